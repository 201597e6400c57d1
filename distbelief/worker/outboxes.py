"""Messages between ranks of one host, in memory that both have mapped.

    the outbox of one rank for another one

    | generation (64 bytes) | messages of even steps | messages of odd steps |

The sender makes it and writes every message of a step to a place of its own; the receiver computes
on it there. What one rank reads no other overwrites:

* A rank begins step s once all have computed step s - 2 (`group.AHEAD`), the last one that lay in
  the same half. What outlives its step is copied (`PartitionExecutor`).
* A rank begins the first step of a generation once all are ready for it: with nothing of an
  earlier one under way.
* A process that another one has replaced was not asked whether it is ready, and may still read.
  So the sender writes its generation before the first message of it, and a reader looks at that
  after its last look at a message: a later one means that it may have read anything.
* A sender that has restarted makes another outbox. The former one stays as it is, as long as it is
  mapped.
"""

from collections.abc import Iterable, Mapping
from typing import Final, final

import numpy as np

from distbelief.core.errors import PeerLostError, RemoteProtocolError, StorageError
from distbelief.core.memory import HEADER_BYTES, Memory, Region, attach_all
from distbelief.core.vectors import Element, Vector
from distbelief.protocol.role import Address
from distbelief.worker.group import AHEAD


Place = tuple[int, int]  # way and micro-batch of a message
Places = Mapping[Place, "slice[int, int, None]"]  # the bytes of each message of a step

_ALIGNMENT: Final = 64  # bytes


def places_of(sizes: Iterable[tuple[Place, int]]) -> Places:
    """Return where messages of these bytes lie, one after the other."""
    places: dict[Place, slice[int, int, None]] = {}
    end = 0
    for place, n_bytes in sizes:
        places[place] = slice(end, end + n_bytes)
        end += n_bytes + -n_bytes % _ALIGNMENT
    return places


def _size(places: Places) -> int:
    end = max((place.stop for place in places.values()), default=0)
    return HEADER_BYTES + AHEAD * (end + -end % _ALIGNMENT)


@final
class Outbox:
    def __init__(self, region: Region, places: Places) -> None:
        self.generation = region[:HEADER_BYTES].view(np.int64)[:1]
        self.halves = np.split(region[HEADER_BYTES:], AHEAD)
        self._places = places

    def room(self, step: int, place: Place, n: int, dtype: "np.dtype[Element]") -> Vector | None:
        """Return the memory of a message of n numbers; None if it is too large for its place."""
        room = self.halves[step % AHEAD][self._places[place]].view(dtype)
        return room[:n] if n <= len(room) else None


@final
class SharedLink:
    """The outboxes of two ranks for each other, as far as they are on one host."""

    def __init__(
        self, memory: Memory, own: Address, peer: Address, *, sent: Places, received: Places
    ) -> None:
        self._memory = memory
        self._own, self._peer = own, peer
        self._sent, self._received = sent, received
        self._outbox: Outbox | None = None
        self._inbox: tuple[str, Outbox] | None = None  # the peer's, and its name
        self.is_used = False  # whether messages to the peer go this way

    def join(self, host: str, incarnation: int) -> str | None:
        """The peer is on this host; return why messages to it go in blocks, if that is news."""
        self.is_used = bool(host and host == self._memory.host and self._sent)
        if self.is_used and self._outbox is None:
            name = _name(self._own, incarnation, self._peer)
            try:
                region = self._memory.create(name, n_bytes=_size(self._sent))
            except StorageError as error:
                self.is_used = False
                return f"{self._peer} is sent messages in blocks, not in shared memory: {error}"
            self._outbox = Outbox(region, self._sent)
        return None

    def begin(self, generation: int, step: int) -> None:
        """A step begins: nobody reads any more what was sent two steps before."""
        if self._outbox is not None:
            self._outbox.generation[0] = generation
            self._memory.retire(self._outbox.halves[step % AHEAD].view(np.float32))

    def room(self, step: int, place: Place, n: int, dtype: "np.dtype[Element]") -> Vector | None:
        """Return where a message goes; None if it goes in blocks."""
        if self._outbox is None or not self.is_used:
            return None
        return self._outbox.room(step, place, n, dtype)

    def read(
        self, incarnation: int, step: int, place: Place, n: int, dtype: "np.dtype[Element]"
    ) -> Vector:
        """Return a message of this incarnation where it lies, or raise MemoryGoneError."""
        name = _name(self._peer, incarnation, self._own)
        if self._inbox is None or self._inbox[0] != name:
            region = attach_all(self._memory, name, n_bytes=_size(self._received))
            if self._inbox is not None:
                self._memory.release(self._inbox[0])
            self._inbox = name, Outbox(region, self._received)
        room = self._inbox[1].room(step, place, n, dtype)
        if room is None:
            raise RemoteProtocolError(
                f"{self._peer} sent {n} numbers of {dtype}, more than its memory has room for"
            )
        return room

    def check(self, generation: int) -> None:
        """Raise PeerLostError if what was read in this generation may have been overwritten."""
        if self._inbox is not None and int(self._inbox[1].generation[0]) > generation:
            raise PeerLostError(
                f"{self._peer} has begun another generation: {self._own} was replaced meanwhile"
            )


def _name(sender: Address, incarnation: int, receiver: Address) -> str:
    return f"{sender}.{incarnation}.to-{receiver}"
