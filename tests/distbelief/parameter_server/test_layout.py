import math
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from distbelief.core.vectors import ALIGNMENT, Vector
from distbelief.parameter_server.layout import Layout, LayoutSpec, PartialView, Segment, TensorSpec
from tests.distbelief.parameter_server.pair import gather, numbered, scatter


SPEECH = [440, 2560, 2560, 2560, 2560, 8192]  # units per layer: 41.8 M parameters


@st.composite
def tensor_specs(draw: st.DrawFn) -> list[TensorSpec]:
    sizes = st.sampled_from([0, 1, 2, 3, 7, 31, 64, 65])
    shapes = st.lists(sizes, max_size=3).map(tuple)
    names = draw(st.lists(st.text("ab.é", min_size=1), max_size=8, unique=True))
    kinds: tuple[Literal["parameter", "buffer"], ...] = ("parameter", "buffer")
    return [
        TensorSpec(name=n, shape=draw(shapes), kind=draw(st.sampled_from(kinds))) for n in names
    ]


def layouts() -> st.SearchStrategy[Layout]:
    dtypes: tuple[Literal["float32", "float64"], ...] = ("float32", "float64")
    return st.builds(
        Layout.of, tensor_specs(), n_shards=st.integers(1, 9), dtype=st.sampled_from(dtypes)
    )


def vectors(layout: Layout, *, fill: float = math.nan) -> list[Vector]:
    return [np.full(layout.shard_size(k), fill, layout.dtype) for k in range(layout.n_shards)]


@given(layout=layouts())
def test_each_element_lies_on_exactly_one_shard(layout: Layout) -> None:
    """DB-5."""
    counts = [np.zeros(spec.n_elements, np.int64) for spec in layout.tensors]
    for k in range(layout.n_shards):
        for segment in layout.segments(k):
            assert segment.n_elements > 0
            counts[segment.tensor_index][segment.start : segment.stop] += 1
    assert all((count == 1).all() for count in counts)


