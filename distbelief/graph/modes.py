"""Whether a model computes in evaluation mode what it does in training.

A layer graph is captured as the model trains. Its kinds know what dropout and
statistics do in evaluation; a forward that asks `self.training` itself, and returns
probabilities rather than scores, say, does something that no layer knows. So the
operations of both modes are compared: dropout apart, they have to be the same.
"""

from dataclasses import dataclass
from typing import Final, final

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from distbelief.graph.tracing import Traced
from distbelief.graph.translating import live_nodes


_DROPOUTS: Final = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
)

_DROPOUT_PLACE: Final = 4
"""Of dropout_p among the arguments of scaled_dot_product_attention."""


@final
@dataclass(frozen=True, slots=True)
class _Described:
    """An operation, the same in every graph."""

    words: str
    constant: torch.Tensor | None


def first_difference(training: Traced, evaluating: Traced, *, root: nn.Module) -> str | None:
    """Return where training does something else than evaluation, if anywhere.

    Args:
        training: What is done in training.
        evaluating: In evaluation mode.
        root: The module that was traced.
    """
    one, other = (_described(t.graph, root) for t in (training, evaluating))
    for (node, here), (late, there) in zip(one, other, strict=False):
        if not _same(here, there):
            shown = late if node.op == "output" else node
            return f"{shown.name}{shown.meta.get('place', '')}"
    return None  # both end with what is returned


def _same(one: _Described, other: _Described) -> bool:
    if one.constant is None or other.constant is None:
        return one == other
    alike = one.constant.shape == other.constant.shape
    return one.words == other.words and alike and one.constant.equal(other.constant)


def _described(graph: fx.Graph, root: nn.Module) -> list[tuple[fx.Node, _Described]]:
    """Return the operations without their names; dropout is left out."""
    numbers: dict[fx.Node, int] = {}
    found: list[tuple[fx.Node, _Described]] = []
    live = live_nodes(list(graph.nodes))
    for node in graph.nodes:
        if node.op != "placeholder" and node not in live:
            continue
        if _is_dropout(node, root) and node.all_input_nodes:
            numbers[node] = numbers[node.all_input_nodes[0]]
            continue
        args, kwargs = node.args, dict(node.kwargs)
        if node.target is functional.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
            args = args[:_DROPOUT_PLACE] + args[_DROPOUT_PLACE + 1 :]
        arguments = map_arg((args, kwargs), lambda n: f"%{numbers[n]}")
        target = getattr(node.target, "__qualname__", node.target)
        words = f"{node.op} {target} {arguments}"
        numbers[node] = len(found)
        found.append((node, _Described(words, node.meta.get("constant"))))
    return found


def _is_dropout(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "call_module":
        return isinstance(root.get_submodule(str(node.target)), _DropoutNd)
    return node.target in _DROPOUTS
