"""A module's operations as torch.export finds them, where torch.fx cannot.

The tracer of torch.fx hands a forward stand-ins, which are no tensors: it gives up
where the forward asks whether they are (`isinstance`), writes into a part of one
(`y[:, :2] = 0`), or hands them to code of torch's own that takes tensors only. And it
keeps functions by their names, of which some have no split rule. torch.export runs the
forward on fake tensors, which are tensors, makes what is changed in place into new
values, and knows what most functions consist of. It has two faults of its own:

* It looks into every layer, down to single operations. So modules that have a
  translation, and torch's own, are made to look like one operation each (`leaves`), and
  come out as they went in, their tensors under the names of the `state_dict`.
* It bakes the batch's size in. So that is a symbol; a forward that needs its number
  cannot be exported.

It takes a second to be imported, and tenths of one for each module: it is asked only
for what tracing gave up on. What neither can capture (it branches on its data) stays
whole, with both reasons. A `torch.autograd.Function` is refused: it would be inlined,
and its backward lost.
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


# Modules that torch.export does not look into: each call is one operation.
#
# While `leaves` lasts, their forwards are replaced by an operation of our own, which gets
# the tensors of the call, and a number by which the rest of it is found again. What comes
# out has the shapes that the module itself returns, found without memory.

LEAF: Final = "distbelief::leaf"
_LIBRARY: Final = torch.library.Library("distbelief", "DEF")
_LIBRARY.define("leaf(Tensor[] inputs, int key) -> Tensor[]")


@final
class Call:
    """One call of a module that is not looked into.

    Args:
        module: Which.
        path: Of it, below the module that is exported.
        arguments: Its arguments and keywords.

    Attributes:
        places: Where in its result each tensor stands.
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
        """Return arguments and keywords with these in the place of its tensors."""
        given = iter(tensors)
        flat = [next(given) if other is None else other[0] for other in self._others]
        found = pytree.tree_unflatten(flat, self._spec)
        return cast("tuple[tuple[object, ...], dict[str, object]]", found)

    def result(self, tensors: Sequence[object]) -> object:
        """Return its result with these tensors in it: tuples, or one alone."""
        return _nested(list(zip(self.places, tensors, strict=True)))

    def shapes(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of the shapes of what the module returns."""
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
                f"{self.path} changes its input in place, which would be lost: let it "
                "return a new tensor"
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


_CALLS: Final[dict[int, Call]] = {}  # of exports under way; the operator has no other
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
    """Let calls of modules that are not looked into be one operation each.

    Args:
        module: In which they are.
        calls: Gets the calls that are made meanwhile, by the number in the operation.
        whole: Paths of modules that are not looked into either.
    """
    changed: list[nn.Module] = []
    above: list[str] = []
    for path, part in module.named_modules():
        hidden = any(path.startswith(f"{other}.") for other in above)
        if not path or hidden or not (path in whole or is_leaf(part)):
            continue
        above.append(path)
        # Hooks run around the forward; what it changes in place is seen in it only.
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
    """Return whether a tensor is of the forward that is exported, not of a leaf's."""
    return isinstance(value, torch.Tensor) and not _INSIDE


def _keys(path: Sequence[object]) -> tuple[object, ...]:
    return tuple(
        entry.idx if isinstance(entry, pytree.SequenceKey) else getattr(entry, "key", 0)
        for entry in path
    )


def _nested(found: Sequence[tuple[tuple[object, ...], object]]) -> object:
    """Return values as tuples and dicts, by their places."""
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

INNER: Final = "inner"
"""What a module is called inside of what is exported."""

_ROUNDS_MAX: Final = 3
"""Times that functions are replaced by what they consist of."""


@final
class ExportError(Exception):
    """torch.export, or what comes of it, cannot capture a module.

    Args:
        reason: Why.
        inner: The path of a module in it that is to blame, and could stay whole.
    """

    def __init__(self, reason: str, *, inner: str = "") -> None:
        super().__init__(reason)
        self.inner = inner


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A module as operations on tensors, for any batch.

    Attributes:
        graph: Operations of aten, and calls of `leaves`.
        tensors: Per placeholder, the path of a tensor of the module.
        constants: Per placeholder, a tensor that the forward made.
        inputs: Placeholders of what it is given.
        calls: Of modules that are not looked into.
        output: The result's structure; its tensors are flat in the graph.
    """

    graph: fx.Graph
    tensors: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    inputs: Sequence[str]
    calls: Mapping[int, Call]
    output: pytree.TreeSpec


@final
class _Closed(nn.Module):
    """Calls a module with tensors, and with what else it is called with."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.inner = call.module
        self.training = call.module.training
        self._call = (call,)  # in a tuple: it is no module

    @override
    def forward(self, *tensors: torch.Tensor) -> object:
        """Return what the module returns."""
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
        module: Nothing of it changes.
        arguments: What its forward is called with, tensors without memory among it.
        batch: Extent of the batch in them; what is returned is for any.
        whole: Paths of modules in it that are not to be looked into either.

    Raises:
        ExportError: it cannot be exported, or does what has no split rule.
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
            torch.enable_grad(),  # so that a no_grad of the forward's is seen
            warnings.catch_warnings(action="ignore"),  # torch's about itself
        ):
            program = _program(closed, batch=batch)
            _check(program)
        watch.check_seeds(str)
    except ExportError:
        raise
    except Exception as error:  # whatever the forward does with fake tensors
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
    """Export it; replace functions without a rule by what they consist of."""
    from torch.export import Dim, default_decompositions, export as export_of_torch  # noqa: PLC0415 -- takes a second, for few models

    examples = tuple(_like(tensor, closed) for tensor in closed._call[0].tensors)  # noqa: SLF001
    dim = Dim("batch", min=2)
    dims = tuple({0: dim} if x.shape[:1] == (batch,) else None for x in examples)
    with _quietly():
        program = export_of_torch(closed, examples, dynamic_shapes={"tensors": dims}, strict=False)
    _check_gradients(program)  # what stops them is soon gone
    _check_modes(program)
    for number in range(_ROUNDS_MAX):
        unknown = {node.target for node in _unknown(program)}
        table = {
            target: rule for target, rule in default_decompositions().items() if target in unknown
        }
        if number and not table:
            break
        program = program.run_decompositions(table)  # and what is in place is not
    return program


