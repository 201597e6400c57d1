"""The coordinator, its commands and its workers: events in, actions out."""

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from distbelief import protocol as wire
from distbelief.core.errors import DistBeliefError, PeerLostError, RemoteProtocolError, StorageError
from distbelief.protocol import role as rl
from distbelief.protocol.vector_commands import Norm
from sandblaster.chunks import ChunkSizes
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.coordinator.shard_commands import CommandBroadcast
from sandblaster.coordinator.workers import CoordinatorConfig
from sandblaster.optimizers.descent import GradientDescent
from tests.simulation.sandblasts import Sandblast


SHARDS = (rl.Address("shard-0"), rl.Address("shard-1"))
REPLICA = rl.Address("replica-0")
CONFIG = CoordinatorConfig(
    chunk_sizes=ChunkSizes(mini_batch_size=5),
    retry_seconds=1.0,
    retry_seconds_max=2.0,
    silence_seconds_max=10.0,
    await_begin=False,
)


def commands_in(actions: list[rl.Action]) -> list[tuple[rl.Address, wire.ShardCommand]]:
    return [
        (action.receiver, action.message)
        for action in actions
        if isinstance(action, rl.Send) and isinstance(action.message, wire.ShardCommand)
    ]


def says(
    sender: rl.Address,
    message: wire.CommandDone | wire.WorkReport | wire.HeartbeatAck,
    *,
    incarnation: int = 1,
) -> rl.Received:
    return rl.Received(sender=sender, incarnation=incarnation, message=message)


# --- commands ---


class Commanding:
    """Commands to two shards."""

    def __init__(self, *, second_copies: Mapping[rl.Address, rl.Address] | None = None) -> None:
        self.commands = CommandBroadcast(CONFIG, shards=SHARDS, second_copies=second_copies or {})
        self.commands.begin_series(4097, 0.0)

    def answer(
        self,
        shard: rl.Address,
        *,
        number: int = 1,
        series: int = 4097,
        incarnation: int = 1,
        error: str | None = None,
        term: int | msgspec.UnsetType = msgspec.UNSET,
    ) -> None:
        performed = wire.CommandDone(series=series, number=number, error=error, term=term)
        event = says(shard, performed, incarnation=incarnation)
        self.commands.receive(event, performed, 0.0)

    # Methods: a type checker believes that a property stays as it was.

    def waiting_for(self) -> rl.Address | None:
        return self.commands.waiting_for

    def lost(self) -> rl.Address | None:
        return self.commands.lost


def test_a_command_is_complete_when_every_shard_has_answered() -> None:
    bench = Commanding()
    assert bench.waiting_for() == SHARDS[0]
    bench.answer(SHARDS[1])
    assert bench.waiting_for() == SHARDS[0]
    bench.answer(SHARDS[0], number=7)  # of another command
    assert bench.waiting_for() == SHARDS[0]
    bench.answer(SHARDS[0])
    assert bench.waiting_for() is None
    assert bench.commands.complete
    assert [version.incarnation for version in bench.commands.versions] == [1, 1]
    assert bench.commands.timer(5.0) == []


def test_only_shards_that_have_not_answered_get_the_command_again() -> None:
    bench = Commanding()
    bench.answer(SHARDS[0])
    assert [shard for shard, _ in commands_in(bench.commands.timer(1.0))] == [SHARDS[1]]
    joined = bench.commands.joined(SHARDS[1], 1)
    assert [shard for shard, _ in commands_in(joined)] == [SHARDS[1]]
    assert bench.commands.joined(SHARDS[0], 1) == []


def test_the_coordinators_own_delay_is_no_silence_of_shards() -> None:
    bench = Commanding()
    assert commands_in(bench.commands.timer(500.0))


def test_a_restarted_shard_ends_the_series() -> None:
    bench = Commanding()
    bench.answer(SHARDS[0])
    bench.answer(SHARDS[0], incarnation=2)
    assert bench.lost() == SHARDS[0]
    bench.answer(SHARDS[1], incarnation=1)
    assert not bench.commands.complete
    assert bench.commands.joined(SHARDS[1], 1) == []
    bench.commands.begin_series(4098, 0.0)
    assert bench.lost() is None
    bench.answer(SHARDS[0], incarnation=1, series=4098)  # the former incarnation
    assert bench.commands.waiting_for == SHARDS[0]


SECOND = {shard: rl.Address(f"{shard}b") for shard in SHARDS}


