"""A shard's values, the rule's state, the clock: what pushes change.

The values lie under a sequence lock (`published`) where clients of the host can read
them, if there is such memory. From `begin_push` to `end_push` they are marked as being
written; the work between runs outside the role, and nothing else may touch them.

Buffers are averages over the clients that push: v += (pushed - v) / n. With n = 1 they
are what was pushed, to the bit, so one replica has BatchNorm as sequential training.
"""

from collections.abc import Callable
from typing import final

import torch

from distbelief.errors import LocalProtocolError, StorageError
from distbelief.memory import Memory
from distbelief.parameter_server.published import Published
from distbelief.parameter_server.snapshots import ShardIdentity, ShardState, restore
from distbelief.parameter_server.update_rules import State
from distbelief.roles import Cost, Snapshot
from distbelief.vectors import Vector


@final
class ShardValues:
    """The arrays of one life of one shard."""

    def __init__(self, identity: ShardIdentity, *, memory: Memory) -> None:
        layout, index = identity.layout, identity.index
        self._identity = identity
        self._memory = memory
        self._n_elements = layout.shard_size(index)
        self._n_gradient = layout.n_gradient(index)
        self._dtype = layout.dtype
        self._published = Published.private(n_elements=0, dtype=self._dtype)
        self._state: State = {}
        self.clock = 0

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
        self._published = Published.private(
            n_elements=self._n_elements, dtype=self._dtype
        )
        return why_not

    def initialising(
        self,
        restored: Snapshot | None,
        initialise: Callable[[], Vector],
        *,
        incarnation: int,
    ) -> tuple[Callable[[], ShardState], Cost]:
        """Return the work that fills them, and what it costs.

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
                    incarnation=incarnation,
                    clock=0,
                    values=initialise(),
                    state=identity.rule.state(self._n_gradient, dtype),
                    clients=(),
                )
            if state.values.shape != vector.shape:
                raise LocalProtocolError(
                    f"initial values of shard {identity.index} have shape "
                    f"{state.values.shape}, not {vector.shape}"
                )
            vector[:] = state.values
            return state

        return work, Cost(n_bytes=2.0 * vector.nbytes)

    def initialised(self, state: ShardState) -> None:
        """The work is done: they can be read."""
        self._state = state.state
        self.clock = state.clock
        self._published.end(clock=self.clock)

    def begin_push(
        self, pushed: Vector, *, n_clients: int
    ) -> tuple[Callable[[], None], Cost]:
        """Return the work that applies a push, and what it costs.

        Args:
            pushed: (shard_size,) gradient of the parameters, then buffers.
            n_clients: Over how many clients buffers are averaged.
        """
        self._published.begin()
        n, rule, clock = self._n_gradient, self._identity.rule, self.clock
        values, state = self.vector, self._state

        def work() -> None:
            rule.apply(values[:n], pushed[:n], state, clock=clock)
            if n < values.size:
                _average(values[n:], pushed[n:], n_clients=n_clients)

        n_passes = 3 + 2 * len(state)  # read and write each vector, read the gradient
        return work, Cost(n_bytes=float(n_passes * values.nbytes), flops=4.0 * n)

    def end_push(self) -> None:
        """The work is done: one more push is in the values."""
        self.clock += 1
        self._published.end(clock=self.clock)

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
