"""What one step of a machine of a replica does in its lane, on its own regions.

Its duty (`training`) decides when; this is the work itself: as in `steps`, but on what
a machine keeps of the model, and with the gradients that its program has found.

If a push follows every step its gradients are laid into the slots while the backward
pass of earlier layers still runs. Whether a step counts all machines decide together:
each says what it has of the gradient's squared norm, not a number if that is not
finite, and learns the sum. So all skip the same steps, and clip by the same factor.
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
from distbelief.worker.group import Install, Vote


# The sum of a machine's gradients since its last push, and what is known of it.


@final
class GradientAccumulator:
    """Gradients of several steps, added up until they are pushed.

    Args:
        n_items: Tensors that a machine keeps.

    Attributes:
        sums: One for each item; None if it has had no gradient.
        n_gradients: How many were added.
        clocks: Of the shards, when the oldest was computed.
        stop: Samples up to and with the newest.
    """

    def __init__(self, n_items: int) -> None:
        self.sums: list[torch.Tensor | None] = [None] * n_items
        self.n_gradients = 0
        self.clocks: tuple[int, ...] = ()
        self.stop = 0
        self._owned: set[int] = set()  # sums that are nobody else's memory

    def add(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Add those of a step, which are given away. Work of the compute lane."""
        for item, gradient in gradients.items():
            accrued = self.sums[item]
            if accrued is None:
                self.sums[item] = gradient
            elif item in self._owned:
                accrued.add_(gradient)
            else:
                # The first may share memory with another gradient: added to a copy.
                self.sums[item] = accrued + gradient
                self._owned.add(item)

    def count(self, stop: int, *, clocks: tuple[int, ...]) -> None:
        """Count a gradient that was added, of samples up to `stop`."""
        if not self.n_gradients:
            self.clocks = clocks
        self.n_gradients += 1
        self.stop = stop

    def fetched_clocks(self, clocks: Sequence[int]) -> tuple[int, ...]:
        """Return when the oldest was computed, by clocks of shards that live now."""
        # A shard that has restarted since counts from an older clock again.
        return tuple(map(min, self.clocks, clocks))

    def drop(self) -> None:
        """Forget them all: they were pushed, or are computed again."""
        self.sums[:] = [None] * len(self.sums)
        self._owned.clear()
        self.n_gradients = 0


# How long a gradient is that several machines have parts of, and whether it is one.
#
# square      each machine's sum of squares, in float64
# norm        the root of their sum, taken in the order of the machines
# clipped     g * norm_max / (norm + 1e-6) where that is less than g (torch's rule)

Gradients = dict[int, torch.Tensor]
"""By item; two of them may share memory."""

_EPSILON: Final = 1e-6  # torch.nn.utils.clip_grad_norm_'s


def sum_of_squares(gradients: Gradients) -> float:
    """Return the sum over all elements, in float64; NaN if they are not finite."""
    total = 0.0
    for gradient in gradients.values():
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        total += float(norm) ** 2
    return total if math.isfinite(total) else math.nan


def clip(gradients: Gradients, square: float, *, norm_max: float | None) -> None:
    """Scale gradients if the norm over all machines is beyond the bound."""
    if norm_max is None:
        return
    factor = norm_max / (math.sqrt(square) + _EPSILON)
    if factor < 1.0:
        for item, gradient in gradients.items():
            gradients[item] = gradient * factor


def is_finite(gradients: Mapping[int, torch.Tensor]) -> bool:
    """Return whether all are, by their sums; see `FlatModel.is_finite`."""
    sums = [gradient.sum() for gradient in gradients.values()]
    return not sums or bool(torch.stack(sums).sum().isfinite())


def bad_sample(batch_slice: BatchSlice) -> int | None:
    """Return the place in the batch of the first sample with NaN or infinity."""
    for regions in batch_slice.inputs.values():
        for part in regions:
            bad = ~part.isfinite()
            if bool(bad.any()):
                return int(bad.nonzero()[0][0])
    return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """What was done in the compute lane at the end of a step.

    Attributes:
        is_finite: Whether the gradient is, as far as that was looked at, on all
            machines.
        staged: What lies in the slots, if anything was laid there.
        blame: If it is not finite: which sample is to blame, if one is.
    """

    is_finite: bool
    staged: PushResult | None = None
    blame: str | None = None


