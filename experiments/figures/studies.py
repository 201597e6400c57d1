"""Studies that a reader of Dean et al. 2012 would ask for, on digits and on speech.

    python -m experiments.figures frequency [--run]     # n_fetch x n_push x replicas
    python -m experiments.figures warm-start [--run]    # on and off
    python -m experiments.figures rates [--run]         # Adagrad against fixed rates
    python -m experiments.figures sizes [--run]         # size of the net
    python -m experiments.figures presets [--run]       # at equal time, on three links

The roles and gradients are real, time is virtual: a step and a message cost what they would with
the paper's speech net in batches of 256, and work is counted, not measured. So nothing depends on
the machine that ran a study. Points are medians of five seeds, bands reach from the lowest to the
highest.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Final, Literal

import msgspec

from distbelief.config.load import parse_job
from distbelief.plans.cluster import Machine
from distbelief.protocol.role import Address
from distbelief.simulation.cluster_options import several
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault
from distbelief.simulation.forecast.prepare import Preparation, PreparedJob
from distbelief.simulation.forecast.run import run_simulated
from distbelief.simulation.machines import ClusterOptions
from experiments.benchmarks.simulated.courses import options_of
from experiments.figures.results import RESULTS, fingerprint, keep, kept


Task = Literal["digits", "speech"]
TASKS: Final[tuple[Task, ...]] = ("digits", "speech")

PAPERS_PARAMETERS: Final = 41_777_152
STEP_SECONDS: Final = 0.2  # of the normal nets, in batches of 32
BATCH: Final = 32
TIME_SCALE: Final = 20.0
LINKS: Final = {"10 Gbit/s": 10e9, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
MEMORY_RATE: Final = 1e10  # bytes a second

# The normal nets, which are priced as the paper's: 16 channels, and 64 hidden units
NORMAL: Final = {"digits": 16, "speech": 64}
PARAMETERS: Final = {"digits": 6_090, "speech": 41_874}
FLOPS_OF_SAMPLE: Final = {"digits": 505_344, "speech": 251_244}

MODELS: Final = {
    "digits": """[model]
factory = "experiments.digits.digits:net"
seed = {seed}
arguments = {{ channels = {size} }}
[data.train]
factory = "experiments.digits.digits:images"
arguments = {{ part = "train" }}
[data.test]
factory = "experiments.digits.digits:images"
arguments = {{ part = "test" }}
""",
    "speech": """[model]
