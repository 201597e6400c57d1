"""Lowers operations on complex numbers, as of rotary embeddings, to those on their two parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch.utils import _pytree as pytree

from distbelief.graph.lowering.operation import Operation, plain_name
from distbelief.graph.lowering.values import NotSplitError


_ATEN: Final = torch.ops.aten
# Operations that do to a complex tensor what they do to each part.
_BY_PARTS: Final = frozenset(
    """
    view reshape flatten unflatten _unsafe_view unsqueeze squeeze permute transpose expand slice
    select narrow index index_select cat stack split unbind chunk contiguous clone alias detach to
    _to_copy lift_fresh_copy neg sum mean
    """.split()
)


@final
@dataclass(frozen=True, slots=True)
class Complex:
    """A complex tensor: two tensors of its shape."""

    real: Any
    imaginary: Any


def has_complex(given: object) -> bool:
    leaves = pytree.tree_leaves(given)
    return any(isinstance(x, Complex) or (_is_tensor(x) and x.is_complex()) for x in leaves)


def _is_tensor(given: object) -> bool:
    return isinstance(given, torch.Tensor)


def by_parts(op: Operation, lower: Callable[[Operation], Any]) -> object:
    """Lower an operation on complex numbers by operations on floats; NotSplitError if unknown."""
    result = _real(op.result)

    def done(target: Any, arguments: Mapping[str, Any], found: Any = result) -> Any:  # noqa: ANN401 -- as torch
        return lower(replace(op, target=target, arguments=arguments, result=found))

    def product(one: object, other: object) -> Any:  # noqa: ANN401
        return done(_ATEN.mul.Tensor, {"self": one, "other": other})

    packet = plain_name(op.target).partition(".")[0]
    given = {word: _in_parts(value) for word, value in op.arguments.items()}
    one, other = given.get("self"), given.get("other")
    match packet:
        case "view_as_complex":
            parts = [done(_ATEN.select.int, {"self": one, "dim": -1, "index": i}) for i in (0, 1)]
            return Complex(*parts)
        case "view_as_real" if isinstance(one, Complex):
            parts = [one.real, one.imaginary]
            return done(_ATEN.stack.default, {"tensors": parts, "dim": -1}, op.result)
        case "complex":
            return Complex(given["real"], given["imag"])
        case "polar":
            waves = (
                done(word.default, {"self": given["angle"]}) for word in (_ATEN.cos, _ATEN.sin)
            )
            return Complex(*(product(given["abs"], wave) for wave in waves))
        case "_conj" | "conj" if isinstance(one, Complex):
            return Complex(one.real, done(_ATEN.neg.default, {"self": one.imaginary}))
        case "mul" if isinstance(one, Complex) and isinstance(other, Complex):
            pairs = [(one.real, other.real), (one.imaginary, other.imaginary)]
            crossed = [(one.real, other.imaginary), (one.imaginary, other.real)]
            sums = []
            for target, terms in ((_ATEN.sub.Tensor, pairs), (_ATEN.add.Tensor, crossed)):
                left, right = (product(*pair) for pair in terms)
                sums.append(done(target, {"self": left, "other": right, "alpha": 1}))
            return Complex(*sums)
        case "mul":
            value, factor = (one, other) if isinstance(one, Complex) else (other, one)
            assert isinstance(value, Complex), op.name
            return Complex(product(value.real, factor), product(value.imaginary, factor))
        case "add" | "sub" if isinstance(one, Complex) and isinstance(other, Complex):
            pass
        case "div" if not isinstance(other, Complex):
            pass
        case _ if packet not in _BY_PARTS:
            raise NotSplitError("its result has complex numbers")
    real, imaginary = (done(op.target, _parts(given, word)) for word in ("real", "imaginary"))
    if isinstance(real, list):
        return [Complex(*pair) for pair in zip(real, imaginary, strict=True)]
    return Complex(real, imaginary)


def _in_parts(given: Any) -> Any:  # noqa: ANN401 -- of any type
    if isinstance(given, list):
        return [_in_parts(one) for one in given]
    if isinstance(given, torch.Tensor) and given.is_complex():
        return Complex(given.real.contiguous(), given.imag.contiguous())
    return given


def _parts(given: Any, word: str) -> Any:  # noqa: ANN401
    if isinstance(given, dict):
        return {name: _parts(one, word) for name, one in given.items()}
    if isinstance(given, list):
        return [_parts(one, word) for one in given]
    return getattr(given, word) if isinstance(given, Complex) else given


def _real(result: Any) -> Any:  # noqa: ANN401
    def one(x: Any) -> Any:  # noqa: ANN401
        return x.real if x.is_complex() else x

    return pytree.tree_map_only(torch.Tensor, one, result)
