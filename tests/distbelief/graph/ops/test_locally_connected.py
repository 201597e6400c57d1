import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.nn import functional

from distbelief.graph.graph import Layer
from distbelief.graph.ops import locally_connected
from distbelief.graph.ops.locally_connected import LocallyConnected2d
from tests.distbelief.graph.ops.comparison import assert_parts_equal, check, layer_of, leaf, random


def naive(module: LocallyConnected2d, x: torch.Tensor) -> torch.Tensor:
    """A loop over positions, by the definition."""
    rows, columns = module.padding
    x = functional.pad(x, (columns, columns, rows, rows))
    lines = []
    for row in range(module.weight.shape[0]):
        line = []
        for column in range(module.weight.shape[1]):
            top, left = row * module.stride[0], column * module.stride[1]
            patch = x[:, :, top : top + module.kernel_size[0], left : left + module.kernel_size[1]]
            bias = None if module.bias is None else module.bias[row, column]
            line.append(functional.linear(patch.flatten(1), module.weight[row, column], bias))
        lines.append(torch.stack(line, 2))
    return torch.stack(lines, 2)


@st.composite
def modules(draw: st.DrawFn) -> LocallyConnected2d:
    pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
    size, stride = draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    extents = draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    assume(all(extents[d] + 2 * padding[d] >= size[d] for d in (0, 1)))
    module = LocallyConnected2d(
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        size,
        input_size=extents,
        stride=stride,
        padding=padding,
        bias=draw(st.booleans()),
        dtype=torch.float64,
    )
    for number, tensor in enumerate(module.parameters()):
        tensor.data = random(*tensor.shape, seed=number)
    return module


def layer_for(module: LocallyConnected2d) -> Layer:
    return layer_of(
        "locally_connected",
        (module.out_channels, *module.weight.shape[:2]),
        (module.in_channels, *module.input_size),
        words={name: tuple(tensor.shape) for name, tensor in module.named_parameters()},
        size=module.kernel_size,
        stride=module.stride,
        padding=module.padding,
    )


@given(modules(), st.data())
@settings(max_examples=50)
def test_a_locally_connected_layer_in_parts_is_the_loop_over_positions(
    module: LocallyConnected2d, data: st.DataObject
) -> None:
    layer = layer_for(module)
    x = leaf(random(2, *layer.input_shapes[0]))
    tensors = dict(module.named_parameters())
    check(data, layer, naive(module, x), {"x": x}, tensors, tight=not any(module.padding))
    assert_parts_equal([layer], {layer.name: [layer.region]}, module(x), {"x": x}, tensors)


@pytest.mark.parametrize("n_elements", [1, 30, 100])
def test_any_tiling_of_the_positions_gives_the_same(
    n_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One position at a time, pieces of a row, whole rows."""
    monkeypatch.setattr(locally_connected, "N_ELEMENTS_MAX", n_elements)
    module = LocallyConnected2d(
        2, 3, (2, 1), input_size=(5, 4), stride=(1, 2), padding=1, dtype=torch.float64
    )
    x = leaf(random(3, 2, 5, 4))
    parameters = tuple(module.parameters())
    found, expected = module(x), naive(module, x)
    torch.testing.assert_close(found, expected)
    seed = random(*expected.shape, seed=4)
    torch.testing.assert_close(
        torch.autograd.grad(found, (x, *parameters), seed),
        torch.autograd.grad(expected, (x, *parameters), seed),
    )


def test_gradients_are_those_of_finite_differences() -> None:
    module = LocallyConnected2d(1, 2, 2, input_size=(3, 4), dtype=torch.float64)
    x = leaf(random(2, 1, 3, 4))
    weight = leaf(module.weight.detach())

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return locally_connected.local_product(x, weight, size=(2, 2), stride=(1, 1))

    assert torch.autograd.gradcheck(product, (x, weight))
    assert torch.autograd.gradcheck(product, (x.detach(), weight))
    assert torch.autograd.gradcheck(product, (x, weight.detach()))


def test_it_has_a_shape_without_any_memory() -> None:
    module = LocallyConnected2d(3, 8, 10, input_size=100, device="meta", dtype=torch.bfloat16)
    y = module(torch.empty(1009, 3, 100, 100, device="meta", dtype=torch.bfloat16))
    assert y.shape == (1009, 8, 91, 91)
    assert module.weight.shape == (91, 91, 8, 300)  # position-first
    assert "kernel_size=(10, 10), input_size=(100, 100)" in repr(module)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit into input_size"):
        LocallyConnected2d(3, 8, 10, input_size=(9, 20))
    module = LocallyConnected2d(3, 8, 3, input_size=9)
    with pytest.raises(ValueError, match=r"weights for \(batch, 3, 9, 9\)"):
        module(torch.zeros(2, 3, 9, 8))


def test_what_comes_out_is_contiguous_and_so_is_what_goes_back() -> None:
    """The profile measures layers alone, on contiguous tensors.

    Products had samples last, as had the images and gradients passed on: a pooling after one took a
    fifth longer, and its gradient half, than its profile said, and every plan was priced too low.
    """
    module = LocallyConnected2d(2, 3, 3, input_size=(6, 5))
    images = torch.rand(4, 6, 5, 2).permute(0, 3, 1, 2).requires_grad_()
    seen: list[torch.Tensor] = []
    images.register_hook(seen.append)
    result = module(images)
    assert result.is_contiguous()
    result.backward(torch.rand(4, 3, 4, 3))
    assert [gradient.is_contiguous() for gradient in seen] == [True]
