"""The work of one rank's training steps: accrue gradients, local steps, norm, clipping.

`worker.replica.TrainingObjective` decides when. If a push follows every step, gradients go
into the push buffers while the backward pass of earlier layers still runs.

    square      a rank's sum of squares, in float64
    norm        the root of their sum, added in the order of ranks
    clipped     g * norm_max / (norm + 1e-6) if that is shorter than g (torch's rule)

Because all ranks see the same sum, all skip the same steps and clip by the same factor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

import torch

from distbelief.execution.executor import Put, StepResult
from distbelief.parameter_server.client.buffers import FetchResult, PushDraft, PushResult
from distbelief.roles.role import Cost
from distbelief.worker.batches import BatchIndices, BatchSlice
from distbelief.worker.config import DownpourConfig
from distbelief.worker.group import Install, LocalNorm


@final
class GradientAccumulator:
    """Gradients of several steps, summed until they are pushed.

    Args:
        n_items: Tensors that a rank keeps.
    """

    def __init__(self, n_items: int) -> None:
        # One per item; None without a gradient.
        self.sums: list[torch.Tensor | None] = [None] * n_items
        self.n_gradients = 0
        self.clocks: tuple[int, ...] = ()  # of the shards, when the oldest gradient was computed
        self.stop = 0  # samples up to the end of the newest gradient
        self._owned: set[int] = set()  # sums whose memory is not shared

    def add(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Add the gradients of a step and take their memory. Runs in the compute executor."""
        for item, gradient in gradients.items():
            accrued = self.sums[item]
            if accrued is None:
                self.sums[item] = gradient
            elif item in self._owned:
                accrued.add_(gradient)
            else:
                # The first one may share memory with another gradient, so copy once.
                self.sums[item] = accrued + gradient
                self._owned.add(item)

    def count(self, stop: int, *, clocks: tuple[int, ...]) -> None:
        if not self.n_gradients:
            self.clocks = clocks
        self.n_gradients += 1
        self.stop = stop

    def fetched_clocks(self, clocks: Sequence[int]) -> tuple[int, ...]:
        # A restarted shard counts on from an older clock, so take the smaller one.
        return tuple(map(min, self.clocks, clocks))

    def drop(self) -> None:
        self.sums[:] = [None] * len(self.sums)
        self._owned.clear()
        self.n_gradients = 0


Gradients = dict[int, torch.Tensor]  # by item; two of them may share memory

_EPSILON: Final = 1e-6  # torch.nn.utils.clip_grad_norm_'s


def sum_of_squares(gradients: Gradients) -> float:
    """Return the sum over all elements, in float64; NaN if they are not finite."""
    total = 0.0
    for gradient in gradients.values():
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        total += float(norm) ** 2
    return total if math.isfinite(total) else math.nan


def clip(gradients: Gradients, square: float, *, norm_max: float | None) -> None:
    """Scale gradients in place if the norm over all ranks is beyond the bound."""
    if norm_max is None:
        return
    factor = norm_max / (math.sqrt(square) + _EPSILON)
    if factor < 1.0:
        for item, gradient in gradients.items():
            gradients[item] = gradient * factor


def is_finite(gradients: Mapping[int, torch.Tensor]) -> bool:
    # One pass over the sums; checking each element takes forty times as long.
    sums = [gradient.sum() for gradient in gradients.values()]
    return not sums or bool(torch.stack(sums).sum().isfinite())


def bad_sample(batch_slice: BatchSlice) -> int | None:
    """Return the index within the batch of the first sample with NaN or infinity."""
    for regions in batch_slice.inputs.values():
        for part in regions:
            bad = ~part.isfinite()
            if bool(bad.any()):
                return int(bad.nonzero()[0][0])
    return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The result of a step's work."""

    is_finite: bool  # whether the gradient is finite on all ranks, as far as that was checked
    staged: PushResult | None = None  # the push, if gradients were staged
    blame: str | None = None  # a sentence on a bad sample, if one was found


@final
@dataclass(slots=True, kw_only=True)
class Step:
    """The current step."""

    number: int
    counts: bool  # whether its gradient is needed: the shards do not have it yet
    draft: PushDraft | None  # the push that takes the gradients at once, if there is one
    local_rate: float | None  # of the local step; None: no local step
    batch: BatchIndices
    batch_slice: BatchSlice
    # By item, unless `draft` takes them.
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    staged: PushResult | None = None
    # Running averages after the step, by item.
    after: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def put(self) -> Put:
        return self.gradients.__setitem__ if self.draft is None else self.draft.put


