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

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import torch

from distbelief.errors import LocalProtocolError, StorageError
from distbelief.memory import Memory
from distbelief.parameter_server.layout.holding import Holding, Holdings
from distbelief.parameter_server.rules.steps import Steps
from distbelief.parameter_server.rules.update_rules import State
from distbelief.parameter_server.state.application import Application, Update
from distbelief.parameter_server.state.pieces import Pieces
from distbelief.parameter_server.state.published import Published
from distbelief.parameter_server.state.snapshots import ShardIdentity, ShardState, restore
from distbelief.roles import Cost, Snapshot
from distbelief.vectors import Vector


_N_APPLICATIONS_MAX = 256


@final
class ShardValues:
    """The arrays of one life of one shard.

    Attributes:
        clock: Pushes applied, of each machine of a replica its own.
        n_restored: Whole pushes (`Steps.n_pushes`) that this life began with.
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
        self._published = Published.private(n_elements=0, dtype=self._dtype)
        self._state: State = {}
        self._pieces = Pieces(self.vector, self._state)
        self._n_held: int | None = None  # pieces, while it becomes a copy
        self.holdings = Holdings(layout, index)
        self._pushing = self.holdings.whole
        self._applications: dict[tuple[bytes, bytes, int, int], Application] = {}
        self.clock = 0
        self.n_restored = 0
        self.steps = Steps()

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
                self._published = Published.create(
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
        self._published = Published.private(n_elements=self._n_elements, dtype=self._dtype)
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
                    steps=Steps(),
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
        self._pieces = Pieces(self.vector, self._state)
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

    def follow(self, *, clock: int, steps: Steps) -> None:
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

    def why_not(self, touches: Vector | None, holding: Holding) -> str | None:
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
        holding: Holding | None = None,
        touched: Holding | None = None,
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
        self, touched: Holding, holding: Holding, start: int, stop: int
    ) -> Application:
        """Return how to apply what is pushed of [start, stop)."""
        key = touched.key, holding.key, start, stop
        if key not in self._applications:
            if len(self._applications) >= _N_APPLICATIONS_MAX:
                self._applications.clear()
            inner = touched.within(start, stop)
            self._applications[key] = Application(inner, holding.places(inner))
        return self._applications[key]

    def _by_steps(
        self, application: Application, touched: Holding, holding: Holding
    ) -> list[tuple[int, Application]]:
        """Return how to apply a push, with the clock that the rule is to see."""
        if not self._identity.rule.needs_clock:
            return [(self.clock, application)]
        parts = self.steps.at(application.target, holding=touched)
        if len(parts) == 1:
            return [(parts[0][0], application)]
        return [(clock, Application(inner, holding.places(inner))) for clock, inner in parts]

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
