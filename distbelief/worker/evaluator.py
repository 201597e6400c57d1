"""Measures loss and metric on held-out data, outside the training path.

    Evaluate --> fetch --> install --> chunk, chunk, ... chunk --> EvaluationDone

`Evaluator` holds the whole model; `EvaluationObjective` evaluates on the ranks of a group,
where one evaluation is one generation and rank 0 has the model's outputs. One evaluation
runs at a time: it answers all requests that came before it began, as the newest one asked.
A request that is repeated gets the same answer again, without another fetch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, assert_never, final

import msgspec
import numpy as np
import torch

from distbelief.data.dataset import Dataset, read_batch
from distbelief.data.sharding import Indices
from distbelief.errors import DistBeliefError, JobError, LocalProtocolError, RemoteProtocolError
from distbelief.execution.executor import Put, StepResult
from distbelief.parameter_server.client.buffers import FetchResult
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.link import ShardReply
from distbelief.protocol import Evaluate, EvaluationDone, Finished, Message, StartTraining, Stop
from distbelief.roles.role import (
    SUPERVISOR,
    Action,
    Address,
    Compute,
    Computed,
    Cost,
    Event,
    Exit,
    Received,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
    message_types,
)
from distbelief.task import dry_run
from distbelief.task.losses import Loss, Metric
from distbelief.worker.batches import BatchIndices, BatchSlice, EvaluationPlan
from distbelief.worker.group import Install
from distbelief.worker.group_leader import GroupLeader, Outgoing
from distbelief.worker.local_executor import FlatModel


# Before a fetch is repeated that met a half-applied update.
TORN_RETRY_SECONDS = 1e-3

N_WAITING_MAX = 64  # requests; older ones are dropped, and asked again if still wanted


_NAMES = dry_run.Names(
    model="the model", loss="(the job's)", data="data.test", metric="(the job's)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorConfig:
    """What is measured."""

    subset: int | None = None  # samples of a usual evaluation, the same each time; None: all
    chunk: int = 1024  # samples of one piece of work, so that `Stop` is answered within a chunk
    seed: int = 0  # of the subset

    def __post_init__(self) -> None:
        if self.subset is not None and self.subset < 1:
            raise ValueError(f"subset is {self.subset}; use 1 or more, or leave it out")
        if self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}; use 1 or more")


@dataclass(slots=True, kw_only=True)
class _Measurement:
    requests: list[int]  # that it answers
    indices: Indices  # (n_samples,)
    n_done: int = 0
    loss: float = 0.0  # sums over the samples done
    metric: float = 0.0
    clock: float = 0.0
    fetching: bool = False
    installed: bool = False


EvaluatorMessage = Evaluate | Stop | ShardReply


@final
class Evaluator:
    """The role `evaluator` of an unpartitioned model.

    Args:
        config: What is measured.
        client: Connects to all shards; it only fetches.
        model: Its own copy.
        dataset: The held-out samples.
        loss: f(outputs, targets) -> mean.
        metric: f(outputs, targets) -> mean.
        names: How messages call them.
    """

    accepts: Final = message_types(EvaluatorMessage)

    def __init__(
        self,
        config: EvaluatorConfig,
        *,
        client: ParameterClient,
        model: FlatModel,
        dataset: Dataset,
        loss: Loss,
        metric: Metric,
        names: dry_run.Names = _NAMES,
    ) -> None:
        self._names = names
        self._config = config
        self._client = client
        self._model = model
        self._dataset = dataset
        self._loss = loss
        self._metric = metric
        self._all = np.arange(len(dataset), dtype=np.int64)
        self._subset = _subset(self._all, config)
        self._waiting: list[Evaluate] = []
        self._measurement: _Measurement | None = None
        self._last: EvaluationDone | None = None
        self._answered: set[int] = set()  # by `_last`
        self._busy = False
        self._stopped_by: Address | None = None
        self._n_measured = 0

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        if self._client.owns(event):
            return [*self._client.handle(event, now), *self._advance(now)]
        actions: list[Action] = []
        match event:
            case Started():
                actions += self._client.start(event.incarnation, now)
            case Received():
                actions += self._receive(event.sender, event.message)
            case Computed(error=error) if error is not None:
                raise _failure(error)
            case Computed(name="evaluator:install"):
                actions += self._installed(event.result, now)
            case Computed(name="evaluator:chunk"):
                actions += self._measured(event.result)
            case TimerFired(name="evaluator:retry"):
                self._busy = False
            case _:
                pass  # the client handles peers that join and leave
        return [*actions, *self._advance(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return the state as a word, and the counters of evaluations and client."""
        counters = {"evaluations": float(self._n_measured), **self._client.counters()}
        if self._stopped_by is not None:
            return "finishing", counters
        if self._measurement is None:
            return "waiting", counters
        if not self._measurement.installed:
            return "fetching", counters
        return "measuring", counters

    # ------------------------------------------------------------------- messages

    def _receive(self, sender: Address, message: Message) -> Sequence[Action]:
        if isinstance(message, Evaluate):
            return self._ask(message)
        if isinstance(message, Stop):
            self._stopped_by = sender
            return []
        raise RemoteProtocolError(
            f"{sender} sent the evaluator {type(message).__name__}: it accepts only "
            "Evaluate and Stop"
        )

    def _ask(self, message: Evaluate) -> Sequence[Action]:
        request = message.request
        if self._last is not None and request in self._answered:
            return [self._answer(self._last, request)]
        measuring = self._measurement.requests if self._measurement else []
        if request not in measuring and all(
            request != waiting.request for waiting in self._waiting
        ):
            self._waiting.append(message)
            del self._waiting[:-N_WAITING_MAX]
        return []

    def _answer(self, measured: EvaluationDone, request: int) -> Send:
        message = msgspec.structs.replace(measured, request=request)
        return Send(receiver=SUPERVISOR, message=message)

    # ---------------------------------------------------------------- measurement

    def _advance(self, now: Seconds) -> Sequence[Action]:
        if self._busy:
            return []
        if self._stopped_by is not None:
            _, counters = self.status()
            finished = Finished(counters=dict(counters))
            return [Send(receiver=self._stopped_by, message=finished), Exit()]
        if self._measurement is None and self._waiting:
            self._measurement = self._begin()
        if self._measurement is None or not self._client.ready:
            return []
        if self._measurement.installed:
            return [self._next_chunk(self._measurement)]
        return self._fetch(self._measurement, now)

    def _begin(self) -> _Measurement:
        newest = max(self._waiting, key=lambda message: message.request)
        requests = sorted(message.request for message in self._waiting)
        self._waiting.clear()
        return _Measurement(requests=requests, indices=self._all if newest.whole else self._subset)

    def _fetch(self, measurement: _Measurement, now: Seconds) -> Sequence[Action]:
        actions: list[Action] = []
        if not measurement.fetching:
            measurement.fetching = True
            actions += self._client.begin_fetch(now)
        if self._client.fetch_complete:
            actions.append(self._install())
        return actions

    def _install(self) -> Compute:
        self._busy = True
        return Compute(
            name="evaluator:install",
            work=self._client.install(self._model.values),
            cost=Cost(n_bytes=2.0 * self._model.n_bytes),
        )

    def _installed(self, result: object, now: Seconds) -> Sequence[Action]:
        assert isinstance(result, FetchResult), result
        assert self._measurement is not None
        self._busy = False
        actions = list(self._client.installed(result, now))
        if result.torn:
            self._busy = True  # until the timer
            at = now + TORN_RETRY_SECONDS
            actions.append(SetTimer(name="evaluator:retry", at=at))
        else:
            self._measurement.installed = True
            self._measurement.clock = sum(result.clocks) / max(len(result.clocks), 1)
        return actions

    def _next_chunk(self, measurement: _Measurement) -> Compute:
        self._busy = True
        begin = measurement.n_done
        indices = measurement.indices[begin : begin + self._config.chunk]
        return Compute(
            name="evaluator:chunk",
            work=partial(self._measure, indices),
            # Forward only: a third of a training step.
            cost=Cost(flops=self._model.flops(len(indices)) / 3.0),
        )

    def _measure(self, indices: Indices) -> tuple[int, float, float]:
        inputs, targets = read_batch(
            self._dataset, [int(index) for index in indices], table="data.test"
        )
        try:
            loss, metric = self._model.measure(
                inputs, targets, loss=self._loss, metric=self._metric
            )
        except DistBeliefError:
            raise
        except Exception:  # all of it is user code: a dry run finds the cause
            names = replace(self._names, indices=[int(index) for index in indices])
            dry_run.evaluate(
                self._model.module,
                inputs,
                targets,
                loss=self._loss,
                metric=self._metric,
                names=names,
            )
            raise
        return len(indices), loss, metric

    def _measured(self, result: object) -> Sequence[Action]:
        assert isinstance(result, tuple)
        n_samples, loss, metric = result
        measurement = self._measurement
        assert measurement is not None
        self._busy = False
        measurement.n_done += n_samples
        measurement.loss += n_samples * loss
        measurement.metric += n_samples * metric
        n_all = len(measurement.indices)
        if measurement.n_done < n_all:
            return []
        self._measurement = None
        self._n_measured += 1
        self._answered = set(measurement.requests)
        self._last = EvaluationDone(
            request=measurement.requests[-1],
            loss=measurement.loss / n_all,
            metric=measurement.metric / n_all,
            n_samples=n_all,
            clock=measurement.clock,
        )
        return [self._answer(self._last, request) for request in measurement.requests]


