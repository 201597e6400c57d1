"""A worker whose every push leaves a mark of its own, and the ledger of all marks.

The one tensor has `N_MARKS` elements on each shard. Push number i of the whole test has
a gradient of 1 at element i of every shard, else 0; shards apply SGD at rate 1 to
zeros. So element i of a shard is minus the number of times it applied push i: exactly
once, or never, whatever happened on the way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from distbelief.memory import Memory
from distbelief.parameter_server.client import (
    ClientConfig,
    Installed,
    ParameterClient,
    Staged,
)
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.shard import ParameterServerShard, ShardConfig
from distbelief.parameter_server.update_rules import SGD
from distbelief.roles import (
    Action,
    Address,
    Compute,
    Computed,
    Cost,
    Event,
    Seconds,
    SetTimer,
    Started,
    TimerFired,
)


N_MARKS = 512  # pushes of one test; a multiple of 64
STEP = Cost(flops=5e7)  # 5 ms
COPY = Cost(n_bytes=1e6)


def layout_of(n_shards: int) -> Layout:
    marks = TensorSpec(name="marks", shape=(n_shards * N_MARKS,))
    return Layout.of([marks], n_shards=n_shards, dtype="float64")


def shard_of(index: int, layout: Layout, memory: Memory) -> ParameterServerShard:
    return ParameterServerShard(
        ShardConfig(index=index, layout=layout, rule=SGD(learning_rate=1.0)),
        memory=memory,
        initialise=lambda: np.zeros(layout.shard_size(index)),
    )


@dataclass
class Ledger:
    """What an all-knowing observer has seen of all workers, in all their lives."""

    n_issued: int = 0
    settled: list[int] = field(default_factory=list)  # of workers that ended well

    def issue(self) -> int:
        """Return the mark of the next push."""
        assert self.n_issued < N_MARKS, "the test makes more pushes than it has marks"
        self.n_issued += 1
        return self.n_issued - 1


class Worker:
    """Fetches, computes, pushes, `n_wanted` times over all its lives."""

    def __init__(
        self,
        shards: Sequence[Address],
        layout: Layout,
        memory: Memory,
        *,
        ledger: Ledger,
        n_wanted: int,
    ) -> None:
        self.client = ParameterClient(
            ClientConfig(pushes=True), layout=layout, shards=shards, memory=memory
        )
        self.state = "greeting"
        self.samples = 0
        self._layout = layout
        self._ledger = ledger
        self._n_wanted = n_wanted
        self._values = torch.zeros(layout.tensors[0].n_elements, dtype=torch.float64)
        self._gradient = torch.zeros_like(self._values)
        self._marks: list[int] = []
        self._waits = False  # for work, or for the timer

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        actions: list[Action] = []
        if self.client.owns(event):
            actions += self.client.handle(event, now)
        else:
            match event:
                case Started():
                    actions += self.client.start(event.incarnation, now)
                case TimerFired():
                    self._waits = False
                case Computed():
                    actions += self._computed(event, now)
                case _:
                    pass
        return [*actions, *self._advance(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self.state, self.client.counters()

    def _advance(self, now: Seconds) -> Sequence[Action]:
        if self._waits:
            return []
        client = self.client
        match self.state:
            case "greeting" if client.ready:
                self.samples = client.samples
                self.state = "beginning"
                return self._advance(now)
            case "beginning" if self.samples < self._n_wanted:
                self.state = "fetching"
                return [*client.begin_fetch(now), *self._advance(now)]
            case "beginning" if client.unacknowledged == 0:
                self.state = "done"
                self._ledger.settled += self._marks
            case "fetching" if client.fetch_complete:
                return self._work("install", client.install([self._values]), COPY)
            case "pushing" if client.can_push:
                return self._work("stage", self._stage(), COPY)
        return []

    def _work(
        self, name: str, work: Callable[[], object], cost: Cost
    ) -> Sequence[Action]:
        self._waits = True
        return [Compute(name=name, work=work, cost=cost)]

    def _stage(self) -> Callable[[], object]:
        mark = self._ledger.issue()
        self._marks.append(mark)
        self._gradient.view(self._layout.n_shards, N_MARKS).zero_()[:, mark] = 1.0
        return self.client.stage([self._gradient], [self._values])

    def _computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        assert event.error is None, event.error
        self._waits = False
        match event.result:
            case Installed() as outcome:
                actions = self.client.installed(outcome, now)
                if outcome.torn:
                    self._waits = True
                    return [*actions, SetTimer(name="torn", at=now + 1e-3)]
                self.state = "computing"
                return [*actions, *self._work("step", self._check, STEP)]
            case Staged() as outcome:
                assert outcome.finite, outcome
                self.samples += 1
                self.state = "beginning"
                return self.client.staged(
                    outcome, n_gradients=1, samples=self.samples, now=now
                )
            case _:
                self.state = "pushing"
                return []

    def _check(self) -> None:
        """What was fetched is whole numbers of pushes: no poison, nothing torn."""
        marks = np.unique(self._values.numpy())
        assert np.isin(marks, (0.0, -1.0)).all(), f"fetched {marks}"
