"""Modules that torch.export does not look into: each call is one operation.

While `leaves` lasts, their forwards are replaced by an operation of our own, which gets
the tensors of the call, and a number by which the rest of it is found again. What comes
out has the shapes that the module itself returns, found without memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Final, cast, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from distbelief.graph.layer import GraphError
from distbelief.graph.stand_in import run_without_memory
from distbelief.graph.tracer import is_leaf
from distbelief.graph.translation import is_like_input


LEAF: Final = "distbelief::leaf"
_LIBRARY: Final = torch.library.Library("distbelief", "DEF")
_LIBRARY.define("leaf(Tensor[] inputs, int key) -> Tensor[]")


@final
class Call:
    """One call of a module that is not looked into.

    Args:
        module: Which.
        path: Of it, below the module that is exported.
        arguments: Its arguments and keywords.

    Attributes:
        places: Where in its result each tensor stands.
    """

    def __init__(
        self, module: nn.Module, path: str, arguments: tuple[tuple[object, ...], dict[str, object]]
    ) -> None:
        self.module = module
        self.path = path
        self.places: list[tuple[object, ...]] = []
        flat, self._spec = pytree.tree_flatten(arguments)
        self.tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        self._others = [None if isinstance(value, torch.Tensor) else (value,) for value in flat]

    def arguments(self, tensors: Sequence[object]) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return arguments and keywords with these in the place of its tensors."""
        given = iter(tensors)
        flat = [next(given) if other is None else other[0] for other in self._others]
        found = pytree.tree_unflatten(flat, self._spec)
        return cast("tuple[tuple[object, ...], dict[str, object]]", found)

    def result(self, tensors: Sequence[object]) -> object:
        """Return its result with these tensors in it: tuples, or one alone."""
        return _nested(list(zip(self.places, tensors, strict=True)))

    def shapes(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of the shapes of what the module returns."""
        if is_like_input(self.module):
            self.places = [()]
            return [torch.empty_like(inputs[0])]
        there = [
            torch.empty(x.shape, device="meta", dtype=None if x.is_floating_point() else x.dtype)
            for x in inputs
        ]
        arguments, keywords = self.arguments(there)
        result = run_without_memory(self.module, arguments, keywords)
        if any(x._version for x in there):  # noqa: SLF001 -- counts changes in place
            raise GraphError(
                f"{self.path} changes its input in place, which would be lost: let it "
                "return a new tensor"
            )
        named, _ = pytree.tree_flatten_with_path(result)
        floats = next((x.dtype for x in inputs if x.is_floating_point()), None)
        found = [(_keys(path), x) for path, x in named if isinstance(x, torch.Tensor)]
        self.places = [place for place, _ in found]
        return [
            torch.empty(
                x.shape, dtype=floats if x.is_floating_point() else x.dtype, device=inputs[0].device
            )
            for _, x in found
        ]


_CALLS: Final[dict[int, Call]] = {}  # of exports under way; the operator has no other
_KEYS: Final = count()
_INSIDE: Final[list[nn.Module]] = []  # modules whose shapes are being found


@torch.library.register_fake(LEAF, lib=_LIBRARY)  # type: ignore[untyped-decorator] # torch has no types here
def _leaf(inputs: Sequence[torch.Tensor], key: int) -> list[torch.Tensor]:
    call = _CALLS[key]
    forward = call.module.__dict__.pop("forward", None)
    _INSIDE.append(call.module)
    try:
        return call.shapes(inputs)
    finally:
        _INSIDE.pop()
        if forward is not None:
            call.module.__dict__["forward"] = forward


@contextmanager
def leaves(module: nn.Module, calls: dict[int, Call], whole: frozenset[str]) -> Iterator[None]:
    """Let calls of modules that are not looked into be one operation each.

    Args:
        module: In which they are.
        calls: Gets the calls that are made meanwhile, by the number in the operation.
        whole: Paths of modules that are not looked into either.
    """
    changed: list[nn.Module] = []
    above: list[str] = []
    for path, part in module.named_modules():
        hidden = any(path.startswith(f"{other}.") for other in above)
        if not path or hidden or not (path in whole or is_leaf(part)):
            continue
        above.append(path)
        # Hooks run around the forward; what it changes in place is seen in it only.
        if not (_has_hooks(part) or getattr(part, "inplace", False)):
            part.__dict__["forward"] = _forward(part, path, calls)
            changed.append(part)
    try:
        yield
    finally:
        for part in changed:
            del part.__dict__["forward"]
        for key in calls:
            del _CALLS[key]


def _forward(part: nn.Module, path: str, calls: dict[int, Call]) -> object:
    def forward(*arguments: object, **keywords: object) -> object:
        call = Call(part, path, (arguments, keywords))
        key = next(_KEYS)
        calls[key] = _CALLS[key] = call
        tensors: list[object] = torch.ops.distbelief.leaf(call.tensors, key)
        return call.result(tensors)

    return forward


def _has_hooks(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks)  # noqa: SLF001


def is_outside(value: object) -> bool:
    """Return whether a tensor is of the forward that is exported, not of a leaf's."""
    return isinstance(value, torch.Tensor) and not _INSIDE


def _keys(path: Sequence[object]) -> tuple[object, ...]:
    return tuple(
        entry.idx if isinstance(entry, pytree.SequenceKey) else getattr(entry, "key", 0)
        for entry in path
    )


def _nested(found: Sequence[tuple[tuple[object, ...], object]]) -> object:
    """Return values as tuples and dicts, by their places."""
    if len(found) == 1 and not found[0][0]:
        return found[0][1]
    groups: dict[object, list[tuple[tuple[object, ...], object]]] = {}
    for (first, *rest), value in found:
        groups.setdefault(first, []).append((tuple(rest), value))
    if all(isinstance(key, int) for key in groups):
        size = max(cast("int", key) for key in groups) + 1
        return tuple(_nested(groups[index]) if index in groups else None for index in range(size))
    return {key: _nested(group) for key, group in groups.items()}
