"""Sparse linear models by scheduled coordinate descent: a program over blocks of columns.

    minimize over w, b    mean loss of y and X w + b, plus alpha |w|_1

    score       each block multiplies its columns with the gradient, and offers the variables
                that are nearest to leaving zero: the working set is of these and of all w_j that
                are not zero (ST-2; Massias, Gramfort & Salmon 2018)
    measure     one block computes loss, duality gap and held-out loss: the end of an alpha
    plan        with several blocks: one gathers the columns of the working set, and plans rounds
                (ST-1)
    descend     each block updates its variables of a round one after the other, on its own
                residual, and adds what it has changed to the predictor X w. A working set with so
                few entries that predictors take longer is updated by the block that gathered it

    close       of a path that keeps its best: one block returns to it, and notes the path

For squares and for the logistic loss, by the same quadratic bound (`losses`). No round raises the
objective (`plan`). Several alphas make a path: each begins at the solution of the one before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, TypeVar, cast, final

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from typing_extensions import override

from distbelief.core.errors import SettingError
from distbelief.parameter_server.rows import Rows, Values
from sandblaster.optimizers.termination import Reason
from sandblaster.strads import plan
from sandblaster.strads.columns import Columns, Csc, Ids, Mapped, Matrix, columns_of, cut, n_entries
from sandblaster.strads.kernels import Floats
from sandblaster.strads.losses import Loss, Squares
from sandblaster.strads.program import Mark, Program, Pushed, Steps, Task, Types, checksum


Schedule = Literal["priority", "round_robin"]

PREDICTOR: Final = "predictor"
INTERCEPT: Final = "intercept"
COEFFICIENTS: Final = "coefficients"
PATH: Final = "path"

_ALL: Final = slice(None)
_FIRST_SIZE: Final = 100  # of a working set
_TURN: Final = 64  # variables of each block that take their turn together
_N_PASSES_MAX: Final = 1000  # over one working set
_LEAST: Final = 1e-280  # of a loss: parts of smaller ones are lost
_N_LINEAR: Final = 5  # passes over one quadratic bound that is not the loss itself
_N_COMPARED_MAX: Final = 4096  # columns, and their entries: beyond, one block after the other
_N_ENTRIES_MAX: Final = 1 << 24
_N_OF_TASK: Final = 1 << 15  # variables: task and report are sent in one message each
_N_CLOSED: Final = _N_OF_TASK // 2  # of those that a path's end sets
_N_GATHERED: Final = 1 << 20  # entries: a pass over so few takes less than rounds of many blocks


class _Packed(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag=True):
    """Base of arguments and reports, which may be sent."""


class Score(_Packed, frozen=True):
    """Score the columns of a block, and offer some."""

    alpha: float
    n_offers: int
    checksum: int  # of y and held-out data: a host with other ones is refused
    # Places of coefficients that are not zero; None: so many that the table is taken.
    used: Ids | None


class Measure(_Packed, frozen=True):
    """Compute the objective, and the duality gap for the largest |x_j.v| of all blocks."""

    alpha: float
    largest: float


class Plan(_Packed, frozen=True):
    """Gather the columns of a working set, and plan the rounds of its variables."""

    ids: Ids
    blocks: Ids  # that have them
    before: Ids  # the round of each before, or -1


class Descend(_Packed, frozen=True):
    """Update these variables."""

    ids: Ids
    alpha: float
    n_passes: int
    enough: float  # the change of the gradient by the last pass that needs no other one
    leads: bool  # adds what is no block's own, and computes the loss
    gathered: bool = False  # the block gathered their columns: not all are its own


class Close(_Packed, frozen=True):
    """Set the coefficients to these, and note the path: (n_alphas, 4)."""

    ids: Ids
    values: Floats
    intercept: float
    path: Floats


Argument: TypeAlias = Score | Measure | Plan | Descend | Close


class Scored(_Packed, frozen=True):
    """The largest |x_j.v| of a block, and those at zero that are nearest to leaving it."""

    largest: float
    ids: Ids
    products: Floats  # |x_j.v|
    lengths: Floats  # |x_j|


class Measured(_Packed, frozen=True):
    """The state at the beginning of a round."""

    loss: float
    dual: float
    intercept: float
    held_out: float  # loss of the held-out samples; NaN without


class Planned(_Packed, frozen=True):
    """The round of each variable; None: one block updates all, which has few entries."""

    rounds: Ids | None


class Descended(_Packed, frozen=True):
    """New values, in the order of the task's variables."""

    values: Floats
    n_updates: int
    change: float
    loss: float  # before the round; NaN from all but one


