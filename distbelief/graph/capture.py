"""Captures an `nn.Module` as a layer graph, without its values.

The module is traced (`tracing`) on tensors without memory, so that models larger than this host
can be captured. Lowering rules (`lowering`) turn each operation into layers. Where tracing or
lowering fails, torch.export is tried (`inlining`); what fails there too becomes an opaque layer,
with both reasons. Every operation must keep the batch as its first dimension.

A model is captured in training mode, except for modules in evaluation mode while the model is
not: they are frozen. `evaluation_difference` tells whether evaluation computes something else.
"""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, final

import torch
from torch import fx, nn
from torch.fx.node import map_arg
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from typing_extensions import override

from distbelief.graph import lowering, ops
from distbelief.graph.graph import Builder, GraphError, LayerGraph
from distbelief.graph.inlining import Exports
from distbelief.graph.lowering.lower import Lowerer, UnsplitError, live_nodes
from distbelief.graph.region import Shape
from distbelief.graph.tracing import ONLY, Traced, UntracedRootError, is_leaf, trace
from distbelief.graph.unsupported import (
    attributes_kept,
    is_altered,
    refuse_bounded_tables,
    refuse_parameter_hooks,
)


# --- training against evaluation ---

_DROPOUT_FUNCTIONS: Final = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
)

# Index of dropout_p among the arguments of scaled_dot_product_attention.
_DROPOUT_P_INDEX: Final = 4


@final
@dataclass(frozen=True, slots=True)
class _Call:
    # An operation, described so that it compares equal between two graphs.

    text: str
    constant: torch.Tensor | None


def first_difference(training: Traced, evaluating: Traced, *, root: nn.Module) -> str | None:
    """Return where two traces of `root` differ, dropout ignored; None if they do not.

    Layers know what dropout and statistics do in evaluation. A forward that branches on
    `self.training` itself does something that no layer knows.
    """
    one, other = (_calls(t.graph, root) for t in (training, evaluating))
    for (node, here), (late, there) in zip(one, other, strict=False):
        if not _same(here, there):
            node_shown = late if node.op == "output" else node
            return f"{node_shown.name}{node_shown.meta.get('place', '')}"
    return None  # both end with their output node


def _same(one: _Call, other: _Call) -> bool:
    if one.constant is None or other.constant is None:
        return one == other
    same_shape = one.constant.shape == other.constant.shape
    return one.text == other.text and same_shape and one.constant.equal(other.constant)


def _calls(graph: fx.Graph, root: nn.Module) -> list[tuple[fx.Node, _Call]]:
    # The operations without their names; dropout is left out.
    numbers: dict[fx.Node, int] = {}
    found: list[tuple[fx.Node, _Call]] = []
    live = live_nodes(list(graph.nodes))
    for node in graph.nodes:
        if node.op != "placeholder" and node not in live:
            continue
        if _is_dropout(node, root) and node.all_input_nodes:
            numbers[node] = numbers[node.all_input_nodes[0]]
            continue
        args, kwargs = node.args, dict(node.kwargs)
        if node.target is functional.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
            args = args[:_DROPOUT_P_INDEX] + args[_DROPOUT_P_INDEX + 1 :]
        arguments = map_arg((args, kwargs), lambda n: f"%{numbers[n]}")
        target = getattr(node.target, "__qualname__", node.target)
        text = f"{node.op} {target} {arguments}"
        numbers[node] = len(found)
        found.append((node, _Call(text, node.meta.get("constant"))))
    return found


def _is_dropout(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "call_module":
        return isinstance(root.get_submodule(str(node.target)), _DropoutNd)
    return node.target in _DROPOUT_FUNCTIONS


assert ops.OPERATORS  # importing these two packages registers operators and lowering rules
assert lowering.__all__

# --- capture ---

# Primes that no model uses: the batch dimension is recognized by its extent. Two captures with
# different primes show whether the batch size got into the graph.
BATCHES: Final = (1009, 1013)
# Of one sample of an input: layers are larger, and torch counts elements in 64 bits.
N_ELEMENTS_MAX: Final = 10**12


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One input of a model."""

    shape: Shape  # shape without the batch dimension
    # for integers, the number of values (words, classes); None for floats
    n_values: int | None = None


def capture(module: nn.Module, inputs: Sequence[InputSpec]) -> LayerGraph:
    """Return the layer graph of `module`.

    Args:
        module: Module on any device; it is not changed or copied.
        inputs: The inputs of its forward, in order; further parameters keep their defaults.

    Raises:
        GraphError: It cannot be traced, takes other inputs, or loses the batch.
    """
    _check_sizes(inputs)
    refuse_parameter_hooks(module)
    refuse_bounded_tables(module)
    names = _names(module, inputs)
    specs = dict(zip(names, inputs, strict=True))
    exports = Exports()
    with attributes_kept(module), _in_mode(module, training=True):
        attempts = [_captured(module, specs, batch=batch, exports=exports)[:2] for batch in BATCHES]
    if any(_drops(traced) for _, traced in attempts):
        _refuse_dropping_in_evaluation(module, specs)
    first, second = (graph for graph, _ in attempts)
    for layer, other in zip(first.layers, second.layers, strict=False):
        if layer != other:
            raise GraphError(
                f"layer {layer.name!r} depends on the batch size or on random numbers: "
                "divide by the batch size in the loss, and use torch.nn.Dropout"
            )
    return first


def evaluation_difference(module: nn.Module, inputs: Sequence[InputSpec]) -> str | None:
    """Return where a model computes something else in evaluation mode; None if nowhere.

    Differences that layers know do not count: dropout, and which statistics are used.

    Args:
        module: A module that `capture` accepts.
        inputs: As for `capture`.

    Raises:
        GraphError: It cannot be captured.
    """
    specs = dict(zip(_names(module, inputs), inputs, strict=True))
    batch = BATCHES[0]
    with attributes_kept(module):
        with _in_mode(module, training=True):
            _, training, attempt = _captured(module, specs, batch=batch, exports=Exports())
        exports = Exports()
        for path in training.whole.keys() - training.exported:
            exports.refuse(path, training.whole[path])
        try:
            with _in_mode(module, training=False):
                _, evaluating, _ = _captured(
                    module,
                    specs,
                    batch=batch,
                    exports=exports,
                    attempt=replace(attempt, whole=training.whole),
                )
        except GraphError as error:
            return str(error)
    if evaluating.whole.keys() != training.whole.keys():
        return "in its opaque modules"
    return first_difference(training, evaluating, root=attempt.root)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    # One way to capture a model.
    # root: what is traced; prefix: the path of the model in it; whole: opaque modules and why.

    root: nn.Module
    prefix: str = ""
    whole: Mapping[str, str] = field(default_factory=dict)


def _captured(
    module: nn.Module,
    specs: Mapping[str, InputSpec],
    *,
    batch: int,
    exports: Exports,
    attempt: _Attempt | None = None,
) -> tuple[LayerGraph, Traced, _Attempt]:
    if attempt is None:
        attempt = _Attempt(root=module)
        if is_leaf(module) or is_altered(module):  # traced as one call inside a wrapper
            attempt = _Attempt(root=_Wrapper(module), prefix=ONLY)
    reason = ""
    tried: set[object] = set()
    while True:  # ends: every round makes one more module opaque, or refuses its export
        _check_progress(attempt, exports, tried, reason)
        builder = Builder(aliases=_aliases(module))
        for name, spec in specs.items():
            builder.input(name, spec.shape, is_integer=spec.n_values is not None)
        try:
            traced = _traced(attempt, specs, batch=batch, exports=exports)
        except UntracedRootError as error:
            reason = f"{type(module).__name__}.forward cannot be traced: {error}"
            attempt = _from_outside(module, reason, attempt.whole)
            continue
        except UnsplitError as error:
            reason = str(error)
            whole = {**attempt.whole, error.path: reason}
            attempt = replace(attempt, whole=whole)
            continue
        lowerer = Lowerer(attempt.root, builder, batch=batch, traced=traced, prefix=attempt.prefix)
        try:
            return builder.finish(lowerer.outputs()), traced, attempt
        except UnsplitError as error:
            reason = str(error)
            attempt = _next(attempt, error, traced, exports)


def _check_progress(attempt: _Attempt, exports: Exports, tried: set[object], reason: str) -> None:
    # The same attempt twice would repeat for ever.
    now = attempt.prefix, frozenset(attempt.whole), frozenset(exports.refused)
    if now in tried:
        raise GraphError(f"the model cannot be captured: {reason}")
    tried.add(now)


def _from_outside(module: nn.Module, reason: str, known: Mapping[str, str]) -> _Attempt:
    # The root itself is exported, or opaque; modules known to be opaque stay so.
    below = {f"{ONLY}.{path}": why for path, why in known.items()}
    return _Attempt(root=_Wrapper(module), prefix=ONLY, whole={ONLY: reason, **below})


def _next(attempt: _Attempt, error: UnsplitError, traced: Traced, exports: Exports) -> _Attempt:
    reason = str(error)
    if error.path in traced.exported:
        exports.refuse(error.path, reason)
        return attempt
    if error.path:
        return replace(attempt, whole={**traced.whole, error.path: reason})
    if attempt.prefix:  # wrapped already
        raise GraphError(reason) from error
    return _from_outside(attempt.root, reason, traced.whole)


def _traced(
    attempt: _Attempt, specs: Mapping[str, InputSpec], *, batch: int, exports: Exports
) -> Traced:
    examples = {
        name: torch.empty(
            batch,
            *spec.shape,
            dtype=torch.float32 if spec.n_values is None else torch.int64,
            device="meta",
        )
        for name, spec in specs.items()
    }
    complete = None
    while complete is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            traced = trace(attempt.root, examples, whole=attempt.whole)
        complete = exports.put_into(traced, attempt.root, batch=batch)
    return complete


def _refuse_dropping_in_evaluation(module: nn.Module, specs: Mapping[str, InputSpec]) -> None:
    with _in_mode(module, training=False):
        _, traced, _ = _captured(module, specs, batch=BATCHES[0], exports=Exports())
    names = _drops(traced)
    if names:
        raise GraphError(
            f"{names[0]} drops elements in evaluation mode too: give it "
            "training=self.training (or dropout_p=0.0 when not self.training)"
        )


def _drops(traced: Traced) -> list[str]:
    names = []
    for node in traced.graph.nodes:
        if node.target is functional.scaled_dot_product_attention:
            drops = node.kwargs.get("dropout_p") or any(node.args[4:5])
        elif node.target in _DROPOUT_FUNCTIONS:
            drops = node.kwargs.get("training", True) and node.kwargs.get("p", 0.5)
        else:
            drops = False
        if drops:
            names.append(str(node.name))
    return names


@final
class _Wrapper(nn.Module):
    # Calls a module, so that the module itself can be traced as one layer.

    def __init__(self, only: nn.Module) -> None:
        super().__init__()
        self.only = only
        self.training = only.training

    @override
    def forward(self, *inputs: torch.Tensor) -> object:
        result: object = self.only(*inputs)
        return result


@contextmanager
def _in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    if module.training != training:
        for part, _ in modes:
            part.training = training
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _check_sizes(inputs: Sequence[InputSpec]) -> None:
    # torch counts elements in 64 bits.
    for spec in inputs:
        if math.prod(spec.shape) > N_ELEMENTS_MAX:
            raise GraphError(
                f"an input of shape {'x'.join(map(str, spec.shape))} has more than "
                f"{N_ELEMENTS_MAX:.0e} elements per sample: use a smaller one"
            )


def _names(module: nn.Module, inputs: Sequence[InputSpec]) -> list[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(module.forward).parameters.values())
    known = [p for p in parameters if p.kind in positional]
    required = [p.name for p in known if p.default is p.empty]
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if keyword_only or len(inputs) < max(1, len(required)):
        raise GraphError(
            f"{type(module).__name__}.forward takes {len(required) + len(keyword_only)} inputs "
            f"({', '.join([*required, *keyword_only])}), but {len(inputs)} shapes are given"
            + (": make all of them positional" if keyword_only else "")
        )
    if len(inputs) > len(known) and not several:
        raise GraphError(
            f"{type(module).__name__}.forward takes {len(known)} inputs "
            f"({', '.join(p.name for p in known)}), but {len(inputs)} shapes are given"
        )
    more = [f"input{index}" for index in range(len(known), len(inputs))]
    return [*(p.name for p in known), *more][: len(inputs)]


def _aliases(module: nn.Module) -> dict[str, str]:
    # For tensors with several names, the first one stands for all.
    first: dict[int, str] = {}
    aliases = {}
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        known = first.setdefault(id(tensor), name)
        if known != name:
            aliases[name] = known
    return aliases
