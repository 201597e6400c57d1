"""Hosts reached by ssh: what runs there, what the user reads, and when ssh connects again.

`ssh` is a script here: it runs the command on this host, or fails as ssh does.
"""

import os
import stat
import time
from itertools import count
from pathlib import Path

import pytest

from distbelief.core.errors import JobError
from distbelief.job.hosts import ssh
from tests.distbelief.jobs import speech
from tests.processes.commands import poll


SECRET = "5f" * 32
ADDRESS = f"tcp://127.0.0.1:1?secret={SECRET}"


def fake_ssh(monkeypatch: pytest.MonkeyPatch, place: Path, script: str) -> None:
    """Let `ssh ... HOST COMMAND` run this script, with HOST and COMMAND set."""
    program = place / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/bash\nCOMMAND="${{@: -1}}"\nHOST="${{@: -2:1}}"\n{script}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def n_lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


class Told:
    """Hosts, and what they log and tell."""

    def __init__(self, place: Path, *hosts: str, command: str = "cat; echo said by") -> None:
        self.logged: list[str] = []
        self.told: list[str] = []
        self.hosts = ssh.SshHosts(hosts, command=command, words="", log=self.logged.append)
        self.hosts.start(ADDRESS, directory=place / "joined")

    def look(self, later: float = 0.0) -> "Told":
        self.told += self.hosts.news(time.monotonic() + later)
        return self


@pytest.mark.parametrize("text", ["", "lab-2,", "-oProxyCommand=id", "lab 2", "lab-2;id", "a@b@c"])
def test_only_names_are_hosts(text: str) -> None:
    with pytest.raises(JobError, match="is no host: write ssh:HOST1,HOST2"):
        ssh.parse(f"ssh:{text}")


def test_hosts_are_as_ssh_takes_them() -> None:
    assert ssh.parse("ssh:lab-2,me@10.0.0.3, lab-2") == ("lab-2", "me@10.0.0.3")


def test_hosts_that_cannot_reach_the_job_are_a_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_ssh(monkeypatch, tmp_path, "exit 0")
    with pytest.raises(JobError, match="lab-2 cannot reach a job that listens at this host only"):
        ssh.check(("localhost", "lab-2"), is_local=True)
    ssh.check(("localhost", "me@127.0.0.1"), is_local=True)
    ssh.check(("lab-2",), is_local=False)


def test_the_command_there_names_what_the_job_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(Path, "cwd", lambda: Path("/home/me/my job"))
    keys = "/home/me/.distbelief/keys"
    made = ssh.SshHosts.of(speech(), ("lab-2",), command=None, keys=keys, log=print)
    assert made.line == (
        "cd ~/'my job' && distbelief join - --allow-import speech.model --allow-import speech.data "
        "--keys ~/.distbelief/keys"
    )
    made = ssh.SshHosts.of(speech(), ("lab-2",), command="./db", keys="", log=print)
    assert made.line.startswith("./db join - --allow-import")


def test_the_address_is_on_no_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_ssh(monkeypatch, tmp_path, f'echo "$@" > {tmp_path}/words; head -1')
    told = Told(tmp_path, "lab-2")
    poll(lambda: told.look().logged)
    told.hosts.close()
    assert told.logged == [f"lab-2: {ADDRESS}"]
    words = (tmp_path / "words").read_text()
    assert "BatchMode=yes" in words
    assert SECRET not in words


def test_a_host_that_cannot_be_reached_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fails = 'echo "ssh: connect to host $HOST port 22: No route to host" >&2; exit 255'
    fake_ssh(monkeypatch, tmp_path, f"echo x >> {tmp_path}/tries; {fails}")
    told = Told(tmp_path, "lab-2")
    tries = tmp_path / "tries"
    poll(lambda: told.look().told)
    why = "ssh: connect to host lab-2 port 22: No route to host"
    text = f"lab-2: ssh cannot connect, or lost the connection ({why}); trying again"
    assert told.told == [text]
    assert n_lines(tries) == 1
    told.look()
    assert n_lines(tries) == 1  # not at once
    told.look(later=3.0)
    poll(lambda: n_lines(tries) == 2)
    told.hosts.close()
    assert len(told.told) == 1  # once, however often it fails


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (127, "lab-2: distbelief is not found there (why): install it, or name it by --remote"),
        (1, "lab-2: cannot take part (why)"),
        (130, None),
        (0, None),
    ],
)
def test_what_another_try_cannot_mend_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, text: str | None
) -> None:
    script = f"echo x >> {tmp_path}/$HOST; [ $HOST = clock ] && exit 255; echo why; exit {code}"
    fake_ssh(monkeypatch, tmp_path, script)
    told = Told(tmp_path, "lab-2", "clock")
    clock, later = tmp_path / "clock", count(step=99)
    poll(lambda: told.look(later=next(later)).logged and n_lines(clock) >= 3)
    told.hosts.close()
    said = [line for line in told.told if line.startswith("lab-2")]
    assert [line[: len(text or "")] for line in said] == ([] if text is None else [text])
    assert (tmp_path / "lab-2").read_text() == "x\n"


def test_without_ssh_the_user_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match="there is no program ssh here"):
        ssh.check(("localhost",), is_local=True)
    told = Told(tmp_path, "lab-2")  # it is gone by now
    told.look(later=99.0).hosts.close()
    assert set(told.logged) == {"lab-2: cannot run ssh: No such file or directory"}


def test_a_host_that_ends_late_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_ssh(monkeypatch, tmp_path, "cat; echo done")  # as long as standard input is open
    monkeypatch.setattr(ssh, "END_SECONDS", 0.1)
    told = Told(tmp_path, "lab-2")
    poll(lambda: told.look().logged)
    told.hosts.close()
    assert told.logged == [f"lab-2: {ADDRESS}", "lab-2: done"]
