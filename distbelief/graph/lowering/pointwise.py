"""Lowering rules for elementwise operations, dropout, comparisons and masks."""

from collections.abc import Callable, Sequence
from typing import Final

import torch

from distbelief.graph.graph import Option
from distbelief.graph.lowering.lower import Filled, NotSplitError, Operation, Value, lowers
from distbelief.graph.lowering.views import lined_up


def pointwise(
    op: Operation, values: Sequence[Value], function: str, argument: float | None = None
) -> Value:
    """Add a layer that computes a function of values that broadcast."""
    options: dict[str, Option] = {"function": function}
    if argument is not None:
        options["argument"] = argument
    return elementwise(op, "pointwise", values, options)


def elementwise(
    op: Operation, kind: str, values: Sequence[Value], options: dict[str, Option]
) -> Value:
    layers, like = lined_up(op, values)
    shape = tuple(torch.broadcast_shapes(*(layer.shape for layer in layers)))
    name = op.builder.add(op.name, kind, [layer.name for layer in layers], shape, options=options)
    return like.to(op.builder[name])


UNARY: Final = (
    *("relu", "relu6", "sigmoid", "tanh", "silu", "mish", "hardswish", "hardsigmoid", "exp"),
    *("log", "sqrt", "rsqrt", "abs", "neg", "square", "reciprocal", "sin", "cos", "erf"),
    *("log1p", "expm1", "selu", "detach"),
)
SEVERAL: Final = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "maximum": "maximum",
    "minimum": "minimum",
}
COMPARISONS: Final = {
    "gt": "greater",
    "ge": "greater_equal",
    "lt": "less",
    "le": "less_equal",
    "eq": "equal",
    "ne": "not_equal",
    "logical_and": "and",
    "logical_or": "or",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "__and__": "and",
    "__or__": "or",
}
_MIRRORED: Final = {
    "greater": "less",
    "greater_equal": "less_equal",
    "less": "greater",
    "less_equal": "greater_equal",
}


def _floats(op: Operation) -> None:
    # Layers compute floating point numbers; sums of integers are called as they are.
    if op.is_integer and op.result.dtype != torch.bool:
        raise NotSplitError("its result is integers")


def _unary(function: str) -> Callable[[Operation], object]:
    def rule(op: Operation) -> object:
        _floats(op)
        if op["self"] is not None and op.lowerer.as_value(op["self"]).layer.is_integer:
            if function == "detach":
                return op["self"]
            raise NotSplitError("its input is integers")
        return pointwise(op, [op.value("self")], function)

    return rule


for _name in UNARY:
    lowers(_name)(_unary(_name))


@lowers("gelu")
def gelu(op: Operation) -> object:
    word = "gelu_tanh" if op["approximate"] == "tanh" else "gelu"
    return pointwise(op, [op.value("self")], word)


_PARAMETRIC: Final = {
    "leaky_relu": "negative_slope",
    "hardshrink": "lambd",
    "softshrink": "lambd",
    "celu": "alpha",
    "clamp_min": "min",
    "clamp_max": "max",
}


def _parametric(function: str, word: str) -> Callable[[Operation], object]:
    return lambda op: pointwise(op, [op.value("self")], function, op.number(word))


for _name, _word in _PARAMETRIC.items():
    lowers(_name)(_parametric(_name, _word))


@lowers("elu")
def elu(op: Operation) -> object:
    if (op["scale"], op["input_scale"]) != (1, 1):
        raise NotSplitError("it is scaled")
    return pointwise(op, [op.value("self")], "elu", op.number("alpha"))


@lowers("softplus")
def softplus(op: Operation) -> object:
    if (op["beta"], op["threshold"]) != (1, 20):
        raise NotSplitError("only the usual constants have a rule")
    return pointwise(op, [op.value("self")], "softplus")


@lowers("log_sigmoid")
def log_sigmoid(op: Operation) -> object:
    return pointwise(op, [op.value("self")], "logsigmoid")


@lowers("hardtanh", "clamp", "clip")
def clamp(op: Operation) -> object:
    low, high = ("min_val", "max_val") if "min_val" in op.arguments else ("min", "max")
    value = op.value("self")
    _floats(op)
    if op[low] is not None:
        value = pointwise(op, [value], "clamp_min", op.number(low))
    return value if op[high] is None else pointwise(op, [value], "clamp_max", op.number(high))


def _several(function: str) -> Callable[[Operation], object]:
    def rule(op: Operation) -> object:
        _floats(op)
        if op.result.dtype == torch.bool and function != "multiply":
            raise NotSplitError("it is arithmetic of masks")
        if op.arguments.get("alpha", 1) != 1 or op.arguments.get("rounding_mode"):
            raise NotSplitError("only the plain form has a rule")
        left, right = op["self"], op["other"]
        numbers = [_number(left), _number(right)]
        if None not in numbers:
            raise NotSplitError("both are numbers")
        if numbers[1] is not None:
            return pointwise(
                op, [op.value("self")], *_with_number(function, numbers[1], right=True)
            )
        if numbers[0] is not None:
            return pointwise(
                op, [op.value("other")], *_with_number(function, numbers[0], right=False)
            )
        return pointwise(op, [op.value("self"), op.value("other")], function)

    return rule


