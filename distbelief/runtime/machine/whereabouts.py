"""What a machine is doing, in a word, and whom it waits for, by name."""

from typing import Final, final

from distbelief.runtime.machine.equipment import Equipment
from distbelief.runtime.machine.living import Phase
from distbelief.runtime.machine.stepping import CHAIN


_IDLE: Final = {Phase.GATHERED: "waiting for begin", Phase.RUNNING: "reading"}


@final
class Whereabouts:
    """Tells of one machine.

    Args:
        own: All that the machine has.
    """

    def __init__(self, own: Equipment) -> None:
        self._own = own

    def state(self, lane: str) -> str:
        """Return what it is doing.

        Args:
            lane: The work under way in the compute lane, or "".
        """
        own = self._own
        if lane and lane != CHAIN:
            return lane.removeprefix("machine:")
        if own.leader is not None and own.leader.is_held:
            return "waiting for more samples"
        machine = self._awaited(lane)
        if machine is not None and machine != own.machine:
            return f"waiting for {own.names[machine]}"
        if lane or own.stepping.is_open:
            return "computing"
        waited = own.client.waiting_for
        if waited is not None:
            return f"waiting for {waited}"
        phase = own.living.phase
        return _IDLE.get(phase, phase.value)

    def _awaited(self, lane: str) -> int | None:
        """Return the machine that this one waits for, if it does."""
        own, leader = self._own, self._own.leader
        match own.living.phase:
            case Phase.RUNNING if own.stepping.is_open:
                return None if lane else own.stepping.awaited
            case Phase.RUNNING if own.voting.is_open or not own.may_step:
                return 0 if leader is None else leader.slowest
            case Phase.ALONE | Phase.GATHERED if leader is None:
                return 0
            case Phase.GATHERED if leader is not None and leader.waiting_for:
                return min(leader.waiting_for)
            case _:
                return None
