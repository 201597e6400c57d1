"""One rank of a split replica: the same steps as `worker.replica`, granted by its group's leader.

    StartEpoch   new generation: drop the current step    -> RankReady, once idle
    GrantSteps   take this many steps in total            -> StepsDone, after each

Its operations run as their inputs arrive, and a training step ends after a reduction of the
gradient norm over all ranks. Messages carry the generation: those of an earlier one are rejected,
those of a later step are kept.
"""

from collections.abc import Mapping, Sequence
from typing import Final, final

from typing_extensions import override

from distbelief import protocol as wire
from distbelief.errors import JobError, RemoteProtocolError
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.roles import role as rl
from distbelief.worker.batches import SlicePrefetch
from distbelief.worker.group import GroupLeader, GroupRank, Outgoing, member_names
from distbelief.worker.replica import Course, Phase, Program, ReplicaMessage, Steps
from distbelief.worker.steps import STEP, StepRunner


REMIND: Final = "replica:remind"

REMIND_SECONDS: Final = 0.25
IDLE_SECONDS: Final = 5.0  # a rank that waits for its group so long does not stop other replicas
END_SECONDS: Final = 30.0  # a rank that has ended exits after so long without its leader

RankMessage = (
    ReplicaMessage
    | wire.RankReady
    | wire.StepsDone
    | wire.StartEpoch
    | wire.GrantSteps
    | wire.TransferBlock
    | wire.TransferAck
)


@final
class _Granted(Course):
    """What the leader has granted in one generation."""

    looks_ahead = True

    def __init__(self, rank: "Rank") -> None:
        self._rank = rank
        self.has_ended = False  # the leader knows that all steps are done
        self._n_reduced = 0  # steps whose gradient norm is reduced over all ranks
        self._norm: tuple[float, int | None] = 0.0, None  # squared, of the last; its bad sample

    def add(self, message: wire.GrantSteps) -> None:
        # Messages may be repeated or arrive late, so values only grow.
        self.allowed = max(self.allowed, message.steps)
        self.is_final |= message.is_last
        self.has_ended |= message.ended
        if self.is_final:
            self.n_readable = self.allowed
        if message.agreed > self._n_reduced:
            self._n_reduced, self._norm = message.agreed, (message.square, message.sample)

    @property
    @override
    def is_held(self) -> bool:
        leader = self._rank.leader
        return leader is not None and leader.is_held

    @override
    def ready(self, pushed: int | None, now: rl.Seconds) -> list[rl.Action]:
        return self._rank.report_ready(now)

    @override
    def taken(self, now: rl.Seconds) -> list[rl.Action]:
        return self._rank.report_steps(now)

    @override
    def reduced(self, n_steps: int) -> tuple[float, int | None] | None:
        return self._norm if self._n_reduced >= n_steps else None


