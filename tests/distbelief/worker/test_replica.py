"""The replica's state machine: events in, actions out."""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from typing_extensions import override

from distbelief import protocol as wire
from distbelief.core.errors import JobError, RemoteProtocolError
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.rules import SGD
from distbelief.protocol.role import Action, Compute, Computed, Executor, Seconds, Started
from distbelief.task.data import BatchCursor, DataShard
from distbelief.task.losses import Measures
from distbelief.worker.batches import (
    BatchSlice,
    EvaluationPlan,
    Limits,
    SlicePrefetch,
    TrainingPlan,
)
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.evaluator import Evaluation
from distbelief.worker.execution.executor import Put, StepResult
from distbelief.worker.replica import Alone, Steps
from distbelief.worker.steps import STEP, Close, StepOutcome, StepRunner
from distbelief.worker.training import Items, Training
from tests.distbelief.examples import Frames, dropout_net, net
from tests.distbelief.worker.bench import Bench


def test_one_step_is_fetch_install_gradient_push() -> None:
    bench = Bench().start()
    bench.deliver()
    assert bench.pending == ["replica:read"]
    bench.compute()
    assert bench.pending == ["replica:read", "replica:install", "replica:step"]
    assert bench.state == "computing"
    bench.compute("install")
    bench.compute("step")
    assert bench.state == "pushing"
    bench.compute("push")
    assert len(bench.sent(wire.Push)) == 1


def test_the_next_batch_is_read_and_the_next_fetch_begun_during_a_step() -> None:
    """DB-10."""
    bench = Bench().start()
    bench.deliver()
    bench.compute("read")
    bench.compute("install")
    assert len(bench.sent(wire.Fetch)) == 1
    read = bench.compute("read")
    assert read.executor is Executor.DATA
    assert bench.pending == ["replica:step"]


def test_a_blocking_replica_fetches_when_its_push_is_applied() -> None:
    """DB-11."""
    bench = Bench(blocking=True).start()
    bench.run_until_step(1)
    bench.shard.acknowledges = False
    bench.compute("push")
    bench.deliver()
    assert not bench.sent(wire.Fetch)
    bench.acknowledge()
    assert len(bench.sent(wire.Fetch)) == 1


def test_two_pushes_may_be_in_flight_and_the_third_waits() -> None:
    bench = Bench().start()
    bench.shard.acknowledges = False
    bench.run_until_step(3)
    bench.deliver()
    assert len(bench.shard.pushed) == 2
    assert "replica:step" not in bench.pending
    assert "replica:push" not in bench.pending
    assert bench.state == "waiting for shard-0"
    bench.acknowledge()
    assert "replica:push" in bench.pending


def test_a_step_behind_a_torn_install_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench().start()
    install = bench.client.install

    def torn(values: Sequence[torch.Tensor]) -> Callable[[], FetchResult]:
        install(values)
        return lambda: FetchResult(torn=(0,), clocks=(-1,))

    monkeypatch.setattr(bench.client, "install", torn)
    bench.deliver()
    for work in ("read", "install", "step"):
        bench.compute(work)
    assert (bench.counters.torn, bench.counters.steps) == (1, 0)


def test_only_two_batches_are_held() -> None:
    bench = Bench().start()
    bench.shard.acknowledges = False
    bench.run_until_step(3)
    while "replica:read" in bench.pending:
        bench.compute("read")
    assert bench.pending == []


def test_work_has_a_cost() -> None:
    bench = Bench().start()
    bench.deliver()
    bench.compute("read")
    read, install, step = bench.computes
    assert install.cost.n_bytes == 2 * bench.model.n_bytes
    assert step.cost.flops == 6 * bench.model.n_parameters * 4
    assert read.cost.n_bytes == 2 * 4 * (4 * 4 + 8)


