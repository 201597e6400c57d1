"""Lowers the operations that torch.export found to layers, one by one.

A value is the output of a layer. Layers count no batch; a forward may have it anywhere:

    x                    (s, 4, 16)      batch 0
    x.transpose(0, 1)    (4, s, 16)      batch 1
    x.view(-1, 16)       (4 s, 16)       batch 0, with one more layer dimension inside (`after`)

So a view that only moves the batch is no layer. What has no rule is computed whole (`fallback`).
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Final, final

import torch
from torch import fx, nn

from distbelief.graph.graph import INPUT, Builder, GraphError, Layer, Option, TensorUse
from distbelief.graph.module_calls import LEAF, LeafCall, OpaqueError, is_experts, n_samples_in
from distbelief.graph.ops.views import reshape_layer
from distbelief.graph.region import Shape
from distbelief.graph.unsupported import lost_change


class NotSplitError(Exception):
    """An operation has no split rule for these arguments."""


@final
class NeedsFunctionalError(Exception):
    """A change in place is seen under another name: the graph must be made functional."""


@final
@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: the output of a layer, with the batch at torch's dimension `batch`."""

    layer: Layer
    batch: int | None = 0  # None: one for all samples
    before: int = 0  # layer dimensions in torch's dimension `batch`, outside of the samples
    after: int = 0  # the same, inside of the samples

    @property
    def n_dims(self) -> int:
        """Number of torch's dimensions."""
        return len(self.layer.shape) - self.before - self.after + (self.batch is not None)

    @property
    def is_plain(self) -> bool:
        """Whether the batch is first, and alone in its dimension."""
        return self.batch == 0 and not self.before and not self.after

    def dim(self, given: int) -> int:
        """Return the layer's dimension for one of torch's.

        Raises:
            NotSplitError: It is the batch.
        """
        dim = given % max(1, self.n_dims)
        if dim == self.batch:
            raise NotSplitError("it works along the batch")
        if self.batch is None or dim < self.batch:
            return dim
        return dim - 1 + self.before + self.after

    def to(self, layer: Layer) -> "Value":
        """Return another layer in the same arrangement."""
        return replace(self, layer=layer)


@final
@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of the model, before a layer reads it."""

    use: TensorUse
    is_integer: bool = False
    turned: bool = False  # transposed; of two dimensions


@final
@dataclass(frozen=True, slots=True)
class Filled:
    """A tensor of one number, with the batch among its dimensions."""

    number: float
    shape: tuple[object, ...]
    dtype: torch.dtype


@final
@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that depends on the number of samples and on nothing else."""

    target: Any
    args: list[Any]
    keywords: dict[str, Any]
    result: Any  # a fake tensor
    known: dict[int, torch.Tensor] = field(default_factory=dict)

    def at(self, n: int) -> torch.Tensor:
        """Return it for n samples."""
        if n not in self.known:
            args, said = _for(self.args, n), _for(self.keywords, n)
            self.known[n] = self.target(*args, **said)
        return self.known[n]

    def row(self) -> torch.Tensor:
        """Return it for any number of samples, with extent 1 there.

        Raises:
            NotSplitError: Samples get different numbers.
        """
        batch = batch_of(self.result.shape)
        two, three = self.at(2), self.at(3)
        if batch is None:
            if not torch.equal(two, three):
                raise NotSplitError("it depends on the batch size")
            return two
        row = two.narrow(batch, 0, 1)
        if factor(self.result.shape[batch]) > 1 or not (
            torch.equal(row.expand_as(two), two) and torch.equal(row.expand_as(three), three)
        ):
            raise NotSplitError("it depends on the batch size")
        return row.contiguous()


def _for(given: Any, n: int) -> Any:  # noqa: ANN401, PLR0911 -- one for each type
    # An argument for n samples.
    if isinstance(given, list | tuple):
        return [_for(one, n) for one in given]
    if isinstance(given, dict):
        return {word: _for(one, n) for word, one in given.items()}
    if isinstance(given, Made):
        return given.at(n).clone()
    if isinstance(given, Filled):
        return torch.full(_for(given.shape, n), given.number, dtype=given.dtype)
    if isinstance(given, torch.Tensor):
        return given.clone()
    if isinstance(given, torch.SymInt):
        return n_samples_in(given, n)
    return given


