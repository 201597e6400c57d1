"""The model replica of Downpour SGD: Algorithm 1.1 of Dean et al. 2012 as a state machine.

    step                 0        1        2        3        ...    n_fetch = n_push = 2
    fetch                x                 x                        DB-6
    push                 x                 x                        DB-6
    gradients pushed     g0                g1 + g2                  DB-7: raw, summed
    local step                             (x)      x               DB-9

Paper to code: alpha is `local_learning_rate`, accrued gradients are `FlatModel.accrued`.
`Replica` holds the whole model in one process. `TrainingObjective` does the same for one
rank of a model-parallel group: each rank fetches, steps and pushes the regions it keeps.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, assert_never, final

from distbelief.data.sharding import DataShard
from distbelief.errors import DistBeliefError, JobError, LocalProtocolError, RemoteProtocolError
from distbelief.execution.executor import Put, StepResult
from distbelief.parameter_server.client.buffers import FetchResult, PushResult
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.link import ShardReply
from distbelief.protocol import Evaluate, Finished, Message, StartTraining, Stop
from distbelief.roles.role import (
    SUPERVISOR,
    Action,
    Address,
    Compute,
    Computed,
    Cost,
    Event,
    Exit,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    message_types,
)
from distbelief.worker.batches import BatchIndices, BatchSlice, Prefetcher
from distbelief.worker.config import DownpourConfig
from distbelief.worker.gradients import Closed, RankTrainer, Step
from distbelief.worker.group import Install, LocalNorm
from distbelief.worker.group_leader import GroupLeader, Outgoing
from distbelief.worker.local_executor import Attempt, Batch, LocalExecutor, Outcome
from distbelief.worker.metrics import Counters, ProgressReporter, TrainingMetrics


# Three activities overlap (DB-10): the compute executor takes steps, the data executor reads
# the next batch, and messages carry fetches and pushes.

# Before a fetch is repeated that met a half-applied update.
TORN_RETRY_SECONDS = 1e-3


ReplicaMessage = StartTraining | Stop | ShardReply


@final
class Replica:
    """The role `replica-INDEX`: a whole model in one process.

    Args:
        config: When to fetch, push and step.
        client: Connects to all shards; it must be able to push.
        trainer: Does the work of the executors on the model.
        data_shard: This replica's part of the training data.
        await_begin: Wait for `StartTraining` before the first step.
    """

    accepts: Final = message_types(ReplicaMessage)

    def __init__(
        self,
        config: DownpourConfig,
        *,
        client: ParameterClient,
        trainer: LocalExecutor,
        data_shard: DataShard,
        await_begin: bool = True,
    ) -> None:
        self._config = config
        self._client = client
        self._trainer = trainer
        self._reader = Prefetcher(
            data_shard, trainer, batch_size=config.batch_size, n_batches_max=config.max_steps
        )
        self._metrics = TrainingMetrics(config)
        self._begun = not await_begin
        self._samples_allowed: int | None = None  # pause after so many
        self._has_position = False  # the position in the data is known
        self._stopped_by: Address | None = None
        self._ended = False
        self._step = 0  # the next one, or the current one
        self._attempt: Attempt | None = None  # at the current step
        self._fetching = False  # begun, not yet installed
        self._torn_wait = False
        self._clock = 0  # of the parameters in use
        self._push_due = False
        self._staging = False
        self._n_accrued = 0
        self._accrued_clocks: tuple[int, ...] = ()  # when the oldest was computed

    @property
    def counters(self) -> Counters:
        return self._metrics.counters

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        Raises:
            JobError: model, data or learning rate make training impossible.
            PeerLostError: a shard has been silent for too long.
        """
        actions: list[Action] = []
        if self._client.owns(event):
            actions += self._client.handle(event, now)
        else:
            match event:
                case Started():
                    actions += self._client.start(event.incarnation, now)
                case Received():
                    self._receive(event.sender, event.message)
                case TimerFired(name="replica:retry"):
                    self._torn_wait = False
                case Computed():
                    actions += self._computed(event, now)
                case _:
                    pass  # the client handles peers that join and leave
        # Every event may have removed the last obstacle to the next piece of work.
        return [*actions, *self._advance(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return the state as a phrase, and the counters of client and replica."""
        counters = {**self._client.counters(), **self._metrics.figures()}
        if self._samples_allowed is not None:
            counters["samples_allowed"] = float(self._samples_allowed)
        return self._state(), counters

    def _state(self) -> str:
        if self._attempt is not None:
            return "computing"
        if self._staging:
            return "pushing"
        waited = self._client.waiting_for
        if waited is not None and (self._begun or not self._client.ready):
            return f"waiting for {waited}"
        if self._is_over:
            return "finishing"
        if self._is_held:
            return "waiting for more samples"
        return "fetching" if self._begun else "waiting for begin"

    # ---------------------------------------------------------------------- events

    def _receive(self, sender: Address, message: Message) -> None:
        if isinstance(message, StartTraining):
            self._begun, self._samples_allowed = True, message.samples
        elif isinstance(message, Stop):
            self._stopped_by = sender
        else:
            raise RemoteProtocolError(
                f"{sender} sent a replica {type(message).__name__}: it accepts only "
                "StartTraining, Stop and messages of shards"
            )

    def _computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        if event.error is not None:
            raise _failure(event.error, step=self._step)
        match event.name:
            case "replica:read":
                self._reader.have_read(event.result)
                return []
            case "replica:install":
                self._metrics.seconds_computing += event.seconds
                return self._installed(event.result, now)
            case "replica:step":
                self._metrics.seconds_computing += event.seconds
                return self._stepped(event.result, now)
            case "replica:push":
                return self._pushed(event.result, now)
            case _:
                raise LocalProtocolError(f"unexpected result of work {event.name!r}")

    # ---------------------------------------------------------------- state machine

    @property
    def _is_over(self) -> bool:
        if self._stopped_by is not None:
            return True
        return self._config.is_over_at(self._step, position=self._metrics.position)

    @property
    def _is_held(self) -> bool:
        allowed = self._samples_allowed
        return allowed is not None and self._has_position and self._metrics.position >= allowed

    def _advance(self, now: Seconds) -> Sequence[Action]:
        # The compute executor has one step or one push at a time.
        busy = self._attempt is not None or self._staging or self._torn_wait
        if busy or self._ended:
            return []
        if self._is_over and not self._push_due:
            if not self._n_accrued:
                return self._end(now)
            self._push_due = True  # the final push: what has accrued since the previous one
        if not self._client.ready:
            return []
        if self._push_due:
            return self._push()
        if not self._begun:
            return []
        self._start_position(now)
        # Earlier incarnations may have trained everything already.
        return self._end(now) if self._is_over else self._take_step(now)

    def _start_position(self, now: Seconds) -> None:
        # The data position is the one thing that outlives an incarnation: the shards know how many
        # samples their applied pushes amount to.
        if not self._has_position:
            self._has_position = True
            self._reader.start(self._client.samples)
            self._metrics.begin(self._client.samples, now)

    def _take_step(self, now: Seconds) -> Sequence[Action]:
        if self._is_held:
            return self._metrics.progress(now)  # the supervisor may wait for this report
        actions = [*self._reader.read_ahead(), *self._fetch(now)]
        fetches = self._config.fetches_at(self._step)
        fetched = self._fetching and self._client.fetch_complete
        batch = self._reader.next
        # The next step lacks its batch or its parameters.
        if batch is None or (fetches and not fetched):
            return actions
        self._attempt = Attempt()
        if fetches:
            actions.append(self._install(self._attempt))
        actions.append(self._compute(batch, self._attempt))
        if not fetches:
            actions += self._fetch_ahead(now)
        return actions

    def _end(self, now: Seconds) -> Sequence[Action]:
        # A push that is lost now would be lost for good.
        if self._client.unacknowledged:
            return []
        self._ended = True
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        return [
            *self._metrics.progress(now),
            Send(receiver=self._stopped_by or SUPERVISOR, message=finished),
            Exit(),
        ]

    # ----------------------------------------------------------------------- fetch

    def _fetch(self, now: Seconds) -> Sequence[Action]:
        if self._fetching or not self._config.fetches_at(self._step):
            return []
        # With local steps to keep, or `blocking`, one replica is sequential SGD (DB-11).
        if self._config.awaits_pushes and self._client.unacknowledged:
            return []
        self._fetching = True
        return self._client.begin_fetch(now)

    def _fetch_ahead(self, now: Seconds) -> Sequence[Action]:
        # Block messages travel while this step computes; shared memory is read only at the install,
        # just before the step, so the newest values are used.
        config, after = self._config, self._step + 1
        if self._fetching or self._stopped_by is not None:
            return []
        if not config.may_fetch_during(self._step):
            return []
        if config.awaits_pushes and self._client.unacknowledged:
            return []
        present = self._reader.next
        position = self._metrics.position + (present.n_samples if present else 0)
        is_last = config.is_over_at(after, position=position)
        if is_last or not config.fetches_at(after):
            return []
        self._fetching = True
        return self._client.begin_fetch(now)

    def _install(self, attempt: Attempt) -> Compute:
        model, config = self._trainer.model, self._config
        work = self._client.install(model.values)
        rate = config.rate(self._clock) if config.keeps_local_steps else None
        # Read and write the values; to repeat local steps also the gradients and the values.
        n_copies = 5 if rate and self._n_accrued else 2
        return Compute(
            name="replica:install",
            work=partial(self._trainer.install, work, attempt, rate=rate),
            cost=Cost(n_bytes=float(n_copies * model.n_bytes)),
            remaining=lambda: self._client.readable_share,
        )

    def _installed(self, result: object, now: Seconds) -> Sequence[Action]:
        assert isinstance(result, FetchResult), result
        actions = list(self._client.installed(result, now))
        if result.torn:
            return actions
        self._fetching = False
        self._clock = max(result.clocks, default=0)
        self.counters.fetches += 1
        return [*actions, *self._fetch_ahead(now)]

    # ------------------------------------------------------------------------ step

    def _compute(self, batch: Batch, attempt: Attempt) -> Compute:
        model, rate = self._trainer.model, self._local_rate()
        n_copies = 1 if rate is None else 4  # read w; a local step reads g and w, writes w
        return Compute(
            name="replica:step",
            work=partial(self._trainer.step, batch, attempt, local_rate=rate),
            cost=Cost(flops=model.flops(batch.n_samples), n_bytes=float(n_copies * model.n_bytes)),
            remaining=lambda: float(not attempt.is_torn),
        )

    def _local_rate(self) -> float | None:
        return self._config.local_rate(self._step, clock=self._clock)

    def _stepped(self, result: object, now: Seconds) -> Sequence[Action]:
        assert isinstance(result, Outcome | None), result
        self._attempt = None
        # The fetch for this step was torn: fetch again, then compute the same batch.
        if result is None:
            self.counters.torn += 1
            self._torn_wait = True
            return [SetTimer(name="replica:retry", at=now + TORN_RETRY_SECONDS)]
        batch = self._reader.take()
        self._metrics.stepped(n_samples=batch.n_samples, loss=result.loss)
        actions: list[Action] = []
        if result.is_finite:
            self._accrued()
        else:
            actions += self._metrics.skip(result.blame)
        # If every gradient was skipped there is nothing to push.
        self._push_due = self._config.pushes_at(self._step) and self._n_accrued > 0
        self._step += 1
        return [*actions, *self._metrics.progress_if_due(now)]

    def _accrued(self) -> None:
        if not self._n_accrued:
            self._accrued_clocks = self._client.clocks
        self._n_accrued += 1
        self.counters.gradients += 1
        self.counters.local_steps += self._local_rate() is not None
        if self._config.checks_every_gradient:
            self._metrics.good()

    # ------------------------------------------------------------------------ push

    def _push(self) -> Sequence[Action]:
        # At most two pushes are in flight; a third waits for a free slot on every shard.
        if not self._client.can_push:
            return []
        self._staging = True
        model = self._trainer.model
        # A restarted shard counts on from an older clock, so take the smaller one.
        oldest = map(min, self._accrued_clocks, self._client.clocks)
        stage = self._client.stage(model.accrued, model.values, fetched_clocks=tuple(oldest))
        return [
            Compute(
                name="replica:push",
                work=partial(self._trainer.push, stage),
                cost=Cost(n_bytes=2.0 * model.n_bytes),
            )
        ]

    def _pushed(self, result: object, now: Seconds) -> Sequence[Action]:
        assert isinstance(result, PushResult), result
        self._staging = self._push_due = False
        n_gradients, self._n_accrued = self._n_accrued, 0
        actions = self._client.staged(
            result, n_gradients=n_gradients, samples=self._metrics.position, now=now
        )
        if not result.finite:  # the client's report names the tensors
            return self._metrics.bad(n_gradients, actions)
        self.counters.pushes += 1
        self.counters.gradients_pushed += n_gradients
        self._metrics.good()
        return actions


def _failure(error: BaseException, *, step: int) -> DistBeliefError:
    if isinstance(error, DistBeliefError):
        return error
    return JobError(f"step {step} failed: {type(error).__name__}: {error}")


PUSH: Final = "machine:push"


@final
class TrainingObjective:
    """The objective of a rank that trains; see `worker.group.Objective`.

    Args:
        config: When to fetch, push and step.
        client: Connects to the shards that hold what this rank keeps.
        trainer: Does the work of the steps.
        await_begin: The leader waits for `StartTraining`.

    Attributes:
        values: One flat tensor per item that this rank keeps.
    """

    def __init__(
        self,
        config: DownpourConfig,
        *,
        client: ParameterClient,
        trainer: RankTrainer,
        await_begin: bool,
    ) -> None:
        self.values = trainer.values
        self._config = config
        self._client = client
        self._trainer = trainer
        self._accrued = trainer.accrued
        self._metrics = TrainingMetrics(config)
        self._begun = not await_begin
        self._samples_allowed: int | None = None
        self._pushed = 0  # samples up to the end of the last push
        self._clock = 0
        self._begun_at: Seconds = 0.0
        self._step: Step | None = None
        self._push_due = False
        self._staging = False
        self._reporter = ProgressReporter(every=config.progress_seconds)

    # ------------------------------------------------------------------ generation

    @property
    def pushed(self) -> int | None:
        if not self.values:
            return None
        return max(self._pushed, self._client.samples)

    @property
    def all_pushes_applied(self) -> bool:
        return not (self._staging or self._client.unacknowledged)

    def may_fetch(self, *, ahead: bool) -> bool:
        config, step = self._config, self._step
        if ahead and step is not None and not config.may_fetch_during(step.number):
            return False
        return not (config.awaits_pushes and self._client.unacknowledged)

    @property
    def is_due(self) -> bool:
        return self._push_due

    def begin(self, position: int, now: Seconds) -> None:
        # A rank whose shards are ahead of the group pushes nothing until the others catch up: each
        # gradient is applied once.
        self._pushed = self.pushed or 0
        if not self._metrics.position:
            self._begun_at = now
        self._metrics.begin(position, now)

    def drop(self) -> None:
        # A new generation begins where the shards' state ends, so this is computed again.
        step, self._step = self._step, None
        if step is not None and step.draft is not None:
            self._client.abandon()
        self._trainer.drop()
        self._push_due = False

    def fetches_at(self, step: int) -> bool:
        return self._config.fetches_at(step)

    def installing(self, work: Install) -> Install:
        if not self._config.keeps_local_steps:
            return work
        return self._trainer.installing(work, rate=self._config.rate(self._clock))

    def fetched(self, seconds: Seconds) -> bool:
        self._metrics.seconds_computing += seconds
        self._metrics.counters.fetches += 1
        self._clock = max(self._client.clocks, default=0)
        return True

    # ------------------------------------------------------------------------ step

    def open(self, step: int, batch: BatchIndices, batch_slice: BatchSlice) -> Put:
        config = self._config
        # A rank may die when some shards have applied its push and others have not. It then goes on
        # from the least advanced shard, and the others apply that one push twice. This is accepted:
        # shards know only sample counts, and it is one gradient of one replica.
        counts = bool(self.values) and batch.stop > self._pushed
        waits = config.checks_every_gradient or config.clip_norm is not None
        # Stage during the backward pass only if nothing can still reject or change the gradient.
        at_once = counts and not waits and not self._accrued.n_gradients
        draft = self._client.draft() if at_once and self._client.can_push else None
        self._step = Step(
            number=step,
            counts=counts,
            draft=draft,
            local_rate=config.local_rate(step, clock=self._clock),
            batch=batch,
            batch_slice=batch_slice,
        )
        return self._step.put

    def close(self, step_result: StepResult) -> LocalNorm | Closed:
        assert self._step is not None
        return self._trainer.close(self._step, step_result)

    def closed(
        self, result: object, step_result: StepResult, batch: BatchIndices, now: Seconds
    ) -> Sequence[Action]:
        """Account for a finished step; send the push that it staged."""
        assert isinstance(result, Closed), result
        step, self._step = self._step, None
        assert step is not None
        n = len(batch.indices)
        loss = math.nan if step_result.loss is None else step_result.loss / n
        self._metrics.stepped(n_samples=n, loss=loss)
        holds_nothing = not self.values  # such a rank may still know the loss
        if not step.counts and not holds_nothing:
            return []
        if not result.is_finite:
            return self._skip(result, step, reports_loss=step_result.loss is not None)
        if holds_nothing:
            self._metrics.good()
            return []
        counters = self._metrics.counters
        counters.gradients += 1
        if step.draft is not None:
            assert result.staged is not None
            return self._staged(result.staged, n_gradients=1, stop=batch.stop, now=now)
        self._accrued.count(batch.stop, clocks=self._client.clocks)
        counters.local_steps += step.local_rate is not None
        if self._config.checks_every_gradient:
            self._metrics.good()
        self._push_due = self._config.pushes_at(step.number)
        return []

    def _skip(self, result: Closed, step: Step, *, reports_loss: bool) -> Sequence[Action]:
        if result.staged is not None:
            self._client.abandon()
        samples = step.batch.indices.tolist()
        # All ranks skip the same step; only the rank that knows the loss reports it.
        report = self._metrics.skip(result.blame, samples=samples)
        return report if reports_loss else []

    # ------------------------------------------------------------------------ push

    def work(self, *, final: bool) -> Sequence[Action]:
        """Stage the accrued gradients once every shard has a free slot."""
        # After the last step, one more push carries what has accrued.
        self._push_due |= final and self._accrued.n_gradients > 0
        if not (self._push_due and self._client.ready and self._client.can_push):
            return []
        self._push_due, self._staging = False, True
        oldest = self._accrued.fetched_clocks(self._client.clocks)
        stage = self._client.stage(self._accrued.sums, self.values, fetched_clocks=oldest)
        n_bytes = 2.0 * sum(value.nbytes for value in self.values)
        return [Compute(name=PUSH, work=stage, cost=Cost(n_bytes=n_bytes))]

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Send the staged push, or drop it if it is not finite."""
        if event.name != PUSH:
            raise LocalProtocolError(f"unexpected result of work {event.name!r}")
        result = event.result
        assert isinstance(result, PushResult), result
        self._staging = False
        n_gradients, stop = self._accrued.n_gradients, self._accrued.stop
        self._trainer.staged(result)
        return self._staged(result, n_gradients=n_gradients, stop=stop, now=now)

    def _staged(
        self, staged: PushResult, *, n_gradients: int, stop: int, now: Seconds
    ) -> Sequence[Action]:
        actions = self._client.staged(staged, n_gradients=n_gradients, samples=stop, now=now)
        if not staged.finite:  # the client's report names the tensors
            return self._metrics.bad(n_gradients, actions)
        self._pushed = max(self._pushed, stop)
        self._metrics.counters.pushes += 1
        self._metrics.counters.gradients_pushed += n_gradients
        self._metrics.good()
        return actions

    # ---------------------------------------------------------------------- leader

    def command(
        self, leader: GroupLeader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        match message:
            case StartTraining():
                self._samples_allowed = message.samples
                return leader.begin(now, samples=message.samples)
            case Stop():
                return leader.stop(now)
            case Evaluate():
                return []  # only evaluators answer this
            case _:
                assert_never(message)

    def report(
        self, leader: GroupLeader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Report progress to the supervisor, at most every `progress_seconds`."""
        progress = self._reporter.report(
            leader,
            now,
            final=final or leader.is_held,
            computing=self._metrics.seconds_computing,
            elapsed=now - self._begun_at,
        )
        if progress is None:
            return [], []
        return [Send(receiver=SUPERVISOR, message=progress)], []

    @property
    def clock(self) -> float | None:
        clocks = self._client.clocks
        return sum(clocks) / len(clocks) if clocks else None

    def figures(self) -> Mapping[str, float]:
        figures = self._metrics.figures()
        if self._samples_allowed is not None:
            figures["samples_allowed"] = float(self._samples_allowed)
        return figures
