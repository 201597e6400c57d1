"""Hosts reached by ssh: one `ssh` per host, which runs `distbelief join` there.

    distbelief train speech.toml --listen tcp://10.0.0.1:7700 --keys ~/.distbelief/keys
        --on ssh:lab-2,lab-3

    train ---> ssh lab-2 ---> sshd ---> distbelief join -
               the job's address goes down standard input, which stays open

No process list shows the address, which may hold a secret. `join -` leaves when its standard input
ends, as it does with the local ssh, with this process, or with the connection.
"""

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self, final

from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.core.formatting import plain
from distbelief.core.reliable import Backoff
from distbelief.job.launch.role_process import words_of_consent
from distbelief.protocol.role import Seconds


PREFIX: Final = "ssh:"
# No password can be asked for; a connection that is cut ends ssh after 15 s.
SSH: Final = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
END_SECONDS: Final = 2.0  # for hosts to end with the job
CLOSE_SECONDS: Final = 3.0  # to end without their connection
OUTPUT_BYTES: Final = 4096  # of a host, that go to the log at once
LINE_MAX: Final = 1000  # characters
_FINAL: Final = (0, 1, 2, 126, 127, 130)  # after these, another try would end the same
_FIRST_SECONDS: Final = 1.0  # pause before the first new try
_LONGEST_SECONDS: Final = 60.0
_HOST: Final = re.compile(r"([\w.-]+@)?[\w.:\[\]]([\w.:\[\]-]*)", re.ASCII)
_LOCAL: Final = ("localhost", "127.0.0.1", "::1")


def parse(on: str) -> tuple[str, ...]:
    """Return the hosts of "ssh:HOST1,HOST2", or raise JobError."""
    hosts = tuple(dict.fromkeys(host.strip() for host in on.removeprefix(PREFIX).split(",")))
    for host in hosts:
        if _HOST.fullmatch(host) is None:
            raise JobError(
                f"--on {on}: {host!r} is no host: write ssh:HOST1,HOST2, each as for the "
                "command ssh (a name of ~/.ssh/config, or USER@NAME)"
            )
    return hosts


def check(hosts: tuple[str, ...], *, is_local: bool) -> None:
    """Raise JobError if these hosts cannot be started, or cannot reach the job."""
    if shutil.which(SSH[0]) is None:
        raise JobError("--on ssh: there is no program ssh here: install OpenSSH's client")
    others = [host for host in hosts if host.rpartition("@")[2] not in _LOCAL]
    if is_local and others:
        raise JobError(
            f"--on ssh: {', '.join(others[:3])} cannot reach a job that listens at this host only: "
            "use --listen tcp://0.0.0.0:7700 --keys DIR, with keys on all hosts"
        )


@final
@dataclass(kw_only=True, eq=False)
class _Link:
    host: str
    process: "subprocess.Popen[bytes] | None" = None
    unread: bytes = b""  # the beginning of a line of its output
    last: str = ""  # line of the output
    told: str = ""  # the newest text about it
    begun_at: Seconds = 0.0
    backoff: Backoff = field(
        default_factory=lambda: Backoff(first=_FIRST_SECONDS, longest=_LONGEST_SECONDS)
    )
    is_over: bool = False

    def lines(self) -> list[str]:
        """Return what ssh and the process there have printed by now."""
        if self.process is None:
            return []
        assert self.process.stdout is not None
        new = self.process.stdout.read(OUTPUT_BYTES)  # None: nothing yet; b"": nothing more
        *whole, self.unread = (self.unread + (b"\n" if new == b"" else new or b"")).split(b"\n")
        self.unread = self.unread[-OUTPUT_BYTES:]
        texts = [line.decode(errors="replace").strip()[:LINE_MAX] for line in whole]
        lines = [plain(text) for text in texts if text]
        self.last = lines[-1] if lines else self.last
        return lines


