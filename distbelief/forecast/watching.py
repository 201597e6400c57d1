"""A simulated job, seen as its supervisor sees it, until it is over."""

from collections.abc import Callable
from typing import Final, cast

from distbelief.job.display.view import SupervisorView
from distbelief.job.supervision.supervisor import Supervisor
from distbelief.roles import SUPERVISOR
from distbelief.simulation.cluster import SimulatedCluster


N_EVENTS_MAX: Final = 10**10
N_EVENTS_BETWEEN: Final = 2000
"""Events between two words about how far it is."""


Tell = Callable[[SupervisorView], None]


def view_of(simulation: SimulatedCluster) -> SupervisorView:
    """Return what the supervisor knows now."""
    supervisor = cast("Supervisor", simulation.role(SUPERVISOR))
    return supervisor.view(simulation.now)


def told_until_over(simulation: SimulatedCluster, tell: Tell | None) -> Callable[[], bool]:
    """Return whether the job is over: to be asked after every event.

    Args:
        simulation: Of the job.
        tell: Told now and then how far it is.
    """
    n_events = 0

    def is_over() -> bool:
        nonlocal n_events
        n_events += 1
        if tell is not None and n_events % N_EVENTS_BETWEEN == 0:
            tell(view_of(simulation))
        # Asked of every event: who has halted is found by going through all roles.
        return not simulation.is_alive(SUPERVISOR) and SUPERVISOR in simulation.halted

    return is_over
