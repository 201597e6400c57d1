"""What a client knows of the primary of one shard, and its memory, if it is on the same host."""

from collections.abc import Sequence
from typing import Final, final

from distbelief.core.errors import MemoryGoneError
from distbelief.core.memory import Memory
from distbelief.parameter_server.layout import PartialView
from distbelief.parameter_server.tensor_copies import PushBuffers, SeqlockVector, push_buffer_views
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import Address


N_ATTACH_MAX: Final = 3
"""Failures in a row after which the client uses messages instead of shared memory."""


@final
class ShardPrimary:
    """Which copy of a shard is primary: the one of the highest term.

    With one copy, its incarnation is the term. A message of a lower term, or of an older
    incarnation of a copy, is late.
    """

    def __init__(self, copies: Sequence[Address]) -> None:
        self.address = copies[0]  # the one that opened the last session; at first, the first copy
        self.term = 0  # the highest known; 0 before the first
        self.incarnations = dict.fromkeys(copies, 0)

    def hear(self, copy: Address, incarnation: int, term: int | None) -> tuple[bool, bool]:
        """Return whether this shows that the primary is lost, and whether it comes too late."""
        before = self.incarnations[copy]
        if incarnation < before:
            return False, True
        self.incarnations[copy] = incarnation
        is_lost = copy == self.address and 0 < before < incarnation
        known, self.term = self.term, max(self.term, term or 0)
        return is_lost or self.term > known, term is not None and term < known


@final
class ShardMemory:
    def __init__(self, memory: Memory, view: PartialView, index: int) -> None:
        self._memory = memory
        self._slice, self._size = view.slices[index], view.layout.shard_size(index)
        self.published: SeqlockVector | None = None  # the values; None: they come in blocks
        self.push_buffers: PushBuffers | None = None  # None: pushes go in blocks
        self._push_region = ""
        self._held: set[str] = set()  # names of regions to release
        self.has_former = False  # whether some of them may be of former primaries
        self.n_failures = 0

    @property
    def host(self) -> str:
        return self._memory.host if self.n_failures < N_ATTACH_MAX else ""

    def attach(self, opened: pf.SessionOpened) -> bool:
        """Attach the regions that SessionOpened names; return whether all of them exist.

        On failure nothing changes: the old push buffers hold pushes in flight, which are copied
        to the new ones later.
        """
        published, push_buffers = self.published, self.push_buffers
        self.has_former = True
        values_region, push_region = opened.parameters_region, opened.push_buffers_region
        n_elements, dtype = self._slice.n_elements, self._slice.dtype
        try:
            if published is None or published.name != values_region:
                published = None
                if values_region:
                    self._held.add(values_region)
                    published = SeqlockVector.attach(
                        self._memory, values_region, n_elements=self._size, dtype=dtype
                    )
            if push_region != self._push_region:
                push_buffers = None
                if push_region:
                    self._held.add(push_region)
                    region = self._memory.attach(push_region)
                    push_buffers = push_buffer_views(region, n_elements=n_elements, dtype=dtype)
        except MemoryGoneError:
            self.n_failures += 1
            return False
        self.published, self.push_buffers, self._push_region = published, push_buffers, push_region
        return True

    def release(self) -> None:
        """Release memory of former primaries; call when no work touches it."""
        self.has_former = False
        used = {self._push_region, self.published.name if self.published else ""}
        for name in self._held - used:
            self._memory.release(name)
        self._held &= used
