"""Dpplee3's modes beside their equations: the kept results are of this code, and agree."""

import re

import pytest

from distbelief.simulation.forecast.prepare import Preparation
from experiments.dpplee3 import reference as ref
from experiments.dpplee3.__main__ import CELLS, LENGTHS, found, in_virtual_time, job_text, main


def test_one_worker_of_the_equations_is_plain_sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each push, at rate 1.0, moves the server to where the worker is."""
    monkeypatch.setattr(ref, "N_WORKERS", 1)
    monkeypatch.setattr(ref, "SERVER_RATE", 1.0)
    for mode in ("synchronous", "asynchronous"):
        scores = [ref.train(mode, every, n_epochs=1, seed=0) for every in (1, 10, 1000)]
        for one in scores[1:]:
            assert one == pytest.approx(scores[0], rel=1e-4)


def test_a_job_of_each_mode_runs_and_begins_as_its_equations() -> None:
    with Preparation() as preparation:
        for mode in ("synchronous", "asynchronous"):
            text = job_text(mode, "epoch 1", n_epochs=1, seed=0)
            loss, _ = in_virtual_time(text, preparation, seed=0)
            theirs, _ = ref.train(mode, ref.steps_of_epoch(), n_epochs=1, seed=0)
            assert loss == pytest.approx(theirs, abs=0.1)  # 2.3 by chance


def test_the_kept_results_are_of_this_code_and_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(found(*cell, runs=False) is not None for cell in CELLS)
    main([])
    found_z = [abs(float(z)) for z in re.findall(r"\| ([+-]\d+\.\d) \|", capsys.readouterr().out)]
    assert len(found_z) == len(CELLS) * len(LENGTHS)
    assert sum(z < 2.0 for z in found_z) >= 0.8 * len(found_z)
