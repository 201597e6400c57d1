"""Four hosts at a switch, 1 Gbit/s each: a job over all of them, links that are cut."""

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from experiments.benchmarks.network import jobs
from experiments.benchmarks.network.hosts import Lan, obstacle, switched
from tests.processes.commands import BATCH_JOB, JOB, LONG, MODULE, Command, poll, sets


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
        job, *self.machines = jobs.start(
            self.folder, self.lan.hosts, *options, imports="tiny", stack=self.stack
        )
        self.command = Command(job, self.folder, self.folder / "0" / "runs/tiny")

    def says(self, pattern: str) -> bool:
        return re.search(pattern, self.command.told()) is not None

    def end(self) -> None:
        self.command.signal(signal.SIGINT)
        assert self.command.wait() == 130, self.command.output


@contextmanager
def job_at(folder: Path, text: str) -> Iterator[Job]:
    if (why := obstacle()) is not None:
        pytest.skip(why)
    jobs.lay_out(folder, text, n_hosts=N_HOSTS)
    for index in range(N_HOSTS):
        (folder / str(index) / "tiny.py").write_text(MODULE)
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
