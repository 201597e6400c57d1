"""One operation of torch, as a lowering rule gets it, and the tables of the rules."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Final, final

import torch
from torch import fx, nn

from distbelief.graph.graph import Builder, Layer, Option, TensorUse
from distbelief.graph.lowering.values import (
    Complex,
    Encoder,
    Held,
    Made,
    NotSplitError,
    Value,
    batch_of,
    narrow,
)
from distbelief.graph.module_calls import LeafCall, is_experts
from distbelief.graph.ops.call import CONSTANT
from distbelief.graph.ops.views import reshape_layer
from distbelief.graph.region import Shape


@final
class Context:
    """What all operations of a model share."""

    def __init__(self, builder: Builder, *, joins: bool, dtype: torch.dtype) -> None:
        self.builder = builder  # with the layers so far
        self.dtype = dtype  # of the model's floats
        self.joins = joins  # whether one number may be computed of all samples: a loss
        self.inputs: list[Layer] = []  # of the model
        self._parameters: dict[str, Value] = {}

    @property
    def first(self) -> Layer:
        """The smallest input of the model; it has all samples."""
        return min(self.inputs, key=lambda layer: math.prod(layer.shape))

    @property
    def encoder(self) -> Encoder:
        return Encoder(self.builder, self.dtype)

    def as_value(self, given: object) -> Value:
        """Return a value for anything that is a tensor; NotSplitError if it is none."""
        if isinstance(given, Value):
            return given
        if isinstance(given, Held):
            return self._parameter(given)
        if isinstance(given, torch.Tensor):
            return self.constant(given)
        if isinstance(given, Made):
            batch, row = batch_of(given.result.shape), given.row()
            row = row if batch is None or given.is_folded else row.squeeze(batch)
            return replace(self.constant(row), batch=batch, after=int(given.is_folded))
        raise NotSplitError(f"{type(given).__name__} is not the output of a layer")

    def constant(self, tensor: torch.Tensor, name: str = "constant") -> Value:
        """Return a layer for a tensor that the forward makes of numbers."""
        text = self.encoder.text([tensor], {})
        options: dict[str, Option] = {"operation": CONSTANT, "arguments": text, "along": ()}
        layer = self.call(name, [], tuple(tensor.shape), tensor.dtype, options, batch=None)
        return Value(layer, batch=None)

    def call(
        self,
        name: str,
        sources: Sequence[Layer],
        shape: Shape,
        dtype: torch.dtype,
        options: Mapping[str, Option],
        *,
        batch: int | None,
        **more: Any,  # noqa: ANN401 -- as `Builder.add` takes them
    ) -> Layer:
        """Add a layer "call" whose result has this type, and the samples in dimension `batch`."""
        options = {**options, "batch": -1 if batch is None else batch, **self._typed(dtype)}
        if "type" in options and dtype.is_floating_point and batch is None:
            options["unchecked"] = True  # sums of rounded gradients are not those of the batch
        is_integer = not dtype.is_floating_point
        return self.builder.add(
            name, "call", sources, shape, options=options, is_integer=is_integer, **more
        )

    def _typed(self, dtype: torch.dtype) -> dict[str, Option]:
        name = narrow(dtype, self.dtype)
        return {"type": name} if name else {}

    def in_parts(self, use: TensorUse) -> Complex:
        """Return a complex tensor of the model, which layers have as (..., 2)."""
        whole, shape = self._parameter(Held(use)).layer, use.shape[:-1]
        n = len(shape)
        parts = []
        for index, word in enumerate(("real", "imaginary")):
            options: dict[str, Option] = {"starts": (*(0,) * n, index), "steps": (1,) * (n + 1)}
            name = f"{use.name}.{word}"
            part = self.builder.add(name, "slice", [whole], (*shape, 1), options=options)
            row = reshape_layer(self.builder.free_name(name), part, shape=shape)
            parts.append(Value(self.builder.add_layer(row), batch=None))
        return Complex(*parts)

    def _parameter(self, held: Held) -> Value:
        use = held.use
        if use.name not in self._parameters:
            layer = self.builder.add(
                use.name,
                "parameter",
                [],
                use.shape,
                tensors={"value": use},
                options=self._typed(held.dtype),
                is_integer=not held.dtype.is_floating_point,
            )
            self._parameters[use.name] = Value(layer, batch=None)
        value = self._parameters[use.name]
        if not held.turned:
            return value
        name, shape, options = f"{use.name}.turned", use.shape[::-1], {"dims": (1, 0)}
        return value.to(self.builder.add(name, "permute", [value.layer], shape, options=options))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    name: str  # for its layer
    target: Any  # the operation of torch
    arguments: Mapping[str, Any]  # by the schema's names, defaults included
    result: Any  # fake tensors
    context: Context
    node: fx.Node

    @property
    def builder(self) -> Builder:
        return self.context.builder

    def __getitem__(self, word: str) -> Any:  # noqa: ANN401 -- of any type
        return self.arguments[word]

    def value(self, word: str) -> Value:
        """Return an argument as a value: a layer is added for a tensor of the model."""
        return self.context.as_value(self.arguments[word])

    def plain(self, word: str) -> Value:
        """Return a value whose batch is first and alone; NotSplitError if it is not."""
        return self.value(word).plain()

    def use(self, word: str) -> TensorUse | None:
        """Return a tensor of the model, None if there is none; NotSplitError if computed."""
        given = self.arguments[word]
        if given is None:
            return None
        if not isinstance(given, Held) or given.turned:
            raise NotSplitError(f"its {word} is computed")
        return given.use

    def uses(self, *words: str) -> dict[str, TensorUse]:
        found = {word: self.use(word) for word in words}
        return {word: use for word, use in found.items() if use is not None}

    @property
    def free_name(self) -> str:
        return self.builder.free_name(self.name)

    def add(self, kind: str, sources: Sequence[Value], shape: Shape, **more: Any) -> Value:  # noqa: ANN401 -- as `Layer.of` takes them
        """Add a layer; its value is arranged like the first source."""
        layers = [source.layer for source in sources]
        return sources[0].to(self.builder.add(self.name, kind, layers, shape, **more))

    def moved(self, kind: str, value: Value, shape: Shape, /, **options: Option) -> Value:
        """Add a layer that has a value's numbers at other places."""
        is_integer = value.layer.is_integer
        return self.add(kind, [value], shape, options=options, is_integer=is_integer)

    def extend(self, like: Value, layers: Sequence[Layer]) -> Value:
        """Add layers in order; return the last one, arranged like a value."""
        return like.to(self.builder.extend(layers))

    def reshaped(self, value: Value, shape: Shape) -> Layer:
        """Return the value's layer with another shape, the batch not counted."""
        if value.layer.shape == shape:
            return value.layer
        return self.builder.add_layer(reshape_layer(self.free_name, value.layer, shape=shape))


