"""What a machine is doing, in a word, and whom it waits for, by name."""

from collections.abc import Sequence
from typing import Final, final

from distbelief.parameter_server.client import ParameterClient
from distbelief.roles import Address
from distbelief.runtime.leading import Leader
from distbelief.runtime.living import Living, Phase
from distbelief.runtime.stepping import CHAIN, Stepping


_IDLE: Final = {Phase.GATHERED: "waiting for begin", Phase.RUNNING: "reading"}


@final
class Whereabouts:
    """Tells of one machine.

    Args:
        names: Of all machines of the group.
        machine: Which of them.
        client: Of the shards.
        stepping: Its steps.
        living: Its life.
        leader: If it leads.
    """

    def __init__(
        self,
        names: Sequence[Address],
        machine: int,
        *,
        client: ParameterClient,
        stepping: Stepping,
        living: Living,
        leader: Leader | None,
    ) -> None:
        self._names = names
        self._machine = machine
        self._client = client
        self._stepping = stepping
        self._living = living
        self._leader = leader

    def state(self, lane: str, *, counts: bool) -> str:
        """Return what it is doing.

        Args:
            lane: The work under way in the compute lane, or "".
            counts: Whether a step is computed, and it waits for what all have of it.
        """
        if lane and lane != CHAIN:
            return lane.removeprefix("machine:")
        machine = self._awaited(lane, counts=counts)
        if machine is not None and machine != self._machine:
            return f"waiting for {self._names[machine]}"
        if lane or self._stepping.is_open:
            return "computing"
        waited = self._client.waiting_for
        if waited is not None:
            return f"waiting for {waited}"
        phase = self._living.phase
        return _IDLE.get(phase, phase.value)

    def _awaited(self, lane: str, *, counts: bool) -> int | None:
        """Return the machine that this one waits for, if it does."""
        leader, stepping = self._leader, self._stepping
        may_step = stepping.step < self._living.granted
        match self._living.phase:
            case Phase.RUNNING if stepping.is_open:
                return None if lane else stepping.awaited
            case Phase.RUNNING if counts or not may_step:
                return 0 if leader is None else leader.slowest
            case Phase.ALONE | Phase.GATHERED if leader is None:
                return 0
            case Phase.GATHERED if leader is not None and leader.waiting_for:
                return min(leader.waiting_for)
            case _:
                return None
