"""Solves a placement problem: tries the solvers in order of cost, and proves the choice if it can.

elimination        small tables, and the choice fits the caps       -> exact
  else prune       what cannot fit, or never beats another
  relax            a bound, and choices that fit (Lagrange)         -> exact if equal
  prune again      what the bound proves more expensive than the best known
  elimination      tables may be small now; no caps                 -> exact
  milp             few enough variables                             -> exact in time
  else             the best known and the bound
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from distbelief.partition.solvers.dynamic_programming import cheapest, eliminate, elimination_order
from distbelief.partition.solvers.lagrangian import relax
from distbelief.partition.solvers.local_search import descend, independent, repair
from distbelief.partition.solvers.milp import milp, n_variables
from distbelief.partition.solvers.problem import (
    PROOF,
    TOLERANCE,
    Array,
    Choice,
    Deadline,
    Indices,
    Problem,
    Solution,
    fitting,
    permitted,
    trivial_bound,
    undominated,
)


VARIABLES_MAX: Final = 200_000  # of a mixed integer program: seconds to minutes

_BISECTIONS: Final = 12


def solve(
    problem: Problem, *, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic
) -> Solution:
    """Return the cheapest choice that fits the caps, or the best found in time.

    If none fits, the cheapest of those that overrun the caps least.

    Args:
        problem: The problem.
        seconds: Approximate limit; elimination alone takes some seconds.
        clock: Monotonic, seconds.

    Raises:
        GraphError: every choice is forbidden.
    """
    deadline = Deadline(seconds, clock=clock)
    kept = permitted(problem)
    small = problem.restricted(kept)
    order = elimination_order(small)
    bound, free = trivial_bound(small), None
    if order.fits:
        free = eliminate(small, order)
        bound = free.bound
    if free is not None and free.exact:
        return _lifted(kept, free)
    found = _under_caps(small, bound, deadline)
    if found is None:
        found = _least_bad(small, bound, deadline)
    return _lifted(kept, found)


def _lifted(kept: Sequence[Indices], solution: Solution) -> Solution:
    # The same solution with the indices of the whole problem.
    pairs = zip(kept, solution.choice, strict=True)
    return replace(solution, choice=tuple(int(rows[index]) for rows, index in pairs))


def _under_caps(problem: Problem, bound: float, deadline: Deadline) -> Solution | None:
    # The cheapest choice that fits, or the best found; None if none was.
    kept = fitting(problem)
    if kept is None:
        return None
    kept = _inner(kept, undominated(problem.restricted(kept)))
    small = problem.restricted(kept)
    order = elimination_order(small)
    if order.fits:
        choice = cheapest(small, small.costs, order)
        cost = small.cost(choice)
        if math.isinf(cost):
            return None
        if small.overrun(choice) <= 1 + TOLERANCE:
            free = small.solution(choice, bound=cost, solver="elimination")
            return _lifted(kept, free)
        bound = max(bound, cost)
    relaxed = relax(small, order, deadline=deadline)
    if relaxed.choice is None:
        return None
    bound = max(bound, relaxed.bound)
    known = small.solution(relaxed.choice, bound=bound, solver="lagrange")
    if not known.exact:
        worth = _worth(known, relaxed.floors)
        inner = small.restricted(worth)
        places = zip(worth, known.choice, strict=True)
        start = [int(np.searchsorted(rows, index)) for rows, index in places]
        known = _lifted(worth, _finished(inner, start, bound, deadline))
    return _lifted(kept, known)


def _worth(known: Solution, floors: Sequence[Array]) -> list[Indices]:
    # Candidates that a cheaper choice than the best known may have, and those of the best known.
    limit = known.cost + PROOF * abs(known.cost)
    worth = []
    for index, costs in zip(known.choice, floors, strict=True):
        mask = costs <= limit
        mask[index] = True
        worth.append(np.flatnonzero(mask))
    return worth


def _finished(problem: Problem, start: Sequence[int], bound: float, deadline: Deadline) -> Solution:
    # The best of the remaining candidates, starting with the best known.
    if problem.shares is None:
        order = elimination_order(problem)
        if order.fits:
            return eliminate(problem, order)
    if deadline.passed or n_variables(problem) > VARIABLES_MAX:
        return problem.solution(start, bound=bound, solver="lagrange")
    found = milp(problem, seconds=deadline.left, start=start)
    return problem.solution(found.choice, bound=max(bound, found.bound), solver=found.solver)


def _least_bad(problem: Problem, bound: float, deadline: Deadline) -> Solution:
    # No choice that fits is known: overrun the caps least.
    kept = undominated(problem)
    small = problem.restricted(kept)
    start = _least_repaired(small, deadline)
    solution = small.solution(start, bound=bound, solver="repair", proven=False)
    if not deadline.passed and n_variables(small) <= VARIABLES_MAX:
        found = milp(small, seconds=deadline.left, start=start)
        solution = small.solution(
            found.choice, bound=max(bound, found.bound), solver=found.solver, proven=found.exact
        )
    return _lifted(kept, solution)


def _least_repaired(problem: Problem, deadline: Deadline) -> Choice:
    # Bisection over the limit that repairs can reach.
    order = elimination_order(problem)
    free = eliminate(problem, order).choice if order.fits else independent(problem)
    best, low, high = free, 0.0, problem.overrun(free)
    for _ in range(_BISECTIONS):
        limit = (low + high) / 2
        found = repair(problem, best, limit=limit, deadline=deadline)
        if found is None:
            low = limit
        else:
            best, high = found, problem.overrun(found)
    return descend(problem, best, limit=max(1.0, problem.overrun(best)))


def _inner(outer: Sequence[Indices], inner: Sequence[Indices]) -> list[Indices]:
    # Indices in the whole problem of what was kept of what was kept.
    return [rows[index] for rows, index in zip(outer, inner, strict=True)]
