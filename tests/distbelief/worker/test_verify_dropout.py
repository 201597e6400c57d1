"""One process draws the dropout masks of the ranks; with processes: `tests/processes/test_verify`.

A graph computed in parts by its kinds, as machines do it, stands in for them.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.lowering.recurrent import N_UNITS_MIN
from distbelief.graph.operator import Step
from distbelief.worker.proof import SharedDropoutMasks
from tests.distbelief.graph.reference import evaluate


SEED = 7


def images() -> nn.Module:
    """As AlexNet: dropout of channels and of elements."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(64, 8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3, inplace=True),
        nn.Dropout(0.0),
        nn.Linear(8, 3),
    )


class Words(nn.Module):
    """Dropout of attention weights, and by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)
        self.last = nn.Linear(8, 3)

    @override
    def forward(self, x: torch.Tensor) -> object:
        y = functional.dropout(self.encode(x), 0.2, self.training)
        return self.last(y.mean(1))


class Folded(nn.Module):
    """Dropout of words of all samples in one dimension, as OPT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    @override
    def forward(self, x: torch.Tensor) -> object:
        y = functional.dropout(self.first(x.flatten(0, 1)), 0.4, self.training)
        return y.view(x.shape).sum(1)


class StepsFirst(nn.Module):
    """Dropout of steps before samples, and inside of a recurrent layer, which has them so."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, N_UNITS_MIN["gru"], 2, batch_first=True, dropout=0.3)

    @override
    def forward(self, x: torch.Tensor) -> object:
        y, _ = self.gru(x)
        return functional.dropout(y.transpose(0, 1), 0.4, self.training).sum(0)


class Turned(nn.Module):
    """Regression: a right plan of torch's own transformers, words first, was called wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.TransformerEncoderLayer(8, 2, 16, 0.3)
        self.last = nn.Linear(8, 3)

    @override
    def forward(self, x: torch.Tensor) -> object:
        return self.last(self.encode(x.transpose(0, 1)).sum(0))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("net", "shape"),
    [
        *((images, (2, 4, 4)), (Words, (5, 8)), (Folded, (5, 8))),
        *((StepsFirst, (6, 8)), (Turned, (5, 8))),
    ],
)
def test_one_process_draws_the_masks_of_the_ranks(
    net: type[nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Once rejected: "chance differs from process to process".

    Masks of steps before samples were those of samples before steps.
    """
    torch.manual_seed(0)
    model = net().to(dtype)
    x = torch.rand(6, *shape, dtype=dtype)
    graph = capture(model, [InputSpec(shape=shape)])
    inputs, step = {graph.layers[0].name: x}, Step(training=True, seed=SEED)
    found = evaluate(graph, inputs, dict(model.state_dict()), step=step)[graph.outputs[0]]
    masks = SharedDropoutMasks(graph, seed=SEED)
    with masks:
        expected = model(x)
    masks.check()
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(model(x), expected)  # of chance of its own


class Noisy(nn.Module):
    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drop(x)
        return x


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (Noisy(), "rand_like"),
        (nn.RReLU(), "rrelu_with_noise"),
        (Unread(), "dropout in a part .* whose result is not used"),
    ],
)
def test_other_random_numbers_are_rejected_by_name(part: nn.Module, said: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), part)
    graph = capture(model, [InputSpec(shape=(4,))])
    with (
        pytest.raises(JobError, match=rf"{said}.*differ.*nn\.Dropout"),
        SharedDropoutMasks(graph, seed=SEED),
    ):
        model(torch.zeros(3, 4))


def test_a_mask_of_another_layer_is_no_mask_of_this_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    graph = capture(model, [InputSpec(shape=(4,))])
    other = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4))
    with pytest.raises(JobError, match="'1'"), SharedDropoutMasks(graph, seed=SEED):
        other(torch.zeros(3, 4))
    masks = SharedDropoutMasks(graph, seed=SEED)
    with pytest.raises(JobError, match="'1'"):
        masks.check()
