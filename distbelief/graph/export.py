"""Captures the operations of a module with torch.export, where torch.fx fails.

torch.export runs the forward on fake tensors, turns changes in place into new values, and
decomposes most functions. It handles forwards that ask for a tensor's type (`isinstance`), write
into a part of one (`y[:, :2] = 0`) or call functions without a split rule. It needs seconds, so it
is used only where tracing failed. Leaf modules become one operation each (`leaves`), and the batch
size is a symbol; a forward that needs it as a number, or branches on its data, cannot be exported.
"""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final, cast, final

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from distbelief.graph.aten import is_known, is_random, stops_gradients
from distbelief.graph.fake_tensor import run_without_memory
from distbelief.graph.graph import GraphError
from distbelief.graph.lowering.registry import is_like_input
from distbelief.graph.tracing import explained, is_leaf, no_custom_functions
from distbelief.graph.unsupported import Watch, has_gradient_hooks, is_replaced


# --- leaf modules ---
#
# Inside `leaves` their forwards are replaced by a custom operation, which gets the tensors of the
# call and a key of its other arguments. Shapes of the result come from a run without memory.

LEAF: Final = "distbelief::leaf"
_LIBRARY: Final = torch.library.Library("distbelief", "DEF")
_LIBRARY.define("leaf(Tensor[] inputs, int key) -> Tensor[]")


