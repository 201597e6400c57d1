"""Tables of rows on the shards: workers take rows, and add to them in rounds.

    table of 200 rows    shard 0: rows 0 to 127    shard 1: rows 128 to 199

A table is a parameter of the layout: its rows are those of its first axis. What the tasks of a
round add to rows is staged, in parts, under the token of the attempt. Committing the round adds
up what those attempts that count have staged, in their order, and makes new rows by a `Pull`. So
rows have the same bits for any number of shards, and no matter which worker has computed a task.

Tasks of later rounds stage before an earlier round is committed, where several are in flight.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias, cast, final

import numpy as np
from numpy.typing import NDArray

from distbelief.core.errors import RemoteProtocolError, SettingError
from distbelief.core.vectors import BLOCK_BYTES, Vector
from distbelief.parameter_server.layout import Layout
from distbelief.protocol import batch as bt
from distbelief.protocol.vector_commands import Pull


Values = NDArray[np.float64]
"""Rows of a table: (n_rows, n_columns), or (n_rows,) of a table without columns."""

Rows: TypeAlias = "NDArray[np.int64] | slice[int, int, None]"
"""Which rows of a table; none is named twice."""

N_ELEMENTS_MAX: Final = BLOCK_BYTES // 8  # of a message

STALENESS_MAX: Final = 8
"""Rounds by which values that a task takes may be older than those before its round."""


class Part(NamedTuple):
    """Some of the rows that a task takes or adds to: all on one shard, and in one message."""

    shard: int
    rows: Rows  # of the table
    places: Rows  # among the rows of the task


@final
class Tables:
    """Where the rows of all tables lie.

    SettingError if the elements of a row would lie on different shards.
    """

    def __init__(self, layout: Layout) -> None:
        self.widths: dict[str, int] = {}  # elements of a row
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._bounds: dict[str, list[tuple[int, int, int]]] = {}  # shard, first row, end
        self._n_shards = layout.n_shards
        for spec in layout.tensors:
            if spec.kind == "parameter" and spec.shape and spec.n_elements:
                self.shapes[spec.name] = spec.shape
                self.widths[spec.name] = spec.n_elements // spec.shape[0]
                self._bounds[spec.name] = []
        for k in range(layout.n_shards):
            for name, (first, end, _) in self.on_shard(layout, k).items():
                self._bounds[name].append((k, first, end))

    def on_shard(self, layout: Layout, k: int) -> Mapping[str, tuple[int, int, int]]:
        """Return the first row and the end of each table on a shard, and their offset there."""
        found: dict[str, tuple[int, int, int]] = {}
        for segment in layout.segments(k):
            name = layout.tensors[segment.tensor_index].name
            if name not in self.widths:
                continue
            width = self.widths[name]
            if segment.start % width or segment.stop % width:
                raise SettingError(
                    f"table {name!r} has rows of {width} numbers, which {self._n_shards} shards "
                    "would cut: use one shard, or rows of 1, 2, 4, ... 64 numbers"
                )
            found[name] = segment.start // width, segment.stop // width, segment.offset
        return found

    def n_rows(self, table: str, rows: Rows) -> int:
        if not isinstance(rows, slice):
            return len(rows)
        start, stop, _ = rows.indices(self.shapes[table][0])
        return max(stop - start, 0)

    def parts(self, table: str, rows: Rows) -> Iterator[Part]:
        """Yield where these rows lie, in pieces that fit into a message."""
        if table not in self.shapes:
            raise SettingError(f"there is no table {table!r}; there are {sorted(self.shapes)}")
        n_most = max(1, N_ELEMENTS_MAX // (self.widths[table] + 1))
        for shard, first, end in self._bounds[table]:
            if isinstance(rows, slice):
                begin, stop, _ = rows.indices(self.shapes[table][0])
                for start in range(max(begin, first), min(stop, end), n_most):
                    last = min(start + n_most, stop, end)
                    yield Part(shard, slice(start, last), slice(start - begin, last - begin))
            else:
                here = np.flatnonzero((rows >= first) & (rows < end))
                for start in range(0, len(here), n_most):
                    places = here[start : start + n_most]
                    yield Part(shard, rows[places], places)


# --- what a shard does ---


@dataclass(slots=True)
class _Staged:
    """What one attempt adds on this shard."""

    n_parts: int
    number: int  # of the command before that which commits it
    # By number, as it came; and table, rows of the shard's own, values.
    parts: dict[int, tuple[bt.AddRows, tuple[str, Rows, Values]]]


@final
class RoundRows:
    """The tables of one shard, and what tasks of the present rounds have added.

    Args:
        layout: Of all shards.
        k: This one.
        number: Of the last command: tables may have changed by it.
    """

    def __init__(self, layout: Layout, k: int, *, number: int = 0) -> None:
        self._tables = Tables(layout)
        self._here = self._tables.on_shard(layout, k)
        self._staged: dict[int, _Staged] = {}  # by token
        self._changed = dict.fromkeys(self._here, number)  # the last command that did

    @property
    def staged(self) -> list[bt.AddRows]:
        """All that is staged, as it came."""
        return [one for task in self._staged.values() for one, _ in task.parts.values()]

    def take(self, vector: Vector, message: bt.TakeRows) -> Vector:
        """Return the elements of these rows, which may share memory with the vector."""
        rows = self._own(message.table, message.start, message.stop, message.rows)
        return self._view(vector, message.table)[rows].reshape(-1)

    def is_known(self, message: bt.TakeRows) -> bool:
        """Return whether these rows have not changed since a worker has taken them."""
        changed = self._changed.get(message.table, 0)
        return 0 < changed <= message.known <= message.number

    def stage(self, message: bt.AddRows) -> bool:
        """Stage a part and return True, or False if it is here already.

        RemoteProtocolError if it does not fit.
        """
        n = message.n_rows
        values = cast("Values", message.values)
        rows = None if not n else values[:n].astype(np.int64)
        own = self._own(message.table, message.start, message.stop, rows)
        n_rows = len(own) if not isinstance(own, slice) else own.stop - own.start
        width = self._tables.widths[message.table]
        if values.dtype != np.float64 or len(values) - n != n_rows * width:
            raise RemoteProtocolError(
                f"{len(values) - n} numbers of {values.dtype} for {n_rows} rows of {width}"
            )
        new = _Staged(message.n_parts, message.number, {})
        staged = self._staged.setdefault(message.token, new)
        if message.n_parts != staged.n_parts or not message.part < staged.n_parts:
            raise RemoteProtocolError(f"part {message.part} of {staged.n_parts}")
        shaped = values[n:].reshape(n_rows, *self._tables.shapes[message.table][1:])
        part = message, (message.table, own, shaped)
        return staged.parts.setdefault(message.part, part) is part

    def check(self, tokens: Sequence[int]) -> None:
        """Raise RemoteProtocolError if a part of what these attempts add is not here."""
        for token in tokens:
            staged = self._staged.get(token)
            if staged is not None and len(staged.parts) < staged.n_parts:
                raise RemoteProtocolError(
                    f"{len(staged.parts)} of {staged.n_parts} parts of attempt {token} are here"
                )

    def commit(
        self, vector: Vector, tokens: Sequence[int], pulls: Mapping[str, Pull], *, number: int
    ) -> None:
        """Add what these attempts have staged, in their order, by this command."""
        adds: dict[str, list[tuple[Rows, Values]]] = {}
        for token in tokens:
            staged = self._staged.get(token)
            for _, (_, part) in sorted(() if staged is None else staged.parts.items()):
                table, rows, values = part
                adds.setdefault(table, []).append((rows, values))
        for table, those in adds.items():
            add_up(self._view(vector, table), those, pulls.get(table, Pull()))
            self._changed[table] = number

    def drop(self, *, before: int) -> None:
        """Drop what is staged for rounds that commands up to this one commit."""
        self._staged = {token: one for token, one in self._staged.items() if one.number >= before}

    def _view(self, vector: Vector, table: str) -> Values:
        first, end, offset = self._here[table]
        n_elements = (end - first) * self._tables.widths[table]
        shape = (end - first, *self._tables.shapes[table][1:])
        return cast("Values", vector[offset : offset + n_elements].reshape(shape))

    def _own(self, table: str, start: int, stop: int, rows: Vector | None) -> Rows:
        """Return rows of a table as those of the part that is here."""
        first, end, _ = self._here.get(table, (0, 0, 0))
        if rows is None:
            if not first <= start <= stop <= end:
                raise RemoteProtocolError(f"rows {start} to {stop} of table {table!r} are not here")
            return slice(start - first, stop - first)
        if rows.dtype != np.int64 or (len(rows) and not first <= rows.min() <= rows.max() < end):
            raise RemoteProtocolError(f"some of {len(rows)} rows of table {table!r} are not here")
        return cast("NDArray[np.int64]", rows) - first


# --- a round ---


def add_up(table: Values, adds: Sequence[tuple[Rows, Values]], pull: Pull) -> None:
    """Make new rows of those that are added to: `pull` of the old ones and of the sums.

    Sums are made in the order given: a table in parts has the same bits.
    """
    given = [(_bounded(rows, len(table)), values) for rows, values in adds]
    spans = sorted({(rows.start, rows.stop) for rows, _ in given if isinstance(rows, slice)})
    if all(isinstance(rows, slice) for rows, _ in given) and all(
        stop <= start for (_, stop), (start, _) in pairwise(spans)
    ):  # the same, or apart, as most programs deal them: in a fraction of the time
        for start, stop in spans:
            span = slice(start, stop)
            first, *rest = [values for rows, values in given if rows == span]
            sums = first.copy() if rest else first
            for values in rest:
                sums += values
            table[span] = _pulled(table[span], sums, pull)
    elif len(given) == 1:
        rows, sums = given[0]
        table[rows] = _pulled(table[rows], sums, pull)
    else:
        indices = np.unique(np.concatenate([_indices(rows) for rows, _ in given]))
        sums = np.full((len(indices), *table.shape[1:]), -0.0)  # -0 + x is x, to the bit
        for rows, values in given:
            sums[np.searchsorted(indices, _indices(rows))] += values
        table[indices] = _pulled(table[indices], sums, pull)


def _pulled(rows: Values, sums: Values, pull: Pull) -> Values:
    match pull.function:
        case "add":
            return rows + sums
        case "divide":
            divisors = sums[:, 1] + pull.a
            return np.stack([sums[:, 0] / divisors, divisors], axis=1)


def _bounded(rows: Rows, n_rows: int) -> Rows:
    if not isinstance(rows, slice):
        return rows
    start, stop, _ = rows.indices(n_rows)
    return slice(start, stop)


def _indices(rows: Rows) -> NDArray[np.int64]:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
