"""Names of machines: machine M of replica R is "replica-R.M"; one place that knows.

Machine 0 of a group leads it. The machines that evaluate are a group too: "evaluator"
(whom the supervisor asks), "evaluator.1", "evaluator.2", ...
"""

import re
from dataclasses import dataclass
from typing import Final, final

from distbelief.roles import Address


EVALUATORS: Final = "evaluator"

_NAME: Final = re.compile(r"(replica-\d+)\.(\d+)|(evaluator)(?:\.([1-9]\d*))?")


@final
@dataclass(frozen=True, slots=True)
class Place:
    """One machine of a group.

    Attributes:
        group: "replica-3", or "evaluator".
        machine: Which of its machines; 0 leads.
    """

    group: str
    machine: int

    @property
    def replica(self) -> int | None:
        """Which replica the group is; None if it evaluates."""
        _, dash, index = self.group.partition("-")
        return int(index) if dash else None


def machine_name(replica: int, machine: int) -> Address:
    """Return the name of a machine of a model replica."""
    return member_name(f"replica-{replica}", machine)


def evaluator_name(machine: int) -> Address:
    """Return the name of a machine that evaluates."""
    return member_name(EVALUATORS, machine)


def member_name(group: str, machine: int) -> Address:
    """Return the name of a machine of this group."""
    if group == EVALUATORS and machine == 0:
        return Address(EVALUATORS)
    return Address(f"{group}.{machine}")


def member_names(group: str, n_machines: int) -> list[Address]:
    """Return the names of all machines of a group, its leader first."""
    return [member_name(group, machine) for machine in range(n_machines)]


def place_of(name: str) -> Place | None:
    """Return which machine is called so; None if none is."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Place(match[1] or match[3], int(match[2] or match[4] or 0))
