"""The role behind `DownpourSGD`: a parameter client inside the user's own training loop.

The loop controls it through `Computed` events of its own ("worker:..."), handled at once. It
joins a running server as a guest: no supervisor starts, restarts or monitors it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import msgspec

from distbelief import protocol as wire
from distbelief.core import formatting
from distbelief.core.errors import LocalProtocolError, PeerLostError
from distbelief.core.reliable import Silence
from distbelief.parameter_server.client.client import ParameterClient, ShardReply
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.parameter_server.client.pushes import PushResult
from distbelief.protocol import push_fetch as pf, role as rl
from distbelief.worker.member import new_peers


FETCH = "worker:fetch"
FETCH_EXACTLY = "worker:fetch-exactly"
FETCH_AFTER = "worker:fetch-after"  # each shard has the pushes under way
INSTALLED = "worker:installed"
PUSHED = "worker:pushed"
ENTER = "worker:enter"  # with the staleness of `ParameterClient.enter`
STEP_OUT = "worker:step-out"  # of the ticks; see `ParameterClient.leave`
LEAVE = "worker:leave"
BEAT = "worker:beat"
JOIN_SECONDS = 0.5  # between two Join messages, until the server answers
BEAT_SECONDS = 1.0
# The server answers every heartbeat. After this time without an answer it may be a new
# incarnation that does not know this worker, so the worker joins again.
SILENCE_SECONDS_MAX = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPush:
    outcome: PushResult
    n_gradients: int
    samples: int
    sets: bool = False  # the server's values, instead of changing them
    in_turn: bool = False  # to one shard after the other
    rates: pf.Rates = msgspec.UNSET  # at which the server applies it


LoopMessage = wire.Peers | wire.HeartbeatAck | wire.StartTraining | wire.Stop | ShardReply


@final
class LoopWorker:
    """The role "worker-..."; the loop calls its client's `install` and `stage`."""

    accepts: Final = rl.message_types(LoopMessage)

    def __init__(self, *, client: ParameterClient, join: wire.Join) -> None:
        self.client = client
        self.stopped: str | None = None  # why the server has ended, once it has sent Stop
        self._join = join
        self._incarnation = 0
        self._incarnations: dict[str, int] = {}  # of the peers
        self._server = Silence()
        self._is_in = False  # the ticks
        self._staleness: int | None = None

    @property
    def has_joined(self) -> bool:
        return bool(self._incarnations)

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        actions = self._handle(event, now)
        # An acknowledgement ends a tick; the next one may have to wait.
        enters = self.client.enter(now, staleness=self._staleness) if self._is_in else []
        return [*actions, *enters]

    def _handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        if self.client.owns(event):
            return self.client.handle(event, now)
        match event:
            case rl.Started():
                self._incarnation = event.incarnation
                return self._beat(now)
            case rl.TimerFired():
                return self._beat(now)
            case rl.Received():
                return self._receive(event, now)
            case rl.Computed():
                return self._command(event, now)
            case _:
                return []

    def status(self) -> tuple[str, Mapping[str, float]]:
        waited = self.client.waiting_for
        state = "ready" if waited is None else f"waiting for {waited}"
        return state, self.client.counters()

    def _beat(self, now: rl.Seconds) -> list[rl.Action]:
        """Join until the server answers, then send heartbeats."""
        # The role runs only while the loop calls it: its own pauses are no silence of the server.
        self._server.woke(now)
        messages: list[wire.Message] = []
        if not self.has_joined or self._server.silent(now) > SILENCE_SECONDS_MAX:
            messages.append(self._join)
        if self.has_joined:
            state, counters = self.status()
            messages.append(wire.Heartbeat(state=state, counters=dict(counters)))
        at = self._server.expect(now + (BEAT_SECONDS if self.has_joined else JOIN_SECONDS))
        sends = [rl.Send(receiver=rl.SUPERVISOR, message=message) for message in messages]
        return [*sends, rl.SetTimer(name=BEAT, at=at)]

    def _receive(self, event: rl.Received, now: rl.Seconds) -> Sequence[rl.Action]:
        if event.sender == rl.SUPERVISOR:
            self._server.heard(now)
        match event.message:
            case wire.Peers():
                return self._update_peers(event.message, now)
            case wire.Stop():
                self.stopped = formatting.plain(event.message.reason)
                raise PeerLostError(f"the server has ended: {self.stopped}")
            case _:
                return []

    def _update_peers(self, peers: wire.Peers, now: rl.Seconds) -> Sequence[rl.Action]:
        first = not self._incarnations
        actions, joined = new_peers(peers, self._incarnations)
        for entry in peers.entries:
            before = self._incarnations.get(entry.name, 0)
            self._incarnations[entry.name] = max(before, entry.incarnation)
        for event in joined:
            if not first and self.client.owns(event):
                actions += self.client.handle(event, now)
        if first:
            actions += [*self.client.start(self._incarnation, now), *self._beat(now)]
        return actions

    def _command(self, event: rl.Computed, now: rl.Seconds) -> Sequence[rl.Action]:
        match event.name, event.result:
            case "worker:fetch" | "worker:fetch-exactly" | "worker:fetch-after" as name, None:
                exact, follows = name == FETCH_EXACTLY, name == FETCH_AFTER
                return self.client.begin_fetch(now, exact=exact, follows=follows)
            case "worker:installed", FetchResult() as outcome:
                return self.client.installed(outcome, now)
            case "worker:pushed", StagedPush() as push:
                return self.client.staged(
                    push.outcome,
                    n_gradients=push.n_gradients,
                    samples=push.samples,
                    sets=push.sets,
                    in_turn=push.in_turn,
                    rates=push.rates,
                    now=now,
                )
            case "worker:enter", (int() | None) as staleness:
                self._is_in, self._staleness = True, staleness
                return []
            case "worker:step-out", None:
                self._is_in = False
                return self.client.leave(now)
            case "worker:leave", None:
                return [rl.Send(receiver=rl.SUPERVISOR, message=wire.Finished(counters={}))]
            case _:
                raise LocalProtocolError(f"unknown command of a loop: {event.name!r}")
