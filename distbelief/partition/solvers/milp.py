"""Mixed integer program (HiGHS through scipy): the exact choice under caps, or the best in time.

    s[v, k] in {0, 1}       node v takes candidate k              sum_k s = 1
    e[u, v, k, l] >= 0      the edge's ends take k and l          sum_l e = s[u, k]
                                                                  sum_k e = s[v, l]
    sum s[v, k] shares[v, k, q] <= limit                          per machine q

Only s is integer: with equal marginals (the local polytope) e follows, and on trees the linear
program alone is integral. Pairs of infinite cost have no variable.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp as solve_program
from scipy.sparse import coo_array, csr_array

from distbelief.graph.graph import GraphError
from distbelief.partition.solvers.dynamic_programming import eliminate, elimination_order
from distbelief.partition.solvers.local_search import descend, independent, repair
from distbelief.partition.solvers.problem import (
    PROOF,
    TOLERANCE,
    Array,
    Choice,
    Deadline,
    Indices,
    Problem,
    Solution,
    no_choice,
    permitted,
    trivial_bound,
)


_SCALE: Final = 100.0  # cost of the best known choice: HiGHS stops at absolute gaps
_SLACK: Final = 2e-6  # of memory rows, twice the tolerance of HiGHS

_INFEASIBLE: Final = 2  # a status of scipy's


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    choice: Choice | None
    bound: float  # on the objective
    infeasible: bool = False  # no choice exists


@final
class Polytope:
    """The matrices of a problem: s of all nodes first, then e of all edges."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        first = np.concatenate([[0], np.cumsum(problem.sizes)]).astype(np.intp)
        self._n_s = int(first[-1])
        owner = np.repeat(np.arange(len(problem.sizes)), problem.sizes)
        rows, columns, signs = [owner], [np.arange(self._n_s)], [np.ones(self._n_s)]
        costs = [*problem.costs]
        n_rows, n_columns = len(problem.sizes), self._n_s
        for (u, v), table in problem.edges.items():
            at_u, at_v = np.nonzero(np.isfinite(table))
            costs.append(table[at_u, at_v])
            own = n_columns + np.arange(len(at_u))
            n_columns += len(at_u)
            for node, ends in ((u, at_u), (v, at_v)):
                size = problem.sizes[node]
                rows += [n_rows + ends, n_rows + np.arange(size)]
                columns += [own, first[node] + np.arange(size)]
                signs += [np.ones(len(ends)), -np.ones(size)]
                n_rows += size
        self._costs = np.concatenate(costs)
        self._signs = np.concatenate(signs)
        self._places = (np.concatenate(rows), np.concatenate(columns))
        self._n_columns = n_columns
        self._sums = np.zeros(n_rows)
        self._sums[: len(problem.sizes)] = 1

    def cheapest(self, start: Choice | None, *, limit: float, deadline: Deadline) -> Answer:
        """Minimise costs, with no machine above `limit` of its cap.

        Args:
            start: A choice known to fit; nothing more expensive is searched.
            limit: Share of its cap that a machine may use.
            deadline: When to stop.
        """
        known = np.inf if start is None else self.problem.cost(start)
        reference = abs(known) if np.isfinite(known) else abs(self._costs).mean()
        scale = _SCALE / reference if reference > 0 else 1.0
        costs = self._costs * scale
        rows = [] if start is None else [_row(costs, known * scale)]
        bound = trivial_bound(self.problem)
        answer = Answer(choice=None, bound=bound)
        # HiGHS tolerates small violations: if its choice breaks a cap, ask for a little less.
        for slack in (0.0, _SLACK):
            answer = self._solve(costs, [*rows, *self._memory(limit - slack)], deadline)
            if slack == 0.0:
                bound = max(bound, answer.bound / scale)
            if answer.choice is None or self._within(answer.choice, limit):
                break
        choice = answer.choice
        if choice is not None and not self._within(choice, limit):
            choice = None
        infeasible = answer.infeasible and start is None and slack == 0.0
        return Answer(choice=choice, bound=bound, infeasible=infeasible)

    def least_overrun(self, *, deadline: Deadline) -> Answer:
        """Minimise the largest share of its cap that any machine uses."""
        objective = np.zeros(self._n_columns + 1)
        objective[-1] = 1
        return self._solve(objective, self._memory(None), deadline)

    def _within(self, choice: Choice, limit: float) -> bool:
        return self.problem.overrun(choice) <= limit * (1 + TOLERANCE)

    def _memory(self, limit: float | None) -> list[LinearConstraint]:
        # One row per machine; without a limit, the limit is the last variable.
        if self.problem.shares is None:
            return []
        shares = np.concatenate(self.problem.shares)
        candidates, machines = np.nonzero(shares)
        values = shares[candidates, machines]
        n_columns, n_machines = self._n_columns, shares.shape[1]
        if limit is None:
            machines = np.concatenate([machines, np.arange(n_machines)])
            candidates = np.concatenate([candidates, np.full(n_machines, n_columns)])
            values = np.concatenate([values, np.full(n_machines, -1.0)])
            n_columns += 1
        rows = _matrix(values, (machines, candidates), (n_machines, n_columns))
        return [LinearConstraint(rows, -np.inf, 0 if limit is None else limit)]

    def _solve(
        self, objective: Array, rows: Sequence[LinearConstraint], deadline: Deadline
    ) -> Answer:
        shape = (len(self._sums), len(objective))
        marginals = _matrix(self._signs, self._places, shape)
        integer = np.zeros(len(objective), np.intp)
        integer[: self._n_s] = 1
        upper = np.ones(len(objective))
        upper[self._n_columns :] = np.inf
        with _hushed():
            result = solve_program(
                objective,
                integrality=integer,
                bounds=Bounds(0, upper),
                constraints=[LinearConstraint(marginals, self._sums, self._sums), *rows],
                options={"time_limit": deadline.left, "mip_rel_gap": 0},
            )
        bound = result.get("mip_dual_bound")
        return Answer(
            choice=None if result.x is None else self._choice(result.x[: self._n_s]),
            bound=-np.inf if bound is None else float(bound),
            infeasible=result.status == _INFEASIBLE,
        )

    def _choice(self, values: Array) -> Choice:
        parts = np.split(values, np.cumsum(self.problem.sizes)[:-1])
        return tuple(int(part.argmax()) for part in parts)


