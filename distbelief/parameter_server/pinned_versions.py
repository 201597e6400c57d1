"""Fetches by blocks: each one reads one pinned version of the shard's values.

    Fetch -> wait for a version -> blocks, FetchAck, ..., FetchAck

    values, clock 41      ->  version (clock 40): read by replica-3, replica-7
    (updated meanwhile)       version (clock 38): read by the evaluator over a slow link

A pin keeps one whole version while updates go on. There are at most `n_copies` versions. A version
is copied piece by piece, and readers get the blocks of a piece while the next one is copied; no
update begins before the last piece, so all blocks have one clock. A fetch shares a version of the
current clock; otherwise it waits, and all waiting fetches share the next version. A pin ends when
its reader has every block, fetches again, is gone, or makes no progress for `pin_seconds_max`.
A fetch never mixes two versions: once its pin has ended it is not served again. If the pin expired,
the client gets `SessionRefused` and fetches anew. A fetch of changes or moves (`fetch_logs`) has a
version of its own, of their words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import msgspec
import numpy as np

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.memory import Memory
from distbelief.core.reliable import Window
from distbelief.core.vectors import Element, Vector, block_of, n_blocks
from distbelief.parameter_server.bfloat16 import WORD
from distbelief.parameter_server.fetch_logs import ToWords
from distbelief.parameter_server.rules import EMA
from distbelief.parameter_server.sessions import Session, Sessions
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.slices import ShardSlice, payload_of
from distbelief.parameter_server.store import ShardStore
from distbelief.parameter_server.tensor_copies import convert
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import Action, Address, Cost, Seconds, Send, SetTimer


CREDIT_BLOCKS_MAX: Final = 64
"""Limit of the blocks under way to one reader."""

PIECE_BYTES: Final = 1 << 22
"""Copied as one piece: few blocks, so that the first are sent soon, and from the cache."""

TIMER: Final = "pins"


@final
@dataclass(slots=True, eq=False)
class Version:
    memory: Vector  # (shard_size,)
    values: Vector  # the numbers in it, or their words
    clock: int = 0
    n_readers: int = 0
    n_copied: int = 0  # elements [0, n_copied) are in it
    of: pf.Fetch | None = None  # for which it has words of changes or moves; None: all elements
    averaged: bool = False  # it has the running averages of parameters
    in_flight: bool = False  # blocks may be under way to a reader whose pin was ended here


@final
@dataclass(slots=True, eq=False)
class Pin:
    version: Version
    client: Session
    held: ShardSlice  # of the shard's vector, what the reader wants
    blocks: Window
    limit: int  # the reader wants no more than blocks [0, limit)
    expires: Seconds


@final
class PinnedVersions:
    """All versions of one shard's values, and their readers."""

    def __init__(
        self, config: ShardConfig, values: ShardStore, sessions: Sessions, *, memory: Memory
    ) -> None:
        self._n_copies = config.n_copies
        self._seconds_max = config.pin_seconds_max
        self._values = values
        self._sessions = sessions
        self._memory = memory
        self._versions: list[Version] = []
        self._pins: dict[Address, Pin] = {}
        self._timer_runs = False
        self.copying: Version | None = None  # until its last piece
        self.waiting: dict[Address, tuple[Session, pf.Fetch]] = {}
        self.bytes_out = 0

    def fetch(self, client: Session, message: pf.Fetch, now: Seconds) -> list[Action]:
        """Start a fetch, or handle a repeated request."""
        name = client.name
        self._dtype(message), self._held(client, message)  # they raise if it is invalid
        if message.request < client.request:
            return []
        if message.request > client.request:
            client.request = message.request
            self._end(name)
            others = [] if self._logged(client, message) is not None else self._versions
            for version in others:
                is_current = version.n_readers and version.clock == self._values.clock
                if is_current and self._fits(version, message):
                    return self._pin(client, message, version, now)
            self.waiting[name] = client, message
            return []
        if name in self.waiting:
            return [self._sessions.session_opened(client)]  # a sign of life
        pin = self._pins.get(name)
        if pin is None:
            return self._answer_ended(client)
        if pin.blocks.received == 0:  # the reader repeats its request and has nothing
            pin.blocks.again()
        return self._blocks(pin)

    def ack(self, client: Session, message: pf.FetchAck, now: Seconds) -> list[Action]:
        """Note what the reader has, and send what it allows; its pin ends if it has everything."""
        if message.request != client.request:
            return []
        pin = self._pins.get(client.name)
        if pin is None:
            return self._answer_ended(client)
        if pin.blocks.acked(message.received):
            pin.expires = now + self._seconds_max
        if message.received == pin.blocks.n:
            self._end(client.name)
            return []
        if message.received == pin.blocks.received:  # not overtaken by a later one
            pin.limit = max(pin.limit, message.limit)
            if message.again:
                pin.blocks.again()
        return self._blocks(pin)

    def timer(self, now: Seconds) -> list[Action]:
        """End the pins without progress, and watch the others."""
        self._timer_runs = False
        for pin in [pin for pin in self._pins.values() if pin.expires <= now]:
            self.expire(pin.client)
        return self._watch()

    def _watch(self) -> list[Action]:
        # One timer for all pins: a new pin expires after the others.
        if self._timer_runs or not self._pins:
            return []
        self._timer_runs = True
        return [SetTimer(name=TIMER, at=min(pin.expires for pin in self._pins.values()))]

    @property
    def wants_copy(self) -> bool:
        if not self.waiting:
            return False
        has_room = len(self._versions) < self._n_copies or self._free() is not None
        return has_room or self._next_logged() is not None

    def copy_work(self) -> tuple[Callable[[], int], Cost]:
        """Return the work that copies the next piece of a version, and its cost."""
        values, version = self._values.vector, self.copying
        if version is None:
            logged = self._next_logged()
            if logged is not None:
                return self._words_work(*logged)
            version = self._free()
            if version is None:
                assert len(self._versions) < self._n_copies, self._n_copies
                memory = np.zeros_like(values)
                version = Version(memory, memory)
                self._versions.append(version)
            # As the first that waits wants it; others with another payload get the next version.
            first = next(iter(self.waiting.values()))[1]
            words = first.payload == "bfloat16"
            version.values = self._values.slice_table.whole.room(version.memory, words=words)
            version.averaged = first.payload == "averaged"
            version.clock, version.n_copied = self._values.clock, 0
            self.copying = version
        # Each piece is as large as all before it: sending keeps pace, and few pieces are begun.
        n = max(version.n_copied, PIECE_BYTES // values.itemsize)
        piece = slice(version.n_copied, version.n_copied + n)
        source = values[piece]
        whole, stop = self._values.slice_table.whole, piece.start + len(source)
        target = version.values[
            slice(*whole.sent_range(piece.start, stop, dtype=version.values.dtype))
        ]
        n_parameters = whole.n_parameters_within(piece.start, stop)
        work = partial(convert, source, target, n_parameters=n_parameters)
        if version.averaged:
            average = self._values.state[EMA][piece]
            work = partial(_convert_averages, average, source, target, n_parameters=n_parameters)
        return work, Cost(n_bytes=float(source.nbytes + target.nbytes))

    def _logged(self, client: Session, message: pf.Fetch) -> ToWords | None:
        """Return what makes the words of what was since the last fetch, if they are to be sent."""
        log = self._values.log
        if log is None or message.payload != log.payload or message.since is msgspec.UNSET:
            return None
        return log.since(message.since, self._held(client, message).ranges)

    def _next_logged(self) -> tuple[pf.Fetch, ToWords] | None:
        """Return the first fetch that waits for such words."""
        if self._values.log is None:
            return None
        for client, message in self.waiting.values():
            to_words = self._logged(client, message)
            if to_words is not None:
                return message, to_words
        return None

    def _words_work(self, fetch: pf.Fetch, to_words: ToWords) -> tuple[Callable[[], int], Cost]:
        none, values = np.zeros(0, np.float32), self._values.vector
        version = self.copying = Version(none, none, clock=self._values.clock, of=fetch)

        def work() -> int:
            version.memory = version.values = to_words(values)
            return len(version.values)

        return work, Cost(n_bytes=float(values.nbytes))

    def copied(self, n_elements: int, now: Seconds) -> list[Action]:
        """Note a copied piece; pin the version for all waiting readers, and send them blocks."""
        version = self.copying
        if version is None:  # its readers left meanwhile
            return []
        version.n_copied += n_elements
        readers = [pin for pin in self._pins.values() if pin.version is version]
        if version.n_copied == len(version.memory):
            self.copying = None
        sent = [self._blocks(pin) for pin in readers]
        ready = [one for one in self.waiting.values() if self._fits(version, one[1])]
        if version.of is not None:
            ready = [one for one in self.waiting.values() if one[1] is version.of]
        for client, fetch in ready:
            del self.waiting[client.name]
            sent.append(self._pin(client, fetch, version, now))
        if not sent:
            self.copying = None
            if version.of is None:
                self._memory.retire(version.memory)
        return [action for actions in sent for action in actions]

    def expire(self, client: Session) -> None:
        """End the fetch of a client that may still read; blocks under way to it stay valid.

        The client learns of it if it comes back.
        """
        client.expired = client.request
        pin = self._pins.get(client.name)
        if pin is not None:
            pin.version.in_flight = True
        self._end(client.name)

    def _end(self, name: Address) -> None:
        self.waiting.pop(name, None)
        pin = self._pins.pop(name, None)
        if pin is None:
            return
        version = pin.version
        version.n_readers -= 1
        if version.n_readers == 0 and version.of is None:
            if version is self.copying:
                self.copying = None
            if version.in_flight:
                # That reader may still copy from the old memory: leave that memory to it.
                version.memory = version.values = np.zeros_like(version.memory)
                version.in_flight = False
            self._memory.retire(version.memory)

    def _pin(
        self, client: Session, message: pf.Fetch, version: Version, now: Seconds
    ) -> list[Action]:
        version.n_readers += 1
        held = self._held(client, message)
        n, values = len(held.bounds), version.values
        if version.of is not None:
            n = n_blocks(len(values), itemsize=values.itemsize)
        blocks, expires = Window(n), now + self._seconds_max
        pin = self._pins[client.name] = Pin(version, client, held, blocks, message.credit, expires)
        return [*self._watch(), *self._blocks(pin)]

    def _blocks(self, pin: Pin) -> list[Action]:
        client, version, blocks = pin.client, pin.version, pin.blocks
        log = self._values.log
        actions: list[Action] = []
        limit = pin.limit
        if version is self.copying:
            limit = min(limit, pin.held.n_blocks_within(version.n_copied))
        for index in blocks.due(min(limit - blocks.received, CREDIT_BLOCKS_MAX)):
            is_part = version.of is not None
            whole = version.values
            values = block_of(whole, index) if is_part else pin.held.block(whole, index)
            self.bytes_out += values.nbytes
            message = pf.ParameterBlock(
                request=client.request,
                term=self._sessions.term,
                block_index=index,
                clock=version.clock,
                values=values,
                payload=log.payload if is_part and log else payload_of(values),
                n_words=len(whole) if is_part else msgspec.UNSET,
            )
            # The memory of a version is lent to the driver.
            actions.append(Send(receiver=client.name, message=message, lent=True))
        return actions

    def _answer_ended(self, client: Session) -> list[Action]:
        # The client ended this fetch itself; the message is a late copy.
        if client.expired != client.request:
            return []
        reason = f"fetch {client.request} expired without progress: fetch again"
        return [self._sessions.refuse(client.name, reason)]

    def _held(self, client: Session, message: pf.Fetch) -> ShardSlice:
        if message.holds is msgspec.UNSET:
            return client.shard_slice
        return self._values.slice_table.get(message.holds)

    def _fits(self, version: Version, message: pf.Fetch) -> bool:
        is_averaged = message.payload == "averaged"
        return version.averaged == is_averaged and version.values.dtype == self._dtype(message)

    def _dtype(self, message: pf.Fetch) -> np.dtype[Element]:
        dtype = self._values.vector.dtype
        if message.payload == "averaged" and EMA not in self._values.state:
            raise RemoteProtocolError("a fetch asks for running averages, and the rule has no ema")
        if message.payload != "bfloat16":
            return dtype
        if dtype != np.float32:
            raise RemoteProtocolError(f"a fetch asks for bfloat16 of values of {dtype}")
        return WORD

    def _free(self) -> Version | None:
        for version in self._versions:
            if version.n_readers == 0 and version is not self.copying:
                return version
        return None


def _convert_averages(average: Vector, source: Vector, target: Vector, *, n_parameters: int) -> int:
    """Convert averages in place of the parameters, which come first; buffers have none."""
    both = np.concatenate([average, source[len(average) :]])
    return convert(both, target, n_parameters=n_parameters)
