"""Do the intervals of `distbelief forecast` hold? Real runs, forecast from their beginnings.

    python experiments/benchmarks/forecast_of_loss.py [--draw 1] [--runs 20] [--share 0.35]
        [--only KIND ...] [--small]

Runs of four kinds in turn: digits, speech and text by Downpour SGD, and digits by L-BFGS. Their
settings (rate, rule, replicas, batch, length, seeds) come from `--draw`: nothing in the method was
chosen on the runs of a number that nobody has used. From what was measured in the first `--share`
of its samples the loss of a run at its end is forecast with an interval of 90 %: the held-out loss,
of L-BFGS that of training. Other runs take the place of those of which the forecast cannot tell.
Curves are kept in runs/forecast-of-loss; those that are there are not run again.

Not in `make bench`: it takes minutes.

    covered      runs whose loss at the end lies in the interval
    told         of so many
    runs         with those of which it cannot tell
    width        median of the interval's width over the loss that was forecast
    error        median of |forecast / measured - 1|
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, Literal

import numpy as np

import distbelief
from distbelief.config.load import parse_job
from distbelief.dashboard.outlook import CannotTellError, Point, curve_of, loss_at
from distbelief.job.run.metrics_file import read_metrics
from experiments.benchmarks.measuring import measurement
from experiments.figures.results import fingerprint


FOLDER: Final = Path("runs/forecast-of-loss")
SMALL: Final = {"runs": 1}
N_EVALUATIONS: Final = 32
Kind = Literal["digits", "speech", "text", "l-bfgs"]
KINDS: Final[tuple[Kind, ...]] = ("digits", "speech", "text", "l-bfgs")
SAMPLES: Final = {"digits": 24_000, "speech": 64_000, "text": 64_000}  # of the shortest runs
_MODEL: Final = """[model]
factory = "{net}"
seed = {seed}
[data.train]
{train}
"""
_TEST: Final = """[data.test]
{test}
"""


def _of_part(factory: str) -> dict[str, str]:
    return {
        key: f'factory = "{factory}"\narguments = {{ part = "{key}" }}' for key in ("train", "test")
    }


MODELS: Final[dict[Kind, dict[str, str]]] = {
    "digits": {
        "net": "experiments.digits.digits:net",
        **_of_part("experiments.digits.digits:images"),
    },
    "speech": {
        "net": "experiments.figures.task:net",
        "train": 'factory = "experiments.figures.task:train"',
        "test": 'factory = "experiments.figures.task:held_out"',
    },
    "text": {
        "net": "experiments.benchmarks.simulated.courses:text_net",
        **_of_part("experiments.benchmarks.simulated.courses:text"),
    },
}
MODELS["l-bfgs"] = MODELS["digits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    kind: Kind
    said: str  # what was drawn
    job: str  # the job file, without its run directory


def setting(draw: int, n: int, kinds: Sequence[Kind]) -> Setting:
    """Return the n-th setting of a draw."""
    kind = kinds[n % len(kinds)]
    own = np.random.default_rng([draw, n, KINDS.index(kind)])
    seed, replicas = own.integers(10**6), own.choice((1, 2, 3))
    if kind == "l-bfgs":
        epochs, history, l2 = own.integers(30, 60), own.choice((5, 10, 20)), own.choice((0.0, 1e-4))
        algorithm = (
            f'name = "sandblaster"\nmethod = "l-bfgs"\nhistory = {history}\nl2 = {l2:g}\n'
            f"tolerance = 0.0\nvalue_tolerance = 0.0\nportion = 180"
        )
        said, stop = f"history {history}, l2 {l2:g}", f"epochs = {epochs}"
        rest = ""
    else:
        rate, batch = 0.005 * 10.0 ** own.random(), own.choice((16, 32))
        name = own.choice(("adagrad", "sgd"))
        rate *= 1.0 if name == "adagrad" else 4.0
        samples = int(SAMPLES[kind] * own.uniform(1.0, 2.0))
        algorithm = (
            f'name = "downpour"\nbatch_size = {batch}\nwarm_start_steps = 20\n'
            f'rule = {{ name = "{name}", learning_rate = {rate:.3g} }}'
        )
        said, stop = f"{name} {rate:.3g}, batch {batch}", f"samples = {samples}"
        every = samples // N_EVALUATIONS
        rest = _TEST.format(**MODELS[kind]) + f'[evaluation]\nevery = "{every} samples"\n'
    text = f"""{_MODEL.format(seed=seed, **MODELS[kind])}[algorithm]
seed = {seed}
loss = "cross_entropy"
{algorithm}
[cluster]
replicas = {replicas}
[stop]
{stop}
{rest}[output]
snapshot_every = "10 h"
"""
    return Setting(kind=kind, said=f"{said}, {replicas} replicas", job=text)


def curve(one: Setting) -> list[Point]:
    """Return the curve of a run, which is done if it is not there yet."""
    name = f"{one.kind}-{fingerprint(one.job)}"
    kept = FOLDER / f"{name}.jsonl"
    if not kept.is_file():
        directory = FOLDER / name
        shutil.rmtree(directory, ignore_errors=True)
        job = parse_job(f'{one.job}directory = "{directory}"\n', path="forecast.toml")
        ended = distbelief.train(job, show=False)
        if ended.exit_code:
            sys.exit(ended.exit_code)  # what was cut short is no run
        (directory / "metrics.jsonl").replace(kept)
        shutil.rmtree(directory)
    return curve_of(read_metrics(kept), "loss" if one.kind == "l-bfgs" else "held_out_loss")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draw", type=int, default=1, help="of the settings")
    parser.add_argument("--runs", type=int, default=20, help="that are forecast")
    parser.add_argument("--share", type=float, default=0.35, help="of the samples of a run")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    options = measurement.options_of(parser, arguments, small=SMALL)
    FOLDER.mkdir(parents=True, exist_ok=True)
    covered, widths, errors, n = 0, list[float](), list[float](), 0
    while len(widths) < options.runs and n < 2 * options.runs:
        one = setting(options.draw, n, options.only)
        n += 1
        points = curve(one)
        samples, measured = points[-1]
        begun = [point for point in points if point[0] <= options.share * samples]
        try:
            low, middle, high = loss_at(samples, begun, is_batch=one.kind == "l-bfgs")
        except CannotTellError as error:
            print(f"{one.kind:6} {one.said}: {error}; {len(points)} points", flush=True)
            continue
        covered += low <= measured <= high
        widths.append((high - low) / middle)
        errors.append(abs(middle / measured - 1.0))
        print(
            f"{one.kind:6} {one.said}: {len(begun)} of {len(points)} points, "
            f"{begun[-1][1]:.3f} -> {middle:.3f} ({low:.3f} to {high:.3f}), measured "
            f"{measured:.3f}{'' if low <= measured <= high else '  outside'}",
            flush=True,
        )
    figures = {"covered": float(covered), "told": float(len(widths)), "runs": float(n)}
    if widths:
        figures |= {"width": median(widths), "error": median(errors)}
    measurement.conclude("forecast_of_loss", figures)


if __name__ == "__main__":
    main()
