"""The values of a shard, the optimizer state and the clock: everything that a push changes.

The values are published in a seqlock vector that clients on this host can read, if there is shared
memory. From `begin_push` to `end_push` they are marked as being written; the work between runs
outside the role, and nothing else may touch them.

Buffers are averages over the n clients that push (`Sessions.n_averaged`): v += (pushed - v) / n.
With n = 1 they are exactly what was pushed, so one replica has the BatchNorm of sequential
training. Of counters the clients push what they have added: v += pushed / n.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, final

import msgspec
import numpy as np
import torch

from distbelief.core import vectors
from distbelief.core.errors import LocalProtocolError, RemoteProtocolError, StorageError
from distbelief.core.memory import Memory
from distbelief.core.spans import NOTHING, Spans
from distbelief.core.vectors import ALIGNMENT, Element, Vector, padded
from distbelief.parameter_server.bfloat16 import as_tensor
from distbelief.parameter_server.checkpoint import ShardState, restore
from distbelief.parameter_server.codecs import Int4, Int8, warm_up
from distbelief.parameter_server.fetch_logs import ChangeLog, FetchLog, MoveLog
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.parameter_server.ranges import IndexRanges, RangeCopier
from distbelief.parameter_server.rules import EMA, State, UpdateRule, classes_on, initial_state
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.slices import ShardSlice, SliceTable
from distbelief.parameter_server.step_counts import StepCounts
from distbelief.parameter_server.tensor_copies import (
    PIECE,
    EncodedNumbers,
    Numbers,
    Pushed,
    SeqlockVector,
)
from distbelief.protocol import push_fetch as pf, replication as rp
from distbelief.protocol.role import Cost, Snapshot


# --- updates of slices ---
#
#     values   |..aaaa....bb..bb..bb....|      a: long, updated in place
#     state    |..aaaa....bb..bb..bb....|      b: copied out, updated, copied back,
#     pushed   |aaaabbbbbb|                       in pieces that stay in the cache
#
# Torch's kernels treat the last few elements of an array differently. So every piece is padded
# with zeros to a multiple of `ALIGNMENT`, and a partial push gives the bits of a whole one.

Update = Callable[[Sequence[Vector], Vector], None]
"""update(vectors, pushed) changes the vectors, each (n,), in place."""

_IN_PLACE_MIN: Final = 1 << 14
"""Elements from which a range is updated in place."""

_Piece = tuple[int, int | RangeCopier, int | RangeCopier]
"""How many elements are updated together, and where they are in the shard's vectors and in the
pushed vector: the first of them, if contiguous."""


@final
class SliceUpdate:
    """How to apply pushes of some ranges; made once for many pushes."""

    def __init__(self, target: IndexRanges, source: IndexRanges) -> None:
        self.target = target  # of the shard's vectors; `source` in the pushed one, in this order
        self._pieces = tuple(_pieces(target, source))
        copied = [n for n, place, _ in self._pieces if isinstance(place, RangeCopier)]
        self._n_copied_max = max(copied, default=0)
        self._gathers = any(isinstance(place, RangeCopier) for *_, place in self._pieces)

    def apply(self, update: Update, vectors: Sequence[Vector], pushed: Numbers) -> None:
        is_encoded = isinstance(pushed, EncodedNumbers)
        if is_encoded and self._gathers:
            pushed = pushed[:]
        for n, target, source in self._pieces:
            if not isinstance(target, int):
                continue
            assert isinstance(source, int)
            step = PIECE if is_encoded else max(n, 1)
            for start in range(0, n, step):
                m = min(step, n - start)
                here = slice(target + start, target + start + m)
                gradient = pushed[source + start : source + start + m]
                update([vector[here] for vector in vectors], gradient)
        if self._n_copied_max:
            self._apply_copied(update, vectors, pushed)

    def _apply_copied(self, update: Update, vectors: Sequence[Vector], pushed: Numbers) -> None:
        room = np.zeros((len(vectors) + 1, padded(self._n_copied_max)), vectors[0].dtype)
        wholes = [torch.from_numpy(one) for one in vectors]
        for n, target, source in self._pieces:
            if isinstance(target, int):
                continue
            copies = room[:, : padded(n)]
            copies[:, n:] = 0.0
            *targets, gradient = copies
            if isinstance(source, int):
                gradient[:n] = pushed[source : source + n]
            else:
                assert not isinstance(pushed, EncodedNumbers)
                source.gather(as_tensor(pushed), torch.from_numpy(gradient[:n]))
            copied = [torch.from_numpy(part[:n]) for part in targets]
            for whole, part in zip(wholes, copied, strict=True):
                target.gather(whole, part)
            update(targets, gradient)
            for whole, part in zip(wholes, copied, strict=True):
                target.scatter(part, whole)


def _pieces(target: IndexRanges, source: IndexRanges) -> Iterator[_Piece]:
    lengths = target.stops - target.starts
    in_place = lengths >= _IN_PLACE_MIN
    if len(lengths) == 1 and target.n_elements % ALIGNMENT == 0:
        in_place[:] = True  # everything, of a small shard
    done = 0  # elements of the target
    for index in np.flatnonzero(in_place):
        begin = int(target.offsets[index])
        yield from _copied(target, source, done, begin)
        n = int(lengths[index]) // ALIGNMENT * ALIGNMENT
        yield n, int(target.starts[index]), int(source.part(begin, begin + 1).starts[0])
        done = begin + n
    yield from _copied(target, source, done, target.n_elements)


def _copied(target: IndexRanges, source: IndexRanges, start: int, stop: int) -> Iterator[_Piece]:
    for first in range(start, stop, PIECE):
        last = min(first + PIECE, stop)
        here = source.part(first, last)
        # What is pushed lies side by side, unless its elements differ in their clocks.
        place = int(here.starts[0]) if len(here.starts) == 1 else RangeCopier(here)
        yield last - first, RangeCopier(target.part(first, last)), place


# --- rounds ---
#
#     pushes, by name     p0   p1   p2          each stays in its client's buffer
#     total               w0 p0 + w1 p1 + w2 p2
#     applied once        total / (w0 + w1 + w2), or the total where weight = "sum"
#
# Pushes are added one by one in the order of their clients' names, in any order of arrival: so two
# copies of a shard, and any number of shards, have equal bits. Of elements that only some clients
# push, their weights alone count. Buffers are averaged always.

_ROUND_PIECE: Final = 1 << 18  # elements added while they are in the cache


@final
class RoundSum:
    """The weighted sum of the pushes of one round, in the shard's own order of elements."""

    def __init__(
        self, n_elements: int, *, n_gradient: int, dtype: np.dtype[Element], policy: ExchangePolicy
    ) -> None:
        self._n_gradient = n_gradient
        self._divides = policy.weight != "sum"
        self._parts: list[IndexRanges] | None = []  # None: a push was of everything
        self._n_elements = n_elements
        self._weight = 0.0  # of pushes of everything
        self._weights: Vector | None = None  # (n_elements,) of the others
        self._is_empty = True
        self.total: Vector = np.zeros(n_elements, dtype)

    @property
    def touched(self) -> IndexRanges | None:
        """What the round changes; None: everything."""
        return None if self._parts is None else IndexRanges.union(self._parts)

    def add_work(
        self, pushed: Pushed, *, shard_slice: ShardSlice, touched: ShardSlice, weight: float
    ) -> Callable[[], None]:
        """Return the work that adds one push: of `touched`, out of the client's."""
        if self._parts is not None and touched.ranges is not None:
            self._parts.append(touched.ranges)
        else:
            self._parts = None

        def work() -> None:
            if touched.ranges is None:
                parts = (0, pushed.gradient), (len(pushed.gradient), pushed.buffers)
                for first, part in parts:
                    self._add(first, part, weight)
                self._is_empty = False
                self._weight += weight
                return
            compact = numbers = pushed.dense()
            if touched.n_elements < shard_slice.n_elements:
                compact = np.empty(touched.n_elements, numbers.dtype)
                places = shard_slice.positions_of(touched.ranges)
                RangeCopier(places).gather(as_tensor(numbers), as_tensor(compact))
            spread = np.zeros(self._n_elements, numbers.dtype)
            touched.scatter(compact, spread)
            self._add(0, spread, weight)
            self._is_empty = False
            if self._weights is None:
                self._weights = np.zeros_like(spread)
            touched.scatter(np.ones_like(compact), spread)
            np.add(self._weights, spread * spread.dtype.type(weight), out=self._weights)

        return work

    def _add(self, first: int, values: Numbers, weight: float) -> None:
        factor = self.total.dtype.type(weight)
        # Multiply, then add, each rounded by itself: no kernel fuses them for some elements only.
        for start in range(0, len(values), _ROUND_PIECE):
            part = values[start : start + _ROUND_PIECE]
            part = part if weight == 1.0 else part * factor
            here = self.total[first + start : first + start + len(part)]
            here[:] = part if self._is_empty else here + part

    def finish(self) -> None:
        """Divide the sum by the weights. Runs as work, after the last push is added."""
        part = self.total[0 if self._divides else self._n_gradient :]
        weights = np.full_like(part, self._weight)
        if self._weights is not None:
            np.add(weights, self._weights[len(self.total) - len(part) :], out=weights)
        np.divide(part, weights, out=part, where=np.greater(weights, 0))


