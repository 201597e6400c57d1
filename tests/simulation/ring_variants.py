"""The ring, broken on purpose: each variant leaves out one rule."""

from dataclasses import replace
from typing import Final

import msgspec
import numpy as np

from distbelief.core.reliable import Window
from distbelief.core.vectors import Vector
from distbelief.protocol.ring import RingAck, RingBlock
from distbelief.protocol.role import Action, Address, Received, Seconds
from distbelief.simulation.faults import Delay, Drop, Duplicate
from distbelief.worker.ring import Ring, RingMessage, _Round
from tests.simulation.random_faults import random_faults
from tests.simulation.rings import RingScene
from tests.simulation.variants import Patch, Variants, Whole


HORIZON: Final = 0.3  # seconds of faults of members
MESSAGES: Final = 5.0  # seconds in which links are bad
VARIANTS: Final = Variants[int]()


def drawn(seed: int) -> RingScene:
    """Return a scene with faults of every kind."""
    n_members = 2 + seed % 4
    names = [Address(f"replica-{k}") for k in range(n_members)]
    faults = random_faults(seed, names, horizon=HORIZON, intensity=1.5)
    late = (
        Drop(probability=0.1, seconds=MESSAGES),
        Duplicate(probability=0.2, seconds_max=0.1, seconds=MESSAGES),
        Delay(probability=0.1, seconds_max=0.1, overtaken=bool(seed % 2), seconds=MESSAGES),
    )
    scene = RingScene(n_members=n_members, n_elements=700, n_rounds=6, seed=seed)
    return replace(scene, faults=(*faults, *late))


def play(seed: int) -> None:
    drawn(seed).finish()


@VARIANTS.replacing(Ring, "receive", caught_by=1)
def late_messages_count(
    whole: Whole[list[Action]], self: Ring, event: Received, message: RingMessage, now: Seconds
) -> list[Action]:
    """A message of another generation is taken for one of this generation."""
    return whole(self, event, msgspec.structs.replace(message, generation=self.generation), now)


@VARIANTS.replacing(Ring, "_arrived", caught_by=0)
def repeated_blocks_are_added_again(
    whole: Whole[list[Action]], self: Ring, message: RingBlock, now: Seconds
) -> list[Action]:
    run = self._run
    is_again = run is not None and 0 < message.index + 1 == run.n_taken < len(run.received)
    if is_again and run is not None and message.round == self.round:
        piece = run.received[message.index]
        if piece.step < run.n_members - 1:
            room = run.values[piece.start : piece.stop]
            np.add(room, message.values, out=room)
    return whole(self, message, now)


@VARIANTS.replacing(Ring, "_arrived", caught_by=0)
def a_gap_is_not_noticed(
    whole: Whole[list[Action]], self: Ring, message: RingBlock, now: Seconds
) -> list[Action]:
    run = self._run
    if run is not None and not run.is_complete and message.index > run.n_taken:
        message = msgspec.structs.replace(message, index=run.n_taken)
    return whole(self, message, now)


@VARIANTS(caught_by=0)
def a_round_begins_before_the_last_is_settled(patch: Patch) -> None:
    patch.setattr(_Round, "is_settled", _Round.is_complete)


@VARIANTS(caught_by=0)
def blocks_are_sent_once(patch: Patch) -> None:
    patch.setattr(Window, "again", lambda _: None)


@VARIANTS(caught_by=1)
def blocks_are_passed_on_before_they_have_come(patch: Patch) -> None:
    def begin(self: _Round) -> None:
        n_own = sum(piece.step < 0 for piece in self.sent)
        self.window = Window(min(n_own + 1, len(self.sent)))

    patch.setattr(_Round, "__post_init__", begin)


@VARIANTS.replacing(Ring, "begin", caught_by=0)
def blocks_that_came_early_are_dropped(
    whole: Whole[list[Action]], self: Ring, values: Vector, now: Seconds
) -> list[Action]:
    self._early.clear()
    return whole(self, values, now)


@VARIANTS(caught_by=0)
def the_whole_sum_is_added_too(patch: Patch) -> None:
    def take(self: _Round, message: RingBlock) -> bool:
        piece = self.received[self.n_taken]
        room = self.values[piece.start : piece.stop]
        with np.errstate(all="ignore"):
            np.add(message.values, room, out=room)
        self.n_taken += 1
        self.window.n = min(self.window.n + 1, len(self.sent))
        return True

    patch.setattr(_Round, "take", take)


@VARIANTS(caught_by=0)
def lost_acknowledgements_stay_lost(patch: Patch) -> None:
    """Neither the timer repeats them, nor are repeated blocks acknowledged."""
    arrived, woke = Ring._arrived, Ring.woke

    def without_acks(actions: list[Action]) -> list[Action]:
        return [one for one in actions if not isinstance(getattr(one, "message", None), RingAck)]

    def arrived_once(self: Ring, message: RingBlock, now: Seconds) -> list[Action]:
        n_acks = self._incoming, len(self._early), self._run and self._run.n_taken
        actions = arrived(self, message, now)
        is_new = n_acks != (self._incoming, len(self._early), self._run and self._run.n_taken)
        return actions if is_new else without_acks(actions)

    patch.setattr(Ring, "_arrived", arrived_once)
    patch.setattr(Ring, "woke", lambda self, now: without_acks(woke(self, now)))
