"""The training program of a member of a ring: replicas sum their gradients, without the shards.

    agree    a new generation of the ring: members tell the step of their last commit; the one with
             the newest gives it to the others, or the shards' values if there is none
    step     each computes the gradient of a batch of its own; the ring sums; each applies the rule
    commit   every so many steps: a copy that outlives a death; the first member sets the shards'
             values to it

All members have the same values and state, bit by bit, at the same step. When one dies or comes,
all return to the newest commit: at most `commit_every` steps are done again (HV-3). A member
without a gradient, as its samples have ended or it was not finite, takes part in every step all the
same. All end together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, cast, final

import numpy as np
import torch
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.core.spans import NOTHING
from distbelief.core.vectors import Vector
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.pushes import PushResult
from distbelief.protocol import Evaluate, StartTraining, Stop
from distbelief.protocol.ring import RingMembers
from distbelief.protocol.role import (
    Action,
    Address,
    Compute,
    Computed,
    Cost,
    Event,
    Received,
    Report,
    Seconds,
    Started,
    TimerFired,
)
from distbelief.task.data import shown_samples
from distbelief.worker.batches import TrainingPlan, bad_sample, blame_of
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.execution.executor import StepResult
from distbelief.worker.group import Outgoing
from distbelief.worker.replica import Leader, Phase, Program, Steps, Waiting
from distbelief.worker.ring import TIMER, Ring, RingMessage
from distbelief.worker.ring_values import RingValues
from distbelief.worker.training import PUSH, BadGradients, Counters, ProgressReports


SUM: Final = "ring:sum"  # the work on a sum
NO_COMMIT: Final = -1


@final
class RingTraining(Program):
    """See `Program`."""

    verb = "computing"
    accepts = Ring.accepts

    def __init__(
        self,
        name: Address,
        config: DownpourSettings,
        values: Sequence[torch.Tensor],  # flat; of the model
        *,
        own: RingValues,  # of the same model
        client: ParameterClient,
        plan: TrainingPlan,
        progress_seconds: Seconds = 0.5,
    ) -> None:
        self.values = values
        self.ring = Ring(name)
        self.counters = Counters()
        self._name = name
        self._own = own
        self._client = client
        self._plan = plan
        self._commit_every = config.exchange.commit_every
        self._bad = BadGradients(config, self.counters)
        self._progress = ProgressReports(progress_seconds)
        self._commit: tuple[int, Vector] | None = None
        self._positions: dict[int, int] = {}  # in the data, by step, since that commit
        self._position = 0
        self._generation = 0  # of the ring, in which these steps are
        self._is_broken = False  # that one has ended, and these steps must
        self._has_fetched = False
        self._is_drafting = False
        self._is_resumed = False  # from the commit of another generation

    @property
    @override
    def pushed(self) -> int | None:
        return self._position

    @property
    @override
    def all_pushes_applied(self) -> bool:
        return not (self._is_drafting or self._client.unacknowledged)

    @property
    @override
    def idle(self) -> str | None:
        return None if self.ring.is_complete else "summing"

    # --- events

    @override
    def handle(self, event: Event, rank: int | None, now: Seconds) -> list[Action] | None:
        ring = self.ring
        match event:
            case Started():
                ring.start(event.incarnation)
                return None
            case TimerFired(name=name) if name == TIMER:
                return ring.woke(now)
            case Received(message=RingMembers() as message):
                before = ring.generation
                actions = ring.join(message)
                self._is_broken |= ring.generation != before and self._generation != 0
                return actions
            case Received(message=message) if isinstance(message, RingMessage):
                return ring.receive(event, message, now)
            case _:
                return None

    @override
    def command(
        self, leader: Leader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        if not isinstance(message, StartTraining):
            return super().command(leader, message, now)
        self._progress.samples_allowed = message.samples
        return leader.begin(now, samples=message.samples)

    @override
    def report(
        self, leader: Leader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        if self._is_broken:
            self._is_broken = False
            return [], leader.new_generation(now)
        due = self._progress.due(leader, now, final=final, computing=self.seconds, skipped=NOTHING)
        return due, []

    @override
    def figures(self) -> Mapping[str, float]:
        counters = self.counters
        figures = {name: float(getattr(counters, name)) for name in counters.__dataclass_fields__}
        figures |= {"samples": float(self._position), "seconds_computing": self.seconds}
        ring = self.ring
        figures |= {
            "ring_generation": float(ring.generation),
            "ring_bytes": float(ring.n_bytes),
            "ring_again": float(ring.n_again),
        }
        n_allowed = self._progress.samples_allowed
        return figures if n_allowed is None else figures | {"samples_allowed": float(n_allowed)}

    # --- one generation, of the ring and so of the steps

    @override
    def steps(self, steps: Steps) -> Waiting[None]:
        if self._is_drafting:
            self._client.abandon()
        self._is_drafting = False
        yield from self._agree(steps)
        yield from steps.gather()
        yield from self._checked()
        self._progress.begun_at = self._progress.begun_at or steps.now
        vector = self._own.new_vector()
        n_members, n_ended = len(self.ring.members), 0
        if self._is_resumed:  # the first member may have died while it set them
            yield from self._set_shards(steps)
        while n_ended < n_members:
            if not (yield from self._give(steps, vector)):
                yield from self._next()
                continue
            yield from self._sum(steps, vector, "step")
            event = yield from self._work(steps, SUM, partial(self._own.take, vector))
            n_given, n_ended = cast("tuple[int, int]", event.result)
            if n_given:
                self._positions[self._own.step] = self._position
                if self._own.step % self._commit_every == 0:
                    yield from self._make_commit(steps)
                    yield from self._set_shards(steps)
        yield from self._make_commit(steps)
        yield from self._set_shards(steps)
        while not self.all_pushes_applied:
            yield from self._next()
        # The first may die while it sets them: the others can still do it.
        yield from self._sum(steps, np.zeros(1), "end")

    def _next(self) -> Waiting[Computed | None]:
        """Wait for an event; for ever if the ring has another generation, and these steps end."""
        event = yield
        yield from self._checked()
        return event

    def _checked(self) -> Waiting[None]:
        if self.ring.failure is not None:
            raise JobError(f"{self._name} gets no sum of gradients: {self.ring.failure}")
        while self._generation != self.ring.generation:
            yield

    def _work(
        self, steps: Steps, name: str, work: Callable[[], object], *, n_bytes: float = 0.0
    ) -> Waiting[Computed]:
        cost = Cost(n_bytes=n_bytes or 3.0 * self._own.all.nbytes)
        steps.start(Compute(name=name, work=work, cost=cost))
        event = yield from self._next()
        assert event is not None
        return event

    def _sum(self, steps: Steps, vector: Vector, what: str) -> Waiting[None]:
        ring = self.ring
        layout = f"{what} of {self._own.layout.fingerprint}"
        steps.actions += ring.begin(vector, steps.now, layout=layout)
        while not (ring.is_complete and ring.is_settled):
            yield from self._next()

    # --- where all begin

    def _agree(self, steps: Steps) -> Waiting[None]:
        """Have the values, the state and the step of the newest commit."""
        ring, client, own = self.ring, self._client, self._own
        while not (client.ready and self.all_pushes_applied and ring.members):
            yield  # a Stop ends it here
        self._generation = ring.generation
        steps.here.phase = Phase.GATHERED  # from now on others need this one to end
        if not self._has_fetched:
            yield from self._fetch(steps)
        rank, n = ring.members.index(self._name), len(ring.members)
        newest = NO_COMMIT if self._commit is None else self._commit[0]
        facts = np.zeros(2 * n)
        facts[2 * rank : 2 * rank + 2] = newest, self._plan.n_steps(0, client.samples)
        yield from self._sum(steps, facts, "facts")
        commits = facts[::2].astype(int).tolist()
        step, source = max(commits), commits.index(max(commits))
        self._is_resumed = step != NO_COMMIT
        if not self._is_resumed:  # by the shards' values, as the first member has them
            step = int(facts[1::2].max())
            if step and own.has_state and rank == source:
                text = f"the state of the rule begins anew at step {step}: no replica had kept it"
                steps.actions.append(Report(text=text, level="warning"))
        whole = None if self._commit is None else self._commit[1]
        if min(commits) < step:
            given = np.zeros_like(own.all)
            if rank == source and whole is None:
                yield from self._work(steps, SUM, partial(own.begin, step))
            if rank == source:
                given[:] = own.all if whole is None else whole
            yield from self._sum(steps, given, "commit")
            whole = given
        assert whole is not None
        yield from self._work(steps, SUM, partial(own.restore, whole, step))
        self._position = self._positions.get(step, self._plan.position_of(step))
        self._commit, self._positions = (step, whole), {step: self._position}

    def _fetch(self, steps: Steps) -> Waiting[None]:
        client = self._client
        while True:
            steps.begin_fetch()
            while not client.fetch_complete:
                yield from self._next()
            steps.begin_install(client.install(self.values), 2.0 * self._own.all.nbytes)
            seconds = yield from steps.installed()
            yield from self._checked()
            if seconds is not None:
                break
            while steps.waits:
                yield from self._next()
        self._has_fetched = True

    # --- steps

    def _give(self, steps: Steps, vector: Vector) -> Waiting[bool]:
        """Fill the vector for a step; return whether there is anything to give."""
        course, own = steps.course, self._own
        is_held = course.is_held and self.ring.is_wanted
        if steps.is_over or is_held:
            own.give_nothing(vector, has_ended=steps.is_over)
            return True
        if not (steps.prepare() and steps.take()):
            return False
        assert steps.slice is not None
        batch_slice = steps.slice
        gradients: dict[int, torch.Tensor] = {}

        def close(result: StepResult) -> tuple[bool, int | None]:
            is_finite = own.give(gradients, vector) and math.isfinite(result.loss or 0.0)
            if not is_finite:
                own.give_nothing(vector, has_ended=False)
            return is_finite, None if is_finite else bad_sample(batch_slice)

        steps.begin_step(gradients.__setitem__, close, n_bytes=2.0 * vector.nbytes)
        taken = yield from steps.taken()
        yield from self._checked()
        assert taken is not None
        self._position = taken.batch.stop
        self.counters.steps += 1
        is_finite, sample = cast("tuple[bool, int | None]", taken.closed)
        self._bad.loss = math.nan if taken.result.loss is None else taken.result.loss
        if is_finite:
            self._bad.n_in_row = 0
            self.counters.gradients += 1
        else:
            shown, blame = shown_samples(taken.batch.indices.tolist()), blame_of(sample)
            text = f"step {self.counters.steps}: the gradient of {shown} is NaN or infinite"
            report = Report(text=f"{text}; it is skipped", level="warning")
            steps.actions += self._bad.count(1, [report], blame=blame)
        return True

    # --- commits

    def _make_commit(self, steps: Steps) -> Waiting[None]:
        own = self._own
        event = yield from self._work(steps, SUM, own.all.copy)
        whole = event.result
        assert isinstance(whole, np.ndarray)
        self._commit = own.step, whole
        self._positions = {own.step: self._position}

    def _set_shards(self, steps: Steps) -> Waiting[None]:
        """Let the shards have the values as they are now, by the first member."""
        client = self._client
        if self.ring.members[0] != self._name:
            return
        while not client.can_push:
            yield from self._next()
        draft, self._is_drafting = client.draft(), True
        event = yield from self._work(
            steps, PUSH, partial(draft.put_all, list(self.values), self.values)
        )
        self._is_drafting = False
        result = event.result
        assert isinstance(result, PushResult), result
        steps.actions += client.staged(
            result, n_gradients=0, samples=self._position, now=steps.now, sets=True
        )
        self.counters.pushes += 1
