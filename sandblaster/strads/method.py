"""A program as a method of the coordinator: its scheduler.

Rounds become requests, marks iterations. What is saved is the program's own state, beside the
tables: a job goes on from there with the same bits.
"""

import math
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, cast, final

import msgspec
import numpy as np
from typing_extensions import override

from distbelief.core.errors import DistBeliefError, RestoreError
from distbelief.parameter_server.rows import Rows
from distbelief.parameter_server.savepoints import PARAMETERS
from sandblaster.optimizers import base
from sandblaster.optimizers.termination import Reason
from sandblaster.strads.columns import Ids
from sandblaster.strads.program import Flight, Mark, Program, Task, packed, unpacked


AnyProgram = Program[Any, Any, Any, object]  # type: ignore[explicit-any] # of any types of its own


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Rows that a task takes: [start, stop), or runs of rows that follow each other."""

    start: int
    stop: int
    firsts: Ids | None = None  # of each run
    ends: Ids | None = None

    @classmethod
    def of(cls, rows: Rows, n_rows: int) -> "Span":
        if isinstance(rows, slice):
            return cls(*rows.indices(n_rows)[:2])
        last = np.flatnonzero(np.diff(rows, append=-1) != 1)
        return cls(0, 0, rows[np.append(0, last[:-1] + 1)[: len(last)]], rows[last] + 1)

    @property
    def rows(self) -> Rows:
        if self.firsts is None or self.ends is None:
            return slice(self.start, self.stop)
        lengths = self.ends - self.firsts
        before = np.cumsum(lengths) - lengths
        return np.repeat(self.firsts - before, lengths) + np.arange(lengths.sum())


def task_content(task: Task[object], n_rows: "dict[str, int]") -> bytes:
    """Return a task as bytes; DistBeliefError if they are too many for a message."""
    takes = {name: Span.of(rows, n_rows[name]) for name, rows in task.takes.items()}
    content = packed((task.argument, takes))
    check_size(content, "task")
    return content


def check_size(content: bytes, what: str) -> None:
    if len(content) > base.N_BYTES_MAX:
        raise DistBeliefError(
            f"a {what} of {len(content):,} bytes is more than {base.N_BYTES_MAX:,}, which messages "
            "have room for: use more blocks, or `sandblaster.strads.program.run` in one process"
        )


@final
class _Counted(Iterator[tuple[tuple[int, bytes], ...]]):
    """Rounds as bytes, each made when it is asked for."""

    def __init__(self, rounds: Iterable[Sequence[Task[object]]], n_rows: dict[str, int]) -> None:
        self._rounds, self._n_rows = iter(rounds), n_rows
        self.n = 0

    @override
    def __next__(self) -> tuple[tuple[int, bytes], ...]:
        tasks = next(self._rounds)
        self.n += 1
        return tuple((task.block, task_content(task, self._n_rows)) for task in tasks)


@final
class Scheduled:
    """Runs a program that has `types`; `steps` are those of an optimizer."""

    def __init__(self, program: AnyProgram) -> None:
        self._program = program

    def steps(self, state: str | None = None) -> base.Steps[base.Result]:
        program, types = self._program, self._program.types
        assert types is not None
        iteration, n_rounds = 0, 0
        if state:
            iteration, saved = _restored(state, types.state)
            schedule = program.schedule(saved)
        else:
            schedule = program.schedule()
        n_rows = {name: len(values) for name, values in program.tables.items()}
        reports: list[object] = []
        may_move, step = True, next(schedule)
        while True:
            if isinstance(step, Mark):
                iteration += 1
                done = _iteration(step, iteration, n_rounds)
                stops = yield done
                if step.end is not None or (stops and step.state is not None):
                    reason = step.end or Reason.STOPPED
                    if not math.isfinite(step.objective):
                        reason = Reason.NOT_FINITE
                    return base.Result(reason=reason, **asdict(done))
                may_move, reports = may_move or step.state is not None, []
            else:
                flight = step if isinstance(step, Flight) else Flight(rounds=[step], staleness=0)
                counted = _Counted(flight.rounds, n_rows)
                # In a flight a block that moves would lack what it has kept since the first round.
                moves = may_move and flight is not step
                reply = yield base.Rounds(
                    rounds=counted,
                    pulls=program.pulls,
                    may_move=moves or not program.keeps_state,
                    staleness=flight.staleness,
                )
                n_rounds += counted.n
                contents = cast("tuple[bytes, ...]", reply)
                may_move = False
                reports = [unpacked(content, types.report) for content in contents]
            step = schedule.send(reports)


def _iteration(mark: Mark, iteration: int, n_rounds: int) -> base.IterationDone:
    state = ""
    if mark.state is not None:
        state = f"{iteration}:{b64encode(packed(mark.state)).decode()}"
    return base.IterationDone(
        iteration=iteration,
        n_evaluations=n_rounds,
        loss=mark.objective,
        gradient_norm=float("nan"),
        step_length=float("nan"),
        state=state,
        vectors=(PARAMETERS,),
        n_updates=mark.n_updates,
    )


def _restored(state: str, kind: object) -> tuple[int, object]:
    number, _, content = state.partition(":")
    try:
        return int(number), unpacked(b64decode(content), kind)
    except (ValueError, msgspec.MsgspecError) as error:
        raise RestoreError(
            f"the state of the program cannot be read ({error}): start again, with --from-scratch"
        ) from None