@final
class RankTrainer:
    """Does the work of one rank's steps.

    Args:
        config: When to push, step and clip.
        sizes: Elements of each item.
        trained: Items with a gradient; the others are pushed as they are.
        counts: By item of a running average, the item that counts its steps.
        dtype: Of all items.
        n_ranks: Ranks of the replica.
    """

    def __init__(
        self,
        config: DownpourConfig,
        *,
        sizes: Sequence[int],
        trained: frozenset[int],
        counts: Mapping[int, int],
        dtype: torch.dtype,
        n_ranks: int,
    ) -> None:
        self.values = [torch.zeros(size, dtype=dtype) for size in sizes]  # one flat tensor per item
        self.accrued = GradientAccumulator(len(sizes))  # the gradients since the last push
        self._config = config
        self._trained = trained
        self._counts = counts
        self._reduces_norm = n_ranks > 1
        self._sent: dict[int, torch.Tensor] = {}  # averages as the shards have them
        self._gains: dict[int, torch.Tensor] | None = None  # their local changes, during a fetch

    def drop(self) -> None:
        self.accrued.drop()
        self._sent.clear()
        self._gains = None

    def staged(self, staged: PushResult) -> None:
        self.accrued.drop()
        if staged.finite:
            self._sent.clear()

    def installing(self, work: Install, *, rate: float) -> Install:
        """Wrap the work of an install so that local steps at `rate` are repeated after it."""

        def install() -> FetchResult:
            if self._gains is None:  # after a torn install the values are a mixture
                self._gains = {item: self.values[item] - sent for item, sent in self._sent.items()}
            installed = work()
            if not installed.torn:
                self._put_back(rate)
            return installed

        return install

    def _put_back(self, rate: float) -> None:
        gains, self._gains = self._gains or {}, None
        for item, gain in gains.items():
            self._sent[item].copy_(self.values[item])
            self.values[item].add_(gain)
        for value, accrued in zip(self.values, self.accrued.sums, strict=True):
            if accrued is not None and rate:
                value.add_(accrued, alpha=-rate)

    def close(self, step: Step, step_result: StepResult) -> LocalNorm | Closed:
        """Return the local part of the norm reduction; with one rank, finish the step at once."""
        step.after = self._after(step_result)
        if step.draft is not None:
            for item, value in enumerate(self.values):
                if item not in self._trained:
                    step.draft.put(item, step.after.get(item, value))
            step.staged = step.draft.finish()
            square = 0.0 if step.staged.finite else math.nan
        else:
            square = self._square(step)
        # A rank without parameters has no gradient that would show a bad sample.
        looks = not (math.isfinite(square) and self.values)
        sample = _bad(step) if looks else None
        if not self._reduces_norm:
            return self._settle(step, square, sample)
        n_bytes = 2.0 * sum(gradient.nbytes for gradient in step.gradients.values())
        settle, cost = partial(self._settle, step), Cost(n_bytes=n_bytes)
        return LocalNorm(square=square, settle=settle, cost=cost, sample=sample)

    def _square(self, step: Step) -> float:
        # Without clipping only finiteness matters, and that only if someone uses it.
        clips, gradients = self._config.clip_norm is not None, step.gradients
        if clips:
            return sum_of_squares(gradients)
        looks = self._reduces_norm or self._config.checks_every_gradient
        return 0.0 if not looks or is_finite(gradients) else math.nan

    def _settle(self, step: Step, square: float, sample: int | None) -> Closed:
        if not math.isfinite(square):
            return Closed(is_finite=False, staged=step.staged, blame=_blame(sample))
        # A running average that is not finite comes from a bad sample and is dropped.
        if is_finite(step.after):
            for item, value in step.after.items():
                if item not in self._sent and self._config.keeps_local_steps:
                    self._sent[item] = self.values[item].clone()
                self.values[item].copy_(value)
        if step.staged is None and step.counts:
            clip(step.gradients, square, norm_max=self._config.clip_norm)
            self._accrue(step)
        return Closed(is_finite=True, staged=step.staged)

    def _after(self, step_result: StepResult) -> dict[int, torch.Tensor]:
        after = {item: value.reshape(-1) for item, value in step_result.averages.items()}
        # BatchNorm counts the steps of its averages in a tensor of its own.
        for item, count in self._counts.items():
            if item in step_result.averages:
                after[count] = self.values[count] + 1
        return after

    def _accrue(self, step: Step) -> None:
        if step.local_rate is not None:
            for item, gradient in step.gradients.items():
                self.values[item].add_(gradient, alpha=-step.local_rate)
        self.accrued.add(step.gradients)
        step.gradients.clear()


def _bad(step: Step) -> int | None:
    row = bad_sample(step.batch_slice)
    return None if row is None else int(step.batch.indices[row])


def _blame(sample: int | None) -> str | None:
    if sample is None:
        return None
    return f"[data.train] sample {sample} has NaN or infinite values: fix or remove such samples"
