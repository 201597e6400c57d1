"""Bytes on each link of a network: as counted there, and as foretold in virtual time.

The job runs for real, its replicas on machines that have joined. Then the same roles
run in virtual time on the same machines, where every message is encoded as it would be
sent, and only counted. What a link has beyond that is the price of the way: frames and
seals of ZeroMQ, headers of TCP and IP, acknowledgements, and what hosts say for
themselves twice a second.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, final

from distbelief.config.load import load_job
from distbelief.forecast.prepare import Preparation, PreparedJob
from distbelief.forecast.run import run_simulated
from distbelief.program.cluster import Machine, uniform
from distbelief.roles.role import SUPERVISOR, Address
from distbelief.run.directory import RunDirectory
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault
from distbelief.simulation.machines import ClusterOptions
from distbelief.simulation.placement import Place, options_for
from distbelief.simulation.trace import Traffic
from distbelief.transport.keys import Allowed, KeyFiles
from experiments.benchmarks.network.hosts import Host
from experiments.benchmarks.network.switch import Lan


SECONDS_MAX: Final = 240.0
TICK_SECONDS: Final = 0.02
TASK: Final = "experiments.benchmarks.simulated.task"
_MACHINE: Final = Machine(flops=2e10, memory_rate=1e10, bandwidth=1.25e8)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One host's link, in bytes.

    Attributes:
        roles: That ran at this host.
        received: As its interface counted.
        sent: Likewise.
        foretold_received: Of the messages of its roles.
        foretold_sent: Likewise.
    """

    roles: tuple[str, ...]
    received: int
    sent: int
    foretold_received: float
    foretold_sent: float

    @property
    def beyond(self) -> float:
        """How much more passed, both ways, than was foretold, as a share."""
        foretold = self.foretold_received + self.foretold_sent
        return (self.received + self.sent) / foretold - 1.0


def links_of(lan: Lan, text: str) -> Sequence[Link]:
    """Run a job over all hosts; return what passed each of their links.

    Raises:
        RuntimeError: it fails; its words.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="distbelief-")))
        placement, before = _run(folder, lan, text, stack)
        after = [lan.n_bytes(host) for host in lan.hosts]
        traffic, names = _foretell(folder / "0" / "job.toml", placement)
    links = []
    for index, (b, a) in enumerate(zip(before, after, strict=True)):
        here = [name for name in names if placement.get(name, 0) == index]
        there = [name for name in names if placement.get(name, 0) != index]
        links.append(
            Link(
                roles=tuple(name for name in here if placement.get(name) == index),
                received=a[0] - b[0],
                sent=a[1] - b[1],
                foretold_received=_between(traffic, there, here),
                foretold_sent=_between(traffic, here, there),
            )
        )
    return links


# -------------------------------------------------------------------------- for real


def _run(
    folder: Path, lan: Lan, text: str, stack: ExitStack
) -> tuple[Mapping[Address, int], Sequence[tuple[int, int]]]:
    """Run the job.

    Returns:
        On which host each replica's process was, and what the links had had when all
        hosts were ready.
    """
    hosts = lan.hosts
    lay_out(folder, hosts)
    (folder / "0" / "job.toml").write_text(text)
    at = f"tcp://{hosts[0].address}:7700"
    words = ["train", "job.toml", "--listen", at, "--keys", "keys", "--cores", "1"]
    job = start(hosts[0], folder / "0", [*words, "--hosts", f"{len(hosts) - 1}"], stack)
    for index, host in enumerate(hosts[1:], start=1):
        words = ["join", at, "--keys", "keys", "--cores", "1", "--allow-import", TASK]
        start(host, folder / f"{index}", words, stack)
    run = RunDirectory(folder / "0" / "runs" / "simulation", lock=None)
    while job.poll() is None and _n_ready(run) < len(hosts) - 1:
        time.sleep(TICK_SECONDS)
    before = [lan.n_bytes(host) for host in hosts]
    said, _ = job.communicate(timeout=SECONDS_MAX)
    if job.returncode:
        raise RuntimeError(f"the job ended with {job.returncode}: {said}")
    placement = {
        Address(log.stem): index
        for index in range(1, len(hosts))
        for log in (folder / f"{index}").glob("runs/joined/*/logs/*-*.log")
    }
    return placement, before


def _n_ready(run: RunDirectory) -> int:
    """Return how many machines that have joined are ready: as of a second ago."""
    status = run.read_status()
    hosts = () if status is None else status.view.hosts
    return sum(host.state == "ready" for host in hosts)


def lay_out(folder: Path, hosts: Sequence[Host]) -> None:
    """Make a directory for each host, and keys that know each other."""
    files = [KeyFiles(folder / f"{index}" / "keys") for index in range(len(hosts))]
    for keys in files:
        keys.directory.parent.mkdir()
        keys.make()
    server = Allowed(key=files[0].pair().public, roles=("server",), name="job")
    for index, other in enumerate(files[1:], start=1):
        key = other.pair().public
        files[0].allow(Allowed(key=key, roles=("host",), name=f"h{index}"))
        other.allow(server)


def start(
    host: Host, folder: Path, words: Sequence[str], stack: ExitStack
) -> "subprocess.Popen[str]":
    """Start a command at a host; it is ended with the stack."""
    command = str(Path(sys.executable).with_name("distbelief"))
    process = subprocess.Popen(
        [*host.prefix, command, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stack.callback(process.communicate)
    stack.callback(process.send_signal, signal.SIGKILL)
    return process


# -------------------------------------------------------------------- in virtual time


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Hosts:
    """Machines of a simulation, like those of the real run."""

    placement: Mapping[Address, int]
    n: int

    def n_needed(self, staged: PreparedJob) -> int:
        """Return how many machines a job takes."""
        del staged
        return self.n

    def options(self, staged: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        """Return what the simulation is to be told of them."""
        places: dict[Address, Place] = {name: self.placement.get(name, 0) for name in staged.kinds}
        cluster = uniform("lan", _MACHINE, self.n, latency=1e-4)
        options = options_for(cluster, places)
        return replace(options, start=(SUPERVISOR,), faults=tuple(faults))

    def builders(self, staged: PreparedJob) -> dict[Address, Builder]:
        """Return how to build the roles of a job."""
        return staged.builders()


def _foretell(path: Path, placement: Mapping[Address, int]) -> tuple[Traffic, Sequence[Address]]:
    """Return what the roles of this job, so placed, send; and all their names."""
    with Preparation() as staging:
        staged = staging.stage(load_job(path))
        hosts = _Hosts(placement=placement, n=1 + max(placement.values(), default=0))
        ended = run_simulated(staged, hosts, seed=0)
    if ended.outcome.error is not None:
        raise RuntimeError(f"the job in virtual time ended: {ended.outcome.error}")
    return ended.simulation.traffic, list(staged.kinds)


def _between(traffic: Traffic, senders: Sequence[Address], receivers: Sequence[Address]) -> float:
    return sum(
        traffic.between(sender, receiver)
        for sender in _shortest(senders)
        for receiver in _shortest(receivers)
    )


def _shortest(names: Sequence[Address]) -> Sequence[Address]:
    """Leave out names that begin with another: `Traffic` goes by beginnings."""
    return [
        name
        for name in names
        if not any(name != other and name.startswith(other) for other in names)
    ]
