"""Which worker computes which chunk, and whose result counts."""

import math

import pytest
from hypothesis import given, strategies as st

from distbelief.protocol import ChunkResult, WorkReport
from distbelief.protocol.role import Address, Received, Seconds
from sandblaster.chunks import ChunkSizes
from sandblaster.coordinator.work_queue import (
    N_ASSIGNED_MAX,
    N_VOID_MAX,
    SeriesCounters,
    WorkQueue,
    end_divided,
    end_undivided,
)
from sandblaster.coordinator.workers import CoordinatorConfig, WorkerPool, WorkerState


A, B, C = Address("replica-a"), Address("replica-b"), Address("replica-c")
CHUNK_SIZES = ChunkSizes(mini_batch_size=10)


class Table:
    """A work queue, and workers of known paces."""

    def __init__(
        self, *names: Address, n_chunks: int = 8, window_chunks: int = 64, backups: bool = True
    ) -> None:
        self.config = CoordinatorConfig(
            chunk_sizes=CHUNK_SIZES, window_chunks=window_chunks, backups=backups
        )
        self.pool = WorkerPool(self.config)
        self.counters = SeriesCounters()
        self.n_examples = 10 * n_chunks
        self.begin()
        for name in names:
            self.join(name)

    def begin(self) -> None:
        self.pool.begin(series=1, evaluation=1, versions=(), n_examples=self.n_examples)
        self.queue = WorkQueue(
            self.config, pool=self.pool, n_examples=self.n_examples, counters=self.counters
        )

    def join(self, name: Address) -> None:
        report = WorkReport(series=0, version=0, evaluation=0, n_computed=0, results=())
        event = Received(sender=name, incarnation=1, message=report)
        worker = self.pool.take_report(event, report, 0.0)
        assert worker is not None
        self.queue.touch(worker)

    def worker(self, name: Address) -> WorkerState:
        worker = self.pool.get(name)
        assert worker is not None
        return worker

    def assign(self, now: Seconds = 0.0) -> None:
        self.queue.assign(now)

    def has(self, name: Address) -> list[int]:
        """Return the chunks that it has to compute."""
        return [one.chunk.index for one in self.worker(name).outstanding.values()]

    def says(
        self,
        name: Address,
        *attempts: int,
        now: Seconds,
        loss: float = 1.0,
        staged: bool = False,
        seconds: float = 1.0,
    ) -> None:
        results = tuple(
            ChunkResult(attempt=attempt, n_examples=10, loss=loss, seconds=seconds, staged=staged)
            for attempt in attempts
        )
        report = WorkReport(series=1, version=1, evaluation=1, n_computed=10, results=results)
        self.queue.take_report(self.worker(name), report, now)

    def computes(self, name: Address, *, now: Seconds) -> int:
        """Let it compute what is next; return the attempt."""
        attempt = next(iter(self.worker(name).outstanding))
        self.says(name, attempt, now=now)
        return attempt

    def granted(self, name: Address) -> list[int]:
        return [a.chunk.index for a in self.worker(name).attempts.values() if a.commit_token]


def test_every_worker_gets_one_chunk_to_compute_and_one_in_reserve() -> None:
    table = Table(A, B, n_chunks=16)
    table.assign()
    assert (table.has(A), table.has(B)) == ([0, 1], [2, 3])
    assert [m.name for m in table.queue.changed()] == [A, B]
    assert table.queue.changed() == []
    table.computes(A, now=1.0)
    table.assign(1.0)
    assert (table.has(A), table.has(B)) == ([1, 4], [2, 3])


def test_no_chunk_is_assigned_beyond_the_window() -> None:
    table = Table(A, B, window_chunks=2, backups=False)
    table.assign()
    assert (table.has(A), table.has(B)) == ([0, 1], [])


def test_the_first_computed_copy_gets_the_token_and_others_are_dropped() -> None:
    table = Table(A, B, n_chunks=1)
    table.worker(B).seconds_per_example = 0.1
    table.assign()
    table.assign(50.0)  # it is late: B gets a copy
    assert (table.has(A), table.has(B)) == ([0], [0])
    assert table.queue.n_backups == 1
    attempt = table.computes(B, now=51.0)
    assert (table.granted(B), table.has(A)) == ([0], [])
    assert attempt == 2
    table.says(A, 1, now=52.0)  # too late: no token is issued
    assert table.granted(A) == []
    assert not table.queue.has_staged
    table.says(B, attempt, now=53.0, staged=True)
    (one,), void = table.queue.to_commit()
    assert (one.chunk_index, one.commit_token, void) == (0, 1, ())
    table.queue.committed((one,), (), 53.0)
    assert table.queue.is_complete
    assert (table.queue.loss, table.queue.n_examples) == (1.0, 10)
    assert table.queue.digest == 1


