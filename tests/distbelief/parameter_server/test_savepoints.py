"""Savepoints of one shard: created, changed afterwards, restored."""

import numpy as np
import pytest

from distbelief.core.errors import RemoteProtocolError, StorageError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.savepoints import PARAMETERS, Savepoints, split
from distbelief.parameter_server.vector_store import VectorStore
from distbelief.protocol import Savepoint
from distbelief.protocol.role import Snapshot
from distbelief.protocol.vector_commands import Axpy, Command, Copy, Fill


LAYOUT = Layout.of([TensorSpec(name="w", shape=(64,))], n_shards=1, dtype="float64")


class Shard:
    """Vectors and savepoints, begun at ones."""

    def __init__(self) -> None:
        self.algebra = VectorStore(LAYOUT, 0)
        self.savepoints = Savepoints(self.algebra)
        self.savepoints.begin_at(7)

    def begin(self) -> "Shard":
        self.savepoints.return_to(0, whole=False, values=lambda: np.ones(64))
        return self

    def do(self, *commands: Command) -> None:
        self.algebra.perform(commands)

    def add(self, savepoint: int, *names: str, settled: int = 0) -> None:
        self.savepoints.add(Savepoint(number=savepoint, vectors=names), settled=settled)

    def return_to(self, savepoint: int, *, whole: bool) -> None:
        self.savepoints.return_to(savepoint, whole=whole, values=lambda: np.ones(64))

    def at(self, name: str) -> float:
        return float(self.algebra.export((name,))[name][0])

    @property
    def held(self) -> list[tuple[int, bool]]:
        return [(record.savepoint, record.whole) for record in self.savepoints.records()]


def test_before_the_first_command_there_is_savepoint_0() -> None:
    shard = Shard()
    (record,) = shard.savepoints.records()
    assert (record.savepoint, record.whole, record.clock) == (0, False, 7)
    (record,) = shard.begin().savepoints.records()
    assert (record.savepoint, record.whole, record.clock) == (0, False, 7)
    assert shard.at(PARAMETERS) == 1.0


def test_a_savepoint_keeps_its_vectors_as_they_were_and_no_others() -> None:
    shard = Shard().begin()
    shard.do(Fill(target="s0", a=3.0))
    shard.add(5, PARAMETERS, "s0")
    shard.do(Axpy(target=PARAMETERS, a=2.0, x="s0"), Fill(target="s0", a=9.0))
    shard.do(Fill(target="trial", a=4.0))
    shard.return_to(5, whole=True)
    assert shard.algebra.names() == (PARAMETERS, "s0")
    assert (shard.at(PARAMETERS), shard.at("s0")) == (1.0, 3.0)
    shard.do(Fill(target="s0", a=9.0))
    shard.return_to(5, whole=True)  # once more
    assert shard.at("s0") == 3.0


def test_two_savepoints_are_kept_until_the_newer_is_settled() -> None:
    shard = Shard().begin()
    shard.add(5, PARAMETERS)
    shard.do(Fill(target=PARAMETERS, a=2.0))
    shard.add(6, PARAMETERS, settled=4)
    shard.do(Fill(target=PARAMETERS, a=3.0))
    assert shard.held == [(5, True), (6, True), (0, False)]
    with pytest.raises(RemoteProtocolError, match="cannot create savepoint 7: settle one of 2"):
        shard.add(7, PARAMETERS, settled=5)
    shard.add(7, PARAMETERS, settled=6)
    assert shard.held == [(6, True), (7, True), (0, False)]
    shard.return_to(6, whole=False)
    assert shard.at(PARAMETERS) == 2.0
    assert shard.held == [(0, False)]


def test_a_savepoint_names_existing_vectors() -> None:
    with pytest.raises(RemoteProtocolError, match=r"do not exist here: \['s0'\]"):
        Shard().begin().add(5, PARAMETERS, "s0")


@pytest.mark.parametrize("whole", [True, False])
def test_an_unknown_savepoint_cannot_be_restored(whole: bool) -> None:  # noqa: FBT001 -- a case
    with pytest.raises(RemoteProtocolError, match="no savepoint 3 here"):
        Shard().begin().return_to(3, whole=whole)


def test_savepoint_0_exists_until_all_shards_have_one_on_disk() -> None:
    shard = Shard().begin()
    shard.do(Fill(target=PARAMETERS, a=2.0))
    shard.add(5, PARAMETERS)
    shard.savepoints.on_disk(5)
    assert shard.held == [(5, True), (0, False), (5, False)]
    shard.savepoints.forget(4)  # unknown here
    shard.savepoints.forget(5)
    assert shard.held == [(5, True), (5, False)]


def test_at_most_three_savepoints_are_kept() -> None:
    """The oldest may be all that another shard has."""
    shard = Shard().begin()
    for savepoint in (5, 6, 7):
        shard.add(savepoint, PARAMETERS, settled=savepoint - 1)
        shard.do(Fill(target=PARAMETERS, a=float(savepoint)))
        shard.savepoints.on_disk(savepoint)
    assert [savepoint for savepoint, whole in shard.held if not whole] == [0, 6, 7]
    shard.return_to(0, whole=False)
    assert shard.at(PARAMETERS) == 1.0


