"""One rank's part of the sums of chunks, call by call."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Self, cast

import msgspec
import pytest
import torch

from distbelief.core.errors import JobError, LocalProtocolError
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.pushes import PushResult
from distbelief.protocol import GroupChunk, PushChunk, ShardVersion
from distbelief.protocol.role import Action, Address, Computed, Report
from distbelief.task.data import Samples
from distbelief.worker.batches import BatchSlice
from distbelief.worker.execution.executor import StepResult
from distbelief.worker.replica import Steps
from distbelief.worker.steps import LocalNorm
from distbelief.worker.training import PUSH, Items
from sandblaster.group_tasks import ChunkBatchPlan
from sandblaster.worker import ChunkProgram


VERSION = ShardVersion(incarnation=1, clock=7)


class Client:
    """A client of shard 1 of three; the test acknowledges its pushes."""

    def __init__(self) -> None:
        self.ready = self.can_push = True
        self.unacknowledged = 0
        self.versions: tuple[tuple[int, int], ...] = ((1, 7),)
        self.pushed: list[tuple[int, int, int]] = []
        self.staged_values: list[Sequence[torch.Tensor | None]] = []

    def draft(self) -> Self:
        return self

    def put_all(
        self, gradients: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor]
    ) -> PushResult:
        self.staged_values.append([gradients[0], values[1]])
        return PushResult(finite=True)

    def staged(
        self, outcome: PushResult, *, n_gradients: int, samples: int, commit_token: int, now: float
    ) -> list[Action]:
        del outcome, now
        self.pushed.append((n_gradients, samples, commit_token))
        self.unacknowledged += 1
        return []


class Bench:
    """A rank that holds a parameter of two elements, an average and its count."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.client = Client()
        self.plan = ChunkBatchPlan(Samples(8), mini_batch_size=2)
        sizes = [2, 1, 1] if keeps else []
        items = Items(
            values=[torch.zeros(size, dtype=torch.float64) for size in sizes],
            trained=frozenset({0}),
            counts={1: 2} if keeps else {},
        )
        if not keeps:
            self.client.versions = ()
        self.sums = ChunkProgram(
            items,
            shards=[1] if keeps else [],
            client=cast("ParameterClient", self.client),
            plan=self.plan,
            group_tasks=None,
            names=[Address("replica-0.0"), Address("replica-0.1")],
            retry_seconds=0.5,
        )
        self._life = 0

    def begin(self, attempt: int, *, evaluation: int = 1, keeps: Sequence[int] = ()) -> None:
        """Begin a generation for a chunk of two mini-batches, of 2 samples and 1."""
        self._life += 1
        chunk = GroupChunk(
            series=1,
            evaluation=evaluation,
            versions=(VERSION, VERSION, VERSION),
            attempt=attempt,
            start=0,
            stop=3,
            keeps=tuple(keeps),
        )
        self.plan.set_chunk(self._life, chunk)
        self.plan.start(0)
        self.sums.begin()

    def fetch(self) -> bool:
        for value in self.sums.values:
            value.fill_(1.0)
        return self.sums.is_fetched()

    def step(self, step: int, gradient: float, *, loss: float = 1.0) -> LocalNorm | bool:
        """Compute a mini-batch."""
        chosen = self.plan.batch(step)
        inputs = torch.full((len(chosen.indices), 1), gradient)
        portion = BatchSlice(generation=1, step=step, samples=chosen, inputs={"x": [inputs]})
        self.sums.open(step, portion)
        if self.sums.values:
            self.sums.put(0, torch.full((2,), gradient, dtype=torch.float64))
        averages = {1: torch.tensor([5.0 + step])} if self.sums.values else {}
        self.found = StepResult(loss=loss, averages=averages, outputs=[])
        vote = self.sums.close(self.found)
        assert isinstance(vote, LocalNorm | bool)
        return vote

    def closed(self) -> Sequence[Action]:
        return self.sums.closed()

    def work(self) -> list[str]:
        """Do the work between steps; return its names."""
        work = self.sums.pushes.stage()
        if work is None:
            return []
        done = Computed(name=work.name, result=work.work(), seconds=0.0)
        self.sums.push_staged(done, 0.0)
        return [work.name]

    def push(self, attempt: int, commit_token: int) -> None:
        self.sums.push(PushChunk(series=1, attempt=attempt, commit_token=commit_token))


def computed() -> Bench:
    """Return a rank that has computed attempt 4."""
    bench = Bench()
    bench.begin(4)
    assert bench.sums.lacks(0)
    assert bench.fetch()
    assert bench.step(0, 2.0) is True
    bench.closed()
    vote = bench.step(1, 3.0)
    assert isinstance(vote, LocalNorm)
    assert vote.square == 0.0
    vote.settle(0.0, None)
    return bench


def test_gradients_are_summed_and_averages_begin_as_they_were_fetched() -> None:
    bench = computed()
    bench.push(4, 50)
    assert bench.sums.has_news()
    assert not bench.sums.has_news()
    assert bench.work() == [PUSH]
    ((gradient, average),) = bench.client.staged_values
    assert gradient is not None
    assert average is not None
    assert gradient.tolist() == [5.0, 5.0]
    assert average.tolist() == [6.0]
    assert bench.sums.values[2].tolist() == [3.0]  # steps counted
    assert bench.client.pushed == [(2, 3, 50)]
    bench.begin(5)
    bench.step(0, 2.0)
    assert bench.sums.values[2].tolist() == [2.0]  # from 1, as it was fetched


