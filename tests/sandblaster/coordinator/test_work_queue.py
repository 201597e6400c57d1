"""Who computes which set, and whose result counts."""

import math

import pytest

from distbelief.protocol import ChunkResult, WorkReport
from distbelief.roles.role import Address, Received, Seconds
from sandblaster.chunks import BatchRange, ChunkSizes
from sandblaster.coordinator.config import CoordinatorConfig
from sandblaster.coordinator.finish_times import FinishTimes, Line, Slope
from sandblaster.coordinator.speed import N_DEALT_MAX, left, n_at_once, seconds_to_end
from sandblaster.coordinator.work_queue import N_VOID_MAX, ExpectedFinish, GrantNumbers, WorkQueue
from sandblaster.coordinator.workers import WorkerPool, WorkerState


A, B, C = Address("replica-a"), Address("replica-b"), Address("replica-c")
CUTTING = ChunkSizes(portion_size=10)


class Table:
    """A dealing, and replicas of known paces."""

    def __init__(
        self, *names: Address, n_sets: int = 8, window_sets: int = 64, backups: bool = True
    ) -> None:
        self.config = CoordinatorConfig(cutting=CUTTING, window_sets=window_sets, backups=backups)
        self.crew = WorkerPool(self.config)
        self.numbers = GrantNumbers()
        self.batch = BatchRange(first=0, n_examples=10 * n_sets)
        self.begin()
        for name in names:
            self.join(name)

    def begin(self) -> None:
        self.crew.begin(epoch=1, evaluation=1, versions=(), batch=self.batch)
        self.dealing = WorkQueue(
            self.config, crew=self.crew, batch=self.batch, numbers=self.numbers
        )

    def join(self, name: Address) -> None:
        account = WorkReport(epoch=0, version=0, evaluation=0, n_computed=0, results=())
        event = Received(sender=name, incarnation=1, message=account)
        member = self.crew.hear(event, account, 0.0)
        assert member is not None
        self.dealing.heard(member)

    def member(self, name: Address) -> WorkerState:
        member = self.crew.get(name)
        assert member is not None
        return member

    def deal(self, now: Seconds = 0.0) -> None:
        self.dealing.deal(now)

    def has(self, name: Address) -> list[int]:
        """Return the sets that it has to compute."""
        return [copy.set_index for copy in self.member(name).outstanding]

    def says(
        self, name: Address, *attempts: int, now: Seconds, loss: float = 1.0, staged: bool = False
    ) -> None:
        results = tuple(
            ChunkResult(attempt=attempt, n_examples=10, loss=loss, seconds=1.0, staged=staged)
            for attempt in attempts
        )
        account = WorkReport(epoch=1, version=1, evaluation=1, n_computed=10, results=results)
        self.dealing.account(self.member(name), account, now)

    def computes(self, name: Address, *, now: Seconds) -> int:
        """Let it compute what is next; return the attempt."""
        copy = self.member(name).outstanding[0]
        self.says(name, copy.attempt, now=now)
        return copy.attempt

    def granted(self, name: Address) -> list[int]:
        return [c.set_index for c in self.member(name).copies.values() if c.grant]


def test_everybody_is_dealt_one_set_to_compute_and_one_to_go_on_with() -> None:
    table = Table(A, B, n_sets=16)
    table.deal()
    assert (table.has(A), table.has(B)) == ([0, 1], [2, 3])
    assert [m.name for m in table.dealing.changed()] == [A, B]
    assert table.dealing.changed() == []
    table.computes(A, now=1.0)
    table.deal(1.0)
    assert (table.has(A), table.has(B)) == ([1, 4], [2, 3])


def test_no_set_is_dealt_beyond_the_window() -> None:
    table = Table(A, B, window_sets=2, backups=False)
    table.deal()
    assert (table.has(A), table.has(B)) == ([0, 1], [])


