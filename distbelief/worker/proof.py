"""Compares a plan with one process: its ranks in this process, and the plain module of the user.

    values -> module: outputs, loss, gradients, buffers --+-- equal but for rounding?
           -> ranks of the plan, on the same batch -------+
           an update, and again on a smaller batch

Rules that turn operations into layers may be wrong in ways that nobody has thought of; a comparison
on the job's own data finds them all. Two steps show what a forward keeps from one to the next, the
smaller batch what depends on the number of samples. `distbelief partition --verify` and the
preflight of jobs with split replicas (`job.launch.preflight`) share it.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple, final

import msgspec
import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.graph.graph import INPUT, Layer, LayerGraph, as_real
from distbelief.graph.lowering.operation import by_name
from distbelief.graph.operator import Step, operator_of
from distbelief.graph.ops.attention import Attention, scores_shape
from distbelief.graph.ops.call import default_dtype
from distbelief.graph.ops.dropout import Dropout, mask
from distbelief.graph.region import Region, Shape
from distbelief.plans.compiler import Compiled
from distbelief.plans.plan import Plan
from distbelief.task import task as tk
from distbelief.task.data import Batch, n_samples_of, tensors_of
from distbelief.task.dry_run import Names, check_mean
from distbelief.task.forward import Sample
from distbelief.task.losses import Loss, is_named
from distbelief.worker.batches import step_seed
from distbelief.worker.build import Split
from distbelief.worker.computation import SEED, output_name, outputs_of
from distbelief.worker.in_process import LocalGroup, StepOutput


_DRAW: Final = torch.ops.aten.bernoulli_.float
_UNIFORM: Final = (torch.ops.aten.rand.default, torch.ops.aten.rand_like.default)
_NOISE: Final = (*_UNIFORM, torch.ops.aten.randn.default, torch.ops.aten.randn_like.default)
_USUAL: Final = 0.5  # default probability


@final
class SharedDropoutMasks(TorchDispatchMode):
    """Draws in one process the dropout masks that ranks draw, for one forward pass.

    Ranks compute masks by a hash of each index. torch draws every mask by `bernoulli_`, in
    the order of the graph, and some models draw u and compute floor(u + kept); all other random
    numbers are rejected.
    """

    def __init__(self, graph: LayerGraph, *, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch has no types here
        self._step = Step(training=True, seed=seed)
        self._left = [layer for layer in graph.layers if 0 < _probability(layer) < 1]

    @override
    def __torch_dispatch__(
        self,
        func: object,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert isinstance(func, OpOverload), func
        # Attention may drop weights, but does not without a probability.
        idle = "attention" in str(func) and not by_name(func, list(args), kwargs or {})["dropout_p"]
        if idle or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if func is _DRAW and not self._left:
            raise _refusal("dropout in a part that is computed whole, or whose result is not used")
        if (func is not _DRAW and func not in _UNIFORM) or not self._left:
            raise _refusal(f"torch's {func}")
        layer = self._left.pop(0)
        left = 1 - _probability(layer)
        drawn = func(*args, **(kwargs or {})) if func in _UNIFORM else args[0]
        assert isinstance(drawn, torch.Tensor), func
        probability = args[1] if func is _DRAW and len(args) > 1 else _USUAL
        kept = self._mask(layer, drawn)
        if kept.numel() != drawn.numel() or (func is _DRAW and probability != left):
            raise _refusal(repr(layer.name))  # the mask of another layer
        # Steps may come before samples, as inside of torch's recurrent layers.
        at = layer.integer("batch") if "batch" in layer.options else 0
        drawn.copy_(kept.movedim(0, at).reshape(drawn.shape) != 0)
        return drawn if func is _DRAW else drawn * (1 - left / 2)

    def _mask(self, layer: Layer, like: torch.Tensor) -> torch.Tensor:
        shape = _fates(layer)
        # The samples may share a dimension with words, say.
        like = like.new_empty(like.numel() // max(1, math.prod(shape)))
        return mask(
            layer.name,
            shape,
            Region.of(*shape),
            probability=_probability(layer),
            like=like,
            step=self._step,
        )

    def check(self) -> None:
        """Check, after the pass, that all masks were drawn; raise JobError if not."""
        if self._left:
            raise _refusal(repr(self._left[0].name))


@final
class NothingAtRandom(TorchDispatchMode):
    """Fills with constants what is drawn at random, so that dropout keeps everything."""

    def __init__(self, graph: LayerGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch has no types here
        # floor(u + kept) depends on u.
        self._drops = any(0 < _probability(layer) < 1 for layer in graph.layers)

    @override
    def __torch_dispatch__(
        self,
        func: object,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert isinstance(func, OpOverload), func
        if torch.Tag.nondeterministic_seeded not in func.tags or "attention" in str(func):
            return func(*args, **(kwargs or {}))
        result = args[0] if func.overloadpacket.__name__.endswith("_") else None
        if func in _NOISE and not (func in _UNIFORM and self._drops):
            result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor):
            raise _refusal(f"torch's {func}")
        kept = args[1] if func is _DRAW and len(args) > 1 else _USUAL
        assert isinstance(kept, float | int), kept
        return result.fill_(kept)


def without_dropout(graph: LayerGraph) -> LayerGraph:
    """Return the graph for `NothingAtRandom`."""
    nothing = {Dropout.name: {"probability": 0.0}, Attention.name: {"dropout": 0.0}}
    layers = [
        msgspec.structs.replace(layer, options={**layer.options, **nothing.get(layer.kind, {})})
        for layer in graph.layers
    ]
    return replace(graph, layers=tuple(layers))


@final
class IncomparableError(JobError):
    """One process cannot compute the same as the ranks: nothing is known about them."""


def _refusal(culprit: str) -> IncomparableError:
    return IncomparableError(
        f"a plan with {culprit} cannot be compared with one process: random numbers differ between "
        "processes; use torch.nn.Dropout, or a model without"
    )


def _probability(layer: Layer) -> float:
    # 0 if the layer drops nothing.
    word = {Dropout.name: "probability", Attention.name: "dropout"}.get(layer.kind)
    return layer.number(word) if word else 0.0


def _fates(layer: Layer) -> Shape:
    # The shape of what is dropped independently, without the batch.
    if layer.kind == Attention.name:
        return scores_shape(layer)
    return layer.shape[: len(layer.shape) - layer.integer("n_shared")]


# --- result ---

ROUNDING: Final = 3.0  # a plan agrees if its error is at most this many times that of one process
SMALLEST: Final = 1e-6  # relative error that always counts as rounding
LARGE: Final = 1e-3  # an error in float32 that says nothing, though one process has it, too
SMALLEST_DOUBLE: Final = 1e-9  # the same in float64


@final
class Agreement(msgspec.Struct, frozen=True, omit_defaults=True):
    """Errors of one quantity: distances from float64, relative to its largest number."""

    plan: float
    one_process: float
    double: float | None = None  # that of the plan in float64, run if float32 is not enough

    @property
    def agrees(self) -> bool:
        if self.double is not None:
            return self.double <= SMALLEST_DOUBLE
        return self.plan <= max(ROUNDING * self.one_process, SMALLEST)


# Of the largest number of its kind: errors are relative to at least this. A gradient that is a sum
# of larger numbers (zero for a bias before softmax) has their rounding.
SHARE: Final = 0.1

Tensors = Mapping[str, torch.Tensor]


@final
class Results(NamedTuple):
    """What a step comes to, by name."""

    outputs: Tensors  # and "loss"
    gradients: Tensors
    buffers: Tensors = MappingProxyType({})  # after the step


def compared(found: Results, single: Results, exact: Results) -> dict[str, Agreement]:
    """Return the errors of a plan's results and of one process; of gradients the worst last."""
    errors: dict[str, Agreement] = {}
    for ours, others, right in zip(found, single, exact, strict=True):
        names = [name for name in right if name in ours]
        # A number that is only rounding (the gradient of a bias before normalisation) is relative
        # to the others.
        least = SHARE * max([_largest(right[name]) for name in names], default=0.0)
        scales = {name: max(_largest(right[name]), least) or 1.0 for name in names}
        group = {
            name: Agreement(
                _distance(ours[name], right[name]) / scale,
                _distance(others[name], right[name]) / scale,
            )
            for name, scale in scales.items()
        }
        if right is exact.gradients:
            names.sort(key=lambda name: group[name].plan)
        errors |= {name: group[name] for name in names}
    return errors