# --- all arrays ---

_N_SLICE_UPDATES_MAX: Final = 256


@final
class ShardStore:
    """The arrays of one shard incarnation.

    A client that holds ranges of the elements changes nothing else: no momentum and no weight
    decay elsewhere. The clock of the update rule is counted per element (`StepCounts`).
    """

    def __init__(self, config: ShardConfig, *, memory: Memory) -> None:
        layout, index = config.layout, config.index
        self._config = config
        self._memory = memory
        self._n_elements = layout.shard_size(index)
        self._n_gradient = layout.n_gradient(index)
        self._n_averaged = layout.n_averaged(index)
        self._dtype = layout.dtype
        self._published = SeqlockVector.create(None, "", n_elements=0, dtype=self._dtype)
        self._replicated: list[Vector] = []  # the values, then the state by name
        self._more: list[Vector] = []  # pieces of what is replicated after them, while it syncs
        self.n_more_blocks = 0  # those pieces
        self._n_held: int | None = None  # state blocks, while it syncs as a backup
        self.state: State = {}
        # What clients hold.
        self.slice_table = SliceTable(
            self._n_elements, dtype=self._dtype, n_gradient=self._n_gradient
        )
        self._pushed_slice: ShardSlice | None = self.slice_table.whole  # None: not applied yet
        self._round: RoundSum | None = None  # in progress
        self._slice_updates: dict[tuple[object, ...], SliceUpdate] = {}
        # Which parameters have the same rule and rate in a push, by which have the same rate.
        self._parts: dict[tuple[int, ...], list[tuple[UpdateRule, int, IndexRanges]]] = {}
        self.clock = 0  # applied pushes; each rank of a partitioned replica counts
        # What a backup has to repeat, in order: pushes, staged ones too, and commands.
        self.position = 0
        self.n_restored = 0  # whole pushes (`StepCounts.n_pushes`) that this incarnation began with
        self.steps = StepCounts()  # pushes that each element has received
        # Where data are dealt: positions of the pushes in the values, and of those in progress.
        self.applied = NOTHING
        self._applying = NOTHING
        self._sets = False  # whether the push in progress sets values
        # Where clients fetch what has changed, or by how much the values have moved.
        self.log: FetchLog | None = None
        fetched = config.policy.fetched
        if isinstance(fetched, Int8 | Int4):
            self.log = MoveLog(fetched, self._n_elements, n_gradient=self._n_gradient)
        elif fetched == "changed" and self._dtype == np.float32:
            self.log = ChangeLog(self._n_elements)

    @property
    def region(self) -> str:
        return self._published.name

    @property
    def vector(self) -> Vector:
        return self._published.values

    def publish(self, region: str) -> str | None:
        """Create the memory for the values; return why it cannot be shared, if that is an error."""
        create = partial(SeqlockVector.create, n_elements=self._n_elements, dtype=self._dtype)
        shared = bool(self._memory.host)
        try:
            self._published = create(self._memory if shared else None, region if shared else "")
        except StorageError as error:
            self._published = create(None, "")
            return str(error)
        return None

    def initialise_work(
        self,
        restored: Snapshot | None,
        initialise: Callable[[], Vector],
        *,
        incarnation: int | None,  # of the shard; None if it is not known yet
    ) -> tuple[Callable[[], ShardState], Cost]:
        """Return the work that fills the values, and its cost.

        The work raises RestoreError if the snapshot cannot be restored, and LocalProtocolError if
        the initial values have another size.
        """
        config, vector = self._config, self.vector

        def work() -> ShardState:
            if config.policy.push_codec is not None or isinstance(self.log, MoveLog):
                warm_up()
            if restored is not None:
                state = restore(restored, config=config, incarnation=incarnation)
            else:
                values, layout = initialise(), config.layout
                rule_state = initial_state(config.rule, layout, config.index)
                if EMA in rule_state:  # also of what is never pushed
                    rule_state[EMA][:] = values[: self._n_gradient]
                state = ShardState(
                    incarnation=incarnation or 0,
                    clock=0,
                    values=values,
                    state=rule_state,
                    clients=(),
                    steps=StepCounts(),
                )
            if state.values.shape != vector.shape:
                raise LocalProtocolError(
                    f"shard {config.index}: {state.values.shape} values, not {vector.shape}"
                )
            vector[:] = state.values
            # Drop the separate array now: push buffers come next, and memory is short.
            return replace(state, values=vector)

        return work, Cost(n_bytes=2.0 * vector.nbytes)

    def initialised(self, state: ShardState) -> None:
        self.state, self.clock, self.steps = state.state, state.clock, state.steps
        self.position = state.clock
        self.applied = state.applied
        self._replicated = [self.vector, *(state.state[name] for name in sorted(state.state))]
        if isinstance(self.log, MoveLog):
            self._replicated.append(self.log.rest)
        self.n_restored = state.steps.n_pushes
        self._forget()
        self._published.end(clock=self.clock)

    # ------------------------------------------------------------------ replication
    #
    #     elements        [0 .... E)[E .... 2E)[2E .... n_gradient .. shard_size)
    #     block 1                    values[E:2E], then each state vector [E:2E)
    #
    # Values and state in blocks that fit into one message each. Blocks [0, k) are a prefix of the
    # elements with all their state, to which a backup can apply pushes: rules work element by
    # element. Blocks start at multiples of `ALIGNMENT`, so kernels round alike on prefix and whole.
    # After them comes what no push changes: arrays of a coordinator's commands.

    @property
    def _block_elements(self) -> int:
        bytes_per_element = self._dtype.itemsize * max(1, len(self._replicated))
        return ALIGNMENT * max(1, vectors.BLOCK_BYTES // (bytes_per_element * ALIGNMENT))

    @property
    def _n_value_blocks(self) -> int:
        return max(1, -(-self._n_elements // self._block_elements))

    @property
    def n_state_blocks(self) -> int:
        return self._n_value_blocks + self.n_more_blocks

    def replicate_too(self, arrays: Sequence[Vector]) -> None:
        """Append these arrays to the state blocks; a backup fills them."""
        size = vectors.BLOCK_BYTES // self._dtype.itemsize
        self._more = [
            array[start : start + size] for array in arrays for start in range(0, len(array), size)
        ]
        self.n_more_blocks = len(self._more)

    @property
    def n_held(self) -> int:
        return self.n_state_blocks if self._n_held is None else self._n_held

    @property
    def n_held_elements(self) -> int:
        if self._n_held is None:
            return self._n_elements
        return min(self._n_held * self._block_elements, self._n_elements)

    def state_block(self, index: int) -> Vector:
        return np.concatenate(self._block_parts(index))

    def start_sync(self, *, clock: int, position: int, steps: StepCounts, applied: Spans) -> None:
        """Drop the values and start as a backup at this clock."""
        if self._n_held is None:
            self._published.begin()
        self._n_held, self.clock, self.steps = 0, clock, steps
        self.position = position
        self.applied, self._applying = applied, NOTHING

    def take_state_block(self, packed: Vector) -> None:
        """Write the next block into the arrays, or raise RemoteProtocolError if it does not fit."""
        assert self._n_held is not None
        parts = self._block_parts(self._n_held)
        n = sum(map(len, parts))
        if packed.dtype != self._dtype or len(packed) != n:
            raise RemoteProtocolError(
                f"state block {self._n_held} has {len(packed)} elements of {packed.dtype}, not {n} "
                f"of {self._dtype}: use one layout and one rule on both copies"
            )
        ends = np.cumsum([len(part) for part in parts])
        for part, values in zip(parts, np.split(packed, ends[:-1]), strict=True):
            part[:] = values
        self._n_held += 1
        if self._n_held == self.n_state_blocks:
            self._n_held, self._more = None, []
            self._forget()
            self._published.end(clock=self.clock)

    def _block_parts(self, index: int) -> list[Vector]:
        if index >= self._n_value_blocks:
            return [self._more[index - self._n_value_blocks]]
        start = index * self._block_elements
        return [vector[start : start + self._block_elements] for vector in self._replicated]

    def why_not(self, touches: Vector | None, shard_slice: ShardSlice) -> str | None:
        """Return why this push may not change only `touches`, or None."""
        if touches is None:
            return None
        touched = self.slice_table.get(touches)
        if not shard_slice.contains(touched):
            return "it changes elements that its client does not hold"
        return self.steps.register(touched) if self._config.rule.needs_clock else None

    def why_not_at(self, rates: pf.Rates) -> str | None:
        """Return why a push cannot have these rates, or None."""
        if rates is msgspec.UNSET:
            return None
        n = sum(tensor.kind == "parameter" for tensor in self._config.layout.tensors)
        if len(rates) not in {1, n}:
            return f"it has {len(rates)} learning rates for {n} parameters"
        if self._config.policy.round is not None:
            return "it has a learning rate of its own, and a round applies many pushes at once"
        for rule in (one for one in self._config.rule.rules if not one.takes_rates):
            needs = f"rule {rule.name!r} needs all earlier ones: give it a schedule, and no lr"
            return f"it has a learning rate of its own, and {needs}"
        return None

    def begin_push(
        self,
        pushed: Pushed,  # of the client's part
        *,
        n_clients: int,  # over which buffers are averaged
        shard_slice: ShardSlice | None = None,  # the client's part; None: everything
        touched: ShardSlice | None = None,  # what the push changes; None: all of the part
        share: rp.Share = rp.WHOLE,
        dealt: pf.Dealt = msgspec.UNSET,
    ) -> tuple[Callable[[], None], Cost]:
        """Return the work that applies a push, or adds it to a round, and its cost.

        A push of dealt positions of which some are applied changes nothing: the clock alone rises.
        """
        shard_slice = shard_slice or self.slice_table.whole
        touched = touched or shard_slice
        is_known = self.knows(dealt)
        if dealt is not msgspec.UNSET and not is_known:
            self._applying |= Spans([dealt])
        if share.weight is not None:
            return self._begin_in_round(pushed, shard_slice, touched, share, adds=not is_known)
        if is_known:
            self._pushed_slice = None
            return _nothing, Cost()
        return self._begin_apply(pushed, shard_slice, touched, n_clients, share=share)

    def _begin_in_round(
        self,
        pushed: Pushed,
        shard_slice: ShardSlice,
        touched: ShardSlice,
        share: rp.Share,
        *,
        adds: bool,
    ) -> tuple[Callable[[], None], Cost]:
        assert share.weight is not None
        if self._round is None and not adds:  # nothing so far
            self._pushed_slice = None
            return _nothing, Cost()
        if self._round is None:
            policy = self._config.policy
            self._round = RoundSum(
                self._n_elements, n_gradient=self._n_gradient, dtype=self._dtype, policy=policy
            )
        whole, so_far = self.slice_table.whole, self._round
        add, cost = _nothing, Cost()
        if adds:
            weight = share.weight
            cost = Cost(n_bytes=3.0 * pushed.values.nbytes, flops=pushed.flops)
            add = so_far.add_work(pushed, shard_slice=shard_slice, touched=touched, weight=weight)
        if share.n_to_follow:
            self._pushed_slice = None
            return add, cost
        self._round = None
        ranges = so_far.touched
        touched = whole if ranges is None else self.slice_table.get(ranges.stripes())
        # Every element of the sum is a mean already.
        total = Pushed.of(so_far.total, whole)
        apply, then = self._begin_apply(total, whole, touched, 1, share=rp.WHOLE)

        def work() -> None:
            add()
            so_far.finish()
            apply()

        return work, Cost(n_bytes=cost.n_bytes + then.n_bytes, flops=cost.flops + then.flops)

    def _begin_apply(
        self,
        pushed: Pushed,
        shard_slice: ShardSlice,
        touched: ShardSlice,
        n_clients: int,
        *,
        share: rp.Share,
    ) -> tuple[Callable[[], None], Cost]:
        if self._n_held is None:
            self._published.begin()
        rule, values = self._config.rule, self.vector
        self._pushed_slice = touched if rule.needs_clock else shard_slice
        n_here = self.n_held_elements
        n = min(self._n_gradient, n_here)
        gradients, buffer_values = pushed.gradient, pushed.buffers
        n_averaged = min(self._n_averaged, n_here)
        buffers = self._slice_update(touched, shard_slice, n, n_averaged)
        counters = self._slice_update(touched, shard_slice, n_averaged, n_here)
        updates: list[tuple[UpdateRule, float | None, int, SliceUpdate]] = []
        for one, learning_rate, ranges in self._parts_at(share.rates):
            parameters = self._slice_update(touched, shard_slice, 0, n, ranges=ranges)
            clocks = [(self.clock, parameters.target)]
            if rule.needs_clock:
                clocks = self.steps.at(parameters.target, shard_slice=touched)
            for clock, inner in clocks:
                if len(clocks) > 1:
                    parameters = SliceUpdate(inner, shard_slice.positions_of(inner))
                updates.append((one, learning_rate, clock, parameters))

        def update(
            rule: UpdateRule,
            learning_rate: float | None,
            clock: int,
            vectors: Sequence[Vector],
            gradient: Vector,
        ) -> None:
            state = dict(zip(rule.state(0, self._dtype), vectors[1:], strict=True))
            if share.scale != 1.0:
                gradient = gradient * gradient.dtype.type(share.scale)
            rule.apply(vectors[0], gradient, state, clock=clock, learning_rate=learning_rate)

        def work() -> None:
            for one, rate, clock, slice_update in updates:
                state = (self.state[name] for name in one.state(0, self._dtype))
                slice_update.apply(partial(update, one, rate, clock), (values, *state), gradients)
            buffers.apply(partial(_average, n_clients=n_clients), [values], buffer_values)
            counters.apply(partial(_count, n_clients=n_clients), [values], buffer_values)

        n_parameters = sum(one.target.n_elements for *_, one in updates)
        n_buffers = buffers.target.n_elements + counters.target.n_elements
        # Read and write each vector, read the gradient.
        n_passes = 3 + 2 * len(self.state)
        n_bytes = (n_parameters + n_buffers) * values.itemsize
        if self.log is not None:
            n_passes += 6  # a copy, and a comparison with it
        flops = 4.0 * n_parameters + pushed.flops
        cost = Cost(n_bytes=float(n_passes * n_bytes), flops=flops)
        if share.sets:
            rest = [(buffers, buffer_values), (counters, buffer_values)]
            work = partial(_set, values, [*((one, gradients) for *_, one in updates), *rest])
        return self._logged(work, sets=share.sets), cost

    def _logged(self, work: Callable[[], None], *, sets: bool) -> Callable[[], None]:
        log = self.log
        if log is None:
            return work
        self._sets = sets

        def logged() -> None:
            before = self.vector.copy()
            work()
            if sets:
                log.forget()
            else:
                log.note(before, self.vector)

        return logged

    def _forget(self) -> None:
        if self.log is not None:
            self.log.begin(self.clock)

    @property
    def settled(self) -> Vector:
        """The values with all that a log holds back."""
        return self.log.settled(self.vector) if isinstance(self.log, MoveLog) else self.vector

    def _parts_at(
        self, rates: pf.Rates
    ) -> list[tuple[UpdateRule, float | None, IndexRanges | None]]:
        """Return rule and rate of each part of the parameters; ranges None: there is one part."""
        given = () if rates is msgspec.UNSET else rates
        classes = tuple(given.index(rate) for rate in given) or (0,)
        if classes not in self._parts:
            if len(self._parts) >= _N_SLICE_UPDATES_MAX:
                self._parts.clear()
                self._slice_updates.clear()
            config = self._config
            self._parts[classes] = classes_on(config.rule, config.layout, config.index, classes)
        parts = self._parts[classes]
        return [
            (rule, given[which] if given else None, ranges if len(parts) > 1 else None)
            for rule, which, ranges in parts
        ]

    def _slice_update(
        self,
        touched: ShardSlice,
        shard_slice: ShardSlice,
        start: int,
        stop: int,
        *,
        ranges: IndexRanges | None = None,  # of one rule; None: all
    ) -> SliceUpdate:
        key = touched.key, shard_slice.key, start, stop, ranges
        if key not in self._slice_updates:
            if len(self._slice_updates) >= _N_SLICE_UPDATES_MAX:
                self._slice_updates.clear()
            inner = touched.within(start, stop)
            if ranges is not None:
                inner = inner.intersection(ranges)
            source = shard_slice.positions_of(inner)
            if start >= self._n_gradient:  # buffers, which are a vector of their own
                source = source.shifted(-shard_slice.n_parameters)
            self._slice_updates[key] = SliceUpdate(inner, source)
        return self._slice_updates[key]

    def end_push(self) -> None:
        """Finish a push: count it, and mark the values as complete; or those of its round."""
        self.clock += 1
        self.position += 1
        if self.log is not None:
            self.log.end_push()
        if self._sets:  # as if nothing had been before
            self._sets = False
            self._forget()
        applied, self._pushed_slice = self._pushed_slice, self.slice_table.whole
        if applied is None:
            return
        if applied.ranges is None:
            self.steps.n_whole += 1
        else:
            self.steps.add(applied)
        if self._applying is not NOTHING:
            self.applied, self._applying = self.applied | self._applying, NOTHING
        if self._n_held is None:
            self._published.end(clock=self.clock)

    def knows(self, dealt: pf.Dealt) -> bool:
        """Return whether some of these positions are applied: then a push of them is dropped."""
        if dealt is msgspec.UNSET:
            return False
        return any(known.overlaps(dealt) for known in (self.applied, self._applying))

    def drop_round(self) -> None:
        """Drop the round in progress: its pushes are acknowledged nowhere."""
        self._round, self._applying = None, NOTHING

    def begin_replace(self) -> None:
        self._forget()
        self._published.begin()


def _nothing() -> None:
    pass


def _average(vectors: Sequence[Vector], pushed: Vector, *, n_clients: int) -> None:
    target, source = torch.from_numpy(vectors[0]), torch.from_numpy(pushed)
    if n_clients == 1:
        target.copy_(source)  # v + (p - v) would not be exactly p
    else:
        target.lerp_(source, 1.0 / n_clients)


def _count(vectors: Sequence[Vector], pushed: Vector, *, n_clients: int) -> None:
    torch.from_numpy(vectors[0]).add_(torch.from_numpy(pushed), alpha=1.0 / n_clients)


def _set(values: Vector, placed: Sequence[tuple[SliceUpdate, Numbers]]) -> None:
    for slice_update, pushed in placed:
        slice_update.apply(partial(_average, n_clients=1), [values], pushed)
