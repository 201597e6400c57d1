"""Steps of several threads on the same parameters, without locks (Niu et al. 2011; Adam 2014).

    step       thread 1       thread 2       thread 3         of one replica
      |        small batch 0  small batch 1  small batch 2    the next for each that is free
      |        x -= rate g    small batch 3  x -= rate g      and reads and writes x at any time
      v        ...            x -= rate g    ...
    exchange                                                  of the whole step, as usual

Each thread has a copy of the module: its parameters are the replica's, in the same memory, its
buffers are its own. Of two updates of one element at the same time, one may be lost; the element
is always one that somebody wrote, since an aligned number is stored at once. Where the driver runs
threads in turn, one takes all small batches in order: plain SGD, to the bit.
"""

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

import torch
from torch import nn

from distbelief.core import torch_optimizers
from distbelief.core.errors import JobError
from distbelief.core.torch_optimizers import Table
from distbelief.protocol.role import Together
from distbelief.task.data import Batch
from distbelief.task.losses import Loss
from distbelief.worker.batches import BatchIndices, BatchSlice
from distbelief.worker.downpour_settings import LockFree
from distbelief.worker.exchange import GradientSum, is_finite
from distbelief.worker.execution.executor import Put, StepResult
from distbelief.worker.factors import LayerFactors, SummedFactors
from distbelief.worker.local_executor import FlatModel, GradientOf


N_COPIES: Final = 3  # of the parameters, that an update moves: it reads g and x, and writes x


def sharing_copy(module: nn.Module, *, model: str) -> nn.Module:
    """Return a copy with parameters in the same memory; JobError if the module has no copy."""
    for parameter_name, one in module.named_parameters():
        if one._backward_hooks or one._post_accumulate_grad_hooks:  # noqa: SLF001 -- no public way
            raise JobError(
                f"[model] {model}: parameter {parameter_name!r} has a hook on its gradient, which "
                "a copy for a thread would not have: change gradients in forward, or by a hook of "
                "the module, or leave [algorithm] lockfree out"
            )
    # `data` has a version of its own: autograd refuses what has changed since the forward pass.
    memo: dict[int, object] = {
        id(one): nn.Parameter(one.data, requires_grad=one.requires_grad)
        for one in module.parameters()
    }
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # of the user's class
        raise JobError(
            f"[model] {model} cannot be copied for each of its threads ({type(error).__name__}: "
            f"{error}): let copy.deepcopy(model) work, or leave [algorithm] lockfree out"
        ) from error


def coalesced(gradient: torch.Tensor) -> torch.Tensor:
    """Return a sparse gradient with each row once, summed in the order in which a dense one is."""
    rows, place = gradient._indices()[0].unique(return_inverse=True)  # noqa: SLF001 -- uncoalesced
    values = gradient._values()  # noqa: SLF001 -- as above
    sums = values.new_zeros(len(rows), *values.shape[1:]).index_add_(0, place, values)
    return torch.sparse_coo_tensor(
        rows[None], sums, gradient.shape, is_coalesced=True, check_invariants=False
    )


def descend(
    values: Mapping[int, torch.Tensor],  # shared, of their own shapes
    gradients: Mapping[int, torch.Tensor],
    *,
    rate: float,
    weight_decay: float = 0.0,
) -> None:
    """Take a step in place: as `torch.optim.SGD`, but a sparse gradient moves its rows only."""
    for item, given in gradients.items():
        value, gradient = values[item], given
        if gradient.is_sparse:
            is_rows = gradient.sparse_dim() == 1 and not weight_decay
            gradient = coalesced(gradient) if is_rows else gradient.to_dense()
        if weight_decay:
            gradient = gradient.add(value, alpha=weight_decay)
        value.add_(gradient, alpha=-rate)


@final
class InnerRate:
    """Rate and weight decay of an inner optimizer that is SGD, as its schedule has them."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._begin()

    def _begin(self) -> None:
        parameters = [nn.Parameter(torch.zeros(1))]
        self._optimizer, self._schedule = torch_optimizers.made(
            self._table, parameters, where="inner"
        )
        self._number = 0

    def at(self, number: int) -> tuple[float, float]:
        """Return both, of the step of this number in the replica's whole training."""
        if number < self._number:
            self._begin()
        if self._schedule is not None:
            torch_optimizers.advance(self._schedule, number - self._number)
        self._number = number
        group = self._optimizer.param_groups[0]
        return float(group["lr"]), float(group["weight_decay"])


@final
class Lane:
    """What one thread has of its own: a module, its buffers, and what it has summed."""

    def __init__(self, index: int, module: nn.Module) -> None:
        self.index, self.model = index, FlatModel(module)
        self.sums = GradientSum(len(self.model.values), shares_memory=False)
        self.n_taken = 0  # small batches of this step
        self._tensors = [*self.model.named_tensors().values()]

    def gradients(self) -> dict[int, torch.Tensor]:
        """Return the gradients of the last small batch, of their own shapes and layouts."""
        found = {item: self._tensors[item].grad for item in sorted(self.model.trained)}
        return {item: one.detach() for item, one in found.items() if one is not None}


