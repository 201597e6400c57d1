"""The phases of a job: when its training begins, that it stands still, and why it ends.

    starting --replica 0 trains--> warm start --the rest may--> training
           any of them --a reason--> stopping, saving --> done, failed, interrupted

A reason is: a rule of [stop] is met; who drives the supervisor wants it; the
coordinator, if there is one, has come to its end; no replica is left. What then is to
be done is `closing`'s.
"""

from typing import final

from distbelief.job.display.view import Phase
from distbelief.job.supervision.books import Books
from distbelief.job.supervision.ending import Stage, listed
from distbelief.job.supervision.membership import Presence, RoleRecord
from distbelief.job.supervision.warm_start import WarmStart
from distbelief.messages import Progress
from distbelief.roles import Action, Seconds


@final
class Phases:
    """Takes a job from its start to a reason to end."""

    def __init__(self, books: Books) -> None:
        self._config = books.config
        self._members = books.members
        self._pairs = books.pairs
        self._figures = books.figures
        self._evaluations = books.evaluations
        self._saves = books.saves
        self._ending = books.ending
        self._warm_start = WarmStart(
            books.members, books.allowances, n_steps=books.config.warm_start_steps
        )
        self._progress_at: Seconds = 0.0
        self._wanted_end: str | None = None

    @property
    def present(self) -> Phase:
        """The one that the job is in."""
        ending = self._ending
        match ending.stage:
            case Stage.OVER if ending.interrupted:
                return "interrupted"
            case Stage.OVER:
                return "done" if ending.error is None else "failed"
            case Stage.KEEP:
                return "saving"
            case Stage.DRAIN | Stage.CLOSE:
                return "stopping"
            case _:
                return self._of_running

    @property
    def _of_running(self) -> Phase:
        """The one that a job is in which is not to end yet."""
        replicas = self._replicas
        if any(r.is_at_work for r in [*self._members.of("coordinator"), *replicas]):
            return "training" if self._warm_start.is_over else "warm start"
        if self._config.stop is None and self._pairs.all_led:
            return "training"  # of a server: it serves
        alive = [replica for replica in replicas if replica.is_alive]
        if alive and all(r.presence is Presence.WAITING for r in alive):
            return "waiting for machines"
        return "resuming" if self._figures.samples else "starting"

    @property
    def _replicas(self) -> list[RoleRecord]:
        return self._members.of("replica")

    def wind_up(self, reason: str) -> None:
        """End the job in order, when `end_if_due` is asked next."""
        self._wanted_end = self._wanted_end or reason

    # -------------------------------------------------------------------- progress

    def moved(self, now: Seconds) -> None:
        """Something goes on: it does not stand still."""
        self._progress_at = now

    def excuse(self, seconds: Seconds) -> None:
        """The supervisor itself stood still."""
        self._progress_at += seconds

    def progressed(self, record: RoleRecord, message: Progress, now: Seconds) -> None:
        """A replica has taken steps, or the coordinator; `record` is as before."""
        if self._figures.training_since is None:
            self._evaluations.begin(now)
            self._saves.begin(now)
        self._warm_start.progressed(record, message)
        self.moved(now)
        self._figures.progress(record, message, now)
        record.progressed = True
        if self._ending.stage is Stage.RUN:
            self.end_if_due(now)

    def tell_stall(self, now: Seconds) -> list[Action]:
        """Tell who stands still, if nobody has taken a step for long."""
        waited = now - self._progress_at
        if self._config.stop is None or waited < self._config.stall_seconds:
            return []
        self.moved(now)  # it is told once per so long
        begun = [replica for replica in self._replicas if replica.begun]
        states = listed(f"{r.label}: {r.state or 'starting'}" for r in begun)
        if not states:
            return []
        text = f"no step in the last {waited:.0f} s ({states})"
        return [self._figures.tell(text, now, "warning")]

    # --------------------------------------------------------------------- changes

    def advance(self, now: Seconds) -> list[Action]:
        """Let those begin who may; end the job if nobody is left who trains."""
        actions = self._warm_start.release()
        self._follow_coordinator(now)
        self._end_without_replicas(now)
        return actions

    def end_if_due(self, now: Seconds) -> None:
        """End the job if somebody wants that, or a rule of [stop] is met."""
        if self._wanted_end is not None:
            self._ending.begin(self._wanted_end, now)
        if self._config.stop is not None:
            reason = self._config.stop.reason(self._figures.reached(now))
            if reason is not None:
                self._ending.begin(reason, now)

    def _follow_coordinator(self, now: Seconds) -> None:
        """Where there is one, the job begins and ends with it."""
        coordinator = self._members.coordinator
        if coordinator is None:
            return
        if coordinator.begun and self._figures.training_since is None:
            self._figures.training_since = self._progress_at = now
            self._evaluations.begin(now)
            self._saves.begin(now)
        if coordinator.farewell:
            verdict = self._config.verdict(coordinator.counters)
            error = verdict.reason if verdict.failed else None
            self._ending.begin(verdict.reason, now, error=error)

    def _end_without_replicas(self, now: Seconds) -> None:
        replicas = self._replicas
        if not replicas or any(replica.is_alive for replica in replicas):
            return
        if any(replica.presence is Presence.FINISHED for replica in replicas):
            self._ending.begin("every replica has taken all its steps", now)
            return
        whys = {r.failure for r in replicas if r.failure}
        error = "every replica is lost" + (f": {listed(sorted(whys))}" if whys else "")
        self._ending.begin(error, now, error=error)
