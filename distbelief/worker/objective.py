"""What the steps of a replica are for: the seam between a replica and its objective."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from distbelief.core.vectors import Vector
from distbelief.errors import LocalProtocolError, RemoteProtocolError
from distbelief.execution.executor import Put, StepResult
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.protocol import Evaluate, GrantSteps, StartEpoch, StartTraining, Stop
from distbelief.roles.role import Action, Computed, Cost, Event, Seconds
from distbelief.worker.batches import BatchIndices, BatchSlice
from distbelief.worker.group import GroupLeader, Outgoing


STEP: Final = "replica:step"  # the work of a step

Install = Callable[[], FetchResult]  # copies fetched parameters into tensors, as work
Close = Callable[[StepResult], object]  # uses the result of a step, as work


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    generation: int  # in which the work was started
    sends: Sequence[tuple[int, Vector]]  # operation instances, and the values that they send
    found: StepResult | None = None  # after the last piece of a step
    closed: object = None  # what `close` returned for it


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNorm:
    """One rank's part of a decision that all ranks of a step take together."""

    square: float  # sum of squares of the local gradient; NaN if it is not finite
    # Work that finishes the step, given the sum over all ranks and the index of a bad sample if a
    # rank has found one.
    settle: Callable[[float, int | None], object]
    cost: Cost  # of that work
    sample: int | None = None  # index in the data set of a sample with NaN or infinity found here


class Objective:
    """What the steps of a replica are for; this base neither fetches nor pushes.

    Attributes:
        values: Flat tensors, one per item; fetched parameters are copied into them.
        verb: What a step does, as a status word.
        reports_steps: Whether `report` has news only after a step.
        accepts: Messages of its own, beside those of every replica.
    """

    values: Sequence[torch.Tensor]
    verb = "computing"
    reports_steps = False
    accepts: frozenset[type] = frozenset()

    # --- generations ---

    @property
    def pushed(self) -> int | None:
        """Number of samples in the pushes that its shards have; None if it never pushes."""
        return None

    @property
    def all_pushes_applied(self) -> bool:
        return True

    @property
    def idle(self) -> str | None:
        """The status word if there is nothing to do."""
        return None

    def begin(self, position: int, now: Seconds) -> None:
        """A generation begins at this position in the data."""

    def drop(self) -> None:
        """Drop the current step and everything accrued; no work is running."""

    # --- fetches ---

    def fetches_at(self, step: int) -> bool:
        del step
        return False

    @property
    def may_go_on(self) -> bool:
        """Whether a step may begin before a fetch that is due has come."""
        return False

    def enter(self, now: Seconds, *, gated: bool = True) -> list[Action]:
        """A step is wanted: others may wait for this worker, and if `gated`, it for them."""
        del now, gated
        return []

    @property
    def owes(self) -> bool:
        """Whether something is accrued that is not pushed yet."""
        return False

    def leave(self, now: Seconds) -> list[Action]:
        """There is no step to take for now: nobody needs to wait for this worker."""
        del now
        return []

    def may_fetch(self, *, ahead: bool) -> bool:
        """Return whether a fetch may begin; `ahead`: while a step is running."""
        return not ahead

    def installing(self, work: Install) -> Install:
        """Wrap the work of an install with what must happen before and after it."""
        return work

    @property
    def install_copies(self) -> int:
        """How often an install reads or writes all values."""
        return 2

    def fetched(self, seconds: Seconds) -> bool:
        """A fetch is installed; return whether it is the version wanted."""
        del seconds
        return True

    # --- steps ---

    def open(self, step: int, batch: BatchIndices, batch_slice: BatchSlice) -> Put:
        """A step begins; return the function that takes its gradients, as work."""
        del step, batch, batch_slice
        return _no_gradient

    def close(self, step_result: StepResult) -> object:
        """Use a step's result, as work; return what `closed` gets, or first a `LocalNorm`."""
        del step_result
        return None

    def closed(
        self, result: object, step_result: StepResult, batch: BatchIndices, now: Seconds
    ) -> Sequence[Action]:
        """A step is finished."""
        del result, step_result, batch, now
        return []

    def computing(self, seconds: Seconds) -> None:
        """A step has computed for so long."""

    def torn(self) -> None:
        """A step was dropped: its fetch met a half-applied update."""

    # --- pushes ---

    @property
    def is_due(self) -> bool:
        """Whether it must wait although there is no work to do now."""
        return False

    def work(self, *, final: bool) -> Sequence[Action]:
        """Return work to do before the next step, or before the end."""
        del final
        return []

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Work that `work` returned is done."""
        del now
        raise LocalProtocolError(f"unexpected result of work {event.name!r}")

    # --- on the leader ---

    def command(
        self, leader: GroupLeader, message: StartTraining | Evaluate | Stop, now: Seconds
    ) -> Outgoing:
        """A command of the supervisor; RemoteProtocolError if it is for another objective."""
        if isinstance(message, Stop):
            return leader.stop(now)
        raise RemoteProtocolError(f"{type(message).__name__} is not for a role that is {self.verb}")

    def report(
        self, leader: GroupLeader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Return what the leader sends to the supervisor, and to its ranks."""
        del leader, now, final
        return [], []

    # --- events of its own ---

    def handle(self, event: Event, rank: int | None, now: Seconds) -> list[Action] | None:
        """Handle an event that is for the objective; None if it is for the replica."""
        del event, rank, now
        return None

    def prepare(self, message: StartEpoch) -> None:
        """The leader begins a generation; RemoteProtocolError if its order is invalid."""

    def granted(self, message: GrantSteps, *, is_first: bool) -> None:
        """The leader grants steps; `is_first`: of a generation."""

    def has_news(self) -> bool:
        """Return whether there may be more to do than before the last event."""
        return False

    def due(self, now: Seconds) -> list[Action]:
        """Return the messages that an event calls for."""
        del now
        return []

    # --- status ---

    def figures(self) -> Mapping[str, float]:
        return {}


def _no_gradient(item: int, gradient: torch.Tensor) -> None:
    del gradient
    raise LocalProtocolError(f"a gradient of item {item} where nothing is trained")