def _lanes(model: FlatModel, n: int, *, name: str) -> list[Lane]:
    """Return what so many threads need; JobError if copies of the module cannot share tensors."""
    lanes = [Lane(index, sharing_copy(model.module, model=name)) for index in range(n)]
    items = [item for item, spec in enumerate(model.specs()) if spec.name in model.frozen]
    for item in [*model.trained, *items]:
        places = {one.values[item].data_ptr() for one in [model, *(lane.model for lane in lanes)]}
        if len(places) > 1:
            raise JobError(
                f"[model] copies of {name} do not share {model.specs()[item].name!r}: let "
                "copy.deepcopy copy it as torch does, or leave [algorithm] lockfree out"
            )
    return lanes


@final
@dataclass(slots=True, kw_only=True)
class _Step:
    batch: BatchSlice
    gradient: GradientOf
    rate: float
    weight_decay: float
    left: deque[tuple[int, int, int]]  # small batches: number, first sample, sample after the last
    losses: list[float]  # of each; not finite if it is skipped
    errors: list[Exception] = field(default_factory=list)

    def small(self, start: int, stop: int) -> tuple[Batch, BatchIndices]:
        whole, samples = self.batch.batch, self.batch.samples
        assert whole is not None
        indices = BatchIndices(
            position=samples.position + start,
            indices=samples.indices[start:stop],
            epoch=samples.epoch,
        )
        tensors = {path: tensor[start:stop] for path, tensor in whole.tensors().items()}
        return Batch.of(tensors), indices


@final
class LockFreeSteps:
    """Takes a replica's steps in several threads; see `SmallBatches`."""

    def __init__(
        self,
        model: FlatModel,
        settings: LockFree,
        *,
        batch_size: int,  # of a whole step
        together: Together,  # runs the threads
        name: str,  # of the model, for messages
        inner: Table | None,  # SGD; None: gradients are pushed
    ) -> None:
        self.n_threads = settings.threads
        self._model = model
        self._settings, self._batch_size = settings, batch_size
        self._together = together
        self._inner = None if inner is None else InnerRate(inner)
        self._lanes = _lanes(model, settings.threads, name=name)
        self._buffers = {  # by item, with their kinds
            item: spec.kind
            for item, spec in enumerate(model.specs())
            if spec.kind != "parameter" and spec.name not in model.frozen
        }
        # As in `sharing_copy`, values with versions of their own.
        self._values = {
            item: model.values[item].view(model.shapes[item]).data for item in model.trained
        }
        self._rate: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        self._factors: SummedFactors | None = None

    def factors(self, *, workers: int) -> SummedFactors:
        """Return the factors of dense layers, of all threads, as steps are taken from now on."""
        models = [lane.model for lane in self._lanes]
        self._factors = SummedFactors(
            [LayerFactors(one.module, one.named_tensors(), workers=workers) for one in models]
        )
        return self._factors

    def n_bytes(self, n_samples: int) -> float:
        n_small = len(self._settings.sizes(n_samples, batch_size=self._batch_size))
        return N_COPIES * float(self._model.n_bytes) * n_small / self.n_threads

    def begin(self, *, number: int, rate: Callable[[], float], counts: bool) -> None:
        """The next step has this number in the whole training, and this rate without an inner one.

        Unless it `counts`, it moves nothing.
        """
        inner = self._inner

        def found() -> tuple[float, float]:
            if not counts:
                return 0.0, 0.0
            return (rate(), 0.0) if inner is None else inner.at(number)

        self._rate = found

    def run(self, batch: BatchSlice, put: Put, gradient: GradientOf) -> StepResult:
        n_samples = len(batch.samples.indices)
        sizes = self._settings.sizes(n_samples, batch_size=self._batch_size)
        stops = torch.tensor(sizes).cumsum(0).tolist()
        spans = zip([0, *stops], stops, strict=False)
        rate, decay = self._rate()
        step = _Step(
            batch=batch,
            gradient=gradient,
            rate=rate,
            weight_decay=decay,
            left=deque((i, start, stop) for i, (start, stop) in enumerate(spans)),
            losses=[math.nan] * len(sizes),
        )
        before = self._begin_buffers()
        self._together([partial(self._work, lane, step) for lane in self._lanes])
        if step.errors:
            raise step.errors[0]
        self._end_buffers(before)
        if self._inner is None:
            self._put_sums(put)
        good = [i for i, loss in enumerate(step.losses) if math.isfinite(loss)]
        loss = sum(sizes[i] * step.losses[i] for i in good) if good else math.nan
        if n_skipped := len(sizes) - len(good):  # as if they had the mean of the others
            loss *= sum(sizes) / max(1, sum(sizes[i] for i in good))
        return StepResult(loss=loss, averages={}, outputs=(), n_skipped=n_skipped)

    # --- in a thread ---

    def _work(self, lane: Lane, step: _Step) -> None:
        """Take small batches until none is left: the next one is for the thread that is free."""
        while step.left and not step.errors:
            try:
                number, start, stop = step.left.popleft()
            except IndexError:  # another thread has taken the last one
                return
            try:
                step.losses[number] = self._take(lane, step, *step.small(start, stop))
            except Exception as error:  # noqa: BLE001 -- raised again by the step
                step.errors.append(error)

    def _take(self, lane: Lane, step: _Step, batch: Batch, samples: BatchIndices) -> float:
        """Take one small batch; return its loss, or NaN if its gradient is not finite."""
        model = lane.model
        before = [model.values[item].clone() for item in self._buffers]
        loss = step.gradient(model, batch, samples)
        gradients = lane.gradients()
        is_good = math.isfinite(loss) and is_finite(_dense(gradients))
        if self._factors is not None:
            self._factors.note(lane.index, counts=is_good)
        if not is_good:
            for item, value in zip(self._buffers, before, strict=True):
                model.values[item].copy_(value)
            return math.nan
        lane.n_taken += 1
        if step.rate:
            descend(self._values, gradients, rate=step.rate, weight_decay=step.weight_decay)
        if self._inner is None:
            lane.sums.add({item: one.reshape(-1) for item, one in _whole(gradients).items()})
        return loss

    # --- after and before all threads ---

    def _put_sums(self, put: Put) -> None:
        """Put what the threads have summed, in their order: a race loses none of it."""
        total, *others = (lane.sums for lane in self._lanes)
        for one in others:
            total.add(dict(one.changes()))
            one.drop()
        for item, gradient in total.changes():
            put(item, gradient)
        total.drop()

    def _begin_buffers(self) -> list[torch.Tensor]:
        before = [self._model.values[item].clone() for item in self._buffers]
        for lane in self._lanes:
            lane.n_taken = 0
            for item, value in zip(self._buffers, before, strict=True):
                lane.model.values[item].copy_(value)
        return before

    def _end_buffers(self, before: Sequence[torch.Tensor]) -> None:
        """Take the mean of the threads' buffers, by their small batches; counters add up."""
        lanes = [lane for lane in self._lanes if lane.n_taken]
        n_taken = sum(lane.n_taken for lane in lanes)
        for (item, kind), old in zip(self._buffers.items(), before, strict=True):
            value = self._model.values[item]
            found = [lane.model.values[item] for lane in lanes]
            if kind == "counter":
                value.copy_(old + sum(one - old for one in found))
            elif len(lanes) > 1:
                shares = [lane.n_taken / n_taken for lane in lanes]
                scaled = [one * share for one, share in zip(found, shares, strict=True)]
                value.copy_(torch.stack(scaled).sum(0))
            elif found:
                value.copy_(found[0])