def test_the_first_computed_copy_is_granted_and_others_are_dropped() -> None:
    table = Table(A, B, n_sets=1)
    table.member(B).seconds_per_example = 0.1
    table.deal()
    table.deal(50.0)  # it is late: B gets a copy
    assert (table.has(A), table.has(B)) == ([0], [0])
    assert table.dealing.n_backups == 1
    attempt = table.computes(B, now=51.0)
    assert (table.granted(B), table.has(A)) == ([0], [])
    assert attempt == 2
    table.says(A, 1, now=52.0)  # too late: nothing is granted
    assert table.granted(A) == []
    assert not table.dealing.sets.has_staged
    table.says(B, attempt, now=53.0, staged=True)
    (one,), void = table.dealing.sets.to_fold()
    assert (one.set_index, one.grant, void) == (0, 1, ())
    table.dealing.sets.folded((one,), (), 53.0)
    assert table.dealing.sets.is_complete
    assert (table.dealing.sets.loss, table.dealing.sets.n_examples) == (1.0, 10)
    assert table.dealing.sets.digest == 1


def test_a_third_copy_is_never_dealt_and_a_quick_replica_needs_none() -> None:
    table = Table(A, B, C, n_sets=1)
    for name in (B, C):
        table.member(name).seconds_per_example = 0.1
    table.deal()
    table.deal(0.5)
    assert table.dealing.n_backups == 0  # A is in time
    table.deal(50.0)
    assert [len(table.has(name)) for name in (A, B, C)] == [1, 1, 0]


def test_what_a_lost_replica_had_is_dealt_again() -> None:
    table = Table(A, B, n_sets=4, backups=False)
    table.deal()
    first = table.has(A)
    table.computes(A, now=1.0)
    member = table.crew.leave(A, is_over=True)
    assert member is not None
    table.dealing.lost(member, 2.0)
    _, void = table.dealing.sets.to_fold()
    assert void == (1,)
    dealt: list[int] = []
    for _ in range(8):
        table.deal(3.0)
        if not table.has(B):
            break
        dealt.append(table.has(B)[0])
        table.computes(B, now=3.0)
    assert set(first) <= set(dealt)
    assert sorted(table.granted(B)) == [0, 1, 2, 3]


def test_a_winner_that_does_not_come_to_its_end_is_rivalled_and_fenced() -> None:
    table = Table(A, B, n_sets=1)
    table.member(B).seconds_per_example = 0.1
    table.deal()
    winner = table.computes(A, now=1.0)
    table.deal(1.0)
    table.deal(100.0)
    assert table.has(B) == [0]
    rival = table.computes(B, now=101.0)
    assert (table.granted(A), table.granted(B)) == ([], [0])
    assert table.dealing.sets.to_fold() == ((), (1,))
    table.says(A, winner, now=102.0, staged=True)  # nobody listens
    table.says(B, rival, now=103.0, staged=True)
    (one,), _ = table.dealing.sets.to_fold()
    assert one.grant == 2


def test_a_long_push_is_rivalled_less_and_less_until_it_comes_to_its_end() -> None:
    """Sets of two samples and pushes of 165 MB: a rival was always computed first.

    How long a push takes was learnt from those alone that came to their end. None did:
    so each was rivalled as soon as somebody was idle, and begun anew by the rival.
    """
    table = Table(A, B, n_sets=1)
    for name in (A, B):
        table.member(name).seconds_per_example = 0.01
    push_seconds, since, n_grants = 100.0, 0.0, 0
    for now in range(2000):
        table.deal(now)
        for name in (A, B):
            if table.has(name):
                table.computes(name, now=now)
                since, n_grants = now, n_grants + 1
        table.dealing.sets.folded(*table.dealing.sets.to_fold(), now)
        if now >= since + push_seconds:
            break
    assert n_grants <= 8


