"""The last stages of a job: what is asked of whom, and when the next stage begins."""

from collections.abc import Sequence
from typing import Final, final

from distbelief.protocol import Stop
from distbelief.roles.role import Action, Exit, Seconds, Send, Terminate
from distbelief.supervisor.liveness import Heartbeats
from distbelief.supervisor.membership import RoleRecord
from distbelief.supervisor.state import JobState, ShutdownStage, listed


LAST_SAVE_SECONDS: Final = 10.0
"""How long a shard that cannot keep the last snapshot is asked to try again."""


@final
class Shutdown:
    """Takes a job through the stages of its end (`ending`)."""

    def __init__(self, books: JobState, *, lives: Heartbeats) -> None:
        self._ending = books.ending
        self._members = books.members
        self._pairs = books.pairs
        self._lives = lives
        self._saves = books.saves
        self._evaluations = books.evaluations
        self._figures = books.figures

    def pursue(self, now: Seconds) -> list[Action]:
        """Do what the present stage asks for, and go on as far as that is done."""
        actions: list[Action] = []
        before = ShutdownStage.RUN
        while self._ending.stage > before:
            before = self._ending.stage
            actions += self._step(now)
        return actions

    def save(self, now: Seconds) -> list[Action]:
        """Begin a round of snapshots; who is not there yet is asked when it is.

        A coordinator is asked instead of the shards, as long as it drives them.
        """
        coordinator = self._members.coordinator
        if coordinator is not None and coordinator.is_alive:
            save = self._saves.ask({coordinator.name}, now)
            return [Send(receiver=coordinator.name, message=save)]
        shards = {shard.shard for shard in self._members.of("shard") if shard.is_alive}
        patience = 0.0
        if self._ending.stage is ShutdownStage.KEEP and not self._ending.interrupted:
            patience = LAST_SAVE_SECONDS  # there will be no other
        last = self._ending.stage is ShutdownStage.KEEP
        save = self._saves.ask(shards, now, retry_seconds=patience, last=last)
        leaders = [self._pairs.leader(name) for name in sorted(shards)]
        return [Send(receiver=r.name, message=save) for r in leaders if r is not None]

    def stop_message(self) -> Stop:
        """Return what every role is told at its end."""
        return Stop(reason=(self._ending.reason or "the job ends")[:1024])

    def _step(self, now: Seconds) -> list[Action]:
        """Do what the present stage of the end asks for, and go on if that is done."""
        match self._ending.stage:
            case ShutdownStage.DRAIN:
                return self._drain(now)
            case ShutdownStage.KEEP:
                return self._keep(now)
            case ShutdownStage.CLOSE:
                return self._close(now)
            case _:
                return []

    def _drain(self, now: Seconds) -> list[Action]:
        ending = self._ending
        first = self._members.of("coordinator")
        # Every machine of a replica is told: one that is being built ends at once.
        actions = self._stop([*first, *self._members.training], now)
        if ending.interrupted and self._members.evaluator is not None:
            actions += self._stop([self._members.evaluator], now)
        left = [replica for replica in self._members.training if replica.is_alive]
        if left and now < ending.deadline:
            return actions
        actions += self._outlasted(left, "its last step and push", now)
        ending.enter(ShutdownStage.KEEP, now)
        return [*actions, *self._begin_keep(now)]

    def _begin_keep(self, now: Seconds) -> list[Action]:
        """Ask for the last snapshot, and the evaluation of everything."""
        self._evaluations.give_up()
        self._saves.give_up()
        if self._members.of("replica") and self._figures.training_since is None:
            return []  # nothing has changed
        coordinator = self._members.coordinator
        if coordinator is not None and not coordinator.farewell:
            return self._keep_nothing(now)
        actions = self.save(now)
        evaluator = self._members.evaluator
        if (
            evaluator is not None
            and evaluator.is_alive
            and not evaluator.stopped
            and self._ending.error is None
        ):
            request = self._evaluations.ask(now, whole=True)
            actions.append(Send(receiver=evaluator.name, message=request))
        return actions

    def _keep_nothing(self, now: Seconds) -> list[Action]:
        """Leave the last snapshot: what the shards hold may be a point on trial."""
        text = "the coordinator did not end in order: the run is as its last snapshot has it"
        if not self._ending.interrupted:
            self._ending.error = self._ending.error or text
        return [self._figures.tell(text, now, "warning")]

    def _keep(self, now: Seconds) -> list[Action]:
        ending = self._ending
        waits = self._saves.waits or self._evaluations.waits
        if waits and now < ending.deadline:
            return []
        actions: list[Action] = []
        if waits:
            late = [*self._saves.waiting, *(["evaluator"] * self._evaluations.waits)]
            names = listed(name.replace("-", " ") for name in late)
            text = f"{names} not done in time: ending without its last answer"
            actions.append(self._figures.tell(text, now, "warning"))
            self._evaluations.give_up()
        self._fail_if_unsaved()
        ending.enter(ShutdownStage.CLOSE, now)
        return actions

    def _fail_if_unsaved(self) -> None:
        """A job whose end is not on the disk has failed, however well it went."""
        errors = self._saves.errors
        late = dict.fromkeys(self._saves.waiting, "it has not answered in time")
        if self._ending.interrupted or not (errors or late):
            return
        name, why = next(iter(sorted((errors | late).items())))
        label = name.replace("-", " ")
        text = f"the last snapshot of {label} could not be saved: {why}"
        self._ending.error = self._ending.error or text

    def _close(self, now: Seconds) -> list[Action]:
        ending = self._ending
        actions = self._stop(list(self._members), now)
        ours = [r for r in self._members if r.is_alive and r.kind != "guest"]
        if ours and now < ending.deadline:
            return actions
        if not ending.interrupted:
            actions += self._outlasted(ours, "to end", now)
        return [*actions, *self.halt(now)]

    def _stop(self, records: Sequence[RoleRecord], now: Seconds) -> list[Action]:
        """Tell these to end, each once; those who cannot hear it are ended."""
        actions: list[Action] = []
        for record in records:
            if not record.is_alive or record.stopped:
                continue
            if record.has_joined:
                record.stopped = True
                stop = self.stop_message()
                actions.append(Send(receiver=record.name, message=stop))
            elif record.kind != "guest":
                actions.append(Terminate(name=record.name))
                actions += self._lives.finished(record, now)
        return actions

    def _outlasted(self, records: Sequence[RoleRecord], what: str, now: Seconds) -> list[Action]:
        """End by force whoever has not ended in time, and name it."""
        actions: list[Action] = []
        for record in records:
            actions.append(Terminate(name=record.name))
            if not self._ending.interrupted:
                text = f"{record.label} takes too long for {what}: ended by force"
                actions.append(self._figures.tell(text, now, "warning"))
            actions += self._lives.finished(record, now)
        return actions

    def halt(self, now: Seconds) -> list[Action]:
        """Nothing is left, or nothing is to be."""
        actions: list[Action] = [
            Terminate(name=record.name)
            for record in self._members
            if record.is_alive and record.kind != "guest"
        ]
        self._ending.stage = ShutdownStage.OVER
        self._figures.ended_at = now
        error = "interrupted" if self._ending.interrupted else self._ending.error
        return [*actions, Exit(error=error)]
