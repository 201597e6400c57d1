"""The evaluator: each request is answered once, from parameters fetched for it."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn
from typing_extensions import override

from distbelief.core.errors import JobError, RemoteProtocolError, RestoreError, StorageError
from distbelief.core.vectors import Vector
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.protocol import Evaluate, EvaluationDone, Finished, Message, StartTraining, Stop
from distbelief.protocol.role import Computed, Persisted, Snapshot, Started, TimerFired
from distbelief.task import dry_run
from distbelief.task.losses import CHUNK, METRICS, Measures, Metric
from distbelief.worker.build import whole_evaluator
from distbelief.worker.evaluator import BestValues, held_out, kept_in
from distbelief.worker.local_executor import FlatModel, LocalExecutor
from tests.distbelief.examples import F1, Frames, f1_of_a_part, failing_function, net
from tests.distbelief.parameter_server.pair import scatter
from tests.distbelief.worker.bench import RoleBench


class Bench(RoleBench):
    """An evaluator of a whole model."""

    def __init__(
        self,
        *,
        subset: int | None = None,
        chunk: int = CHUNK,
        seed: int = 0,
        metric: Metric = METRICS["accuracy"],
        more: Mapping[str, Metric] | None = None,
        keeps: bool = False,
        higher_is_better: bool = True,
        restored: Snapshot | None = None,
    ) -> None:
        torch.manual_seed(0)
        model, loss = FlatModel(net()), nn.functional.cross_entropy
        super().__init__(model, pushes=False)
        self.shard.clock = 7
        self.initial, self.n_asked = self.shard.values.copy(), 0
        self.dataset = Frames(n_samples=50)
        measures = Measures(loss, {"m": metric, **(more or {})})
        names = dry_run.Names(model="net", loss="cross_entropy", data="data.test")
        self.role = self.evaluator = whole_evaluator(
            LocalExecutor(model, self.dataset, loss=loss, measures=measures, names=names),
            client=self.client,
            kinds=held_out(50, subset=subset, seed=seed),
            chunk=chunk,
            best=BestValues(self.layout, higher_is_better=higher_is_better) if keeps else None,
        )
        self.start(restored)

    def ask(self, message: Message) -> None:
        self.receive(message)
        self.deliver()

    def measure(self, bias: float, *, whole: bool = False) -> Snapshot | None:
        """Evaluate the usual net with this shift of its values; return what gets saved."""
        self.n_asked += 1
        self.shard.values[:] = self.initial + np.float32(bias)
        self.ask(Evaluate(request=self.n_asked, whole=whole))
        self.run_while_it_can()
        return self.saving.pop() if self.saving else None

    def tensors_in(self, vector: Vector) -> list[list[float]]:
        tensors = [torch.zeros(spec.n_elements) for spec in self.layout.tensors]
        scatter(self.layout, 0, vector, tensors)
        return [tensor.tolist() for tensor in tensors]

    def run(self) -> list[EvaluationDone]:
        self.run_while_it_can()
        return [message for message in self.reported if isinstance(message, EvaluationDone)]


def expected(bench: Bench, indices: list[int]) -> tuple[float, float]:
    module = net()
    scatter(bench.layout, 0, bench.shard.values, FlatModel(module).values)
    inputs, targets = bench.dataset.inputs[indices], bench.dataset.targets[indices]
    with torch.no_grad():
        outputs = module(inputs)
    loss = nn.functional.cross_entropy(outputs, targets)
    return float(loss), float(METRICS["accuracy"](outputs, targets))


@pytest.mark.parametrize("chunk", [50, 7, 1])
def test_the_whole_set_is_measured_whatever_the_chunk(chunk: int) -> None:
    bench = Bench(chunk=chunk)
    bench.ask(Evaluate(request=3, whole=True))
    (measured,) = bench.run()
    loss, metric = expected(bench, list(range(50)))
    assert measured.loss == pytest.approx(loss)
    assert measured.metric == pytest.approx(metric)
    assert (measured.request, measured.n_samples, measured.clock) == (3, 50, 7.0)
    assert bench.evaluator.status()[1]["evaluations"] == 1.0


def test_the_usual_subset_is_the_same_each_time() -> None:
    figures = []
    for request in (1, 2):
        bench = Bench(subset=20, seed=4)
        bench.ask(Evaluate(request=request, whole=False))
        (measured,) = bench.run()
        assert measured.n_samples == 20
        figures.append((measured.loss, measured.metric))
    assert figures[0] == figures[1]


def test_of_the_requests_that_waited_only_the_newest_is_answered() -> None:
    bench = Bench(subset=20)
    bench.ask(Evaluate(request=1, whole=False))
    bench.ask(Evaluate(request=2, whole=False))
    bench.ask(Evaluate(request=3, whole=True))
    measured = bench.run()
    assert [(m.request, m.n_samples) for m in measured] == [(1, 20), (3, 50)]
    assert bench.shard.n_fetches == 2


def test_a_request_asked_again_is_answered_again_and_measured_once() -> None:
    bench = Bench()
    bench.ask(Evaluate(request=1, whole=True))
    bench.ask(Evaluate(request=1, whole=True))  # while it is measured
    bench.run()
    bench.ask(Evaluate(request=1, whole=True))  # its answer was lost
    assert [m.request for m in bench.run()] == [1, 1]
    assert bench.shard.n_fetches == 1


def test_each_request_sees_new_parameters() -> None:
    bench = Bench()
    bench.ask(Evaluate(request=1, whole=True))
    bench.run()
    bench.shard.values[:] = 0.0
    bench.ask(Evaluate(request=2, whole=True))
    assert bench.run()[1].loss == pytest.approx(float(np.log(2.0)))


def test_status_describes_the_state() -> None:
    bench = Bench()
    assert bench.state == "waiting"
    bench.ask(Evaluate(request=1, whole=True))
    assert bench.state == "fetching"
    bench.compute()
    assert bench.state == "measuring"
    bench.run()
    assert bench.state == "waiting"


def test_stop_is_answered_after_the_current_chunk() -> None:
    bench = Bench(chunk=10)
    bench.ask(Evaluate(request=1, whole=True))
    bench.compute()
    bench.compute()
    bench.ask(Stop(reason="enough"))
    assert not bench.has_halted()
    bench.compute()
    assert bench.has_halted()
    assert [type(message) for message in bench.reported] == [Finished]


def test_stop_while_idle_is_answered_at_once() -> None:
    bench = Bench()
    bench.ask(Stop(reason="enough"))
    assert bench.has_halted()


def test_a_torn_read_is_repeated() -> None:
    bench = Bench()
    bench.ask(Evaluate(request=1, whole=True))
    install = bench.computes.pop()
    torn = FetchResult(torn=(0,), clocks=(-1,))
    bench.feed(Computed(name=install.name, result=torn))
    assert list(bench.timers)[-1] == "replica:retry"
    assert not bench.computes
    bench.feed(TimerFired(name="replica:retry"))
    assert len(bench.run()) == 1


def test_a_failing_metric_is_the_jobs_error() -> None:
    bench = Bench(metric=failing_function)
    bench.ask(Evaluate(request=1, whole=True))
    with pytest.raises(JobError, match="failed on outputs"):
        bench.run()


def test_errors_of_the_data_set_are_passed_on() -> None:
    bench = Bench()
    bench.dataset.inputs = torch.zeros(3, 4)
    bench.ask(Evaluate(request=1, whole=True))
    with pytest.raises(JobError, match=r"\[data.test\] reading samples 0 to 49"):
        bench.run()


def test_unexpected_messages_are_rejected() -> None:
    with pytest.raises(RemoteProtocolError, match="StartTraining is not for a role"):
        Bench().ask(StartTraining())


# --------------------------------------------------------------------- several metrics


@pytest.mark.parametrize("chunk", [50, 7, 1])
def test_a_metric_with_a_state_is_that_of_all_samples_whatever_the_chunk(chunk: int) -> None:
    bench = Bench(chunk=chunk, more={"f1": F1()})
    for request in (1, 2):  # its state begins anew
        bench.ask(Evaluate(request=request, whole=True))
        bench.run()
    whole = Bench(metric=f1_of_a_part)  # in one piece
    whole.ask(Evaluate(request=1, whole=True))
    (expected_f1,) = whole.run()
    for done in bench.run():
        assert done.metric == pytest.approx(expected(bench, list(range(50)))[1])
        assert done.others[0] == pytest.approx(expected_f1.metric)


def test_a_metric_with_a_state_that_fails_is_the_jobs_error() -> None:
    class Failing(F1):
        @override
        def compute(self) -> torch.Tensor:
            raise ValueError("no positives")

    bench = Bench(more={"f1": Failing()})
    bench.ask(Evaluate(request=1, whole=True))
    with pytest.raises(JobError, match="ValueError: no positives"):
        bench.run()


# --------------------------------------------------------------------- the best values


def level(value: float) -> Metric:
    return lambda _outputs, _targets: value


def one_by_one(values: list[float]) -> Metric:
    """Return a metric with these values, one after the other."""
    left = iter(values)
    return lambda _outputs, _targets: next(left)


def test_the_values_of_each_better_evaluation_are_saved_before_it_is_answered() -> None:
    bench = Bench(keeps=True, metric=one_by_one([0.25, 0.5, 0.5, 0.75]))
    kept: list[float] = []
    for bias in (0.0, 1.0, 2.0, 3.0):
        n_answers = len(bench.run())
        saved = bench.measure(bias)
        if saved is not None:
            assert len(bench.run()) == n_answers
            assert bench.tensors_in(saved.arrays["values"]) == bench.tensors_in(bench.shard.values)
            kept.append(kept_in(saved).metric)
            bench.feed(Persisted(label=saved.label))
        assert len(bench.run()) == n_answers + 1
    assert kept == [0.25, 0.5, 0.75]
    assert bench.state == "waiting"


def test_of_a_loss_the_lowest_is_the_best_and_nan_never() -> None:
    bench = Bench(keeps=True, higher_is_better=False, metric=one_by_one([np.nan, 2.0, 3.0, 1.0]))
    found = []
    for _ in range(4):
        saved = bench.measure(0.0)
        found.append(saved and kept_in(saved).metric)
        if saved is not None:
            bench.feed(Persisted(label=saved.label))
    assert found == [None, 2.0, None, 1.0]


def test_after_a_restart_only_values_better_than_the_saved_ones_are_saved() -> None:
    first = Bench(keeps=True, metric=level(0.5)).measure(0.0)
    assert first is not None
    assert Bench(keeps=True, metric=level(0.25), restored=first).measure(0.0) is None
    better = Bench(keeps=True, metric=level(0.75), restored=first).measure(0.0)
    assert better is not None
    assert better.facts["incarnation"] == "2"


def test_values_that_could_not_be_saved_are_told_and_are_not_the_best() -> None:
    bench = Bench(keeps=True, metric=one_by_one([0.75, 0.5]))
    saved = bench.measure(0.0)
    assert saved is not None
    bench.feed(Persisted(label=saved.label, error="no space"))
    assert [done.unsaved for done in bench.run()] == ["no space"]
    assert bench.measure(0.0) is not None


def test_the_last_evaluation_is_not_compared_with_those_of_a_subset() -> None:
    bench = Bench(keeps=True, subset=20, metric=one_by_one([0.25, 0.5]))
    saved = bench.measure(0.0)
    assert saved is not None
    bench.feed(Persisted(label=saved.label))
    assert bench.measure(0.0, whole=True) is None
    alone = Bench(keeps=True, subset=20, metric=level(0.5))
    assert alone.measure(0.0, whole=True) is not None  # better than none


def test_best_values_that_cannot_be_read_are_not_replaced() -> None:
    with pytest.raises(StorageError, match=r"damaged\. Restore the file, or move it away"):
        BestValues(Bench().layout, higher_is_better=True).start(
            Started(incarnation=2, unrestored="damaged")
        )
    with pytest.raises(RestoreError, match="no measurement of its values"):
        kept_in(Snapshot(label="best", arrays={}, facts={}))