def held_out(n_samples: int, config: EvaluatorConfig) -> tuple[Indices, Indices]:
    """Return the samples of a usual evaluation, and all samples."""
    indices = np.arange(n_samples, dtype=np.int64)
    return _subset(indices, config), indices


def _subset(indices: Indices, config: EvaluatorConfig) -> Indices:
    if config.subset is None or config.subset >= len(indices):
        return indices
    generator = np.random.default_rng(config.seed)
    return np.sort(generator.permutation(indices)[: config.subset])


def _failure(error: BaseException) -> DistBeliefError:
    if isinstance(error, DistBeliefError):
        return error
    return JobError(f"the evaluation failed: {type(error).__name__}: {error}")


# score(outputs, targets) -> loss and metric, means over the samples
Score = Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]

# The position where a generation begins selects what it measures.
SUBSET: Final = 0
WHOLE: Final = 1

N_REQUESTS_WAITING_MAX: Final = 64


@final
@dataclass(slots=True, kw_only=True)
class _Sums:
    n_samples: int = 0
    loss: float = 0.0
    metric: float = 0.0


@final
@dataclass(slots=True, kw_only=True)
class _Requests:
    waiting: list[Evaluate] = field(default_factory=list)  # for the next evaluation
    measured: list[int] = field(default_factory=list)  # answered by the current one
    answered: set[int] = field(default_factory=set)  # by `last`
    last: EvaluationDone | None = None
    again: list[int] = field(default_factory=list)


