"""Shared memory of simulated hosts: released regions become NaN."""

from collections.abc import Sequence

import numpy as np
import pytest

from distbelief.core.errors import LocalProtocolError, MemoryGoneError, StorageError
from distbelief.core.memory import Memory
from distbelief.protocol import role as rl
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.storage import HostMemory
from distbelief.simulation.trace import SimulationFailed
from tests.distbelief.simulation.toys import STEADY, A, B, Scripted, on_start


class Holder:
    """Owns a region of eight doubles per life; finds them all finite when asked."""

    accepts = rl.ALL_MESSAGES

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.values = np.zeros(0)

    def handle(self, event: rl.Event, now: rl.Seconds) -> list[rl.Action]:
        del now
        if isinstance(event, rl.Started):
            name = f"held-{event.incarnation}"
            self.values = self.memory.create(name, n_bytes=64).view(np.float64)
            self.values[:] = event.incarnation
        return []

    def status(self) -> tuple[str, dict[str, float]]:
        return "holding", {}


def cluster_of_holders(host: str = "shared") -> SimulatedCluster:
    cluster = SimulatedCluster(
        {A: Holder, B: Holder},
        seed=1,
        options=ClusterOptions(machine=SimulatedMachine(host=host), start=(A,)),
    )
    cluster.run()
    return cluster


def memory_of(cluster: SimulatedCluster, name: rl.Address) -> Memory:
    role: rl.Role = cluster.role(name)
    assert isinstance(role, Holder)
    return role.memory


def test_roles_of_one_host_see_the_same_bytes() -> None:
    cluster = cluster_of_holders()
    other = cluster.memory(B).lend()
    assert other.host == "shared"
    assert other.attach("held-1").view(np.float64).tolist() == [1.0] * 8


def test_roles_of_another_host_or_of_none_see_nothing() -> None:
    other = HostMemory("elsewhere", n_bytes_max=100).lend()
    with pytest.raises(MemoryGoneError, match="'held-1' on host 'elsewhere'"):
        other.attach("held-1")
    cluster = cluster_of_holders(host="")
    assert memory_of(cluster, A).host == ""
    with pytest.raises(MemoryGoneError):
        cluster.memory(B).lend().attach("held-1")


def test_regions_are_aligned_to_a_cache_line() -> None:
    memory = HostMemory("h", n_bytes_max=1000).lend()
    for n in range(4):
        assert memory.create(str(n), n_bytes=17).ctypes.data % 64 == 0


def test_a_released_region_is_poison_and_gone_and_its_room_free() -> None:
    host = HostMemory("h", n_bytes_max=100)
    owner, reader = host.lend(), host.lend()
    values = owner.create("r", n_bytes=64).view(np.float32)
    reader.release("r")  # not its own: stays
    assert reader.attach("r").sum() == 0
    owner.release("r")
    owner.release("r")
    assert np.isnan(values).all()
    with pytest.raises(MemoryGoneError):
        reader.attach("r")
    assert host.n_bytes == 0


def test_a_host_without_room_says_what_is_taken() -> None:
    memory = HostMemory("h", n_bytes_max=100).lend()
    memory.create("r", n_bytes=64)
    with pytest.raises(StorageError, match=r"'s' of 64 bytes: 64 of 100 are taken"):
        memory.create("s", n_bytes=64)


def test_a_name_is_not_used_twice() -> None:
    memory = HostMemory("h", n_bytes_max=1000).lend()
    memory.create("r", n_bytes=64)
    with pytest.raises(LocalProtocolError, match="exists already"):
        memory.create("r", n_bytes=64)


def test_regions_of_a_killed_role_stay_until_its_next_incarnation() -> None:
    cluster = cluster_of_holders()
    reader = cluster.memory(B).lend()
    old = memory_of(cluster, A).attach("held-1").view(np.float64)  # by its owner
    cluster.kill(A)
    assert old.tolist() == [1.0] * 8
    cluster.restart(A)
    assert np.isnan(old).all()
    with pytest.raises(MemoryGoneError):
        reader.attach("held-1")
    assert reader.attach("held-2").view(np.float64).tolist() == [2.0] * 8
    assert cluster.memory(A).n_bytes == 64