def test_no_step_begins_beyond_the_allowed_samples() -> None:
    """Regression: it trained on until Stop came, however late."""
    bench = Bench(await_begin=True).start()
    bench.receive(wire.StartTraining(samples=7))
    bench.run_while_it_can()
    assert bench.counters.steps == 2  # a batch of 4 begins at 4, none at 8
    assert bench.state == "waiting for more samples"
    last = bench.reported[-1]
    assert isinstance(last, wire.Progress)  # at once: the supervisor waits for it
    assert last.samples == 8
    assert bench.replica.status()[1]["samples_allowed"] == 7
    bench.receive(wire.StartTraining(samples=9))
    bench.run_while_it_can()
    assert bench.counters.steps == 3
    bench.receive(wire.Stop(reason="that is all"))
    bench.run_while_it_can()
    assert isinstance(bench.reported[-1], wire.Finished)


def test_the_first_push_has_one_gradient_and_later_ones_n_push() -> None:
    """DB-6 and DB-7."""
    bench = Bench(n_push=3, max_steps=8).run_to_the_end()
    pushes = [push for push, _ in bench.shard.pushed]
    assert [push.n_gradients for push in pushes] == [1, 3, 3, 1]
    assert [push.samples for push in pushes] == [4, 16, 28, 32]


def test_a_push_names_the_clock_of_its_oldest_gradient() -> None:
    bench = Bench(max_steps=8, n_push=3, overwrite_local_steps=True).run_to_the_end()
    clocks = [push.fetched_clock for push, _ in bench.shard.pushed]
    assert clocks == [0, 0, 1, 2]  # the fetch for step 1 began before push 1 was sent


def test_with_local_steps_to_keep_a_fetch_waits_for_every_push() -> None:
    """Otherwise it is unknown whether the fetch contains that push, and which steps to repeat."""
    bench = Bench(n_push=3, max_steps=8).run_to_the_end()
    clocks = [push.fetched_clock for push, _ in bench.shard.pushed]
    assert clocks == [0, 1, 2, 3]


_PART = DataShard(64, replica_index=0, n_replicas=1, seed=0)


class Client:
    """A client whose shards have the pushes of 8 samples."""

    samples = 8
    clocks = (2,)
    unacknowledged = 0
    ready = fetch_complete = fetches_own_pushes = is_placed = True
    can_push = may_begin = encodes = owes_rest = False
    view = PartialView(Layout.of([TensorSpec(name="a", shape=(2,))], n_shards=1))

    def enter(self, *_: object, **__: object) -> list[Action]:
        return []

    begin_fetch = installed = skip_tick = enter

    def install(self, values: object) -> Callable[[], FetchResult]:
        del values
        return lambda: FetchResult(torn=(), clocks=(3,))


class Ones:
    """An executor whose gradients are ones."""

    step = generation = 0
    is_open = False

    def begin(self, generation: int) -> None:
        self.generation, self.step = generation, 0

    def place(self, now: Seconds) -> list[Action]:
        del now
        return []

    def open(
        self, batch_slice: BatchSlice, parameters: object, *, put: Put, close: Close, n_bytes: float
    ) -> list[Compute]:
        del batch_slice, parameters, n_bytes

        def work() -> StepOutcome:
            put(0, torch.ones(2))
            found = StepResult(loss=4.0, averages={}, outputs=())
            return StepOutcome(
                generation=self.generation, sends=(), found=found, closed=close(found)
            )

        return [Compute(name=STEP, work=work)]

    def ran(self, outcome: StepOutcome, now: Seconds) -> list[Action]:
        del outcome, now
        self.step += 1
        return []


@pytest.mark.parametrize(("done", "pushed"), [(0, [4, 8, 12, 16]), (9, [13, 17]), (16, [])])
def test_samples_of_all_incarnations_count_towards_the_bound(done: int, pushed: list[int]) -> None:
    """Regression: a late incarnation did its whole share once more."""
    bench = Bench(samples_max=16)
    bench.shard.samples = done
    bench.run_to_the_end()
    assert [push.samples for push, _ in bench.shard.pushed] == pushed
    assert len(bench.sent(wire.Fetch)) <= max(1, len(pushed))
    assert not bench.reported[:-1] or pushed
    assert isinstance(bench.reported[-1], wire.Finished)


