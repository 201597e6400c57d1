import pytest

from distbelief.program.cluster_file import load_cluster
from distbelief.roles.role import Address
from experiments.figures.rig import (
    BATCH,
    N_PARAMETERS,
    PAPERS_BATCH,
    PAPERS_PARAMETERS,
    Rig,
    shard_machines,
)


def test_a_step_of_the_small_net_takes_as_long_as_one_of_the_large() -> None:
    given = load_cluster("commodity-2012").machines[0]
    machine = Rig(20, haste=20.0).machine
    small = 6 * N_PARAMETERS * BATCH / machine.flops
    large = 6 * PAPERS_PARAMETERS * PAPERS_BATCH / given.flops
    assert 20.0 * small == pytest.approx(large)
    sent = 4 * N_PARAMETERS / machine.bandwidth
    assert 20.0 * sent == pytest.approx(4 * PAPERS_PARAMETERS / given.bandwidth)


@pytest.mark.parametrize(("replicas", "machines"), [(1, 2), (20, 10), (200, 100), (2000, 250)])
def test_shards_have_half_as_many_machines_as_replicas(replicas: int, machines: int) -> None:
    assert shard_machines(replicas) == machines
    assert Rig(replicas, haste=20.0).n_machines == replicas + machines


def test_nobody_shares_a_machine_but_who_computes_little() -> None:
    rig = Rig(20, haste=20.0)
    assert rig.place(Address("replica-19"), "replica") == 19
    assert rig.place(Address("shard-0"), "shard") == (20, 10)
    assert rig.place(Address("evaluator"), "evaluator") == (30, 64)
    assert rig.place(Address("coordinator"), "coordinator") == 94
