"""Whether the role that holds a job back is named, with its cause: planted in real processes.

    python experiments/benchmarks/culprits.py [--runs 20] [--healthy 10] [--only CAUSE] [--small]

Each run is a job of three replicas, which sleep 25 ms in each step, so that speed does not depend
on the processors, and two shards. The first `--healthy` runs are looked at before anything is
planted, then each has one of these:

    processor   a replica's process is stopped for three quarters of the time
    straggler   the same, in a job whose replicas wait for each other in rounds
    link        a replica's host sends and receives 20 Mbit/s; the others 1 Gbit/s
    data        a replica's data set sleeps
    silent      a shard's process is stopped
    memory      a replica's process gets a control group with less memory than its mapped data

All looks are those of `distbelief status --why`: six seconds. Not in `make bench`: only root may
make network namespaces and control groups.

    named           share of the runs in which the role and the cause were named
    named_CAUSE     of those with this cause
    blamed          healthy jobs in which any role was named
"""

import argparse
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from distbelief.dashboard.bottleneck import Finding
from distbelief.dashboard.reader import watched
from distbelief.job.run.directory import RunDirectory
from distbelief.simulation.chaos.local_faults import TURN_SECONDS, ProcessFaults
from distbelief.supervisor.view import JobView
from experiments.benchmarks.marks import planted
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.network import jobs
from experiments.benchmarks.network.hosts import Lan, obstacle, switched


CAUSES: Final = ("processor", "straggler", "link", "data", "silent", "memory")
N_REPLICAS, N_SHARDS = 3, 2
HOSTS: Final = range(1, 1 + N_REPLICAS)  # which join
FAST_BITS, SLOW_BITS = 1e9, 2e7
SLOWER: Final = 4.0
MEMORY_BYTES: Final = planted.FILE_BYTES // 3
START_SECONDS: Final = 120.0
SETTLE_SECONDS: Final = 3.0
SMALL: Final = {"runs": 1, "healthy": 1}
JOB: Final = """
cluster = {{ replicas = 3, shards = 2 }}
model = {{ factory = "{module}:PacedNet", arguments = {{ seconds = 0.025 }} }}
data.train = {{ factory = "{module}:Scattered", arguments = {{ folder = "{folder}", n = 100000 }} }}
stop.seconds = 600
output.directory = "run"

[algorithm]
name = "downpour"
loss = "cross_entropy"
batch_size = 16
rule = {{ name = "sgd", learning_rate = 0.01 }}
{more}
"""
ROUNDS: Final = 'exchange = { staleness = 0, round = {}, weight = "mean" }'


class Running(NamedTuple):
    """A job that trains."""

    lan: Lan
    folder: Path
    run: RunDirectory

    def look(self) -> Finding | None:
        return watched(self.run).why

    @property
    def view(self) -> JobView:
        status = self.run.read_status()
        return JobView() if status is None else status.view

    def pid(self, name: str) -> int:
        return next(role.pid for role in self.view.roles if role.name == name and role.pid)


@contextmanager
def training(lan: Lan, folder: Path, cause: str) -> Iterator[Running]:
    """Start a job, wait until it trains, and kill it afterwards."""
    module = planted.__name__
    n_hosts = len(lan.hosts) if cause == "link" else 1
    more = ROUNDS if cause == "straggler" else ""
    jobs.lay_out(folder, JOB.format(module=module, folder=folder, more=more), n_hosts=n_hosts)
    with ExitStack() as stack:
        if n_hosts > 1:
            words = ("--cores", "0")  # no replica beside the shards
            jobs.start(folder, lan.hosts, *words, imports=module, stack=stack)
        else:
            command = [*lan.hosts[0].prefix, jobs.COMMAND, "train", "job.toml"]
            log = stack.enter_context((folder / "log").open("w"))
            process = subprocess.Popen(command, cwd=folder / "0", stdout=log, stderr=log)
            stack.callback(process.wait)
        for host in lan.hosts:
            stack.callback(lan.kill, host)
        job = Running(lan, folder, RunDirectory(folder / "0" / "run", lock=None))
        deadline = time.monotonic() + START_SECONDS
        while sum(role.rate is not None for role in job.view.roles) < N_REPLICAS + N_SHARDS:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no training after {START_SECONDS:.0f} s, see {folder}")
            time.sleep(0.2)
        time.sleep(SETTLE_SECONDS)
        yield job


