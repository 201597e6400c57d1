"""Lowers a traced module to layers, operation by operation."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, final

import torch
from torch import fx, nn

from distbelief.graph.graph import Builder, GraphError, TensorUse
from distbelief.graph.lowering.registry import knows_function, lower_function, lower_module
from distbelief.graph.opaque import CallError
from distbelief.graph.operation import Lowered, Operand, Operation, Several, is_integer
from distbelief.graph.tracing import Traced
from distbelief.graph.unsupported import lost_change


# --- changes in place ---
#
# Layers have no memory to change: after `y = x.relu_()` every later use of x reads the new layer.
# A later use with another shape (a view of x) is an error.

_DETACHING: Final = ("detach", "detach_", torch.detach)


def renamed(node: fx.Node, later: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes whose value is the result of `node` from now on.

    Args:
        node: Its `meta` says which arguments it changed in place.
        later: Nodes before it whose results are used after it.

    Raises:
        GraphError: It changes a tensor of the model, or one that is used later in another way.
    """
    later = list(later)
    for changed in node.meta.get("changed", ()):
        if changed.op == "get_attr":
            raise GraphError(lost_change(str(changed.target)))
        _refuse_detached(node, changed)
        for other in later:
            if not _share(other.meta.get("value"), changed.meta["value"]):
                continue
            if not _same_place(other.meta["value"], node.meta["value"]):
                raise GraphError(
                    f"{node.target} changes a tensor in place that is used later by "
                    "another name or shape: use the function that returns a new one"
                )
            yield other


def _refuse_detached(node: fx.Node, changed: fx.Node) -> None:
    # A detached alias would have another gradient than the changed tensor.
    for other in node.graph.nodes:
        detached = other.meta.get("detached") or other.target in _DETACHING
        if detached and _share(other.meta.get("value"), changed.meta["value"]):
            raise GraphError(
                f"{node.target} changes a tensor in place of which a part is detached, "
                "or under no_grad: use the function that returns a new one"
            )


def refuse_change(node: fx.Node) -> None:
    """Raise `GraphError` if the node changes its input in place."""
    if node.meta.get("changed"):
        raise GraphError(
            f"{node.target} changes its input in place and is opaque: use inplace=False"
        )


def _share(one: object, other: object) -> bool:
    # Tensors without memory have no addresses, but storages all the same.
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)  # noqa: SLF001
    )


def _same_place(one: torch.Tensor, other: object) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and _share(one, other)
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )


Known = Operand | Several | torch.Tensor | tuple[object, ...]


