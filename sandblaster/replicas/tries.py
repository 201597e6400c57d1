"""A replica's tries at sets: what it was told, and how far it has come.

told of -> computing -> computed -> granted -> pushed -> staged
   |           |           |
   +-----------+-----------+--> no longer told of: dropped
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from distbelief.messages import Account, Assignment, SetResult, ShardVersion
from sandblaster.replicas.portion_sums import PortionOutcome, SetSum
from sandblaster.sets import BatchRange, Cutting


Bounds = tuple[int, int]  # positions [start, stop)


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Try:
    """One try at one set."""

    set_index: int
    attempt: int
    portions: Sequence[Bounds]
    grant: int = 0
    losses: list[float] = field(default_factory=list)  # of the portions computed
    seconds: float = 0.0
    total: SetSum | None = None  # once computed, until it is pushed
    pushed: bool = False
    staged: bool = False
    is_finite: bool = True

    @property
    def is_computed(self) -> bool:
        """Is nothing left to compute?"""
        return len(self.losses) == len(self.portions) or not self.is_finite

    @property
    def next_portion(self) -> Bounds:
        """What is to be computed next."""
        return self.portions[len(self.losses)]

    @property
    def is_last(self) -> bool:
        """Is that the last?"""
        return len(self.losses) == len(self.portions) - 1

    @property
    def n_examples(self) -> int:
        """Of the set."""
        return self.portions[-1][1] - self.portions[0][0]

    def computed(self, outcome: PortionOutcome, *, seconds: float) -> None:
        """One portion more is computed."""
        self.losses.append(outcome.loss)
        self.seconds += seconds
        self.total = outcome.total
        self.is_finite = math.isfinite(outcome.loss)

    @property
    def result(self) -> SetResult:
        """What the coordinator is told."""
        loss = math.fsum(self.losses) if self.is_finite else math.nan
        return SetResult(
            attempt=self.attempt,
            n_examples=self.n_examples,
            loss=loss,
            seconds=self.seconds,
            staged=self.staged,
        )


@final
class Tries:
    """All tries of one replica at the sets of one evaluation.

    Attributes:
        epoch: Of the coordinator.
        evaluation: Its number.
        versions: Of the shards' values at which it is computed.
        n_computed: Examples, for this evaluation.
    """

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self._version = 0
        self._tries: dict[int, Try] = {}  # by attempt, in the order to compute
        self._pushed: deque[Try] = deque()  # not acknowledged, the oldest first
        self.epoch = 0
        self.evaluation = 0
        self.versions: tuple[ShardVersion, ...] = ()
        self.n_computed = 0

    @property
    def key(self) -> tuple[int, int]:
        """Which evaluation it is."""
        return self.epoch, self.evaluation

    def __iter__(self) -> Iterator[Try]:
        return iter(self._tries.values())

    def __contains__(self, one: Try) -> bool:
        # Each epoch counts attempts from 1: of another, the same number is another try.
        return self._tries.get(one.attempt) is one

    def told(self, message: Assignment) -> bool:
        """Take an assignment; return whether it says anything new.

        Raises:
            ValueError: it names a set that the batch does not have.
        """
        if (message.epoch, message.version) <= (self.epoch, self._version):
            return False
        is_new = (message.epoch, message.evaluation) != self.key
        batch = BatchRange(first=message.first, n_examples=message.n_examples)
        tries: dict[int, Try] = {}
        for task in message.tasks:
            known = None if is_new else self._tries.get(task.attempt)
            if known is None:
                portions = tuple(batch.portions(task.set_index, self._cutting))
                known = Try(set_index=task.set_index, attempt=task.attempt, portions=portions)
            known.grant = task.grant
            tries[task.attempt] = known
        self._tries = tries
        if is_new:
            self.n_computed = 0
        self.epoch, self._version = message.epoch, message.version
        self.evaluation, self.versions = message.evaluation, message.versions
        return True

    def forget(self) -> None:
        """Forget all tries: what was computed of them is lost."""
        self._tries = {}
        self._pushed.clear()
        self.n_computed = 0

    # ------------------------------------------------------------- what is to be done

    @property
    def to_push(self) -> Try | None:
        """One that is granted and not yet pushed."""
        return next((t for t in self if t.grant and t.total is not None), None)

    def to_compute(self, *, n_held_max: int) -> Sequence[Try]:
        """Return those to compute, in order; none while too many sums are held."""
        if sum(t.total is not None for t in self) >= n_held_max:
            return ()
        return [t for t in self if not t.is_computed]

    def pushed(self, one: Try, *, is_finite: bool) -> None:
        """Its sum was pushed; or could not be, because it is not finite."""
        one.total, one.is_finite = None, is_finite
        if is_finite:
            one.pushed = True
            self._pushed.append(one)

    @property
    def awaits_shards(self) -> bool:
        """Was one pushed, and not acknowledged?"""
        return bool(self._pushed)

    def acknowledged(self, *, n_waiting: int) -> bool:
        """So many pushes are not acknowledged; return whether that is news."""
        news = False
        while len(self._pushed) > n_waiting:
            self._pushed.popleft().staged = news = True
        return news

    @property
    def account(self) -> Account:
        """How it stands."""
        return self.account_of(0)

    def account_of(self, life: int) -> Account:
        """Return how it stands, with this life of a replica of several machines."""
        return Account(
            life=life,
            epoch=self.epoch,
            version=self._version,
            evaluation=self.evaluation,
            n_computed=self.n_computed,
            results=tuple(one.result for one in self if one.is_computed),
        )
