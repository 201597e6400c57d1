"""Replicas that sum their gradients over a ring, shards that hold the commits, and an overseer."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from msgspec.structs import replace
from typing_extensions import override

from distbelief.core.memory import PrivateMemory
from distbelief.core.vectors import Vector
from distbelief.parameter_server.initial_values import shard_values
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import SGD, Adagrad, Adam, Momentum, UpdateRule
from distbelief.protocol.role import SUPERVISOR, Address, Role
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import Builder, HandledEvent
from distbelief.simulation.faults import Kill
from distbelief.task.task import BuildContext, build_model
from distbelief.worker import batches, build as wb
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.local_executor import FlatModel
from distbelief.worker.member import JobMember
from distbelief.worker.replica import Phase, Replica
from distbelief.worker.ring_training import RingTraining
from distbelief.worker.ring_values import RingValues
from tests.distbelief.examples import initials_of
from tests.simulation.jobs import TASK, Direct, scattered
from tests.simulation.random_faults import message_faults
from tests.simulation.rings import RingOverseer, plain_sum
from tests.simulation.scene import Check


class EqualBits:
    """Looks whether all members have the same values and state after the same step."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], bytes] = {}  # by generation and step
        self._steps: dict[Address, list[tuple[int, int]]] = {}

    def __call__(self, happening: HandledEvent) -> None:
        role = happening.role
        role = role.role if isinstance(role, JobMember) and role.role is not None else role
        if not (isinstance(role, Replica) and isinstance(role.program, RingTraining)):
            return
        own, generation, name = role.program._own, role.program._generation, happening.name
        key, steps = (generation, own.step), self._steps.setdefault(name, [])
        if role._steps.here.phase is not Phase.RUNNING:
            return  # it still has the values of another generation
        if own.step and (not steps or steps[-1] != key):
            steps.append(key)
            bits = own.all.tobytes()
            assert self.found.setdefault(key, bits) == bits, f"{name} differs at {key}"

    def check_few_are_done_again(self, commit_every: int) -> None:
        """HV-3: no member goes back by more steps than lie between two commits."""
        for name, steps in self._steps.items():
            for (_, before), (_, after) in pairwise(steps):
                assert after > before - commit_every, (name, before, after)


@dataclass(eq=False)
class RingJob(Direct):
    _: KW_ONLY
    n_replicas: int = 2
    n_steps: int = 12  # of each
    flops_per_second: float = 2e7  # a step takes some milliseconds
    bits: EqualBits = field(default_factory=EqualBits, init=False)

    @cached_property
    def overseer(self) -> RingOverseer:
        return RingOverseer(self.replicas)

    @override
    def roles(self) -> Mapping[Address, Builder]:
        return {**super().roles(), SUPERVISOR: lambda _: self.overseer}

    @property
    @override
    def names(self) -> list[Address]:
        return [*self.shards, *self.replicas]

    @override
    def built(self, name: Address, context: BuildContext) -> Role:
        if name in self.shards:
            return super().built(name, context)
        module = build_model(self.task.model)
        module.train()
        index, context = int(name.removeprefix("replica-")), wb.with_data(context)
        return wb.ring_replica(
            index,
            config=self.settings,
            context=context,
            model=FlatModel(module),
            samples_max=self.plan(index, context).position_of(self.n_steps),
        )

    def plan(self, index: int, context: BuildContext) -> batches.TrainingPlan:
        shard = wb.data_shard_of(index, config=self.settings, context=context)
        return batches.TrainingPlan(shard, batch_size=self.settings.batch_size)

    def values_of(self, model: FlatModel) -> RingValues:
        specs = {
            item: spec for item, spec in enumerate(model.specs()) if spec.name not in model.frozen
        }
        return RingValues(model.values, specs, self.settings.rule, is_mean=True, layout=self.layout)

    @override
    def checks(self, cluster: SimulatedCluster) -> Sequence[Check]:
        return (self.bits,)

    def finish(self, *, within: float = 300.0) -> None:
        self.run_until(self._has_ended, within=within)
        halted = self.cluster.halted
        assert {name: halted[name] for name in self.replicas} == dict.fromkeys(self.replicas)

    def _has_ended(self) -> bool:
        return all(name in self.cluster.halted for name in self.replicas)

    def expected(self) -> dict[str, torch.Tensor]:
        """Return what one process gets that sums the gradients of all replicas in ring order."""
        models = [FlatModel(build_model(self.task.model)) for _ in self.replicas]
        own = [self.values_of(model) for model in models]
        initials = initials_of(self.model.module)
        vectors = [
            shard_values(self.layout, k, initials, seed=self.task.model.seed)
            for k in range(self.n_shards)
        ]
        start = scattered(self.layout, vectors)
        names = [spec.name for spec in self.layout.tensors]
        for model, one in zip(models, own, strict=True):
            for name, value in zip(names, model.values, strict=True):
                value.copy_(start[name])
            one.begin(0)
        executors, plans = [], []
        for index, model in enumerate(models):
            context = wb.with_data(self.context(PrivateMemory()))
            executors.append(wb.local_executor(model, context, seed=(self.settings.seed, index)))
            plan = self.plan(index, context)
            plan.start(0)
            plans.append(plan)
        for step in range(self.n_steps):
            given: list[Vector] = []
            for one, executor, plan in zip(own, executors, plans, strict=True):
                gradients: dict[int, torch.Tensor] = {}
                batch = executor.batches.read(0, step, plan.batch(step))
                executor.run(batch, gradients.__setitem__)
                vector = one.new_vector()
                assert one.give(gradients, vector)
                given.append(vector)
            total = plain_sum(given)
            for one in own:
                one.take(total)
        assert all(np.array_equal(one.all, own[0].all) for one in own)
        return dict(zip(names, models[0].values, strict=True))


RING = ExchangePolicy(staleness=0, round=Round(), weight="mean", route="ring")
RULES: list[UpdateRule] = [
    SGD(learning_rate=0.1),
    Momentum(learning_rate=0.1),
    Adagrad(learning_rate=0.05),
    Adam(learning_rate=0.01),
]


def settings_of(rule: UpdateRule = RULES[1], *, commit_every: int = 4) -> DownpourSettings:
    exchange = replace(RING, commit_every=commit_every)
    return DownpourSettings(
        loss=TASK.loss, batch_size=4, rule=rule, order="parts", exchange=exchange
    )


def job(settings: DownpourSettings, **options: object) -> RingJob:
    return RingJob(replace(TASK, test=None), settings, **options)  # type: ignore[arg-type]


def drawn(seed: int) -> RingJob:
    """Return a job in which two replicas die, over bad links."""
    n_replicas = 2 + seed % 3
    settings = settings_of(RULES[seed % 4], commit_every=1 + seed % 5)
    run = job(settings, n_replicas=n_replicas, n_steps=30)
    run.seed = seed
    stream = np.random.default_rng([seed, 0xDEAD])
    victims = stream.choice(n_replicas, size=2)
    run.faults = [
        *(
            Kill(
                at=float(stream.uniform(0.0, 0.2)),
                role=Address(f"replica-{victim}"),
                restart_after=float(stream.uniform(0.01, 0.3)),
                after_actions=int(stream.integers(4)) if stream.random() < 0.5 else None,
            )
            for victim in victims
        ),
        *message_faults(stream, horizon=0.2, intensity=2.0),
    ]
    return run
