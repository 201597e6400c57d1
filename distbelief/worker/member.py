"""Wraps a role as a member of a job: joins, sends heartbeats, learns of its peers.

    member                        supervisor
      | Heartbeat --------------->  |   twice a second, from the start; of thousands less often
      | Join -------------------->  |   with every heartbeat, until Peers comes
      | <------------ HeartbeatAck  |   the answer to every heartbeat
      | <------------------- Peers  |   connect to these; those no longer listed are gone
      |      (the wrapped role starts)
      | Failed ------------------>  |   the wrapped role cannot go on

The wrapped role is built as work, since model and data may take long; until it is built and
knows its peers, events for it are kept here.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast, final

import msgspec
from msgspec.structs import replace

from distbelief import protocol as wire
from distbelief.config.job import PATIENCE_SECONDS
from distbelief.core.errors import (
    DistBeliefError,
    JobError,
    LocalProtocolError,
    RemoteProtocolError,
    RestoreError,
)
from distbelief.core.reliable import Silence
from distbelief.protocol import role as rl


TIMER = "member:heartbeat"
BUILD = "member:build"
HEARTBEAT_SECONDS: Final = 0.5
# Of thousands: the supervisor gets at most 1000 a second, up to 10,000 replicas.
HEARTBEAT_SECONDS_MAX: Final = 10.0
HEARTBEATS_PER_SECOND: Final = 1000
# Of a shard with a backup, which takes over after a second of silence.
PAIRED_HEARTBEAT_SECONDS: Final = 0.2
# For the last checkpoint of a shard whose supervisor is lost.
SAVE_SECONDS_MAX: Final = 300.0
# Events kept for a role that is not built yet; senders repeat what is dropped.
N_EARLY_MAX = 4096
# Silence of the supervisor after which a member joins again: it may be another one.
REJOIN_SECONDS: Final = 5.0
# Without supervisor, other roles have so long for their last step and push before shards save; as
# long as the patience if that is less.
LAST_STEP_SECONDS: Final = 10.0
N_BEATS_SILENT: Final = 4  # heartbeats without an answer, after which nobody seems to listen
N_WARNINGS_MAX: Final = 8  # in a Join message
_TEXT_MAX = 8192  # characters of an error or a warning


@dataclass(frozen=True, kw_only=True)
class JobMemberConfig:
    name: str  # of the role
    endpoint: str = ""  # address of its driver ("" in a simulation)
    host: str = ""  # roles with equal host share memory; "" shares with no one
    pid: int = 0  # of the process
    heartbeat_seconds: rl.Seconds = HEARTBEAT_SECONDS  # between two heartbeats
    # The member exits after so long without any message of the supervisor.
    patience_seconds: rl.Seconds = PATIENCE_SECONDS


def new_peers(
    peers: wire.Peers, known: Mapping[str, int]
) -> tuple[list[rl.Action], list[rl.Event]]:
    """Return links to, and news of, peers of which an older incarnation or none is known."""
    new = [entry for entry in peers.entries if entry.incarnation > known.get(entry.name, 0)]
    connects: list[rl.Action] = []
    joined: list[rl.Event] = []
    for entry in new:
        peer, incarnation = rl.Address(entry.name), entry.incarnation
        link = rl.Connect(
            peer=peer, incarnation=incarnation, endpoint=entry.endpoint, host=entry.host
        )
        connects.append(link)
        joined.append(rl.PeerJoined(peer=peer, incarnation=incarnation, host=entry.host))
    return connects, joined


def heartbeat_seconds(name: str, shard_copies: int, n_replicas: int) -> rl.Seconds:
    if name.startswith("shard-"):
        return PAIRED_HEARTBEAT_SECONDS if shard_copies > 1 else HEARTBEAT_SECONDS
    all_together = n_replicas / HEARTBEATS_PER_SECOND
    return min(max(HEARTBEAT_SECONDS, all_together), HEARTBEAT_SECONDS_MAX)


@final
class JobMember:
    """Wraps any role; `build` returns it, and is called once, as work."""

    accepts: Final = rl.ALL_MESSAGES

    def __init__(
        self,
        config: JobMemberConfig,
        *,
        build: Callable[[], rl.Role],
        counted: Callable[[], Mapping[str, float]] = dict,  # of its process, for heartbeats
    ) -> None:
        self._config = config
        self._build = build
        self._counted = counted
        self.role: rl.Role | None = None
        self._started: rl.Started | None = None  # kept until the wrapped role gets it
        self._runs = False  # the wrapped role has been started
        self._peers: dict[str, wire.PeerEntry] | None = None
        self._gone: set[str] = set()  # peers that are lost for good
        self._unlisted: dict[str, int] = {}  # senders since the last Peers, which it did not list
        self._early: deque[rl.Event] = deque(maxlen=N_EARLY_MAX)
        self._silence = Silence()  # of the supervisor
        self.reported_failure = False
        self._save_by: rl.Seconds | None = None  # once the supervisor is lost
        self._stopped: str | None = None  # why, for want of a supervisor
        self._last: list[rl.Action] = []  # what ends the role, until a supervisor listens
        self._label = 0  # of the newest checkpoint that it was asked for, or began with
        self._warnings: list[str] = []

    def warn(self, text: str) -> None:
        """Send this warning to the supervisor with the Join message."""
        self._warnings.append(text[:_TEXT_MAX])

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        actions = self._handle(event, now)
        for action in actions:
            if isinstance(action, rl.Exit):
                return self._ending([self._with_own_counters(one) for one in actions], now)
        return self._ending(actions, now) if self._last or self._stopped else actions

    def _with_own_counters(self, action: rl.Action) -> rl.Action:
        if not (isinstance(action, rl.Send) and isinstance(action.message, wire.Finished)):
            return action
        counters = {**action.message.counters, **self._counted()}
        return replace(action, message=replace(action.message, counters=counters))

    def _ending(self, actions: Sequence[rl.Action], now: rl.Seconds) -> Sequence[rl.Action]:
        """Let an end in good order wait for a silent supervisor.

        The next one would take a role that nobody has heard the last of for lost, and start it.
        """
        silent_max = N_BEATS_SILENT * self._config.heartbeat_seconds
        if self._stopped is None and self._silence.silent(now) > silent_max:
            self._last += [one for one in actions if _is_end(one)]
            return [one for one in actions if not _is_end(one)]
        last, self._last = self._last, []
        actions = [*actions, *last]
        return actions if self._stopped is None else self._unfinished(actions, self._stopped)

    def _unfinished(self, actions: Sequence[rl.Action], reason: str) -> Sequence[rl.Action]:
        # A supervisor that was only paused must start the role again, and not count it as done.
        return [
            rl.Exit(error=reason) if isinstance(one, rl.Exit) and one.error is None else one
            for one in actions
            if isinstance(one, rl.Exit) or not _is_end(one)
        ]

    def _handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        match event:
            case rl.Started():
                return self._start(event, now)
            case rl.TimerFired(name=name) if name == TIMER:
                return self._heartbeat(now)
            case rl.Computed(name=name) if name == BUILD:
                return self._built(event, now)
            case rl.Received(sender=sender) if sender == rl.SUPERVISOR:
                return self._supervised(event, now)
            case rl.PeerLost(peer=peer) if peer == rl.SUPERVISOR:
                return self._supervisor_lost(event.reason, now)
            case rl.Received(sender=sender) if sender not in (self._peers or {}):
                if len(self._unlisted) < N_EARLY_MAX:
                    self._unlisted[sender] = max(event.incarnation, self._unlisted.get(sender, 0))
            case _:
                pass
        return self._forward(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        if self.role is None:
            return "building", {}
        if not self._runs:
            return "joining", {}
        return self.role.status()

    def _start(self, event: rl.Started, now: rl.Seconds) -> list[rl.Action]:
        self._started = event
        if event.restored is not None:
            self._note_label(event.restored.label)
        self._silence.start(now)
        return [rl.Compute(name=BUILD, work=self._build), *self._heartbeat(now)]

    def _heartbeat(self, now: rl.Seconds) -> list[rl.Action]:
        self._silence.woke(now)
        state, counters = self.status()
        heartbeat = wire.Heartbeat(
            state=state[:128],
            counters={**counters, **self._counted()},
            # Only a replica has some, and only once it is built.
            pieces=getattr(self.role, "pieces", msgspec.UNSET),
        )
        joins = []
        rejoins_after = max(REJOIN_SECONDS, 2 * self._config.heartbeat_seconds)
        if self._peers is None or self._silence.silent(now) > rejoins_after:
            config, warnings = self._config, tuple(self._warnings[:N_WARNINGS_MAX])
            join = wire.Join(
                endpoint=config.endpoint, host=config.host, pid=config.pid, warnings=warnings
            )
            joins.append(_to_supervisor(join))
        timer = rl.SetTimer(
            name=TIMER, at=self._silence.expect(now + self._config.heartbeat_seconds)
        )
        return [*joins, _to_supervisor(heartbeat), timer, *self._end_if_silent(now)]

    def _end_if_silent(self, now: rl.Seconds) -> Sequence[rl.Action]:
        if self._save_by is not None:
            if now < self._save_by:
                return []
            text = f"the last checkpoint was not saved in {SAVE_SECONDS_MAX:.0f} s"
            return [rl.Exit(error=text)]
        # The supervisor may be paused, wait for a disk, or be started again (--resume), so the role
        # works on for minutes.
        silent = self._silence.silent(now)
        late = silent - max(self._config.patience_seconds, 2 * self._config.heartbeat_seconds)
        if late <= 0.0:
            return []
        text = f"no message from the supervisor for {silent:.1f} s"
        if late > min(LAST_STEP_SECONDS, self._config.patience_seconds) or not self._runs:
            return self._supervisor_lost(text, now)
        if self._stopped is not None or self._config.name.startswith("shard-"):
            return []
        self._stopped = text
        message: wire.Message = wire.Stop(reason=text)
        if self._config.name == "coordinator":  # only it knows when its shards can be saved
            message = wire.SaveCheckpoint(label=f"{self._label + 1:05d}")
        last = rl.Received(sender=rl.SUPERVISOR, incarnation=0, message=message)
        return self._forward(last, now)

    def _supervisor_lost(self, reason: str, now: rl.Seconds) -> Sequence[rl.Action]:
        # No process outlives its job; a shard saves its values first.
        if not (self._runs and self._config.name.startswith("shard-")):
            return [rl.Exit(error=reason)]
        if self._save_by is not None:
            return []
        self._save_by = now + SAVE_SECONDS_MAX
        lost = rl.PeerLost(peer=rl.SUPERVISOR, incarnation=0, reason=reason, for_good=True)
        report = rl.Report(text=f"{reason}: saving, then ending", level="warning")
        return [report, *self._forward(lost, now)]

    def _supervised(self, event: rl.Received, now: rl.Seconds) -> Sequence[rl.Action]:
        self._silence.heard(now)
        match event.message:
            case wire.HeartbeatAck():
                return []
            case wire.Peers():
                return self._update_peers(event.message, now)
            case wire.SaveCheckpoint(label=label):
                self._note_label(label)
                return self._forward(event, now)
            case wire.Stop() if not self._runs:  # nothing to finish
                return [_to_supervisor(wire.Finished(counters={})), rl.Exit()]
            case _:
                return self._forward(event, now)

    def _note_label(self, label: str) -> None:
        if label.isdecimal():
            self._label = max(self._label, int(label))

    def _update_peers(self, message: wire.Peers, now: rl.Seconds) -> Sequence[rl.Action]:
        before = self._peers or {}
        after = {entry.name: entry for entry in message.entries}
        self._peers = after
        known = {name: entry.incarnation for name, entry in before.items()}
        # A message of a peer that is lost may come late. Then it is lost anew.
        heard, self._unlisted = self._unlisted, {}
        left = "it is no longer a member of the job"
        events: list[rl.Event] = [
            rl.PeerLost(peer=rl.Address(name), incarnation=incarnation, reason=left)
            for name, incarnation in {**known, **heard}.items()
            if name not in after and name not in message.gone
        ]
        events += [
            rl.PeerLost(
                peer=rl.Address(name),
                incarnation=before[name].incarnation if name in before else 0,
                reason="it has ended",
                for_good=True,
            )
            for name in message.gone
            if name not in self._gone
        ]
        self._gone.update(message.gone)
        connects, joined = new_peers(message, known)
        events += joined
        actions = [*connects, *self._run_role(now)]
        for event in events:
            actions += self._forward(event, now)
        return actions

    def _built(self, event: rl.Computed, now: rl.Seconds) -> Sequence[rl.Action]:
        if event.error is not None:
            return self._failed(event.error)
        self.role = cast("rl.Role", event.result)
        return self._run_role(now)

    def _run_role(self, now: rl.Seconds) -> Sequence[rl.Action]:
        if self._runs or self.role is None or self._peers is None:
            return []
        assert self._started is not None
        self._runs = True
        started, self._started = self._started, None  # it may hold a large checkpoint
        early, self._early = self._early, deque()
        actions = [*self._forward(started, now)]
        for event in early:
            # One rejected event must not discard the actions of the others: without its
            # first messages and timers this role would wait for ever.
            try:
                actions += self._forward(event, now)
            except RemoteProtocolError as error:
                actions.append(rl.Report(text=f"refused: {error}", level="warning"))
        return actions

    def _forward(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        if not self._runs or self.role is None:
            self._early.append(event)
            return []
        try:
            kind = type(event.message) if isinstance(event, rl.Received) else None
            # Most messages may come from anybody.
            if kind is not None and (kind in rl.ORDERS or kind not in self.role.accepts):
                rl.check_accepted(self.role, event, name=self._config.name)
            return self.role.handle(event, now)
        except (RemoteProtocolError, LocalProtocolError):
            raise  # the driver logs the first; the second is a bug
        except DistBeliefError as error:
            return self._failed(error)

    def _failed(self, error: BaseException) -> Sequence[rl.Action]:
        self.reported_failure = True
        text = str(error)
        if not isinstance(error, JobError):
            text = f"{type(error).__name__}: {text}"
        failed = wire.Failed(
            error=text[:_TEXT_MAX],
            culprit_is_job=isinstance(error, JobError),
            restart_helps=not isinstance(error, RestoreError),
        )
        return [_to_supervisor(failed), rl.Exit(error=text)]


def _is_end(action: rl.Action) -> bool:
    """Return whether this is of an end in good order."""
    if isinstance(action, rl.Exit):
        return action.error is None
    return isinstance(action, rl.Send) and isinstance(action.message, wire.Finished)


def _to_supervisor(message: wire.Join | wire.Heartbeat | wire.Finished | wire.Failed) -> rl.Send:
    return rl.Send(receiver=rl.SUPERVISOR, message=message)
