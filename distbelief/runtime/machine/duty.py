"""What a machine computes for: training, or measuring. The role asks; see `machine`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch

from distbelief.messages import Begin, Evaluate, Stop
from distbelief.parameter_server.client.client import Installed
from distbelief.roles import Action, Computed, Cost, Seconds
from distbelief.runtime.execution.execution import Found, Put
from distbelief.runtime.machine.course import Chosen
from distbelief.runtime.machine.leading import Leader, Outgoing
from distbelief.runtime.machine.portions import Portion


Install = Callable[[], Installed]
"""Copies what was fetched into a duty's tensors, in the compute lane."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What a machine has of something that all of a step's machines decide together.

    Attributes:
        square: Sum of the squares of its part of the gradient; NaN if that is not
            finite.
        settle: Work: given the sum over all machines, and the sample that one of them
            blames, does with the result of the step what is to be done.
        cost: Of that.
        sample: Of the data set: this machine sees that it is not finite.
    """

    square: float
    settle: Callable[[float, int | None], object]
    cost: Cost
    sample: int | None = None


class Duty(Protocol):
    """What a machine computes for."""

    @property
    def values(self) -> Sequence[torch.Tensor]:
        """Flat tensors, one per item: what is fetched is copied into them."""
        ...

    @property
    def pushed(self) -> int | None:
        """Samples of what the shards have from it; None if it pushes nothing."""
        ...

    @property
    def is_settled(self) -> bool:
        """Whether nothing that it pushed is under way."""
        ...

    def may_fetch(self, *, ahead: bool) -> bool:
        """Return whether a fetch may begin now, `ahead`: while a step is under way."""
        ...

    def begin(self, position: int, now: Seconds) -> None:
        """A life begins there in the data."""
        ...

    def drop(self) -> None:
        """Give up the step under way, and what has accrued; the lane is idle."""
        ...

    def fetches_at(self, step: int) -> bool:
        """Return whether this step begins with a fetch."""
        ...

    def installing(self, work: Install) -> Install:
        """Return the work of an install, and what it is to do before and after it."""
        ...

    def fetched(self, seconds: Seconds) -> bool:
        """A fetch was installed; return whether it is what was wanted."""
        ...

    def open(self, step: int, chosen: Chosen, portion: Portion) -> Put:
        """A step begins; return what takes its gradients, in the compute lane."""
        ...

    def close(self, found: Found) -> object:
        """Do with the result of a step what is to be done in the compute lane.

        Returns:
            What `closed` is given; or a `Vote`, and then it is given what comes of
            that.
        """
        ...

    def closed(
        self, result: object, found: Found, chosen: Chosen, now: Seconds
    ) -> Sequence[Action]:
        """A step is over."""
        ...

    def work(self, *, final: bool) -> Sequence[Action]:
        """Return what is to be computed before the next step, or the end."""
        ...

    @property
    def is_due(self) -> bool:
        """Whether it cannot go on yet, but has nothing to compute either."""
        ...

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Something that `work` asked for is done."""
        ...

    def command(self, leader: Leader, message: Begin | Evaluate | Stop, now: Seconds) -> Outgoing:
        """The supervisor has told the leader something."""
        ...

    def report(
        self, leader: Leader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Return what the leader tells the supervisor, and does next."""
        ...

    @property
    def clock(self) -> float | None:
        """Mean clock of the values in use; None if it keeps none."""
        ...

    def figures(self) -> Mapping[str, float]:
        """Return counters."""
        ...
