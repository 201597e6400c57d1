"""Rounds: when one ends, and what clients add to it that push parts of a shard."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from distbelief.core.vectors import Vector
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.ranges import IndexRanges
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.store import RoundSum
from distbelief.parameter_server.tensor_copies import Pushed
from distbelief.protocol import push_fetch as pf
from distbelief.protocol.role import Action, Address, PeerLost, Seconds, Send
from tests.distbelief.parameter_server.shard_copies import A, OneCopy


N = 192
FLOATS = np.dtype(np.float32)


def part(*ends: tuple[int, int]) -> ShardSlice:
    ranges = IndexRanges.union(IndexRanges.whole(start, stop) for start, stop in ends)
    return ShardSlice(N, dtype=FLOATS, ranges=ranges)


@pytest.mark.parametrize(
    "parts",
    [
        [part((0, 64)), part((0, 64))],
        [part((0, 64), (128, 192)), part((64, 192))],
        [part((0, 192)), part((64, 128)), part((0, 64))],
    ],
)
def test_parts_of_one_round_may_overlap(parts: list[ShardSlice]) -> None:
    """Two replicas split alike, in a round: their shards ended with "ranges overlap"."""
    policy = ExchangePolicy(round=Round(quorum=0.5), weight="mean")
    rounds = RoundSum(N, n_gradient=N, dtype=FLOATS, policy=policy)
    total, counts = np.zeros(N, FLOATS), np.zeros(N)
    for value, one in enumerate(parts, 1):
        pushed: Vector = np.full(one.n_elements, value, FLOATS)
        rounds.add_work(Pushed.of(pushed, one), shard_slice=one, touched=one, weight=1.0)()
        spread = np.zeros(N, FLOATS)
        one.scatter(pushed, spread)
        total, counts = total + spread, counts + (spread > 0)
    rounds.finish()
    assert rounds.touched is not None
    assert (rounds.touched.mask(np.arange(N + 1)) == (counts > 0)).all()
    np.testing.assert_array_equal(rounds.total, total / np.maximum(counts, 1))


@pytest.mark.parametrize("held", [ShardSlice(N, dtype=FLOATS), part((32, 96), (128, 192))])
def test_a_push_of_a_round_may_change_some_of_what_its_client_holds(held: ShardSlice) -> None:
    """What it does not change counts neither in the sum nor in the weights."""
    policy = ExchangePolicy(round=Round(quorum=0.5), weight="mean")
    rounds = RoundSum(N, n_gradient=N, dtype=FLOATS, policy=policy)
    whole = np.arange(N, dtype=FLOATS)
    ranges = part((48, 64), (160, 170))
    numbers: Vector = whole if held.ranges is None else whole[held.ranges.mask(np.arange(N + 1))]
    rounds.add_work(Pushed.of(numbers, held), shard_slice=held, touched=ranges, weight=2.0)()
    rounds.finish()
    expected = np.zeros(N, FLOATS)
    for start, stop in ((48, 64), (160, 170)):
        expected[start:stop] = whole[start:stop]
    np.testing.assert_array_equal(rounds.total, expected)


# --- when a round ends ---

GRACE: Seconds = 2.0
BEFORE: Seconds = 1e-3


class Shard:
    """One shard, whose workers are all in; it works at once."""

    def __init__(
        self,
        n_workers: int,
        *,
        quorum: float,
        early: bool = False,
        staleness: int | None = None,
        life: int = 1,
    ) -> None:
        ends = Round(quorum=quorum, grace_seconds=GRACE, early=early)
        policy = ExchangePolicy(
            send="delta", round=ends, weight="mean", every=4, staleness=staleness
        )
        self.copy = OneCopy(A, policy=policy, is_replicated=False, life=life)
        self.workers = [Address(f"worker-{n}") for n in range(n_workers)]
        self.ticks = [0] * n_workers
        for name in self.workers:
            self.copy.hello(name, tick=0)

    def push(self, *indices: int) -> list[Action]:
        actions: list[Action] = []
        for index in indices:
            self.ticks[index] += 1
            tick, name = self.ticks[index], self.workers[index]
            actions += self.copy.push(tick, sender=name, tick=tick)
        return [*actions, *self.copy.work_all()]

    def push_elsewhere(self, *indices: int) -> None:
        """End a tick whose push another shard has, and the round there waits for this shard's."""
        for index in indices:
            self.ticks[index] += 1
            self.copy.hello(self.workers[index], tick=self.ticks[index])

    def wait(self, seconds: Seconds) -> None:
        self.copy.wait(seconds)
        self.copy.work_all()

    @property
    def n_applied(self) -> float:
        return self.copy.counters()["pushes_applied"]


