"""Commands as data: what they need, what they measure, how shards' answers combine."""

import math
from typing import get_args

import msgspec
import pytest

from distbelief.core.errors import RemoteProtocolError
from distbelief.protocol import vector_commands as vc


# Command, vectors that it needs, vectors that it writes, numbers that it measures.
TABLE: list[tuple[vc.Command, set[str], set[str], int]] = [
    (vc.Copy(target="t", x="a"), {"a"}, {"t"}, 0),
    (vc.Fill(target="t", a=1.0), set(), {"t"}, 0),
    (vc.Axpy(target="t", a=2.0, x="a"), {"t", "a"}, {"t"}, 0),
    (
        vc.LinearCombination(target="t", terms=(vc.Term(1.0, "a"), vc.Term(2.0, "b"))),
        {"a", "b"},
        {"t"},
        0,
    ),
    (vc.Pointwise(target="t", function="align", x="a", y="b"), {"a", "b"}, {"t"}, 0),
    (vc.Dot(x="a", y="b"), {"a", "b"}, set(), 1),
    (vc.Gram(rows=("a", "b"), columns=("a", "b", "c")), {"a", "b", "c"}, set(), 6),
    (vc.Norm(x="a", order="inf"), {"a"}, set(), 1),
]


def test_the_table_has_every_command() -> None:
    assert {type(command) for command, *_ in TABLE} == set(get_args(vc.Command))


@pytest.mark.parametrize(("command", "needed", "written", "measured"), TABLE)
def test_each_command_says_what_it_needs_writes_and_measures(
    command: vc.Command, needed: set[str], written: set[str], measured: int
) -> None:
    assert set(vc.reads(command)) == needed
    assert set(vc.writes(command)) == written
    assert vc.n_scalars([command]) == measured


def test_a_batch_crosses_the_wire_as_it_is() -> None:
    batch = tuple(command for command, *_ in TABLE)
    encoded = msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.decode(encoded, type=vc.Batch) == batch


@pytest.mark.parametrize("name", ["", "a b", "../a", "a\n", "x" * 65, "é"])
def test_a_name_that_could_be_anything_is_refused(name: str) -> None:
    encoded = msgspec.msgpack.encode((vc.Fill(target=name, a=1.0),))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=vc.Batch)


def test_a_function_of_two_vectors_asks_for_the_second() -> None:
    encoded = msgspec.msgpack.encode(
        ({"type": "Pointwise", "target": "t", "function": "align", "x": "a"},)
    )
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=vc.Batch)


def test_answers_are_added_in_the_order_of_the_shards_and_norms_each_in_its_own_way() -> None:
    batch = (vc.Dot(x="a", y="b"), vc.Copy(target="t", x="a"), vc.Norm(x="a", order="2"))
    answers = [(1e16, 9.0), (1.0, 7.0), (-1e16, 0.0)]
    assert vc.combine(batch, answers) == ((1e16 + 1.0) - 1e16, 4.0)
    norms = (vc.Norm(x="a", order="1"), vc.Norm(x="a", order="2"), vc.Norm(x="a", order="inf"))
    assert vc.combine(norms, [(3.0, 9.0, 3.0), (4.0, 16.0, 4.0)]) == (7.0, 5.0, 4.0)
    with pytest.raises(RemoteProtocolError, match="measured 2 numbers, not 1"):
        vc.combine((vc.Dot(x="a", y="b"),), [(1.0,), (1.0, 2.0)])


@pytest.mark.parametrize(
    ("order", "partials"),
    [("inf", (1.0, math.nan)), ("inf", (math.nan, 1.0)), ("2", (-1.0,))],
    ids=["largest element", "largest element first", "a square that cannot be"],
)
def test_what_is_nan_is_not_lost_and_no_crash(order: vc.Order, partials: tuple[float, ...]) -> None:
    (norm,) = vc.combine((vc.Norm(x="a", order=order),), [(p,) for p in partials])
    assert math.isnan(norm)