def test_a_killed_roles_region_keeps_its_bytes_as_long_as_somebody_has_it() -> None:
    """As a mapped file does: its name goes, and nobody else finds it."""
    cluster = cluster_of_holders()
    readers = [cluster.memory(B).lend() for _ in range(3)]
    old = readers[0].attach("held-1").view(np.float64)
    readers[1].attach("held-1")
    cluster.kill(A)
    cluster.restart(A)
    with pytest.raises(MemoryGoneError, match="'held-1' on host 'shared': its owner"):
        readers[2].attach("held-1")
    assert readers[0].attach("held-1").view(np.float64).tolist() == [1.0] * 8
    assert cluster.memory(A).n_bytes == 128  # it takes its room all the while
    readers[0].release("held-1")
    assert old.tolist() == [1.0] * 8
    with pytest.raises(MemoryGoneError):
        readers[0].attach("held-1")
    readers[1].release_all()  # the life of the last one that has it is over
    assert np.isnan(old).all()
    assert cluster.memory(A).n_bytes == 64


def test_what_its_owner_releases_is_poison_whoever_has_it() -> None:
    """Its lease is over: a late reader is caught."""
    host = HostMemory("h", n_bytes_max=100)
    owner, reader = host.lend(), host.lend()
    owner.create("r", n_bytes=64)
    values = reader.attach("r").view(np.float32)
    owner.release("r")
    assert np.isnan(values).all()
    reader.release("r")
    owner.release_all()
    assert host.n_bytes == 0


def test_what_its_owner_disowns_ends_with_its_use() -> None:
    host = HostMemory("h", n_bytes_max=1024)
    owner, reader, late = host.lend(), host.lend(), host.lend()
    owner.create("a", n_bytes=64)[:] = 7
    seen = reader.attach("a")
    reader.disown("a")  # it is not its own
    late.attach("a")
    late.release("a")
    owner.disown("a")
    assert (seen == 7).all()
    with pytest.raises(MemoryGoneError, match="its owner"):
        late.attach("a")
    reader.release("a")
    assert host.n_bytes == 0
    assert (seen == 0xFF).all()


def test_regions_of_a_zombie_stay_until_it_dies() -> None:
    launches = [rl.Launch(name=A, incarnation=1), rl.Launch(name=A, incarnation=2)]
    boss = Scripted(on_start(*launches))
    cluster = SimulatedCluster(
        {rl.SUPERVISOR: lambda _: boss, A: Holder},
        seed=1,
        options=ClusterOptions(start=(rl.SUPERVISOR,)),
    )
    cluster.run()
    reader = cluster.memory(rl.SUPERVISOR).lend()
    assert reader.attach("held-1").view(np.float64)[0] == 1.0
    assert cluster.memory(A).n_bytes == 128


def test_a_read_after_the_lease_has_ended_is_caught() -> None:
    """The reader's work ends after the lender took its buffer back: NaN, and caught."""

    def lend(memory: Memory) -> rl.Role:
        values = memory.create("lent", n_bytes=64).view(np.float32)
        values[:] = 1.0

        def end_lease() -> None:
            memory.retire(values)

        return Scripted(on_start(rl.Compute(name="end", work=end_lease, cost=rl.Cost(flops=1.0))))

    def read(memory: Memory) -> rl.Role:
        def add() -> float:
            return float(memory.attach("lent").view(np.float32).sum())

        begin = on_start(rl.Compute(name="read", work=add, cost=rl.Cost(flops=2.0)))

        def answer(event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
            if isinstance(event, rl.Computed):
                assert event.result == 16.0, f"the sum is {event.result}"
            return begin(event, now)

        return Scripted(answer)

    cluster = SimulatedCluster({A: lend, B: read}, seed=1, options=ClusterOptions(machine=STEADY))
    with pytest.raises(SimulationFailed, match="the sum is nan"):
        cluster.run()