@given(layout=layouts())
def test_segments_are_aligned_and_apart_parameters_first(layout: Layout) -> None:
    for k in range(layout.n_shards):
        end = 0
        for segment in layout.segments(k):
            is_parameter = layout.tensors[segment.tensor_index].kind == "parameter"
            assert is_parameter == (segment.offset < layout.n_gradient(k))
            assert segment.offset == -(-end // ALIGNMENT) * ALIGNMENT
            assert segment.start % ALIGNMENT == 0
            end = segment.offset + segment.n_elements
            assert not is_parameter or end <= layout.n_gradient(k)
        assert layout.shard_size(k) == -(-end // ALIGNMENT) * ALIGNMENT
        assert layout.n_gradient(k) % ALIGNMENT == 0


@given(layout=layouts(), size=st.integers(1, 200))
def test_what_is_gathered_is_scattered_back_unchanged_whole_or_in_blocks(
    layout: Layout, size: int
) -> None:
    tensors = numbered(layout)
    whole, in_blocks = ([torch.full_like(one, math.nan) for one in tensors] for _ in range(2))
    view = PartialView(layout)
    for k, vector in enumerate(vectors(layout)):
        gather(layout, k, tensors, vector)
        vector.flags.writeable = False
        scatter(layout, k, vector, whole)
        starts = range(0, len(vector), size)
        view.slices[k].bounds = [(start, min(start + size, len(vector))) for start in starts]
        for index, (start, stop) in enumerate(view.slices[k].bounds):
            view.block_copier(k, index).scatter(vector[start:stop], in_blocks)
    for tensor, one, other in zip(tensors, whole, in_blocks, strict=True):
        assert torch.equal(tensor, one)
        assert torch.equal(tensor, other)


@given(layout=layouts())
def test_gather_fills_the_vector_with_elements_and_zeros(layout: Layout) -> None:
    gathered = vectors(layout)
    for k, vector in enumerate(gathered):
        gather(layout, k, numbered(layout), vector)
        assert np.isfinite(vector).all()
    n_elements = sum(spec.n_elements for spec in layout.tensors)
    everything = np.concatenate(gathered)
    assert np.count_nonzero(everything) == n_elements
    assert sorted(everything[everything != 0]) == list(range(1, n_elements + 1))
    for k, vector in enumerate(gathered):
        gather(layout, k, [None] * len(layout.tensors), vector)
        assert not vector.any()


@given(specs=tensor_specs(), n_shards=st.integers(1, 9), data=st.data())
def test_a_layout_does_not_depend_on_the_order_of_the_tensors(
    specs: list[TensorSpec], n_shards: int, data: st.DataObject
) -> None:
    one = Layout.of(specs, n_shards=n_shards)
    other = Layout.of(data.draw(st.permutations(specs)), n_shards=n_shards)
    assert one.tensors == other.tensors
    assert one.fingerprint == other.fingerprint
    for k in range(n_shards):
        assert one.segments(k) == other.segments(k)


@given(layout=layouts())
def test_a_layout_is_rebuilt_from_json(layout: Layout) -> None:
    text = msgspec.json.encode(layout.spec)
    other = Layout(msgspec.json.decode(text, type=LayoutSpec))
    assert other.fingerprint == layout.fingerprint
    assert other.dtype == layout.dtype
    assert [other.segments(k) for k in range(other.n_shards)] == [
        layout.segments(k) for k in range(layout.n_shards)
    ]


def test_a_fingerprint_tells_apart_whatever_cuts_differently() -> None:
    tensor = TensorSpec(name="a", shape=(2, 3))
    fingerprints = {
        Layout.of([tensor], n_shards=1).fingerprint,
        Layout.of([tensor], n_shards=2).fingerprint,
        Layout.of([tensor], n_shards=1, dtype="float64").fingerprint,
        Layout.of([TensorSpec(name="b", shape=(2, 3))], n_shards=1).fingerprint,
        Layout.of([TensorSpec(name="a", shape=(3, 2))], n_shards=1).fingerprint,
        Layout.of([TensorSpec(name="a", shape=(2, 3), kind="buffer")], n_shards=1).fingerprint,
        Layout.of([], n_shards=1).fingerprint,
    }
    assert len(fingerprints) == 7


def test_a_fingerprint_never_changes_from_one_release_to_the_next() -> None:
    """Or old snapshots cannot be read. A change of the cutting must change it."""
    layout = Layout.of([TensorSpec(name="a", shape=(300, 2))], n_shards=3)
    assert layout.fingerprint == "b7542d409fc2999f"


def test_the_layout_is_that_of_the_drawing() -> None:
    layout = Layout.of(
        [
            TensorSpec(name="m", shape=(2,), kind="buffer"),
            TensorSpec(name="b", shape=(5,)),
            TensorSpec(name="a", shape=(3, 100)),
        ],
        n_shards=2,
    )
    a, b, m = 0, 1, 2
    # shard 0   a[0:128] | b[0:5] 0...0 | m[0:2] 0...0      offsets   0, 128, 192
    # shard 1   a[128:300] 0........0                        offsets   0
    assert layout.segments(0) == (
        Segment(a, 0, 128, 0),
        Segment(b, 0, 5, 128),
        Segment(m, 0, 2, 192),
    )
    assert layout.segments(1) == (Segment(a, 128, 300, 0),)
    assert [layout.n_gradient(k) for k in range(2)] == [192, 192]
    assert [layout.shard_size(k) for k in range(2)] == [256, 192]


@pytest.mark.parametrize("n_shards", range(2, 17))
def test_the_shards_of_the_speech_net_are_of_one_size_within_2_percent(n_shards: int) -> None:
    specs = []
    for index, (n_in, n_out) in enumerate(pairwise(SPEECH)):
        specs.append(TensorSpec(name=f"{index}.weight", shape=(n_out, n_in)))
        specs.append(TensorSpec(name=f"{index}.bias", shape=(n_out,)))
    layout = Layout.of(specs, n_shards=n_shards)
    sizes = [layout.shard_size(k) for k in range(n_shards)]
    assert max(sizes) <= 1.02 * min(sizes)


def test_small_tensors_are_spread_over_the_shards() -> None:
    specs = [TensorSpec(name=f"norm{i}.bias", shape=(64,)) for i in range(40)]
    layout = Layout.of(specs, n_shards=4)
    assert [layout.shard_size(k) for k in range(4)] == [640] * 4


def test_a_net_smaller_than_its_shards_leaves_some_empty() -> None:
    layout = Layout.of([TensorSpec(name="a", shape=())], n_shards=3)
    assert [layout.shard_size(k) for k in range(3)] == [64, 0, 0]
    gather(layout, 2, [torch.ones(1)], np.zeros(0, np.float32))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_tensors_of_other_dtypes_are_cast_both_ways(dtype: torch.dtype) -> None:
    layout = Layout.of([TensorSpec(name="a", shape=(4,))], n_shards=1)
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    [vector] = vectors(layout)
    gather(layout, 0, [tensor], vector)
    assert vector[:4].tolist() == [0.0, 1.0, 1.0, 0.0]
    received = torch.ones(4, dtype=dtype)
    scatter(layout, 0, vector, [received])
    assert torch.equal(received, tensor)


def test_averages_of_counts_are_rounded_to_the_nearest_count() -> None:
    layout = Layout.of([TensorSpec(name="a", shape=(3,), kind="buffer")], n_shards=1)
    [vector] = vectors(layout)
    vector[:3] = [2.9999, 3.0001, -0.6]
    counts = torch.zeros(3, dtype=torch.int64)
    scatter(layout, 0, vector, [counts])
    assert counts.tolist() == [3, 3, -1]


def test_values_reach_parameters_that_require_gradients() -> None:
    layout = Layout.of([TensorSpec(name="a", shape=(3,))], n_shards=1)
    parameter = torch.nn.Parameter(torch.zeros(3))
    scatter(layout, 0, np.ones(64, np.float32), [parameter])
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    [vector] = vectors(layout)
    gather(layout, 0, [parameter], vector)
    assert vector.sum() == 3.0


def test_tensors_that_do_not_fit_the_layout_are_named() -> None:
    layout = Layout.of([TensorSpec(name="a", shape=(3, 2))], n_shards=1)
    [vector] = vectors(layout)
    with pytest.raises(ValueError, match="0 tensors given, the layout has 1: give"):
        scatter(layout, 0, vector, [])
    with pytest.raises(ValueError, match=r"'a' has shape \(3, 2\).* flatten"):
        gather(layout, 0, [torch.zeros(3, 2)], vector)
    with pytest.raises(ValueError, match=r"'a' is torch.complex64.*view_as_real"):
        gather(layout, 0, [torch.zeros(6, dtype=torch.complex64)], vector)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"tensors": [], "n_shards": 0}, "n_shards is 0; use at least 1"),
        ({"tensors": [], "n_shards": 1, "dtype": "float16"}, "float16"),
        ({"tensors": [{"name": "", "shape": []}], "n_shards": 1}, "no name"),
        ({"tensors": [{"name": "a", "shape": [2, -1]}], "n_shards": 1}, r"'a' has shape \(2, -1\)"),
        (
            {"tensors": [{"name": "a", "shape": []}] * 2, "n_shards": 1},
            r"\['a'\] are given more than once; .* tied",
        ),
    ],
)
def test_a_wrong_layout_is_refused_by_name_and_value(spec: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.convert(spec, LayoutSpec)