def _number(given: object) -> float | None:
    if isinstance(given, torch.Tensor):
        return float(given.item()) if given.numel() == 1 else None
    if isinstance(given, Filled):
        return given.number
    if isinstance(given, torch.SymInt | torch.SymFloat):
        raise NotSplitError("it depends on the batch size")
    return float(given) if isinstance(given, bool | int | float) else None


def _with_number(function: str, number: float, *, right: bool) -> tuple[str, float]:
    match function:
        case "add":
            return "add_number", number
        case "multiply":
            return "multiply_number", number
        case "subtract":
            return ("add_number", -number) if right else ("subtract_from_number", number)
        case "divide":
            return ("multiply_number", 1.0 / number) if right else ("divide_number", number)
        case _:
            return ("clamp_min" if function == "maximum" else "clamp_max"), number


for _name, _word in SEVERAL.items():
    lowers(_name)(_several(_word))


@lowers("rsub")
def rsub(op: Operation) -> object:
    number = _number(op["other"])
    if number is None or op["alpha"] != 1:
        raise NotSplitError("only a number minus a tensor has a rule")
    return pointwise(op, [op.value("self")], "subtract_from_number", number)


@lowers("pow")
def power(op: Operation) -> object:
    _floats(op)
    exponent = _number(op["exponent"])
    if exponent is None:
        raise NotSplitError("its exponent is computed")
    return pointwise(op, [op.value("self")], "power", exponent)


@lowers("addcmul")
def addcmul(op: Operation) -> object:
    product = pointwise(op, [op.value("tensor1"), op.value("tensor2")], "multiply")
    if op["value"] != 1:
        raise NotSplitError("it is scaled")
    return pointwise(op, [op.value("self"), product], "add")


def _compared(function: str) -> Callable[[Operation], object]:
    def rule(op: Operation) -> object:
        if op.result.dtype != torch.bool:
            raise NotSplitError("it is bitwise on integers")
        left, right = op["self"], op["other"]
        numbers = [_number(left), _number(right)]
        if numbers[1] is not None:
            return _comparison(op, [op.value("self")], function, numbers[1])
        if numbers[0] is not None:
            mirrored = _MIRRORED.get(function, function)
            return _comparison(op, [op.value("other")], mirrored, numbers[0])
        return _comparison(op, [op.value("self"), op.value("other")], function)

    return rule


def _comparison(
    op: Operation, values: Sequence[Value], function: str, number: float | None = None
) -> Value:
    options: dict[str, Option] = {"function": function, "gradient": False}
    if number is not None:
        options["argument"] = number
    return elementwise(op, "comparison", values, options)


for _name, _word in COMPARISONS.items():
    lowers(_name)(_compared(_word))


@lowers("logical_not", "bitwise_not")
def inverted(op: Operation) -> object:
    if op.result.dtype != torch.bool:
        raise NotSplitError("it is bitwise on integers")
    return _comparison(op, [op.value("self")], "equal", 0.0)


@lowers("where")
def where(op: Operation) -> object:
    return _chosen(op, op.value("condition"), {"yes": op["self"], "no": op["other"]})


@lowers("masked_fill")
def masked_fill(op: Operation) -> object:
    return _chosen(op, op.value("mask"), {"yes": op["value"], "no": op["self"]})


def _chosen(op: Operation, mask: Value, values: dict[str, object]) -> Value:
    _floats(op)
    options: dict[str, Option] = {}
    operands = [mask]
    for word, given in values.items():
        number = _number(given)
        if number is None:
            operands.append(op.lowerer.as_value(given))
        else:
            options[word] = number
    return elementwise(op, "where", operands, options)


# --- types ---


@lowers("to", "_to_copy", "type_as", "float", "double", "half", "bfloat16")
def converted(op: Operation) -> object:
    source = op["self"]
    if not isinstance(source, Value):
        source = op.value("self")
    if op.result.dtype == torch.bool and not op.lowerer.is_mask(source.layer):
        return _comparison(op, [source], "not_equal", 0.0)
    was_integer = source.layer.is_integer
    if was_integer != (op.is_integer and op.result.dtype != torch.bool):
        raise NotSplitError("it converts between whole and floating point numbers")
    return source


lowers("_assert_tensor_metadata")(lambda _: None)


# --- dropout ---


@lowers("dropout", "feature_dropout", "native_dropout")
def dropout(op: Operation) -> object:
    word = "self" if "self" in op.arguments else "input"
    probability = op["p"]
    value = op.value(word)
    several = isinstance(op.result, tuple | list)
    if not op["train"] or not probability:
        return [value, None] if several else value
    channels = "feature" in str(op.target)
    if channels and not value.is_plain:
        raise NotSplitError("the batch is not its first dimension")
    n_shared = len(value.layer.shape) - 1 if channels else 0
    options: dict[str, Option] = {"probability": float(probability), "n_shared": n_shared}
    found = op.add("dropout", [value], value.layer.shape, options=options)
    return [found, None] if several else found
