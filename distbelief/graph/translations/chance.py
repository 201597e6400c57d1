"""Translations of dropout."""

from typing import Final

from torch import nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from distbelief.graph.building import Builder
from distbelief.graph.operation import Operation, Translated
from distbelief.graph.translation import translates, translates_function


_WHOLE_CHANNELS: Final = (functional.dropout1d, functional.dropout2d, functional.dropout3d)


@translates(nn.Dropout, like_input=True)
def dropout(builder: Builder, module: nn.Dropout, operation: Operation) -> Translated:
    """Add dropout of elements."""
    return _dropout(builder, operation, module.p, trains=operation.trains)


@translates(nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, like_input=True)
def channel_dropout(builder: Builder, module: _DropoutNd, operation: Operation) -> Translated:
    """Add dropout of channels."""
    n_shared = len(operation.output) - 1
    return _dropout(builder, operation, module.p, trains=operation.trains, n_shared=n_shared)


@translates_function(functional.dropout)
def dropout_function(builder: Builder, operation: Operation) -> Translated:
    """Add dropout of elements."""
    probability, trains = _given(operation)
    return _dropout(builder, operation, probability, trains=trains)


@translates_function(*_WHOLE_CHANNELS)
def channel_dropout_function(builder: Builder, operation: Operation) -> Translated:
    """Add dropout of channels."""
    probability, trains = _given(operation)
    n_shared = len(operation.output) - 1
    return _dropout(builder, operation, probability, trains=trains, n_shared=n_shared)


def _given(operation: Operation) -> tuple[float, bool]:
    probability = operation.argument(1, "p", 0.5)
    assert isinstance(probability, int | float), operation
    return float(probability), bool(operation.argument(2, "training", default=True))


def _dropout(
    builder: Builder, operation: Operation, probability: float, *, trains: bool, n_shared: int = 0
) -> str:
    if not trains or not probability:
        return operation.operands[0].name
    return builder.add(
        operation.name,
        "dropout",
        operation.inputs[:1],
        operation.output,
        options={"probability": float(probability), "n_shared": n_shared},
    )