@final
@dataclass(slots=True)
class Results:
    """Several results, each of which becomes a layer when it is used."""

    make: Callable[[int], object]
    made: dict[int, object] = field(default_factory=dict)

    def __getitem__(self, index: int) -> object:
        if index not in self.made:
            self.made[index] = self.make(index)
        return self.made[index]


Rule = Callable[["Operation"], object]
RULES: Final[dict[str, Rule]] = {}  # by the operation's name, with or without its overload
ModuleRule = Callable[["Lowerer", nn.Module, LeafCall, Sequence[object]], object]
MODULES: Final[dict[object, ModuleRule]] = {}  # by type, or by what recognises them


def module_rule(module: nn.Module) -> ModuleRule | None:
    """Return the rule of a module that becomes one operation."""
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


def linear(extent: Any) -> tuple[int, int]:  # noqa: ANN401 -- an int or a symbol
    """Return a and b of an extent of a * n + b for n samples.

    Raises:
        NotSplitError: It is something else, such as half the batch size.
    """
    if isinstance(extent, int):
        return 0, extent
    found = [n_samples_in(extent, n) for n in (0, 1, 2, 7)]
    a, b = found[1] - found[0], found[0]
    if found != [a * n + b for n in (0, 1, 2, 7)]:
        raise NotSplitError(f"an extent is {extent}, no multiple of the batch size")
    return a, b


def factor(extent: object) -> int:
    """Return n of an extent of n samples; 0 if it does not depend on the batch.

    Raises:
        NotSplitError: It is something else, such as the batch size plus one.
    """
    a, b = linear(extent)
    if a and b:
        raise NotSplitError(f"an extent is {extent}, no multiple of the batch size")
    return a


def batch_of(shape: Sequence[object]) -> int | None:
    """Return the dimension that is the batch, or holds it."""
    found = [dim for dim, extent in enumerate(shape) if factor(extent)]
    if len(found) > 1:
        raise NotSplitError("its result has the batch twice")
    return found[0] if found else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of torch."""

    name: str  # for its layer
    target: Any  # the operation of torch
    arguments: Mapping[str, Any]  # by the schema's names, defaults included
    result: Any  # fake tensors
    lowerer: "Lowerer"
    node: fx.Node

    @property
    def builder(self) -> Builder:
        return self.lowerer.builder

    def __getitem__(self, word: str) -> Any:  # noqa: ANN401 -- of any type
        return self.arguments[word]

    @property
    def is_integer(self) -> bool:
        return isinstance(self.result, torch.Tensor) and not self.result.is_floating_point()

    def value(self, word: str) -> Value:
        """Return an argument as a value: a layer is added for a tensor of the model."""
        return self.lowerer.as_value(self.arguments[word])

    def use(self, word: str) -> TensorUse | None:
        """Return a tensor of the model, None if there is none.

        Raises:
            NotSplitError: It is computed.
        """
        given = self.arguments[word]
        if given is None:
            return None
        if not isinstance(given, Held) or given.turned:
            raise NotSplitError(f"its {word} is computed")
        return given.use

    def uses(self, *words: str) -> dict[str, TensorUse]:
        found = {word: self.use(word) for word in words}
        return {word: use for word, use in found.items() if use is not None}

    def add(
        self,
        kind: str,
        sources: Sequence[Value],
        shape: Shape,
        *,
        name: str = "",
        options: Mapping[str, Option] | None = None,
        tensors: Mapping[str, TensorUse] | None = None,
        is_integer: bool = False,
    ) -> Value:
        """Add a layer; its value is arranged like the first source."""
        added = self.builder.add(
            name or self.name,
            kind,
            [source.layer.name for source in sources],
            shape,
            options=options,
            tensors=tensors,
            is_integer=is_integer,
        )
        return sources[0].to(self.builder[added])

    def extend(self, like: Value, layers: Sequence[Layer]) -> Value:
        return like.to(self.builder[self.builder.extend(layers)])

    @property
    def free_name(self) -> str:
        return self.builder.free_name(self.name)

    def plain(self, word: str) -> Value:
        """Return a value whose batch is first and alone.

        Raises:
            NotSplitError: It is arranged in another way.
        """
        value = self.value(word)
        if not value.is_plain:
            raise NotSplitError("the batch is not its first dimension")
        return value

    def reshaped(self, value: Value, shape: Shape) -> Layer:
        """Return the value's layer with another shape, the batch not counted."""
        if value.layer.shape == shape:
            return value.layer
        layer = reshape_layer(self.free_name, value.layer, shape=shape)
        return self.builder[self.builder.add_layer(layer)]

    def number(self, word: str) -> float:
        given = self.arguments[word]
        if isinstance(given, torch.Tensor) and given.numel() == 1:
            given = given.item()
        if isinstance(given, Filled):
            given = given.number
        if not isinstance(given, int | float):
            raise NotSplitError(f"its {word} is no number")
        return float(given)


