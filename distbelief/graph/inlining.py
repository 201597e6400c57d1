"""Inlines modules that torch.export captured into the traced graph.

A module is exported once for all batches. Every operation becomes one or more nodes with lowering
rules (`aten`), with `meta` as in `tracing`. Sizes and what depends on no input become numbers
and constants. A module that cannot be exported, or has an operation without a rule, stays opaque.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar, cast, final

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate, map_arg
from torch.utils import _pytree as pytree

from distbelief.graph.aten import is_assertion, name_of, rewritten
from distbelief.graph.export import Exported, ExportError, dependents, export, module_of, place_of
from distbelief.graph.fake_tensor import run_without_memory, without_memory
from distbelief.graph.graph import GraphError
from distbelief.graph.lowering.lower import UnsplitError
from distbelief.graph.tracing import Traced, explained


def inline(call: fx.Node, exported: Exported, *, root: nn.Module) -> None:
    """Replace the call of a module by its operations.

    Args:
        call: The node; it is erased.
        exported: The module's operations.
        root: The module whose graph the node is in.

    Raises:
        GraphError: An operation has no rule, or the result is used in an unsupported way.
    """
    result = _Inlining(call, exported, root).run()
    _replace(call, result)
    call.graph.erase_node(call)


_PLACES: Final = frozenset({"device", "layout", "pin_memory"})
# Limit of a constant that the forward makes.
_N_ELEMENTS_MAX: Final = 1 << 24


@final
class _Inlining:
    def __init__(self, call: fx.Node, exported: Exported, root: nn.Module) -> None:
        self._call = call
        self._path = str(call.target)
        self._exported = exported
        self._root = root
        self._known: dict[fx.Node, object] = {}
        self._now: fx.Node | None = None  # the operation being inlined

    def run(self) -> object:
        exported = self._exported
        dependent = dependents(exported.graph, exported.constants)
        flat, _ = pytree.tree_flatten((self._call.args, dict(self._call.kwargs)))
        given = iter([x for x in flat if isinstance(x, fx.Node)])
        inputs = set(exported.inputs)
        output: object = ()
        for node in exported.graph.nodes:
            self._now = node
            if node.op == "placeholder":
                name = str(node.name)
                self._known[node] = next(given) if name in inputs else self._own(name)
            elif node.op == "output":
                output = self._argument(node.args[0])
            else:
                self._known[node] = self._done(node, is_constant=node not in dependent)
        assert isinstance(output, tuple | list), output
        # Changed tensors of the model would come first; `export` rejects them.
        return pytree.tree_unflatten(list(output), exported.output)

    def _own(self, name: str) -> object:
        constant = self._exported.constants.get(name)
        if constant is not None:
            return constant
        path = f"{self._path}.{self._exported.tensors[name]}"
        parent, _, word = path.rpartition(".")
        tensor = getattr(self._root.get_submodule(parent), word)
        return self._node("get_attr", path, value=without_memory(tensor))

    def _done(self, node: fx.Node, *, is_constant: bool) -> object:
        target = node.target
        assert callable(target), node
        args, kwargs = self._argument(node.args), self._argument(node.kwargs)
        assert isinstance(args, tuple)
        assert isinstance(kwargs, dict)
        if is_assertion(target):
            return None
        if is_constant:
            return self._constant(node, _values(args), kwargs)
        if getattr(target, "namespace", "") == "distbelief":
            return self._leaf(args)
        if target is operator.getitem:  # one of several results
            several, index = args
            if isinstance(several, _Result):
                return several[index]
            return self._emit(target, several, index)
        return rewritten(self._emit, target, args, kwargs)

    def _constant(
        self, node: fx.Node, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        # Tensors without values (empty) need no memory.
        target = node.target
        assert callable(target), node
        said = {word: kwargs[word] for word in kwargs if word not in _PLACES}
        if name_of(target).startswith(("empty", "new_empty")):
            return target(*args, **{**said, "device": torch.device("meta")})
        found = node.meta.get("val")
        if isinstance(found, torch.Tensor):
            _check_size(found, self._call)
        return target(*args, **said)

    def _leaf(self, args: Sequence[object]) -> object:
        tensors, key = args
        assert isinstance(tensors, tuple | list)
        assert isinstance(key, int)
        call = self._exported.calls[key]
        arguments, keywords = call.arguments(tensors)
        path = f"{self._path}.{call.path}"
        module = self._root.get_submodule(path)
        value = run_without_memory(module, _hollow(arguments), _hollow(keywords))
        node = self._node("call_module", path, args=arguments, kwargs=keywords, value=value)
        return _Result(self, node, call.places)

    def _emit(self, target: object, *args: object, **kwargs: object) -> fx.Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        values, words = _hollow(args), _hollow(kwargs)
        if isinstance(target, str):
            value = getattr(values[0], target)(*values[1:], **words)
        else:
            assert callable(target), target
            value = target(*values, **words)
        return self._node(op, target, args=args, kwargs=kwargs, value=value)

    def take(self, node: fx.Node, place: Sequence[object]) -> fx.Node:
        for key in place:
            value = node.meta["value"][key]
            node = self._node("call_function", operator.getitem, args=(node, key), value=value)
        return node

    def _node(
        self,
        op: str,
        target: object,
        *,
        value: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> fx.Node:
        graph = self._call.graph
        with graph.inserting_before(self._call):
            node = graph.create_node(
                op,
                target,  # type: ignore[arg-type] # a function, or the name of one
                self._with_constants(args),  # type: ignore[arg-type]
                self._with_constants(dict(kwargs or {})),  # type: ignore[arg-type]
            )
        node.meta["value"] = value
        node.meta["changed"] = []
        node.meta["place"] = place_of(self._now) if self._now else ""
        path = self._around()
        node.meta["nn_module_stack"] = {path: (path, nn.Module)}
        return node

    def _around(self) -> str:
        inner = module_of(self._now) if self._now else ""
        return f"{self._path}.{inner}" if inner else self._path

    def _with_constants(self, arguments: object) -> object:

        def placed(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            node = self._node("get_attr", "constant", value=without_memory(value))
            node.meta["constant"] = value
            return node

        found: object = map_aggregate(arguments, placed)  # type: ignore[arg-type,type-var]
        return found

    def _argument(self, argument: object) -> object:
        found: object = map_arg(argument, self._known.__getitem__)  # type: ignore[type-var, arg-type]
        return found


@final
class _Result:
    # Tensors of an opaque module's result, added to the graph when they are used.

    def __init__(
        self, inlining: _Inlining, node: fx.Node, places: Sequence[tuple[object, ...]]
    ) -> None:
        self._inlining = inlining
        self._node = node
        self._places = places

    def __getitem__(self, index: object) -> fx.Node:
        assert isinstance(index, int), index
        return self._inlining.take(self._node, self._places[index])


def _check_size(found: torch.Tensor, call: fx.Node) -> None:
    extents: tuple[object, ...] = tuple(found.shape)  # whole numbers, or symbols
    sizes = [n if isinstance(n, int) else _batch_of(call) for n in extents]
    if math.prod(sizes) > _N_ELEMENTS_MAX:
        raise GraphError(
            f"the forward of {call.target} makes a constant of shape {sizes}: register it "
            "as a buffer, or make it smaller"
        )


def _batch_of(call: fx.Node) -> int:
    value = call.all_input_nodes[0].meta["value"]
    assert isinstance(value, torch.Tensor), call
    return int(value.shape[0])


def _replace(node: fx.Node, result: object) -> None:
    # The result may be several tensors.
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
        return
    for user in list(node.users):
        if user.op == "output":
            user.args = cast("tuple[fx.node.Argument, ...]", _put(user.args, node, result))
        elif user.target is operator.getitem and isinstance(result, tuple | list | dict):
            _replace(user, result[user.args[1]])  # type: ignore[index] # as it was in the forward
            user.graph.erase_node(user)
        else:
            raise GraphError(
                f"{node.target} returns a {type(result).__name__}, which {user.name} takes "
                "as a whole: pass its tensors one by one"
            )


def _put(arguments: object, node: fx.Node, result: object) -> object:
    found: object = map_arg(arguments, lambda one: result if one is node else one)  # type: ignore[type-var, arg-type, return-value]
    return found


_Arguments = TypeVar("_Arguments", tuple[object, ...], dict[str, object])


def _values(arguments: _Arguments) -> _Arguments:
    found: _Arguments = map_arg(arguments, lambda node: node.meta["value"])  # type: ignore[type-var]
    return found


def _hollow(arguments: _Arguments) -> _Arguments:

    def emptied(value: object) -> object:
        if isinstance(value, torch.Tensor) and not value.is_meta:
            return without_memory(value)
        return value

    found: _Arguments = map_aggregate(_values(arguments), emptied)  # type: ignore[type-var, arg-type]
    return found


Key = tuple[object, ...]


@final
class Exports:
    """The modules of one model that are exported, or refused.

    Attributes:
        refused: Path -> reason.
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._found: dict[Key, Exported] = {}

    def refuse(self, path: str, reason: str) -> None:
        self.refused[path] = reason

    def put_into(self, traced: Traced, root: nn.Module, *, batch: int) -> Traced | None:
        """Inline all modules that can be exported into the traced graph.

        Args:
            traced: Its graph is changed.
            root: The module that was traced.
            batch: Extent of the batch during tracing.

        Returns:
            None if the model must be traced again, because one more module is refused.

        Raises:
            UnsplitError: A module inside one of them must become opaque first.
        """
        exported: set[str] = set()
        while True:
            calls = [
                node
                for node in traced.graph.nodes
                if node.op == "call_module"
                and node.target in traced.whole
                and node.target not in self.refused
            ]
            if not calls:
                return replace(traced, whole=self._reasons(traced), exported=frozenset(exported))
            try:
                inline(calls[0], self._exported(calls[0], traced, root, batch=batch), root=root)
            except ExportError as error:
                path = str(calls[0].target)
                inner = f"{path}.{error.inner}"
                if error.inner and inner not in traced.whole:
                    raise UnsplitError(inner, str(error)) from error
                self.refuse(path, str(error))
            except Exception as error:  # noqa: BLE001 -- torch may reject the arguments in any way
                self.refuse(str(calls[0].target), explained(error))
                return None  # a part of it may already be in the graph
            else:
                exported.add(str(calls[0].target))

    def _exported(self, call: fx.Node, traced: Traced, root: nn.Module, *, batch: int) -> Exported:
        path = str(call.target)
        below = frozenset(
            other.removeprefix(f"{path}.") for other in traced.whole if other.startswith(f"{path}.")
        )
        if not all(_is_tensor(node) for node in call.all_input_nodes):
            raise ExportError("it is given several tensors as one")
        args, kwargs = (
            map_arg(given, lambda node: node.meta["value"])
            for given in (call.args, dict(call.kwargs))
        )
        flat, spec = pytree.tree_flatten((args, kwargs))
        shown = tuple(_shown(value, batch) for value in flat)
        key = (path, below, shown, str(spec))
        if key not in self._found:
            self._found[key] = export(
                root.get_submodule(path),
                (args, kwargs),  # type: ignore[arg-type] # as it was called
                batch=batch,
                whole=below,
            )
        return self._found[key]

    def _reasons(self, traced: Traced) -> dict[str, str]:
        return {path: both(reason, self.refused.get(path)) for path, reason in traced.whole.items()}


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["value"], torch.Tensor)


def both(reason: str, refusal: str | None) -> str:
    if refusal is None or refusal in reason:
        return reason
    return f"{reason}; torch.export: {refusal}"


def _shown(value: object, batch: int) -> object:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape = tuple(-1 if extent == batch else extent for extent in value.shape)
    return shape, value.dtype
