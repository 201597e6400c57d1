"""The evaluation objective: loss and metric on held-out data, outside the training path.

    Evaluate --> fetch --> install --> chunk, chunk, ... chunk --> EvaluationDone

One evaluation is one generation of a group, whose rank 0 has the model's outputs. One evaluation
runs at a time: it answers all requests that came before it began, as the newest one asked.
A request that is repeated gets the same answer again, without another fetch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

import msgspec
import numpy as np
import torch
from typing_extensions import override

from distbelief.data import Indices
from distbelief.errors import JobError
from distbelief.execution.executor import Put, StepResult
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.protocol import Evaluate, EvaluationDone, StartTraining, Stop
from distbelief.roles.role import SUPERVISOR, Action, Seconds, Send
from distbelief.task.dry_run import shown
from distbelief.worker.batches import BatchIndices, BatchSlice, EvaluationPlan
from distbelief.worker.group import GroupLeader, Outgoing
from distbelief.worker.objective import Objective


CHUNK: Final = 1024  # samples of one step of a whole model, so that `Stop` is answered within one

N_WAITING_MAX: Final = 64  # requests; older ones are dropped, and asked again if still wanted

# score(outputs of the graph, targets) -> loss and metric, means over the samples
Score = Callable[[Sequence[torch.Tensor], object], tuple[float, float]]

# The position where a generation begins selects what it measures.
SUBSET: Final = 0
WHOLE: Final = 1


def held_out(n_samples: int, *, subset: int | None, seed: int = 0) -> tuple[Indices, Indices]:
    """Return the samples of a usual evaluation (the same each time), and all samples."""
    if subset is not None and subset < 1:
        raise ValueError(f"subset is {subset}; use 1 or more, or leave it out")
    indices = np.arange(n_samples, dtype=np.int64)
    if subset is None or subset >= n_samples:
        return indices, indices
    generator = np.random.default_rng(seed)
    return np.sort(generator.permutation(indices)[:subset]), indices


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
class EvaluationObjective(Objective):
    """Evaluates; see `worker.objective.Objective`."""

    verb = "measuring"

    def __init__(
        self,
        *,
        client: ParameterClient,  # it only fetches
        values: Sequence[torch.Tensor],
        batch_plan: EvaluationPlan,  # the chunks
        score: Score | None = None,  # on rank 0; the executor of a whole model does it itself
    ) -> None:
        self.values = values
        self._client = client
        self._batch_plan = batch_plan
        self._score = score
        self._targets: object = None  # of the current chunk
        self._sums = _Sums()
        self._asked = _Requests()
        self._n_measured = 0
        self._seconds_computing: Seconds = 0.0

    @override
    def begin(self, position: int, now: Seconds) -> None:
        self._sums = _Sums()

    @property
    @override
    def idle(self) -> str | None:
        return None if self._asked.measured else "waiting"

    @override
    def fetches_at(self, step: int) -> bool:
        # All chunks of an evaluation use the same parameters.
        return step == 0

    @override
    def fetched(self, seconds: Seconds) -> bool:
        self._seconds_computing += seconds
        return True

    @override
    def computing(self, seconds: Seconds) -> None:
        self._seconds_computing += seconds

    # --- chunks ---

    @override
    def open(self, step: int, batch: BatchIndices, batch_slice: BatchSlice) -> Put:
        self._targets = None if batch_slice.batch is None else batch_slice.batch.targets
        return super().open(step, batch, batch_slice)

    @override
    def close(self, step_result: StepResult) -> object:
        """Compute loss and metric of the outputs, as work."""
        if step_result.scores is not None or self._score is None or not step_result.outputs:
            return step_result.scores
        outputs = [value for _, _, value in step_result.outputs]
        try:
            return self._score(outputs, self._targets)
        except Exception as error:  # loss and metric are the user's
            raise JobError(
                f"loss or metric failed on {shown(outputs)} and targets {shown(self._targets)}: "
                f"{type(error).__name__}: {error}"
            ) from error

    @override
    def closed(
        self, result: object, step_result: StepResult, batch: BatchIndices, now: Seconds
    ) -> Sequence[Action]:
        self._targets = None
        if isinstance(result, tuple):
            n_samples, sums = len(batch.indices), self._sums
            loss, metric = result
            sums.n_samples += n_samples
            sums.loss += n_samples * loss
            sums.metric += n_samples * metric
        return []

    # --- on the leader ---

    @override
    def command(
        self, leader: GroupLeader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        if not isinstance(message, Evaluate):
            return super().command(leader, message, now)
        asked, request = self._asked, message.request
        if request in asked.answered:
            asked.again.append(request)
        # The supervisor repeats a request until it is answered.
        elif request not in {*asked.measured, *(waiting.request for waiting in asked.waiting)}:
            asked.waiting.append(message)
            del asked.waiting[:-N_WAITING_MAX]
        return []

    @override
    def report(
        self, leader: GroupLeader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Answer the supervisor; start the next evaluation."""
        asked = self._asked
        actions: list[Action] = []
        if asked.measured and leader.is_complete:
            self._n_measured += 1
            asked.last = self._result(leader)
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

    def _result(self, leader: GroupLeader) -> EvaluationDone:
        sums = self._sums
        n_samples = max(sums.n_samples, 1)
        return EvaluationDone(
            request=self._asked.measured[-1],
            loss=sums.loss / n_samples,
            metric=sums.metric / n_samples,
            n_samples=sums.n_samples,
            clock=leader.clock,
        )

    # --- status ---

    @override
    def figures(self) -> Mapping[str, float]:
        return {
            "evaluations": float(self._n_measured),
            "seconds_computing": self._seconds_computing,
        }


def _answer(measured: EvaluationDone, request: int) -> Send:
    message = msgspec.structs.replace(measured, request=request)
    return Send(receiver=SUPERVISOR, message=message)
