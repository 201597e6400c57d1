"""Held-out loss of Dpplee3's modes and frequencies: this library beside the equations.

    python -m experiments.dpplee3 [--run] [--only synchronous ...]

Without `--run` it prints what `results/` holds; with it, it first runs what is missing there: about
10 minutes of one core. Two workers train on digits for 2, 4, 8 and 16 epochs each, five seeds.
Asynchronous and synchronous jobs run their real roles in virtual time, where worker 1 has 0.9 of
the speed of worker 0, as in the reference. `hogwild` runs in processes with two threads, since only
real threads meet; it has no frequency, as each update is in the shared memory at once.

    z   difference of the two means of the loss, over the standard error of that difference. The two
        sides draw weights and batches of their own, so |z| is below 2 in 19 of 20 cells.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Final

import msgspec
import torch

import distbelief
from distbelief.config import toml
from distbelief.config.load import parse_job
from distbelief.plans.cluster import Cluster, Machine
from distbelief.protocol.role import SUPERVISOR, Address
from distbelief.simulation.cluster_options import options_for
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault
from distbelief.simulation.forecast.prepare import Preparation, PreparedJob
from distbelief.simulation.forecast.run import run_simulated
from distbelief.simulation.machines import ClusterOptions
from experiments.digits import digits
from experiments.dpplee3 import reference
from experiments.dpplee3.reference import BATCH, N_WORKERS, SPEEDS, Score
from experiments.figures.results import code_of, fingerprint, keep, kept, slug


LENGTHS: Final = (2, 4, 8, 16)  # epochs of each worker
SEEDS: Final = range(5)
PRESETS: Final = {"asynchronous": "dpplee3-asgd", "synchronous": "dl4j-averaging"}
EVERY: Final[Mapping[str, int | str]] = {
    "batch 1": 1,
    "batch 10": 10,
    "epoch 1": "1 epoch",
    "epoch 2": "2 epochs",
}
CELLS: Final = [*((mode, each) for mode in PRESETS for each in EVERY), ("hogwild", "batch 1")]
RESULTS: Final = Path(__file__).parent / "results"
_STEP_FLOPS: Final = 1e9  # a step takes a tenth of a second, or so


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one mode and frequency, by epochs and seed."""

    ours: dict[int, list[Score]]
    theirs: dict[int, list[Score]]


def tables(mode: str, frequency: str, *, n_epochs: int, seed: int) -> dict[str, object]:
    """Return the job that does what Dpplee3 does in this mode."""
    data = {"factory": "experiments.digits.digits:images"}
    n_steps = reference.steps_of_epoch(0) * n_epochs
    # Dpplee3 applies all differences at this rate in turn: their mean, at so many times the rate.
    rate = reference.SERVER_RATE * (N_WORKERS if mode == "synchronous" else 1)
    return {
        "model": {"factory": "experiments.digits.digits:net", "seed": seed},
        "data": {part: data | {"arguments": {"part": part}} for part in ("train", "test")},
        "algorithm": {
            "name": "downpour",
            "preset": PRESETS[mode],
            "loss": "cross_entropy",
            "batch_size": BATCH,
            "seed": seed,
            "order": "parts",
            "blocking": True,
            "max_steps": n_steps,
            "rule": {"name": "sgd", "learning_rate": rate},
            "inner": {"name": "SGD", "lr": reference.RATE, "momentum": reference.MOMENTUM},
            "exchange": {"every": EVERY[frequency]},
        },
        "cluster": {"replicas": N_WORKERS},
        "evaluation": {"every": "1 h"},
        "stop": {"epochs": 10 * n_epochs},
        "output": {"directory": "unused", "snapshot_every": "10 h"},
    }