@final
class Rank:
    """The role "replica-R.M", or "evaluator" or "evaluator.M" of a split model."""

    accepts = rl.message_types(RankMessage)

    def __init__(  # noqa: PLR0913 -- one call describes a rank
        self,
        rank: GroupRank,
        program: Program,
        *,
        n_ranks: int,  # of the group
        plan: str,  # hash of the plan, equal on all ranks
        client: ParameterClient,  # of the shards that hold what the rank keeps
        executor: StepRunner,
        slices: SlicePrefetch,
        leader: GroupLeader | None,  # on rank 0
        shapes: Sequence[tuple[int, ...]],  # per item that the rank keeps
    ) -> None:
        self.accepts = self.accepts | program.accepts
        self.program = program
        self.leader = leader
        self._names = member_names(rank.group, n_ranks)
        self._rank_of = {name: index for index, name in enumerate(self._names)}
        self._rank = rank.machine
        self._plan = plan
        self._client = client
        self._executor = executor
        self._granted = _Granted(self)
        self._steps = Steps(
            program,
            client=client,
            executor=executor,
            slices=slices,
            course=self._granted,
            shapes=shapes,
        )
        self._incarnation = 0
        self._n_generations = 0
        self._ended_at: rl.Seconds | None = None  # in this generation
        self._idle_since: rl.Seconds | None = None
        self._stopped_at: rl.Seconds | None = None
        self._is_orphan = False  # the leader is lost for good
        self._is_gone = False

    # --- events ---

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        if self._is_gone:
            return []
        if self._client.owns(event):
            actions: Sequence[rl.Action] = self._client.handle(event, now)
        else:
            own = None
            if self.program.accepts:
                rank = self._rank_of.get(event.sender) if isinstance(event, rl.Received) else None
                own = self.program.handle(event, rank, now)
            actions = self._on_event(event, now) if own is None else own
        # Every event may have removed the last obstacle to the next piece of work.
        begun = self._advance(now)
        # The work of a step does not depend on these messages: it starts before they are sent.
        both = (begun, actions) if self._steps.lane == [STEP] else (actions, begun)
        done = [*both[0], *both[1], *self._lead(now)]
        while self._has_news():
            done += [*self._advance(now), *self._lead(now)]
        return [*done, *self._due(now)]

    def _has_news(self) -> bool:
        return not self._is_gone and self.program.has_news()

    def _due(self, now: rl.Seconds) -> list[rl.Action]:
        return [] if self._is_gone else self.program.due(now)

    def _on_event(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        match event:
            case rl.Started():
                return self._start(event.incarnation, now)
            case rl.Received():
                return self._receive(event, now)
            case rl.TimerFired(name=name) if name == REMIND:
                return self._remind(now)
            case rl.TimerFired():
                self._steps.retry()
            case rl.Computed():
                return self._steps.computed(event, now)
            case rl.PeerJoined() | rl.PeerLost():
                return self._peer(event, now)
            case _:
                pass
        return []

    def _start(self, incarnation: int, now: rl.Seconds) -> list[rl.Action]:
        self._incarnation = incarnation
        actions = self._client.start(incarnation, now)
        if self.leader is not None:
            self.leader.joined(0, incarnation, now)
            actions += self._deliver(self.leader.start(incarnation, now), now)
        return [*actions, *self._remind(now)]

    def _peer(self, event: rl.PeerJoined | rl.PeerLost, now: rl.Seconds) -> list[rl.Action]:
        rank, leader = self._rank_of.get(event.peer), self.leader
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
            case wire.RankReady() | wire.StepsDone() if self.leader and rank is not None:
                heard = self.leader.hear(rank, event.incarnation, message, now)
                return self._deliver(heard, now)
            case wire.StartEpoch() | wire.GrantSteps() if rank == 0:
                return self._follow(message, now)
            case wire.TransferBlock() | wire.TransferAck() if rank in self._executor.links:
                assert rank is not None
                return self._executor.receive(rank, message, now)
            case _:
                raise RemoteProtocolError(
                    f"{event.sender} sent {self._names[self._rank]} {type(message).__name__}, "
                    "which is not for it"
                )

    def _command(
        self, message: wire.StartTraining | wire.Evaluate | wire.Stop, now: rl.Seconds
    ) -> list[rl.Action]:
        if self.leader is not None:
            return self._deliver(self.program.command(self.leader, message, now), now)
        # The leader gets the same command, and decides.
        if isinstance(message, wire.Stop) and self._stopped_at is None:
            self._stopped_at = now
        return []

    # --- the group ---

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
        if self.leader is None:
            return [rl.Send(receiver=self._names[0], message=message)]
        return self._deliver(self.leader.hear(0, self._incarnation, message, now), now)

    def report_ready(self, now: rl.Seconds) -> list[rl.Action]:
        pushed, generation = self.program.pushed, self._executor.generation
        ready = wire.RankReady(
            generation=generation, pushes=pushed is not None, samples=pushed or 0
        )
        return self._to_leader(ready, now)

    def report_steps(self, now: rl.Seconds) -> list[rl.Action]:
        clocks, here = self._client.clocks, self._steps.here
        square, sample = self._steps.vote
        done = wire.StepsDone(
            generation=self._executor.generation,
            steps=self._executor.step,
            loss=here.loss,
            samples=here.samples,
            no_loss=here.no_loss,
            clock=sum(clocks) / len(clocks) if clocks else -1.0,
            ended=here.phase is Phase.ENDED,
            square=square,
            sample=sample,
        )
        return self._to_leader(done, now)

    def _follow(
        self, message: wire.StartEpoch | wire.GrantSteps, now: rl.Seconds
    ) -> list[rl.Action]:
        name, generation = self._names[self._rank], self._executor.generation
        if message.generation < generation:
            raise RemoteProtocolError(
                f"{name} was sent {type(message).__name__} of generation "
                f"{message.generation}, after generation {generation} had begun"
            )
        if isinstance(message, wire.GrantSteps):
            return self._take_grant(message, now)
        self.program.prepare(message)
        if message.plan != self._plan:
            raise JobError(
                f"the leader of {name} has plan {message.plan}, {name} has "
                f"{self._plan}: start all ranks of a replica with one plan"
            )
        # The leader repeats this message until it is answered.
        if message.generation == generation:
            return self.report_ready(now) if self._phase is Phase.GATHERED else []
        self._n_generations += 1
        self._ended_at = None
        self._steps.course = self._granted = _Granted(self)
        self._steps.begin(message.generation)
        return []

    def _take_grant(self, message: wire.GrantSteps, now: rl.Seconds) -> list[rl.Action]:
        ready = self._phase not in {Phase.ALONE, Phase.GATHERING}
        if message.generation > self._executor.generation or not ready:
            raise RemoteProtocolError(
                f"{self._names[self._rank]} was granted steps of generation {message.generation} "
                "before it was ready"
            )
        self._granted.add(message)
        is_first = self._phase is Phase.GATHERED
        self.program.granted(message, is_first=is_first)
        return (
            self._steps.run_from(message.position, now) if is_first else self._executor.place(now)
        )

    @property
    def _phase(self) -> Phase:
        return self._steps.here.phase

    def _advance(self, now: rl.Seconds) -> list[rl.Action]:
        actions = self._steps.advance(now)
        if self._phase is not Phase.ENDED or self._is_gone:
            return actions
        if self._ended_at is None:
            self._ended_at = now
            actions += self.report_steps(now)
        return [*actions, *self._leave(now, ended_at=self._ended_at or now)]

    def _lead(self, now: rl.Seconds) -> Sequence[rl.Action]:
        if self.leader is None or self._is_gone:
            return []
        actions, out = self.program.report(self.leader, now, final=False)
        if not out:
            return actions
        return [*actions, *self._deliver(out, now), *self._advance(now)]

    def _remind(self, now: rl.Seconds) -> list[rl.Action]:
        # Repeats whatever may have been lost; the receivers ignore duplicates.
        actions: list[rl.Action] = [rl.SetTimer(name=REMIND, at=now + REMIND_SECONDS)]
        for link in self._executor.links.values():
            actions += link.remind(now)
        if self.leader is not None:
            actions += self._deliver(self.leader.remind(now), now)
        if self._is_left(now):
            return [*actions, *self._exit()]
        steps, may_step = self._steps, self._executor.step < self._granted.allowed
        is_idle = not (steps.lane or self._executor.is_open or may_step)
        self._idle_since = (self._idle_since or now) if is_idle else None
        if self._idle_since is not None and now - self._idle_since >= IDLE_SECONDS:
            actions += self.program.leave(now)
        match self._phase:
            # A rank that starts late introduces itself to the leader.
            case Phase.ALONE if self.leader is None:
                ready = wire.RankReady(generation=0, pushes=False, samples=0)
                return [*actions, *self._to_leader(ready, now)]
            case Phase.GATHERED:
                return [*actions, *self.report_ready(now)]
            case Phase.RUNNING | Phase.ENDED if steps.awaits_norm or not may_step:
                return [*actions, *self.report_steps(now)]
            case _:
                return actions

    # --- the end ---

    def _leave(self, now: rl.Seconds, *, ended_at: rl.Seconds) -> list[rl.Action]:
        leader = self.leader
        # Another rank may still have to repeat a step, and needs this one for it.
        has_ended = self._granted.has_ended and (leader is None or leader.all_ended)
        is_late = leader is None and now - ended_at > END_SECONDS
        if not (has_ended or is_late):
            return []
        actions: list[rl.Action] = []
        if leader is not None:
            last, _ = self.program.report(leader, now, final=True)
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
            return not self._steps.lane and self.program.all_pushes_applied
        is_late = self._stopped_at is not None and now - self._stopped_at > END_SECONDS
        return is_late and self._phase is Phase.ALONE

    def _exit(self) -> list[rl.Action]:
        self._is_gone = True
        return [
            rl.Send(receiver=rl.SUPERVISOR, message=wire.Finished(counters=self._metrics())),
            rl.Exit(),
        ]

    # --- status ---

    def status(self) -> tuple[str, Mapping[str, float]]:
        awaited = self._awaited()
        name = None if awaited is None or awaited == self._rank else self._names[awaited]
        return self._steps.state(name), self._metrics()

    def _awaited(self) -> int | None:
        leader, executor = self.leader, self._executor
        match self._phase:
            case Phase.RUNNING if executor.is_open:
                return None if self._steps.lane else executor.awaited
            case Phase.RUNNING if self._steps.awaits_norm or executor.step >= self._granted.allowed:
                return 0 if leader is None else leader.slowest
            case Phase.ALONE | Phase.GATHERED if leader is None:
                return 0
            case Phase.GATHERED if leader is not None and leader.waiting_for:
                return min(leader.waiting_for)
            case _:
                return None

    def _metrics(self) -> dict[str, float]:
        links = self._executor.links
        metrics = {
            **self._client.counters(),
            **self.program.figures(),
            # JSON numbers: the low 32 bits are enough to tell generations apart.
            "generation": float(self._executor.generation & 0xFFFFFFFF),
            "generations": float(self._n_generations),
            "messages_out": float(sum(link.n_out for link in links.values())),
            "messages_resent": float(sum(link.n_again for link in links.values())),
        }
        n_bytes = {f"bytes_to_{rank}": float(link.n_bytes) for rank, link in links.items()}
        return metrics | {name: n for name, n in n_bytes.items() if n}
