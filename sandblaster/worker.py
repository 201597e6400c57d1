"""The chunk program: a worker, or one rank of it, sums gradients for the coordinator.

Algorithm 1.2 of Dean et al. 2012, `ProcessPortion`:

    coordinator -> leader    Assignment       for its group tasks
    leader -> rank           StartGeneration  with its chunk
                             PushChunk        push the sum of an attempt
    rank -> leader           ChunkStaged      all shards hold this rank's part; repeated
    leader -> coordinator    WorkReport       computed, or staged by all ranks; repeated

A rank pushes each sum once, under one commit token. At most `N_CHUNKS_HELD` sums are held.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import torch
from typing_extensions import override

from distbelief import protocol as wire
from distbelief.core.errors import JobError, LocalProtocolError
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.pushes import PushResult
from distbelief.protocol import role as rl
from distbelief.worker.batches import BatchSlice, bad_sample, blame_of
from distbelief.worker.exchange import GradientSum, is_finite
from distbelief.worker.execution.executor import StepResult
from distbelief.worker.group import Outgoing
from distbelief.worker.replica import OTHER_RETRY_SECONDS, Leader, Program, Steps, Waiting
from distbelief.worker.steps import LocalNorm
from distbelief.worker.training import PUSH, Items
from sandblaster.chunks import COORDINATOR
from sandblaster.group_tasks import TIMER as GROUP_TIMER, ChunkBatchPlan, ChunkOutcome, GroupTasks


# --- pushes ---

STAGED_TIMER: Final = "rank:report"

N_STAGED_REPEATED: Final = 32
"""Tokens that each `ChunkStaged` repeats: more than can be open at once."""

Key = tuple[int, int]  # series, attempt


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptChunk:
    """This rank's part of the sum of one chunk; flat, as a client stages it."""

    gradients: Sequence[torch.Tensor | None]
    values: Sequence[torch.Tensor]  # buffers as they were after the chunk
    n_mini_batches: int
    n_examples: int


@final
class ChunkPushes:
    """Holds the sums of a rank and pushes those that have a commit token.

    kept --> token --> staging --> pushed --> staged: all shards hold it
      |        |
      +--------+--> no longer named: dropped
    """

    def __init__(self, client: ParameterClient, *, n_bytes: float, has_parts: bool) -> None:
        # Tokens whose parts all shards hold, the newest last.
        self.staged: deque[int] = deque(maxlen=N_STAGED_REPEATED)
        self._client = client
        self._n_bytes = n_bytes  # of one sum
        self._has_parts = has_parts  # whether this rank holds any parameters
        self._sums: dict[Key, KeptChunk] = {}
        self._to_push: dict[int, Key] = {}  # by token, the oldest first
        self._pushing: tuple[int, KeptChunk] | None = None  # in the executor, with its token
        self._pushed: deque[int] = deque()  # not acknowledged
        self.newest = 0  # token of the last push
        self._has_new_staged = False
        self.has_work = False  # more to push than when this was reset

    def __len__(self) -> int:
        return len(self._sums)

    def keep(self, key: Key, kept: KeptChunk) -> None:
        self._sums[key] = kept

    def retain(self, keys: Collection[Key]) -> None:
        self._sums = {key: one for key, one in self._sums.items() if key in keys}

    def request_push(self, message: wire.PushChunk) -> None:
        # The leader repeats `PushChunk`: a sum is pushed once for each token.
        key, commit_token = (message.series, message.attempt), message.commit_token
        pushing = () if self._pushing is None else self._pushing[:1]
        known = (*self.staged, *self._pushed, *self._to_push, *pushing)
        if commit_token in known or key not in self._sums:
            return
        # A rank without parameters has nothing to push: its part counts as staged.
        if not self._has_parts:
            del self._sums[key]
            self.staged.append(commit_token)
            self._has_new_staged = True
            return
        self._to_push[commit_token] = key
        self.has_work = True

    def stage(self) -> rl.Compute | None:
        """Return the work that stages the next sum with a token, once every shard has room."""
        client = self._client
        if not self._to_push or not (client.ready and client.can_push):
            return None
        self._to_push = {g: key for g, key in self._to_push.items() if key in self._sums}
        if not self._to_push:
            return None
        commit_token = next(iter(self._to_push))
        kept = self._sums.pop(self._to_push.pop(commit_token))
        self._pushing = commit_token, kept
        work = partial(client.draft().put_all, kept.gradients, kept.values)
        return rl.Compute(name=PUSH, work=work, cost=rl.Cost(n_bytes=2.0 * self._n_bytes))

    def computed(self, event: rl.Computed, now: rl.Seconds) -> Sequence[rl.Action]:
        if event.name != PUSH or self._pushing is None:
            raise LocalProtocolError(f"unexpected result of {event.name!r}")
        result = event.result
        assert isinstance(result, PushResult), result
        (commit_token, kept), self._pushing = self._pushing, None
        if not result.finite:  # it was when it was summed
            raise JobError(f"a chunk's sum is not finite when it is pushed: {result.culprits}")
        self.newest = commit_token
        self._pushed.append(commit_token)
        return self._client.staged(
            result,
            n_gradients=kept.n_mini_batches,
            samples=kept.n_examples,
            commit_token=commit_token,
            now=now,
        )

    def has_new_staged(self) -> bool:
        """Return whether more parts are staged than at the last call."""
        while self._pushed and len(self._pushed) > self._client.unacknowledged:
            self.staged.append(self._pushed.popleft())
            self._has_new_staged = True
        news, self._has_new_staged = self._has_new_staged, False
        return news


