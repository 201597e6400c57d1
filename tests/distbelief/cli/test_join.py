"""Options of `join`, and of `train` where other hosts may join."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distbelief.cli.main import app
from distbelief.errors import JobError
from distbelief.serve.options import join_server
from distbelief.transport.keys import KeyFiles
from tests.distbelief.jobs import SPEECH


MISTAKEN = 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["join", "nowhere"], "is not a job address"),
        (["join", "tcp://h:7700?key=abc"], "not a public key"),
        (["join", "tcp://127.0.0.1:7700"], "distbelief keys new"),
        (["join", "tcp://127.0.0.1:7700", "--keys", "none"], "distbelief keys new"),
        (
            [
                "join",
                "tcp://127.0.0.1:1?secret=5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f5f",
                "--memory",
                "4",
            ],
            "has no unit",
        ),
    ],
)
def test_mistakes_of_who_joins_are_named(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == MISTAKEN, done.output
    assert said in done.stderr


def test_a_machine_that_knows_no_server_asks_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    KeyFiles(tmp_path / "keys").make()
    words = ["join", "tcp://127.0.0.1:7700", "--keys", "keys"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == MISTAKEN
    assert "allows 0 keys as a server" in done.stderr


def listening(
    listen: str = "tcp://127.0.0.1:0", *, keys: Path | None = None, on: str | None = None
) -> None:
    join_server(listen, keys=keys, insecure=False, n_hosts=1, hosts_seconds=1.0, cores=None, on=on)


def test_where_a_job_listens_is_checked() -> None:
    listening()
    with pytest.raises(JobError, match="--listen 'x' is no address"):
        listening("x")
    with pytest.raises(JobError, match="can be reached from other hosts and needs keys"):
        listening("tcp://0.0.0.0:7700")
    with pytest.raises(JobError, match="--on 'spark'"):
        listening(on="spark")


def test_options_for_machines_need_somewhere_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "speech").mkdir()
    (tmp_path / "speech.toml").write_text(SPEECH)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "speech.toml", "--hosts", "2"])
    assert done.exit_code == MISTAKEN
    assert "--listen tcp://0.0.0.0:7700" in done.stderr


def test_without_ray_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run directory stayed behind, and the next run's was called speech.2."""
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "speech").mkdir()
    (tmp_path / "speech.toml").write_text(SPEECH)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "speech.toml", "--on", "ray"])
    assert done.exit_code == MISTAKEN, done.output
    assert "pip install 'distbelief[ray]'" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"speech", "speech.toml"}
