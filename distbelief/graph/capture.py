"""Captures any module as a layer graph, by torch.export.

torch.export runs the forward once on tensors without memory, with the batch size as a symbol, and
records ATen operations; `lowering` turns each into layers. An operation without a rule is computed
whole. A module that torch.export refuses, because it branches on its data for example, becomes an
opaque layer with the reason.

A model is captured in training mode, except for modules in evaluation mode while the model is
not: they are frozen. `evaluation_difference` tells whether evaluation computes something else.
"""

import builtins
import inspect
import logging
import math
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast, final
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.graph import lowering, ops  # noqa: F401 -- registers operators and lowering rules
from distbelief.graph.graph import INPUT, Builder, GraphError, LayerGraph, TensorUse, as_real
from distbelief.graph.lowering.fallback import per_sample
from distbelief.graph.lowering.lower import Lowerer, NeedsFunctionalError
from distbelief.graph.lowering.noise import replace_noise
from distbelief.graph.lowering.operation import module_rule, place_of
from distbelief.graph.lowering.values import Held, NotSplitError, Value
from distbelief.graph.module_calls import (
    AppliedFunction,
    LeafCall,
    OpaqueError,
    bags,
    is_inside,
    is_outside,
    leaf_call,
    leaves,
    own_path,
    path_of,
    shapes_of_recurrent_layers,
)
from distbelief.graph.operator import joined
from distbelief.graph.region import Shape
from distbelief.graph.unsupported import (
    Attributes,
    Change,
    Reading,
    RememberedError,
    attributes_kept,
    has_gradient_hooks,
    lost_change,
    lost_hook,
    no_other_generators,
    opaque_reason,
    refuse_bounded_tables,
    refuse_parameter_hooks,
    refuse_scripts,
    remembered,
)


if TYPE_CHECKING:
    from torch.export import ExportedProgram


# Of one sample of an input: layers are larger, and torch counts elements in 64 bits.
N_ELEMENTS_MAX: Final = 10**12
_N_SAMPLES: Final = 3  # of the example; the result is for any number
_WORD_ONLY: Final = inspect.Parameter.KEYWORD_ONLY


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    shape: Shape  # shape without the batch dimension
    # for integers, the number of values (words, classes); None for floats
    n_values: int | None = None
    is_mask: bool = False  # whether they are True and False

    @property
    def is_integer(self) -> bool:
        return self.n_values is not None


Inputs = Mapping[str, InputSpec]
"""The tensors that a model is called with, by the names that their layers get."""


class ModelCall(Protocol):
    fields: tuple[tuple[str | int, ...], ...]  # where the outputs of the last call stand
    has_loss: bool  # whether the last of them is the loss, a mean over the samples
    joins: bool  # whether the model may compute such a mean itself

    def __call__(self, module: nn.Module, tensors: Sequence[torch.Tensor], /) -> Sequence[object]:
        """Return the outputs of a model for these inputs, then the loss."""
        ...


@final
class _Model(nn.Module):
    # The model under a name, so that it can be a leaf itself.

    def __init__(self, inner: nn.Module, call: ModelCall | None) -> None:
        super().__init__()
        self.inner = inner
        self.call = call
        self.training = inner.training
        self.kept: list[Change] = []  # what an earlier forward has left
        self.leave: Callable[[list[Change]], None] = list[Change]().extend

    @override
    def forward(self, *inputs: torch.Tensor) -> object:
        before = Attributes(self.inner)
        own = [*self.inner.parameters(), *self.inner.buffers()]
        with _Watch(self.inner), (reading := Reading(inputs, own, self.kept)):
            result: object
            result = self.inner(*inputs) if self.call is None else self.call(self.inner, inputs)
        self.leave(reading.left(before.changes()))
        return result


