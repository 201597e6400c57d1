"""The pushes of one client at one shard.

    sequence        7   8   9   10  11
                    [settled]  [sent ]  next         settled = 8, issued = 10
    buffer s mod 2              1   0

Push s is staged into buffer s mod 2 once push s - 2 is settled: acknowledged or lost. A push in
flight outlives its shard. The next primary tells in SessionOpened which pushes it has; the others
are sent again with the same sequence, so each push is applied once or lost. Lost pushes are those
acknowledged but missing in the values of the next primary.

Each number is copied once: from the gradients into the push buffer, which in shared memory is the
shard's own. Pushes that are encoded are put together in `residuals`; their words go in blocks.

Blocks of a dense push may leave while its gradient is still being computed, as they get full
(PO-1). The last one, and `Push`, stay here until all of it is found finite. Otherwise what has left
is void: the next attempt has the same sequence, and a higher number.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

import msgspec
import numpy as np
import torch

from distbelief.core.errors import LocalProtocolError, RemoteProtocolError
from distbelief.core.reliable import Transfer, Window
from distbelief.core.vectors import Vector, n_blocks
from distbelief.parameter_server.client.factored import PushEncoder
from distbelief.parameter_server.client.primary import ShardMemory
from distbelief.parameter_server.client.residuals import EncodedPush
from distbelief.parameter_server.layout import PartialView, TensorSpec
from distbelief.parameter_server.lost_pushes import Lost, lost_after, n_lost
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.parameter_server.tensor_copies import (
    N_PUSH_BUFFERS,
    PushBuffers,
    TensorCopier,
    push_block,
)
from distbelief.parameter_server.ticks import ShardTicks
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import Notes


@final
@dataclass(frozen=True, slots=True, eq=False)
class StageTarget:
    index: int  # of the shard
    copier: TensorCopier
    values: Vector  # (n_elements,)
    push: pf.Push  # without its counts
    blocks: Mapping[int, range]  # that have some of a tensor
    n_blocks: int


@final
class SendOrder:
    """Which blocks of pushes go first to shards on one host, which share its card.

    If it `is_used`, those of the oldest push, by index of the shard. So a shard has its push, and
    answers a fetch, while later ones are still under way.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.pushes: list[ShardPush] = []
        self.held: set[int] = set()  # shards to which blocks wait for their turn, and none is sent

    def n_ahead(self, push: "ShardPush", sequence: int) -> int:
        """Return how many blocks go before those of this push to this shard."""
        if not self.is_used:
            return 0
        return sum(
            other.n_under_way(until=sequence - (other.index > push.index))
            for other in self.pushes
            if other is not push and other.host == push.host
        )


