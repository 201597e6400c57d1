"""Runs the steps of a replica that holds the whole model: read, step, stage a push, install.

In the terms of Algorithm 1.1 of Dean et al. 2012:

    step    g := gradient of the mini-batch
            parameters := parameters - alpha * g      unless a fetch follows
            accrued := accrued + g
    push    buffers := accrued; accrued := 0          the role then sends the buffers
    fetch   parameters := the shards' - alpha * accrued
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import nn

from distbelief.data.dataset import Dataset, read_batch
from distbelief.data.sharding import Indices
from distbelief.errors import DistBeliefError, JobError
from distbelief.parameter_server.client.buffers import FetchResult, PushResult
from distbelief.parameter_server.initial_values import Initial
from distbelief.parameter_server.layout import TensorSpec
from distbelief.task import dry_run
from distbelief.task.initializers import initials_of
from distbelief.task.losses import Loss, Metric


# The tensors of a module keep their memory, so the flat views made here serve every fetch.
# Gradients are fresh after each backward pass: they are handed on without a copy.

# Of a step, per parameter and sample: a multiplication and an addition forward, twice that
# backward. Weight sharing (convolutions) makes it more.
FLOPS_PER_PARAMETER = 6.0


@final
class FlatModel:
    """A module's tensors as flat views, its gradients, and their accrued sum.

    Shared tensors count once, under their first name. Parameters that require no grad, and
    buffers, are "buffers" to the shards: averaged, not updated. Buffers that the module does
    not save (persistent=False) are left out.

    Attributes:
        module: The user's model; this object owns its tensors from now on.
        values: Flat views of all tensors, in the order of `specs()`.
        accrued: Sum of the gradients since `drop_accrued`, in the same order; None where
            there is none. The list object never changes.
        n_parameters: Number of trained elements.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        tensors = _tensors_of(module)
        self._names = sorted(tensors)
        self._tensors = [tensors[name] for name in self._names]
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if tensor.is_complex() or tensor.is_sparse:
                raise JobError(
                    f"[model] tensor {name!r} is {tensor.dtype} and {tensor.layout}: "
                    "only dense real tensors can be trained"
                )
            # A transposed or expanded tensor has no flat view; a fresh one has.
            if not tensor.is_contiguous():
                tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.values = [tensor.detach().view(-1) for tensor in self._tensors]
        self._trained = [
            index for index, tensor in enumerate(self._tensors) if tensor.requires_grad
        ]
        self._buffers = _owners_of_buffers(module)
        self._averages = [
            index
            for index, tensor in enumerate(self._tensors)
            if not isinstance(tensor, nn.Parameter) and tensor.dtype != torch.bool
        ]
        self._sent: dict[int, torch.Tensor] = {}  # averages as the shards have them
        self._gains: dict[int, torch.Tensor] | None = None  # their local changes, during a fetch
        self.accrued: list[torch.Tensor | None] = [None] * len(self._tensors)
        self.n_parameters = sum(self.values[index].numel() for index in self._trained)

    def specs(self) -> list[TensorSpec]:
        """Return name, shape and kind of every tensor, sorted by name."""
        trained = set(self._trained)
        return [
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                kind="parameter" if index in trained else "buffer",
            )
            for index, (name, tensor) in enumerate(zip(self._names, self._tensors, strict=True))
        ]

    def initials(self) -> Mapping[str, Initial]:
        """Return how each tensor is drawn, by the type of its layer.

        Raises:
            JobError: a tensor is neither constant nor of a layer whose rule is known.
        """
        return initials_of(self.module, self._names)

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
        return [_flat_gradient(tensor) for tensor in self._tensors]

    def gradient(self, inputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> float:
        """Compute the gradient of the loss on this batch; return the loss.

        Args:
            inputs: (n_samples, ...).
            targets: (n_samples, ...).
            loss: f(outputs, targets) -> mean over the samples.
        """
        for index in self._trained:
            self._tensors[index].grad = None
        value = loss(self.module(inputs), targets)
        value.backward()
        self._keep_buffers()
        return float(value.detach())

    def clip(self, norm_max: float) -> None:
        """Scale the gradient down to this 2-norm if it is longer."""
        torch.nn.utils.clip_grad_norm_([self._tensors[index] for index in self._trained], norm_max)

    def is_finite(self) -> bool:
        # One pass over the sums; checking each element takes forty times as long.
        sums = [gradient.sum() for gradient in self.gradients if gradient is not None]
        return not sums or bool(torch.stack(sums).sum().isfinite())

    def step(self, rate: float) -> None:
        self._step_by(self.gradients, rate)

    def accrue(self) -> None:
        """Add the gradient to `accrued`; the first one is taken without a copy."""
        for index, gradient in enumerate(self.gradients):
            if gradient is None:
                continue
            accrued = self.accrued[index]
            if accrued is None:
                self.accrued[index] = gradient
            else:
                accrued.add_(gradient)

    def drop_accrued(self) -> None:
        self.accrued[:] = [None] * len(self.accrued)

    def before_fetch(self) -> None:
        if self._gains is None:  # after a torn install the values are a mixture
            self._gains = {index: self.values[index] - sent for index, sent in self._sent.items()}

    def after_fetch(self, rate: float) -> None:
        """Repeat what is not pushed yet: steps of -rate * `accrued`, and changes of averages."""
        gains, self._gains = self._gains or {}, None
        self._sent = {index: self.values[index].clone() for index in self._averages}
        for index, gain in gains.items():
            # A change that is not finite comes from a skipped sample.
            if bool(gain.isfinite().all()):
                self.values[index].add_(gain)
        self._step_by(self.accrued, rate)

    def averages_are_sent(self) -> None:
        for index, sent in self._sent.items():
            sent.copy_(self.values[index])

    def _step_by(self, gradients: Sequence[torch.Tensor | None], rate: float) -> None:
        pairs = [
            (value, gradient)
            for value, gradient in zip(self.values, gradients, strict=True)
            if gradient is not None
        ]
        if pairs and rate:
            values, moves = zip(*pairs, strict=True)
            torch._foreach_add_(list(values), list(moves), alpha=-rate)

    def measure(
        self, inputs: torch.Tensor, targets: torch.Tensor, *, loss: Loss, metric: Metric
    ) -> tuple[float, float]:
        """Return loss and metric of this batch in evaluation mode."""
        self.module.eval()
        with torch.no_grad():
            outputs = self.module(inputs)
            return float(loss(outputs, targets)), float(metric(outputs, targets))

    def _keep_buffers(self) -> None:
        # Forward may bind a buffer to a new tensor: copy the new values into the old one.
        for owner, name, tensor in self._buffers:
            bound = owner._buffers[name]  # noqa: SLF001
            if bound is not tensor and bound is not None:
                tensor.copy_(bound)
                owner._buffers[name] = tensor  # noqa: SLF001


def _tensors_of(module: nn.Module, *, shared: bool = False) -> dict[str, torch.Tensor]:
    saved = module.state_dict(keep_vars=True).keys()
    tensors: dict[str, torch.Tensor] = {}
    tensors.update(module.named_parameters(remove_duplicate=not shared))
    tensors.update(module.named_buffers(remove_duplicate=not shared))
    return {name: tensor for name, tensor in tensors.items() if name in saved}


def _owners_of_buffers(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    return [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]


def _flat_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    gradient = tensor.grad
    if gradient is None:
        return None
    if gradient.is_sparse:  # of an Embedding(sparse=True)
        gradient = gradient.to_dense()
    return gradient.detach().reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples of one step."""

    position: int  # samples that this replica consumed before them
    indices: Indices  # (n_samples,) in the data set
    inputs: torch.Tensor  # (n_samples, ...)
    targets: torch.Tensor  # (n_samples, ...)

    @property
    def n_samples(self) -> int:
        return len(self.indices)

    @property
    def n_bytes(self) -> int:
        return self.inputs.nbytes + self.targets.nbytes


@final
class Attempt:
    """One attempt at a step; a torn fetch cancels it."""

    def __init__(self) -> None:
        self.is_torn = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a step."""

    loss: float  # mean over the batch
    is_finite: bool  # the gradient is finite and has accrued
    blame: str | None = None  # otherwise, a sentence on the bad sample if one was found


@final
class LocalExecutor:
    """Does the work of one replica's steps.

    Args:
        model: The local copy of the parameters.
        dataset: Gives the batches.
        loss: f(outputs, targets) -> mean.
        names: How messages call model, data and loss.
        clip_norm: Bound of each gradient's 2-norm, if any.
        always_check: Check every gradient, not only the sum that is pushed.
        seed: Of the model's own random numbers, one stream per position.
    """

    def __init__(
        self,
        model: FlatModel,
        dataset: Dataset,
        *,
        loss: Loss,
        names: dry_run.Names,
        clip_norm: float | None,
        always_check: bool,
        seed: tuple[int, int],
    ) -> None:
        self.model = model
        self._dataset = dataset
        self._loss = loss
        self._names = names
        self._clip_norm = clip_norm
        self._always_check = always_check
        self._seed = seed

    def read(self, position: int, indices: Indices) -> Batch:
        inputs, targets = read_batch(self._dataset, [int(i) for i in indices])
        return Batch(position=position, indices=indices, inputs=inputs, targets=targets)

    def install(
        self, work: Callable[[], FetchResult], attempt: Attempt, *, rate: float | None
    ) -> FetchResult:
        """Copy fetched parameters into the model; cancel the attempt if the fetch was torn.

        Args:
            work: Copies.
            attempt: At the step that this fetch is for.
            rate: Of the local steps that are not pushed yet and are repeated; None: they are
                overwritten.
        """
        if rate is not None:
            self.model.before_fetch()
        installed = work()
        attempt.is_torn = bool(installed.torn)
        if rate is not None and not attempt.is_torn:
            self.model.after_fetch(rate)
        return installed

    def step(self, batch: Batch, attempt: Attempt, *, local_rate: float | None) -> Outcome | None:
        """Compute the gradient, step locally at `local_rate`, accrue; None if the fetch was torn.

        Raises:
            JobError: the user's model, loss or data fails on this batch.
        """
        if attempt.is_torn:
            return None
        loss = self._gradient(batch)
        is_finite = bool(np.isfinite(loss))
        if is_finite and self._always_check:
            is_finite = self.model.is_finite()
        if is_finite:
            if local_rate is not None:
                self.model.step(local_rate)
            self.model.accrue()
            return Outcome(loss=loss, is_finite=True)
        names = replace(self._names, indices=[int(index) for index in batch.indices])
        blame = dry_run.bad_sample(batch.inputs, batch.targets, names=names)
        return Outcome(loss=loss, is_finite=False, blame=blame)

    def push(self, stage: Callable[[], PushResult]) -> PushResult:
        """Stage the accrued gradients and start a new sum."""
        staged = stage()
        # Only the push buffers hold the sum now: no gradient is pushed twice (DB-8).
        self.model.drop_accrued()
        if staged.finite:
            self.model.averages_are_sent()
        return staged

    def _gradient(self, batch: Batch) -> float:
        torch.default_generator.manual_seed(self._seed_at(batch.position))
        model = self.model
        try:
            loss = model.gradient(batch.inputs, batch.targets, self._loss)
            if self._clip_norm is not None:
                model.clip(self._clip_norm)
        except MemoryError as error:
            raise JobError(
                f"out of memory in a step of {batch.n_samples} samples: use a smaller batch_size"
            ) from error
        except DistBeliefError:
            raise
        except Exception as error:  # model and loss are the user's
            # Raises a clearer JobError if the dry run can find the cause.
            self._explain(batch)
            raise JobError(
                f"[model] {self._names.model} failed on samples "
                f"{batch.indices[0]}, ...: {type(error).__name__}: {error}"
            ) from error
        return loss

    def _explain(self, batch: Batch) -> None:
        dry_run.train(
            self.model.module,
            batch.inputs,
            batch.targets,
            loss=self._loss,
            names=replace(self._names, indices=[int(index) for index in batch.indices]),
        )

    def _seed_at(self, position: int) -> int:
        sequence = np.random.SeedSequence((*self._seed, position))
        return int(sequence.generate_state(1, np.uint64)[0])
