"""Does `--suggest` find what an exhaustive sweep finds?

    python experiments/benchmarks/suggest.py [--steps 12] [--only CASE ...] [--small]
    python experiments/benchmarks/suggest.py --real slow fast [--seconds 8]

Twelve clusters of ten machines: links of three speeds x equal or unequal machines x machines that
stay or are taken back and cost money. Thirty combinations of replicas, shards and placement are run
in virtual time, with one seed; the suggestion searches all 270. A combination of which a run fails
is worth nothing, in the sweep and in the search. The best `--again` of the sweep and the suggested
one are run with `--seeds` others: `ratio` is the median of the suggested one over the least of the
sweep's medians, below 1 where it is none of the thirty and better. On machines with a price the
suggestion is by price, elsewhere by time. Gradients of a small net are real, so nothing here
depends on the machine. Not in `make bench`: it takes minutes.

    within       how many cases of all are within 5 %
    worst        the largest ratio
    runs         of a suggestion, its last ones included, on average; of a sweep
    processor_*  seconds of the processor, of all sweeps and of all suggestions

`--real`, for root: five namespaces with links of 40 (slow) or 160 (fast) Mbit/s. `--suggest`
goes by what `network.forecasts` measures of this host. What it names and ten combinations are run
there, beside their forecasts.

    over_best_*  samples per second of the fastest of all, over those of the suggestion
    rank_*       Spearman's rank correlation of forecasts and runs
    error_*      mean of |forecast / measured - 1|
"""

import argparse
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Final

from rich.console import Console

from distbelief.config.load import load_job
from distbelief.core.errors import JobError
from distbelief.job.display.progress import WaitProgress
from distbelief.simulation.forecast.chooser import cost_by
from distbelief.simulation.forecast.placed_cluster import HostCosts
from distbelief.simulation.forecast.prepare import Preparation
from distbelief.simulation.forecast.run import Trial
from distbelief.simulation.forecast.simulate import SimulationRequest, run_request, seeds_of
from distbelief.simulation.forecast.sweep import Axis, Variant, combinations
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.network.forecasts import (
    N_MACHINES as N_REAL,
    OVERRIDES,
    reading_at_once,
    site,
)
from experiments.benchmarks.network.hosts import obstacle
from experiments.benchmarks.planner_against_runtime import compared
from experiments.benchmarks.simulated import truth


N_MACHINES: Final = 10
LINKS: Final = {"slow": 0.1, "middle": 0.3, "fast": 3.0}  # Mbit/s
STEP_SECONDS: Final = 0.075  # of computing
STEP_MBIT: Final = 0.04  # both ways
WITHIN: Final = 1.05
SMALL: Final = {"only": ["slow-equal-stay"], "seeds": 1, "again": 2}