# --- sums ---


@final
class ChunkProgram(Program):
    """Sums gradients of a rank over a chunk; see `distbelief.worker.replica.Program`.

    The sum depends on the mini-batches and the parameters alone, so every attempt at a chunk
    gives the same bits. Only the leader, the first of `names`, has `group_tasks`.
    """

    accepts = frozenset({wire.Assignment, wire.ChunkStaged, wire.PushChunk})

    def __init__(
        self,
        items: Items,
        *,
        shards: Sequence[int] | None,
        client: ParameterClient,
        plan: ChunkBatchPlan,
        group_tasks: GroupTasks | None,
        names: Sequence[rl.Address],
        retry_seconds: rl.Seconds,
    ) -> None:
        self.values = items.values
        self._items = items
        self._buffers = [item for item in range(len(items.values)) if item not in items.trained]
        self._shards = shards  # those that hold any of the items; None: all
        self._client = client
        self._plan = plan
        self._group_tasks = group_tasks
        self._names = names
        self._is_alone = len(names) == 1
        self._retry_seconds = retry_seconds
        self._tells_staged = False
        # Completed sums on their way to the shards.
        self.pushes = ChunkPushes(client, n_bytes=items.n_bytes, has_parts=bool(self.values))
        self._installed: tuple[int, int] | None = None  # evaluation of the parameters
        self._fetched: list[torch.Tensor] = []  # buffers as they were fetched
        self._opened = False  # whether this generation's first step has begun
        self._n_computed = 0
        # Of the step in progress; the executor uses them.
        self._total = GradientSum(len(items.values), shares_memory=not self._is_alone)
        self._gradients: dict[int, torch.Tensor] = {}
        self._mini_batch = BatchSlice(generation=0, step=0)
        self._positions = 0, 0  # of the mini-batch
        self._key: Key = (0, 0)
        self._is_last = False
        self._done: tuple[Key, KeptChunk] | None = None
        self._losses: list[float] = []  # of the mini-batches of the chunk, where they are known
        self._bad: tuple[int, int] | None = None  # positions of the first that is not finite
        self._blame: str | None = None

    # --- chunks ---

    @property
    @override
    def idle(self) -> str | None:
        if self._group_tasks is not None:
            return self._group_tasks.idle
        return "waiting for work" if self._plan.chunk is None else None

    @override
    def steps(self, steps: Steps) -> Waiting[None]:
        self.drop()
        yield from steps.gather()
        self.begin()
        while (yield from self.next_mini_batch(steps)):
            assert steps.slice is not None
            self.open(steps.number, steps.slice)
            steps.begin_step(self.put, self.close, n_bytes=self._items.n_bytes)
            yield from steps.taken()
            steps.actions += self.closed()
            yield

    def drop(self) -> None:
        self._collect()
        self._gradients = {}
        self._total.drop()

    def begin(self) -> None:
        self._collect()
        self._opened = False
        chunk = self._plan.chunk
        if chunk is None:
            return
        # Nobody can ask for the other sums any more.
        self.pushes.retain({(chunk.series, attempt) for attempt in chunk.keeps})
        if (chunk.series, chunk.evaluation) != self._installed:
            self._installed = None

    def _collect(self) -> None:
        # The executor leaves a completed sum here; it may already run the next step.
        done, self._done = self._done, None
        if done is not None:
            self.pushes.keep(*done)

    # --- what comes before a mini-batch ---

    def next_mini_batch(self, steps: Steps) -> Waiting[bool]:
        """Push sums, fetch the parameters of a chunk; wait for samples. False: none is left."""
        while not steps.is_over:
            if (stage := self.pushes.stage()) is not None:
                steps.start(stage)
                event = yield
                assert event is not None
                steps.actions += self.push_staged(event, steps.now)
            elif (may_step := steps.prepare()) is not None:
                lacks = self.lacks(steps.number)
                if lacks and not steps.here.fetching:
                    steps.begin_fetch()
                if not lacks and may_step and steps.take():
                    return True
                if lacks and may_step and steps.has_fetched:
                    install = self._client.install(self.values)
                    steps.begin_install(install, 2.0 * self._items.n_bytes)
                    seconds = yield from steps.installed()
                    if seconds is not None and self.is_fetched():
                        self.seconds += seconds
                    elif seconds is not None:
                        steps.wait(OTHER_RETRY_SECONDS)
            yield
        return False

    def lacks(self, step: int) -> bool:
        """Return whether parameters must come before a step."""
        return step == 0 and self._plan.chunk is not None and self._installed is None

    def is_fetched(self) -> bool:
        """Note an installed fetch; return whether it is of this evaluation (DB-16)."""
        chunk = self._plan.chunk
        assert chunk is not None
        wanted = [
            version
            for index, version in enumerate(chunk.versions)
            if self._shards is None or index in self._shards
        ]
        fetched = self._client.versions
        if len(fetched) != len(wanted) or not all(map(_is_version, fetched, wanted)):
            return False
        self._installed = chunk.series, chunk.evaluation
        self._fetched = [self.values[item].clone() for item in self._buffers]
        return True

    # --- mini-batches ---

    def open(self, step: int, batch_slice: BatchSlice) -> None:
        chunk = self._plan.chunk
        assert chunk is not None
        if step == 0:
            self._opened = True
            self._key = chunk.series, chunk.attempt
            self._total.drop()
            self._losses.clear()
            self._bad = None
            # Running averages of each chunk start from the fetched buffers.
            for item, fetched in zip(self._buffers, self._fetched, strict=True):
                self.values[item].copy_(fetched)
        self._gradients = {}
        self._mini_batch, self._positions = batch_slice, self._plan.bounds(step)
        self._is_last = self._plan.is_last(step)

    def put(self, item: int, gradient: torch.Tensor) -> None:
        """Take a gradient of a mini-batch, as work."""
        self._gradients[item] = gradient

    def close(self, found: StepResult) -> LocalNorm | bool:
        """Add a mini-batch to the sum, as work; return whether it is finite, or a group's vote."""
        self._total.add(self._gradients)
        self._gradients = {}
        self._average(found)
        self._n_computed += len(self._mini_batch.samples.indices)
        if found.loss is not None:
            self._losses.append(found.loss)
            if not math.isfinite(found.loss):
                self._note_bad(self._positions)
        if not self._is_last:
            return self._bad is None
        chunk = self._plan.chunk
        assert chunk is not None
        buffers = {i: self.values[i] for i in self._buffers}
        if not (self._total.is_finite and is_finite(buffers)):
            self._note_bad((chunk.start, chunk.stop))
        if self._bad is None:
            kept = KeptChunk(
                gradients=tuple(self._total.sums),
                values=self._values(),
                n_mini_batches=self._plan.n_steps(chunk.start, chunk.stop),
                n_examples=chunk.stop - chunk.start,
            )
            self._done = self._key, kept
        self._total.drop()
        if self._is_alone:
            return self._bad is None
        square = 0.0 if self._bad is None else math.nan
        return LocalNorm(square=square, settle=_ignore_vote, cost=rl.Cost())

    def _note_bad(self, positions: tuple[int, int]) -> None:
        if self._bad is None:
            self._bad = positions
            self._blame = blame_of(bad_sample(self._mini_batch))

    def _average(self, found: StepResult) -> None:
        for item, value in found.averages.items():
            self.values[item].copy_(value.reshape(-1))
            if item in self._items.counts:
                self.values[self._items.counts[item]] += 1

    def _values(self) -> list[torch.Tensor]:
        values = list(self.values)
        for item in self._buffers:
            values[item] = values[item].clone()
        return values

    def closed(self) -> list[rl.Action]:
        """A mini-batch is done."""
        self._collect()
        if self._group_tasks is not None and self._is_alone:
            if self._is_last:
                self._group_tasks.computed(self._outcome())
            return []
        blame, self._blame = self._blame, None
        return [] if blame is None else [rl.Report(text=blame, level="warning")]

    def _outcome(self) -> ChunkOutcome:
        if self._bad is None:
            # Exactly rounded, as the coordinator's sum over chunks is.
            return ChunkOutcome(loss=math.fsum(self._losses))
        return ChunkOutcome(loss=math.nan, bad=self._bad, blame=self._blame)

    # --- pushes ---

    def push(self, message: wire.PushChunk) -> None:
        self._collect()
        self.pushes.request_push(message)

    def push_staged(self, event: rl.Computed, now: rl.Seconds) -> Sequence[rl.Action]:
        actions = self.pushes.computed(event, now)
        if self._group_tasks is not None and self._is_alone:
            self._group_tasks.pushed(self.pushes.newest)
        return actions

    # --- the coordinator's protocol ---

    @override
    def handle(self, event: rl.Event, rank: int | None, now: rl.Seconds) -> list[rl.Action] | None:
        tasks = self._group_tasks
        match event:
            case rl.Started():
                if tasks is None:
                    self._tells_staged = True
                else:
                    tasks.start(event.incarnation)
                return None
            case rl.Received():
                if tasks is not None and rank is not None:
                    tasks.note_alive(rank, now)
                return [] if self._receive(event.message, rank) else None
            case rl.TimerFired(name=name) if name == STAGED_TIMER:
                self._tells_staged = True
                return []
            case rl.TimerFired(name=name) if name == GROUP_TIMER and tasks is not None:
                out = self._take_own(tasks.resend())
                return [rl.Send(receiver=self._names[to], message=message) for to, message in out]
            case rl.PeerJoined(peer=peer) if peer == COORDINATOR:
                if tasks is not None:
                    tasks.request_report()
                return []
            case _:
                return None

    def _receive(self, message: wire.Message, rank: int | None) -> bool:
        tasks = self._group_tasks
        match message:
            case wire.Assignment() if tasks is not None:
                tasks.take(message)
            case wire.ChunkStaged() if tasks is not None and rank is not None:
                tasks.staged(rank, message.commit_tokens)
            case wire.PushChunk() if rank == 0:
                self.push(message)
                self._tells_staged |= message.commit_token in self.pushes.staged
            case _:
                return False
        return True

    def _take_own(self, out: Outgoing) -> Outgoing:
        for rank, message in out:
            if isinstance(message, wire.PushChunk) and rank == 0:
                self.push(message)
        return [(rank, m) for rank, m in out if not (isinstance(m, wire.PushChunk) and rank == 0)]

    @override
    def prepare(self, message: wire.StartGeneration) -> None:
        self._plan.set_chunk(message.generation, message.chunk)

    @override
    def has_news(self) -> bool:
        pushes = self.pushes
        has_work, pushes.has_work, has_staged = pushes.has_work, False, pushes.has_new_staged()
        if has_staged and self._group_tasks is not None:
            self._group_tasks.staged(0, tuple(pushes.staged))
            return True
        self._tells_staged |= has_staged
        return has_work

    @override
    def due(self, now: rl.Seconds) -> list[rl.Action]:
        if self._group_tasks is not None:
            return [*self._group_tasks.due_report(now)]
        if not self._tells_staged:
            return []
        self._tells_staged = False
        staged = wire.ChunkStaged(commit_tokens=tuple(self.pushes.staged))
        timer = rl.SetTimer(name=STAGED_TIMER, at=now + self._retry_seconds)
        return [rl.Send(receiver=self._names[0], message=staged), timer]

    @override
    def command(
        self,
        leader: Leader,
        message: wire.StartTraining | wire.Evaluate | wire.Stop,
        now: rl.Seconds,
    ) -> Outgoing:
        assert self._group_tasks is not None
        return self._group_tasks.command(leader, message, now)

    @override
    def report(
        self, leader: Leader, now: rl.Seconds, *, final: bool
    ) -> tuple[Sequence[rl.Action], Outgoing]:
        """Begin the next generation, if there is a chunk to compute; `final` ends the reports."""
        assert self._group_tasks is not None
        if final:
            return [], []
        actions, out = self._group_tasks.report(leader, now, has_opened=self._opened)
        return actions, self._take_own(out)

    @override
    def figures(self) -> Mapping[str, float]:
        return {
            "samples": float(self._n_computed),
            "seconds_computing": self.seconds,
            "sets_held": float(len(self.pushes)),
        }


def _ignore_vote(square: float, sample: int | None) -> None:
    del square, sample


def _is_version(fetched: tuple[int, int], wanted: wire.ShardVersion) -> bool:
    term, clock = fetched
    is_of_term = term == wanted.incarnation or (
        wanted.outlasts is True and term > wanted.incarnation
    )
    return is_of_term and clock == wanted.clock
