"""A shard's values, the rule's state, the clock: what pushes change.

The values lie under a sequence lock (`published`) where clients of the host can read
them, if there is such memory. From `begin_push` to `end_push` they are marked as being
written; the work between runs outside the role, and nothing else may touch them.

Who becomes a copy of another shard (`follow`) takes its values piece by piece. Until it
has them all they are marked as being written, and pushes are applied to that prefix of
the elements which it holds.

Buffers are averages over the clients that push: v += (pushed - v) / n. With n = 1 they
are what was pushed, to the bit, so one replica has BatchNorm as sequential training.

Of a client that holds ranges of the elements, nothing else is touched: no momentum goes
on elsewhere, and no weight decays. The rule's clock is each element's own (`steps`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from distbelief.core import vectors
from distbelief.core.memory import Memory
from distbelief.core.vectors import ALIGNMENT, Element, Vector
from distbelief.errors import LocalProtocolError, RemoteProtocolError, StorageError
from distbelief.parameter_server.checkpoint import ShardIdentity, ShardState, restore
from distbelief.parameter_server.optimizers import State, StepCounts
from distbelief.parameter_server.shared_vector import SeqlockVector
from distbelief.parameter_server.slices import IndexRanges, RangeCopier, ShardSlice, SliceTable
from distbelief.roles.role import Cost, Snapshot


# How a push of some ranges is applied to a shard's vectors.
#
#     values   |..aaaa....bb..bb..bb....|      a: long, updated where it lies
#     state    |..aaaa....bb..bb..bb....|      b: copied out, updated, copied back,
#     pushed   |aaaabbbbbb|                       in pieces that stay in the cache
#
# Update rules work element by element, and torch's kernels treat the last few elements of
# an array otherwise. So every piece that a rule sees has a multiple of `ALIGNMENT`
# elements, as a whole vector has, filled up with zeros: a client that pushes parts gets
# the bits that one gets which pushes everything.

Update = Callable[[Sequence[Vector], Vector], None]
"""update(vectors, pushed) changes the vectors, each (n,), in place."""

_IN_PLACE_MIN = 1 << 14
"""Elements of a range from which on it is updated where it lies."""

_PIECE = 1 << 16
"""Elements copied out at a time, of each vector."""


@final
@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements updated together.

    Attributes:
        n_elements: How many.
        target: Where they are in the shard's vectors: the first of them, if they lie
            side by side.
        source: Where they are in what was pushed, likewise.
    """

    n_elements: int
    target: int | RangeCopier
    source: int | RangeCopier


@final
class SliceUpdate:
    """One way to apply pushes, made once for many.

    Args:
        target: Of the shard's vectors, what is to be updated.
        source: Where it lies in what is pushed, in the same order.

    Attributes:
        target: Likewise.
        n_elements: Of the target.
    """

    def __init__(self, target: IndexRanges, source: IndexRanges) -> None:
        self.target = target
        self.n_elements = target.n_elements
        self._pieces = tuple(_pieces(target, source))
        copied = [p.n_elements for p in self._pieces if isinstance(p.target, RangeCopier)]
        self._n_copied = max(copied, default=0)

    def apply(self, update: Update, vectors: Sequence[Vector], pushed: Vector) -> None:
        """Update these ranges of the vectors by what was pushed."""
        room = np.zeros((len(vectors) + 1, _padded(self._n_copied)), pushed.dtype)
        for piece in self._pieces:
            n, target, source = piece.n_elements, piece.target, piece.source
            if isinstance(target, int) and isinstance(source, int):
                parts = [vector[target : target + n] for vector in vectors]
                update(parts, pushed[source : source + n])
            else:
                copies = room[:, : _padded(n)]
                copies[:, n:] = 0.0
                _apply_to_copies(piece, update, vectors, pushed, copies=copies)


def _apply_to_copies(
    piece: _Piece,
    update: Update,
    vectors: Sequence[Vector],
    pushed: Vector,
    *,
    copies: npt.NDArray[Element],
) -> None:
    n, target = piece.n_elements, piece.target
    assert isinstance(target, RangeCopier)
    *targets, gradient = copies
    if isinstance(piece.source, int):
        gradient[:n] = pushed[piece.source : piece.source + n]
    else:
        piece.source.gather(torch.from_numpy(pushed), torch.from_numpy(gradient[:n]))
    pairs = [
        (torch.from_numpy(whole), torch.from_numpy(part[:n]))
        for whole, part in zip(vectors, targets, strict=True)
    ]
    for whole, part in pairs:
        target.gather(whole, part)
    update(targets, gradient)
    for whole, part in pairs:
        target.scatter(part, whole)