JOB: Final = """
[model]
factory = "experiments.benchmarks.simulated.task:net"
initial = "seed"
[data]
train = {{ factory = "experiments.benchmarks.simulated.task:samples" }}
[algorithm]
name = "downpour"
loss = "cross_entropy"
batch_size = 8
rule = {{ name = "sgd", learning_rate = 0.1 }}
[stop]
seconds = {seconds}
[output]
directory = "unused"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    link: str
    unequal: bool
    leaves: bool  # machines are taken back, and cost money

    @property
    def name(self) -> str:
        speeds = "unequal" if self.unequal else "equal"
        return f"{self.link}-{speeds}-{'spot' if self.leaves else 'stay'}"

    @property
    def by(self) -> str:
        return "price" if self.leaves else "time"

    def seconds(self, steps: int) -> float:
        return steps * (STEP_SECONDS + STEP_MBIT / LINKS[self.link])

    def cluster(self, steps: int) -> str:
        """Return the cluster file: a third of unequal machines is four times as slow."""
        text = 'latency = "20 ms"\n'
        for n, speed in ((7, 1.0), (3, 0.25)) if self.unequal else ((10, 1.0),):
            text += f'[[machines]]\ncount = {n}\nflops = "{0.4 * speed} MFLOP/s"\n'
            text += f'memory_rate = "10 MB/s"\nbandwidth = "{LINKS[self.link]} Mbit/s"\n'
            text += "jitter = 0.1\n"
            if self.leaves:
                text += f"price = {1.0 if speed == 1.0 else 0.2}\n"
                seconds = self.seconds(steps)
                text += f'preemptions = {{ mean_time = "{20 * seconds} s", '
                text += f'away = "{seconds / 20} s" }}\n'
        return text


CASES: Final = [
    Case(link=link, unequal=unequal, leaves=leaves)
    for leaves, unequal, link in itertools.product((False, True), (False, True), LINKS)
]
AXES: Final = (
    Axis(key="cluster.replicas", values=("1", "2", "4", "6", "9")),
    Axis(key="cluster.shards", values=("1", "3")),
    Axis(key="cluster.placement", values=("spread", "here", "beside replicas")),
)


@dataclass(kw_only=True)
class Runner:
    """Runs combinations of one case, and counts."""

    hosts: HostCosts
    job: Path
    preparation: Preparation
    progress: WaitProgress

    def variant(self, settings: Mapping[str, str], seeds: Sequence[int]) -> Variant:
        job = load_job(self.job, swept=[f"{key}={value}" for key, value in settings.items()])
        host = self.hosts.hosting(job, tell=print)
        trial = Trial(settings=settings, job=host.formed(self.preparation.stage(job)), host=host)
        variant = trial.variant(machines=N_MACHINES)
        if variant.left_out is not None:
            return variant
        return trial.completed(variant, seeds=seeds, progress=self.progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    ratio: float
    suggested: str
    best: str
    processor_sweep: float
    processor_suggest: float
    n_swept: int
    n_failed: int  # of the sweep
    n_tried: int


def _short(settings: Mapping[str, str]) -> str:
    replicas, shards, *more = settings.values()
    return " ".join((f"{replicas} x {shards}", *more))


def found_of(case: Case, folder: Path, *, steps: int, seeds: int, again: int) -> Found:
    job, cluster = folder / "job.toml", folder / f"{case.name}.toml"
    job.write_text(JOB.format(seconds=case.seconds(steps)))
    cluster.write_text(case.cluster(steps))
    quiet, cost = Console(quiet=True), cost_by(case.by)
    begun = time.process_time()
    request = SimulationRequest(
        job=job,
        cluster=str(cluster),
        machines=N_MACHINES,
        suggests=True,
        seeds=seeds_of(0, None, suggests=True),  # as on the command line
        by=case.by,
        measures=False,
    )
    n_runs = 0
    run = Trial.run

    def counted(self: Trial, **wish: object) -> object:
        nonlocal n_runs
        n_runs += 1
        return run(self, **wish)  # type: ignore[arg-type]  # by name

    Trial.run = counted  # type: ignore[method-assign,assignment]
    try:
        best = run_request(request, console=quiet).best
    except JobError as error:
        print(f"{case.name}: no suggestion: {error}")
        best = None
    finally:
        Trial.run = run  # type: ignore[method-assign]
    suggested_at = time.process_time()
    hosts = HostCosts(str(cluster), machines=N_MACHINES, measures=False)
    with Preparation() as preparation, WaitProgress(quiet, n_runs=1) as progress:
        runner = Runner(hosts=hosts, job=job, preparation=preparation, progress=progress)
        swept = [runner.variant(settings, [100]) for settings in combinations(AXES)]
        swept.sort(key=cost)
        others = range(101, 101 + seeds)
        finalists = [runner.variant(one.settings, others) for one in swept[:again]]
        mine = None if best is None else runner.variant(best.settings, others)
    ended = time.process_time()
    least = min(finalists, key=cost)
    return Found(
        ratio=math.inf if mine is None else cost(mine) / cost(least),
        suggested="none" if mine is None else _short(mine.settings),
        best=_short(least.settings),
        processor_sweep=ended - suggested_at,
        processor_suggest=suggested_at - begun,
        n_swept=len(swept),
        n_failed=sum(cost(one) == math.inf for one in swept),
        n_tried=n_runs,
    )


# --- real runs ---

REAL: Final = {"slow": 4e7, "fast": 1.6e8}  # bits a second of each card
TRIED: Final = [
    dict(zip((axis.key for axis in AXES), one, strict=True))
    for n in ("2", "4")
    for one in (
        (n, "1", "here"),
        (n, "1", "spread"),
        (n, "2", "spread"),
        (n, "4", "spread"),
        (n, n, "beside replicas"),
    )
]


def real(names: Sequence[str], *, seconds: float) -> dict[str, float]:
    """Run what is suggested, and ten combinations, in network namespaces."""
    figures: dict[str, float] = {}
    with site() as here:
        for name in names:
            bits = REAL[name]
            base = (*OVERRIDES, f"stop.seconds={seconds}")
            request = SimulationRequest(
                job=truth.Case(name=name, overrides=base).job,
                cluster=str(here.cluster(bits)),
                machines=N_REAL,
                suggests=True,
                seeds=seeds_of(0, None, suggests=True),
            )
            begun = time.process_time()
            with reading_at_once():
                best = run_request(request, console=Console(quiet=True)).best
            assert best is not None
            print(f"{name}: suggested in {time.process_time() - begun:.0f} s of processor")
            suggested = _short(best.settings)
            foretold: dict[str, float] = {}
            measured: dict[str, float] = {}
            for settings in (best.settings, *TRIED):
                if (key := _short(settings)) in measured:
                    continue
                own = [f"{one}={value}" for one, value in settings.items()]
                case = truth.Case(name=key, overrides=(*base, *own))
                with measurement.usage(lambda: 0.0) as used:
                    found = here.run(case, bits_per_second=bits)
                virtual = here.forecast(case, bits_per_second=bits)
                foretold[key], measured[key] = virtual, found
                print(
                    f"{name} {key:18} {found:7.2f} samples/s, forecast {virtual:7.2f}, "
                    f"{used.others:.2f} processors busy"
                    + ("  suggested" if key == suggested else ""),
                    flush=True,
                )
            figures[f"over_best_{name}"] = max(measured.values()) / measured[suggested]
            both = compared(foretold, measured)
            figures |= {f"{key}_{name}": value for key, value in both.items()}
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--steps", type=int, default=12, help="of a fast replica, in a run")
    parser.add_argument("--seeds", type=int, default=3, help="of the runs that are compared")
    parser.add_argument("--again", type=int, default=3, help="of the sweep that are run with these")
    parser.add_argument("--real", nargs="+", choices=REAL, help="for root: links of real runs")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a real run")
    options = measurement.options_of(parser, arguments, small=SMALL)
    if options.real:
        if (why := obstacle()) is not None:
            raise SystemExit(why)
        measurement.conclude("suggest", real(options.real, seconds=options.seconds))
        return
    cases = [case for case in CASES if case.name in (options.only or [case.name])]
    found: dict[str, Found] = {}
    with TemporaryDirectory() as folder:
        for case in cases:
            one = found[case.name] = found_of(
                case, Path(folder), steps=options.steps, seeds=options.seeds, again=options.again
            )
            print(
                f"{case.name:20} by {case.by:5}  suggested {one.suggested:14} "
                f"best {one.best:14} ratio {one.ratio:.3f}  {one.n_tried} runs; "
                f"{one.n_swept} of the sweep, {one.n_failed} failed; "
                f"{one.processor_suggest:.0f} s and {one.processor_sweep:.0f} s",
                flush=True,
            )
    ratios = [one.ratio for one in found.values()]
    measurement.conclude(
        "suggest",
        {
            "within": sum(ratio <= WITHIN for ratio in ratios),
            "cases": len(ratios),
            "worst": max(ratios),
            "median": median(ratios),
            "runs_suggest": fmean(one.n_tried for one in found.values()),
            "runs_sweep": fmean(one.n_swept for one in found.values()),
            "processor_suggest": sum(one.processor_suggest for one in found.values()),
            "processor_sweep": sum(one.processor_sweep for one in found.values()),
        },
    )


if __name__ == "__main__":
    main()
