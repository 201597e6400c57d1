"""Rows of tables on shards against plain numpy: the same bits, whatever the number of shards."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from distbelief.core.errors import RemoteProtocolError, SettingError
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.rows import RoundRows, Rows, Tables, Values
from distbelief.protocol.batch import AddRows, TakeRows
from distbelief.protocol.vector_commands import Pull


SHAPES = {"long": (700,), "pairs": (300, 2), "short": (3,)}
PULLS = {"pairs": Pull("divide", 0.5)}

Task = Mapping[str, tuple[Rows, Values]]


def layout_of(n_shards: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Layout:
    specs = [TensorSpec(name=name, shape=shape) for name, shape in shapes.items()]
    return Layout.of(specs, n_shards=n_shards, dtype="float64")


class Shards:
    """The vectors of some shards, and what is staged there."""

    def __init__(self, n_shards: int, values: Mapping[str, Values]) -> None:
        self.layout = layout_of(n_shards)
        self.tables = Tables(self.layout)
        self.rows = [RoundRows(self.layout, k) for k in range(n_shards)]
        self.vectors = [np.zeros(self.layout.n_gradient(k)) for k in range(n_shards)]
        for k in range(n_shards):
            for segment in self.layout.segments(k):
                name = self.layout.tensors[segment.tensor_index].name
                here = slice(segment.offset, segment.offset + segment.n_elements)
                self.vectors[k][here] = values[name].ravel()[segment.start : segment.stop]

    def take(self, table: str, rows: Rows) -> Values:
        shape = self.tables.shapes[table][1:]
        taken = np.full((self.tables.n_rows(table, rows), *shape), np.nan)
        for part in self.tables.parts(table, rows):
            is_span = isinstance(part.rows, slice)
            message = TakeRows(
                series=1,
                number=1,
                part=0,
                table=table,
                start=part.rows.start if isinstance(part.rows, slice) else 0,
                stop=part.rows.stop if isinstance(part.rows, slice) else 0,
                rows=None if is_span else np.asarray(part.rows),
            )
            values = self.rows[part.shard].take(self.vectors[part.shard], message)
            taken[part.places] = np.asarray(values).reshape(-1, *shape)
        return taken

    def messages(self, token: int, task: Task) -> list[tuple[int, AddRows]]:
        parts = [
            (name, values, part)
            for name, (rows, values) in task.items()
            for part in self.tables.parts(name, rows)
        ]
        counts = [sum(one[2].shard == k for one in parts) for k in range(len(self.rows))]
        numbers = [0] * len(self.rows)
        messages: list[tuple[int, AddRows]] = []
        for name, values, part in parts:
            some = values[part.places].ravel()
            is_span = isinstance(part.rows, slice)
            message = AddRows(
                series=1,
                number=1,
                token=token,
                part=numbers[part.shard],
                n_parts=counts[part.shard],
                table=name,
                start=part.rows.start if isinstance(part.rows, slice) else 0,
                stop=part.rows.stop if isinstance(part.rows, slice) else 0,
                n_rows=0 if is_span else len(np.asarray(part.rows)),
                values=some if is_span else np.concatenate([np.asarray(part.rows, float), some]),
            )
            numbers[part.shard] += 1
            messages.append((part.shard, message))
        return messages

    def commit(self, tokens: Sequence[int]) -> None:
        for rows, vector in zip(self.rows, self.vectors, strict=True):
            rows.check(tokens)
            rows.commit(vector, tokens, PULLS, number=2)
            rows.drop(before=2)


def plain(values: Mapping[str, Values], tasks: Sequence[Task]) -> dict[str, Values]:
    """Return the tables after a round, row by row."""
    tables = {name: table.copy() for name, table in values.items()}
    for name, table in tables.items():
        for row in range(len(table)):
            sums: NDArray[np.float64] | None = None
            for task in tasks:
                if name not in task:
                    continue
                rows, added = task[name]
                indices = np.arange(len(table))[rows]
                for place in np.flatnonzero(indices == row):
                    sums = added[place].copy() if sums is None else sums + added[place]
            if sums is not None and name in PULLS:
                divisor = sums[1] + PULLS[name].a
                table[row] = [sums[0] / divisor, divisor]
            elif sums is not None:
                table[row] = table[row] + sums
    return tables


@st.composite
def rows_of(draw: st.DrawFn, n: int) -> Rows:
    if draw(st.booleans()):
        start = draw(st.integers(0, n))
        return slice(start, draw(st.integers(start, n)))
    return np.array(draw(st.lists(st.integers(0, n - 1), unique=True, max_size=30)), np.int64)


@st.composite
def tasks_of(draw: st.DrawFn) -> list[Task]:
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    tasks: list[Task] = []
    for _ in range(draw(st.integers(1, 4))):
        task: dict[str, tuple[Rows, Values]] = {}
        for name in draw(st.sets(st.sampled_from(sorted(SHAPES)))):
            rows = draw(rows_of(SHAPES[name][0]))
            n = len(np.arange(SHAPES[name][0])[rows])
            values = rng.normal(size=(n, *SHAPES[name][1:])) * rng.integers(0, 2, n).reshape(
                n, *(1,) * (len(SHAPES[name]) - 1)
            )
            task[name] = rows, values if name != "pairs" else np.abs(values)
        tasks.append(task)
    return tasks


def start() -> dict[str, Values]:
    rng = np.random.default_rng(5)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def bits(tables: Mapping[str, Values]) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in tables.items()}


def played(
    n_shards: int, tasks: Sequence[Task], order: Callable[[list[tuple[int, AddRows]]], None]
) -> dict[str, Values]:
    """Return the tables after a round whose parts came in some order, some of them twice."""
    shards = Shards(n_shards, start())
    messages = [one for token, task in enumerate(tasks, 7) for one in shards.messages(token, task)]
    other = {"long": (slice(0, 700), np.full(700, 9.0))}
    messages += shards.messages(99, other)  # an attempt that does not count
    order(messages)
    for k, message in messages:
        shards.rows[k].stage(message)
    shards.commit(range(7, 7 + len(tasks)))
    assert not any(rows.staged for rows in shards.rows)
    return {name: shards.take(name, slice(None)) for name in SHAPES}


@settings(max_examples=60, deadline=None)
@given(tasks_of(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_round_has_the_bits_of_a_plain_loop(tasks: list[Task], n: int, random: object) -> None:
    def shuffled(messages: list[tuple[int, AddRows]]) -> None:
        messages += messages[: len(messages) // 2]  # repeated
        random.shuffle(messages)  # type: ignore[attr-defined] # hypothesis hides its type

    assert bits(played(n, tasks, shuffled)) == bits(plain(start(), tasks))


@given(rows_of(700), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_rows_are_taken_as_they_are(rows: Rows, n_shards: int) -> None:
    values = start()
    shards = Shards(n_shards, values)
    assert (shards.take("long", rows) == values["long"][rows]).all()
    assert (shards.take("pairs", slice(-40, None)) == values["pairs"][-40:]).all()


def test_without_a_rule_the_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    tasks: list[Task] = [
        {"long": (slice(0, 700), rng.normal(size=700) * 10.0**k)} for k in range(3)
    ]
    expected = bits(plain(start(), tasks))
    commit, stage = RoundRows.commit, RoundRows.stage

    def in_any_order(
        self: RoundRows, vector: Values, tokens: Sequence[int], pulls: object, *, number: int
    ) -> None:
        commit(self, vector, list(tokens)[::-1], pulls, number=number)  # type: ignore[arg-type] # as there

    def counted_again(self: RoundRows, message: AddRows) -> None:
        known = self._staged.get(message.token)
        if known is not None and message.part in known.parts:
            known.parts[message.part][1][2][:] += message.values
        else:
            stage(self, message)

    def twice(messages: list[tuple[int, AddRows]]) -> None:
        messages += messages

    assert bits(played(2, tasks, twice)) == expected
    for name, variant in (("commit", in_any_order), ("stage", counted_again)):
        with monkeypatch.context() as patch:
            patch.setattr(RoundRows, name, variant)
            assert bits(played(2, tasks, twice)) != expected, name


def test_what_does_not_fit_is_refused() -> None:
    shards = Shards(2, start())
    add = partial(AddRows, series=1, number=1, token=3, part=0, n_parts=2, table="long")
    cases = {
        "are not here": add(start=600, stop=650, values=np.zeros(50)),
        "numbers": add(start=0, stop=10, values=np.zeros(9)),
        "some of": add(n_rows=1, values=np.array([699.0, 1.0])),
    }
    for text, message in cases.items():
        with pytest.raises(RemoteProtocolError, match=text):
            shards.rows[0].stage(message)
    shards.rows[0].stage(add(start=0, stop=2, values=np.zeros(2)))
    with pytest.raises(RemoteProtocolError, match="1 of 2 parts of attempt 3"):
        shards.rows[0].check([3])
    with pytest.raises(SettingError, match="rows of 3 numbers, which 2 shards would cut"):
        Tables(layout_of(2, {"threes": (100, 3)}))
    with pytest.raises(SettingError, match="no table 'wide'"):
        list(shards.tables.parts("wide", slice(0, 1)))
