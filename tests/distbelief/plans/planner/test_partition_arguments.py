"""Wrong types and empty values in `distbelief.plan`: one message each."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from typing_extensions import override

import distbelief
from distbelief.cli.run_partition import counts, input_spec, input_specs
from distbelief.core.errors import JobError
from distbelief.graph.capture import InputSpec
from distbelief.graph.graph import GraphError
from distbelief.plans.planner.planning_result import counts_of, examples_of, pins, spec_of


NET = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
BATCH = torch.zeros(5, 6)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (None, r"example is None \(NoneType\)"),
        (5, r"example is 5 \(int\)"),
        ("a batch", "example is 'a batch'"),
        ([], "example is"),
        ({}, "example is"),
        ({"x": BATCH, "y": 5}, r"of an input is 5 \(int\): give a tensor"),
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


EXTENTS = st.lists(st.integers(1, 5000), min_size=1, max_size=5)
WORDS = st.text("abc.019_", min_size=1, max_size=8)


@given(EXTENTS, st.none() | st.integers(1, 10**6))
def test_shapes_are_read_as_they_are_written(shape: list[int], n: int | None) -> None:
    text = "x".join(map(str, shape)) + (f":{n}" if n else "")
    assert input_spec(f" {text} ") == InputSpec(shape=tuple(shape), n_values=n)


def test_a_single_number_a_sample_has_no_extents() -> None:
    assert input_spec(":50") == InputSpec(shape=(), n_values=50)


@pytest.mark.parametrize("text", ["", " ", "3,4", "3x", "x3", "-3", "3.5", "a", "3:x"])
def test_an_invalid_shape_is_rejected(text: str) -> None:
    with pytest.raises(JobError, match="is not a shape"):
        input_spec(text)


@given(EXTENTS)
def test_an_extent_of_0_is_rejected(shape: list[int]) -> None:
    with pytest.raises(JobError, match="extent of 0"):
        input_spec("x".join(map(str, [*shape, 0])))


@given(EXTENTS)
def test_numbers_of_machines_ascend_and_none_is_there_twice(numbers: list[int]) -> None:
    assert counts(",".join(map(str, numbers))) == sorted(set(numbers))


@pytest.mark.parametrize("text", ["", "0", "-1", "1,,2", "1.5", "1;2", "0,1"])
def test_an_invalid_number_of_machines_is_rejected(text: str) -> None:
    with pytest.raises(JobError, match="has no numbers of machines"):
        counts(text)


@given(st.dictionaries(WORDS, WORDS))
def test_pins_are_read_as_they_are_written(wanted: dict[str, str]) -> None:
    assert pins([f"{name}={split}" for name, split in wanted.items()]) == wanted


def test_the_same_pin_twice_is_one_and_two_that_differ_are_rejected() -> None:
    assert pins(["a=whole", "a=whole"]) == {"a": "whole"}
    with pytest.raises(JobError, match="'a' twice: whole and rows:2"):
        pins(["a=whole", "a=rows:2"])


@pytest.mark.parametrize("text", ["", "a", "a=", "=whole", "="])
def test_a_pin_without_a_split_is_rejected(text: str) -> None:
    with pytest.raises(JobError, match="pins nothing"):
        pins([text])


def test_inputs_may_be_named() -> None:
    specs = input_specs(["ids=3:50", "mask = 3:bool", "x=2x2"])
    assert specs == {
        "ids": InputSpec(shape=(3,), n_values=50),
        "mask": InputSpec(shape=(3,), n_values=2, is_mask=True),
        "x": InputSpec(shape=(2, 2)),
    }
    assert input_specs(["3", "4"]) == [InputSpec(shape=(3,)), InputSpec(shape=(4,))]
    with pytest.raises(JobError, match="name all inputs"):
        input_specs(["ids=3", "4"])


class Asking(nn.Module):
    """Needs a mask, and returns a loss where it gets labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    @override
    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> object:
        logits = self.layer(x.masked_fill(~mask, 0.0))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def test_examples_may_be_named_and_the_loss_the_models_own() -> None:
    mask = torch.ones(5, 6, dtype=torch.bool)
    example = {"x": BATCH, "mask": mask}
    labels = {"labels": torch.zeros(5, dtype=torch.int64)}
    with_labels = distbelief.plan(Asking(), example | labels, loss="model", machines=(2,))
    assert with_labels.plan.inputs == {"labels": (), "mask": (6,), "x": (6,)}
    (mean,) = (layer for layer in with_labels.request.graph.layers if layer.name == "loss")
    named = distbelief.plan(Asking(), example, loss="cross_entropy", machines=(2,))
    assert mean.shape == named.request.graph["loss"].shape == ()
    # A large vocabulary is split in both.
    kinds = [[layer.kind for layer in p.request.graph.layers] for p in (with_labels, named)]
    assert all("class_sums" in each and "cross_entropy" in each for each in kinds)
    with pytest.raises(JobError, match="missing a required argument: 'mask'"):
        distbelief.plan(Asking(), {"x": BATCH}, loss="cross_entropy")
    with pytest.raises(JobError, match="it returned logits: does the data set give the labels"):
        distbelief.plan(Asking(), example, loss="model")