factory = "experiments.speech.model:acoustic_net"
seed = {seed}
arguments = {{ hidden = [{size}], states = 210, activation = "relu" }}
initial = "module"
[data.train]
factory = "experiments.speech.data:frames"
arguments = {{ part = "train", hours = 1.0, labels = "mono" }}
[data.test]
factory = "experiments.speech.data:frames"
arguments = {{ part = "test", hours = 0.5, labels = "mono" }}
""",
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of a study: a point of a line."""

    task: Task
    panel: str
    line: str
    x: str
    algorithm: str  # keys of its table
    replicas: int
    stop: str = "samples = 16000"
    size: int | None = None  # of the net: channels or hidden units; None: the normal one
    link: str = "1 Gbit/s"
    batch: int = BATCH

    def job(self, seed: int) -> str:
        """Return the job file of a run; its seed decides weights and order of data."""
        model = MODELS[self.task].format(size=self.size or NORMAL[self.task], seed=seed)
        return f"""{model}[algorithm]
seed = {seed}
name = "downpour"
loss = "cross_entropy"
batch_size = {self.batch}
{self.algorithm}
[cluster]
replicas = {self.replicas}
shards = 1
[evaluation]
metric = "accuracy"
subset = 4000
every = "10 h"
[stop]
{self.stop}
[output]
directory = "unused"
report_every = "1 h"
snapshot_every = "10 h"
"""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The machines of a row: one for each replica, and for the shard a quarter as many together.

    Time runs `TIME_SCALE` times as fast, because heartbeats do not scale. Evaluations take none.
    """

    row: Row

    def n_needed(self, prepared: PreparedJob) -> int:
        del prepared
        return self.row.replicas + 1

    def builders(self, prepared: PreparedJob) -> dict[Address, Builder]:
        return prepared.builders()

    def options(self, prepared: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        n, task = self.row.replicas, self.row.task
        size = PAPERS_PARAMETERS / PARAMETERS[task]
        one = Machine(
            flops=FLOPS_OF_SAMPLE[task] * BATCH / STEP_SECONDS * TIME_SCALE,
            memory_rate=MEMORY_RATE * TIME_SCALE,
            bandwidth=LINKS[self.row.link] / 8 * TIME_SCALE,
        )
        machines = (*[one] * n, several(one, max(1, n // 4)))
        return options_of(prepared, machines, size=size, faults=faults)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """How one run of a row ended."""

    accuracy: float | None  # held out; None: the run failed
    seconds: float  # virtual, of training
    samples: int
    staleness: float | None  # mean, in pushes
    error: str = ""


def _rule(name: str, rate: float) -> str:
    return f'rule = {{ name = "{name}", learning_rate = {rate:g} }}'


def _frequency() -> Iterator[Row]:
    for task, replicas, n_fetch, n_push in product(TASKS, (4, 16), (1, 5, 20), (1, 5, 20)):
        local = "" if n_fetch == n_push == 1 else "local_learning_rate = 0.05\n"
        keys = f"n_fetch = {n_fetch}\nn_push = {n_push}\n"
        yield Row(
            task=task, panel=f"{replicas} replicas", line=f"n_push = {n_push}", x=str(n_fetch),
            replicas=replicas, algorithm=keys + local + _rule("sgd", 0.05),
        )  # fmt: skip


def _warm_start() -> Iterator[Row]:
    rules = {"SGD": ("sgd", 0.05), "Adagrad": ("adagrad", 0.02)}
    for task, replicas, (line, rule), steps in product(TASKS, (4, 20), rules.items(), (0, 100)):
        yield Row(
            task=task, panel=f"{replicas} replicas", line=line, x=str(steps), replicas=replicas,
            algorithm=f"warm_start_steps = {steps}\n{_rule(*rule)}",
        )  # fmt: skip


def _rates() -> Iterator[Row]:
    for task, replicas, (line, rule), rate in product(
        TASKS, (20, 50, 200), {"fixed rate": "sgd", "Adagrad": "adagrad"}.items(), (0.01, 0.03, 0.1)
    ):
        yield Row(
            task=task, panel=f"{replicas} replicas", line=line, x=f"{rate:g}", replicas=replicas,
            algorithm=f"warm_start_steps = 40\n{_rule(rule, rate)}", batch=16,
        )  # fmt: skip


def _sizes() -> Iterator[Row]:
    sizes: dict[Task, tuple[int, ...]] = {"digits": (1, 4, 16, 32), "speech": (8, 32, 128, 256)}
    stops = {"equal samples": "samples = 16000", "equal time": f"seconds = {300 / TIME_SCALE}"}
    for task, (panel, stop) in product(TASKS, stops.items()):
        for size in sizes[task]:
            yield Row(
                task=task, panel=panel, line="Adagrad", x=str(size), replicas=4, size=size,
                stop=stop, algorithm=_rule("adagrad", 0.02),
            )  # fmt: skip


PRESETS: Final = ("downpour", "ssp", "local", "local-rounds", "diloco", "horovod", "dl4j-averaging")


def _presets() -> Iterator[Row]:
    for task, preset, link in product(TASKS, PRESETS, LINKS):
        yield Row(
            task=task, panel="", line=preset, x=link, replicas=4, link=link,
            stop=f'seconds = {120 / TIME_SCALE}', algorithm=f'preset = "{preset}"',
        )  # fmt: skip


STUDIES: Final[dict[str, tuple[str, Callable[[], Iterator[Row]]]]] = {
    "frequency": ("n_fetch: steps between fetches", _frequency),
    "warm-start": ("steps of replica 0 alone", _warm_start),
    "rates": ("learning rate", _rates),
    "sizes": ("channels (digits), hidden units (speech)", _sizes),
    "presets": ("link of each machine", _presets),
}
N_SEEDS: Final = 5


def found_of(row: Row, preparation: Preparation | None) -> list[Found] | None:
    """Return the runs of a row, one per seed; without a preparation None if they are not kept."""
    of = fingerprint(row.job(0), row.link, N_SEEDS)
    path = RESULTS / "studies" / f"{of}.json"
    known = kept(path, of, list[Found])
    if known is None and preparation is not None:
        known = [_run(row, preparation, seed) for seed in range(N_SEEDS)]
        keep(path, known, of=of)
    return known


def _run(row: Row, preparation: Preparation, seed: int) -> Found:
    prepared = preparation.stage(parse_job(row.job(seed), path="study.toml"))
    outcome = run_simulated(prepared, Hosts(row), seed=seed).outcome
    metrics = [point.metric for point in outcome.history if point.metric is not None]
    return Found(
        accuracy=metrics[-1] if metrics and not outcome.error else None,
        seconds=round(outcome.training_seconds * TIME_SCALE, 1),
        samples=outcome.samples,
        staleness=outcome.staleness_mean,
        error=outcome.error or "",
    )


def tell(name: str, *, runs: bool) -> None:
    """Print a study, and draw it as `study-NAME.png`; with `runs`, run what is missing first."""
    rows = list(STUDIES[name][1]())
    with Preparation() as preparation:
        found = {row: found_of(row, preparation if runs else None) for row in rows}
    shown = {row: own for row, own in found.items() if own is not None}
    for row, own in shown.items():
        low, middle, high = (f"{accuracy:.1%}" for accuracy in spread(own))
        seconds = median(one.seconds for one in own)
        place = ", ".join(filter(None, (row.task, row.panel, row.line)))
        failed = sum(one.accuracy is None for one in own)
        print(
            f"{place}, {row.x}: {middle} ({low} to {high}) after {seconds:,.0f} s"
            + (f", {failed} failed" if failed else "")
        )
    if len(shown) < len(rows):
        print(f"{len(rows) - len(shown)} of {len(rows)} rows are not run yet: add --run")
    if shown:
        from experiments.figures.drawing import draw_study  # noqa: PLC0415 -- slow

        draw_study(name, STUDIES[name][0], shown)


def spread(found: Sequence[Found]) -> tuple[float, float, float]:
    """Return the least, median and greatest accuracy; that of a failed run is 0."""
    accuracies = [one.accuracy or 0.0 for one in found]
    return min(accuracies), median(accuracies), max(accuracies)
