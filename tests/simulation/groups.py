"""A partitioned replica, or partitioned evaluators, without a supervisor."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from distbelief.algorithms.downpour import DOWNPOUR
from distbelief.core.memory import Memory
from distbelief.graph.graph import INPUT
from distbelief.graph.region import Shape
from distbelief.parameter_server.initial_values import shard_values
from distbelief.parameter_server.layout import ElementType, Layout
from distbelief.program.placement import Placement
from distbelief.program.plan import Plan, Target
from distbelief.protocol import Stop
from distbelief.roles.role import Address, Role
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.faults import Fault
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.task.forward import Sample
from distbelief.task.task import BuildContext, Captured, TaskSpec, build_model, capture_task
from distbelief.worker.build import Split, build_rank
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.group import member_names
from distbelief.worker.local_executor import FlatModel
from tests.distbelief.examples import a_sample, initials_of
from tests.distbelief.program.plans import random_plan
from tests.simulation.jobs import Direct


class Group(Direct):
    """A job with one replica of several ranks, without a supervisor."""

    def __init__(
        self,
        task: TaskSpec,
        settings: DownpourSettings,
        *,
        inputs: Shape | Sample,
        n_machines: int = 3,
        n_shards: int = 1,
        plan_seed: int = 0,
        micro_batches: int = 1,
        host: str = "host-0",
        seed: int = 0,
        faults: Sequence[Fault] = (),
        await_begin: bool = False,
        group: str = "replica-0",
        dtype: ElementType = "float32",
        place: Callable[[str], int] | None = None,
    ) -> None:
        captured = _captured(task, inputs)
        graph = captured.graph
        if place is None:
            generator = np.random.default_rng(plan_seed)
            placements = random_plan(graph, generator, n_machines=n_machines)
        else:  # whole layers, as `place` says
            placements = {
                layer.name: Placement.whole(len(layer.shape), place(layer.name))
                for layer in graph.layers
                if layer.kind != INPUT
            }
        plan = Plan(
            graph=graph.fingerprint,
            inputs={},
            batch=settings.batch_size,
            loss=task.loss,
            cluster=Target(name="here", fingerprint="", n_machines=n_machines),
            placements=placements,
            micro_batches=micro_batches,
        )
        self.settings = settings
        self.layout = Layout.of(captured.specs, n_shards=n_shards, dtype=dtype)
        self.split_of: dict[str, Split] = {}  # where not the one above
        model = FlatModel(build_model(task.model))
        self.split = Split(plan=plan, graph=graph, modules=captured.modules, frozen=model.frozen)
        assert model.specs() == captured.specs
        self.machines = member_names(group, n_machines)
        self.shards = [Address(f"shard-{k}") for k in range(n_shards)]
        self._context = partial(
            BuildContext,
            task=task,
            layout=self.layout,
            n_replicas=1,
            n_shards=n_shards,
            seed=0,
            initials=initials_of(model.module),
            evaluation_subset=20,
            sample=inputs if isinstance(inputs, Sample) else None,
            await_begin=await_begin,
        )
        names = [*self.shards, *self.machines]
        self.simulation = SimulatedCluster(
            {name: self._builder(name) for name in names},
            seed=seed,
            options=ClusterOptions(
                introduce=True, machine=SimulatedMachine(host=host), faults=tuple(faults)
            ),
        )

    def _builder(self, name: Address) -> Callable[[Memory], Role]:
        def build(memory: Memory) -> Role:
            context = self._context(memory=memory)
            if name in self.shards:
                return DOWNPOUR.build(name, config=self.settings, context=context)
            split = self.split_of.get(name, self.split)
            return build_rank(name, config=self.settings, context=context, split=split)

        return build

    def run(self) -> None:
        self.simulation.run(until=10.0)
        if (
            not self._has_ended()
        ):  # as a supervisor would: a restarted rank finds that others have exited
            for name in self.simulation.alive:
                if name in self.machines:
                    self.tell(name, Stop(reason="over"))
        self.simulation.run_until(self._has_ended, within=120.0)
        halted = self.simulation.halted
        assert not any(halted.values()), halted
        assert {name: halted[name] for name in self.machines} == dict.fromkeys(self.machines)

    def _has_ended(self) -> bool:
        halted = self.simulation.halted
        return any(halted.values()) or all(name in halted for name in self.machines)

    def first_values(self) -> dict[str, torch.Tensor]:
        """Return the shards' initial values."""
        model = self._context.keywords["task"].model
        initials = self._context.keywords["initials"]
        return self.scattered(
            [
                shard_values(self.layout, k, initials, seed=model.seed)
                for k in range(self.layout.n_shards)
            ]
        )


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
