"""Broken variants of the protocol: each one leaves out one rule.

A rule whose loss no test notices is redundant or not tested hard enough. Where two rules back
each other up, the variant breaks both and says so.

    with broken(VARIANTS["no watermark"]):
        play(seed)  # fails, for some seed
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final, Generic, TypeVar

import msgspec
import numpy as np
import pytest

from distbelief import protocol as wire
from distbelief.parameter_server import shard as shard_module
from distbelief.parameter_server.checkpoint import ShardState, take
from distbelief.parameter_server.client import client as client_module
from distbelief.parameter_server.client.client import ShardLink, ShardReply
from distbelief.parameter_server.client.fetches import ShardFetch
from distbelief.parameter_server.client.primary import ShardPrimary
from distbelief.parameter_server.client.pushes import ShardPush
from distbelief.parameter_server.pinned_versions import PinnedVersions, Version
from distbelief.parameter_server.replication import Backup, Primary
from distbelief.parameter_server.sessions import PushInProgress, Session, Sessions
from distbelief.parameter_server.shard import ClientMessage, ReplicationMessage, Shard
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.tensor_copies import (
    N_PUSH_BUFFERS,
    PushBuffer,
    Pushed,
    SeqlockVector,
)
from distbelief.protocol.role import Action, Address, Persist, Received, Seconds, Send, Snapshot
from distbelief.simulation.trace import SimulationFailed
from distbelief.supervisor.failover import PrimaryElection


Patch = pytest.MonkeyPatch
Variant = Callable[[Patch], None]
S = TypeVar("S")
T = TypeVar("T")
Whole = Callable[..., T]  # what a variant replaces
N_SEEDS = 400  # in which each variant must be caught


@contextmanager
def broken(variant: Variant) -> Iterator[None]:
    """Patch the protocol inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        variant(patch)
        yield


def failure_of(variant: Variant, play: Callable[[], object]) -> str | None:
    """Return how a run fails where this rule is left out; None if it does not."""
    try:
        with broken(variant):
            play()
    except (SimulationFailed, AssertionError) as error:
        what = str(error) or type(error).__name__
    else:
        return None
    mistakes = ("AttributeError", "TypeError", "NameError")
    assert not any(f"raised {m}" in what for m in mistakes), what
    return what.splitlines()[0]


def assert_noticed(name: str, variants: "Variants[int]", play: Callable[[int], object]) -> None:
    """A seed fails where this rule is left out; one that is known is tried first, to save time."""
    searches = name not in variants.caught_by or "SIMULATION_VARIANTS" in os.environ
    for seed in chain([] if searches else [variants.caught_by[name]], range(N_SEEDS)):
        failure = failure_of(variants[name], partial(play, seed))
        if failure is not None:
            sys.stdout.write(f"    {name}: caught_by={seed}  # {failure}\n")
            return
    pytest.fail(f"{name}: none of {N_SEEDS} seeds fails; make `scenarios` harder")


class Variants(dict[str, Variant], Generic[S]):
    """Variants by name; of each, what is known to catch it."""

    def __init__(self) -> None:
        super().__init__()
        self.caught_by: dict[str, S] = {}

    def __call__(self, *, caught_by: S | None = None) -> Callable[[Variant], Variant]:
        """Note a variant under the name of its function."""

        def note(variant: Variant) -> Variant:
            name = variant.__name__.replace("_", " ")
            self[name] = variant
            if caught_by is not None:
                self.caught_by[name] = caught_by
            return variant

        return note

    def replacing(
        self, owner: object, name: str, *, caught_by: S | None = None
    ) -> Callable[[Callable[..., object]], Variant]:
        """Note a function in place of one of `owner`; it gets that one as its first argument."""

        def note(function: Callable[..., object]) -> Variant:
            def variant(patch: Patch) -> None:
                whole = getattr(owner, name)
                patch.setattr(owner, name, lambda *args, **keys: function(whole, *args, **keys))

            variant.__name__ = function.__name__
            return self(caught_by=caught_by)(variant)

        return note


VARIANTS: Final = Variants[int]()


# ----------------------------------------------------------------- pushes, one copy