@dataclass(frozen=True, slots=True)
class Hosts:
    """A machine for each worker, and one for all other roles."""

    def n_needed(self, prepared: PreparedJob) -> int:
        del prepared
        return N_WORKERS + 1

    def builders(self, prepared: PreparedJob) -> dict[Address, Builder]:
        return prepared.builders()

    def options(self, prepared: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        del faults
        one = Machine(flops=_STEP_FLOPS, memory_rate=1e12, bandwidth=1e12)
        machines = [msgspec.structs.replace(one, flops=one.flops * speed) for speed in SPEEDS]
        cluster = Cluster(name="two", machines=(*machines, one), latency=1e-6)
        places = {
            name: int(name.partition("-")[2]) if kind == "replica" else N_WORKERS
            for name, kind in prepared.kinds.items()
        }
        options = options_for(cluster, places, share_memory=False)
        return replace(options, start=(SUPERVISOR,), trace="order", codec=False)


def in_virtual_time(
    preparation: Preparation, mode: str, frequency: str, *, n_epochs: int, seed: int
) -> Score:
    table = tables(mode, frequency, n_epochs=n_epochs, seed=seed)
    prepared = preparation.stage(parse_job(toml.write(table), path="dpplee3.toml"))
    outcome = run_simulated(prepared, Hosts(), seed=seed).outcome
    wanted = len(digits.images("train")) * n_epochs
    if outcome.error is not None or outcome.samples != wanted:
        sys.exit(f"{mode}, {frequency}: {outcome.error or outcome.samples}, not {wanted} samples")
    last = outcome.history[-1]
    assert last.held_out_loss is not None
    assert last.metric is not None
    return Score(loss=last.held_out_loss, accuracy=last.metric)


def with_threads(*, n_epochs: int, seed: int) -> Score:
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        run = distbelief.fit(
            digits.net(),
            digits.images("train"),
            loss="cross_entropy",
            batch_size=8 * BATCH,
            preset="hogwild",
            inner={"name": "SGD", "lr": reference.HOGWILD_RATE},
            epochs=N_WORKERS * n_epochs / N_WORKERS,
            directory=Path(folder) / "run",
            overrides={
                "algorithm.lockfree": {"threads": N_WORKERS, "samples": BATCH},
                "algorithm.blocking": True,
                "algorithm.seed": seed,
            },
            show=False,
        )
        return reference.score(dict(run.model.state_dict()))


def found(mode: str, frequency: str, *, runs: bool) -> Cell | None:
    """Return the scores that are kept; with `runs`, run what is not."""
    path = RESULTS / f"{slug(f'{mode} {frequency}')}.json"
    of = fingerprint(code_of("experiments/dpplee3", "experiments/digits"), LENGTHS, [*SEEDS])
    cell = kept(path, of, Cell)
    if cell is not None or not runs:
        return cell
    every = EVERY[frequency]
    n_steps = every if isinstance(every, int) else None
    n_steps = 2 * reference.steps_of_epoch(0) if every == "2 epochs" else n_steps
    ours: dict[int, list[Score]] = {n: [] for n in LENGTHS}
    theirs: dict[int, list[Score]] = {n: [] for n in LENGTHS}
    with Preparation() as preparation:
        for n in LENGTHS:
            for seed in SEEDS:
                theirs[n].append(reference.train(mode, n_steps, n_epochs=n, seed=seed))
                if mode == "hogwild":
                    score = with_threads(n_epochs=n, seed=seed)
                else:
                    score = in_virtual_time(preparation, mode, frequency, n_epochs=n, seed=seed)
                ours[n].append(score)
    cell = Cell(ours=ours, theirs=theirs)
    keep(path, cell, of=of)
    return cell


def z_of(one: Sequence[float], other: Sequence[float]) -> float:
    spread = math.sqrt((stdev(one) ** 2 + stdev(other) ** 2) / len(one))
    return (fmean(one) - fmean(other)) / spread


def rows(cells: Mapping[tuple[str, str], Cell]) -> Iterator[list[str]]:
    for (mode, frequency), cell in cells.items():
        for n in LENGTHS:
            ours, theirs = ([one.loss for one in each[n]] for each in (cell.ours, cell.theirs))
            accuracies = (
                fmean(one.accuracy for one in each[n]) for each in (cell.ours, cell.theirs)
            )
            yield [
                *(mode, frequency, str(n)),
                *(f"{fmean(each):.3f} ± {stdev(each):.3f}" for each in (ours, theirs)),
                f"{z_of(ours, theirs):+.1f}",
                *(f"{100 * one:.1f} %" for one in accuracies),
            ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="run what is missing first")
    parser.add_argument("--only", nargs="*", default=[*PRESETS, "hogwild"], metavar="MODE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cells: dict[tuple[str, str], Cell] = {}
    for mode, frequency in CELLS:
        if mode in options.only:
            cell = found(mode, frequency, runs=options.run)
            if cell is None:
                sys.exit(f"{mode}, {frequency}: no result of this code is kept: use --run")
            cells[mode, frequency] = cell
    heads = [
        "mode",
        "frequency",
        "epochs",
        "loss, ours",
        "loss, equations",
        "z",
        "ours",
        "equations",
    ]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows(cells):
        print(f"| {' | '.join(row)} |")
    far = [
        z_of(*([s.loss for s in side[n]] for side in (c.ours, c.theirs)))
        for c in cells.values()
        for n in LENGTHS
    ]
    print(f"|z| below 2 in {sum(abs(z) < 2 for z in far)} of {len(far)}")


if __name__ == "__main__":
    main()