def _pieces(target: IndexRanges, source: IndexRanges) -> Iterator[_Piece]:
    """Yield the pieces, by rising index."""
    lengths = target.stops - target.starts
    in_place = lengths >= _IN_PLACE_MIN
    if len(lengths) == 1 and target.n_elements % ALIGNMENT == 0:
        in_place[:] = True  # everything, of a small shard
    done = 0  # elements of the target
    for index in np.flatnonzero(in_place):
        begin = int(target.offsets[index])
        yield from _copied(target, source, done, begin)
        n = int(lengths[index]) // ALIGNMENT * ALIGNMENT
        place = int(source.part(begin, begin + 1).starts[0])
        yield _Piece(n, int(target.starts[index]), place)
        done = begin + n
    yield from _copied(target, source, done, target.n_elements)


def _copied(target: IndexRanges, source: IndexRanges, start: int, stop: int) -> Iterator[_Piece]:
    for first in range(start, stop, _PIECE):
        last = min(first + _PIECE, stop)
        there, here = target.part(first, last), source.part(first, last)
        # What is pushed lies side by side, unless its elements differ in their clocks.
        place = int(here.starts[0]) if len(here.starts) == 1 else RangeCopier(here)
        yield _Piece(last - first, RangeCopier(there), place)


def _padded(n_elements: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-n_elements // ALIGNMENT) * ALIGNMENT


# A shard's values and its rule's state in pieces, to be sent while they change.
#
#     elements        [0 .... E)[E .... 2E)[2E .... n_gradient .. shard_size)
#     piece 1                    values[E:2E], then each vector of the state [E:2E)
#
# Rules:
#
# * A piece fits into one message. Whoever holds pieces [0, k) holds a prefix of the
#   elements with all that belongs to them, and can apply pushes to it: rules work element
#   by element.
# * Cuts are multiples of `ALIGNMENT`, so that kernels round alike on the prefix and on
#   the whole.
# * Vectors of the state come in the order of their names, and end with the parameters.


@final
class StateChunks:
    """How these arrays are cut; it sees them, and writes into them."""

    def __init__(self, values: Vector, state: State) -> None:
        self._whole = [values, *(state[name] for name in sorted(state))]
        bytes_per_element = values.itemsize * len(self._whole)
        n_aligned = vectors.BLOCK_BYTES // (bytes_per_element * ALIGNMENT)
        self._n_elements = ALIGNMENT * max(1, n_aligned)

    def __len__(self) -> int:
        """How many there are; at least 1, so that every transfer has an end."""
        return max(1, -(-len(self._whole[0]) // self._n_elements))

    def n_elements(self, n_pieces: int) -> int:
        """Return how many elements the first pieces hold."""
        return min(n_pieces * self._n_elements, len(self._whole[0]))

    def pack(self, index: int) -> Vector:
        """Return a copy of one piece."""
        return np.concatenate(list(self._parts(index)))

    def unpack(self, index: int, packed: Vector) -> None:
        """Write one piece to where it belongs.

        Raises:
            RemoteProtocolError: it cannot be that piece.
        """
        if index >= len(self):
            raise RemoteProtocolError(f"there is no piece {index} of {len(self)}")
        parts = list(self._parts(index))
        n, dtype = sum(map(len, parts)), self._whole[0].dtype
        if packed.dtype != dtype or len(packed) != n:
            raise RemoteProtocolError(
                f"piece {index} has {len(packed)} elements of {packed.dtype}, not {n} "
                f"of {dtype}: both copies must use one layout and one rule"
            )
        start = 0
        for part in parts:
            part[:] = packed[start : start + len(part)]
            start += len(part)

    def _parts(self, index: int) -> Iterator[Vector]:
        start = index * self._n_elements
        for vector in self._whole:
            yield vector[start : start + self._n_elements]


_N_APPLICATIONS_MAX = 256


@final
class ShardStore:
    """The arrays of one life of one shard.

    Attributes:
        clock: Pushes applied, of each machine of a replica its own.
        n_restored: Whole pushes (`StepCounts.n_pushes`) that this life began with.
        holdings: What clients hold of them.
        steps: Pushes that each element has met.
    """

    def __init__(self, identity: ShardIdentity, *, memory: Memory) -> None:
        layout, index = identity.layout, identity.index
        self._identity = identity
        self._memory = memory
        self._n_elements = layout.shard_size(index)
        self._n_gradient = layout.n_gradient(index)
        self._dtype = layout.dtype
        self._published = SeqlockVector.private(n_elements=0, dtype=self._dtype)
        self._state: State = {}
        self._pieces = StateChunks(self.vector, self._state)
        self._n_held: int | None = None  # pieces, while it becomes a copy
        self.holdings = SliceTable(layout, index)
        self._pushing = self.holdings.whole
        self._applications: dict[tuple[bytes, bytes, int, int], SliceUpdate] = {}
        self.clock = 0
        self.n_restored = 0
        self.steps = StepCounts()

    @property
    def region(self) -> str:
        """Name of the memory where they can be read; "" if nobody else can."""
        return self._published.name

    @property
    def vector(self) -> Vector:
        """(shard_size,) parameters, then buffers."""
        return self._published.values

    @property
    def state(self) -> State:
        """The rule's vectors, each (n_gradient,)."""
        return self._state

    def publish(self, region: str, *, incarnation: int) -> str | None:
        """Make room for them; return why nobody else can read them, if that is new."""
        why_not = None
        if self._memory.host:
            try:
                self._published = SeqlockVector.create(
                    self._memory,
                    region,
                    n_elements=self._n_elements,
                    dtype=self._dtype,
                    incarnation=incarnation,
                )
            except StorageError as error:
                why_not = str(error)
            else:
                return None
        self._published = SeqlockVector.private(n_elements=self._n_elements, dtype=self._dtype)
        return why_not

    def initialising(
        self,
        restored: Snapshot | None,
        initialise: Callable[[], Vector],
        *,
        incarnation: int | None,
    ) -> tuple[Callable[[], ShardState], Cost]:
        """Return the work that fills them, and what it costs.

        Args:
            restored: From what, if not from the initial values.
            initialise: Returns those.
            incarnation: Of the shard; None if nobody can say yet.

        The work raises:
            StorageError: the snapshot cannot be restored.
            LocalProtocolError: the initial values are of another size.
        """
        identity, vector, dtype = self._identity, self.vector, self._dtype

        def work() -> ShardState:
            if restored is not None:
                state = restore(restored, identity=identity, incarnation=incarnation)
            else:
                state = ShardState(
                    incarnation=incarnation or 0,
                    clock=0,
                    values=initialise(),
                    state=identity.rule.state(self._n_gradient, dtype),
                    clients=(),
                    steps=StepCounts(),
                )
            if state.values.shape != vector.shape:
                raise LocalProtocolError(
                    f"initial values of shard {identity.index} have shape "
                    f"{state.values.shape}, not {vector.shape}"
                )
            vector[:] = state.values
            # Nobody keeps the others: slots are lent next, and memory is short.
            return replace(state, values=vector)

        return work, Cost(n_bytes=2.0 * vector.nbytes)

    def initialised(self, state: ShardState) -> None:
        """The work is done: they can be read."""
        self._state = state.state
        self._pieces = StateChunks(self.vector, self._state)
        self.clock, self.steps = state.clock, state.steps
        self.n_restored = state.steps.n_pushes
        self._published.end(clock=self.clock)

    # -------------------------------------------------------------------- pieces

    @property
    def n_pieces(self) -> int:
        """In how many pieces all of it can be sent."""
        return len(self._pieces)

    @property
    def n_held(self) -> int:
        """How many of them are here."""
        return len(self._pieces) if self._n_held is None else self._n_held

    def piece(self, index: int) -> Vector:
        """Return a copy of one piece."""
        return self._pieces.pack(index)

    def follow(self, *, clock: int, steps: StepCounts) -> None:
        """Hold nothing from now on, and become a copy of a shard at that clock."""
        if self._n_held is None:
            self._published.begin()
        self._n_held, self.clock, self.steps = 0, clock, steps

    def take_piece(self, packed: Vector) -> None:
        """Hold the next piece as well.

        Raises:
            RemoteProtocolError: it cannot be that piece.
        """
        assert self._n_held is not None
        self._pieces.unpack(self._n_held, packed)
        self._n_held += 1
        if self._n_held == len(self._pieces):
            self._n_held = None
            self._published.end(clock=self.clock)

    # -------------------------------------------------------------------- pushes

    def why_not(self, touches: Vector | None, holding: ShardSlice) -> str | None:
        """Return why a push of what a client holds cannot change just this, if so.

        Raises:
            RemoteProtocolError: it is no part of the vector.
        """
        if touches is None:
            return None
        if holding.ranges is not None:
            return "its client holds parts of tensors, and such pushes change all of it"
        touched = self.holdings.get(touches)
        return self.steps.know(touched) if self._identity.rule.needs_clock else None

    def begin_push(
        self,
        pushed: Vector,
        *,
        n_clients: int,
        holding: ShardSlice | None = None,
        touched: ShardSlice | None = None,
    ) -> tuple[Callable[[], None], Cost]:
        """Return the work that applies a push, and what it costs.

        Args:
            pushed: (n_elements,) of what the client holds: gradient of the parameters,
                then buffers.
            n_clients: Over how many clients buffers are averaged.
            holding: What it holds; by default everything.
            touched: What the push changes; by default all that it holds.
        """
        if self._n_held is None:
            self._published.begin()
        holding = holding or self.holdings.whole
        touched = touched or holding
        self._pushing = touched if self._identity.rule.needs_clock else holding
        n_here = self._pieces.n_elements(self.n_held)
        n = min(self._n_gradient, n_here)
        parameters = self._application(touched, holding, 0, n)
        buffers = self._application(touched, holding, n, n_here)
        updates = self._by_steps(parameters, touched, holding)
        values, state = self.vector, self._state
        vectors = (values, *state.values())

        def average(values: Sequence[Vector], pushed: Vector) -> None:
            _average(values[0], pushed, n_clients=n_clients)

        def work() -> None:
            for clock, application in updates:
                application.apply(self._updating(clock), vectors, pushed)
            buffers.apply(average, [values], pushed)

        n_parameters, n_buffers = parameters.n_elements, buffers.n_elements
        n_passes = 3 + 2 * len(state)  # read and write each vector, read the gradient
        n_bytes = (n_parameters + n_buffers) * values.itemsize
        return work, Cost(n_bytes=float(n_passes * n_bytes), flops=4.0 * n_parameters)

    def _application(
        self, touched: ShardSlice, holding: ShardSlice, start: int, stop: int
    ) -> SliceUpdate:
        """Return how to apply what is pushed of [start, stop)."""
        key = touched.key, holding.key, start, stop
        if key not in self._applications:
            if len(self._applications) >= _N_APPLICATIONS_MAX:
                self._applications.clear()
            inner = touched.within(start, stop)
            self._applications[key] = SliceUpdate(inner, holding.places(inner))
        return self._applications[key]

    def _by_steps(
        self, application: SliceUpdate, touched: ShardSlice, holding: ShardSlice
    ) -> list[tuple[int, SliceUpdate]]:
        """Return how to apply a push, with the clock that the rule is to see."""
        if not self._identity.rule.needs_clock:
            return [(self.clock, application)]
        parts = self.steps.at(application.target, holding=touched)
        if len(parts) == 1:
            return [(parts[0][0], application)]
        return [(clock, SliceUpdate(inner, holding.places(inner))) for clock, inner in parts]

    def _updating(self, clock: int) -> Update:
        """Return what the rule does at that clock to values and state."""
        rule, names = self._identity.rule, tuple(self._state)

        def update(vectors: Sequence[Vector], gradient: Vector) -> None:
            state = dict(zip(names, vectors[1:], strict=True))
            rule.apply(vectors[0], gradient, state, clock=clock)

        return update

    def end_push(self) -> None:
        """The work is done: one more push is in the values."""
        self.clock += 1
        self.steps.add(self._pushing)
        self._pushing = self.holdings.whole
        if self._n_held is None:
            self._published.end(clock=self.clock)

    def begin_replacing(self) -> None:
        """Somebody else writes all of them now, until `end_push`."""
        self._published.begin()

    def copying(self, out: Vector) -> tuple[Callable[[], None], Cost]:
        """Return the work that copies them into `out`, and what it costs."""
        values = self.vector

        def work() -> None:
            out[:] = values

        return work, Cost(n_bytes=2.0 * values.nbytes)


def _average(values: Vector, pushed: Vector, *, n_clients: int) -> None:
    """Move `values` one n-th of the way to `pushed`."""
    target, source = torch.from_numpy(values), torch.from_numpy(pushed)
    if n_clients == 1:
        target.copy_(source)  # v + (p - v) would not be p to the bit
    else:
        target.lerp_(source, 1.0 / n_clients)
