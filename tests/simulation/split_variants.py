"""Sandblaster's model-parallel replicas, broken on purpose: one rule is left out.

with broken(VARIANTS["staged by one"]):
    play(seed)  # fails, for some seed
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from distbelief.parameter_server.gradient_sums import GradientSums
from distbelief.protocol import Assignment, WorkReport
from distbelief.protocol.role import Received, Seconds
from distbelief.worker.batches import BatchSlice
from distbelief.worker.group import Outgoing
from sandblaster.coordinator.workers import WorkerPool
from sandblaster.group_tasks import GroupTasks
from sandblaster.worker import ChunkProgram, ChunkPushes
from tests.simulation.split_sandblasts import SplitSandblast
from tests.simulation.split_scenes import (
    dies_with_its_part,
    drawn,
    half_pushed,
    not_told_to_push,
    stands_still,
)
from tests.simulation.variants import Patch, Variants, Whole


VARIANTS: Final = Variants[Callable[[], SplitSandblast]]()


# --- leader ---


@VARIANTS.replacing(GroupTasks, "staged", caught_by=partial(drawn, 0))
def staged_by_one(
    whole: Whole[None], self: GroupTasks, machine: int, commit_tokens: Sequence[int]
) -> None:
    """A chunk is staged once any rank reports its part."""
    for commit_token in commit_tokens:
        if commit_token in self._waiting:
            self._waiting[commit_token] = {machine}
    whole(self, machine, commit_tokens)


@VARIANTS(caught_by=dies_with_its_part)
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


@VARIANTS(caught_by=stands_still)
def speaks_for_the_silent(patch: Patch) -> None:
    """A leader reports though a rank is silent."""

    def all_alive(self: GroupTasks, now: Seconds) -> bool:
        del self, now
        return True

    patch.setattr(GroupTasks, "_all_alive", all_alive)


@VARIANTS(caught_by=not_told_to_push)
def said_once(patch: Patch) -> None:
    """Push requests are sent once."""

    def resend(self: GroupTasks) -> Outgoing:
        self._is_due = True
        return []

    patch.setattr(GroupTasks, "resend", resend)


# --- ranks ---


@VARIANTS.replacing(ChunkProgram, "begin", caught_by=SplitSandblast)
def parameters_are_kept(whole: Whole[None], self: ChunkProgram) -> None:
    """Another evaluation uses the parameters that are installed already."""
    installed, chunk = self._installed, self._plan.chunk
    whole(self)
    if installed is not None and chunk is not None:
        self._installed = chunk.series, chunk.evaluation


@VARIANTS.replacing(ChunkProgram, "open", caught_by=SplitSandblast)
def averages_go_on(
    whole: Whole[None], self: ChunkProgram, step: int, batch_slice: BatchSlice
) -> None:
    """A chunk begins with the running averages of the one before."""
    self._fetched = [self.values[item].clone() for item in self._buffers]
    whole(self, step, batch_slice)


@VARIANTS.replacing(ChunkPushes, "has_new_staged", caught_by=half_pushed)
def staged_when_sent(whole: Whole[bool], self: ChunkPushes) -> bool:
    """A rank reports its part as staged as soon as it is sent."""
    while self._pushed:
        self.staged.append(self._pushed.popleft())
        self._has_new_staged = True
    return whole(self)


# --------------------------------------------------------------------------- shards


@VARIANTS.replacing(GradientSums, "stage_work", caught_by=SplitSandblast)
def parts_are_not_awaited(
    whole: Whole[Callable[[], object]], self: GradientSums, *args: object, **options: object
) -> Callable[[], object]:
    """A part overwrites the whole vector: the parts of other ranks are lost."""
    commit_token = options["commit_token"]
    known = self._staged.get(commit_token)  # type: ignore[call-overload]
    work = whole(self, *args, **options)
    if known is None:
        return work

    def all_of_it() -> None:
        known.total[: self._n_gradient] = 0.0
        work()

    return all_of_it