@contextmanager
def _quietly() -> Iterator[None]:
    """Log nothing: what export cannot do is told by us, in a line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _like(tensor: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """Return an example where the module's own tensors are, of their type."""
    own = next((p for p in module.parameters() if p.is_floating_point()), None)
    device = torch.device("cpu") if own is None else own.device
    dtype = own.dtype if own is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device=device)


def _tensors(signature: "ExportGraphSignature") -> dict[str, str]:
    """Return the module's tensors, per placeholder.

    Raises:
        ExportError: the forward changes one.
    """
    changed = [path.removeprefix(f"{INNER}.") for path in signature.buffers_to_mutate.values()]
    if changed:
        raise ExportError(f"the forward changes {changed[0]!r}, a tensor of the model")
    paths = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    return {name: path.removeprefix(f"{INNER}.") for name, path in paths.items()}


def _check(program: "ExportedProgram") -> None:
    """Check that all that is done has a rule.

    Raises:
        ExportError: something has none.
    """
    for node in _unknown(program):
        raise _without_rule(node)


def _without_rule(node: fx.Node) -> ExportError:
    reason = f"{node.target} has no split rule{place_of(node)}"
    return ExportError(reason, inner=module_of(node))


def _check_gradients(program: "ExportedProgram") -> None:
    """Check that gradients go back through all that is done.

    Raises:
        ExportError: something stops them.
    """
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    for node in dependents(program.graph, constants):
        if node.op == "call_function" and stops_gradients(node.target):
            raise _without_rule(node)


def _check_modes(program: "ExportedProgram") -> None:
    """Check that nothing is done under no_grad or autocast: that is soon gone, too.

    Raises:
        ExportError: something is.
    """
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):  # noqa: SLF001 -- has no other name
            raise ExportError(f"{node.target} has no split rule{place_of(node)}")


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """Let no forward use it: torch.export does not see it."""
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
    """Check that nothing was done to its modules that torch.export does not see.

    Raises:
        ExportError: something was.
    """
    for path, part in module.named_modules():
        if has_gradient_hooks(part):
            raise ExportError("it has hooks on its gradients")
        if path in whole and is_replaced(part):
            raise ExportError(f"the forward of {path} is another than its type's")


def _unknown(program: "ExportedProgram") -> list[fx.Node]:
    """Return operations that have no rule, and are no constants."""
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
    """Return the nodes whose tensors depend on the input, or on the model's own."""
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
    """Return where in the user's source an operation stands."""
    frames = re.findall(r'File ".+?", line \d+', str(node.meta.get("stack_trace", "")))
    return f" ({frames[-1]})" if frames else ""


def module_of(node: fx.Node) -> str:
    """Return the path of the module in which an operation stands, below the whole."""
    stack = node.meta.get("nn_module_stack", {}).values()
    paths = [str(path) for path, _ in stack if str(path).startswith(f"{INNER}.")]
    return paths[-1].removeprefix(f"{INNER}.") if paths else ""


def _reason(error: Exception) -> str:
    """Return why a module cannot be exported, in a sentence."""
    words = f"{type(error).__name__}: {error}"
    if "data-dependent" in words or "DataDependent" in words:
        return "its forward depends on the values of its data"
    if "specialized" in words or "Constraints violated" in words:
        return "its forward needs the number of samples"
    if isinstance(error, GraphError):
        return str(error)
    return explained(error)
