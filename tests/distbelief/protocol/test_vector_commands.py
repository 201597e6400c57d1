"""Commands as data: what they need, what they measure, how shards' answers combine."""

import math
from typing import get_args

import msgspec
import pytest

from distbelief.errors import RemoteProtocolError
from distbelief.protocol.vector_commands import (
    Axpy,
    Batch,
    Command,
    Copy,
    Dot,
    Drop,
    Fill,
    Gram,
    LinearCombination,
    Multiply,
    Norm,
    Pointwise,
    Scale,
    Term,
    combine,
    n_scalars,
    reads,
    targets,
    writes,
)


# Command, vectors that it needs, vectors that it writes, numbers that it measures.
TABLE: list[tuple[Command, set[str], set[str], int]] = [
    (Copy(target="t", x="a"), {"a"}, {"t"}, 0),
    (Fill(target="t", a=1.0), set(), {"t"}, 0),
    (Scale(target="t", a=2.0), {"t"}, {"t"}, 0),
    (Axpy(target="t", a=2.0, x="a"), {"t", "a"}, {"t"}, 0),
    (Multiply(target="t", x="a"), {"t", "a"}, {"t"}, 0),
    (LinearCombination(target="t", terms=(Term(1.0, "a"), Term(2.0, "b"))), {"a", "b"}, {"t"}, 0),
    (Pointwise(target="t", function="sign", x="a"), {"a"}, {"t"}, 0),
    (Pointwise(target="t", function="align", x="a", y="b"), {"a", "b"}, {"t"}, 0),
    (Drop(names=("a", "b")), set(), {"a", "b"}, 0),
    (Dot(x="a", y="b"), {"a", "b"}, set(), 1),
    (Gram(rows=("a", "b"), columns=("a", "b", "c")), {"a", "b", "c"}, set(), 6),
    (Norm(x="a", order="inf"), {"a"}, set(), 1),
]


def test_the_table_has_every_command() -> None:
    assert {type(command) for command, *_ in TABLE} == set(get_args(Command))


@pytest.mark.parametrize(("command", "needed", "written", "measured"), TABLE)
def test_each_command_says_what_it_needs_writes_and_measures(
    command: Command, needed: set[str], written: set[str], measured: int
) -> None:
    assert set(reads(command)) == needed
    assert set(writes(command)) == written
    assert targets([command]) == written
    assert n_scalars([command]) == measured


def test_a_batch_crosses_the_wire_as_it_is() -> None:
    batch = tuple(command for command, *_ in TABLE)
    encoded = msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.decode(encoded, type=Batch) == batch


@pytest.mark.parametrize("name", ["", "a b", "../a", "a\n", "x" * 65, "é"])
def test_a_name_that_could_be_anything_is_refused(name: str) -> None:
    encoded = msgspec.msgpack.encode((Scale(target=name, a=1.0),))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=Batch)


def test_a_function_of_two_vectors_asks_for_the_second() -> None:
    with pytest.raises(ValueError, match="'orthant' of 'w' needs a second vector"):
        Pointwise(target="t", function="orthant", x="w")
    encoded = msgspec.msgpack.encode(
        ({"type": "Pointwise", "target": "t", "function": "align", "x": "a"},)
    )
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=Batch)


def test_answers_are_added_in_the_order_of_the_shards() -> None:
    batch = (Dot(x="a", y="b"), Copy(target="t", x="a"), Norm(x="a", order="2"))
    answers = [(1e16, 9.0), (1.0, 7.0), (-1e16, 0.0)]
    assert combine(batch, answers) == ((1e16 + 1.0) - 1e16, 4.0)


def test_norms_combine_each_in_its_own_way() -> None:
    batch = (Norm(x="a", order="1"), Norm(x="a", order="2"), Norm(x="a", order="inf"))
    assert combine(batch, [(3.0, 9.0, 3.0), (4.0, 16.0, 4.0)]) == (7.0, 5.0, 4.0)


@pytest.mark.parametrize("partials", [(1.0, math.nan), (math.nan, 1.0)])
def test_a_largest_element_that_is_nan_is_not_lost(partials: tuple[float, float]) -> None:
    (norm,) = combine((Norm(x="a", order="inf"),), [(p,) for p in partials])
    assert math.isnan(norm)


def test_a_square_that_cannot_be_is_nan_and_no_crash() -> None:
    (norm,) = combine((Norm(x="a", order="2"),), [(-1.0,)])
    assert math.isnan(norm)


def test_an_answer_of_the_wrong_length_names_its_shard() -> None:
    with pytest.raises(RemoteProtocolError, match="answered a batch of 1 commands with 2"):
        combine((Dot(x="a", y="b"),), [(1.0,), (1.0, 2.0)])
