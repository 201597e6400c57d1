"""The course of one rank of a split replica: its steps are granted by its group's leader.

    StartGeneration   new generation: drop the current step    -> RankReady, once idle
    GrantSteps   take this many steps in total            -> StepsDone, after each

Its operations run as their inputs arrive, and a training step ends after a reduction of the
gradient norm over all ranks. Messages carry the generation: those of an earlier one are rejected,
those of a later step are kept.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Final, final

from typing_extensions import override

from distbelief import protocol as wire
from distbelief.core.errors import JobError, RemoteProtocolError
from distbelief.protocol import role as rl
from distbelief.worker.group import GroupLeader, GroupRank, Outgoing, member_names
from distbelief.worker.replica import Command, Course, Phase
from distbelief.worker.steps import StepRunner


REMIND: Final = "replica:remind"

REMIND_SECONDS: Final = 0.25
IDLE_SECONDS: Final = 5.0  # a rank that waits for its group so long does not stop other replicas
END_SECONDS: Final = 30.0  # a rank that has ended exits after so long without its leader

RankMessage = (
    wire.RankReady
    | wire.StepsDone
    | wire.StartGeneration
    | wire.GrantSteps
    | wire.TransferBlock
    | wire.TransferAck
)


@final
class Rank(Course):
    """The course of "replica-R.M", or of "evaluator.M" of a split model."""

    accepts = rl.message_types(RankMessage)
    in_group = True

    def __init__(
        self,
        rank: GroupRank,
        *,
        n_ranks: int,  # of the group
        plan: str,  # hash of the plan, equal on all ranks
        executor: StepRunner,
        leader: GroupLeader | None,  # on rank 0
    ) -> None:
        self.leader = leader
        self._names = member_names(rank.group, n_ranks)
        self._ranks = {name: index for index, name in enumerate(self._names)}
        self._rank = rank.index
        self._plan = plan
        self._executor = executor
        self._incarnation = 0
        self._n_generations = 0
        self._idle_since: rl.Seconds | None = None
        self._stopped_at: rl.Seconds | None = None
        self._is_orphan = False  # the leader is lost for good
        self._begin()

    def _begin(self) -> None:
        self.allowed, self.is_final, self.n_readable = 0, False, sys.maxsize
        self._has_ended = False  # the leader knows that all steps are done
        self._ended_at: rl.Seconds | None = None
        # Steps of which the gradient norm is reduced over all ranks; that of the last, squared; its
        # bad sample.
        self._reduced: tuple[int, float, int | None] = 0, 0.0, None

    # --- for its steps

    @property
    @override
    def is_held(self) -> bool:
        return self.leader is not None and self.leader.is_held

    @override
    def ready(self, pushed: int | None, now: rl.Seconds) -> list[rl.Action]:
        generation = self._executor.generation
        pushes = pushed is not None
        ready = wire.RankReady(generation=generation, pushes=pushes, samples=pushed or 0)
        return self._to_leader(ready, now)

    @override
    def taken(self, now: rl.Seconds) -> list[rl.Action]:
        here = self.own.here
        square, sample = self.own.vote
        done = wire.StepsDone(
            generation=self._executor.generation,
            steps=self._executor.step,
            loss=here.loss,
            samples=here.samples,
            no_loss=here.no_loss,
            clock=self.own.clock,
            ended=here.phase is Phase.ENDED,
            square=square,
            sample=sample,
        )
        return self._to_leader(done, now)

    @override
    def reduced(self, n_steps: int) -> tuple[float, int | None] | None:
        n_reduced, square, sample = self._reduced
        return (square, sample) if n_reduced >= n_steps else None

    # --- events

    @override
    def rank_of(self, sender: rl.Address) -> int | None:
        return self._ranks.get(sender)

    def _start(self, incarnation: int, now: rl.Seconds) -> list[rl.Action]:
        self._incarnation = incarnation
        actions: list[rl.Action] = []
        if self.leader is not None:
            self.leader.joined(0, incarnation, now)
            actions = self._deliver(self.leader.start(incarnation, now), now)
        return [*actions, *self._remind(now)]

    @override
    def handle(self, event: rl.Event, now: rl.Seconds) -> list[rl.Action] | None:
        match event:
            case rl.Started():
                return self._start(event.incarnation, now)
            case rl.Received():
                return self._receive(event, now)
            case rl.TimerFired(name=name) if name == REMIND:
                return self._remind(now)
            case rl.PeerJoined() | rl.PeerLost():
                return self._peer(event, now)
            case _:
                return []

    def _peer(self, event: rl.PeerJoined | rl.PeerLost, now: rl.Seconds) -> list[rl.Action]:
        rank, leader = self.rank_of(event.peer), self.leader
        if rank is None:
            return []
        if isinstance(event, rl.PeerJoined):
            out = [] if leader is None else leader.joined(rank, event.incarnation, now)
            link = self._executor.links.get(rank)
            shared = [] if link is None else link.join(event.host, self._incarnation, now)
            return [*shared, *self._deliver(out, now)]
        if event.for_good and leader is not None:
            return self._deliver(leader.lost(rank, now), now)
        self._is_orphan |= event.for_good and rank == 0
        return []

    def _receive(self, event: rl.Received, now: rl.Seconds) -> list[rl.Action] | None:
        message, rank = event.message, self.rank_of(event.sender)
        match message:
            case wire.StartTraining() | wire.Evaluate() | wire.Stop():
                return self._command(message, now)
            case wire.RankReady() | wire.StepsDone() if self.leader and rank is not None:
                heard = self.leader.hear(rank, event.incarnation, message, now)
                return self._deliver(heard, now)
            case wire.StartGeneration() | wire.GrantSteps() if rank == 0:
                return self._follow(message, now)
            case wire.TransferBlock() | wire.TransferAck() if rank in self._executor.links:
                assert rank is not None
                return self._executor.receive(rank, event.incarnation, message, now)
            case _:
                return None

    def _command(self, message: Command, now: rl.Seconds) -> list[rl.Action]:
        if self.leader is not None:
            return self._deliver(self.own.program.command(self.leader, message, now), now)
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
                assert isinstance(message, wire.StartGeneration | wire.GrantSteps), message
                actions += self._follow(message, now)
        return actions

    def _to_leader(
        self, message: wire.RankReady | wire.StepsDone, now: rl.Seconds
    ) -> list[rl.Action]:
        if self.leader is None:
            return [rl.Send(receiver=self._names[0], message=message)]
        return self._deliver(self.leader.hear(0, self._incarnation, message, now), now)

    def _follow(
        self, message: wire.StartGeneration | wire.GrantSteps, now: rl.Seconds
    ) -> list[rl.Action]:
        name, generation = self._names[self._rank], self._executor.generation
        if message.generation < generation:
            raise RemoteProtocolError(
                f"{name} was sent {type(message).__name__} of generation "
                f"{message.generation}, after generation {generation} had begun"
            )
        if isinstance(message, wire.GrantSteps):
            return self._take_grant(message, now)
        self.own.program.prepare(message)
        if message.plan != self._plan:
            raise JobError(
                f"the leader of {name} has plan {message.plan}, {name} has "
                f"{self._plan}: start all ranks of a replica with one plan"
            )
        # The leader repeats this message until it is answered.
        if message.generation == generation:
            is_ready = self._phase is Phase.GATHERED
            return self.ready(self.own.program.pushed, now) if is_ready else []
        self._n_generations += 1
        self._begin()
        self.own.begin(message.generation)
        return []

    def _take_grant(self, message: wire.GrantSteps, now: rl.Seconds) -> list[rl.Action]:
        ready = self._phase not in {Phase.ALONE, Phase.GATHERING}
        if message.generation > self._executor.generation or not ready:
            raise RemoteProtocolError(
                f"{self._names[self._rank]} was granted steps of generation {message.generation} "
                "before it was ready"
            )
        # Messages may be repeated or arrive late, so values only grow.
        self.allowed = max(self.allowed, message.steps)
        self.is_final |= message.is_last
        self._has_ended |= message.ended
        if self.is_final:
            self.n_readable = self.allowed
        if message.agreed > self._reduced[0]:
            self._reduced = message.agreed, message.square, message.sample
        is_first = self._phase is Phase.GATHERED
        self.own.program.granted(message, is_first=is_first)
        return self.own.run_from(message.position, now) if is_first else self._executor.place(now)

    @property
    def _phase(self) -> Phase:
        return self.own.here.phase

    @override
    def lead(self, now: rl.Seconds) -> tuple[Sequence[rl.Action], bool]:
        if self.leader is None:
            return [], False
        actions, out = self.own.program.report(self.leader, now, final=False)
        return [*actions, *self._deliver(out, now)], bool(out)

    def _remind(self, now: rl.Seconds) -> list[rl.Action]:
        # Repeats whatever may have been lost; the receivers ignore duplicates.
        actions: list[rl.Action] = [rl.SetTimer(name=REMIND, at=now + REMIND_SECONDS)]
        for link in self._executor.links.values():
            actions += link.remind(now)
        if self.leader is not None:
            actions += self._deliver(self.leader.remind(now), now)
        self.has_left = self._is_left(now)
        if self.has_left:
            return actions
        steps, may_step = self.own, self._executor.step < self.allowed
        is_idle = not (steps.lane or self._executor.is_open or may_step)
        self._idle_since = (self._idle_since or now) if is_idle else None
        if self._idle_since is not None and now - self._idle_since >= IDLE_SECONDS:
            actions += steps.program.leave(now)
        match self._phase:
            # A rank that starts late introduces itself to the leader.
            case Phase.ALONE if self.leader is None:
                ready = wire.RankReady(generation=0, pushes=False, samples=0)
                return [*actions, *self._to_leader(ready, now)]
            case Phase.GATHERED:
                return [*actions, *self.ready(steps.program.pushed, now)]
            case Phase.RUNNING | Phase.ENDED if steps.awaits_norm or not may_step:
                return [*actions, *self.taken(now)]
            case _:
                return actions

    # --- the end ---

    @override
    def end(self, now: rl.Seconds) -> list[rl.Action]:
        actions: list[rl.Action] = []
        if self._ended_at is None:
            self._ended_at = now
            actions = self.taken(now)
        leader, ended_at = self.leader, self._ended_at or now
        # Another rank may still have to repeat a step, and needs this one for it.
        has_ended = self._has_ended and (leader is None or leader.all_ended)
        self.has_left = has_ended or (leader is None and now - ended_at > END_SECONDS)
        if self.has_left and leader is not None:
            last, _ = self.own.program.report(leader, now, final=True)
            actions += last
            if leader.missing:
                names = ", ".join(self._names[rank] for rank in sorted(leader.missing))
                text = f"ended without {names}: no message from there"
                actions.append(rl.Report(text=text, level="warning"))
        return actions

    def _is_left(self, now: rl.Seconds) -> bool:
        # Either the leader has exited for good, or the whole group had ended before this
        # incarnation of the rank started.
        if self._is_orphan:
            return not self.own.lane and self.own.program.all_pushes_applied
        is_late = self._stopped_at is not None and now - self._stopped_at > END_SECONDS
        return is_late and self._phase is Phase.ALONE

    # --- status ---

    @property
    @override
    def awaited(self) -> str | None:
        rank = self._awaited()
        return None if rank is None or rank == self._rank else self._names[rank]

    def _awaited(self) -> int | None:
        leader, executor = self.leader, self._executor
        match self._phase:
            case Phase.RUNNING if executor.is_open:
                return None if self.own.lane else executor.awaited
            case Phase.RUNNING if self.own.awaits_norm or executor.step >= self.allowed:
                return 0 if leader is None else leader.slowest
            case Phase.ALONE | Phase.GATHERED if leader is None:
                return 0
            case Phase.GATHERED if leader is not None and leader.waiting_for:
                return min(leader.waiting_for)
            case _:
                return None

    @override
    def figures(self) -> Mapping[str, float]:
        links = self._executor.links
        metrics = {
            # JSON numbers: the low 32 bits are enough to tell generations apart.
            "generation": float(self._executor.generation & 0xFFFFFFFF),
            "generations": float(self._n_generations),
            "messages_out": float(sum(link.n_out for link in links.values())),
            "messages_resent": float(sum(link.n_again for link in links.values())),
            "messages_shared": float(sum(link.n_shared for link in links.values())),
        }
        n_bytes = {f"bytes_to_{rank}": float(link.n_bytes) for rank, link in links.items()}
        return metrics | {name: n for name, n in n_bytes.items() if n}
