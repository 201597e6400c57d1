"""Matrix factorization by coordinate descent, some ranks at a time (ST-5; CCD++: Yu et al. 2012).

    minimize over U, V   sum over entries of w (t - u.v)^2 + whole * sum over all pairs of (u.v)^2
                         + regularization (|U|^2 + |V|^2)

Ratings have t = rating, w = 1, whole = 0. Implicit feedback r (Hu, Koren and Volinsky 2008), where
a pair without an entry is a 0 of weight 1 and one with an entry a 1 of weight c = 1 + strength r,
is the same problem, up to a constant: w = c - 1, t = c / (c - 1), whole = 1.

Rows are cut into blocks, ranks into groups. The first round of a group solves for all its u: each
block for those of its own rows, which do not depend on each other given the rest. Each round then
updates one v_f: blocks add up what it follows from, given those before, and `pull` divides. So
entries, and all other ranks, are read once for a group. With groups of one rank it is CCD++. A
row's bias is a rank whose v is held at 1; a column's one, whose u is.

Blocks keep residuals, and what they take of v. At every fourth pass they begin anew, from tables,
and where a run that has ended goes on with other bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeAlias, cast, final

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from typing_extensions import override

from distbelief.core.errors import SettingError
from distbelief.parameter_server.rows import Rows, Values
from distbelief.protocol.vector_commands import Pull
from sandblaster.optimizers.termination import Reason
from sandblaster.strads.columns import check_copy, check_width, checked_table, of_sklearn
from sandblaster.strads.estimator import (
    Estimator,
    blocks_of,
    check_numbers,
    check_workers,
    checked_entries,
)
from sandblaster.strads.factor_kernel import N_SUMS, PAIRS, TOGETHER, stepper, subtracter
from sandblaster.strads.program import Mark, Program, Pushed, Steps, Task, Types, checksum, run


Matrix: TypeAlias = "sparse.csr_array[np.float64]"
Report: TypeAlias = Values
"""(4,): the block's part of the objective; of |V|^2; of held-out errors; their number."""

History: TypeAlias = list[tuple[float, float]]

