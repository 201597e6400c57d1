"""What a machine of a group has: given whole to each part that acts for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from distbelief.parameter_server.client.client import ParameterClient
from distbelief.roles import Address
from distbelief.runtime.machine.courier import Courier
from distbelief.runtime.machine.course import Course
from distbelief.runtime.machine.duty import Duty
from distbelief.runtime.machine.ending import Ending
from distbelief.runtime.machine.leading import Leader
from distbelief.runtime.machine.living import Living
from distbelief.runtime.machine.portions import PortionsAhead
from distbelief.runtime.machine.renewing import Renewing
from distbelief.runtime.machine.stepping import Stepping
from distbelief.runtime.machine.voting import Voting


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """All that one machine has.

    Attributes:
        names: Of all machines of the group, its leader first.
        machine: Which of them.
        client: Of the shards that hold what it keeps.
        stepping: Its steps.
        couriers: Its links to the other machines.
        course: The samples of each step.
        portions: Its part of them.
        duty: What it computes for.
        parameters: Per item that it keeps, (*region.shape).
        living: Where in the life of the group it is.
        renewing: Its fetches.
        voting: What it says of a step, and all have.
        ending: When it may go.
        leader: If it leads.
    """

    names: Sequence[Address]
    machine: int
    client: ParameterClient
    stepping: Stepping
    couriers: Mapping[int, Courier]
    course: Course
    portions: PortionsAhead
    duty: Duty
    parameters: Sequence[torch.Tensor]
    living: Living
    renewing: Renewing
    voting: Voting
    ending: Ending
    leader: Leader | None

    @property
    def may_step(self) -> bool:
        """Whether the leader has granted the step under way, or the next."""
        return self.stepping.step < self.living.granted
