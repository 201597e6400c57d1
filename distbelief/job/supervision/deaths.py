"""Deaths of roles: who is restarted, who is missed, and when a job cannot go on."""

from typing import Final, final

from distbelief.job.supervision.books import Books
from distbelief.job.supervision.ending import Stage
from distbelief.job.supervision.lives import Lives
from distbelief.job.supervision.membership import RoleRecord
from distbelief.roles import Action, Address, PeerLost, Seconds, Send, SetTimer, Terminate


TIMER: Final = "supervisor:lost:"

LAST_WORDS_SECONDS: Final = 0.1
"""What a role said last may arrive after the news of its end."""


@final
class Deaths:
    """Decides what follows from the death of a role."""

    def __init__(self, books: Books, *, lives: Lives) -> None:
        self._ending = books.ending
        self._members = books.members
        self._pairs = books.pairs
        self._lives = lives
        self._saves = books.saves
        self._evaluations = books.evaluations
        self._figures = books.figures

    def told(self, event: PeerLost, now: Seconds) -> list[Action]:
        """The launcher tells of a process that has ended: wait for its last words."""
        record = self._members.get(event.peer)
        if record is None or event.incarnation != record.incarnation or not record.is_alive:
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
        if ending.interrupted or (ending.stage >= Stage.CLOSE and record.end):
            return self._lives.finished(record, now)
        if self._lives.is_late(record):
            text = f"{record.label} {why} while it was stopping"
            said = self._figures.tell(text, now, "warning")
            return [said, Terminate(name=record.name), *self._lives.finished(record, now)]
        led = self._pairs.has_led(record)
        actions = self._lives.restart(record, why, now)
        if record.kind == "shard":
            actions += self.replace(record, why, now, led=led)
        if not record.is_alive:
            self.await_nothing(record)
        if record.kind == "coordinator" and not record.is_alive:
            often = self._lives.so_often(record)
            error = f"the coordinator cannot be kept alive{often}: it {why}"
            self._ending.begin(error, now, error=error)
        return actions

    def await_nothing(self, record: RoleRecord) -> None:
        """Wait for no answer of a role that is gone for good."""
        if record.kind in {"evaluator", "machine"} and not record.trains:
            self._evaluations.give_up()
        if not any(copy.is_alive for copy in self._pairs.copies(record.shard)):
            self._saves.forget(record.shard)

    def replace(self, record: RoleRecord, why: str, now: Seconds, *, led: bool) -> list[Action]:
        """Let the other copy of a shard do without this one, if there is another.

        Args:
            record: Of the copy that is dead.
            why: It is.
            now: The present.
            led: Whether it led before.
        """
        actions: list[Action] = [*self._pairs.lost(record, now)]
        leader = self._pairs.leader(record.shard)
        if led and leader is not None and leader is not record:
            save = self._saves.again(record.shard, now, at_once=True)
            actions += [Send(receiver=leader.name, message=save)] if save else []
        if record.is_alive:
            return actions
        others = [copy for copy in self._pairs.copies(record.shard) if copy.is_alive]
        if not others:
            often = self._lives.so_often(record)
            label = record.shard.replace("-", " ")
            error = f"{label} cannot be kept alive{often}: it {why}"
            self._ending.begin(error, now, error=error)
        elif leader is None and others[0].has_joined:
            # It holds a part of a copy: only a new life has a snapshot to lead with.
            why = f"is not whole, and {record.label} will not come back"
            actions += self.bury(others[0], why, now)
        return actions