@final
class EvaluationObjective:
    """The objective of a rank that evaluates; see `worker.group.Objective`.

    Args:
        client: Connects to the shards; it only fetches.
        sizes: Elements of each item.
        dtype: Of all items.
        batch_plan: The chunks.
        score: Computes loss and metric from outputs; used on rank 0 only.
    """

    def __init__(
        self,
        *,
        client: ParameterClient,
        sizes: Sequence[int],
        dtype: torch.dtype,
        batch_plan: EvaluationPlan,
        score: Score,
    ) -> None:
        self.values = [torch.zeros(size, dtype=dtype) for size in sizes]  # one flat tensor per item
        self._client = client
        self._batch_plan = batch_plan
        self._score = score
        self._targets: torch.Tensor | None = None  # of the current chunk
        self._sums = _Sums()
        self._asked = _Requests()
        self._n_measured = 0
        self._seconds_computing: Seconds = 0.0

    # ------------------------------------------------------------------------ generation

    @property
    def pushed(self) -> int | None:
        return None

    @property
    def all_pushes_applied(self) -> bool:
        return True

    @property
    def is_due(self) -> bool:
        return False

    def may_fetch(self, *, ahead: bool) -> bool:
        return not ahead

    def begin(self, position: int, now: Seconds) -> None:
        del position, now
        self._sums = _Sums()

    def drop(self) -> None:
        self._targets = None

    def fetches_at(self, step: int) -> bool:
        # All chunks of an evaluation use the same parameters.
        return step == 0

    def installing(self, work: Install) -> Install:
        return work

    def fetched(self, seconds: Seconds) -> bool:
        self._seconds_computing += seconds
        return True

    # ----------------------------------------------------------------------- chunk

    def open(self, step: int, batch: BatchIndices, batch_slice: BatchSlice) -> Put:
        del step, batch
        self._targets = batch_slice.targets
        return _nothing

    def close(self, step_result: StepResult) -> object:
        """Compute loss and metric of the outputs, as work."""
        if self._targets is None:
            return None
        ((_, _, outputs),) = step_result.outputs
        try:
            return self._score(outputs, self._targets)
        except Exception as error:  # loss and metric are the user's
            raise JobError(
                f"loss or metric failed on outputs of shape {list(outputs.shape)} and "
                f"targets of {list(self._targets.shape)}: {type(error).__name__}: "
                f"{error}"
            ) from error

    def closed(
        self, result: object, step_result: StepResult, batch: BatchIndices, now: Seconds
    ) -> Sequence[Action]:
        del step_result, now
        self._targets = None
        if isinstance(result, tuple):
            n_samples, sums = len(batch.indices), self._sums
            loss, metric = result
            sums.n_samples += n_samples
            sums.loss += n_samples * loss
            sums.metric += n_samples * metric
        return []

    def work(self, *, final: bool) -> Sequence[Action]:
        del final
        return []

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        del now
        raise LocalProtocolError(f"unexpected result of work {event.name!r}")

    # ---------------------------------------------------------------------- leader

    def command(
        self, leader: GroupLeader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        match message:
            case StartTraining():
                return []
            case Stop():
                return leader.stop(now)
            case Evaluate():
                self._ask(message)
                return []
            case _:
                assert_never(message)

    def _ask(self, message: Evaluate) -> None:
        asked, request = self._asked, message.request
        if request in asked.answered:
            asked.again.append(request)
        # The supervisor repeats a request until it is answered.
        elif request not in asked.measured and all(
            request != waiting.request for waiting in asked.waiting
        ):
            asked.waiting.append(message)
            del asked.waiting[:-N_REQUESTS_WAITING_MAX]

    def report(
        self, leader: GroupLeader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Answer the supervisor; start the next evaluation."""
        asked = self._asked
        actions: list[Action] = []
        if asked.measured and leader.is_complete:
            self._n_measured += 1
            asked.last = self._measured(leader)
            asked.answered = set(asked.measured)
            asked.again += asked.measured
            asked.measured = []
        if asked.last is not None:
            actions += [_answer(asked.last, request) for request in asked.again]
        asked.again = []
        if final or asked.measured or not asked.waiting or not leader.is_running:
            return actions, []
        newest = max(asked.waiting, key=lambda message: message.request)
        asked.measured = sorted(message.request for message in asked.waiting)
        asked.waiting = []
        position = WHOLE if newest.whole else SUBSET
        steps = self._batch_plan.n_steps(position)
        return actions, leader.new_generation(now, position=position, limit=steps)

    def _measured(self, leader: GroupLeader) -> EvaluationDone:
        sums = self._sums
        n_samples = max(sums.n_samples, 1)
        return EvaluationDone(
            request=self._asked.measured[-1],
            loss=sums.loss / n_samples,
            metric=sums.metric / n_samples,
            n_samples=sums.n_samples,
            clock=leader.clock,
        )

    @property
    def clock(self) -> float | None:
        clocks = self._client.clocks
        return sum(clocks) / len(clocks) if clocks else None

    def figures(self) -> Mapping[str, float]:
        return {"measured": float(self._n_measured), "seconds_computing": self._seconds_computing}


def _nothing(item: int, _gradient: torch.Tensor) -> None:
    raise LocalProtocolError(f"a gradient of item {item} where nothing is trained")


def _answer(measured: EvaluationDone, request: int) -> Send:
    message = msgspec.structs.replace(measured, request=request)
    return Send(receiver=SUPERVISOR, message=message)
