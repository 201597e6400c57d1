"""Four hosts at a switch, 1 Gbit/s each: a job over all of them, links that are cut."""

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distbelief.transport.keys import Allowed, KeyFiles
from experiments.benchmarks.network.hosts import Host, Lan, obstacle, switched
from tests.processes.commands import BATCH_JOB, COMMAND, JOB, LONG, MODULE, Command, poll, sets


pytestmark = [pytest.mark.soak, pytest.mark.root, pytest.mark.processes, pytest.mark.timeout(900)]

N_HOSTS = 4
SPLIT = sets("cluster.replicas=2", "cluster.partitions=2", "model.initial=seed")
SECONDS_MAX = 500.0  # on a machine that has other things to do


@dataclass
class Job:
    """One job, its machines, and where they live."""

    folder: Path
    lan: Lan
    stack: ExitStack
    command: Command = field(init=False)
    machines: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(self, *options: str) -> None:
        here = self.lan.hosts[0]
        listen = ["--listen", f"tcp://{here.address}:7700", "--keys", "keys"]
        hosts = ["--hosts", f"{N_HOSTS - 1}", "--cores", "1"]
        words = ["train", "tiny.toml", *listen, *hosts, *options]
        process = self._start(here, self.folder / "0", words)
        self.command = Command(process, self.folder, self.folder / "0" / "runs/tiny")
        for index, host in enumerate(self.lan.hosts[1:], start=1):
            words = ["join", f"tcp://{here.address}:7700", "--keys", "keys"]
            words += ["--cores", "1", "--allow-import", "tiny"]
            folder = self.folder / str(index)
            self.machines.append(self._start(host, folder, words))

    def says(self, pattern: str) -> bool:
        return re.search(pattern, self.command.told()) is not None

    def end(self) -> None:
        self.command.signal(signal.SIGINT)
        assert self.command.wait() == 130, self.command.output

    def _start(self, host: Host, folder: Path, words: list[str]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*host.prefix, str(COMMAND), *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.stack.callback(process.communicate)
        self.stack.callback(process.kill)
        return process


@contextmanager
def job_at(folder: Path, text: str) -> Iterator[Job]:
    if (why := obstacle()) is not None:
        pytest.skip(why)
    for index in range(N_HOSTS):
        (folder / str(index)).mkdir()
        (folder / str(index) / "tiny.py").write_text(MODULE)
        KeyFiles(folder / str(index) / "keys").make()
    (folder / "0" / "tiny.toml").write_text(text)
    keys = [KeyFiles(folder / str(index) / "keys") for index in range(N_HOSTS)]
    server = Allowed(key=keys[0].pair().public, roles=("server",), name="job")
    for index, other in enumerate(keys[1:]):
        key = other.pair().public
        keys[0].allow(Allowed(key=key, roles=("host",), name=f"h{index}"))
        other.allow(server)
    with ExitStack() as stack:
        yield Job(folder, stack.enter_context(switched(N_HOSTS, bits_per_second=1e9)), stack)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (JOB, sets("cluster.replicas=4")),
        (JOB, [*SPLIT, *sets("stop.epochs=1")]),
        (BATCH_JOB, sets("cluster.replicas=4")),
        (BATCH_JOB, SPLIT),
    ],
    ids=["Downpour", "Downpour, split", "Sandblaster", "Sandblaster, split"],
)
def test_a_job_runs_on_four_hosts(tmp_path: Path, text: str, options: list[str]) -> None:
    with job_at(tmp_path, text) as job:
        job.start(*options)
        assert job.command.wait(seconds=SECONDS_MAX) == 0, job.command.output
        assert len(re.findall(r": on \S+ \(host-", job.command.output)) == N_HOSTS - 1
        for machine in job.machines:
            assert machine.wait(20) == 0
        for host in job.lan.hosts[1:]:
            received, sent = job.lan.n_bytes(host)
            assert received > 10_000
            assert sent > 10_000


@pytest.mark.parametrize("for_good", [False, True])
def test_a_job_does_without_a_host_that_is_cut_off(tmp_path: Path, *, for_good: bool) -> None:
    """One that is back after ten seconds gets roles again."""
    with job_at(tmp_path, JOB) as job:
        job.start(*sets("cluster.replicas=4"), *LONG)
        poll(job.command.is_training)
        last = job.lan.hosts[-1]
        job.lan.cut(last)
        poll(lambda: job.says("waits for a host" if for_good else "is lost"), seconds=40)
        job.command.trains()
        if not for_good:
            job.lan.mend(last)
            poll(lambda: len(re.findall(r": on \S+ \(host-", job.command.told())) == N_HOSTS)
            job.command.trains()
        job.end()
