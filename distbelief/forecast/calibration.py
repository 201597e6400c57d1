"""Calibration: measures the costs of a job's work on this host, in several processes at once.

    python -m distbelief.forecast.calibration FOLDER INDEX N_PROCESSES

Each process runs the job in FOLDER/job.json with one replica in virtual time, times every
piece of work, and writes the costs to FOLDER/INDEX.json. The processes start together, so
that all cores are busy: a single busy core would be faster than the cores of a real job.
"""

import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Final, final

import msgspec

from distbelief.config.job import Job, StopTable
from distbelief.config.load import job_from_json
from distbelief.core import units
from distbelief.core.files import scratch
from distbelief.core.memory import keep_memory
from distbelief.errors import DistBeliefError, JobError
from distbelief.forecast.prepare import Preparation, costed
from distbelief.forecast.timing import (
    MessageCosts,
    Piece,
    Rate,
    Rates,
    Stopwatch,
    Unit,
    idle,
    measure_messages,
    now,
    rate_of,
    waiting_of,
    warm,
)
from distbelief.program.cluster import Cluster, Machine, Outages
from distbelief.roles.role import SUPERVISOR, Seconds
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.machines import ClusterOptions


Constant = tuple[str, str, str]  # name, value and origin of a constant of the forecast

_DIMENSIONS: Final[Mapping[str, units.Dimension]] = {
    "flops": "compute",
    "memory_rate": "rate",
    "memory": "bytes",
    "bandwidth": "rate",
    "message_rate": "rate",
    "overhead": "time",
    "handling": "time",
}


def constants_of(cluster: Cluster) -> list[Constant]:
    """Return the constants of a cluster; equal machines are listed once."""
    rows: list[Constant] = []
    for machine, group in groupby(cluster.machines):
        count = len(list(group))
        rows.append(("machines", str(count), _origin(cluster, "count")))
        rows += _machine(cluster, machine)
    rows += [
        ("latency", _microseconds(cluster.latency), _origin(cluster, "latency")),
        (
            "message overhead",
            _microseconds(cluster.message_overhead),
            _origin(cluster, "message_overhead"),
        ),
    ]
    rows += [
        (f"link {ends}", _shown(rate, "rate"), _origin(cluster, "links"))
        for ends, rate in cluster.links.items()
    ]
    rows += [
        (
            f"switch {switch.first}-{switch.last}",
            _shown(switch.bandwidth, "rate"),
            _origin(cluster, "switches"),
        )
        for switch in cluster.switches
    ]
    rows += [
        (name, _process(process), _origin(cluster, name))
        for name, process in (("failures", cluster.failures), ("preemptions", cluster.preemptions))
        if process is not None
    ]
    if (trace := cluster.trace) is not None:
        watched = f"{len(trace.outages):,} outages within {trace.covers:g} s"
        rows.append(("trace", watched, _origin(cluster, "trace")))
    return rows


def _machine(cluster: Cluster, machine: Machine) -> list[Constant]:
    rows: list[Constant] = [("cores", str(machine.cores), _origin(cluster, "cores"))]
    for name, dimension in _DIMENSIONS.items():
        value = getattr(machine, name)
        if math.isfinite(value) and value:
            text = _shown(value, dimension)
            rows.append((name.replace("_", " "), text, _origin(cluster, name)))
    rows.append(("jitter", f"{machine.jitter:.3g}", _origin(cluster, "jitter")))
    return rows


def _process(process: Outages) -> str:
    often = f"of each machine every {process.mean_time / 3600:.3g} h"
    return f"{often}, away {process.away:.3g} s, {process.group} together"


def _origin(cluster: Cluster, name: str) -> str:
    return cluster.origins.get(name, cluster.origin)


def _shown(value: float, dimension: units.Dimension) -> str:
    if dimension == "time":
        return _microseconds(value)
    digits = float(f"{value:.3g}")
    match dimension:
        case "rate":
            return f"{digits / 1e9:.3g} GB/s"
        case "compute":
            return f"{digits / 1e9:.3g} GFLOP/s"
        case _:
            return f"{value / 2**30:.3g} GiB"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"


SECONDS: Final = 8.0  # of one measurement, with the warm-up

N_EVENTS_MAX: Final = 10**9
READY_SECONDS_MAX: Final = 120.0
POLL_SECONDS: Final = 0.02
_WITHIN: Final = 1e6


@final
class _Found(msgspec.Struct, frozen=True, kw_only=True):
    work: dict[str, tuple[Unit, list[Piece]]]
    waits: dict[str, list[Piece]]
    handling: dict[str, tuple[Seconds, int]]
    exchange: MessageCosts
    share: float


