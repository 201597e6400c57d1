"""Workers whose every push leaves its own mark, and a ledger of all marks.

The tensor has `N_MARKS` elements on each shard. Push number i of a test has a gradient of 1 at one
element of every shard, else 0. Shards start at zeros and apply SGD at rate 1, or Adagrad, which
gives the same here and has a state as well. So that element is minus the number of times that the
shard applied push i. Successive pushes mark elements far apart: a mixture of two versions contains
some of a push's marks and not others. With local steps each step leaves a mark.

While a push is applied, the values in memory are NaN.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch

from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.graph.region import Region
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.parameter_server.client.pushes import PushResult
from distbelief.parameter_server.layout import ElementType, Layout, PartialView, TensorSpec
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy
from distbelief.parameter_server.rules import SGD, Adagrad
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ClientConfig, ShardConfig
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.store import ShardStore
from distbelief.parameter_server.tensor_copies import Pushed
from distbelief.protocol import role as rl
from distbelief.protocol.push_fetch import Dealt
from distbelief.protocol.replication import WHOLE, Share
from distbelief.worker.exchange import LocalSteps
from distbelief.worker.inner_optimizer import InnerOptimizer


N_MARKS = 512  # pushes of one test; a multiple of 64
STEP = rl.Cost(flops=5e7)  # 5 ms
COPY = rl.Cost(n_bytes=1e6)

WIDTH, N_COLUMNS = 64, 40  # of the tensor, and those that a partial worker holds

PLACES = np.arange(N_MARKS) * 197 % N_MARKS  # mark -> element: 197 and 512 are coprime

PLAIN = SGD(learning_rate=1.0)
WITH_STATE = Adagrad(learning_rate=1.0, epsilon=0.0)  # 1 / sqrt(1) the first time


def layout_of(n_shards: int, *, dtype: ElementType = "float64") -> Layout:
    marks = TensorSpec(name="marks", shape=(n_shards * N_MARKS // WIDTH, WIDTH))
    return Layout.of([marks], n_shards=n_shards, dtype=dtype)


def shard_of(
    index: int, layout: Layout, memory: Memory, config: ShardConfig | None = None
) -> Shard:
    shard = Shard(
        config or ShardConfig(index=index, layout=layout, rule=PLAIN),
        memory=memory,
        initialise=lambda: np.zeros(layout.shard_size(index), layout.dtype),
    )
    Unreadable.make(shard.values)
    return shard


class Unreadable:
    """Makes a shard's values and state NaN while they are being written.

    Simulated work runs in one moment of virtual time; without this, no reader could ever see a
    half-applied push.
    """

    _all: ClassVar["WeakKeyDictionary[ShardStore, Unreadable]"] = WeakKeyDictionary()

    def __init__(self, values: ShardStore) -> None:
        # Values and state, while they are being written.
        self.saved: tuple[Vector, ...] | None = None
        self._begin_push = values.begin_push

    @classmethod
    def make(cls, values: ShardStore) -> None:
        """Let these values be so."""
        harsh = cls._all[values] = cls(values)

        def begin_push(
            pushed: Pushed,
            *,
            n_clients: int,
            shard_slice: ShardSlice | None = None,
            touched: ShardSlice | None = None,
            share: Share = WHOLE,
            dealt: Dealt = msgspec.UNSET,
        ) -> tuple[Callable[[], None], rl.Cost]:
            work, cost = harsh._begin_push(
                pushed,
                n_clients=n_clients,
                shard_slice=shard_slice,
                touched=touched,
                share=share,
                dealt=dealt,
            )
            if share.n_to_follow:
                return work, cost  # nothing is written
            arrays = arrays_of(values)
            saved = harsh.saved = tuple(array.copy() for array in arrays)
            for array in arrays:
                array.fill(np.nan)

            def apply() -> None:
                for array, before in zip(arrays, saved, strict=True):
                    array[:] = before
                work()
                harsh.saved = None

            return apply, cost

        values.begin_push = begin_push  # type: ignore[method-assign]

    @classmethod
    def read_all(cls, values: ShardStore) -> tuple[Vector, ...]:
        """Return values and state as they are, or were before they are written."""
        harsh = cls._all.get(values)
        saved = None if harsh is None else harsh.saved
        return arrays_of(values) if saved is None else saved

    @classmethod
    def read(cls, values: ShardStore) -> Vector:
        """Return the values alone."""
        return cls.read_all(values)[0]


def arrays_of(values: ShardStore) -> tuple[Vector, ...]:
    """Return the values, and each vector of the rule's state."""
    return values.vector, *(values.state[name] for name in sorted(values.state))


