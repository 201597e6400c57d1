"""Predicted against measured: does a step take as long as the planner says?

    python experiments/benchmarks/planner_against_runtime.py [--rounds 3] [--seconds 4]

Two machines of one thread each on this host, joined by ZeroMQ; the speech net and the
image net, split in the ways of `ways`, bad ones too. Layers are measured here and now,
and so is what a message takes; then each plan is played through, and run, in turns.

    error_NET    mean of |predicted / measured - 1|
    rank_NET     Spearman's rank correlation of predicted and measured
    regret_NET   measured: the plan that the planner prefers / the fastest of all, - 1
    plans_NET    how many
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from scipy.stats import spearmanr

from distbelief.allocator import keep_memory
from distbelief.partition.planning import Order, played
from experiments.benchmarks import measurement
from experiments.benchmarks.crews import Crew
from experiments.benchmarks.machines import network, order_here, replica
from experiments.benchmarks.measurement import Spread
from experiments.benchmarks.ways import N_MACHINES, Way, ways
from experiments.benchmarks.workload import Workload


BATCH_SIZES = {"speech": 256, "image": 64}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    keep_memory()  # as machines do, and
    torch.set_num_threads(1)  # so: what is measured of layers depends on both
    figures: dict[str, float] = {}
    with TemporaryDirectory(prefix="distbelief-against-") as folder:
        # What somebody measured on a busier day is not asked.
        os.environ["XDG_CACHE_HOME"] = folder
        between = network(Path(folder), seconds=options.seconds / 4)
        print(
            f"between machines {between.bandwidth / 1e9:.2f} GB/s, "
            f"{1e6 * (between.latency + between.message_overhead):.0f} us",
            flush=True,
        )
        for name in options.nets:
            workload = Workload(
                net=name,
                batch_size=8 if options.small else BATCH_SIZES[name],
                small=options.small,
            )
            order = order_here(workload, between, stages=True)
            figures |= _compare(name, order, workload, Path(folder), options)
    measurement.conclude("planner_against_runtime", figures)


def compared(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, float]:
    """Return how well predictions do: error, rank, regret, plans."""
    names = list(predicted)
    errors = [abs(predicted[name] / measured[name] - 1.0) for name in names]
    rank = spearmanr(
        [predicted[name] for name in names], [measured[name] for name in names]
    )
    preferred = min(names, key=lambda name: predicted[name])
    return {
        "error": sum(errors) / len(errors),
        "rank": float(cast("float", rank.statistic)),
        "regret": measured[preferred] / min(measured.values()) - 1.0,
        "plans": len(names),
    }


def predictions(order: Order, found: Mapping[str, Way]) -> dict[str, float]:
    """Return the seconds of a step of each way, as the planner plays it through."""
    return {
        name: played(
            order,
            way.placements,
            n_machines=N_MACHINES,
            micro_batches=way.micro_batches,
        ).step_seconds
        for name, way in found.items()
    }


def _compare(
    net: str,
    order: Order,
    workload: Workload,
    folder: Path,
    options: argparse.Namespace,
) -> dict[str, float]:
    place = folder / net
    place.mkdir()
    found = ways(order)
    predicted = predictions(order, found)
    runs: dict[str, list[Crew]] = {name: [] for name in found}
    for index, name in enumerate(
        measurement.turns(list(found), n_rounds=options.rounds)
    ):
        crew = replica(
            f"{index} {name}", found[name], order, workload=workload, folder=place
        )
        with crew:  # not all at once: that would take too much memory
            crew.turn(seconds=options.seconds)
        runs[name].append(crew)
    taken = {
        name: Spread.of([1e3 * crew.step.median for crew in crews])
        for name, crews in runs.items()
    }
    rows = {
        name: {
            "predicted, ms": f"{1e3 * predicted[name]:.1f}",
            "step, ms": taken[name].show(),
            "predicted / measured": f"{1e3 * predicted[name] / taken[name].median:.3f}",
            "CPU ms": f"{1e3 * min(crew.cpu_seconds[0] for crew in runs[name]):.0f}",
            "memory": f"{max(crew.n_bytes for crew in runs[name]) / 2**20:,.0f} MiB",
        }
        for name in sorted(found, key=lambda name: taken[name].median)
    }
    measurement.show(f"{net}, load {measurement.load():.1f}", rows)
    measured = {name: spread.median / 1e3 for name, spread in taken.items()}
    figures = compared(predicted, measured)
    return {f"{key}_{net}": value for key, value in figures.items()}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument(
        "--nets", nargs="+", default=list(BATCH_SIZES), choices=list(BATCH_SIZES)
    )
    parser.add_argument("--small", action="store_true", help="tiny nets, for a look")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