@pytest.mark.parametrize(
    ("n_workers", "quorum", "n_needed"),
    [
        (3, 0.5, 2),
        (3, 0.34, 2),
        (4, 0.7, 3),
        (5, 0.01, 1),
        # Products that floating point makes a little more than the number that is meant.
        (10, 0.7, 7),
        (3, 1 / 3, 1),
        (25, 0.28, 7),
    ],
)
def test_a_quorum_is_a_share_of_the_workers_and_no_less(
    n_workers: int, quorum: float, n_needed: int
) -> None:
    """Half of three workers is two: rounds of one would be half as large as was asked for."""
    shard = Shard(n_workers, quorum=quorum)
    shard.push(*range(n_needed - 1))
    shard.wait(10 * GRACE)
    assert shard.n_applied == 0
    shard.push(n_needed - 1)
    shard.wait(GRACE - BEFORE)
    assert shard.n_applied == 0
    shard.wait(2 * BEFORE)
    assert shard.n_applied == n_needed


def test_a_client_hears_that_its_push_waits_for_others() -> None:
    """It sent all of its push again after half a second, and after two."""
    shard = Shard(3, quorum=0.9)
    (ack,) = [one.message for one in shard.push(0) if isinstance(one, Send)]
    assert isinstance(ack, pf.PushBlockAck)
    assert ack.waits is True


def test_workers_that_come_before_there_is_a_floor_are_in_the_rounds_that_follow() -> None:
    """Of a shard that began in its second term each push was a round: 1, not 1/3, of its steps."""
    shard = Shard(0, quorum=0.9, life=2)
    shard.workers = [Address(f"worker-{n}") for n in range(3)]
    for name in shard.workers:
        shard.copy.hello(name, enters=True)
        shard.copy.push(1, sender=name, number=2)  # it waits for nobody, and knows no tick yet
    placed = [one.message for one in shard.copy.wait(GRACE) if isinstance(one, Send)]
    assert [one.tick for one in placed if isinstance(one, pf.SessionOpened)] == [0, 0, 0]
    shard.copy.work_all()
    assert shard.n_applied == 3
    shard.copy.push(2, sender=shard.workers[0], tick=1, number=2)
    shard.wait(10 * GRACE)
    assert shard.n_applied == 3


def test_a_round_ends_at_once_when_all_are_here() -> None:
    shard = Shard(3, quorum=0.5)
    shard.push(0, 1, 2)
    assert shard.n_applied == 3


def test_the_grace_begins_with_the_quorum_and_later_pushes_do_not_prolong_it() -> None:
    shard = Shard(4, quorum=0.5)
    shard.push(0)
    shard.wait(10 * GRACE)
    shard.push(1)
    shard.wait(GRACE / 2)
    shard.push(2)
    shard.wait(GRACE / 2 - BEFORE)
    assert shard.n_applied == 0
    shard.wait(2 * BEFORE)
    assert shard.n_applied == 3


@pytest.mark.parametrize("early", [True, False])
def test_late_workers_are_asked_once_a_round_for_what_they_have(*, early: bool) -> None:
    shard = Shard(4, quorum=0.5, early=early)
    assert not called(shard.push(0))
    assert called(shard.push(1)) == ({"worker-2": 1, "worker-3": 1} if early else {})
    assert not called(shard.push(2))
    assert not called(shard.push(3))
    assert shard.n_applied == 4
    shard.push(3)
    assert called(shard.push(2)) == ({"worker-0": 2, "worker-1": 2} if early else {})


@pytest.mark.parametrize("n_workers", [2, 3])
def test_of_two_or_three_workers_the_last_is_asked_too(n_workers: int) -> None:
    """Regression: three of four, rounded up, were all of them, and nobody was ever asked."""
    shard = Shard(n_workers, quorum=0.75, early=True)
    last = shard.push(*range(n_workers - 1))
    assert called(last) == {f"worker-{n_workers - 1}": 1}


def called(actions: Sequence[Action]) -> dict[str, int]:
    return {
        action.receiver: action.message.closes or 0
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, pf.Floor)
    }


def test_each_round_has_a_grace_of_its_own() -> None:
    """Also one whose quorum is here when the last round ends."""
    shard = Shard(4, quorum=0.5)
    shard.push(0, 1)
    shard.copy.wait(GRACE)  # the round is being added up
    shard.push(2, 3)
    assert shard.n_applied == 2
    shard.wait(GRACE - BEFORE)
    assert shard.n_applied == 2
    shard.wait(2 * BEFORE)
    assert shard.n_applied == 4