def marks_of(shard: Shard) -> Vector:
    """Return how often a shard has applied each push, by mark."""
    return -Unreadable.read(shard.values)[PLACES]


@dataclass
class Ledger:
    """The marks of all workers over all incarnations, as a global observer sees them."""

    n_issued: int = 0
    settled: list[int] = field(default_factory=list)  # of workers that ended well
    pushes: list[list[int]] = field(default_factory=list)  # the marks of each
    _unused: list[int] = field(default_factory=lambda: list(range(N_MARKS)))

    def issue(self, *, n_columns: int = WIDTH) -> int:
        """Return the mark of the next push, in the first so many columns."""
        mark = next((m for m in self._unused if PLACES[m] % WIDTH < n_columns), None)
        assert mark is not None, "the test makes more pushes than it has marks"
        self._unused.remove(mark)
        self.n_issued += 1
        return mark


class Worker:
    """Fetches, computes and pushes, until `n_wanted` steps are pushed over all its incarnations.

    It holds all columns of the tensor, or the first ones if it is `partial`. If its policy sends
    deltas, it goes on with local steps while a push and a fetch travel, unless it is gated.

    Attributes:
        marks: (sequence, mark) of each step of this incarnation that is pushed, in order.
        values: The tensor as last fetched; with local steps, they are in it as well.
        fetched: The tensor as last fetched.
    """

    accepts = rl.ALL_MESSAGES

    def __init__(
        self,
        layout: Layout,
        memory: Memory,
        *,
        ledger: Ledger,
        n_wanted: int,
        config: ClientConfig | None = None,
        shard_copies: int = 1,
        partial: bool = False,
        policy: ExchangePolicy = DOWNPOUR,
    ) -> None:
        self._n_columns = N_COLUMNS if partial else WIDTH
        n_rows = layout.tensors[0].shape[0]
        region = Region(((0, n_rows), (0, self._n_columns)))
        self.client = ParameterClient(
            config or ClientConfig(pushes=True),
            PartialView(layout, [("marks", region)] if partial else None),
            memory=memory,
            shard_copies=shard_copies,
        )
        self.state = "greeting"
        self.samples = 0
        self.marks: list[tuple[int, int]] = []
        dtype = torch.float64 if layout.dtype.itemsize == 8 else torch.float32
        self.values = torch.zeros(region.n_elements, dtype=dtype)
        self._layout = layout
        self._ledger = ledger
        self._n_wanted = n_wanted
        self._gradient = torch.zeros_like(self.values)
        self._unsent: list[int] = []  # marks of the push being staged, or of local steps
        self._waits = False  # for work, or for the timer
        self._policy = policy
        self._every = policy.every if isinstance(policy.every, int) else 1
        self.local_steps: LocalSteps | None = None
        if policy.send == "delta":
            inner = InnerOptimizer({"name": "SGD", "lr": 1.0}, {0: self.values})
            self.local_steps = LocalSteps([self.values], [0], inner)
        self.begun = 0  # ticks
        self.ticks: dict[int, int] = {}  # by mark: which one its push ended

    @property
    def fetched(self) -> torch.Tensor:
        return self.values if self.local_steps is None else self.local_steps._anchors[0]

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        actions: list[rl.Action] = []
        if self.client.owns(event):
            actions += self.client.handle(event, now)
        else:
            match event:
                case rl.Started():
                    actions += self.client.start(event.incarnation, now)
                case rl.TimerFired():
                    self._waits = False
                case rl.Computed():
                    actions += self._computed(event, now)
                case _:
                    pass
        return [*actions, *self._advance(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self.state, self.client.counters()

    def _advance(self, now: rl.Seconds) -> Sequence[rl.Action]:
        if self._waits:
            return []
        client = self.client
        match self.state:
            case "greeting" if client.ready:
                self.samples = client.samples
                self.state = "beginning"
                return self._advance(now)
            case "beginning":
                return self._begin(now)
            case "fetching":
                return self._fetch()
            case "pushing" if client.can_push:
                return self._work("stage", self._stage(), COPY)
        return []

    def _begin(self, now: rl.Seconds) -> Sequence[rl.Action]:
        if self.samples >= self._n_wanted and not self._unsent:
            if self.client.unacknowledged == 0:
                self.state = "done"
                self._ledger.settled += [mark for _, mark in self.marks]
            return self.client.leave(now)
        staleness = self._policy.staleness
        entered = self.client.enter(now, staleness=staleness)
        if staleness is not None and not self.client.may_begin:
            return entered
        if self.local_steps is not None and self.client.unacknowledged:
            # The values fetched must contain what is no longer in a - x.
            goes_on = self._may_go_on
            return [*entered, *(self._work("step", self._step, STEP) if goes_on else ())]
        self.begun += 1
        self.state = "fetching"
        return [*entered, *self.client.begin_fetch(now), *self._advance(now)]

    def _fetch(self) -> Sequence[rl.Action]:
        if self.client.fetch_complete:
            return self._work("install", self._install(), COPY)
        return self._work("step", self._step, STEP) if self._may_go_on else []

    @property
    def _n_left(self) -> int:
        return self._n_wanted - self.samples - len(self._unsent)

    @property
    def _may_go_on(self) -> bool:
        """Whether to take a local step while a push or a fetch travels."""
        local_steps = self.local_steps
        if local_steps is None or local_steps.is_held or self._policy.staleness is not None:
            return False
        return self.begun > 0 and self._n_left > 0 and len(self._unsent) < 2 * self._every

    def _work(self, name: str, work: Callable[[], object], cost: rl.Cost) -> Sequence[rl.Action]:
        self._waits = True
        return [rl.Compute(name=name, work=work, cost=cost)]

    def _install(self) -> Callable[[], object]:
        work, local_steps = self.client.install([self.values]), self.local_steps
        if local_steps is None:
            return work

        def install() -> FetchResult:
            local_steps.hold()
            installed = work()
            if not installed.torn:
                local_steps.merge()
            return installed

        return install

    def _mark_next(self) -> torch.Tensor:
        """Return the gradient of the next step."""
        mark = self._ledger.issue(n_columns=self._n_columns)
        self._unsent.append(mark)
        row, column = divmod(int(PLACES[mark]), WIDTH)
        parts = self._gradient.view(self._layout.n_shards, -1, self._n_columns)
        parts.zero_()[:, row, column] = 1.0
        return self._gradient

    def _step(self) -> None:
        self._check()
        if self.local_steps is not None and self._n_left > 0:
            self.local_steps.step({0: self._mark_next()}, 0)

    def _stage(self) -> Callable[[], object]:
        local_steps, draft = self.local_steps, self.client.draft()
        if local_steps is None:
            return partial(draft.put_all, [self._mark_next()], [self.values])

        def stage() -> PushResult:
            for item, change in local_steps.changes():
                draft.put(item, change)
            staged = draft.finish()
            local_steps.pushed(finite=staged.finite)
            return staged

        return stage

    def _computed(self, event: rl.Computed, now: rl.Seconds) -> Sequence[rl.Action]:
        assert event.error is None, event.error
        self._waits = False
        match event.result:
            case FetchResult() as outcome:
                actions = self.client.installed(outcome, now)
                if outcome.torn:
                    self._waits = True
                    return [*actions, rl.SetTimer(name="torn", at=now + 2e-3)]
                self.state = "computing"
                return [*actions, *self._compute()]
            case PushResult() as outcome:
                assert outcome.finite, outcome
                return self._pushed(outcome, now)
            case _ if self.state == "computing" and self.local_steps is None:
                self.state = "pushing"
            case _ if self.state == "computing":
                return self._compute()
            case _:
                pass
        return []

    def _compute(self) -> Sequence[rl.Action]:
        """Take the next step, unless there are as many local ones as a push has."""
        lacks_steps = self._n_left > 0 and len(self._unsent) < self._every
        if self.local_steps is None or lacks_steps:
            return self._work("step", self._step, STEP)
        self.state = "pushing"
        return []

    def _pushed(self, outcome: PushResult, now: rl.Seconds) -> Sequence[rl.Action]:
        marks, self._unsent = self._unsent, []
        self.samples += len(marks)
        self.state = "beginning"
        self._ledger.pushes.append(marks)
        actions = self.client.staged(outcome, n_gradients=len(marks), samples=self.samples, now=now)
        sequence = self.client._links[0].pushing.issued
        self.marks += [(sequence, mark) for mark in marks]
        self.ticks |= dict.fromkeys(marks, self.client.tick)
        return actions

    def _check(self) -> None:
        """What was fetched is whole numbers of pushes: no poison, nothing torn."""
        marks = self.values.numpy()
        policy = self._policy
        if policy.weight == "sum" and policy.damping == "none":
            assert ((marks == 0.0) | (marks == -1.0)).all(), f"fetched {np.unique(marks)}"
        else:
            assert ((marks <= 0.0) & (marks >= -1.0)).all(), f"fetched {np.unique(marks)}"
