"""Wrong types and empty values in `distbelief.plan`: one message each."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

import distbelief
from distbelief.graph.capture import InputSpec
from distbelief.graph.graph import GraphError
from distbelief.partition.api import counts_of, examples_of, spec_of


NET = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
BATCH = torch.zeros(5, 6)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (None, r"example is None \(NoneType\)"),
        (5, r"example is 5 \(int\)"),
        ("a batch", "example is 'a batch'"),
        ([], "example is"),
        ({"x": BATCH}, "example is"),
        ([5], r"of an input is 5 \(int\): give a tensor"),
        ([np.zeros((5, 6))], r"\(ndarray\): give a tensor .* torch.as_tensor"),
        (torch.zeros(5, 6, dtype=torch.complex64), "complex64: give floating point"),
        (torch.zeros(()), r"has shapes \[\[\]\]: give"),
        ([BATCH, torch.zeros(4, 6)], r"has shapes \[\[5, 6\], \[4, 6\]\]: give"),
        (torch.zeros(0, 6), r"an extent of 0: \[\[0, 6\]\]"),
        (torch.zeros(5, 0), r"an extent of 0: \[\[5, 0\]\]"),
    ],
)
def test_an_example_is_a_batch_of_tensors(example: object, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        examples_of(example)


def test_the_largest_integer_counts() -> None:
    assert spec_of(torch.tensor([[3, 9]])) == InputSpec(shape=(2,), n_values=10)
    assert spec_of(BATCH) == InputSpec(shape=(6,))
    no_values = torch.empty(5, 6, dtype=torch.int64, device="meta")
    assert spec_of(no_values) == InputSpec(shape=(6,), n_values=1)


@pytest.mark.parametrize("machines", ["4", 4.5, True, None, [2, "3"], [1, True], {1, 2}, b"12"])
def test_machines_are_numbers(machines: object) -> None:
    with pytest.raises(GraphError, match=r"machines is .*: give a number, such as 8"):
        counts_of(machines)


@pytest.mark.parametrize("machines", [(1, 2), [1, 2]])
def test_counts_may_be_one_number_or_several(machines: Sequence[int]) -> None:
    assert counts_of(machines) == [1, 2]
    assert counts_of(3) == [3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model is None .NoneType.: give a torch.nn.Module"),
        ({"model": nn.Linear}, "model is <class .*: give a torch.nn.Module"),
        ({"machines": [0]}, "0 are requested"),
        ({"loss": None}, "loss is None .NoneType.: give its name"),
        ({"loss": nn.CrossEntropyLoss()}, "loss is CrossEntropyLoss.. "),
        ({"cluster": 5}, "cluster is 5 .int.: give a name"),
        ({"pins": ["0=whole"]}, "pins is .*: give a split per layer"),
        ({"pins": {"0": 3}}, "pins is .*: give a split per layer"),
        ({"exactly": "yes"}, "exactly is 'yes' .str.: give True or False"),
        ({"profile": 2}, "profile is 2 .int.: give True or False"),
    ],
)
def test_a_wrong_type_is_named(changes: dict[str, object], message: str) -> None:
    arguments = {"model": NET, "example": BATCH} | changes
    with pytest.raises(GraphError, match=message):
        distbelief.plan(**arguments)  # type: ignore[arg-type]  # what is tested