def test_accepted_points_and_savepoints_move_nothing_and_use_arrays_again() -> None:
    shard = Shard().begin()
    arrays: dict[int, Vector] = {}
    for savepoint in range(1, 20):
        shard.do(Fill(target="trial", a=float(savepoint)), Copy(target=PARAMETERS, x="trial"))
        shard.add(savepoint, PARAMETERS, settled=savepoint - 1)
        vectors = shard.algebra.export()
        assert vectors[PARAMETERS] is vectors["trial"]
        arrays |= {id(vector): vector for vector in vectors.values()}
    # The start, which stays; two savepoints; the trial that follows them.
    assert len(arrays) <= 4


PLAIN = Snapshot(label="3", arrays={"values": np.ones(64)}, facts={"clock": "3"})


def test_a_saved_savepoint_comes_back_bit_for_bit() -> None:
    shard = Shard().begin()
    shard.do(Fill(target="s0", a=0.1))
    shard.add(5, PARAMETERS, "s0")
    shard.savepoints.check_current(5)
    saved = shard.savepoints.extend(PLAIN, savepoint=5)
    plain, savepoints = split(saved)
    assert [one.number for one in savepoints] == [5, 0]
    assert plain.facts == PLAIN.facts
    assert list(plain.arrays) == ["values"]
    other = Shard()
    other.savepoints.restore(savepoints)
    assert other.held == [(5, True), (0, False), (5, False)]
    assert (other.at(PARAMETERS), other.at("s0")) == (1.0, 0.1)


def test_a_saved_savepoint_includes_the_one_that_all_shards_have() -> None:
    """Two shards died around a save that one of them had finished (seed 4642).

    The one was at the savepoint it had just saved, the other, whose save was torn, where the
    run began: they shared no point, and the run was over.
    """
    shard = Shard().begin()
    shard.do(Fill(target=PARAMETERS, a=2.0))
    shard.add(5, PARAMETERS)
    _, first = split(shard.savepoints.extend(PLAIN, savepoint=5))
    other = Shard()
    other.savepoints.restore(first)
    assert [(r.savepoint, r.clock) for r in other.savepoints.records()] == [(5, 0), (0, 7), (5, 0)]
    other.return_to(0, whole=False)
    assert other.at(PARAMETERS) == 1.0

    shard.savepoints.on_disk(5)
    shard.savepoints.forget(5)
    shard.do(Fill(target=PARAMETERS, a=3.0))
    shard.add(6, PARAMETERS, settled=5)
    shard.do(Fill(target=PARAMETERS, a=4.0))
    shard.add(7, PARAMETERS, settled=6)
    shard.savepoints.on_disk(7)  # here, and not elsewhere
    shard.do(Fill(target=PARAMETERS, a=5.0))
    shard.add(8, PARAMETERS, settled=7)
    _, second = split(shard.savepoints.extend(PLAIN, savepoint=8))
    other.savepoints.restore(second)
    assert other.held == [(8, True), (5, False), (8, False)]
    other.return_to(5, whole=False)
    assert other.at(PARAMETERS) == 2.0


def test_the_common_savepoint_is_not_saved_twice() -> None:
    shard = Shard().begin()
    shard.add(5, PARAMETERS)
    shard.savepoints.on_disk(5)
    shard.savepoints.forget(5)
    again = shard.savepoints.extend(PLAIN, savepoint=5)
    assert sorted(again.arrays) == ["values", "vector.parameters"]


def test_only_the_current_savepoint_can_be_saved() -> None:
    shard = Shard().begin()
    with pytest.raises(RemoteProtocolError, match="vectors have changed since"):
        shard.savepoints.check_current(5)
    shard.add(5, PARAMETERS)
    shard.do(Copy(target="s0", x=PARAMETERS), Fill(target=PARAMETERS, a=2.0))
    with pytest.raises(RemoteProtocolError, match="cannot save savepoint 5"):
        shard.savepoints.check_current(5)


def test_a_snapshot_without_a_savepoint_has_the_shards_own_state() -> None:
    assert split(PLAIN) == (PLAIN, ())


@pytest.mark.parametrize(
    ("fact", "arrays"),
    [
        ("{", {}),
        ('{"cut":5,"vectors":["parameters","s0"]}', {}),
        ('{"cut":5,"vectors":["parameters"],"earlier":[4,0]}', {}),
        ('{"cut":5,"vectors":["parameters"]}', {"earlier": np.ones(64)}),
        ('{"cut":5,"vectors":["parameters"],"earlier":[4,0]}', {"earlier": np.ones(63)}),
    ],
)
def test_a_damaged_snapshot_is_refused(fact: str, arrays: dict[str, Vector]) -> None:
    snapshot = Snapshot(
        label="3", arrays={"vector.parameters": np.ones(64), **arrays}, facts={"cut": fact}
    )
    with pytest.raises(StorageError, match="snapshot '3'"):
        split(snapshot)
