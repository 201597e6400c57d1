"""Steps on a model that one process holds as a whole: for training and for evaluation.

`FlatModel` is a module as flat tensors; `LocalExecutor` computes gradients with it, or loss and
metric.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, final

import torch
from torch import nn

from distbelief.core.errors import DistBeliefError, JobError
from distbelief.graph.graph import as_real
from distbelief.parameter_server.client.pushes import PushDraft
from distbelief.parameter_server.layout import ElementType, TensorSpec, kind_of
from distbelief.protocol.role import Action, Compute, Cost, Seconds
from distbelief.task import dry_run
from distbelief.task.data import Batch, Dataset, Readers, n_samples_of
from distbelief.task.losses import Loss, Measures, base_of
from distbelief.worker.batches import (
    BatchIndices,
    BatchReader,
    BatchSlice,
    Draws,
    WholeBatches,
    step_seed,
)
from distbelief.worker.exchange import bind_again, bindings_of
from distbelief.worker.execution.executor import Put, StepResult
from distbelief.worker.steps import STEP, Close, StepOutcome


# The tensors of a module keep their memory, so the flat views made here serve every fetch.
# Gradients are fresh after each backward pass: they are handed on without a copy.

_LATE: Final = (
    ", which is not exchanged: make in __init__ what trains, let forward change buffers only, "
    "and train in stages by jobs that begin with each other's model (initial)"
)
# Of a step, per parameter and sample: a multiplication and an addition forward, twice that
# backward. Weight sharing (convolutions) makes it more.
FLOPS_PER_PARAMETER = 6.0


@final
class FlatModel:
    """A module's tensors as flat views, its gradients, and their accrued sum.

    Shared tensors count once, under their first name. Parameters that require no grad are fetched
    once and never pushed. Buffers that the module does not save (persistent=False) are left out.
    Complex numbers are pairs of real ones: (..., 2).

    Attributes:
        module: The user's model; this object owns its tensors from now on.
        values: All tensors, flat, in the order of `specs()`: views of those of the module, or on
            another device, copies in the host's memory, from which each step begins.
        trained: Items with a gradient.
        frozen: Names of parameters without one.
        shapes: Of all tensors.
        n_parameters: Number of trained elements.
    """

    def __init__(self, module: nn.Module, *, device: str = "cpu") -> None:
        self.module = module
        # None: the module's tensors are in the host's memory, where they are exchanged.
        self._device = None if device == "cpu" else torch.device(device)
        tensors = _tensors_of(module if self._device is None else module.to(self._device))
        self._names = sorted(tensors)
        self._tensors = [tensors[name] for name in self._names]
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if tensor.is_complex() and tensor.requires_grad:
                raise JobError(
                    f"[model] parameter {name!r} is {tensor.dtype}, which is not trained: make it "
                    "of real numbers, and join their parts by torch.view_as_complex"
                )
            if tensor.layout != torch.strided:
                raise JobError(
                    f"[model] tensor {name!r} is {tensor.layout}, which shards cannot keep: "
                    "register it by register_buffer with persistent=False"
                )
            # A transposed, expanded or conjugate tensor has no flat view; a fresh one has.
            if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._views = [as_real(tensor.detach()).view(-1) for tensor in self._tensors]
        self.values = self._views
        if self._device is not None:
            self.values = [_in_memory(view) for view in self._views]
            self._wait()
        self._trained = [
            index for index, tensor in enumerate(self._tensors) if tensor.requires_grad
        ]
        self._bindings = bindings_of(module)
        views = {id(one): view for one, view in zip(self._tensors, self._views, strict=True)}
        self._parameters = [(n, one, views.get(id(one))) for n, one in module.named_parameters()]
        self.trained = frozenset(self._trained)
        self.frozen = frozen_of(module)
        self._buffers = {*self._names} - {name for name, _ in module.named_parameters()}
        self.shapes = [as_real(tensor).shape for tensor in self._tensors]
        self.n_parameters = sum(self.values[index].numel() for index in self._trained)

    def specs(self) -> list[TensorSpec]:
        """Return name, shape and kind of every tensor, sorted by name."""
        return [
            TensorSpec(name=name, shape=tuple(shape), kind=kind_of(tensor))
            for name, tensor, shape in zip(self._names, self._tensors, self.shapes, strict=True)
        ]

    @property
    def element_type(self) -> ElementType:
        """That of the shards: float64 if a trained tensor is."""
        is_double = any(self._tensors[index].dtype == torch.float64 for index in self._trained)
        return "float64" if is_double else "float32"

    def aliases(self) -> Mapping[str, str]:
        """Return the other names of shared tensors: name -> the name used here."""
        names = {id(tensor): name for name, tensor in self.named_tensors().items()}
        return {
            name: names[id(tensor)]
            for name, tensor in _tensors_of(self.module, shared=True).items()
            if names[id(tensor)] != name
        }

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        return dict(zip(self._names, self._tensors, strict=True))

    @property
    def n_bytes(self) -> int:
        return sum(value.nbytes for value in self.values)

    def flops(self, n_samples: int) -> float:
        """Return roughly how many operations a step on so many samples takes."""
        return FLOPS_PER_PARAMETER * self.n_parameters * n_samples

    @property
    def gradients(self) -> list[torch.Tensor | None]:
        """Flat gradients of the last batch; None for buffers and unused parameters."""
        found = [_flat_gradient(tensor) for tensor in self._tensors]
        if self._device is None:
            return found
        copies = [None if gradient is None else _in_memory(gradient) for gradient in found]
        self._wait()
        return copies

    def here(self, batch: Batch) -> Batch:
        """Return the batch on the module's device, which now computes with `values`."""
        if self._device is None:
            return batch
        for view, value in zip(self._views, self.values, strict=True):
            view.copy_(value, non_blocking=True)
        return batch.to(self._device)

    def _wait(self) -> None:
        # Copies into pinned memory are done when the device is.
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def gradient(self, batch: Batch, loss: Loss, *, keeps_all: bool = False) -> float:
        """Compute the gradient of the loss on this batch; return the loss.

        On another device, the batch is there already (`here`). JobError if forward has changed what
        is not exchanged: parameters, if it is to keep all; or frozen ones, and which there are.
        """
        for index in self._trained:
            self._tensors[index].grad = None
        before = [one._version for _, one, _ in self._parameters]  # noqa: SLF001 -- torch's own
        value = loss(batch.run(self.module), batch.targets)
        value.backward()
        if self._bindings:
            bind_again(self._bindings)
        self._check_kept(before, keeps_all=keeps_all)
        if self._device is not None:  # buffers may have moved
            for name, view, own in zip(self._names, self._views, self.values, strict=True):
                if name in self._buffers:
                    own.copy_(view)
        return float(value.detach())

    def _check_kept(self, before: Sequence[int], *, keeps_all: bool) -> None:
        # What the first forward does is known before the start; this is of later ones.
        here = {id(one) for one in self.module.parameters()}
        for (name, one, view), version in zip(self._parameters, before, strict=True):
            is_frozen = name in self.frozen
            has_moved = view is not None and one.data_ptr() != view.data_ptr()
            what = ""
            if id(one) not in here:
                what = "replaces"
            elif is_frozen and one.requires_grad:
                what = "begins to train"
            elif (keeps_all or is_frozen) and (has_moved or one._version != version):  # noqa: SLF001
                what = "changes"
            if what:
                raise JobError(f"[model] a later step {what} parameter {name!r} itself{_LATE}")
            if has_moved and view is not None:  # by assigning to `data`
                view.copy_(one.detach().reshape(-1))
                one.data = view.view(one.shape)
        if len(here) > len(self._parameters):
            raise JobError(f"[model] a later step makes a parameter itself{_LATE}")

    @contextmanager
    def passing_on(self, draft: PushDraft | None) -> Iterator[None]:
        """Put each gradient of a backward pass into a draft as soon as it is accumulated (PO-1).

        The draft is void if one has changed later: in a second pass, or by a hook of the user's.
        """
        if draft is None or self._device is not None:  # there they are copied at once, at the end
            yield
            return

        def pass_on(index: int, tensor: torch.Tensor) -> None:
            flat = _flat_gradient(tensor)
            if flat is None or draft.is_void:
                return
            if index in draft:
                draft.is_void = True
                return
            draft.put(index, flat)

        hooks = [
            self._tensors[index].register_post_accumulate_grad_hook(partial(pass_on, index))
            for index in self._trained
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        # By its numbers: torch counts no change by `grad.data`, which hooks of old code use.
        for index, gradient in enumerate(self.gradients):
            if index in draft and not draft.is_void:
                draft.is_void = gradient is None or not draft.has(index, gradient)

    def clip(self, norm_max: float) -> None:
        torch.nn.utils.clip_grad_norm_([self._tensors[index] for index in self._trained], norm_max)


def _tensors_of(module: nn.Module, *, shared: bool = False) -> dict[str, torch.Tensor]:
    saved = module.state_dict(keep_vars=True).keys()
    tensors: dict[str, torch.Tensor] = {}
    tensors.update(module.named_parameters(remove_duplicate=not shared))
    tensors.update(module.named_buffers(remove_duplicate=not shared))
    return {name: tensor for name, tensor in tensors.items() if name in saved}


def frozen_of(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that do not train."""
    return frozenset(name for name, one in module.named_parameters() if not one.requires_grad)


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the host's memory, which may not be complete yet."""
    # Pinned memory is copied without a detour, and torch keeps what is free of it.
    room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return room.copy_(tensor, non_blocking=True)


def _flat_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    gradient = tensor.grad
    if gradient is None:
        return None
    if gradient.is_sparse:  # of an Embedding(sparse=True)
        gradient = gradient.to_dense()
    return gradient.detach().reshape(-1)


class SmallBatches(Protocol):
    """Takes steps of small batches, after each of which the parameters change."""

    n_threads: int

    def begin(self, *, number: int, rate: Callable[[], float], counts: bool) -> None:
        """The next step has this number in the whole training, and this rate of its own.

        Unless it `counts`, it moves nothing.
        """
        ...

    def run(self, batch: BatchSlice, put: Put, gradient: "GradientOf") -> StepResult:
        """Take a step; `put` gets the gradients that a push has of it."""
        ...

    def n_bytes(self, n_samples: int) -> float:
        """Return how many bytes its updates move, of each thread."""
        ...


GradientOf = Callable[[FlatModel, Batch, BatchIndices], float]
"""Computes a model's gradient on samples, and returns the loss."""


@final
class LocalExecutor:
    """Runs the steps of a whole model: gradients, or with `measures` loss and metrics.

    Each step is one piece of work; see `worker.steps.StepRunner` for the methods of its last part.

    Attributes:
        batches: Reads what its steps need.
        is_open: Whether a step has begun.
        measures: Loss and metrics, if it evaluates.
        small: Takes steps of small batches; None: each is computed as a whole.
    """

    awaited: int | None = None

    def __init__(  # noqa: PLR0913 -- one call describes what a replica computes
        self,
        model: FlatModel,
        dataset: Dataset,
        *,
        loss: Loss,
        names: dry_run.Names,  # how messages call model, data and loss
        measures: Measures | None = None,
        seed: tuple[int, int] = (0, 0),  # of the job, and of this replica's steps
        clip_norm: float | None = None,
        sums: bool = False,  # take the gradient of the loss's sum over the samples, not of its mean
        small: SmallBatches | None = None,
        readers: Readers | None = None,  # of the data set
    ) -> None:
        self.model = model
        self.is_open = False
        self.generation = 0
        self.step = 0
        table = "data.train" if measures is None else "data.test"
        self._reader = BatchReader(dataset, seed=seed[0], table=table, readers=readers)
        self.batches = WholeBatches(self._reader)
        self._draws = Draws()  # of the model
        # Another loss with a name is the mean of its parts.
        self._leaves_out = sums and base_of(names.loss) in dry_run.LEAVE_OUT
        self._loss = summed(loss, checks=":" in names.loss) if sums else loss
        self.measures = measures
        self._sums = sums
        self.small = small
        self._names = names
        self._clip_norm = clip_norm
        self._seed = seed

    def flops(self, n_samples: int) -> float:
        flops = self.model.flops(n_samples)
        return flops if self.measures is None else flops / 3.0  # forward only

    def run(self, batch: BatchSlice, put: Put, early: PushDraft | None = None) -> StepResult:
        """Compute a batch's gradient, or evaluate it; JobError if the user's code or data fails."""
        if self.measures is not None:
            scores = self._evaluate(self.measures, batch)
            return StepResult(loss=None, averages={}, outputs=(), scores=scores)
        assert batch.batch is not None
        if self.small is not None:
            return self.small.run(batch, put, self._gradient)
        with self.model.passing_on(early):
            loss = self._gradient(self.model, batch.batch, batch.samples)
        for item, gradient in enumerate(self.model.gradients):
            if gradient is not None:
                put(item, gradient)
        loss = loss if self._sums else len(batch.samples.indices) * loss
        return StepResult(loss=loss, averages={}, outputs=())

    def _gradient(self, model: FlatModel, batch: Batch, samples: BatchIndices) -> float:
        indices: list[int] = samples.indices.tolist()
        if self._leaves_out:
            dry_run.check_counted(batch.targets, indices=indices, table=self._names.data)
        batch = model.here(batch)
        try:
            loss = self._draws.run(
                lambda: model.gradient(batch, self._loss, keeps_all=self._names.kept == "all"),
                seed=lambda: step_seed(self._seed, samples.position),
            )
            if self._clip_norm is not None:
                model.clip(self._clip_norm)
        except MemoryError as error:
            raise JobError(
                f"out of memory in a step of {len(indices)} samples: use a smaller batch_size"
            ) from error
        except DistBeliefError:
            raise
        except Exception as error:  # model and loss are the user's
            names = replace(self._names, indices=indices)
            # Raises a clearer JobError if the dry run can find the cause.
            dry_run.train(model.module, batch, loss=self._loss, names=names)
            raise JobError(
                f"[model] {names.model} failed on samples {indices[0]}, ...: "
                f"{type(error).__name__}: {error}"
            ) from error
        return loss

    def _evaluate(self, measures: Measures, batch: BatchSlice) -> Sequence[float]:
        indices = [int(index) for index in batch.samples.indices]
        given = self.model.here(batch.batch or self._reader.read(batch.samples))
        names = replace(self._names, indices=indices)
        module = self.model.module
        explain = partial(
            dry_run.evaluate, module, given, loss=self._loss, metrics=measures.metrics, names=names
        )
        module.eval()
        try:
            with torch.no_grad():
                outputs = given.run(module)
                if _has_strange_labels(outputs, given.targets):
                    explain()  # loss or metric may fail, and name no sample
                return measures.of(outputs, given.targets)
        except Exception:  # all of it is user code: a dry run finds the cause
            explain()
            raise

    # --- the steps of a replica

    def begin(self, generation: int) -> None:
        self.generation, self.step, self.is_open = generation, 0, False

    def place(self, now: Seconds) -> list[Action]:
        del now
        return []

    def open(
        self,
        batch_slice: BatchSlice,
        *,
        put: Put,
        close: Close,
        n_bytes: float,  # moved beside the computation
        early: PushDraft | None = None,  # takes gradients during the backward pass, too
    ) -> list[Compute]:
        """Begin a step, of which `close` gets the result, as work; return the work."""
        self.is_open = True
        work = partial(self._run, self.generation, batch_slice, put, close, early)
        n_samples, n_threads = len(batch_slice.samples.indices), 1
        if self.small is not None:
            n_threads, n_bytes = self.small.n_threads, n_bytes + self.small.n_bytes(n_samples)
        cost = Cost(flops=self.flops(n_samples), n_bytes=n_bytes, threads=n_threads)
        notes = None if early is None else early.notes
        return [Compute(name=STEP, work=work, cost=cost, notes=notes)]

    def cancel(self) -> None:
        self.is_open = False

    def chain(self) -> list[Compute]:
        return []

    def _run(
        self,
        generation: int,
        batch_slice: BatchSlice,
        put: Put,
        close: Close,
        early: PushDraft | None,
    ) -> StepOutcome:
        found = self.run(batch_slice, put, early)
        return StepOutcome(generation=generation, sends=(), found=found, closed=close(found))

    def ran(self, result: StepOutcome, now: Seconds) -> list[Action]:
        del now
        if result.generation == self.generation:
            self.is_open = False
            self.step += 1
        return []


def summed(loss: Loss, *, checks: bool = False) -> Loss:
    """Return the loss times the number of samples: a sum, where users give a mean.

    If it `checks`, a loss of tensors that is no mean over samples raises JobError.
    """

    def of_part(outputs: torch.Tensor, targets: torch.Tensor, part: dry_run.PartOf) -> float:
        return float(loss(outputs[part], targets[part]))

    # The last mini-batch may be smaller: so sums are added, and the shards divide once.
    def total(outputs: object, targets: object) -> torch.Tensor:
        n_samples = n_samples_of(targets)
        if checks and isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor):
            one = partial(of_part, outputs.detach(), targets)
            dry_run.check_parts(one, n_samples, loss=getattr(loss, "__name__", "of your own"))
        return loss(outputs, targets) * n_samples

    return total


def _has_strange_labels(outputs: object, targets: object) -> bool:
    if not (isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
        return False
    if targets.is_floating_point() or targets.dim() >= outputs.dim():
        return False
    return bool(targets.max() >= outputs.shape[1]) or bool(targets.min() < 0)