@final
class ShardPush:
    def __init__(
        self,
        config: ClientConfig,
        view: PartialView,
        index: int,
        memory: ShardMemory,
        ticks: ShardTicks,
        residuals: PushEncoder | None,  # of all shards, where pushes are encoded
        order: SendOrder,
    ) -> None:
        self._config, self._memory, self._ticks = config, memory, ticks
        self._residuals = residuals
        self._order = order
        order.pushes.append(self)
        self.host: str | None = None  # of the primary, while its session is open; "": not known
        self._view, self.index, self._slice = view, index, view.slices[index]
        self._term = 0
        self._first_clock = 0  # of that primary, when it opened the session
        self._push_buffers: PushBuffers | None = None
        self._copier = view.copier(index, compact=True)
        self._per_answer = config.blocks_per_answer
        self._own_buffers: PushBuffers | None = None  # for pushes in blocks, created when needed
        self._by_blocks = False
        self.in_flight: deque[Transfer[pf.Push]] = deque()
        # The last of them, while only blocks of it may be sent: it is not issued yet.
        self.early: Transfer[pf.Push] | None = None
        self.sends_early = False  # whether some blocks may leave before all are full
        self._attempt = 0  # at pushes of one sequence; it never falls
        self._blocks_of: Mapping[int, range] = {}
        self._n_issued = 0
        self.issued = 0  # the last used sequence
        self.settled = 0  # no push up to it awaits anything
        # Issued pushes that are not in the shard's values and never will be, numbered from 1 in
        # each incarnation of the client.
        self.lost: Lost = ()
        self.clock = 0  # the newest known clock of the current primary
        self._is_dealt = False  # the last push was of dealt samples
        self.bytes_out = 0  # of sent blocks and filled buffers

    def start(self, first_sequence: int) -> None:
        self.issued = self.settled = first_sequence - 1

    def agrees(self, opened: pf.SessionOpened) -> bool:
        """Return whether the shard knows every settled push; if not, open the session again."""
        # An incarnation that did not rise would reuse sequences that the shard has applied.
        if opened.watermark > self.issued:
            raise LocalProtocolError(
                f"shard {self.index} knows push {opened.watermark} of this client, whose last "
                f"is {self.issued}: incarnations must rise, also in a resumed run"
            )
        return opened.watermark >= self.settled

    def session_opened(self, opened: pf.SessionOpened) -> None:
        """Push into the attached buffers from now on, or in blocks if there are none.

        Pushes in flight are moved there; `again` sends them.
        """
        if self._residuals is not None:
            self._residuals.opened(self.index, opened.samples)
        if opened.term != self._term:
            self._term = opened.term
            self._first_clock = self.clock = opened.clock
        self.clock = max(self.clock, opened.clock)
        self._settle(opened.watermark)
        n_issued_here = len(self.in_flight) - (self.early is not None)
        n_settled, n_before = self._n_issued - n_issued_here, n_lost([self.lost])
        self.lost = lost_after(self.lost, seen=n_settled, kept=opened.applied)
        if self._is_dealt and n_lost([self.lost]) > n_before:
            self._forget_rest()
        self._push_buffers = self._memory.push_buffers
        self._by_blocks = self._push_buffers is None
        has_more = len(self._slice.bounds) > 1
        self.sends_early = self._by_blocks and has_more and self._residuals is None
        if self._push_buffers is None:
            if self._own_buffers is None:
                n = 0 if self._residuals else self._slice.n_elements
                one, other = np.zeros((N_PUSH_BUFFERS, n), self._slice.dtype)
                self._own_buffers = one, other
            self._push_buffers = self._own_buffers
        for in_flight in self.in_flight:
            if in_flight is not self.early:  # which is still being filled where it lies
                self._move(in_flight)
            # The shard may have released the old buffers of a client that it believed gone.
            held = in_flight.blocks.held
            in_flight.blocks = self._window(in_flight.values, held=held)

    def stage_target(
        self, *, fetched_clock: int, touched: Sequence[object | None] | None
    ) -> StageTarget:
        """Return where to stage the next push; it changes `touched` tensors, or None for all."""
        assert self._push_buffers is not None
        values = self._push_buffers[(self.issued + 1) % N_PUSH_BUFFERS]
        if self._residuals is not None:
            values = self._residuals.staging(self.index)
        elif not self._blocks_of:
            self._blocks_of = self._view.blocks_of(self.index)
        push = pf.Push(
            sequence=self.issued + 1,
            term=self._term,
            fetched_clock=fetched_clock,
            n_gradients=0,
            samples=0,
            attempt=self._attempt or msgspec.UNSET,
        )
        target = StageTarget(
            index=self.index,
            copier=self._copier,
            values=values,
            push=push,
            blocks=self._blocks_of,
            n_blocks=len(self._slice.bounds),
        )
        return self.described(target, fetched_clock=fetched_clock, touched=touched)

    def described(
        self, target: StageTarget, *, fetched_clock: int, touched: Sequence[object | None] | None
    ) -> StageTarget:
        touches = None if touched is None else self._view.stripes_of(self.index, touched)
        changed = {"fetched_clock": fetched_clock, "touches": touches}
        return replace(target, push=msgspec.structs.replace(target.push, **changed))

    def filled(
        self, staged: StageTarget, blocks: Sequence[int], *, is_open: bool
    ) -> list[pf.PushBlock | pf.Push]:
        """These blocks of what is being staged are full: send them, but never the last one."""
        if self.early is None:
            self.early = Transfer(staged.push, staged.values, self._window(staged.values), order=[])
            self.in_flight.append(self.early)
        early, n = self.early, staged.n_blocks
        early.order = [*(early.order or ()), *blocks]
        early.blocks.held = n - min(len(early.order), n - 1)
        return self._send(early) if is_open else []

    def abandon(self) -> None:
        """Nothing of what was staged is pushed: blocks that have left are void."""
        if self.early is not None:
            self.in_flight.remove(self.early)
            self.early = None
            self._attempt += 1

    def issue(
        self,
        staged: StageTarget,
        encoded: EncodedPush | None,
        *,
        is_open: bool,
        **counts: pf.Ticks | pf.Dealt | pf.Rates,
    ) -> list[pf.PushBlock | pf.Push]:
        """Send what was staged; if the session is not open, that waits for `session_opened`."""
        self.issued += 1
        self._n_issued += 1
        push, values = msgspec.structs.replace(staged.push, **counts), staged.values
        self._is_dealt = push.dealt is not msgspec.UNSET
        if encoded is not None:
            values = encoded.words[self.index]
            push = msgspec.structs.replace(push, form=encoded.form, n_words=len(values))
        in_flight, self.early = self.early, None
        if in_flight is None:
            in_flight = Transfer(push, values, self._window(values))
            self.in_flight.append(in_flight)
        else:
            # A number stands for the same block as long as this attempt lasts.
            in_flight.message, order, n = push, in_flight.order or (), in_flight.blocks.n
            in_flight.order = [*order, *sorted({*range(n)}.difference(order))]
            in_flight.blocks.held = 0
        self._move(in_flight)
        if not self._by_blocks:
            self.bytes_out += staged.values.nbytes
        return self._send(in_flight) if is_open else []

    def blocks_acked(
        self, message: pf.PushBlockAck
    ) -> tuple[int, Sequence[pf.PushBlock | pf.Push]]:
        """Return how many more blocks the shard has, and the messages to send now."""
        for in_flight in self.in_flight:
            push, blocks = in_flight.message, in_flight.blocks
            if push.sequence == message.sequence and push.attempt == message.attempt:
                before = blocks.received
                is_news = blocks.acked(message.received)
                more = self._send(in_flight) if is_news and self._by_blocks else ()
                return blocks.received - before, more
        return 0, ()

    def acknowledged(self, message: pf.PushApplied) -> bool:
        """Settle every push up to the acknowledged one; return whether there was one."""
        if message.sequence > self.issued:
            raise RemoteProtocolError(
                f"shard {self.index} acknowledges push {message.sequence} of {self.issued}"
            )
        if message.sequence <= self.settled:
            return False
        self._settle(message.sequence)
        self.clock = max(self.clock, message.clock)
        if message.dropped is not msgspec.UNSET:
            self._forget_rest()
        return True

    def _forget_rest(self) -> None:
        # Samples of lost pushes are dealt again, and what is held back has some of them already.
        if self._residuals is not None:
            self._residuals.forget([self.index])

    def again(self) -> list[pf.PushBlock | pf.Push]:
        """Return the messages to repeat after a while without an answer."""
        messages: list[pf.PushBlock | pf.Push] = []
        for in_flight in self.in_flight:
            in_flight.again()
            messages += self._send(in_flight)
        return messages

    def more(self) -> list[pf.PushBlock | pf.Push]:
        """Return the blocks whose turn has come."""
        waiting = self.in_flight if self._by_blocks else ()
        return [message for in_flight in waiting for message in self._send(in_flight)]

    @property
    def n_unanswered(self) -> int:
        """Blocks that were sent, and that the shard has not acknowledged."""
        return sum(one.blocks.sent - one.blocks.received for one in self.in_flight)

    def n_under_way(self, *, until: int) -> int:
        """Return how many blocks of pushes up to this one the shard has still to acknowledge."""
        if not self._by_blocks:
            return 0
        each = self._per_answer  # the last ones, if fewer, are only acknowledged with the push
        windows = [one.blocks for one in self.in_flight if one.message.sequence <= until]
        ends = [one.n - one.held if one.held else one.n // each * each for one in windows]
        return sum(max(n - one.received, 0) for n, one in zip(ends, windows, strict=True))

    def _settle(self, sequence: int) -> None:
        self.settled = max(self.settled, sequence)
        while self.in_flight and self.in_flight[0].message.sequence <= self.settled:
            tick = self.in_flight.popleft().message.tick
            if tick is not msgspec.UNSET:
                self._ticks.settled(tick)

    def _move(self, in_flight: Transfer[pf.Push]) -> None:
        assert self._push_buffers is not None
        push = in_flight.message
        buffer = self._push_buffers[push.sequence % N_PUSH_BUFFERS]
        if self._residuals is None and in_flight.values is not buffer:
            np.copyto(buffer, in_flight.values)
            in_flight.values = buffer
        if push.term != self._term:
            # Staleness is counted within one incarnation of the shard.
            in_flight.message = msgspec.structs.replace(
                push, term=self._term, fetched_clock=min(push.fetched_clock, self._first_clock)
            )

    def _send(self, in_flight: Transfer[pf.Push]) -> list[pf.PushBlock | pf.Push]:
        if not self._by_blocks:
            if in_flight is self.early:
                return []
            in_flight.is_sent = True
            return [in_flight.message]
        credit, blocks = self._config.credit_blocks, in_flight.blocks
        n_ahead = self._order.n_ahead(self, in_flight.message.sequence)
        if n_ahead:  # the last ones keep the link busy until these come
            credit = 0 if n_ahead > self._per_answer else max(credit - n_ahead, self._per_answer)
        messages = in_flight.due(partial(self._block, in_flight), credit=credit)
        if blocks.sent == blocks.received < blocks.n - blocks.held:
            self._order.held.add(self.index)
        self.bytes_out += sum(
            one.values.nbytes for one in messages if isinstance(one, pf.PushBlock)
        )
        return messages

    def _window(self, values: Vector, *, held: int = 0) -> Window:
        if values.dtype == self._slice.dtype:
            return Window(len(self._slice.bounds), held=held)
        return Window(n_blocks(len(values), itemsize=values.itemsize))

    def _block(self, in_flight: Transfer[pf.Push], number: int) -> pf.PushBlock:
        push, order, blocks = in_flight.message, in_flight.order, in_flight.blocks
        # The next ones may be full much later: until then the shard owes nothing.
        is_last = blocks.held > 0 and number + 1 == blocks.n - blocks.held
        return push_block(
            in_flight.values,
            number if order is None else order[number],
            sequence=push.sequence,
            term=self._term,
            answer=is_last or (number + 1) % self._per_answer == 0,
            number=msgspec.UNSET if order is None else number,
            attempt=push.attempt,
        )


# --- work for the executor ---


@final
@dataclass(frozen=True, slots=True)
class PushResult:
    finite: bool  # whether all numbers are finite; if not, nothing is pushed
    culprits: tuple[str, ...] = ()  # names of the tensors with NaN or infinity
    encoded: EncodedPush | None = None  # if the push is


@final
@dataclass(frozen=True, slots=True)
class FullBlocks:
    """A note of a draft: which blocks have got full, and can be sent."""

    targets: Sequence[StageTarget]  # of the draft
    blocks: Sequence[Sequence[int]]  # of each


@final
@dataclass(slots=True, eq=False)
class PushDraft:
    """A push that is filled tensor by tensor, in one executor, while backward continues.

    All tensors are copied and checked before a push is closed, so one with NaN is applied nowhere.
    """

    _targets: Sequence[StageTarget]  # one per shard
    _specs: Sequence[TensorSpec]  # all tensors of the push
    _encode: Callable[[], EncodedPush | list[int]] | None  # how it is encoded, if it is
    notes: Notes | None = None  # where it tells which blocks are full; None: nobody asks
    is_void: bool = False  # a gradient has changed after it was put
    _n_missing: list[list[int]] = field(default_factory=list)  # tensors, by target and block
    _put: set[int] = field(default_factory=set)
    _culprits: list[int] = field(default_factory=list)

    def put(self, index: int, tensor: torch.Tensor) -> None:
        """Copy a gradient, a buffer's value or a counter's change into every shard's push buffer.

        The tensor, (n_elements,), may be overwritten as soon as this returns.
        """
        self.put_each({index: tensor})

    def put_each(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Put several."""
        for index in tensors:
            if index in self._put or not 0 <= index < len(self._specs):
                raise LocalProtocolError(
                    f"tensor {index} of {len(self._specs)} is put twice: sum gradients first"
                )
        sums = [one.copier.put_all(tensors, one.values) for one in self._targets]
        if self.notes is not None:
            self._tell(self.notes, tensors)
        self._put.update(tensors)
        for place, (index, tensor) in enumerate(tensors.items()):
            # A sum of finite numbers may overflow, so look at each element then.
            is_finite = math.isfinite(sum(one[place] for one in sums))
            if not (is_finite or bool(torch.isfinite(tensor).all())):
                self._culprits.append(index)

    def __contains__(self, index: int) -> bool:
        """Return whether a tensor was put."""
        return index in self._put

    def has(self, index: int, tensor: torch.Tensor) -> bool:
        """Return whether a tensor that was put still has the bits that it had then."""
        return all(one.copier.has(index, tensor, one.values) for one in self._targets)

    def _tell(self, notes: Notes, tensors: Iterable[int]) -> None:
        if not self._n_missing:
            for target in self._targets:
                target.copier.zero_padding(target.values)
                counts = Counter(block for blocks in target.blocks.values() for block in blocks)
                self._n_missing.append([counts[block] for block in range(target.n_blocks)])
        full: list[list[int]] = []
        for target, missing in zip(self._targets, self._n_missing, strict=True):
            full.append([])
            for index in tensors:
                for block in target.blocks.get(index, ()):
                    missing[block] -= 1
                    if not missing[block]:
                        full[-1].append(block)
        if any(full):
            n = sum(self._specs[index].n_elements for index in (*self._put, *tensors))
            n_all = sum(spec.n_elements for spec in self._specs)
            notes.tell(FullBlocks(self._targets, full), n / n_all)

    def put_all(
        self, gradients: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor]
    ) -> PushResult:
        """Copy all gradients, None for zeros, and the values of buffers; see `finish`."""
        for index, (gradient, value) in enumerate(zip(gradients, values, strict=True)):
            tensor = gradient if self._specs[index].kind == "parameter" else value
            if tensor is not None:
                self.put(index, tensor)
        return self.finish()

    def finish(self) -> PushResult:
        """Fill the rest with zeros; return whether all that was put is finite.

        LocalProtocolError if a buffer is missing: zeros would spoil its average.
        """
        for index, spec in enumerate(self._specs):
            if index in self._put:
                continue
            if spec.kind != "parameter" and spec.n_elements:
                raise LocalProtocolError(
                    f"buffer {spec.name!r} was not put into the draft of a push: put its value"
                )
            for target in self._targets:
                target.copier.put(index, None, target.values)
        for target in self._targets:
            target.copier.zero_padding(target.values)
        self._put.update(range(len(self._specs)))
        encoded = self._encode() if self._encode is not None and not self._culprits else None
        if isinstance(encoded, EncodedPush):
            return PushResult(finite=True, encoded=encoded)
        culprits = sorted(self._culprits) if encoded is None else encoded
        names = tuple(self._specs[index].name for index in culprits)
        return PushResult(finite=not names, culprits=names)
