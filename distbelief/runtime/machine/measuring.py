"""What the machines that evaluate compute for: loss and metric of held-out samples.

A measurement is a life of the group: all machines fetch at its first step, and take a
chunk of the samples in each. Machine 0, which has the model's outputs whole, judges
them. If a machine is lost the measurement begins anew.

As with the evaluator of one machine (`evaluator`): requests that come meanwhile wait,
and the next measurement answers them all; a request asked again is answered again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never, final

import msgspec
import torch

from distbelief.errors import JobError, LocalProtocolError
from distbelief.messages import Begin, Evaluate, Measured, Stop
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.roles import SUPERVISOR, Action, Computed, Seconds, Send
from distbelief.runtime.execution.execution import Found, Put
from distbelief.runtime.machine.course import Chosen, MeasuringCourse
from distbelief.runtime.machine.duty import Install
from distbelief.runtime.machine.leading import Leader, Outgoing
from distbelief.runtime.machine.portions import Portion


Judge = Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]
"""judge(outputs, targets) -> loss and metric, means over the samples."""

SUBSET: Final = 0
WHOLE: Final = 1
"""Positions: where a measurement begins says what it measures."""

N_WAITING_MAX: Final = 64


@final
@dataclass(slots=True, kw_only=True)
class _Sums:
    n_samples: int = 0
    loss: float = 0.0
    metric: float = 0.0


@final
@dataclass(slots=True, kw_only=True)
class _Requests:
    """What the leader is asked.

    Attributes:
        waiting: For the next measurement.
        measured: By the one under way; none if there is none.
        answered: By `last`.
    """

    waiting: list[Evaluate] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    answered: set[int] = field(default_factory=set)
    last: Measured | None = None
    again: list[int] = field(default_factory=list)


@final
class Measuring:
    """Measures; see `runtime.machine.Duty`.

    Args:
        client: Of the shards; it only fetches.
        sizes: Elements of each item.
        dtype: Of all of them.
        course: The chunks.
        judge: Of outputs; on machine 0 only.

    Attributes:
        values: Flat, one per item.
    """

    def __init__(
        self,
        *,
        client: ParameterClient,
        sizes: Sequence[int],
        dtype: torch.dtype,
        course: MeasuringCourse,
        judge: Judge,
    ) -> None:
        self.values = [torch.zeros(size, dtype=dtype) for size in sizes]
        self._client = client
        self._course = course
        self._judge = judge
        self._targets: torch.Tensor | None = None  # of the chunk under way
        self._sums = _Sums()
        self._asked = _Requests()
        self._n_measured = 0
        self._seconds_computing: Seconds = 0.0

    # ------------------------------------------------------------------------ the life

    @property
    def pushed(self) -> int | None:
        """None: it pushes nothing."""
        return None

    @property
    def is_settled(self) -> bool:
        """Whether nothing that it pushed is under way."""
        return True

    @property
    def is_due(self) -> bool:
        """Whether it has to wait."""
        return False

    def may_fetch(self, *, ahead: bool) -> bool:
        """Return whether a fetch may begin now."""
        return not ahead

    def begin(self, position: int, now: Seconds) -> None:
        """Begin a measurement."""
        del position, now
        self._sums = _Sums()

    def drop(self) -> None:
        """Give up the chunk under way."""
        self._targets = None

    def fetches_at(self, step: int) -> bool:
        """Return whether this step begins with a fetch: the first does."""
        return step == 0

    def installing(self, work: Install) -> Install:
        """Return the work of an install as it is."""
        return work

    def fetched(self, seconds: Seconds) -> bool:
        """A fetch was installed."""
        self._seconds_computing += seconds
        return True

    # ----------------------------------------------------------------------- the chunk

    def open(self, step: int, chosen: Chosen, portion: Portion) -> Put:
        """Begin a chunk."""
        del step, chosen
        self._targets = portion.targets
        return _nothing

    def close(self, found: Found) -> object:
        """Judge the outputs. Work."""
        if self._targets is None:
            return None
        ((_, _, outputs),) = found.outputs
        try:
            return self._judge(outputs, self._targets)
        except Exception as error:  # loss and metric are the user's
            raise JobError(
                f"loss or metric failed on outputs of shape {list(outputs.shape)} and "
                f"targets of {list(self._targets.shape)}: {type(error).__name__}: "
                f"{error}"
            ) from error

    def closed(
        self, result: object, found: Found, chosen: Chosen, now: Seconds
    ) -> Sequence[Action]:
        """Add what was judged."""
        del found, now
        self._targets = None
        if isinstance(result, tuple):
            n_samples, sums = len(chosen.indices), self._sums
            loss, metric = result
            sums.n_samples += n_samples
            sums.loss += n_samples * loss
            sums.metric += n_samples * metric
        return []

    def work(self, *, final: bool) -> Sequence[Action]:
        """Return nothing: there is nothing to do between chunks."""
        del final
        return []

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Refuse: it asks for nothing."""
        del now
        raise LocalProtocolError(f"nobody asked for {event.name!r}")

    # ---------------------------------------------------------------------- the leader

    def command(self, leader: Leader, message: Begin | Evaluate | Stop, now: Seconds) -> Outgoing:
        """Obey the supervisor, if this machine leads."""
        match message:
            case Begin():
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
        elif request not in asked.measured and all(
            request != waiting.request for waiting in asked.waiting
        ):
            asked.waiting.append(message)
            del asked.waiting[:-N_WAITING_MAX]

    def report(
        self, leader: Leader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Answer the supervisor; begin the next measurement."""
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
        steps = self._course.n_steps(position)
        return actions, leader.new_life(now, position=position, limit=steps)

    def _measured(self, leader: Leader) -> Measured:
        sums = self._sums
        n_samples = max(sums.n_samples, 1)
        return Measured(
            request=self._asked.measured[-1],
            loss=sums.loss / n_samples,
            metric=sums.metric / n_samples,
            n_samples=sums.n_samples,
            clock=leader.clock,
        )

    @property
    def clock(self) -> float | None:
        """Mean clock of the values in use; None if it keeps none."""
        clocks = self._client.clocks
        return sum(clocks) / len(clocks) if clocks else None

    def figures(self) -> Mapping[str, float]:
        """Return counters."""
        return {"measured": float(self._n_measured), "seconds_computing": self._seconds_computing}


def _nothing(item: int, _gradient: torch.Tensor) -> None:
    """Take a gradient: there is none."""
    raise LocalProtocolError(f"a gradient of item {item} where nothing is trained")


def _answer(measured: Measured, request: int) -> Send:
    message = msgspec.structs.replace(measured, request=request)
    return Send(receiver=SUPERVISOR, message=message)
