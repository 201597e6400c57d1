"""Shuts a job down in stages: what is asked of each role, and when the next stage begins.

    RUN     replicas train
    DRAIN   replicas finish their step and their last push (DB-6), and end
    KEEP    every shard saves a last checkpoint; the evaluator measures all samples
    CLOSE   shards and evaluator end
    OVER    nothing is left

Each stage has a time limit; a role that exceeds it is named and killed. An interrupted job goes
through the same stages in little more than a second.
"""

from collections.abc import Sequence
from typing import Final, final

from distbelief.protocol import Stop
from distbelief.roles.role import Action, Exit, Seconds, Send, Terminate
from distbelief.supervisor.liveness import Heartbeats
from distbelief.supervisor.membership import RoleRecord
from distbelief.supervisor.state import JobState, ShutdownStage, listed


LAST_SAVE_SECONDS: Final = 10.0  # for repeating a failed save of the last checkpoint


@final
class Shutdown:
    """Runs the stages of the shutdown."""

    def __init__(self, job: JobState, *, heartbeats: Heartbeats) -> None:
        self._shutdown_state = job.shutdown
        self._members = job.members
        self._failover = job.failover
        self._heartbeats = heartbeats
        self._checkpoints = job.checkpoints
        self._evaluations = job.evaluations
        self._metrics = job.metrics

    def pursue(self, now: Seconds) -> list[Action]:
        """Do what the present stage needs, and enter the next ones as far as possible."""
        actions: list[Action] = []
        before = ShutdownStage.RUN
        while self._shutdown_state.stage > before:
            before = self._shutdown_state.stage
            actions += self._step(now)
        return actions

    def save(self, now: Seconds) -> list[Action]:
        """Begin a round of checkpoints; a shard that is down is asked when it is back."""
        # Only the coordinator knows when the shards hold a point to resume from.
        coordinator = self._members.coordinator
        if coordinator is not None and coordinator.is_alive:
            save = self._checkpoints.ask({coordinator.name}, now)
            return [Send(receiver=coordinator.name, message=save)]
        shards = {shard.shard for shard in self._members.of("shard") if shard.is_alive}
        patience = 0.0
        if (
            self._shutdown_state.stage is ShutdownStage.KEEP
            and not self._shutdown_state.interrupted
        ):
            patience = LAST_SAVE_SECONDS
        last = self._shutdown_state.stage is ShutdownStage.KEEP
        save = self._checkpoints.ask(shards, now, retry_seconds=patience, last=last)
        primaries = [self._failover.primary(name) for name in sorted(shards)]
        return [Send(receiver=r.name, message=save) for r in primaries if r is not None]

    def stop_message(self) -> Stop:
        return Stop(reason=(self._shutdown_state.reason or "the job ends")[:1024])

    def _step(self, now: Seconds) -> list[Action]:
        match self._shutdown_state.stage:
            case ShutdownStage.DRAIN:
                return self._drain(now)
            case ShutdownStage.KEEP:
                return self._keep(now)
            case ShutdownStage.CLOSE:
                return self._close(now)
            case _:
                return []

    def _drain(self, now: Seconds) -> list[Action]:
        ending = self._shutdown_state
        first = self._members.of("coordinator")
        # Every rank gets a Stop: one that is still being built ends at once.
        actions = self._stop([*first, *self._members.training], now)
        if ending.interrupted and self._members.evaluator is not None:
            actions += self._stop([self._members.evaluator], now)
        left = [replica for replica in self._members.training if replica.is_alive]
        if left and now < ending.deadline:
            return actions
        actions += self._kill(left, "its last step and push", now)
        ending.enter(ShutdownStage.KEEP, now)
        return [*actions, *self._begin_keep(now)]

    def _begin_keep(self, now: Seconds) -> list[Action]:
        self._evaluations.give_up()
        self._checkpoints.give_up()
        if self._members.of("replica") and self._metrics.training_since is None:
            return []  # nothing has changed
        coordinator = self._members.coordinator
        if coordinator is not None and not coordinator.has_finished:
            return self._keep_nothing(now)
        actions = self.save(now)
        evaluator = self._members.evaluator
        if (
            evaluator is not None
            and evaluator.is_alive
            and not evaluator.stopped
            and self._shutdown_state.error is None
        ):
            request = self._evaluations.ask(now, whole=True)
            actions.append(Send(receiver=evaluator.name, message=request))
        return actions

    def _keep_nothing(self, now: Seconds) -> list[Action]:
        # The shards may hold a trial point of a line search, so no checkpoint is taken.
        text = "the coordinator ended early: the run resumes from its last checkpoint"
        if not self._shutdown_state.interrupted:
            self._shutdown_state.error = self._shutdown_state.error or text
        return [self._metrics.report(text, now, "warning")]

    def _keep(self, now: Seconds) -> list[Action]:
        ending = self._shutdown_state
        waits = self._checkpoints.waits or self._evaluations.waits
        if waits and now < ending.deadline:
            return []
        actions: list[Action] = []
        if waits:
            late = [*self._checkpoints.waiting, *(["evaluator"] * self._evaluations.waits)]
            names = listed(name.replace("-", " ") for name in late)
            text = f"{names} did not answer in time: ending without it"
            actions.append(self._metrics.report(text, now, "warning"))
            self._evaluations.give_up()
        self._fail_if_unsaved()
        ending.enter(ShutdownStage.CLOSE, now)
        return actions

    def _fail_if_unsaved(self) -> None:
        # A job whose last checkpoint is not on disk has failed.
        errors = self._checkpoints.errors
        late = dict.fromkeys(self._checkpoints.waiting, "it did not answer in time")
        if self._shutdown_state.interrupted or not (errors or late):
            return
        name, why = next(iter(sorted((errors | late).items())))
        label = name.replace("-", " ")
        text = f"the last checkpoint of {label} could not be saved: {why}"
        self._shutdown_state.error = self._shutdown_state.error or text

    def _close(self, now: Seconds) -> list[Action]:
        ending = self._shutdown_state
        actions = self._stop(list(self._members), now)
        ours = [r for r in self._members if r.is_alive and r.kind != "guest"]
        if ours and now < ending.deadline:
            return actions
        if not ending.interrupted:
            actions += self._kill(ours, "to end", now)
        return [*actions, *self.halt(now)]

    def _stop(self, records: Sequence[RoleRecord], now: Seconds) -> list[Action]:
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
                actions += self._heartbeats.finished(record, now)
        return actions

    def _kill(self, records: Sequence[RoleRecord], what: str, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        for record in records:
            actions.append(Terminate(name=record.name))
            if not self._shutdown_state.interrupted:
                text = f"{record.label} takes too long for {what}: killed"
                actions.append(self._metrics.report(text, now, "warning"))
            actions += self._heartbeats.finished(record, now)
        return actions

    def halt(self, now: Seconds) -> list[Action]:
        """End the job at once: kill what is left."""
        actions: list[Action] = [
            Terminate(name=record.name)
            for record in self._members
            if record.is_alive and record.kind != "guest"
        ]
        self._shutdown_state.stage = ShutdownStage.OVER
        self._metrics.ended_at = now
        error = "interrupted" if self._shutdown_state.interrupted else self._shutdown_state.error
        return [*actions, Exit(error=error)]