_N_BIASES: Final = 2  # ranks: of rows, then of columns
_ANEW_EVERY: Final = 4  # passes
_ROUNDING: Final = 1e-9  # by which the objective may rise, as a share of that of no factors
_WEAK: Final = 1e-9  # weights of feedback whose targets, of their inverse size, hide the objective
_THOSE: Final = tuple(np.transpose(PAIRS))  # of a matrix


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Update a rank; None: evaluate."""

    rank: int | None
    before: int | None = None  # the rank whose v has changed since
    anew: bool = False  # from all of the tables
    checksum: int = 0  # of the data: a host with other ones is refused


@final
@dataclass(slots=True, eq=False)
class Block:
    """Some rows of the matrix."""

    first: int  # its rows, in the whole
    starts: NDArray[np.int64]  # (n_rows + 1,) of rows among its entries
    columns: NDArray[np.int32]  # (n_entries,)
    targets: Values  # (n_entries,)
    residuals: Values  # (n_entries,) w (t - u.v)
    weights: Values  # (n_entries,)
    u: Values  # (n_ranks, n_rows)
    v: Values  # (n_ranks, n_columns): as taken last
    held_out: Matrix
    # Of the present group:
    u_of: Values  # (n_rows, 8)
    changes: Values  # (n_rows, 8) of its u
    moved: Values  # (n_columns, 8) of its v: not yet in the residuals
    sums: Values  # (44, n_columns), as `step` returns them, of all pairs


@final
@dataclass(kw_only=True, eq=False)
class Factors(Program[Block, Turn, Report, History]):
    """Factors of a matrix. Its tables hold one rank after the other.

    "rows" are u, (n_ranks * n_rows,); "columns" v, and what each was divided by:
    (n_ranks * n_columns, 2). `schedule` returns objective and held-out error after each pass.

    Args:
        mean: What was taken from ratings; 0 of feedback.
        targets, weights: t and w: (n_rows, n_columns), canonical, of the same entries.
        whole: Weight of all pairs.
        regularization: Above 0.
        n_ranks: With those of biases, which come first.
        biases: Whether there are any.
        seed: Of the first values of v; u is 0.
        held_out: Entries that are only evaluated; may be none. Their error is the mean square of
            t - u.v, or with `whole` the mean share of columns with a larger u.v.

        n_together: Ranks of a group: 1 to 8.

    All others as those of the estimator.
    """

    mean: float
    targets: Matrix
    weights: Matrix
    whole: float
    regularization: float
    n_ranks: int
    biases: bool
    seed: int
    n_blocks: int
    max_iter: int
    tol: float
    held_out: Matrix
    patience: int
    n_together: int = TOGETHER
    tables: Mapping[str, Values] = field(init=False)

    def __post_init__(self) -> None:
        n_rows, n_columns = self.targets.shape
        with np.errstate(over="ignore"):  # then the factors are not finite
            self._most = float((self.weights.data * self.targets.data**2).sum())
        # Which u and v are free: those of biases are not on the other side.
        self._free = np.ones((2, self.n_ranks), bool)
        u, v = np.zeros((self.n_ranks, n_rows)), np.zeros((self.n_ranks, n_columns, 2))
        v[..., 0] = np.random.default_rng(self.seed).standard_normal((self.n_ranks, n_columns)) / 10
        if self.biases:
            self._free[[0, 1], [1, 0]] = False
            u[1], v[:_N_BIASES, :, 0] = 1, [[1], [0]]
        self.tables = {"rows": u.ravel(), "columns": v.reshape(-1, 2)}
        self.pulls = {"columns": Pull("divide", self.regularization)}
        self.types = Types(argument=Turn, report=Report, state=History)
        self.bounds = ("max_iter", "patience", "tol")
        self.keeps_state = True
        self.checksum = checksum(self.targets, self.held_out)  # weights follow
        ends = self.targets.indptr[1:].astype(np.int64)
        shares = np.arange(self.n_blocks + 1) * (ends[-1] / self.n_blocks)
        self._ends = np.searchsorted(ends, shares)
        self._ends[[0, -1]] = 0, n_rows

    def start_at(self, tables: Mapping[str, Values]) -> None:
        """Begin at other factors; SettingError if they are not of such a matrix, and as many."""
        u, v = (tables.get(name, np.zeros(0)) for name in self.tables)
        fits = [u.shape, v.shape] == [values.shape for values in self.tables.values()]
        if fits and self.biases:  # what is held stays what it is
            n_rows, n_columns = self.targets.shape
            fits = bool((u[n_rows : 2 * n_rows] == 1).all() and (v[:n_columns, 0] == 1).all())
        if not fits or not (np.isfinite(u).all() and np.isfinite(v).all()):
            raise SettingError(
                f"the factors to start at are not of {self.n_ranks} ranks, biases among them, of "
                f"{self.targets.shape} rows and columns: start without them"
            )
        self.tables = {"rows": u, "columns": v}

    @override
    def load(self, block: int) -> Block:
        first, end = self._ends[block : block + 2]
        targets, weights = self.targets[first:end], self.weights[first:end]
        n_columns = targets.shape[1]
        of_rows = np.zeros((2, end - first, TOGETHER))
        return Block(
            first=int(first),
            starts=targets.indptr.astype(np.int64),
            columns=targets.indices.astype(np.int32),
            targets=targets.data,
            residuals=np.zeros_like(targets.data),
            weights=weights.data,
            u=np.zeros((self.n_ranks, end - first)),
            v=np.zeros((self.n_ranks, n_columns)),
            held_out=self.held_out[first:end],
            u_of=of_rows[0],
            changes=of_rows[1],
            moved=np.zeros((n_columns, TOGETHER)),
            sums=np.zeros((N_SUMS, n_columns)),
        )

    @override
    def schedule(self, state: object = None) -> Steps[Turn, Report, History]:
        history = [] if state is None else cast("History", state)
        has_begun = False  # so that blocks have what tables say: a run may end after any pass
        n_variables = int((self._free * [[self.targets.shape[0]], [self.targets.shape[1]]]).sum())
        while not (end := self._end(history)):
            is_anew, before = len(history) % _ANEW_EVERY == 0 or not has_begun, None
            has_begun = True
            for rank in range(self.n_ranks):
                yield self._round(rank, before, anew=is_anew and not rank)
                before = rank
            loss, of_v, errors, n = np.sum((yield self._round(None, before)), axis=0)
            # Each block has reported the same v.
            objective = loss + of_v / self.n_blocks - self.whole * self.targets.sum()
            history.append((float(objective), float(errors / n) if n else 0.0))
            can_resume = len(history) % _ANEW_EVERY == 0
            yield self._mark(history, n_variables, history if can_resume else None)
        yield self._mark(history, n_variables, history, end)
        return history

    def _mark(
        self, history: History, n_variables: int, state: History | None, end: Reason | None = None
    ) -> Mark:
        n_updates = len(history) * n_variables
        return Mark(objective=history[-1][0], n_updates=n_updates, state=state, end=end)

    def _round(
        self, rank: int | None, before: int | None, *, anew: bool = False
    ) -> list[Task[Turn]]:
        changed = before is not None and self._free[1, before]
        takes: dict[str, Rows] = {}
        if changed and before is not None:
            takes = {"columns": self._columns(before)}
        before = before if changed else None
        turn = Turn(rank=rank, before=before, anew=anew, checksum=self.checksum)
        blocks = range(self.n_blocks)
        if not anew:
            return [Task(block=block, argument=turn, takes=takes) for block in blocks]
        ranks = np.arange(self.n_ranks)[:, None] * self.targets.shape[0]
        return [
            Task(
                block=block,
                argument=turn,
                takes={
                    "columns": slice(None),
                    "rows": (ranks + np.arange(*self._ends[block : block + 2])).ravel(),
                },
            )
            for block in blocks
        ]

    def _columns(self, rank: int) -> "slice[int, int, None]":
        n_columns = self.targets.shape[1]
        return slice(rank * n_columns, (rank + 1) * n_columns)

    def _end(self, history: History) -> Reason | None:
        errors = [error for _, error in history]
        if self.rises(history):
            return Reason.ROSE
        if self.held_out.nnz and len(history) > self.patience:
            best = min(errors[: -self.patience])
            if min(errors[-self.patience :]) >= best:
                return Reason.HELD_OUT
        if len(history) > 1:
            before, last = history[-2][0], history[-1][0]
            if before - last <= self.tol * abs(before):
                return Reason.CONVERGED_VALUE
        return Reason.MAX_ITERATIONS if len(history) >= self.max_iter else None

    def rises(self, history: History) -> bool:
        """Return whether the last pass raised the objective: rounding loses the regularization."""
        last = [objective for objective, _ in history[-2:]]
        return len(last) == 2 and not last[1] <= last[0] + _ROUNDING * self._most

    @override
    def push(self, block: Block, argument: Turn, taken: Mapping[str, Values]) -> Pushed[Report]:
        rank, before = argument.rank, argument.before
        if argument.checksum != self.checksum:
            raise SettingError("ratings or held_out are others here: give all hosts the same")
        if argument.anew:
            self._begin_anew(block, taken)
        if before is not None:
            block.moved[:, before % self.n_together] = taken["columns"][:, 0] - block.v[before]
            block.v[before] = taken["columns"][:, 0]
        entries = block.starts, block.columns, block.residuals, block.weights
        if rank is None:
            subtracter()(*entries, block.u_of, block.moved)
            block.moved[:] = 0
            return Pushed(adds={}, report=self._report(block))
        place = rank % self.n_together
        if not place:
            self._solve(block, slice(rank, rank + self.n_together))
        start = rank * self.targets.shape[0] + block.first
        change = block.changes[:, place].copy()
        adds: dict[str, tuple[slice[int, int, None], Values]] = {}
        adds["rows"] = slice(start, start + len(change)), change
        if self._free[1, rank]:
            size = block.sums[TOGETHER + PAIRS.index((place, place))]
            numerators = block.sums[place] + size * block.v[rank]
            for other in range(place):  # whose v has been updated
                both = block.sums[TOGETHER + PAIRS.index((other, place))]
                numerators -= both * block.moved[:, other]
            adds["columns"] = self._columns(rank), np.stack([numerators, size], axis=1)
        return Pushed(adds=adds, report=np.zeros(4))

    def _solve(self, block: Block, those: "slice[int, int, None]") -> None:
        """Update u of a group, and set what its v follow from."""
        u, v = _eight(block.u[those]), _eight(block.v[those])
        old = u.copy()
        gram, rest = self._of_all_pairs(block.u, block.v, v)
        diagonal = np.full(TOGETHER, self.regularization)
        diagonal[: len(self._free[0, those])][~self._free[0, those]] = np.inf
        gram += np.diag(diagonal)
        rest = np.ascontiguousarray(rest) - self.regularization * old
        entries = block.starts, block.columns, block.residuals, block.weights
        sums = stepper()(*entries, block.u_of, block.moved, u, v, rest, gram)
        block.u[those] = u.T[: len(block.u[those])]
        gram, rest = self._of_all_pairs(block.v, block.u, u)
        block.sums = np.ascontiguousarray(sums.T[:N_SUMS])
        block.sums[:TOGETHER] += rest.T
        block.sums[TOGETHER:] += gram[_THOSE][:, None]
        block.u_of, block.changes = u, u - old
        block.moved[:] = 0

    def _of_all_pairs(self, u: Values, v: Values, some: Values) -> tuple[Values, Values]:
        """Return what all pairs add to the matrix, (8, 8), and to the numerators of u, (n, 8).

        `some` are those of v in the group.
        """
        if not self.whole:
            return np.zeros((TOGETHER, TOGETHER)), np.zeros((u.shape[1], TOGETHER))
        return self.whole * (some.T @ some), -((self.whole * (v @ some)).T @ u).T

    def _begin_anew(self, block: Block, taken: Mapping[str, Values]) -> None:
        block.u = taken["rows"].reshape(self.n_ranks, -1).copy()
        block.v = taken["columns"][:, 0].reshape(self.n_ranks, -1).copy()
        block.moved[:] = 0
        block.residuals = block.targets * block.weights
        entries = block.starts, block.columns, block.residuals, block.weights
        for first in range(0, self.n_ranks, TOGETHER):
            u, v = (_eight(one[first : first + TOGETHER]) for one in (block.u, block.v))
            subtracter()(*entries, u, v)

    def _report(self, block: Block) -> Report:
        u, v = block.u, block.v
        loss = float((block.residuals**2 / block.weights).sum())
        loss += self.regularization * float((u[self._free[0]] ** 2).sum())
        if self.whole:
            loss += self.whole * float(((u @ u.T) * (v @ v.T)).sum())
        error = 0.0
        held_out = block.held_out
        for row in np.flatnonzero(np.diff(held_out.indptr)):
            some = slice(*held_out.indptr[row : row + 2])
            products = u[:, row] @ v
            those = products[held_out.indices[some]]
            if self.whole:
                error += float((products > those[:, None]).mean(axis=1).sum())
            else:
                error += float(((held_out.data[some] - those) ** 2).sum())
        of_v = self.regularization * float((v[self._free[1]] ** 2).sum())
        return np.array([loss, of_v, error, held_out.nnz])


def _eight(some: Values) -> Values:
    """Return up to eight rows as columns, and zeros beside them."""
    columns = np.zeros((some.shape[1], TOGETHER))
    columns[:, : len(some)] = some.T
    return columns


# --- the estimator ---


class MatrixFactorization(Estimator):
    """Factors of a matrix with few known entries, by coordinate descent (STRADS, ST-5).

    The same input gives the same bits, for any `workers`; another `n_blocks` adds up in another
    order.

    Args:
        n_components: The rank.
        regularization: Weight of the squares of factors and biases, above 0.
        biases: Whether rows and columns have one.
        implicit_strength: None: entries are ratings, others unknown. Otherwise entries r are
            feedback (clicks), above 0: u.v should be 1 there, with weight 1 + implicit_strength r,
            and 0 elsewhere, with weight 1 (Hu, Koren and Volinsky 2008).
        max_iter: Passes over all ranks, at most.
        tol: It ends when the objective falls by no more in a pass, as a share of it.
        patience: It ends after so many passes without a smaller error of `held_out`; the factors
            are those of the last pass.
        n_blocks: Blocks of rows, updated at the same time, by up to so many workers; None: 8, or
            all rows if these are fewer.
        workers: Threads.
        random_state: The seed, 0 or more.
        warm_start: Whether `fit` begins at the factors of the fit before.

    Attributes:
        row_factors_: (n_rows, n_components)
        components_: (n_components, n_columns)
        mean_: Of the ratings; 0 of feedback.
        row_biases_, column_biases_: (n_rows,), (n_columns,); 0 without `biases`.
        n_iter_: Passes made.
        objectives_: After each pass.
        held_out_errors_: After each pass: RMSE; of feedback the mean share of columns that are
            expected to be more welcome (Hu et al., equation 8: 0 is best, 0.5 is chance).
    """

    _takes: ClassVar[Mapping[str, bool]] = {"allow_nan": True}

    def __init__(  # noqa: PLR0913 -- scikit-learn's convention
        self,
        n_components: int = 10,
        *,
        regularization: float = 0.1,
        biases: bool = False,
        implicit_strength: float | None = None,
        max_iter: int = 50,
        tol: float = 1e-4,
        patience: int = 3,
        n_blocks: int | None = None,
        workers: int = 1,
        random_state: int = 0,
        warm_start: bool = False,
    ) -> None:
        self.n_components = n_components
        self.regularization = regularization
        self.biases = biases
        self.implicit_strength = implicit_strength
        self.max_iter = max_iter
        self.tol = tol
        self.patience = patience
        self.n_blocks = n_blocks
        self.workers = workers
        self.random_state = random_state
        self.warm_start = warm_start

    def program(self, X: object, *, held_out: object = None) -> Factors:  # noqa: N803 -- scikit-learn's name
        """Return what `fit` runs.

        Raises:
            SettingError: as `fit`.
        """
        user = type(self).__name__
        whole = ("n_components", "max_iter", "patience", "workers", "random_state")
        check_numbers(user, **{name: getattr(self, name) for name in whole})
        check_numbers(user, regularization=self.regularization, tol=self.tol)
        if self.implicit_strength is not None:
            check_numbers(user, implicit_strength=self.implicit_strength)
        if not isinstance(cast("object", self.biases), bool | np.bool_):
            raise SettingError(f"{user}: biases is {self.biases!r}; use true or false")
        entries = self._checked(X, self.implicit_strength)
        if not entries.nnz:
            raise SettingError(f"{user}: X has no entries; give at least one")
        if self.implicit_strength is not None:
            weights = _weights(entries.data, self.implicit_strength)
            with np.errstate(all="ignore"):
                is_weak = not (1 / weights).mean() <= 1 / _WEAK
            if is_weak:
                raise SettingError(
                    f"{user}: implicit_strength times feedback is {weights.min():.3g}, lost beside "
                    "the weight 1 of all pairs; scale X, or use a larger implicit_strength"
                )
        n_blocks = blocks_of(user, self.n_blocks, rows=entries.shape[0])
        if self.n_blocks is not None:
            check_workers(user, self.workers, n_blocks)
        evaluated: Matrix = sparse.csr_array(entries.shape)
        if held_out is not None:
            evaluated = self._checked(held_out, self.implicit_strength)
        if evaluated.shape != entries.shape:
            raise SettingError(
                f"{user}: held_out has shape {evaluated.shape}, X {entries.shape}; give both the "
                "same rows and columns"
            )
        if held_out is not None and not evaluated.nnz:
            raise SettingError(f"{user}: held_out has no entries; give some or none")
        mean = 0.0 if self.implicit_strength else float(entries.data.mean())
        program = Factors(
            mean=mean,
            targets=self._with(entries, _targets(entries.data, mean, self.implicit_strength)),
            weights=self._with(entries, _weights(entries.data, self.implicit_strength)),
            whole=float(self.implicit_strength is not None),
            regularization=float(self.regularization),
            n_ranks=self.n_components + _N_BIASES * self.biases,
            biases=self.biases,
            seed=int(self.random_state),
            n_blocks=n_blocks,
            max_iter=self.max_iter,
            tol=self.tol,
            held_out=self._with(evaluated, evaluated.data - mean),
            patience=self.patience,
        )
        before = cast("Mapping[str, Mapping[str, Values]]", vars(self)).get("_tables")
        if self.warm_start and before is not None:
            program.start_at(before)
        return program

    def fit(
        self,
        X: object,  # noqa: N803 -- scikit-learn's name
        y: object = None,  # noqa: ARG002 -- scikit-learn's signature
        *,
        held_out: object = None,
    ) -> "MatrixFactorization":
        """Factor a matrix.

        Args:
            X: (n_rows, n_columns). Of scipy.sparse: the stored entries are known, zeros among them
                as well. Dense: all but NaN. Of feedback zeros are as if not stored.
            y: Nothing: for pipelines.
            held_out: Entries of the same rows and columns, only evaluated, for `patience`.

        Raises:
            SettingError: NaN or infinity, negative feedback, a wrong parameter, more blocks than
                rows.
        """
        program = self.program(X, held_out=held_out)
        stepper(), subtracter()  # compiled before threads ask for them
        history, tables = run(program, workers=self.workers)
        before, last = (of[0] for of in (history[-2:] * 2)[:2])
        if (is_lost := not np.isfinite(last)) or program.rises(history):
            rose = f"rounding has raised the objective from {before:.6g} to {last:.6g} in pass"
            what = "the factors are not finite" if is_lost else f"{rose} {len(history)}"
            way = "use a larger regularization, or scale X"
            raise SettingError(f"{type(self).__name__}: {what}: {way}")
        self._tables = tables
        self._fitted = self.biases, self.implicit_strength, self.regularization
        self.mean_ = program.mean
        u = tables["rows"].reshape(program.n_ranks, -1)
        v = tables["columns"][:, 0].reshape(program.n_ranks, -1)
        first = _N_BIASES * self.biases
        self.row_factors_, self.components_ = u[first:].T.copy(), v[first:].copy()
        zeros = np.zeros(max(program.targets.shape))
        self.row_biases_ = u[0].copy() if self.biases else zeros[: u.shape[1]]
        self.column_biases_ = v[1].copy() if self.biases else zeros[: v.shape[1]]
        self.n_features_in_, self.n_iter_ = v.shape[1], len(history)
        self.objectives_ = [objective for objective, _ in history]
        errors = [error for _, error in history] if held_out is not None else []
        is_rating = self.implicit_strength is None
        self.held_out_errors_ = [error**0.5 if is_rating else error for error in errors]
        return self

    def predict(self, rows: object, columns: object) -> Values:
        """Return what is expected at pairs of row and column, (n,), of those of `fit`."""
        self._check_fitted()
        i, j = (_indices(one, user=type(self).__name__) for one in (rows, columns))
        if i.shape != j.shape:
            raise SettingError(
                f"{type(self).__name__}: rows are {i.shape}, columns {j.shape}; give pairs"
            )
        for indices, n, name in (
            (i, len(self.row_biases_), "row"),
            (j, self.n_features_in_, "column"),
        ):
            for index in indices[(indices < 0) | (indices >= n)].ravel()[:1]:
                raise SettingError(
                    f"{type(self).__name__}: there is no {name} {index}; use 0 to {n - 1}"
                )
        products = np.einsum("...f,f...->...", self.row_factors_[i], self.components_[:, j])
        return np.asarray(products + self.row_biases_[i] + self.column_biases_[j] + self.mean_)

    def transform(self, X: object) -> Values:  # noqa: N803 -- as above
        """Return factors of rows, also of new ones, (n_rows, n_components), given the columns'."""
        self._check_fitted()
        biases, strength, regularization = self._fitted
        entries = self._checked(X, strength)
        check_width(entries.shape[1], self.n_features_in_, type(self).__name__)
        # The row's bias is a factor whose column factors are 1.
        v = np.vstack([self.components_, *np.ones((int(biases), self.n_features_in_))])
        is_implicit = strength is not None
        fixed = regularization * np.eye(len(v)) + is_implicit * (v @ v.T)
        pull = is_implicit * (v @ self.column_biases_)
        targets = _targets(entries.data, self.mean_, strength)
        weights = _weights(entries.data, strength)
        factors = np.zeros((entries.shape[0], len(v)))
        for row, (start, end) in enumerate(zip(entries.indptr, entries.indptr[1:], strict=False)):
            columns, w = entries.indices[start:end], weights[start:end]
            some = v[:, columns]
            rest = w * (targets[start:end] - self.column_biases_[columns])
            factors[row] = np.linalg.solve((some * w) @ some.T + fixed, some @ rest - pull)
        return factors[:, : len(self.components_)]

    def fit_transform(self, X: object, y: object = None) -> Values:  # noqa: N803 -- as above
        """Factor a matrix, and return the factors of its rows."""
        return self.fit(X, y).row_factors_

    def score(self, X: object, y: object = None) -> float:  # noqa: N803, ARG002 -- as above
        """Return minus the RMSE of ratings of the rows and columns of `fit`.

        Raises:
            SettingError: feedback: of that `held_out_errors_` says more.
        """
        self._check_fitted()
        if self._fitted[1] is not None:
            raise SettingError(
                f"{type(self).__name__}: feedback has no score; give fit held_out and read "
                "held_out_errors_"
            )
        entries = self._checked(X, None).tocoo()
        shape = len(self.row_biases_), self.n_features_in_
        if entries.shape != shape or not entries.nnz:
            raise SettingError(
                f"{type(self).__name__}: X has shape {entries.shape} and {entries.nnz} entries; "
                f"give ratings of shape {shape}"
            )
        errors = entries.data - self.predict(*entries.coords)
        return -float(np.sqrt((errors**2).mean()))

    def _with(self, entries: Matrix, values: Values) -> Matrix:
        matrix: Matrix = sparse.csr_array(
            (values, entries.indices, entries.indptr), shape=entries.shape
        )
        return matrix

    def _checked(self, x: object, strength: float | None) -> Matrix:
        user = type(self).__name__
        if strength is None and not sparse.issparse(x):
            x = _known(x, user)
        entries = checked_entries(x, user=user)
        if strength is None and sparse.issparse(x):
            n_given = cast("Matrix", x).nnz
            # By diagonals zeros are no entries: most of them only fill the diagonals.
            if n_given != entries.nnz and str(cast("Matrix", x).format) != "dia":
                raise SettingError(
                    f"{user}: X has {n_given - entries.nnz} entries of a row and column that has "
                    "one already; give one rating each"
                )
        if strength is not None:
            if (entries.data < 0).any():
                value = entries.data.min()
                raise SettingError(f"{user}: X has negative feedback, {value}; leave it out")
            entries = entries.copy()
            entries.eliminate_zeros()
        return entries

    def _check_fitted(self) -> None:
        if not hasattr(self, "components_"):
            kind = of_sklearn("NotFittedError", SettingError)
            raise kind(f"this {type(self).__name__} has no factors yet; call fit first")


def _targets(values: Values, mean: float, strength: float | None) -> Values:
    return values - mean if strength is None else 1 + 1 / (strength * values)


def _weights(values: Values, strength: float | None) -> Values:
    return np.ones_like(values) if strength is None else strength * values


def _indices(given: object, *, user: str) -> "NDArray[np.intp]":
    indices = np.asarray(given)
    if indices.size and indices.dtype.kind not in "iu":
        raise SettingError(f"{user}: rows and columns are of {indices.dtype}; give whole numbers")
    return indices.astype(np.intp)


def _known(x: object, user: str) -> object:
    """Return the entries of a dense matrix that are not NaN, zeros among them."""
    dense = cast("Values", checked_table(x, user=user))
    check_copy(dense, user=user)
    values = dense.astype(np.float64)
    rows, columns = np.nonzero(~np.isnan(values))
    return sparse.coo_array((values[rows, columns], (rows, columns)), shape=values.shape)
