"""The replica: a role that runs a program of steps, on a whole model or on one rank of a split one.

A program (training, evaluation, chunks of a batch) is a generator, one for each generation:

    position = yield from steps.gather()          all pushes are applied; where to begin
    while (yield from steps.next_step(...)):      granted, its samples read, its parameters here
        steps.begin_step(...)                     work of the executor
        taken = yield from steps.taken()          its result
        yield                                     the rest waits until the event is handled

Each `yield` waits for another event, and for the work under way. A new generation ends the one
before once no work is under way.
"""

import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, TypeVar, final

import msgspec
import torch
from typing_extensions import override

from distbelief import protocol as wire
from distbelief.core.errors import (
    DistBeliefError,
    JobError,
    LocalProtocolError,
    RemoteProtocolError,
)
from distbelief.core.pieces import Placed
from distbelief.parameter_server.client.client import ParameterClient, ShardReply
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.parameter_server.client.pushes import PushDraft
from distbelief.protocol import role as rl
from distbelief.worker.batches import READ, BatchIndices, BatchSlice, Limits, SlicePrefetch
from distbelief.worker.execution.executor import Put, StepResult
from distbelief.worker.group import GroupLeader, GroupProgress, Outgoing
from distbelief.worker.local_executor import LocalExecutor
from distbelief.worker.steps import STEP, Close, LocalNorm, StepOutcome, StepRunner


INSTALL: Final = "replica:install"
SETTLE: Final = "replica:settle"
RETRY: Final = "replica:retry"

TORN_RETRY_SECONDS: Final = 1e-3  # before a fetch is repeated that met a half-applied update
OTHER_RETRY_SECONDS: Final = 0.05  # before one that gave another version than the wanted one

N_STATES_MAX: Final = 24  # of which time is counted, so that heartbeats stay small

T = TypeVar("T")
Waiting = Generator[None, rl.Computed | None, T]
Install = Callable[[], FetchResult]  # copies fetched parameters into tensors, as work
Command = wire.StartTraining | wire.Evaluate | wire.Stop


class Phase(Enum):
    """Where in a generation a rank is; the values are its state in status tables."""

    ALONE = "waiting for its leader"
    GATHERING = "gathering"  # drop the current step, wait for pushes
    GATHERED = "waiting for begin"
    RUNNING = "fetching"
    ENDED = "finishing"  # every push is applied


@final
@dataclass(frozen=True, slots=True)
class Taken:
    """A step that is done."""

    closed: object  # what the program's `close` has made of the result, or its `settle`
    result: StepResult
    batch: BatchIndices

    @property
    def n_samples(self) -> int:
        return len(self.batch.indices)


class Program:
    """What the steps of a replica are for; this base neither fetches nor pushes.

    Attributes:
        values: Flat tensors, one per item; fetched parameters are copied into them.
        verb: What a step does, as a status word.
        reports_steps: Whether `report` has news only after a step.
        accepts: Messages of its own, beside those of every replica.
        seconds: Spent computing steps, and installing their parameters.
    """

    values: Sequence[torch.Tensor]
    verb = "computing"
    reports_steps = False
    accepts: frozenset[type] = frozenset()
    seconds: rl.Seconds = 0.0

    @abstractmethod
    def steps(self, steps: "Steps") -> Waiting[None]:
        """Take the steps of one generation."""

    @property
    def pushed(self) -> int | None:
        """Number of samples in the pushes that its shards have; None if it never pushes."""
        return None

    @property
    def all_pushes_applied(self) -> bool:
        return True

    @property
    def idle(self) -> str | None:
        """The status word if there is nothing to do."""
        return None

    def leave(self, now: rl.Seconds) -> list[rl.Action]:
        """There is no step to take for now: nobody needs to wait for this worker."""
        del now
        return []

    # --- on the leader ---

    def command(self, leader: "Leader", message: Command, now: float) -> Outgoing:
        """A command of the supervisor; RemoteProtocolError if it is for another program."""
        if isinstance(message, wire.Stop):
            return leader.stop(now)
        raise RemoteProtocolError(f"{type(message).__name__} is not for a role that is {self.verb}")

    def report(
        self, leader: "Leader", now: rl.Seconds, *, final: bool
    ) -> tuple[Sequence[rl.Action], Outgoing]:
        """Return what the leader sends to the supervisor, and to its ranks."""
        del leader, now, final
        return [], []

    # --- events of its own ---

    def handle(self, event: rl.Event, rank: int | None, now: rl.Seconds) -> list[rl.Action] | None:
        """Handle an event that is for the program; None if it is for the replica."""
        del event, rank, now
        return None

    def prepare(self, message: wire.StartGeneration) -> None:
        """The leader begins a generation; RemoteProtocolError if its chunk is invalid."""

    def granted(self, message: wire.GrantSteps, *, is_first: bool) -> None:
        """The leader grants steps; `is_first`: of a generation."""

    def has_news(self) -> bool:
        """Return whether there may be more to do than before the last event."""
        return False

    def due(self, now: rl.Seconds) -> list[rl.Action]:
        """Return the messages that an event calls for."""
        del now
        return []

    def figures(self) -> Mapping[str, float]:
        return {}


