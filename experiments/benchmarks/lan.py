"""What passes the links of four hosts at a switch, 1 Gbit/s each, beside the forecast.

    python experiments/benchmarks/lan.py [--only CASE] [--small]

Jobs over network namespaces. Not in `make bench`: only root may make these.

    beyond_CASE    the share by which the links had more than that, both ways, all hosts
    beyond_worst   that of the worst link
"""

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from distbelief.config.job import Job
from distbelief.forecast.prepare import Preparation, PreparedJob
from distbelief.forecast.run import run_simulated
from distbelief.program.cluster import Machine, uniform
from distbelief.roles.role import SUPERVISOR, Address
from distbelief.run.directory import RunDirectory
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault
from distbelief.simulation.machines import ClusterOptions
from distbelief.simulation.placement import options_for
from distbelief.simulation.trace import Traffic
from distbelief.supervisor.view import JobView
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.network import jobs
from experiments.benchmarks.network.hosts import Lan, obstacle, switched
from experiments.benchmarks.simulated.truth import SANDBLAST, Case


SECONDS_MAX: Final = 240.0
TICK_SECONDS: Final = 0.02
READY: Final = " is ready: "  # of the message about a host
TASK: Final = "experiments.benchmarks.simulated.task"
_MACHINE: Final = Machine(flops=2e10, memory_rate=1e10, bandwidth=1.25e8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    roles: tuple[str, ...]  # that ran at this host
    received: int  # as its interface counted
    sent: int  # likewise
    foretold_received: float  # of the messages of its roles
    foretold_sent: float  # likewise


def links_of(lan: Lan, case: Case) -> Sequence[Link]:
    """Run a job over all hosts; return what passed each of their links."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="distbelief-")))
        placement, before = _run(folder, lan, case, stack)
        after = [lan.n_bytes(host) for host in lan.hosts]
    traffic, names = _foretell(case.job, placement)
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
    folder: Path, lan: Lan, case: Case, stack: ExitStack
) -> tuple[Mapping[Address, int], Sequence[tuple[int, int]]]:
    """Return the hosts of the replicas, and what the links had had when all hosts were ready."""
    hosts = lan.hosts
    jobs.lay_out(folder, case.text, n_hosts=len(hosts))
    words = [word for override in case.overrides for word in ("--set", override)]
    job, *_ = jobs.start(folder, hosts, *words, imports=TASK, stack=stack)
    run = RunDirectory(folder / "0" / "runs" / "simulation", lock=None)
    readings: list[Reading] = []
    began = math.inf
    while job.poll() is None:
        status = run.read_status()
        if status is not None and not status.ended:  # the last one is written after its view
            began = min(began, status.written - status.view.seconds)
            # The status is up to a second old, in which a small job may send all that it sends.
            if sum(host.state == "ready" for host in status.view.hosts) == len(hosts) - 1:
                break
        now = time.time()  # noqa: TID251 -- the time of day, as in the status
        readings.append(Reading(now, [lan.n_bytes(host) for host in hosts]))
        time.sleep(TICK_SECONDS)
    said, _ = job.communicate(timeout=SECONDS_MAX)
    status = run.read_status()
    if job.returncode or status is None:
        raise RuntimeError(f"the job ended with {job.returncode}: {said}")
    before = reading_before(readings, began + ready_after(status.view)).counts
    placement = {
        Address(log.stem): index
        for index in range(1, len(hosts))
        for log in (folder / f"{index}").glob("runs/joined/*/logs/*-*.log")
    }
    return placement, before


class Reading(NamedTuple):
    """What the links had carried at one time."""

    at: float  # seconds since 1970
    counts: Sequence[tuple[int, int]]  # bytes received and sent by each host


def ready_after(view: JobView) -> float:
    """Return after how many seconds of a job its last host was ready."""
    said = [message.seconds for message in view.messages if READY in message.text]
    if not said:
        raise RuntimeError("no host was ready before the job ended")
    return max(said)


def reading_before(readings: Sequence[Reading], at: float) -> Reading:
    """Return the last reading of the links until then."""
    return max((one for one in readings if one.at <= at), default=readings[0])


# -------------------------------------------------------------------- in virtual time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hosts:
    """Machines of a simulation, like those of the real run."""

    placement: Mapping[Address, int]
    n: int

    def n_needed(self, staged: PreparedJob) -> int:
        del staged
        return self.n

    def options(self, staged: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        places = {name: self.placement.get(name, 0) for name in staged.kinds}
        cluster = uniform("lan", _MACHINE, self.n, latency=1e-4)
        options = options_for(cluster, places)
        return replace(options, start=(SUPERVISOR,), faults=tuple(faults))

    def builders(self, staged: PreparedJob) -> dict[Address, Builder]:
        return staged.builders()


def _foretell(job: Job, placement: Mapping[Address, int]) -> tuple[Traffic, Sequence[Address]]:
    """Return what the roles of this job, so placed, send; and all their names."""
    with Preparation() as staging:
        staged = staging.stage(job)
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
    return [one for one in names if not any(one != n and one.startswith(n) for n in names)]


N_HOSTS: Final = 4
_STEPS: Final = "algorithm.max_steps=25"
_WHOLE: Final = ("cluster.replicas=4",)
_SPLIT: Final = ("cluster.replicas=2", "cluster.partitions=2")
_TINY: Final = ("model.arguments.hidden=128",)

# Jobs over all four
CASES: Final[Mapping[str, Case]] = {
    "downpour": Case(name="downpour", overrides=(*_WHOLE, _STEPS)),
    "split": Case(name="split", overrides=(*_SPLIT, _STEPS)),
    "sandblaster": Case(name="sandblaster", text=SANDBLAST, overrides=_WHOLE),
    "split_sandblaster": Case(name="split_sandblaster", text=SANDBLAST, overrides=_SPLIT),
}

SMALL: Final = {"only": ("downpour",)}  # with a tiny net


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", action="append", choices=list(CASES))
    options = measurement.options_of(parser, arguments, small=SMALL)
    if (why := obstacle()) is not None:
        raise SystemExit(why)
    found: dict[str, Sequence[Link]] = {}
    rows = {}
    for case in options.only or CASES:
        one = CASES[case]
        if options.small:
            one = replace(one, overrides=(*one.overrides, *_TINY))
        with switched(N_HOSTS, bits_per_second=1e9) as lan:
            found[case] = links_of(lan, one)
        for index, link in enumerate(found[case]):
            rows[f"{case} {index}"] = {
                "roles": ", ".join(link.roles) or "shards, replica 0, supervisor",
                "in: foretold": f"{link.foretold_received / 1e6:,.2f} MB",
                "link": f"{link.received / 1e6:,.2f} MB",
                "out: foretold": f"{link.foretold_sent / 1e6:,.2f} MB",
                "link ": f"{link.sent / 1e6:,.2f} MB",
                "beyond": f"{_beyond([link]):+.2%}",
            }
            print(f"{case} {index}", rows[f"{case} {index}"], flush=True)
    measurement.show(f"{N_HOSTS} hosts at a switch, 1 Gbit/s each", rows)
    figures = {f"beyond_{case}": _beyond(links) for case, links in found.items()}
    worst = max(abs(_beyond([link])) for links in found.values() for link in links)
    measurement.conclude("lan", figures | {"beyond_worst": worst})


def _beyond(links: Sequence[Link]) -> float:
    passed = sum(link.received + link.sent for link in links)
    return passed / sum(x.foretold_received + x.foretold_sent for x in links) - 1.0


if __name__ == "__main__":
    main()
