import numpy as np
import pytest
import torch
from torch import nn

from distbelief.errors import JobError
from distbelief.parameter_server.initial_values import draw
from distbelief.worker.local_executor import FlatModel
from tests.distbelief.examples import Everything


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(300, 200),
        nn.Conv2d(20, 30, 5),
        nn.Conv2d(20, 40, 5, groups=4),
        nn.ConvTranspose2d(30, 20, 5),
        nn.Bilinear(20, 30, 40),
        nn.Embedding(500, 50),
        nn.LSTM(40, 60),
        nn.GRUCell(40, 60),
        nn.MultiheadAttention(80, 4),
    ],
)
def test_the_distribution_is_that_of_torch(module: nn.Module) -> None:
    model = FlatModel(module)
    initials = model.initials()
    for name, tensor in model.named_tensors().items():
        n = tensor.numel()
        drawn = draw(initials[name], seed=1, tensor=name, start=0, stop=n, dtype=np.float64)
        theirs = tensor.detach().double().numpy().reshape(-1)
        if n < 1000:  # too few to compare: at least it is of that size
            assert np.abs(drawn).max() <= 1.5 * max(np.abs(theirs).max(), 0.01), name
        else:
            assert drawn.std() == pytest.approx(theirs.std(), rel=0.05), name
            assert np.abs(drawn).max() == pytest.approx(np.abs(theirs).max(), rel=0.3), name


def test_norms_and_counters_start_as_in_the_module() -> None:
    initials = FlatModel(nn.BatchNorm1d(5)).initials()
    values = {name: initial.value for name, initial in initials.items()}
    assert values == {
        "bias": 0.0,
        "num_batches_tracked": 0.0,
        "running_mean": 0.0,
        "running_var": 1.0,
        "weight": 1.0,
    }
    assert {initial.distribution for initial in initials.values()} == {"constant"}


def test_a_single_drawn_number_is_not_taken_for_a_constant() -> None:
    initial = FlatModel(nn.Linear(4, 1)).initials()["bias"]
    assert (initial.distribution, initial.high) == ("uniform", 0.5)


def test_an_empty_tensor_needs_no_rule() -> None:
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(torch.zeros(0)))
    assert FlatModel(module).initials()["w"].value == 0.0


def test_a_users_layer_is_named_with_the_fix() -> None:
    with pytest.raises(JobError, match=r"Everything draws 'scale': use initial = "):
        FlatModel(Everything(4, 2)).initials()
