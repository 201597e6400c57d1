"""One turn of one plan, between two looks at how fast the machine is.

    pace   warm   step   step   pace        others had at most a fifth of a processor,
    |------|------|------|------|------|    and paces differ by a third: else void

The next turn begins with the pace at which this one has ended.
"""

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final, final

import msgspec

from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.plans.company import Company
from experiments.benchmarks.plans.pace import Pace, Paces, mean_pace


OTHERS_MAX: Final = 0.2
CHANGE_MAX: Final = 0.35
"""Of a turn that counts: processors that others may have, and by which share layers may
become slower or faster meanwhile."""


@final
class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one plan.

    Attributes:
        plan: Its name.
        seconds: Of a step, the median of those after the first.
        cpu_seconds: Of all its processes, per step.
        others: Processors that others kept busy meanwhile.
        before: How fast the machine was just before.
        after: And just after.
    """

    plan: str
    seconds: float
    cpu_seconds: float
    others: float
    before: Paces
    after: Paces

    @property
    def is_void(self) -> bool:
        """Whether the machine was not alone, or another one before than after."""
        before, after = self.before.seconds, self.after.seconds
        changes = max(before / after, after / before) > 1.0 + CHANGE_MAX
        return self.others > OTHERS_MAX or changes

    def pace(self, overlap: float) -> Pace:
        """Return the machine's during the turn, as well as can be told.

        Args:
            overlap: Which share is computed while other machines compute as well.
        """
        return mean_pace([self.before.at(overlap), self.after.at(overlap)])


def rounds(
    company: Company, plans: Sequence[str], *, n_rounds: int, n_steps: int, seconds_max: float
) -> Iterator[Turn]:
    """Yield the turns of all plans, one of each a round.

    Args:
        company: Machines that know them.
        plans: Their names.
        n_rounds: How many; in every other one the other way around.
        n_steps: Of a turn, beside the first, which warms up.
        seconds_max: After so many no other round begins, except the first.
    """
    until = time.monotonic() + seconds_max
    paces: dict[int, Paces] = {}  # by machines, the last
    for index, plan in enumerate(measurement.turns(plans, n_rounds=n_rounds)):
        if index and index % len(plans) == 0 and time.monotonic() > until:
            return
        yield _turn(company, plan, paces, n_steps=n_steps)


def counting(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns that count: all of a plan, if none of them does."""
    alone = {turn.plan for turn in turns if not turn.is_void}
    return [turn for turn in turns if not turn.is_void or turn.plan not in alone]


def _turn(company: Company, plan: str, paces: dict[int, Paces], *, n_steps: int) -> Turn:
    n_machines = company.n_machines(plan)
    before = paces.pop(n_machines, None) or company.paces(n_machines)
    taken = company.take(plan, n_steps=1 + n_steps)
    after = company.paces(n_machines)
    paces.clear()
    paces[n_machines] = after
    return Turn(
        plan=plan,
        seconds=median(taken.seconds[1:]),
        cpu_seconds=taken.cpu_seconds,
        others=taken.others,
        before=before,
        after=after,
    )
