"""Lowers the operations that torch.export found to layers, one by one.

What has no rule is computed by torch: in parts (`calls`) or whole (`fallback`).
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from distbelief.graph.graph import Builder, GraphError
from distbelief.graph.lowering.calls import call_in_parts, detached, typed
from distbelief.graph.lowering.complex_numbers import by_parts, has_complex
from distbelief.graph.lowering.fallback import call_whole, whole_module
from distbelief.graph.lowering.operation import (
    RULES,
    Context,
    Operation,
    Rule,
    by_name,
    module_rule,
    place_of,
    plain_name,
)
from distbelief.graph.lowering.values import (
    MOVES,
    Complex,
    Held,
    Made,
    NotSplitError,
    Results,
    Value,
    batch_of,
    factor,
    narrow,
)
from distbelief.graph.module_calls import LEAF, LeafCall, OpaqueError, own_path
from distbelief.graph.ops.call import TorchCall
from distbelief.graph.unsupported import lost_change


@final
class NeedsFunctionalError(Exception):
    """A change in place is seen under another name: the graph must be made functional."""


@final
class Lowerer:
    """Makes layers of an exported program's operations, calls of leaf modules among them.

    `whole` says why modules are opaque. With `joins`, one number may be computed of all samples: a
    loss.
    """

    def __init__(
        self,
        builder: Builder,
        *,
        calls: Mapping[int, LeafCall],
        whole: Mapping[str, str],
        joins: bool,
        dtype: torch.dtype,
    ) -> None:
        self.context = Context(builder, joins=joins, dtype=dtype)
        self._calls = calls
        self._whole = whole
        self.known: dict[fx.Node, Any] = {}
        self.nodes: dict[str, fx.Node] = {}  # of layers, by name
        self._named: dict[str, str] = {}

    def run(self, graph: fx.Graph, owner: nn.Module) -> list[object]:
        """Lower all operations of a graph whose inputs are known; return its outputs."""
        nodes = list(graph.nodes)
        last = {source: i for i, node in enumerate(nodes) for source in node.all_input_nodes}
        live = _live(nodes)
        aliases = _by_storage(nodes)
        for index, node in enumerate(nodes):
            if node not in live:
                continue
            if node.op == "output":
                return list(self._argument(node.args[0]))
            if node.op == "get_attr":
                self.known[node] = getattr(owner, str(node.target))
            elif node.op == "call_function":
                try:
                    found = self.known[node] = self._called(node)
                    if isinstance(found, Value):
                        self.nodes.setdefault(found.layer.name, node)
                    if _changes(node):
                        shared = aliases[_storage(node)]
                        later = [n for n in shared if n in self.known and last.get(n, -1) > index]
                        self._change_in_place(node, shared, later)
                except NotSplitError as error:
                    raise OpaqueError(_inside(node), f"{error}{place_of(node)}") from error
                except GraphError as error:
                    raise GraphError(f"{error}{place_of(node)}") from error
        raise AssertionError("a graph without outputs")

    def _argument(self, given: Any) -> Any:  # noqa: ANN401 -- of any type
        return fx.map_arg(given, self.known.__getitem__)

    def _called(self, node: fx.Node) -> object:
        target: Any = node.target
        result = node.meta.get("val")
        args = list(self._argument(node.args))
        if target is operator.getitem:
            return args[0][args[1]]
        if isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
            return result
        name = getattr(target, "__name__", str(target))
        if isinstance(target, torch._ops.HigherOrderOperator):  # noqa: SLF001 -- has no public name
            return self._nested(name, args)
        self._refuse_lost_changes(target, args)
        target = _functional(target)
        if target is torch.ops.aten.bernoulli.p:  # in place, it has a default, which is left out
            args = [*args, 0.5][:2]
        if "assert" in name or name.startswith("sym_"):
            return None
        keywords = dict(self._argument(node.kwargs))
        if str(target) == f"{LEAF.replace('::', '.')}.default":
            return self._leaf(args, result)
        if not isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 -- as above
            raise NotSplitError(f"it calls {name}, which is no operation on tensors")
        return self._computed(node, target, args, keywords, result)

    def _refuse_lost_changes(self, target: Any, args: list[Any]) -> None:  # noqa: ANN401 -- an operation
        # Of tensors of the model that an operation changes besides its first argument.
        schema = getattr(target, "_schema", None)
        for argument, given in zip(schema.arguments[1:] if schema else (), args[1:], strict=False):
            if argument.is_write and isinstance(given, Held):
                raise GraphError(lost_change(given.use.name))

    def _computed(
        self,
        node: fx.Node,
        target: Any,  # noqa: ANN401 -- an operation
        args: list[Any],
        keywords: Mapping[str, Any],
        result: Any,  # noqa: ANN401 -- fake tensors
    ) -> object:
        arguments = by_name(target, args, keywords)
        given = pytree.tree_leaves(arguments)
        depends = any(isinstance(one, Value | Held | Results | Complex) for one in given)
        if not depends or _is_filling(target):
            folded = _folded(target, args, keywords, result)
            if folded is not None:
                return folded
        operation = Operation(
            name=self._name(node),
            target=target,
            arguments=arguments,
            result=result,
            context=self.context,
            node=node,
        )
        if has_complex([list(arguments.values()), result]):
            return by_parts(operation, self._lowered)
        _refuse_results(result)
        return self._lowered(operation)

    def _row(self, given: Made) -> object:
        if given.number is not None:
            return given
        return self.context.as_value(given) if given.is_folded else given.row()

    def _lowered(self, operation: Operation) -> object:
        packet, _, overload = plain_name(operation.target).partition(".")
        rule = RULES.get(f"{packet}.{overload}", RULES.get(packet))
        reason = f"{packet} has no split rule"
        try:
            rows = pytree.tree_map_only(Made, self._row, dict(operation.arguments))
            with_rows = replace(operation, arguments=rows)
            if rule is not None:
                try:
                    return _as_found(operation, self._by_rule(rule, with_rows))
                except NotSplitError as error:
                    reason = f"{packet} has no split rule here: {error}"
            return _as_found(operation, call_in_parts(with_rows))
        except NotSplitError:
            return call_whole(operation, reason + place_of(operation.node, is_short=True))

    def _by_rule(self, rule: Rule, operation: Operation) -> object:
        # Layers but calls and moves compute in the precision of the graph.
        n_before, own = len(self.context.builder), operation.context.dtype
        found = rule(operation)
        given = [x.meta.get("val") for x in operation.node.all_input_nodes]
        types = {
            narrow(x.dtype, own)
            for x in pytree.tree_leaves([given, operation.result])
            if isinstance(x, torch.Tensor) and not x.is_complex()
        } - {"", "bool"}
        if types and any(
            layer.kind not in {*MOVES, TorchCall.name, "parameter"}
            for layer in self.context.builder.since(n_before)
        ):
            raise NotSplitError(f"it computes in {types.pop()}")
        return found

    def _nested(self, name: str, args: list[Any]) -> object:
        if name == "wrap_with_autocast":
            *_, enabled, _, inner = args[:5]
            given = args[5:]
            if enabled:
                raise NotSplitError("it computes under torch.autocast, which is not split")
            args = [True, inner, *given]
        elif name in _CONTROL:
            raise GraphError(
                f"the forward calls {name}, which ranks cannot run: use {_CONTROL[name]}, or one "
                "process per replica (partitions = 1)"
            )
        elif name != "wrap_with_set_grad_enabled":
            raise NotSplitError(f"{name} has no split rule")
        enabled, inner, *given = args
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        self.known.update(zip(placeholders, given, strict=True))
        results = self.run(inner.graph, inner)
        return results if enabled else [self._detached(value) for value in results]

    def _detached(self, value: object) -> object:
        # Without a gradient.
        if isinstance(value, Complex):
            return Complex(self._detached(value.real), self._detached(value.imaginary))
        if isinstance(value, Held):
            value = self.context.as_value(value)
        return detached(self.context, value) if isinstance(value, Value) else value

    def _leaf(self, args: list[Any], result: object) -> object:
        inputs, key = args
        call = self._calls[key]
        rule = module_rule(call.module)
        if call.path not in self._whole and rule is not None:
            return rule(self.context, call.module, call, inputs)
        try:
            _refuse_results(result)
        except NotSplitError as error:
            raise OpaqueError(call.path.rpartition(".")[0], f"{call.path}: {error}") from error
        return whole_module(self.context, call, inputs, result, self._whole[call.path])

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
        path = own_path(path)
        word = plain_name(node.target).split(".")[-2].strip("_")
        simple = str(getattr(kind, "__module__", kind)).startswith("torch.nn.modules")
        if path and simple and self._named.setdefault(path, word) == word:
            return path
        return f"{path}.{word}" if path else word


def _refuse_results(result: object) -> None:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # noqa: PLC0415 -- takes a second

    # Ranks send floats and integers only, and know the sizes of layers before they run.
    for one in pytree.tree_leaves(result):
        if not isinstance(one, torch.Tensor):
            continue
        if one.is_complex():
            raise NotSplitError("its result has complex numbers")
        if free_unbacked_symbols(one):
            raise NotSplitError("the size of its result depends on the values of its data")


def _as_found(operation: Operation, found: object) -> object:
    # Of torch's type; what was computed once for all samples is still a tensor with them.
    result = operation.result
    if isinstance(found, list) and isinstance(result, list | tuple):
        pairs = zip(found, result, strict=True)
        return [_as_found(replace(operation, result=r), one) for one, r in pairs]
    if not isinstance(found, Value) or not isinstance(result, torch.Tensor):
        return found
    found = typed(operation, found, result.dtype)
    if found.batch is not None:
        return found
    batch = batch_of(result.shape)
    if batch is None:
        return found
    own = found.layer.shape
    if own[batch : batch + 1] != (1,):
        raise NotSplitError("its tensors have no samples")
    return Value(operation.reshaped(found, (*own[:batch], *own[batch + 1 :])), batch)


def _live(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    # Outputs, changes in place, and all they read.
    live: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op == "output" or _is_mutable(node.target) or not live.isdisjoint(node.users):
            live.add(node)
    return live


def _is_mutable(target: object) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and schema.is_mutable


def _functional(target: Any) -> Any:  # noqa: ANN401 -- an operation
    # The operation that returns what this one writes into its first argument.
    if not _is_mutable(target):
        return target
    packet, _, overload = str(target).removeprefix("aten.").partition(".")
    if target is torch.ops.aten.bernoulli_.float:
        return torch.ops.aten.bernoulli.p
    found = getattr(getattr(torch.ops.aten, packet.removesuffix("_"), None), overload, None)
    if not packet.endswith("_") or found is None:
        raise NotSplitError(f"{packet} changes a tensor in place")
    return found


# The functions that write a changed view into its tensor.
_SCATTERS: Final[dict[object, Any]] = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
# Operations that torch compiles where they are called, with what replaces them.
_CONTROL: Final[Mapping[str, str]] = {
    "cond": "torch.where, or Python's `if` where it does not depend on the data",
    **dict.fromkeys(("while_loop", "scan", "associative_scan", "map_impl"), "a loop of Python"),
    "flex_attention": "scaled_dot_product_attention",
}
_PLACES: Final = frozenset({"device", "layout", "pin_memory"})
_FILLED: Final = {
    form.format(word): number
    for word, number in (("zeros", 0.0), ("ones", 1.0), ("empty", 0.0))
    for form in ("{}", "{}_like", "new_{}")
}
_FULL: Final = ("full", "full_like", "new_full")
_N_ELEMENTS_MAX: Final = 1 << 24


def _is_filling(target: Any) -> bool:  # noqa: ANN401 -- an operation
    # Its result depends on the shape of its input only.
    return plain_name(target).partition(".")[0] in {*_FILLED, *_FULL}


def _folded(target: Any, args: list[Any], keywords: Mapping[str, Any], result: object) -> object:  # noqa: ANN401
    # The value of what depends on no input: arange, masks.
    if torch.Tag.nondeterministic_seeded in target.tags or not isinstance(result, torch.Tensor):
        return None
    packet = plain_name(target).partition(".")[0]
    said = {word: value for word, value in keywords.items() if word not in _PLACES}
    number = _FILLED.get(packet)
    if packet in _FULL and not isinstance(args[-1], torch.SymInt | torch.SymFloat):
        number = float(args[-1])
    if number is not None:
        args, said = [list(result.shape), number], {"dtype": result.dtype}
        target = torch.ops.aten.full.default
    made = Made(target, args, said, result, number)
    if any(factor(extent) for extent in result.shape):
        return made
    if math.prod(result.shape) > _N_ELEMENTS_MAX:
        return None
    given = pytree.tree_leaves((args, said))
    return made if any(isinstance(one, Made | torch.SymInt) for one in given) else made.at(1)


def _changes(node: fx.Node) -> bool:
    # Whether it changes its first argument in place.
    return _is_mutable(node.target) and "detach_" not in str(node.target)


def _storage(node: fx.Node) -> int | None:
    # What nodes have in common that are views of one tensor; fake tensors have no address, so it is
    # the storage object itself.
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
    return own_path(str(stack[-1][0])) if stack else ""
