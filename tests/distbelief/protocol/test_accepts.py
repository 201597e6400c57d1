"""Each role declares the messages that it accepts; the drivers refuse all others."""

from collections.abc import Mapping, Sequence
from typing import get_args

import pytest

from distbelief.core.errors import FalseClaimError, RemoteProtocolError
from distbelief.job.hosts.agent import HostAgent
from distbelief.parameter_server.shard import Shard
from distbelief.protocol import HeartbeatAck, Message, Stop, role as rl
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.machines import ClusterOptions
from distbelief.supervisor.supervisor import Supervisor
from distbelief.worker.loop_worker import LoopWorker
from distbelief.worker.rank import Rank
from distbelief.worker.replica import Replica
from distbelief.worker.ring import Ring
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.strads.worker import BlockWorker
from sandblaster.warm_start_worker import WarmStartWorker
from sandblaster.worker import ChunkProgram
from tests.distbelief.simulation.toys import STEADY, TESTER, A


ROLES = (
    BlockWorker,
    Coordinator,
    HostAgent,
    LoopWorker,
    Replica,
    Shard,
    Supervisor,
    WarmStartWorker,
)


class OnlyStop:
    """Accepts nothing but `Stop`."""

    accepts = frozenset({Stop})

    def __init__(self) -> None:
        self.seen: list[rl.Event] = []

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        del now
        self.seen.append(event)
        return []

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "", {}


def test_each_message_is_accepted_by_some_role_and_no_role_accepts_all() -> None:
    accepted = frozenset().union(*(role.accepts for role in ROLES))
    parts = Rank.accepts | ChunkProgram.accepts | Ring.accepts
    assert accepted | parts == rl.ALL_MESSAGES
    assert frozenset(get_args(Message)) == rl.ALL_MESSAGES
    assert all(role.accepts < rl.ALL_MESSAGES for role in ROLES)
    assert all(Stop in role.accepts for role in ROLES)  # any role can be asked to end


def test_a_wrapped_role_accepts_what_the_role_within_accepts() -> None:
    assert WarmStartWorker.accepts == Replica.accepts | ChunkProgram.accepts


def test_a_message_that_a_role_does_not_accept_is_refused_by_name() -> None:
    role: rl.Role = OnlyStop()
    heartbeat = rl.Received(sender=rl.Address("shard-1"), incarnation=1, message=HeartbeatAck())
    with pytest.raises(RemoteProtocolError, match="shard-1 sent replica-0 HeartbeatAck, which it"):
        rl.check_accepted(role, heartbeat, name="replica-0")
    stop = rl.Received(sender=rl.SUPERVISOR, incarnation=1, message=Stop(reason="over"))
    rl.check_accepted(role, stop, name="replica-0")
    rl.check_accepted(role, rl.TimerFired(name="any"), name="replica-0")


@pytest.mark.parametrize("sender", ["worker-1-a", "replica-0.1", "host-5f", "supervisor-1", ""])
def test_a_worker_gives_no_orders(sender: str) -> None:
    """An allowed worker ended a server for all: its `Stop` was obeyed, whoever sent it."""
    role = OnlyStop()
    order = rl.Received(sender=rl.Address(sender), incarnation=1, message=Stop(reason="over"))
    with pytest.raises(FalseClaimError, match="sent shard-0 Stop: only supervisor or coordinator"):
        rl.check_accepted(role, order, name="shard-0")


def test_the_simulation_refuses_it_before_the_role_sees_it() -> None:
    toy = OnlyStop()
    options = ClusterOptions(introduce=True, machine=STEADY)
    cluster = SimulatedCluster({A: lambda _: toy}, seed=0, options=options)
    cluster.run()
    cluster.post(A, rl.Received(sender=TESTER, incarnation=1, message=HeartbeatAck()))
    cluster.run()
    assert cluster.counts.refused == 1
    assert not any(isinstance(event, rl.Received) for event in toy.seen)
    assert "tester sent a HeartbeatAck, which it does not accept" in cluster.trace.table()
