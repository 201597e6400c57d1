import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from distbelief.graph.graph import GraphError, Layer
from distbelief.graph.operator import Step
from distbelief.graph.ops import dropout
from distbelief.graph.region import Region
from tests.distbelief.graph.ops.comparison import check, close, layer_of, leaf, random, values_of


def dropout_of(*shape: int, probability: float = 0.5, n_shared: int = 0, name: str = "") -> Layer:
    return layer_of("dropout", shape, shape, name=name, probability=probability, n_shared=n_shared)


def kept(layer: Layer, n_samples: int, **step: int) -> torch.Tensor:
    like = torch.empty(n_samples, *layer.shape)
    step_of = Step(training=True, **step)  # type: ignore[arg-type]
    return mask_of(layer, like, step_of) > 0


def mask_of(layer: Layer, like: torch.Tensor, step: Step) -> torch.Tensor:
    n_shared = layer.integer("n_shared")
    shape = layer.shape[: len(layer.shape) - n_shared]
    region, probability = Region.of(*shape), layer.number("probability")
    found = dropout.mask(layer.name, shape, region, probability=probability, like=like, step=step)
    return found.view(*found.shape, *(1,) * n_shared)


def reference(numbers: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    """The hash in unsigned arithmetic, where wrapping is defined."""
    x = numbers.numpy().astype(np.int64).astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


@given(
    st.lists(st.integers(1, 4), max_size=3).map(tuple),
    st.integers(0, 3),
    st.integers(0, 1 << 63),
    st.integers(0, 1 << 40),
    st.data(),
)
@settings(max_examples=60)
def test_any_split_and_any_range_of_samples_has_the_same_mask(
    shape: tuple[int, ...], n_shared: int, seed: int, first: int, data: st.DataObject
) -> None:
    layer = dropout_of(*shape, n_shared=min(n_shared, len(shape)))
    x = leaf(random(5, *shape))
    step = Step(training=True, seed=seed, first_sample=first)
    expected = x * mask_of(layer, x, step)
    check(data, layer, expected, {"x": x}, step=step)
    start = data.draw(st.integers(0, 4))
    later = Step(training=True, seed=seed, first_sample=first + start)
    close(values_of([layer], {"x": x[start:]}, step=later)["dropout"], expected[start:])


@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1))
@settings(max_examples=50)
def test_the_hash_is_that_of_unsigned_arithmetic(numbers: list[int]) -> None:
    signed = torch.tensor(numbers, dtype=torch.int32)
    found = dropout._hash(signed).numpy().view(np.uint32)
    np.testing.assert_array_equal(found, reference(signed))


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_should_be(probability: float) -> None:
    """Overall, per sample, per element, and for pairs of neighbors: to 5 sigmas."""
    layer = dropout_of(50, 40, probability=probability)
    dropped = ~kept(layer, 500, seed=3)
    spread = math.sqrt(probability * (1 - probability))

    def check(mean: torch.Tensor, count: int, wanted: float, sigma: float) -> None:
        # Over n means at once, the largest deviation is a little more.
        bound = 5.5 * sigma / math.sqrt(count)
        assert float((mean - wanted).abs().max()) < bound

    frequencies = dropped.double()
    check(frequencies.mean(), dropped.numel(), probability, spread)
    if probability >= 0.1:
        check(frequencies.mean((1, 2)), 2000, probability, spread)
        check(frequencies.mean(0), 500, probability, spread)
    both = probability**2
    for one, other in [
        (dropped[:, 1:], dropped[:, :-1]),
        (dropped[:, :, 1:], dropped[:, :, :-1]),
        (dropped[1:], dropped[:-1]),
    ]:
        together = (one & other).double().mean()
        check(together, one.numel(), both, math.sqrt(both * (1 - both)) + 1e-9)


def test_seeds_layers_and_samples_have_masks_of_their_own() -> None:
    layer = dropout_of(1000)
    masks = [
        kept(layer, 2, seed=1),
        kept(layer, 2, seed=2),
        kept(dropout_of(1000, name="other"), 2, seed=1),
        kept(layer, 2, seed=1, first_sample=2),
    ]
    rows = torch.cat(masks).double() - 0.5
    agreement = (rows @ rows.T) / 250  # 1 for equal masks, near 0 for others
    others = agreement[~torch.eye(len(rows), dtype=torch.bool)]
    assert float(others.abs().max()) < 6 / math.sqrt(1000)


def test_channels_share_their_fate() -> None:
    layer = dropout_of(8, 3, 3, n_shared=2)
    x = torch.ones(4, 8, 3, 3)
    value = values_of([layer], {"x": x}, step=Step(training=True))["dropout"]
    assert torch.equal(value, value[..., :1, :1].expand(4, 8, 3, 3))
    assert set(value.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(
    ("probability", "training", "factor"),
    [(0.5, False, 1.0), (0.0, True, 1.0), (1.0, True, 0.0), (1 - 1e-12, True, 0.0)],
)
def test_nothing_is_dropped_outside_of_training_and_all_with_probability_one(
    probability: float, *, training: bool, factor: float
) -> None:
    x, layer = random(2, 3), dropout_of(3, probability=probability)
    close(values_of([layer], {"x": x}, step=Step(training=training))["dropout"], factor * x)


def test_a_layer_with_too_many_elements_to_tell_apart_is_refused() -> None:
    shape, region, like = (1 << 16, 1 << 16), Region.of(1, 1), torch.zeros(1, 1, 1)
    with pytest.raises(GraphError, match="4294967296 elements per sample"):
        dropout.mask("drop", shape, region, probability=0.5, like=like, step=Step())
