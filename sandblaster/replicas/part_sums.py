"""What a machine of a replica computes for: its part of the sums of sets.

    a life begins     of one set; sums that nobody may ask for any more are dropped
    its first step    parameters are fetched, if those of another evaluation are here
    each step         a portion: its gradients are added to the sum
    the last          the sum is kept; all are told whether it is finite
    push              what was granted is pushed, between two steps

As with a whole replica (`portion_sums`) the sum of a set depends on its portions and
the parameters alone: running averages begin each set as they were fetched, and
gradients are added in the order of positions. So every try at a set is worth the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch

from distbelief.downpour.norms import bad_sample, is_finite
from distbelief.messages import Begin, Evaluate, PushPart, Stop
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.roles import Action, Computed, Cost, Report, Seconds
from distbelief.runtime.execution.execution import Found, Put
from distbelief.runtime.machine.course import Chosen
from distbelief.runtime.machine.duty import Install, Vote
from distbelief.runtime.machine.leading import Leader, Outgoing
from distbelief.runtime.machine.portions import Portion
from sandblaster.replicas.foreman import Foreman
from sandblaster.replicas.part_pushes import Kept, Key, PartPushes
from sandblaster.replicas.portion_sums import SetSum
from sandblaster.replicas.set_course import SetCourse


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keeping:
    """What a machine keeps, item by item.

    Attributes:
        sizes: Elements of each.
        buffers: Those that are no parameters: pushed as they are.
        counts: By item of a running average, the item that counts its steps.
        shards: Those that hold something of them.
        dtype: Of all of them.
    """

    sizes: Sequence[int]
    buffers: Sequence[int]
    counts: Mapping[int, int]
    shards: Sequence[int]
    dtype: torch.dtype


@final
class PartSums:
    """Sums; see `distbelief.runtime.machine.duty.Duty`.

    Args:
        keeping: What the machine keeps.
        client: Of the shards that hold it.
        course: The portions.
        foreman: What it does besides, if it leads.

    Attributes:
        values: Flat, one per item.
        pushes: Of the sums that are whole.
    """

    def __init__(
        self,
        keeping: Keeping,
        *,
        client: ParameterClient,
        course: SetCourse,
        foreman: Foreman | None,
    ) -> None:
        self.values = [torch.zeros(size, dtype=keeping.dtype) for size in keeping.sizes]
        self._keeping = keeping
        self._client = client
        self._course = course
        self._foreman = foreman
        n_bytes = float(sum(value.nbytes for value in self.values))
        self.pushes = PartPushes(client, n_bytes=n_bytes, has_parts=bool(self.values))
        self._installed: tuple[int, int] | None = None  # which evaluation's parameters
        self._fetched: list[torch.Tensor] = []  # buffers as they were fetched
        self._opened = False  # the first step of this life
        self._n_computed = 0
        # Of the step under way, for the lane.
        self._accrued: list[torch.Tensor | None] = []
        self._owned: set[int] = set()  # sums that are nobody else's memory
        self._gradients: dict[int, torch.Tensor] = {}
        self._portion = Portion(life=0, step=0)
        self._chosen: Chosen | None = None
        self._key: Key = (0, 0)
        self._is_last = False
        self._done: tuple[Key, Kept] | None = None
        self._blame: str | None = None

    # ------------------------------------------------------------------------ the life

    @property
    def pushed(self) -> int | None:
        """None: where a life begins, its order says."""
        return None

    @property
    def is_settled(self) -> bool:
        """Whether nothing hinders a new life: pushes do not."""
        return True

    @property
    def is_due(self) -> bool:
        """Whether it has to wait: a push waits for its slot, nothing else does."""
        return False

    @property
    def clock(self) -> float | None:
        """None: versions are compared, not clocks."""
        return None

    def begin(self, position: int, now: Seconds) -> None:
        """A life begins: of the sums keep those that it names."""
        del position, now
        self._collect()
        self._opened = False
        order = self._course.order
        if order is None:
            return
        self.pushes.retain({(order.epoch, attempt) for attempt in order.keeps})
        if (order.epoch, order.evaluation) != self._installed:
            self._installed = None

    def drop(self) -> None:
        """Give up the step under way; the lane is idle."""
        self._collect()
        self._gradients = {}
        self._accrued = []

    def _collect(self) -> None:
        """Keep what the lane has done; the lane may go on meanwhile."""
        done, self._done = self._done, None
        if done is not None:
            self.pushes.keep(*done)

    # ----------------------------------------------------------------------- the fetch

    def may_fetch(self, *, ahead: bool) -> bool:
        """Return whether a fetch may begin now: not while values are in use."""
        return not ahead

    def fetches_at(self, step: int) -> bool:
        """Return whether this step begins with a fetch: once for an evaluation."""
        return step == 0 and self._course.order is not None and self._installed is None

    def installing(self, work: Install) -> Install:
        """Return the work of an install as it is."""
        return work

    def fetched(self, seconds: Seconds) -> bool:
        """A fetch was installed; return whether it is of the evaluation (DB-16)."""
        del seconds
        order = self._course.order
        assert order is not None
        wanted = tuple(
            (version.incarnation, version.clock)
            for index, version in enumerate(order.versions)
            if index in self._keeping.shards
        )
        if self._client.versions != wanted:
            return False
        self._installed = order.epoch, order.evaluation
        self._fetched = [self.values[item].clone() for item in self._keeping.buffers]
        return True

    # ------------------------------------------------------------------------ the step

    def open(self, step: int, chosen: Chosen, portion: Portion) -> Put:
        """Begin a portion; return what takes its gradients."""
        order = self._course.order
        assert order is not None
        if step == 0:
            self._opened = True
            self._key = order.epoch, order.attempt
            self._accrued = [None] * len(self.values)
            self._owned.clear()
            for item, fetched in zip(self._keeping.buffers, self._fetched, strict=True):
                self.values[item].copy_(fetched)
        self._gradients = {}
        self._portion, self._chosen = portion, chosen
        self._is_last = self._course.is_last(step)
        return self._gradients.__setitem__

    def close(self, found: Found) -> Vote | None:
        """Add a portion to the sum; after the last, say whether it is finite. Work."""
        for item, gradient in self._gradients.items():
            self._add(item, gradient)
        self._gradients = {}
        self._average(found)
        assert self._chosen is not None
        self._n_computed += len(self._chosen.indices)
        if found.loss is not None and not math.isfinite(found.loss):
            self._find_blame()
        if not self._is_last:
            return None
        order = self._course.order
        assert order is not None
        accrued, self._accrued = self._accrued, []
        total = SetSum(tuple(accrued), self._values())
        finite = is_finite(
            dict(enumerate(tensor for tensor in accrued if tensor is not None))
        ) and is_finite({item: total.values[item] for item in self._keeping.buffers})
        if not finite:
            self._find_blame()
            return Vote(square=math.nan, settle=_nothing, cost=Cost())
        kept = Kept(
            total=total, n_portions=self._course.n_steps(order), n_examples=order.stop - order.start
        )
        self._done = self._key, kept
        return Vote(square=0.0, settle=_nothing, cost=Cost())

    def _add(self, item: int, gradient: torch.Tensor) -> None:
        before = self._accrued[item]
        if before is None:
            self._accrued[item] = gradient
        elif item in self._owned:
            before.add_(gradient)
        else:
            # The first may share memory with another gradient: added to a copy.
            self._accrued[item] = before + gradient
            self._owned.add(item)

    def _average(self, found: Found) -> None:
        """Let running averages, and counts of their steps, be what they are now."""
        for item, value in found.averages.items():
            self.values[item].copy_(value.reshape(-1))
            if item in self._keeping.counts:
                self.values[self._keeping.counts[item]] += 1

    def _values(self) -> list[torch.Tensor]:
        values = list(self.values)
        for item in self._keeping.buffers:
            values[item] = values[item].clone()
        return values

    def _find_blame(self) -> None:
        row = bad_sample(self._portion)
        if row is not None and self._chosen is not None:
            self._blame = (
                f"[data.train] sample {int(self._chosen.indices[row])} has NaN or "
                "infinite values: mend or leave out such samples"
            )

    def closed(
        self, result: object, found: Found, chosen: Chosen, now: Seconds
    ) -> Sequence[Action]:
        """Keep a sum that is whole; tell who is to blame for one that is not finite."""
        del result, found, chosen, now
        self._collect()
        blame, self._blame = self._blame, None
        return [] if blame is None else [Report(text=blame, level="warning")]

    # ------------------------------------------------------------------------ the push

    def push(self, message: PushPart) -> None:
        """Push what there is of this try under this grant, unless that was done."""
        self._collect()
        self.pushes.grant(message)

    def work(self, *, final: bool) -> Sequence[Action]:
        """Stage what was granted, once there is a free slot on every shard."""
        return [] if final else self.pushes.stage()

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Send what lies in the slots now."""
        return self.pushes.computed(event, now)

    # ---------------------------------------------------------------------- the leader

    def command(self, leader: Leader, message: Begin | Evaluate | Stop, now: Seconds) -> Outgoing:
        """Obey the supervisor, if this machine leads."""
        assert self._foreman is not None
        return self._foreman.command(leader, message, now)

    def report(
        self, leader: Leader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Begin the next life, if there is one to begin."""
        assert self._foreman is not None
        if final:
            return [], []
        actions, out = self._foreman.report(leader, now, has_opened=self._opened)
        others: Outgoing = []
        for machine, message in out:
            if isinstance(message, PushPart) and machine == 0:
                self.push(message)
            else:
                others.append((machine, message))
        return actions, others

    def figures(self) -> Mapping[str, float]:
        """Return counters."""
        return {"samples": float(self._n_computed), "sets_held": float(len(self.pushes))}


def _nothing(square: float, sample: int | None) -> None:
    """Do nothing with what all have agreed on: the leader knows."""
    del square, sample