def test_no_chunk_has_three_copies_and_a_fast_worker_needs_no_backup() -> None:
    table = Table(A, B, C, n_chunks=1)
    for name in (B, C):
        table.worker(name).seconds_per_example = 0.1
    table.assign()
    table.assign(0.5)
    assert table.queue.n_backups == 0  # A is in time
    table.assign(50.0)
    assert [len(table.has(name)) for name in (A, B, C)] == [1, 1, 0]


def test_chunks_of_a_lost_replica_are_assigned_again() -> None:
    table = Table(A, B, n_chunks=4, backups=False)
    table.assign()
    first = table.has(A)
    table.computes(A, now=1.0)
    worker = table.pool.remove(A, is_over=True)
    assert worker is not None
    table.queue.lost(worker, 2.0)
    _, void = table.queue.to_commit()
    assert void == (1,)
    dealt: list[int] = []
    for _ in range(8):
        table.assign(3.0)
        if not table.has(B):
            break
        dealt.append(table.has(B)[0])
        table.computes(B, now=3.0)
    assert set(first) <= set(dealt)
    assert sorted(table.granted(B)) == [0, 1, 2, 3]


def test_a_winner_that_does_not_come_to_its_end_is_rivalled_and_fenced() -> None:
    table = Table(A, B, n_chunks=1)
    table.worker(B).seconds_per_example = 0.1
    table.assign()
    winner = table.computes(A, now=1.0)
    table.assign(1.0)
    table.assign(100.0)
    assert table.has(B) == [0]
    rival = table.computes(B, now=101.0)
    assert (table.granted(A), table.granted(B)) == ([], [0])
    assert table.queue.to_commit() == ((), (1,))
    table.says(A, winner, now=102.0, staged=True)  # the report is ignored
    table.says(B, rival, now=103.0, staged=True)
    (one,), _ = table.queue.to_commit()
    assert one.commit_token == 2


def test_a_long_push_is_rivalled_less_and_less_until_it_comes_to_its_end() -> None:
    """Chunks of two samples and pushes of 165 MB: a rival was always computed first.

    How long a push takes was learnt from those alone that came to their end. None did:
    so each was rivalled as soon as a worker was idle, and restarted by the rival.
    """
    table = Table(A, B, n_chunks=1)
    for name in (A, B):
        table.worker(name).seconds_per_example = 0.01
    push_seconds, since, n_grants = 100.0, 0.0, 0
    for now in range(2000):
        table.assign(now)
        for name in (A, B):
            if table.has(name):
                table.computes(name, now=now)
                since, n_grants = now, n_grants + 1
        table.queue.committed(*table.queue.to_commit(), now)
        if now >= since + push_seconds:
            break
    assert n_grants <= 8


def test_near_the_end_a_slow_worker_gets_no_chunk_that_others_finish_sooner() -> None:
    table = Table(A, B, n_chunks=4, backups=False)
    table.worker(A).seconds_per_example = 0.1
    table.worker(B).seconds_per_example = 0.5
    table.assign()
    assert (table.has(A), table.has(B)) == ([0, 1], [])
    table.computes(A, now=1.0)
    table.assign(1.0)
    assert (table.has(A), table.has(B)) == ([1, 2], [])


def test_a_slow_one_waits_while_quick_ones_have_enough_for_now() -> None:
    """One of four replicas five times slower: 1.22 of ideal, where 1.05 had been.

    For a moment it alone was hungry: so all that was left was to be done by it, and it
    was assigned its share of that.
    """
    table = Table(A, B, n_chunks=6, backups=False)
    table.worker(A).seconds_per_example = 0.1
    table.worker(B).seconds_per_example = 0.8
    table.assign()
    table.assign()
    assert (table.has(A), table.has(B)) == ([0, 1], [])


def test_the_last_chunks_go_out_at_once_to_many_idle_workers() -> None:
    """1,000 simulated replicas were no faster than 300: the last chunks came one by one.

    By the speed of all together a few chunks are done in no time; only the fastest could
    do one whole, and took them one after the other, while the others stood idle.
    """
    names = [Address(f"replica-{index}") for index in range(40)]
    table = Table(*names, n_chunks=8, backups=False)
    for index, name in enumerate(names):
        table.worker(name).seconds_per_example = 0.1 + 0.01 * index
    table.assign()
    assert [name for name in names if table.has(name)] == names[:8]
    assert all(len(table.has(name)) == 1 for name in names[:8])


