"""A partitioned replica, or partitioned evaluators, without a supervisor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from typing_extensions import override

from distbelief.graph.graph import INPUT
from distbelief.graph.region import Shape
from distbelief.parameter_server.initial_values import shard_values
from distbelief.plans.placement import Placement
from distbelief.plans.plan import Plan, Target
from distbelief.protocol import Stop
from distbelief.protocol.role import Address, Role
from distbelief.task.forward import Sample
from distbelief.task.task import BuildContext, Captured, TaskSpec, capture_task
from distbelief.worker.build import Split, build_rank
from distbelief.worker.group import member_names
from tests.distbelief.examples import a_sample, initials_of
from tests.distbelief.plans.plans import random_plan
from tests.simulation.jobs import Direct, scattered


Seed = int | Sequence[int]


@dataclass(eq=False)
class Group(Direct):
    """A job with one replica of several ranks, without a supervisor."""

    _: KW_ONLY
    inputs: Shape | Sample
    n_machines: int = 3
    plan_seed: int = 0
    micro_batches: int = 1
    group: str = "replica-0"
    place: Callable[[str], int] | None = None  # whole layers on machines; else at random
    split_of: dict[str, Split] = field(default_factory=dict)  # of ranks with another plan

    @cached_property
    def split(self) -> Split:
        captured = _captured(self.task, self.inputs)
        assert self.model.specs() == captured.specs
        placements = None
        if self.place is not None:
            placements = {
                layer.name: Placement.whole(len(layer.shape), self.place(layer.name))
                for layer in captured.graph.layers
                if layer.kind != INPUT
            }
        return split_of(
            captured,
            placements or self.plan_seed,
            n_machines=self.n_machines,
            batch=self.settings.batch_size,
            loss=self.task.loss,
            micro_batches=self.micro_batches,
            frozen=self.model.frozen,
        )

    @property
    def machines(self) -> list[Address]:
        return member_names(self.group, self.n_machines)

    @property
    @override
    def names(self) -> list[Address]:
        return [*self.shards, *self.machines]

    @override
    def built(self, name: Address, context: BuildContext) -> Role:
        if name in self.shards:
            return super().built(name, context)
        if isinstance(self.inputs, Sample):
            context = replace(context, sample=self.inputs)
        split = self.split_of.get(name, self.split)
        return build_rank(name, config=self.settings, context=context, split=split)

    def run(self) -> None:
        self.cluster.run(until=10.0)
        if not self._has_ended():
            # As a supervisor would: a restarted rank finds that others have exited.
            for name in self.cluster.alive:
                if name in self.machines:
                    self.tell(name, Stop(reason="over"))
        self.run_until(self._has_ended, within=120.0)
        halted = self.cluster.halted
        assert not any(halted.values()), halted
        assert {name: halted[name] for name in self.machines} == dict.fromkeys(self.machines)

    def _has_ended(self) -> bool:
        halted = self.cluster.halted
        return any(halted.values()) or all(name in halted for name in self.machines)

    def first_values(self) -> dict[str, torch.Tensor]:
        """Return the shards' initial values."""
        initials, seed = initials_of(self.model.module), self.task.model.seed
        shards = range(self.n_shards)
        return scattered(
            self.layout, (shard_values(self.layout, k, initials, seed=seed) for k in shards)
        )


def split_of(
    captured: Captured,
    placements: Mapping[str, Placement] | Seed,
    *,
    n_machines: int,
    batch: int,
    loss: str,
    micro_batches: int = 1,
    frozen: frozenset[str] = frozenset(),
) -> Split:
    """Return how ranks share a model, as given, or at random from a seed."""
    graph = captured.graph
    if not isinstance(placements, Mapping):
        generator = np.random.default_rng(placements)
        placements = random_plan(graph, generator, n_machines=n_machines)
    plan = Plan(
        graph=graph.fingerprint,
        inputs={},
        batch=batch,
        loss=loss,
        cluster=Target(name="here", fingerprint="", n_machines=n_machines),
        placements=placements,
        micro_batches=micro_batches,
    )
    return Split(plan=plan, graph=graph, modules=captured.modules, frozen=frozen)


def _captured(task: TaskSpec, inputs: Shape | Sample) -> Captured:
    # Capturing takes longer than most simulations: do it once.
    key = (task.model.factory, task.loss, inputs)
    if key not in _CAPTURED:
        if not isinstance(inputs, Sample):
            inputs = a_sample(inputs, labels=":" not in task.loss)
        _CAPTURED[key] = capture_task(task, inputs)
    return _CAPTURED[key]


_CAPTURED: dict[object, Captured] = {}


FRAMES = (40,)
