"""The role behind `DownpourSGD`: a parameter client inside the user's own training loop.

The loop controls it through `Computed` events of its own ("worker:..."), handled at once. It
joins a running server as a guest: no supervisor starts, restarts or monitors it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from distbelief.core.reliable import Silence
from distbelief.errors import LocalProtocolError, PeerLostError
from distbelief.parameter_server.client.buffers import FetchResult, PushResult
from distbelief.parameter_server.client.client import ParameterClient, ShardReply
from distbelief.protocol import Finished, Heartbeat, HeartbeatAck, Join, Peers, StartTraining, Stop
from distbelief.roles.role import (
    SUPERVISOR,
    Action,
    Address,
    CancelTimer,
    Computed,
    Connect,
    Event,
    PeerJoined,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    message_types,
)


FETCH = "worker:fetch"
INSTALLED = "worker:installed"
PUSHED = "worker:pushed"
LEAVE = "worker:leave"
JOIN = "worker:join"
BEAT = "worker:beat"

JOIN_RETRY_SECONDS = 0.5
BEAT_SECONDS = 1.0
# The server answers every heartbeat. After this time without an answer it may be a new
# incarnation that does not know this worker, so the worker joins again.
SILENCE_SECONDS_MAX = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPush:
    """A push that the loop has staged."""

    outcome: PushResult
    n_gradients: int
    samples: int


LoopMessage = Peers | HeartbeatAck | StartTraining | Stop | ShardReply


@final
class LoopWorker:
    """The role "worker-...".

    Args:
        client: Connects to the shards; the loop calls its `install` and `stage`.
        join: The Join message for the server.
    """

    accepts: Final = message_types(LoopMessage)

    def __init__(self, *, client: ParameterClient, join: Join) -> None:
        self.client = client
        self.stopped: str | None = None  # why the server has ended, once it has sent Stop
        self._join = join
        self._incarnation = 0
        self._incarnations: dict[Address, int] = {}  # of the peers
        self._server = Silence()

    @property
    def has_joined(self) -> bool:
        return bool(self._incarnations)

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        Raises:
            PeerLostError: a shard has been silent for too long.
        """
        if self.client.owns(event):
            return self.client.handle(event, now)
        match event:
            case Started():
                self._incarnation = event.incarnation
                return self._send_join(now)
            case TimerFired():
                return self._send_join(now) if event.name == JOIN else self._heartbeat(now)
            case Received():
                return self._receive(event, now)
            case Computed():
                return self._command(event, now)
            case _:
                return []

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return the state as a phrase, and the client's counters."""
        waited = self.client.waiting_for
        state = "ready" if waited is None else f"waiting for {waited}"
        return state, self.client.counters()

    def _send_join(self, now: Seconds) -> Sequence[Action]:
        return [
            Send(receiver=SUPERVISOR, message=self._join),
            SetTimer(name=JOIN, at=now + JOIN_RETRY_SECONDS),
        ]

    def _heartbeat(self, now: Seconds) -> Sequence[Action]:
        state, counters = self.status()
        heartbeat = Heartbeat(state=state, counters=dict(counters))
        # The role runs only while the loop calls it: its own pauses are no silence of the server.
        self._server.woke(now)
        is_silent = self._server.silent(now) > SILENCE_SECONDS_MAX
        return [
            *([Send(receiver=SUPERVISOR, message=self._join)] if is_silent else []),
            Send(receiver=SUPERVISOR, message=heartbeat),
            SetTimer(name=BEAT, at=self._server.expect(now + BEAT_SECONDS)),
        ]

    def _receive(self, event: Received, now: Seconds) -> Sequence[Action]:
        if event.sender == SUPERVISOR:
            self._server.heard(now)
        match event.message:
            case Peers():
                return self._update_peers(event.message, now)
            case Stop():
                self.stopped = event.message.reason
                raise PeerLostError(f"the server has ended: {self.stopped}")
            case _:
                return []

    def _update_peers(self, peers: Peers, now: Seconds) -> Sequence[Action]:
        first = not self._incarnations
        actions: list[Action] = [CancelTimer(name=JOIN)]
        for entry in peers.entries:
            name = Address(entry.name)
            if entry.incarnation <= self._incarnations.get(name, 0):
                continue
            self._incarnations[name] = entry.incarnation
            actions.append(
                Connect(
                    peer=name,
                    incarnation=entry.incarnation,
                    endpoint=entry.endpoint,
                    host=entry.host,
                )
            )
            joined = PeerJoined(peer=name, incarnation=entry.incarnation)
            if not first and self.client.owns(joined):
                actions += self.client.handle(joined, now)
        if first:
            actions += [*self.client.start(self._incarnation, now), *self._heartbeat(now)]
        return actions

    def _command(self, event: Computed, now: Seconds) -> Sequence[Action]:
        match event.name, event.result:
            case "worker:fetch", None:
                return self.client.begin_fetch(now)
            case "worker:installed", FetchResult() as outcome:
                return self.client.installed(outcome, now)
            case "worker:pushed", StagedPush() as push:
                return self.client.staged(
                    push.outcome, n_gradients=push.n_gradients, samples=push.samples, now=now
                )
            case "worker:leave", None:
                return [Send(receiver=SUPERVISOR, message=Finished(counters={}))]
            case _:
                raise LocalProtocolError(f"unknown command of a loop: {event.name!r}")
