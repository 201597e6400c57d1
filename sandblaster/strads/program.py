"""Programs of three functions: schedule, push, pull (STRADS: Kim et al., EuroSys 2016).

Not samples but variables of a model are dealt to those that compute:

    schedule    deals a round of tasks: which variables each block updates next. All tasks of a
                round see the same values, so they must not depend on each other by much (ST-1)
    push        computes, from one block of the data and the rows it takes, what to add to rows
    pull        makes new rows of the old ones and of the sums over all tasks of the round

The data are cut into blocks. Their number is of the program, and they decide what is computed;
which worker has which block changes no bit, since sums are added in the order of the tasks.

Variables are rows of named tables. `run` holds them in this process.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray


Values = NDArray[np.float64]
"""Rows of a table: (n_rows, n_columns), or (n_rows,) of a table without columns."""

Rows: TypeAlias = "NDArray[np.int64] | slice[int, int, None]"
"""Which rows of a table; none is named twice."""

Block = TypeVar("Block")
Argument = TypeVar("Argument")
Report = TypeVar("Report")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Generic[Argument]):
    """What one block computes in a round."""

    block: int
    argument: Argument  # what else `push` gets, such as the variables to update
    takes: Mapping[str, Rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed(Generic[Report]):
    """What a task has computed."""

    adds: Mapping[str, tuple[Rows, Values]]
    report: Report  # for `schedule`: numbers and changes of variables, never data


class Program(Protocol[Block, Argument, Report, Result_co]):
    """What is computed, and in which order. `tables` are the values at the start."""

    n_blocks: int
    tables: Mapping[str, Values]

    def load(self, block: int) -> Block:
        """Return this block of the data, with what its worker keeps from round to round."""
        ...

    def schedule(self) -> Generator[Sequence[Task[Argument]], Sequence[Report], Result_co]:
        """Deal rounds, each with at most one task per block; receive reports in their order."""
        ...

    def push(self, block: Block, argument: Argument, taken: Mapping[str, Values]) -> Pushed[Report]:
        """Compute one task. What was taken must not be changed."""
        ...

    def pull(self, table: str, rows: Values, sums: Values) -> Values:
        """Return the new rows of a table: most programs add the sums."""
        ...


def run(
    program: Program[Block, Argument, Report, Result_co],
    *,
    workers: int = 1,
    watch: Callable[[Sequence[Report]], object] | None = None,
) -> tuple[Result_co, Mapping[str, Values]]:
    """Run a program in so many threads; return what its schedule returns, and the tables.

    `watch` receives the reports of each round. The bits are the same for any number of workers.
    """
    tables = {name: values.copy() for name, values in program.tables.items()}
    read_only = {name: values.view() for name, values in tables.items()}
    for view in read_only.values():
        view.flags.writeable = False
    blocks: dict[int, Block] = {}

    def computed(task: Task[Argument]) -> Pushed[Report]:
        if task.block not in blocks:
            blocks[task.block] = program.load(task.block)
        # A slice is a view, and stays as it is: rows change when all tasks have been computed.
        taken = {name: read_only[name][rows] for name, rows in task.takes.items()}
        return program.push(blocks[task.block], task.argument, taken)

    steps, reports = program.schedule(), None
    with ThreadPoolExecutor(workers) as pool:
        while True:
            try:
                tasks = next(steps) if reports is None else steps.send(reports)
            except StopIteration as end:
                return cast("Result_co", end.value), tables
            pushed = list(pool.map(computed, tasks) if workers > 1 else map(computed, tasks))
            for name, table in tables.items():
                _commit(program, name, table, [one.adds.get(name) for one in pushed])
            reports = [one.report for one in pushed]
            if watch is not None:
                watch(reports)


def _commit(
    program: Program[Block, Argument, Report, Result_co],
    name: str,
    table: Values,
    adds: Sequence[tuple[Rows, Values] | None],
) -> None:
    given = [(_bounded(one[0], len(table)), one[1]) for one in adds if one is not None]
    spans = {(rows.start, rows.stop) for rows, _ in given if isinstance(rows, slice)}
    ordered = sorted(spans)
    if all(isinstance(rows, slice) for rows, _ in given) and all(
        stop <= start for (_, stop), (start, _) in pairwise(ordered)
    ):  # the same, or apart, as most programs deal them: in a fraction of the time
        for start, stop in ordered:
            span = slice(start, stop)
            first, *rest = [values for rows, values in given if rows == span]
            sums = first.copy() if rest else first
            for values in rest:
                sums += values
            table[span] = program.pull(name, table[span], sums)
    elif len(given) == 1:
        rows, sums = given[0]
        table[rows] = program.pull(name, table[rows], sums)
    else:
        indices = np.unique(np.concatenate([_indices(rows) for rows, _ in given]))
        sums = np.zeros((len(indices), *table.shape[1:]))
        for rows, values in given:
            sums[np.searchsorted(indices, _indices(rows))] += values
        table[indices] = program.pull(name, table[indices], sums)


def _bounded(rows: Rows, n_rows: int) -> Rows:
    if not isinstance(rows, slice):
        return rows
    start, stop, _ = rows.indices(n_rows)
    return slice(start, stop)


def _indices(rows: Rows) -> NDArray[np.int64]:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
