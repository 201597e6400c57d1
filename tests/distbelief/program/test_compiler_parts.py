"""The compiler cache changes no plan."""

import numpy as np
import pytest

from distbelief.graph.graph import INPUT, GraphError
from distbelief.program.compiler import Compiled, CompilerCache, LruCache, compile_plan
from distbelief.program.placement import Placement
from tests.distbelief.program.plans import captured, random_placement, random_plan


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
