"""The masks of dropout that machines draw, for the process they are compared with.

torch draws every mask by one operation, `bernoulli_`. In a forward
pass these are the graph's layers that drop, in this order. A machine computes its part
of a mask by a hash of each element's place (`kinds.dropout`); so can one process. All
else that is drawn differs from process to process, and is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Final, final

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from distbelief.errors import JobError
from distbelief.graph.kind import Step
from distbelief.graph.kinds.attention import Attention, scores_shape
from distbelief.graph.kinds.dropout import Dropout, mask
from distbelief.graph.layer import Layer, LayerGraph
from distbelief.graph.region import Region, Shape


_DRAW: Final = torch.ops.aten.bernoulli_.float
_USUAL: Final = 0.5
"""Its probability where none is said."""


@final
class SameMasks(TorchDispatchMode):
    """Lets one forward pass of a model drop what machines drop.

    Args:
        graph: Of the model.
        seed: Of the machines' step.
    """

    def __init__(self, graph: LayerGraph, *, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch has no types here
        self._step = Step(training=True, seed=seed)
        self._left = [layer for layer in graph.layers if 0 < _probability(layer) < 1]

    @override
    def __torch_dispatch__(
        self,
        func: object,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert isinstance(func, OpOverload), func
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if func is not _DRAW or not self._left:
            raise _refusal(f"torch's {func}")
        layer = self._left.pop(0)
        drawn = args[0]
        assert isinstance(drawn, torch.Tensor), func
        probability = args[1] if len(args) > 1 else _USUAL
        kept = self._mask(layer, drawn)
        if kept.numel() != drawn.numel() or probability != 1 - _probability(layer):
            raise _refusal(repr(layer.name))  # it is of another layer
        return drawn.copy_(kept.view_as(drawn) != 0)

    def _mask(self, layer: Layer, like: torch.Tensor) -> torch.Tensor:
        shape = _fates(layer)
        return mask(
            layer.name,
            shape,
            Region.of(*shape),
            probability=_probability(layer),
            like=like,
            step=self._step,
        )

    def check(self) -> None:
        """Check, after the pass, that all masks were drawn.

        Raises:
            JobError: one was not.
        """
        if self._left:
            raise _refusal(repr(self._left[0].name))


def _refusal(culprit: str) -> JobError:
    return JobError(
        f"--verify cannot compare {culprit}: its random numbers differ from process to "
        "process; use torch.nn.Dropout for them, or make the model without"
    )


def _probability(layer: Layer) -> float:
    """Return with which probability a layer drops; 0 if it does not."""
    word = {Dropout.name: "probability", Attention.name: "dropout"}.get(layer.kind)
    return layer.number(word) if word else 0.0


def _fates(layer: Layer) -> Shape:
    """Return the shape of what has a fate of its own, without the batch."""
    if layer.kind == Attention.name:
        return scores_shape(layer)
    return layer.shape[: len(layer.shape) - layer.integer("n_shared")]
