"""Whichever way a net is split, its machines find torch's loss and gradients."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch

from distbelief.core.memory import Memory, PrivateMemory
from distbelief.graph.graph import LayerGraph
from distbelief.plans.cluster import Cluster, Machine
from distbelief.plans.compiler import compile_plan
from distbelief.plans.planner.cost_model import AnalyticCosts, single_sample
from distbelief.plans.planner.profile import load, this_host
from distbelief.plans.planner.profiling.layer_timer import Limits, profiled
from distbelief.plans.planner.search import PlanningRequest
from distbelief.protocol import TransferAck
from distbelief.protocol.role import (
    Action,
    Address,
    Compute,
    Computed,
    Event,
    Received,
    Send,
    Started,
)
from distbelief.worker.batches import micro_sizes
from experiments.benchmarks.bare.exchange import STEP
from experiments.benchmarks.bare.machine import (
    BareMachine,
    Machine as PlansMachine,
    Setting,
    machine_of,
    present,
)
from experiments.benchmarks.measuring.workload import NetName, Workload
from experiments.benchmarks.plans.machines import Way, plan_of, ways
from tests.distbelief.plans.planner.clocks import Clock
from tests.distbelief.plans.planner.plans import fully_connected


MACHINE = Machine(flops=1e11, memory_rate=2e10, overhead=1e-5, bandwidth=1e9)
CLUSTER = Cluster(name="two", machines=(MACHINE,) * 2, latency=1e-4)
BATCH = 6


def order_of(workload: Workload) -> PlanningRequest:
    graph, batch = workload.graph(), workload.batch_size
    single = single_sample(graph)
    return PlanningRequest(
        graph=graph,
        cluster=CLUSTER,
        batch=batch,
        costs=AnalyticCosts(CLUSTER, batch=batch, single=single),
        micro_batches=True,
        pins={},
    )


def replica(workload: Workload, way: Way, graph: LayerGraph, memory: Memory) -> list[BareMachine]:
    sizes = micro_sizes(workload.batch_size, way.micro_batches)
    compiled = compile_plan(graph, way.placements, batch=sizes[0], n_machines=2)
    tensors, n = workload.tensors(), way.micro_batches
    return [
        BareMachine(
            compiled, index, workload=workload, micro_batches=n, tensors=tensors, memory=memory
        )
        for index in range(2)
    ]


def run(machines: Sequence[BareMachine | PlansMachine], *, n_steps: int) -> None:
    """Drive them by hand: work is done at once, messages arrive in order."""
    names = machines[0].names
    events: deque[tuple[int, Event]] = deque()

    def perform(index: int, action: Action) -> None:
        match action:
            case Compute():
                done = Computed(name=action.name, result=action.work())
                events.append((index, done))
            case Send():
                message = Received(sender=names[index], incarnation=1, message=action.message)
                events.append((names.index(action.receiver), message))
            case _:
                pass

    begin: list[Event] = [Started(incarnation=1), *[STEP] * n_steps]
    for first in begin:
        events.extend((index, first) for index in range(len(machines)))
        while events:
            index, event = events.popleft()
            for action in machines[index].handle(event, 0.0):
                perform(index, action)


NETS: list[NetName] = ["speech", "image"]


def gradients_of(
    workload: Workload, *, dtype: torch.dtype
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and all gradients, by torch alone."""
    module = workload.module().to(dtype)
    inputs, labels = workload.samples()
    loss = workload.mean_loss(module(inputs.to(dtype)), labels)
    names = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(names.values()))
    return loss.item(), dict(zip(names, found, strict=True))


@pytest.mark.each_value
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("host", ["", "here"])  # "": by blocks
def test_every_way_to_split_a_net_leaves_the_gradients_of_torch(net: NetName, host: str) -> None:
    """As near those in float64 as three times what torch's own in float32 are."""
    workload = Workload(net=net, batch_size=BATCH, small=True)
    loss, single = gradients_of(workload, dtype=torch.float32)
    _, double = gradients_of(workload, dtype=torch.float64)
    own = {name: float((single[name] - double[name]).abs().max()) for name in single}
    order = order_of(workload)
    found = ways(order)
    assert len(found) >= 8
    if net == "image":
        assert len(set(map(repr, found.values()))) == len(found)
        assert {"one", "rows", "columns", "to and fro", "layers, 4 parts"} <= set(found)
    for name, way in found.items():
        machines = replica(workload, way, order.graph, PrivateMemory(host=host, poison=True))
        run(machines, n_steps=3)  # the third overwrites what the first has sent
        assert {machine.n_done for machine in machines} == {3}, name
        losses = [m.loss for m in machines if m.loss is not None]
        assert sum(losses) / BATCH == pytest.approx(loss, rel=1e-5), name
        covered = dict.fromkeys(single, 0)
        for machine in machines:
            for item, gradient in machine.gradients.items():
                tensor, region = machine.items[item]
                torch.testing.assert_close(
                    gradient.view(region.shape).double(),
                    double[tensor][region.slices],
                    rtol=torch.finfo(torch.float32).eps,  # the unit in the last place
                    atol=3.0 * own[tensor],
                    msg=f"{tensor} of {name}",
                )
                covered[tensor] += region.n_elements
        assert covered == {n: g.numel() for n, g in single.items()}, name


def test_machines_with_several_plans_take_steps_by_the_chosen_one(tmp_path: Path) -> None:
    workload = Workload(net="speech", batch_size=BATCH, small=True)
    inputs, labels = workload.samples()
    loss = workload.mean_loss(workload.module()(inputs), labels).item()
    order = order_of(workload)
    found = ways(order)
    paths = {}
    for name in ("one", "units", "layers, 2 parts"):
        paths[name] = str(tmp_path / f"{name}.json")
        plan_of(found[name], order, loss=workload.loss).save(paths[name])
    setting = Setting(workload=workload, plans=paths, n_machines=2, folder=str(tmp_path))
    machines = [machine_of(setting, index) for index in range(2)]
    for n_done, name in enumerate(("units", "one", "layers, 2 parts", "units")):
        for machine in machines:
            machine.choose(name)
        run(machines, n_steps=1)
        assert {m.n_done for m in machines} == {1 + (n_done == 3)}, name
        total = sum(m.loss or 0.0 for m in machines)
        assert total / BATCH == pytest.approx(loss, rel=1e-5), name


def test_a_late_message_reaches_the_plan_that_it_is_of() -> None:
    class Plan:
        def __init__(self) -> None:
            self.events: list[Event] = []
            self.gradients: dict[int, torch.Tensor] = {}

        def handle(self, event: Event, now: float) -> Sequence[Action]:
            del now
            self.events.append(event)
            return []

    one, other = Plan(), Plan()
    plans = cast("dict[str, BareMachine]", {"one": one, "other": other})
    machine = PlansMachine(plans, [Address("machine-0"), Address("machine-1")])
    machine.choose("other")
    late = Received(
        sender=Address("machine-1"), incarnation=1, message=TransferAck(generation=1, taken=4)
    )
    machine.handle(late, 0.0)
    machine.handle(STEP, 0.0)
    assert one.events == [late]
    assert other.events == [STEP]


def test_whole_layers_can_be_measured_again_without_being_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graph = fully_connected(12, 8, 8, 8, 6)
    profile = profiled(graph, batch=3, limits=Limits(seconds=1e3, clock=Clock()))
    measure = present(graph, batch=3)
    for now in (measure(), measure()):
        assert now.keys() == profile.layers.keys()
        assert all(seconds >= 0.0 for time in now.values() for seconds in time)
    assert load(this_host()) == profile
