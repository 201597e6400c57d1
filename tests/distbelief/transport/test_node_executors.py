"""Lanes: threads that work in order, side by side, and end."""

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from distbelief.roles.role import Compute, Computed, Executor
from distbelief.transport.node import WorkExecutors


PATIENCE_SECONDS = 20.0


class Bench:
    """Lanes, and a way to wait for their answers."""

    def __init__(self) -> None:
        self._woken = threading.Semaphore(0)
        self.lanes = WorkExecutors("role", now=time.monotonic, wake=self._woken.release)

    def next_answer(self) -> Computed:
        assert self._woken.acquire(timeout=PATIENCE_SECONDS)
        answer = next(self.lanes.answers())
        assert isinstance(answer, Computed)
        return answer


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    bench.lanes.start()
    yield bench
    assert bench.lanes.close(seconds_max=PATIENCE_SECONDS) == []


def test_constructing_lanes_starts_no_thread() -> None:
    before = threading.active_count()
    lanes = Bench().lanes
    assert threading.active_count() == before
    assert lanes.close(seconds_max=0.0) == []


def test_an_answer_has_name_result_and_duration(bench: Bench) -> None:
    bench.lanes.compute(Compute(name="sum", work=lambda: 1 + 1))
    answer = bench.next_answer()
    assert (answer.name, answer.result, answer.error) == ("sum", 2, None)
    assert 0 <= answer.seconds < PATIENCE_SECONDS


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), KeyboardInterrupt()])
def test_what_work_raises_is_its_answer(bench: Bench, error: BaseException) -> None:
    def fail() -> None:
        raise error

    bench.lanes.compute(Compute(name="broken", work=fail))
    answer = bench.next_answer()
    assert answer.error is error
    assert answer.result is None


def test_two_lanes_work_side_by_side(bench: Bench) -> None:
    meeting = threading.Barrier(2)
    for lane in Executor:
        work = Compute(name=lane.value, work=lambda: meeting.wait(PATIENCE_SECONDS), lane=lane)
        bench.lanes.compute(work)
    names = {bench.next_answer().name for _ in Executor}
    assert names == {"compute", "data"}


def test_one_lane_works_in_order_one_piece_at_a_time(bench: Bench) -> None:
    busy = threading.Lock()
    order = []

    def work(index: int) -> None:
        assert busy.acquire(blocking=False)
        order.append(index)
        busy.release()

    for index in range(50):
        bench.lanes.compute(Compute(name="", work=partial(work, index)))
    errors = [bench.next_answer().error for _ in range(50)]
    assert errors == [None] * 50
    assert order == list(range(50))


def test_closing_drops_what_has_not_begun_and_names_what_goes_on() -> None:
    bench = Bench()
    bench.lanes.start()
    begun, end = threading.Event(), threading.Event()
    ran = []

    def work() -> None:
        begun.set()
        assert end.wait(PATIENCE_SECONDS)

    bench.lanes.compute(Compute(name="gradient", work=work))
    bench.lanes.compute(Compute(name="never", work=lambda: ran.append(1)))
    assert begun.wait(PATIENCE_SECONDS)
    assert bench.lanes.close(seconds_max=0.01) == ["gradient (compute)"]
    end.set()
    assert bench.lanes.close(seconds_max=PATIENCE_SECONDS) == []
    assert ran == []
