"""ATen operations of torch.export, rewritten to functions that have lowering rules.

Most are called like a method of tensors and take the same arguments: they need no entry here.
`_FUNCTIONS` lists those with a rule for the function, `_REWRITTEN` those that differ.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch
from torch import fx
from torch.nn import functional

from distbelief.graph.graph import GraphError
from distbelief.graph.lowering.registry import knows_function


# The result of an operation, or a constant.
Tensor = fx.Node | torch.Tensor


class Emit(Protocol):
    """Adds an operation to a graph and returns its result."""

    def __call__(self, target: object, *args: object, **kwargs: object) -> fx.Node: ...


_FUNCTIONS: Final[Mapping[str, object]] = {
    "linear": functional.linear,
    "conv1d": functional.conv1d,
    "conv2d": functional.conv2d,
    "conv3d": functional.conv3d,
    "relu6": functional.relu6,
    "silu": functional.silu,
    "mish": functional.mish,
    "gelu": functional.gelu,
    "elu": functional.elu,
    "leaky_relu": functional.leaky_relu,
    "softplus": functional.softplus,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "scaled_dot_product_attention": functional.scaled_dot_product_attention,
    "max_pool1d": functional.max_pool1d,
    "max_pool2d": functional.max_pool2d,
    "max_pool3d": functional.max_pool3d,
    "avg_pool1d": functional.avg_pool1d,
    "avg_pool2d": functional.avg_pool2d,
    "avg_pool3d": functional.avg_pool3d,
    "adaptive_avg_pool1d": functional.adaptive_avg_pool1d,
    "adaptive_avg_pool2d": functional.adaptive_avg_pool2d,
    "adaptive_avg_pool3d": functional.adaptive_avg_pool3d,
    "pad": functional.pad,
    "cat": torch.cat,
    "stack": torch.stack,
    "where": torch.where,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_not": operator.invert,
    "_unsafe_view": "view",
    "alias": "contiguous",
    "lift_fresh_copy": "contiguous",
}

# Assertions, which have no effect.
_SAID: Final = frozenset(
    {
        "_assert_tensor_metadata",
        "_assert_scalar",
        "_assert_async",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
    }
)


def is_known(target: object) -> bool:
    if not isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 -- has no other name
        # Sizes are computed with by Python's operators, and by torch.sym_*.
        return getattr(target, "__module__", "") in {"_operator", "math", "torch"}
    if target.namespace == "distbelief":
        return True
    name = name_of(target)
    if name in _FUNCTIONS or name in _REWRITTEN or name in _SAID:
        return True
    if is_random(target):
        return False
    return knows_function(name) or name.startswith("sym_")


def is_random(target: object) -> bool:
    tags = getattr(target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def is_assertion(target: object) -> bool:
    return name_of(target) in _SAID


def stops_gradients(target: object) -> bool:
    return name_of(target) in {"detach", "detach_"}


def name_of(target: object) -> str:
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet))


def rewritten(
    emit: Emit, target: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Add the operations of an ATen call and return the result.

    Raises:
        GraphError: There is no rule for these arguments.
    """
    name = name_of(target)
    if name in _REWRITTEN:
        rewrite = _REWRITTEN[name]
        assert callable(rewrite), name
        result: object = rewrite(emit, *args, **kwargs)
        return result
    return emit(_FUNCTIONS.get(name, name), *args, **kwargs)


