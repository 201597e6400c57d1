"""Translations of recurrent networks: computed whole, with what each result is.

The last hidden state of the last layer, `h[-1]`, is the last output; other states of
hidden layers have the batch as their second dimension, and no translation.
"""

from dataclasses import replace

import torch
from torch import nn

from distbelief.graph.building import Builder
from distbelief.graph.kinds.reshaping import reshape_layer
from distbelief.graph.layer import GraphError
from distbelief.graph.operation import Operation, Several, Translated
from distbelief.graph.translation import translates
from distbelief.graph.wholes import whole_module


@translates(nn.RNN, nn.LSTM, nn.GRU)
def recurrent(builder: Builder, module: nn.RNNBase, operation: Operation) -> Translated:
    """Add a whole layer for the outputs, and what of it is the last state."""
    if not module.batch_first:
        raise GraphError(
            f"{operation.name} takes the batch as its second dimension: give it batch_first=True"
        )
    reason = f"{type(module).__name__} has no split rule: a step needs the one before"
    whole = whole_module(builder, module, operation, reason=reason)
    assert isinstance(whole, Several), operation
    outputs = whole
    last = module.num_layers - 1
    of_hidden = (1, 0) if isinstance(module, nn.LSTM) else (1,)

    def add(place: tuple[int, ...], result: torch.Tensor) -> str | Several:
        if place == of_hidden:
            states = tuple(result.unbind(0))
            return Several(results=states, add=add, place=place)
        if place[:-1] == of_hidden and place[-1] == last and not module.bidirectional:
            name = outputs.take(0)
            assert isinstance(name, str), operation
            return _last(builder, name, f"{operation.name}.last")
        if place == (0,):
            return outputs.take(0)
        raise GraphError(
            f"{operation.name}: state {place} has the batch as its second dimension; "
            "only outputs, and h[-1] of a network in one direction, can be used"
        )

    return replace(whole, add=add)


def _last(builder: Builder, source: str, name: str) -> str:
    """Add what is at the last position of (positions, features)."""
    n_positions, n_features = builder[source].shape
    part = builder.add(
        f"{name}.slice",
        "slice",
        [source],
        (1, n_features),
        options={"starts": (n_positions - 1, 0), "steps": (1, 1)},
    )
    layer = reshape_layer(builder.free_name(name), builder[part], shape=(n_features,))
    return builder.add_layer(layer)
