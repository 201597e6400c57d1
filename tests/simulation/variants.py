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
from distbelief.parameter_server.client.fetch import Fetching
from distbelief.parameter_server.client.link import Ranking
from distbelief.parameter_server.client.push import Pushing
from distbelief.parameter_server.client_service import ClientMessage, Service
from distbelief.parameter_server.pinned_versions import Copy, Leases
from distbelief.parameter_server.push_handler import Applying, Pushes
from distbelief.parameter_server.replication import Following, Forwarding
from distbelief.parameter_server.session_state import N_SLOTS, Client, Slot
from distbelief.parameter_server.sessions import Clients
from distbelief.parameter_server.shard import (
    Agenda,
    CopyMessage,
    FromLeader,
    ParameterServerShard,
    Standing,
)
from distbelief.parameter_server.shared_vector import Published
from distbelief.protocol import (
    Acknowledge,
    Follow,
    Forward,
    Hello,
    Lead,
    ParameterBlock,
    Push,
    PushBlock,
    StateBlock,
)
from distbelief.roles.role import Action, Address, Received, Seconds, Send, Snapshot
from distbelief.supervisor.failover import Decision, Pairing


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
    whole = Pushes.take

    def take(self: Pushes, client: Client, message: Push, *, clock: int) -> list[Action]:
        client.watermark = min(client.watermark, message.sequence - 1)
        return whole(self, client, message, clock=clock)

    patch.setattr(Pushes, "take", take)


def acknowledged_before_it_is_applied(patch: Patch) -> None:
    """A push is acknowledged as soon as it is here."""
    whole = Pushes.take

    def take(self: Pushes, client: Client, message: Push, *, clock: int) -> list[Action]:
        told = Acknowledge(
            sequence=message.sequence,
            shard_incarnation=message.shard_incarnation,
            clock=clock,
            staleness=0,
        )
        actions = whole(self, client, message, clock=clock)
        return [*actions, Send(receiver=client.name, message=told)]

    patch.setattr(Pushes, "take", take)


def lives_of_clients_are_not_told_apart(patch: Patch) -> None:
    """Every life numbers its pushes from 1, and a shard looks at no incarnation.

    Either alone does no harm: sequences that rise with the lives make the watermark
    refuse what a former life says, and so does the look at the incarnation.
    """
    whole = Service.serve

    def serve(self: Service, event: Received, message: ClientMessage, now: Seconds) -> list[Action]:
        known = self._clients.get(event.sender)
        life = event.incarnation if known is None else known.incarnation
        event = msgspec.structs.replace(event, incarnation=life)
        return whole(self, event, message, now)

    patch.setattr(Service, "serve", serve)
    patch.setattr(Clients, "is_older", lambda *_: False)
    patch.setattr(client_module, "_LIFE_BITS", 0)


def slot_is_used_again_too_early(patch: Patch) -> None:
    """A client stages a third push while two are in flight."""
    has_room = property(lambda self: self.issued - self.settled <= N_SLOTS)
    patch.setattr(Pushing, "has_room", has_room)


def blocks_are_taken_in_any_order(patch: Patch) -> None:
    """A block counts for all before it."""

    def take_block(self: Client, message: PushBlock) -> int:
        slot = self._slot_of(message.sequence)
        slot.lend(message.sequence)
        start, stop = self.holding.bounds[message.block_index]
        slot.values[start:stop] = message.values
        slot.received = max(slot.received, message.block_index + 1)
        return slot.received

    patch.setattr(Client, "take_block", take_block)


def applied_before_all_blocks_are_here(patch: Patch) -> None:
    """A push is complete when its Push has come."""

    def next_complete(self: Client) -> Slot | None:
        slot = self.slots[(self.watermark + 1) % N_SLOTS] if self.slots else None
        is_next = slot is not None and slot.sequence == self.watermark + 1
        return slot if is_next and slot is not None and slot.push else None

    patch.setattr(Client, "next_complete", next_complete)


