"""What predictions are worth: beside what was measured, at one pace of the machine.

Each prediction is by the profile at the pace of a turn, and what was measured is
brought to the profile's pace likewise, so that plans can be compared with each other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, cast, final

from scipy.stats import spearmanr

from distbelief.partition.profiling.profile import Profile
from distbelief.partition.search import PlanningRequest, PlanSimulator, SimulatedPlan
from distbelief.program.plan import Plan
from experiments.benchmarks.plans.overlap import overlap
from experiments.benchmarks.plans.pace import at_pace, slower
from experiments.benchmarks.plans.turn import Turn


N_FINALISTS: Final = 3
"""The plan that is preferred and the fastest others, until there are so many."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Seconds of a step of each plan.

    Attributes:
        predicted: By the profile.
        measured: As taken, in the middle.
        brought: As they would have been at the profile's pace, in the middle.
        slower: Layers during each turn / in the profile.
    """

    predicted: dict[str, float]
    measured: dict[str, float]
    brought: dict[str, float]
    slower: list[float]

    @property
    def preferred(self) -> str:
        """The plan that should be the fastest."""
        return min(self.predicted, key=self.predicted.__getitem__)

    @property
    def finalists(self) -> list[str]:
        """The plan that is preferred, and the fastest others."""
        others = sorted(self.brought, key=self.brought.__getitem__)
        return list(dict.fromkeys([self.preferred, *others]))[:N_FINALISTS]


def compared(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Return how well predictions do: error, rank."""
    names = list(predicted)
    errors = [abs(predicted[name] / measured[name] - 1.0) for name in names]
    rank = spearmanr([predicted[name] for name in names], [measured[name] for name in names])
    return {"error": sum(errors) / len(errors), "rank": float(cast("float", rank.statistic))}


def regret(preferred: str, final: Mapping[str, Sequence[float]]) -> float:
    """Return by which share the preferred plan is slower than the fastest one."""
    return median(final[preferred]) / min(map(median, final.values())) - 1.0


def verdict(
    turns: Sequence[Turn],
    plans: Mapping[str, Plan],
    profile: Profile,
    order_by: Callable[[Profile], PlanningRequest],
) -> Verdict:
    """Return what turns say of predictions.

    Args:
        turns: Of all plans.
        plans: By name.
        profile: Of the layers.
        order_by: What the planner was told, by a profile.
    """
    found = simulated(order_by(profile), plans)
    predicted = {name: way.seconds[1] for name, way in found.items()}
    shared = {name: overlap(way.cost) for name, way in found.items()}
    brought: dict[str, list[float]] = {name: [] for name in plans}
    paces = [turn.pace(shared[turn.plan]) for turn in turns]
    for turn, pace in zip(turns, paces, strict=True):
        order, name = order_by(at_pace(profile, pace)), turn.plan
        then = simulated(order, {name: plans[name]})[name].seconds[1]
        brought[name].append(turn.seconds * predicted[name] / then)
    return Verdict(
        predicted=predicted,
        measured={
            name: median(turn.seconds for turn in turns if turn.plan == name) for name in plans
        },
        brought={name: median(seconds) for name, seconds in brought.items()},
        slower=[slower(profile, pace) for pace in paces],
    )


def simulated(order: PlanningRequest, plans: Mapping[str, Plan]) -> dict[str, SimulatedPlan]:
    """Return each plan played through, as the planner would print it."""
    player = PlanSimulator(order)
    return {
        name: player.way(
            name,
            plan.placements,
            n_machines=plan.cluster.n_machines,
            micro_batches=plan.micro_batches,
        )
        for name, plan in plans.items()
    }