class Course:
    """How far the steps of a generation go: for a whole model `Alone`, or as a group decides.

    Attributes:
        own: The steps of its replica.
        allowed: Steps that may be taken.
        is_final: Whether no more will be.
        n_readable: Steps whose samples may be read.
        is_cut: Whether the replica ends before it has begun.
        in_group: Whether other ranks take part; then a step is prepared before it is allowed.
        has_left: Whether the replica exits now.
        accepts: Messages of its own, beside those of every replica.
    """

    own: "Steps"
    allowed = 0
    is_final = False
    n_readable = sys.maxsize
    is_cut = False
    in_group = False
    has_left = False
    accepts: frozenset[type] = frozenset()

    @property
    def is_held(self) -> bool:
        """Whether all allowed steps are taken, and more may be allowed later."""
        return False

    # --- for its steps

    @abstractmethod
    def ready(self, pushed: int | None, now: rl.Seconds) -> list[rl.Action]:
        """All pushes are applied, up to this sample."""

    def begins_at(self) -> int | None:
        """Return where the steps begin; None if that is not known, or told by `Steps.run_from`."""
        return None

    @abstractmethod
    def taken(self, now: rl.Seconds) -> list[rl.Action]:
        """A step is done."""

    def reduced(self, n_steps: int) -> tuple[float, int | None] | None:
        """Return squared norm and bad sample of the last of these steps, once they are known."""
        del n_steps
        return None

    # --- for its replica

    def rank_of(self, sender: rl.Address) -> int | None:
        """Return the rank of a member of its group."""
        del sender
        return None

    @abstractmethod
    def handle(self, event: rl.Event, now: rl.Seconds) -> list[rl.Action] | None:
        """Handle what is for no shard and no program, like commands; None if it may not come."""

    @abstractmethod
    def lead(self, now: rl.Seconds) -> tuple[Sequence[rl.Action], bool]:
        """Return what to report, and whether a generation begins."""

    @abstractmethod
    def end(self, now: rl.Seconds) -> list[rl.Action]:
        """All steps are taken."""

    @property
    def awaited(self) -> str | None:
        """The rank that this one waits for."""
        return None

    def figures(self) -> Mapping[str, float]:
        return {}


@dataclass(slots=True)
class Generation:
    """What was done since the steps began anew."""

    number: int = 0
    phase: Phase = Phase.ALONE
    position: int = 0  # in the data, of its first step
    loss: float = 0.0  # sum over `samples`, on the rank that computes it
    samples: int = 0  # those with a finite loss
    no_loss: int = 0
    fetching: bool = False  # a fetch has begun and is not installed yet
    installed_for: int = -1  # the step whose parameters are installed

    def count(self, loss: float | None, n_samples: int) -> None:
        # Only the rank that holds the loss layer knows the loss.
        if loss is not None and math.isfinite(loss):
            self.loss += loss
            self.samples += n_samples
        elif loss is not None:
            self.no_loss += n_samples


