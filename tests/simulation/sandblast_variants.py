"""Sandblaster's protocol, broken on purpose: each variant leaves out one rule.

with broken(VARIANTS["changed in place"]):
    play(seed)  # fails, for some seed
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from distbelief.parameter_server.command_log import CommandExecutor
from distbelief.parameter_server.gradient_sums import GradientSums
from distbelief.parameter_server.savepoints import Savepoints
from distbelief.protocol import CommandDone, Savepoint, ShardCommand
from distbelief.protocol.role import Action, Received, Seconds
from distbelief.worker.batches import BatchSlice
from distbelief.worker.exchange import GradientSum
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.coordinator.shard_commands import CommandBroadcast
from sandblaster.coordinator.work_queue import WorkQueue
from sandblaster.coordinator.workers import Attempt, Chunk
from sandblaster.optimizers.base import IterationDone
from sandblaster.worker import ChunkProgram, ChunkPushes
from tests.simulation.sandblasts import (
    Sandblast,
    drawn,
    half_pushed,
    journal_not_on_disk,
    shard_dies_while_saving,
)
from tests.simulation.split_variants import VARIANTS as SPLIT
from tests.simulation.variants import Patch, Variants, Whole


VARIANTS: Final = Variants[Callable[[], Sandblast]]()


# --- commands ---


@VARIANTS.replacing(CommandExecutor, "take", caught_by=partial(drawn, 10))
def a_command_performed_again(
    whole: Whole[list[Action]], self: CommandExecutor, event: Received, command: ShardCommand
) -> list[Action]:
    """A repeated command is executed again."""
    last = self._answer
    if (command.series, command.number) == (last.series, last.number) and last.number > 1:
        self._answer = msgspec.structs.replace(last, number=last.number - 1)
    return whole(self, event, command)


@VARIANTS.replacing(CommandExecutor, "take", caught_by=partial(drawn, 4))
def no_series(
    whole: Whole[list[Action]], self: CommandExecutor, event: Received, command: ShardCommand
) -> list[Action]:
    """A shard obeys the coordinator that sent the last command."""
    if command.series < self._series:
        self._series = command.series
        self._answer = CommandDone(series=command.series, number=command.number - 1)
    return whole(self, event, command)


@VARIANTS.replacing(CommandBroadcast, "receive", caught_by=half_pushed)
def answers_of_any_order(
    whole: Whole[None], self: CommandBroadcast, event: Received, message: CommandDone, now: Seconds
) -> None:
    """Any answer of a shard counts for the present command."""
    if self._command is not None and message.series == self.series:
        message = msgspec.structs.replace(message, number=self.number)
    whole(self, event, message, now)


# --- chunks ---


@VARIANTS(caught_by=half_pushed)
def a_winner_per_shard(patch: Patch) -> None:
    """A chunk has one token for all workers: shards keep what comes first."""
    whole = WorkQueue._issue_token
    first: dict[tuple[WorkQueue, int], int] = {}

    def issue_token(self: WorkQueue, chunk: Chunk, now: Seconds) -> None:
        before = chunk.winner
        whole(self, chunk, now)
        if chunk.winner is not None and chunk.winner is not before:
            winner = chunk.winner
            winner.commit_token = first.setdefault((self, chunk.index), winner.commit_token)

    def fence(self: WorkQueue, one: Attempt) -> None:
        del self
        one.chunk.winner = None

    patch.setattr(WorkQueue, "_issue_token", issue_token)
    patch.setattr(WorkQueue, "_fence", fence)


@VARIANTS.replacing(ChunkPushes, "has_new_staged", caught_by=half_pushed)
def staged_somewhere(whole: Whole[bool], self: ChunkPushes) -> bool:
    """A worker reports that all shards hold a chunk before they do."""
    while len(self._pushed) > max(self._client.unacknowledged - 1, 0):
        self.staged.append(self._pushed.popleft())
        self._has_new_staged = True
    return whole(self)


@VARIANTS.replacing(GradientSums, "commit", caught_by=half_pushed)
def in_order_of_arrival(
    whole: Whole[None], self: GradientSums, chunk_index: int, commit_token: int
) -> None:
    """Chunks are summed as they come."""
    arrived = len(self._committed)
    whole(self, arrived, commit_token)
    self._committed[chunk_index] = self._committed.pop(arrived)


@VARIANTS(caught_by=partial(drawn, 10))
def counted_twice(patch: Patch) -> None:
    """A committed chunk stays staged, and may be committed again."""

    def check(self: GradientSums, sets: Iterable[tuple[int, int]]) -> None:
        del self, sets

    whole = GradientSums.commit

    def commit(self: GradientSums, chunk_index: int, commit_token: int) -> None:
        staged = self._staged[commit_token]
        self._staged[commit_token] = replace(staged, total=staged.total.copy())
        whole(self, chunk_index, commit_token)
        self._staged[commit_token] = replace(staged, total=staged.total.copy())

    patch.setattr(GradientSums, "check", check)
    patch.setattr(GradientSums, "commit", commit)
    VARIANTS["a command performed again"](patch)


# --- workers ---


@VARIANTS(caught_by=partial(drawn, 5))
def sums_go_on(patch: Patch) -> None:
    """A chunk that is dropped half-way leaves its sum to the next."""
    whole = ChunkProgram.open

    def drop(self: ChunkProgram) -> None:
        self._collect()

    def opened(self: ChunkProgram, step: int, batch_slice: BatchSlice) -> None:
        total, self._total = self._total, GradientSum(0)
        whole(self, step, batch_slice)
        self._total = total

    patch.setattr(ChunkProgram, "drop", drop)
    patch.setattr(ChunkProgram, "open", opened)


# --- savepoints ---


@VARIANTS(caught_by=journal_not_on_disk)
def changed_in_place(patch: Patch) -> None:
    """Arrays of a savepoint are changed when nobody else uses them."""
    patch.setattr(Savepoints, "_arrays", lambda self: iter(()))  # noqa: ARG005 -- as the method


@VARIANTS(caught_by=journal_not_on_disk)
def settled_before_durable(patch: Patch) -> None:
    """A savepoint is settled when it is taken, before its journal is on disk."""
    whole = Coordinator._take_savepoint

    def mark(self: Coordinator, request: IterationDone) -> int:
        savepoint = whole(self, request)
        self._series.settled = savepoint
        return savepoint

    patch.setattr(Coordinator, "_take_savepoint", mark)
    whole_add = Savepoints.add

    def add_and_settle(self: Savepoints, mark: Savepoint, *, settled: int) -> None:
        self._live = []
        whole_add(self, mark, settled=settled)

    patch.setattr(Savepoints, "add", add_and_settle)


@VARIANTS.replacing(Savepoints, "on_disk", caught_by=shard_dies_while_saving)
def forgotten_too_early(whole: Whole[None], self: Savepoints, savepoint: int) -> None:
    """A shard whose savepoint is on disk drops the one before at once."""
    whole(self, savepoint)
    self.forget(savepoint)


@VARIANTS.replacing(CommandBroadcast, "_note_incarnation", caught_by=shard_dies_while_saving)
def the_same_series(
    whole: Whole[None],
    self: CommandBroadcast,
    shard: object,
    incarnation: int,
    *,
    goes_on: bool = False,
) -> None:
    """A coordinator continues after a shard was lost."""
    whole(self, shard, incarnation, goes_on=goes_on)
    self.lost = None


@VARIANTS(caught_by=shard_dies_while_saving)
def told_at_once(patch: Patch) -> None:
    """A checkpoint is reported as saved when it is requested."""

    def request_save(self: Coordinator, label: str) -> None:
        self._report_saved(label, None)

    patch.setattr(Coordinator, "_request_save", request_save)


VARIANTS["any version"] = SPLIT["parameters are kept"]
VARIANTS.caught_by["any version"] = half_pushed