@VARIANTS.replacing(Sessions, "take_push", caught_by=0)
def no_watermark(
    whole: Whole[list[Action]], self: Sessions, client: Session, message: wire.Push
) -> list[Action]:
    """A duplicate push is applied again."""
    client.watermark = min(client.watermark, message.sequence - 1)
    return whole(self, client, message)


@VARIANTS.replacing(Sessions, "take_push", caught_by=0)
def acknowledged_before_it_is_applied(
    whole: Whole[list[Action]], self: Sessions, client: Session, message: wire.Push
) -> list[Action]:
    """A push is acknowledged as soon as it has arrived."""
    acknowledgement = wire.PushApplied(
        sequence=message.sequence, term=message.term, clock=self._values.clock, staleness=0
    )
    actions = whole(self, client, message)
    return [*actions, Send(receiver=client.name, message=acknowledgement)]


@VARIANTS(caught_by=1)
def client_incarnations_are_ignored(patch: Patch) -> None:
    """Every incarnation numbers its pushes from 1, and the shard compares no incarnations.

    Either alone does no harm: both the watermark (sequences rise over all incarnations) and the
    check of the incarnation reject messages of a former one.
    """
    whole = Shard._serve_client

    def serve(self: Shard, event: Received, message: ClientMessage, now: Seconds) -> list[Action]:
        known = self._sessions.get(event.sender)
        incarnation = event.incarnation if known is None else known.incarnation
        event = msgspec.structs.replace(event, incarnation=incarnation)
        return whole(self, event, message, now)

    patch.setattr(Shard, "_serve_client", serve)
    patch.setattr(Sessions, "is_older", lambda *_: False)
    patch.setattr(client_module, "_INCARNATION_BITS", 0)


@VARIANTS(caught_by=0)
def push_buffer_is_reused_too_early(patch: Patch) -> None:
    """A client stages a third push while two are in flight."""
    has_room = property(lambda self: self.pushing.issued - self.pushing.settled <= N_PUSH_BUFFERS)
    patch.setattr(ShardLink, "has_room", has_room)


@VARIANTS(caught_by=43)
def blocks_are_taken_in_any_order(patch: Patch) -> None:
    """A block counts for all blocks before it."""
    whole = PushBuffer.take

    def take(
        self: PushBuffer, block: wire.PushBlock, *, sender: str, of_part: bool = False
    ) -> None:
        self.lend(block.sequence, block.n_words)
        self.received = block.block_index
        whole(self, block, sender=sender, of_part=of_part)

    patch.setattr(PushBuffer, "take", take)


@VARIANTS(caught_by=17)
def applied_before_all_blocks_are_here(patch: Patch) -> None:
    """A push is complete as soon as its Push message has arrived."""

    def next_complete(self: Session) -> PushBuffer | None:
        push_buffer = (
            self.push_buffers[(self.watermark + 1) % N_PUSH_BUFFERS] if self.push_buffers else None
        )
        if push_buffer is None or push_buffer.sequence != self.watermark + 1:
            return None
        if push_buffer.push is not None and push_buffer.pushed is None:
            dense = np.zeros(self.shard_slice.n_elements, push_buffer.dtype)
            push_buffer.pushed = Pushed.of(dense, self.shard_slice)
        return push_buffer if push_buffer.push is not None else None

    patch.setattr(Session, "next_complete", next_complete)


@VARIANTS.replacing(Sessions, "admit", caught_by=1)
def late_open_session_lowers_the_watermark(
    whole: Whole[tuple[Session, str | None]],
    self: Sessions,
    name: Address,
    incarnation: int,
    request: wire.OpenSession,
    *,
    region: str,
    now: Seconds,
) -> tuple[Session, str | None]:
    """The watermark in OpenSession is taken over, however old the message is."""
    client, why_not = whole(self, name, incarnation, request, region=region, now=now)
    client.watermark = request.next_sequence - 1
    return client, why_not


@VARIANTS(caught_by=75)
def late_session_opened_is_accepted(patch: Patch) -> None:
    """A SessionOpened that answers an older OpenSession is accepted."""
    patch.setattr(ShardPush, "agrees", lambda *_: True)


@VARIANTS(caught_by=11)
def open_session_does_not_wait_for_the_push_being_applied(patch: Patch) -> None:
    """Push buffers are released while a push is read from them."""
    patch.setattr(Sessions, "must_wait", lambda *_: False)