def measure(job: Job, *, n_processes: int) -> Rates:
    """Measure the costs of a job in `n_processes` processes at once.

    Raises:
        JobError: the job cannot be run.
    """
    with scratch() as path:
        (path / "job.json").write_bytes(_alone(job).to_json())
        command = [sys.executable, "-m", "distbelief.forecast.calibration", str(path)]
        # The processes are killed at the end; their temporary files are in this folder.
        environment = {**os.environ, "TMPDIR": str(path)}
        workers = [
            subprocess.Popen(  # noqa: S603 -- our own program
                [*command, str(index), str(n_processes)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            for index in range(n_processes)
        ]
        try:
            outputs = [worker.communicate()[0].decode(errors="replace") for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        found = [_read(path / f"{i}.json", text) for i, text in enumerate(outputs)]
    return _together(found)


def _alone(job: Job) -> Job:
    # One replica, and no end: the measurement stops it.
    cluster = msgspec.structs.replace(job.cluster, replicas=1, shard_copies=1)
    return msgspec.structs.replace(
        job,
        cluster=cluster,
        stop=StopTable(seconds=1e9),
        evaluation=msgspec.structs.replace(job.evaluation, every=1.0),
    )


def _read(path: Path, output: str) -> _Found:
    if not path.is_file():
        raise JobError(f"the cost of the job's work cannot be measured:\n{output[-2000:]}")
    return msgspec.json.decode(path.read_bytes(), type=_Found)


def _together(found: Sequence[_Found]) -> Rates:
    work: dict[str, Rate] = {}
    for key in sorted({key for each in found for key in each.work}):
        measured = [each.work[key] for each in found if key in each.work]
        pieces = [piece for _, every in measured for piece in warm(every)]
        if pieces:
            rate = rate_of(pieces)
            waited = [p for each in found for p in warm(each.waits.get(key, ()))]
            work[key] = Rate(
                unit=measured[0][0],
                seconds=rate,
                n=len(pieces),
                waiting=waiting_of(waited, besides=rate) if waited else 0.0,
            )
    handling = {
        kind: median(
            each.handling[kind][0] / each.handling[kind][1]
            for each in found
            if kind in each.handling
        )
        for kind in sorted({kind for each in found for kind in each.handling})
    }
    return Rates(
        work=work,
        handling=handling,
        exchange=_usual([each.exchange for each in found]),
        n_side_by_side=len(found),
        share=min(each.share for each in found),
        date=now(),
    )


def _usual(found: Sequence[MessageCosts]) -> MessageCosts:
    figures = [msgspec.structs.asdict(each) for each in found]
    return MessageCosts(**{name: median(f[name] for f in figures) for name in figures[0]})


# --- the program ---


def main(folder: str, index: int, n_processes: int) -> int:
    """Measure, write the costs, and return the exit status."""
    path = Path(folder)
    job = job_from_json((path / "job.json").read_bytes())
    keep_memory()
    try:
        with Preparation() as preparation:
            prepared = preparation.stage(job)
            # With several threads only wall-clock time shows what work takes.
            watch = (
                Stopwatch(idle=idle) if job.cluster.threads == 1 else Stopwatch(time.perf_counter)
            )
            builders = costed(
                prepared.builders(), prepared.kinds, adapt=watch.adapt, handled=watch.handled
            )
            options = ClusterOptions(start=(SUPERVISOR,))
            simulation = SimulatedCluster(builders, seed=0, options=options)
            simulation.run_until(lambda: begun_in(simulation), within=_WITHIN)
            _meet(path, index, n_processes)
            begun, ran, slept = time.perf_counter(), time.thread_time(), idle()
            simulation.run_until(
                lambda: time.perf_counter() - begun > SECONDS or SUPERVISOR in simulation.halted,
                within=_WITHIN,
                max_events=N_EVENTS_MAX,
            )
            wanted = time.perf_counter() - begun - (idle() - slept)
            share = (time.thread_time() - ran) / wanted
    except DistBeliefError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    layout = prepared.layout
    found = _Found(
        work=watch.work,
        waits=watch.waits,
        handling=watch.handling,
        exchange=measure_messages(layout.dtype.itemsize * layout.n_parameters),
        share=min(1.0, share),
    )
    (path / f"{index}.json").write_bytes(msgspec.json.encode(found))
    return 0


def begun_in(simulation: SimulatedCluster) -> bool:
    supervisor = simulation.role(SUPERVISOR)
    return supervisor.status()[1]["samples"] > 0


def _meet(path: Path, index: int, n_processes: int) -> None:
    # Wait until all processes are ready, but for a limited time: one may have failed.
    (path / f"{index}.ready").touch()
    deadline = time.perf_counter() + READY_SECONDS_MAX
    while time.perf_counter() < deadline:
        if len(list(path.glob("*.ready"))) >= n_processes:
            return
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