@final
class Steps:
    """Takes the steps of one process, in the order that its program asks for."""

    def __init__(
        self,
        program: Program,
        *,
        client: ParameterClient,  # of the shards that hold what the rank keeps
        executor: LocalExecutor | StepRunner,
        slices: SlicePrefetch,
        course: Course,
        shapes: Sequence[tuple[int, ...]] | None = None,  # per item that the rank keeps; None: flat
    ) -> None:
        self.program = program
        self.executor = executor
        self.course = course
        course.own = self
        self.here = Generation()
        self.lane: list[str] = []  # work in the compute executor, the oldest first
        self.now: rl.Seconds = 0.0
        self.actions: list[rl.Action] = []  # of the current event
        self.number = 0  # of the current step, or of the next one
        self.is_over = False  # no step is left in this generation
        self.vote: tuple[float, int | None] = 0.0, None  # the last local square, and bad sample
        self.has_stepped = False  # since the last report
        self.awaits_norm = False
        self.slice: BatchSlice | None = None  # of the current step
        self.client = client
        self._slices = slices
        self._parameters: Sequence[torch.Tensor] = program.values
        if shapes is not None:
            pairs = zip(program.values, shapes, strict=True)
            self._parameters = [value.view(shape) for value, shape in pairs]
        self.waits = False  # a timer will repeat the last fetch
        self._is_torn = False  # the last install met a half-applied update
        self._run: Waiting[None] | None = None
        self._is_new = False  # another generation begins once nothing of this one is running

    # --- from the role ---

    def begin(self, generation: int) -> None:
        """Begin a generation: drop the current step."""
        self.here = Generation(number=generation, phase=Phase.GATHERING)
        self.executor.begin(generation)
        self._is_new = True

    def run_from(self, position: int, now: rl.Seconds) -> list[rl.Action]:
        """It is known at which sample the steps begin."""
        self.here.phase, self.here.position = Phase.RUNNING, position
        self._slices.begin(self.here.number, position)
        return self.executor.place(now)

    def computed(self, event: rl.Computed, now: rl.Seconds) -> list[rl.Action]:
        """Use the result of work."""
        error = event.error
        if isinstance(error, DistBeliefError):
            raise error
        if error is not None:
            raise JobError(f"step {self.executor.step} failed: {type(error).__name__}: {error}")
        # Reading runs in the data executor and never occupies this one.
        if event.name == READ:
            self._slices.have_read(event.result)
            return []
        if event.name not in self.lane:
            raise LocalProtocolError(f"unexpected result of work {event.name!r}")
        self.lane.remove(event.name)
        return self._resume(event, now)

    def advance(self, now: rl.Seconds) -> list[rl.Action]:
        """Begin what can begin now."""
        if self.lane or self.waits:
            return []
        if self.course.is_cut and self.here.phase is Phase.GATHERING:
            if self.program.all_pushes_applied:
                self.here.phase = Phase.ENDED
            return []
        if self._is_new:
            self._is_new, self.awaits_norm, self.slice = False, False, None
            self._run = self.program.steps(self)
        return self._resume(None, now)

    def _resume(self, event: rl.Computed | None, now: rl.Seconds) -> list[rl.Action]:
        if self._run is None:
            return []
        self.now, self.actions = now, []
        self._look()
        try:
            self._run.send(event)
        except StopIteration:
            self._run, self.here.phase = None, Phase.ENDED
        return self.actions

    def state(self, awaited: str | None = None) -> str:
        """Return a status word; `awaited`: a rank that this one waits for."""
        here, program = self.here, self.program
        is_running = here.phase is Phase.RUNNING
        if self.lane and STEP not in self.lane:
            return {INSTALL: "fetching", SETTLE: program.verb}.get(self.lane[0], "pushing")
        if self.course.is_held:
            return "waiting for more samples"
        if awaited is not None:
            return f"waiting for {awaited}"
        if self.lane or self.executor.is_open:
            return program.verb
        waited = self.client.waiting_for
        if is_running and program.idle is not None:
            state = program.idle
        elif waited is not None and (is_running or not self.client.ready):
            state = f"waiting for {waited}"
        elif is_running and self._is_over:
            state = Phase.ENDED.value
        elif is_running and self._awaits_samples:
            state = "reading"
        else:
            state = here.phase.value
        return state

    @property
    def clock(self) -> float:
        """The mean clock of the shards, as far as it is known; -1 if there are none."""
        clocks = self.client.clocks
        return sum(clocks) / len(clocks) if clocks else -1.0

    @property
    def _is_over(self) -> bool:
        return self.course.is_final and self.executor.step >= self.course.allowed

    @property
    def _awaits_samples(self) -> bool:
        number, fetches = self.executor.step, self.here.fetching and not self.client.fetch_complete
        may_step = number < self.course.allowed and not (self.waits or fetches)
        return may_step and not self._slices.has(number)

    def activity(self, awaited: str | None) -> str:
        """Return the status word, but "waiting for shards" where it waits for several at once."""
        state = self.state(awaited)
        is_shard = state.startswith("waiting for shard")
        return "waiting for shards" if is_shard and len(self.client.late_shards) > 1 else state

    def _look(self) -> None:
        self.number, self.is_over = self.executor.step, self._is_over

    # --- for the program ---

    def start(self, work: rl.Compute) -> None:
        """Run this work behind what is already under way."""
        self.lane.append(work.name)
        self.actions.append(work)

    def gather(self) -> Waiting[int]:
        """Wait until all pushes are applied, and until it is known where to begin."""
        # Pushes in flight count for the position where the next generation begins.
        while not (self.client.ready and self.program.all_pushes_applied):
            yield
        self.here.phase = Phase.GATHERED
        self.actions += self.course.ready(self.program.pushed, self.now)
        while self.here.phase is Phase.GATHERED:
            position = self.course.begins_at()
            if position is None:
                yield
            else:
                self.actions += self.run_from(position, self.now)
        self._look()
        return self.here.position

    def prepare(self) -> bool | None:
        """Read ahead; return whether a step may begin, or None if it is too early to prepare it."""
        course = self.course
        if course.is_held:
            self.actions += self.program.leave(self.now)
        may_step = self.number < course.allowed and self.client.ready
        if not (may_step or course.in_group):
            return None
        self.actions += self._slices.read_ahead(self.number, stop=course.n_readable)
        return may_step

    def next_step(self, *, fetches: bool = False) -> Waiting[bool]:
        """Wait until a step may begin, if it `fetches` with new parameters; False: none is left."""
        while not self.is_over:
            may_step = self.prepare()
            if may_step is not None:
                if fetches and not self.here.fetching:
                    self.begin_fetch()
                if not may_step:
                    pass
                elif not fetches:
                    if self.take():
                        return True
                elif self.has_fetched:
                    n_bytes = 2.0 * sum(value.nbytes for value in self.program.values)
                    self.begin_install(self.client.install(self.program.values), n_bytes)
                    seconds = yield from self.installed()
                    if seconds is not None:
                        self.program.seconds += seconds
                        fetches = False
            yield
        return False

    def take(self) -> bool:
        """Take the samples of the next step, if they are read."""
        self.slice = self._slices.take(self.number)
        return self.slice is not None

    # --- parameters

    def begin_fetch(self, *, follows: bool = False) -> None:
        self.here.fetching = True
        self.actions += self.client.begin_fetch(self.now, follows=follows)

    @property
    def has_fetched(self) -> bool:
        """Whether a fetch is complete and not installed."""
        return self.here.fetching and self.client.fetch_complete

    def begin_install(self, install: Install, n_bytes: float) -> None:
        self._is_torn = False

        def work() -> FetchResult:
            result = install()
            self._is_torn = bool(result.torn)
            return result

        client, cost = self.client, rl.Cost(n_bytes=n_bytes)
        self.start(
            rl.Compute(name=INSTALL, work=work, cost=cost, remaining=lambda: client.readable_share)
        )

    def installed(self) -> Waiting[rl.Seconds | None]:
        """Wait for an install, return its seconds; None if its fetch was torn, and is repeated."""
        generation = self.here
        event = yield
        assert event is not None
        result = event.result
        assert isinstance(result, FetchResult), result
        self.actions += self.client.installed(result, self.now)
        # Older parameters than those that this rank has pushed meanwhile are not used.
        if generation is not self.here:
            return None
        if result.torn:
            if not self.lane:  # a queued step finds out by itself
                self.wait(TORN_RETRY_SECONDS)
            return None
        self.here.fetching = False
        return event.seconds

    def wait(self, seconds: rl.Seconds) -> None:
        self.waits = True
        self.actions.append(rl.SetTimer(name=RETRY, at=self.now + seconds))

    # --- steps

    def begin_step(
        self,
        put: Put,
        close: Close,
        *,
        n_bytes: float = 0.0,
        is_queued: bool = False,
        early: PushDraft | None = None,
    ) -> None:
        """Begin a step on the samples taken; it `is_queued` behind the install of its parameters.

        `put` takes its gradients, and `close` its result, as work; of a whole model, `early` takes
        each gradient while earlier layers still compute theirs.
        """
        assert self.slice is not None
        number, parameters, executor = self.number, self._parameters, self.executor
        if isinstance(executor, LocalExecutor):
            work = executor.open(self.slice, put=put, close=close, n_bytes=n_bytes, early=early)
        else:
            work = executor.open(self.slice, parameters, put=put, close=close, n_bytes=n_bytes)
        for each in work:
            self.start(self._unless_torn(each) if is_queued else each)
        if self.course.in_group:
            self.actions += self._slices.read_ahead(number + 1, stop=number + 2)

    def _unless_torn(self, step: rl.Compute) -> rl.Compute:
        return rl.Compute(
            name=step.name,
            work=lambda: None if self._is_torn else step.work(),
            cost=step.cost,
            remaining=lambda: float(not self._is_torn),
            notes=step.notes,
        )

    def taken(self) -> Waiting[Taken | None]:
        """Wait for the end of a step; None: its parameters were torn, so it is to begin anew."""
        executor = self.executor
        while True:
            event = yield
            if event is None:
                for each in executor.chain():
                    self.start(each)
                continue
            outcome = event.result
            if outcome is None:
                assert self.slice is not None
                executor.cancel()
                self._slices.put_back(self.slice)
                self.wait(TORN_RETRY_SECONDS)
                return None
            assert isinstance(outcome, StepOutcome), outcome
            self.program.seconds += event.seconds
            self.actions += executor.ran(outcome, self.now)
            if outcome.found is not None:
                break
        assert self.slice is not None
        taken = Taken(outcome.closed, outcome.found, self.slice.samples)
        is_dropped, self.slice = outcome.generation != self.here.number, None
        if not isinstance(taken.closed, LocalNorm):
            # Complete, so it is valid even if its generation has ended meanwhile.
            if not is_dropped:
                self._count(taken)
            return taken
        while is_dropped:
            yield  # no norm will be reduced
        return (yield from self._reduced(taken, taken.closed))

    def _reduced(self, taken: Taken, local: LocalNorm) -> Waiting[Taken]:
        self.vote, self.awaits_norm = (local.square, local.sample), True
        self._count(taken)
        norm = None
        while norm is None:
            yield
            norm = self.course.reduced(self.executor.step)
        work = partial(local.settle, *norm)
        self.start(rl.Compute(name=SETTLE, work=work, cost=local.cost))
        event = yield
        assert event is not None
        self.awaits_norm = False
        return Taken(event.result, taken.result, taken.batch)

    def _count(self, taken: Taken) -> None:
        self.has_stepped = True
        self.here.count(taken.result.loss, taken.n_samples)
        self.actions += self.course.taken(self.now)