def _distance(tensor: torch.Tensor, exact: torch.Tensor) -> float:
    if tensor.shape != exact.shape:
        return math.inf
    one, two = tensor.double(), exact.double()
    alike = (one == two) | (one.isnan() & two.isnan())  # infinities, too
    distance = _largest(torch.where(alike, 0.0, one - two))
    return math.inf if math.isnan(distance) else distance


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.double().nan_to_num(0, 0, 0).abs().max()) if tensor.numel() else 0.0


# --- one process ---

_COUNT: Final = "num_batches_tracked"  # no layer computes it: `executor.with_counts`


@final
class Doubled(TorchDispatchMode):
    """Makes float64 of float32 where a forward names it, as by `.float()`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch has no types here

    @override
    def __torch_dispatch__(
        self,
        func: object,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert callable(func)
        words = dict(kwargs or {})
        if words.get("dtype") is torch.float32:
            words["dtype"] = torch.float64
        return func(*args, **words)


def reference(
    module: nn.Module, batch: Batch, loss: Loss, *, graph: LayerGraph, seed: int | None
) -> Results:
    """Return a step of one process, with the dropout masks of the ranks; without any if None."""
    module.zero_grad()
    masks = SharedDropoutMasks(graph, seed=seed or 0)
    with ExitStack() as stack:
        if any(p.dtype == torch.float64 for p in module.parameters()):
            stack.enter_context(Doubled())
        stack.enter_context(default_dtype(module.parameters()))
        stack.enter_context(NothingAtRandom(graph) if seed is None else masks)
        outputs = tensors_of(returned := batch.run(module))
        value = loss(returned, batch.targets)
        value.backward()
    if seed is not None:
        masks.check()
    found = {output_name(path): outputs[path].detach() for path in graph.fields}
    saved = module.state_dict().keys()
    return Results(
        found | {"loss": value.detach()},
        {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None},
        {
            name: as_real(buffer).clone()
            for name, buffer in module.named_buffers()
            if name in saved and not name.endswith(_COUNT)
        },
    )


def in_precision(batch: Batch, dtype: torch.dtype) -> Batch:
    tensors = batch.tensors().items()
    return Batch.of({p: x.to(dtype) if x.is_floating_point() else x for p, x in tensors})


# --- two steps ---

ROUNDED: Final = 3e-5  # a difference in float32 that needs no further look
ROUNDED_DOUBLE: Final = 1e-7  # the same in float64, where a model may have constants in float32
STEP_SIZE: Final = 0.01  # how far a tensor goes between the steps, as root mean square
FLOPS_MAX: Final = 1e10  # of a step
N_SAMPLES_MAX: Final = 512  # of a step


@final
@dataclass(frozen=True, kw_only=True)
class Proof:
    """That a plan computes what one process does."""

    task: tk.TaskSpec
    plan: Plan
    graph: LayerGraph
    sample: Sample
    dtype: torch.dtype  # in which ranks compute
    is_still: bool = False  # compares without random numbers

    @cached_property
    def _compiled(self) -> Compiled:
        graph = without_dropout(self.graph) if self.is_still else self.graph
        return Split(plan=self.plan, graph=graph, modules={}).compiled()

    def _group(self, dtype: torch.dtype, outputs: Sequence[str]) -> LocalGroup:
        # Modules are made as ranks make them: what they keep from step to step begins anew.
        loss = tk.loss_module(self.graph, self.sample, self.task.loss)
        modules = tk.modules_of(self.graph, tk.build_on_meta(self.task.model), loss)
        return LocalGroup(
            compiled=self._compiled,
            dtype=dtype,
            micro_batches=self.plan.micro_batches,
            modules=modules,
            loss=self.graph.outputs[-1],
            outputs=frozenset(outputs),
        )

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """How many samples each step has: those of the job, or what is quick enough."""
        works = [operator_of(layer).work(layer, layer.region) for layer in self.graph.computed]
        flops = sum(work.forward + work.backward for work in works)
        most = min(int(FLOPS_MAX / max(flops, 1.0)), N_SAMPLES_MAX)
        n = min(self.plan.batch, max(most, 2 * self.plan.micro_batches, 4))
        return n, n - n // 4

    def check(self, batches: Sequence[Batch]) -> str:
        """Compare, and return how; raise JobError if the plan computes something else.

        IncomparableError if nothing is known.
        """
        if not is_named(self.task.loss):
            names = Names(model=self.task.model.factory, loss=self.task.loss, data="data.train")
            module, loss = tk.build_model(self.task.model), tk.build_loss(self.task)
            check_mean(module, batches[0], loss=loss, names=names)
        try:
            self.compare(batches)
        except IncomparableError:
            replace(self, is_still=True).compare(batches)
            return ", but for random numbers"
        return ""

    def compare(self, batches: Sequence[Batch]) -> None:
        """Raise JobError as `check` does."""
        step = self._first_bad(batches, self.dtype, ROUNDED)
        if step is not None and self.dtype != torch.float64:
            try:
                # At kinks, as of ReLU, rounding moves gradients as much as a fault may.
                step = self._first_bad(batches, torch.float64, ROUNDED_DOUBLE)
            except (JobError, RuntimeError):  # an operation has no float64
                step = self._first_bad(batches, self.dtype, LARGE)
        if step is not None:
            raise JobError(
                f"{self._subject} compute something else than one process: "
                f"{self._what(batches, step)}{_WAYS_OUT}"
            )

    @property
    def _subject(self) -> str:
        return f"[model] {self.task.model.factory}: split replicas would"

    def _first_bad(
        self, batches: Sequence[Batch], dtype: torch.dtype, tolerance: float
    ) -> int | None:
        for index, step in enumerate(self._steps(batches, dtype)):
            if any(error > tolerance for error in step.errors.values()):
                return index
        return None

    def _steps(
        self,
        batches: Sequence[Batch],
        dtype: torch.dtype,
        *,
        outputs: Sequence[str] = (),  # of layers, in addition
        trace: "_Trace | None" = None,
    ) -> Iterator["_StepPair"]:
        graph, chance = self.graph, NothingAtRandom(self.graph) if self.is_still else nullcontext()
        group = self._group(dtype, (*outputs_of(graph, has_loss=True), *outputs))
        module = tk.build_model(self.task.model).train()
        module = module.double() if dtype == torch.float64 else module.float()
        loss, position = tk.build_loss(self.task), 0
        for batch in (in_precision(each, dtype) for each in batches):
            seed = step_seed(SEED, position)
            position += n_samples_of(batch.inputs)
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            before = {name: as_real(one.detach()).clone() for name, one in tensors.items()}
            with trace or nullcontext():
                given = None if self.is_still else seed
                single = self._plain(module, batch, loss, seed=given, dtype=dtype)
            inputs = _inputs_of(graph, batch, dtype)
            values = {name: tensor.to(dtype) for name, tensor in before.items()}
            try:
                with chance:
                    found = group.step(inputs, values, seed=seed)
            except JobError as error:
                raise JobError(f"{self._subject} fail in a step: {error}{_WAYS_OUT}") from error
            yield _StepPair(_results(graph, found, before, single), single, found.outputs)
            _update(module)

    def _plain(
        self, module: nn.Module, batch: Batch, loss: Loss, *, seed: int | None, dtype: torch.dtype
    ) -> Results:
        try:
            return reference(module, batch, loss, graph=self.graph, seed=seed)
        except JobError:
            raise
        except Exception as error:  # of the user's model or loss
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            name = str(dtype).removeprefix("torch.")
            raise IncomparableError(f"one process cannot take a step in {name}: {why}") from error

    def _what(self, batches: Sequence[Batch], index: int) -> str:
        """Say what differs first in a step that is wrong."""
        trace = _Trace()
        layers = [layer for layer in self.graph.computed if layer.kind != "running_average"]
        names = [layer.name for layer in layers]
        steps = self._steps(batches, self.dtype, outputs=names, trace=trace)
        for _ in range(index):
            next(steps)
            trace.values.clear()
        step, when = next(steps), " in the second step" * (index > 0)
        wrong = [name for name, error in step.errors.items() if error > ROUNDED]
        worst = max(step.errors, key=lambda name: step.errors[name])
        first = next((name for name in step.single.outputs if name in wrong), None)
        if first is not None:
            right = {n for n in names if trace.has(step.layers[n])}
            for layer in reversed(layers):
                if layer.name in right:
                    right.update(layer.inputs)
            found = next((layer for layer in layers if layer.name not in right), None)
            kind = "" if found is None else found.options.get("operation") or found.kind
            where = f"layer {found.name!r} ({kind}) is the first that" if found else f"{first!r}"
            return f"{where} differs{when}, by {_share(step.errors[first])} in {first!r}"
        trained = [use.name for layer in layers for use in layer.tensors.values()]
        last = [name for name in trained if name in step.single.gradients and name in wrong]
        if last:
            by = _share(step.errors[last[-1]])
            return f"outputs agree, and the gradient of {last[-1]!r} differs{when}, by {by}"
        what = "the buffer" if worst in step.single.buffers else "the gradient of"
        return f"{what} {worst!r} differs{when}, by {_share(step.errors[worst])}"


_WAYS_OUT: Final = (
    ". Use one process per replica (partitions = 1), or keep that part whole: a module with a full "
    "backward hook is computed by one rank"
)


@final
class _StepPair(NamedTuple):
    found: Results
    single: Results
    layers: Tensors  # outputs of the layers wanted

    @property
    def errors(self) -> dict[str, float]:
        found = compared(self.found, self.single, self.single)
        return {name: each.plan for name, each in found.items()}


@final
class _Trace(TorchDispatchMode):
    """Keeps what the operations of one process return, to find layers among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch has no types here
        self.values: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # by size, sorted

    @override
    def __torch_dispatch__(
        self,
        func: object,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert callable(func)
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.values[leaf.numel()].append(_sorted(leaf))
        return result

    def has(self, value: torch.Tensor) -> bool:
        """Return whether an operation returned these numbers, in any order."""
        wanted = _sorted(value)
        near = ROUNDED * _largest(wanted)
        return any(_distance(wanted, each) <= near for each in self.values[value.numel()])


def _sorted(value: torch.Tensor) -> torch.Tensor:
    return value.detach().double().flatten().sort().values


def _share(error: float) -> str:
    return (
        "NaN or infinity"
        if math.isinf(error)
        else f"{100 * error:{'.0f' if error > 1 else '.2g'}} %"
    )


def _inputs_of(graph: LayerGraph, batch: Batch, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    given = [layer for layer in graph.layers if layer.kind == INPUT]
    return {
        layer.name: value.to(torch.int64 if layer.is_integer else dtype)
        for layer, value in zip(given, batch.tensors().values(), strict=False)
    }


def _results(graph: LayerGraph, found: StepOutput, before: Tensors, single: Results) -> Results:
    # What the plan does not compute is zero, or stays.
    names = dict(zip(map(output_name, graph.fields), graph.outputs, strict=False))
    outputs = {name: found.outputs[layer] for name, layer in names.items()}
    assert found.loss is not None
    return Results(
        outputs | {"loss": torch.tensor(found.loss, dtype=torch.float64)},
        {n: found.gradients.get(n, torch.zeros_like(x)) for n, x in single.gradients.items()},
        {name: found.averages.get(name, before[name]) for name in single.buffers},
    )


@torch.no_grad()
def _update(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            norm = parameter.grad.square().mean().sqrt()
            parameter.sub_(STEP_SIZE * parameter.grad / norm.clamp(min=1e-30))