def test_a_resumed_replica_goes_on_at_the_next_sample() -> None:
    bench = Bench(max_steps=1)
    bench.shard.samples = 20
    bench.run_to_the_end()
    indices = BatchCursor(bench.data_shard).batch(20, 4).tolist()
    dataset = Frames()
    module = net()
    for value, parameter in zip(
        bench.model.named_tensors().values(),
        dict(sorted(module.named_parameters())).values(),
        strict=True,
    ):
        parameter.data.copy_(value.data)
    nn.functional.cross_entropy(
        module(dataset.inputs[indices]), dataset.targets[indices]
    ).backward()
    expected = [p.grad for _, p in sorted(module.named_parameters())]
    for got, gradient in zip(bench.sums_pushed()[0], expected, strict=True):
        assert gradient is not None
        assert torch.equal(got, gradient.view(-1))
    assert bench.shard.pushed[0][0].samples == 24


def test_clipping_bounds_each_gradient() -> None:
    bench = Bench(clip_norm=0.01, max_steps=2).run_to_the_end()
    for tensors in bench.sums_pushed():
        assert float(torch.cat(tensors).norm()) == pytest.approx(0.01, rel=1e-3)


def test_dropout_is_a_function_of_seed_and_position() -> None:
    pushed = []
    for noise in (1, 2):
        torch.manual_seed(0)
        bench = Bench(module=dropout_net(), max_steps=1)
        bench.start()
        torch.manual_seed(noise)
        bench.run_to_the_end()
        pushed.append(torch.cat(bench.sums_pushed()[0]))
    assert torch.equal(*pushed)


class Computing(nn.Module):
    """A model of one layer that computes what a test says."""

    def __init__(self, compute: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.compute = compute

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.layer, x)


def spoilt_steps(steps: list[int]) -> Frames:
    """Return data that is NaN in these steps of the first pass."""
    order, dataset = Bench().data_shard.order(0), Frames()
    dataset.inputs[[int(i) for step in steps for i in order[4 * step :][:4]]] = float("nan")
    return dataset


@pytest.mark.parametrize("n_push", [1, 3])
def test_a_gradient_that_is_not_finite_is_skipped_counted_and_named(n_push: int) -> None:
    dataset = spoilt_steps([2])
    bench = Bench(dataset=dataset, n_push=n_push, max_steps=7).run_to_the_end()
    assert bench.counters.non_finite == 1
    assert bench.counters.gradients_pushed == 6
    assert sum(push.n_gradients for push, _ in bench.shard.pushed) == 6
    assert all(torch.cat(t).isfinite().all() for t in bench.sums_pushed())
    assert [report.level for report in bench.reports] == ["warning"]
    assert "NaN or infinite (loss nan)" in bench.reports[0].text
    assert bench.shard.pushed[-1][0].samples == 28  # the skipped ones are behind us


def test_an_infinite_sum_of_finite_losses_is_named_by_its_tensors() -> None:
    """The gradient alone overflows: the client finds it as it is staged."""

    steep = Computing(lambda layer, x: layer(x) * 1e38 * 1e38)
    nn.init.zeros_(steep.layer.weight)
    nn.init.zeros_(steep.layer.bias)
    bench = Bench(module=steep, max_steps=3).run_to_the_end()
    assert bench.shard.pushed == []
    assert bench.counters.non_finite == 3
    assert len(bench.reports) == 1  # once for each row of them


def test_too_many_in_a_row_end_the_replica_with_what_to_do() -> None:
    bench = Bench(dataset=spoilt_steps([0, 2, 3, 4]), non_finite_limit=3)
    bench.start()
    with pytest.raises(JobError) as caught:
        bench.run_until_step(9)
    assert str(caught.value) == (
        "3 gradients in a row were NaN or infinite (step 5): [data.train] sample 11 "
        "has NaN or infinite values: fix or remove such samples"
    )


def test_a_step_of_nothing_but_bad_gradients_pushes_nothing() -> None:
    bench = Bench(dataset=spoilt_steps([0]), n_push=9).start()
    bench.run_until_step(1)
    assert "replica:push" not in bench.pending


def test_a_label_out_of_range_is_named_with_its_sample() -> None:
    dataset = Frames()
    dataset.targets[:] = 9
    bench = Bench(dataset=dataset).start()
    first = int(bench.data_shard.order(0)[0])
    with pytest.raises(JobError, match=rf"sample {first} has label 9, but the model"):
        bench.run_until_step(1)


