"""Resharding to another number of shards keeps every bit of every element."""

from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from distbelief.core.vectors import Vector
from distbelief.parameter_server.checkpoint import Read, ShardState, reshard
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.rules import (
    SGD,
    Adagrad,
    Adam,
    Momentum,
    RMSprop,
    UpdateRule,
    initial_state,
)
from distbelief.parameter_server.step_counts import StepCounts
from tests.distbelief.parameter_server.pair import scatter


RULES: tuple[UpdateRule, ...] = (
    SGD(learning_rate=0.1),
    Momentum(learning_rate=0.1),
    Adagrad(learning_rate=0.1, initial_accumulator=0.5),
    RMSprop(learning_rate=0.1, momentum=0.5),
    Adam(learning_rate=0.1),
    msgspec.convert({"name": "NAdam", "lr": 0.1}, UpdateRule),
    Adagrad(learning_rate=0.1, groups={"a*": RMSprop(learning_rate=0.1, momentum=0.5)}),
)


@st.composite
def tensor_specs(draw: st.DrawFn) -> list[TensorSpec]:
    """Return tensors that are cut, that go whole, that are empty, and buffers."""
    kinds: tuple[Literal["parameter", "buffer"], ...] = ("parameter", "buffer")
    sizes = st.sampled_from([0, 1, 5, 63, 64, 65, 128, 300, 1000])
    names = draw(st.lists(st.text("abc", min_size=1), max_size=6, unique=True))
    return [
        TensorSpec(name=n, shape=(draw(sizes),), kind=draw(st.sampled_from(kinds))) for n in names
    ]


dtypes: st.SearchStrategy[Literal["float32", "float64"]] = st.sampled_from(("float32", "float64"))
numbers = st.integers(1, 7)


def vector_of(stream: np.random.Generator, n: int, dtype: np.dtype) -> Vector:
    """Return any bits at all: NaN, infinities and denormals among them."""
    vector: Vector = np.frombuffer(stream.bytes(n * dtype.itemsize), dtype).copy()
    return vector


def trained(layout: Layout, rule: UpdateRule, *, seed: int) -> list[ShardState]:
    """Return shards full of noise, as pushes leave them: padding is what it was."""
    stream = np.random.default_rng(seed)
    contents = []
    for k in range(layout.n_shards):
        n_gradient = layout.n_gradient(k)
        values: Vector = np.zeros(layout.shard_size(k), layout.dtype)
        state = initial_state(rule, layout, k)
        for segment in layout.segments(k):
            here = slice(segment.offset, segment.offset + segment.n_elements)
            values[here] = vector_of(stream, segment.n_elements, layout.dtype)
            for vector in state.values() if segment.offset < n_gradient else ():
                vector[here] = vector_of(stream, segment.n_elements, layout.dtype)
        contents.append(
            ShardState(
                incarnation=0,
                clock=40 + k,
                values=values,
                state=state,
                clients=(),
                steps=StepCounts(40 + k),
            )
        )
    return contents


def reads(contents: list[ShardState]) -> Read:
    def read(shard_index: int, array: str, start: int, stop: int) -> Vector:
        content = contents[shard_index]
        arrays = {"values": content.values} | {
            f"state.{name}": vector for name, vector in content.state.items()
        }
        part = arrays[array][start:stop]
        assert part.size == stop - start
        return part

    return read


def recut(
    contents: list[ShardState], old: Layout, new: Layout, rule: UpdateRule
) -> list[ShardState]:
    clocks = [content.clock for content in contents]
    steps = [content.steps for content in contents]
    return [
        reshard(old, new, k, rule=rule, clocks=clocks, steps=steps, read=reads(contents))
        for k in range(new.n_shards)
    ]


