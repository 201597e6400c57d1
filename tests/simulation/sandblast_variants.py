"""Sandblaster's protocol, broken on purpose: each variant leaves out one rule.

with broken(VARIANTS["changed in place"]):
    play(seed)  # fails, for some seed
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import msgspec

from distbelief.parameter_server.command_log import CommandExecutor
from distbelief.parameter_server.gradient_sums import GradientSums
from distbelief.parameter_server.savepoints import Savepoints
from distbelief.protocol import CommandDone, Savepoint, ShardCommand
from distbelief.roles.role import Action, Received, Seconds
from distbelief.worker.batches import BatchSlice
from distbelief.worker.exchange import GradientSum
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.coordinator.shard_commands import CommandBroadcast
from sandblaster.coordinator.work_queue import WorkQueue
from sandblaster.coordinator.workers import Attempt, Chunk
from sandblaster.optimizers.base import IterationDone
from sandblaster.worker import ChunkProgram, ChunkPushes
from tests.simulation.split_variants import parameters_are_kept
from tests.simulation.variants import Patch, Variant


# --- commands ---


def performed_again(patch: Patch) -> None:
    """A repeated command is executed again."""
    whole = CommandExecutor.take

    def take(self: CommandExecutor, event: Received, order: ShardCommand) -> list[Action]:
        last = self._answer
        if (order.epoch, order.number) == (last.epoch, last.number) and last.number > 1:
            self._answer = msgspec.structs.replace(last, number=last.number - 1)
        return whole(self, event, order)

    patch.setattr(CommandExecutor, "take", take)


def no_epochs(patch: Patch) -> None:
    """A shard obeys the coordinator that sent the last command."""
    whole = CommandExecutor.take

    def take(self: CommandExecutor, event: Received, order: ShardCommand) -> list[Action]:
        if order.epoch < self._epoch:
            self._epoch = order.epoch
            self._answer = CommandDone(epoch=order.epoch, number=order.number - 1)
        return whole(self, event, order)

    patch.setattr(CommandExecutor, "take", take)


def answers_of_any_order(patch: Patch) -> None:
    """Any answer of a shard counts for the present command."""
    whole = CommandBroadcast.receive

    def receive(
        self: CommandBroadcast, event: Received, message: CommandDone, now: Seconds
    ) -> None:
        if self._command is not None and message.epoch == self.epoch:
            message = msgspec.structs.replace(message, number=self.number)
        whole(self, event, message, now)

    patch.setattr(CommandBroadcast, "receive", receive)


# --- chunks ---


def one_grant_for_all(patch: Patch) -> None:
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


def staged_somewhere(patch: Patch) -> None:
    """A worker reports that all shards hold a chunk before they do."""
    whole = ChunkPushes.has_new_staged

    def has_new_staged(self: ChunkPushes) -> bool:
        while len(self._pushed) > max(self._client.unacknowledged - 1, 0):
            self.staged.append(self._pushed.popleft())
            self._has_new_staged = True
        return whole(self)

    patch.setattr(ChunkPushes, "has_new_staged", has_new_staged)


def in_order_of_arrival(patch: Patch) -> None:
    """Chunks are summed as they come."""
    whole = GradientSums.commit

    def commit(self: GradientSums, chunk_index: int, commit_token: int) -> None:
        arrived = len(self._committed)
        whole(self, arrived, commit_token)
        self._committed[chunk_index] = self._committed.pop(arrived)

    patch.setattr(GradientSums, "commit", commit)


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
    performed_again(patch)


# --- workers ---


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


def changed_in_place(patch: Patch) -> None:
    """Arrays of a savepoint are changed when nobody else uses them."""
    patch.setattr(Savepoints, "_arrays", lambda self: iter(()))  # noqa: ARG005 -- as the method


def settled_before_durable(patch: Patch) -> None:
    """A savepoint is settled when it is taken, before its journal is on disk."""
    whole = Coordinator._take_savepoint

    def mark(self: Coordinator, request: IterationDone) -> int:
        cut = whole(self, request)
        self._epoch.settled = cut
        return cut

    patch.setattr(Coordinator, "_take_savepoint", mark)
    whole_add = Savepoints.add

    def add_and_settle(self: Savepoints, mark: Savepoint, *, settled: int) -> None:
        self._live = []
        whole_add(self, mark, settled=settled)

    patch.setattr(Savepoints, "add", add_and_settle)


def forgotten_too_early(patch: Patch) -> None:
    """A shard whose savepoint is on disk drops the one before at once."""
    whole = Savepoints.on_disk

    def on_disk(self: Savepoints, cut: int) -> None:
        whole(self, cut)
        self.forget(cut)

    patch.setattr(Savepoints, "on_disk", on_disk)


def same_epoch(patch: Patch) -> None:
    """A coordinator continues after a shard was lost."""
    whole = CommandBroadcast._note_incarnation

    def meet(self: CommandBroadcast, shard: object, incarnation: int) -> None:
        whole(self, shard, incarnation)  # type: ignore[arg-type]
        self.lost = None

    patch.setattr(CommandBroadcast, "_note_incarnation", meet)


def told_at_once(patch: Patch) -> None:
    """A checkpoint is reported as saved when it is requested."""

    def request_save(self: Coordinator, label: str) -> None:
        self._report_saved(label, None)

    patch.setattr(Coordinator, "_request_save", request_save)


VARIANTS: Final[dict[str, Variant]] = {
    "an order performed again": performed_again,
    "no epochs": no_epochs,
    "answers of any order": answers_of_any_order,
    "a winner per shard": one_grant_for_all,
    "staged somewhere": staged_somewhere,
    "in order of arrival": in_order_of_arrival,
    "counted twice": counted_twice,
    "any version": parameters_are_kept,
    "sums go on": sums_go_on,
    "changed in place": changed_in_place,
    "settled before durable": settled_before_durable,
    "the same epoch": same_epoch,
    "forgotten too early": forgotten_too_early,
    "told at once": told_at_once,
}
