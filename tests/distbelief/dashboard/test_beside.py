"""The page in processes of its own: beside a run, and as a command."""

import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distbelief.cli.main import app
from distbelief.dashboard import beside
from distbelief.dashboard.beside import page_beside
from distbelief.dashboard.server import listen
from tests.distbelief.dashboard import made_runs


pytestmark = pytest.mark.processes


def test_the_page_beside_a_run_sends_its_end_and_ends(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run")
    listening = listen("127.0.0.1:0")
    port = listening.getsockname()[1]
    with page_beside(path, listening):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/events")
        reply = connection.getresponse()
        while b"event: state" not in reply.readline():
            pass
        made_runs.write_status(path, made_runs.view(), ended=True)
    rest = reply.read()
    assert b'"state":"ended"' in rest
    assert b"event: end\n" in rest
    connection.close()
    with pytest.raises(OSError, match="refused"):
        http.client.HTTPConnection("127.0.0.1", port, timeout=60).request("GET", "/")


def children() -> set[int]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


@pytest.mark.parametrize("what", [signal.SIGSTOP, signal.SIGKILL])
def test_a_run_waits_for_no_page_that_stands_still_or_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: int
) -> None:
    monkeypatch.setattr(beside, "END_SECONDS", 0.2)
    path, before = made_runs.make(tmp_path / "run"), children()
    with page_beside(path, listen("127.0.0.1:0")):
        (pid,) = children() - before
        os.kill(pid, what)
        made_runs.write_status(path, made_runs.view(), ended=True)  # as a run that goes on
    assert pid not in children()


def test_it_shows_a_run_that_has_written_nothing_yet(tmp_path: Path) -> None:
    listening = listen("127.0.0.1:0")
    port = listening.getsockname()[1]
    (tmp_path / "run").mkdir()
    with page_beside(tmp_path / "run", listening):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/metrics")
        assert b"distbelief_run_up{" in connection.getresponse().read()
        connection.close()


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run")
    command = [sys.executable, "-c", "from distbelief.cli.entry import main; main()", "dashboard"]
    with subprocess.Popen(
        [*command, str(path), "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        try:
            line = running.stdout.readline()
            assert line.startswith("page: http://127.0.0.1:")
            port = int(line.split("/")[2].split(":")[1])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            # At once: the first reply waits for the first reading of the run.
            connection.request("GET", "/metrics")
            assert b"distbelief_samples_total" in connection.getresponse().read()
            connection.close()
            os.kill(running.pid, signal.SIGINT)
            assert running.wait(60) == 0
        finally:
            running.kill()


def test_mistakes_are_told(tmp_path: Path) -> None:
    for arguments, what in (
        ([], "no run to show"),
        ([str(tmp_path / "none")], "no such"),
        ([str(made_runs.make(tmp_path / "run")), "--listen", "here"], "HOST:PORT"),
    ):
        done = CliRunner().invoke(app, ["dashboard", *arguments])
        assert done.exit_code == 2
        assert what in done.output


def test_why_is_told_of_a_run_that_has_ended(tmp_path: Path) -> None:
    path = made_runs.make(tmp_path / "run", ended=True)
    done = CliRunner().invoke(app, ["status", str(path), "--why"])
    assert done.exit_code == 0
    assert "replicas compute" in done.output
    done = CliRunner().invoke(app, ["status", str(path), "--why", "--json"])
    assert done.stdout.startswith('{"role":"","cause":""')