@final
class UnsplitError(Exception):
    """A module does something without a lowering rule.

    Args:
        path: Path of the module; "" for the model itself.
        reason: What has no rule.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path


@final
class Lowerer:
    """Makes layers of a traced module's operations.

    Args:
        module: The module that was traced.
        builder: Builder with its inputs, by the names of placeholders.
        batch: Extent of the batch during tracing.
        traced: The operations.
        prefix: Prefix of all paths of modules and tensors that layers omit.
    """

    def __init__(
        self, module: nn.Module, builder: Builder, *, batch: int, traced: Traced, prefix: str = ""
    ) -> None:
        self._module = module
        self._builder = builder
        self._batch = batch
        self._nodes = list(traced.graph.nodes)
        self._whole = traced.whole
        self._prefix = prefix
        self._known: dict[fx.Node, Known] = {}
        self._last_use = {
            source: index
            for index, node in enumerate(self._nodes)
            for source in node.all_input_nodes
        }

    def outputs(self) -> list[str]:
        """Lower everything; return the layers that are the model's outputs.

        Raises:
            GraphError: An operation cannot be lowered; the message says where it stands.
            UnsplitError: The same, but in a module that can be opaque, or for an unknown function.
        """
        names: list[str] = []
        live = live_nodes(self._nodes)
        for index, node in enumerate(self._nodes):
            if node not in live:
                continue
            try:
                if node.op == "output":
                    names = self._outputs(node)
                else:
                    self._lower(node)
                    self._change_in_place(node, index)
            except GraphError as error:
                reason = f"{error}{node.meta.get('place', '')}"
                calls = isinstance(error, CallError)  # then the caller may be whole
                path = _caller(node) if calls else _inside(node)
                if path or calls or _is_unknown(node):
                    raise UnsplitError(path, reason) from error
                raise GraphError(reason) from error
        return names

    def _lower(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            name = str(node.target)
            layer = self._builder[name]
            self._known[node] = Operand(name=name, shape=layer.shape, is_integer=layer.is_integer)
        elif node.op == "get_attr":
            constant = node.meta.get("constant")
            tensor = node.meta["value"]
            self._known[node] = self._parameter(node, tensor) if constant is None else constant
        else:
            operation = self._operation(node)
            if operation is not None:
                known = self._as_operands(self._lowered(node, operation), node.meta["value"])
                detached = node.meta.get("detached")
                self._known[node] = self._detached(known) if detached else known

    def _detached(self, known: Known) -> Known:
        # Computed under no_grad: a layer without a gradient.
        if isinstance(known, tuple):
            return tuple(self._detached(one) for one in known)  # type: ignore[arg-type] # results
        if isinstance(known, Several):
            raise GraphError(
                "it returns several tensors under no_grad, which has no split rule: "
                "use requires_grad_(False) on its parameters"
            )
        if not isinstance(known, Operand) or known.is_integer:
            return known
        layer = self._builder[known.name]
        name = self._builder.add(
            f"{known.name}.detach",
            "pointwise",
            [known.name],
            layer.shape,
            options={"function": "detach"},
        )
        return replace(known, name=name)

    def _operation(self, node: fx.Node) -> Operation | None:
        # None for sizes and other numbers.
        arguments = tuple(self._argument(argument) for argument in node.args)
        keywords = {word: self._argument(value) for word, value in node.kwargs.items()}
        path = ""
        trains = True
        if node.op == "call_module":
            called = self._module.get_submodule(str(node.target))
            path = self._path(str(node.target))
            trains = called.training
            name = path or type(called).__name__.lower()
        else:
            word = getattr(node.target, "__name__", str(node.target)).strip("_")
            around = list(node.meta.get("nn_module_stack", {}).values())
            module = self._path(around[-1][0]) if around else ""
            name = f"{module}.{word}" if module else word
        operation = Operation(
            name=name,
            target=path if node.op == "call_module" else word_of(node),
            arguments=arguments,
            keywords=keywords,
            result=node.meta["value"],
            batch=self._batch,
            trains=trains,
        )
        several = any(isinstance(item, Several) for item in arguments)
        if operation.operands or several or node.op == "call_module":
            return operation
        return None

    def _lowered(self, node: fx.Node, operation: Operation) -> Lowered:
        if node.op == "call_module":
            path = str(node.target)
            module = self._module.get_submodule(path)
            reason = self._whole.get(path)
            return lower_module(self._builder, module, operation, whole=reason)
        return lower_function(self._builder, node.target, operation)

    def _parameter(self, node: fx.Node, tensor: torch.Tensor) -> Operand:
        # A tensor of the model is an operand without a batch.
        path = str(node.target)
        module, _, word = path.rpartition(".")
        owned = getattr(self._module.get_submodule(module), word)
        assert isinstance(owned, torch.Tensor), path
        name = self._builder.add(
            path,
            "parameter",
            [],
            tuple(tensor.shape),
            tensors={
                "value": TensorUse(
                    name=self._path(path), shape=tuple(tensor.shape), trains=owned.requires_grad
                )
            },
            is_integer=is_integer(tensor),
        )
        return Operand(
            name=name, shape=tuple(tensor.shape), batched=False, is_integer=is_integer(tensor)
        )

    def _path(self, target: str) -> str:
        return target.removeprefix(self._prefix).removeprefix(".")

    def _argument(self, argument: object) -> object:
        if isinstance(argument, fx.Node):
            return self._known.get(argument, argument.meta["value"])
        if isinstance(argument, list | tuple):
            return tuple(self._argument(item) for item in argument)
        return argument

    def _as_operands(self, lowered: object, result: object) -> Known:
        if isinstance(lowered, Several):
            return lowered
        if isinstance(lowered, tuple):
            assert isinstance(result, tuple | list), lowered
            return tuple(
                self._as_operands(name, one) for name, one in zip(lowered, result, strict=False)
            )
        assert isinstance(lowered, str), lowered
        assert isinstance(result, torch.Tensor), lowered
        layer = self._builder[lowered]
        batched = tuple(result.shape) == (self._batch, *layer.shape)
        if not batched and tuple(result.shape) != layer.shape:
            raise GraphError(
                f"the lowering rule of {lowered!r} gives {list(layer.shape)}, but the "
                f"operation gives {list(result.shape[1:])}: correct the rule"
            )
        return Operand(
            name=lowered, shape=layer.shape, batched=batched, is_integer=is_integer(result)
        )

    def _change_in_place(self, node: fx.Node, index: int) -> None:
        # Later uses of a tensor that was changed in place read the change.
        known = self._known.get(node)
        if isinstance(known, Operand) and self._builder[known.name].whole:
            refuse_change(node)
        later = [other for other in self._nodes[:index] if self._last_use.get(other, -1) > index]
        for other in renamed(node, later):
            self._known[other] = self._known[node]

    def _outputs(self, node: fx.Node) -> list[str]:
        known: list[object] = []
        fx.map_arg(node.args, lambda source: known.append(self._known.get(source, source)))
        names = [name for item in known for name in self._names(item)]
        if not names:
            raise GraphError("the model returns no tensors")
        return names

    def _names(self, known: object) -> list[str]:
        if isinstance(known, Operand) and known.batched:
            return [known.name]
        if isinstance(known, Several):
            taken = [known.take(index) for index in range(len(known.results))]
            return [
                name
                for item in taken
                for name in ([item] if isinstance(item, str) else self._names(item))
            ]
        if isinstance(known, tuple):
            return [name for item in known for name in self._names(item)]
        raise GraphError(
            "the model's outputs must be tensors with a batch: one of them does not "
            "depend on its inputs"
        )


def live_nodes(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes with an effect: outputs, modules, changes in place, and all they read."""
    live: set[fx.Node] = set()
    for node in reversed(nodes):
        effect = node.op in {"output", "call_module"} or node.meta.get("changed")
        if effect or not live.isdisjoint(node.users):
            live.add(node)
    return live


def _inside(node: fx.Node) -> str:
    around = list(node.meta.get("nn_module_stack", {}).values())
    if node.op == "call_module" or not around:
        return ""
    return str(around[-1][0])


def _caller(node: fx.Node) -> str:
    around = list(node.meta.get("nn_module_stack", {}).values())[:-1]  # itself apart
    return str(around[-1][0]) if around else ""


def _is_unknown(node: fx.Node) -> bool:
    calls = node.op in {"call_function", "call_method"}
    return calls and not knows_function(node.target)


def word_of(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))