def _dense(gradients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return what gradients have in memory."""
    return {item: one._values() if one.is_sparse else one for item, one in gradients.items()}  # noqa: SLF001 -- not coalesced


def _whole(gradients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {item: one.to_dense() if one.is_sparse else one for item, one in gradients.items()}


# --- before the start ---


def prove(
    build: Callable[[], nn.Module], batches: tuple[Batch, Batch], *, loss: Loss, name: str
) -> None:
    """Raise JobError unless two copies compute what a module alone does, to the bit.

    One computes between the forward pass and the loss of the other, so that state which both share
    is found, such as a list of the module's class.
    """
    module, (first, second) = build(), batches
    model = FlatModel(module)
    one, other = (lane.model for lane in _lanes(model, 2, name=name))
    found: list[_Found] = []

    def interrupted(outputs: object, targets: object) -> torch.Tensor:
        found.append(_Found.of(other, second, loss))
        return loss(outputs, targets)

    wanted = [_Found.of(model, first, loss), _Found.of(FlatModel(build()), second, loss)]
    if wanted[0] != _Found.of(FlatModel(build()), first, loss):
        return  # it differs each time, so nothing can be compared
    found.insert(0, _Found.of(one, first, interrupted))
    if found != wanted:
        raise JobError(
            f"[model] two copies of {name} that share parameters do not compute what one alone "
            "does: let forward use only self and its arguments, or leave [algorithm] lockfree out"
        )


@final
@dataclass(frozen=True)
class _Found:
    loss: float
    gradients: Mapping[int, bytes]

    @classmethod
    def of(cls, model: FlatModel, batch: Batch, loss: Loss) -> "_Found":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            value = model.gradient(batch, loss)
        gradients = {i: one for i, one in enumerate(model.gradients) if one is not None}
        raw = {i: one.contiguous().view(torch.uint8) for i, one in gradients.items()}
        return cls(value, {i: one.numpy().tobytes() for i, one in raw.items()})
