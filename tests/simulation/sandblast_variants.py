"""Sandblaster's protocol, broken on purpose: each variant leaves out one rule.

with broken(VARIANTS["changed in place"]):
    play(seed)  # fails, for some seed
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import msgspec

from distbelief.parameter_server.command_log import Orders
from distbelief.parameter_server.gradient_sums import Collecting
from distbelief.parameter_server.savepoints import Cuts
from distbelief.protocol import Mark, Order, Performed
from distbelief.roles.role import Action, Received, Seconds
from sandblaster.coordinator.coordinator import Supervision
from sandblaster.coordinator.run import Course
from sandblaster.coordinator.shard_commands import ShardOrders
from sandblaster.coordinator.work_queue import Granting, _Set
from sandblaster.coordinator.workers import Copy
from sandblaster.optimizers.base import Iterated
from sandblaster.worker import Parameters, PortionSums, Tries
from tests.simulation.variants import Patch, Variant


# ------------------------------------------------------------------------------ orders


def performed_again(patch: Patch) -> None:
    """An order that comes again is performed again."""
    whole = Orders.take

    def take(self: Orders, event: Received, order: Order) -> list[Action]:
        last = self._answer
        if (order.epoch, order.number) == (last.epoch, last.number) and last.number > 1:
            self._answer = msgspec.structs.replace(last, number=last.number - 1)
        return whole(self, event, order)

    patch.setattr(Orders, "take", take)


def no_epochs(patch: Patch) -> None:
    """A shard obeys whichever coordinator spoke last."""
    whole = Orders.take

    def take(self: Orders, event: Received, order: Order) -> list[Action]:
        if order.epoch < self._epoch:
            self._epoch = order.epoch
            self._answer = Performed(epoch=order.epoch, number=order.number - 1)
        return whole(self, event, order)

    patch.setattr(Orders, "take", take)


def answers_of_any_order(patch: Patch) -> None:
    """Any answer of a shard counts for the order that is under way."""
    whole = ShardOrders.receive

    def receive(self: ShardOrders, event: Received, message: Performed, now: Seconds) -> None:
        if self._order is not None and message.epoch == self.epoch:
            message = msgspec.structs.replace(message, number=self.number)
        whole(self, event, message, now)

    patch.setattr(ShardOrders, "receive", receive)


# -------------------------------------------------------------------------------- sets


def one_grant_for_all(patch: Patch) -> None:
    """A set has one number, whoever pushes it: shards keep what comes first."""
    whole = Granting._grant_next

    def grant_next(self: Granting, one: _Set, now: Seconds) -> None:
        before = one.winner
        whole(self, one, now)
        if one.winner and one.winner != before:
            first = self.__dict__.setdefault("firsts", {})
            copy = one.holders[one.winner].copies[one.winner]
            copy.grant = first.setdefault(copy.set_index, copy.grant)

    def fence(self: Granting, one: _Set, copy: Copy) -> None:
        del self, copy
        one.winner = 0

    patch.setattr(Granting, "_grant_next", grant_next)
    patch.setattr(Granting, "_fence", fence)


def staged_somewhere(patch: Patch) -> None:
    """A replica says that every shard holds a set before all of them do."""
    whole = Tries.acknowledged

    def acknowledged(self: Tries, *, n_waiting: int) -> bool:
        return whole(self, n_waiting=max(n_waiting - 1, 0))

    patch.setattr(Tries, "acknowledged", acknowledged)


def in_order_of_arrival(patch: Patch) -> None:
    """Sets are summed as they come."""
    whole = Collecting.fold

    def fold(self: Collecting, set_index: int, grant: int) -> None:
        arrived = len(self._folded)
        whole(self, arrived, grant)
        self._folded[set_index] = self._folded.pop(arrived)

    patch.setattr(Collecting, "fold", fold)


def counted_twice(patch: Patch) -> None:
    """What is folded stays staged, and a set may be folded again."""

    def check(self: Collecting, sets: Iterable[tuple[int, int]]) -> None:
        del self, sets

    whole = Collecting.fold

    def fold(self: Collecting, set_index: int, grant: int) -> None:
        staged = self._staged[grant]
        self._staged[grant] = replace(staged, total=staged.total.copy())
        whole(self, set_index, grant)
        self._staged[grant] = replace(staged, total=staged.total.copy())

    patch.setattr(Collecting, "check", check)
    patch.setattr(Collecting, "fold", fold)
    performed_again(patch)


# ---------------------------------------------------------------------------- replicas


def any_version(patch: Patch) -> None:
    """A replica computes with whatever parameters it has fetched last."""

    def lacks(self: Parameters, tries: Tries) -> bool:
        del tries
        return not self._evaluation

    patch.setattr(Parameters, "lacks", lacks)


def sums_go_on(patch: Patch) -> None:
    """A set that is dropped half-way leaves its sum to the next."""
    whole = PortionSums.step

    def step(self: PortionSums, batch: object, *, is_first: bool, is_last: bool) -> object:
        del is_first
        return whole(self, batch, is_first=False, is_last=is_last)  # type: ignore[arg-type]

    patch.setattr(PortionSums, "step", step)


# -------------------------------------------------------------------------------- cuts


def changed_in_place(patch: Patch) -> None:
    """Vectors of a cut are not copied before they are changed."""

    def touch(self: Cuts, names: Iterable[str]) -> None:
        del self, names

    patch.setattr(Cuts, "touch", touch)


def settled_before_durable(patch: Patch) -> None:
    """A cut is settled when it is marked, before the journal of it is on disk."""
    whole = Course._mark

    def mark(self: Course, request: Iterated) -> int:
        cut = whole(self, request)
        self.settled = cut
        return cut

    patch.setattr(Course, "_mark", mark)
    whole_mark = Cuts.mark

    def mark_and_settle(self: Cuts, mark: Mark, *, settled: int) -> None:
        self._live = []
        whole_mark(self, mark, settled=settled)

    patch.setattr(Cuts, "mark", mark_and_settle)


def forgotten_too_early(patch: Patch) -> None:
    """A shard whose cut is on disk forgets the one before, wherever others are."""
    whole = Cuts.on_disk

    def on_disk(self: Cuts, cut: int) -> None:
        whole(self, cut)
        self.forget(cut)

    patch.setattr(Cuts, "on_disk", on_disk)


def same_epoch(patch: Patch) -> None:
    """A coordinator goes on after a shard was lost, as if nothing had happened."""
    whole = ShardOrders._meet

    def meet(self: ShardOrders, shard: object, incarnation: int) -> None:
        whole(self, shard, incarnation)  # type: ignore[arg-type]
        self.lost = None

    patch.setattr(ShardOrders, "_meet", meet)


def told_at_once(patch: Patch) -> None:
    """A save is told to have been made when it was asked for."""
    whole = Supervision.ask_to_save

    def ask(self: Supervision, label: str) -> None:
        whole(self, label)
        self._wishes.saves.clear()
        self._wishes.saved.append((label, None))

    patch.setattr(Supervision, "ask_to_save", ask)


VARIANTS: Final[dict[str, Variant]] = {
    "an order performed again": performed_again,
    "no epochs": no_epochs,
    "answers of any order": answers_of_any_order,
    "a winner per shard": one_grant_for_all,
    "staged somewhere": staged_somewhere,
    "in order of arrival": in_order_of_arrival,
    "counted twice": counted_twice,
    "any version": any_version,
    "sums go on": sums_go_on,
    "changed in place": changed_in_place,
    "settled before durable": settled_before_durable,
    "the same epoch": same_epoch,
    "forgotten too early": forgotten_too_early,
    "told at once": told_at_once,
}
