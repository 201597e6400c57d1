import pytest
import torch
from torch import nn
from typing_extensions import override

from distbelief.graph.graph import GraphError, Layer, Option
from distbelief.graph.operator import Step, operator_of
from tests.distbelief.graph.ops.comparison import (
    assert_parts_equal,
    close,
    graph_of,
    layer_of,
    leaf,
    random,
)
from tests.distbelief.graph.reference import evaluate


def layer_for(module: nn.Module, shape: tuple[int, ...], **options: Option) -> Layer:
    tensors = (*module.named_parameters(), *module.named_buffers())
    words = {name: tuple(tensor.shape) for name, tensor in tensors}
    return layer_of("call", shape, (5, 3), name="whole", words=words, module="path", **options)


def test_a_recurrent_module_without_memory_is_computed_with_the_tensors_given() -> None:
    x = leaf(random(2, 5, 3))
    module = nn.LSTM(3, 4, 2, batch_first=True, dtype=torch.float64)
    shell = nn.LSTM(3, 4, 2, batch_first=True, device="meta")
    tensors = dict(module.named_parameters())
    layer = layer_for(module, (5, 4), output=0)
    assert operator_of(layer).cuts(layer) == ()
    step = Step(modules={"path": shell})
    parts = {"whole": [layer.region]}
    assert_parts_equal([layer], parts, module(x)[0], {"x": x}, tensors, step=step)


def test_its_random_numbers_are_the_steps() -> None:
    x = random(2, 5, 3)
    module = nn.Dropout(0.5)
    layer = layer_for(module, (5, 3))
    before = torch.get_rng_state()

    def computed(**step: int | bool) -> torch.Tensor:
        steps = Step(modules={"path": module}, **step)  # type: ignore[arg-type]
        return evaluate(graph_of(layer), {"x": x}, {}, step=steps)["whole"]

    close(computed(training=False), x)
    one = computed(training=True, seed=1)
    close(computed(training=True, seed=1), one)
    assert not torch.equal(computed(training=True, seed=2), one)
    assert torch.equal(torch.get_rng_state(), before)


class Counter(nn.Module):
    """Counts its calls in a buffer and returns more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    @override
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor] | torch.Tensor:
        self.count += 1
        return {"x": x} if float(self.count) > 5 else x * self.count


def test_what_it_does_to_its_buffers_is_lost() -> None:
    x, count = random(2, 5, 3), torch.tensor(2.0)
    module = Counter()
    layer = layer_for(module, (5, 3))
    step = Step(modules={"path": module})
    for _ in range(2):
        values = evaluate(graph_of(layer), {"x": x}, {"count": count}, step=step)
        close(values["whole"], 3 * x)
    assert float(count) == 2.0


def test_a_module_that_is_missing_or_returns_something_else_is_named() -> None:
    x, module = random(2, 5, 3), Counter()
    layer = layer_for(module, (5, 3))
    with pytest.raises(GraphError, match=r"'path'.*Step.modules"):
        evaluate(graph_of(layer), {"x": x}, {"count": torch.tensor(1.0)})
    step = Step(modules={"path": module})
    with pytest.raises(GraphError, match="returns a dict, not a tensor"):
        evaluate(graph_of(layer), {"x": x}, {"count": torch.tensor(9.0)}, step=step)


def test_its_price_is_that_of_the_operations_counted_or_of_its_tensors() -> None:
    module = nn.Linear(3, 4)
    plain, counted = layer_for(module, (5, 4)), layer_for(module, (5, 4), operations=99)
    assert operator_of(plain).work(plain, plain.region).forward == 2 * (12 + 4)
    assert operator_of(counted).work(counted, counted.region).forward == 99