Report: TypeAlias = Scored | Measured | Planned | Descended


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """What has been found for one alpha."""

    alpha: float
    ids: Ids = field(repr=False)  # of coefficients that are not zero
    values: Floats = field(repr=False)
    intercept: float
    objective: float
    gap: float  # the objective is above its minimum by no more
    converged: bool
    n_iterations: int  # times all columns were scored
    n_updates: int  # of single variables
    n_rounds: int
    held_out: float
    objectives: Floats = field(repr=False)  # before each round
    updates: Ids = field(repr=False)  # and the updates until then


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathered:
    """Columns of any blocks, with those of held-out samples."""

    ids: Ids
    columns: Columns
    held_out: "Csc | None"


@final
@dataclass(slots=True)
class Block:
    """What the worker of one block holds."""

    columns: Columns
    held_out: "Matrix | None"  # (n_held_out, n_columns)
    gathered: Gathered | None = None  # last


T = TypeVar("T")
Numbers = TypeVar("Numbers", Floats, Ids)
_Steps: TypeAlias = "Steps[Argument, Report, T]"


@final
class Descent(Program[Block, Argument, Report, Sequence[Solution]]):
    """Solutions for alphas, from the first to the last.

    Args:
        x: (n_samples, n_features), by `checked_matrix`, or in a file.
        y: (n_samples,)
        loss: `Squares` or `Logistic`.
        alphas: Weights of the penalty; or with `relative`, shares of the smallest one with which
            all coefficients are 0.
        n_blocks: Groups of columns that are updated at the same time.
        centred: Whether there is an intercept.
        tolerance: Duality gap at which an alpha is solved, relative to the loss of a constant.
        max_iterations: Bound on scorings for an alpha.
        schedule: "priority": working sets. "round_robin": all variables in turn.
        interference: Bound of I_j (`plan`); infinity: dependencies do not count, and the
            objective may rise.
        gather: Entries per sample up to which a working set is updated by one block, as is any
            with at most 2^20 entries; 0: none is.
        start: Coefficients and intercept of the start; None: 0, and the best constant.
        held_out: Samples and targets that are only evaluated.
        patience: After so many alphas without a better held-out loss the path ends.
        keeps_best: Whether the tables end at the solution with the least held-out loss, with one
            more of alpha, objective, gap and held-out loss of each.
    """

    def __init__(  # noqa: PLR0913 -- one problem, and how it is solved
        self,
        x: "Matrix | Mapped",
        y: Floats,
        loss: Loss,
        *,
        alphas: Sequence[float],
        relative: bool = False,
        n_blocks: int = 1,
        centred: bool = True,
        tolerance: float = 1e-4,
        max_iterations: int = 100,
        schedule: Schedule = "priority",
        interference: float = 0.05,
        gather: float = 4.0,
        start: tuple[Floats, float] | None = None,
        held_out: "tuple[Matrix, Floats] | None" = None,
        patience: int | None = None,
        keeps_best: bool = False,
    ) -> None:
        n_samples, n_features = x.shape
        if not 1 <= n_blocks <= n_features:
            raise SettingError(
                f"n_blocks is {n_blocks} for {n_features} columns; use 1 to {n_features}"
            )
        if not interference > 0.0:
            raise SettingError(
                f"interference is {interference}; use a number above 0, such as 0.05"
            )
        self.n_blocks = n_blocks
        self._x, self._y, self._loss, self._held_out = x, y, loss, held_out
        self._alphas, self._centred, self._patience = alphas, centred, patience
        self._relative, self._keeps_best = relative, keeps_best
        self._max_iterations, self._schedule = max_iterations, schedule
        self._interference = interference
        self._gather_max = max(gather * n_samples, _N_GATHERED) if gather else 0.0
        # How many elements of dense columns are not zero only their worker knows.
        self._is_dense = isinstance(x, np.ndarray) or (isinstance(x, Mapped) and x.starts is None)
        self._n_samples = n_samples
        self.types = Types(argument=Argument, report=Report, state=State)
        self.checksum = checksum(y, *(held_out or ()))
        self.data = x.arrays if isinstance(x, Mapped) else [x]  # a worker reads a part
        self.bounds = ("max_iter", "patience", "tol")
        self._which = cut(n_features, n_blocks)
        self._ends = np.array([which.stop for which in self._which])
        constant = loss.constant(y, centred=centred)
        with np.errstate(over="ignore"):
            scale = loss.value(y, np.full(n_samples, constant))
        if not (_LEAST <= scale < math.inf or (y == y[0]).all()):
            what = "large" if scale > 1.0 else "small"
            raise SettingError(f"the squares of y are too {what} for float64: scale y")
        self._gap_max = tolerance * scale
        coefficients, intercept = (np.zeros(n_features), constant) if start is None else start
        matrices = [x] if held_out is None else [x, held_out[0]]
        used = np.flatnonzero(coefficients)
        parts = [np.asarray(columns_of(one, used) @ coefficients[used]) for one in matrices]
        tables = {
            PREDICTOR: np.concatenate(parts),
            INTERCEPT: np.array([intercept]),
            COEFFICIENTS: coefficients,
        }
        if keeps_best:
            tables[PATH] = np.zeros((len(alphas), 4))
        self.tables: Mapping[str, Values] = tables

    @override
    def load(self, block: int) -> Block:
        which = self._which[block]
        held = None
        if self._held_out is not None:
            held = self._held_out[0][:, which.start : which.stop]
        return Block(Columns.of(self._x, which, centred=self._centred), held)

    # --- at the scheduler ---

    @override
    def schedule(self, state: object = None) -> "_Steps[Sequence[Solution]]":
        scheduler = State.at(self.tables[COEFFICIENTS])
        if state is not None:
            scheduler = cast("State", state)
        solutions, last = scheduler.solutions, scheduler
        if scheduler.is_closed and not self._is_over(solutions):  # there is more patience
            yield from self._close(scheduler, solutions[-1])
            scheduler.is_closed = False
            scheduler.begin()
        if self._relative and not scheduler.unit:
            scored = yield self._scoring(scheduler.used, 1.0, n_offers=1)
            largest = max(one.largest for one in scored if isinstance(one, Scored))
            if not largest > 0.0:
                raise SettingError("no column varies with the targets; give others")
            scheduler.unit = largest / self._n_samples
        while not self._is_over(solutions):
            alpha = self._alphas[len(solutions)] * (scheduler.unit or 1.0)
            solution = yield from self._solve(scheduler, alpha)
            # From before it has ended: other bounds let a job go on there.
            n = scheduler.n_iterations - 1  # it scores again
            last = replace(scheduler, solutions=[*solutions], n_iterations=n)
            solutions.append(solution)
            scheduler.begin()
        found = solutions[-1]
        if self._keeps_best:
            # From here on the state is that of the best one, as the tables are.
            found = min(solutions, key=lambda one: one.held_out)
            yield from self._close(scheduler, found)
            last, scheduler.is_closed = scheduler, True
        end = Reason.CONVERGED_GAP if found.converged else Reason.MAX_ITERATIONS
        if len(solutions) < len(self._alphas):
            end = Reason.HELD_OUT
        yield self._mark(last, found.objective, end)
        return solutions

    def _close(self, scheduler: "State", best: Solution) -> "_Steps[None]":
        whole = scheduler.close(best, self.tables[PATH].shape)
        for first in range(0, max(len(whole.ids), 1), _N_CLOSED):
            some = slice(first, first + _N_CLOSED)
            yield [
                self._task(
                    0,
                    msgspec.structs.replace(whole, ids=whole.ids[some], values=whole.values[some]),
                )
            ]

    def _is_over(self, solutions: "Sequence[Solution]") -> bool:
        best = min(range(len(solutions)), key=lambda k: solutions[k].held_out, default=0)
        patience = math.inf if self._patience is None else self._patience
        return len(solutions) == len(self._alphas) or len(solutions) - 1 - best >= patience

    def _mark(self, scheduler: "State", objective: float, end: Reason | None = None) -> Mark:
        before = sum(one.n_updates for one in scheduler.solutions)
        return Mark(
            objective=objective, n_updates=before + scheduler.n_updates, state=scheduler, end=end
        )

    def _solve(self, scheduler: "State", alpha: float) -> "_Steps[Solution]":
        while True:
            n_used = len(scheduler.used)
            size = max(_FIRST_SIZE, 2 * n_used)
            n_offers = min(size - n_used, _N_OF_TASK)
            scored = yield self._scoring(scheduler.used, alpha, n_offers=n_offers)
            largest = max(one.largest for one in scored if isinstance(one, Scored))
            (measured,) = yield [self._task(0, Measure(alpha=alpha, largest=largest))]
            assert isinstance(measured, Measured)
            penalty = alpha * float(np.abs(scheduler.values).sum())
            objective = measured.loss + penalty
            # From here a job goes on by scoring again: that changes nothing.
            yield self._mark(scheduler, objective)
            scheduler.n_iterations += 1
            scheduler.best_dual = max(scheduler.best_dual, measured.dual)
            gap = objective - scheduler.best_dual
            solved = bool(gap <= self._gap_max)
            if solved or not gap < math.inf or scheduler.n_iterations >= self._max_iterations:
                return scheduler.solution(alpha, measured, objective, gap, converged=solved)
            tightness = 0.1
            if gap >= 0.5 * scheduler.last_gap:
                tightness = max(0.1 * scheduler.tightness, 1e-9)
            scheduler.tightness, scheduler.last_gap = tightness, gap
            enough = tightness * alpha * min(1.0, gap / penalty if penalty else 1.0)
            if self._schedule == "priority":
                scale = max(largest, alpha * self._n_samples)
                ids = scheduler.working_set(scored, size, scale)
                values = yield from self._descend(scheduler, ids, alpha, enough)
            else:
                turns = list[tuple[Ids, Floats]]()
                for first in range(0, len(self._which[-1]), self._turn):
                    turn = [which[first : first + self._turn] for which in self._which]
                    ids = np.concatenate([np.arange(one.start, one.stop) for one in turn])
                    turns.append((ids, (yield from self._descend(scheduler, ids, alpha, math.inf))))
                ids, values = (np.concatenate(parts) for parts in zip(*turns, strict=True))
                order = np.argsort(ids)
                ids, values = ids[order], values[order]
            scheduler.used, scheduler.values = ids[values != 0.0], values[values != 0.0]

    @property
    def _turn(self) -> int:
        alone = self.n_blocks == 1 or self._interference == math.inf
        return len(self._which[-1]) if alone else _TURN

    def _descend(
        self, scheduler: "State", ids: Ids, alpha: float, enough: float
    ) -> "_Steps[Floats]":
        """Make passes over a working set, in rounds, until they change as little as `enough`.

        Return its new values.
        """
        blocks = np.searchsorted(self._ends, ids, side="right")
        values = _looked_up(ids, scheduler.used, scheduler.values, 0.0)
        rounds, gathered = np.zeros(len(ids), np.int64), False
        if len(np.unique(blocks)) > 1 and self._interference < math.inf:
            may_gather = self._gather_max > 0.0 and not self._is_dense
            is_small = may_gather and n_entries(self._x, ids) <= self._gather_max
            if is_small and len(ids) <= _N_COMPARED_MAX:  # no need to ask
                blocks, gathered = np.zeros_like(blocks), True
            elif len(ids) <= _N_COMPARED_MAX:
                before = _looked_up(ids, scheduler.planned, scheduler.rounds, -1)
                plan = Plan(ids=ids, blocks=blocks, before=before)
                (planned,) = yield [self._task(0, plan)]
                assert isinstance(planned, Planned)
                if planned.rounds is None:
                    blocks, gathered = np.zeros_like(blocks), True
                else:
                    rounds = planned.rounds
                    scheduler.planned, scheduler.rounds = ids, rounds
            else:
                rounds = blocks
        groups = [np.flatnonzero(rounds == one) for one in np.unique(rounds)]
        groups = [some for group in groups for some in _few(group, blocks[group])]
        is_alone = len(groups) == 1 == len(np.unique(blocks)) and self._schedule == "priority"
        n_passes = _N_PASSES_MAX if is_alone else 1
        for _ in range(_N_PASSES_MAX // n_passes):
            change = 0.0
            for group in groups:
                parts = [group[blocks[group] == block] for block in np.unique(blocks[group])]
                reports = yield [
                    self._task(
                        blocks[part[0]],
                        Descend(
                            ids=ids[part],
                            alpha=alpha,
                            n_passes=n_passes,
                            enough=enough,
                            leads=part is parts[0],
                            gathered=gathered,
                        ),
                    )
                    for part in parts
                ]
                change = max(change, scheduler.note(values, parts, reports))
            if change <= enough:
                break
        return values

    def _scoring(self, used: Ids, alpha: float, *, n_offers: int) -> list[Task[Argument]]:
        tasks: list[Task[Argument]] = []
        for block, which in enumerate(self._which):
            first, end = np.searchsorted(used, [which.start, which.stop])
            own = used[first:end] - which.start
            score = Score(
                alpha=alpha,
                n_offers=n_offers,
                checksum=self.checksum,
                used=own if len(own) <= _N_OF_TASK else None,
            )
            tasks.append(self._task(block, score))
        return tasks

    def _task(self, block: int | np.int64, argument: Argument) -> Task[Argument]:
        takes: dict[str, Rows] = {PREDICTOR: _ALL, INTERCEPT: _ALL}
        if isinstance(argument, Plan):
            takes = {}
        if isinstance(argument, Score) and argument.used is None:
            which = self._which[block]
            takes[COEFFICIENTS] = slice(which.start, which.stop)
        if isinstance(argument, Descend | Close):
            takes[COEFFICIENTS] = argument.ids
        if isinstance(argument, Close):
            takes[PATH] = _ALL
        return Task(block=int(block), argument=argument, takes=takes)

    # --- at a worker ---

    @override
    def push(self, block: Block, argument: Argument, taken: Mapping[str, Values]) -> Pushed[Report]:
        columns = block.columns
        if isinstance(argument, Plan):
            return Pushed(adds={}, report=self._planned(block, argument))
        f = taken[PREDICTOR] + taken[INTERCEPT][0]
        match argument:
            case Score():
                is_used = np.zeros(len(columns.norms), np.bool_)
                used = argument.used
                is_used[np.flatnonzero(taken[COEFFICIENTS]) if used is None else used] = True
                scored = self._score(columns, argument, f[: self._n_samples], is_used)
                return Pushed(adds={}, report=scored)
            case Measure():
                return Pushed(
                    adds={}, report=self._measure(argument, f, float(taken[INTERCEPT][0]))
                )
            case Close():
                return Pushed(adds=self._closed(argument, taken), report=Planned(rounds=None))
            case Descend():
                return self._update(block, argument, f[: self._n_samples], taken[COEFFICIENTS])

    def _closed(
        self, argument: Close, taken: Mapping[str, Values]
    ) -> "dict[str, tuple[Rows, Values]]":
        ids, changes = argument.ids, argument.values - taken[COEFFICIENTS]
        matrices = [self._x, *([] if self._held_out is None else [self._held_out[0]])]
        parts = [np.asarray(columns_of(one, ids) @ changes) for one in matrices]
        return {
            PREDICTOR: (_ALL, np.concatenate(parts)),
            INTERCEPT: (_ALL, argument.intercept - taken[INTERCEPT]),
            COEFFICIENTS: (ids, changes),
            PATH: (_ALL, argument.path - taken[PATH]),
        }

    def _planned(self, block: Block, argument: Plan) -> Planned:
        ids, x = argument.ids, self._x
        if not isinstance(x, np.ndarray) and n_entries(x, ids) > _N_ENTRIES_MAX:
            return Planned(rounds=argument.blocks)
        columns = self._gathered(block, ids).columns
        n_gathered = cast("Csc", columns.matrix).nnz
        if n_gathered > _N_ENTRIES_MAX:
            return Planned(rounds=argument.blocks)
        if n_gathered <= self._gather_max:
            return Planned(rounds=None)
        sizes = plan.correlations(columns)
        bound = self._interference
        return Planned(rounds=plan.rounds(sizes, argument.blocks, bound, argument.before))

    def _gathered(self, block: Block, ids: Ids) -> Gathered:
        known = block.gathered
        if known is None or not np.array_equal(known.ids, ids):
            all_of_them = np.arange(len(ids))
            some = columns_of(self._x, ids)
            columns = Columns.of(some, range(len(ids)), centred=self._centred)
            known = block.gathered = Gathered(
                ids=ids,
                columns=columns.some(all_of_them),
                held_out=None
                if self._held_out is None
                else sparse.csc_array(self._held_out[0][:, ids]),
            )
        return known

    def _score(
        self, columns: Columns, argument: Score, f: Floats, is_used: "NDArray[np.bool_]"
    ) -> Scored:
        if argument.checksum != self.checksum:
            raise SettingError("y or held-out data are others here: give all hosts the same files")
        vector = self._loss.dual_vector(self._y, f, centred=self._centred)
        sizes = np.abs(columns.products(vector))
        sizes[columns.norms == 0.0] = 0.0
        largest = float(sizes.max())
        lengths = np.sqrt(columns.norms)
        distances = _distances(sizes, lengths, max(largest, argument.alpha * self._n_samples))
        distances[is_used] = np.inf
        n = min(argument.n_offers, len(sizes))
        offered = np.argpartition(distances, n - 1)[:n]
        offered = np.sort(offered[distances[offered] < np.inf])
        return Scored(
            largest=largest,
            ids=offered + columns.first,
            products=sizes[offered],
            lengths=lengths[offered],
        )

    def _measure(self, argument: Measure, f: Floats, intercept: float) -> Measured:
        loss, (f, held_out) = self._loss, np.split(f, [self._n_samples])
        vector = loss.dual_vector(self._y, f, centred=self._centred)
        bound = argument.alpha * self._n_samples
        most = bound / argument.largest if argument.largest else math.inf
        return Measured(
            loss=loss.value(self._y, f),
            dual=loss.dual_value(self._y, vector, most),
            intercept=intercept,
            held_out=loss.value(self._held_out[1], held_out) if self._held_out else math.nan,
        )

    def _update(self, block: Block, argument: Descend, f: Floats, old: Values) -> Pushed[Report]:
        loss, values = self._loss, old.copy()
        columns, held_out = block.columns, block.held_out
        places = argument.ids - columns.first
        if argument.gathered:
            gathered = self._gathered(block, argument.ids)
            columns, held_out, places = gathered.columns, gathered.held_out, np.arange(len(places))
        unit = self._n_samples / loss.curvature  # of gradients here, in those of the mean loss
        # The bound of squares is the loss itself; another one is soon worth renewing.
        at_once = argument.n_passes if isinstance(loss, Squares) else _N_LINEAR
        predictor, intercept = np.zeros(self._n_samples), 0.0  # what is added
        n_done = 0
        while True:
            before = loss.residual(self._y, f + predictor + intercept if n_done else f)
            after = before.copy()
            mean = float(before.mean()) if self._centred else 0.0
            n, shift, most = columns.descend(
                places,
                values,
                after,
                mean,
                threshold=argument.alpha * unit,
                n_passes=min(at_once, argument.n_passes - n_done),
                enough=argument.enough * unit,
            )
            # All blocks see the same mean, and one adds it; the rest is by own columns.
            intercept += shift if argument.leads or n_done else shift - mean
            predictor += before - after
            n_done += n
            change = most / unit
            if n_done >= argument.n_passes or change <= argument.enough:
                break
        changes = values - old
        if held_out is not None:
            predictor = np.concatenate([predictor, held_out[:, places] @ changes])
        changed = np.flatnonzero(predictor)
        rows: Rows = changed if 2 * len(changed) < len(predictor) else _ALL
        report = Descended(
            values=old + changes,  # as in the table, to the bit
            n_updates=n_done * len(values),
            change=change,
            loss=loss.value(self._y, f) if argument.leads else math.nan,
        )
        return Pushed(
            adds={
                PREDICTOR: (rows, predictor[rows]),
                INTERCEPT: (_ALL, np.array([intercept])),
                COEFFICIENTS: (argument.ids, changes),
            },
            report=report,
        )


def _few(group: Ids, blocks: Ids) -> list[Ids]:
    """Return the group in parts: a task has room for so many variables of a block."""
    counts = np.bincount(blocks)
    if counts.max() <= _N_OF_TASK:
        return [group]
    part = np.empty_like(group)
    starts = np.cumsum(counts) - counts
    part[np.argsort(blocks, kind="stable")] = np.arange(len(group)) - np.repeat(starts, counts)
    part //= _N_OF_TASK
    return [group[part == k] for k in range(part.max() + 1)]


def _looked_up(ids: Ids, keys: Ids, values: Numbers, otherwise: float) -> Numbers:
    """Return the values of some ids, by keys in order."""
    found = np.full(len(ids), otherwise, values.dtype)
    if len(keys):
        places = np.minimum(np.searchsorted(keys, ids), len(keys) - 1)
        met = keys[places] == ids
        found[met] = values[places[met]]
    return found


def _distances(products: Floats, lengths: Floats, scale: float) -> Floats:
    """Return how far the dual point may move until each column reaches its bound."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(lengths > 0.0, (scale - products) / lengths, np.inf)


@final
@dataclass(slots=True, kw_only=True, eq=False)
class State:
    """What the scheduler knows: coefficients, rounds and counts, and nothing of the data."""

    used: Ids  # of coefficients that are not zero
    values: Floats
    planned: Ids = field(default_factory=lambda: np.zeros(0, np.int64))  # the last working set
    rounds: Ids = field(default_factory=lambda: np.zeros(0, np.int64))  # of these
    solutions: list[Solution] = field(default_factory=list)
    unit: float = 0.0  # of alphas that are relative
    # Of the present alpha.
    n_iterations: int = 0
    n_updates: int = 0
    penalty: float = 0.0
    losses: list[tuple[float, float, int]] = field(default_factory=list)
    best_dual: float = -math.inf
    last_gap: float = math.inf
    tightness: float = 0.1
    is_closed: bool = False  # tables are those of the best solution, not of the last

    @classmethod
    def at(cls, coefficients: Floats) -> "State":
        used = np.flatnonzero(coefficients)
        state = cls(used=used, values=coefficients[used])
        state.begin()
        return state

    def begin(self) -> None:
        """Begin an alpha."""
        self.n_iterations = self.n_updates = 0
        self.penalty = float(np.abs(self.values).sum())
        self.losses = []
        self.best_dual, self.last_gap, self.tightness = -math.inf, math.inf, 0.1

    def close(self, best: Solution, shape: tuple[int, ...]) -> Close:
        """Return to a solution; the path is what is known of all, with 0 for alphas not tried."""
        path = np.zeros(shape)
        rows = [(one.alpha, one.objective, one.gap, one.held_out) for one in self.solutions]
        path[: len(rows)] = rows
        ids = np.union1d(self.used, best.ids)
        self.used, self.values = best.ids, best.values
        wanted = _looked_up(ids, self.used, self.values, 0.0)
        return Close(ids=ids, values=wanted, intercept=best.intercept, path=path)

    def working_set(self, scored: Sequence[Report], size: int, scale: float) -> Ids:
        """Return all that are used, and the nearest others; in order of their indices."""
        offers = [one for one in scored if isinstance(one, Scored)]
        ids = np.concatenate([one.ids for one in offers])
        products = np.concatenate([one.products for one in offers])
        lengths = np.concatenate([one.lengths for one in offers])
        distances = _distances(products, lengths, scale)
        n = max(size - len(self.used), 0)
        if n < len(ids):  # sorting all of them takes longer
            few = distances <= np.partition(distances, n)[n]
            ids, distances = ids[few], distances[few]
        nearest = ids[np.lexsort((ids, distances))][:n]
        return np.sort(np.concatenate([self.used, nearest]))

    def note(self, values: Floats, parts: Sequence[Ids], reports: Sequence[Report]) -> float:
        """Note the new values of a round, at these places of a working set.

        Return the largest change of a gradient.
        """
        done = [one for one in reports if isinstance(one, Descended)]
        self.losses.append((done[0].loss, self.penalty, self.n_updates))
        for part, one in zip(parts, done, strict=True):
            self.penalty += float(np.abs(one.values).sum() - np.abs(values[part]).sum())
            values[part] = one.values
            self.n_updates += one.n_updates
        return max(one.change for one in done)

    def solution(
        self, alpha: float, measured: Measured, objective: float, gap: float, *, converged: bool
    ) -> Solution:
        losses, penalties, updates = np.array([*self.losses, (np.nan,) * 3]).T[:, :-1]
        return Solution(
            alpha=alpha,
            ids=self.used,
            values=self.values,
            intercept=measured.intercept,
            objective=objective,
            gap=gap,
            converged=converged,
            n_iterations=self.n_iterations,
            n_updates=self.n_updates,
            n_rounds=len(self.losses),
            held_out=measured.held_out,
            objectives=losses + alpha * penalties,
            updates=updates.astype(np.int64),
        )