def late_hello_lowers_the_watermark(patch: Patch) -> None:
    """What Hello says counts, whenever it was said."""
    whole = Clients.admit

    def admit(
        self: Clients, name: Address, incarnation: int, hello: Hello, *, region: str
    ) -> tuple[Client, str | None]:
        client, why_not = whole(self, name, incarnation, hello, region=region)
        client.watermark = hello.next_sequence - 1
        return client, why_not

    patch.setattr(Clients, "admit", admit)


def late_welcome_is_believed(patch: Patch) -> None:
    """A Welcome that answers an older Hello is taken for the present one."""
    patch.setattr(Pushing, "agrees", lambda *_: True)


def hello_does_not_wait_for_the_push_being_applied(patch: Patch) -> None:
    """Slots are taken back while a push is read from them."""
    patch.setattr(Service, "_must_wait", lambda self, *_: not self._open)


# ------------------------------------------------------------------ reads, snapshots


def lease_ends_before_its_reader_has_all(patch: Patch) -> None:
    """A copy is filled anew while somebody reads it, who looks at no clock.

    A reader that does refuses the mixture, and fetches anew once its lease has expired.
    """
    patch.setattr(Fetching, "take", _whatever_its_clock(Fetching.take))

    def free(self: Leases) -> Copy | None:
        return next((copy for copy in self._copies if not copy.filling), None)

    patch.setattr(Leases, "_free", free)


def values_are_even_while_they_are_written(patch: Patch) -> None:
    """The version under the sequence lock is not made odd."""

    def end(self: Published, *, clock: int) -> None:
        self._header[0] += 2
        self._header[1] = clock

    patch.setattr(Published, "begin", lambda _: None)
    patch.setattr(Published, "end", end)


def torn_read_is_believed(patch: Patch) -> None:
    """A reader does not look at the version."""

    def read(self: Published, copy: Callable[[], object]) -> int:
        copy()
        return self.clock

    patch.setattr(Published, "read", read)


def blocks_of_a_former_fetch_are_taken(patch: Patch) -> None:
    """A reader does not look whose answer a block is, nor at its clock.

    If it looks at the clock, it refuses the mixture, as above.
    """
    whole = _whatever_its_clock(Fetching.take)

    def fetch(self: Fetching, block: ParameterBlock) -> Sequence[object]:
        return whole(self, msgspec.structs.replace(block, request=self._request))

    patch.setattr(Fetching, "take", fetch)


def _whatever_its_clock(
    take: Callable[[Fetching, ParameterBlock], Sequence[object]],
) -> Callable[[Fetching, ParameterBlock], Sequence[object]]:
    def taking(self: Fetching, block: ParameterBlock) -> Sequence[object]:
        clock = self._block_clock if self._received else block.clock
        return take(self, msgspec.structs.replace(block, clock=clock))

    return taking


def watermarks_are_forgotten_in_the_snapshot(patch: Patch) -> None:
    """The clients of a snapshot have pushed nothing."""

    def forgetful(label: str, state: ShardState, *, identity: ShardIdentity) -> Snapshot:
        clients = (
            Client.of(msgspec.structs.replace(client.record, watermark=0))
            for client in state.clients
        )
        return take(label, replace(state, clients=tuple(clients)), identity=identity)

    patch.setattr(agenda_module, "take", forgetful)


def snapshot_is_taken_while_a_push_is_applied(patch: Patch) -> None:
    """Save does not wait for the work under way."""

    def save(self: ParameterServerShard, _: Address, label: str) -> Sequence[Action]:
        agenda = self._agenda
        before = agenda._work
        actions = agenda._begin_save(label)
        agenda._work = before
        return actions

    patch.setattr(ParameterServerShard, "_save", save)
    patch.setattr(Agenda, "persisted", lambda *_: [])


# ------------------------------------------------------------ two copies of a shard


def acknowledged_before_the_second_holds_it(patch: Patch) -> None:
    """The leader acknowledges what it has applied itself."""
    whole = Forwarding.applied

    def applied(self: Forwarding, *, clock: int) -> bool:
        whole(self, clock=clock)
        return False

    def settle(self: Pushes, applied: Applying, *, staleness: int, clock: int) -> Action:
        del staleness
        return self._replies.acknowledge(applied.client, clock=clock)

    patch.setattr(Forwarding, "applied", applied)
    patch.setattr(Pushes, "settle", settle)


