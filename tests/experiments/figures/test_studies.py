from itertools import chain
from pathlib import Path

import pytest

from distbelief.config.load import parse_job
from distbelief.simulation.forecast.prepare import Preparation
from experiments.figures.results import RESULTS
from experiments.figures.studies import LINKS, STUDIES, Found, Row, found_of, spread


def test_every_row_is_a_job_and_no_point_is_drawn_twice() -> None:
    for _, rows in STUDIES.values():
        own = list(rows())
        assert len({(row.task, row.panel, row.line, row.x) for row in own}) == len(own)
    for row in chain.from_iterable(rows() for _, rows in STUDIES.values()):
        assert parse_job(row.job(3), path="study.toml").cluster.replicas == row.replicas
        assert row.link in LINKS


def test_a_row_is_run_once_per_seed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.figures.studies.RESULTS", tmp_path)
    monkeypatch.setattr("experiments.figures.studies.N_SEEDS", 2)
    row = Row(
        task="digits", panel="", line="", x="", replicas=2, stop="samples = 3200",
        algorithm='rule = { name = "adagrad", learning_rate = 0.05 }',
    )  # fmt: skip
    assert found_of(row, None) is None
    with Preparation() as preparation:
        first = found_of(row, preparation)
    assert first is not None
    assert len({one.accuracy for one in first}) == 2  # of other weights and data
    assert all(one.samples == 3200 and one.seconds > 0 for one in first)
    assert found_of(row, None) == first


def test_every_kept_result_is_of_a_row() -> None:
    """A changed row would leave its old results behind."""
    rows = chain.from_iterable(rows() for _, rows in STUDIES.values())
    known = {row for row in rows if found_of(row, None) is not None}
    assert len(known) == len(list((RESULTS / "studies").glob("*.json"))) >= 89


def test_a_run_that_fails_has_learnt_nothing() -> None:
    runs = [Found(accuracy=a, seconds=1.0, samples=1, staleness=None) for a in (0.4, None, 0.6)]
    assert spread(runs) == (0.0, 0.4, 0.6)