def capture(
    module: nn.Module, inputs: Sequence[InputSpec] | Inputs, *, call: ModelCall | None = None
) -> LayerGraph:
    """Return the layer graph of `module`, on any device, which is not changed or copied.

    `inputs` are the positional inputs of its forward; further parameters keep their defaults. With
    `call` they are what that gets, by name, and the graph's outputs are what it returns. GraphError
    if it takes other inputs, or mixes or loses the samples of a batch.
    """
    refuse_scripts(module)
    refuse_parameter_hooks(module)
    refuse_bounded_tables(module)
    _refuse_plain_averages(module)
    named = _named(module, inputs)
    _check_sizes(named.values())
    with _in_mode(module, training=True):
        model, whole = _Model(module, call), dict[str, str]()
        left: list[Change] = []
        model.leave = left.extend
        graph = _captured(model, named, whole)[0]
        if left:
            model.leave, model.kept = list[Change]().extend, left
            _refuse_memory(model, named, whole, graph)
        return graph


def _refuse_memory(model: _Model, named: Inputs, whole: dict[str, str], graph: LayerGraph) -> None:
    # What the forward of one step keeps must not change the next.
    for change in model.kept:
        change.make()
    try:
        again: LayerGraph | None = _captured(model, named, whole)[0]
    except RememberedError:
        raise
    except GraphError:
        again = None
    if again != graph:
        raise RememberedError(remembered(model.kept[0].name))


def evaluation_difference(
    module: nn.Module, inputs: Sequence[InputSpec] | Inputs, *, call: ModelCall | None = None
) -> str | None:
    """Return where a model computes something else in evaluation mode; None if nowhere.

    Differences that layers know do not count: dropout, and which statistics are used. Arguments
    and errors are those of `capture`.
    """
    whole: dict[str, str] = {}
    named, model = _named(module, inputs), _Model(module, call)
    with _in_mode(module, training=True):
        training, _ = _captured(model, named, whole)
    if "" in whole:
        return None
    with _in_mode(module, training=False):
        model.training = False
        evaluating, nodes = _captured(model, named, whole)
    for layer in evaluating.layers:
        if layer.kind == "dropout" or layer.options.get("dropout") or "mode" in layer.options:
            return (
                f"{layer.name} drops elements in evaluation mode too: give it "
                "training=self.training (or dropout_p=0.0 when not self.training)"
            )
    before, after = _numbers(training), _numbers(evaluating)
    if [before[name] for name in training.outputs] == [after[n] for n in evaluating.outputs]:
        return None
    new = [name for name, number in after.items() if number not in before.values()]
    # Of an operation with several layers the last is known.
    shown = next((name for name in new if name in nodes), evaluating.outputs[-1])
    return f"{shown}{place_of(nodes[shown]) if shown in nodes else ''}"


def _numbers(graph: LayerGraph) -> dict[str, int]:
    # A number for each layer, the same if it computes the same in evaluation: nothing is dropped,
    # and running statistics stand for those of the batch.
    numbers: dict[str, int] = {}
    for layer in graph.layers:
        sources = [numbers[name] for name in layer.inputs]
        if layer.kind == "dropout":
            numbers[layer.name] = sources[0]
            continue
        if "running_var" in layer.tensors:
            del sources[1:]
        left = {"dropout", "n_places", "operations", "mode"}  # these depend on the mode
        options = {word: value for word, value in layer.options.items() if word not in left}
        name = layer.name if layer.kind == INPUT else ""
        form = repr((name, layer.kind, layer.shape, sources, options, dict(layer.tensors)))
        numbers[layer.name] = hash(form)
    return numbers


# --- export ---


_Captured = tuple[LayerGraph, Mapping[str, fx.Node]]  # with the operations of its layers


