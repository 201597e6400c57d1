"""The model replica: Algorithm 1.1 of Dean et al. 2012, as a state machine.

    step                 0        1        2        3        ...    n_fetch = n_push = 2
    fetch                x                 x                        DB-6
    push                 x                 x                        DB-6
    gradients pushed     g0                g1 + g2                  DB-7: raw, summed
    local step                             (x)      x               DB-9

Paper to code: alpha `local_learning_rate`, n_fetch `n_fetch`, n_push `n_push`, accrued
gradients `LocalModel.accrued`.

Three things run side by side, weakly synchronised (DB-10): the compute lane takes
steps, the data lane reads the batch of the next one, and the client's messages carry
fetches and pushes. What was fetched is copied into the model just before the step that
it is for, so from shared memory the newest values are used; block messages are asked
for while the step before is computed. With `blocking` a fetch begins only when every
push is applied: one replica then is sequential SGD (DB-11).

A step waits if no slot is free for the push before it: at most two pushes of a replica
are under way. After the last step one more push carries what has accrued since.

The place in the data is the one thing that outlives a replica: the shards know how many
samples the pushes they applied amount to, and a new incarnation goes on from there.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

from distbelief.data.subset import BatchCursor, DataShard
from distbelief.downpour.steps import Attempt, Batch, Outcome, Trainer
from distbelief.errors import (
    DistBeliefError,
    JobError,
    LocalProtocolError,
    RemoteProtocolError,
)
from distbelief.messages import Begin, Finished, Message, Progress, Stop
from distbelief.parameter_server.client import Installed, ParameterClient, Staged
from distbelief.parameter_server.schedules import Constant, Schedule
from distbelief.roles import (
    SUPERVISOR,
    Action,
    Address,
    Compute,
    Computed,
    Cost,
    Event,
    Halt,
    Lane,
    Received,
    Report,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
)


TORN_RETRY_SECONDS = 1e-3
"""After a fetch that met an update half done."""

N_BATCHES_HELD = 2
"""That of the present step, and the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownpourConfig:
    """How a replica trains.

    Attributes:
        batch_size: Samples of one step.
        n_fetch: Steps between fetches.
        n_push: Steps between pushes.
        blocking: Fetch only once every push is applied.
        learning_rate: Of the shards' rule, for messages and local steps.
        local_learning_rate: Of local steps; None: `learning_rate`.
        schedule: Of the shards' rule; local steps follow it.
        clip_norm: Bound of each gradient's 2-norm; None: no bound.
        max_steps: Steps of one life; None: until told to stop.
        progress_seconds: Between reports to the supervisor, at least.
        non_finite_limit: Gradients in a row that may be NaN or infinite.
        seed: Of the order of samples and of the model's own randomness.
    """

    batch_size: int
    n_fetch: int = 1
    n_push: int = 1
    blocking: bool = False
    learning_rate: float = 0.0
    local_learning_rate: float | None = None
    schedule: Schedule = field(default_factory=Constant)
    clip_norm: float | None = None
    max_steps: int | None = None
    progress_seconds: Seconds = 0.5
    non_finite_limit: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "n_fetch", "n_push", "non_finite_limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; use 1 or more")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(
                f"max_steps is {self.max_steps}; use 1 or more, or leave it out"
            )
        if self.clip_norm is not None and not 0.0 < self.clip_norm < math.inf:
            raise ValueError(
                f"clip_norm is {self.clip_norm}; use a number above 0, or leave it out"
            )
        if self.progress_seconds < 0.0:
            raise ValueError(
                f"progress_seconds is {self.progress_seconds}; use 0 or more"
            )

    @property
    def checks_every_gradient(self) -> bool:
        """A bad gradient must not spoil a sum, or the local copy of the parameters."""
        return self.n_fetch > 1 or self.n_push > 1

    def local_rate(self, clock: int) -> float:
        """Return the rate of a local step on parameters of this clock."""
        rate = self.local_learning_rate
        if rate is None:
            rate = self.learning_rate
        return rate * self.schedule.factor(clock)


@dataclass(slots=True, kw_only=True)
class Counters:
    """What a replica has done in this life."""

    steps: int = 0
    fetches: int = 0
    pushes: int = 0
    local_steps: int = 0
    gradients: int = 0  # accrued
    gradients_pushed: int = 0
    non_finite: int = 0  # gradients skipped
    torn: int = 0  # attempts given up because a fetch met an update


