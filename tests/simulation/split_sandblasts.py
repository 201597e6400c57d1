"""A small Sandblaster cluster with model-parallel replicas, and what must hold.

checked                                               against
the gradient that every shard seals, to 1e-10         one plain process
whose parts are counted under a token                 all ranks of one replica
where a run ends, bit by bit                          the run that nothing disturbs
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.core.memory import Memory
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.protocol.role import Address, Role
from distbelief.simulation.driver import Builder
from distbelief.task.task import (
    BuildContext,
    Captured,
    DataSpec,
    ModelSpec,
    TaskSpec,
    build_model,
    capture_task,
)
from distbelief.worker.build import Split
from distbelief.worker.execution.dataflow import dataflow
from distbelief.worker.execution.executor import with_counts
from distbelief.worker.group import group_rank_of, rank_name
from sandblaster.algorithm import SANDBLASTER
from sandblaster.build import build_rank
from sandblaster.chunks import COORDINATOR
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.coordinator.workers import CoordinatorConfig
from sandblaster.settings import SandblasterSettings
from tests.distbelief.examples import a_sample, initials_of
from tests.simulation import groups
from tests.simulation.sandblasts import Batch, RunChecker, Tensors, bits_of


HERE = "tests.simulation.split_sandblasts"
N_SAMPLES = 26
SETTINGS = SandblasterSettings(
    loss="cross_entropy",
    history=3,
    max_iterations=3,
    tolerance=1e-12,
    portion=4,
    portions_per_set=2,
)


def net() -> nn.Module:
    """Layers that can each be partitioned, one with averages that are pushed."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


class Points:
    """Inputs (6,), and a class of three."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(N_SAMPLES, 6, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(3, (N_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


TASK = TaskSpec(
    model=ModelSpec(factory=f"{HERE}:net", initial="seed"),
    train=DataSpec(factory=f"{HERE}:Points"),
    loss="cross_entropy",
)


@cache
def captured() -> Captured:
    return capture_task(TASK, a_sample((6,), labels=True))


@cache
def split_of(plan_seed: int, n_machines: int, micro_batches: int = 1) -> Split:
    return groups.split_of(
        captured(),
        [plan_seed, 77],
        n_machines=n_machines,
        batch=SETTINGS.portion,
        loss=TASK.loss,
        micro_batches=micro_batches,
    )


def layout_of(n_shards: int) -> Layout:
    return Layout.of(captured().specs, n_shards=n_shards, dtype="float64")


def plain_gradient(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the mean gradient of all samples, by mini-batches, in one process."""
    model, data = net(), Points()
    shapes = dict(model.named_parameters())
    total: dict[str, torch.Tensor] = {}
    for start in range(0, N_SAMPLES, SETTINGS.portion):
        model.load_state_dict(
            {
                name: values[name].view(tensor.shape).to(tensor.dtype)
                for name, tensor in model.state_dict().items()
            }
        )
        part = slice(start, start + SETTINGS.portion)
        loss = functional.cross_entropy(
            model(data.inputs[part]), data.targets[part], reduction="sum"
        )
        found = torch.autograd.grad(loss, list(shapes.values()))
        for name, gradient in zip(shapes, found, strict=True):
            before = total.get(name)
            total[name] = gradient if before is None else before + gradient
    return {name: tensor.reshape(-1) / N_SAMPLES for name, tensor in total.items()}


# --- scenes ---


@dataclass(kw_only=True, eq=False)
class SplitSandblast(Batch):
    """Without ranks a replica is one process."""

    plan_seed: int = 0
    n_machines: int | None = 2
    n_replicas: int = 2
    micro_batches: int = 1
    settings: SandblasterSettings = SETTINGS

    @property
    @override
    def replicas(self) -> list[Address]:
        if self.n_machines is None:
            return super().replicas
        return [rank_name(r, m) for r in range(self.n_replicas) for m in range(self.n_machines)]

    @property
    def undisturbed(self) -> "SplitSandblast":
        """A run of one such replica that nothing disturbs."""
        return undisturbed(self.plan_seed, self.n_machines, self.n_shards, self.micro_batches)

    @cached_property
    @override
    def layout(self) -> Layout:
        return layout_of(self.n_shards)

    @cached_property
    @override
    def checker(self) -> RunChecker:
        return RunChecker(self.layout, self._compare, self._ranks)

    @override
    def flops(self, name: Address) -> float:
        return 2e6

    @override
    def roles(self) -> Mapping[Address, Builder]:
        names = [COORDINATOR, *self.shards, *self.replicas]
        return {name: partial(self._build, name) for name in names}

    def _build(self, name: Address, memory: Memory) -> Role:
        context = BuildContext(
            task=TASK,
            layout=self.layout,
            n_replicas=self.n_replicas,
            n_shards=self.n_shards,
            seed=0,
            memory=memory,
            initials=initials_of(build_model(TASK.model)),
            await_begin=False,
        )
        if name == COORDINATOR:
            config = CoordinatorConfig(
                chunk_sizes=self.settings.chunk_sizes(
                    n_examples=N_SAMPLES, n_replicas=self.n_replicas
                ),
                backups=self.backups,
                suspect_seconds=2.5,
                await_begin=False,
            )
            return Coordinator(
                config, method=self.settings.chosen(), shards=self.shards, n_examples=N_SAMPLES
            )
        if group_rank_of(name) is None:
            return SANDBLASTER.build(name, config=self.settings, context=context)
        return build_rank(name, config=self.settings, context=context, split=self._split)

    @property
    def _split(self) -> Split:
        assert self.n_machines is not None
        return split_of(self.plan_seed, self.n_machines, self.micro_batches)

    @cache  # noqa: B019 -- runs are few
    def _ranks(self, shard: int) -> set[int]:
        """Return which ranks of a replica hold something of a shard."""
        if self.n_machines is None:
            return {0}
        split, found = self._split, set()
        for machine in range(self.n_machines):
            flow = with_counts(
                dataflow(split.compiled(), machine, loss=split.graph.outputs[-1]),
                {spec.name for spec in captured().specs},
            )
            if shard in PartialView(self.layout, flow.items).shards:
                found.add(machine)
        return found

    def _compare(self, point: Tensors, gradient: Tensors) -> None:
        if self.micro_batches > 1:
            return  # each of them has statistics of its own
        for name, wanted in plain_gradient(point).items():
            torch.testing.assert_close(gradient[name], wanted, rtol=1e-10, atol=1e-13)

    def bits_of(self, *, buffers: bool) -> bytes:
        """Return what the shards hold at the end.

        Args:
            buffers: And buffers: an evaluation that is begun again, by another life of
                the coordinator, begins with those that it left.
        """
        kinds = {spec.name: spec.kind for spec in self.layout.tensors}
        kept = {n: t for n, t in self.values.items() if buffers or kinds[n] == "parameter"}
        return bits_of(kept)


@cache
def undisturbed(
    plan_seed: int, n_machines: int | None, n_shards: int, micro_batches: int
) -> SplitSandblast:
    """Return a run of one replica that nothing disturbs."""
    run = SplitSandblast(
        plan_seed=plan_seed,
        n_machines=n_machines,
        n_shards=n_shards,
        n_replicas=1,
        micro_batches=micro_batches,
    )
    run.play()
    return run