def _captured(model: _Model, inputs: Inputs, whole: dict[str, str]) -> _Captured:
    for path, part in model.inner.named_modules():
        if has_gradient_hooks(part):
            whole[path] = "it has hooks on its gradients, so it cannot be split"
    while True:  # ends: every round makes one more module opaque
        try:
            program, calls = _exported(model, inputs, whole)
            try:
                return _lowered(model, program, calls, inputs, whole)
            except NeedsFunctionalError:
                with _quietly(), warnings.catch_warnings(action="ignore"):
                    program = program.run_decompositions({})
                return _lowered(model, program, calls, inputs, whole)
        except (OpaqueError, NotSplitError, NeedsFunctionalError) as error:
            path = error.path if isinstance(error, OpaqueError) else ""
            if path in whole:
                raise GraphError(f"the model cannot be captured: {error}") from error
            whole[path] = str(error)


def _exported(
    model: _Model, inputs: Inputs, whole: dict[str, str]
) -> tuple["ExportedProgram", Mapping[int, LeafCall]]:
    """Export a module; return also the calls of its leaves.

    OpaqueError if a module in it cannot be exported. GraphError if even an opaque module could not
    do it.
    """
    from torch.export import Dim, export  # noqa: PLC0415 -- takes a second

    calls: dict[int, LeafCall] = {}
    module = model.inner
    examples = tuple(_without_memory(module, [_example(spec, module) for spec in inputs.values()]))
    dim = Dim("batch", min=2)

    def is_leaf(path: str, part: nn.Module) -> bool:
        return path in whole or (module_rule(part) is not None and opaque_reason(part) is None)

    try:
        with (
            _quietly(),
            _as_export_sees_it(calls, whole),
            leaves(model, calls, is_leaf),
            torch.enable_grad(),  # so that a no_grad in the forward shows
            warnings.catch_warnings(action="ignore"),  # torch warns about its own internals
            torch.random.fork_rng(devices=[]),
            no_other_generators(module),
        ):
            program = export(
                model,
                examples,
                dynamic_shapes={"inputs": tuple({0: dim} for _ in examples)},
                strict=False,
            )
    except (JobError, OpaqueError):
        raise
    except Exception as error:  # a forward may do anything with fake tensors
        path = _innermost(error, module)
        while path and any(path.startswith(f"{other}.") or path == other for other in whole):
            path = path.rpartition(".")[0]
        raise OpaqueError(path, reason_of(error)) from error
    replace_noise(program.graph)
    return program, calls


def _innermost(error: BaseException | None, module: nn.Module) -> str:
    # The path of the innermost module whose forward was running.
    paths = {id(part): path for path, part in module.named_modules()}
    found = ""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            found = paths.get(id(frame.f_locals.get("self")), found)
        error = error.__cause__ or error.__context__
    return found


_DATA: Final = torch.Tensor.data.__get__  # type: ignore[attr-defined] # torch has no types here


_NODE: Final = getattr(torch.Tensor.grad_fn, "__get__")  # noqa: B009 -- as above, by its type
_GRADIENT: Final[Mapping[object, str]] = {
    torch.Tensor.register_hook: "register_hook",
    torch.Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
    _NODE: "grad_fn",
}