def test_two_copies_get_each_command_and_a_takeover_goes_on_with_the_series() -> None:
    bench = Commanding(second_copies=SECOND)
    receivers = [receiver for receiver, _ in commands_in(bench.commands.timer(1.0))]
    assert receivers == [*SHARDS, *SECOND.values()]
    bench.answer(SHARDS[0], term=2)
    bench.answer(SHARDS[1], term=2)
    assert [one.incarnation for one in bench.commands.versions] == [2, 2]
    assert all(one.outlasts is True for one in bench.commands.versions)
    bench.commands.send(wire.BeginSeries(), 2.0)
    assert commands_in(bench.commands.joined(SECOND[SHARDS[0]], 7))  # a restart loses nothing
    bench.answer(SECOND[SHARDS[0]], number=2, term=4, incarnation=7)
    bench.answer(SHARDS[1], number=2, term=2)
    assert bench.lost() is None
    assert bench.commands.complete
    bench.commands.send(wire.BeginSeries(), 3.0)
    bench.answer(SHARDS[0], number=3, term=2)  # of the former primary
    assert bench.waiting_for() == SHARDS[0]


def test_a_primary_that_does_not_know_the_series_has_lost_it() -> None:
    bench = Commanding(second_copies=SECOND)
    bench.answer(SHARDS[0], term=2)
    bench.answer(SHARDS[0], series=0, number=0, term=2)  # late: it has answered since
    assert bench.lost() is None
    bench.answer(SECOND[SHARDS[0]], series=0, number=0, term=3)
    assert bench.lost() == SHARDS[0]


def test_a_coordinator_with_an_older_series_ends() -> None:
    with pytest.raises(DistBeliefError, match="another coordinator has taken over"):
        Commanding().answer(SHARDS[0], series=9000)


def test_an_answer_that_does_not_fit_its_command_is_refused() -> None:
    """Regression: the method's generator ended with it, and the coordinator stepped for ever."""
    bench = Commanding()
    for shard in SHARDS:
        bench.answer(shard)
    bench.commands.send(
        wire.Execute(commands=(Norm(x="a", order="2"), Norm(x="b", order="2"))), 0.0
    )
    with pytest.raises(RemoteProtocolError, match="with 0 numbers, not 2"):
        bench.answer(SHARDS[0], number=2)
    assert bench.waiting_for() == SHARDS[0]
    for second in range(1, 10):
        bench.commands.timer(float(second))
    with pytest.raises(PeerLostError):  # no sign of life either
        bench.commands.timer(11.0)


# --- the role ---


def coordinator() -> Coordinator:
    role = Coordinator(CONFIG, method=GradientDescent(), shards=SHARDS, n_examples=20)
    actions = role.handle(rl.Started(incarnation=1), 0.0)
    begin_series = [command for _, command in commands_in(list(actions))]
    assert [type(command.task) for command in begin_series] == [wire.BeginSeries, wire.BeginSeries]
    return role


def answer_all(role: Coordinator, number: int) -> list[rl.Action]:
    savepoints = (wire.CheckpointRecord(savepoint=0, whole=False, clock=0),) if number == 1 else ()
    done: list[rl.Action] = []
    for shard in SHARDS:
        performed = wire.CommandDone(series=4097, number=number, savepoints=savepoints)
        done += role.handle(says(shard, performed), 0.0)
    return done


def test_status_names_what_it_waits_for() -> None:
    role = coordinator()
    assert role.status()[0] == "waiting for shard-0"
    answer_all(role, 1)
    answer_all(role, 2)
    answer_all(role, 3)
    assert role.status()[0] == "waiting for replicas"


def test_a_shard_that_dies_while_no_answer_is_due_is_named() -> None:
    """Chunks were computed, and none was ever on all shards: the run stood still for good."""
    role, now, asked = coordinator(), 0.0, set[rl.Address]()
    actions = [action for number in (1, 2, 3) for action in answer_all(role, number)]

    def live(seconds: float, *living: rl.Address) -> None:
        nonlocal now, actions
        until = now + seconds
        while now < until:
            now = next(a.at for a in actions if isinstance(a, rl.SetTimer) and "tick" in a.name)
            actions = list(role.handle(rl.TimerFired(name="coordinator:tick"), now))
            for shard, command in commands_in(actions):
                asked.add(shard)
                done = wire.CommandDone(series=4097, number=command.number)
                if shard in living:
                    role.handle(says(shard, done), now)

    live(30.0, *SHARDS)  # each repeats its last answer
    assert asked == {*SHARDS}
    now += 500.0  # its own process stood still
    actions = list(role.handle(rl.TimerFired(name="coordinator:tick"), now))
    with pytest.raises(PeerLostError, match="shard-1 has not answered for 10"):
        live(30.0, SHARDS[0])


