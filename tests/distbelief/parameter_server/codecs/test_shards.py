"""E11: the number of shards changes no bit of what is sent and what is kept, by any codec."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from distbelief.parameter_server.codecs import Codec
from distbelief.parameter_server.codecs.exactness import History, Residual
from distbelief.parameter_server.codecs.threshold import Threshold
from distbelief.parameter_server.layout import Layout, TensorSpec
from tests.distbelief.parameter_server.codecs.residuals import (
    CODECS,
    decoded,
    name_of,
    residual,
    tuned,
)


Tensors = dict[str, NDArray[np.float32]]


def on_shards(layout: Layout, tensors: Tensors) -> list[Residual]:
    vectors = [np.zeros(layout.n_gradient(k), np.float32) for k in range(layout.n_shards)]
    for vector, (name, part, place) in placed(layout, vectors):
        vector[place] = tensors[name][part]
    return vectors


def placed(
    layout: Layout, vectors: Sequence[Residual]
) -> list[tuple[Residual, tuple[str, slice, slice]]]:
    """Return every part of a tensor in the order of tensors, and where it lies in which vector."""
    found = [
        (segment.tensor_index, segment.start, segment, vector)
        for k, vector in enumerate(vectors)
        for segment in layout.segments(k)
    ]
    return [
        (
            vector,
            (
                layout.tensors[index].name,
                slice(start, segment.stop),
                slice(segment.offset, segment.offset + segment.n_elements),
            ),
        )
        for index, start, segment, vector in sorted(found, key=lambda one: one[:2])
    ]


def pushed_by(codec: Codec, tensors: Tensors, n_shards: int, n_pushes: int) -> list[Tensors]:
    """Return what each push sends, and the rest after the last."""
    specs = [TensorSpec(name=name, shape=one.shape) for name, one in tensors.items()]
    layout = Layout.of(specs, n_shards=n_shards)
    vectors = on_shards(layout, tensors)
    history, sent = History(), []
    for _ in range(n_pushes):
        parts = [vector[place] for vector, (_, _, place) in placed(layout, vectors)]
        cut = codec.choose(parts, history)
        n_sent, targets = 0, []
        for vector in vectors:
            out = np.zeros(codec.n_words_max(len(vector)), np.uint32)
            encoded = codec.encode(vector, cut, out)
            n_sent += encoded.n_sent
            targets.append(decoded(codec, out[: encoded.n_words], len(vector)))
        sent.append(gathered(layout, targets))
        n_elements = sum(map(len, parts))
        history = codec.after(history, cut, n_sent=n_sent, n_elements=n_elements)
    return [*sent, gathered(layout, vectors)]


def gathered(layout: Layout, vectors: Sequence[Residual]) -> Tensors:
    tensors = {one.name: np.zeros(one.n_elements, np.float32) for one in layout.tensors}
    for vector, (name, part, place) in placed(layout, vectors):
        tensors[name][part] = vector[place]
    return tensors


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
@settings(max_examples=10)
@given(
    seed=st.integers(0, 1 << 60),
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=5),
    n_shards=st.integers(2, 7),
)
def test_the_number_of_shards_changes_no_bit(
    codec: Codec, seed: int, sizes: list[int], n_shards: int
) -> None:
    tensors = {str(k): residual(seed + k, size) for k, size in enumerate(sizes)}
    codec = tuned(codec, tensors["0"], seed)
    one, many = (pushed_by(codec, tensors, n, 3) for n in (1, n_shards))
    for alone, together in zip(one, many, strict=True):
        for name, values in alone.items():
            assert (values + np.float32(0)).tobytes() == (
                together[name] + np.float32(0)
            ).tobytes(), name


@pytest.mark.parametrize("codec", CODECS, ids=name_of)
def test_it_changes_none_of_a_model_that_is_only_sampled(codec: Codec) -> None:
    generator = np.random.default_rng(1)
    sizes = {"a": 150_001, "b": 64, "c": 90_000, "d": 7}
    tensors = {
        name: generator.standard_normal(n).astype(np.float32) * np.float32(0.01)
        for name, n in sizes.items()
    }
    if isinstance(codec, Threshold):
        codec = Threshold(tau=0.02, adaptive=codec.adaptive, clip=codec.clip, clip_every=2)
    one, many = (pushed_by(codec, tensors, n, 3) for n in (1, 3))
    for alone, together in zip(one, many, strict=True):
        assert all(np.array_equal(alone[name], together[name]) for name in sizes)
