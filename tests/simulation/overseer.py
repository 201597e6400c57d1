"""The part of a job's supervisor that shards of two copies need: it elects their primary."""

from collections.abc import Mapping, Sequence
from typing import Final

from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import copy_names
from distbelief.protocol import BackupInSync, BackupUnresponsive, Heartbeat, role as rl
from distbelief.supervisor.failover import PrimaryElection


BEAT_SECONDS: Final = 0.2
TICK_SECONDS: Final = 0.1
BEAT: Final = "beat"


class Beating:
    """A shard copy that sends heartbeats."""

    accepts = Shard.accepts

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        if isinstance(event, rl.TimerFired) and event.name == BEAT:
            return self._beat(now)
        actions = self.shard.handle(event, now)
        if isinstance(event, rl.Started):
            actions = [*actions, *self._beat(now)]
        return actions

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self.shard.status()

    def _beat(self, now: rl.Seconds) -> list[rl.Action]:
        state, counters = self.status()
        beat = Heartbeat(state=state, counters=dict(counters))
        return [
            rl.Send(receiver=rl.SUPERVISOR, message=beat),
            rl.SetTimer(name=BEAT, at=now + BEAT_SECONDS),
        ]


class Overseer:
    """Launches shard copies; `PrimaryElection` decides which one is primary.

    Those that are demoted it ends `late_seconds` later: meanwhile there are two primaries.
    """

    accepts = rl.ALL_MESSAGES

    def __init__(
        self, n_shards: int, *, takeover_seconds: rl.Seconds, late_seconds: rl.Seconds
    ) -> None:
        self.elections: dict[rl.Address, PrimaryElection] = {}
        self.lives: dict[rl.Address, int] = {}
        self.terminates = True  # those that are demoted
        self.n_takeovers = 0
        self.n_alone = 0
        self._late_seconds = late_seconds
        for index in range(n_shards):
            one, other = copy_names(index, 2)
            election = PrimaryElection((one, other), first=1, takeover_seconds=takeover_seconds)
            self.elections |= dict.fromkeys((one, other), election)

    def leader(self, names: Sequence[rl.Address]) -> rl.Address | None:
        """Return who leads, of these copies."""
        return names[0] if len(names) == 1 else self.elections[names[0]].primary

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        match event:
            case rl.Started():
                self.lives = dict.fromkeys(self.elections, 1)
                launches = [rl.Launch(name=name, incarnation=1) for name in self.lives]
                return [*launches, *self._tick(now)]
            case rl.TimerFired(name=name):
                return self._tick(now) if name == "tick" else self._end(*name.split()[1:])
            case rl.PeerJoined() if self._knows(event.peer, event.incarnation):
                election = self.elections[event.peer]
                return self._follow(election.joined(event.peer, event.incarnation, now), now)
            case rl.PeerLost() if self._knows(event.peer, event.incarnation):
                return self._lost(event.peer, now)
            case rl.Received() if self._knows(event.sender, event.incarnation):
                return self._hear(event, now)
            case _:
                return []

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "overseeing", {}

    def _knows(self, name: rl.Address, incarnation: int) -> bool:
        return self.lives.get(name) == incarnation

    def _tick(self, now: rl.Seconds) -> list[rl.Action]:
        actions: list[rl.Action] = [rl.SetTimer(name="tick", at=now + TICK_SECONDS)]
        for election in dict.fromkeys(self.elections.values()):
            actions += self._follow(election.tick(now), now)
        return actions

    def _end(self, name: str, life: str) -> list[rl.Action]:
        is_there = self.lives[rl.Address(name)] == int(life)
        return [rl.Terminate(name=rl.Address(name))] if is_there else []

    def _lost(self, name: rl.Address, now: rl.Seconds) -> list[rl.Action]:
        election = self.elections[name]
        self.n_takeovers += name == election.primary and election.in_sync
        self.lives[name] += 1
        again = rl.Launch(name=name, incarnation=self.lives[name])
        return [again, *self._follow(election.lost(name), now)]

    def _hear(self, event: rl.Received, now: rl.Seconds) -> list[rl.Action]:
        sender, election = event.sender, self.elections[event.sender]
        match event.message:
            case Heartbeat(counters=counters):
                return self._follow(election.heard(sender, counters, now), now)
            case BackupInSync(term=number):
                return self._follow(election.heard(sender, {"in_sync": number}, now), now)
            case BackupUnresponsive(term=number):
                self.n_alone += 1
                return self._follow(election.backup_unresponsive(sender, number, now), now)
            case _:
                return []

    def _follow(self, actions: Sequence[rl.Action], now: rl.Seconds) -> list[rl.Action]:
        followed: list[rl.Action] = []
        for action in actions:
            if isinstance(action, rl.Terminate):
                self.n_takeovers += 1
                if not self.terminates:
                    continue
                if self._late_seconds:
                    timer = f"deposed {action.name} {self.lives[action.name]}"
                    action = rl.SetTimer(name=timer, at=now + self._late_seconds)  # noqa: PLW2901
            followed.append(action)
        return followed
