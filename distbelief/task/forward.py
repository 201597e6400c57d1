"""A model's forward, and the loss behind it, as a function of tensors alone, to be captured.

tensors of a batch --> arguments --> outputs --> the tensors of the outputs, and the loss
"""

from collections.abc import Mapping, Sequence
from typing import final

import msgspec
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.graph.capture import InputSpec, input_names, reason_of
from distbelief.graph.graph import GraphError
from distbelief.task.data import Batch, Path, rebuilt, shown_path, tensors_of
from distbelief.task.dry_run import check_arguments
from distbelief.task.imports import place
from distbelief.task.losses import Loss, scores_path


@final
class Entry(msgspec.Struct, frozen=True):
    path: Path  # in a batch: ("inputs",), ("targets", "boxes"), ("batch", "mask")
    spec: InputSpec

    @override
    def __str__(self) -> str:
        kind = "whole numbers" if self.spec.is_integer else "numbers"
        if self.spec.is_mask:
            kind = "True and False"
        root = str(self.path[0]).removesuffix("s")
        return f"{shown_path((root, *self.path[1:]))} {list(self.spec.shape)} of {kind}"


@final
class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and types of an item of the data: all that a layer graph needs."""

    entries: tuple[Entry, ...]

    @override
    def __str__(self) -> str:
        return ", ".join(map(str, self.entries))

    @classmethod
    def of(cls, batch: Batch) -> "Sample":
        return cls(
            entries=tuple(
                Entry(
                    path,
                    InputSpec(
                        shape=tuple(tensor.shape[1:]),
                        # No layer uses the number of values.
                        n_values=None if tensor.is_floating_point() else 1,
                        is_mask=tensor.dtype == torch.bool,
                    ),
                )
                for path, tensor in batch.tensors().items()
            )
        )

    @property
    def inputs(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.path[0] != "targets")

    @property
    def of_loss(self) -> tuple[Entry, ...]:
        """What the loss reads: the targets, or all entries of a dictionary."""
        targets = tuple(entry for entry in self.entries if entry.path[0] == "targets")
        return targets or self.entries

    @property
    def target(self) -> InputSpec | None:
        return next((e.spec for e in self.entries if e.path == ("targets",)), None)


def input_specs(module: nn.Module, entries: Sequence[Entry]) -> dict[str, InputSpec]:
    """Return the inputs of a graph by their names: those of arguments and entries."""
    places = [e for e in entries if e.path[0] == "inputs" and not isinstance(e.path[-1], str)]
    places += [e for e in entries if e.path == ("inputs",)]
    names = iter(input_names(module, len(places)) if places else ())
    found: dict[str, InputSpec] = {}
    for entry in entries:
        name = next(names) if entry in places else shown_path(entry.path[1:]) or "targets"
        while name in found:
            name = f"{entry.path[0]}.{name}"
        found[name] = entry.spec
    return found


@final
class Forward:
    """Calls a model with the tensors of a batch; see `graph.capture.ModelCall`.

    Without `loss` (a mean over samples) it is forward only. `scores`: return only the tensor
    that a loss with a name takes. `keeps_outputs`: return also outputs that the loss does not
    read. `only`: return these outputs; () for all.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        loss: Loss | None = None,
        scores: bool = False,
        keeps_outputs: bool = False,
        only: Sequence[Path] = (),
        name: str = "",
    ) -> None:
        self.fields: tuple[Path, ...] = ()
        self.has_loss = loss is not None
        self.joins = self.has_loss or paths[0][0] == "batch"  # with labels among its arguments
        self._paths = paths
        self._loss = loss
        self._scores = scores
        self._keeps_outputs = keeps_outputs
        self._only = only
        self._name = name

    def __call__(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        batch = Batch.of(dict(zip(self._paths, tensors, strict=True)))
        check_arguments(module, batch, model=type(module).__name__)
        outputs = batch.run(module)
        found = tensors_of(outputs)
        if self._scores:
            path = scores_path(outputs)
            found = {path: found[path]}
        elif self._only:
            found = {path: found[path] for path in self._only}
        losses = []
        if self._loss is not None:
            reads = _Reads()
            losses = [self._value(reads, outputs, batch.targets)]
            if not self._keeps_outputs:
                found = {path: tensor for path, tensor in found.items() if id(tensor) in reads.seen}
            found = {path: tensor for path, tensor in found.items() if tensor is not losses[0]}
        self.fields = tuple(found)
        return [*found.values(), *losses]

    def _value(self, reads: "_Reads", outputs: object, targets: object) -> torch.Tensor:
        assert self._loss is not None
        try:
            with reads:
                value: object = self._loss(outputs, targets)
        except JobError:
            raise
        except Exception as error:  # the loss is the user's
            raise GraphError(
                f"[algorithm] loss = {self._name!r} cannot be captured: {reason_of(error)}"
                f"{place(error)}; let it compute with tensors only, or use one process per replica "
                "(partitions = 1)"
            ) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise GraphError(
                f"[algorithm] loss = {self._name!r} returned {type(value).__name__}: it must "
                "return a tensor of one element, the mean over the samples"
            )
        return value


@final
class WholeLoss(nn.Module):
    """A user's loss function that one rank computes, of fields of the outputs and of the batch."""

    def __init__(self, function: Loss, fields: Sequence[Path], entries: Sequence[Entry]) -> None:
        super().__init__()
        self.function = function
        self.fields = fields
        self.entries = entries

    @override
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return (batch,): the loss for each sample, so that the mean is the function's value."""
        outputs = rebuilt(dict(zip(self.fields, tensors, strict=False)))
        given = zip(self.entries, tensors[len(self.fields) :], strict=True)
        batch = Batch.of({e.path: x.bool() if e.spec.is_mask else x for e, x in given})
        return self.function(outputs, batch.targets).reshape(()).expand(len(tensors[0]))


@final
class _Reads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    @override
    def __torch_function__(
        self,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert callable(func)
        self.seen.update(map(id, pytree.tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))