def test_no_worker_is_late_while_parameters_arrive_one_by_one() -> None:
    """The first evaluation of 2,000 replicas made 1,300 backups, most of them in vain.

    Parameters come to one after the other. Measured by the first workers, all the others
    were late. A worker that computes for the first time is late when it takes longer than the
    last worker that has computed.
    """
    names = [Address(f"replica-{index}") for index in range(20)]
    table = Table(*names, n_chunks=20)
    table.assign()
    now = 1.0
    for index, name in enumerate(names[:-1]):
        now = 1.0 + 0.3 * index
        table.says(name, table.computes(name, now=now), now=now, staged=True)
        table.assign(now)
    table.assign(1.2 * now)
    assert table.queue.n_backups == 0
    table.assign(1.3 * now)
    assert table.queue.n_backups == 1


def test_a_slow_worker_gets_what_it_can_finish_in_time() -> None:
    table = Table(A, B, n_chunks=12, backups=False)
    table.worker(A).seconds_per_example = 0.1
    table.worker(B).seconds_per_example = 0.5
    table.worker(B).turnaround = 1.0  # several at once would save assignments
    table.assign()
    assert table.has(B) == [2]


def test_no_backup_for_a_hiccup_or_a_small_share_of_the_time() -> None:
    for late, n_backups in ((0.03, 0), (0.06, 1)):
        table = Table(A, B, n_chunks=1)
        for name in (A, B):
            table.worker(name).seconds_per_example = 1e-4
        table.assign()
        table.assign(late)
        assert table.queue.n_backups == n_backups
    table = Table(A, B, n_chunks=1)
    for name in (A, B):
        table.worker(name).seconds_per_example = 1e-3
    table.assign()
    next(iter(table.worker(A).outstanding.values())).assigned_at = 9.94
    table.worker(A).progress_at = 9.94
    table.queue.touch(table.worker(A))
    table.assign(10.0)
    assert not table.queue.n_backups
    table = Table(A, B, n_chunks=1)
    for now in (0.0, 100.0):
        table.assign(now)
    assert not table.queue.n_backups  # how long a chunk takes is not known