@final
class ModelReplica:
    """The role `replica-INDEX`.

    Args:
        config: How it trains.
        client: Of the shards; it pushes.
        trainer: What is run in its lanes, with the model.
        data_shard: Its part of the data.
        await_begin: Wait for `Begin` before the first step.
    """

    def __init__(
        self,
        config: DownpourConfig,
        *,
        client: ParameterClient,
        trainer: Trainer,
        data_shard: DataShard,
        await_begin: bool = True,
    ) -> None:
        self._config = config
        self._client = client
        self._trainer = trainer
        self._cursor = BatchCursor(data_shard)
        self._begun = not await_begin
        self._begun_at: Seconds | None = None
        self._stopped_by: Address | None = None
        self._position = -1  # samples consumed; known once the shards have told
        self._step = 0
        self._clock = 0  # of the parameters in use
        self._batches: deque[Batch] = deque()  # the first is that of the next step
        self._read_to = 0  # position after the last batch asked for
        self._reading = False
        self._bytes_per_sample = 0.0
        self._fetching = False  # begun, and not yet installed
        self._attempt: Attempt | None = None  # the step under way
        self._staging = False  # a push by itself is under way
        self._torn_wait = False
        self._push_due = False
        self._n_accrued = 0
        self._accrued_clocks: tuple[int, ...] = ()  # when the oldest was computed
        self._n_bad_in_row = 0
        self._seconds_computing = 0.0
        self._loss = 0.0  # of the last step
        self._unreported_loss = 0.0  # sum over the samples since the last report
        self._n_unreported = 0  # samples
        self._reported_at: Seconds = -math.inf
        self._ended = False
        self.counters = Counters()

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        Raises:
            JobError: model, data or learning rate make it impossible to go on.
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
                    pass  # peers come and go: the client's business
        return [*actions, *self._advance(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing, and: its counters, and the client's."""
        own = self.counters
        counters: dict[str, float] = dict(self._client.counters())
        counters |= {
            name: float(getattr(own, name)) for name in own.__dataclass_fields__
        }
        counters["samples"] = float(max(self._position, 0))
        counters["seconds_computing"] = self._seconds_computing
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
        if not self._begun:
            return "waiting for begin"
        return "fetching"

    # ------------------------------------------------------------------- messages

    def _receive(self, sender: Address, message: Message) -> None:
        if isinstance(message, Begin):
            self._begun = True
        elif isinstance(message, Stop):
            self._stopped_by = sender
        else:
            raise RemoteProtocolError(
                f"{sender} sent a replica {type(message).__name__}: only shards, and "
                "Begin and Stop, speak to it"
            )

    def _computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        if event.error is not None:
            raise _failure(event.error, step=self._step)
        match event.name:
            case "replica:read":
                return self._have_read(event.result)
            case "replica:install":
                self._seconds_computing += event.seconds
                return self._installed(event.result, now)
            case "replica:step":
                self._seconds_computing += event.seconds
                return self._stepped(event.result, now)
            case "replica:push":
                return self._pushed(event.result, now)
            case _:
                raise LocalProtocolError(f"nobody asked for {event.name!r}")

    # ----------------------------------------------------------------- the machine

    @property
    def _is_over(self) -> bool:
        """Whether no further step is to begin."""
        done = self._config.max_steps
        return self._stopped_by is not None or (done is not None and self._step >= done)

    def _advance(self, now: Seconds) -> Sequence[Action]:
        """Begin what can begin; the compute lane has one step or push at a time."""
        busy = self._attempt is not None or self._staging or self._torn_wait
        if busy or self._ended:
            return []
        if self._is_over and not self._push_due:
            if not self._n_accrued:
                return self._end(now)
            self._push_due = True  # the final push: what has accrued since the last
        if not self._client.ready:
            return []
        if self._push_due:
            return self._push()
        if not self._begun:
            return []
        if self._position < 0:
            self._position = self._read_to = self._client.samples
            self._begun_at = now
        return self._take_step(now)

    def _take_step(self, now: Seconds) -> Sequence[Action]:
        """Take the next step, or do whatever it still lacks."""
        actions = [*self._read(), *self._fetch(now)]
        fetches = self._is_fetch_due(self._step)
        fetched = self._fetching and self._client.fetch_complete
        if not self._batches or (fetches and not fetched):
            return actions
        self._attempt = Attempt()
        if fetches:
            actions.append(self._install(self._attempt))
        actions.append(self._compute(self._batches[0], self._attempt))
        if not fetches:
            actions += self._fetch_ahead(now)
        return [*actions, *self._read()]

    def _is_fetch_due(self, step: int) -> bool:
        return step % self._config.n_fetch == 0

    def _install(self, attempt: Attempt) -> Compute:
        model = self._trainer.model
        work = self._client.install(model.values)
        return Compute(
            name="replica:install",
            work=partial(self._trainer.install, work, attempt),
            cost=Cost(n_bytes=2.0 * model.n_bytes),
        )

    def _compute(self, batch: Batch, attempt: Attempt) -> Compute:
        model, rate = self._trainer.model, self._local_rate()
        n_copies = 1 if rate is None else 4  # parameters read; stepped: g, w, w again
        return Compute(
            name="replica:step",
            work=partial(self._trainer.step, batch, attempt, local_rate=rate),
            cost=Cost(
                flops=model.flops(batch.n_samples),
                n_bytes=float(n_copies * model.n_bytes),
            ),
        )

    def _local_rate(self) -> float | None:
        """Return the rate of this step's local step; None if a fetch overwrites it."""
        if self._is_fetch_due(self._step + 1):
            return None
        return self._config.local_rate(self._clock)

    def _read(self) -> Sequence[Action]:
        """Read a batch in advance, unless enough are there or on their way."""
        n_held = len(self._batches) + self._reading
        last = self._config.max_steps
        if (
            self._reading
            or n_held >= N_BATCHES_HELD
            or self._is_over
            or (last is not None and self._step + n_held >= last)
        ):
            return []
        self._reading = True
        indices = self._cursor.batch(self._read_to, self._config.batch_size)
        position, self._read_to = self._read_to, self._read_to + len(indices)
        return [
            Compute(
                name="replica:read",
                work=partial(self._trainer.read, position, indices),
                cost=Cost(n_bytes=2.0 * self._bytes_per_sample * len(indices)),
                lane=Lane.DATA,
            )
        ]

    def _have_read(self, result: object) -> Sequence[Action]:
        assert isinstance(result, Batch), result
        self._reading = False
        self._batches.append(result)
        self._bytes_per_sample = result.n_bytes / result.n_samples
        return []

    # ----------------------------------------------------------------------- fetch

    def _fetch(self, now: Seconds) -> Sequence[Action]:
        """Begin the fetch of the next step, unless it is under way or must wait."""
        if self._fetching or not self._is_fetch_due(self._step):
            return []
        if self._config.blocking and self._client.unacknowledged:
            return []
        self._fetching = True
        return self._client.begin_fetch(now)

    def _fetch_ahead(self, now: Seconds) -> Sequence[Action]:
        """Begin the fetch of the step after the present one (DB-10)."""
        last = self._config.max_steps
        after = self._step + 1
        if (
            self._config.blocking
            or self._fetching
            or self._is_over
            or not self._is_fetch_due(after)
            or (last is not None and after >= last)
        ):
            return []
        self._fetching = True
        return self._client.begin_fetch(now)

    def _installed(self, result: object, now: Seconds) -> Sequence[Action]:
        assert isinstance(result, Installed), result
        actions = list(self._client.installed(result, now))
        if result.torn:
            return actions
        self._fetching = False
        self._clock = max(result.clocks, default=0)
        self.counters.fetches += 1
        return [*actions, *self._fetch_ahead(now)]

    # ------------------------------------------------------------------------ step

    def _stepped(self, result: object, now: Seconds) -> Sequence[Action]:
        """Account for a step that has been computed, or could not be."""
        assert isinstance(result, Outcome | None), result
        self._attempt = None
        if result is None:
            self.counters.torn += 1
            self._torn_wait = True
            return [SetTimer(name="replica:retry", at=now + TORN_RETRY_SECONDS)]
        batch = self._batches.popleft()
        actions: list[Action] = []
        self.counters.steps += 1
        if result.is_finite:
            self._accrued()
        else:
            actions += self._bad(1, result.loss, self._warning(result.loss))
        # Nothing to push if all was skipped.
        self._push_due = self._step % self._config.n_push == 0 and self._n_accrued > 0
        self._step += 1
        self._position += batch.n_samples
        self._loss = result.loss
        self._unreported_loss += batch.n_samples * result.loss
        self._n_unreported += batch.n_samples
        if now - self._reported_at >= self._config.progress_seconds:
            actions += self._progress(now)
        return actions

    def _accrued(self) -> None:
        """Count the gradient of the step just taken; remember how old the oldest is."""
        if not self._n_accrued:
            self._accrued_clocks = self._client.clocks
        self._n_accrued += 1
        self.counters.gradients += 1
        self.counters.local_steps += self._local_rate() is not None
        if self._config.checks_every_gradient:
            self._n_bad_in_row = 0

    def _bad(
        self, n_gradients: int, loss: float, warning: Sequence[Action]
    ) -> Sequence[Action]:
        """Count gradients that were not finite; give up after too many in a row."""
        is_first = self._n_bad_in_row == 0
        self.counters.non_finite += n_gradients
        self._n_bad_in_row += n_gradients
        config = self._config
        if self._n_bad_in_row < config.non_finite_limit:
            return warning if is_first else []  # once for each row of them
        clip = config.clip_norm
        raise JobError(
            f"{self._n_bad_in_row} gradients in a row were NaN or infinite (step "
            f"{self.counters.steps}, loss {loss:g}, learning_rate "
            f"{config.learning_rate:g}): the training has diverged. Use a lower "
            "learning_rate, or "
            + ("a clip_norm" if clip is None else f"a clip_norm below {clip:g}")
        )

    def _warning(self, loss: float) -> Sequence[Action]:
        text = (
            f"step {self.counters.steps}: the gradient is NaN or infinite (loss "
            f"{loss:g}); it is skipped"
        )
        return [Report(text=text, level="warning")]

    # ------------------------------------------------------------------------ push

    def _push(self) -> Sequence[Action]:
        """Stage what has accrued, once there is a free slot on every shard."""
        if not self._client.can_push:
            return []
        self._staging = True
        model = self._trainer.model
        # A shard that has restarted since counts from an older clock again.
        oldest = map(min, self._accrued_clocks, self._client.clocks)
        stage = self._client.stage(
            model.accrued, model.values, fetched_clocks=tuple(oldest)
        )
        return [
            Compute(
                name="replica:push",
                work=partial(self._trainer.push, stage),
                cost=Cost(n_bytes=2.0 * model.n_bytes),
            )
        ]

    def _pushed(self, result: object, now: Seconds) -> Sequence[Action]:
        """Send what lies in the slots now; or, if it is not finite, forget it."""
        assert isinstance(result, Staged), result
        self._staging = self._push_due = False
        n_gradients, self._n_accrued = self._n_accrued, 0
        actions = self._client.staged(
            result, n_gradients=n_gradients, samples=self._position, now=now
        )
        if not result.finite:  # the client's report names the tensors
            return self._bad(n_gradients, self._loss, actions)
        self.counters.pushes += 1
        self.counters.gradients_pushed += n_gradients
        self._n_bad_in_row = 0
        return actions

    # ------------------------------------------------------------------------- end

    def _progress(self, now: Seconds) -> Sequence[Action]:
        if not self._n_unreported or self._begun_at is None:
            return []
        message = Progress(
            step=self._step,
            samples=self._position,
            loss=self._unreported_loss / self._n_unreported,
            seconds_computing=self._seconds_computing,
            seconds_waiting=max(now - self._begun_at - self._seconds_computing, 0.0),
        )
        self._reported_at, self._unreported_loss, self._n_unreported = now, 0.0, 0
        return [Send(receiver=SUPERVISOR, message=message)]

    def _end(self, now: Seconds) -> Sequence[Action]:
        """End once every push is known to be applied."""
        if self._client.unacknowledged:
            return []
        self._ended = True
        _, counters = self.status()
        return [
            *self._progress(now),
            Send(
                receiver=self._stopped_by or SUPERVISOR,
                message=Finished(counters=dict(counters)),
            ),
            Halt(),
        ]


def _failure(error: BaseException, *, step: int) -> DistBeliefError:
    if isinstance(error, DistBeliefError):
        return error
    return JobError(f"step {step} failed: {type(error).__name__}: {error}")
