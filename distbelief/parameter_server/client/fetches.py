"""The fetches of one client from one shard.

    begin --> (shared memory: at once)  -----------------------> complete --> installed
          --> Fetch, blocks in order, FetchAck, ..., FetchAck -->

All blocks of a fetch have one clock, because the shard pins one version for it. Each number is
copied once: from the published values or received blocks into the model's tensors. Where only what
has changed is fetched, or by how much the shards have moved, the client keeps the values as last
fetched, and sets those elements, or moves by those words, there (`fetch_logs`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, cast, final

import msgspec
import numpy as np
import torch

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.vectors import Vector, block_range, n_blocks
from distbelief.parameter_server.client.primary import ShardMemory
from distbelief.parameter_server.codecs import Int4, Int8, Residual, Words
from distbelief.parameter_server.fetch_logs import moves_of
from distbelief.parameter_server.layout import PartialView
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.parameter_server.tensor_copies import SeqlockVector, TensorCopier
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import Seconds


INSTALL_BLOCKS: Final = 8
"""Blocks worth an install while others are still to come."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class ShardReader:
    """What one install reads from one shard: a new session meanwhile changes nothing for it."""

    copy: Callable[[Sequence[torch.Tensor]], None]
    published: SeqlockVector | None  # where it reads; None: blocks
    clock: int | None  # of the blocks; None if there are more to come
    term: int  # that the values come from
    blocks: Sequence[Vector] = ()

    @property
    def readable(self) -> bool:
        return self.published is None or self.published.version % 2 == 0

    def read(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Copy into `tensors`; return the clock, or None if it was torn or more is to come."""
        if self.published is None:
            self.copy(tensors)
            return self.clock
        return self.published.read(partial(self.copy, tensors))


@final
class ShardFetch:
    """The fetches of one client from one shard. Invalid blocks raise RemoteProtocolError."""

    def __init__(
        self, config: ClientConfig, view: PartialView, index: int, memory: ShardMemory
    ) -> None:
        self._config, self._memory = config, memory
        self._later, self._index = view, index  # once frozen tensors are here
        self._view, self._slice = view.first, view.first.slices[index]
        self._payload: pf.Payload = msgspec.UNSET  # of this request
        self._term = 0
        self._first_clock = 0  # of that incarnation, as far as known
        self._copier: TensorCopier | None = None  # of the published values, once there are some
        self._block_copiers: dict[int, TensorCopier] = {}  # of the blocks that have come
        self._per_answer = config.blocks_per_answer
        self._request = 0
        self._block_clock = 0
        self._block_term = 0
        self._acked = 0  # blocks of this request the shard was told of
        self._by_blocks = True
        self._torn_since: Seconds | None = None
        self.received = 0  # blocks [0, received) of this request have come
        # Those of them that are not installed. They stay in the transport's memory.
        self._blocks: list[Vector] = []
        self._n_blocks = 0  # of this request, once the first has come
        self._n_words: pf.Words = msgspec.UNSET  # that they have, if they are of changed elements
        # The values as last fetched by blocks, where later only changed ones are; and which.
        self._known: Residual | None = None
        self._known_version = 0, 0
        self._known_copier: TensorCopier | None = None
        self._update: Callable[[Residual], None] | None = None  # by what has come; None: to that
        self.wanted = False  # a fetch has begun and is not installed
        self.is_held = False  # it has begun, but its request is not sent yet
        self.complete = True  # no block is to come
        self.clock = 0  # of the installed values; lowered when the shard restarts
        self.version = 0, 0  # shard incarnation and clock of the installed values
        self.bytes_in = 0  # of received blocks and of installs from shared memory

    def start(self, first_request: int) -> None:
        self._request = first_request

    @property
    def installable(self) -> bool:
        """Whether it is worth while to copy what has come into the tensors."""
        has_part = (
            not self._keeps_known and self._view.is_whole and len(self._blocks) >= INSTALL_BLOCKS
        )
        return self.wanted and (self.complete or has_part)

    def session_opened(self, opened: pf.SessionOpened) -> list[pf.Fetch]:
        """Read from this shard incarnation; restart an incomplete fetch."""
        if opened.term != self._term:
            # Staleness is counted within one incarnation of the shard.
            self.clock = min(self.clock, opened.clock)
            self._first_clock = opened.clock
        self._term = opened.term
        if self._memory.published is not None and self._copier is None:
            self._copier = self._view.copier(self._index)
        if self.wanted and not (self.is_held or (self._by_blocks and self.complete)):
            return self._begin(by_blocks=self._wants_blocks)
        return []

    def lost(self) -> None:
        """Drop an incomplete fetch: the shard is gone until the session opens."""
        if not (self._by_blocks and self.complete):
            self._restart(by_blocks=True)

    def begin(self, *, is_open: bool, exact: bool = False, is_held: bool = False) -> list[pf.Fetch]:
        """Begin a fetch; one that `is_held` asks the shard on `release`."""
        self.wanted, self.is_held = True, is_held
        exact |= self._view is not self._later  # frozen ones come once
        self._payload = msgspec.UNSET
        if self._config.averaged:
            self._payload = "averaged"
        elif self._config.fetch == "bfloat16" and not exact:
            self._payload = "bfloat16"
        elif self._keeps_known:
            self._payload = "moved" if isinstance(self._config.fetch, Int8 | Int4) else "changed"
        self._torn_since = None
        if is_open and not is_held:
            return self._begin(by_blocks=self._wants_blocks)
        self._request += 1  # late blocks of the fetch before are not of this one
        self._restart(by_blocks=True)
        return []

    def release(self) -> list[pf.Fetch]:
        """Ask the shard, whose session is open, for what was held."""
        self.is_held = False
        return self._begin(by_blocks=self._wants_blocks)

    def take(self, block: pf.ParameterBlock) -> list[pf.FetchAck]:
        """Keep a block if it is the next one; return the acknowledgement, if one is due."""
        if block.request != self._request or self.complete:
            return []
        sender = f"shard {self._index}"
        if not self.received:
            self._n_words, self._n_blocks = block.n_words, len(self._slice.bounds)
            if block.n_words is not msgspec.UNSET:
                self._n_blocks = n_blocks(block.n_words, itemsize=4)
        if block.n_words is not msgspec.UNSET and self._keeps_known:
            self._check_words(block, sender)
        else:
            words = self._payload == "bfloat16"
            self._slice.check_block(block.block_index, block.values, words=words, sender=sender)
        # Blocks are kept in order; the shard resends from the first missing one.
        if block.block_index != self.received:
            return []
        if self.received and block.clock != self._block_clock:
            raise RemoteProtocolError(
                f"{sender} mixes blocks of clocks {self._block_clock} and {block.clock}"
            )
        self._block_clock = block.clock
        self._block_term = self._term
        self._blocks.append(block.values)
        self.received += 1
        self.complete = self.received == self._n_blocks
        self._update = None
        if self.complete and self._n_words is not msgspec.UNSET:
            try:
                self._update = self._read_words(sender)
            except RemoteProtocolError:
                self._restart(by_blocks=True)
                raise
        self.bytes_in += block.values.nbytes
        if not self.complete and self.received - self._acked < self._per_answer:
            return []
        return [self._ack(again=False)]

    def again(self) -> list[pf.Fetch | pf.FetchAck]:
        """Return the message to repeat after a while without progress."""
        if self.complete or self.is_held:
            return []
        return [self._ack(again=True) if self.received else self._fetch()]

    @property
    def n_under_way(self) -> int:
        """Blocks that it has asked for."""
        if self.complete or self.is_held or not self._by_blocks:
            return 0
        n = self._n_blocks if self.received else len(self._slice.bounds)
        return min(n - self.received, self._config.credit_blocks)

    def reader(self) -> ShardReader:
        """Return what the install reads; call only if `installable`."""
        view, k, published = self._view, self._index, self._memory.published
        if self._by_blocks and self._keeps_known:
            version = self._block_term, self._block_clock
            copy_known = partial(
                self._copy_known, tuple(self._blocks), version, update=self._update
            )
            return ShardReader(copy_known, None, self._block_clock, self._block_term)
        if self._by_blocks:
            blocks, copiers = tuple(self._blocks), self._block_copiers
            first = self.received - len(blocks)

            def copy(tensors: Sequence[torch.Tensor]) -> None:
                for index, block in enumerate(blocks, first):
                    if index not in copiers:
                        copiers[index] = view.block_copier(k, index)
                    copiers[index].scatter(block, tensors)

            clock = self._block_clock if self.complete else None
            return ShardReader(copy, None, clock, self._block_term, blocks)
        assert published is not None
        assert self._copier is not None
        copy_all = partial(self._copier.scatter, published.values)
        return ShardReader(copy_all, published, 0, self._term)

    @property
    def _wants_blocks(self) -> bool:
        """Whether fetches go by blocks: what is published are the values, not their averages."""
        return self._config.averaged or self._memory.published is None

    @property
    def _keeps_known(self) -> bool:
        """Whether the values as last fetched are kept: not of the first fetch of frozen ones."""
        is_logged = self._config.fetch not in {"float32", "bfloat16"}
        return is_logged and self._view is self._later

    def _check_words(self, block: pf.ParameterBlock, sender: str) -> None:
        n_words, values = block.n_words or 0, block.values
        is_valid = n_words == (self._n_words or 0) and n_words <= 2 * self._slice.n_elements
        expected = len(block_range(block.block_index, n_words, itemsize=4))
        is_valid = is_valid and block.block_index < self._n_blocks
        if not is_valid or values.dtype != np.uint32 or values.size != expected:
            raise RemoteProtocolError(
                f"{sender} sent {values.size} elements of {values.dtype} as block "
                f"{block.block_index} of {n_words} words"
            )

    def _read_words(self, sender: str) -> Callable[[Residual], None]:
        """Return what brings the values as last fetched up to date by the words that have come."""
        words, n = cast("Words", np.concatenate(self._blocks)), self._slice.n_elements
        codec = self._config.fetch
        if isinstance(codec, Int8 | Int4):
            return moves_of(words, codec, n, n_parameters=self._slice.n_parameters)
        half = len(words) // 2
        places, numbers = words[:half], words[half:].view(np.float32)
        if len(words) % 2 or (places[1:] <= places[:-1]).any() or (places[-1:] >= n).any():
            raise RemoteProtocolError(f"{sender} sent changed elements that do not exist")

        def update(known: Residual) -> None:
            known[places] = numbers

        return update

    def _copy_known(
        self,
        blocks: tuple[Vector, ...],
        version: tuple[int, int],
        tensors: Sequence[torch.Tensor],
        *,
        update: Callable[[Residual], None] | None,
    ) -> None:
        """Bring the values as last fetched up to date, and copy all of them."""
        if update is None:
            self._known = cast("Residual", np.concatenate(blocks))
        else:
            assert self._known is not None
            update(self._known)
        self._known_version = version
        if self._known_copier is None:
            self._known_copier = self._view.copier(self._index, compact=True)
        self._known_copier.scatter(self._known, tensors)

    def part_installed(self, reader: ShardReader) -> None:
        """Let go of installed blocks, unless the fetch has begun anew."""
        n = len(reader.blocks)
        if n and len(self._blocks) >= n and self._blocks[0] is reader.blocks[0]:
            del self._blocks[:n]

    def installed(self, clock: int, reader: ShardReader) -> None:
        self.wanted, self.complete = False, True
        self._blocks.clear()
        self.version = reader.term, clock
        if reader.term != self._term:
            clock = min(clock, self._first_clock)
        self.clock = clock
        if reader.published is not None:
            self.bytes_in += self._slice.n_elements * self._slice.dtype.itemsize
        if self._view is not self._later:
            self._view, self._slice = self._later, self._later.slices[self._index]
            self._copier, self._block_copiers = self._copier and self._view.copier(self._index), {}

    def torn(self, now: Seconds) -> list[pf.Fetch]:
        """Note a torn read; after `torn_seconds_max`, fetch by blocks: writes starve no reader."""
        if self._by_blocks:
            return []  # the shard was lost in the meantime
        if self._torn_since is None:
            self._torn_since = now
        if now - self._torn_since < self._config.torn_seconds_max:
            return []
        return self._begin(by_blocks=True)

    def _begin(self, *, by_blocks: bool) -> list[pf.Fetch]:
        self._request += 1
        self._restart(by_blocks=by_blocks)
        return [self._fetch()] if by_blocks else []

    def _restart(self, *, by_blocks: bool) -> None:
        self._by_blocks = by_blocks
        self.complete = not (self.wanted and by_blocks)
        self.received = self._acked = 0
        self._blocks.clear()

    def _fetch(self) -> pf.Fetch:
        return pf.Fetch(
            request=self._request,
            term=self._term,
            credit=self._config.credit_blocks,
            payload=self._payload,
            holds=msgspec.UNSET if self._view is self._later else self._slice.all_stripes,
            since=self._since,
        )

    @property
    def _since(self) -> int | msgspec.UnsetType:
        """The clock of the values as last fetched, as far as this primary knows it."""
        term, clock = self._known_version
        has_known = self._keeps_known and self._known is not None
        return clock if has_known and term == self._term else msgspec.UNSET

    def _ack(self, *, again: bool) -> pf.FetchAck:
        self._acked = self.received
        return pf.FetchAck(
            request=self._request,
            term=self._term,
            received=self._acked,
            limit=self._acked + self._config.credit_blocks,
            again=again,
        )


# --- work for the executor ---


@final
@dataclass(frozen=True, slots=True)
class FetchResult:
    # Shards with torn or missing values. Until an install leaves none, the tensors are a mixture
    # of versions: do not use them.
    torn: tuple[int, ...]
    clocks: tuple[int, ...]  # per shard, the clock of what was copied; -1 for those in `torn`


def install(
    readers: Mapping[int, ShardReader], tensors: Sequence[torch.Tensor], *, known: Mapping[int, int]
) -> FetchResult:
    """Copy the values of shards into `tensors`, in the order of the layout or the selection.

    `known` has, per index, the clock of what was copied before; -1 for the others.
    """
    clocks = dict(known)
    for index, reader in readers.items():
        clock = reader.read(tensors)
        if clock is not None:
            clocks[index] = clock
    torn = tuple(index for index, clock in clocks.items() if clock < 0)
    return FetchResult(torn=torn, clocks=tuple(clocks.values()))
