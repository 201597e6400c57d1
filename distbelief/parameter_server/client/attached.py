"""The memory of one shard that one client has attached: values to read, slots to fill.

Rules:

* A Welcome names both, or neither, or one. All that it names is attached, or nothing
  changes: what was attached before holds pushes in flight, which are copied from there
  once there is somewhere to copy them to.
* What is no longer used is released when the client says that no work touches it.
* Memory that cannot be attached, three times in a row, is done without: the next Hello
  names no host.
"""

from typing import final

from distbelief.errors import MemoryGoneError
from distbelief.memory import Memory
from distbelief.messages import Welcome
from distbelief.parameter_server.client.pushing import Room
from distbelief.parameter_server.layout.selection import Part
from distbelief.parameter_server.state.published import Published
from distbelief.parameter_server.state.slots import slot_views


N_ATTACH_MAX = 3
"""Failures in a row after which a client does without shared memory."""


@final
class Attached:
    """One shard's memory, as one client sees it.

    Attributes:
        published: The shard's values; None if they come by blocks.
        room: Slots to push into; None if pushes go by blocks.
    """

    def __init__(self, memory: Memory, part: Part) -> None:
        self._memory = memory
        self._part = part
        self._slots_name = ""
        self._held: set[str] = set()  # attached, if they were there, and not yet released
        self._n_failures = 0
        self.published: Published | None = None
        self.room: Room | None = None

    @property
    def host(self) -> str:
        """What to say in Hello."""
        return self._memory.host if self._n_failures < N_ATTACH_MAX else ""

    def forgive(self) -> None:
        """Somebody else leads, whose memory may well be there."""
        self._n_failures = 0

    def follow(self, welcome: Welcome) -> bool:
        """Attach what `welcome` names; return whether all of it was there.

        Raises:
            RemoteProtocolError: it is of another size.
        """
        try:
            published = self._published(welcome.parameters_region)
            room = self._room(welcome.slots_region)
        except MemoryGoneError:
            self._n_failures += 1
            return False
        self.published, self.room = published, room
        self._slots_name = welcome.slots_region
        return True

    def release(self) -> None:
        """Let go of what is no longer used; call when no work touches it."""
        if not self._held:  # as of every shard of another host
            return
        used = {self._slots_name}
        if self.published is not None:
            used.add(self.published.name)
        for name in self._held - used:
            self._memory.release(name)
        self._held &= used

    def _published(self, name: str) -> Published | None:
        if self.published is not None and self.published.name == name:
            return self.published
        if not name:
            return None
        self._held.add(name)
        return Published.attach(
            self._memory, name, n_elements=self._part.shard_size, dtype=self._part.dtype
        )

    def _room(self, name: str) -> Room | None:
        if name == self._slots_name:
            return self.room
        if not name:
            return None
        self._held.add(name)
        region = self._memory.attach(name)
        n_elements = self._part.holding.n_elements
        return slot_views(region, n_elements=n_elements, dtype=self._part.dtype)