def _row(costs: Array, cutoff: float) -> LinearConstraint:
    # Nothing may cost more than the known choice, which itself stays feasible.
    return LinearConstraint(csr_array(costs[None, :]), -np.inf, cutoff + PROOF * abs(cutoff))


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


def n_variables(problem: Problem) -> int:
    pairs = sum(int(np.isfinite(table).sum()) for table in problem.edges.values())
    return sum(problem.sizes) + pairs


def milp(
    problem: Problem, *, seconds: float = 60.0, start: Sequence[int] | None = None
) -> Solution:
    """Return the best choice found in time, with the bound proven by then.

    If none fits the caps, the cheapest of those that overrun them least.

    Args:
        problem: The problem.
        seconds: Time limit.
        start: A known choice; if it fits, nothing more expensive is searched.

    Raises:
        GraphError: every choice is forbidden.
    """
    deadline = Deadline(seconds)
    kept = permitted(problem)
    small = problem.restricted(kept)
    known = _start(small, kept, start, deadline)
    solution = _solve(small, known, deadline)
    choice = [rows[index] for rows, index in zip(kept, solution.choice, strict=True)]
    return problem.solution(choice, bound=solution.bound, solver="milp", proven=solution.exact)


def _start(
    problem: Problem,
    kept: Sequence[NDArray[np.intp]],
    start: Sequence[int] | None,
    deadline: Deadline,
) -> Choice | None:
    # A choice of finite cost, within the caps if that is easy; None if there is none.
    if start is not None:
        places = zip(kept, start, strict=True)
        return tuple(int(np.searchsorted(rows, index)) for rows, index in places)
    order = elimination_order(problem)
    choice = eliminate(problem, order).choice if order.fits else independent(problem)
    if problem.overrun(choice) > 1 + TOLERANCE:
        choice = repair(problem, choice, limit=1.0, deadline=deadline) or choice
    choice = descend(problem, choice)
    return choice if np.isfinite(problem.cost(choice)) else None


def _solve(problem: Problem, known: Choice | None, deadline: Deadline) -> Solution:
    program = Polytope(problem)
    fits = known is not None and problem.overrun(known) <= 1 + TOLERANCE
    answer = program.cheapest(known if fits else None, limit=1.0, deadline=deadline)
    proven = True
    if answer.infeasible and not fits:
        answer, proven = _least_bad(program, known, deadline)
    elif not fits and answer.choice is None:
        proven = False  # out of time: a choice may fit
    if answer.choice is None and known is None:
        raise GraphError("no choice of finite cost was found in time: allow more seconds")
    # Priced by our own code: old versions of HiGHS returned choices that broke their own bound
    # (scipy#22812), and none at all when time ran out (scipy#16545).
    choices = [choice for choice in (answer.choice, known) if choice is not None]
    best = min(choices, key=lambda choice: _badness(problem, choice))
    return problem.solution(best, bound=answer.bound, solver="milp", proven=proven)


def _least_bad(program: Polytope, known: Choice | None, deadline: Deadline) -> tuple[Answer, bool]:
    # The cheapest of the choices that overrun the caps least; whether that is proven.
    problem = program.problem
    answer = program.least_overrun(deadline=deadline)
    if answer.infeasible:
        raise no_choice()
    choices = [choice for choice in (answer.choice, known) if choice is not None]
    if not choices:
        return answer, False
    least = min(choices, key=lambda choice: _badness(problem, choice))
    limit = problem.overrun(least)
    cheap = program.cheapest(least, limit=limit, deadline=deadline)
    proven = answer.bound >= limit * (1 - PROOF)
    return Answer(choice=cheap.choice or least, bound=cheap.bound), proven


def _badness(problem: Problem, choice: Choice) -> tuple[float, float]:
    # Fitting comes first, then the cost.
    overrun = problem.overrun(choice)
    return (0.0 if overrun <= 1 + TOLERANCE else overrun, problem.cost(choice))
