"""The work of training steps: sum gradients, take local steps, reduce the norm, clip.

`worker.training.TrainingObjective` decides when. Where gradients come during the backward pass
and a push follows every step, they go into the push buffers while earlier layers still run.

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
from distbelief.worker.batches import BatchSlice
from distbelief.worker.objective import Install, LocalNorm
from distbelief.worker.policy import Async


@final
class GradientSum:
    """Gradients of several steps, summed until they are pushed.

    Args:
        n_items: Tensors that a rank keeps.
        shares_memory: Whether two gradients of a step may share memory.
    """

    def __init__(self, n_items: int, *, shares_memory: bool = True) -> None:
        # One per item; None without a gradient.
        self.sums: list[torch.Tensor | None] = [None] * n_items
        self.n_gradients = 0
        self.clocks: tuple[int, ...] = ()  # of the shards, when the oldest gradient was computed
        self.stop = 0  # samples up to the end of the newest gradient
        self._shares_memory = shares_memory
        self._owned: set[int] = set()  # sums whose memory is not shared

    def add(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Add the gradients of a step and take their memory. Runs in the compute executor."""
        for item, gradient in gradients.items():
            total = self.sums[item]
            if total is None:
                self.sums[item] = gradient
            elif item in self._owned or not self._shares_memory:
                total.add_(gradient)
            else:
                # The first one may share memory with another gradient, so copy once.
                self.sums[item] = total + gradient
                self._owned.add(item)

    def count(self, stop: int, *, clocks: tuple[int, ...]) -> None:
        if not self.n_gradients:
            self.clocks = clocks
        self.n_gradients += 1
        self.stop = stop

    def fetched_clocks(self, clocks: Sequence[int]) -> tuple[int, ...]:
        # A restarted shard counts on from an older clock, so take the smaller one.
        return tuple(map(min, self.clocks, clocks))

    @property
    def is_finite(self) -> bool:
        return is_finite(dict(enumerate(each for each in self.sums if each is not None)))

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


def clip(gradients: Gradients, square: float, *, norm_max: float) -> None:
    """Replace gradients by shorter ones if the norm over all ranks is beyond the bound."""
    factor = norm_max / (math.sqrt(square) + _EPSILON)
    if factor < 1.0:
        for item, gradient in gradients.items():
            gradients[item] = gradient * factor


def is_finite(gradients: Mapping[int, torch.Tensor]) -> bool:
    # One pass over the sums; checking each element takes forty times as long.
    sums = [gradient.sum() for gradient in gradients.values()]
    return not sums or bool(torch.stack(sums).sum().isfinite())


def bad_sample(batch_slice: BatchSlice) -> int | None:
    """Return the index in the data set of the first sample with NaN or infinity."""
    parts = [part for regions in batch_slice.inputs.values() for part in regions]
    targets = batch_slice.targets
    for part in parts if targets is None else [*parts, targets]:
        bad = ~part.isfinite()
        if bool(bad.any()):
            return int(batch_slice.samples.indices[int(bad.nonzero()[0][0])])
    return None


def blame_of(sample: int | None) -> str | None:
    if sample is None:
        return None
    return f"[data.train] sample {sample} has NaN or infinite values: fix or remove such samples"


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
    batch_slice: BatchSlice
    gradients: Gradients = field(default_factory=dict)  # unless `draft` takes them
    staged: PushResult | None = None
    after: dict[int, torch.Tensor] = field(default_factory=dict)  # running averages after the step

    @property
    def put(self) -> Put:
        return self.gradients.__setitem__ if self.draft is None else self.draft.put


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """The tensors that a replica, or one rank of it, keeps."""

    values: Sequence[torch.Tensor]  # flat
    trained: frozenset[int] = frozenset()  # with a gradient; the others are pushed as they are
    counts: Mapping[int, int] = field(default_factory=dict)  # running average -> its step counter
    averages: Sequence[int] = ()  # changed in place by a step
    n_bytes: float = field(init=False)  # asked for several times a step

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_bytes", float(sum(value.nbytes for value in self.values)))