@pytest.mark.parametrize("round_seconds", [1.0, 7.0])
def test_workers_that_wait_at_another_shard_are_waited_for_as_long_as_two_rounds(
    round_seconds: Seconds,
) -> None:
    """They have ended the tick elsewhere, so this shard's round has no quorum, and never will.

    Without that time a shard would end each of its rounds with the first push that comes, as
    soon as those of the others are a little late.
    """
    shard = Shard(3, quorum=0.75)
    for _ in range(2):  # the time of a round is known with the second
        shard.push(0, 1, 2)
        shard.wait(round_seconds)
    shard.push(0, 1, 2)
    assert shard.n_applied == 9
    shard.push(0)
    shard.push_elsewhere(1, 2)
    shard.wait(GRACE + 2 * round_seconds - BEFORE)
    assert shard.n_applied == 9
    shard.wait(2 * BEFORE)
    assert shard.n_applied == 10


def test_a_worker_that_does_not_wait_elsewhere_is_waited_for_without_end() -> None:
    shard = Shard(3, quorum=0.75)
    shard.push(0, 1, 2)
    shard.push(0)
    shard.push_elsewhere(1)
    shard.wait(100 * GRACE)
    assert shard.n_applied == 3


# --- clients that come during a round ---

SECONDS: Seconds = 50.0  # of a round


def come_back(shard: Shard, name: Address, *, life: int) -> tuple[pf.Ticks, pf.Ticks]:
    """Lose a worker, which begins anew; return its tick, and the floor that it hears."""
    lost = PeerLost(peer=name, incarnation=life - 1, reason="killed")
    shard.copy._note(shard.copy.shard.handle(lost, shard.copy.now))
    actions = shard.copy.hello(name, life=life, tick=msgspec.UNSET, enters=True)
    (opened,) = [a.message for a in actions if isinstance(a, Send) and a.receiver == name]
    assert isinstance(opened, pf.SessionOpened)
    return opened.tick, opened.floor


def test_nobody_waits_for_a_worker_that_comes_late_in_a_round() -> None:
    """Of 300 of which four were lost in each round, all waited for one or another for ever."""
    shard = Shard(4, quorum=1.0, staleness=0)
    shard.wait(SECONDS)
    shard.push(0, 1, 2, 3)
    assert shard.n_applied == 4
    shard.wait(SECONDS / 2)
    assert come_back(shard, shard.workers[3], life=2) == (2, 1)
    shard.wait(SECONDS / 2)
    shard.push(0, 1)
    assert come_back(shard, shard.workers[3], life=3) == (2, 1)
    shard.push(2)
    assert shard.n_applied == 7
    assert shard.copy.counters()["floor"] == 2  # and now it may begin


def test_a_worker_that_comes_soon_takes_part_in_the_round() -> None:
    """As long as four others wait for it for less time than it would wait for them."""
    shard = Shard(4, quorum=1.0, staleness=0)
    shard.wait(SECONDS)
    shard.push(0, 1, 2, 3)
    shard.wait(SECONDS / 4 - 1.0)
    assert come_back(shard, shard.workers[3], life=2) == (1, 1)
    shard.push(0, 1, 2)
    assert shard.n_applied == 4


def test_workers_that_come_at_the_start_take_part_in_the_first_round() -> None:
    shard = Shard(2, quorum=1.0, staleness=0)
    shard.wait(SECONDS)
    late = Address("worker-late")
    shard.copy.hello(late, tick=msgspec.UNSET, enters=True)
    assert shard.copy.counters()["workers_in"] == 3
    shard.push(0, 1)
    assert shard.n_applied == 0
    assert come_back(shard, late, life=2) == (1, 0)  # it has lost what the others waited for
    shard.wait(0.0)
    assert shard.n_applied == 2


def test_workers_that_are_all_gone_begin_together() -> None:
    """After the first one, each would have waited for a round."""
    shard = Shard(3, quorum=1.0, staleness=0)
    shard.wait(SECONDS)
    shard.push(0, 1, 2)
    shard.wait(SECONDS)
    for name in shard.workers:
        lost = PeerLost(peer=name, incarnation=1, reason="killed")
        shard.copy._note(shard.copy.shard.handle(lost, shard.copy.now))
    assert [come_back(shard, name, life=2) for name in shard.workers] == [(1, 1)] * 3
