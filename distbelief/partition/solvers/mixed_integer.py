"""The exact choice under caps, by a mixed integer program, or the best in its time.

What HiGHS returns is priced by our own code, since old versions returned choices that
broke their own bound (scipy#22812), and none at all when time ran out (scipy#16545).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distbelief.graph.layer import GraphError
from distbelief.partition.solvers.deadline import Deadline
from distbelief.partition.solvers.elimination import eliminate, elimination_order
from distbelief.partition.solvers.local_search import descend, independent, repair
from distbelief.partition.solvers.polytope import Answer, Polytope
from distbelief.partition.solvers.problem import (
    PROOF,
    TOLERANCE,
    Choice,
    Problem,
    Solution,
    no_choice,
)
from distbelief.partition.solvers.pruning import permitted


def n_variables(problem: Problem) -> int:
    """Return how many variables the program has."""
    pairs = sum(int(np.isfinite(table).sum()) for table in problem.edges.values())
    return sum(problem.sizes) + pairs


def milp(
    problem: Problem, *, seconds: float = 60.0, start: Sequence[int] | None = None
) -> Solution:
    """Return the best choice found in time, with the bound proven by then.

    If none fits the caps, the cheapest of those that overrun them least.

    Args:
        problem: What is to be chosen.
        seconds: How long it may take.
        start: A choice that is known; if it fits, nothing dearer is looked for.

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
    """A choice of finite cost, inside the caps if that is easy; None if it is not."""
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
        proven = False  # out of time: something may fit
    if answer.choice is None and known is None:
        raise GraphError("no choice of finite cost was found in the time given; allow more seconds")
    choices = [choice for choice in (answer.choice, known) if choice is not None]
    best = min(choices, key=lambda choice: _badness(problem, choice))
    return problem.solution(best, bound=answer.bound, solver="milp", proven=proven)


def _least_bad(program: Polytope, known: Choice | None, deadline: Deadline) -> tuple[Answer, bool]:
    """The cheapest of the choices that overrun the caps least; whether it is proven."""
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
    """Whether it fits comes first, then what it costs."""
    overrun = problem.overrun(choice)
    return (0.0 if overrun <= 1 + TOLERANCE else overrun, problem.cost(choice))
