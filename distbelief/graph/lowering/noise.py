"""Dropout, also that which is made of random numbers, such as stochastic depth.

    x * (empty(s, 1, 1).bernoulli_(q) / q)        timm, torchvision
    x / q * floor(rand(s, 1, 1) + q)              transformers

Each of these becomes one operation, distbelief::drop, so that evaluation computes without it. The
numbers may be one for each sample, for each channel or for each element.
"""

import math
from typing import Any, Final

import torch
from torch import fx

from distbelief.graph.graph import Option
from distbelief.graph.lowering.operation import Operation, lowers, plain_name
from distbelief.graph.lowering.values import factor


_LIBRARY: Final = torch.library.Library("distbelief", "FRAGMENT")
_LIBRARY.define("drop(Tensor x, float p, int n_shared) -> Tensor")
torch.library.register_fake("distbelief::drop", lambda x, *_: torch.empty_like(x), lib=_LIBRARY)


@lowers("distbelief.drop.default")
def drop(op: Operation) -> object:
    value = op.plain("x")
    options = {"probability": op["p"], "n_shared": op["n_shared"]}
    return op.add("dropout", [value], value.layer.shape, options=options)


@lowers("dropout", "feature_dropout", "native_dropout")
def dropout(op: Operation) -> object:
    value = op.value("self" if "self" in op.arguments else "input")
    if op["train"] and op["p"]:
        channels = "feature" in str(op.target)
        n_shared = len(value.plain().layer.shape) - 1 if channels else 0
        options: dict[str, Option] = {"probability": float(op["p"]), "n_shared": n_shared}
        if place := (value.batch or 0) + value.before:
            options["batch"] = place
        value = op.add("dropout", [value], value.layer.shape, options=options)
    return [value, None] if isinstance(op.result, tuple | list) else value


def replace_noise(graph: fx.Graph) -> None:
    """Make each dropout that is made of random numbers one operation."""
    for node in list(graph.nodes):
        if _word(node) != "mul" or len(node.args) != 2:
            continue
        for value, noise in (node.args, node.args[::-1]):
            found = _scaled(noise) if isinstance(value, fx.Node) else None
            if found is None:
                continue
            kept, scale = found
            source: Any = value
            if not math.isclose(kept * scale, 1.0) and _word(source) == "div":
                source, divisor = source.args[:2]
                scale /= divisor if isinstance(divisor, float) else math.nan
            n_shared = _n_shared(source, noise)
            if math.isclose(kept * scale, 1.0) and n_shared is not None:
                _replace(graph, node, (source, 1 - kept, n_shared))
                break


def _word(node: object) -> str:
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    return plain_name(node.target).partition(".")[0]


def _scaled(node: Any) -> tuple[float, float] | None:  # noqa: ANN401 -- an argument of an operation
    # (q, f) of numbers that are f with probability q, else 0, and are used once.
    word = _word(node)
    if not word or len(node.users) != 1:
        return None
    first, number = (*node.args, None)[:2]
    if word in {"div", "mul"} and isinstance(number, float):
        found = _scaled(first)
        return found and (found[0], found[1] / number if word == "div" else found[1] * number)
    if word == "bernoulli":
        number = 0.5 if number is None else number  # its default, which torch.export leaves out
        return (number, 1.0) if isinstance(number, float) and 0 < number < 1 else None
    if word == "floor" and _word(first) == "add":
        one, other = first.args[:2]
        draw, q = (one, other) if isinstance(other, float) else (other, one)
        if _word(draw) in {"rand", "rand_like"} and isinstance(q, float) and 0 < q < 1:
            return q, 1.0
    return None


def _n_shared(value: Any, noise: fx.Node) -> int | None:  # noqa: ANN401
    # How many of the last dimensions of a value share their number; None if it is no dropout.
    if not isinstance(value, fx.Node):
        return None
    shape, drawn = value.meta["val"].shape, noise.meta["val"].shape
    if len(shape) != len(drawn) or str(shape[0]) != str(drawn[0]) or factor(shape[0]) != 1:
        return None
    n_own = max((dim for dim, extent in enumerate(drawn) if dim and extent != 1), default=0)
    return len(shape) - 1 - n_own if drawn[1 : n_own + 1] == shape[1 : n_own + 1] else None


def _replace(graph: fx.Graph, node: fx.Node, arguments: tuple[object, ...]) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(torch.ops.distbelief.drop.default, arguments)  # type: ignore[arg-type]
    new.meta = dict(node.meta)
    name = node.name
    node.replace_all_uses_with(new)
    _erase(graph, node)
    new._rename(name)  # noqa: SLF001 -- the names of outputs stand in the program's signature


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        if source.op == "call_function" and not source.users:
            _erase(graph, source)
