import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional

from distbelief.graph.append_loss import ELEMENTWISE
from distbelief.graph.ops.loss_layers import cross_entropy_layers, elementwise_loss_layer
from tests.distbelief.graph.ops.comparison import (
    check,
    close,
    close_gradients,
    leaf,
    parts_of,
    random,
    source,
    values_of,
)


FUNCTIONS = sorted(set(ELEMENTWISE.values()))


def labels_of(n_classes: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n_classes)
    return torch.randint(n_classes, shape, generator=generator)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.sampled_from([0.0, 0.1]),
    st.data(),
)
@settings(max_examples=80)
def test_cross_entropy_in_parts_is_that_of_torch(
    shape: tuple[int, ...], smoothing: float, data: st.DataObject
) -> None:
    soft, mean = data.draw(st.booleans()), data.draw(st.booleans())
    scores = leaf(20 * random(3, *shape))
    if soft:
        target = random(3, *shape, seed=1).softmax(1)
        sources = (source("x", *shape), source("t", *shape))
    else:
        target = labels_of(shape[0], 3, *shape[1:])
        sources = (source("x", *shape), source("t", *shape[1:], is_integer=True))
    ignore = data.draw(st.sampled_from([-100, 0])) if not soft else -100
    if ignore == 0 and bool((target == 0).all()):
        ignore = -100
    layers = cross_entropy_layers("loss", sources, smoothing=smoothing, ignore=ignore, mean=mean)
    parts = {layer.name: data.draw(parts_of(layer)) for layer in layers}
    losses = values_of(layers, {"x": scores, "t": target}, parts=parts)["loss"]
    assert losses.shape == (3,)
    expected = functional.cross_entropy(
        scores,
        target,
        label_smoothing=smoothing,
        ignore_index=ignore,
        reduction="mean" if mean else "sum",
    )
    found = losses.mean() if mean else losses.sum()
    close(found, expected)
    close_gradients(found, expected, [scores])


@given(st.integers(2, 6), st.data())
@settings(max_examples=30)
def test_classes_may_be_the_last_dimension_and_scores_be_logarithms(
    n_classes: int, data: st.DataObject
) -> None:
    scores = leaf(random(2, 4, n_classes).log_softmax(2))
    target = labels_of(n_classes, 2, 4)
    layers = cross_entropy_layers(
        "loss", (source("x", 4, n_classes), source("t", 4, is_integer=True)), dim=1, normalised=True
    )
    expected = functional.nll_loss(scores.movedim(2, 1), target, reduction="none").mean(1)
    check(data, layers, expected, {"x": scores, "t": target})


def test_classes_that_are_ruled_out_have_no_say() -> None:
    scores = torch.tensor([[1.0, -torch.inf, 2.0]], requires_grad=True)
    target = torch.tensor([2])
    layers = cross_entropy_layers("loss", (source("x", 3), source("t", is_integer=True)))
    loss = values_of(layers, {"x": scores, "t": target})["loss"].mean()
    expected = functional.cross_entropy(scores, target)
    assert loss.item() == pytest.approx(expected.item())
    (gradient,) = torch.autograd.grad(loss, scores)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, scores)[0])


def test_a_batch_whose_labels_all_count_for_nothing_has_loss_zero() -> None:
    scores, target = leaf(random(2, 3)), torch.full((2,), -100)
    layers = cross_entropy_layers("loss", (source("x", 3), source("t", is_integer=True)))
    loss = values_of(layers, {"x": scores, "t": target})["loss"]
    assert loss.tolist() == [0.0, 0.0]
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert not gradient.any()


@pytest.mark.parametrize("function", FUNCTIONS)
@given(data=st.data())
@settings(max_examples=12)
def test_an_elementwise_loss_in_parts_is_that_of_torch(function: str, data: st.DataObject) -> None:
    mean = data.draw(st.booleans())
    shape = data.draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    x, target = random(3, *shape), random(3, *shape, seed=1).sigmoid()
    match function:
        case "binary_cross_entropy":
            x = x.sigmoid()
        case "soft_margin_loss":
            target = (target - 0.5).sign()
        case "poisson_nll_loss":
            target = target.round()
        case _:
            x = 5 * x
    x = leaf(x)
    layer = elementwise_loss_layer(
        "loss", (source("x", *shape), source("t", *shape)), function=function, mean=mean
    )
    losses = getattr(functional, function)(x, target, reduction="none").view(3, -1)
    expected = losses.mean(1) if mean else losses.sum(1)
    check(data, layer, expected, {"x": x, "t": target})


@given(st.integers(1, 7), st.data())
@settings(max_examples=40)
def test_one_vs_all_is_a_logistic_loss_for_every_class(n_classes: int, data: st.DataObject) -> None:
    x, labels = leaf(random(3, 2, n_classes)), labels_of(n_classes, 3, 2)
    sources = (source("x", 2, n_classes), source("t", 2, is_integer=True))
    layer = elementwise_loss_layer(
        "loss", sources, function="binary_cross_entropy_with_logits", mean=False, dim=1
    )
    target = functional.one_hot(labels, n_classes).double()
    expected = functional.binary_cross_entropy_with_logits(x, target, reduction="none")
    check(data, layer, expected.sum((1, 2)), {"x": x, "t": labels})