def test_towards_the_end_a_slow_one_is_dealt_nothing_that_others_do_sooner() -> None:
    table = Table(A, B, n_sets=4, backups=False)
    table.member(A).seconds_per_example = 0.1
    table.member(B).seconds_per_example = 0.5
    table.deal()
    assert (table.has(A), table.has(B)) == ([0, 1], [])
    table.computes(A, now=1.0)
    table.deal(1.0)
    assert (table.has(A), table.has(B)) == ([1, 2], [])


def test_a_slow_one_waits_while_quick_ones_have_enough_for_now() -> None:
    """One of four replicas five times slower: 1.22 of ideal, where 1.05 had been.

    For a moment it alone was hungry: so all that was left was to be done by it, and it
    was dealt its share of that.
    """
    table = Table(A, B, n_sets=6, backups=False)
    table.member(A).seconds_per_example = 0.1
    table.member(B).seconds_per_example = 0.8
    table.deal()
    table.deal()
    assert (table.has(A), table.has(B)) == ([0, 1], [])


def test_the_last_sets_are_dealt_at_once_where_idle_ones_are_many() -> None:
    """1,000 simulated replicas were no faster than 300: the last sets came singly.

    By the speed of all together a few sets are done in no time; only the quickest could
    do one whole, and took them one after the other, while the others stood idle.
    """
    names = [Address(f"replica-{index}") for index in range(40)]
    table = Table(*names, n_sets=8, backups=False)
    for index, name in enumerate(names):
        table.member(name).seconds_per_example = 0.1 + 0.01 * index
    table.deal()
    assert [name for name in names if table.has(name)] == names[:8]
    assert all(len(table.has(name)) == 1 for name in names[:8])


def test_nobody_is_late_at_first_as_long_as_one_after_the_other_comes() -> None:
    """The first evaluation of 2,000 replicas made 1,300 backups, most of them in vain.

    Parameters come to one after the other. By those who have them first, all the others
    were late. Whoever computes for the first time is late when it takes longer than the
    last one of those who have done so.
    """
    names = [Address(f"replica-{index}") for index in range(20)]
    table = Table(*names, n_sets=20)
    table.deal()
    now = 1.0
    for index, name in enumerate(names[:-1]):
        now = 1.0 + 0.3 * index
        table.says(name, table.computes(name, now=now), now=now, staged=True)
        table.deal(now)
    table.deal(1.2 * now)
    assert table.dealing.n_backups == 0
    table.deal(1.3 * now)
    assert table.dealing.n_backups == 1


def test_a_slow_one_is_dealt_what_it_can_do_in_time() -> None:
    table = Table(A, B, n_sets=12, backups=False)
    table.member(A).seconds_per_example = 0.1
    table.member(B).seconds_per_example = 0.5
    table.member(B).turnaround = 1.0  # several at once would be no waste of dealing
    table.deal()
    assert table.has(B) == [2]


def test_no_backup_is_dealt_for_a_hiccup_or_a_small_share_of_the_time() -> None:
    for late, n_backups in ((0.03, 0), (0.06, 1)):
        table = Table(A, B, n_sets=1)
        for name in (A, B):
            table.member(name).seconds_per_example = 1e-4
        table.deal()
        table.deal(late)
        assert table.dealing.n_backups == n_backups
    table = Table(A, B, n_sets=1)
    for name in (A, B):
        table.member(name).seconds_per_example = 1e-3
    table.deal()
    table.member(A).outstanding[0].dealt_at = 9.94
    table.member(A).progress_at = 9.94
    table.dealing.heard(table.member(A))
    table.deal(10.0)
    assert not table.dealing.n_backups


