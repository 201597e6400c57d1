"""Loss against samples, bytes and time for all presets of `distbelief presets`; stragglers; kills.

    python experiments/benchmarks/exchanges.py [--only PART ...] [--draw FOLDER] [--small]

Four replicas and a shard in *virtual time*, with real gradients of a small net on a real task:
`text`, the next letter of Python's documentation, and `speech`, the phone states of the demo. Steps
and bytes are priced as those of the paper's speech net (see `simulated.courses`), so nothing here
depends on the machine, and everything follows from the seeds.

Each preset has three rates a factor of three apart, the same for all with one optimizer on a task,
but for `dpplee3-asgd`. All are tried with seed 0 at 100 Mbit/s; the one with the least held-out
loss after `--gradients` batches goes on with two more seeds, and with seed 0 at 1 Gbit/s. Presets
with local steps run twice as long: samples cost them little. `one process` is plain torch with
AdamW, without a link; `AdamW in step` is that at the shards, of the mean gradient of each step, and
with 16 bits it sends bfloat16 both ways: the target of all times.

    uneven       one of 4 replicas takes 5 times as long for each step: loss at equal samples
    straggler    one of 4 replicas takes 5 times as long for each step; no limit by the link
    kill         replica 3 of `decoupled-diloco` dies within a round, at three moments

Finished runs are kept in runs/exchanges, so that a run that was cut off goes on; remove the folder
after a change of the library. With one seed some three minutes of one core for a preset and task.

Not in `make bench`: it says nothing about the machine, and takes long.

    TASK_local_time            seconds until `local` has Downpour's final loss, over Downpour's
    TASK_local_loss            loss of `local` at equal samples, over Downpour's
    TASK_local_loss_alone      the same, over that of one process
    TASK_PRESET_loss           loss at equal samples, over that of `AdamW in step`; PRESET_bytes:
                               bytes per sample, likewise; PRESET_uneven: with a slow replica
    TASK_PRESET_time           seconds to the loss of `AdamW in step, 16 bits`, over its seconds
    straggler_PRESET           samples/s, over what the speeds of the four replicas allow
    kill_steps, kill_wait      most steps done again; most seconds that another one stood still
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Final

import msgspec
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from distbelief.config.presets import PRESETS
from distbelief.protocol.role import Address
from distbelief.simulation.faults import Kill, Slow
from distbelief.simulation.forecast.prepare import Preparation
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.simulated.courses import (
    ALONE,
    BATCH,
    IN_STEP,
    IN_STEP_16,
    N_EVALUATIONS,
    N_REPLICAS,
    TIME_SCALE,
    Course,
    Hosts,
    alone,
    exchange_of,
    expected_seconds,
    job_text,
    optimizer_of,
    run,
)
from experiments.figures.results import code_of, fingerprint, keep, kept, slug


TASKS: Final = ("text", "speech")
PARTS: Final = (*TASKS, "uneven", "straggler", "kill")
RATES: Final[Mapping[str, tuple[float, ...]]] = {
    "text sgd": (0.2, 0.6, 1.8),
    "text dpplee3-asgd": (0.02, 0.06, 0.2),  # four times ten steps are added up: more diverges
    "speech sgd": (0.02, 0.06, 0.2),
    **{f"{task} adagrad": (0.01, 0.03, 0.09) for task in TASKS},
    **{f"{task} adamw": (0.001, 0.003, 0.009) for task in TASKS},
    **{f"{task} muon": (0.003, 0.009, 0.027) for task in TASKS},
}
SLOW_LINK, FAST_LINK, NO_LIMIT = 1e8, 1e9, 1e12  # bits a second
SEEDS: Final = (0, 1, 2)
LONGER: Final = 2  # times the gradients of the others, for presets with local steps
SLOWER: Final = 5.0
UNEVEN: Final = (
    "local-rounds",
    "muloco",
    "sparseloco",
    "dl4j-sharing",
    "strom",
    "poseidon",
    "adam-2014",
    "hogwild",
)
STRAGGLING: Final = ("local-rounds", "decoupled-diloco", "local", "ssp", "horovod", "downpour")
STRAGGLER_SECONDS: Final = 120.0
KILLED: Final = Address("replica-3")
SLOW: Final = Slow(at=0.0, role=KILLED, factor=SLOWER, seconds=1e9)
KILLED_AT: Final = (35.0, 59.0, 83.0)  # a round takes some 21 seconds
SMALL: Final = {
    "gradients": 64,
    "only": ["text", "straggler", "kill"],
    "presets": ["downpour", "local"],
    "seeds": 1,
}
_CODE: Final = "experiments/benchmarks/simulated"
_FOLDER: Final = Path(__file__).parents[2] / "runs" / "exchanges"


@dataclass(kw_only=True)
class Runs:
    """Runs each course once, and tells how many are left."""

    gradients: int
    preparation: Preparation
    n_left: int
    begun: float = field(default_factory=time.monotonic)
    n_done: int = 0

    def course(
        self,
        task: str,
        preset: str,
        *,
        rate: float,
        seed: int,
        bits_per_second: float = SLOW_LINK,
        is_uneven: bool = False,  # a replica is slow
    ) -> Course:
        longer = preset == ALONE or exchange_of(preset).get("every", 1) != 1
        gradients = self.gradients * (LONGER if longer else 1)
        every = 0.0
        if preset != ALONE:
            every = expected_seconds(preset, bits_per_second, gradients) / N_EVALUATIONS
        uneven = " uneven" if is_uneven else ""
        name = slug(f"{task} {preset} {rate} {seed} {bits_per_second:.0e} {gradients}{uneven}")
        path, of = _FOLDER / f"{name}.json", fingerprint(code_of(_CODE), name, every)
        found = kept(path, of, Course)
        if found is None:
            if preset == ALONE:
                found = alone(task, rate=rate, seed=seed, gradients=gradients)
            else:
                stop = {"samples": gradients * BATCH}
                text = job_text(task, preset, rate=rate, seed=seed, every=every, stop=stop)
                hosts = Hosts(bits_per_second=bits_per_second)
                faults = [SLOW] if is_uneven else []
                found, _ = run(self.preparation, text, hosts, seed=seed, faults=faults)
            finite = tuple(point for point in found.points if math.isfinite(point[2]))
            if finite != found.points:  # which JSON could not keep
                why = found.error or "its loss is not finite"
                found = msgspec.structs.replace(found, points=finite, error=why)
            keep(path, found, of=of)
            self.n_done += 1
        self.n_left -= 1
        seconds = (time.monotonic() - self.begun) / max(1, self.n_done) * self.n_left
        ended = found.error or f"loss {found.loss_at(self.gradients * BATCH):.3f}"
        print(f"{seconds:,.0f} s left  {name}  {ended}", flush=True)
        return found


@dataclass(frozen=True, kw_only=True)
class Found:
    """One preset on one task, at its best rate."""

    rate: float
    slow: Sequence[Course]  # one for each seed, at 100 Mbit/s
    fast: Sequence[Course]  # of the first seed, at 1 Gbit/s

    def loss(self, samples: int) -> float:
        return fmean(course.loss_at(samples) for course in self.slow)


def found_of(runs: Runs, task: str, preset: str, seeds: Sequence[int]) -> Found:
    rates = RATES.get(f"{task} {preset}") or RATES[f"{task} {optimizer_of(preset).lower()}"]
    tried = {rate: runs.course(task, preset, rate=rate, seed=seeds[0]) for rate in rates}
    samples = runs.gradients * BATCH
    rate = min(tried, key=lambda each: tried[each].loss_at(samples))
    slow = [tried[rate], *(runs.course(task, preset, rate=rate, seed=n) for n in seeds[1:])]
    fast = slow
    if preset != ALONE:
        fast = [runs.course(task, preset, rate=rate, seed=seeds[0], bits_per_second=FAST_LINK)]
    return Found(rate=rate, slow=slow, fast=fast)


def time_to(courses: Sequence[Course], targets: Sequence[float]) -> list[float]:
    """Return the seconds to the targets, one for each seed, of those that reach theirs."""
    reached = [one.seconds_to(loss) for one, loss in zip(courses, targets, strict=False)]
    return [seconds for seconds in reached if seconds is not None]


def row(one: Found, target: Found, samples: int) -> dict[str, str]:
    losses = [course.loss_at(samples) for course in one.slow]
    cells = {
        "rate": f"{one.rate:g}",
        "loss": f"{fmean(losses):.3f} ± {(max(losses) - min(losses)) / 2:.3f}",
        "at its end": f"{fmean(course.points[-1][2] for course in one.slow):.3f}",
        "MB per sample": f"{one.slow[0].bytes_per_sample / 1e6:.2f}",
    }
    links = (("100 Mbit/s", one.slow, target.slow), ("1 Gbit/s", one.fast, target.fast))
    for name, courses, others in links:
        reached = time_to(courses, [other.loss_at(samples) for other in others])
        all_of = len(reached) == min(len(courses), len(others)) > 0
        cells[f"s to target, {name}"] = f"{median(reached):,.0f}" if all_of else "not reached"
    return cells


def figures_of(task: str, found: Mapping[str, Found], samples: int) -> dict[str, float]:
    local, downpour, one = (found.get(name) for name in ("local", "downpour", ALONE))
    figures: dict[str, float] = {}
    if local is None or downpour is None:
        return figures
    targets = [course.loss_at(samples) for course in downpour.slow]
    reached = time_to(local.slow, targets)
    if len(reached) == len(targets):
        shares = zip(reached, downpour.slow, strict=True)
        figures[f"{task}_local_time"] = median(own / other.seconds for own, other in shares)
    figures[f"{task}_local_loss"] = local.loss(samples) / downpour.loss(samples)
    if one is not None:
        figures[f"{task}_local_loss_alone"] = local.loss(samples) / one.loss(samples)
    return figures


def figures_of_presets(
    task: str, found: Mapping[str, Found], runs: Runs, *, uneven: bool
) -> dict[str, float]:
    """Return loss, bytes and time of each preset beside those of a mean gradient per step."""
    figures: dict[str, float] = {}
    samples, in_step, in_16 = runs.gradients * BATCH, found[IN_STEP], found[IN_STEP_16]
    least, n_least = in_step.loss(samples), in_step.slow[0].bytes_per_sample
    for preset, one in found.items():
        if preset in (IN_STEP, IN_STEP_16, ALONE):
            continue
        name = f"{task}_{preset.replace('-', '_')}"
        figures[f"{name}_loss"] = one.loss(samples) / least
        figures[f"{name}_bytes"] = one.slow[0].bytes_per_sample / n_least
        for link, courses, others in (("", one.slow, in_16.slow), ("_fast", one.fast, in_16.fast)):
            target = fmean(course.loss_at(samples) for course in others)
            reached = time_to(courses, [target] * len(courses))
            if len(reached) == len(courses):
                usual = median(course.seconds for course in others)
                figures[f"{name}_time{link}"] = median(reached) / usual
        if uneven and preset in UNEVEN:
            courses = [
                runs.course(task, preset, rate=one.rate, seed=seed, is_uneven=True)
                for seed in SEEDS[: len(one.slow)]
            ]
            figures[f"{name}_uneven"] = fmean(one.loss_at(samples) for one in courses) / least
            n_bytes = courses[0].bytes_per_sample / n_least
            figures[f"{name}_uneven_bytes"] = n_bytes
    return figures


# --------------------------------------------------------------------- stragglers, kills


def share_with_straggler(preparation: Preparation, preset: str, seconds: float) -> float:
    """Return samples/s with a slow replica, over what the speeds of all replicas allow."""
    rates = []
    rate = RATES[f"text {optimizer_of(preset).lower()}"][0]
    stop = {"seconds": seconds / TIME_SCALE}
    text = job_text("text", preset, rate=rate, seed=0, every=10 * seconds, stop=stop)
    for faults in ([], [SLOW]):
        course, _ = run(preparation, text, Hosts(bits_per_second=NO_LIMIT), seed=0, faults=faults)
        rates.append(course.samples / course.seconds)
    return rates[1] / (rates[0] * (N_REPLICAS - 1 + 1 / SLOWER) / N_REPLICAS)


def killed(preparation: Preparation, seconds: float, moments: Sequence[float]) -> dict[str, float]:
    """Kill a replica within a round; return steps done again, and seconds others stood still."""
    stop = {"seconds": seconds / TIME_SCALE}
    text = job_text("text", "decoupled-diloco", rate=0.001, seed=0, every=10 * seconds, stop=stop)

    def run_with(faults: Sequence[Kill]) -> tuple[int, float, float]:
        hosts = Hosts(bits_per_second=NO_LIMIT)
        _, ended = run(preparation, text, hosts, seed=0, faults=faults)
        position = ended.simulation.role(KILLED).status()[1]["samples"]
        again = len(hosts.steps[KILLED]) - round(position / BATCH)
        others = [steps for name, steps in hosts.steps.items() if name != KILLED]
        still = max(after[0] - before[1] for steps in others for before, after in pairwise(steps))
        return again, still * TIME_SCALE, min(steps[0][0] for steps in hosts.steps.values())

    _, usual, begun = run_with([])
    found = [run_with([Kill(at=begun + moment / TIME_SCALE, role=KILLED)]) for moment in moments]
    print(f"kill: steps again, seconds still (undisturbed {usual:.2f}): {found}")
    return {
        "kill_steps": float(max(again for again, _, _ in found)),
        "kill_wait": max(still for _, still, _ in found),
        "kill_wait_undisturbed": usual,
    }


# ------------------------------------------------------------------------------ pictures


def draw(task: str, found: Mapping[str, Found], path: Path) -> None:
    figure = Figure(figsize=(13.0, 3.6), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 4, sharey=True)
    axes_of: dict[str, Callable[[Found], Iterator[tuple[float, float]]]] = {
        "samples (thousands)": lambda one: ((n / 1e3, loss) for _, n, loss in one.slow[0].points),
        "GB sent and received": lambda one: (
            (n * one.slow[0].bytes_per_sample / 1e9, loss) for _, n, loss in one.slow[0].points
        ),
        "hours at 100 Mbit/s": lambda one: ((s / 3600, loss) for s, _, loss in one.slow[0].points),
        "hours at 1 Gbit/s": lambda one: ((s / 3600, loss) for s, _, loss in one.fast[0].points),
    }
    for axes, (label, points_of) in zip(panels, axes_of.items(), strict=True):
        for index, (name, one) in enumerate(found.items()):
            points = [point for point in points_of(one) if point[0] > 0]
            style = (
                {"color": "black", "linestyle": ":"} if name == ALONE else {"color": f"C{index}"}
            )
            axes.plot(*zip(*points, strict=True) if points else ([], []), label=name, **style)
        axes.set(xlabel=label, xscale="linear" if "samples" in label else "log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    losses = [loss for one in found.values() for _, _, loss in one.slow[0].points]
    panels[0].set(ylabel=f"{task}: held-out loss", ylim=(min(losses) - 0.05, min(losses) + 1.5))
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path, format="png")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS, metavar="PART")
    parser.add_argument("--presets", nargs="+", default=[*PRESETS], choices=PRESETS)
    parser.add_argument("--gradients", type=int, default=1200, help="of all replicas together")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--draw", type=Path, help="folder for exchanges_TASK.png")
    options = measurement.options_of(parser, arguments, small=SMALL)
    samples = options.gradients * BATCH
    names = [*options.presets, IN_STEP, IN_STEP_16, ALONE]
    tasks = [task for task in TASKS if task in options.only]
    n_runs = len(tasks) * (len(names) * (3 + options.seeds) - 1)
    figures: dict[str, float] = {}
    with Preparation() as preparation:
        runs = Runs(gradients=options.gradients, preparation=preparation, n_left=n_runs)
        for task in tasks:
            seeds = SEEDS[: options.seeds]
            found = {name: found_of(runs, task, name, seeds) for name in names}
            target = found[IN_STEP_16]
            rows = {name: row(one, target, samples) for name, one in found.items()}
            title = f"{task}: after {samples:,} samples, and seconds to {IN_STEP_16}'s loss there"
            measurement.show(title, rows)
            figures |= figures_of(task, found, samples)
            uneven = "uneven" in options.only
            figures |= figures_of_presets(task, found, runs, uneven=uneven)
            if options.draw is not None:
                draw(task, found, options.draw / f"exchanges_{task}.png")
        seconds = 30.0 if options.small else STRAGGLER_SECONDS
        if "straggler" in options.only:
            for preset in STRAGGLING[-1:] if options.small else STRAGGLING:
                share = share_with_straggler(preparation, preset, seconds)
                figures[f"straggler_{preset.replace('-', '_')}"] = share
                print(f"straggler: {preset} {share:.3f}", flush=True)
        if "kill" in options.only:
            moments = KILLED_AT[:1] if options.small else KILLED_AT
            figures |= killed(preparation, max(seconds, moments[-1] + 30), moments)
    measurement.conclude("exchanges", figures)


if __name__ == "__main__":
    main()
