"""The scaled-down task, its machines, and its warm starts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from distbelief.plans.cluster_file import load_cluster
from distbelief.protocol.role import Address
from experiments.figures import entries, task
from experiments.figures.entries import (
    BATCH,
    N_PARAMETERS,
    PAPERS_BATCH,
    PAPERS_PARAMETERS,
    ScaledMachines,
    shard_machines,
)
from experiments.figures.task import warm_start


def test_the_net_has_the_parameters_that_its_price_is_for() -> None:
    n = sum(parameter.numel() for parameter in task.net().parameters())
    assert n == entries.N_PARAMETERS


@pytest.mark.parametrize(
    ("trained", "held_out"), [(0, 0), (7, 3), (3, 0), (0, 9), (task.N_MEASURED, task.N_MEASURED)]
)
def test_both_accuracies_come_back_from_one_number(trained: int, held_out: int) -> None:
    n = task.N_MEASURED
    targets = torch.zeros(2 * n, dtype=torch.int64)
    targets[n:] = task.PART
    outputs = torch.zeros(2 * n, 2)
    outputs[:, 1] = 1.0  # all wrong, but for so many:
    outputs[:held_out, 0] = outputs[n : n + trained, 0] = 2.0
    chunks = [
        task.both(outputs[rows], targets[rows]).item() * len(rows)
        for rows in torch.arange(2 * n).split(1024)
    ]
    mean = sum(chunks) / (2 * n)
    assert task.parts_of(mean) == (trained / n, held_out / n)
    assert held_out / n <= mean < (held_out + 1) / n


def test_the_loss_does_not_see_which_part_a_sample_is_of() -> None:
    outputs = torch.eye(3)
    plain = task.loss(outputs, torch.tensor([0, 1, 2]))
    marked = task.loss(outputs, torch.tensor([0, 1, 2]) + task.PART)
    assert torch.equal(plain, marked)


def test_digests_tell_data_apart() -> None:
    one = task.Held(torch.zeros(4, 2), torch.arange(4))
    assert one.digest == task.Held(torch.zeros(4, 2), torch.arange(4)).digest
    assert one.digest != task.Held(torch.ones(4, 2), torch.arange(4)).digest
    assert one.digest != task.Held(torch.zeros(4, 2), torch.arange(4) + 1).digest


def test_a_step_of_the_small_net_takes_as_long_as_one_of_the_large() -> None:
    given = load_cluster("commodity-2012").machines[0]
    machine = ScaledMachines(20, time_scale=20.0).machine
    small = 6 * N_PARAMETERS * BATCH / machine.flops
    large = 6 * PAPERS_PARAMETERS * PAPERS_BATCH / given.flops
    assert 20.0 * small == pytest.approx(large)
    sent = 4 * N_PARAMETERS / machine.bandwidth
    assert 20.0 * sent == pytest.approx(4 * PAPERS_PARAMETERS / given.bandwidth)


@pytest.mark.parametrize(("replicas", "machines"), [(1, 2), (20, 10), (200, 100), (2000, 250)])
def test_shards_have_half_as_many_machines_as_replicas(replicas: int, machines: int) -> None:
    assert shard_machines(replicas) == machines
    rig = ScaledMachines(replicas, time_scale=20.0)
    assert rig.n_machines == replicas + machines
    # Nobody shares a machine but who computes little.
    assert rig.place(Address(f"replica-{replicas - 1}"), "replica") == replicas - 1
    if replicas == 20:
        kinds = ("shard", "evaluator", "coordinator")
        assert [rig.place(Address(kind), kind) for kind in kinds] == [20, 21, 22]


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.figures.task.STEPS", 3)


def data(seed: int) -> task.Held:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 440, generator=generator)
    return task.Held(inputs, torch.arange(64))


def test_a_warm_start_is_kept_for_its_data_and_seed(tmp_path: Path) -> None:
    first = warm_start(3, data=data(0), folder=tmp_path)
    written = Path(first.path).stat().st_mtime_ns
    again = warm_start(3, data=data(0), folder=tmp_path)
    assert again == first
    assert Path(again.path).stat().st_mtime_ns == written
    assert first.squares > 0
    assert warm_start(3, data=data(1), folder=tmp_path).of != first.of
    assert warm_start(4, data=data(0), folder=tmp_path).of != first.of


def test_a_file_that_is_of_something_else_is_refused(tmp_path: Path) -> None:
    """A sigmoid net's warm start was once gone on with by a ReLU net."""
    found = warm_start(3, data=data(0), folder=tmp_path)
    save_file(load_file(found.path), found.path, {"of": "sigmoid", "squares": "1"})
    with pytest.raises(ValueError, match=r"is of sigmoid, not of .*: remove it"):
        warm_start(3, data=data(0), folder=tmp_path)
