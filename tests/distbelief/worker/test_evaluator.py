"""The evaluator: each request is answered once, from parameters fetched for it."""

import numpy as np
import pytest
import torch
from torch import nn

from distbelief.core.memory import PrivateMemory
from distbelief.errors import JobError, RemoteProtocolError
from distbelief.parameter_server.client.buffers import FetchResult
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.link import ClientConfig
from distbelief.parameter_server.layout import Layout
from distbelief.protocol import (
    Evaluate,
    EvaluationDone,
    Fetch,
    Finished,
    Message,
    OpenSession,
    ParameterBlock,
    SessionOpened,
    StartTraining,
    Stop,
)
from distbelief.roles.role import (
    SUPERVISOR,
    Address,
    Compute,
    Computed,
    Event,
    Exit,
    Received,
    Send,
    SetTimer,
    Started,
    TimerFired,
)
from distbelief.task import dry_run
from distbelief.task.losses import METRICS, Metric
from distbelief.worker.build import score_of, whole_evaluator
from distbelief.worker.evaluator import CHUNK, held_out
from distbelief.worker.local_executor import FlatModel, LocalEvaluator
from tests.distbelief.examples import Frames, failing_function, net


SHARD = Address("shard-0")


class Bench:
    """An evaluator, and one shard played by the test."""

    def __init__(
        self,
        *,
        subset: int | None = None,
        chunk: int = CHUNK,
        seed: int = 0,
        metric: Metric = METRICS["accuracy"],
    ) -> None:
        torch.manual_seed(0)
        model = FlatModel(net())
        self.layout = Layout.of(model.specs(), n_shards=1)
        self.values = np.zeros(self.layout.shard_size(0), np.float32)
        self.layout.gather(0, model.values, self.values)
        self.dataset = Frames(n_samples=50)
        client = ParameterClient(
            ClientConfig(pushes=False),
            layout=self.layout,
            shards=[SHARD],
            memory=PrivateMemory(host=""),
        )
        loss = nn.functional.cross_entropy
        names = dry_run.Names(model="net", loss="cross_entropy", data="data.test", metric="m")
        self.evaluator = whole_evaluator(
            LocalEvaluator(model, self.dataset, loss=loss, metric=metric, names=names),
            client=client,
            kinds=held_out(50, subset=subset, seed=seed),
            score=score_of(loss, metric),
            chunk=chunk,
        )
        self.computes: list[Compute] = []
        self.told: list[Message] = []
        self.timers: list[str] = []
        self._halted = False
        self.n_fetches = 0
        self.feed(Started(incarnation=1))

    def feed(self, event: Event) -> None:
        for action in self.evaluator.handle(event, 0.0):
            match action:
                case Send(receiver=receiver, message=message) if receiver == SHARD:
                    self._answer(message)
                case Send(message=message):
                    self.told.append(message)
                case Compute():
                    self.computes.append(action)
                case SetTimer():
                    self.timers.append(action.name)
                case Exit():
                    self._halted = True
                case _:
                    raise AssertionError(action)

    def _answer(self, message: Message) -> None:
        match message:
            case OpenSession():
                answer: Message = SessionOpened(
                    shard_incarnation=1,
                    clock=0,
                    samples=0,
                    watermark=message.next_sequence - 1,
                    applied=0,
                    parameters_region="",
                    push_buffers_region="",
                )
            case Fetch():
                self.n_fetches += 1
                answer = ParameterBlock(
                    request=message.request,
                    shard_incarnation=1,
                    block_index=0,
                    clock=7,
                    values=self.values.copy(),
                )
            case _:
                return
        self.feed(Received(sender=SHARD, incarnation=1, message=answer))

    def ask(self, message: Message) -> None:
        self.feed(Received(sender=SUPERVISOR, incarnation=1, message=message))

    def compute(self) -> Compute:
        compute = self.computes.pop(0)
        result: object = None
        error: Exception | None = None
        try:
            result = compute.work()
        except Exception as caught:  # noqa: BLE001 -- as a driver does
            error = caught
        self.feed(Computed(name=compute.name, result=result, error=error))
        return compute

    def run(self) -> list[EvaluationDone]:
        while self.computes:
            self.compute()
        return [message for message in self.told if isinstance(message, EvaluationDone)]

    def has_halted(self) -> bool:
        return self._halted

    @property
    def state(self) -> str:
        return self.evaluator.status()[0]


def expected(bench: Bench, indices: list[int]) -> tuple[float, float]:
    module = net()
    bench.layout.scatter(0, bench.values, FlatModel(module).values)
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


def test_requests_that_waited_are_answered_together_as_the_newest_asks() -> None:
    bench = Bench(subset=20)
    bench.ask(Evaluate(request=1, whole=False))
    bench.ask(Evaluate(request=2, whole=False))
    bench.ask(Evaluate(request=3, whole=True))
    measured = bench.run()
    assert [(m.request, m.n_samples) for m in measured] == [(1, 20), (2, 50), (3, 50)]
    assert bench.n_fetches == 2


def test_a_request_asked_again_is_answered_again_and_measured_once() -> None:
    bench = Bench()
    bench.ask(Evaluate(request=1, whole=True))
    bench.ask(Evaluate(request=1, whole=True))  # while it is measured
    bench.run()
    bench.ask(Evaluate(request=1, whole=True))  # its answer was lost
    assert [m.request for m in bench.run()] == [1, 1]
    assert bench.n_fetches == 1


def test_each_request_sees_new_parameters() -> None:
    bench = Bench()
    bench.ask(Evaluate(request=1, whole=True))
    bench.run()
    bench.values[:] = 0.0
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
    assert [type(message) for message in bench.told] == [Finished]


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
    assert bench.timers[-1] == "replica:retry"
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
    with pytest.raises(JobError, match=r"\[data.test\] reading samples 0, 1"):
        bench.run()


def test_unexpected_messages_are_rejected() -> None:
    with pytest.raises(RemoteProtocolError, match="StartTraining is not for a role"):
        Bench().ask(StartTraining())


def test_a_bad_subset_is_named() -> None:
    with pytest.raises(ValueError, match="subset is 0; use 1 or more"):
        held_out(50, subset=0)
