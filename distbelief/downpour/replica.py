"""The model replica: Algorithm 1.1 of Dean et al. 2012, as a state machine.

    step                 0        1        2        3        ...    n_fetch = n_push = 2
    fetch                x                 x                        DB-6
    push                 x                 x                        DB-6
    gradients pushed     g0                g1 + g2                  DB-7: raw, summed
    local step                             (x)      x               DB-9

A fetch loses no local step: those whose gradients are not pushed yet are taken again
from the parameters fetched. With `overwrite_local_steps` they are lost, as in the
paper.

Paper to code: alpha `local_learning_rate`, n_fetch `n_fetch`, n_push `n_push`, accrued
gradients `LocalModel.accrued`.

Three things run side by side, weakly synchronised (DB-10): the compute lane takes
steps, the data lane reads the batch of the next one, and the client's messages carry
fetches and pushes. What was fetched is copied into the model just before the step that
it is for, so from shared memory the newest values are used; block messages are asked
for while the step before is computed. With `blocking`, or where there are local steps
to keep, a fetch begins only when every push is applied: one replica then is sequential
SGD (DB-11).

A step waits if no slot is free for the push before it: at most two pushes of a replica
are under way. After the last step one more push carries what has accrued since.

The place in the data is the one thing that outlives a replica: the shards know how many
samples the pushes they applied amount to, and a new incarnation goes on from there.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import final

from distbelief.data.subset import DataShard
from distbelief.downpour.config import DownpourConfig
from distbelief.downpour.reading import BatchReader
from distbelief.downpour.steps import Attempt, Batch, Outcome, Trainer
from distbelief.downpour.tally import Counters, Tally
from distbelief.errors import DistBeliefError, JobError, LocalProtocolError, RemoteProtocolError
from distbelief.messages import Begin, Finished, Message, Stop
from distbelief.parameter_server.client.client import Installed, ParameterClient, Staged
from distbelief.roles import (
    SUPERVISOR,
    Action,
    Address,
    Compute,
    Computed,
    Cost,
    Event,
    Halt,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
)


TORN_RETRY_SECONDS = 1e-3
"""After a fetch that met an update half done."""


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
        self._reader = BatchReader(
            data_shard, trainer, batch_size=config.batch_size, n_batches_max=config.max_steps
        )
        self._tally = Tally(config)
        self._begun = not await_begin
        self._samples_allowed: int | None = None  # no step begins then
        self._placed = False  # does it know where in the data to begin?
        self._stopped_by: Address | None = None
        self._ended = False
        self._step = 0  # the next, or the one under way
        self._attempt: Attempt | None = None  # at the step under way
        self._fetching = False  # begun, and not yet installed
        self._torn_wait = False
        self._clock = 0  # of the parameters in use
        self._push_due = False
        self._staging = False
        self._n_accrued = 0
        self._accrued_clocks: tuple[int, ...] = ()  # when the oldest was computed

    @property
    def counters(self) -> Counters:
        """What it has done in this life."""
        return self._tally.counters

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
        """Return what it is doing, and: the client's counters, and its own."""
        counters = {**self._client.counters(), **self._tally.figures()}
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
        if isinstance(message, Begin):
            self._begun, self._samples_allowed = True, message.samples
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
                self._reader.have_read(event.result)
                return []
            case "replica:install":
                self._tally.seconds_computing += event.seconds
                return self._installed(event.result, now)
            case "replica:step":
                self._tally.seconds_computing += event.seconds
                return self._stepped(event.result, now)
            case "replica:push":
                return self._pushed(event.result, now)
            case _:
                raise LocalProtocolError(f"nobody asked for {event.name!r}")

    # ----------------------------------------------------------------- the machine

    @property
    def _is_over(self) -> bool:
        """Whether no further step is to begin."""
        if self._stopped_by is not None:
            return True
        return self._config.is_over_at(self._step, position=self._tally.position)

    @property
    def _is_held(self) -> bool:
        """Whether it has trained all that it may so far."""
        allowed = self._samples_allowed
        return allowed is not None and self._placed and self._tally.position >= allowed

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
        self._place(now)
        # Lives before may have done it all.
        return self._end(now) if self._is_over else self._take_step(now)

    def _place(self, now: Seconds) -> None:
        """Begin where in the data the lives before have ended, once."""
        if not self._placed:
            self._placed = True
            self._reader.start(self._client.samples)
            self._tally.begin(self._client.samples, now)

    def _take_step(self, now: Seconds) -> Sequence[Action]:
        """Take the next step, or do whatever it still lacks."""
        if self._is_held:
            return self._tally.progress(now)  # the supervisor may wait for it
        actions = [*self._reader.read_ahead(), *self._fetch(now)]
        fetches = self._config.fetches_at(self._step)
        fetched = self._fetching and self._client.fetch_complete
        batch = self._reader.next
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
        """End once every push is known to be applied."""
        if self._client.unacknowledged:
            return []
        self._ended = True
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        return [
            *self._tally.progress(now),
            Send(receiver=self._stopped_by or SUPERVISOR, message=finished),
            Halt(),
        ]

    # ----------------------------------------------------------------------- fetch

    def _fetch(self, now: Seconds) -> Sequence[Action]:
        """Begin the fetch of the next step, unless it is under way or must wait."""
        if self._fetching or not self._config.fetches_at(self._step):
            return []
        if self._config.awaits_pushes and self._client.unacknowledged:
            return []
        self._fetching = True
        return self._client.begin_fetch(now)

    def _fetch_ahead(self, now: Seconds) -> Sequence[Action]:
        """Begin the fetch of the step after the present one (DB-10)."""
        config, after = self._config, self._step + 1
        if self._fetching or self._stopped_by is not None:
            return []
        if not config.may_fetch_during(self._step):
            return []
        if config.awaits_pushes and self._client.unacknowledged:
            return []
        present = self._reader.next
        position = self._tally.position + (present.n_samples if present else 0)
        is_last = config.is_over_at(after, position=position)
        if is_last or not config.fetches_at(after):
            return []
        self._fetching = True
        return self._client.begin_fetch(now)

    def _install(self, attempt: Attempt) -> Compute:
        model, config = self._trainer.model, self._config
        work = self._client.install(model.values)
        rate = config.rate(self._clock) if config.keeps_local_steps else None
        # Copied; and if local steps are taken again: gradients, values, values again.
        n_copies = 5 if rate and self._n_accrued else 2
        return Compute(
            name="replica:install",
            work=partial(self._trainer.install, work, attempt, rate=rate),
            cost=Cost(n_bytes=float(n_copies * model.n_bytes)),
            remaining=lambda: self._client.readable_share,
        )

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

    def _compute(self, batch: Batch, attempt: Attempt) -> Compute:
        model, rate = self._trainer.model, self._local_rate()
        n_copies = 1 if rate is None else 4  # parameters read; stepped: g, w, w again
        return Compute(
            name="replica:step",
            work=partial(self._trainer.step, batch, attempt, local_rate=rate),
            cost=Cost(flops=model.flops(batch.n_samples), n_bytes=float(n_copies * model.n_bytes)),
            remaining=lambda: float(not attempt.is_torn),
        )

    def _local_rate(self) -> float | None:
        return self._config.local_rate(self._step, clock=self._clock)

    def _stepped(self, result: object, now: Seconds) -> Sequence[Action]:
        """Account for a step that has been computed, or could not be."""
        assert isinstance(result, Outcome | None), result
        self._attempt = None
        if result is None:
            self.counters.torn += 1
            self._torn_wait = True
            return [SetTimer(name="replica:retry", at=now + TORN_RETRY_SECONDS)]
        batch = self._reader.take()
        self._tally.stepped(n_samples=batch.n_samples, loss=result.loss)
        actions: list[Action] = []
        if result.is_finite:
            self._accrued()
        else:
            actions += self._tally.skip(result.blame)
        # There is nothing to push if all was skipped.
        self._push_due = self._config.pushes_at(self._step) and self._n_accrued > 0
        self._step += 1
        return [*actions, *self._tally.progress_if_due(now)]

    def _accrued(self) -> None:
        """Count the gradient of the present step; remember how old the oldest is."""
        if not self._n_accrued:
            self._accrued_clocks = self._client.clocks
        self._n_accrued += 1
        self.counters.gradients += 1
        self.counters.local_steps += self._local_rate() is not None
        if self._config.checks_every_gradient:
            self._tally.good()

    # ------------------------------------------------------------------------ push

    def _push(self) -> Sequence[Action]:
        """Stage what has accrued, once there is a free slot on every shard."""
        if not self._client.can_push:
            return []
        self._staging = True
        model = self._trainer.model
        # A shard that has restarted since counts from an older clock again.
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
        """Send what lies in the slots now; or, if it is not finite, forget it."""
        assert isinstance(result, Staged), result
        self._staging = self._push_due = False
        n_gradients, self._n_accrued = self._n_accrued, 0
        actions = self._client.staged(
            result, n_gradients=n_gradients, samples=self._tally.position, now=now
        )
        if not result.finite:  # the client's report names the tensors
            return self._tally.bad(n_gradients, actions)
        self.counters.pushes += 1
        self.counters.gradients_pushed += n_gradients
        self._tally.good()
        return actions


def _failure(error: BaseException, *, step: int) -> DistBeliefError:
    if isinstance(error, DistBeliefError):
        return error
    return JobError(f"step {step} failed: {type(error).__name__}: {error}")
