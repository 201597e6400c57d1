"""Messages of compiled plans, compared with counting every index (DB-1, DB-2)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from distbelief.graph.graph import INPUT, GraphError, Layer, LayerGraph
from distbelief.graph.operator import joined, operator_of
from distbelief.graph.ops.norms import running_averages
from distbelief.graph.region import Region, Shape
from distbelief.plans.compiler import Compiled, CompilerCache, LruCache, compile_plan, with_gradient
from distbelief.plans.placement import Placement, grid
from distbelief.plans.tasks import Message
from distbelief.worker.execution.dataflow import dataflow
from distbelief.worker.execution.operations import InputOp, OutputOp
from tests.distbelief.plans.plans import captured, chain, random_placement, random_plan


BATCH = 3
Counts = npt.NDArray[np.int64]


def counted(shape: Shape, regions: Sequence[Region]) -> Counts:
    """How often each index occurs."""
    counts = np.zeros(shape, dtype=np.int64)
    for region in regions:
        counts[region.slices] += 1
    return counts


def received(compiled: Compiled, kind: str, name: str, machine: int) -> list[Message]:
    return [
        message
        for message in compiled.messages
        if (message.kind, message.name, message.receiver) == (kind, name, machine)
    ]


def needs(
    graph: LayerGraph, plan: Mapping[str, Placement], name: str, machine: int
) -> list[Region]:
    """What a rank reads of a layer, computed from the operators."""
    found = []
    for layer in graph.consumers[name]:
        kind, placement = operator_of(layer), plan[layer.name]
        partial = kind.partial if placement.combine else None
        shape = layer.input_shapes[0] if partial else layer.shape
        for owner, cell in placement.cells(shape):
            if owner == machine:
                reads = (partial or kind).reads(layer, cell)
                pairs = zip(layer.inputs, reads, strict=True)
                found += [region for read, region in pairs if read == name]
    return found


def drawn(name: str, seed: int) -> tuple[LayerGraph, dict[str, Placement], Compiled]:
    _, graph = captured(name)
    generator = np.random.default_rng([seed, *name.encode()])
    n_machines = int(generator.integers(2, 6))
    plan = random_plan(graph, generator, n_machines=n_machines)
    return graph, plan, compile_plan(graph, plan, batch=BATCH, n_machines=n_machines)


MODELS = ("inception", "unet", "encoder", "vision transformer", "local", "mobilenet")


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MODELS)
def test_each_index_that_is_needed_and_not_owned_comes_once(name: str, seed: int) -> None:
    graph, plan, compiled = drawn(name, seed)
    once = joined(graph)
    for layer in graph.layers:
        owners = [] if layer.kind == INPUT else plan[layer.name].owners(layer)
        for machine in range(compiled.n_machines):
            own = counted(layer.shape, [r for m, r in owners if m == machine])
            needed = counted(layer.shape, needs(graph, plan, layer.name, machine)) > 0
            messages = received(compiled, "state", layer.name, machine)
            came = counted(layer.shape, [r for m in messages for r in m.regions])
            wanted = needed & (own == 0) & (layer.kind != INPUT)
            np.testing.assert_array_equal(came, wanted.astype(np.int64))
            each = 8 if layer.is_integer else 4
            n_bytes = each * (1 if layer.name in once else BATCH) * int(wanted.sum())
            assert sum(message.n_bytes for message in messages) == n_bytes
            for message in messages:
                theirs = counted(layer.shape, [r for m, r in owners if m == message.sender])
                assert all(theirs[region.slices].all() for region in message.regions)


@pytest.mark.parametrize("name", MODELS)
def test_between_two_machines_goes_one_message_of_a_kind_and_name(name: str) -> None:
    _, _, compiled = drawn(name, 2)
    keys = [(m.kind, m.name, m.sender, m.receiver) for m in compiled.messages]
    assert len(set(keys)) == len(keys)
    assert all(message.sender != message.receiver for message in compiled.messages)
    assert all(message.n_bytes > 0 for message in compiled.messages)
    assert compiled.n_messages == len(keys)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_go_the_way_that_states_came(name: str) -> None:
    _, _, compiled = drawn(name, 3)
    ways = {(m.kind, m.name, m.sender, m.receiver): m.regions for m in compiled.messages}
    for (kind, layer, sender, receiver), regions in ways.items():
        if kind == "gradient":
            assert layer in compiled.gradients
            assert ways["state", layer, receiver, sender] == regions
        if kind == "partial_gradient":
            assert ways["partial", layer, receiver, sender] == regions
        if kind == "parameter_gradient":
            assert ways["parameter", layer, receiver, sender] == regions


@pytest.mark.parametrize("name", MODELS)
def test_every_number_of_a_tensor_is_kept_by_one_of_its_users(name: str) -> None:
    graph, _, compiled = drawn(name, 4)
    for tensor, users in compiled.demands.tensors.items():
        shape = graph.tensors[tensor].shape
        kept = compiled.kept[tensor]
        all_used = sum(counted(shape, regions) for regions in users.values())
        np.testing.assert_array_equal(
            counted(shape, [region for _, region in kept]), np.asarray(all_used) > 0
        )
        for machine, regions in users.items():
            own = [region for keeper, region in kept if keeper == machine]
            came = received(compiled, "parameter", tensor, machine)
            came_regions = [region for message in came for region in message.regions]
            np.testing.assert_array_equal(
                counted(shape, [*own, *came_regions]), counted(shape, regions)
            )


@pytest.mark.parametrize("name", MODELS)
def test_programs_send_and_receive_every_message_once(name: str) -> None:
    _, _, compiled = drawn(name, 5)
    sent, got = [], []
    for rank in range(compiled.n_machines):
        for operation in dataflow(compiled, rank).operations:
            if isinstance(operation, OutputOp) and operation.message is not None:
                assert operation.message.sender == rank
                sent.append(operation.message)
            if isinstance(operation, InputOp) and operation.message is not None:
                assert operation.message.receiver == rank
                got.append(operation.message)
    order = [str(message) for message in compiled.messages]
    assert sorted(map(str, sent)) == sorted(order)
    assert sorted(map(str, got)) == sorted(order)


def test_a_weight_that_three_bands_share_is_cut_in_three() -> None:
    """The drawing in `compiler.pieces`."""
    _, graph = captured("vgg16")
    convolution = max(
        (layer for layer in graph.layers if layer.kind == "convolution"),
        key=lambda layer: (layer.shape[1] >= 3, layer.shape[0]),
    )
    plan = {
        layer.name: Placement.whole(len(layer.shape), 2)
        for layer in graph.layers
        if layer.kind != INPUT
    }
    shape = convolution.shape
    plan[convolution.name] = grid(shape, [[1.0], [1.0] * 3, *[[1.0]] * (len(shape) - 2)], [2, 0, 1])
    compiled = compile_plan(graph, plan, batch=1, n_machines=3)
    weight = convolution.tensors["weight"]
    rows = weight.shape[0]
    bounds = [0, round(rows / 3), round(2 * rows / 3), rows]
    assert [m for m, _ in compiled.kept[weight.name]] == [2, 0, 1]
    assert [r.intervals[0] for _, r in compiled.kept[weight.name]] == list(pairwise(bounds))
    kinds = [m.kind for m in compiled.messages if m.name == weight.name]
    assert kinds.count("parameter") == kinds.count("parameter_gradient") == 6
    for machine in range(3):
        flow = dataflow(compiled, machine)
        assert [name for name, _ in flow.items].count(weight.name) == 1
        assert flow.trained == set(range(len(flow.items)))  # what is fetched is pushed


def test_plans_for_other_graphs_are_rejected_with_a_message() -> None:
    graph = chain([4, 6, 2])
    plan = {"fc0": Placement.whole(1, 0), "fc1": Placement.whole(1, 1)}
    for broken, words in (
        ({"fc0": plan["fc0"]}, "no placement for 'fc1'"),
        ({**plan, "x": Placement.whole(1, 0)}, "'x', an input"),
        ({**plan, "fc7": Placement.whole(1, 0)}, "'fc7', which is not a layer"),
        ({**plan, "fc1": Placement.whole(1, 2)}, "machine 2: use 0 to 1"),
    ):
        with pytest.raises(GraphError, match=words):
            compile_plan(graph, broken, batch=1, n_machines=2)


def test_fully_connected_layers_need_messages_between_all_pairs() -> None:
    n = 48
    graph = chain([5, 96, 96])
    plan = {name: grid((96,), [[1.0] * n], range(n)) for name in ("fc0", "fc1")}
    compiled = compile_plan(graph, plan, batch=2, n_machines=n)
    counts = {(way.kind, way.name): len(way) for way in compiled.traffic}
    assert counts == {("state", "fc0"): n * (n - 1), ("gradient", "fc0"): n * (n - 1)}
    assert {way.n_bytes.sum() for way in compiled.traffic} == {n * (n - 1) * 2 * 2 * 4}


def test_all_layers_that_train_have_a_gradient_and_no_input() -> None:
    assert with_gradient(chain([3, 2, 4])) == {"fc0", "fc1"}


def test_a_layer_that_no_output_depends_on_has_none() -> None:
    graph = chain([3, 2, 4])
    assert with_gradient(LayerGraph(graph.layers, ("fc0",))) == {"fc0"}


def test_a_layer_before_all_that_trains_has_none() -> None:
    x = Layer(name="x", kind=INPUT, shape=(3,))
    relu = Layer(name="relu", kind="relu", inputs=("x",), input_shapes=((3,),), shape=(3,))
    assert with_gradient(LayerGraph((x, relu), ("relu",))) == frozenset()


def test_running_averages_have_none() -> None:
    _, graph = captured("resnet18")
    averages = set(running_averages(graph).values())
    assert averages
    assert averages.isdisjoint(with_gradient(graph))


def test_maxima_of_a_softmax_have_none_but_its_sums_do() -> None:
    _, graph = captured("mobilenet")
    found = with_gradient(graph)
    assert "loss" in found
    assert "loss.maximum" in graph.by_name
    assert "loss.maximum" not in found
    assert "targets" not in found


def test_the_least_recently_used_entry_is_dropped() -> None:
    made: list[int] = []
    parts = LruCache[int](2)

    def ask(key: int) -> int:
        def make() -> int:
            made.append(key)
            return 10 * key

        return parts.get(key, make)

    assert [ask(key) for key in (1, 2, 1, 3, 1, 2)] == [10, 20, 10, 30, 10, 20]
    assert made == [1, 2, 3, 2]


def same(one: Compiled, other: Compiled) -> bool:
    ways = zip(one.traffic, other.traffic, strict=True)
    return (
        one.tasks == other.tasks
        and one.demands == other.demands
        and list(one.demands.tensors) == list(other.demands.tensors)
        and one.kept == other.kept
        and one.messages == other.messages
        and all((a.kind, a.name) == (b.kind, b.name) for a, b in ways)
    )


@pytest.mark.parametrize("name", ["mobilenet", "vision transformer", "unet"])
def test_plans_compiled_with_a_cache_are_equal(name: str) -> None:
    _, graph = captured(name)
    generator = np.random.default_rng(list(name.encode()))
    cache = CompilerCache(graph, n_plans=2)
    plan = random_plan(graph, generator, n_machines=4)
    layers = [layer for layer in graph.layers if layer.kind != INPUT]
    for _ in range(6):
        alone = compile_plan(graph, plan, batch=3, n_machines=4)
        with_cache = compile_plan(graph, plan, batch=3, n_machines=4, cache=cache)
        assert same(with_cache, alone)
        layer = layers[generator.integers(len(layers))]
        plan |= {layer.name: random_placement(layer, generator, n_machines=4)}


def test_a_placement_that_is_known_is_checked_for_fewer_machines() -> None:
    _, graph = captured("alexnet")
    plan = {
        layer.name: Placement.whole(len(layer.shape), 3)
        for layer in graph.layers
        if layer.kind != INPUT
    }
    cache = CompilerCache(graph)
    compile_plan(graph, plan, batch=3, n_machines=4, cache=cache)
    for _ in range(2):
        with pytest.raises(GraphError, match="placed on machine 3: use 0 to 2"):
            compile_plan(graph, plan, batch=3, n_machines=3, cache=cache)
