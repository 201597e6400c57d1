"""The training program: steps, clipping by norm, gradients that are not finite, pushes.

It is Algorithm 1.1 of Dean et al. 2012, on a whole model or one rank's part. Paper to code: alpha
is `local_learning_rate`, accrued gradients are in `ExchangeState`; instead of gradients, replicas
may push local steps of an optimizer of their own (`worker.exchange`). Three activities overlap
(DB-10): the compute executor takes steps, the data executor reads the next batch, and messages
carry fetches and pushes. Where gradients come during the backward pass and a push follows every
step, they go into the push buffers while earlier layers still run. A gradient with NaN or infinity
is skipped: neither it nor anything computed from it reaches the shards. A single one is harmless;
many in a row mean that training has diverged.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final, final

import msgspec
import torch
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.core.formatting import duration
from distbelief.core.spans import NOTHING, Spans
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.parameter_server.client.pushes import PushDraft, PushResult
from distbelief.protocol import Evaluate, GrantSteps, Progress, StartTraining, Stop
from distbelief.protocol.role import SUPERVISOR, Action, Compute, Cost, Notes, Report, Seconds, Send
from distbelief.task.data import shown_samples
from distbelief.worker.batches import (
    BatchIndices,
    BatchSlice,
    DealtBatch,
    DealtPlan,
    DealtPushes,
    bad_sample,
    blame_of,
)
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.exchange import ExchangeState, is_finite
from distbelief.worker.execution.executor import Put, StepResult
from distbelief.worker.group import GroupProgress, Outgoing
from distbelief.worker.inner_optimizer import InnerOptimizer
from distbelief.worker.local_executor import SmallBatches
from distbelief.worker.replica import Leader, Program, Steps, Taken, Waiting
from distbelief.worker.steps import LocalNorm


PUSH: Final = "replica:push"
N_LAST_MAX: Final = 2
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    is_finite: bool  # whether the gradient is finite on all ranks, as far as that was checked
    staged: PushResult | None = None  # the push, if gradients were staged
    is_void: bool = False  # what was put into the draft is not the gradient
    blame: str | None = None  # a sentence on a bad sample, if one was found


@final
@dataclass(slots=True, kw_only=True)
class Step:
    number: int
    scheduled: int  # its number among all steps of the replica, those of earlier lives included
    counts: bool  # whether its gradient is needed: the shards do not have it yet
    draft: PushDraft | None  # the push that takes the gradients at once, if there is one
    steps_locally: bool  # unless a fetch overwrites that, or repeats it with the others
    is_whole: bool  # gradients come at the end, and meanwhile if there is a draft
    batch_slice: BatchSlice
    n_bytes: float  # that it moves beside its computation
    clocks: tuple[int, ...]  # of the parameters, unless those of a whole model come later
    gradients: Gradients = field(default_factory=dict)  # unless `draft` takes them
    staged: PushResult | None = None
    touched: list[torch.Tensor | None] | None = None  # of the push; None: all
    after: dict[int, torch.Tensor] = field(default_factory=dict)  # running averages after the step

    @property
    def put(self) -> Put:
        return self.gradients.__setitem__ if self.draft is None or self.is_whole else self.draft.put

    @property
    def early(self) -> PushDraft | None:
        return self.draft if self.is_whole else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    values: Sequence[torch.Tensor]  # flat
    trained: frozenset[int]  # with a gradient; the others are pushed as they are
    counts: Mapping[int, int] = field(default_factory=dict)  # running average -> its step counter
    # Of the replica, those that push to each shard of these items; (): nobody else does.
    n_ranks: Sequence[int] = ()
    n_bytes: float = field(init=False)  # asked for several times a step

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_bytes", float(sum(value.nbytes for value in self.values)))

    def n_pushes(self, clocks: Sequence[int]) -> int:
        """Return how many pushes, each by a whole replica, these clocks of the shards count.

        A clock rises with the push of each rank. Those of others may still be under way.
        """
        n_ranks = self.n_ranks or [1] * len(clocks)
        each = [-(-clock // n) for clock, n in zip(clocks, n_ranks, strict=True)]
        return max(each, default=0)


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
class BadGradients:
    """Gradients with NaN or infinity: each is skipped, and many in a row end the training."""

    def __init__(self, config: DownpourSettings, counters: Counters) -> None:
        self.n_in_row = 0
        self.loss = 0.0  # of the last step
        self._config = config
        self._counters = counters

    def count(
        self, n_gradients: int, warning: Sequence[Action], *, blame: str | None = None
    ) -> Sequence[Action]:
        """Count gradients that were not finite; return the warning once per row of them."""
        is_first = self.n_in_row == 0
        self._counters.non_finite += n_gradients
        self.n_in_row += n_gradients
        config, n = self._config, self.n_in_row
        if n < config.non_finite_limit:
            return warning if is_first else []
        found = f"{n} gradients in a row were NaN or infinite (step {self._counters.steps}"
        if blame:
            raise JobError(f"{found}): {blame}")
        clip = "" if config.clip_norm is None else f" below {config.clip_norm:g}"
        rate, key = f"learning_rate {config.rule.learning_rate:g}", "learning_rate"
        if config.inner is not None:
            rate, key = f"inner.lr {config.inner.get('lr', 'as torch has it')}", "inner.lr"
        raise JobError(
            f"{found}, loss {self.loss:g}, {rate}): training has diverged. Use a lower {key}, "
            f"or a clip_norm{clip}"
        )


@final
class ProgressReports:
    """What the supervisor knows of the progress of a replica."""

    def __init__(self, seconds: Seconds) -> None:
        self.samples_allowed: int | None = None
        self.begun_at: Seconds | None = None
        self._seconds = seconds  # least time between reports
        self._reported_at: Seconds = -math.inf
        self._reported_steps = 0  # of all generations
        self._reported = 0, GroupProgress()  # the newest generation, and what it had done

    def due(
        self, leader: Leader, now: Seconds, *, final: bool, computing: Seconds, skipped: Spans
    ) -> list[Action]:
        if now - self._reported_at < self._seconds and not (final or leader.is_held):
            return []
        done = leader.generation_done()
        generation, before = self._reported
        # A new generation counts from zero; steps of earlier ones stay counted.
        if generation != leader.generation:
            before = GroupProgress()
            self._reported = leader.generation, before
        n_of_loss = done.samples - before.samples
        if n_of_loss + done.no_loss - before.no_loss <= 0:
            return []
        self._reported_at, self._reported = now, (leader.generation, done)
        self._reported_steps += max(done.steps - before.steps, 0)
        progress = Progress(
            step=self._reported_steps,
            samples=done.position + done.samples + done.no_loss,
            loss=(done.loss - before.loss) / n_of_loss if n_of_loss else math.nan,
            seconds_computing=computing,
            seconds_waiting=max(now - (self.begun_at or 0.0) - computing, 0.0),
            skipped=skipped.to_wire()[-N_SKIPPED_MAX:] if skipped is not NOTHING else (),
        )
        return [Send(receiver=SUPERVISOR, message=progress)]


class Next(Enum):
    """What comes next in a generation."""

    STEP = "a step"
    INSTALL_AND_STEP = "an install, and a step queued behind it"
    END = "nothing"


@final
class Training(Program):
    """Trains; see `Program`. The last methods are work of the compute executor on the tensors."""

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
        small: SmallBatches | None = None,  # takes the steps, after each of which values have moved
        progress_seconds: Seconds = 0.5,  # least time between reports to the supervisor
    ) -> None:
        self.values = items.values
        self.counters = Counters()
        self._config = config
        self._items = items
        self._is_whole = is_whole
        self._reduces_norm = n_ranks > 1
        self._n_steps = n_steps
        self._dealt = None if dealt is None else DealtPushes(dealt, part=part)
        self._progress = ProgressReports(progress_seconds)
        self._client = client
        self._small = small
        inner = None  # if deltas are sent
        if config.inner is not None and small is None:
            trained = {item: items.values[item] for item in sorted(items.trained)}
            names = [client.view.tensors[item].name for item in trained]
            inner = InnerOptimizer(config.inner, trained, shapes=shapes, names=names)
        self._exchange = ExchangeState(
            items.values,
            client.view,
            config.pace,
            trained=sorted(items.trained),
            inner=inner,
            shares_memory=not is_whole,
            fits_link=config.exchange.every == "auto",
            encodes=client.encodes,
        )
        self._any_length = config.exchange.is_of_any_length  # pushes are
        self._position = 0  # samples consumed since the replica's first incarnation
        self._pushed = 0  # samples up to the end of the last push
        self._clock = 0  # pushes in the parameters in use; the compute executor's
        self._step: Step | None = None
        self._push_due = False
        self._staging = False
        self._n_last = 0  # pushes at the end of this generation; the first may be refused
        self._n_repeated = 0  # steps since the last push, for ranks that have not pushed them
        # Whether gradients may be put into a push while earlier layers still compute theirs.
        self._passes_on = small is None and all(value.is_cpu for value in items.values)
        self._bad = BadGradients(config, self.counters)

    @property
    @override
    def pushed(self) -> int | None:
        return max(self._pushed, self._client.samples) if self.values else None

    @property
    @override
    def all_pushes_applied(self) -> bool:
        return not (self._staging or self._client.unacknowledged)

    # --- one generation ---

    @override
    def steps(self, steps: Steps) -> Waiting[None]:
        self._drop()
        position = yield from steps.gather()
        self._begin(position, steps.now)
        while (found := (yield from self._next_step(steps))) is not Next.END:
            is_queued = found is Next.INSTALL_AND_STEP
            if is_queued:
                self._begin_install(steps)
            step = self._open(steps)
            close = partial(self._close, step)
            steps.begin_step(
                step.put, close, n_bytes=step.n_bytes, is_queued=is_queued, early=step.early
            )
            if is_queued:
                yield from self._installed(steps, step)
            else:
                self._fetch_ahead(steps, step, self._client.unacknowledged)
            taken = yield from steps.taken()
            self._step = None
            if taken is None:
                self.counters.torn += 1
                if step.draft is not None:
                    self._client.abandon()
            else:
                steps.actions += self._closed(step, taken, steps.now)
            yield

    def _drop(self) -> None:
        # A new generation begins where the shards' state ends, so this is computed again.
        step, self._step = self._step, None
        if step is not None and step.draft is not None:
            self._client.abandon()
        self._exchange.drop()
        self._push_due = False
        if self._dealt is not None:
            self._dealt.drop()

    def _begin(self, position: int, now: Seconds) -> None:
        # A rank whose shards are ahead of the group pushes nothing until the others catch up: each
        # gradient is applied once.
        self._pushed = self.pushed or 0
        if not self._position:
            self._progress.begun_at = now
        self._position = position
        self._n_last = self._n_repeated = 0
        if self._dealt is not None:
            self._dealt.begin()
        if self._exchange.pace.sends_delta and position:
            self.counters.inner_lost += 1

    def _next_step(self, steps: Steps) -> Waiting[Next]:
        """Push and fetch what is due; wait until a step may begin."""
        while True:
            is_over = steps.is_over
            is_late = is_over and self._owes
            if is_late:
                # What a held replica still has to push belongs to a round with the others' last
                # steps.
                steps.actions += self._client.enter(steps.now)
            if is_late and not self._client.may_begin:
                pass
            elif self._may_push(final=is_over):
                yield from self._push(steps, is_last=is_over)
            elif self._is_due:
                pass
            elif is_over:
                steps.actions += self.leave(steps.now)
                if self.all_pushes_applied:
                    return Next.END
            elif (may_step := steps.prepare()) is not None:
                found = yield from self._with_parameters(steps, may_step=may_step)
                if found is not None and steps.take():
                    return found
            yield

    # --- fetches ---

    def _with_parameters(self, steps: Steps, *, may_step: bool) -> Waiting[Next | None]:
        """Fetch what the next step lacks; return what may begin with what is here."""
        client, here = self._client, steps.here
        lacks = here.installed_for != steps.number and self._exchange.fetches_before(steps.number)
        if may_step:
            # Others may wait for this worker, and it for them.
            steps.actions += client.enter(steps.now, staleness=self._config.exchange.staleness)
        waits = self._config.exchange.staleness is not None
        # A push that was the last one dealt has not waited for the fetch before it, which lacks it:
        # its local steps are not to be repeated any more, and would be missing in the next step.
        is_old = self._exchange.pace.sends_delta and not client.fetches_own_pushes
        if (
            lacks
            and (is_old or not here.fetching)
            and (not waits or client.unacknowledged or client.may_begin)
        ):
            steps.begin_fetch(follows=is_old or self._exchange.pace.awaits_pushes)
        if not may_step or not client.is_placed:
            return None  # not placed after a pause: its push would end no tick
        is_here = here.fetching and client.fetch_complete and (not waits or client.may_begin)
        if not (lacks and is_here):
            return Next.STEP if not lacks or self._may_go_on else None
        if self._is_whole and not self._exchange.pace.sends_delta:
            # Values are copied just before their step, so that they are as new as possible.
            return Next.INSTALL_AND_STEP
        self._begin_install(steps)
        yield from self._installed(steps)
        return None

    @property
    def _may_go_on(self) -> bool:
        """Whether a step may begin before a fetch that is due has come."""
        is_late = self._dealt is not None and self._dealt.is_whole and self._push_due
        return self._exchange.may_go_on and not is_late

    def _fetch_ahead(self, steps: Steps, step: Step, unacknowledged: int) -> None:
        # Block messages travel while this step computes (DB-10); shared memory is read only at the
        # install, just before the step, so the newest values are used.
        course, here, after = steps.course, steps.here, step.number + 1
        is_last = course.is_final and after >= course.allowed
        if is_last or here.fetching or self._config.exchange.staleness is not None:
            return  # a tick begins with a fetch
        dealt, exchange = step.batch_slice.samples.dealt, self._exchange
        if exchange.fetches_before(after) and exchange.pace.may_fetch(
            unacknowledged=unacknowledged,
            during=step.number,
            pushes=None if dealt is None else dealt.ends_push,
        ):
            here.fetching = True
            steps.actions += self._client.begin_fetch(steps.now)

    def _begin_install(self, steps: Steps) -> None:
        exchange, pace = self._exchange, self._exchange.pace
        repeats = pace.keeps_local_steps and not pace.sends_delta
        contains_pushes = self._client.fetches_own_pushes
        fetched = self._client.install(self.values)

        def install() -> FetchResult:
            exchange.hold()
            installed = fetched()
            if not installed.torn:
                self._clock = self._items.n_pushes(installed.clocks)
                rate = self._local_rate() if repeats else 0.0
                exchange.merge(contains_pushes=contains_pushes, rates=rate)
            return installed

        has_steps = exchange.n_unsent > 0
        # Of deltas also the anchor, before and after; to repeat local steps also read gradients and
        # values, and write values.
        is_read = has_steps and repeats and self._config.local_rate > 0.0
        n_copies = (8 if has_steps else 4) if pace.sends_delta else 5 if is_read else 2
        work = install if exchange.changes_installs or pace.n_fetch > 1 else fetched
        steps.begin_install(work, n_copies * self._items.n_bytes)

    def _installed(self, steps: Steps, step: Step | None = None) -> Waiting[None]:
        """Wait for an install; if this step is queued behind it, fetch ahead for the next one."""
        seconds = yield from steps.installed()
        if seconds is None:
            return
        self.seconds += seconds
        self.counters.fetches += 1
        unacknowledged = self._client.unacknowledged
        self._exchange.fetched()
        steps.here.installed_for = steps.number
        if step is not None:
            self._fetch_ahead(steps, step, unacknowledged)

    # --- ticks ---

    @override
    def leave(self, now: Seconds) -> list[Action]:
        # Nobody must fold a round, or count the workers present, without a push under way.
        return self._client.leave(now) if self.all_pushes_applied else []

    @property
    def _owes(self) -> bool:
        """Whether something is accrued that is not pushed yet, or was held back by a codec."""
        if self._owes_rest:
            return True
        return self._exchange.n_unsent > 0 and (self._carries_all or self._push_due)

    @property
    def _owes_rest(self) -> bool:
        """Whether a last push is still to send what a codec has held back."""
        is_asked = self._exchange.encodes and self._n_last < N_LAST_MAX
        return is_asked and self._client.owes_rest

    @property
    def _carries_all(self) -> bool:
        """Whether the last push carries what has accrued, also a part of what a push has.

        After a Stop, such a part is dealt anew: a resumed run pushes as one without a pause. After
        `max_steps`, nobody would get it.
        """
        return self._dealt is None or self._config.max_steps is not None

    # --- steps ---

    def _open(self, steps: Steps) -> Step:
        # A rank may die when some shards have applied its push and others have not. It then goes on
        # from the least advanced shard, and the others apply that one push twice. This is accepted:
        # shards know only sample counts, and it is one gradient of one replica. Of dealt samples
        # they know the positions.
        assert steps.slice is not None
        batch, pace = steps.slice.samples, self._exchange.pace
        counts = bool(self.values) and batch.stop > self._pushed
        # Stage during the backward pass only if nothing can still reject or change the gradient.
        # What is encoded cannot be taken back. A whole model's gradients come at the end, and
        # earlier only if something of them may leave then.
        later = pace.sums_gradients or self._exchange.encodes
        later = later or (self._is_whole and not (self._passes_on and self._client.sends_early))
        drafts = not (later or self._config.clip_norm is not None)
        draft = None
        if counts and drafts and not self._exchange.n_unsent and self._client.can_push:
            notes = Notes() if self._is_whole else None
            draft = self._client.draft(notes=notes, in_turn=pace.awaits_pushes)
        # Read w; a local step reads g and w, and writes w; an optimizer has two moments, at most.
        steps_locally = pace.sends_delta or (steps.number + 1) % pace.n_fetch != 0
        n_copies = 8 if pace.sends_delta else 4 if steps_locally else 1
        # It is put into the push, and compared with that afterwards.
        n_copies += 4 if draft is not None and self._is_whole else 0
        self._step = step = Step(
            number=steps.number,
            scheduled=self._n_steps(0, batch.position) if pace.sends_delta else 0,
            counts=counts,
            draft=draft,
            steps_locally=steps_locally,
            is_whole=self._is_whole,
            batch_slice=steps.slice,
            n_bytes=n_copies * self._items.n_bytes,
            clocks=() if draft is None or self._is_whole else self._client.clocks,
        )
        if self._small is not None:
            self._small.begin(number=step.scheduled, rate=self._local_rate, counts=counts)
        return step

    def _local_rate(self) -> float:
        """Return the rate of a local step, by the pushes in the values that are installed."""
        return self._config.rate(self._clock)

    def _closed(self, step: Step, taken: Taken, now: Seconds) -> Sequence[Action]:
        """Account for a finished step; send the push that it staged."""
        result, step_result, batch = taken.closed, taken.result, taken.batch
        assert isinstance(result, Closed), result
        n, counters = len(batch.indices), self.counters
        counters.steps += 1
        self._position += n
        if result.is_void:
            self._client.abandon()
            self._passes_on = False
        self._bad.loss = math.nan if step_result.loss is None else step_result.loss / n
        holds_nothing = not self.values  # such a rank may still know the loss
        n_skipped = step_result.n_skipped
        if not step.counts and not holds_nothing:
            self._n_repeated += result.is_finite and n_skipped < len(batch.indices)
            return self._repeated(step, batch.dealt, now)
        if not result.is_finite:
            reports_loss = step_result.loss is not None
            n = max(1, n_skipped)
            actions = self._skip(result, step, n_gradients=n, reports_loss=reports_loss)
        elif holds_nothing:
            actions, self._bad.n_in_row = [], 0
            self._exchange.n_unsent += batch.dealt is not None  # other ranks push it
        else:
            actions = self._skipped_in(step, n_skipped) if n_skipped else []
            counters.gradients += 1
            if step.draft is not None and not result.is_void:
                assert result.staged is not None
                if step.is_whole:  # its parameters were not here when it began
                    self._client.describe(self._client.clocks, step.touched)
                elif step.touched is not None:
                    self._client.describe(step.clocks, step.touched)
                return self._staged_at_once(result.staged, batch, now)
            self._exchange.count(self._client.clocks)
            counters.local_steps += step.steps_locally
            if self._exchange.pace.sums_gradients:
                self._bad.n_in_row = 0
        if self._config.exchange.every == "auto":
            actions = [*actions, *self._fit_to_link(now)]
        # If every gradient was skipped there is nothing to push. Skipped samples are behind us.
        if self._dealt is None or batch.dealt is None:
            is_early = self._any_length and self._client.is_awaited and self._exchange.n_unsent > 0
            self._push_due = is_early or self._exchange.pushes_after(step.number)
        else:
            self._end_batch(self._dealt, batch.dealt)
        return actions

    def _repeated(self, step: Step, dealt: DealtBatch | None, now: Seconds) -> Sequence[Action]:
        # A rank that was lost pushes again what this one has pushed. Its push ends a tick, and so
        # does this step here: else a round waits for this rank, and this rank for that push.
        n = self._n_repeated
        if dealt is None:
            ends = self._exchange.pace.pushes_after(step.number, n_unsent=n)
        else:
            ends = n > 0 and (dealt.ends_push or dealt.ends_range)
        if not ends:
            return []
        self._n_repeated = 0
        return self._client.skip_tick(now, staleness=self._config.exchange.staleness)

    def _end_batch(self, pushes: DealtPushes, dealt: DealtBatch) -> None:
        """Let a push end where that of any other replica would, or as the link allows."""
        exchange, is_auto = self._exchange, self._any_length
        is_full = exchange.n_unsent >= exchange.pace.n_push
        is_full = is_full or (is_auto and self._client.is_awaited)
        if not pushes.add(dealt, is_auto=is_auto, is_full=is_full):
            return
        self._end_dealt(pushes)
        if dealt.ends_range:
            pushes.end_range(self.counters.pushes + self._push_due)

    def _end_dealt(self, pushes: DealtPushes) -> None:
        """A push ends here; without a gradient there is nothing to push."""
        exchange = self._exchange
        self._push_due = exchange.n_unsent > 0 and bool(self.values)
        if not exchange.n_unsent:
            pushes.skip()
        if not self._push_due:
            pushes.drop()
            exchange.discard()

    def _staged_at_once(
        self, staged: PushResult, batch: BatchIndices, now: Seconds
    ) -> Sequence[Action]:
        if self._dealt is not None and batch.dealt is not None:
            self._dealt.end(batch.dealt.push)
        self._exchange.staged()
        actions = self._staged(staged, n_gradients=1, stop=batch.stop, now=now)
        if self._dealt is not None and batch.dealt is not None and batch.dealt.ends_range:
            self._dealt.end_range(self.counters.pushes)
        return actions

    def _fit_to_link(self, now: Seconds) -> Sequence[Action]:
        step_seconds = self.seconds / self.counters.steps
        seconds = self._exchange.fit_to_link(now, step_seconds=step_seconds)
        if seconds is None:
            return []
        text = (
            f"exchanges every {self._exchange.pace.n_push} steps: a push and a fetch take "
            f"{duration(seconds)}, a step {duration(step_seconds)}"
        )
        return [Report(text=text)]

    def _skip(
        self, result: Closed, step: Step, *, n_gradients: int, reports_loss: bool
    ) -> Sequence[Action]:
        if result.staged is not None:
            self._client.abandon()
        samples = shown_samples(step.batch_slice.samples.indices.tolist())
        text = (
            f"step {self.counters.steps}: the gradient of {samples} is NaN or infinite (loss "
            f"{self._bad.loss:g}); it is skipped" + (f": {result.blame}" if result.blame else "")
        )
        report = self._bad.count(
            n_gradients, [Report(text=text, level="warning")], blame=result.blame
        )
        # All ranks skip the same step; only the rank that knows the loss reports it.
        return report if reports_loss else []

    def _skipped_in(self, step: Step, n_small: int) -> Sequence[Action]:
        self.counters.non_finite += n_small
        samples = shown_samples(step.batch_slice.samples.indices.tolist())
        text = (
            f"step {self.counters.steps}: {n_small} small batches of {samples} have gradients that "
            "are NaN or infinite; they are skipped"
        )
        return [Report(text=text, level="warning")]

    # --- pushes ---

    @property
    def _is_due(self) -> bool:
        """Whether a push must come before another step."""
        return self._push_due and not (
            (self._exchange.fetch_due and self._exchange.pace.sends_delta) or self._may_go_on
        )

    def _may_push(self, *, final: bool) -> bool:
        """Return whether to stage what has accrued: every shard has a free slot for it."""
        if final and not self._push_due:
            self._end_last_push()
            self._push_due = self._push_due or self._owes_rest
        # The values fetched after a push of local steps contain it, and so none after it.
        # A replica without any further step to take begins no fetch, and its push is waited for.
        is_last = final or (self._dealt is not None and self._dealt.plan.is_read)
        is_early = self._exchange.pace.sends_delta and self._exchange.fetch_due and not is_last
        return self._push_due and not is_early and self._client.can_push

    def _end_last_push(self) -> None:
        """After the last step, one more push carries what has accrued."""
        if self._dealt is None:
            self._push_due = self._exchange.n_unsent > 0
        elif not self._carries_all:
            self._exchange.discard()
        elif self._dealt.end_early():
            self._end_dealt(self._dealt)

    def _push(self, steps: Steps, *, is_last: bool) -> Waiting[None]:
        self._push_due, self._staging = False, True
        self._n_last += is_last
        n_copies = 6.0 if self._exchange.pace.sends_delta else 2.0
        n_copies += 4.0 if self._exchange.encodes else 0.0
        cost = Cost(n_bytes=n_copies * self._items.n_bytes)
        n_gradients = self._exchange.n_unsent
        if self._dealt is not None and not n_gradients:
            self._dealt.end_nothing()
        steps.start(Compute(name=PUSH, work=self._staging_work(is_last=is_last), cost=cost))
        event = yield
        assert event is not None
        result = event.result
        assert isinstance(result, PushResult), result
        self._staging = False
        if self._dealt is not None:
            self._dealt.drop()
        stop = self._position if n_gradients else self._pushed  # or it is of what was held back
        steps.actions += self._staged(result, n_gradients=n_gradients, stop=stop, now=steps.now)

    def _staged(
        self, staged: PushResult, *, n_gradients: int, stop: int, now: Seconds
    ) -> Sequence[Action]:
        actions = self._client.staged(
            staged,
            n_gradients=n_gradients,
            samples=stop,
            now=now,
            dealt=msgspec.UNSET if self._dealt is None else self._dealt.span,
            in_turn=self._exchange.pace.awaits_pushes,
        )
        self._exchange.sent(now, finite=staged.finite)
        if not staged.finite:  # the client's report names the tensors
            if self._dealt is not None:
                self._dealt.skip()
            return self._bad.count(n_gradients, actions)
        self._pushed = max(self._pushed, stop)
        self.counters.pushes += 1
        self.counters.gradients_pushed += n_gradients
        self._bad.n_in_row = 0
        return actions

    @override
    def command(
        self, leader: Leader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        if not isinstance(message, StartTraining):
            return super().command(leader, message, now)
        samples = message.samples
        if self._dealt is not None:
            plan = self._dealt.plan
            plan.take(message.ranges or (), n_before=message.n_before)
            samples = plan.n_dealt  # the leader asks for its steps
        self._progress.samples_allowed = samples
        return leader.begin(now, samples=samples)

    @override
    def granted(self, message: GrantSteps, *, is_first: bool) -> None:
        if self._dealt is None or message.dealt is msgspec.UNSET:
            return
        if is_first:
            self._dealt.plan.follow(message.dealt)
        else:
            self._dealt.plan.take(message.dealt.ranges, n_before=message.dealt.n_before)

    @override
    def report(
        self, leader: Leader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Report progress to the supervisor, at most every `progress_seconds`."""
        skipped = NOTHING if self._dealt is None else self._dealt.skipped
        computing = self.seconds
        due = self._progress.due(leader, now, final=final, computing=computing, skipped=skipped)
        return due, []

    @override
    def figures(self) -> Mapping[str, float]:
        counters = self.counters
        figures = {name: float(getattr(counters, name)) for name in counters.__dataclass_fields__}
        figures |= {"samples": float(self._position), "seconds_computing": self.seconds}
        n_allowed = self._progress.samples_allowed
        if n_allowed is None:
            return figures
        if self._dealt is None:
            return figures | {"samples_allowed": float(n_allowed)}
        n_applied = counters.pushes - self._client.unacknowledged
        return figures | self._dealt.figures(n_applied, position=self._position)

    # --- work of the compute executor

    def _staging_work(self, *, is_last: bool) -> Callable[[], PushResult]:
        exchange = self._exchange
        clocks, touched = exchange.push_facts(self._client.clocks, trained=self._items.trained)
        draft = self._client.draft(fetched_clocks=clocks, touched=touched, is_last=is_last)

        is_rest = not exchange.n_unsent

        def stage() -> PushResult:
            exchange.put_into(draft, is_rest=is_rest)
            result = draft.finish()
            # Only the push buffers hold the sum now: no gradient is pushed twice (DB-8).
            exchange.staged(finite=result.finite, is_rest=is_rest)
            return result

        return stage

    def _close(self, step: Step, step_result: StepResult) -> LocalNorm | Closed:
        """Return the local part of the norm reduction; with one rank, finish the step at once."""
        step.after = self._after(step_result)
        if step.draft is not None and not step.draft.is_void:
            self._put_rest(step, step.draft)
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

    def _put_rest(self, step: Step, draft: PushDraft) -> None:
        for item, gradient in step.gradients.items():
            if item not in draft:  # nothing has accumulated it
                draft.put(item, gradient)
        if not all(item in draft for item in self._items.trained):
            others = {*self._exchange.buffers.all}
            has = [item in draft or item in others for item in range(len(self.values))]
            pairs = zip(self.values, has, strict=True)
            step.touched = [one if is_there else None for one, is_there in pairs]
        step.gradients.clear()

    @property
    def _bound(self) -> float | None:
        """The bound of the norm, if it is not the executor that clips."""
        return None if self._is_whole else self._config.clip_norm

    def _square(self, step: Step) -> float:
        # Without clipping only finiteness matters, and that only if someone uses it.
        if self._bound is not None:
            return sum_of_squares(step.gradients)
        looks = self._reduces_norm or self._exchange.pace.sums_gradients
        return 0.0 if not looks or is_finite(step.gradients) else math.nan

    def _settle(self, step: Step, square: float, sample: int | None) -> Closed:
        is_void = step.draft is not None and step.draft.is_void
        if not math.isfinite(square):
            blame = blame_of(sample)
            return Closed(is_finite=False, staged=step.staged, is_void=is_void, blame=blame)
        # A running average that is not finite comes from a bad sample and is dropped.
        if step.after and is_finite(step.after):
            for item, value in step.after.items():
                self.values[item].copy_(value)
        if step.staged is None and step.counts:
            if self._bound is not None:
                clip(step.gradients, square, norm_max=self._bound)
            # Of the parameters that this step was computed from; deltas have a rate of their own.
            is_taken = self._small is not None or not step.steps_locally
            rate = 0.0 if is_taken else self._local_rate()
            self._exchange.add(step.gradients, rates=rate, number=step.scheduled)
            step.gradients.clear()
        return Closed(is_finite=True, staged=step.staged, is_void=is_void)

    def _after(self, step_result: StepResult) -> dict[int, torch.Tensor]:
        after = {item: value.reshape(-1) for item, value in step_result.averages.items()}
        # BatchNorm counts the steps of its averages in a tensor of its own.
        for item, count in self._items.counts.items():
            if item in step_result.averages:
                after[count] = self.values[count] + 1
        return after
