"""What the page knows of a run: the same as its files, as they grow, and nothing else."""

import math
from pathlib import Path

import msgspec
import pytest

from distbelief.dashboard import reader as reader_module
from distbelief.dashboard.reader import RunReader, now
from distbelief.job.run.directory import RunDirectory
from distbelief.job.run.metrics_file import Measurement, read_metrics
from distbelief.supervisor.view import JobView, RoleView
from tests.distbelief.dashboard import made_runs


def opened(path: Path) -> RunReader:
    return RunReader(RunDirectory.open(path, write=False))


def test_the_curve_is_that_of_the_file_as_it_grows(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run", n_points=7)
    reader = opened(path)
    reader.read_points()
    assert reader.curve.n_points == 7
    made_runs.append(path, range(7, 30))
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"time": 31, "ste')  # a line that is being written
    reader.read_points()
    lines = read_metrics(path / "metrics.jsonl")
    assert reader.curve.n_points == len(lines) == 30
    for name in ("time", "samples", "loss", "held_out_loss", "pushes_refused"):
        wanted = [getattr(line, name) for line in lines]
        for found, value in zip(reader.curve.columns[name], wanted, strict=True):
            assert found == value if value is None else found == pytest.approx(value, rel=1e-5)
    assert reader.curve.columns["metric:accuracy"][9] is None
    assert reader.curve.columns["metric:accuracy"][10] == lines[10].metric
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'p": 3}\n')
    reader.read_points()
    assert reader.curve.n_points == 31


def test_a_file_that_begins_anew_is_read_anew(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run", n_points=20)
    reader = opened(path)
    reader.read_points()
    (path / "metrics.jsonl").rename(path / "aside")  # --from-scratch
    made_runs.append(path, range(3))
    reader.read_points()
    assert (reader.curve.epoch, reader.curve.n_points) == (1, 3)


def test_a_large_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "READ_BYTES_MAX", 2000)
    path = made_runs.make(tmp_path / "run", n_points=50)
    reader, n = opened(path), 1
    while reader.read_points():
        n += 1
    assert n > 5
    assert reader.curve.n_points == 50


def test_times_rise_and_numbers_are_finite(tmp_path: Path) -> None:
    """A resumed run may begin before the last line; NaN is no point of a curve."""
    path = made_runs.make(tmp_path / "run", n_points=0)
    lines = [Measurement(time=t, loss=loss) for t, loss in ((5, 1.0), (4, 0.9), (6, math.nan))]
    with (path / "metrics.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
    reader = opened(path)
    reader.read_points()
    assert reader.curve.columns["time"] == [5, 5, 6]
    assert reader.curve.columns["loss"] == [1.0, 0.9, None]


def test_what_others_wrote_is_bounded(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run", n_points=0)
    esc = "\x1b]0;owned\x07"
    many = Measurement(time=1.0, figures={f"{esc}{n}": 1.0 for n in range(500)})
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b"x" * 3_000_000 + b"\n" + msgspec.json.encode(many) + b"\n")
    reader = opened(path)
    while reader.read_points():
        pass
    assert reader.curve.n_points == 1
    assert len(reader.curve.columns) == reader_module.N_COLUMNS_MAX
    assert not any("\x1b" in name for name in reader.curve.columns)


@pytest.mark.parametrize(
    ("ended", "error", "phase", "state"),
    [
        (True, None, "done", "ended"),
        (True, None, "interrupted", "interrupted"),
        (True, "no space", "failed", "failed"),
        (False, None, "training", "stopped"),
    ],
)
def test_the_state_of_a_run_that_is_over(
    tmp_path: Path, *, ended: bool, error: str | None, phase: str, state: str
) -> None:
    shown = msgspec.structs.replace(made_runs.view(), phase=phase)
    path = made_runs.make(tmp_path / "run", shown=shown, ended=ended, error=error)
    reader = opened(path)
    reader.read_status(now())
    assert reader.state.state == state
    assert reader.state.note == (error or "" if ended else reader.state.note)
    assert all(role.rate is None for role in reader.state.roles)
    assert not any(role.trouble for role in reader.state.roles)


def test_the_state_of_a_run_that_runs(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run")
    reader = opened(path)
    with made_runs.running(path):
        reader.read_status(now())
        assert reader.state.state == "running"
        assert [role.name for role in reader.state.roles if role.trouble] == ["replica-1"]
        reader.read_status(now() + 60)
        assert reader.state.state == "silent"
        (path / "status.json").write_bytes(b"{")
        reader.read_status(now())
        assert "damaged" in reader.state.note
        (path / "status.json").unlink()
        reader.read_status(now())
        assert (reader.state.state, reader.state.view) == ("starting", None)


def test_rates_of_roles_are_those_of_the_last_seconds(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run", n_points=0)
    reader = opened(path)

    def seen(at: float, **counters: float) -> None:
        role = RoleView(name="replica-0", state="computing", counters=counters)
        made_runs.write_status(path, JobView(phase="training", now=at, roles=(role,)))
        reader.read_status(now())

    with made_runs.running(path):
        seen(100.0, bytes_in=5000.0, spent_computing=50.0)
        seen(102.0, bytes_in=7000.0, spent_computing=51.5)
        (row,) = reader.state.roles
        assert row.bytes_in == pytest.approx(1000.0)
        assert row.spent == {"computing": pytest.approx(0.75)}
        # It was restarted, and counts from zero.
        seen(104.0, bytes_in=10.0, spent_computing=0.1)
        (row,) = reader.state.roles
        assert row.bytes_in in {None, 0.0}
        assert row.spent["computing"] == pytest.approx(0.0)


def test_shares_of_a_resumed_run_are_those_of_its_last_session(tmp_path: Path) -> None:
    """Counters of 100 s over the 1,000 s of all sessions: a replica seemed to idle nine tenths."""
    path = made_runs.make(tmp_path / "run", n_points=0)
    counters = {"spent_computing": 60.0, "spent_waiting for shard-0": 40.0}
    roles = (
        RoleView(name="replica-0", state="finished", counters=counters),
        RoleView(name="shard-0", state="done", counters={"spent_applying": 50.0}),
    )
    view = JobView(phase="done", now=5.0, training_seconds=1000.0, roles=roles)
    made_runs.write_status(path, view)
    reader = opened(path)
    reader.read_status(now())
    replica, shard = reader.state.roles
    assert replica.spent == pytest.approx({"computing": 0.6, "waiting for shards": 0.4})
    assert shard.spent == pytest.approx({"computing": 0.5})


def test_messages_outlive_the_list_of_the_status(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run")
    reader = opened(path)
    reader.read_status(now())
    made_runs.write_status(path, msgspec.structs.replace(made_runs.view(), messages=()))
    reader.read_status(now())
    assert [message.what for message in reader.state.messages] == [
        "host_joined",
        "role_restarted",
        "role_back",
    ]


def test_reading_writes_nothing(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run")
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    reader = opened(path)
    reader.read_points()
    reader.read_status(now())
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before