def test_parameters_of_a_shard_that_was_lost_are_not_used_at_the_same_clock() -> None:
    """Its next incarnation may have published other values at the clock that the old one had."""
    bench = Bench()
    bench.begin(4)
    for versions, is_wanted in ((((2, 7),), False), (((1, 6),), False), (((1, 7),), True)):
        bench.client.versions = versions
        assert bench.fetch() is is_wanted
        assert bench.sums.lacks(0) is not is_wanted


def test_parameters_of_a_backup_that_took_over_are_used() -> None:
    bench = Bench()
    bench.begin(4)
    assert bench.plan.chunk is not None
    versions = (msgspec.structs.replace(VERSION, outlasts=True),) * 3
    bench.plan.chunk = msgspec.structs.replace(bench.plan.chunk, versions=versions)
    for fetched, is_wanted in (((2, 8), False), ((0, 7), False), ((2, 7), True), ((1, 7), True)):
        bench.client.versions = (fetched,)
        assert bench.fetch() is is_wanted


def test_a_part_is_staged_once_all_its_shards_have_acknowledged() -> None:
    bench = computed()
    bench.push(4, 50)
    bench.push(4, 50)
    bench.work()
    assert not bench.sums.pushes.has_new_staged()
    bench.push(4, 50)
    assert bench.work() == []
    bench.client.unacknowledged = 0
    assert bench.sums.pushes.has_new_staged()
    assert list(bench.sums.pushes.staged) == [50]
    bench.push(4, 50)  # asked again, when it is long done
    assert bench.work() == []
    assert not bench.sums.pushes.has_new_staged()


def test_while_it_is_laid_into_the_slots_it_is_not_pushed_again() -> None:
    bench = computed()
    bench.push(4, 50)
    work = bench.sums.pushes.stage()
    assert work is not None
    bench.push(4, 50)
    assert bench.sums.pushes.stage() is None


def test_a_generation_may_begin_while_a_sum_of_the_last_one_is_staged() -> None:
    """It was looked up again after staging: by then it was no longer named."""
    bench = computed()
    bench.push(4, 50)
    work = bench.sums.pushes.stage()
    assert work is not None
    bench.begin(5)
    done = Computed(name=work.name, result=work.work(), seconds=0.0)
    bench.sums.push_staged(done, 0.0)
    assert bench.client.pushed == [(2, 3, 50)]  # rejected there, if its token is void


def test_no_slot_no_push_and_none_at_the_end() -> None:
    bench = computed()
    bench.push(4, 50)
    bench.client.can_push = False
    assert bench.work() == []
    bench.client.can_push = True
    over = cast("Steps", SimpleNamespace(is_over=True))
    with pytest.raises(StopIteration):
        next(bench.sums.next_mini_batch(over))
    assert bench.work() == [PUSH]


def test_a_sum_that_is_not_named_any_more_is_dropped() -> None:
    bench = computed()
    bench.push(4, 50)
    bench.begin(5)
    assert bench.work() == []
    bench.push(4, 50)
    assert not bench.sums.pushes.has_work or bench.work() == []
    assert bench.sums.figures()["sets_held"] == 0.0


def test_a_named_sum_is_kept_and_idle_generations_drop_none() -> None:
    bench = computed()
    bench.begin(5, keeps=[4])
    bench.plan.set_chunk(9, None)
    bench.plan.start(0)
    bench.sums.begin()
    assert not bench.sums.lacks(0)
    bench.push(4, 50)
    assert bench.work() == [PUSH]


def test_a_dropped_step_leaves_nothing() -> None:
    bench = Bench()
    bench.begin(4)
    bench.fetch()
    bench.step(0, 2.0)
    bench.sums.drop()
    bench.begin(5)
    assert not bench.sums.lacks(0)  # parameters are those of the evaluation
    bench.step(0, 10.0)
    bench.step(1, 10.0)
    bench.sums.drop()  # the generation is over, but the sum is complete
    bench.push(5, 50)
    bench.work()
    ((gradient, _),) = bench.client.staged_values
    assert gradient is not None
    assert gradient.tolist() == [20.0, 20.0]


@pytest.mark.parametrize(("gradient", "loss"), [(math.inf, 1.0), (2.0, math.nan)])
def test_a_sum_that_is_not_finite_is_reported_with_its_sample(gradient: float, loss: float) -> None:
    bench = Bench()
    bench.begin(4)
    bench.fetch()
    bench.step(0, 1.0)
    vote = bench.step(1, gradient, loss=loss)
    assert isinstance(vote, LocalNorm)
    assert math.isnan(vote.square)
    reports = bench.closed()
    if math.isinf(gradient):  # then so is the input
        (report,) = reports
        assert isinstance(report, Report)
        assert "sample 2 has NaN or infinite values" in report.text
        bench.push(4, 50)
        assert bench.work() == []
    else:
        assert reports == []


def test_a_rank_without_items_has_nothing_to_push() -> None:
    bench = Bench(keeps=False)
    bench.begin(4)
    assert bench.fetch()
    bench.step(0, 1.0)
    bench.step(1, 1.0)
    bench.push(4, 50)
    assert bench.sums.pushes.has_new_staged()
    assert list(bench.sums.pushes.staged) == [50]


def test_unexpected_or_failed_work_is_rejected() -> None:
    bench = computed()
    with pytest.raises(LocalProtocolError, match="unexpected result of 'replica:push'"):
        bench.sums.push_staged(Computed(name=PUSH, result=None, seconds=0.0), 0.0)
    bench.push(4, 50)
    bench.sums.pushes.stage()
    bad = PushResult(finite=False, culprits=("w",))
    with pytest.raises(JobError, match="not finite when it is pushed"):
        bench.sums.push_staged(Computed(name=PUSH, result=bad, seconds=0.0), 0.0)
