"""Training over a ring by the roles of a job: a short one, in which coverage is measured."""

from distbelief.protocol.role import Address
from distbelief.simulation.faults import Kill
from tests.simulation.test_ring_training import cluster


def test_a_replica_dies_and_the_others_go_on_with_it_when_it_is_back() -> None:
    run = cluster(seed=1)
    run.wait(0.1)
    run.train(100)
    run.cluster.inject(Kill(at=run.now, role=Address("replica-1")))
    assert run.run() is None
    assert run.n_samples >= 600
    assert run.restarts(Address("replica-1")) == 1
