"""Sandblaster's replicas of several machines, broken on purpose: one rule is left out.

with broken(VARIANTS["staged by one"]):
    play(seed)  # fails, for some seed
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from distbelief.execution.executor import Put
from distbelief.parameter_server.gradient_sums import Collecting
from distbelief.protocol import Account, Assignment
from distbelief.roles.role import Received, Seconds
from distbelief.worker.batches import Chosen, Portion
from distbelief.worker.group_leader import Outgoing
from sandblaster.coordinator.workers import Crew
from sandblaster.group_tasks import Foreman
from sandblaster.partitioned_worker import PartPushes, PartSums
from tests.simulation.variants import Patch, Variant


# --------------------------------------------------------------------------- the leader


def staged_by_one(patch: Patch) -> None:
    """A set is staged once any machine says that its part is."""
    whole = Foreman.staged

    def staged(self: Foreman, machine: int, grants: Sequence[int]) -> None:
        for grant in grants:
            if grant in self._waiting:
                self._waiting[grant] = {machine}
        whole(self, machine, grants)

    patch.setattr(Foreman, "staged", staged)


def lives_are_not_told_apart(patch: Patch) -> None:
    """The coordinator hears nothing of a replica's lives within its leader's."""
    whole = Crew.hear

    def hear(self: Crew, event: Received, account: Account, now: Seconds) -> object:
        known = self.get(event.sender)
        life = account.life if known is None else known.life
        account = msgspec.structs.replace(account, life=life)
        return whole(self, event, account, now)

    def is_new_life(self: Crew, event: Received, account: Account) -> bool:
        del account
        member = self.get(event.sender)
        return member is not None and event.incarnation > member.incarnation

    taken = Foreman.take

    def take(self: Foreman, message: Assignment) -> None:
        life = self._replica_life
        taken(self, msgspec.structs.replace(message, replica_life=life))

    patch.setattr(Crew, "hear", hear)
    patch.setattr(Crew, "is_new_life", is_new_life)
    patch.setattr(Foreman, "take", take)


def speaks_for_the_silent(patch: Patch) -> None:
    """A leader says how the replica stands, though a machine of it is silent."""

    def all_live(self: Foreman, now: Seconds) -> bool:
        del self, now
        return True

    patch.setattr(Foreman, "_all_live", all_live)


def said_once(patch: Patch) -> None:
    """Machines are told once that they may push."""

    def again(self: Foreman) -> Outgoing:
        self._due = True
        return []

    patch.setattr(Foreman, "again", again)


# ------------------------------------------------------------------------- the machines


def parameters_are_kept(patch: Patch) -> None:
    """Another evaluation is computed with the parameters that are there."""
    whole = PartSums.begin

    def begin(self: PartSums, position: int, now: Seconds) -> None:
        installed, order = self._installed, self._course.order
        whole(self, position, now)
        if installed is not None and order is not None:
            self._installed = order.epoch, order.evaluation

    patch.setattr(PartSums, "begin", begin)


def averages_go_on(patch: Patch) -> None:
    """A set begins with the running averages that the one before it has left."""
    whole = PartSums.open

    def opened(self: PartSums, step: int, chosen: Chosen, portion: Portion) -> Put:
        self._fetched = [self.values[item].clone() for item in self._keeping.buffers]
        return whole(self, step, chosen, portion)

    patch.setattr(PartSums, "open", opened)


def staged_when_sent(patch: Patch) -> None:
    """A part is staged, says its machine, as soon as it is sent."""
    whole = PartPushes.has_news

    def has_news(self: PartPushes) -> bool:
        while self._pushed:
            self.staged.append(self._pushed.popleft())
            self._news = True
        return whole(self)

    patch.setattr(PartPushes, "has_news", has_news)


# --------------------------------------------------------------------------- the shards


def parts_are_not_awaited(patch: Patch) -> None:
    """A part lays all of the vector: what others have laid is lost."""
    whole = Collecting.staging

    def staging(self: Collecting, *args: object, **options: object) -> object:
        grant = options["grant"]
        known = self._staged.get(grant)  # type: ignore[call-overload]
        work = whole(self, *args, **options)  # type: ignore[arg-type]
        if known is None:
            return work

        def all_of_it() -> None:
            known.total[: self._n_gradient] = 0.0
            work()

        return all_of_it

    patch.setattr(Collecting, "staging", staging)


VARIANTS: Final[dict[str, Variant]] = {
    "staged by one": staged_by_one,
    "lives are not told apart": lives_are_not_told_apart,
    "speaks for the silent": speaks_for_the_silent,
    "said once": said_once,
    "parameters are kept": parameters_are_kept,
    "averages go on": averages_go_on,
    "staged when sent": staged_when_sent,
    "parts are not awaited": parts_are_not_awaited,
}
