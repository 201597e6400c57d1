"""Held-out loss of Dpplee3's modes and frequencies: this library beside the equations.

    python -m experiments.dpplee3 [--run] [--only asynchronous synchronous hogwild]

Without `--run` it prints what `results/` holds; with it, it first runs what is missing there: some
two minutes of one core. Two workers train on digits for 3 and 10 epochs each, four seeds.
Asynchronous and synchronous jobs run their real roles in virtual time, where worker 1 has 0.9 of
the speed of worker 0, as in the reference. `hogwild` runs in processes, with two threads, since
only real threads meet; it has no frequency, as each step is in the shared memory at once.

    z   difference of the two means of the loss, over the standard error of that difference. A seed
        has the same first weights on both sides, and batches in another order.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
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
from experiments.dpplee3 import reference as ref
from experiments.figures.results import code_of, fingerprint, keep, kept, slug


LENGTHS: Final = (3, 10)  # epochs of each worker
SEEDS: Final = range(4)
PRESETS: Final = {"asynchronous": "dpplee3-asgd", "synchronous": "dl4j-averaging"}
EVERY: Final[dict[str, tuple[int | str, int]]] = {  # in a job, and in steps
    "batch 1": (1, 1),
    "batch 10": (10, 10),
    "epoch 1": ("1 epoch", ref.steps_of_epoch()),
    "epoch 2": ("2 epochs", 2 * ref.steps_of_epoch()),
}
CELLS: Final = [*((mode, each) for mode in PRESETS for each in EVERY), ("hogwild", "batch 1")]
RESULTS: Final = Path(__file__).parent / "results"
Scores = dict[int, list[tuple[float, float]]]  # by epochs: of each seed


def job_text(mode: str, frequency: str, *, n_epochs: int, seed: int) -> str:
    """Return the job that does what Dpplee3 does in this mode."""
    data = {"factory": "experiments.digits.digits:images"}
    # Dpplee3 applies all differences at this rate in turn: their mean, at so many times the rate.
    rate = ref.SERVER_RATE * (ref.N_WORKERS if mode == "synchronous" else 1)
    return toml.write(
        {
            "model": {"factory": "experiments.digits.digits:net", "seed": seed},
            "data": {part: {**data, "arguments": {"part": part}} for part in ("train", "test")},
            "algorithm": {
                "name": "downpour",
                "preset": PRESETS[mode],
                "loss": "cross_entropy",
                "batch_size": ref.BATCH,
                "seed": seed,
                "order": "parts",
                "blocking": True,
                "max_steps": n_epochs * ref.steps_of_epoch(),
                "rule": {"name": "sgd", "learning_rate": rate},
                "inner": {"name": "SGD", "lr": ref.RATE, "momentum": ref.MOMENTUM},
                "exchange": {"every": EVERY[frequency][0]},
            },
            "cluster": {"replicas": ref.N_WORKERS},
            "evaluation": {"every": "1 h"},
            "stop": {"epochs": 10 * n_epochs},
            "output": {"directory": "unused", "snapshot_every": "10 h"},
        }
    )


@dataclass(frozen=True, slots=True)
class Hosts:
    """A machine for each worker, and one for all other roles."""

    def n_needed(self, prepared: PreparedJob) -> int:
        del prepared
        return ref.N_WORKERS + 1

    def builders(self, prepared: PreparedJob) -> dict[Address, Builder]:
        return prepared.builders()

    def options(self, prepared: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        del faults
        one = Machine(flops=1e9, memory_rate=1e12, bandwidth=1e12)
        machines = [msgspec.structs.replace(one, flops=1e9 * speed) for speed in ref.SPEEDS]
        cluster = Cluster(name="two", machines=(*machines, one), latency=1e-6)
        places = {
            name: int(name.partition("-")[2]) if kind == "replica" else ref.N_WORKERS
            for name, kind in prepared.kinds.items()
        }
        options = options_for(cluster, places, share_memory=False)
        return replace(options, start=(SUPERVISOR,), trace="order", codec=False)


def in_virtual_time(text: str, preparation: Preparation, *, seed: int) -> tuple[float, float]:
    prepared = preparation.stage(parse_job(text, path="dpplee3.toml"))
    last = run_simulated(prepared, Hosts(), seed=seed).outcome.history[-1]
    assert last.samples % len(ref.images("train")[1]) == 0, last.samples  # whole epochs
    assert last.held_out_loss is not None
    assert last.metric is not None
    return last.held_out_loss, last.metric


def with_threads(*, n_epochs: int, seed: int) -> tuple[float, float]:
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        run = distbelief.fit(
            digits.net(),
            digits.images("train"),
            loss="cross_entropy",
            batch_size=8 * ref.BATCH,
            preset="hogwild",
            inner={"name": "SGD", "lr": ref.HOGWILD_RATE},
            epochs=n_epochs,
            directory=Path(folder) / "run",
            overrides={
                "algorithm.lockfree": {"threads": ref.N_WORKERS, "samples": ref.BATCH},
                "algorithm.blocking": True,
                "algorithm.seed": seed,
            },
            show=False,
        )
        return ref.score(dict(run.model.state_dict()))


def found(mode: str, frequency: str, *, runs: bool) -> tuple[Scores, Scores] | None:
    """Return the scores that are kept, ours and those of the equations; or run them."""
    path = RESULTS / f"{slug(f'{mode} {frequency}')}.json"
    of = fingerprint(code_of("experiments/dpplee3", "experiments/digits"), LENGTHS, [*SEEDS])
    scores = kept(path, of, tuple[Scores, Scores])
    if scores is None and runs:
        scores = {n: [] for n in LENGTHS}, {n: [] for n in LENGTHS}
        with Preparation() as preparation:
            for n, seed in [(n, seed) for n in LENGTHS for seed in SEEDS]:
                if mode == "hogwild":
                    scores[0][n].append(with_threads(n_epochs=n, seed=seed))
                else:
                    text = job_text(mode, frequency, n_epochs=n, seed=seed)
                    scores[0][n].append(in_virtual_time(text, preparation, seed=seed))
                every = EVERY[frequency][1]
                scores[1][n].append(ref.train(mode, every, n_epochs=n, seed=seed))
        keep(path, scores, of=of)
    return scores


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="run what is missing first")
    parser.add_argument("--only", nargs="*", default=[*PRESETS, "hogwild"], metavar="MODE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    heads = "mode, frequency, epochs, loss here, of equations, z, accuracy here, of equations"
    lines = ["| " + heads.replace(", ", " | ") + " |", "|---" * 8 + "|"]
    for mode, frequency in CELLS:
        if mode not in options.only:
            continue
        scores = found(mode, frequency, runs=options.run)
        if scores is None:
            sys.exit(f"{mode}, {frequency}: no result of this code is kept: use --run")
        for n in LENGTHS:
            (ours, own), (theirs, their) = (zip(*side[n], strict=True) for side in scores)
            error = math.hypot(stdev(ours), stdev(theirs)) / math.sqrt(len(SEEDS))
            losses = [f"{fmean(each):.3f} ± {stdev(each):.3f}" for each in (ours, theirs)]
            z = (fmean(ours) - fmean(theirs)) / error
            accuracies = [f"{100 * fmean(each):.1f} %" for each in (own, their)]
            row = [mode, frequency, str(n), *losses, f"{z:+.1f}", *accuracies]
            lines.append(f"| {' | '.join(row)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
