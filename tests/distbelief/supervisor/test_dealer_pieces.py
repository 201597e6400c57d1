"""The dealer of data in pieces: to whom they are near, and each row of an epoch once."""

from collections.abc import Sequence

import numpy as np
import pytest

from distbelief.core.pieces import PieceOrder, Pieces
from distbelief.core.spans import NOTHING, Epochs, Span, Spans
from distbelief.protocol import Heartbeat, SamplesApplied, StartTraining
from distbelief.protocol.role import Address
from distbelief.supervisor.dealer import MISSING_SECONDS_MAX, Dealer, Wanted
from distbelief.supervisor.membership import Kind, Membership, Presence, RoleRecord
from tests.distbelief.supervisor.test_supervisor import Desk, a_job, letters


SHARDS = Address("shard-0"), Address("shard-1")


class Table:
    """Replicas that train what they are dealt, and two shards that apply it, or not yet."""

    def __init__(
        self,
        rows: Sequence[int],
        places: Sequence[Sequence[int] | None],
        *,
        fetches: bool = False,
        n_epochs: float = 2.0,
        batch_size: int = 4,
    ) -> None:
        self.names = [Address(f"replica-{k}") for k in range(len(places))]
        roster: list[tuple[str, Kind]] = [(name, "shard") for name in SHARDS]
        self.members = Membership([*roster, *((name, "replica") for name in self.names)])
        named = {f"{k:03d}": n for k, n in enumerate(rows)}
        pieces = Pieces.of(named, is_placed=True, can_fetch=fetches)
        self.order, self.n = PieceOrder(pieces, seed=0), sum(rows)
        self.epochs = Epochs(n_samples=self.n, batch_size=batch_size, n_push=2, pieces=self.order)
        self.total = int(np.ceil(n_epochs * self.n))
        self.dealer = Dealer(self.members, self.epochs, total=self.total, epoch_share=1.0)
        self.held: dict[Address, list[Span]] = {name: [] for name in self.names}
        self.applied = dict.fromkeys(SHARDS, NOTHING)
        self.counts = {name: np.zeros(self.total, np.int64) for name in SHARDS}
        for name, here in zip(self.names, places, strict=True):
            self.replica(name).presence = Presence.PRESENT
            self.place(name, here)
        self.tell()

    def replica(self, name: Address) -> RoleRecord:
        record = self.members.get(name)
        assert record is not None
        return record

    def place(self, name: Address, here: Sequence[int] | None) -> None:
        self.replica(name).pieces = None if here is None else Spans((k, k + 1) for k in here)

    def tell(self) -> None:
        for shard, spans in self.applied.items():
            self.dealer.applied(shard, spans.to_wire())

    def deal(self, name: Address, wanted: int = 1000) -> list[Span]:
        record, held = self.replica(name), self.held[name]
        n_before = len(held)
        message = self.dealer.deal(record, lambda: Wanted(wanted), repeats=True)
        if message is not None:
            held += (message.ranges or ())[len(held) - message.n_before :]
            record.counters["ranges"] = float(len(held))
        self.dealer.validate()
        return held[n_before:]

    def train(self, spans: Sequence[Span], shards: Sequence[Address] = SHARDS) -> None:
        """Push these ranges; a shard leaves out a push of which it has something."""
        for start, stop in spans:
            at = start
            while at < stop:
                push = at, min(self.epochs.stop(at), stop)
                for shard in shards:
                    if not self.applied[shard].overlaps(push):
                        self.applied[shard] |= Spans([push])
                        self.counts[shard][slice(*push)] += 1
                at = push[1]

    def lose(self, name: Address) -> None:
        record = self.replica(name)
        record.begin_incarnation(record.incarnation + 1, 0.0)
        self.dealer.began(record)
        self.held[name].clear()

    def pieces(self, spans: Sequence[Span]) -> set[int]:
        return {self.order.at_position(at)[0] for span in spans for at in range(*span)}


def test_a_replica_is_dealt_what_lies_on_its_host() -> None:
    table = Table([8, 5, 12, 7], [[0, 2], [1, 3]])
    first, second = (table.deal(name) for name in table.names)
    assert table.pieces(first) == {0, 2}
    assert table.pieces(second) == {1, 3}
    assert Spans([*first, *second]) == Spans([(0, table.total)])


def test_nothing_is_dealt_before_its_pieces_are_known() -> None:
    table = Table([8, 5], [None, [0, 1]])
    assert table.deal(table.names[0]) == []
    table.place(table.names[0], [1])
    assert table.pieces(table.deal(table.names[0])) == {1}