def test_who_waits_for_parameters_is_not_asked_at_every_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2,000 replicas spent 97 % of a core on backup tasks that none was worth.

    At the end of a batch all but a few idle. Those who had no set of it would have to
    wait for parameters first, longer than any backup may take: each of them was looked
    at for each word of anybody.
    """
    names = [Address(f"replica-{i}") for i in range(50)]
    table = Table(*names, n_sets=2)
    for name in names:
        table.member(name).seconds_per_example = 0.1
        table.member(name).lag = 100.0
        table.dealing.heard(table.member(name))
    table.deal()
    busy = [name for name in names if table.has(name)]
    for name in busy:
        table.member(name).n_sets = 1  # it has the parameters
    asked: list[WorkerState] = []
    takes = ExpectedFinish.seconds_to_begin_with

    def asks(self: ExpectedFinish, member: WorkerState, n_examples: int) -> Seconds:
        asked.append(member)
        return takes(self, member, n_examples)

    monkeypatch.setattr(ExpectedFinish, "seconds_to_begin_with", asks)
    for step in range(20):
        table.dealing.heard(table.member(busy[0]))
        table.deal(10.0 + step)
    assert table.dealing.n_backups == 0
    assert len(asked) <= 2 * 20  # the one that spoke


def test_after_a_backup_only_who_is_worth_the_next_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [Address(f"replica-{i:02d}") for i in range(50)]
    table = Table(*names, n_sets=1)
    for index, name in enumerate(names):
        table.member(name).seconds_per_example = 1.0 if index == 0 else 0.1
        table.dealing.heard(table.member(name))
    tried: list[WorkerState] = []
    backs_up = WorkQueue._backs_up

    def tries(self: WorkQueue, member: WorkerState, now: Seconds) -> bool:
        tried.append(member)
        return backs_up(self, member, now)

    monkeypatch.setattr(WorkQueue, "_backs_up", tries)
    table.deal()
    table.deal(50.0)  # who has it is late
    assert table.dealing.n_backups == 1
    assert len(tried) == 1


def test_nothing_is_granted_while_too_much_is_to_be_forgotten() -> None:
    table = Table(n_sets=1, backups=False)
    names = [Address(f"replica-{index}") for index in range(N_VOID_MAX + 1)]
    for index, name in enumerate(names):
        table.join(name)
        table.deal(float(index))
        table.computes(name, now=float(index))
        if index < N_VOID_MAX:
            assert table.granted(name) == [0]
            member = table.crew.leave(name, is_over=True)
            assert member is not None
            table.dealing.lost(member, float(index))
    assert table.granted(names[-1]) == []
    sets, void = table.dealing.sets.to_fold()
    assert (sets, len(void)) == ((), N_VOID_MAX)
    table.dealing.sets.folded(sets, void, 20.0)
    assert table.granted(names[-1]) == [0]


def test_a_loss_that_is_not_a_number_ends_it() -> None:
    table = Table(A)
    table.deal()
    table.says(A, 1, now=1.0, loss=math.nan)
    assert not table.dealing.sets.is_finite
    assert table.granted(A) == []


def test_a_sum_that_is_found_not_finite_when_it_is_pushed_ends_it_too() -> None:
    table = Table(A)
    table.deal()
    table.says(A, 1, now=1.0)
    table.says(A, 1, 99, now=2.0, loss=math.inf)
    assert not table.dealing.sets.is_finite


def test_the_next_batch_is_dealt_to_those_who_have_its_data() -> None:
    table = Table(A, B, C, n_sets=6, backups=False)
    table.numbers.owners = {0: B, 10: B, 20: A, 30: A, 40: B, 50: Address("gone")}
    table.begin()
    table.deal()
    assert (table.has(A), table.has(B), table.has(C)) == ([2], [0], [5])
    for name, expected in ((B, [1]), (A, [3]), (C, [4])):
        table.computes(name, now=1.0)
        table.deal(1.0)
        assert table.has(name) == expected


# --------------------------------------------------------------------------- estimates


def test_dealing_takes_one_percent_of_computing_at_the_most() -> None:
    member = Table(A).member(A)
    assert n_at_once(member, 1.0) == 1
    member.turnaround = 0.05
    assert n_at_once(member, 0.0) == 1
    assert n_at_once(member, 1.0) == 5
    assert n_at_once(member, 1e-3) == N_DEALT_MAX


@pytest.mark.parametrize(
    ("members", "n_sets", "seconds"),
    [
        ([(0.0, 1.0)], 4, 4.0),
        ([(0.0, 1.0), (0.0, 1.0)], 4, 2.0),
        ([(0.0, 1.0), (0.0, 0.25)], 10, 2.0),
        ([(1.0, 1.0), (0.0, 1.0)], 3, 2.0),
        ([(9.0, 1.0), (0.0, 1.0)], 3, 3.0),  # the first has enough to do
    ],
)
def test_the_end_is_where_work_and_summed_speeds_meet(
    members: list[tuple[float, float]], n_sets: int, seconds: float
) -> None:
    ranked = FinishTimes()
    for number, (begin, set_seconds) in enumerate(members):
        ranked.put(number, Line(begin), weight=1.0 / set_seconds)
    assert seconds_to_end(ranked, n_sets, 7.0) == pytest.approx(seconds)


@pytest.mark.parametrize("now", [0.7, 83_000.123, 5_000_000.3])
@pytest.mark.parametrize("slope", [-1, 0, 1])
@pytest.mark.parametrize("n_sets", range(1, 9))
def test_the_end_is_found_where_one_is_done_just_then(
    n_sets: int, slope: Slope, now: float
) -> None:
    """Rounding once let that one be counted and not, in turn, for ever: after a shard's
    death a coordinator now and then said nothing more, until it was started anew.
    """
    for set_seconds in (1e-3 * ms for ms in range(10, 100)):
        ranked = FinishTimes()
        for number, (n_left, rate) in enumerate([(n_sets, -1), (2 * n_sets, slope)]):
            line = Line(n_left * set_seconds - rate * now, rate)
            ranked.put(number, line, weight=1.0 / set_seconds)
        found = seconds_to_end(ranked, n_sets, now)
        assert found == pytest.approx(2 * n_sets * set_seconds, rel=1e-6)


def test_the_pace_of_a_newcomer_is_the_typical_one() -> None:
    table = Table(A, B, C)
    loads = ExpectedFinish(table.config, table.crew)
    loads.look(0.0)
    before = loads.is_known, loads.set_seconds(table.member(A))
    assert before == (False, 0.0)
    table.member(B).seconds_per_example = 0.2
    loads.touch(table.member(B))
    loads.look(0.0)
    assert loads.is_known
    assert loads.set_seconds(table.member(A)) == pytest.approx(2.0)


def test_a_pace_that_is_none_is_not_believed() -> None:
    member = Table(A).member(A)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        result = ChunkResult(attempt=1, n_examples=10, loss=0.0, seconds=seconds, staged=False)
        member.measured(result, elapsed=1.0)
        assert member.seconds_per_example is None


def test_the_first_set_of_an_evaluation_waits_for_the_parameters() -> None:
    table = Table(A, B, n_sets=8)
    member = table.member(A)
    table.deal()
    table.computes(A, now=3.0)  # it says 1 s of computing
    assert member.lag == 2.0
    line, _ = left(member, 0.1, 2.0, 3.0)
    assert line.at(3.0) == 1.0
    table.begin()
    table.deal(10.0)
    line, _ = left(member, 0.1, 2.0, 10.0)
    assert line.at(10.0) == 2.0 + 1.0 * len(table.has(A))


def test_what_is_late_will_take_as_long_again() -> None:
    table = Table(A, n_sets=8)
    table.member(A).seconds_per_example = 0.1
    table.deal()
    assert table.has(A) == [0, 1]
    for now, seconds, until in ((0.25, 1.75, 1.0), (1.2, 1.0, 1.25), (7.0, 8.0, math.inf)):
        line, holds_until = left(table.member(A), 0.1, 0.0, now)
        assert line.at(now) == pytest.approx(seconds)
        assert holds_until == until
