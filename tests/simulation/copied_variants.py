"""Two copies under a coordinator, broken on purpose: each variant leaves out one rule."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Final

from distbelief.core.errors import DistBeliefError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.command_log import CommandExecutor
from distbelief.parameter_server.replication import Primary
from distbelief.parameter_server.savepoints import Savepoints, SavepointState
from distbelief.parameter_server.session import PushInProgress
from distbelief.protocol import ReplicateCommand
from distbelief.protocol.role import Action, Address, Computed, Seconds
from sandblaster.coordinator.shard_commands import CommandBroadcast
from tests.simulation.copied_sandblasts import (
    CopiedSandblast,
    dies_with_a_chunk,
    dies_with_a_command,
    dies_with_what_it_sent,
    drawn,
    resumes_after_a_takeover,
)
from tests.simulation.variants import Patch, Variants, Whole


VARIANTS: Final = Variants[Callable[[], CopiedSandblast]]()


@VARIANTS(caught_by=dies_with_what_it_sent)
def answered_before_the_backup_has_it(patch: Patch) -> None:
    """The primary answers a command as soon as it has executed it itself."""
    whole, whole_answer = Primary.executed, CommandExecutor.answer

    def executed(self: Primary, now: Seconds) -> list[Action]:
        actions = whole(self, now)
        return [*self._commands.answer(), *actions]

    def answer(self: CommandExecutor) -> list[Action]:
        return [] if self.held is None else whole_answer(self)

    patch.setattr(Primary, "executed", executed)
    patch.setattr(CommandExecutor, "answer", answer)


@VARIANTS(caught_by=dies_with_a_chunk)
def chunks_on_the_primary_only(patch: Patch) -> None:
    """Staged chunks are acknowledged at once and not replicated."""
    whole = Primary.replicate

    def replicate(
        self: Primary, push: PushInProgress, *, n_clients: int, now: Seconds
    ) -> list[Action]:
        if push.push.commit_token:
            self._values.position -= 1  # it counts for nothing
            return []
        return whole(self, push, n_clients=n_clients, now=now)

    patch.setattr(Primary, "replicate", replicate)


@VARIANTS.replacing(CommandExecutor, "repeated", caught_by=dies_with_a_command)
def results_are_not_compared(
    whole: Whole[None], self: CommandExecutor, event: Computed, message: ReplicateCommand
) -> None:
    """A backup that rounds otherwise goes on as if it had the same vectors."""
    self._vector_store.vector("parameters")[0] *= 1.0 + 1e-15
    with contextlib.suppress(DistBeliefError):
        whole(self, event, message)


@VARIANTS.replacing(CommandExecutor, "repeated", caught_by=dies_with_a_command)
def a_backup_that_remembers_no_answer(
    whole: Whole[None], self: CommandExecutor, event: Computed, message: ReplicateCommand
) -> None:
    """A backup executes a command and does not know its number."""
    answer = self._answer
    whole(self, event, message)
    self._answer = answer


@VARIANTS.replacing(CommandExecutor, "state", caught_by=partial(drawn, 0))
def values_alone(whole: Whole[list[Vector]], self: CommandExecutor) -> list[Vector]:
    """A backup that joins in a series gets the series, but no vectors."""
    store = self._vector_store
    vectors, store._vectors = store._vectors, {}
    try:
        return whole(self)
    finally:
        store._vectors = vectors


@VARIANTS.replacing(Savepoints, "adopt", caught_by=resumes_after_a_takeover)
def no_savepoints(whole: Whole[None], self: Savepoints, state: SavepointState) -> None:
    """A backup that joins in a series gets no savepoints."""
    whole(self, SavepointState([], [], state.base_clock))


@VARIANTS(caught_by=partial(drawn, 0))
def commands_while_a_backup_syncs(patch: Patch) -> None:
    """A primary executes commands and stages chunks while the backup's vectors are under way."""
    patch.setattr(Primary, "may_apply", property(lambda _: True))
    patch.setattr(Primary, "may_command", property(lambda _: True))


@VARIANTS.replacing(CommandBroadcast, "_note_incarnation", caught_by=partial(drawn, 0))
def a_takeover_begins_again(
    whole: Whole[None],
    self: CommandBroadcast,
    shard: Address,
    incarnation: int,
    *,
    goes_on: bool = False,
) -> None:
    """A coordinator begins another series after each takeover."""
    del goes_on
    whole(self, shard, incarnation)
