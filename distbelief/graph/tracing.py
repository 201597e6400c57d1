"""A module's operations as a graph of torch.fx, whatever its forward looks like.

Modules that have a translation, and torch's own, are kept whole; the user's are traced
through. A module whose forward cannot be traced (it branches on its data, or calls a
`torch.autograd.Function`, whose gradient tracing would silently replace) is kept whole
as well, with the reason, and tried no further.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn, final

import torch
from torch import fx, nn
from typing_extensions import override

from distbelief.graph.layer import GraphError


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What tracing a module has come to.

    Attributes:
        graph: Its operations.
        whole: Modules kept whole because they cannot be traced, and why.
    """

    graph: fx.Graph
    whole: dict[str, str] = field(default_factory=dict)


def trace(module: nn.Module, *, is_leaf: Callable[[nn.Module], bool]) -> Traced:
    """Trace `module`.

    Args:
        module: Whose forward takes tensors only.
        is_leaf: Which modules have a translation of their own.

    Raises:
        GraphError: its own forward cannot be traced.
    """
    whole: dict[str, str] = {}
    while True:
        tracer = _Tracer(is_leaf, frozenset(whole))
        try:
            with _no_custom_functions():
                graph = tracer.trace(module)
        except Exception as error:  # whatever the user's forward does with a proxy
            path = tracer.innermost
            if not path:
                raise GraphError(
                    f"{type(module).__name__}.forward cannot be traced: "
                    f"{_explained(error)}. Move that part into a module of its own, "
                    "which is then computed whole on one machine"
                ) from error
            whole[path] = _explained(error)
        else:
            return Traced(graph=graph, whole=whole)


@final
class _CustomFunctionError(Exception):
    """A `torch.autograd.Function` was about to be traced through."""


@final
class _Tracer(fx.Tracer):
    def __init__(
        self, is_leaf: Callable[[nn.Module], bool], whole: frozenset[str]
    ) -> None:
        super().__init__()
        self._is_leaf = is_leaf
        self._whole = whole
        self.innermost = ""  # the module whose forward was entered last, and not left

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._whole or self._is_leaf(m):
            return True
        ours = type(m).__module__.partition(".")[0] == "torch"
        return ours and not isinstance(m, _CONTAINERS)

    @override
    def call_module(
        self,
        m: nn.Module,
        forward: object,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        before = self.innermost
        self.innermost = self.path_of_module(m)
        assert callable(forward)
        result: object = super().call_module(m, forward, args, kwargs)
        self.innermost = before  # not after an error: it tells where that was
        return result


@contextmanager
def _no_custom_functions() -> Iterator[None]:
    """Let no `torch.autograd.Function` be inlined: its backward would be lost."""

    def refuse(cls: type, /, *args: object, **kwargs: object) -> NoReturn:
        del args, kwargs
        raise _CustomFunctionError(cls.__qualname__)

    original = torch.autograd.Function.__dict__.get("apply")
    assert original is not None
    torch.autograd.Function.apply = classmethod(refuse)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _explained(error: Exception) -> str:
    """Return why something cannot be traced, in a sentence."""
    if isinstance(error, _CustomFunctionError):
        return f"it calls {error}, a torch.autograd.Function with a gradient of its own"
    if isinstance(error, fx.proxy.TraceError):
        return "its forward depends on the values of its data (an `if`, a loop, len())"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