def _slice(
    emit: Emit,
    source: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    # Of a concatenation, only the parts in the slice are taken.
    n_dims, extent = len(_shape(source)), _shape(source)[dim]
    first, last, by = slice(start, end, step).indices(extent)
    if (first, last, by) == (0, extent, 1):
        return source
    parts = _joined(source, dim % n_dims) if by == 1 else []
    if not parts:
        places = (*[slice(None)] * (dim % n_dims), slice(first, last, by))
        if isinstance(source, torch.Tensor):
            return source[places]
        return emit(operator.getitem, source, places)
    found, begin = [], 0
    for part in parts:
        n = _shape(part)[dim]
        low, high = max(first - begin, 0), min(last - begin, n)
        if low < high:
            found.append(_slice(emit, part, dim, low, high))
        begin += n
    return found[0] if len(found) == 1 else emit(torch.cat, found, dim % n_dims)


def _joined(source: Tensor, dim: int) -> list[Tensor]:
    if isinstance(source, torch.Tensor) or source.target is not torch.cat:
        return []
    parts, along = source.args
    assert isinstance(parts, tuple | list), source
    return [_value(part) for part in parts] if along == dim else []


def _value(part: object) -> Tensor:
    assert isinstance(part, fx.Node), part
    constant: torch.Tensor | None = part.meta.get("constant")
    return part if constant is None else constant


def _slice_scatter(
    emit: Emit,
    source: Tensor,
    part: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    # What is before the part, the new part, and what comes after it.
    extent = _shape(source)[dim]
    first, last, by = slice(start, end, step).indices(extent)
    if by != 1:
        raise GraphError(f"writing every {by}th of a dimension has no split rule")
    if (first, last) == (0, extent):
        return part
    parts = [
        _slice(emit, source, dim, 0, first) if first else None,
        part,
        _slice(emit, source, dim, last, extent) if last < extent else None,
    ]
    there = [one for one in parts if one is not None]
    return emit(torch.cat, there, dim % len(_shape(source)))


def _select_scatter(emit: Emit, source: Tensor, part: Tensor, dim: int, index: int) -> Tensor:
    first = index % _shape(source)[dim]
    thin = emit("unsqueeze", part, dim % len(_shape(source)))
    return _slice_scatter(emit, source, thin, dim, first, first + 1)


def _copy(
    emit: Emit,
    source: Tensor,
    other: Tensor,
    non_blocking: bool = False,  # noqa: FBT001, FBT002 -- aten's
) -> object:
    del non_blocking
    if isinstance(other, torch.Tensor) or _shape(source) != _shape(other):
        return emit("expand", other, list(_shape(source)))
    return other


def _product(emit: Emit, one: fx.Node, other: fx.Node) -> object:
    # A product with a tensor of the model is a linear layer.
    weight = _turned(other)
    if weight is not None:
        return emit(functional.linear, one, weight)
    return emit("matmul", one, other)


def _added_product(
    emit: Emit, bias: fx.Node, one: fx.Node, other: fx.Node, *, beta: float = 1, alpha: float = 1
) -> object:
    weight = _turned(other)
    if weight is None or (beta, alpha) != (1, 1):
        raise GraphError(
            "addmm of other than an input and a weight turned around has no split "
            "rule: use torch.nn.Linear"
        )
    return emit(functional.linear, one, weight, bias)


def _turned(node: fx.Node) -> fx.Node | None:
    names = {"transpose", "permute"}
    if node.target not in names or len(_shape(node)) != 2:
        return None
    (source,) = node.all_input_nodes
    same = sorted(a % 2 for a in node.args[1:] if isinstance(a, int)) == [0, 1]
    turned = same or [*map(_listed, node.args[1:])] == [[1, 0]]
    return source if turned and source.op == "get_attr" else None


def _listed(argument: object) -> object:
    return list(argument) if isinstance(argument, Sequence) else argument


def _turn(emit: Emit, source: fx.Node) -> object:
    return emit("transpose", source, 0, 1) if len(_shape(source)) == 2 else source


def _embedding(
    emit: Emit,
    weight: fx.Node,
    words: fx.Node,
    padding: int = -1,
    scaled: bool = False,  # noqa: FBT001, FBT002 -- aten's
    sparse: bool = False,  # noqa: FBT001, FBT002 -- aten's
) -> object:
    del sparse
    if scaled:
        raise GraphError("an embedding with scale_grad_by_freq has no split rule")
    index = None if padding < 0 else padding
    return emit(functional.embedding, words, weight, index)


def _dropout(
    emit: Emit,
    source: fx.Node,
    probability: float,
    trains: bool,  # noqa: FBT001 -- aten's
) -> object:
    return emit(functional.dropout, source, p=probability, training=trains)


def _same(emit: Emit, source: fx.Node, **options: object) -> object:
    del emit, options
    return source


def _converted(emit: Emit, source: fx.Node, *args: object, **options: object) -> object:
    types = [x for x in (*args, options.get("dtype")) if isinstance(x, torch.dtype)]
    return emit("to", source, types[0]) if types else source


def _with_function(target: object) -> object:
    def rewrite(emit: Emit, source: fx.Node, *args: object, **kwargs: object) -> object:
        kept = {word: value for word, value in kwargs.items() if value is not None}
        return emit(target, source, *args, **kept)

    return rewrite


# rewrite(emit, *args, **kwargs) -> result
_REWRITTEN: Final[Mapping[str, object]] = {
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "copy": _copy,
    "matmul": _product,
    "mm": _product,
    "addmm": _added_product,
    "t": _turn,
    "embedding": _embedding,
    "dropout": _dropout,
    "clone": _same,
    "contiguous": _same,
    "to": _converted,
    "_to_copy": _converted,
    "softmax": _with_function(functional.softmax),
    "_softmax": lambda emit, x, dim, _: emit(functional.softmax, x, dim),
    "log_softmax": _with_function(functional.log_softmax),
    "_log_softmax": lambda emit, x, dim, _: emit(functional.log_softmax, x, dim),
    "rsub": lambda emit, x, other: emit(operator.sub, other, x),
    "reciprocal": lambda emit, x: emit(operator.truediv, 1.0, x),
    "layer_norm": lambda emit, x, shape, weight=None, bias=None, eps=1e-5, _=True: emit(
        functional.layer_norm, x, shape, weight, bias, eps
    ),
    "einsum": lambda emit, equation, tensors, **_: emit(torch.einsum, equation, *tensors),
    "constant_pad_nd": lambda emit, x, pad, value=0.0: emit(
        functional.pad, x, pad, "constant", value
    ),
}


def _shape(node: Tensor) -> torch.Size:
    value = node if isinstance(node, torch.Tensor) else node.meta["value"]
    assert isinstance(value, torch.Tensor), node
    return value.shape