# --- rules ---

Rule = Callable[[Operation], object]
RULES: Final[dict[str, Rule]] = {}  # by the operation's name, with or without its overload
ModuleRule = Callable[[Context, nn.Module, LeafCall, Sequence[object]], object]
MODULES: Final[dict[object, ModuleRule]] = {}  # by type, or by what recognises them


def module_rule(module: nn.Module) -> ModuleRule | None:
    return MODULES.get(is_experts if is_experts(module) else type(module))


def lowers(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of ATen operations: "cumsum", or "view.dtype" for one overload."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def lowers_module(*kinds: object) -> Callable[[ModuleRule], ModuleRule]:
    """Register the rule of modules of exactly these types, which become one operation."""

    def register(rule: ModuleRule) -> ModuleRule:
        MODULES.update(dict.fromkeys(kinds, rule))
        return rule

    return register


# --- torch's names ---

_HERE: Final = str(Path(__file__).parents[1])


def plain_name(target: Any) -> str:  # noqa: ANN401 -- an operation
    """Return the name of the operation that changes nothing: aten.relu_.default, relu.default."""
    packet, _, overload = str(target).removeprefix("aten.").partition(".")
    if packet.endswith("_") and not packet.startswith("_"):
        packet = packet[:-1]
    return f"{packet}.{overload}"


def by_name(target: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """Return the arguments of an operation by the schema's names, defaults included."""
    schema = target._schema.arguments  # noqa: SLF001 -- torch's own name
    found = {a.name: a.default_value for a in schema}
    found.update(zip((a.name for a in schema), args, strict=False))
    found.update(keywords)
    return found


def place_of(node: fx.Node, *, is_short: bool = False) -> str:
    """Return the user's source line of an operation, in brackets; in short, without folders."""
    lines = re.findall(r'File "(.+?)", line (\d+)', str(node.meta.get("stack_trace", "")))
    own = [each for each in lines if not each[0].startswith(_HERE)]
    if not own:
        return ""
    file, line = own[-1]
    return f" ({PurePath(file).name if is_short else file}, line {line})"
