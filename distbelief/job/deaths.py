"""Deaths of roles: who is restarted, who is missed, and when a job cannot go on."""

from typing import Final, final

from distbelief.job.ending import Ending, Stage
from distbelief.job.figures import Figures
from distbelief.job.lives import Lives
from distbelief.job.membership import Membership, RoleRecord
from distbelief.job.rounds import Evaluations, Saves
from distbelief.roles import Action, Address, PeerLost, Seconds, SetTimer, Terminate


TIMER: Final = "supervisor:lost:"

LAST_WORDS_SECONDS: Final = 0.1
"""What a role said last may arrive after the news of its end."""


@final
class Deaths:
    """Decides what follows from the death of a role."""

    def __init__(
        self,
        ending: Ending,
        members: Membership,
        *,
        lives: Lives,
        saves: Saves,
        evaluations: Evaluations,
        figures: Figures,
    ) -> None:
        self._ending = ending
        self._members = members
        self._lives = lives
        self._saves = saves
        self._evaluations = evaluations
        self._figures = figures

    def told(self, event: PeerLost, now: Seconds) -> list[Action]:
        """The launcher tells of a process that has ended: wait for its last words."""
        record = self._members.get(event.peer)
        if (
            record is None
            or event.incarnation != record.incarnation
            or not record.is_alive
        ):
            return []
        record.end = event.reason
        if self._ending.interrupted or self._ending.stage >= Stage.CLOSE:
            return self.settle(record.name, now)
        timer = SetTimer(name=f"{TIMER}{record.name}", at=now + LAST_WORDS_SECONDS)
        return [timer]

    def settle(self, name: Address, now: Seconds) -> list[Action]:
        """A process has ended, and what it had to say has come."""
        record = self._members.get(name)
        if record is None or record.end is None or not record.is_alive:
            return []
        why = f"failed ({record.failure})" if record.failure else record.end
        return self.bury(record, why, now)

    def bury(self, record: RoleRecord, why: str, now: Seconds) -> list[Action]:
        """A role is dead: restart it, unless it is not needed any more."""
        ending = self._ending
        if ending.interrupted or ending.stage >= Stage.CLOSE:
            return self._lives.finished(record, now)
        if record.kind == "replica" and ending.stage is not Stage.RUN:
            text = f"{record.label} {why} while it was stopping"
            said = self._figures.tell(text, now, "warning")
            return [
                said,
                Terminate(name=record.name),
                *self._lives.finished(record, now),
            ]
        actions = self._lives.restart(record, why, now)
        if record.kind == "shard" and not record.is_alive:
            error = f"{record.label} cannot be kept alive: it {why}"
            ending.begin(error, now, error=error)
        if not record.is_alive:
            self.await_nothing(record)
        return actions

    def await_nothing(self, record: RoleRecord) -> None:
        """Wait for no answer of a role that is gone for good."""
        if record.kind == "evaluator":
            self._evaluations.give_up()
        self._saves.forget(record.name)
