"""Is a forecast true? Jobs in virtual time beside the same jobs in processes here.

    step         of a replica; of an iteration, where there is a coordinator
    samples/s    of all replicas, while it went steadily
    staleness    of a push, mean, in pushes
    pushed, fetched    bytes between replicas and shards: equal to the last one
    others       cores that were taken by what is not of this benchmark

Nothing is fitted on the jobs that are compared: constants are measured on single pieces
of work and on messages (`forecast.calibration`), and printed.
A broken job is broken alike on both sides: a replica that stands still for a while, or
has its processor a part of the time only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

from distbelief.chaos.schedule import FaultEvent
from distbelief.config.job import Job
from distbelief.config.load import parse_job
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.quiet import Quiet
from experiments.benchmarks.simulated.agreement import Agreement, both_ways


JOB: Final = """
[model]
factory = "experiments.benchmarks.simulated.task:net"
arguments = { width = 440, hidden = 1024, layers = 4 }
[data.train]
factory = "experiments.benchmarks.simulated.task:samples"
arguments = { width = 440, n_samples = 8192 }
[algorithm]
name = "downpour"
loss = "cross_entropy"
batch_size = 64
max_steps = 150
rule = { name = "adagrad", learning_rate = 0.01 }
[cluster]
replicas = 2
shards = 1
[stop]
epochs = 1000
[output]
directory = "runs/simulation"
"""
SANDBLAST: Final = JOB.replace(
    """name = "downpour"
loss = "cross_entropy"
batch_size = 64
max_steps = 150
rule = { name = "adagrad", learning_rate = 0.01 }""",
    """name = "sandblaster"
loss = "cross_entropy"
max_evaluations = 24
tolerance = 0.0
value_tolerance = 0.0
portion = 256""",
).replace("n_samples = 8192", "n_samples = 4096")


HORIZON: Final = 10.0
"""Seconds of training that blows are laid over."""

STALENESS_MIN: Final = 0.1
"""Pushes; a replica that is alone meets none but at its start."""

PAUSED: Final = FaultEvent(kind="pause", role="replica-1", at=0.2, lasts=0.2)
SLOWED: Final = FaultEvent(kind="slow", role="replica-1", at=0.1, lasts=10.0, factor=3.0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job to be run both ways."""

    name: str
    text: str = JOB
    overrides: tuple[str, ...] = ()
    blows: tuple[FaultEvent, ...] = ()

    @property
    def job(self) -> Job:
        """Return the job."""
        path = Path("simulation.toml")
        return parse_job(self.text, path=path, overrides=self.overrides)


ALONE: Final = ("cluster.replicas=1", "algorithm.max_steps=250")
SPLIT: Final = ("cluster.replicas=1", "cluster.partitions=2")

CASES: Final[Mapping[str, Case]] = {
    "alone": Case(name="Downpour, 1 replica, 1 shard", overrides=ALONE),
    "two": Case(name="Downpour, 2 replicas, 1 shard"),
    "shards": Case(name="Downpour, 2 replicas, 2 shards", overrides=("cluster.shards=2",)),
    "paused": Case(name="Downpour 2 x 1, a replica paused 2 s", blows=(PAUSED,)),
    "slowed": Case(name="Downpour 2 x 1, a replica slowed 3 times", blows=(SLOWED,)),
    "split": Case(name="2 machines of a replica, 1 shard", overrides=SPLIT),
    "sandblaster": Case(name="Sandblaster, 2 replicas, 1 shard", text=SANDBLAST),
}
"""Each is over in two minutes, so they can be measured one by one."""

TINY: Final = ("model.arguments.hidden=32",)


def truth(names: Sequence[str] = tuple(CASES), *, small: bool = False) -> dict[str, float]:
    """Run these jobs, or tiny ones, in virtual time and for real."""
    found: dict[str, Agreement] = {}
    others: dict[str, float] = {}
    cases = [CASES[name] for name in names]
    if small:
        cases = [replace(c, overrides=(*c.overrides, *TINY)) for c in cases]
    for case in cases:
        with Quiet() as quiet:
            both = both_ways(case.job, blows=case.blows, horizon=HORIZON)
        found[case.name], others[case.name] = both, quiet.others
        print(case.name, _row(both), f"others {quiet.others:.2f} cores", flush=True)
    for last in list(found.values())[-1:]:
        for name, value in last.constants:
            print(f"  {name}: {value}")
    rows = {name: {**_row(both), "others": f"{others[name]:.2f}"} for name, both in found.items()}
    measurement.show("simulated / real on this host", rows)
    return {
        "step_time_error": _worst(found, "step_seconds"),
        "samples_per_second_error": _worst(found, "samples_per_second"),
        "staleness_error": _worst(_stale(found), "staleness_mean"),
        "bytes_differ": float(sum(not _equal_bytes(both) for both in found.values())),
        "others": max(others.values(), default=0.0),
    }


def _stale(found: Mapping[str, Agreement]) -> dict[str, Agreement]:
    """Return the jobs of which a share of the staleness says anything."""
    return {
        name: both
        for name, both in found.items()
        if (both.real.staleness_mean or 0.0) >= STALENESS_MIN
    }


def _row(both: Agreement) -> dict[str, str]:
    cells = {}
    for figure in ("step_seconds", "samples_per_second", "staleness_mean"):
        simulated, real = getattr(both.simulated, figure), getattr(both.real, figure)
        if simulated is not None and real is not None:
            cells[figure] = f"{simulated:.4g} / {real:.4g}"
    for figure in ("pushed_bytes", "fetched_bytes", "steps"):
        cells[figure] = f"{getattr(both.simulated, figure)} / " + str(getattr(both.real, figure))
    return cells


def _worst(found: Mapping[str, Agreement], figure: str) -> float:
    errors = [both.error_of(figure) for both in found.values()]  # None: has none
    return max((error for error in errors if error is not None), default=0.0)


def _equal_bytes(both: Agreement) -> bool:
    return all(
        getattr(both.simulated, figure) == getattr(both.real, figure)
        for figure in ("pushed_bytes", "fetched_bytes")
    )