# ------------------------------------------------------------------ reads, snapshots


@VARIANTS(caught_by=23)
def version_is_unpinned_too_early(patch: Patch) -> None:
    """A pinned version is overwritten while a reader, which ignores clocks, reads it.

    A reader that compares clocks rejects the mixture and fetches again once its pin expires.
    """
    patch.setattr(ShardFetch, "take", _ignoring_the_clock(ShardFetch.take))

    def free(self: PinnedVersions) -> Version | None:
        return next((one for one in self._versions if one is not self.copying), None)

    patch.setattr(PinnedVersions, "_free", free)


@VARIANTS(caught_by=0)
def values_are_even_while_they_are_written(patch: Patch) -> None:
    """The version of the seqlock is not odd during a write."""

    def end(self: SeqlockVector, *, clock: int) -> None:
        self._header[0] += 2
        self._header[1] = clock

    patch.setattr(SeqlockVector, "begin", lambda _: None)
    patch.setattr(SeqlockVector, "end", end)


@VARIANTS(caught_by=0)
def torn_read_is_accepted(patch: Patch) -> None:
    """A reader ignores the version of the seqlock."""

    def read(self: SeqlockVector, copy: Callable[[], object]) -> int:
        copy()
        return self.clock

    patch.setattr(SeqlockVector, "read", read)


@VARIANTS(caught_by=47)
def blocks_of_a_former_fetch_are_taken(patch: Patch) -> None:
    """A reader ignores the request number and the clock of a block.

    With the clock alone it would reject the mixture, as above.
    """
    whole = _ignoring_the_clock(ShardFetch.take)

    def fetch(self: ShardFetch, block: wire.ParameterBlock) -> Sequence[object]:
        return whole(self, msgspec.structs.replace(block, request=self._request))

    patch.setattr(ShardFetch, "take", fetch)


def _ignoring_the_clock(
    take: Callable[[ShardFetch, wire.ParameterBlock], Sequence[object]],
) -> Callable[[ShardFetch, wire.ParameterBlock], Sequence[object]]:
    def take_any(self: ShardFetch, block: wire.ParameterBlock) -> Sequence[object]:
        clock = self._block_clock if self.received else block.clock
        return take(self, msgspec.structs.replace(block, clock=clock))

    return take_any


@VARIANTS(caught_by=102)
def watermarks_are_forgotten_in_the_snapshot(patch: Patch) -> None:
    """A snapshot records a watermark of 0 for each client."""

    def forgetful(label: str, state: ShardState, *, config: ShardConfig) -> Snapshot:
        clients = (msgspec.structs.replace(client, watermark=0) for client in state.clients)
        return take(label, replace(state, clients=tuple(clients)), config=config)

    patch.setattr(shard_module, "take", forgetful)


@VARIANTS(caught_by=0)
def snapshot_is_taken_while_a_push_is_applied(patch: Patch) -> None:
    """A snapshot does not wait for the work in progress."""

    def save(self: Shard, _: Address, label: str) -> list[Action]:
        return [Persist(snapshot=self._commands.with_vectors(self._snapshot(label)))]

    patch.setattr(Shard, "_save", save)
    patch.setattr(Shard, "_persisted", lambda *_: [])


# ------------------------------------------------------------ two copies of a shard


@VARIANTS(caught_by=9)
def acknowledged_before_the_backup_has_it(patch: Patch) -> None:
    """The primary acknowledges a push as soon as it has applied it itself."""
    whole = Primary.applied

    def applied(self: Primary, *, position: int) -> bool:
        whole(self, position=position)
        return False

    def confirm(self: Sessions, push: PushInProgress) -> Action:
        return self._push_applied(push.client)

    patch.setattr(Primary, "applied", applied)
    patch.setattr(Sessions, "confirm", confirm)


@VARIANTS.replacing(Primary, "timer", caught_by=15)
def primary_drops_its_backup_without_permission(
    whole: Whole[list[Action]], self: Primary, now: Seconds
) -> list[Action]:
    """A primary with a silent backup does not wait for the supervisor."""
    actions = whole(self, now)
    is_silent = any(
        isinstance(action, Send) and isinstance(action.message, wire.BackupUnresponsive)
        for action in actions
    )
    return self.stop() if is_silent else actions