@final
@dataclass(slots=True, kw_only=True)
class Step:
    """The step under way.

    Attributes:
        number: In this life.
        counts: Whether its gradient is wanted: the shards do not have it already.
        draft: Where it is laid at once.
        gradients: Where it is kept otherwise, by item.
        local_rate: Of the local step; None: there is none.
        chosen: Its samples.
        portion: What this machine has of them.
        staged: What lies in the slots, once all does.
        after: What running averages are after it.
    """

    number: int
    counts: bool
    draft: PushDraft | None
    local_rate: float | None
    batch: BatchIndices
    batch_slice: BatchSlice
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    staged: PushResult | None = None
    after: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def put(self) -> Put:
        """What takes its gradients."""
        return self.gradients.__setitem__ if self.draft is None else self.draft.put


@final
class RankTrainer:
    """The work of one machine's steps.

    Args:
        config: How the replica trains.
        sizes: Elements of each item.
        trained: Items that have a gradient; the others are pushed as they are.
        counts: By item of a running average, the item that counts its steps.
        dtype: Of all of them.
        n_machines: Of the replica.

    Attributes:
        values: Flat, one per item.
        accrued: The gradients since the last push.
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
        self.values = [torch.zeros(size, dtype=dtype) for size in sizes]
        self.accrued = GradientAccumulator(len(sizes))
        self._config = config
        self._trained = trained
        self._counts = counts
        self._reduces_norm = n_ranks > 1
        self._sent: dict[int, torch.Tensor] = {}  # averages that shards have otherwise
        self._gains: dict[int, torch.Tensor] | None = None  # of these, in a fetch

    def drop(self) -> None:
        """Forget what is not pushed: a life begins where the shards have it."""
        self.accrued.drop()
        self._sent.clear()
        self._gains = None

    def staged(self, staged: PushResult) -> None:
        """Begin to accrue anew: what there was is pushed, or is not finite."""
        self.accrued.drop()
        if staged.finite:
            self._sent.clear()

    def installing(self, work: Install, *, rate: float) -> Install:
        """Return the work of an install that puts back what is not pushed yet.

        Args:
            work: Of the install.
            rate: Of the local steps, which are taken again.
        """

        def install() -> FetchResult:
            if self._gains is None:  # else an install was torn: values are a mixture
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

    def close(self, step: Step, step_result: StepResult) -> Vote | Closed:
        """Say what this machine has of a step; alone, go on at once."""
        step.after = self._after(step_result)
        if step.draft is not None:
            for item, value in enumerate(self.values):
                if item not in self._trained:
                    step.draft.put(item, step.after.get(item, value))
            step.staged = step.draft.finish()
            square = 0.0 if step.staged.finite else math.nan
        else:
            square = self._square(step)
        # Where it keeps nothing, nothing of its own tells that its samples are bad.
        looks = not (math.isfinite(square) and self.values)
        sample = _bad(step) if looks else None
        if not self._reduces_norm:
            return self._settle(step, square, sample)
        n_bytes = 2.0 * sum(gradient.nbytes for gradient in step.gradients.values())
        settle, cost = partial(self._settle, step), Cost(n_bytes=n_bytes)
        return Vote(square=square, settle=settle, cost=cost, sample=sample)

    def _square(self, step: Step) -> float:
        """Return the squared norm; if nobody asks for that, only whether it is one."""
        clips, gradients = self._config.clip_norm is not None, step.gradients
        if clips:
            return sum_of_squares(gradients)
        looks = self._reduces_norm or self._config.checks_every_gradient
        return 0.0 if not looks or is_finite(gradients) else math.nan

    def _settle(self, step: Step, square: float, sample: int | None) -> Closed:
        """Step locally and accrue, or let the push go, as all have agreed.

        Args:
            step: The step under way.
            square: Squared norm of the gradient of all machines.
            sample: To blame if it is not finite: a machine has seen that.
        """
        if not math.isfinite(square):
            return Closed(is_finite=False, staged=step.staged, blame=_blame(sample))
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
        """Return what running averages, and counts of their steps, are after a step."""
        after = {item: value.reshape(-1) for item, value in step_result.averages.items()}
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
    """Return the first sample that is NaN or infinite, as far as it is seen here."""
    row = bad_sample(step.batch_slice)
    return None if row is None else int(step.batch.indices[row])


def _blame(sample: int | None) -> str | None:
    """Return a sentence on a sample that is NaN or infinite, if one is."""
    if sample is None:
        return None
    return (
        f"[data.train] sample {sample} has NaN or infinite values: mend or leave out such samples"
    )
