"""`distbelief train --on ssh:...`: hosts start, are lost and come back, and end with the job.

`ssh` is a program here that does on this host what ssh and sshd do on two: the command there has
pipes to it, which close with it.
"""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.processes.commands import (
    COMMAND,
    MODULE,
    SLOW,
    Command,
    alive,
    poll,
    sets,
    train,
    write_job,
)


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.untraced,
    pytest.mark.timeout(180),
]

FAKE = """#!{python}
import subprocess, sys
*_, host, command = sys.argv
process = subprocess.Popen(
    ["bash", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="{there}"
)
open("{there}/pids", "a").write(f"{{process.pid}}\\n")
process.stdin.write(sys.stdin.buffer.readline())
process.stdin.flush()
import threading
threading.Thread(
    target=lambda: (sys.stdin.buffer.read(), process.stdin.close()), daemon=True
).start()
for line in process.stdout:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
sys.exit(process.wait())
"""


@contextmanager
def over_ssh(
    place: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> Iterator[tuple[Command, Path]]:
    """Start a job with two replicas, one of them on a host that the program `ssh` reaches."""
    here, there, program = place / "here", place / "there", place / "bin" / "ssh"
    for folder in (here, there, program.parent):
        folder.mkdir()
    write_job(here)
    (there / "tiny.py").write_text(MODULE)
    program.write_text(FAKE.format(python=COMMAND.with_name("python"), there=there))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    words = ["--on", "ssh:me@localhost", "--remote", f"exec {COMMAND}", "--hosts", "1"]
    words += ["--cores", "1", *sets("cluster.replicas=2"), *options]
    try:
        with train(here, *words, fresh=True) as command:
            yield command, there
    finally:
        poll(lambda: not alive(joined(there)))


def joined(there: Path) -> list[int]:
    """Return the processes that joined, by ssh."""
    file = there / "pids"
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def maps_of(role: str, there: Path) -> str:
    """Return which files a role maps that runs on the host that joined."""
    logs = [path.read_text() for path in there.rglob(f"{role}.log")]
    pids = re.findall(r"process (\d+) begins", "".join(logs))
    return content(Path(f"/proc/{pids[-1]}/maps")).decode() if pids else ""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_hosts_start_by_ssh_and_end_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with over_ssh(tmp_path, monkeypatch, *SLOW) as (command, there):
        poll(command.is_training)
        secret = (command.run / "address").read_text().strip().partition("?secret=")[2]
        lines = [content(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert any(b"BatchMode" in line for line in lines)
        assert not any(secret.encode() in line for line in lines)
        poll(lambda: command.told().count("replica 1: on ") == 1)
        # On one machine, nothing goes through TCP.
        poll(lambda: f"/distbelief-{command.process.pid}-" in maps_of("replica-1", there))
        os.kill(parent(joined(there)[0]), signal.SIGKILL)  # the local ssh
        poll(lambda: not alive(joined(there)[:1]))
        poll(lambda: command.told().count("replica 1: on ") == 2)
        command.signal(signal.SIGINT)
        assert command.wait() == 130, command.output
    assert len(joined(there)) == 2
    assert re.search(r"me@localhost: host-\w+ waits for a job at tcp://", command.told())
    assert secret not in command.told()


@pytest.mark.soak
def test_hosts_end_when_the_job_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patience = sets("cluster.patience=2 s")
    with over_ssh(tmp_path, monkeypatch, *SLOW, *patience) as (command, there):
        poll(command.is_training)
        command.signal(signal.SIGKILL)
        poll(lambda: not alive(joined(there)))


def content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # its process has ended
        return b""
