"""Sandblaster's model-parallel replicas, broken on purpose: one rule is left out.

with broken(VARIANTS["staged by one"]):
    play(seed)  # fails, for some seed
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from distbelief.parameter_server.gradient_sums import GradientSums
from distbelief.protocol import Assignment, WorkReport
from distbelief.roles.role import Received, Seconds
from distbelief.worker.batches import BatchSlice
from distbelief.worker.group import Outgoing
from sandblaster.coordinator.workers import WorkerPool
from sandblaster.group_tasks import GroupTasks
from sandblaster.worker import ChunkProgram, ChunkPushes
from tests.simulation.variants import Patch, Variant


# --- leader ---


def staged_by_one(patch: Patch) -> None:
    """A chunk is staged once any rank reports its part."""
    whole = GroupTasks.staged

    def staged(self: GroupTasks, machine: int, commit_tokens: Sequence[int]) -> None:
        for commit_token in commit_tokens:
            if commit_token in self._waiting:
                self._waiting[commit_token] = {machine}
        whole(self, machine, commit_tokens)

    patch.setattr(GroupTasks, "staged", staged)


def lives_are_not_told_apart(patch: Patch) -> None:
    """The coordinator ignores generations within an incarnation of the leader."""
    whole = WorkerPool.take_report

    def take_report(self: WorkerPool, event: Received, report: WorkReport, now: Seconds) -> object:
        known = self.get(event.sender)
        generation = report.generation if known is None else known.generation[1]
        report = msgspec.structs.replace(report, generation=generation)
        return whole(self, event, report, now)

    def has_restarted(self: WorkerPool, event: Received, report: WorkReport) -> bool:
        del report
        worker = self.get(event.sender)
        return worker is not None and event.incarnation > worker.generation[0]

    taken = GroupTasks.take

    def take(self: GroupTasks, message: Assignment) -> None:
        generation = self._replica_generation
        taken(self, msgspec.structs.replace(message, replica_generation=generation))

    patch.setattr(WorkerPool, "take_report", take_report)
    patch.setattr(WorkerPool, "has_restarted", has_restarted)
    patch.setattr(GroupTasks, "take", take)


def speaks_for_the_silent(patch: Patch) -> None:
    """A leader reports though a rank is silent."""

    def all_alive(self: GroupTasks, now: Seconds) -> bool:
        del self, now
        return True

    patch.setattr(GroupTasks, "_all_alive", all_alive)


def said_once(patch: Patch) -> None:
    """Push requests are sent once."""

    def resend(self: GroupTasks) -> Outgoing:
        self._is_due = True
        return []

    patch.setattr(GroupTasks, "resend", resend)


# --- ranks ---


def parameters_are_kept(patch: Patch) -> None:
    """Another evaluation uses the parameters that are installed already."""
    whole = ChunkProgram.begin

    def begin(self: ChunkProgram) -> None:
        installed, order = self._installed, self._plan.order
        whole(self)
        if installed is not None and order is not None:
            self._installed = order.epoch, order.evaluation

    patch.setattr(ChunkProgram, "begin", begin)


def averages_go_on(patch: Patch) -> None:
    """A chunk begins with the running averages of the one before."""
    whole = ChunkProgram.open

    def opened(self: ChunkProgram, step: int, batch_slice: BatchSlice) -> None:
        self._fetched = [self.values[item].clone() for item in self._buffers]
        whole(self, step, batch_slice)

    patch.setattr(ChunkProgram, "open", opened)


def staged_when_sent(patch: Patch) -> None:
    """A rank reports its part as staged as soon as it is sent."""
    whole = ChunkPushes.has_new_staged

    def has_new_staged(self: ChunkPushes) -> bool:
        while self._pushed:
            self.staged.append(self._pushed.popleft())
            self._has_new_staged = True
        return whole(self)

    patch.setattr(ChunkPushes, "has_new_staged", has_new_staged)


# --------------------------------------------------------------------------- shards


def parts_are_not_awaited(patch: Patch) -> None:
    """A part overwrites the whole vector: the parts of other ranks are lost."""
    whole = GradientSums.stage_work

    def stage_work(self: GradientSums, *args: object, **options: object) -> object:
        commit_token = options["commit_token"]
        known = self._staged.get(commit_token)  # type: ignore[call-overload]
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
