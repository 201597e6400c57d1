"""Runs an optimizer in this process, for a function of one flat vector.

The shards are in this process too, each with its own range of the vector, so the results
are those of a cluster:

    def bowl(x):
        return float(x @ x), 2.0 * x

    x, result = minimize_flat(bowl, numpy.ones(3), LBFGS())
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TypeVar, final

import numpy as np
import torch
from numpy.typing import NDArray

from distbelief.core.vectors import Vector
from distbelief.parameter_server.layout import ElementType, Layout, TensorSpec
from distbelief.parameter_server.vector_store import VectorStore
from distbelief.protocol.vector_commands import Command, Scalars, VectorName, combine
from sandblaster.optimizers import base
from tests.distbelief.parameter_server.pair import gather, scatter


T = TypeVar("T")
Doubles = NDArray[np.float64]
Function = Callable[[Doubles], tuple[float, Doubles]]
"""From a point to loss and gradient, both of shape (n,)."""


def minimize_flat(
    function: Function,
    x0: Doubles,
    method: base.Runnable,
    *,
    n_shards: int = 1,
    callback: Callable[[base.IterationDone], bool] | None = None,
    bounds: tuple[Doubles, Doubles] | None = None,
) -> tuple[Doubles, base.Result]:
    """Return the best point found, of shape (n,), and how the run ended.

    Args:
        function: Returns loss and gradient; either may be NaN or infinite.
        x0: (n,) where to begin.
        method: Settings of a method, as in `LBFGS(history=20)`.
        n_shards: Number of ranges the vector is divided into.
        callback: Called with each accepted point; returns whether to stop.
        bounds: (n,) the lower and upper ones, as shards have them.
    """
    local = Local(x0, function, n_shards=n_shards, callback=callback, bounds=bounds)
    result = local.run(method.steps())
    return local.get("parameters"), result


@final
class Local:
    """Shards in one process, and the driver that answers requests with them."""

    def __init__(
        self,
        x0: Doubles,
        function: Function,
        *,
        n_shards: int = 1,
        dtype: ElementType = "float64",
        callback: Callable[[base.IterationDone], bool] | None = None,
        bounds: tuple[Doubles, Doubles] | None = None,
    ) -> None:
        # As many tensors as shards, so that even a short vector is on all of them.
        self._cuts = np.linspace(0, len(x0), n_shards + 1).astype(int).tolist()
        specs = [
            TensorSpec(name=f"{k:06}", shape=(stop - start,))
            for k, (start, stop) in enumerate(pairwise(self._cuts))
        ]
        self._layout = Layout.of(specs, n_shards=n_shards, dtype=dtype)
        self._function = function
        self._callback = callback
        self._n = len(x0)
        # The vectors of each shard.
        self.algebras = [VectorStore(self._layout, k) for k in range(n_shards)]
        if bounds is not None:
            for name, values in zip(("lower", "upper"), bounds, strict=True):
                self.put(name, values)
            self.algebras = [
                VectorStore(self._layout, k, constants=algebra.export(("lower", "upper")))
                for k, algebra in enumerate(self.algebras)
            ]
        # Number of requests answered, by kind.
        self.n_requests = {base.VectorOps: 0, base.Evaluate: 0, base.IterationDone: 0}
        self.put("parameters", x0)

    def run(self, steps: base.Steps[T]) -> T:
        try:
            request = next(steps)
            while True:
                request = steps.send(self.answer(request))
        except StopIteration as end:  # at once, if a finished run is resumed
            result: T = end.value
            return result

    def answer(self, request: base.Request) -> base.Reply:
        self.n_requests[type(request)] += 1
        match request:
            case base.VectorOps(commands=commands):
                return self.perform(commands)
            case base.Evaluate():
                return self._evaluate(request)
            case base.Rounds():
                raise AssertionError("no program")
            case base.IterationDone():
                return self._callback is not None and self._callback(request)

    def perform(self, commands: tuple[Command, ...]) -> Scalars:
        answers = [algebra.perform(commands) for algebra in self.algebras]
        return combine(commands, answers)

    # Without buffers a shard's vector is its whole range.

    def get(self, name: VectorName) -> Doubles:
        whole = torch.zeros(self._n, dtype=torch.float64)
        for k, algebra in enumerate(self.algebras):
            scatter(self._layout, k, algebra.vector(name), self._tensors(whole))
        return whole.numpy()

    def put(self, name: VectorName, values: Doubles) -> None:
        whole = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))
        for k, algebra in enumerate(self.algebras):
            gather(self._layout, k, self._tensors(whole), algebra.vector(name))

    def export(self, names: tuple[VectorName, ...]) -> list[Mapping[str, Vector]]:
        return [
            {name: vector.copy() for name, vector in algebra.export(names).items()}
            for algebra in self.algebras
        ]

    def restore(self, saved: list[Mapping[str, Vector]]) -> None:
        for algebra, vectors in zip(self.algebras, saved, strict=True):
            algebra.restore(vectors)

    def _tensors(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole[start:stop] for start, stop in pairwise(self._cuts)]

    def _evaluate(self, request: base.Evaluate) -> base.Evaluation:
        before = self.perform(request.before)
        loss, gradient = self._function(self.get(request.point))
        self.put(request.gradient, gradient)
        after = self.perform(request.after)
        return base.Evaluation(loss=float(loss), scalars=before + after)