def test_a_failure_that_does_not_repeat_is_reported_as_it_was() -> None:
    failures = [OSError("a cold cache")]

    def once(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if failures:
            raise failures.pop()
        outputs: torch.Tensor = layer(x)
        return outputs

    with pytest.raises(JobError, match=r"net failed on .*OSError: a cold cache"):
        Bench(module=Computing(once)).start().run_until_step(1)


def test_running_out_of_memory_is_reported_with_the_batch_size() -> None:
    def huge(_layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        raise MemoryError(x.shape)

    with pytest.raises(JobError, match="a step of 4 samples: use a smaller batch_size"):
        Bench(module=Computing(huge)).start().run_until_step(1)


def test_data_that_fails_is_named() -> None:
    class Torn(Frames):
        @override
        def __getitems__(self, indices: list[int]) -> object:
            raise OSError("disk gone")

    with pytest.raises(JobError, match=r"reading samples .* OSError: disk gone"):
        Bench(dataset=Torn()).start().run_until_step(1)


@pytest.mark.parametrize("message", [wire.Evaluate(request=1, whole=True), wire.HeartbeatAck()])
def test_unexpected_messages_are_rejected(message: wire.Evaluate | wire.HeartbeatAck) -> None:
    with pytest.raises(RemoteProtocolError, match="is not for"):
        Bench().start().receive(message)


def test_it_waits_for_begin() -> None:
    bench = Bench(await_begin=True).start()
    assert bench.state == "waiting for begin"
    assert bench.pending == []
    bench.receive(wire.StartTraining())
    assert bench.pending == ["replica:read"]
    assert bench.state == "waiting for shard-0"  # whose values are on their way


def test_stop_before_begin_ends_it_at_once() -> None:
    bench = Bench(await_begin=True).start()
    bench.receive(wire.Stop(reason="enough"))
    assert bench.has_halted()
    assert isinstance(bench.reported[-1], wire.Finished)


def test_stop_finishes_the_step_and_pushes_what_accrued() -> None:
    bench = Bench(n_push=4).start()
    bench.run_until_step(2)
    bench.receive(wire.Stop(reason="enough"))
    assert not bench.has_halted()
    bench.shard.acknowledges = False
    while bench.computes:
        bench.compute()
        bench.deliver()
    assert bench.state == "finishing"
    assert not bench.has_halted()  # not before the shard has it
    bench.acknowledge()
    assert bench.has_halted()
    assert sum(push.n_gradients for push, _ in bench.shard.pushed) == (bench.counters.gradients)
    progress, finished = bench.reported[-2:]
    assert isinstance(progress, wire.Progress)
    assert isinstance(finished, wire.Finished)
    assert finished.counters["samples"] == progress.samples


def test_progress_is_reported_at_most_twice_a_second() -> None:
    bench = Bench().start()
    for step in range(1, 11):
        bench.now = 0.2 * step
        bench.run_until_step(step)
    reported = [m for m in bench.reported if isinstance(m, wire.Progress)]
    assert [m.step for m in reported] == [1, 4, 7, 10]
    assert [m.samples for m in reported] == [4, 16, 28, 40]
    assert all(0.0 < m.loss < 2.0 for m in reported)


def test_seconds_computing_are_those_of_the_work() -> None:
    bench = Bench(max_steps=2).run_to_the_end()
    progress = [m for m in bench.reported if isinstance(m, wire.Progress)][-1]
    assert progress.seconds_computing == 2 * (0.25 + 0.25)


def test_no_step_begins_after_a_stop() -> None:
    bench = Bench()
    bench.feed(Started(incarnation=1))
    for opened in bench.shard.answer(bench.to_shard.pop(0)):
        bench.receive(opened, sender="shard-0")
    assert bench.sent(wire.Fetch)  # its values are on their way
    bench.compute("read")
    bench.receive(wire.Stop(reason="enough"))
    assert bench.has_halted()
    assert bench.counters.steps == 0


def test_no_batch_beyond_the_last_step_is_read() -> None:
    bench = Bench(max_steps=2).start()
    assert bench.run_while_it_can().count("replica:read") == 2


def test_a_rank_ahead_of_its_group_counts_no_gradient_twice() -> None:
    """The group begins where the rank that has pushed least left off."""
    config = DownpourSettings(loss="", batch_size=4, rule=SGD(learning_rate=0.1))
    client, plan = cast("ParameterClient", Client()), TrainingPlan(_PART, batch_size=4)
    program = Training(
        config,
        Items(values=[torch.zeros(2)], trained=frozenset({0})),
        client=client,
        n_ranks=1,
        is_whole=False,
        shapes=[(2,)],
        n_steps=plan.n_steps,
    )
    course = Alone()
    steps = Steps(
        program,
        client=client,
        executor=cast("StepRunner", Ones()),
        slices=SlicePrefetch(None, plan),
        course=course,
    )

    def run(generation: int) -> list[int]:
        """Return how many gradients were counted after each step, until it waits."""
        counted: list[int] = []
        course.new_generation(0.0, position=0, limit=6)
        steps.begin(generation)
        while work := [one for one in steps.advance(0.0) if isinstance(one, Compute)]:
            steps.computed(Computed(name=work[0].name, result=work[0].work()), 0.0)
            if work[0].name == STEP:
                counted.append(program.counters.gradients)
        return counted

    assert run(1) == [0, 0, 1]  # no shard has room for a push
    assert run(2) == [1, 1, 2]  # what was not pushed is computed again
    assert program.pushed == 8


# --- the course of a whole model


def course_of(limits: Limits, *, begins: bool = True, pushed: int = 8) -> tuple[Alone, Steps]:
    """Return the course of a replica that is ready, and its steps."""
    course = Alone(limits=limits, begins=begins)
    client = cast("ParameterClient", Client())
    program = Evaluation(
        values=[],
        batch_plan=EvaluationPlan([np.arange(8)], chunk=4),
        measures=Measures(cross_entropy, {}),
    )
    steps = Steps(
        program,
        client=client,
        executor=cast("StepRunner", Ones()),
        slices=SlicePrefetch(None, TrainingPlan(_PART, batch_size=4)),
        course=course,
    )
    course.handle(Started(incarnation=1), 0.0)
    course.ready(pushed, 0.0)
    return course, steps


def steps_between(start: int, stop: int) -> int:
    return -((start - stop) // 4)


def test_a_whole_model_takes_no_step_before_it_is_begun() -> None:
    course, _ = course_of(Limits(), begins=False)
    assert course.begins_at() is None
    assert course.allowed == 0
    course.begin(0.0)
    assert course.begins_at() == 8
    assert course.allowed > 1000
    assert not course.is_final


def test_a_whole_model_pauses_at_the_allowed_samples() -> None:
    course, _ = course_of(Limits(n_steps=steps_between), begins=False)
    course.begin(0.0, samples=14)
    course.begins_at()
    assert course.allowed == 2
    held = [course.is_held]
    for _ in range(2):
        course.taken(0.0)
        held.append(course.is_held)
    assert held == [False, False, True]
    assert not course.is_final
    course.begin(0.0, samples=30)
    assert (course.allowed, course.is_held) == (6, False)


def test_a_whole_model_ends_at_its_bounds() -> None:
    for limits in (Limits(steps_max=3), Limits(samples_max=18, n_steps=steps_between)):
        course, _ = course_of(limits)
        course.begins_at()
        assert (course.allowed, course.is_final) == (3, True)


def test_a_stopped_whole_model_keeps_the_step_that_has_begun() -> None:
    course, steps = course_of(Limits())
    course.begins_at()
    steps.executor.step, steps.executor.is_open = 4, True
    course.stop(0.0)
    assert (course.allowed, course.is_final) == (5, True)
    course.new_generation(0.0)
    course.begins_at()
    assert course.allowed == 0


def test_a_generation_of_a_whole_model_may_have_its_own_position_and_length() -> None:
    course, _ = course_of(Limits(first=0))
    assert course.begins_at() == 8
    complete = [course.is_complete]
    course.new_generation(0.0, position=1, limit=1)
    assert course.begins_at() == 1
    complete.append(course.is_complete)
    course.taken(0.0)
    assert [*complete, course.is_complete] == [True, False, True]
    assert course.generation_done().steps == 1
