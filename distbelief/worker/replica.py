"""The replica: a role that takes steps on a model, whole or one rank of a partition of it.

    gathering     a new generation: drop the current step, wait for pushes
    gathered      the leader knows
    running       take the granted steps, one after the other
    ended         the last step is done and every push is applied

It joins a step executor (the whole model, or one rank's partition) and an objective (train,
evaluate, or sum over a chunk). A step starts once its samples and parameters are here. With a
partition, its operations run as their inputs arrive, and the objective uses the result after a
reduction of the gradient norm over all ranks. A whole model is a group of one rank, which sends
no group message. Messages carry the generation: those of an earlier one are rejected, those of a
later step are kept.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, final

import torch

from distbelief import protocol as wire
from distbelief.errors import DistBeliefError, JobError, LocalProtocolError, RemoteProtocolError
from distbelief.execution.executor import StepResult
from distbelief.parameter_server.client.client import ParameterClient, ShardReply
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.roles import role as rl
from distbelief.worker.batches import READ, BatchIndices, BatchSlice, SlicePrefetch
from distbelief.worker.group import GroupLeader, GroupRank, Outgoing, member_names
from distbelief.worker.local_executor import LocalExecutor
from distbelief.worker.objective import STEP, LocalNorm, Objective, StepOutcome
from distbelief.worker.steps import StepRunner


INSTALL: Final = "replica:install"
SETTLE: Final = "replica:settle"
RETRY: Final = "replica:retry"
REMIND: Final = "replica:remind"

TORN_RETRY_SECONDS: Final = 1e-3  # before a fetch is repeated that met a half-applied update
OTHER_RETRY_SECONDS: Final = 0.05  # before one that gave another version than the wanted one
REMIND_SECONDS: Final = 0.25
IDLE_SECONDS: Final = 5.0  # a rank that waits for its group so long does not stop other replicas
END_SECONDS: Final = 30.0  # a rank that has ended exits after so long without its leader


class Phase(Enum):
    """Where in a generation a rank is; the values are its state in status tables."""

    ALONE = "waiting for its leader"
    GATHERING = "gathering"
    GATHERED = "waiting for begin"
    RUNNING = "fetching"
    ENDED = "finishing"


@dataclass(slots=True)
class _Epoch:
    phase: Phase = Phase.ALONE
    granted: int = 0  # steps that the rank may take
    is_last: bool = False  # no more will be granted
    has_ended: bool = False  # the leader knows that all steps are done
    n_reduced: int = 0  # steps whose gradient norm is reduced over all ranks
    square: float = 0.0  # squared norm of the last of them
    sample: int | None = None  # index of a bad sample in that step, if a rank reported one
    loss: float = 0.0  # sum over `samples`, on the rank that computes it
    samples: int = 0  # those with a finite loss
    no_loss: int = 0
    installed_for: int = -1  # the step whose parameters are installed
    fetching: bool = False  # a fetch has begun and is not installed yet


@final
@dataclass(frozen=True, slots=True)
class _Pending:
    local: LocalNorm  # this rank's part of the decision
    result: StepResult
    batch: BatchIndices


ReplicaMessage = (
    wire.StartTraining
    | wire.Evaluate
    | wire.Stop
    | wire.RankReady
    | wire.StepsDone
    | wire.StartEpoch
    | wire.GrantSteps
    | wire.TransferBlock
    | wire.TransferAck
    | ShardReply
)


@final
class Replica:
    """The role "replica-R" or "evaluator", or one rank of it: "replica-R.M", "evaluator.M"."""

    accepts = rl.message_types(ReplicaMessage)

    def __init__(  # noqa: PLR0913 -- one call describes a rank
        self,
        rank: GroupRank,
        *,
        n_ranks: int = 1,  # of the group
        plan: str = "",  # hash of the plan, equal on all ranks
        client: ParameterClient,  # of the shards that hold what the rank keeps
        executor: LocalExecutor | StepRunner,
        slices: SlicePrefetch,
        objective: Objective,
        leader: GroupLeader | None,  # on rank 0
        shapes: Sequence[tuple[int, ...]] | None = None,  # per item that the rank keeps; None: flat
    ) -> None:
        self.accepts = self.accepts | objective.accepts
        self.objective = objective
        self._names = member_names(rank.group, n_ranks)
        self._rank_of = {name: index for index, name in enumerate(self._names)}
        self._rank = rank.machine
        self._name = self._names[rank.machine]
        self._plan = plan
        self._is_single = n_ranks == 1
        self._client = client
        self._executor = executor
        self._links = executor.links if isinstance(executor, StepRunner) else {}
        self._slices = slices
        self._leader = leader
        self._n_bytes = sum(value.nbytes for value in objective.values)
        self._parameters: Sequence[torch.Tensor] = objective.values
        if shapes is not None:
            pairs = zip(objective.values, shapes, strict=True)
            self._parameters = [value.view(shape) for value, shape in pairs]
        self._incarnation = 0
        self._n_generations = 0
        self._epoch = _Epoch()
        self._lane: list[str] = []  # work in the compute executor, the oldest first
        self._waits = False  # a timer will repeat the last fetch
        self._installing = (0, 0)  # generation and step
        self._slice: BatchSlice | None = None  # of the current step
        self._is_torn = False  # the last install met a half-applied update
        self._pending: _Pending | None = None
        self._local_square = 0.0  # the last local sum of squares, which the rank reports
        self._local_sample: int | None = None  # the last bad sample found here, if any
        self._has_stepped = False  # since the last report
        self._ended_at: rl.Seconds = 0.0
        self._idle_since: rl.Seconds | None = None
        self._stopped_at: rl.Seconds | None = None
        self._is_orphan = False  # the leader is lost for good
        self._is_gone = False

    # --- events ---

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        if self._is_gone:
            return []
        of_shard, phase = self._client.owns(event), self._epoch.phase
        if of_shard:
            actions: Sequence[rl.Action] = self._client.handle(event, now)
            # Most events of shards are blocks, acknowledgements and timers that remove no obstacle.
            if self._is_single and not self._client.has_news:
                return actions
        else:
            own = None
            if self.objective.accepts:
                rank = self._rank_of.get(event.sender) if isinstance(event, rl.Received) else None
                own = self.objective.handle(event, rank, now)
            actions = self._on_event(event, now) if own is None else own
        # Every event may have removed the last obstacle to the next piece of work.
        begun = self._advance(now)
        # Most messages of shards are no news to a leader without other ranks.
        is_same = self._is_single and not begun and phase is self._epoch.phase
        if of_shard and is_same and not self._has_news():
            return actions
        # Work of a partition does not depend on these messages: it starts before they are sent.
        is_chain = not self._is_single and self._lane == [STEP]
        both = (begun, actions) if is_chain else (actions, begun)
        done = [*both[0], *both[1], *self._lead(now)]
        while self._has_news():
            done += [*self._advance(now), *self._lead(now)]
        return [*done, *self._due(now)]

    def _has_news(self) -> bool:
        return not self._is_gone and self.objective.has_news()

    def _due(self, now: rl.Seconds) -> list[rl.Action]:
        return [] if self._is_gone else self.objective.due(now)

    def _on_event(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        match event:
            case rl.Started():
                return self._start(event.incarnation, now)
            case rl.Received():
                return self._receive(event, now)
            case rl.TimerFired(name=name) if name == REMIND:
                return self._remind(now)
            case rl.TimerFired():
                self._waits = False
            case rl.Computed():
                return self._computed(event, now)
            case rl.PeerJoined() | rl.PeerLost():
                return self._peer(event, now)
            case _:
                pass
        return []

    def _start(self, incarnation: int, now: rl.Seconds) -> list[rl.Action]:
        self._incarnation = incarnation
        actions = self._client.start(incarnation, now)
        if self._leader is not None:
            self._leader.joined(0, incarnation, now)
            actions += self._deliver(self._leader.start(incarnation, now), now)
        return [*actions, *([] if self._is_single else self._remind(now))]

    def _peer(self, event: rl.PeerJoined | rl.PeerLost, now: rl.Seconds) -> list[rl.Action]:
        rank, leader = self._rank_of.get(event.peer), self._leader
        if rank is None:
            return []
        if isinstance(event, rl.PeerJoined):
            out = [] if leader is None else leader.joined(rank, event.incarnation, now)
            return self._deliver(out, now)
        if event.for_good and leader is not None:
            return self._deliver(leader.lost(rank, now), now)
        self._is_orphan |= event.for_good and rank == 0
        return []

    def _receive(self, event: rl.Received, now: rl.Seconds) -> list[rl.Action]:
        message = event.message
        rank = self._rank_of.get(event.sender)
        match message:
            case wire.StartTraining() | wire.Evaluate() | wire.Stop():
                return self._command(message, now)
            case wire.RankReady() | wire.StepsDone() if self._leader and rank is not None:
                heard = self._leader.hear(rank, event.incarnation, message, now)
                return self._deliver(heard, now)
            case wire.StartEpoch() | wire.GrantSteps() if rank == 0:
                return self._follow(message, now)
            case wire.TransferBlock() | wire.TransferAck() if (
                rank is not None and rank in self._links
            ):
                assert isinstance(self._executor, StepRunner)
                return self._executor.receive(rank, message, now)
            case _:
                raise RemoteProtocolError(
                    f"{event.sender} sent {self._name} {type(message).__name__}, "
                    "which is not for it"
                )

    def _command(
        self, message: wire.StartTraining | wire.Evaluate | wire.Stop, now: rl.Seconds
    ) -> list[rl.Action]:
        if self._leader is None:  # the leader gets the same command, and decides
            if isinstance(message, wire.Stop) and self._stopped_at is None:
                self._stopped_at = now
            return []
        if self._is_single:  # no other rank has begun a step that this one has not
            self._leader.n_begun = self._executor.step + self._executor.is_open
        return self._deliver(self.objective.command(self._leader, message, now), now)

    # --- status ---

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self._state(), self._metrics()

    def _metrics(self) -> dict[str, float]:
        metrics = {**self._client.counters(), **self.objective.figures()}
        if self._is_single:
            return metrics
        links = self._links
        metrics |= {
            # JSON numbers: the low 32 bits are enough to tell generations apart.
            "generation": float(self._executor.generation & 0xFFFFFFFF),
            "generations": float(self._n_generations),
            "messages_out": float(sum(link.n_out for link in links.values())),
            "messages_resent": float(sum(link.n_again for link in links.values())),
        }
        n_bytes = {f"bytes_to_{rank}": float(link.n_bytes) for rank, link in links.items()}
        return metrics | {name: n for name, n in n_bytes.items() if n}

    def _state(self) -> str:
        phase, leader = self._epoch.phase, self._leader
        if self._lane and STEP not in self._lane:
            return {INSTALL: "fetching", SETTLE: self.objective.verb}.get(self._lane[0], "pushing")
        if leader is not None and leader.is_held:
            return "waiting for more samples"
        rank, waited = self._awaited(), self._client.waiting_for
        if rank is not None and rank != self._rank:
            return f"waiting for {self._names[rank]}"
        if self._lane or self._executor.is_open:
            return self.objective.verb
        is_running = phase is Phase.RUNNING
        if is_running and self.objective.idle is not None:
            state = self.objective.idle
        elif waited is not None and (is_running or not self._client.ready):
            state = f"waiting for {waited}"
        elif is_running and self._is_over(self._executor.step):
            state = Phase.ENDED.value
        else:
            state = phase.value
        return state

    def _awaited(self) -> int | None:
        leader = self._leader
        match self._epoch.phase:
            case Phase.RUNNING if self._executor.is_open:
                return None if self._lane else self._executor.awaited
            case Phase.RUNNING if self._pending is not None or not self._may_step:
                return 0 if leader is None else leader.slowest
            case Phase.ALONE | Phase.GATHERED if leader is None:
                return 0
            case Phase.GATHERED if leader is not None and leader.waiting_for:
                return min(leader.waiting_for)
            case _:
                return None

    # --- the group ---
    #
    # StartEpoch   new generation: drop the current step    -> RankReady, once idle
    # GrantSteps   take this many steps in total            -> StepsDone, after each

    def _deliver(self, out: Outgoing, now: rl.Seconds) -> list[rl.Action]:
        actions: list[rl.Action] = []
        for rank, message in out:
            # Messages of rank 0 to itself take effect at once.
            if rank != self._rank:
                actions.append(rl.Send(receiver=self._names[rank], message=message))
            else:
                assert isinstance(message, wire.StartEpoch | wire.GrantSteps), message
                actions += self._follow(message, now)
        return actions

    def _to_leader(
        self, message: wire.RankReady | wire.StepsDone, now: rl.Seconds
    ) -> list[rl.Action]:
        if self._leader is None:
            return [rl.Send(receiver=self._names[0], message=message)]
        return self._deliver(self._leader.hear(0, self._incarnation, message, now), now)

    def _report_ready(self, now: rl.Seconds) -> list[rl.Action]:
        pushed = self.objective.pushed
        ready = wire.RankReady(
            generation=self._executor.generation, pushes=pushed is not None, samples=pushed or 0
        )
        return self._to_leader(ready, now)

    def _report_steps(self, now: rl.Seconds) -> list[rl.Action]:
        clocks, here = self._client.clocks, self._epoch
        done = wire.StepsDone(
            generation=self._executor.generation,
            steps=self._executor.step,
            loss=here.loss,
            samples=here.samples,
            no_loss=here.no_loss,
            clock=sum(clocks) / len(clocks) if clocks else -1.0,
            ended=here.phase is Phase.ENDED,
            square=self._local_square,
            sample=self._local_sample,
        )
        # A grant would tell a single rank nothing, unless a step waits for the norm.
        if self._is_single and self._leader is not None and self._pending is None:
            self._leader.note(0, done, now)
            return []
        return self._to_leader(done, now)

    def _follow(
        self, message: wire.StartEpoch | wire.GrantSteps, now: rl.Seconds
    ) -> list[rl.Action]:
        generation = self._executor.generation
        if message.generation < generation:
            raise RemoteProtocolError(
                f"{self._name} was sent {type(message).__name__} of generation "
                f"{message.generation}, after generation {generation} had begun"
            )
        if isinstance(message, wire.GrantSteps):
            return self._take_grant(message, now)
        self.objective.prepare(message)
        if message.plan != self._plan:
            raise JobError(
                f"the leader of {self._name} has plan {message.plan}, {self._name} has "
                f"{self._plan}: start all ranks of a replica with one plan"
            )
        # The leader repeats this message until it is answered.
        if message.generation == generation:
            return self._report_ready(now) if self._epoch.phase is Phase.GATHERED else []
        self._epoch = _Epoch(phase=Phase.GATHERING)
        self._n_generations += 1
        self._executor.begin(message.generation)
        return []

    def _take_grant(self, message: wire.GrantSteps, now: rl.Seconds) -> list[rl.Action]:
        here = self._epoch
        ready = here.phase not in {Phase.ALONE, Phase.GATHERING}
        if message.generation > self._executor.generation or not ready:
            raise RemoteProtocolError(
                f"{self._name} was granted steps of generation {message.generation} before it "
                "was ready"
            )
        # Messages may be repeated or arrive late, so values only grow.
        here.granted = max(here.granted, message.steps)
        here.is_last |= message.is_last
        here.has_ended |= message.ended
        if message.agreed > here.n_reduced:
            here.n_reduced, here.square = message.agreed, message.square
            here.sample = message.sample
        is_first = here.phase is Phase.GATHERED
        self.objective.granted(message, is_first=is_first)
        if not is_first:
            return self._executor.place(now)
        here.phase = Phase.RUNNING
        self._slices.begin(message.generation, message.position)
        self.objective.begin(message.position, now)
        return self._executor.place(now)

    def _lead(self, now: rl.Seconds) -> Sequence[rl.Action]:
        leader = self._leader
        if leader is None or self._is_gone:
            return []
        waits = self._is_single and self.objective.reports_steps and not leader.is_held
        if waits and not self._has_stepped:
            return []
        self._has_stepped = False
        actions, out = self.objective.report(leader, now, final=False)
        if not out:
            return actions
        return [*actions, *self._deliver(out, now), *self._advance(now)]

    def _remind(self, now: rl.Seconds) -> list[rl.Action]:
        # Repeats whatever may have been lost; the receivers ignore duplicates.
        actions: list[rl.Action] = [rl.SetTimer(name=REMIND, at=now + REMIND_SECONDS)]
        for link in self._links.values():
            actions += link.remind(now)
        if self._leader is not None:
            actions += self._deliver(self._leader.remind(now), now)
        if self._is_left(now):
            return [*actions, *self._exit()]
        here = self._epoch
        is_idle = not (self._lane or self._executor.is_open or self._may_step)
        self._idle_since = (self._idle_since or now) if is_idle else None
        if self._idle_since is not None and now - self._idle_since >= IDLE_SECONDS:
            actions += self.objective.leave(now)
        match here.phase:
            # A rank that starts late introduces itself to the leader.
            case Phase.ALONE if self._leader is None:
                ready = wire.RankReady(generation=0, pushes=False, samples=0)
                return [*actions, *self._to_leader(ready, now)]
            case Phase.GATHERED:
                return [*actions, *self._report_ready(now)]
            case Phase.RUNNING | Phase.ENDED if self._pending is not None or not self._may_step:
                return [*actions, *self._report_steps(now)]
            case _:
                return actions

    # --- what the compute executor runs next ---

    @property
    def _may_step(self) -> bool:
        leader = self._leader
        granted = leader.granted if self._is_single and leader else self._epoch.granted
        return self._executor.step < granted

    def _is_over(self, step: int) -> bool:
        # A single rank may be told to end before it takes a step that it has been granted.
        leader, here = self._leader, self._epoch
        if self._is_single and leader is not None:
            return leader.is_last and step >= leader.granted
        return here.is_last and step >= here.granted

    def _advance(self, now: rl.Seconds) -> list[rl.Action]:
        if self._lane or self._waits:
            return []
        actions: list[rl.Action] = []
        leader = self._leader
        stops = self._is_single and leader is not None and leader.is_stopping
        if stops and self._epoch.phase is not Phase.RUNNING:
            return self._end(now)
        if self._epoch.phase is Phase.GATHERING:
            actions += self._settle(now)
        if self._epoch.phase is Phase.RUNNING:
            actions += self._continue_step(now)
        elif self._epoch.phase is Phase.ENDED and not self._is_gone:
            actions += self._leave(now)
        return actions

    def _settle(self, now: rl.Seconds) -> list[rl.Action]:
        # Nothing of the previous generation is running any more.
        self._slice = self._pending = None
        self.objective.drop()
        # Pushes in flight count for the position where the next generation begins.
        if not (self._client.ready and self.objective.all_pushes_applied):
            return []
        self._epoch.phase = Phase.GATHERED
        return self._report_ready(now)

    def _continue_step(self, now: rl.Seconds) -> list[rl.Action]:
        if self._pending is not None:
            return self._run(self._when_reduced(self._pending))
        if self._executor.is_open:
            return self._run(self._executor.chain())
        return self._between_steps(now)

    def _run(self, actions: Sequence[rl.Action]) -> list[rl.Action]:
        self._lane += [action.name for action in actions if isinstance(action, rl.Compute)]
        return list(actions)

    def _when_reduced(self, pending: _Pending) -> list[rl.Compute]:
        here, local = self._epoch, pending.local
        if here.n_reduced < self._executor.step:
            return []
        work = partial(local.settle, here.square, here.sample)
        return [rl.Compute(name=SETTLE, work=work, cost=local.cost)]

    def _between_steps(self, now: rl.Seconds) -> list[rl.Action]:
        step = self._executor.step
        over = self._is_over(step)
        if over and self.objective.owes:
            # What a held replica still has to push belongs to a round with the others' last steps.
            entered = self.objective.enter(now, gated=False)
            if not self._client.may_begin:
                return entered
        work = self._run(self.objective.work(final=over))
        if work or self.objective.is_due:
            return work
        if over:
            return [*self.objective.leave(now), *self._end(now)]
        is_held = self._leader is not None and self._leader.is_held
        left = self.objective.leave(now) if is_held else []
        if self._is_single and not (self._may_step and self._client.ready):
            return left
        actions = [*left, *self._slices.read_ahead(step, stop=self._read_stop(step))]
        if self._may_step:
            actions += self.objective.enter(now)
        actions += self._fetch(step, now, ahead=False)
        if self._may_step and self._client.ready:
            actions += self._begin_step(step, now)
        return actions

    def _begin_step(self, step: int, now: rl.Seconds) -> list[rl.Action]:
        has_fetched = self._epoch.fetching and self._client.fetch_complete
        if not self._lacks(step) or (self.objective.may_go_on and not has_fetched):
            return self._start_step(step, now)
        # Values are copied just before their step, so that they are as new as possible.
        if self._executor.follows_install:
            return self._install_and_start(step, now)
        return self._run(self._install(step))

    def _read_stop(self, step: int) -> int:
        # The leader grants two steps ahead, so two batches may be read.
        if not self._is_single or self._leader is None:
            return self._epoch.granted if self._epoch.is_last else step + 2
        bound = self._leader.steps_bound
        return step + 2 if bound is None else min(step + 2, bound)

    def _install_and_start(self, step: int, now: rl.Seconds) -> list[rl.Action]:
        if not (self._epoch.fetching and self._client.fetch_complete and self._slices.has(step)):
            return []
        install = self._run(self._install(step))
        return [*install, *self._start_step(step, now, is_queued=True)]

    def _start_step(
        self, step: int, now: rl.Seconds, *, is_queued: bool = False
    ) -> list[rl.Action]:
        batch_slice = self._slices.take(step)
        # Its samples are still being read.
        if batch_slice is None:
            return []
        self._slice = batch_slice
        self._executor.open(
            batch_slice,
            self._parameters,
            put=self.objective.open(step, batch_slice.samples, batch_slice),
            close=self.objective.close,
        )
        chain = self._executor.chain()
        if is_queued:  # behind the install of its parameters
            chain = [self._unless_torn(each) for each in chain]
        actions = self._run(chain)
        if not self._is_single:
            actions += self._slices.read_ahead(step + 1, stop=step + 2)
        return [*actions, *self._fetch_ahead(now)]

    def _computed(self, event: rl.Computed, now: rl.Seconds) -> Sequence[rl.Action]:
        if event.error is not None:
            raise failure(event.error, step=self._executor.step)
        # Reading runs in the data executor and never occupies this one.
        if event.name == READ:
            self._slices.have_read(event.result)
            return []
        if event.name not in self._lane:
            raise LocalProtocolError(f"unexpected result of work {event.name!r}")
        self._lane.remove(event.name)
        if event.name == INSTALL:
            return self._installed(event, now)
        if event.name == STEP:
            return self._ran(event, now)
        if event.name == SETTLE:
            pending, self._pending = self._pending, None
            assert pending is not None
            return self.objective.closed(event.result, pending.result, pending.batch, now)
        return self.objective.computed(event, now)

    def _ran(self, event: rl.Computed, now: rl.Seconds) -> Sequence[rl.Action]:
        result = event.result
        if result is None:  # the fetch for this step was torn: compute the same batch again
            assert self._slice is not None
            self._executor.cancel()
            self._slices.put_back(self._slice)
            self.objective.torn()
            return self._wait(TORN_RETRY_SECONDS, now)
        assert isinstance(result, StepOutcome), result
        self.objective.computing(event.seconds)
        actions = self._executor.ran(result, now)
        if result.found is None:
            return actions
        assert self._slice is not None
        batch, self._slice = self._slice.samples, None
        is_over = result.generation != self._executor.generation
        if isinstance(result.closed, LocalNorm):
            if is_over:
                return actions  # no norm will be reduced; the objective drops the step
            self._local_square, self._local_sample = result.closed.square, result.closed.sample
            self._pending = _Pending(result.closed, result.found, batch)
        else:
            # Complete, so it is valid even if its generation has ended meanwhile.
            actions += self.objective.closed(result.closed, result.found, batch, now)
            if is_over:
                return actions
        self._has_stepped = True
        loss, here = result.found.loss, self._epoch
        # Only the rank that holds the loss layer knows the loss.
        if loss is not None and math.isfinite(loss):
            here.loss += loss
            here.samples += len(batch.indices)
        elif loss is not None:
            here.no_loss += len(batch.indices)
        return [*actions, *self._report_steps(now)]

    # --- parameters ---

    def _lacks(self, step: int) -> bool:
        return self._epoch.installed_for != step and self.objective.fetches_at(step)

    def _fetch(self, step: int, now: rl.Seconds, *, ahead: bool) -> list[rl.Action]:
        if self._epoch.fetching or not self._lacks(step):
            return []
        if not self.objective.may_fetch(ahead=ahead):
            return []
        self._epoch.fetching = True
        return self._client.begin_fetch(now)

    def _fetch_ahead(self, now: rl.Seconds) -> list[rl.Action]:
        # Block messages travel while this step computes (DB-10); shared memory is read only at the
        # install, just before the step, so the newest values are used.
        after = self._executor.step + 1
        return [] if self._is_over(after) else self._fetch(after, now, ahead=True)

    def _install(self, step: int) -> list[rl.Compute]:
        if not (self._epoch.fetching and self._client.fetch_complete):
            return []
        objective = self.objective
        self._is_torn = False
        self._installing = self._executor.generation, step
        install = objective.installing(self._client.install(objective.values))

        def work() -> FetchResult:
            result = install()
            self._is_torn = bool(result.torn)
            return result

        cost = rl.Cost(n_bytes=float(objective.install_copies * self._n_bytes))
        client = self._client
        return [
            rl.Compute(name=INSTALL, work=work, cost=cost, remaining=lambda: client.readable_share)
        ]

    def _installed(self, event: rl.Computed, now: rl.Seconds) -> Sequence[rl.Action]:
        result = event.result
        assert isinstance(result, FetchResult), result
        actions = self._client.installed(result, now)
        generation, step = self._installing
        # Older parameters than those that this rank has pushed meanwhile are not used.
        if generation != self._executor.generation:
            return actions
        if result.torn:
            # A queued step finds out by itself.
            return actions if self._lane else [*actions, *self._wait(TORN_RETRY_SECONDS, now)]
        self._epoch.fetching = False
        if not self.objective.fetched(event.seconds):
            return [*actions, *self._wait(OTHER_RETRY_SECONDS, now)]
        self._epoch.installed_for = step
        return [*actions, *(self._fetch_ahead(now) if self._executor.is_open else [])]

    def _unless_torn(self, step: rl.Compute) -> rl.Compute:
        return rl.Compute(
            name=step.name,
            work=lambda: None if self._is_torn else step.work(),
            cost=step.cost,
            remaining=lambda: float(not self._is_torn),
        )

    def _wait(self, seconds: rl.Seconds, now: rl.Seconds) -> list[rl.Action]:
        self._waits = True
        return [rl.SetTimer(name=RETRY, at=now + seconds)]

    # --- the end ---

    def _end(self, now: rl.Seconds) -> list[rl.Action]:
        # The leader may let everyone exit after this report, so all pushes must be applied: one
        # that is lost now would be lost for good.
        if not self.objective.all_pushes_applied:
            return []
        self._epoch.phase = Phase.ENDED
        self._ended_at = now
        reported = [] if self._is_single else self._report_steps(now)
        return [*reported, *self._leave(now)]

    def _leave(self, now: rl.Seconds) -> list[rl.Action]:
        leader = self._leader
        # Another rank may still have to repeat a step, and needs this one for it.
        others = self._epoch.has_ended and (leader is None or leader.all_ended)
        is_late = leader is None and now - self._ended_at > END_SECONDS
        if not (self._is_single or others or is_late):
            return []
        actions: list[rl.Action] = []
        if leader is not None:
            last, _ = self.objective.report(leader, now, final=True)
            actions += last
            if leader.missing:
                names = ", ".join(self._names[rank] for rank in sorted(leader.missing))
                text = f"ended without {names}: no message from there"
                actions.append(rl.Report(text=text, level="warning"))
        return [*actions, *self._exit()]

    def _is_left(self, now: rl.Seconds) -> bool:
        # Either the leader has exited for good, or the whole group had ended before this
        # incarnation of the rank started.
        if self._is_orphan:
            return not self._lane and self.objective.all_pushes_applied
        is_late = self._stopped_at is not None and now - self._stopped_at > END_SECONDS
        return is_late and self._epoch.phase is Phase.ALONE

    def _exit(self) -> list[rl.Action]:
        self._is_gone = True
        return [
            rl.Send(receiver=rl.SUPERVISOR, message=wire.Finished(counters=self._metrics())),
            rl.Exit(),
        ]


def failure(error: BaseException, *, step: int | None = None) -> DistBeliefError:
    """Return the error of a piece of work as one that the job reports."""
    if isinstance(error, DistBeliefError):
        return error
    which = "a step" if step is None else f"step {step}"
    return JobError(f"{which} failed: {type(error).__name__}: {error}")
