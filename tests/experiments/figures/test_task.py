import pytest
import torch

from experiments.figures import rig, task


def test_the_net_has_the_parameters_that_its_price_is_for() -> None:
    n = sum(parameter.numel() for parameter in task.net().parameters())
    assert n == rig.N_PARAMETERS


@pytest.mark.parametrize(("trained", "held_out"), [(0, 0), (7, 3), (3, 0), (0, 9)])
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


def test_both_and_all_right_is_one_and_one() -> None:
    n = task.N_MEASURED
    assert task.parts_of((n + n / (n + 1)) / n) == (1.0, 1.0)


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