def test_many_workers_are_not_all_looked_at_for_every_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2,000 replicas spent 97 % of a core on backup tasks that none was worth."""
    names = [Address(f"replica-{i}") for i in range(200)]
    table = Table(*names, n_chunks=20)
    for name in names:
        table.worker(name).seconds_per_example = 0.1
        table.worker(name).lag = 100.0
    table.assign()
    busy = [name for name in names if table.has(name)]
    assert len(busy) == 20
    for name in busy:
        table.worker(name).n_chunks = 1  # it has the parameters
    looked_at: list[WorkerState] = []
    left = WorkQueue._seconds_left

    def looks(self: WorkQueue, worker: WorkerState, now: Seconds) -> Seconds:
        looked_at.append(worker)
        return left(self, worker, now)

    monkeypatch.setattr(WorkQueue, "_seconds_left", looks)
    for step in range(20):
        table.says(busy[0], now=10.0 + step)
        table.assign(10.0 + step)
    assert not looked_at
    table.queue.rank()
    table.assign(40.0)
    assert table.queue.n_backups == 0
    assert len(looked_at) == len(busy)


def test_no_token_is_issued_while_too_many_are_void() -> None:
    table = Table(n_chunks=1, backups=False)
    names = [Address(f"replica-{index}") for index in range(N_VOID_MAX + 1)]
    for index, name in enumerate(names):
        table.join(name)
        table.assign(float(index))
        table.computes(name, now=float(index))
        if index < N_VOID_MAX:
            assert table.granted(name) == [0]
            worker = table.pool.remove(name, is_over=True)
            assert worker is not None
            table.queue.lost(worker, float(index))
    assert table.granted(names[-1]) == []
    sets, void = table.queue.to_commit()
    assert (sets, len(void)) == ((), N_VOID_MAX)
    table.queue.committed(sets, void, 20.0)
    assert table.granted(names[-1]) == [0]


def test_a_loss_that_is_not_a_number_ends_it() -> None:
    table = Table(A)
    table.assign()
    table.says(A, 1, now=1.0, loss=math.nan)
    assert not table.queue.is_finite
    assert table.granted(A) == []


def test_a_sum_that_is_found_not_finite_when_it_is_pushed_ends_it_too() -> None:
    table = Table(A)
    table.assign()
    table.says(A, 1, now=1.0)
    table.says(A, 1, 99, now=2.0, loss=math.inf)
    assert not table.queue.is_finite


def test_the_next_batch_goes_to_the_workers_that_have_its_data() -> None:
    table = Table(A, B, C, n_chunks=6, backups=False)
    table.counters.owners = {0: B, 10: B, 20: A, 30: A, 40: B, 50: Address("gone")}
    table.begin()
    table.assign()
    assert (table.has(A), table.has(B), table.has(C)) == ([2], [0], [5])
    for name, expected in ((B, [1]), (A, [3]), (C, [4])):
        table.computes(name, now=1.0)
        table.assign(1.0)
        assert table.has(name) == expected


# --- estimates ---


def test_assigning_takes_one_percent_of_computing_at_most() -> None:
    table = Table(A)
    worker = table.worker(A)
    worker.seconds_per_example = 0.1
    assert table.queue._n_at_once(worker) == 1
    worker.turnaround = 0.05
    assert table.queue._n_at_once(worker) == 5
    worker.seconds_per_example = 1e-4
    assert table.queue._n_at_once(worker) == N_ASSIGNED_MAX


SECONDS = st.integers(0, 80).map(lambda n: n / 8)
BUSY = st.lists(st.tuples(SECONDS, SECONDS.map(lambda s: s + 0.125)), min_size=1, max_size=12)


@given(BUSY, st.integers(1, 60))
def test_the_end_is_where_work_and_summed_speeds_meet(
    workers: list[tuple[float, float]], n_chunks: int
) -> None:
    end = end_divided(workers, n_chunks)
    assert sum(max(0.0, end - left) / s for left, s in workers) == pytest.approx(n_chunks)


@given(BUSY, st.integers(1, 40))
def test_undivided_chunks_go_to_whom_is_free_first(
    workers: list[tuple[float, float]], n_chunks: int
) -> None:
    ends = sorted(left + k * s for left, s in workers for k in range(1, n_chunks + 1))
    assert end_undivided(workers, n_chunks) == pytest.approx(ends[n_chunks - 1])
    assert end_undivided(workers, 10_000) == 0.0  # too many to look at


@pytest.mark.parametrize("n_workers", [8, 100])
def test_a_batch_takes_as_long_as_summed_speeds_allow(n_workers: int) -> None:
    """Many workers, which are not ranked at every event, do as well as few."""
    names = [Address(f"replica-{index:03d}") for index in range(n_workers)]
    table = Table(*names, n_chunks=20 * n_workers, window_chunks=2 * n_workers)
    takes = {name: 0.5 + 1.5 * (index % 7) / 7 for index, name in enumerate(names)}
    table.assign()
    now, ticked_at, ends = 0.0, 0.0, dict[Address, Seconds]()
    while not table.queue.is_complete:
        for name in names:
            if table.has(name):
                ends.setdefault(name, now + takes[name])
            else:
                ends.pop(name, None)
        name = min(ends, key=lambda name: ends[name])
        now = min(ends[name], ticked_at + 0.25)
        if now < ends[name]:
            ticked_at = now
            table.queue.rank()
        else:
            del ends[name]
            attempt = next(iter(table.worker(name).outstanding))
            for staged in (False, True):
                table.says(name, attempt, now=now, seconds=takes[name], staged=staged)
            table.queue.committed(*table.queue.to_commit(), now)
        table.assign(now)
    ideal = 20 * n_workers / sum(1.0 / seconds for seconds in takes.values())
    assert now < ideal + 1.2 * max(takes.values())


def test_the_pace_of_a_newcomer_is_the_typical_one() -> None:
    table = Table(A, B, C, n_chunks=1)
    table.assign()
    assert table.queue._chunk_seconds(table.worker(A)) == 0.0
    measured = ChunkResult(attempt=1, n_examples=10, loss=0.0, seconds=2.0, staged=False)
    table.pool.record(table.worker(B), measured, elapsed=2.0)
    table.assign()
    assert table.queue._chunk_seconds(table.worker(A)) == pytest.approx(2.0)


def test_a_pace_that_is_none_is_not_believed() -> None:
    table = Table(A)
    worker = table.worker(A)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        result = ChunkResult(attempt=1, n_examples=10, loss=0.0, seconds=seconds, staged=False)
        table.pool.record(worker, result, elapsed=1.0)
        assert worker.seconds_per_example is None
        assert not worker.spent


def test_the_first_chunk_of_an_evaluation_waits_for_the_parameters() -> None:
    table = Table(A, B, n_chunks=8)
    worker = table.worker(A)
    table.assign()
    table.computes(A, now=3.0)  # it reports 1 s of computing
    assert worker.lag == 2.0
    assert table.queue._seconds_left(worker, 3.0) == 1.0
    table.begin()
    table.assign(10.0)
    assert table.queue._seconds_left(worker, 10.0) == 2.0 + 1.0 * len(table.has(A))


def test_what_is_late_will_take_as_long_again() -> None:
    table = Table(A, n_chunks=8)
    table.worker(A).seconds_per_example = 0.1
    table.assign()
    assert table.has(A) == [0, 1]
    for now, seconds in ((0.25, 1.75), (1.2, 1.0), (7.0, 8.0)):
        assert table.queue._seconds_left(table.worker(A), now) == pytest.approx(seconds)
