"""`distbelief slurm`: its batch script, run on this host by programs that stand in for Slurm's."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from distbelief.transport.keys import KeyFiles
from tests.processes.commands import SLOW, Command, alive, ended, poll, said, sets, write_job
from tests.processes.nursery import Forked


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.untraced,
    pytest.mark.timeout(300),
]

# Late with the second name, and fails if nobody reads it: `scontrol ... | head -n 1`, as the script
# had it, was ended by SIGPIPE now and then, and the job with it (exit code 141).
NODES = """#!/bin/bash
[[ $* == "show hostnames node-[1-2]" ]] || exit 1
echo 127.0.0.1; sleep 0.3; echo 127.0.0.2
"""
# Runs the command once, in place of the other node, and notes which process it is.
SRUN = """#!/bin/bash
echo $$ >> {place}/pids
for word in "$@"; do [[ $word == -* ]] || break; shift; done
exec "$@"
"""


def script_of(place: Path, *options: str) -> str:
    KeyFiles(place / "keys").make()
    write_job(place)
    return said(place, "slurm", "tiny.toml", "--keys", "keys", *options)


@contextmanager
def submitted(place: Path, script: Path) -> Iterator[Command]:
    """Run the batch script as Slurm does on the first of two nodes."""
    environment = os.environ | {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    process = subprocess.Popen(
        ["bash", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    command = Command(process, place, place / "runs" / "tiny")
    with process:
        try:
            yield command
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def has_hosts(command: Command, n_runs: int) -> bool:
    """Whether the other node has got a replica, in each of so many runs."""
    process = command.process
    assert isinstance(process, subprocess.Popen)
    assert process.poll() is None, process.communicate()[0]
    return command.told().count("replica 1: on ") == n_runs


def trains_beyond(command: Command, n_samples: int) -> bool:
    return command.is_training() and command.samples() > n_samples


def test_a_job_under_slurm_saves_before_its_time_limit_and_goes_on(tmp_path: Path) -> None:
    for name, text in (("scontrol", NODES), ("srun", SRUN.format(place=tmp_path))):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    script = tmp_path / "tiny.sbatch"
    script.write_text(script_of(tmp_path, "--nodes", "2", *SLOW, *sets("cluster.replicas=2")))
    done = 0
    for turn in (1, 2):
        with submitted(tmp_path, script) as command:
            poll(partial(has_hosts, command, turn), seconds=90.0)
            poll(partial(trains_beyond, command, done))
            command.signal(signal.SIGTERM)  # to the script alone, as --signal=B:TERM does
            assert command.wait() == 143, command.output
        assert command.summary()["samples"] > done
        done = command.summary()["samples"]
        assert list((command.run / "snapshots").rglob("*")), "nothing was saved"
    assert not alive([int(pid) for pid in (tmp_path / "pids").read_text().split()])
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name != "joined"] == [
        "tiny"
    ]


@pytest.mark.parametrize("nodes", ["1", "3"])
def test_the_script_is_sound(tmp_path: Path, nodes: str) -> None:
    place = tmp_path / "my job's folder"
    place.mkdir()
    script = place / "tiny.sbatch"
    script.write_text(script_of(place, "--nodes", nodes, "--set", "output.directory=runs/a b"))
    assert ended(place, "bash", "-n", script).returncode == 0
    assert ("srun" in script.read_text()) == (nodes != "1")
    assert f"?key={KeyFiles(place / 'keys').pair().public}" in script.read_text() or nodes == "1"
    if shutil.which("shellcheck"):
        checked = ended(place, "shellcheck", script)
        assert checked.returncode == 0, checked.stdout


def test_what_a_script_cannot_be_made_of_is_named(tmp_path: Path) -> None:
    write_job(tmp_path)
    for words, text in (
        (["tiny.toml", "--keys", "keys"], "distbelief keys new"),
        ([], "no job: name a job file"),
        (["tiny.toml", "--time", "$(id)"], "--time $(id): write it as sbatch takes it"),
    ):
        with Forked(["slurm", *words], folder=tmp_path) as command:
            told, _ = command.communicate()
            assert command.returncode == 2, told
        assert text in told
