"""The dealer alone: what shards have applied in, ranges out."""

import itertools
from collections.abc import Iterable

from distbelief.core.spans import Epochs, Span, Spans, of_part
from distbelief.protocol import StartTraining
from distbelief.protocol.role import Address
from distbelief.supervisor.dealer import N_BATCHES_FIRST, SETTLE_SECONDS, Dealer, Wanted
from distbelief.supervisor.membership import Kind, Membership, Presence, RoleRecord


A, B = Address("replica-0"), Address("replica-1")
SHARDS = Address("shard-0"), Address("shard-1")
ROSTER: tuple[tuple[str, Kind], ...] = (
    *((name, "shard") for name in SHARDS),
    (A, "replica"),
    (B, "replica"),
)


class Table:
    """Replicas that are present, and take what they are dealt."""

    def __init__(self, *, total: int | None = 100, epoch_share: float = 1.0) -> None:
        self.members = Membership(ROSTER)
        for record in self.members:
            record.presence = Presence.PRESENT
        epochs = Epochs(n_samples=50, batch_size=4, n_push=2)
        self.dealer = Dealer(self.members, epochs, total=total, epoch_share=epoch_share)
        self.ranges: dict[Address, list[Span]] = {A: [], B: []}

    def replica(self, name: Address) -> RoleRecord:
        record = self.members.get(name)
        assert record is not None
        return record

    def deal(
        self, name: Address, wanted: int, *, arrives: bool = True, **parts: int
    ) -> StartTraining | None:
        may = Wanted(wanted, **parts)
        message = self.dealer.deal(self.replica(name), lambda: may, repeats=True)
        if message is not None and arrives:
            held = self.ranges[name]
            assert message.n_before <= len(held)
            held += (message.ranges or ())[len(held) - message.n_before :]
            self.replica(name).counters["ranges"] = float(len(held))
        return message

    def applied(self, *spans: Span, shards: Iterable[Address] = SHARDS) -> None:
        for shard in shards:
            self.dealer.applied(shard, Spans(spans).to_wire())

    def read(self, name: Address, *, at: float) -> None:
        """This replica has pushed all that it holds."""
        record = self.replica(name)
        record.counters["ranges_done"] = float(len(self.ranges[name]))
        record.heard_at = at


def begun(*, total: int | None = 100, epoch_share: float = 1.0) -> Table:
    table = Table(total=total, epoch_share=epoch_share)
    table.applied()
    return table


def test_nothing_is_dealt_before_every_shard_has_told_what_it_has() -> None:
    table = Table()
    table.applied(shards=SHARDS[:1])
    table.deal(A, 20)
    assert table.ranges[A] == []
    table.applied((0, 16), shards=SHARDS[1:])
    table.deal(A, 20)
    assert table.ranges[A] == [(0, 16), (16, 24)]  # as one shard has none of it


def test_ranges_end_where_pushes_end() -> None:
    table = begun()
    table.deal(A, 20)
    table.deal(B, 30)
    assert table.ranges == {A: [(0, 24)], B: [(24, 50), (50, 58)]}  # one epoch each


def test_at_the_end_a_push_is_dealt_in_parts_of_whole_batches() -> None:
    table = begun()
    for name, wanted in ((A, 3), (B, 20), (A, 8)):
        table.deal(name, wanted, part_min=4)
        table.replica(name).counters["samples_ahead"] = 0.0
    # Never beyond the end of a push; the rest is dealt later, when what is left is known better.
    assert table.ranges == {A: [(0, 4), (8, 16)], B: [(4, 8)]}


def test_a_part_leaves_no_single_sample() -> None:
    """Batch normalisation cannot train on one."""
    table = begun(total=45)
    table.dealer = Dealer(
        table.members, Epochs(n_samples=9, batch_size=4, n_push=2), total=45, epoch_share=1.0
    )
    table.applied()
    table.deal(A, 8, part_min=4)
    assert table.ranges[A] == [(0, 9)]


def test_what_is_trained_and_not_applied_is_not_ahead() -> None:
    """A replica whose push waited for a round was dealt nothing, and waited too."""
    table = begun()
    table.deal(A, 8)
    assert table.deal(A, 8) is None
    table.replica(A).counters["samples_ahead"] = 0.0
    table.deal(A, 8)
    assert table.ranges[A] == [(0, 8), (8, 16)]