def test_other_senders_break_the_protocol() -> None:
    with pytest.raises(RemoteProtocolError, match="sent the coordinator HeartbeatAck"):
        coordinator().handle(says(rl.Address("stranger"), wire.HeartbeatAck()), 0.0)
    performed = wire.CommandDone(series=1, number=1)
    with pytest.raises(RemoteProtocolError, match="CommandDone"):
        coordinator().handle(says(rl.Address("stranger"), performed), 0.0)


def test_peers_come_and_go() -> None:
    role = coordinator()
    joined = role.handle(rl.PeerJoined(peer=SHARDS[0], incarnation=1), 0.0)
    assert len(commands_in(list(joined))) == 1
    for lost in (SHARDS[0], REPLICA):
        event = rl.PeerLost(peer=lost, incarnation=1, reason="gone")
        assert list(role.handle(event, 0.0)) == []
    here = wire.WorkReport(series=0, version=0, evaluation=0, n_computed=0, results=())
    role.handle(says(REPLICA, here), 0.0)
    assert role.status()[1]["replicas"] == 1.0
    role.handle(rl.PeerLost(peer=REPLICA, incarnation=1, reason="gone"), 0.0)
    assert role.status()[1]["replicas"] == 0.0


def test_nothing_is_ever_computed_there() -> None:
    role = coordinator()
    assert list(role.handle(rl.Computed(name="whatever"), 0.0)) == []
    assert list(role.handle(rl.Persisted(label="whatever"), 0.0)) == []
    assert list(role.handle(rl.TimerFired(name="coordinator:tick"), 0.0)) == []
    assert list(role.handle(rl.TimerFired(name="coordinator:save"), 0.0)) == []


def test_a_shard_that_is_lost_too_often_ends_the_run() -> None:
    role = coordinator()
    role._n_series = (1 << 12) - 1
    answer_all(role, 1)
    with pytest.raises(DistBeliefError, match="shards restarted 4096 times"):
        role.handle(rl.PeerJoined(peer=SHARDS[0], incarnation=2), 0.0)


def test_status_in_a_warm_start_and_the_end_on_request() -> None:
    coordinator = Coordinator(
        replace(CONFIG, n_warm=1, await_begin=False),
        method=GradientDescent(),
        shards=[rl.Address("shard-0")],
        n_examples=4,
    )
    coordinator.handle(rl.Started(incarnation=1, restored=None), 0.0)
    here = wire.WorkReport(series=0, version=0, evaluation=0, n_computed=0, results=())
    report = rl.Received(sender=REPLICA, incarnation=1, message=here)
    assert coordinator.handle(report, 0.1)
    assert coordinator.status()[0] == "warm start"
    assert coordinator.handle(rl.TimerFired(name="coordinator:warm"), 0.5)
    stop = rl.Received(sender=rl.SUPERVISOR, incarnation=1, message=wire.Stop(reason="enough"))
    assert any(isinstance(a, rl.Exit) for a in coordinator.handle(stop, 1.0))


def test_a_replica_that_ends_a_warm_start_late_is_no_news() -> None:
    coordinator = Coordinator(
        CONFIG, method=GradientDescent(), shards=[rl.Address("shard-0")], n_examples=4
    )
    coordinator.handle(rl.Started(incarnation=1, restored=None), 0.0)
    late = rl.Received(
        sender=rl.Address("replica-0"), incarnation=1, message=wire.Finished(counters={})
    )
    assert coordinator.handle(late, 1.0) == []
    assert coordinator.handle(rl.TimerFired(name="coordinator:warm"), 2.0) == []


def test_a_run_that_ends_at_its_start_has_a_loss() -> None:
    """A constant loss: it had converged, with a reported loss of NaN."""
    run = Sandblast(method=GradientDescent(tolerance=1e9))
    run.play()
    assert run.coordinator.status()[1]["loss"] == run.checker.losses[-1] > 0.0


def test_a_damaged_journal_does_not_restart_the_run() -> None:
    coordinator = Coordinator(CONFIG, method=GradientDescent(), n_examples=10, shards=SHARDS)
    started = rl.Started(incarnation=2, unrestored="no snapshot of coordinator is whole")
    with pytest.raises(StorageError, match="no snapshot of coordinator is whole"):
        coordinator.handle(started, 0.0)
