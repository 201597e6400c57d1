"""Mixed integer program (HiGHS through scipy): the exact choice under caps, or the best in time.

    s[v, k] in {0, 1}       node v takes candidate k              sum_k s = 1
    e[u, v, k, l] >= 0      the edge's ends take k and l          sum_l e = s[u, k]
                                                                  sum_k e = s[v, l]
    sum s[v, k] shares[v, k, q] <= limit                          per machine q

Only s is integer: with equal marginals (the local polytope) e follows, and on trees the linear
program alone is integral.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp as solve_program
from scipy.sparse import coo_array, csr_array

from distbelief.graph.graph import GraphError
from distbelief.plans.planner.solvers.problem import (
    PROOF,
    TOLERANCE,
    Array,
    Choice,
    Indices,
    Left,
    Problem,
    Solution,
    time_left,
    trivial_bound,
)


_SCALE: Final = 100.0  # cost of the best known choice: HiGHS stops at absolute gaps
_SLACK: Final = 2e-6  # of memory rows, twice the tolerance of HiGHS

_INFEASIBLE: Final = 2  # a status of scipy's


class _Answer(NamedTuple):
    choice: Choice | None
    bound: float  # on the objective
    infeasible: bool = False  # no choice exists


def n_variables(problem: Problem) -> int:
    return sum(problem.sizes) + sum(table.size for table in problem.edges.values())


def milp(problem: Problem, *, seconds: float = 60.0, start: Choice | None = None) -> Solution:
    """Return the best choice found in time, with the bound proven by then.

    If none fits the caps, the cheapest of those that overrun them least. If `start` fits the caps,
    nothing more expensive is searched. GraphError if none was found in time.
    """
    program, left = _Program(problem), time_left(seconds)
    fits = start is not None and problem.fits(start)
    answer = program.cheapest(start if fits else None, limit=1.0, left=left)
    known = [choice for choice in (answer.choice, start) if choice is not None]
    proven = fits or answer.choice is not None  # else out of time: a choice may fit
    bound = answer.bound
    if answer.infeasible:
        least = program.least_overrun(left=left)
        known += [] if least.choice is None else [least.choice]
        if known:
            best = min(known, key=problem.badness)
            limit = problem.overrun(best)
            cheap = program.cheapest(best, limit=limit, left=left)
            known += [] if cheap.choice is None else [cheap.choice]
            proven, bound = least.bound >= limit * (1 - PROOF), cheap.bound
    if not known:
        raise GraphError("no choice was found in time: allow more seconds")
    # Priced by our own code: old versions of HiGHS returned choices that broke their own bound
    # (scipy#22812), and none at all when time ran out (scipy#16545).
    best = min(known, key=problem.badness)
    return problem.solution(best, bound=bound, solver="milp", proven=proven)


@final
class _Program:
    # The matrices of a problem: s of all nodes first, then e of all edges.

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        first = np.concatenate([[0], np.cumsum(problem.sizes)]).astype(np.intp)
        self._n_s = int(first[-1])
        owner = np.repeat(np.arange(len(problem.sizes)), problem.sizes)
        rows, columns, signs = [owner], [np.arange(self._n_s)], [np.ones(self._n_s)]
        costs = [*problem.costs]
        n_rows, n_columns = len(problem.sizes), self._n_s
        for (u, v), table in problem.edges.items():
            costs.append(table.ravel())
            own = n_columns + np.arange(table.size)
            n_columns += table.size
            for node, ends in zip((u, v), np.indices(table.shape).reshape(2, -1), strict=True):
                size = problem.sizes[node]
                rows += [n_rows + ends, n_rows + np.arange(size)]
                columns += [own, first[node] + np.arange(size)]
                signs += [np.ones(len(ends)), -np.ones(size)]
                n_rows += size
        self._costs = np.concatenate(costs)
        self._signs = np.concatenate(signs)
        self._places = (np.concatenate(rows), np.concatenate(columns))
        self._sums = np.zeros(n_rows)
        self._sums[: len(problem.sizes)] = 1

    def cheapest(self, start: Choice | None, *, limit: float, left: Left) -> _Answer:
        """Minimise costs, with no machine above `limit` of its cap.

        `start` is known to fit: nothing more expensive is searched.
        """
        known = abs(self._costs).mean() if start is None else self.problem.cost(start)
        scale = _SCALE / abs(known) if known else 1.0
        costs = self._costs * scale
        rows = []
        if start is not None:
            cutoff = known * scale
            most = cutoff + PROOF * abs(cutoff)
            rows.append(LinearConstraint(csr_array(costs[None, :]), -np.inf, most))
        # HiGHS tolerates small violations: if its choice breaks a cap, ask for a little less.
        first = answer = self._solve(costs, [*rows, *self._memory(limit)], left)
        if not self._within(answer.choice, limit):
            answer = self._solve(costs, [*rows, *self._memory(limit - _SLACK)], left)
        return _Answer(
            choice=answer.choice if self._within(answer.choice, limit) else None,
            bound=max(trivial_bound(self.problem), first.bound / scale),
            infeasible=first.infeasible and start is None,
        )

    def least_overrun(self, *, left: Left) -> _Answer:
        """Minimise the largest share of its cap that any machine uses."""
        objective = np.zeros(len(self._costs) + 1)
        objective[-1] = 1
        return self._solve(objective, self._memory(None), left)

    def _within(self, choice: Choice | None, limit: float) -> bool:
        return choice is None or self.problem.overrun(choice) <= limit * (1 + TOLERANCE)

    def _memory(self, limit: float | None) -> list[LinearConstraint]:
        # One row per machine; without a limit, the limit is the last variable.
        if self.problem.shares is None:
            return []
        shares = np.concatenate(self.problem.shares)
        candidates, machines = np.nonzero(shares)
        values = shares[candidates, machines]
        n_columns, n_machines = len(self._costs), shares.shape[1]
        if limit is None:
            machines = np.concatenate([machines, np.arange(n_machines)])
            candidates = np.concatenate([candidates, np.full(n_machines, n_columns)])
            values = np.concatenate([values, np.full(n_machines, -1.0)])
            n_columns += 1
        rows = _matrix(values, (machines, candidates), (n_machines, n_columns))
        return [LinearConstraint(rows, -np.inf, 0 if limit is None else limit)]

    def _solve(self, objective: Array, rows: Sequence[LinearConstraint], left: Left) -> _Answer:
        marginals = _matrix(self._signs, self._places, (len(self._sums), len(objective)))
        integer = np.zeros(len(objective), np.intp)
        integer[: self._n_s] = 1
        upper = np.full(len(objective), np.inf)
        upper[: len(self._costs)] = 1
        with _hushed():
            result = solve_program(
                objective,
                integrality=integer,
                bounds=Bounds(0, upper),
                constraints=[LinearConstraint(marginals, self._sums, self._sums), *rows],
                options={"time_limit": left(), "mip_rel_gap": 0},
            )
        bound = result.get("mip_dual_bound")
        choice: Choice | None = None
        if result.x is not None:
            parts = np.split(result.x[: self._n_s], np.cumsum(self.problem.sizes)[:-1])
            choice = tuple(int(part.argmax()) for part in parts)
        return _Answer(
            choice=choice,
            bound=-np.inf if bound is None else float(bound),
            infeasible=result.status == _INFEASIBLE,
        )


def _matrix(
    values: Array, places: tuple[Indices, Indices], shape: tuple[int, int]
) -> csr_array[np.float64]:
    return csr_array(coo_array((values, places), shape=shape))


@contextmanager
def _hushed() -> Iterator[None]:
    # HiGHS sometimes prints to standard output: redirect it.
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # there is none
        yield
        return
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
