"""The evaluation program: which held-out samples are measured, and their loss and metric.

    Evaluate --> fetch --> install --> chunk, chunk, ... chunk --> EvaluationDone

One evaluation is one generation of a group, whose rank 0 has the model's outputs. One evaluation
runs at a time; of the requests that come meanwhile, only the newest is answered.
A request that is repeated gets the same answer again, without another fetch.

With [output] keep = "best" the values that were measured are saved, if they are the best so far,
before the answer. The evaluator knows that by itself, also after a restart: from what it saved.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, final

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from typing_extensions import override

from distbelief.core.errors import JobError, LocalProtocolError, RestoreError, StorageError
from distbelief.parameter_server.layout import Layout
from distbelief.protocol import Evaluate, EvaluationDone, StartTraining, Stop
from distbelief.protocol.role import (
    BEST,
    SUPERVISOR,
    Action,
    Event,
    Persist,
    Persisted,
    Seconds,
    Send,
    Snapshot,
    Started,
)
from distbelief.task.data import Indices
from distbelief.task.dry_run import shown
from distbelief.task.losses import Measures
from distbelief.worker.batches import EvaluationPlan
from distbelief.worker.execution.executor import StepResult
from distbelief.worker.group import Outgoing
from distbelief.worker.replica import Leader, Program, Steps, Waiting


_TEXT_MAX: Final = 8192  # characters of an error

# score(outputs of the graph, targets) -> loss and metrics, means over the samples
Score = Callable[[Sequence[torch.Tensor], object], Sequence[float]]

# The position where a generation begins selects what it measures.
SUBSET: Final = 0
WHOLE: Final = 1


def held_out(n_samples: int, *, subset: int | None, seed: int = 0) -> tuple[Indices, Indices]:
    """Return the samples of a usual evaluation (the same each time), and all samples."""
    indices = np.arange(n_samples, dtype=np.int64)
    if subset is None or subset >= n_samples:
        return indices, indices
    generator = np.random.default_rng(seed)
    return np.sort(generator.permutation(indices)[:subset]), indices


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of the values that are kept."""

    metric: float  # of the evaluation
    loss: float  # mean over the held-out samples
    n_samples: int  # held-out samples
    clock: float  # mean over shards of the clock at which the values were read


@final
class BestValues:
    """The values of the best evaluation, as a snapshot that looks like that of a single shard."""

    def __init__(self, layout: Layout, *, higher_is_better: bool, judged_by: str = "") -> None:
        self._layout = Layout.of(layout.tensors, n_shards=1, dtype=layout.spec.dtype)
        self._sign = 1.0 if higher_is_better else -1.0
        self._judged_by = judged_by  # `task.judged_by`
        self._incarnation = 0
        self._saved: Kept | None = None
        self._saving: Kept | None = None

    def start(self, event: Started) -> None:
        """Begin with what a former incarnation has saved; StorageError if that is unreadable."""
        self._incarnation = event.incarnation
        if event.unrestored is not None:
            raise StorageError(
                f"the best values so far cannot be read: {event.unrestored}. Restore the file, or "
                "move it away to keep those of the next evaluation"
            )
        if event.restored is not None:
            self._saved = kept_in(event.restored)

    def improve(self, done: EvaluationDone, values: Sequence[torch.Tensor]) -> Snapshot | None:
        """Return what to save of these values; None if others were better.

        Those of a usual evaluation are not compared with those of the last one, on more samples.
        """
        saved = self._saved
        is_worse = saved is not None and (
            self._sign * done.metric <= self._sign * saved.metric
            if done.n_samples == saved.n_samples
            else done.n_samples > saved.n_samples
        )
        if is_worse or not math.isfinite(done.metric) or not done.n_samples:
            return None
        self._saving = Kept(
            metric=done.metric, loss=done.loss, n_samples=done.n_samples, clock=done.clock
        )
        vector = np.zeros(self._layout.shard_size(0), self._layout.dtype)
        for part in self._layout.segments(0):
            value = values[part.tensor_index][part.start : part.stop]
            # As the shards have them: numpy has no bfloat16.
            value = value if value.dtype == torch.float64 else value.to(torch.float32)
            vector[part.offset : part.offset + part.n_elements] = value.numpy()
        facts = {"kept": msgspec.json.encode(self._saving).decode()}
        facts |= {"incarnation": str(self._incarnation), "judged_by": self._judged_by}
        return Snapshot(label=BEST, arrays={"values": vector}, facts=facts)

    def persisted(self, error: str | None) -> None:
        if error is None:
            self._saved = self._saving


def kept_in(snapshot: Snapshot) -> Kept:
    """Return what was measured of kept values; RestoreError if a file does not say."""
    try:
        return msgspec.json.decode(snapshot.facts.get("kept", ""), type=Kept)
    except msgspec.MsgspecError as error:
        raise RestoreError(f"{snapshot.label} has no measurement of its values: {error}") from None