def leader_goes_on_alone_without_leave(patch: Patch) -> None:
    """A leader whose second is mute does not wait for the supervisor."""

    def complain(self: Forwarding, _: Seconds) -> list[Action]:
        actions = self._release_all()
        self._begin(None, life=0)
        return actions

    patch.setattr(Forwarding, "_complain", complain)


def deposed_leader_is_acknowledged(patch: Patch) -> None:
    """A copy that leads says yes to whatever its former leader forwards."""
    whole = Standing._from_leader

    def hear(self: Standing, sender: Address, message: FromLeader) -> Sequence[Action]:
        if self._following is not None or not isinstance(message, Forward):
            return whole(self, sender, message)
        told = Acknowledge(
            sequence=message.clock + 1,
            shard_incarnation=message.pairing,
            clock=message.clock + 1,
            staleness=0,
        )
        return [Send(receiver=sender, message=told)]

    patch.setattr(Standing, "_from_leader", hear)


def told_to_any_life_of_that_name(patch: Patch) -> None:
    """A copy obeys a Lead or Follow, whichever of its lives was meant."""
    whole = Standing.receive

    def receive(
        self: Standing, event: Received, message: CopyMessage, now: Seconds
    ) -> list[Action]:
        if isinstance(message, Lead | Follow):
            message = msgspec.structs.replace(message, receiver_incarnation=self._life)
        return whole(self, event, message, now)

    patch.setattr(Standing, "receive", receive)


def former_leaders_are_heard(patch: Patch) -> None:
    """A client takes the word of any leader, and of any life of it.

    Either alone does no harm as long as the other is heeded: who leads anew lives
    anew, or what its predecessor acknowledged is in its values.
    """

    def rise(self: Ranking, number: int) -> bool:
        before, self.number = self.number, number
        return number > before

    patch.setattr(Ranking, "rise", rise)
    patch.setattr(Ranking, "is_over", lambda *_: False)


def piece_of_another_clock_is_taken(patch: Patch) -> None:
    """A second takes a piece as it comes, and holds a mixture of versions."""
    whole = Following.take_piece

    def take_piece(self: Following, sender: Address, message: StateBlock) -> object:
        here = msgspec.structs.replace(message, clock=self._values.clock)
        return whole(self, sender, here)

    patch.setattr(Following, "take_piece", take_piece)


def pushes_are_taken_in_any_order(patch: Patch) -> None:
    """A second applies what is forwarded as it comes, whatever is missing before it."""
    whole = Following.forward

    def forward(self: Following, sender: Address, message: Forward) -> object:
        n_waiting = len(self._queue) + (self._applying is not None)
        here = msgspec.structs.replace(message, clock=self._values.clock + n_waiting)
        return whole(self, sender, here)

    patch.setattr(Following, "forward", forward)


def whole_is_said_too_early(patch: Patch) -> None:
    """A second counts as whole once it has begun to follow."""
    patch.setattr(Following, "is_whole", property(lambda self: self.follows))


def second_takes_over_that_is_not_whole(patch: Patch) -> None:
    """The supervisor does not ask whether it is, and it leads with what it has.

    The supervisor's rule alone does no harm if it is broken: a second that is not whole
    ends its life when it is told to lead.
    """
    whole, fence = Pairing._lead, Following.lead

    def decide(self: Pairing, leader: Address, *, second: Address | None) -> Decision:
        decision = whole(self, leader, second=second)
        self.is_whole = second is not None
        return decision

    def lead(self: Following, pairing: int) -> bool:
        fence(self, pairing)
        return True

    patch.setattr(Pairing, "_lead", decide)
    patch.setattr(Following, "lead", lead)


def second_does_not_know_the_clients(patch: Patch) -> None:
    """A push is applied to the second's values, but not to its watermarks."""
    whole = Following.end

    def end(self: Following) -> list[Action]:
        before = dict(self.clients)
        actions = whole(self)
        self.clients = before
        return actions

    patch.setattr(Following, "end", end)


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
