"""What tracing gave up on, captured by torch.export where that can: module by module.

A module is exported once for all batches; what comes of it is put into every graph that
is traced. What cannot be exported, or has no split rule then either, is refused with
the reason, and stays whole.
"""

from dataclasses import replace
from typing import final

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from distbelief.graph.exporting import Exported, ExportError, export
from distbelief.graph.inlining import inline
from distbelief.graph.tracer import explained
from distbelief.graph.tracing import Traced
from distbelief.graph.translating import UnsplitError


Key = tuple[object, ...]


@final
class Exports:
    """The modules of one model that are exported, or refused.

    Attributes:
        refused: Per path, why.
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._found: dict[Key, Exported] = {}

    def refuse(self, path: str, reason: str) -> None:
        """Note that a module is to stay whole."""
        self.refused[path] = reason

    def put_into(self, traced: Traced, root: nn.Module, *, batch: int) -> Traced | None:
        """Return what was traced with all modules that can be exported looked into.

        Args:
            traced: Its graph is changed.
            root: The module that was traced.
            batch: Extent of the batch while it was.

        Returns:
            None if it has to be traced again, for one more is refused.

        Raises:
            UnsplitError: a module in one of them has to stay whole first.
        """
        exported: set[str] = set()
        while True:
            calls = [
                node
                for node in traced.graph.nodes
                if node.op == "call_module"
                and node.target in traced.whole
                and node.target not in self.refused
            ]
            if not calls:
                return replace(traced, whole=self._reasons(traced), exported=frozenset(exported))
            try:
                inline(calls[0], self._exported(calls[0], traced, root, batch=batch), root=root)
            except ExportError as error:
                path = str(calls[0].target)
                inner = f"{path}.{error.inner}"
                if error.inner and inner not in traced.whole:
                    raise UnsplitError(inner, str(error)) from error
                self.refuse(path, str(error))
            except Exception as error:  # noqa: BLE001 -- also what torch says to arguments
                self.refuse(str(calls[0].target), explained(error))
                return None  # a part of it may be in the graph already
            else:
                exported.add(str(calls[0].target))

    def _exported(self, call: fx.Node, traced: Traced, root: nn.Module, *, batch: int) -> Exported:
        path = str(call.target)
        below = frozenset(
            other.removeprefix(f"{path}.") for other in traced.whole if other.startswith(f"{path}.")
        )
        if not all(_is_tensor(node) for node in call.all_input_nodes):
            raise ExportError("it is given several tensors as one")
        args, kwargs = (
            map_arg(given, lambda node: node.meta["value"])
            for given in (call.args, dict(call.kwargs))
        )
        flat, spec = pytree.tree_flatten((args, kwargs))
        shown = tuple(_shown(value, batch) for value in flat)
        key = (path, below, shown, str(spec))
        if key not in self._found:
            self._found[key] = export(
                root.get_submodule(path),
                (args, kwargs),  # type: ignore[arg-type] # as it was called
                batch=batch,
                whole=below,
            )
        return self._found[key]

    def _reasons(self, traced: Traced) -> dict[str, str]:
        """Return why modules stay whole: both reasons, if they differ."""
        return {path: both(reason, self.refused.get(path)) for path, reason in traced.whole.items()}


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["value"], torch.Tensor)


def both(reason: str, refusal: str | None) -> str:
    """Return why a module can be captured in neither way."""
    if refusal is None or refusal in reason:
        return reason
    return f"{reason}; nor by torch.export: {refusal}"


def _shown(value: object, batch: int) -> object:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape = tuple(-1 if extent == batch else extent for extent in value.shape)
    return shape, value.dtype