@final
class Lowerer:
    """Makes layers of an exported program's operations.

    Args:
        builder: Builder with its inputs.
        calls: Calls of leaf modules, by key.
        whole: Opaque modules, and why.
        joins: Whether one number may be computed of all samples: a loss.
        in_parts: Adds what has no rule of its own, but is split.
        fallback: Adds what has no rule, for the reason.
        constant: Adds a tensor that the forward makes.
        opaque: Adds a call of an opaque module.
    """

    def __init__(
        self,
        builder: Builder,
        *,
        calls: Mapping[int, LeafCall],
        whole: Mapping[str, str],
        joins: bool,
        in_parts: Rule,
        fallback: Callable[[Operation, str], object],
        constant: Callable[["Lowerer", torch.Tensor], Value],
        opaque: Callable[["Lowerer", LeafCall, Sequence[object], Any], object],
    ) -> None:
        self.builder = builder
        self.calls = calls
        self.whole = whole
        self.joins = joins
        self.in_parts = in_parts
        self._fallback = fallback
        self._constant = constant
        self._opaque = opaque
        self.known: dict[fx.Node, Any] = {}
        self._parameters: dict[str, Value] = {}
        self._named: dict[str, str] = {}

    @property
    def first(self) -> str:
        """The smallest input of the model; it has all samples."""
        values = [value.layer for value in self.known.values() if isinstance(value, Value)]
        inputs = [layer for layer in values if layer.kind == INPUT]
        return min(inputs, key=lambda layer: math.prod(layer.shape)).name

    # --- graphs ---

    def run(self, graph: fx.Graph, owner: nn.Module) -> object:
        """Lower all operations of a graph whose inputs are known; return its outputs."""
        nodes = list(graph.nodes)
        last = {source: i for i, node in enumerate(nodes) for source in node.all_input_nodes}
        live = _live(nodes)
        aliases = _by_storage(nodes)
        for index, node in enumerate(nodes):
            if node not in live:
                continue
            if node.op == "output":
                return self.argument(node.args[0])
            if node.op == "get_attr":
                self.known[node] = getattr(owner, str(node.target))
            elif node.op == "call_function":
                try:
                    self.known[node] = self._called(node)
                    if _changes(node):
                        shared = aliases[_storage(node)]
                        later = [n for n in shared if n in self.known and last.get(n, -1) > index]
                        self._change_in_place(node, shared, later)
                except NotSplitError as error:
                    raise OpaqueError(_inside(node), f"{error}{place_of(node)}") from error
                except GraphError as error:
                    raise GraphError(f"{error}{place_of(node)}") from error
        raise AssertionError("a graph without outputs")

    def argument(self, given: object) -> Any:  # noqa: ANN401 -- of any type
        if isinstance(given, fx.Node):
            return self.known[given]
        if isinstance(given, list | tuple):
            return [self.argument(item) for item in given]
        if isinstance(given, dict):
            return {key: self.argument(item) for key, item in given.items()}
        return given

    def _called(self, node: fx.Node) -> object:  # noqa: PLR0911 -- one for each kind of call
        target: Any = node.target
        result = node.meta.get("val")
        args = [self.argument(value) for value in node.args]
        if target is operator.getitem:
            return args[0][args[1]]
        if isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
            return result
        name = getattr(target, "__name__", str(target))
        if isinstance(target, torch._ops.HigherOrderOperator):  # noqa: SLF001
            return self._nested(name, args)
        target = _functional(target)
        if "assert" in name or name.startswith("sym_"):
            return None
        keywords = {word: self.argument(value) for word, value in node.kwargs.items()}
        if str(target) == f"{LEAF.replace('::', '.')}.default":
            return self._leaf(args, result)
        return self._computed(node, target, args, keywords, result)

    def _computed(
        self,
        node: fx.Node,
        target: Any,
        args: list[Any],
        keywords: Mapping[str, Any],
        result: Any,  # noqa: ANN401
    ) -> object:
        arguments = by_name(target, args, keywords)
        if not any(_depends(value) for value in arguments.values()) or _is_filling(target):
            folded = _folded(target, args, keywords, result)
            if folded is not None:
                return folded
        operation = Operation(
            name=self._name(node),
            target=target,
            arguments=arguments,
            result=result,
            lowerer=self,
            node=node,
        )
        return self._lowered(operation)

    def _rows(self, given: Any) -> Any:  # noqa: ANN401
        if isinstance(given, list):
            return [self._rows(one) for one in given]
        if not isinstance(given, Made):
            return given
        batch = batch_of(given.result.shape)
        n = 0 if batch is None else factor(given.result.shape[batch])
        if n <= 1:
            return given.row()
        rows = [given.at(k).unflatten(batch, (k, n)) for k in (2, 3)]
        row = rows[0].narrow(batch, 0, 1)
        if not all(torch.equal(row.expand_as(one), one) for one in rows):
            raise NotSplitError("it depends on the batch size")
        layer = self.as_value(row.squeeze(batch).contiguous()).layer
        return Value(layer, batch, after=1)

    def _lowered(self, operation: Operation) -> object:
        packet, _, overload = plain_name(operation.target).partition(".")
        rule = RULES.get(f"{packet}.{overload}", RULES.get(packet))
        reason = f"{packet} has no split rule"
        try:
            rows = {word: self._rows(value) for word, value in operation.arguments.items()}
            with_rows = replace(operation, arguments=rows)
            if rule is not None:
                try:
                    return self._with_samples(operation, rule(with_rows))
                except NotSplitError as error:
                    reason = f"{packet} has no split rule here: {error}"
            return self._with_samples(operation, self.in_parts(with_rows))
        except NotSplitError:
            return self._fallback(operation, reason + place_of(operation.node, is_short=True))

    def _with_samples(self, operation: Operation, found: object) -> object:
        # What was computed once for all samples is still a tensor with them.
        result = operation.result
        if not isinstance(found, Value) or found.batch is not None:
            return found
        batch = batch_of(result.shape) if isinstance(result, torch.Tensor) else None
        if batch is None:
            return found
        own = found.layer.shape
        return Value(operation.reshaped(found, (*own[:batch], *own[batch + 1 :])), batch)

    def _nested(self, name: str, args: list[Any]) -> object:
        if name == "wrap_with_autocast":
            *_, enabled, _, inner = args[:5]
            given = args[5:]
            if enabled:
                raise NotSplitError("it computes under torch.autocast, which is not split")
            args = [True, inner, *given]
        elif name != "wrap_with_set_grad_enabled":
            raise NotSplitError(f"{name} has no split rule")
        enabled, inner, *given = args
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        self.known.update(zip(placeholders, given, strict=True))
        results = self.run(inner.graph, inner)
        assert isinstance(results, list)
        return results if enabled else [self.detached(value) for value in results]

    def detached(self, value: object) -> object:
        """Return a value without a gradient."""
        if isinstance(value, Held):
            value = self.as_value(value)
        if not isinstance(value, Value) or value.layer.is_integer:
            return value
        layer = value.layer
        name = self.builder.add(
            f"{layer.name}.detach",
            "pointwise",
            [layer.name],
            layer.shape,
            options={"function": "detach"},
        )
        return value.to(self.builder[name])

    def _leaf(self, args: list[Any], result: object) -> object:
        inputs, key = args
        call = self.calls[key]
        rule = module_rule(call.module)
        if call.path not in self.whole and rule is not None:
            return rule(self, call.module, call, inputs)
        return self._opaque(self, call, inputs, result)

    # --- values ---

    def as_value(self, given: object) -> Value:
        """Return a value for anything that is a tensor.

        Raises:
            NotSplitError: It is none.
        """
        if isinstance(given, Value):
            return given
        if isinstance(given, Held):
            return self._parameter(given)
        if isinstance(given, torch.Tensor):
            return self._constant(self, given)
        if isinstance(given, Filled):
            batch = batch_of(given.shape)
            shape = [int(n) for dim, n in enumerate(given.shape) if dim != batch]  # type: ignore[call-overload] # ints
            value = self._constant(self, torch.full(shape, given.number, dtype=given.dtype))
            if batch is not None and factor(given.shape[batch]) > 1:
                raise NotSplitError("it has several elements for each sample")
            return replace(value, batch=batch)
        raise NotSplitError(f"{type(given).__name__} is not the output of a layer")

    def _parameter(self, held: Held) -> Value:
        use = held.use
        if use.name not in self._parameters:
            name = self.builder.add(
                use.name,
                "parameter",
                [],
                use.shape,
                tensors={"value": use},
                is_integer=held.is_integer,
            )
            self._parameters[use.name] = Value(self.builder[name], batch=None)
        value = self._parameters[use.name]
        if not held.turned:
            return value
        layer = value.layer
        name = self.builder.add(
            f"{use.name}.turned",
            "permute",
            [layer.name],
            layer.shape[::-1],
            options={"dims": (1, 0)},
        )
        return value.to(self.builder[name])

    def is_mask(self, layer: Layer) -> bool:
        """Return whether a layer's numbers stand for True and False."""
        while layer.kind in {"permute", "reshape", "slice", "expand"}:
            layer = self.builder[layer.inputs[0]]
        return layer.kind == "comparison" or bool(layer.options.get("mask"))

    # --- changes in place ---

    def _change_in_place(self, node: fx.Node, aliases: list[fx.Node], live: list[fx.Node]) -> None:
        # Later uses of a tensor that was changed in place read the change.
        changed = node.args[0]
        assert isinstance(changed, fx.Node), node
        if isinstance(self.known[changed], Held):
            name = self.known[changed].use.name
            if not name.endswith("num_batches_tracked"):
                raise GraphError(lost_change(name))
            return
        detached = any("aten.detach" in str(other.target) for other in aliases)
        if detached and isinstance(self.known[changed], Value):
            raise GraphError(
                f"{plain_name(node.target)} changes a tensor in place of which a part is "
                "detached: use the function that returns a new one"
            )
        written = self._write_back(changed, node, live)
        for other in live:
            if other in written:
                continue
            if not _same_place(other, node):
                raise NeedsFunctionalError
            self.known[other] = self.known[node]

    def _write_back(self, view: fx.Node, node: fx.Node, live: list[fx.Node]) -> list[fx.Node]:
        # Writes a change into the tensors of which it changed a slice, and returns them.
        wholes: list[fx.Node] = []
        part = view
        while part.target in _SCATTERS:
            part = part.all_input_nodes[0]
            wholes.append(part)
        while wholes and wholes[-1] not in live:
            wholes.pop()
        for whole in wholes:
            if whole.op == "placeholder":
                raise NeedsFunctionalError
            given = [self.known[whole], self.known[node], *view.args[1:]]
            result = whole.meta["val"]
            self.known[whole] = self._computed(node, _SCATTERS[view.target], given, {}, result)
            view = node = whole
        return wholes

    def _name(self, node: fx.Node) -> str:
        # A layer of a module of torch is called like it; others add the operation's name.
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path, kind = stack[-1] if stack else ("", "")
        path = path.removeprefix("inner").removeprefix(".")
        word = plain_name(node.target).split(".")[-2].strip("_")
        simple = str(getattr(kind, "__module__", kind)).startswith("torch.nn.modules")
        if path and simple and self._named.setdefault(path, word) == word:
            return path
        return f"{path}.{word}" if path else word


