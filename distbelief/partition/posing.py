"""What the solver is asked, what it says, and what search makes of the best of that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from distbelief.partition.building import Decoder, build
from distbelief.partition.order import Order, Told
from distbelief.partition.playing import Player, Way
from distbelief.partition.search import TRIES_MAX, improve
from distbelief.partition.solvers.problem import Choice, Problem, Solution
from distbelief.partition.solvers.solving import solve
from distbelief.program.cluster import Cluster


_EVENTS_MAX: Final = 250_000
"""Tasks and messages that local search plays through; a second or two."""

_LAYERS_MAX: Final = 8_000
"""Layers of all plans that it compiles; some seconds."""

_TELL_EVERY: Final = 5  # plans
_SEARCHED: Final = " + search"


@final
@dataclass(frozen=True, kw_only=True)
class Posed:
    """What a solver was asked, with machines in one order, and what came of it.

    Attributes:
        problem: The question.
        decoder: What its choices mean.
        solution: The answer.
        ways: Those that are choices of the problem, played through.
    """

    problem: Problem
    decoder: Decoder
    solution: Solution
    ways: Mapping[Choice, Way]

    @property
    def rank(self) -> tuple[float, float]:
        """Of its best way."""
        return min(way.rank for way in self.ways.values())


def pose(
    order: Order,
    cluster: Cluster,
    *,
    machines: Sequence[int],
    others: Sequence[Way],
    player: Player,
    tell: Told,
) -> Posed:
    """Return what the solver says, and which other ways it might have said.

    Args:
        order: What is to be planned.
        cluster: The machines that there may be.
        machines: In the order in which they are used.
        others: Ways whose cuts are candidates too.
        player: Plays ways through.
        tell: Told what is being done.
    """
    count = len(cluster)
    tell(f"{count} machines: what each split of a layer costs")
    others = [way for way in others if way.micro_batches == 1]
    problem, decoder = build(
        order.graph,
        cluster,
        batch=order.batch,
        costs=order.costs,
        pins=order.pins,
        machines=machines,
        also=[way.placements for way in others],
    )
    tell(f"{count} machines: the best choice among {sum(problem.sizes)} splits")
    solution = solve(problem, seconds=order.solver_seconds)
    solved = {solution.choice: solution.solver}
    if problem.caps is not None:
        # What is best without caps may fit, or come to fit by the search.
        free = replace(problem, memory=None, caps=None)
        unbound = solve(free, seconds=order.solver_seconds)
        solved.setdefault(unbound.choice, unbound.solver)
    ways = {
        choice: player.way(solver, decoder(choice), n_machines=count)
        for choice, solver in solved.items()
    }
    for way in others:
        known = decoder.choice(way.placements)
        if known is not None:
            ways.setdefault(known, way)
    return Posed(
        problem=problem,
        decoder=decoder,
        solution=solution,
        ways={
            choice: replace(way, model_seconds=problem.cost(choice)) for choice, way in ways.items()
        },
    )


def search(posed: Posed, cluster: Cluster, *, player: Player, tell: Told) -> Way | None:
    """Return what local search makes of the best way; None if nothing better.

    It makes the jittered median small, by which plans are ranked and which is printed.
    With jitters of 0.05 and 0.3 it ends in the very plans that the step without jitter
    leads to (AlexNet, VGG-16, MobileNet; 2, 4 and 8 machines), so there is no reason to
    have two measures.

    Args:
        posed: Where it begins, and among what it searches.
        cluster: The machines that there may be.
        player: Plays ways through.
        tell: Told what is being done.
    """
    count = len(cluster)
    start, first = min(posed.ways.items(), key=lambda item: item[1].rank)
    compiled = first.price.compiled
    tries = min(
        TRIES_MAX,
        _EVENTS_MAX // (len(compiled.tasks) + compiled.n_messages),
        _LAYERS_MAX // len(compiled.graph.layers),
    )
    if not tries or count == 1:
        return None
    method = f"{first.method.removesuffix(_SEARCHED)}{_SEARCHED}"
    n_played = 0

    def way_of(choice: Choice) -> Way:
        return posed.ways.get(choice) or player.way(method, posed.decoder(choice), n_machines=count)

    def seconds_of(choice: Choice) -> float:
        nonlocal n_played
        if n_played % _TELL_EVERY == 0:
            tell(f"{count} machines: search, {n_played} of {tries} plans")
        n_played += 1
        return way_of(choice).penalised

    better, _ = improve(posed.problem, start, seconds_of, tries=tries)
    if better == start:
        return None
    # Played again: to keep all that were played takes too much memory.
    cost = posed.problem.cost(better)
    return replace(way_of(better), method=method, model_seconds=cost)
