"""Batch worker: computes gradient sums of chunks for the coordinator, as a state machine.

Algorithm 1.2 of Dean et al. 2012, `ProcessPortion`:

    Assignment           fetch the parameters of this evaluation, compute mini-batches
    chunk computed       WorkReport: its loss; the sum is held
    commit token         push the sum under the token
    shards acknowledge   WorkReport: staged

An attempt that an assignment no longer names is dropped, whatever its state. At most
`N_CHUNKS_HELD` computed sums are held. The last report is repeated on a timer.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

import torch

from distbelief.data.sharding import Samples
from distbelief.errors import LocalProtocolError, RemoteProtocolError
from distbelief.parameter_server.client.buffers import FetchResult, PushResult
from distbelief.parameter_server.client.client import ParameterClient, ShardReply
from distbelief.protocol import (
    Assignment,
    ChunkResult,
    Finished,
    ShardVersion,
    StartTraining,
    Stop,
    WorkReport,
)
from distbelief.roles.role import (
    SUPERVISOR,
    Action,
    Address,
    Compute,
    Computed,
    Cost,
    Event,
    Executor,
    Exit,
    PeerJoined,
    Received,
    Report,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    message_types,
)
from distbelief.task.losses import Loss
from distbelief.worker.batches import READ, BatchIndices, BatchSlice
from distbelief.worker.gradients import GradientSum, bad_sample, blame_of
from distbelief.worker.local_executor import LocalExecutor
from distbelief.worker.replica import INSTALL, RETRY, TORN_RETRY_SECONDS, failure
from distbelief.worker.training import PUSH
from sandblaster.chunks import COORDINATOR, BatchRange, ChunkSizes


# --- sums of chunks ---


@final
@dataclass(frozen=True, slots=True, eq=False)
class ChunkSum:
    """The gradient of a chunk, and the buffers after it; flat, as a client stages them."""

    gradients: Sequence[torch.Tensor | None]
    values: Sequence[torch.Tensor]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MiniBatchOutcome:
    """What came of one mini-batch."""

    loss: float  # sum over its examples; NaN if the loss or the gradient is not finite
    blame: str | None = None  # which sample causes that, if one is known
    # Whether only the chunk is known, not the mini-batch, where that happened.
    is_of_chunk: bool = False
    total: ChunkSum | None = None  # the sum of the chunk, if this was its last mini-batch


@final
class MiniBatchSums:
    """Sums gradients of mini-batches to those of chunks; the work of the executors.

    A sum depends on its mini-batches and the parameters alone, so every attempt at a chunk
    gives the same bits.
    """

    def __init__(self, executor: LocalExecutor) -> None:
        self.executor = executor
        model = executor.model
        self.values = model.values
        self._total = GradientSum(len(model.values), shares_memory=False)
        self._buffers = [index for index, spec in enumerate(model.specs()) if spec.kind == "buffer"]
        self._fetched: list[torch.Tensor] = []

    @property
    def n_bytes(self) -> int:
        return self.executor.model.n_bytes

    def flops(self, n_samples: int) -> float:
        return self.executor.model.flops(n_samples)

    def install(self, work: Callable[[], FetchResult]) -> FetchResult:
        installed = work()
        if not installed.torn:
            self._fetched = [self.values[index].clone() for index in self._buffers]
        return installed

    def step(self, batch: BatchSlice, *, is_first: bool, is_last: bool) -> MiniBatchOutcome:
        """Add the gradient of a mini-batch to that of its chunk.

        Raises:
            JobError: the user's model, loss or data fails on it.
        """
        if is_first:
            # Each chunk starts from the fetched buffers: what the worker computed before
            # must not change the sum.
            self._total.drop()
            for index, fetched in zip(self._buffers, self._fetched, strict=True):
                self.values[index].copy_(fetched)
        loss = self.executor.gradient(batch)
        if not math.isfinite(loss):
            return MiniBatchOutcome(loss=math.nan, blame=blame_of(bad_sample(batch)))
        gradients = enumerate(self.executor.model.gradients)
        self._total.add({item: each for item, each in gradients if each is not None})
        if not is_last:
            return MiniBatchOutcome(loss=loss)
        # Copies: the next chunk overwrites the model's buffers before this one is pushed.
        values = list(self.values)
        for index in self._buffers:
            values[index] = values[index].clone()
        # Finite mini-batches may still overflow in their sum.
        finite = self._total.is_finite
        total = ChunkSum(tuple(self._total.sums), values)
        self._total.drop()
        if not finite:
            return MiniBatchOutcome(loss=math.nan, is_of_chunk=True)
        return MiniBatchOutcome(loss=loss, total=total)


# --- reading ahead ---

N_MINI_BATCHES_HELD: Final = 2

BatchBounds = tuple[int, int]  # positions [start, stop)


@final
class Prefetch:
    """Reads the samples of the next mini-batches; drops those no longer wanted."""

    def __init__(self, sums: MiniBatchSums, samples: Samples) -> None:
        self._executor = sums.executor
        self._samples = samples
        self._held: dict[BatchBounds, BatchSlice] = {}
        self._reading: BatchBounds | None = None

    def get(self, mini_batch: BatchBounds) -> BatchSlice | None:
        return self._held.get(mini_batch)

    def read(self, wanted: Sequence[BatchBounds]) -> Sequence[Action]:
        wanted = wanted[:N_MINI_BATCHES_HELD]
        self._held = {p: batch for p, batch in self._held.items() if p in wanted}
        missing = [mini_batch for mini_batch in wanted if mini_batch not in self._held]
        if self._reading is not None or not missing:
            return []
        start, stop = self._reading = missing[0]
        position = start % self._samples.n_samples
        indices = BatchIndices(position=position, indices=self._samples.at(start, stop))
        return [
            Compute(
                name=READ,
                work=partial(self._executor.read, 0, 0, indices),
                cost=Cost(n_bytes=self._executor.read_bytes(stop - start)),
                executor=Executor.DATA,
            )
        ]

    def have_read(self, result: object) -> None:
        assert isinstance(result, BatchSlice), result
        assert self._reading is not None
        self._held[self._reading] = result
        self._reading = None


def summed(loss: Loss) -> Loss:
    """Return the loss times the number of samples: a sum, where users give a mean."""

    # The last mini-batch may be smaller: so sums are added, and the shards divide once.
    def total(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(outputs, targets) * targets.shape[0]

    return total


# --- attempts ---

ChunkBounds = tuple[int, int]  # positions [start, stop)


@final
@dataclass(slots=True, kw_only=True, eq=False)
class ChunkAttempt:
    """One attempt at one chunk: assigned, computed, committing, pushed, staged."""

    chunk_index: int
    attempt: int
    mini_batches: Sequence[ChunkBounds]
    commit_token: int = 0
    losses: list[float] = field(default_factory=list)  # of the mini-batches computed
    seconds: float = 0.0
    total: ChunkSum | None = None  # once computed, until it is pushed
    pushed: bool = False
    staged: bool = False
    is_finite: bool = True

    @property
    def is_computed(self) -> bool:
        return len(self.losses) == len(self.mini_batches) or not self.is_finite

    @property
    def next_mini_batch(self) -> ChunkBounds:
        return self.mini_batches[len(self.losses)]

    @property
    def is_last(self) -> bool:
        return len(self.losses) == len(self.mini_batches) - 1

    @property
    def n_examples(self) -> int:
        return self.mini_batches[-1][1] - self.mini_batches[0][0]

    def computed(self, outcome: MiniBatchOutcome, *, seconds: float) -> None:
        self.losses.append(outcome.loss)
        self.seconds += seconds
        self.total = outcome.total
        self.is_finite = math.isfinite(outcome.loss)

    @property
    def result(self) -> ChunkResult:
        loss = math.fsum(self.losses) if self.is_finite else math.nan
        return ChunkResult(
            attempt=self.attempt,
            n_examples=self.n_examples,
            loss=loss,
            seconds=self.seconds,
            staged=self.staged,
        )


@final
class ChunkAttempts:
    """All attempts of one worker at the chunks of one evaluation."""

    def __init__(self, chunk_sizes: ChunkSizes) -> None:
        self._chunk_sizes = chunk_sizes
        self._version = 0
        self._attempts: dict[int, ChunkAttempt] = {}  # by attempt, in the order to compute
        self._pushed: deque[ChunkAttempt] = deque()  # not acknowledged, the oldest first
        self.epoch = 0  # of the coordinator
        self.evaluation = 0  # its number
        # Versions of the shards' values at which it is computed.
        self.versions: tuple[ShardVersion, ...] = ()
        self.n_computed = 0  # examples computed for this evaluation

    @property
    def key(self) -> tuple[int, int]:
        return self.epoch, self.evaluation

    def __iter__(self) -> Iterator[ChunkAttempt]:
        return iter(self._attempts.values())

    def __contains__(self, one: ChunkAttempt) -> bool:
        # Each epoch counts attempts from 1: the same number may be another attempt.
        return self._attempts.get(one.attempt) is one

    def update(self, message: Assignment) -> bool:
        """Take an assignment; return whether it is newer than the last one.

        Raises:
            ValueError: it names a chunk that the batch does not have.
        """
        if (message.epoch, message.version) <= (self.epoch, self._version):
            return False
        is_new = (message.epoch, message.evaluation) != self.key
        batch = BatchRange(first=message.first, n_examples=message.n_examples)
        attempts: dict[int, ChunkAttempt] = {}
        for task in message.tasks:
            # An attempt that is already here keeps what it has computed.
            known = None if is_new else self._attempts.get(task.attempt)
            if known is None:
                mini_batches = tuple(batch.mini_batches(task.chunk_index, self._chunk_sizes))
                known = ChunkAttempt(
                    chunk_index=task.chunk_index, attempt=task.attempt, mini_batches=mini_batches
                )
            known.commit_token = task.commit_token
            attempts[task.attempt] = known
        self._attempts = attempts
        if is_new:
            self.n_computed = 0
        self.epoch, self._version = message.epoch, message.version
        self.evaluation, self.versions = message.evaluation, message.versions
        return True

    def clear(self) -> None:
        self._attempts = {}
        self._pushed.clear()
        self.n_computed = 0

    @property
    def to_push(self) -> ChunkAttempt | None:
        return next((t for t in self if t.commit_token and t.total is not None), None)

    def to_compute(self, *, n_held_max: int) -> Sequence[ChunkAttempt]:
        if sum(t.total is not None for t in self) >= n_held_max:
            return ()
        return [t for t in self if not t.is_computed]

    def pushed(self, one: ChunkAttempt, *, is_finite: bool) -> None:
        one.total, one.is_finite = None, is_finite
        if is_finite:
            one.pushed = True
            self._pushed.append(one)

    @property
    def awaits_shards(self) -> bool:
        return bool(self._pushed)

    def acknowledged(self, *, n_waiting: int) -> bool:
        """Mark what shards hold, given the pushes still in flight; return whether any is new."""
        news = False
        while len(self._pushed) > n_waiting:
            self._pushed.popleft().staged = news = True
        return news

    @property
    def report(self) -> WorkReport:
        return self.report_of(0)

    def report_of(self, generation: int) -> WorkReport:
        return WorkReport(
            generation=generation,
            epoch=self.epoch,
            version=self._version,
            evaluation=self.evaluation,
            n_computed=self.n_computed,
            results=tuple(one.result for one in self if one.is_computed),
        )


# --- parameters ---


@final
class Parameters:
    """Fetches and installs the parameters of one evaluation, for a worker."""

    def __init__(
        self, client: ParameterClient, sums: MiniBatchSums, *, retry_seconds: Seconds
    ) -> None:
        self._client = client
        self._sums = sums
        self._retry_seconds = retry_seconds
        self._due = False  # an evaluation has begun whose parameters are not fetched
        self._fetching = False
        self._installing = False
        self._waits = False  # before it fetches, or installs, again
        self._evaluation: tuple[int, int] | None = None  # of which they are

    def lacks(self, attempts: ChunkAttempts) -> bool:
        return self._evaluation != attempts.key

    def invalidate(self) -> None:
        self._due, self._waits = True, False

    def retry(self) -> None:
        self._waits = False

    def fetch(self, attempts: ChunkAttempts, now: Seconds) -> Sequence[Action]:
        wanted = self._due or (self.lacks(attempts) and not self._fetching)
        if not wanted or self._waits or self._installing:
            return []
        if all(one.is_computed for one in attempts):
            return []
        self._due, self._fetching = False, True
        return self._client.begin_fetch(now)

    def install(self) -> Sequence[Action]:
        if not self._fetching or self._due or self._waits:
            return []
        client = self._client
        if not client.ready or not client.fetch_complete:
            return []
        self._installing = True
        work = client.install(self._sums.values)
        return [
            Compute(
                name=INSTALL,
                work=partial(self._sums.install, work),
                cost=Cost(n_bytes=2.0 * self._sums.n_bytes),
                remaining=lambda: client.readable_share,
            )
        ]

    def installed(self, result: object, attempts: ChunkAttempts, now: Seconds) -> Sequence[Action]:
        assert isinstance(result, FetchResult), result
        self._installing = False
        actions = list(self._client.installed(result, now))
        # All mini-batches of a batch must be computed at one point: parameters count only
        # if every shard sent the version that the coordinator published (DB-16).
        wanted = tuple((one.incarnation, one.clock) for one in attempts.versions)
        pause = TORN_RETRY_SECONDS
        if not result.torn:
            self._fetching = False
            if not self._due and self._client.versions == wanted:
                self._evaluation = attempts.key
                return actions
            self._evaluation = None
            if not self._due:  # the coordinator will soon send another evaluation
                pause = self._retry_seconds
        self._waits = True
        return [*actions, SetTimer(name=RETRY, at=now + pause)]


N_CHUNKS_HELD: Final = 2

_REPORT_TIMER = "replica:report"


@final
@dataclass(frozen=True, kw_only=True)
class BatchWorkerConfig:
    """Settings of a batch worker."""

    chunk_sizes: ChunkSizes  # how batches are divided; the coordinator must have the same
    retry_seconds: Seconds = 0.5  # seconds after which a busy worker repeats its report
    retry_seconds_max: Seconds = 4.0  # seconds after which an idle worker does

    def __post_init__(self) -> None:
        for name in ("retry_seconds", "retry_seconds_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use more than 0")


BatchWorkerMessage = StartTraining | Stop | Assignment | ShardReply


@final
class BatchWorker:
    """The role `replica-INDEX` of a Sandblaster job.

    Args:
        config: Its settings.
        client: Client of all shards, which pushes.
        executor: Computes; its loss is a sum (`summed`).
        samples: The order of the data.
        await_begin: Wait for `StartTraining` before it asks for work.
    """

    accepts: Final = message_types(BatchWorkerMessage)

    def __init__(
        self,
        config: BatchWorkerConfig,
        *,
        client: ParameterClient,
        executor: LocalExecutor,
        samples: Samples,
        await_begin: bool = True,
    ) -> None:
        self._config = config
        self._client = client
        self._sums = MiniBatchSums(executor)
        self._prefetch = Prefetch(self._sums, samples)
        self._attempts = ChunkAttempts(config.chunk_sizes)
        self._parameters = Parameters(client, self._sums, retry_seconds=config.retry_seconds)
        self._incarnation = 0
        self._begun = not await_begin
        self._stopped_by: Address | None = None
        self._busy = False  # whether the compute executor has work
        self._current: ChunkAttempt | None = None  # whose mini-batch or push runs
        self._accruing: ChunkAttempt | None = None  # whose gradients the model has accrued
        self._computing_for = (0, 0)  # which evaluation
        self._n_computed = 0  # examples, in this incarnation
        self._seconds = 0.0

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        Raises:
            JobError: model, data or loss make it impossible to go on.
            PeerLostError: a shard has been silent for too long.
        """
        if self._client.owns(event):
            return self._handle_client(event, now)
        actions: list[Action] = []
        match event:
            case Started():
                self._incarnation = event.incarnation
                actions += [*self._client.start(event.incarnation, now)]
                actions += self._report(now)
            case Received():
                actions += self._receive(event, now)
            case TimerFired(name=name):
                actions += self._timer(name, now)
            case Computed():
                actions += self._computed(event, now)
            case PeerJoined(peer=peer) if peer == COORDINATOR:
                actions += self._report(now)
            case _:
                pass  # other peers that join or leave change nothing
        return [*actions, *self._advance(now)]

    def _handle_client(self, event: Event, now: Seconds) -> Sequence[Action]:
        # Most events of a job come here. A shard's message can only make a push or an
        # install possible; nothing else needs to be checked.
        actions = self._client.handle(event, now)
        attempts = self._attempts
        if attempts.awaits_shards and attempts.acknowledged(n_waiting=self._client.unacknowledged):
            actions += self._report(now)
        if self._busy or not self._begun:
            return actions
        return [*actions, *(self._push() or self._install())]

    def adopt(self, incarnation: int) -> None:
        """Continue as this incarnation, with a client that another role has started."""
        self._incarnation, self._begun = incarnation, False

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self._state(), {
            **self._client.counters(),
            "samples": float(self._n_computed),
            "seconds_computing": self._seconds,
            "sets_held": float(sum(one.total is not None for one in self._attempts)),
        }

    def _state(self) -> str:
        if self._busy:
            return "computing"
        waited = self._client.waiting_for
        if waited is not None and any(True for _ in self._attempts):
            return f"waiting for {waited}"
        return "waiting for work" if self._begun else "waiting for begin"

    # --- events ---

    def _receive(self, event: Received, now: Seconds) -> Sequence[Action]:
        message = event.message
        match message:
            case StartTraining():
                self._begun = True
                return self._report(now)
            case Stop():
                self._stopped_by = event.sender
                return []
            case Assignment():
                return self._take_assignment(message, now)
            case _:
                raise RemoteProtocolError(
                    f"{event.sender} sent a replica {type(message).__name__}: only "
                    "shards, the coordinator and the supervisor send it messages"
                )

    def _take_assignment(self, message: Assignment, now: Seconds) -> Sequence[Action]:
        attempts = self._attempts
        if message.replica_incarnation != self._incarnation:
            return []  # for another incarnation
        if message.epoch < attempts.epoch:
            return []  # from an earlier coordinator
        before = attempts.key
        try:
            attempts.update(message)
        except ValueError as error:
            raise RemoteProtocolError(f"invalid assignment: {error}") from None
        if attempts.key != before:
            self._parameters.invalidate()
        return self._report(now)

    def _timer(self, name: str, now: Seconds) -> Sequence[Action]:
        if name == RETRY:
            self._parameters.retry()
            return []
        return self._report(now)

    def _report(self, now: Seconds) -> Sequence[Action]:
        if not self._begun:
            return []
        idle = not any(True for _ in self._attempts)
        config = self._config
        pause = config.retry_seconds_max if idle else config.retry_seconds
        return [
            Send(receiver=COORDINATOR, message=self._attempts.report),
            SetTimer(name=_REPORT_TIMER, at=now + pause),
        ]

    def _computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        if event.error is not None:
            raise failure(event.error)
        if event.name == READ:
            self._prefetch.have_read(event.result)
            return []
        self._busy = False
        self._seconds += event.seconds
        match event.name:
            case name if name == INSTALL:
                return self._parameters.installed(event.result, self._attempts, now)
            case "replica:mini-batch":
                return self._finish_mini_batch(event, now)
            case name if name == PUSH:
                return self._finish_push(event.result, now)
            case _:
                raise LocalProtocolError(f"unexpected result of {event.name!r}")

    # --- what to start next ---

    def _advance(self, now: Seconds) -> Sequence[Action]:
        if self._stopped_by is not None:
            return [] if self._busy else self._exit()  # the executor finishes its work first
        if not self._begun:
            return []
        to_compute = self._attempts.to_compute(n_held_max=N_CHUNKS_HELD)
        actions = [*self._parameters.fetch(self._attempts, now), *self._read(to_compute)]
        if self._busy:
            return actions
        # One work at a time in the compute executor; a push frees memory, so it goes first.
        return [*actions, *(self._push() or self._install() or self._step(to_compute))]

    def _exit(self) -> Sequence[Action]:
        receiver, self._stopped_by = self._stopped_by, None
        self._begun = False
        _, counters = self.status()
        finished = Finished(counters=dict(counters))
        return [Send(receiver=receiver or SUPERVISOR, message=finished), Exit()]

    def _read(self, to_compute: Sequence[ChunkAttempt]) -> Sequence[Action]:
        ahead = [
            mini_batch
            for one in to_compute[:N_MINI_BATCHES_HELD]
            for mini_batch in one.mini_batches[len(one.losses) :][:N_MINI_BATCHES_HELD]
        ]
        return self._prefetch.read(ahead)

    def _install(self) -> Sequence[Action]:
        actions = self._parameters.install()
        if actions:
            self._busy, self._current, self._accruing = True, None, None
        return actions

    def _step(self, to_compute: Sequence[ChunkAttempt]) -> Sequence[Action]:
        if not to_compute or self._parameters.lacks(self._attempts):
            return []
        one = to_compute[0]
        if self._accruing in to_compute and self._accruing is not None:
            # A new assignment put another first; finish this one, or its sum is lost.
            one = self._accruing
        batch = self._prefetch.get(one.next_mini_batch)
        if batch is None:
            return []
        is_first = not one.losses
        self._busy, self._current, self._accruing = True, one, one
        self._computing_for = self._attempts.key
        work = partial(self._sums.step, batch, is_first=is_first, is_last=one.is_last)
        cost = Cost(
            flops=self._sums.flops(len(batch.samples.indices)), n_bytes=float(self._sums.n_bytes)
        )
        return [Compute(name="replica:mini-batch", work=work, cost=cost)]

    def _finish_mini_batch(self, event: Computed, now: Seconds) -> Sequence[Action]:
        one, result = self._current, event.result
        assert one is not None
        assert isinstance(result, MiniBatchOutcome), result
        start, stop = one.next_mini_batch
        self._current = None
        self._n_computed += stop - start
        one.computed(result, seconds=event.seconds)
        if self._computing_for == self._attempts.key:
            self._attempts.n_computed += stop - start
        if one not in self._attempts or not one.is_computed:
            return []
        actions: list[Action] = []
        if not one.is_finite:
            start = one.mini_batches[0][0] if result.is_of_chunk else start
            blame = result.blame or "check the model and its loss there"
            text = f"loss or gradient of positions {start} to {stop - 1} of the data is"
            actions.append(Report(text=f"{text} not finite: {blame}", level="warning"))
        return [*actions, *self._report(now)]

    def _push(self) -> Sequence[Action]:
        one = self._attempts.to_push
        if one is None or one.total is None or not self._client.can_push:
            return []
        self._busy, self._current = True, one
        stage = self._client.stage(one.total.gradients, one.total.values)
        cost = Cost(n_bytes=2.0 * self._sums.n_bytes)
        return [Compute(name=PUSH, work=stage, cost=cost)]

    def _finish_push(self, result: object, now: Seconds) -> Sequence[Action]:
        one, self._current = self._current, None
        assert one is not None
        assert isinstance(result, PushResult), result
        actions = self._client.staged(
            result,
            n_gradients=len(one.mini_batches),
            samples=one.n_examples,
            commit_token=one.commit_token,
            now=now,
        )
        self._attempts.pushed(one, is_finite=result.finite)
        return actions if result.finite else [*actions, *self._report(now)]