@contextmanager
def slowed(job: Running, name: str) -> Iterator[str]:
    faults, over = ProcessFaults(), threading.Event()
    faults.slow(job.pid(name), now=time.monotonic(), seconds=math.inf, factor=SLOWER)

    def turn() -> None:
        while not over.wait(TURN_SECONDS):
            faults.turn(time.monotonic())

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        yield name
    finally:
        over.set()
        thread.join()
        faults.release()


@contextmanager
def slow_link(job: Running, name: str) -> Iterator[str]:
    found = (job.folder.glob(f"{index}/runs/joined/*/logs/{name}*.log") for index in HOSTS)
    index = next(index for index, logs in zip(HOSTS, found, strict=True) if any(logs))
    job.lan.limit(job.lan.hosts[index], bits_per_second=SLOW_BITS)
    yield name
    job.lan.limit(job.lan.hosts[index], bits_per_second=FAST_BITS)


@contextmanager
def slow_data(job: Running, name: str) -> Iterator[str]:
    (job.folder / f"slow-{job.pid(name)}").touch()
    yield name


@contextmanager
def stopped_shard(job: Running, name: str) -> Iterator[str]:
    name = f"shard-{int(name[-1]) % N_SHARDS}"
    os.kill(job.pid(name), signal.SIGSTOP)
    yield name


@contextmanager
def small_memory(job: Running, name: str) -> Iterator[str]:
    """Its group has what it allocates from now on: pages of the file among that."""
    pid, first = job.pid(name), Path("/sys/fs/cgroup/memory")
    first = first if first.is_dir() else Path("/sys/fs/cgroup")
    limit = "memory.limit_in_bytes" if first.name == "memory" else "memory.max"
    group = first / f"distbelief-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(MEMORY_BYTES))
        (group / "cgroup.procs").write_text(str(pid))
        (job.folder / f"small-{pid}").touch()
        yield name
    finally:
        with suppress(ProcessLookupError):  # it may have ended, as by a signal to all
            (first / "cgroup.procs").write_text(str(pid))
        group.rmdir()


PLANT: Final[Mapping[str, Callable[[Running, str], AbstractContextManager[str]]]] = {
    "processor": slowed,
    "straggler": slowed,
    "link": slow_link,
    "data": slow_data,
    "silent": stopped_shard,
    "memory": small_memory,
}


class Verdict(NamedTuple):
    named: bool
    blamed: bool | None  # before it was planted; None: not looked at
    text: str


def judge(lan: Lan, cause: str, index: int, *, healthy: bool) -> Verdict:
    with TemporaryDirectory() as place, training(lan, Path(place), cause) as job:
        before = job.look() if healthy else None
        with PLANT[cause](job, f"replica-{index % N_REPLICAS}") as culprit:
            time.sleep(SETTLE_SECONDS)
            found = job.look()
    expected = "processor" if cause == "straggler" else cause
    text = "nothing to tell" if found is None else found.text
    named = found is not None and (found.role, found.cause) == (culprit, expected)
    if cause == "straggler":
        named = named and text.startswith("The others wait for")
    is_blamed = None if not healthy else before is None or bool(before.role)
    if is_blamed:
        text = f"{text} [healthy: {before}]"
    return Verdict(named, is_blamed, text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--healthy", type=int, default=10)
    parser.add_argument("--only", choices=CAUSES, action="append")
    options = measurement.options_of(parser, arguments, small=SMALL)
    if (why := obstacle()) is not None:
        parser.exit(message=f"not run: {why}\n")
    causes = options.only or CAUSES
    verdicts: list[tuple[str, Verdict]] = []
    with switched(1 + N_REPLICAS, bits_per_second=FAST_BITS) as lan:
        for index in range(options.runs):
            cause = causes[index % len(causes)]
            found = judge(lan, cause, index // len(causes), healthy=index < options.healthy)
            verdicts.append((cause, found))
            print(
                f"{cause:10} {'named' if found.named else 'NOT NAMED':10} {found.text}", flush=True
            )
    figures = {"named": fmean(found.named for _, found in verdicts)}
    for cause in causes:
        own = [found.named for planted, found in verdicts if planted == cause]
        if own:
            figures[f"named_{cause}"] = fmean(own)
    figures["blamed"] = float(sum(found.blamed is True for _, found in verdicts))
    measurement.conclude("culprits", figures)


if __name__ == "__main__":
    main()