def test_nobody_is_more_than_an_epoch_ahead() -> None:
    """Of pieces of 1 : 10 rows, the small one was trained to the end of the job at once."""
    table = Table([10, 100], [[0], [1]], n_epochs=5)
    small, large = table.names
    found = table.deal(small)
    assert Spans(found).n_positions == 2 * 10
    table.train(found)
    table.tell()
    assert table.deal(small) == []
    table.train(table.deal(large, wanted=400))
    table.tell()
    assert Spans(table.deal(small)).n_positions == 10 * (table.dealer.n_done // table.n + 2) - 20


def test_what_others_have_is_fetched_whole_from_the_end() -> None:
    table = Table([16] * 6, [range(6), []], fetches=True, n_epochs=1)
    order = [int(k) for k in table.order.at(0)[0]]
    assert table.pieces(table.deal(table.names[0], wanted=20)) == {*order[:2]}
    found = table.deal(table.names[1], wanted=24)
    assert table.pieces(found) == {*order[-2:]}
    table.train(found)
    table.tell()
    # What is left of a piece that it has comes before others.
    assert table.pieces(table.deal(table.names[1], wanted=8)) == {order[-2]}
    assert table.pieces(table.deal(table.names[0])) == {*order[1:-2]}


def test_whole_pieces_of_the_older_epoch_are_fetched_first() -> None:
    table = Table([16] * 4, [range(4), []], fetches=True)
    table.deal(table.names[0], wanted=8)
    order = [int(k) for k in table.order.at(0)[0]]
    found = table.deal(table.names[1])
    spans = [(a // 16, b // 16) for a, b in found if (b - a) == 16]
    assert [a for a, _ in spans] == [3, 2, 1, 7, 6, 5, 4]
    assert found[-1] == (8, 16)
    assert table.order.at_position(8)[0] == order[0]


def test_two_that_fetch_take_different_pieces() -> None:
    table = Table([16] * 4, [[], []], fetches=True, n_epochs=1)
    first, second = (table.deal(name, wanted=8) for name in table.names)
    assert not table.pieces(first) & table.pieces(second)


def test_the_pieces_of_a_lost_host_go_to_another_that_has_them() -> None:
    table = Table([8, 9], [[0, 1], [1]], n_epochs=1)
    dealt = table.deal(table.names[0])
    assert table.deal(table.names[1]) == []
    table.train(dealt[:1], SHARDS[:1])
    table.tell()
    table.lose(table.names[0])
    assert table.pieces(table.deal(table.names[1])) == {1}
    assert table.dealer.missing(0.0) == ((), 0.0)  # the lost one is on its way
    table.replica(table.names[0]).presence = Presence.LEFT_OUT
    assert table.dealer.missing(0.0) == (("000",), 0.0)


def test_all_wait_for_what_nobody_has() -> None:
    table = Table([8, 9], [[1]], n_epochs=2)
    found = table.deal(table.names[0])
    assert table.dealer.missing(10.0) == (("000",), 0.0)
    table.train(found)
    table.tell()
    table.deal(table.names[0])
    assert table.dealer.missing(20.0) == (("000",), 0.0)
    assert table.dealer.missing(90.0) == (("000",), 70.0)
    table.place(table.names[0], [0, 1])
    assert table.dealer.missing(91.0) == ((), 0.0)
    table.train(table.deal(table.names[0]))
    table.tell()
    assert table.dealer.n_left == 0
    assert MISSING_SECONDS_MAX < 70.0


def test_a_replica_of_several_ranks_is_dealt_what_all_of_them_read() -> None:
    table = Table([8, 9, 10], [[0, 1, 2]])
    roster: list[tuple[str, Kind]] = [
        *((name, "shard") for name in SHARDS),
        ("replica-0", "replica"),
        ("replica-0.1", "rank"),
    ]
    members = table.members = Membership(roster)
    table.dealer = Dealer(members, table.epochs, total=table.total, epoch_share=1.0)
    table.tell()
    first, second = members.get(table.names[0]), members.get(Address("replica-0.1"))
    assert first is not None
    assert second is not None
    first.presence = second.presence = Presence.PRESENT
    first.ranks = second.ranks = 2
    first.pieces = Spans([(0, 2)])
    assert table.deal(first.name) == []
    second.pieces = Spans([(1, 3)])
    assert table.pieces(table.deal(first.name)) == {1}


@pytest.mark.parametrize("seed", range(60))
def test_each_row_counts_once_whoever_comes_and_goes(seed: int) -> None:
    stream = np.random.default_rng(seed)
    n_pieces, n_replicas = int(stream.integers(1, 7)), int(stream.integers(1, 5))
    rows = [int(stream.choice([0, 1, 2, 5, 9, 50])) for _ in range(n_pieces)]
    rows[0] += not sum(rows)
    fetches = bool(stream.integers(2))

    def here() -> list[int]:
        return [k for k in range(n_pieces) if stream.random() < 0.5]

    places = [here() for _ in range(n_replicas)]
    table = Table(
        rows,
        places,
        fetches=fetches,
        n_epochs=float(stream.choice([1, 2, 3.5])),
        batch_size=int(stream.integers(1, 6)),
    )
    places_of = dict(zip(table.names, places, strict=True))
    wrong: list[Span] = []
    for _ in range(60):
        name = table.names[int(stream.integers(n_replicas))]
        found = table.deal(name, wanted=int(stream.integers(1, 40)))
        if not fetches:
            wrong += [span for span in found if table.pieces([span]) - {*places_of[name]}]
        held = table.held[name]
        some = [held[int(k)] for k in stream.integers(len(held), size=2)] if held else []
        table.train(some, [SHARDS[k] for k in range(2) if stream.random() < 0.7])
        if stream.random() < 0.5:
            table.tell()
        if stream.random() < 0.2:
            table.lose(name)
            table.replica(name).presence = Presence.PRESENT
            places_of[name] = here()
            table.place(name, places_of[name])
    assert not wrong
    table.lose(table.names[0])  # all others are gone, and it can read all
    for name in table.names:
        table.replica(name).presence = Presence.LEFT_OUT
    table.replica(table.names[0]).presence = Presence.PRESENT
    table.place(table.names[0], range(n_pieces))
    while table.dealer.n_left:
        found = table.deal(table.names[0])
        assert found
        table.train(found)
        table.tell()
    for shard in SHARDS:
        assert (table.counts[shard] == 1).all()


def a_job_of(rows: Sequence[int]) -> Desk:
    """Return a job of two replicas and shards, which begin, and have applied nothing."""
    named = {f"{k:03d}": n for k, n in enumerate(rows)}
    order = PieceOrder(Pieces.of(named, is_placed=True, can_fetch=False), seed=0)
    epochs = Epochs(n_samples=sum(rows), batch_size=10, pieces=order)
    desk = a_job(dealt=epochs, batch_size=10)
    desk.join()
    for shard in SHARDS:
        desk.hear(shard, SamplesApplied(spans=()))
    return desk


def has(desk: Desk, name: str, *pieces: int) -> list[Span]:
    """This replica says which ranges of pieces are on its host; return what it is dealt."""
    found = desk.hear(name, Heartbeat(state="busy", counters={}, pieces=pieces))
    return [span for _, begin in letters(found, StartTraining) for span in begin.ranges or ()]


def test_heartbeats_say_which_pieces_are_on_a_host() -> None:
    desk = a_job_of([40, 40])
    desk.beat("replica-0")
    assert has(desk, "replica-0", 0, 1)
    assert has(desk, "replica-1", 1, 2)
    desk.pass_time(2.0)
    assert not any("no host" in text for text in desk.told)


def test_the_job_says_which_pieces_no_host_has_and_ends() -> None:
    rows = [40] * 8
    desk = a_job_of(rows)
    beats = ("shard-0", "shard-1", "evaluator")
    dealt = [*has(desk, "replica-0", 0, 1), *has(desk, "replica-1", 1, 2)]
    assert Spans(dealt).n_positions == 2 * 80
    desk.pass_time(2.0, beats=[*beats, "replica-0", "replica-1"])
    missing = ", ".join(f"'00{k}'" for k in range(2, 7))
    text = f"no host that takes part has piece {missing}, ... (6 in all): going on with the"
    assert sum(text in told for told in desk.told) == 1
    for shard in SHARDS:
        desk.hear(shard, SamplesApplied(spans=Spans(dealt).to_wire()))
    desk.pass_time(MISSING_SECONDS_MAX - 1.0, beats=[*beats, "replica-0", "replica-1"])
    before = desk.view.error
    assert before is None
    desk.pass_time(3.0, beats=[*beats, "replica-0", "replica-1"])
    assert desk.view.error is not None
    assert desk.view.error.startswith(f"no host has piece {missing}, ... (6 in all), and all")
