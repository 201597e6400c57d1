import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional

from distbelief.graph.ops.windows import Weights, gaussian, window_sums


WEIGHTS = st.lists(st.floats(0.125, 2.0), min_size=1, max_size=4).map(tuple)


@given(
    rows=WEIGHTS,
    columns=WEIGHTS,
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    extents=st.tuples(st.integers(4, 9), st.integers(4, 9)),
)
def test_sums_and_gradients_are_those_of_a_convolution(
    rows: Weights, columns: Weights, stride: tuple[int, int], extents: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, 2, *extents, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    kernel = torch.outer(*(torch.tensor(w, dtype=x.dtype) for w in (rows, columns)))
    maps = functional.conv2d(x.flatten(0, 1)[:, None], kernel[None, None], stride=stride)
    wanted = maps.view(3, 2, *maps.shape[2:])
    found = window_sums(x, rows=rows, columns=columns, stride=stride)
    torch.testing.assert_close(found, wanted)
    seed = torch.rand(found.shape, generator=generator, dtype=x.dtype)
    (gradient,) = torch.autograd.grad(found, x, seed)
    (expected,) = torch.autograd.grad(wanted, x, seed)
    torch.testing.assert_close(gradient, expected)


def test_a_window_has_the_same_bits_wherever_it_lies() -> None:
    x = torch.rand(2, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    weights = gaussian(5)
    whole = window_sums(x, rows=weights, columns=weights)
    part = window_sums(x[:, :, 3:12, 6:19], rows=weights, columns=weights)
    assert torch.equal(whole[:, :, 3:8, 6:15], part)


def test_weights_sum_to_one() -> None:
    assert sum(gaussian(5)) == pytest.approx(1.0)
    assert gaussian(1) == (1.0,)


def test_a_window_that_does_not_fit_is_refused() -> None:
    ones = (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="a window of 3 does not fit into 2 places"):
        window_sums(torch.zeros(1, 2, 4), rows=ones, columns=ones)
