"""The role behind `DownpourSGD`, without a server."""

from collections.abc import Sequence

import pytest

from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.protocol import HeartbeatAck, Join, Message, PeerEntry, Peers, role as rl
from distbelief.worker.loop_worker import BEAT, LoopWorker


SHARD = rl.Address("shard-0")


def peers(incarnation: int) -> Peers:
    entry = PeerEntry(name=SHARD, incarnation=incarnation, endpoint=f"at-{incarnation}", host="")
    return Peers(entries=(entry,))


def tell(worker: LoopWorker, message: Message, now: rl.Seconds) -> Sequence[rl.Action]:
    said = rl.Received(sender=rl.SUPERVISOR, incarnation=1, message=message)
    return worker.handle(said, now)


def joins(actions: Sequence[rl.Action]) -> bool:
    """Return whether the server is asked to be let in."""
    return any(isinstance(a, rl.Send) and isinstance(a.message, Join) for a in actions)


@pytest.fixture
def worker() -> LoopWorker:
    tensor = TensorSpec(name="000000", shape=(3,), kind="parameter")
    client = ParameterClient(
        ClientConfig(pushes=True),
        PartialView(Layout.of([tensor], n_shards=1)),
        memory=PrivateMemory(host=""),
    )
    made = LoopWorker(client=client, join=Join(endpoint="here", host="", pid=0))
    assert joins(made.handle(rl.Started(incarnation=1), 0.0))
    tell(made, peers(1), 0.5)
    return made


def test_a_worker_joins_a_server_that_was_killed_and_started_again(worker: LoopWorker) -> None:
    """Regression: it only sent heartbeats, which the new server ignored, not knowing the worker.

    The loop waited for a minute and failed.
    """
    beat = rl.TimerFired(name=BEAT)
    for now in (1.0, 2.0, 3.0):
        assert not joins(worker.handle(beat, now))
        tell(worker, HeartbeatAck(), now)
    for now in (4.0, 5.0, 6.0):
        assert not joins(worker.handle(beat, now))
    assert joins(worker.handle(beat, 7.0))
    assert joins(worker.handle(beat, 8.0))
    connects = [a for a in tell(worker, peers(2), 8.5) if isinstance(a, rl.Connect)]
    assert [(c.peer, c.incarnation, c.endpoint) for c in connects] == [(SHARD, 2, "at-2")]
    for n in (2, 1, 2):  # no news: no new link
        assert not any(isinstance(a, rl.Connect) for a in tell(worker, peers(n), 8.6))
    assert not joins(worker.handle(beat, 9.0))


def test_a_loop_that_computes_for_long_does_not_join_again_after_every_step(
    worker: LoopWorker,
) -> None:
    for step in range(1, 5):
        now = 10.0 * step  # its timer was due nine seconds ago
        assert not joins(worker.handle(rl.TimerFired(name=BEAT), now))
        tell(worker, HeartbeatAck(), now)