@final
class Alone(Course):
    """The course of a whole model, which asks nobody."""

    def __init__(self, *, limits: Limits | None = None, begins: bool = True) -> None:
        self.generation = 0
        self.is_running = False
        self.steps = 0  # of this generation
        self.square = 0.0
        self._limits = limits or Limits()
        self._begins = begins  # without being asked to
        self._pushed = 0  # samples, when all pushes were applied
        self._wanted_position: int | None = None

    # --- for the program, as the leader of a group

    @property
    def is_complete(self) -> bool:
        return self.is_running and self.steps == self._limits.generation

    @property
    def clock(self) -> float:
        return max(self.own.clock, 0.0)

    def generation_done(self) -> GroupProgress:
        here = self.own.here
        return GroupProgress(
            steps=self.steps,
            position=here.position,
            loss=here.loss,
            samples=here.samples,
            no_loss=here.no_loss,
        )

    def begin(self, now: rl.Seconds, *, samples: int | None = None) -> Outgoing:
        """Allow steps, up to a number of samples if one is given."""
        del now
        self._begins, self._limits.samples_allowed = True, samples
        self._update()
        return []

    def stop(self, now: rl.Seconds) -> Outgoing:
        del now
        if not self.is_cut:
            self._limits.last_step = self.own.executor.step + self.own.executor.is_open
        self.is_cut = True
        self._update()
        return []

    def new_generation(
        self,
        now: rl.Seconds,
        *,
        position: int | None = None,  # where to begin; None: where the pushes end
        limit: int | None = None,  # steps of this generation
        chunk: wire.GroupChunk | None = None,
    ) -> Outgoing:
        """Start a new generation: drop the current step."""
        del now, chunk
        self.generation += 1
        self.is_running, self.steps = False, 0
        self._limits.last_step = 0 if self.is_cut else None
        self._wanted_position, self._limits.generation = position, limit
        self._update()
        return []

    # --- for its replica

    @override
    def handle(self, event: rl.Event, now: rl.Seconds) -> list[rl.Action] | None:
        match event:
            case rl.Started():
                self.new_generation(now, limit=self._limits.first)
                self.own.begin(self.generation)
            case rl.Received(
                message=(wire.StartTraining() | wire.Evaluate() | wire.Stop()) as command
            ):
                self.own.program.command(self, command, now)
            case rl.Received():
                return None
            case _:
                pass
        return []

    @override
    def lead(self, now: rl.Seconds) -> tuple[Sequence[rl.Action], bool]:
        own = self.own
        if own.program.reports_steps and not (self.is_held or own.has_stepped):
            return [], False
        own.has_stepped = False
        actions, _ = own.program.report(self, now, final=False)
        begins = self.generation != own.here.number
        if begins:
            own.begin(self.generation)
        return actions, begins

    @override
    def end(self, now: rl.Seconds) -> list[rl.Action]:
        self.has_left = True
        last, _ = self.own.program.report(self, now, final=True)
        return [*last]

    # --- for its steps

    @override
    def ready(self, pushed: int | None, now: rl.Seconds) -> list[rl.Action]:
        del now
        self._pushed = pushed or 0
        return []

    @override
    def begins_at(self) -> int | None:
        if not (self._begins or self.is_cut):
            return None
        wanted = self._wanted_position
        position = self._pushed if wanted is None else wanted
        self.is_running, self.own.here.position = True, position
        self._update()
        return position

    @override
    def taken(self, now: rl.Seconds) -> list[rl.Action]:
        del now
        self.steps += 1
        return []

    @property
    @override
    def is_held(self) -> bool:
        pauses = self._limits.samples_allowed is not None and self.is_running
        return pauses and self.steps >= self.allowed

    def _update(self) -> None:
        limits = self._limits
        self.allowed = 0
        if self.is_running and self._begins:
            bounds = limits.bounds(self.own.here.position)
            self.allowed = min(bounds, default=sys.maxsize)
        is_last = self.is_running and limits.is_last(self.allowed, self.own.here.position)
        self.is_final = self.is_cut or is_last
        self.n_readable = sys.maxsize if limits.steps_max is None else limits.steps_max


