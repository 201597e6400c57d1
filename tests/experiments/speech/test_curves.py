from pathlib import Path

import pytest

from distbelief.config.load import load_job
from distbelief.run.metrics_file import Measurement, MetricsFile
from experiments.speech import curves


FOLDER = Path(curves.__file__).parent


def lines(n: int) -> list[Measurement]:
    return [
        Measurement(
            time=float(k),
            step=k,
            samples=10 * k,
            loss=None if k == 0 else 1.0 / k,
            held_out_loss=2.0,
            metric=0.1 * k,
        )
        for k in range(n)
    ]


def test_both_jobs_train_the_same_net_on_the_same_data() -> None:
    demo, ours = load_job(FOLDER / "demo.toml"), load_job(FOLDER / "sandblaster.toml")
    assert (ours.data, ours.cluster, ours.loss) == (demo.data, demo.cluster, demo.loss)
    assert ours.model.arguments == demo.model.arguments


def test_runs_are_drawn_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("downpour", "sandblaster"):
        (tmp_path / name).mkdir()
        with MetricsFile(tmp_path / name / "metrics.jsonl") as file:
            for line in lines(4):
                file.append(line)
    measured = lines(3)
    assert curves.values_of(measured, "loss in training") == [(1.0, 1.0), (2.0, 0.5)]
    assert curves.values_of(measured, "loss held out") == [(0.0, 2.0)]
    out = tmp_path / "curves.png"
    runs = [str(tmp_path / name) for name in ("downpour", "sandblaster")]
    monkeypatch.setattr("sys.argv", ["curves", *runs, "--out", str(out)])
    curves.main()
    assert out.read_bytes()[:4] == b"\x89PNG"
    assert "sandblaster: 3 s" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["curves", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        curves.main()