@final
class Trainer:
    """Does the work of training steps.

    Args:
        items: What is trained.
        policy: When to push and step.
        clip_norm: Bound of each gradient's norm, if it is clipped here.
        n_ranks: Ranks of the replica.
        is_whole: Gradients come at the end of a step, and share no memory.
    """

    def __init__(
        self, items: Items, policy: Async, *, clip_norm: float | None, n_ranks: int, is_whole: bool
    ) -> None:
        self.items = items
        self.total = GradientSum(len(items.values), shares_memory=not is_whole)
        self.drafts = not (is_whole or policy.sums_gradients or clip_norm is not None)
        self._values = items.values
        self._policy = policy
        self._clip_norm = clip_norm
        self._reduces_norm = n_ranks > 1
        self._sent: dict[int, torch.Tensor] = {}  # averages as the shards have them
        self._gains: dict[int, torch.Tensor] | None = None  # their local changes, during a fetch

    def drop(self) -> None:
        self.total.drop()
        self._sent.clear()
        self._gains = None

    def staged(self, staged: PushResult) -> None:
        # Only the push buffers hold the sum now: no gradient is pushed twice (DB-8).
        self.total.drop()
        if staged.finite:
            self._sent = {item: self._values[item].clone() for item in self._sent_again}

    @property
    def _sent_again(self) -> Sequence[int]:
        return self.items.averages if self._sent else ()

    def installing(self, work: Install, *, rate: float) -> Install:
        """Wrap the work of an install so that what is not pushed yet is repeated after it."""

        def install() -> FetchResult:
            if self._gains is None:  # after a torn install the values are a mixture
                self._gains = {item: self._values[item] - sent for item, sent in self._sent.items()}
            installed = work()
            if not installed.torn:
                self._repeat(rate)
            return installed

        return install

    def _repeat(self, rate: float) -> None:
        gains, self._gains = self._gains or {}, None
        for item in {*gains, *self.items.averages}:
            self._sent[item] = self._values[item].clone()
        for item, gain in gains.items():
            # A change that is not finite comes from a skipped sample.
            if bool(gain.isfinite().all()):
                self._values[item].add_(gain)
        self._step({i: total for i, total in enumerate(self.total.sums) if total is not None}, rate)

    def _step(self, gradients: Mapping[int, torch.Tensor], rate: float) -> None:
        if gradients and rate:
            values = [self._values[item] for item in gradients]
            torch._foreach_add_(values, list(gradients.values()), alpha=-rate)

    def close(self, step: Step, step_result: StepResult) -> LocalNorm | Closed:
        """Return the local part of the norm reduction; with one rank, finish the step at once."""
        step.after = self._after(step_result)
        if step.draft is not None:
            for item, value in enumerate(self._values):
                if item not in self.items.trained:
                    step.draft.put(item, step.after.get(item, value))
            step.staged = step.draft.finish()
            square = 0.0 if step.staged.finite else math.nan
        else:
            square = self._square(step)
        if step_result.loss is not None and not math.isfinite(step_result.loss):
            square = math.nan
        # A rank without parameters has no gradient that would show a bad sample.
        looks = not (math.isfinite(square) and self._values)
        sample = bad_sample(step.batch_slice) if looks else None
        if not self._reduces_norm:
            return self._settle(step, square, sample)
        n_bytes = 2.0 * sum(gradient.nbytes for gradient in step.gradients.values())
        settle, cost = partial(self._settle, step), Cost(n_bytes=n_bytes)
        return LocalNorm(square=square, settle=settle, cost=cost, sample=sample)

    def _square(self, step: Step) -> float:
        # Without clipping only finiteness matters, and that only if someone uses it.
        if self._clip_norm is not None:
            return sum_of_squares(step.gradients)
        looks = self._reduces_norm or self._policy.sums_gradients
        return 0.0 if not looks or is_finite(step.gradients) else math.nan

    def _settle(self, step: Step, square: float, sample: int | None) -> Closed:
        if not math.isfinite(square):
            return Closed(is_finite=False, staged=step.staged, blame=blame_of(sample))
        # A running average that is not finite comes from a bad sample and is dropped.
        if is_finite(step.after):
            for item, value in step.after.items():
                if item not in self._sent and self._policy.keeps_local_steps:
                    self._sent[item] = self._values[item].clone()
                self._values[item].copy_(value)
        if step.staged is None and step.counts:
            if self._clip_norm is not None:
                clip(step.gradients, square, norm_max=self._clip_norm)
            self._step(step.gradients, step.local_rate or 0.0)
            self.total.add(step.gradients)
            step.gradients.clear()
        return Closed(is_finite=True, staged=step.staged)

    def _after(self, step_result: StepResult) -> dict[int, torch.Tensor]:
        after = {item: value.reshape(-1) for item, value in step_result.averages.items()}
        # BatchNorm counts the steps of its averages in a tensor of its own.
        for item, count in self.items.counts.items():
            if item in step_result.averages:
                after[count] = self._values[count] + 1
        return after