Leader = GroupLeader | Alone  # of a group of ranks; of a whole model

ReplicaMessage = Command | ShardReply


@final
class TimeSpent:
    """Seconds that a role was in each state, as counters `spent_STATE`."""

    def __init__(self) -> None:
        self._since: rl.Seconds | None = None
        self._seconds: dict[str, rl.Seconds] = {}

    def until(self, now: rl.Seconds, state: str) -> None:
        """It was in this state since the last event."""
        if self._since is not None:
            known = state in self._seconds or len(self._seconds) < N_STATES_MAX
            name = state if known else "waiting for others"
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def counters(self) -> dict[str, float]:
        return {f"spent_{state}": seconds for state, seconds in self._seconds.items()}


@final
class Replica:
    """The role "replica-R", "replica-R.M" or "evaluator": runs a program, as its course allows."""

    accepts = rl.message_types(ReplicaMessage)

    def __init__(self, steps: Steps, *, placed: Placed | None = None) -> None:
        self.program, self.course = steps.program, steps.course
        # Of data in pieces, those that it can read: for its heartbeats.
        self.pieces = msgspec.UNSET if placed is None else placed.here
        self.accepts = self.accepts | self.program.accepts | self.course.accepts
        self._steps, self._client = steps, steps.client
        self._is_gone = False
        self._spent = TimeSpent()
        self._activity: str | None = None  # as after the last event, if that has changed nothing

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        activity = self._activity or self._steps.activity(self.course.awaited)
        self._activity = None
        self._spent.until(now, activity)
        if self._is_gone:
            return []
        is_quiet, steps, phase = False, self._steps, self._steps.here.phase
        if isinstance(event, rl.Computed) and event.is_note:  # of the step that is being computed
            return self._client.filled(event.result, now)
        if isinstance(event, rl.Computed):
            actions: Sequence[rl.Action] = steps.computed(event, now)
        elif self._client.owns(event):
            actions = self._client.handle(event, now)
            # Most events of shards are blocks, acknowledgements and timers that remove no obstacle.
            is_quiet = not self.course.in_group
            if is_quiet and not self._client.has_news:
                self._activity = activity
                return actions
        else:
            actions = [*self._on_event(event, now), *self._exit()]
        # Every event may have removed the last obstacle to the next piece of work.
        begun = self._advance(now)
        if is_quiet and not begun and phase is steps.here.phase and not self._has_news():
            return actions
        # The work of a step does not depend on these messages: it starts before they are sent.
        starts = self.course.in_group and steps.lane == [STEP]
        done = [*begun, *actions] if starts else [*actions, *begun]
        done += self._lead(now)
        while self._has_news():
            done += [*self._advance(now), *self._lead(now)]
        return done if self._is_gone else [*done, *self.program.due(now)]

    def _has_news(self) -> bool:
        return not self._is_gone and self.program.has_news()

    def _on_event(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        course = self.course
        rank = course.rank_of(event.sender) if isinstance(event, rl.Received) else None
        own = self.program.handle(event, rank, now)
        if own is not None:
            return own
        if isinstance(event, rl.TimerFired) and event.name == RETRY:
            self._steps.waits = False
            return []
        begun: list[rl.Action] = []
        if isinstance(event, rl.Started):
            begun = self._client.start(event.incarnation, now, restored=event.restored)
        actions = course.handle(event, now)
        if actions is None and isinstance(event, rl.Received):
            kind = type(event.message).__name__
            raise RemoteProtocolError(f"{event.sender} sent a replica {kind}, which is not for it")
        return [*begun, *(actions or ())]

    def _advance(self, now: rl.Seconds) -> list[rl.Action]:
        actions = self._steps.advance(now)
        if self._steps.here.phase is not Phase.ENDED or self._is_gone:
            return actions
        return [*actions, *self.course.end(now), *self._exit()]

    def _lead(self, now: rl.Seconds) -> Sequence[rl.Action]:
        if self._is_gone:
            return []
        actions, begins = self.course.lead(now)
        return [*actions, *self._advance(now)] if begins else actions

    def _exit(self) -> list[rl.Action]:
        if not self.course.has_left:
            return []
        self._is_gone = True
        finished = wire.Finished(counters=dict(self.status()[1]))
        return [rl.Send(receiver=rl.SUPERVISOR, message=finished), rl.Exit()]

    def status(self) -> tuple[str, Mapping[str, float]]:
        course = self.course
        metrics = {**self._client.counters(), **self.program.figures(), **course.figures()}
        metrics |= self._spent.counters()
        return self._steps.state(course.awaited), metrics