@final
class Evaluation(Program):
    """Evaluates; see `worker.replica.Program`."""

    verb = "measuring"

    def __init__(
        self,
        *,
        values: Sequence[torch.Tensor],
        batch_plan: EvaluationPlan,  # the chunks
        measures: Measures,
        score: Score | None = None,  # on rank 0; the executor of a whole model does it itself
        best: BestValues | None = None,  # of a whole model, if the best values are kept
    ) -> None:
        self.values = values
        self._batch_plan = batch_plan
        self._measures = measures
        self._score = score
        self._best = best
        self._saves = False  # the values just measured
        self._sums = np.zeros(2 + len(measures.metrics))  # samples, loss, metrics
        self._whole: Mapping[int, float] = {}  # those that are no means
        self._newest = -1  # number of the newest request
        self._waiting: Evaluate | None = None  # it, until its evaluation begins
        self._measured: Evaluate | None = None  # of the current evaluation
        self._last: EvaluationDone | None = None
        self._answers = False  # whether to send `_last`
        self._n_measured = 0

    @override
    def steps(self, steps: Steps) -> Waiting[None]:
        yield from steps.gather()
        self._sums[:] = 0.0
        self._measures.reset()  # no work is under way
        n_chunks = self._batch_plan.n_steps(steps.here.position)
        # All chunks of an evaluation use the same parameters.
        while (yield from steps.next_step(fetches=steps.number == 0)):
            assert steps.slice is not None
            batch = steps.slice.batch
            is_last = steps.number + 1 == n_chunks
            targets = None if batch is None else batch.targets
            close = partial(self._scores, targets, is_last=is_last)
            steps.begin_step(_no_gradient, close)
            taken = yield from steps.taken()
            if taken is not None and isinstance(taken.closed, list):
                self._sums += taken.n_samples * np.array([1.0, *taken.closed])
            yield

    @property
    @override
    def idle(self) -> str | None:
        return "waiting" if self._measured is None else None

    def _scores(
        self, targets: object, found: StepResult, *, is_last: bool
    ) -> Sequence[float] | None:
        # Runs in the compute executor.
        outputs, scores = [value for _, _, value in found.outputs], found.scores
        try:
            if scores is None and self._score is not None and outputs:
                scores = self._score(outputs, targets)
            if scores is not None and is_last:
                self._whole = self._measures.whole()
        except Exception as error:  # loss and metrics are the user's
            raise JobError(
                f"loss or metric failed on {shown(outputs)} and targets {shown(targets)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return scores

    # --- on the leader ---

    @override
    def command(
        self, leader: Leader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        if not isinstance(message, Evaluate):
            return super().command(leader, message, now)
        # The supervisor repeats a request until it is answered.
        if self._last is not None and message.request == self._last.request:
            self._answers = True
        elif message.request > self._newest:
            self._newest, self._waiting = message.request, message
        return []

    @override
    def report(
        self, leader: Leader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Answer the supervisor; start the next evaluation."""
        actions: list[Action] = []
        if self._measured is not None and leader.is_complete and not self._saves:
            self._n_measured += 1
            self._last = self._result(self._measured.request, leader.clock)
            snapshot = self._best and self._best.improve(self._last, self.values)
            if snapshot is None:
                self._measured, self._answers = None, True
            else:
                self._saves = True
                actions.append(Persist(snapshot=snapshot))
        if self._answers and self._last is not None:
            actions.append(Send(receiver=SUPERVISOR, message=self._last))
        self._answers = False
        asked = self._waiting
        if final or asked is None or self._measured is not None or not leader.is_running:
            return actions, []
        self._measured, self._waiting = asked, None
        position = WHOLE if asked.whole else SUBSET
        steps = self._batch_plan.n_steps(position)
        return actions, leader.new_generation(now, position=position, limit=steps)

    @override
    def handle(self, event: Event, rank: int | None, now: Seconds) -> list[Action] | None:
        if isinstance(event, Started) and self._best is not None:
            self._best.start(event)
        if not isinstance(event, Persisted) or self._best is None or self._last is None:
            return None
        self._best.persisted(event.error)
        self._last = replace(self._last, unsaved=event.error and event.error[:_TEXT_MAX])
        self._saves, self._measured, self._answers = False, None, True
        return []

    def _result(self, request: int, clock: float) -> EvaluationDone:
        n_samples = float(self._sums[0])
        loss, metric, *others = (
            self._whole.get(place, float(value) / max(n_samples, 1.0))
            for place, value in enumerate(self._sums[1:])
        )
        return EvaluationDone(
            request=request,
            loss=loss,
            metric=metric,
            others=tuple(others),
            n_samples=int(n_samples),
            clock=clock,
        )

    # --- status ---

    @override
    def figures(self) -> Mapping[str, float]:
        return {"evaluations": float(self._n_measured), "seconds_computing": self.seconds}


def _no_gradient(item: int, gradient: torch.Tensor) -> None:
    del gradient
    raise LocalProtocolError(f"a gradient of item {item} where nothing is trained")
