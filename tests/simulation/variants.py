"""The protocol, broken on purpose: each variant leaves out one rule.

A rule whose loss nobody notices is either redundant, or not tried hard enough. Where
one rule is the spare of another, the variant breaks both, and says so.

    with broken(VARIANTS["no watermark"]):
        play(seed)  # fails, for some seed
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import msgspec
import pytest

from distbelief.parameter_server import shard as agenda_module
from distbelief.parameter_server.checkpoint import ShardIdentity, ShardState, take
from distbelief.parameter_server.client import client as client_module
from distbelief.parameter_server.client.fetch import ShardFetch
from distbelief.parameter_server.client.link import PrimaryTracker
from distbelief.parameter_server.client.push import ShardPush
from distbelief.parameter_server.client_service import ClientMessage, ClientService
from distbelief.parameter_server.pinned_versions import PinnedVersions, Version
from distbelief.parameter_server.push_handler import PushHandler, PushInProgress
from distbelief.parameter_server.replication import Backup, Primary
from distbelief.parameter_server.session_state import N_SLOTS, PushBuffer, Session
from distbelief.parameter_server.sessions import SessionTable
from distbelief.parameter_server.shard import (
    CopyMessage,
    FromLeader,
    ReplicaState,
    Shard,
    WorkQueue,
)
from distbelief.parameter_server.shared_vector import SeqlockVector
from distbelief.protocol import (
    OpenSession,
    ParameterBlock,
    Promote,
    Push,
    PushApplied,
    PushBlock,
    ReplicatePush,
    StartSync,
    StateBlock,
)
from distbelief.roles.role import Action, Address, Received, Seconds, Send, Snapshot
from distbelief.supervisor.failover import Decision, PrimaryElection


Patch = pytest.MonkeyPatch
Variant = Callable[[Patch], None]


@contextmanager
def broken(variant: Variant) -> Iterator[None]:
    """Break the protocol for a while."""
    with pytest.MonkeyPatch.context() as patch:
        variant(patch)
        yield


# ----------------------------------------------------------------- pushes, one copy


def no_watermark(patch: Patch) -> None:
    """A push that comes again is applied again."""
    whole = PushHandler.take

    def take(self: PushHandler, client: Session, message: Push, *, clock: int) -> list[Action]:
        client.watermark = min(client.watermark, message.sequence - 1)
        return whole(self, client, message, clock=clock)

    patch.setattr(PushHandler, "take", take)


def acknowledged_before_it_is_applied(patch: Patch) -> None:
    """A push is acknowledged as soon as it is here."""
    whole = PushHandler.take

    def take(self: PushHandler, client: Session, message: Push, *, clock: int) -> list[Action]:
        told = PushApplied(
            sequence=message.sequence,
            shard_incarnation=message.shard_incarnation,
            clock=clock,
            staleness=0,
        )
        actions = whole(self, client, message, clock=clock)
        return [*actions, Send(receiver=client.name, message=told)]

    patch.setattr(PushHandler, "take", take)


def lives_of_clients_are_not_told_apart(patch: Patch) -> None:
    """Every life numbers its pushes from 1, and a shard looks at no incarnation.

    Either alone does no harm: sequences that rise with the lives make the watermark
    refuse what a former life says, and so does the look at the incarnation.
    """
    whole = ClientService.serve

    def serve(
        self: ClientService, event: Received, message: ClientMessage, now: Seconds
    ) -> list[Action]:
        known = self._clients.get(event.sender)
        life = event.incarnation if known is None else known.incarnation
        event = msgspec.structs.replace(event, incarnation=life)
        return whole(self, event, message, now)

    patch.setattr(ClientService, "serve", serve)
    patch.setattr(SessionTable, "is_older", lambda *_: False)
    patch.setattr(client_module, "_LIFE_BITS", 0)


def slot_is_used_again_too_early(patch: Patch) -> None:
    """A client stages a third push while two are in flight."""
    has_room = property(lambda self: self.issued - self.settled <= N_SLOTS)
    patch.setattr(ShardPush, "has_room", has_room)


def blocks_are_taken_in_any_order(patch: Patch) -> None:
    """A block counts for all before it."""

    def take_block(self: Session, message: PushBlock) -> int:
        slot = self._slot_of(message.sequence)
        slot.lend(message.sequence)
        start, stop = self.holding.bounds[message.block_index]
        slot.values[start:stop] = message.values
        slot.received = max(slot.received, message.block_index + 1)
        return slot.received

    patch.setattr(Session, "take_block", take_block)


def applied_before_all_blocks_are_here(patch: Patch) -> None:
    """A push is complete when its Push has come."""

    def next_complete(self: Session) -> PushBuffer | None:
        slot = self.slots[(self.watermark + 1) % N_SLOTS] if self.slots else None
        is_next = slot is not None and slot.sequence == self.watermark + 1
        return slot if is_next and slot is not None and slot.push else None

    patch.setattr(Session, "next_complete", next_complete)


def late_hello_lowers_the_watermark(patch: Patch) -> None:
    """What Hello says counts, whenever it was said."""
    whole = SessionTable.admit

    def admit(
        self: SessionTable, name: Address, incarnation: int, hello: OpenSession, *, region: str
    ) -> tuple[Session, str | None]:
        client, why_not = whole(self, name, incarnation, hello, region=region)
        client.watermark = hello.next_sequence - 1
        return client, why_not

    patch.setattr(SessionTable, "admit", admit)


def late_welcome_is_believed(patch: Patch) -> None:
    """A Welcome that answers an older Hello is taken for the present one."""
    patch.setattr(ShardPush, "agrees", lambda *_: True)


def hello_does_not_wait_for_the_push_being_applied(patch: Patch) -> None:
    """Slots are taken back while a push is read from them."""
    patch.setattr(ClientService, "_must_wait", lambda self, *_: not self._open)


# ------------------------------------------------------------------ reads, snapshots


def lease_ends_before_its_reader_has_all(patch: Patch) -> None:
    """A copy is filled anew while somebody reads it, who looks at no clock.

    A reader that does refuses the mixture, and fetches anew once its lease has expired.
    """
    patch.setattr(ShardFetch, "take", _whatever_its_clock(ShardFetch.take))

    def free(self: PinnedVersions) -> Version | None:
        return next((copy for copy in self._copies if not copy.filling), None)

    patch.setattr(PinnedVersions, "_free", free)


def values_are_even_while_they_are_written(patch: Patch) -> None:
    """The version under the sequence lock is not made odd."""

    def end(self: SeqlockVector, *, clock: int) -> None:
        self._header[0] += 2
        self._header[1] = clock

    patch.setattr(SeqlockVector, "begin", lambda _: None)
    patch.setattr(SeqlockVector, "end", end)


def torn_read_is_believed(patch: Patch) -> None:
    """A reader does not look at the version."""

    def read(self: SeqlockVector, copy: Callable[[], object]) -> int:
        copy()
        return self.clock

    patch.setattr(SeqlockVector, "read", read)


def blocks_of_a_former_fetch_are_taken(patch: Patch) -> None:
    """A reader does not look whose answer a block is, nor at its clock.

    If it looks at the clock, it refuses the mixture, as above.
    """
    whole = _whatever_its_clock(ShardFetch.take)

    def fetch(self: ShardFetch, block: ParameterBlock) -> Sequence[object]:
        return whole(self, msgspec.structs.replace(block, request=self._request))

    patch.setattr(ShardFetch, "take", fetch)


def _whatever_its_clock(
    take: Callable[[ShardFetch, ParameterBlock], Sequence[object]],
) -> Callable[[ShardFetch, ParameterBlock], Sequence[object]]:
    def taking(self: ShardFetch, block: ParameterBlock) -> Sequence[object]:
        clock = self._block_clock if self._received else block.clock
        return take(self, msgspec.structs.replace(block, clock=clock))

    return taking


def watermarks_are_forgotten_in_the_snapshot(patch: Patch) -> None:
    """The clients of a snapshot have pushed nothing."""

    def forgetful(label: str, state: ShardState, *, identity: ShardIdentity) -> Snapshot:
        clients = (
            Session.of(msgspec.structs.replace(client.record, watermark=0))
            for client in state.clients
        )
        return take(label, replace(state, clients=tuple(clients)), identity=identity)

    patch.setattr(agenda_module, "take", forgetful)


def snapshot_is_taken_while_a_push_is_applied(patch: Patch) -> None:
    """Save does not wait for the work under way."""

    def save(self: Shard, _: Address, label: str) -> Sequence[Action]:
        agenda = self._agenda
        before = agenda._work
        actions = agenda._begin_save(label)
        agenda._work = before
        return actions

    patch.setattr(Shard, "_save", save)
    patch.setattr(WorkQueue, "persisted", lambda *_: [])


# ------------------------------------------------------------ two copies of a shard


def acknowledged_before_the_second_holds_it(patch: Patch) -> None:
    """The leader acknowledges what it has applied itself."""
    whole = Primary.applied

    def applied(self: Primary, *, clock: int) -> bool:
        whole(self, clock=clock)
        return False

    def settle(self: PushHandler, applied: PushInProgress, *, staleness: int, clock: int) -> Action:
        del staleness
        return self._replies.acknowledge(applied.client, clock=clock)

    patch.setattr(Primary, "applied", applied)
    patch.setattr(PushHandler, "settle", settle)


def leader_goes_on_alone_without_leave(patch: Patch) -> None:
    """A leader whose second is mute does not wait for the supervisor."""

    def complain(self: Primary, _: Seconds) -> list[Action]:
        actions = self._release_all()
        self._begin(None, life=0)
        return actions

    patch.setattr(Primary, "_complain", complain)


def deposed_leader_is_acknowledged(patch: Patch) -> None:
    """A copy that leads says yes to whatever its former leader forwards."""
    whole = ReplicaState._from_leader

    def hear(self: ReplicaState, sender: Address, message: FromLeader) -> Sequence[Action]:
        if self._following is not None or not isinstance(message, ReplicatePush):
            return whole(self, sender, message)
        told = PushApplied(
            sequence=message.clock + 1,
            shard_incarnation=message.pairing,
            clock=message.clock + 1,
            staleness=0,
        )
        return [Send(receiver=sender, message=told)]

    patch.setattr(ReplicaState, "_from_leader", hear)


def told_to_any_life_of_that_name(patch: Patch) -> None:
    """A copy obeys a Lead or Follow, whichever of its lives was meant."""
    whole = ReplicaState.receive

    def receive(
        self: ReplicaState, event: Received, message: CopyMessage, now: Seconds
    ) -> list[Action]:
        if isinstance(message, Promote | StartSync):
            message = msgspec.structs.replace(message, receiver_incarnation=self._life)
        return whole(self, event, message, now)

    patch.setattr(ReplicaState, "receive", receive)


def former_leaders_are_heard(patch: Patch) -> None:
    """A client takes the word of any leader, and of any life of it.

    Either alone does no harm as long as the other is heeded: who leads anew lives
    anew, or what its predecessor acknowledged is in its values.
    """

    def rise(self: PrimaryTracker, number: int) -> bool:
        before, self.number = self.number, number
        return number > before

    patch.setattr(PrimaryTracker, "rise", rise)
    patch.setattr(PrimaryTracker, "is_over", lambda *_: False)


def piece_of_another_clock_is_taken(patch: Patch) -> None:
    """A second takes a piece as it comes, and holds a mixture of versions."""
    whole = Backup.take_piece

    def take_piece(self: Backup, sender: Address, message: StateBlock) -> object:
        here = msgspec.structs.replace(message, clock=self._values.clock)
        return whole(self, sender, here)

    patch.setattr(Backup, "take_piece", take_piece)


def pushes_are_taken_in_any_order(patch: Patch) -> None:
    """A second applies what is forwarded as it comes, whatever is missing before it."""
    whole = Backup.forward

    def forward(self: Backup, sender: Address, message: ReplicatePush) -> object:
        n_waiting = len(self._queue) + (self._applying is not None)
        here = msgspec.structs.replace(message, clock=self._values.clock + n_waiting)
        return whole(self, sender, here)

    patch.setattr(Backup, "forward", forward)


def whole_is_said_too_early(patch: Patch) -> None:
    """A second counts as whole once it has begun to follow."""
    patch.setattr(Backup, "is_whole", property(lambda self: self.follows))


def second_takes_over_that_is_not_whole(patch: Patch) -> None:
    """The supervisor does not ask whether it is, and it leads with what it has.

    The supervisor's rule alone does no harm if it is broken: a second that is not whole
    ends its life when it is told to lead.
    """
    whole, fence = PrimaryElection._promote, Backup.lead

    def decide(self: PrimaryElection, primary: Address, *, backup: Address | None) -> Decision:
        decision = whole(self, primary, backup=backup)
        self.in_sync = backup is not None
        return decision

    def lead(self: Backup, pairing: int) -> bool:
        fence(self, pairing)
        return True

    patch.setattr(PrimaryElection, "_promote", decide)
    patch.setattr(Backup, "lead", lead)


def second_does_not_know_the_clients(patch: Patch) -> None:
    """A push is applied to the second's values, but not to its watermarks."""
    whole = Backup.end

    def end(self: Backup) -> list[Action]:
        before = dict(self.clients)
        actions = whole(self)
        self.clients = before
        return actions

    patch.setattr(Backup, "end", end)


_ALL: Final[tuple[Variant, ...]] = (
    no_watermark,
    acknowledged_before_it_is_applied,
    lives_of_clients_are_not_told_apart,
    slot_is_used_again_too_early,
    blocks_are_taken_in_any_order,
    applied_before_all_blocks_are_here,
    late_hello_lowers_the_watermark,
    late_welcome_is_believed,
    hello_does_not_wait_for_the_push_being_applied,
    lease_ends_before_its_reader_has_all,
    values_are_even_while_they_are_written,
    torn_read_is_believed,
    blocks_of_a_former_fetch_are_taken,
    watermarks_are_forgotten_in_the_snapshot,
    snapshot_is_taken_while_a_push_is_applied,
    acknowledged_before_the_second_holds_it,
    leader_goes_on_alone_without_leave,
    deposed_leader_is_acknowledged,
    told_to_any_life_of_that_name,
    former_leaders_are_heard,
    piece_of_another_clock_is_taken,
    pushes_are_taken_in_any_order,
    whole_is_said_too_early,
    second_takes_over_that_is_not_whole,
    second_does_not_know_the_clients,
)

VARIANTS: Final = {variant.__name__.replace("_", " "): variant for variant in _ALL}
