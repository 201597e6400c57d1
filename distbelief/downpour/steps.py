"""What one step of a replica does in its lanes: read a batch, compute its gradient.

The role (`replica`) decides when; this is the work itself, which may take long and
touches the model. One step, in the words of Algorithm 1.1 of Dean et al. 2012:

    step    g := gradient of the mini-batch
            parameters := parameters - alpha * g      unless a fetch follows
            accrued := accrued + g
    push    slots := accrued; accrued := 0            the role then sends the slots
    fetch   parameters := the shards' - alpha * accrued
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch

from distbelief.data.dataset import Dataset, read_batch
from distbelief.data.subset import Indices
from distbelief.errors import DistBeliefError, JobError
from distbelief.parameter_server.client.client import Installed, Staged
from distbelief.runtime.task import trial
from distbelief.runtime.task.local_model import LocalModel
from distbelief.runtime.task.losses import Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples of one step.

    Attributes:
        position: Samples that this replica consumed before them.
        indices: (n_samples,) in the data set.
        inputs: (n_samples, ...).
        targets: (n_samples, ...).
    """

    position: int
    indices: Indices
    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def n_samples(self) -> int:
        """How many they are."""
        return len(self.indices)

    @property
    def n_bytes(self) -> int:
        """Bytes of inputs and targets."""
        return self.inputs.nbytes + self.targets.nbytes


@final
class Attempt:
    """One attempt at a step; its gradient is not computed if its fetch was torn."""

    def __init__(self) -> None:
        self.is_torn = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a step.

    Attributes:
        loss: Mean over the batch.
        is_finite: The gradient had neither NaN nor infinity, and has accrued.
        blame: If not: which sample is to blame, if one is.
    """

    loss: float
    is_finite: bool
    blame: str | None = None


@final
class Trainer:
    """The work of one replica's steps.

    Args:
        model: The local copy of the parameters.
        dataset: Where batches come from.
        loss: f(outputs, targets) -> mean.
        names: How messages name model, data and loss.
        clip_norm: Bound of each gradient's 2-norm, if any.
        always_check: Look at every gradient, not only at the sum that is pushed.
        seed: Of the model's own randomness, one stream for each position.
    """

    def __init__(
        self,
        model: LocalModel,
        dataset: Dataset,
        *,
        loss: Loss,
        names: trial.Names,
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
        """Return the batch of these indices (in the data lane)."""
        inputs, targets = read_batch(self._dataset, [int(i) for i in indices])
        return Batch(position=position, indices=indices, inputs=inputs, targets=targets)

    def install(
        self, work: Callable[[], Installed], attempt: Attempt, *, rate: float | None
    ) -> Installed:
        """Copy what was fetched into the model; tell the attempt if it was torn.

        Args:
            work: Copies.
            attempt: At the step that this fetch is for.
            rate: Of the local steps that are not pushed yet, which are taken again;
                None: they are overwritten.
        """
        if rate is not None:
            self.model.before_fetch()
        installed = work()
        attempt.is_torn = bool(installed.torn)
        if rate is not None and not attempt.is_torn:
            self.model.after_fetch(rate)
        return installed

    def step(self, batch: Batch, attempt: Attempt, *, local_rate: float | None) -> Outcome | None:
        """Compute, step locally at `local_rate`, accrue; None if the fetch was torn.

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
        blame = trial.bad_sample(batch.inputs, batch.targets, names=names)
        return Outcome(loss=loss, is_finite=False, blame=blame)

    def push(self, stage: Callable[[], Staged]) -> Staged:
        """Stage what has accrued, and begin anew.

        The slots now hold the sum, and nothing else does: no gradient is sent twice,
        and none that accrues from now on is sent with it (DB-8).
        """
        staged = stage()
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
            self._explain(batch)
            raise JobError(
                f"[model] {self._names.model} failed on samples "
                f"{batch.indices[0]}, ...: {type(error).__name__}: {error}"
            ) from error
        return loss

    def _explain(self, batch: Batch) -> None:
        """Raise a JobError that names what is wrong with this batch, if one can."""
        trial.train(
            self.model.module,
            batch.inputs,
            batch.targets,
            loss=self._loss,
            names=replace(self._names, indices=[int(index) for index in batch.indices]),
        )

    def _seed_at(self, position: int) -> int:
        sequence = np.random.SeedSequence((*self._seed, position))
        return int(sequence.generate_state(1, np.uint64)[0])
