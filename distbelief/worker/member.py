"""A role as a member of a job: it joins, is introduced to its peers, and says it lives.

    member                        supervisor
      | Heartbeat --------------->  |   twice a second, from the first moment on
      | Join -------------------->  |   again with every heartbeat, until Peers comes
      | <-------------------- Alive |   the answer to every heartbeat
      | <-------------------- Peers |   connect to these; those no longer named are gone
      |      (the role within now starts)
      | Failed ------------------>  |   the role within cannot go on

The role within is built as work, since that may take long: model, data. Until it is
built and introduced, what is sent to it waits here.

A silent supervisor is not a dead one: it may be paused, or wait for a disk. A member
waits for it for minutes, and its role works on. Then it ends, for a job that has lost
its supervisor leaves no process behind; a shard is told (`PeerLost`), and saves first.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast, final

from distbelief.config.job import PATIENCE_SECONDS
from distbelief.errors import DistBeliefError, JobError, LocalProtocolError, RemoteProtocolError
from distbelief.protocol import (
    Failed,
    Finished,
    Heartbeat,
    HeartbeatAck,
    Join,
    PeerEntry,
    Peers,
    Stop,
)
from distbelief.roles.role import (
    SUPERVISOR,
    Action,
    Address,
    Compute,
    Computed,
    Connect,
    Event,
    Exit,
    PeerJoined,
    PeerLost,
    Received,
    Report,
    Role,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
)


TIMER = "member:heartbeat"
BUILD = "member:build"
HEARTBEAT_SECONDS: Final = 0.5
PAIRED_HEARTBEAT_SECONDS: Final = 0.2
"""Of a shard with another copy, which takes over after a second of silence."""

SAVE_SECONDS_MAX: Final = 300.0
"""For the last snapshot of a shard whose supervisor is gone."""

N_EARLY_MAX = 4096
"""Messages kept for a role that is not there yet; whoever loses one sends it again."""

N_WARNINGS_MAX: Final = 8
"""Told when it joins."""

_TEXT_MAX = 8192
"""Characters of an error told to the supervisor."""


@dataclass(frozen=True, kw_only=True)
class JobMemberConfig:
    """How a member keeps in touch.

    Attributes:
        name: Of the role.
        endpoint: Where the driver can be reached ("" in a simulation).
        host: Roles of equal host share memory; "" shares with nobody.
        pid: Of the process.
        heartbeat_seconds: Between two signs of life.
        patience_seconds: Without a word of the supervisor, after which it ends.
    """

    name: str
    endpoint: str = ""
    host: str = ""
    pid: int = 0
    heartbeat_seconds: Seconds = HEARTBEAT_SECONDS
    patience_seconds: Seconds = PATIENCE_SECONDS

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_seconds < self.patience_seconds:
            raise ValueError(
                f"heartbeat_seconds is {self.heartbeat_seconds} and patience_seconds "
                f"{self.patience_seconds}; use more than 0, and several heartbeats to "
                "the patience"
            )

    @property
    def is_shard(self) -> bool:
        """Whether the role within has values that nobody else may have."""
        return self.name.startswith("shard-")


def heartbeat_seconds(name: str, shard_copies: int) -> Seconds:
    """Return how often a role of this name says that it lives."""
    paired = shard_copies > 1 and name.startswith("shard-")
    return PAIRED_HEARTBEAT_SECONDS if paired else HEARTBEAT_SECONDS


@final
class JobMember:
    """Wraps any role.

    Args:
        config: Who it is, and how it keeps in touch.
        build: Returns the role within; called once, as work.
    """

    def __init__(self, config: JobMemberConfig, *, build: Callable[[], Role]) -> None:
        self._config = config
        self._build = build
        self._role: Role | None = None
        self._started: Started | None = None  # kept until the role within gets it
        self._runs = False  # the role within: it has been started
        self._peers: dict[str, PeerEntry] | None = None
        self._gone: set[str] = set()  # peers that will not come back
        self._early: deque[Event] = deque(maxlen=N_EARLY_MAX)
        self._heard_at: Seconds = 0.0
        self._heartbeat_at: Seconds = 0.0  # when the timer is due
        self._reported_failure = False
        self._save_by: Seconds | None = None  # once the supervisor is gone
        self._warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Let the supervisor be told of this, as soon as this member joins."""
        self._warnings.append(text[:_TEXT_MAX])

    @property
    def role(self) -> Role | None:
        """The role within, once it is built."""
        return self._role

    @property
    def told_failure(self) -> bool:
        """Whether the supervisor has been told that this member cannot go on."""
        return self._reported_failure

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        match event:
            case Started():
                return self._start(event, now)
            case TimerFired(name=name) if name == TIMER:
                return self._heartbeat(now)
            case Computed(name=name) if name == BUILD:
                return self._built(event, now)
            case Received(sender=sender) if sender == SUPERVISOR:
                return self._supervised(event, now)
            case PeerLost(peer=peer) if peer == SUPERVISOR:
                return self._supervisor_lost(event.reason, now)
            case _:
                return self._forward(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return that of the role within, if it runs."""
        if self._role is None:
            return "building", {}
        if not self._runs:
            return "joining", {}
        return self._role.status()

    # ------------------------------------------------------------------ in touch

    def _start(self, event: Started, now: Seconds) -> list[Action]:
        self._started = event
        self._heard_at = self._heartbeat_at = now
        return [Compute(name=BUILD, work=self._build), *self._heartbeat(now)]

    def _heartbeat(self, now: Seconds) -> list[Action]:
        """Say that this role lives; end if nobody has answered for too long."""
        # Time in which the whole process stood still is nobody's silence.
        self._heard_at += max(0.0, now - self._heartbeat_at)
        self._heartbeat_at = now + self._config.heartbeat_seconds
        state, counters = self.status()
        heartbeat = Heartbeat(state=state[:128], counters=dict(counters))
        joins = [] if self._peers is not None else [self._join()]
        timer = SetTimer(name=TIMER, at=self._heartbeat_at)
        return [*joins, _to_supervisor(heartbeat), timer, *self._end_if_silent(now)]

    def _end_if_silent(self, now: Seconds) -> Sequence[Action]:
        if self._save_by is not None:
            if now < self._save_by:
                return []
            text = f"the last snapshot was not saved in {SAVE_SECONDS_MAX:.0f} s"
            return [Exit(error=text)]
        silent = now - self._heard_at
        if silent <= self._config.patience_seconds:
            return []
        text = f"no word from the supervisor for {silent:.1f} s"
        return self._supervisor_lost(text, now)

    def _supervisor_lost(self, reason: str, now: Seconds) -> Sequence[Action]:
        """The supervisor is gone: end, a shard once it has saved."""
        if not (self._runs and self._config.is_shard):
            return [Exit(error=reason)]
        if self._save_by is not None:
            return []
        self._save_by = now + SAVE_SECONDS_MAX
        lost = PeerLost(peer=SUPERVISOR, incarnation=0, reason=reason, for_good=True)
        report = Report(text=f"{reason}: saving, then ending", level="warning")
        return [report, *self._forward(lost, now)]

    def _join(self) -> Send:
        config = self._config
        join = Join(
            endpoint=config.endpoint,
            host=config.host,
            pid=config.pid,
            warnings=tuple(self._warnings[:N_WARNINGS_MAX]),
        )
        return _to_supervisor(join)

    def _supervised(self, event: Received, now: Seconds) -> Sequence[Action]:
        self._heard_at = max(self._heard_at, now)
        match event.message:
            case HeartbeatAck():
                return []
            case Peers():
                return self._update_peers(event.message, now)
            case Stop() if not self._runs:  # there is nothing to finish
                return [_to_supervisor(Finished(counters={})), Exit()]
            case _:
                return self._forward(event, now)

    def _update_peers(self, message: Peers, now: Seconds) -> Sequence[Action]:
        """Connect to whoever is new, and tell the role within of changes."""
        before = self._peers or {}
        after = {entry.name: entry for entry in message.entries}
        self._peers = after
        connects: list[Action] = []
        events: list[Event] = [
            PeerLost(
                peer=Address(name),
                incarnation=entry.incarnation,
                reason="it is no longer a member of the job",
            )
            for name, entry in before.items()
            if name not in after and name not in message.gone
        ]
        events += [
            _lost_for_good(name, before.get(name))
            for name in message.gone
            if name not in self._gone
        ]
        self._gone.update(message.gone)
        for name, entry in after.items():
            known = before.get(name)
            if known is not None and known.incarnation >= entry.incarnation:
                continue
            peer = Address(name)
            connects.append(
                Connect(
                    peer=peer,
                    incarnation=entry.incarnation,
                    endpoint=entry.endpoint,
                    host=entry.host,
                )
            )
            events.append(PeerJoined(peer=peer, incarnation=entry.incarnation))
        actions = [*connects, *self._run_role(now)]
        for event in events:
            actions += self._forward(event, now)
        return actions

    # ----------------------------------------------------------- the role within

    def _built(self, event: Computed, now: Seconds) -> Sequence[Action]:
        if event.error is not None:
            return self._failed(event.error)
        self._role = cast("Role", event.result)
        return self._run_role(now)

    def _run_role(self, now: Seconds) -> Sequence[Action]:
        """Start the role within once it is built and introduced."""
        if self._runs or self._role is None or self._peers is None:
            return []
        assert self._started is not None
        self._runs = True
        started, self._started = self._started, None  # it may hold a large snapshot
        early, self._early = self._early, deque()
        actions = [*self._forward(started, now)]
        for event in early:
            # One that is refused must not take along what the others have called for:
            # this role would neither say Hello nor have a timer, and wait for ever.
            try:
                actions += self._forward(event, now)
            except RemoteProtocolError as error:
                actions.append(Report(text=f"refused: {error}", level="warning"))
        return actions

    def _forward(self, event: Event, now: Seconds) -> Sequence[Action]:
        if not self._runs or self._role is None:
            self._early.append(event)
            return []
        try:
            return self._role.handle(event, now)
        except (RemoteProtocolError, LocalProtocolError):
            raise  # the first is the driver's to log, the second a bug
        except DistBeliefError as error:
            return self._failed(error)

    def _failed(self, error: BaseException) -> Sequence[Action]:
        self._reported_failure = True
        text = str(error)
        if not isinstance(error, JobError):
            text = f"{type(error).__name__}: {text}"
        failed = Failed(error=text[:_TEXT_MAX], culprit_is_job=isinstance(error, JobError))
        return [_to_supervisor(failed), Exit(error=text)]


def _lost_for_good(name: str, entry: PeerEntry | None) -> PeerLost:
    return PeerLost(
        peer=Address(name),
        incarnation=0 if entry is None else entry.incarnation,
        reason="it has ended",
        for_good=True,
    )


def _to_supervisor(message: Join | Heartbeat | Finished | Failed) -> Send:
    return Send(receiver=SUPERVISOR, message=message)