def _live(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    # Outputs, changes in place, and all they read.
    live: set[fx.Node] = set()
    for node in reversed(nodes):
        schema = getattr(node.target, "_schema", None)
        changes = schema is not None and schema.is_mutable
        if node.op == "output" or changes or not live.isdisjoint(node.users):
            live.add(node)
    return live


def plain_name(target: Any) -> str:  # noqa: ANN401 -- an operation
    """Return the name of the operation that changes nothing: aten.relu_.default, relu.default."""
    packet, _, overload = str(target).removeprefix("aten.").partition(".")
    if packet.endswith("_") and not packet.startswith("_"):
        packet = packet[:-1]
    return f"{packet}.{overload}"


def _functional(target: Any) -> Any:  # noqa: ANN401 -- an operation
    # The operation that returns what this one writes into its first argument.
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return target
    packet, _, overload = str(target).removeprefix("aten.").partition(".")
    if target is torch.ops.aten.bernoulli_.float:
        return torch.ops.aten.bernoulli.p
    found = getattr(getattr(torch.ops.aten, packet.removesuffix("_"), None), overload, None)
    if not packet.endswith("_") or found is None:
        raise NotSplitError(f"{packet} changes a tensor in place")
    return found


def by_name(target: Any, args: list[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """Return the arguments of an operation by the schema's names, defaults included."""
    schema = target._schema.arguments  # noqa: SLF001 -- torch's own name
    found = {a.name: a.default_value for a in schema}
    found.update(zip((a.name for a in schema), args, strict=False))
    found.update(keywords)
    return found


def _depends(value: object) -> bool:
    if isinstance(value, list):
        return any(_depends(item) for item in value)
    return isinstance(value, Value | Held | Results)


# The functions that write a changed view into its tensor.
_SCATTERS: Final[dict[object, Any]] = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
_PLACES: Final = frozenset({"device", "layout", "pin_memory"})
_FILLED: Final = {
    "zeros": 0.0,
    "ones": 1.0,
    "zeros_like": 0.0,
    "ones_like": 1.0,
    "new_zeros": 0.0,
    "new_ones": 1.0,
    "empty": 0.0,
    "empty_like": 0.0,
    "new_empty": 0.0,
}
_N_ELEMENTS_MAX: Final = 1 << 24


def _is_filling(target: Any) -> bool:  # noqa: ANN401 -- an operation
    # Its result depends on the shape of its input only.
    packet = plain_name(target).partition(".")[0]
    return packet in {*_FILLED, "full_like", "new_zeros", "new_ones", "new_full", "empty_like"}


def _folded(target: Any, args: list[Any], keywords: Mapping[str, Any], result: object) -> object:  # noqa: ANN401
    # The value of what depends on no input: arange, masks.
    if torch.Tag.nondeterministic_seeded in target.tags or not isinstance(result, torch.Tensor):
        return None
    packet = plain_name(target).partition(".")[0]
    said = {word: value for word, value in keywords.items() if word not in _PLACES}
    made = Made(target, args, said, result)
    number = _FILLED.get(packet)
    if packet in {"full", "full_like", "new_full"}:
        number = float(args[-1])
    if any(factor(extent) for extent in result.shape):
        return made if number is None else Filled(number, tuple(result.shape), result.dtype)
    if math.prod(result.shape) > _N_ELEMENTS_MAX:
        return None
    if number is not None:
        return torch.full(result.shape, number, dtype=result.dtype)
    return made if _any_made([args, list(keywords.values())]) else made.at(1)


def _any_made(given: object) -> bool:
    if isinstance(given, list | tuple):
        return any(_any_made(one) for one in given)
    return isinstance(given, Made | Filled | torch.SymInt)


def _changes(node: fx.Node) -> bool:
    # Whether it changes its first argument in place.
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and "detach_" not in str(node.target)


def _storage(node: fx.Node) -> int | None:
    # What nodes have in common that are views of one tensor.
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None  # noqa: SLF001


def _by_storage(nodes: Sequence[fx.Node]) -> dict[int | None, list[fx.Node]]:
    found: dict[int | None, list[fx.Node]] = {}
    for node in nodes if any(map(_changes, nodes)) else ():
        found.setdefault(_storage(node), []).append(node)
    return found


def _same_place(one: fx.Node, other: fx.Node) -> bool:
    first, second = one.meta["val"], other.meta["val"]
    return (
        tuple(map(str, first.shape)) == tuple(map(str, second.shape))
        and tuple(map(str, first.stride())) == tuple(map(str, second.stride()))
        and str(first.storage_offset()) == str(second.storage_offset())
    )


def _inside(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]).removeprefix("inner").removeprefix(".") if stack else ""


def place_of(node: fx.Node, *, is_short: bool = False) -> str:
    """Return the user's source line of an operation, in brackets; in short, without folders."""
    lines = re.findall(r'File "(.+?)", line (\d+)', str(node.meta.get("stack_trace", "")))
    own = [each for each in lines if "module_calls" not in each[0]]
    if not own:
        return ""
    file, line = own[-1]
    return f" ({PurePath(file).name if is_short else file}, line {line})"