@final
class Call:
    """One call of a leaf module.

    Args:
        module: The module.
        path: Its path below the exported module.
        arguments: Positional and keyword arguments.

    Attributes:
        places: For each tensor of the result, its key path there.
    """

    def __init__(
        self, module: nn.Module, path: str, arguments: tuple[tuple[object, ...], dict[str, object]]
    ) -> None:
        self.module = module
        self.path = path
        self.places: list[tuple[object, ...]] = []
        flat, self._spec = pytree.tree_flatten(arguments)
        self.tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        self._others = [None if isinstance(value, torch.Tensor) else (value,) for value in flat]

    def arguments(self, tensors: Sequence[object]) -> tuple[tuple[object, ...], dict[str, object]]:
        given = iter(tensors)
        flat = [next(given) if other is None else other[0] for other in self._others]
        found = pytree.tree_unflatten(flat, self._spec)
        return cast("tuple[tuple[object, ...], dict[str, object]]", found)

    def result(self, tensors: Sequence[object]) -> object:
        return _nested(list(zip(self.places, tensors, strict=True)))

    def shapes(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if is_like_input(self.module):
            self.places = [()]
            return [torch.empty_like(inputs[0])]
        there = [
            torch.empty(x.shape, device="meta", dtype=None if x.is_floating_point() else x.dtype)
            for x in inputs
        ]
        arguments, keywords = self.arguments(there)
        result = run_without_memory(self.module, arguments, keywords)
        if any(x._version for x in there):  # noqa: SLF001 -- counts changes in place
            raise GraphError(
                f"{self.path} changes its input in place, which would be lost: return a new tensor"
            )
        named, _ = pytree.tree_flatten_with_path(result)
        floats = next((x.dtype for x in inputs if x.is_floating_point()), None)
        found = [(_keys(path), x) for path, x in named if isinstance(x, torch.Tensor)]
        self.places = [place for place, _ in found]
        return [
            torch.empty(
                x.shape, dtype=floats if x.is_floating_point() else x.dtype, device=inputs[0].device
            )
            for _, x in found
        ]


_CALLS: Final[dict[int, Call]] = {}  # of running exports: the operation only gets a key
_KEYS: Final = count()
_INSIDE: Final[list[nn.Module]] = []  # modules whose shapes are being found


@torch.library.register_fake(LEAF, lib=_LIBRARY)  # type: ignore[untyped-decorator] # torch has no types here
def _leaf(inputs: Sequence[torch.Tensor], key: int) -> list[torch.Tensor]:
    call = _CALLS[key]
    forward = call.module.__dict__.pop("forward", None)
    _INSIDE.append(call.module)
    try:
        return call.shapes(inputs)
    finally:
        _INSIDE.pop()
        if forward is not None:
            call.module.__dict__["forward"] = forward


@contextmanager
def leaves(module: nn.Module, calls: dict[int, Call], whole: frozenset[str]) -> Iterator[None]:
    """Make each call of a leaf module one operation.

    Args:
        module: The module that is exported.
        calls: Gets the calls, by the key in the operation.
        whole: Paths of further modules to treat as leaves.
    """
    changed: list[nn.Module] = []
    above: list[str] = []
    for path, part in module.named_modules():
        hidden = any(path.startswith(f"{other}.") for other in above)
        if not path or hidden or not (path in whole or is_leaf(part)):
            continue
        above.append(path)
        # Hooks run around the forward, and changes in place show only inside of it.
        if not (_has_hooks(part) or getattr(part, "inplace", False)):
            part.__dict__["forward"] = _forward(part, path, calls)
            changed.append(part)
    try:
        yield
    finally:
        for part in changed:
            del part.__dict__["forward"]
        for key in calls:
            del _CALLS[key]


def _forward(part: nn.Module, path: str, calls: dict[int, Call]) -> object:
    def forward(*arguments: object, **keywords: object) -> object:
        call = Call(part, path, (arguments, keywords))
        key = next(_KEYS)
        calls[key] = _CALLS[key] = call
        tensors: list[object] = torch.ops.distbelief.leaf(call.tensors, key)
        return call.result(tensors)

    return forward


def _has_hooks(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks)  # noqa: SLF001


def is_outside(value: object) -> bool:
    # A tensor of the exported forward, not of a leaf's.
    return isinstance(value, torch.Tensor) and not _INSIDE


def _keys(path: Sequence[object]) -> tuple[object, ...]:
    return tuple(
        entry.idx if isinstance(entry, pytree.SequenceKey) else getattr(entry, "key", 0)
        for entry in path
    )


def _nested(found: Sequence[tuple[tuple[object, ...], object]]) -> object:
    if len(found) == 1 and not found[0][0]:
        return found[0][1]
    groups: dict[object, list[tuple[tuple[object, ...], object]]] = {}
    for (first, *rest), value in found:
        groups.setdefault(first, []).append((tuple(rest), value))
    if all(isinstance(key, int) for key in groups):
        size = max(cast("int", key) for key in groups) + 1
        return tuple(_nested(groups[index]) if index in groups else None for index in range(size))
    return {key: _nested(group) for key, group in groups.items()}


if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.export.graph_signature import ExportGraphSignature

# Name of the module inside the exported wrapper.
INNER: Final = "inner"

# Rounds of decomposition.
_ROUNDS_MAX: Final = 3


@final
class ExportError(Exception):
    """torch.export cannot capture a module.

    Args:
        reason: Why.
        inner: Path of the module in it that failed, which could be opaque.
    """

    def __init__(self, reason: str, *, inner: str = "") -> None:
        super().__init__(reason)
        self.inner = inner


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A module as operations on tensors, for any batch."""

    graph: fx.Graph  # ATen operations, and calls of `leaves`
    tensors: Mapping[str, str]  # for each placeholder, the path of a tensor of the module
    constants: Mapping[str, torch.Tensor]  # for each placeholder, a tensor that the forward made
    inputs: Sequence[str]  # placeholders of its inputs
    calls: Mapping[int, Call]  # calls of leaf modules
    output: pytree.TreeSpec  # structure of the result, whose tensors are flat in the graph


@final
class _Closed(nn.Module):
    # Calls a module with tensors, and with its other arguments.

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.inner = call.module
        self.training = call.module.training
        self._call = (call,)  # a tuple, so that nn.Module does not register the call's module

    @override
    def forward(self, *tensors: torch.Tensor) -> object:
        arguments, keywords = self._call[0].arguments(tensors)
        result: object = self.inner(*arguments, **keywords)
        return result


def export(
    module: nn.Module,
    arguments: tuple[tuple[object, ...], dict[str, object]],
    *,
    batch: int,
    whole: frozenset[str],
) -> Exported:
    """Return the operations of a module.

    Args:
        module: The module; it is not changed.
        arguments: Arguments of its forward; tensors without memory.
        batch: Extent of the batch in them; the result is for any batch.
        whole: Paths of modules in it that stay opaque.

    Raises:
        ExportError: It cannot be exported, or has an operation without a rule.
    """
    closed = _Closed(Call(module, "", arguments))
    calls: dict[int, Call] = {}
    _refuse_altered(module, whole)
    watch = Watch(module)
    try:
        with (
            no_custom_functions(is_outside),
            _no_inference_mode(),
            leaves(module, calls, whole),
            torch.enable_grad(),  # so that a no_grad in the forward shows
            warnings.catch_warnings(action="ignore"),  # torch warns about its own internals
        ):
            program = _program(closed, batch=batch)
            _check(program)
        watch.check_seeds(str)
    except ExportError:
        raise
    except Exception as error:  # a forward may do anything with fake tensors
        raise ExportError(_reason(error)) from error
    signature = program.graph_signature
    output = program.call_spec.out_spec
    assert output is not None
    return Exported(
        graph=program.graph,
        tensors=_tensors(signature),
        constants={
            name: program.constants[path]
            for name, path in signature.inputs_to_lifted_tensor_constants.items()
        },
        inputs=[str(name) for name in signature.user_inputs],
        calls=calls,
        output=output,
    )


def _program(closed: _Closed, *, batch: int) -> "ExportedProgram":
    # Exports the module and decomposes functions without a rule.
    from torch.export import Dim, default_decompositions, export as export_of_torch  # noqa: PLC0415 -- takes a second, for few models

    examples = tuple(_like(tensor, closed) for tensor in closed._call[0].tensors)  # noqa: SLF001
    dim = Dim("batch", min=2)
    dims = tuple({0: dim} if x.shape[:1] == (batch,) else None for x in examples)
    with _quietly():
        program = export_of_torch(closed, examples, dynamic_shapes={"tensors": dims}, strict=False)
    _check_gradients(program)  # before decompositions remove what stops gradients
    _check_modes(program)
    for number in range(_ROUNDS_MAX):
        unknown = {node.target for node in _unknown(program)}
        table = {
            target: rule for target, rule in default_decompositions().items() if target in unknown
        }
        if number and not table:
            break
        program = program.run_decompositions(table)  # also removes changes in place
    return program


@contextmanager
def _quietly() -> Iterator[None]:
    # torch logs what export cannot do; the error reports it in one line.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _like(tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
    # On the device and in the dtype of the module's own tensors.
    own = next((p for p in module.parameters() if p.is_floating_point()), None)
    device = torch.device("cpu") if own is None else own.device
    dtype = own.dtype if own is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device=device)


def _tensors(signature: "ExportGraphSignature") -> dict[str, str]:
    changed = [path.removeprefix(f"{INNER}.") for path in signature.buffers_to_mutate.values()]
    if changed:
        raise ExportError(f"the forward changes {changed[0]!r}, a tensor of the model")
    paths = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return {name: path.removeprefix(f"{INNER}.") for name, path in paths.items()}


def _check(program: "ExportedProgram") -> None:
    for node in _unknown(program):
        raise _without_rule(node)


def _without_rule(node: fx.Node) -> ExportError:
    reason = f"{node.target} has no split rule{place_of(node)}"
    return ExportError(reason, inner=module_of(node))


def _check_gradients(program: "ExportedProgram") -> None:
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    for node in dependents(program.graph, constants):
        if node.op == "call_function" and stops_gradients(node.target):
            raise _without_rule(node)


def _check_modes(program: "ExportedProgram") -> None:
    # no_grad and autocast vanish in decompositions, so they are checked before.
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):  # noqa: SLF001 -- has no other name
            raise ExportError(f"{node.target} has no split rule{place_of(node)}")


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    # torch.export does not see inference mode.
    original = torch.inference_mode.__enter__

    def refuse(mode: torch.inference_mode) -> None:
        if mode.mode:
            raise ExportError("it computes under torch.inference_mode")
        original(mode)

    torch.inference_mode.__enter__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.inference_mode.__enter__ = original  # type: ignore[method-assign]


def _refuse_altered(module: nn.Module, whole: frozenset[str]) -> None:
    # Hooks and replaced forwards that torch.export does not see.
    for path, part in module.named_modules():
        if has_gradient_hooks(part):
            raise ExportError("it has hooks on its gradients")
        if path in whole and is_replaced(part):
            raise ExportError(f"the forward of {path} was replaced on the instance")


def _unknown(program: "ExportedProgram") -> list[fx.Node]:
    # Operations without a rule that are not constants.
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    dependent = dependents(program.graph, constants)
    return [
        node
        for node in program.graph.nodes
        if node.op in {"call_function", "get_attr"}
        and not is_known(node.target)
        and (node in dependent or is_random(node.target))
    ]


def dependents(graph: fx.Graph, constants: Mapping[str, object]) -> set[fx.Node]:
    """Return the nodes that depend on the input, or on the model's own tensors."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        is_tensor = isinstance(value, torch.Tensor | tuple | list)
        if node.op == "placeholder":
            depends = node.name not in constants
        else:
            depends = is_tensor and not found.isdisjoint(node.all_input_nodes)
        if depends or node.op == "get_attr":
            found.add(node)
    return found


def place_of(node: fx.Node) -> str:
    frames = re.findall(r'File ".+?", line \d+', str(node.meta.get("stack_trace", "")))
    return f" ({frames[-1]})" if frames else ""


def module_of(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack", {}).values()
    paths = [str(path) for path, _ in stack if str(path).startswith(f"{INNER}.")]
    return paths[-1].removeprefix(f"{INNER}.") if paths else ""


def _reason(error: Exception) -> str:
    words = f"{type(error).__name__}: {error}"
    if "data-dependent" in words or "DataDependent" in words:
        return "its forward depends on the values of its data"
    if "specialized" in words or "Constraints violated" in words:
        return "its forward needs the number of samples"
    if isinstance(error, GraphError):
        return str(error)
    return explained(error)
