"""WorkExecutors: threads that work in order, in parallel, and end."""

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from distbelief.roles.role import Compute, Computed, Event, Executor
from distbelief.transport.node import WorkExecutors, _compute


PATIENCE_SECONDS = 20.0


class Bench:
    """Executors, and a way to wait for their results."""

    def __init__(self) -> None:
        self._woken = threading.Semaphore(0)
        self._results: list[Event] = []
        self.executors = WorkExecutors("role", wake=self._woken.release)

    def compute(self, action: Compute) -> None:
        self.executors.add(action.executor, action.name, partial(_compute, action))

    def next_result(self) -> Computed:
        assert self._woken.acquire(timeout=PATIENCE_SECONDS)
        self._results += self.executors.results()
        result = self._results.pop(0)
        assert isinstance(result, Computed)
        return result


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    bench.executors.start()
    yield bench
    assert bench.executors.close(seconds_max=PATIENCE_SECONDS) == []


def test_constructing_executors_starts_no_thread() -> None:
    before = threading.active_count()
    executors = Bench().executors
    assert threading.active_count() == before
    assert executors.close(seconds_max=0.0) == []


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), KeyboardInterrupt()])
def test_what_work_raises_is_in_its_result(bench: Bench, error: BaseException) -> None:
    def fail() -> None:
        raise error

    bench.compute(Compute(name="broken", work=fail))
    result = bench.next_result()
    assert result.error is error
    assert result.result is None


def test_two_executors_work_in_parallel(bench: Bench) -> None:
    meeting = threading.Barrier(2)
    for executor in Executor:
        work = Compute(
            name=executor.value, work=lambda: meeting.wait(PATIENCE_SECONDS), executor=executor
        )
        bench.compute(work)
    names = {bench.next_result().name for _ in Executor}
    assert names == {"compute", "data"}


def test_one_executor_works_in_order_one_task_at_a_time(bench: Bench) -> None:
    busy = threading.Lock()
    order = []

    def work(index: int) -> None:
        assert busy.acquire(blocking=False)
        order.append(index)
        busy.release()

    for index in range(50):
        bench.compute(Compute(name="", work=partial(work, index)))
    errors = [bench.next_result().error for _ in range(50)]
    assert errors == [None] * 50
    assert order == list(range(50))


def test_closing_drops_what_has_not_started_and_names_what_goes_on() -> None:
    bench = Bench()
    bench.executors.start()
    started, end = threading.Event(), threading.Event()
    ran = []

    def work() -> None:
        started.set()
        assert end.wait(PATIENCE_SECONDS)

    bench.compute(Compute(name="gradient", work=work))
    bench.compute(Compute(name="never", work=lambda: ran.append(1)))
    assert started.wait(PATIENCE_SECONDS)
    assert bench.executors.close(seconds_max=0.01) == ["gradient (compute)"]
    end.set()
    assert bench.executors.close(seconds_max=PATIENCE_SECONDS) == []
    assert ran == []
