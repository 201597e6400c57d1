"""Do the intervals of `distbelief forecast` hold? Real runs, forecast from their beginnings.

    python experiments/benchmarks/forecast_of_loss.py [--runs 20] [--share 0.35] [--small]

Digits with two replicas and a shard: five rates, each with the seeds that make up the number of
runs. From the points in the first `--share` of each run's samples the held-out loss at its end is
forecast with an interval of 90 %. Curves are kept in runs/forecast-of-loss; those that are there
are not run again. Not in `make bench`: it takes some ten minutes of processor.

    covered      runs whose loss at the end lies in the interval, of those that were forecast
    told         how many were; of the others the forecast says that it cannot tell
    width        median of the interval's width over the loss that was forecast
    error        median of |forecast / measured - 1|
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

import distbelief
from distbelief.dashboard.outlook import CannotTellError, curve_of, loss_at
from distbelief.job.run.metrics_file import read_metrics
from experiments.benchmarks.measuring import measurement


RATES: Final = (0.005, 0.01, 0.02, 0.04, 0.08)
FOLDER: Final = Path("runs/forecast-of-loss")
DIGITS: Final = Path(__file__).parents[1] / "digits" / "digits.toml"
SMALL: Final = {"runs": 1}


def run(rate: float, seed: int) -> Path:
    """Return the metrics of a run, which is done if they are not there yet."""
    kept = FOLDER / f"{rate:g}-{seed}.jsonl"
    if not kept.is_file():
        directory = FOLDER / f"run-{rate:g}-{seed}"
        shutil.rmtree(directory, ignore_errors=True)
        ended = distbelief.train(
            DIGITS,
            {
                "algorithm.rule": {"name": "adagrad", "learning_rate": rate},
                "algorithm.seed": seed,
                "cluster.shards": 1,
                "evaluation.every": "1000 samples",
                "stop.epochs": 20,
                "output.directory": str(directory),
            },
            show=False,
        )
        if ended.exit_code:
            sys.exit(ended.exit_code)  # what was cut short is no run
        (directory / "metrics.jsonl").replace(kept)
        shutil.rmtree(directory)
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.35, help="of the samples of a run")
    options = measurement.options_of(parser, arguments, small=SMALL)
    FOLDER.mkdir(parents=True, exist_ok=True)
    covered, widths, errors = 0, [], []
    for n in range(options.runs):
        rate, seed = RATES[n % len(RATES)], n // len(RATES)
        points = curve_of(read_metrics(run(rate, seed)))
        samples, measured = points[-1]
        begun = [point for point in points if point[0] <= options.share * samples]
        try:
            low, middle, high = loss_at(samples, begun)
        except CannotTellError as error:
            print(f"rate {rate:g} seed {seed}: {error}", flush=True)
            continue
        covered += low <= measured <= high
        widths.append((high - low) / middle)
        errors.append(abs(middle / measured - 1.0))
        print(
            f"rate {rate:<5g} seed {seed}: {len(begun)} of {len(points)} points, "
            f"{begun[-1][1]:.3f} -> {middle:.3f} ({low:.3f} to {high:.3f}), measured "
            f"{measured:.3f}{'' if low <= measured <= high else '  outside'}",
            flush=True,
        )
    figures = {"covered": float(covered), "told": float(len(widths)), "runs": float(options.runs)}
    if widths:
        figures |= {"width": median(widths), "error": median(errors)}
    measurement.conclude("forecast_of_loss", figures)


if __name__ == "__main__":
    main()