@final
class SshHosts:
    """The hosts of one job that ssh reaches: `start`, `news` now and then, `close`.

    `command` are shell words that run distbelief there; `log` takes what the hosts print.
    """

    def __init__(
        self, hosts: tuple[str, ...], *, command: str, words: str, log: Callable[[str], None]
    ) -> None:
        self._hosts = hosts
        self.line = f"{command} join - {words}"
        self._log = log
        self._address = b""
        self._links: list[_Link] = []

    @classmethod
    def of(
        cls,
        job: Job,
        hosts: tuple[str, ...],
        *,
        command: str | None,
        keys: str,
        log: Callable[[str], None],
    ) -> Self:
        """Return the hosts of this job; its folder and its keys lie there as they do here."""
        words = [words_of_consent(job)]
        words += [f"--keys {_from_home(Path(keys))}"] if keys else []
        here = f"cd {_from_home(Path.cwd())} && distbelief"
        return cls(hosts, command=command or here, words=" ".join(words), log=log)

    def start(self, address: str, *, directory: Path) -> None:
        """Connect to all hosts; they join when they are ready. Their logs stay with them."""
        del directory
        self._address = f"{address}\n".encode()
        self._links = [_Link(host=host) for host in self._hosts]
        for link in self._links:
            self._connect(link)

    def news(self, now: Seconds) -> list[str]:
        """Log what the hosts printed, connect again where due; return texts for the user."""
        texts: list[str] = []
        for link in self._links:
            self._read(link)
            if link.is_over:
                continue
            if link.process is None:
                if now >= link.backoff.due:
                    self._connect(link)
            elif (code := link.process.poll()) is not None:
                texts += self._ended(link, code, now)
        return texts

    def close(self) -> None:
        """End all hosts; what does not end in time loses its connection, and ends by that."""
        processes = [link.process for link in self._links if link.process is not None]
        _wait(processes, END_SECONDS)
        for process in processes:
            _hang_up(process)
        _wait(processes, CLOSE_SECONDS)
        for link in self._links:
            self._end(link)
        self._links = []

    def _read(self, link: _Link) -> None:
        for line in link.lines():
            self._log(f"{link.host}: {line}")

    def _connect(self, link: _Link) -> None:
        directory = shlex.quote(f"runs/joined/{link.host}")
        link.begun_at = time.monotonic()
        try:
            # A session of its own: Ctrl+C is for the job, which ends the hosts in order.
            process = link.process = subprocess.Popen(  # noqa: S603 -- the user's hosts
                [*SSH, "--", link.host, f"{self.line} --directory {directory}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:  # too many processes, for example
            self._log(f"{link.host}: cannot run ssh: {error.strerror}")
            link.backoff.repeat(link.begun_at)
            return
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        with suppress(OSError):  # it has ended already: `news` says why
            process.stdin.write(self._address)  # much less than a pipe holds

    def _end(self, link: _Link) -> None:
        process = link.process
        if process is None:
            return
        _hang_up(process)
        process.kill()
        process.wait()
        for _ in range(16):  # all that a pipe holds: the last line says why
            self._read(link)
        assert process.stdout is not None
        process.stdout.close()
        link.process, link.unread = None, b""

    def _ended(self, link: _Link, code: int, now: Seconds) -> list[str]:
        self._end(link)
        link.is_over = code in _FINAL
        if now - link.begun_at > _LONGEST_SECONDS:
            link.backoff.start(now)
        else:
            link.backoff.repeat(now)
        text = _failure(link.host, code, link.last)
        if text is None or text == link.told:
            return []
        link.told = text
        return [text if link.is_over else f"{text}; trying again"]


def _hang_up(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()


def _wait(processes: Sequence["subprocess.Popen[bytes]"], seconds: Seconds) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _failure(host: str, code: int, last: str) -> str | None:
    why = f" ({last[:500]})" if last else ""
    match code:
        case 0 | 130:
            return None
        case 255:
            return f"{host}: ssh cannot connect, or lost the connection{why}"
        case 126 | 127:
            return (
                f"{host}: distbelief is not found there{why}: install it, or name it by --remote "
                "/PATH/TO/distbelief"
            )
        case 1 | 2:
            return f"{host}: cannot take part{why}"
        case _:
            return f"{host}: `distbelief join` ended with exit code {code}{why}"


def _from_home(path: Path) -> str:
    """Return a path for a shell on a host with another home."""
    with suppress(ValueError):
        return f"~/{shlex.quote(str(path.absolute().relative_to(Path.home())))}"
    return shlex.quote(str(path.absolute()))
