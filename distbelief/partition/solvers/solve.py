"""Solves a placement problem: tries the solvers in order of cost, and proves the choice if it can.

elimination        small tables, and the choice fits the caps       -> exact
  else prune       what cannot fit, or never beats another
  local search     a choice that fits; the cheapest without caps is a bound
  milp             few enough variables                             -> exact in time
  else             the best known and the bound
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from distbelief.partition.solvers.dynamic_programming import (
    Order,
    cheapest,
    eliminate,
    elimination_order,
)
from distbelief.partition.solvers.local_search import descend, exchange, independent, repair
from distbelief.partition.solvers.milp import milp, n_variables
from distbelief.partition.solvers.problem import (
    TOLERANCE,
    Choice,
    Deadline,
    Indices,
    Problem,
    Solution,
    fitting,
    trivial_bound,
    undominated,
)


VARIABLES_MAX: Final = 200_000  # of a mixed integer program: seconds to minutes
# Where elimination's tables would be too large: HiGHS looks at the clock too seldom, and took 70
# seconds in place of 10 for DenseNet-121 on 4 machines (94,000 variables).
DENSE_VARIABLES_MAX: Final = 30_000

_BISECTIONS: Final = 12


def solve(
    problem: Problem, *, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic
) -> Solution:
    """Return the cheapest choice that fits the caps, or the best found in time.

    If none fits, the cheapest of those that overrun the caps least.

    `seconds` is approximate: elimination alone takes some.
    """
    deadline = Deadline(seconds, clock=clock)
    order = elimination_order(problem)
    bound = trivial_bound(problem)
    if order.fits:
        free = eliminate(problem, order)
        if free.exact:
            return free
        bound = free.bound
    return _under_caps(problem, bound, deadline) or _least_bad(problem, bound, deadline)


def _under_caps(problem: Problem, bound: float, deadline: Deadline) -> Solution | None:
    # The cheapest choice that fits, or the best found; None if none was.
    kept = fitting(problem)
    if kept is None:
        return None
    inner = undominated(problem.restricted(kept))
    kept = [rows[index] for rows, index in zip(kept, inner, strict=True)]
    small = problem.restricted(kept)
    order = elimination_order(small)
    if order.fits:
        start = cheapest(small, small.costs, order)
        bound = max(bound, small.cost(start))
    else:
        start = _descended(small)
    if small.overrun(start) > 1 + TOLERANCE:
        mended = repair(small, start, limit=1.0, deadline=deadline)
        if mended is None:
            return None
        start = descend(small, mended)
    elif order.fits:
        return _lifted(kept, small.solution(start, bound=bound, solver="elimination"))
    known = exchange(small, start, deadline=deadline)
    return _lifted(kept, _finished(small, known, bound, order, deadline))


def _descended(problem: Problem) -> Choice:
    # The best of local searches from several choices: each node by itself, and all nodes alike.
    starts = [tuple(min(k, n - 1) for n in problem.sizes) for k in range(max(problem.sizes))]
    ends = [descend(problem, start) for start in (independent(problem), *starts)]
    return min(ends, key=problem.badness)


def _finished(
    problem: Problem, start: Choice, bound: float, order: Order, deadline: Deadline
) -> Solution:
    # The best choice, by a mixed integer program if it is small enough.
    n_max = VARIABLES_MAX if order.fits else DENSE_VARIABLES_MAX
    if deadline.passed or n_variables(problem) > n_max:
        fits = problem.overrun(start) <= 1 + TOLERANCE  # else a lower overrun may be possible
        return problem.solution(start, bound=bound, solver="repair", proven=fits)
    found = milp(problem, seconds=deadline.left, start=start)
    return problem.solution(
        found.choice, bound=max(bound, found.bound), solver=found.solver, proven=found.exact
    )


def _least_bad(problem: Problem, bound: float, deadline: Deadline) -> Solution:
    # No choice that fits is known: overrun the caps least.
    kept = undominated(problem)
    small = problem.restricted(kept)
    order = elimination_order(small)
    start = _least_repaired(small, order, deadline)
    return _lifted(kept, _finished(small, start, bound, order, deadline))


def _least_repaired(problem: Problem, order: Order, deadline: Deadline) -> Choice:
    # Bisection over the limit that repairs can reach.
    free = eliminate(problem, order).choice if order.fits else _descended(problem)
    best, low, high = free, 0.0, problem.overrun(free)
    for _ in range(_BISECTIONS):
        limit = (low + high) / 2
        found = repair(problem, best, limit=limit, deadline=deadline)
        if found is None:
            low = limit
        else:
            best, high = found, problem.overrun(found)
    return descend(problem, best, limit=max(1.0, problem.overrun(best)))


def _lifted(kept: Sequence[Indices], solution: Solution) -> Solution:
    # The same solution with the indices of the whole problem.
    pairs = zip(kept, solution.choice, strict=True)
    return replace(solution, choice=tuple(int(rows[index]) for rows, index in pairs))
