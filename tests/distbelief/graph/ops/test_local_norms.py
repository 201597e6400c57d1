import pytest
import torch
from hypothesis import given, settings, strategies as st

from distbelief.graph.ops.local_norms import LocalContrastNorm2d
from distbelief.graph.ops.windows import gaussian
from distbelief.graph.region import Shape
from tests.distbelief.graph.ops.comparison import check, layer_of, leaf, random


def naive(x: torch.Tensor, size: int, epsilon: float) -> torch.Tensor:
    """A loop over positions, by the formulas of the module's docstring."""
    n_rows, n_columns = x.shape[2:]
    weights = gaussian(size)
    radius = size // 2

    def means(maps: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(maps[:, :1])
        for row in range(n_rows):
            for column in range(n_columns):
                total, sum_of_weights = torch.zeros(x.shape[0], dtype=x.dtype), 0.0
                for i in range(max(0, row - radius), min(n_rows, row + radius + 1)):
                    for j in range(max(0, column - radius), min(n_columns, column + radius + 1)):
                        weight = weights[i - row + radius] * weights[j - column + radius]
                        total = total + weight * maps[:, :, i, j].mean(1)
                        sum_of_weights += weight
                found[:, 0, row, column] = total / sum_of_weights
        return found

    centred = x - means(x)
    return centred / means(centred**2).sqrt().clamp_min(epsilon)


extents = st.integers(1, 9)


@given(st.tuples(st.integers(1, 3), extents, extents), st.sampled_from([1, 3, 5]), st.data())
@settings(max_examples=40)
def test_local_contrast_in_parts_is_the_module(
    shape: Shape, size: int, data: st.DataObject
) -> None:
    layer = layer_of("local_contrast", shape, shape, size=size, epsilon=0.3)
    x = leaf(random(2, *shape))
    expected = LocalContrastNorm2d(size, epsilon=0.3)(x)
    check(data, layer, expected, {"x": x}, tight=size > 1)


def test_the_module_is_what_its_documentation_says() -> None:
    x = random(2, 3, 5, 7)
    for size in (1, 3, 5):
        found = LocalContrastNorm2d(size, epsilon=0.3)(x)
        torch.testing.assert_close(found, naive(x, size, 0.3))


def test_a_constant_image_gives_zero_and_a_finite_gradient() -> None:
    x = torch.full((1, 2, 6, 6), 7.0, dtype=torch.float64, requires_grad=True)
    y = LocalContrastNorm2d(5)(x)
    assert y.abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(y[0, 0, 0, 0], x)
    assert bool(gradient.isfinite().all())


def test_windows_without_a_middle_are_refused() -> None:
    with pytest.raises(ValueError, match="size must be odd and positive, got 4"):
        LocalContrastNorm2d(4)
    with pytest.raises(ValueError, match="epsilon must be above 0"):
        LocalContrastNorm2d(3, epsilon=0.0)
    assert repr(LocalContrastNorm2d()) == "LocalContrastNorm2d(size=9, epsilon=0.01)"
