"""Lowers operations on complex numbers, as of rotary embeddings, to those on their two parts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch.utils import _pytree as pytree

from distbelief.graph.lowering.operation import Operation, plain_name
from distbelief.graph.lowering.values import Complex, NotSplitError


_ATEN: Final = torch.ops.aten
# Operations that do to a complex tensor what they do to each of its parts.
_ALIKE: Final = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "_unsafe_view", "unsqueeze", "squeeze"),
        *("permute", "transpose", "expand", "slice", "select", "narrow", "index", "index_select"),
        *("cat", "stack", "split", "unbind", "chunk", "contiguous", "clone", "alias", "detach"),
        *("to", "_to_copy", "lift_fresh_copy", "neg", "sum", "mean"),
    }
)


def has_complex(given: object) -> bool:
    return any(
        isinstance(one, Complex) or (isinstance(one, torch.Tensor) and one.is_complex())
        for one in pytree.tree_leaves(given)
    )


def by_parts(op: Operation, lower: Callable[[Operation], Any]) -> object:
    """Lower an operation on complex numbers by operations on floats; NotSplitError if unknown."""
    packet = plain_name(op.target).partition(".")[0]
    arguments = {word: _in_parts(value) for word, value in op.arguments.items()}
    operation = _ByParts(replace(op, arguments=arguments), lower)
    if packet in _RULES:
        return _RULES[packet](operation)
    one, other = arguments.get("self"), arguments.get("other")
    both = isinstance(one, Complex) and isinstance(other, Complex)
    if not (packet in _ALIKE or (packet in {"add", "sub"} and both)):
        raise NotSplitError("its result has complex numbers")
    real, imaginary = (
        operation.done(op.target, **_parts(arguments, word)) for word in ("real", "imaginary")
    )
    if isinstance(real, list):
        return [Complex(*pair) for pair in zip(real, imaginary, strict=True)]
    return Complex(real, imaginary)


@final
@dataclass(frozen=True, slots=True)
class _ByParts:
    op: Operation
    lower: Callable[[Operation], Any]

    def __getitem__(self, word: str) -> Any:  # noqa: ANN401 -- of any type
        return self.op[word]

    def done(self, target: Any, /, **arguments: object) -> Any:  # noqa: ANN401 -- an operation
        result = pytree.tree_map_only(torch.Tensor, _real, self.op.result)
        return self.lower(replace(self.op, target=target, arguments=arguments, result=result))

    def product(self, one: object, other: object) -> Any:  # noqa: ANN401 -- a value
        return self.done(_ATEN.mul.Tensor, self=one, other=other)


def _viewed_as_complex(op: _ByParts) -> object:
    parts = (op.done(_ATEN.select.int, self=op["self"], dim=-1, index=i) for i in range(2))
    return Complex(*parts)


def _viewed_as_real(op: _ByParts) -> object:
    parts = [op["self"].real, op["self"].imaginary]
    return op.done(_ATEN.stack.default, tensors=parts, dim=-1)


def _polar(op: _ByParts) -> object:
    waves = [op.done(word, self=op["angle"]) for word in (_ATEN.cos.default, _ATEN.sin.default)]
    return Complex(*(op.product(op["abs"], wave) for wave in waves))


def _conjugate(op: _ByParts) -> object:
    return Complex(op["self"].real, op.done(_ATEN.neg.default, self=op["self"].imaginary))


def _product(op: _ByParts) -> object:
    one, other = op["self"], op["other"]
    if not isinstance(other, Complex):
        one, other = other, one
    if not isinstance(one, Complex):
        return Complex(op.product(one, other.real), op.product(one, other.imaginary))
    real = op.product(one.real, other.real), op.product(one.imaginary, other.imaginary)
    crossed = op.product(one.real, other.imaginary), op.product(one.imaginary, other.real)
    return Complex(
        op.done(_ATEN.sub.Tensor, self=real[0], other=real[1], alpha=1),
        op.done(_ATEN.add.Tensor, self=crossed[0], other=crossed[1], alpha=1),
    )


_RULES: Final[dict[str, Callable[[_ByParts], object]]] = {
    "view_as_complex": _viewed_as_complex,
    "view_as_real": _viewed_as_real,
    "complex": lambda op: Complex(op["real"], op["imag"]),
    "polar": _polar,
    "_conj": _conjugate,
    "conj": _conjugate,
    "mul": _product,
}


def _in_parts(given: Any) -> Any:  # noqa: ANN401 -- of any type
    if isinstance(given, list):
        return [_in_parts(one) for one in given]
    if isinstance(given, torch.Tensor) and given.is_complex():
        return Complex(given.real.contiguous(), given.imag.contiguous())
    return given


def _parts(given: Any, word: str) -> Any:  # noqa: ANN401 -- as above
    if isinstance(given, dict):
        return {name: _parts(one, word) for name, one in given.items()}
    if isinstance(given, list):
        return [_parts(one, word) for one in given]
    return getattr(given, word) if isinstance(given, Complex) else given


def _real(result: torch.Tensor) -> torch.Tensor:
    return result.real if result.is_complex() else result
