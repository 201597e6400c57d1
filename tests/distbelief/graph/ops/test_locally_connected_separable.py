from collections.abc import Callable, Sequence

import pytest
import torch
from torch.nn import functional

from distbelief.graph.ops import locally_connected, recurrent
from distbelief.worker.execution.dataflow import SEPARABLE


Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return locally_connected.local_product(x, weight, size=(2, 2), stride=(1, 1))


CASES: dict[str, tuple[Compute, Sequence[int], Sequence[int]]] = {
    "linear": (functional.linear, (3, 5), (4, 5)),
    "convolution": (functional.conv2d, (3, 2, 5, 5), (4, 2, 3, 3)),
    "gates": (recurrent.linear, (3, 2, 5), (4, 5)),
    "recurrent": (lambda x, w: torch.tanh(recurrent.linear(x, w)), (3, 5), (4, 5)),
    "locally_connected": (product, (3, 2, 4, 4), (3, 3, 5, 8)),
}


@pytest.mark.parametrize("kind", sorted(SEPARABLE))
def test_gradients_asked_for_one_by_one_have_the_bits_of_both(kind: str) -> None:
    compute, x_shape, weight_shape = CASES[kind]
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(*x_shape, generator=generator).requires_grad_()
    weight = torch.rand(*weight_shape, generator=generator).requires_grad_()
    output = compute(x, weight)
    gradient = torch.rand(output.shape, generator=generator)
    both = torch.autograd.grad(output, [x, weight], gradient, retain_graph=True)
    (first,) = torch.autograd.grad(output, [x], gradient, retain_graph=True)
    (second,) = torch.autograd.grad(output, [weight], gradient)
    assert torch.equal(first, both[0])
    assert torch.equal(second, both[1])


def test_the_gradient_of_images_does_not_compute_that_of_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.rand(3, 2, 4, 4).requires_grad_()
    weight = torch.rand(3, 3, 5, 8).requires_grad_()
    output = product(x, weight)

    def refuse(*_: object) -> None:
        raise AssertionError("patches are copied for the gradient of weights")

    monkeypatch.setattr(locally_connected, "_patches", refuse)
    gradient = torch.ones_like(output)
    torch.autograd.grad(output, [x], gradient, retain_graph=True)
    with pytest.raises(AssertionError, match="patches"):
        torch.autograd.grad(output, [weight], gradient)