def test_who_pushes_nothing_is_dealt_no_more_whatever_it_says() -> None:
    """It said that it had trained all that it held, and was dealt more at each heartbeat."""
    table = begun(total=10_000)
    table.replica(A).counters["samples_ahead"] = 0.0
    for _ in range(50):
        table.deal(A, 8)
    assert sum(stop - start for start, stop in table.ranges[A]) <= 3 * 8 + 8


def test_who_trains_what_others_have_pushed_is_dealt_no_more() -> None:
    """It held what a lost one had pushed in a round, was dealt 8 steps more, and ended last."""
    table = begun()
    table.deal(A, 8)
    table.applied((0, 8))
    table.replica(A).counters["samples_ahead"] = 8.0
    assert table.deal(A, 8) is None
    table.replica(A).counters["samples_ahead"] = 4.0
    table.deal(A, 8)
    assert table.ranges[A] == [(0, 8), (8, 16)]


def test_who_holds_enough_is_dealt_no_more() -> None:
    table = begun()
    table.deal(A, 24)
    assert table.deal(A, 24) is None
    table.applied((0, 16))
    table.deal(A, 24)
    assert table.ranges[A] == [(0, 24), (24, 40)]


def test_a_replica_never_holds_more_than_twice_what_it_has_read() -> None:
    """The first one that was heard after a takeover was dealt all that was left, for 300 s.

    Then it was so at each of its heartbeats, up to 720 s.
    """
    table = begun(total=10_000)
    ends = [0]
    for _ in range(3):
        table.applied((0, ends[-1]))
        for _ in range(3):  # it reads nothing meanwhile
            table.deal(A, 10_000)
        ends.append(table.ranges[A][-1][1])
    dealt = [end - begin for begin, end in itertools.pairwise(ends)]
    assert dealt == [4 * N_BATCHES_FIRST + 2, 516, 1550]  # up to where a push ends


def test_a_replica_of_another_supervisor_proves_its_speed_anew() -> None:
    table = begun(total=10_000)
    for _ in range(3):
        table.deal(A, 10_000)
        table.applied((0, table.ranges[A][-1][1]))
    hands = table.dealer.hands
    epochs = Epochs(n_samples=50, batch_size=4, n_push=2)
    table.dealer = Dealer(table.members, epochs, total=10_000, epoch_share=1.0)
    table.dealer.adopt(hands)
    table.applied((0, table.ranges[A][-1][1]))
    n_before = len(table.ranges[A])
    table.deal(A, 10_000)
    assert (
        sum(Spans([span]).n_positions for span in table.ranges[A][n_before:]) <= 8 * N_BATCHES_FIRST
    )


def test_another_dealer_goes_on_where_this_one_was_killed() -> None:
    """It dealt anew what replicas held: they read most of two epochs twice.

    And again, of those that it had not heard before it dealt to the first one.
    """
    table = begun()
    table.deal(A, 24)
    table.deal(B, 24)
    table.replica(B).presence = Presence.LAUNCHED
    other = begun()
    other.members, other.ranges = table.members, table.ranges
    other.dealer = Dealer(
        table.members, Epochs(n_samples=50, batch_size=4, n_push=2), total=100, epoch_share=1.0
    )
    other.dealer.adopt(table.dealer.hands)
    other.applied()
    for name in (A, B):
        other.dealer.began(other.replica(name))  # which has begun already
    held = list(table.ranges[A])
    other.deal(A, 24)
    assert table.ranges[A] == held
    other.deal(A, 100)
    assert not Spans(table.ranges[A]) & Spans(table.ranges[B])
    assert Spans([*table.ranges[A], *table.ranges[B]]) == Spans([(0, 100)])


def test_what_did_not_arrive_is_dealt_again() -> None:
    table = begun()
    lost, repeated = table.deal(A, 8, arrives=False), table.deal(A, 8)
    assert lost is not None
    assert repeated is not None
    assert lost.ranges == repeated.ranges == ((0, 8),)
    assert table.deal(A, 8) is None


def test_what_a_lost_replica_held_goes_to_others() -> None:
    table = begun()
    table.deal(A, 40)
    table.applied((0, 8))
    table.replica(A).begin_incarnation(2, 0.0)
    table.deal(B, 42)
    assert table.ranges[B] == [(8, 50)]


def test_what_only_one_shard_has_is_not_done() -> None:
    table = begun()
    table.deal(A, 100)
    table.applied((0, 100), shards=SHARDS[:1])
    table.applied((0, 50), (56, 100), shards=SHARDS[1:])
    assert table.dealer.n_done == 94
    table.replica(A).silence_reported = True
    table.deal(B, 100)
    assert table.ranges[B] == [(50, 56)]


