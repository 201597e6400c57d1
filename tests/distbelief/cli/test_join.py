import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distbelief.cli.main import app
from distbelief.core.errors import JobError
from distbelief.serve.options import join_server
from distbelief.transport.keys import KeyFiles
from tests.distbelief.jobs import SPEECH


SECRET = "5f" * 32


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "speech").mkdir()
    (tmp_path / "speech.toml").write_text(SPEECH)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mistaken(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    return done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["join", "nowhere"], "is not a job address"),
        (["join", "tcp://h:7700?key=abc"], "not a public key"),
        (["join", "tcp://127.0.0.1:7700"], "distbelief keys new"),
        (["join", "tcp://127.0.0.1:7700", "--keys", "none"], "distbelief keys new"),
        (["join", "tcp://127.0.0.1:7700", "--keys", "keys"], "allows 0 keys as a server"),
        (["join", f"tcp://127.0.0.1:1?secret={SECRET}", "--memory", "4"], "has no unit"),
        (["train", "speech.toml", "--hosts", "2"], "--listen tcp://0.0.0.0:7700"),
    ],
)
def test_mistakes_in_options_of_join_are_named(words: list[str], said: str, folder: Path) -> None:
    KeyFiles(folder / "keys").make()
    assert said in mistaken(*words)


def listening(listen: str, *, on: str | None = None) -> None:
    join_server(listen, keys=None, insecure=False, n_hosts=1, hosts_seconds=1.0, cores=None, on=on)


def test_where_a_job_listens_is_checked() -> None:
    listening("tcp://127.0.0.1:0")
    with pytest.raises(JobError, match="--listen 'x' is no address"):
        listening("x")
    with pytest.raises(JobError, match="can be reached from other hosts and needs keys"):
        listening("tcp://0.0.0.0:7700")
    with pytest.raises(JobError, match="--on 'slurm'"):
        listening("tcp://127.0.0.1:0", on="slurm")


def test_without_ray_nothing_is_begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run directory stayed behind, and the next run's was called speech.2."""
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'distbelief[ray]'" in mistaken("train", "speech.toml", "--on", "ray")
    assert {path.name for path in folder.iterdir()} == {"speech", "speech.toml"}