@VARIANTS.replacing(Shard, "_replicate", caught_by=17)
def demoted_primary_is_acknowledged(
    whole: Whole[list[Action]],
    self: Shard,
    event: Received,
    message: ReplicationMessage,
    now: Seconds,
) -> list[Action]:
    """A primary acknowledges every push that its former primary replicates."""
    if self._backup is not None or not isinstance(message, wire.ReplicatePush):
        return whole(self, event, message, now)
    acknowledgement = wire.PushApplied(
        sequence=message.position + 1, term=message.term, clock=message.position + 1, staleness=0
    )
    return [Send(receiver=event.sender, message=acknowledgement)]


@VARIANTS.replacing(Shard, "_replicate", caught_by=307)
def receiver_incarnation_is_ignored(
    whole: Whole[list[Action]],
    self: Shard,
    event: Received,
    message: ReplicationMessage,
    now: Seconds,
) -> list[Action]:
    """A copy obeys Promote and StartSync for any of its incarnations."""
    if isinstance(message, wire.Promote | wire.StartSync):
        message = msgspec.structs.replace(message, receiver_incarnation=self._incarnation)
    return whole(self, event, message, now)


@VARIANTS(caught_by=52)
def former_primaries_are_accepted(patch: Patch) -> None:
    """A client accepts answers of any term and of any incarnation.

    Either alone does no harm: a new primary has a new incarnation, or its values contain
    everything that its predecessor acknowledged.
    """

    whole = ShardLink.receive

    def receive(
        self: ShardLink, event: Received, message: ShardReply, now: Seconds
    ) -> list[Action]:
        if not isinstance(message, wire.SessionRefused):
            self.primary.term = min(self.primary.term, message.term)
        return whole(self, event, message, now)

    hear = ShardPrimary.hear

    def hear_anybody(
        self: ShardPrimary, copy: Address, incarnation: int, term: int | None
    ) -> tuple[bool, bool]:
        return hear(self, copy, max(incarnation, self.incarnations[copy]), term)

    patch.setattr(ShardLink, "receive", receive)
    patch.setattr(ShardPrimary, "hear", hear_anybody)


@VARIANTS.replacing(Backup, "_take_state_block", caught_by=187)
def state_block_of_another_clock_is_accepted(
    whole: Whole[object], self: Backup, message: wire.StateBlock
) -> object:
    """A backup accepts any state block and so holds a mixture of versions."""
    return whole(self, msgspec.structs.replace(message, position=self._values.position))


@VARIANTS.replacing(Backup, "_replicate", caught_by=5)
def pushes_are_taken_in_any_order(
    whole: Whole[object], self: Backup, sender: Address, message: wire.ReplicatePush
) -> object:
    """A backup applies replicated pushes in order of arrival, gaps or not."""
    n_waiting = len(self._queue) + (self._applying is not None)
    here = msgspec.structs.replace(message, position=self._values.position + n_waiting)
    return whole(self, sender, here)


@VARIANTS(caught_by=27)
def in_sync_is_reported_too_early(patch: Patch) -> None:
    """A backup counts as in sync as soon as it has started to sync."""
    patch.setattr(Backup, "in_sync", property(lambda self: self.primary is not None))


@VARIANTS(caught_by=27)
def backup_takes_over_before_it_is_in_sync(patch: Patch) -> None:
    """The supervisor promotes any backup, and the backup serves what it has.

    Without the supervisor's rule alone no harm is done: a backup that is not in sync exits when
    it is promoted.
    """
    whole, fence = PrimaryElection._promote, Backup.promote

    def decide(self: PrimaryElection, primary: Address, *, backup: Address | None) -> list[Action]:
        actions = whole(self, primary, backup=backup)
        self.in_sync = backup is not None
        return actions

    def promote(self: Backup, term: int) -> bool:
        fence(self, term)
        return True

    patch.setattr(PrimaryElection, "_promote", decide)
    patch.setattr(Backup, "promote", promote)


@VARIANTS.replacing(Backup, "end_push", caught_by=1)
def backup_does_not_know_the_clients(whole: Whole[list[Action]], self: Backup) -> list[Action]:
    """The backup applies a push to its values but not to its watermarks."""
    before = dict(self.clients)
    actions = whole(self)
    self.clients = before
    return actions
