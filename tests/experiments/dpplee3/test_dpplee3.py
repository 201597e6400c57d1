"""Dpplee3's modes beside their equations: the kept results are of this code, and agree."""

import re

import pytest
import torch

from distbelief.simulation.forecast.prepare import Preparation
from distbelief.task.data import DataShard
from distbelief.worker.batches import TrainingPlan
from experiments.dpplee3 import reference as ref
from experiments.dpplee3.__main__ import (
    CELLS,
    EVERY,
    LENGTHS,
    found,
    in_virtual_time,
    job_text,
    main,
)


def test_one_worker_of_the_equations_is_plain_sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each push, at rate 1.0, moves the server to where the worker is."""
    monkeypatch.setattr(ref, "N_WORKERS", 1)
    monkeypatch.setattr(ref, "SERVER_RATE", 1.0)
    for mode in ("synchronous", "asynchronous"):
        scores = [ref.train(mode, every, n_epochs=1, seed=0) for every in (1, 10, 1000)]
        for one in scores[1:]:
            assert one == pytest.approx(scores[0], rel=1e-4)


class WithBatchesOfJobs(ref.Worker):
    def __init__(self, index: int, n_epochs: int, *, seed: int, is_hogwild: bool = False) -> None:
        super().__init__(index, n_epochs, seed=seed, is_hogwild=is_hogwild)
        n = len(self.targets)
        part = DataShard(n, replica_index=index, n_replicas=ref.N_WORKERS, seed=seed)
        plan = TrainingPlan(part, batch_size=ref.BATCH)
        self.left = [torch.from_numpy(plan.batch(k).indices) for k in range(len(self.left))][::-1]


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize("frequency", ["batch 10", "epoch 1"])
def test_from_the_same_batches_a_job_learns_what_the_equations_do(
    mode: str, frequency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DP-1 to DP-4, of two workers, one of which is slower, over the short batch of each epoch."""
    monkeypatch.setattr(ref, "Worker", WithBatchesOfJobs)
    with Preparation() as preparation:
        text = job_text(mode, frequency, n_epochs=3, seed=1)
        loss, accuracy = in_virtual_time(text, preparation, seed=1)
        theirs = ref.train(mode, EVERY[frequency][1], n_epochs=3, seed=1)
    assert (loss, accuracy) == pytest.approx(theirs, rel=1e-4, abs=0.003)  # a scan is 0.0028


def test_the_kept_results_are_of_this_code_and_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(found(*cell, runs=False) is not None for cell in CELLS)
    main([])
    found_z = [abs(float(z)) for z in re.findall(r"\| ([+-]\d+\.\d) \|", capsys.readouterr().out)]
    assert len(found_z) == len(CELLS) * len(LENGTHS)
    assert sum(z < 2.0 for z in found_z) >= 0.8 * len(found_z)
