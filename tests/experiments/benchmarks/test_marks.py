from pathlib import Path

import numpy as np
import torch

from experiments.benchmarks.marks.worker import N_RESIDUES, Ledger, judge


def test_a_lost_push_and_one_that_was_applied_twice_are_counted(tmp_path: Path) -> None:
    ledger = Ledger.make(tmp_path / "ledger")
    marks = torch.zeros(2, 1, N_RESIDUES)
    for life, (n_issued, n_acknowledged) in enumerate([(700, 650), (3, 0), (600, 600)]):
        for _ in range(n_issued):
            number = ledger.issue(life)
            marks[:, 0, number % N_RESIDUES] += 1
        ledger.acknowledge(life, n_acknowledged)
    acknowledged, issued = Ledger(tmp_path / "ledger").by_residue()
    known = [*range(650), *range(703, 1303)]
    slow = np.bincount(np.array(known) % N_RESIDUES, minlength=N_RESIDUES)
    np.testing.assert_array_equal(acknowledged, slow)
    assert issued.sum() == 1303
    verdict = judge(marks, [ledger])
    assert (verdict.n_lost, verdict.n_twice, verdict.n_applied) == (0, 0, 1303)
    marks[0, 0, 5] += 2  # issued three times
    marks[1, 0, 649 % N_RESIDUES] = 0
    verdict = judge(marks, [ledger])
    assert verdict.n_twice == 2
    assert verdict.n_lost == acknowledged[649 % N_RESIDUES] > 0