def test_what_a_shard_has_lost_is_dealt_anew() -> None:
    table = begun()
    table.deal(A, 100)
    table.applied((0, 100))
    assert table.dealer.n_done == 100
    table.deal(A, 0)
    table.dealer.lost(SHARDS[0])
    assert not table.dealer.knows_all
    table.applied((0, 40), shards=SHARDS[:1])
    table.deal(B, 100)
    assert table.ranges[B] == [(40, 50), (50, 100)]


def test_what_its_replica_has_pushed_and_a_shard_lost_is_dealt_anew() -> None:
    table = begun()
    table.deal(A, 24)
    table.read(A, at=5.0)
    table.applied((0, 16))  # the last push of the range, which was acknowledged, is lost
    table.deal(A, 8)
    assert table.ranges[A] == [(0, 24)]  # or it is only not told yet
    table.read(A, at=5.1 + SETTLE_SECONDS)
    table.deal(A, 8)
    assert table.ranges[A] == [(0, 24), (16, 24)]


def test_what_a_shard_claims_beyond_what_can_be_dealt_does_not_count() -> None:
    """With `epoch_share` the supervisor looked at each epoch up to there, for ever."""
    table = begun(total=None, epoch_share=0.9)
    table.deal(A, 8)
    table.applied((0, 8), (1 << 52, 1 << 53))
    assert table.dealer.n_done == 8
    assert table.dealer.n_left == 2 * 50 - 8
    table.applied((0, 8), (96, 1 << 53))
    assert table.dealer.n_done == 12


def test_what_was_trained_beyond_an_earlier_end_counts() -> None:
    """A run of 19,860 samples that was resumed with an end at 8,000 said that it had 8,000."""
    table = begun(total=24)
    table.applied((0, 16), (24, 40))
    assert table.dealer.n_done == 16  # it is not over, whatever shards claim
    table.applied((0, 40))
    assert [table.dealer.n_done, table.dealer.n_left] == [40, 0]


def test_a_replica_cannot_skip_what_it_was_not_dealt() -> None:
    """Then the samples of all others counted as done, and the job ended."""
    table = begun()
    table.deal(A, 24)
    table.deal(B, 8)
    table.dealer.skipped(table.replica(A), [0, 1 << 53])
    assert table.dealer.n_done == 24
    table.dealer.skipped(table.replica(B), [0, 32])
    assert table.dealer.n_done == 32


def test_skipped_samples_are_done() -> None:
    table = begun()
    table.applied((8, 100))
    table.deal(A, 8)
    table.dealer.skipped(table.replica(A), [0, 8])
    assert table.dealer.n_done == 100


def test_without_a_number_of_samples_two_epochs_are_dealt_at_most() -> None:
    table = begun(total=None)
    table.deal(A, 1000)
    assert table.ranges[A] == [(0, 50), (50, 100)]
    table.applied((0, 50))
    table.deal(A, 1000)
    assert table.ranges[A][2:] == [(100, 150)]


def test_the_rest_of_an_epoch_may_be_left_out() -> None:
    """AD-4."""
    table = begun(epoch_share=0.75)
    table.deal(A, 50)
    table.applied((0, 37))
    assert table.dealer.n_done == 37
    table.applied((0, 38))
    assert table.dealer.n_done == 50
    table.replica(A).presence = Presence.LAUNCHED
    table.deal(B, 8)
    assert table.ranges[B] == [(50, 58)]


def test_a_sample_is_done_once_every_rank_has_pushed_it_to_its_shards() -> None:
    table = Table()
    epochs = Epochs(n_samples=50, batch_size=4, n_push=2)
    parts = {SHARDS[0]: (0, 1), SHARDS[1]: (1,)}
    dealer = Dealer(table.members, epochs, total=100, epoch_share=1.0, parts=parts)
    first, second = of_part((0, 16), 0), of_part((0, 8), 1)
    dealer.applied(SHARDS[0], Spans([first, second]).to_wire())
    assert not dealer.knows_all
    dealer.applied(SHARDS[1], Spans([of_part((0, 16), 1)]).to_wire())
    assert dealer.n_done == 8
    table.dealer = dealer
    table.deal(A, 20)
    assert table.ranges[A] == [(8, 16), (16, 32)]