def assert_same(some: list[ShardState], others: list[ShardState]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.values.tobytes() == other.values.tobytes()
        assert one.state.keys() == other.state.keys()
        for name, vector in one.state.items():
            assert vector.tobytes() == other.state[name].tobytes()


@given(tensor_specs(), dtypes, numbers, numbers, st.sampled_from(RULES), st.integers(0, 2**32))
def test_there_and_back_again_is_the_same_to_the_bit(
    specs: list[TensorSpec],
    dtype: Literal["float32", "float64"],
    n_old: int,
    n_new: int,
    rule: UpdateRule,
    seed: int,
) -> None:
    old = Layout.of(specs, n_shards=n_old, dtype=dtype)
    new = Layout.of(specs, n_shards=n_new, dtype=dtype)
    before = trained(old, rule, seed=seed)
    between = recut(before, old, new, rule)
    assert_same(recut(between, new, old, rule), before)


@given(tensor_specs(), numbers, numbers, st.integers(0, 2**32))
def test_the_whole_tensors_stay_the_same_and_padding_is_zero(
    specs: list[TensorSpec], n_old: int, n_new: int, seed: int
) -> None:
    rule = Adagrad(learning_rate=0.1)
    old, new = (Layout.of(specs, n_shards=n) for n in (n_old, n_new))
    before = trained(old, rule, seed=seed)
    after = recut(before, old, new, rule)
    for name in ("values", "sum_of_squares"):
        whole = [[torch.zeros(spec.n_elements) for spec in old.tensors] for _ in range(2)]
        for tensors, layout, contents in zip(whole, (old, new), (before, after), strict=True):
            for k, content in enumerate(contents):
                vector = content.values if name == "values" else content.state[name]
                padded = np.zeros(layout.shard_size(k), layout.dtype)
                padded[: vector.size] = vector  # the rule has nothing of buffers
                scatter(layout, k, padded, tensors)
        for one, other in zip(*whole, strict=True):
            assert one.numpy().tobytes() == other.numpy().tobytes()
    for k, content in enumerate(after):
        is_padding = np.ones(new.shard_size(k), bool)
        for segment in new.segments(k):
            is_padding[segment.offset : segment.offset + segment.n_elements] = False
        assert not content.values[is_padding].any()


def test_padding_of_the_state_is_what_the_rule_begins_with() -> None:
    rule = Adagrad(learning_rate=0.1, initial_accumulator=0.5)
    specs = [TensorSpec(name="w", shape=(5,))]
    old, new = (Layout.of(specs, n_shards=n) for n in (1, 2))
    (before,) = trained(old, rule, seed=0)
    after, empty = recut([before], old, new, rule)
    assert after.state["sum_of_squares"][5:].tolist() == [0.5] * 59
    assert empty.values.size == 0


def test_a_shard_begins_at_the_largest_clock_of_those_whose_elements_it_holds() -> None:
    specs = [TensorSpec(name="w", shape=(640,)), TensorSpec(name="b", shape=(3,))]
    rule = SGD(learning_rate=0.1)
    layouts = {n: Layout.of(specs, n_shards=n) for n in (1, 2, 3, 11)}
    two = trained(layouts[2], rule, seed=0)  # at clocks 40 and 41
    clocks = {
        n: [content.clock for content in recut(two, layouts[2], layout, rule)]
        for n, layout in layouts.items()
    }
    assert clocks[1] == [41]
    assert clocks[2] == [40, 41]  # the same cut: nothing is put together
    assert clocks[3][0] == 40
    assert clocks[3][2] == 41
    assert max(clocks[11]) == clocks[11][-1] == 41  # one that holds nothing, too


def test_ranges_are_read_only_once_and_never_more_than_is_needed() -> None:
    specs = [TensorSpec(name="w", shape=(1000,)), TensorSpec(name="m", shape=(7,))]
    rule = Adam(learning_rate=0.1)
    old, new = (Layout.of(specs, n_shards=n) for n in (3, 2))
    contents = trained(old, rule, seed=1)
    n_read = dict.fromkeys(("values", "state.mean", "state.mean_square"), 0)

    def read(shard_index: int, array: str, start: int, stop: int) -> Vector:
        n_read[array] += stop - start
        return reads(contents)(shard_index, array, start, stop)

    for k in range(2):
        reshard(old, new, k, rule=rule, clocks=[1, 1, 1], steps=[StepCounts(1)] * 3, read=read)
    assert set(n_read.values()) == {1007}


def test_layouts_of_other_tensors_are_refused() -> None:
    one = Layout.of([TensorSpec(name="w", shape=(5,))], n_shards=1)
    other = Layout.of([TensorSpec(name="w", shape=(6,))], n_shards=2)
    double = Layout.of([TensorSpec(name="w", shape=(5,))], n_shards=2, dtype="float64")
    for wrong in (other, double):
        with pytest.raises(ValueError, match="differ in more than shards"):
            reshard(one, wrong, 0, rule=SGD(learning_rate=1.0), clocks=[], steps=[], read=reads([]))
