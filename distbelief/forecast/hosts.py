"""Which machines a job is simulated on: this host, machines like it, or a cluster.

no --cluster          this host, as `train` would use it: all roles share its cores
--cluster here        as many machines like this one as --machines says
--cluster NAME, FILE  machines that somebody has written down
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import msgspec
import torch

from distbelief.errors import JobError
from distbelief.forecast.constants import constants_of
from distbelief.forecast.hosting import Hosting
from distbelief.forecast.likeness import likeness
from distbelief.forecast.measuring import measure
from distbelief.forecast.rates import Rates, keep, kept
from distbelief.graph.layer import GraphError
from distbelief.job.configuration.sections import Job
from distbelief.partition.profiling.host import HERE, figures, here
from distbelief.program.cluster import Cluster, Machine, uniform
from distbelief.program.cluster_file import load_cluster


N_HERE: Final = 64
"""Machines like this one, if nobody says how many."""

LOOPBACK_SECONDS: Final = 60e-6
LOOPBACK_RATE: Final = 4e9
"""Between processes of this host: of a small message, until it is measured; bytes."""


SHARE_MIN: Final = 0.9
"""Of a core: with less, others computed while the job's work was measured."""


@final
class Hosts:
    """Machines, and what a job's work takes on them.

    Args:
        name: Of a cluster, or its path; None: this host.
        machines: How many of them; None: all.
        measures: Whether what work takes is measured on this host.

    Raises:
        JobError: there is no such cluster, or it has fewer machines.
    """

    def __init__(self, name: str | None, *, machines: int | None, measures: bool) -> None:
        self._measures = measures
        self._budget = machines
        self._rates: dict[str, Rates] = {}
        self._together = name is None and machines is None
        try:
            self.cluster = _cluster(name, machines)
        except GraphError as error:
            name = name or HERE  # that of a file is in the error already
            why = str(error).removeprefix(f"{Path(name)}: ")
            raise JobError(f"--cluster {name}: {why}") from error

    @property
    def constants(self) -> tuple[tuple[str, str, str], ...]:
        """Name, value and origin of every figure."""
        rows = constants_of(self.cluster)
        if self._rates:
            n_kinds = sum(len(rates.work) for rates in self._rates.values())
            date = max(rates.date for rates in self._rates.values())
            measured = f"measured on this host, {date}"
            share = min(rates.share for rates in self._rates.values())
            if share < SHARE_MIN:
                measured += f", when others left {100 * share:.0f} % of each core"
            rows.append(("work of the roles", f"{n_kinds} kinds of it", measured))
            if self._together:
                rows += _exchange_rows([*self._rates.values()][-1], measured)
        elif not self._measures:
            rows.append(("work of the roles", "by arithmetic", "counted, not measured"))
        return tuple(rows)

    def hosting(self, job: Job, *, tell: Callable[[str], None]) -> Hosting:
        """Return the machines for a job; its work is measured if nobody has yet.

        Args:
            job: The job.
            tell: Told what is being done, if it takes long.

        Raises:
            JobError: the job cannot be run.
        """
        rates = self._rates_of(job, tell) if self._measures else None
        if rates is not None and self._together:
            latency = rates.exchange.latency
            self.cluster = msgspec.structs.replace(self.cluster, latency=latency)
        return Hosting(
            cluster=self.cluster,
            reference=_one_core(),
            rates=rates,
            together=self._together,
            budget=self._budget,
        )

    def _rates_of(self, job: Job, tell: Callable[[str], None]) -> Rates:
        key = likeness(job)
        if key not in self._rates:
            known = kept(job)
            if known is None:
                tell("Measuring what the job's work takes on this host")
                known = measure(job, n_processes=os.cpu_count() or 1)
                keep(job, known)
            self._rates[key] = known
        return self._rates[key]


def _cluster(name: str | None, machines: int | None) -> Cluster:
    if name is None and machines is None:
        return this_host()
    if name is None or name == HERE:
        return here(N_HERE if machines is None else machines)
    cluster = load_cluster(name)
    return cluster if machines is None else cluster.first(machines)


def _exchange_rows(rates: Rates, origin: str) -> list[tuple[str, str, str]]:
    words = {
        "message": "core time of a message, both ends",
        "work": "core time of handing on a piece of work",
        "timer": "core time of a timer",
        "latency": "latency of a message besides",
        "wake": "until a sleeper has one of the taken cores",
        "begins": "until a lane begins what it is handed",
        "answers": "until a process handles what its lane has done",
    }
    rows = [
        (word, f"{1e6 * getattr(rates.exchange, name):.3g} us", origin)
        for name, word in words.items()
    ]
    handling = max(
        (seconds for key, seconds in rates.handling.items() if " " not in key), default=0.0
    )
    return [*rows, ("handling of an event, at most", f"{1e6 * handling:.3g} us", origin)]


def this_host() -> Cluster:
    """Return this host as a cluster of one machine, with all its cores."""
    n_cores = len(os.sched_getaffinity(0))
    one = _one_core()
    machine = Machine(
        flops=one.flops * n_cores,
        memory_rate=one.memory_rate,
        memory=one.memory,
        overhead=one.overhead,
        jitter=one.jitter,
        bandwidth=LOOPBACK_RATE,
        cores=n_cores,
    )
    return msgspec.structs.replace(
        uniform("this-host", machine, 1, latency=LOOPBACK_SECONDS), origin="measured"
    )


def _one_core() -> Machine:
    """Return one core of this host."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = figures()
    finally:
        torch.set_num_threads(n_threads)
    return Machine(
        flops=found.flops,
        memory_rate=found.memory_rate,
        memory=found.memory,
        overhead=found.overhead,
        jitter=found.jitter,
        bandwidth=LOOPBACK_RATE,
    )