class _Watch(TorchFunctionMode):
    # Refuses what torch.export does not see: hooks on gradients, and parameters that no module has,
    # which would be constants.

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._own = {id(parameter): name for name, parameter in module.named_parameters()}

    @override
    def __torch_function__(
        self,
        func: Callable[[object], object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not is_inside():
            if func == _DATA:  # torch.export does not see it
                func = cast("Callable[[object], object]", torch.Tensor.detach)
            if func in _GRADIENT:
                if (name := self._own.get(id(args[0]))) is not None:
                    raise GraphError(lost_hook(name))
                raise _RefusedError(f"it changes gradients by {_GRADIENT[func]} of a tensor")
            for value in pytree.tree_leaves((args, kwargs)):
                if (
                    isinstance(value, nn.Parameter)
                    and not isinstance(value, FakeTensor)
                    and id(value) not in self._own
                ):
                    raise _RefusedError(
                        "it uses parameters outside of its attributes, for example in a list: use "
                        "nn.ParameterList"
                    )
        return func(*args, **(kwargs or {}))


class _RefusedError(Exception):
    """The forward does what torch.export would not see."""


def reason_of(error: Exception) -> str:
    """Return in a few words why torch.export refuses a function, and where."""
    if isinstance(error, _RefusedError):
        return str(error)
    words = f"{type(error).__name__}: {error}"
    lines = str(error).strip().splitlines()
    found = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
    if "data-dependent" in words or "DataDependent" in words:
        found = "it depends on the values of its data (an `if`, a loop, `.item()`)"
    elif "specialized" in words or "Constraints violated" in words:
        found = "it needs the number of samples (as int(x.shape[0]) does, unlike x.shape[0])"
    return found + _line_of(error)


def _line_of(error: BaseException) -> str:
    # The line of the forward, in brackets.
    frames = traceback.extract_tb(error.__traceback__)
    inside = (Path(torch.__file__).parent, Path(__file__).parents[1])
    own = [f for f in frames if not any(Path(f.filename).is_relative_to(each) for each in inside)]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def _example(spec: InputSpec, module: nn.Module) -> torch.Tensor:
    own = _floats_of(module)
    dtype = torch.bool if spec.is_mask else torch.int64
    dtype = dtype if spec.is_integer else own.dtype
    return torch.empty(_N_SAMPLES, *spec.shape, dtype=dtype, device=own.device)


def _floats_of(module: nn.Module) -> torch.Tensor:
    # A tensor of the type that a model's floats have.
    tensors = (*module.parameters(), *module.buffers())
    return next((x for x in tensors if x.is_floating_point()), torch.empty(0, device="cpu"))


def _without_memory(module: nn.Module, examples: list[torch.Tensor]) -> list[torch.Tensor]:
    # Puts tensors without memory, on the CPU, in the place of the module's; those on the meta
    # device would make constants of the forward that have no values.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: PLC0415 -- takes a second

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    known: dict[int, torch.Tensor] = {}
    # Buffers that are not saved with the model are constants of the graph: no shard has them.
    unsaved = {
        id(part._buffers[name])  # noqa: SLF001
        for part in module.modules()
        for name in part._non_persistent_buffers_set  # noqa: SLF001
    }

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            with mode:
                made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            values = getattr(tensor, "values_of_buffer", tensor)
            if id(tensor) in unsaved and not isinstance(values, FakeTensor) and not values.is_meta:
                made.values_of_buffer = values  # type: ignore[attr-defined] # torch allows it
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            known[id(tensor)] = made
        return known[id(tensor)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):  # noqa: SLF001
            tensors.update({n: fake(t) for n, t in tensors.items() if t is not None})  # type: ignore[misc]
    return [fake(example) for example in examples]


@contextmanager
def _quietly() -> Iterator[None]:
    # torch logs and prints what export cannot do; the error reports it in one line.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(before)


@contextmanager
def _as_export_sees_it(calls: dict[int, LeafCall], whole: dict[str, str]) -> Iterator[None]:
    # Refuses what torch.export does not see, and shows it what it would not.
    enter = torch.inference_mode.__enter__
    enter_hooks = saved_tensors_hooks.__enter__
    apply = torch.autograd.Function.__dict__["apply"]  # a classmethod, in Python or C
    run_backward = vars(torch.autograd)["_engine_run_backward"]  # of grad() and backward()

    def entered(mode: torch.inference_mode) -> None:
        if mode.mode and not is_inside():
            raise _RefusedError("it computes under torch.inference_mode")
        enter(mode)

    def hooked(hooks: saved_tensors_hooks) -> None:
        if type(hooks) is saved_tensors_hooks and not is_inside():  # others change no values
            raise _RefusedError("it changes saved tensors by saved_tensors_hooks")
        enter_hooks(hooks)

    def applied(cls: type, /, *args: object, **kwargs: object) -> object:
        given = [*args, *kwargs.values()]
        is_torchs = cls.__module__.startswith("torch._higher_order_ops.")  # torch.cond, say
        if not is_torchs and any(is_outside(value) for value in given):
            reason = f"{cls.__qualname__}, a torch.autograd.Function with its own gradient"
            path = path_of(cls, given)
            if path is None:
                raise _RefusedError(f"it calls {reason}")
            whole[path] = f"it is {reason}"
            function = cast("type[torch.autograd.Function]", cls)
            return leaf_call(AppliedFunction(function), path, calls)(*args, **kwargs)
        return apply.__get__(None, cls)(*args, **kwargs)

    def backwards(*args: object, **kwargs: object) -> object:
        if not is_inside():
            raise _RefusedError("it computes gradients in its forward (torch.autograd.grad)")
        return run_backward(*args, **kwargs)

    def as_told(_mask: object, is_causal: object = None, _size: object = None) -> bool:
        return bool(is_causal)  # torch's encoder looks at the values of its mask

    with (
        patch.object(torch.inference_mode, "__enter__", entered),
        patch.object(saved_tensors_hooks, "__enter__", hooked),
        patch.object(torch.autograd.Function, "apply", classmethod(applied)),
        patch.object(torch.autograd, "_engine_run_backward", backwards),
        patch.object(transformer, "_detect_is_causal_mask", as_told),
        patch.object(builtins, "len", _length),
        patch.object(functional, "embedding_bag", bags),
        shapes_of_recurrent_layers(),
    ):
        yield


_len = len


def _length(given: Sized) -> int:
    # Python's own makes a number of the batch size, and the model would hold for that one only.
    if isinstance(given, torch.Tensor) and given.dim() and is_outside(given):
        return given.shape[0]
    return _len(given)


# --- lowering ---


def _lowered(
    model: _Model,
    program: "ExportedProgram",
    calls: Mapping[int, LeafCall],
    inputs: Inputs,
    whole: Mapping[str, str],
) -> _Captured:
    module, call = model.inner, model.call
    builder = Builder(aliases=_aliases(module))
    joins = call is not None and call.joins
    dtype = _floats_of(module).dtype
    lowerer = Lowerer(builder, calls=calls, whole=whole, joins=joins, dtype=dtype)
    context = lowerer.context
    signature = program.graph_signature
    tensors = _tensors(module)
    own = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    given = iter(inputs.items())
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        known: object
        if node.name in own:
            path = own_path(own[node.name])
            tensor = tensors[path]
            known = getattr(tensor, "values_of_buffer", None)
            if known is None:
                shape = tuple(as_real(tensor).shape)
                use = TensorUse(name=path, shape=shape, trains=tensor.requires_grad)
                known = context.in_parts(use) if tensor.is_complex() else Held(use, tensor.dtype)
            elif isinstance(known, torch.Tensor) and known.is_floating_point():
                # Layers read floats, indices are known to rules.
                with suppress(GraphError):  # too large, but perhaps only a part is read
                    known = context.constant(known, path)
        elif node.name in signature.inputs_to_lifted_tensor_constants:
            known = program.constants[signature.inputs_to_lifted_tensor_constants[node.name]]
        else:
            name, spec = next(given)
            integer, mask = spec.is_integer, spec.is_mask
            context.inputs.append(builder.input(name, spec.shape, is_integer=integer, is_mask=mask))
            known = Value(context.inputs[-1])
        lowerer.known[node] = known
    for path in map(own_path, signature.buffers_to_mutate.values()):
        if not path.endswith(("running_mean", "running_var", "num_batches_tracked")):
            raise GraphError(lost_change(path))
    results = lowerer.run(program.graph, program.graph_module)
    found = pytree.tree_leaves(results[len(signature.buffers_to_mutate) :])
    if call is None:
        return _with_samples(builder.finish(_outputs(found))), lowerer.nodes
    losses = []
    if call.has_loss:
        mean = found.pop()
        if not isinstance(mean, Value):
            raise GraphError("[algorithm] the loss does not depend on the model's outputs")
        losses = [per_sample(context, mean).name]  # each sample has the mean over the batch
    # Of several outputs, those without a row for each sample are left out.
    plain = [isinstance(value, Value) and value.is_plain for value in found]
    kept = [i for i, is_plain in enumerate(plain) if is_plain or len(found) == 1]
    outputs = _outputs([found[i] for i in kept]) if kept or not losses else []
    graph = builder.finish([*outputs, *losses])
    return replace(graph, fields=tuple(call.fields[i] for i in kept)), lowerer.nodes


_INDEPENDENT: Final = (
    "the model's outputs must be tensors with a batch: one of them does not depend on its inputs"
)


def _with_samples(graph: LayerGraph) -> LayerGraph:
    if not joined(graph).isdisjoint(graph.outputs):
        raise GraphError(_INDEPENDENT)
    return graph


def _outputs(results: Sequence[object]) -> list[str]:
    names: list[str] = []
    for value in results:
        if isinstance(value, Value) and value.batch is not None:
            if not value.is_plain:
                raise GraphError(
                    "a model's output must have the batch as its first dimension: use "
                    "batch_first=True, or reshape with the batch in front"
                )
            names.append(value.layer.name)
        elif isinstance(value, torch.Tensor | Held | Value):
            raise GraphError(_INDEPENDENT)
    if not names:
        raise GraphError("the model returns no tensors")
    return names


@contextmanager
def _in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    with attributes_kept(module):
        if module.training != training:
            for part in module.modules():
                part.training = training
        yield


def _refuse_plain_averages(module: nn.Module) -> None:
    for path, part in module.named_modules():
        if isinstance(part, _NormBase) and part.track_running_stats and part.momentum is None:
            raise GraphError(
                f"{path or 'the model'} averages its statistics over all steps (momentum=None), "
                "which is not supported: use a number such as 0.1"
            )


def _check_sizes(inputs: Iterable[InputSpec]) -> None:
    # torch counts elements in 64 bits.
    for spec in inputs:
        if math.prod(spec.shape) > N_ELEMENTS_MAX:
            raise GraphError(
                f"an input of shape {'x'.join(map(str, spec.shape))} has more than "
                f"{N_ELEMENTS_MAX:.0e} elements per sample: use a smaller one"
            )


def _named(module: nn.Module, inputs: Sequence[InputSpec] | Inputs) -> Inputs:
    if isinstance(inputs, Mapping):
        return inputs
    return dict(zip(input_names(module, len(inputs)), inputs, strict=True))


def input_names(module: nn.Module, n_inputs: int) -> list[str]:
    """Return the names of a forward's first parameters; GraphError if it takes another number."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(module.forward).parameters.values())
    known = [p for p in parameters if p.kind in positional]
    needed = [p for p in parameters if p.default is p.empty and p.kind in {*positional, _WORD_ONLY}]
    most = math.inf if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(known)
    word_only = any(p.kind is _WORD_ONLY for p in needed)
    if word_only or not max(1, len(needed)) <= n_inputs <= most:
        shown = known if n_inputs > most else needed
        raise GraphError(
            f"{type(module).__name__}.forward takes {len(shown)} inputs "
            f"({', '.join(p.name for p in shown)}), but {n_inputs} shapes are given"
            + (": make all of them positional" if word_only else "")
        )
    more = [f"input{index}" for index in range(len(known), n_inputs)]
    return [*(p.name for p in known), *more][:n_inputs]


def _aliases(module: nn.Module) -> dict[str, str]:
    # For tensors with several names, the first one stands for all.
    first: dict[int, str] = {}
    return {
        name: first[id(tensor)]
        for name, tensor in _tensors(module).items()
        if first.setdefault(id(tensor), name) != name
    }


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
