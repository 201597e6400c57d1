"""Sandblaster's replicas of several machines, broken on purpose: one rule is left out.

with broken(VARIANTS["staged by one"]):
    play(seed)  # fails, for some seed
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from distbelief.execution.executor import Put
from distbelief.parameter_server.gradient_sums import GradientSums
from distbelief.protocol import Assignment, WorkReport
from distbelief.roles.role import Received, Seconds
from distbelief.worker.batches import BatchIndices, BatchSlice
from distbelief.worker.group_leader import Outgoing
from sandblaster.coordinator.workers import WorkerPool
from sandblaster.group_tasks import GroupTasks
from sandblaster.partitioned_worker import ChunkObjective, ChunkPushes
from tests.simulation.variants import Patch, Variant


# --------------------------------------------------------------------------- the leader


def staged_by_one(patch: Patch) -> None:
    """A set is staged once any machine says that its part is."""
    whole = GroupTasks.staged

    def staged(self: GroupTasks, machine: int, grants: Sequence[int]) -> None:
        for grant in grants:
            if grant in self._waiting:
                self._waiting[grant] = {machine}
        whole(self, machine, grants)

    patch.setattr(GroupTasks, "staged", staged)


def lives_are_not_told_apart(patch: Patch) -> None:
    """The coordinator hears nothing of a replica's lives within its leader's."""
    whole = WorkerPool.hear

    def hear(self: WorkerPool, event: Received, account: WorkReport, now: Seconds) -> object:
        known = self.get(event.sender)
        life = account.life if known is None else known.life
        account = msgspec.structs.replace(account, life=life)
        return whole(self, event, account, now)

    def is_new_life(self: WorkerPool, event: Received, account: WorkReport) -> bool:
        del account
        member = self.get(event.sender)
        return member is not None and event.incarnation > member.incarnation

    taken = GroupTasks.take

    def take(self: GroupTasks, message: Assignment) -> None:
        life = self._replica_life
        taken(self, msgspec.structs.replace(message, replica_life=life))

    patch.setattr(WorkerPool, "hear", hear)
    patch.setattr(WorkerPool, "is_new_life", is_new_life)
    patch.setattr(GroupTasks, "take", take)


def speaks_for_the_silent(patch: Patch) -> None:
    """A leader says how the replica stands, though a machine of it is silent."""

    def all_live(self: GroupTasks, now: Seconds) -> bool:
        del self, now
        return True

    patch.setattr(GroupTasks, "_all_live", all_live)


def said_once(patch: Patch) -> None:
    """Machines are told once that they may push."""

    def again(self: GroupTasks) -> Outgoing:
        self._due = True
        return []

    patch.setattr(GroupTasks, "again", again)


# ------------------------------------------------------------------------- the machines


def parameters_are_kept(patch: Patch) -> None:
    """Another evaluation is computed with the parameters that are there."""
    whole = ChunkObjective.begin

    def begin(self: ChunkObjective, position: int, now: Seconds) -> None:
        installed, order = self._installed, self._course.order
        whole(self, position, now)
        if installed is not None and order is not None:
            self._installed = order.epoch, order.evaluation

    patch.setattr(ChunkObjective, "begin", begin)


def averages_go_on(patch: Patch) -> None:
    """A set begins with the running averages that the one before it has left."""
    whole = ChunkObjective.open

    def opened(self: ChunkObjective, step: int, chosen: BatchIndices, portion: BatchSlice) -> Put:
        self._fetched = [self.values[item].clone() for item in self._keeping.buffers]
        return whole(self, step, chosen, portion)

    patch.setattr(ChunkObjective, "open", opened)


def staged_when_sent(patch: Patch) -> None:
    """A part is staged, says its machine, as soon as it is sent."""
    whole = ChunkPushes.has_news

    def has_news(self: ChunkPushes) -> bool:
        while self._pushed:
            self.staged.append(self._pushed.popleft())
            self._news = True
        return whole(self)

    patch.setattr(ChunkPushes, "has_news", has_news)


# --------------------------------------------------------------------------- the shards


def parts_are_not_awaited(patch: Patch) -> None:
    """A part lays all of the vector: what others have laid is lost."""
    whole = GradientSums.stage_work

    def stage_work(self: GradientSums, *args: object, **options: object) -> object:
        grant = options["grant"]
        known = self._staged.get(grant)  # type: ignore[call-overload]
        work = whole(self, *args, **options)  # type: ignore[arg-type]
        if known is None:
            return work

        def all_of_it() -> None:
            known.total[: self._n_gradient] = 0.0
            work()

        return all_of_it

    patch.setattr(GradientSums, "stage_work", stage_work)


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
