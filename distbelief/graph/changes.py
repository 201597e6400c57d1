"""Tensors that a forward changes in place: what is read of them later is the change.

Layers have no memory to change. So after `y = x.relu_()` every later use of x is one of
the new layer; if it is used by another shape (a view of it), that is refused.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import fx

from distbelief.graph.layer import GraphError
from distbelief.graph.unseen import lost_change


_DETACHING: Final = ("detach", "detach_", torch.detach)


def renamed(node: fx.Node, later: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes that mean the result of `node` from now on.

    Args:
        node: Its `meta` says which arguments it changed.
        later: Nodes before it whose results are used after it.

    Raises:
        GraphError: it changes a tensor of the model, or one that is used later in
            another way.
    """
    later = list(later)
    for changed in node.meta.get("changed", ()):
        if changed.op == "get_attr":
            raise GraphError(lost_change(str(changed.target)))
        _refuse_detached(node, changed)
        for other in later:
            if not _share(other.meta.get("value"), changed.meta["value"]):
                continue
            if not _same_place(other.meta["value"], node.meta["value"]):
                raise GraphError(
                    f"{node.target} changes a tensor in place that is used later by "
                    "another name or shape: use the function that returns a new one"
                )
            yield other


def _refuse_detached(node: fx.Node, changed: fx.Node) -> None:
    """Check that what is changed has no name whose gradient is another.

    Raises:
        GraphError: it has.
    """
    for other in node.graph.nodes:
        detached = other.meta.get("detached") or other.target in _DETACHING
        if detached and _share(other.meta.get("value"), changed.meta["value"]):
            raise GraphError(
                f"{node.target} changes a tensor in place of which a part is detached, "
                "or under no_grad: use the function that returns a new one"
            )


def refuse_change(node: fx.Node) -> None:
    """Check that a node changes nothing.

    Raises:
        GraphError: it does.
    """
    if node.meta.get("changed"):
        raise GraphError(
            f"{node.target} changes its input in place, and is computed whole: use inplace=False"
        )


def _share(one: object, other: object) -> bool:
    # Tensors without memory have no addresses, but storages all the same.
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)  # noqa: SLF001
    )


def _same_place(one: torch.Tensor, other: object) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and _share(one, other)
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )
