"""From an `nn.Module` to a layer graph, without any of its numbers.

The module is traced (`tracing`) on tensors without memory, so that models larger than
this machine can be captured too. Each operation is translated into layers by the table
of its kind (`translation`). Where tracing gives up, or a function has no translation,
torch.export is asked (`exports`). What has none then is kept whole, with both reasons.

The batch is told from other dimensions by its size, a prime that no model uses: every
operation must keep it as the first dimension of its result, for a replica computes all
samples of a batch together, and regions know nothing of it. A second capture with
another prime tells whether the batch's size, or chance, has got into the graph.

A model is captured as it trains: an `if self.training` goes the way of training, unless
the module is in evaluation mode while the model is not, which freezes it. Whether it
does something else in evaluation is a question of its own (`evaluation_difference`).
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
from distbelief.graph.lowering.lower import Translator, UnsplitError, live_nodes
from distbelief.graph.region import Shape
from distbelief.graph.tracing import ONLY, Traced, UntracedRootError, is_leaf, trace
from distbelief.graph.unsupported import (
    attributes_kept,
    is_altered,
    refuse_bounded_tables,
    refuse_parameter_hooks,
)


# Whether a model computes in evaluation mode what it does in training.
#
# A layer graph is captured as the model trains. Its kinds know what dropout and
# statistics do in evaluation; a forward that asks `self.training` itself, and returns
# probabilities rather than scores, say, does something that no layer knows. So the
# operations of both modes are compared: dropout apart, they have to be the same.

_DROPOUT_MODULES: Final = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
)

_DROPOUT_PLACE: Final = 4
"""Of dropout_p among the arguments of scaled_dot_product_attention."""


@final
@dataclass(frozen=True, slots=True)
class _Described:
    """An operation, the same in every graph."""

    words: str
    constant: torch.Tensor | None


def first_difference(training: Traced, evaluating: Traced, *, root: nn.Module) -> str | None:
    """Return where training does something else than evaluation, if anywhere.

    Args:
        training: What is done in training.
        evaluating: In evaluation mode.
        root: The module that was traced.
    """
    one, other = (_described(t.graph, root) for t in (training, evaluating))
    for (node, here), (late, there) in zip(one, other, strict=False):
        if not _same(here, there):
            shown = late if node.op == "output" else node
            return f"{shown.name}{shown.meta.get('place', '')}"
    return None  # both end with what is returned


def _same(one: _Described, other: _Described) -> bool:
    if one.constant is None or other.constant is None:
        return one == other
    alike = one.constant.shape == other.constant.shape
    return one.words == other.words and alike and one.constant.equal(other.constant)


def _described(graph: fx.Graph, root: nn.Module) -> list[tuple[fx.Node, _Described]]:
    """Return the operations without their names; dropout is left out."""
    numbers: dict[fx.Node, int] = {}
    found: list[tuple[fx.Node, _Described]] = []
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
            args = args[:_DROPOUT_PLACE] + args[_DROPOUT_PLACE + 1 :]
        arguments = map_arg((args, kwargs), lambda n: f"%{numbers[n]}")
        target = getattr(node.target, "__qualname__", node.target)
        words = f"{node.op} {target} {arguments}"
        numbers[node] = len(found)
        found.append((node, _Described(words, node.meta.get("constant"))))
    return found


def _is_dropout(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "call_module":
        return isinstance(root.get_submodule(str(node.target)), _DropoutNd)
    return node.target in _DROPOUT_MODULES


assert ops.KINDS  # importing these registers
assert lowering.__all__

BATCHES: Final = (1009, 1013)
N_ELEMENTS_MAX: Final = 10**12
"""Of a sample of an input: layers are larger, and torch counts in 64 bits."""

_DROPOUTS: Final = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One input of a model.

    Attributes:
        shape: Without the batch dimension.
        n_values: For whole numbers, how many values there are (words, classes); None
            for floating point.
    """

    shape: Shape
    n_values: int | None = None


def capture(module: nn.Module, inputs: Sequence[InputSpec]) -> LayerGraph:
    """Return the layer graph of `module`.

    Args:
        module: On any device; nothing of it is changed or copied.
        inputs: What its forward takes, in order; it takes defaults for the rest.

    Raises:
        GraphError: it cannot be traced, takes other inputs, or loses the batch.
    """
    _check_sizes(inputs)
    refuse_parameter_hooks(module)
    refuse_bounded_tables(module)
    names = _names(module, inputs)
    specs = dict(zip(names, inputs, strict=True))
    exports = Exports()
    with attributes_kept(module), _in_mode(module, training=True):
        tries = [_captured(module, specs, batch=batch, exports=exports)[:2] for batch in BATCHES]
    if any(_drops(traced) for _, traced in tries):
        _refuse_dropping_in_evaluation(module, specs)
    first, second = (graph for graph, _ in tries)
    for layer, other in zip(first.layers, second.layers, strict=False):
        if layer != other:
            raise GraphError(
                f"layer {layer.name!r} is another one for another batch: the forward "
                "computes with the batch's size, or with random numbers of its own: "
                "divide by the batch in the loss, and use torch.nn.Dropout for chance"
            )
    return first


def evaluation_difference(module: nn.Module, inputs: Sequence[InputSpec]) -> str | None:
    """Return where a model does something else in evaluation mode, if anywhere.

    What layers know of it does not count: that nothing is dropped, and which statistics
    are used.

    Args:
        module: As for `capture`, by which it can be captured.
        inputs: Likewise.

    Raises:
        GraphError: it cannot be captured.
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
        return "what cannot be captured"
    return first_difference(training, evaluating, root=attempt.root)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One way to look at a model.

    Attributes:
        root: What is traced.
        prefix: The path of the model in it.
        whole: Modules that are not looked into, and why.
    """

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
        if is_leaf(module) or is_altered(module):  # what is around it is traced
            attempt = _Attempt(root=_Only(module), prefix=ONLY)
    reason = ""
    tried: set[object] = set()
    while True:  # ends: with every round one more module is kept whole, or refused
        _note(attempt, exports, tried, reason)
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
        translator = Translator(
            attempt.root, builder, batch=batch, traced=traced, prefix=attempt.prefix
        )
        try:
            return builder.finish(translator.outputs()), traced, attempt
        except UnsplitError as error:
            reason = str(error)
            attempt = _next(attempt, error, traced, exports)


def _note(attempt: _Attempt, exports: Exports, tried: set[object], reason: str) -> None:
    """Note what is tried.

    Raises:
        GraphError: it was tried before, and would be for ever.
    """
    now = attempt.prefix, frozenset(attempt.whole), frozenset(exports.refused)
    if now in tried:
        raise GraphError(f"the model cannot be captured: {reason}")
    tried.add(now)


def _from_outside(module: nn.Module, reason: str, known: Mapping[str, str]) -> _Attempt:
    """Return the attempt at a model that is to be exported; `known` stay whole."""
    below = {f"{ONLY}.{path}": why for path, why in known.items()}
    return _Attempt(root=_Only(module), prefix=ONLY, whole={ONLY: reason, **below})


def _next(attempt: _Attempt, error: UnsplitError, traced: Traced, exports: Exports) -> _Attempt:
    """Return the attempt after one that met what cannot be split.

    Raises:
        GraphError: there is none.
    """
    reason = str(error)
    if error.path in traced.exported:
        exports.refuse(error.path, reason)
        return attempt
    if error.path:
        return replace(attempt, whole={**traced.whole, error.path: reason})
    if attempt.prefix:  # from outside already
        raise GraphError(reason) from error
    return _from_outside(attempt.root, reason, traced.whole)


def _traced(
    attempt: _Attempt, specs: Mapping[str, InputSpec], *, batch: int, exports: Exports
) -> Traced:
    """Trace it, and put in what is exported.

    Raises:
        UntracedRootError: the model's own forward cannot be traced.
        GraphError: a layer cannot be run on what it is given.
    """
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
    """Check that functions that drop in training do not in evaluation mode.

    Raises:
        GraphError: they do; the dropout of a layer graph never does.
    """
    with _in_mode(module, training=False):
        _, traced, _ = _captured(module, specs, batch=BATCHES[0], exports=Exports())
    words = _drops(traced)
    if words:
        raise GraphError(
            f"{words[0]} drops in evaluation mode too: give it training=self.training "
            "(or dropout_p=0.0 when not self.training)"
        )


def _drops(traced: Traced) -> list[str]:
    """Return the functions that drop something, as they are called."""
    words = []
    for node in traced.graph.nodes:
        if node.target is functional.scaled_dot_product_attention:
            drops = node.kwargs.get("dropout_p") or any(node.args[4:5])
        elif node.target in _DROPOUTS:
            drops = node.kwargs.get("training", True) and node.kwargs.get("p", 0.5)
        else:
            drops = False
        if drops:
            words.append(str(node.name))
    return words


@final
class _Only(nn.Module):
    """Calls a module, so that it can be traced as one layer."""

    def __init__(self, only: nn.Module) -> None:
        super().__init__()
        self.only = only
        self.training = only.training

    @override
    def forward(self, *inputs: torch.Tensor) -> object:
        """Return what the module returns."""
        result: object = self.only(*inputs)
        return result


@contextmanager
def _in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model that is in the other mode into this one for a while."""
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
    """Check that torch can count what a batch of each input takes."""
    for spec in inputs:
        if math.prod(spec.shape) > N_ELEMENTS_MAX:
            raise GraphError(
                f"an input of shape {'x'.join(map(str, spec.shape))} has more than "
                f"{N_ELEMENTS_MAX:.0e} numbers a sample: use a smaller one"
            )


def _names(module: nn.Module, inputs: Sequence[InputSpec]) -> list[str]:
    """Return what the forward calls its inputs."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(module.forward).parameters.values())
    known = [p for p in parameters if p.kind in positional]
    wanted = [p.name for p in known if p.default is p.empty]
    hidden = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if hidden or len(inputs) < max(1, len(wanted)):
        raise GraphError(
            f"{type(module).__name__}.forward takes {len(wanted) + len(hidden)} inputs "
            f"({', '.join([*wanted, *hidden])}), but {len(inputs)} shapes are given"
            + (": let it take all by position" if hidden else "")
        )
    if len(inputs) > len(known) and not several:
        raise GraphError(
            f"{type(module).__name__}.forward takes {len(known)} inputs "
            f"({', '.join(p.name for p in known)}), but {len(inputs)} shapes are given"
        )
    more = [f"input{index}" for index in range(len(known), len(inputs))]
    return [*(p.name for p in known), *more][: len(inputs)]


def _aliases(module: nn.Module) -> dict[str, str]:
    """Return, for tensors with several names, which name stands for each."""
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
