"""Laws of step costs, and one step drawn by hand."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from distbelief.graph.graph import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.region import Region
from distbelief.plans.cluster import Cluster, Machine, uniform
from distbelief.plans.compiler import compile_plan
from distbelief.plans.placement import Placement, grid
from distbelief.plans.step_cost import Passes, StepCost, chrome_trace, events, step_cost
from tests.distbelief.plans.plans import captured, chain, random_plan


@dataclass
class PerElement:
    """Seconds per element and machine; twice as long backward."""

    speeds: Sequence[float] = (1.0,) * 64

    def passes(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> Passes:
        del layer, partial
        forward = region.n_elements / self.speeds[machine]
        return Passes(forward, 2 * forward)


def cluster(n: int, *, bandwidth: float = math.inf, latency: float = 0.0) -> Cluster:
    machine = Machine(flops=1.0, memory_rate=math.inf, bandwidth=bandwidth)
    return uniform("test", machine, n, latency=latency)


def drawn(name: str, seed: int, *, n_machines: int) -> dict[str, Placement]:
    generator = np.random.default_rng([seed, *name.encode()])
    return random_plan(captured(name)[1], generator, n_machines=n_machines)


def priced(
    graph: LayerGraph, plan: Mapping[str, Placement], on: Cluster, costs: PerElement | None = None
) -> StepCost:
    compiled = compile_plan(graph, plan, batch=1, n_machines=len(on))
    return step_cost(compiled, on, costs or PerElement())


MODELS = ("inception", "encoder", "vision transformer", "local")


def test_a_step_drawn_by_hand() -> None:
    """fc0 on machines 0 and 1, one unit each; fc1 on 0. A number takes 1 s to send.

    seconds      0    1    2    3    4    5    6    7    8    9
    computes  0  |fc0 |      . |fc1 |fc1 back |fc0 back |
              1  |fc0 |                           .  |fc0 back |
    sends     0                               |fc0 |..
              1       |fc0 |..
    """
    graph = chain([3, 2, 1])
    plan = {"fc0": grid((2,), [[1.0, 1.0]], [0, 1]), "fc1": Placement.whole(1, 0)}
    found = priced(graph, plan, cluster(2, bandwidth=4.0, latency=0.5))
    drawing = [
        ("compute", 0, "fc0", 0.0, 1.0),
        ("compute", 0, "fc1", 2.5, 1.0),
        ("compute", 0, "fc1", 3.5, 2.0),
        ("compute", 0, "fc0", 5.5, 2.0),
        ("compute", 1, "fc0", 0.0, 1.0),
        ("compute", 1, "fc0", 7.0, 2.0),
        ("receive", 0, "fc0", 1.0, 1.0),
        ("receive", 1, "fc0", 5.5, 1.0),
        ("send", 0, "fc0", 5.5, 1.0),
        ("send", 1, "fc0", 1.0, 1.0),
    ]
    seen = [(e.track, e.machine, e.name, e.start, e.seconds) for e in events(found)]
    assert sorted(seen) == sorted(drawing)
    assert found.step_seconds == 9.0
    assert [tuple(each) for each in found.seconds] == [(6, 1, 0, 2), (3, 2, 0, 4)]
    assert found.link_bytes == {(0, 1): 4, (1, 0): 4}


def test_memory_is_tensors_states_and_their_gradients() -> None:
    """Weights, biases; own and received states; the input, which has no gradient."""
    graph = chain([3, 2, 1])
    plan = {"fc0": grid((2,), [[1.0, 1.0]], [0, 1]), "fc1": Placement.whole(1, 0)}
    compiled = compile_plan(graph, plan, batch=10, n_machines=3)
    found = step_cost(compiled, cluster(3), PerElement())
    tensors = (8 * (3 + 1 + 2 + 1), 8 * (3 + 1))
    states = (10 * (4 * 3 + 8 * (2 + 1)), 10 * (4 * 3 + 8 * 1))
    assert found.memory_bytes == (tensors[0] + states[0], tensors[1] + states[1], 0)


@pytest.mark.parametrize("name", MODELS)
def test_one_machine_takes_the_sum_of_its_tasks(name: str) -> None:
    found = priced(captured(name)[1], drawn(name, 0, n_machines=1), cluster(1))
    simulated = found.simulated
    total = float((simulated.ends - simulated.starts).sum())
    assert found.step_seconds == pytest.approx(total)
    assert found.seconds[0].compute == pytest.approx(total)
    assert not found.link_bytes


def test_without_a_network_each_layer_takes_as_long_as_its_slowest_machine() -> None:
    graph = chain([5, 24, 12, 24])
    names = [layer.name for layer in graph.layers if layer.kind != INPUT]
    plan = {name: grid(graph[name].shape, [[1.0, 2.0, 1.0]], range(3)) for name in names}
    speeds = (1.0, 3.0, 0.5)
    found = priced(graph, plan, cluster(3), PerElement(speeds))
    slowest = [
        max(r.n_elements / speeds[m] for m, r in plan[name].owners(graph[name])) for name in names
    ]
    assert found.step_seconds == pytest.approx(3 * sum(slowest))


@pytest.mark.parametrize("name", MODELS)
def test_permuting_equal_machines_changes_nothing(name: str) -> None:
    n, graph = 5, captured(name)[1]
    plan = drawn(name, 1, n_machines=n)
    on = cluster(n, bandwidth=8.0, latency=0.25)
    found = priced(graph, plan, on)
    permutation = np.random.default_rng(2).permutation(n).tolist()
    permuted = {key: _permuted(each, permutation) for key, each in plan.items()}
    other = priced(graph, permuted, on)
    assert other.step_seconds == found.step_seconds
    for machine in range(n):
        image = permutation[machine]
        assert other.seconds[image] == found.seconds[machine]
        assert other.memory_bytes[image] == found.memory_bytes[machine]


def _permuted(placement: Placement, permutation: Sequence[int]) -> Placement:
    combine = placement.combine
    return msgspec.structs.replace(
        placement,
        machines=tuple(permutation[machine] for machine in placement.machines),
        combine=None if combine is None else _permuted(combine, permutation),
    )


@pytest.mark.parametrize("name", MODELS)
def test_no_track_overlaps_and_nothing_begins_early(name: str) -> None:
    latency, n = 0.5, 4
    graph = captured(name)[1]
    plan = drawn(name, 3, n_machines=n)
    found = priced(graph, plan, cluster(n, bandwidth=16.0, latency=latency))
    tracks: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in events(found):
        track = tracks.setdefault((event.machine, event.track), [])
        track.append((event.start, event.start + event.seconds))
    for track in tracks.values():
        track.sort()
        for (_, end), (start, _) in pairwise(track):
            assert start >= end - 1e-9
    for machine, seconds in enumerate(found.seconds):
        assert sum(seconds) == pytest.approx(found.step_seconds)
        assert min(seconds) >= -1e-9
        own = [end - start for start, end in tracks.get((machine, "compute"), [])]
        assert seconds.compute == pytest.approx(sum(own))
    simulated = found.simulated
    # Each event begins at once when another one has ended or arrived: nobody waits for nothing.
    moments = np.unique([0.0, *simulated.ends, *(simulated.ends + latency)])
    assert all(np.isclose(moments, start).any() for start in simulated.starts)
    assert found.step_seconds == simulated.arrivals.max()


@pytest.mark.parametrize("name", MODELS)
def test_links_carry_what_messages_hold(name: str) -> None:
    n, graph = 4, captured(name)[1]
    found = priced(graph, drawn(name, 4, n_machines=n), cluster(n, bandwidth=8.0))
    totals: dict[tuple[int, int], int] = {}
    for message in found.compiled.messages:
        pair = (message.sender, message.receiver)
        totals[pair] = totals.get(pair, 0) + message.n_bytes
    assert found.link_bytes == totals
    sent = [event for event in events(found) if event.track == "send"]
    assert sum(event.n_bytes for event in sent) == sum(totals.values())
    for event in sent:
        assert event.seconds == pytest.approx(event.n_bytes / 8.0)


def test_an_idle_machine_handles_messages_at_no_cost() -> None:
    """A chain on two machines, one of which is always idle and handles messages at no cost."""
    graph = chain([1, 1, 1, 1])
    plan = {
        "fc0": Placement.whole(1, 0),
        "fc1": Placement.whole(1, 1),
        "fc2": Placement.whole(1, 0),
    }
    free = cluster(2, bandwidth=1.0)
    busy = handling(free, 2.0)
    assert priced(graph, plan, free).step_seconds == 9.0 + 4 * 4.0
    assert priced(graph, plan, busy).step_seconds == 9.0 + 4 * 4.0


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_stages_that_send_while_they_compute_take_longer(micro_batches: int) -> None:
    """Machine 0 is busy with the next micro-batch while it sends the one before."""
    graph = chain([1, 1, 1])
    plan = {"fc0": Placement.whole(1, 0), "fc1": Placement.whole(1, 1)}
    compiled = compile_plan(graph, plan, batch=1, n_machines=2)
    free = cluster(2, bandwidth=8.0)
    busy = handling(free, 16.0)
    took = [
        step_cost(compiled, on, PerElement(), micro_batches=micro_batches) for on in (free, busy)
    ]
    computing = [sum(each.compute for each in found.seconds) for found in took]
    # At most each end of each message: 4 bytes, at 1/16 s each.
    assert 0.0 < computing[1] - computing[0] <= 2 * 2 * micro_batches * 4 / 16.0
    assert took[1].step_seconds >= took[0].step_seconds
    for found in took:
        assert found.simulated.ends.max() <= found.step_seconds


@pytest.mark.parametrize("cores", [1, 4])
def test_a_message_takes_core_time_at_both_ends(cores: int) -> None:
    """fc0 on machine 0, in two parts; fc1 on machine 1, which is idle.

    seconds       0     1     2
    computes  0   |fc0  |fc0  ..|    half of it when the message begins, half at its end
    sends     0         |fc0|
    """
    graph = chain([1, 1, 1])
    plan = {"fc0": Placement.whole(1, 0), "fc1": Placement.whole(1, 1)}
    compiled = compile_plan(graph, plan, batch=1, n_machines=2)
    free = cluster(2, bandwidth=8.0)
    (machine,) = set(free.machines)
    paying = msgspec.structs.replace(machine, handling=0.1, cores=cores)
    on = msgspec.structs.replace(free, machines=(paying, paying))
    found = step_cost(compiled, on, PerElement(), micro_batches=2)
    seconds = (found.simulated.ends - found.simulated.starts).tolist()
    first, second = (
        seconds[index]
        for index, task in enumerate(found.tasks)
        if (task.layer, task.phase) == ("fc0", "forward")
    )
    assert (first, second) == pytest.approx((1.0, 1.0 + 0.1 / cores))


def test_a_gradient_that_is_added_up_arrives_later() -> None:
    """4 bytes each, and 3 times as many moved, at 12 bytes a second."""
    graph = chain([1, 1, 1])
    plan = {"fc0": Placement.whole(1, 0), "fc1": Placement.whole(1, 1)}
    on = cluster(2, bandwidth=4.0)
    (machine,) = set(on.machines)
    slow = msgspec.structs.replace(machine, memory_rate=12.0)
    adding = msgspec.structs.replace(on, machines=(slow, slow))
    found = priced(graph, plan, adding)
    assert priced(graph, plan, on).step_seconds == 6.0 + 2 * 1.0
    assert found.step_seconds == 6.0 + 2 * 1.0 + 1.0
    assert found.simulated.arrivals.max() == found.step_seconds


def test_adding_up_partial_outputs_takes_its_share_of_memory() -> None:
    """Two summands and the sum, 2 numbers of 4 bytes: 24 bytes, and an overhead."""
    graph = chain([2, 2, 2])
    halves = Placement(cuts=((1,),), machines=(0, 1), combine=Placement.whole(1, 0))
    plan = {"fc0": Placement.whole(1, 0), "fc1": halves}
    machine = Machine(flops=1.0, memory_rate=8.0, overhead=0.5, bandwidth=4.0)
    found = priced(graph, plan, uniform("test", machine, 2))
    (combining,) = [event for event in events(found) if event.what == "combine"]
    assert combining.seconds == 0.5 + 24 / 8.0
    came = [event for event in events(found) if (event.what, event.track) == ("partial", "receive")]
    assert [event.start + event.seconds for event in came] == [combining.start]


def handling(on: Cluster, rate: float) -> Cluster:
    machines = tuple(msgspec.structs.replace(machine, message_rate=rate) for machine in on.machines)
    return msgspec.structs.replace(on, machines=machines)


def test_slow_links_are_slow() -> None:
    graph = chain([1, 1, 1])
    plan = {"fc0": Placement.whole(1, 0), "fc1": Placement.whole(1, 1)}
    fast = cluster(2, bandwidth=4.0)
    slow = msgspec.structs.replace(fast, links={"0-1": 1.0})
    assert priced(graph, plan, fast).step_seconds == 6.0 + 2 * 1.0
    assert priced(graph, plan, slow).step_seconds == 6.0 + 2 * 4.0
    # Machines that appear in another order than their numbers.
    chained = {f"fc{i}": Placement.whole(1, machine) for i, machine in enumerate((2, 0, 1))}
    on = msgspec.structs.replace(cluster(3, bandwidth=4.0), links={"0-2": 1.0})
    assert priced(chain([1, 1, 1, 1]), chained, on).step_seconds == 9.0 + 2 * 4.0 + 2 * 1.0


def test_all_pairs_exchange_messages_without_a_gap() -> None:
    """Each rank starts with the next one, so that no two send to the same one."""
    n = 16
    graph = chain([1, n, n])
    plan = {name: grid((n,), [[1.0] * n], range(n)) for name in ("fc0", "fc1")}
    found = priced(graph, plan, cluster(n, bandwidth=4.0))
    assert found.step_seconds == 2 * (1.0 + 2.0) + 2 * (n - 1)


def test_a_trace_is_json_with_a_process_per_machine() -> None:
    graph = chain([3, 2, 1])
    plan = {"fc0": grid((2,), [[1.0, 1.0]], [0, 1]), "fc1": Placement.whole(1, 0)}
    found = priced(graph, plan, cluster(2, bandwidth=4.0, latency=0.5))
    trace = json.loads(json.dumps(chrome_trace(found)))
    spans = [entry for entry in trace if entry["ph"] == "X"]
    assert len(spans) == 10
    assert {entry["pid"] for entry in trace} == {0, 1}
    names = [e["args"]["name"] for e in trace if e["name"] == "thread_name"]
    assert names == ["compute", "send", "receive"] * 2
    (sent,) = [e for e in spans if e["pid"] == 1 and e["tid"] == 1]
    assert (sent["ts"], sent["dur"], sent["args"]["bytes"]) == (1e6, 1e6, 4)


def test_a_plan_for_more_machines_than_there_are_is_rejected() -> None:
    graph = chain([3, 2])
    compiled = compile_plan(graph, {"fc0": Placement.whole(1, 2)}, batch=1, n_machines=3)
    with pytest.raises(GraphError, match="needs 3 machines, but cluster 'test' has 2"):
        step_cost(compiled, cluster(2), PerElement())
