"""The training objective: Algorithm 1.1 of Dean et al. 2012 on a whole model or one rank's part.

Paper to code: alpha is `local_learning_rate`, accrued gradients are in `ExchangeState`; instead of
gradients, replicas may push local steps of an optimizer of their own (`worker.exchange`). Three
activities overlap (DB-10): the compute executor takes steps, the data executor reads the next
batch, and messages carry fetches and pushes. Where gradients come during the backward pass and a
push follows every step, they go into the push buffers while earlier layers still run. A gradient
with NaN or infinity is skipped: neither it nor anything computed from it reaches the shards. A
single one is harmless; many in a row mean that training has diverged.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

import msgspec
import torch
from typing_extensions import override

from distbelief.core.formatting import duration
from distbelief.core.spans import NOTHING, Span, Spans, of_part
from distbelief.data import shown_samples
from distbelief.errors import JobError, LocalProtocolError
from distbelief.execution.executor import Put, StepResult
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.parameter_server.client.pushes import PushDraft, PushResult
from distbelief.protocol import Evaluate, GrantSteps, Progress, StartTraining, Stop
from distbelief.roles.role import SUPERVISOR, Action, Compute, Computed, Cost, Report, Seconds, Send
from distbelief.worker.batches import BatchIndices, BatchSlice, DealtBatch, DealtPlan
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.exchange import ExchangeState, is_finite
from distbelief.worker.group import GroupLeader, GroupProgress, Outgoing
from distbelief.worker.inner import InnerOptimizer
from distbelief.worker.objective import Install, LocalNorm, Objective


PUSH: Final = "replica:push"
N_SKIPPED_MAX: Final = 128  # ends of skipped spans in a report


# The norm of a gradient that several ranks share:
#     square      a rank's sum of squares, in float64
#     norm        the root of their sum, added in the order of ranks
#     clipped     g * norm_max / (norm + 1e-6) if that is shorter than g (torch's rule)
# Because all ranks see the same sum, all skip the same steps and clip by the same factor.

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


def bad_sample(batch_slice: BatchSlice) -> int | None:
    """Return the index in the data set of the first sample with NaN or infinity."""
    parts = [part for regions in batch_slice.inputs.values() for part in regions]
    if batch_slice.batch is not None:
        parts += batch_slice.batch.tensors().values()
    for part in parts:
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
    is_finite: bool  # whether the gradient is finite on all ranks, as far as that was checked
    staged: PushResult | None = None  # the push, if gradients were staged
    blame: str | None = None  # a sentence on a bad sample, if one was found


@final
@dataclass(slots=True, kw_only=True)
class Step:
    number: int
    scheduled: int  # its number among all steps of the replica, those of earlier lives included
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
    values: Sequence[torch.Tensor]  # flat
    trained: frozenset[int]  # with a gradient; the others are pushed as they are
    counts: Mapping[int, int] = field(default_factory=dict)  # running average -> its step counter
    n_bytes: float = field(init=False)  # asked for several times a step

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_bytes", float(sum(value.nbytes for value in self.values)))


@dataclass(slots=True, kw_only=True)
class Counters:
    steps: int = 0
    fetches: int = 0
    pushes: int = 0
    local_steps: int = 0
    gradients: int = 0  # accrued
    gradients_pushed: int = 0
    non_finite: int = 0  # gradients skipped
    torn: int = 0  # attempts dropped because a fetch met a half-applied update
    inner_lost: int = 0  # times that the inner optimizer's state was lost


@final
class TrainingObjective(Objective):
    """Trains; see `Objective`. The last methods are work of the compute executor on the tensors."""

    reports_steps = True

    def __init__(  # noqa: PLR0913 -- one call describes what is trained
        self,
        config: DownpourSettings,
        items: Items,
        *,
        client: ParameterClient,  # of the shards that hold what is trained here
        n_ranks: int,
        is_whole: bool,  # its executor clips; gradients come at the end, and share no memory
        shapes: Sequence[Sequence[int]],  # of the items
        n_steps: Callable[[int, int], int],  # from one data position to another
        dealt: DealtPlan | None = None,  # where data are dealt
        part: int = 0,  # of the replica that this rank pushes
        progress_seconds: Seconds = 0.5,  # least time between reports to the supervisor
    ) -> None:
        self.values = items.values
        self.counters = Counters()
        self._config = config
        self._items = items
        pace = config.pace
        self._clip_norm = None if is_whole else config.clip_norm
        self._reduces_norm = n_ranks > 1
        # Whether gradients may go into the push buffers during the backward pass.
        self._drafts = not (is_whole or pace.sums_gradients or self._clip_norm is not None)
        self._n_steps = n_steps
        self._dealt = dealt
        self._part = part
        self._dealt_push: Span | None = None  # positions of the push that is due
        self._push_start: int | None = None  # the first position since the last push
        self._is_whole_push = False  # whether no later sample may join the push that is due
        self._last_skipped: Span | None = None  # positions of a push without any gradient
        self._skipped = NOTHING  # of all such pushes
        # Pushes up to the end of each range that is taken and not known to be applied.
        self._range_ends: deque[int] = deque()
        self._n_ranges_done = 0
        self._progress_seconds = progress_seconds
        self._client = client
        inner = None  # if deltas are sent
        if config.inner is not None:
            trained = {item: items.values[item] for item in sorted(items.trained)}
            inner = InnerOptimizer(config.inner, trained, shapes=shapes)
        self._exchange = ExchangeState(
            items.values,
            client.view,
            pace,
            trained=sorted(items.trained),
            inner=inner,
            shares_memory=not is_whole,
            fits_link=config.exchange.every == "auto",
        )
        self._stop = 0  # samples up to the end of the newest gradient
        self._samples_allowed: int | None = None
        self._position = 0  # samples consumed since the replica's first incarnation
        self._pushed = 0  # samples up to the end of the last push
        self._clock = 0  # of the parameters in use
        self._seconds: Seconds = 0.0  # installing parameters and computing steps
        self._begun_at: Seconds = 0.0
        self._step: Step | None = None
        self._push_due = False
        self._staging = False
        self._loss = 0.0  # of the last step
        self._n_bad_in_row = 0
        self._reported_at: Seconds = -math.inf
        self._reported_steps = 0  # of all generations
        self._reported = 0, GroupProgress()  # the newest generation, and what it had done

    @property
    @override
    def pushed(self) -> int | None:
        return max(self._pushed, self._client.samples) if self.values else None

    @property
    @override
    def all_pushes_applied(self) -> bool:
        return not (self._staging or self._client.unacknowledged)

    @override
    def begin(self, position: int, now: Seconds) -> None:
        # A rank whose shards are ahead of the group pushes nothing until the others catch up: each
        # gradient is applied once.
        self._pushed = self.pushed or 0
        if not self._position:
            self._begun_at = now
        self._position = position
        if self._dealt is not None:
            self._range_ends.clear()
            self._n_ranges_done = self._dealt.n_gone
        if self._exchange.pace.sends_delta and position:
            self.counters.inner_lost += 1

    @override
    def drop(self) -> None:
        # A new generation begins where the shards' state ends, so this is computed again.
        step, self._step = self._step, None
        if step is not None and step.draft is not None:
            self._client.abandon()
        self._exchange.drop()
        self._push_start = None
        self._push_due = False

    @override
    def fetches_at(self, step: int) -> bool:
        return self._exchange.fetches_before(step)

    @property
    @override
    def may_go_on(self) -> bool:
        is_late = self._is_whole_push and self._push_due
        return self._exchange.may_go_on and not is_late

    @override
    def enter(self, now: Seconds, *, gated: bool = True) -> list[Action]:
        return self._client.enter(now, staleness=self._config.exchange.staleness if gated else None)

    @property
    @override
    def owes(self) -> bool:
        return self._exchange.n_unsent > 0 and (self._dealt is None or self._push_due)

    @override
    def leave(self, now: Seconds) -> list[Action]:
        # Nobody must fold a round, or count the workers present, without a push under way.
        return self._client.leave(now) if self.all_pushes_applied else []

    @override
    def may_fetch(self, *, ahead: bool) -> bool:
        waits = self._config.exchange.staleness is not None
        if waits and (ahead or not self._client.may_begin):
            return False  # a tick begins with a fetch
        step = self._step if ahead else None
        dealt = None if step is None else step.batch_slice.samples.dealt
        return self._exchange.pace.may_fetch(
            unacknowledged=self._client.unacknowledged,
            during=None if step is None else step.number,
            pushes=None if dealt is None else dealt.ends_push,
        )

    @override
    def installing(self, work: Install) -> Install:
        exchange, rate = self._exchange, self._config.rate(self._clock)
        contains_pushes = self._client.fetches_own_pushes

        def install() -> FetchResult:
            exchange.hold()
            installed = work()
            if not installed.torn:
                exchange.merge(contains_pushes=contains_pushes, rates=rate)
            return installed

        return install

    @property
    @override
    def install_copies(self) -> int:
        pace, has_steps = self._exchange.pace, self._exchange.n_unsent > 0
        if pace.sends_delta:  # also the anchor, before and after
            return 8 if has_steps else 4
        # To repeat local steps also read gradients and values, and write values.
        repeats = pace.keeps_local_steps and self._config.rate(self._clock)
        return 5 if repeats and has_steps else 2

    @override
    def fetched(self, seconds: Seconds) -> bool:
        self._seconds += seconds
        self.counters.fetches += 1
        self._exchange.fetched()
        self._clock = max(self._client.clocks, default=0)
        return True

    @override
    def open(self, step: int, batch: BatchIndices, batch_slice: BatchSlice) -> Put:
        # A rank may die when some shards have applied its push and others have not. It then goes on
        # from the least advanced shard, and the others apply that one push twice. This is accepted:
        # shards know only sample counts, and it is one gradient of one replica. Of dealt samples
        # they know the positions.
        counts = bool(self.values) and batch.stop > self._pushed
        # Stage during the backward pass only if nothing can still reject or change the gradient.
        at_once = counts and self._drafts and not self._exchange.n_unsent
        draft = self._client.draft() if at_once and self._client.can_push else None
        self._step = Step(
            number=step,
            scheduled=self._n_steps(0, batch.position),
            counts=counts,
            draft=draft,
            local_rate=self._local_rate(step),
            batch_slice=batch_slice,
        )
        return self._step.put

    def _local_rate(self, step: int) -> float | None:
        pace = self._exchange.pace
        if pace.sends_delta:
            return 0.0  # the inner optimizer has its own
        # A fetch that follows overwrites the local step, or repeats it with the others.
        return None if pace.fetches_before(step + 1) else self._config.rate(self._clock)

    def step_bytes(self) -> float:
        """Moved by the current step beside its computation."""
        assert self._step is not None
        # Read w; a local step reads g and w, and writes w; an optimizer has two moments, at most.
        n_copies = (
            8 if self._exchange.pace.sends_delta else 1 if self._step.local_rate is None else 4
        )
        return self._items.n_bytes * n_copies

    @override
    def computing(self, seconds: Seconds) -> None:
        self._seconds += seconds

    @override
    def torn(self) -> None:
        self.counters.torn += 1
        self._step = None

    @override
    def closed(
        self, result: object, step_result: StepResult, batch: BatchIndices, now: Seconds
    ) -> Sequence[Action]:
        """Account for a finished step; send the push that it staged."""
        assert isinstance(result, Closed), result
        step, self._step = self._step, None
        assert step is not None
        n, counters = len(batch.indices), self.counters
        counters.steps += 1
        self._position += n
        self._loss = math.nan if step_result.loss is None else step_result.loss / n
        holds_nothing = not self.values  # such a rank may still know the loss
        if not step.counts and not holds_nothing:
            return []
        if not result.is_finite:
            actions = self._skip(result, step, reports_loss=step_result.loss is not None)
        elif holds_nothing:
            actions, self._n_bad_in_row = [], 0
            self._exchange.n_unsent += batch.dealt is not None  # other ranks push it
        else:
            actions = []
            counters.gradients += 1
            if step.draft is not None:
                assert result.staged is not None
                return self._staged_at_once(result.staged, batch, now)
            self._exchange.count(self._client.clocks)
            counters.local_steps += step.local_rate is not None
            if self._exchange.pace.sums_gradients:
                self._n_bad_in_row = 0
        actions = [*actions, *self._fit_to_link(now)]
        # If every gradient was skipped there is nothing to push. Skipped samples are behind us.
        self._stop = batch.stop
        if batch.dealt is None:
            self._push_due = self._exchange.pushes_after(step.number)
        else:
            self._end_batch(batch.dealt)
        return actions

    def _end_batch(self, dealt: DealtBatch) -> None:
        """Let a push end where that of any other replica would, or as the link allows."""
        start, stop = dealt.push
        if self._push_start is None:
            self._push_start = start
        is_auto, exchange = self._config.exchange.every == "auto", self._exchange
        is_full = is_auto and exchange.n_unsent >= exchange.pace.n_push
        self._is_whole_push = dealt.ends_range or not is_auto
        if not (is_full or dealt.ends_range or (dealt.ends_push and not is_auto)):
            return
        self._begin_push(self._push_start, stop)
        self._push_due = exchange.n_unsent > 0 and bool(self.values)
        if not exchange.n_unsent:
            self._skip_push()
        if not self._push_due:
            self._push_start = None
            exchange.discard()
        if dealt.ends_range:
            self._range_ends.append(self.counters.pushes + self._push_due)

    def _staged_at_once(
        self, staged: PushResult, batch: BatchIndices, now: Seconds
    ) -> Sequence[Action]:
        dealt = batch.dealt
        if dealt is not None:
            self._begin_push(*dealt.push)
        self._exchange.staged()
        actions = self._staged(staged, n_gradients=1, stop=batch.stop, now=now)
        if dealt is not None and dealt.ends_range:
            self._range_ends.append(self.counters.pushes)
        return actions

    def _begin_push(self, start: int, stop: int) -> None:
        last = self._last_skipped
        if last is not None and last[1] == start:
            start = last[0]  # this push is also for the samples just skipped
        self._dealt_push = start, stop

    def _skip_push(self) -> None:
        self._last_skipped = self._dealt_push
        self._skipped |= NOTHING if self._dealt_push is None else Spans([self._dealt_push])

    def _fit_to_link(self, now: Seconds) -> Sequence[Action]:
        step_seconds = self._seconds / self.counters.steps
        seconds = self._exchange.fit_to_link(now, step_seconds=step_seconds)
        if seconds is None:
            return []
        text = (
            f"exchanges every {self._exchange.pace.n_push} steps: a push and a fetch take "
            f"{duration(seconds)}, a step {duration(step_seconds)}"
        )
        return [Report(text=text)]

    def _skip(self, result: Closed, step: Step, *, reports_loss: bool) -> Sequence[Action]:
        if result.staged is not None:
            self._client.abandon()
        samples = shown_samples(step.batch_slice.samples.indices.tolist())
        text = (
            f"step {self.counters.steps}: the gradient of {samples} is NaN or infinite (loss "
            f"{self._loss:g}); it is skipped" + (f": {result.blame}" if result.blame else "")
        )
        report = self._bad(1, [Report(text=text, level="warning")], blame=result.blame)
        # All ranks skip the same step; only the rank that knows the loss reports it.
        return report if reports_loss else []

    def _bad(
        self, n_gradients: int, warning: Sequence[Action], *, blame: str | None = None
    ) -> Sequence[Action]:
        """Count gradients that were not finite; return the warning once per row of them."""
        is_first = self._n_bad_in_row == 0
        self.counters.non_finite += n_gradients
        self._n_bad_in_row += n_gradients
        config, n = self._config, self._n_bad_in_row
        if n < config.non_finite_limit:
            return warning if is_first else []
        found = f"{n} gradients in a row were NaN or infinite (step {self.counters.steps}"
        if blame:
            raise JobError(f"{found}): {blame}")
        clip = "" if config.clip_norm is None else f" below {config.clip_norm:g}"
        rate, key = f"learning_rate {config.rule.learning_rate:g}", "learning_rate"
        if config.inner is not None:
            rate, key = f"inner.lr {config.inner.get('lr', 'as torch has it')}", "inner.lr"
        raise JobError(
            f"{found}, loss {self._loss:g}, {rate}): training has diverged. Use a lower {key}, "
            f"or a clip_norm{clip}"
        )

    @property
    @override
    def is_due(self) -> bool:
        return self._push_due and not (
            (self._exchange.fetch_due and self._exchange.pace.sends_delta) or self.may_go_on
        )

    @override
    def work(self, *, final: bool) -> Sequence[Action]:
        """Stage the accrued gradients once every shard has a free slot (two are in flight)."""
        # After the last step, one more push carries what has accrued.
        if final and self._dealt is None:
            self._push_due |= self._exchange.n_unsent > 0
        elif final and not self._push_due:  # a push that has not all its samples is dealt anew
            self._exchange.discard()
        # The values fetched after a push of local steps contain it, and so none after it.
        # A replica without any further step to take begins no fetch, and its push is waited for.
        is_last = final or (self._dealt is not None and self._dealt.is_read)
        sends_delta = self._exchange.pace.sends_delta
        is_early = sends_delta and self._exchange.fetch_due and not is_last
        if is_early or not (self._push_due and self._client.ready and self._client.can_push):
            return []
        self._push_due, self._staging = False, True
        n_copies = 6.0 if sends_delta else 2.0
        cost = Cost(n_bytes=n_copies * self._items.n_bytes)
        return [Compute(name=PUSH, work=self._staging_work(), cost=cost)]

    @override
    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Send the staged push, or drop it if it is not finite."""
        if event.name != PUSH:
            raise LocalProtocolError(f"unexpected result of work {event.name!r}")
        result = event.result
        assert isinstance(result, PushResult), result
        self._staging = False
        self._push_start = None
        n_gradients = self._exchange.n_unsent
        return self._staged(result, n_gradients=n_gradients, stop=self._stop, now=now)

    def _staged(
        self, staged: PushResult, *, n_gradients: int, stop: int, now: Seconds
    ) -> Sequence[Action]:
        push = self._dealt_push
        dealt = msgspec.UNSET if push is None else of_part(push, self._part)
        actions = self._client.staged(
            staged, n_gradients=n_gradients, samples=stop, now=now, dealt=dealt
        )
        self._exchange.sent(now, finite=staged.finite)
        if not staged.finite:  # the client's report names the tensors
            self._skip_push()
            return self._bad(n_gradients, actions)
        self._pushed = max(self._pushed, stop)
        self.counters.pushes += 1
        self.counters.gradients_pushed += n_gradients
        self._n_bad_in_row = 0
        return actions

    @override
    def command(
        self, leader: GroupLeader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        if not isinstance(message, StartTraining):
            return super().command(leader, message, now)
        self._samples_allowed = message.samples
        if self._dealt is not None:
            self._dealt.take(message.ranges or (), n_before=message.n_before)
            self._samples_allowed = self._dealt.n_dealt  # the leader asks for its steps
        return leader.begin(now, samples=self._samples_allowed)

    @override
    def granted(self, message: GrantSteps, *, is_first: bool) -> None:
        if self._dealt is None or message.dealt is msgspec.UNSET:
            return
        if is_first:
            self._dealt.follow(message.dealt)
        else:
            self._dealt.take(message.dealt.ranges, n_before=message.dealt.n_before)

    @override
    def report(
        self, leader: GroupLeader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Report progress to the supervisor, at most every `progress_seconds`."""
        pauses = now - self._reported_at < self._progress_seconds
        if pauses and not (final or leader.is_held):
            return [], []
        done = leader.generation_done()
        generation, before = self._reported
        # A new generation counts from zero; steps of earlier ones stay counted.
        if generation != leader.generation:
            before = GroupProgress()
            self._reported = leader.generation, before
        n_of_loss = done.samples - before.samples
        if n_of_loss + done.no_loss - before.no_loss <= 0:
            return [], []
        self._reported_at, self._reported = now, (leader.generation, done)
        self._reported_steps += max(done.steps - before.steps, 0)
        progress = Progress(
            step=self._reported_steps,
            samples=done.position + done.samples + done.no_loss,
            loss=(done.loss - before.loss) / n_of_loss if n_of_loss else math.nan,
            seconds_computing=self._seconds,
            seconds_waiting=max(now - self._begun_at - self._seconds, 0.0),
            skipped=self._skipped.to_wire()[-N_SKIPPED_MAX:]
            if self._skipped is not NOTHING
            else (),
        )
        return [Send(receiver=SUPERVISOR, message=progress)], []

    @override
    def figures(self) -> Mapping[str, float]:
        counters = self.counters
        figures = {name: float(getattr(counters, name)) for name in counters.__dataclass_fields__}
        figures |= {"samples": float(self._position), "seconds_computing": self._seconds}
        if self._samples_allowed is None:
            return figures
        if self._dealt is None:
            return figures | {"samples_allowed": float(self._samples_allowed)}
        n_applied = counters.pushes - self._client.unacknowledged
        while self._range_ends and self._range_ends[0] <= n_applied:
            self._range_ends.popleft()
            self._n_ranges_done += 1
        ranges = {"ranges": self._dealt.n_ranges, "ranges_done": self._n_ranges_done}
        return figures | {name: float(n) for name, n in ranges.items()}

    # --- work of the compute executor

    def _staging_work(self) -> Callable[[], PushResult]:
        exchange, clocks = self._exchange, self._client.clocks
        draft = self._client.draft(fetched_clocks=exchange.fetched_clocks(clocks))

        def stage() -> PushResult:
            exchange.put_into(draft.put)
            result = draft.finish()
            # Only the push buffers hold the sum now: no gradient is pushed twice (DB-8).
            exchange.staged(finite=result.finite)
            return result

        return stage

    @override
    def close(self, step_result: StepResult) -> LocalNorm | Closed:
        """Return the local part of the norm reduction; with one rank, finish the step at once."""
        step = self._step
        assert step is not None
        step.after = self._after(step_result)
        if step.draft is not None:
            for item, value in self._exchange.buffers.to_push(step.after).items():
                step.draft.put(item, value)
            step.staged = step.draft.finish()
            square = 0.0 if step.staged.finite else math.nan
        else:
            square = self._square(step)
        if step_result.loss is not None and not math.isfinite(step_result.loss):
            square = math.nan
        # A rank without parameters has no gradient that would show a bad sample.
        looks = not (math.isfinite(square) and self.values)
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
        looks = self._reduces_norm or self._exchange.pace.sums_gradients
        return 0.0 if not looks or is_finite(step.gradients) else math.nan

    def _settle(self, step: Step, square: float, sample: int | None) -> Closed:
        if not math.isfinite(square):
            return Closed(is_finite=False, staged=step.staged, blame=blame_of(sample))
        # A running average that is not finite comes from a bad sample and is dropped.
        if is_finite(step.after):
            for item, value in step.after.items():
                self.values[item].copy_(value)
        if step.staged is None and step.counts:
            if self._clip_norm is not None:
                clip(step.gradients, square, norm_max=self._clip_norm)
            rate, number = step.local_rate or 0.0, step.scheduled
            self._exchange.add(step.gradients, rates=rate, number=number)
            step.gradients.clear()
        return Closed(is_finite=True, staged=step.staged)

    def _after(self, step_result: StepResult) -> dict[int, torch.Tensor]:
        after = {item: value.reshape(-1) for item, value in step_result.averages.items()}
        # BatchNorm counts the steps of its averages in a tensor of its own.
        for item, count in self._items.counts.items():
            if item in step_result.averages:
                after[count] = self.values[count] + 1
        return after
