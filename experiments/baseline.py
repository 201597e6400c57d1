"""The plain thing: one process, one thread, one torch optimizer; no cluster.

    python -m experiments.baseline JOB.toml [--rule sgd] [--set KEY=VALUE]

It takes net, data, batch size and loss from a job file, so that what Downpour does is compared with
the same samples through the same net. It prints a table and, as its last line, the same as JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from distbelief.config.job import Job
from distbelief.config.load import load_job
from distbelief.core.errors import DistBeliefError, JobError
from distbelief.task.data import Dataset, read_batch
from distbelief.task.losses import Measures
from distbelief.task.task import build_dataset, build_loss, build_metrics, build_model, prepare_data
from experiments.benchmarks.measuring.measurement import show


LEARNING_RATES = {"sgd": 0.1, "adagrad": 0.01}
TEST_BATCH = 2_000
TEST_SEED = 1  # of the choice of held-out samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    samples: int
    seconds: float  # of training, measurement left out
    samples_per_second: float
    accuracy: float  # the job's metric
    loss: float


def train(job: Job, *, rule: str, learning_rate: float, steps: int, seed: int) -> Iterator[Point]:
    assert job.data.test is not None
    torch.manual_seed(seed)
    net, loss = build_model(job.model), build_loss(job.task)
    data = build_dataset(job.data.train)
    test = build_dataset(job.data.test, table="data.test")
    kind = torch.optim.SGD if rule == "sgd" else torch.optim.Adagrad
    optimizer = kind(net.parameters(), lr=learning_rate)
    batches = draw_batches(len(data), size=job.batch_size, seed=seed)
    n_done, seconds = 0, 0.0
    while True:
        for _ in range(steps):
            begun = time.monotonic()
            batch = read_batch(data, next(batches))
            optimizer.zero_grad()
            loss(batch.run(net), batch.targets).backward()
            optimizer.step()
            seconds += time.monotonic() - begun
        n_done += steps * job.batch_size
        accuracy, held_out = measure(net, test, job)
        yield Point(
            samples=n_done,
            seconds=seconds,
            samples_per_second=n_done / seconds,
            accuracy=accuracy,
            loss=held_out,
        )


def draw_batches(n_samples: int, *, size: int, seed: int) -> Iterator[list[int]]:
    """Batches of indices without end; every epoch is a new permutation."""
    if size > n_samples:
        raise JobError(f"batch_size = {size} is more than the {n_samples} samples")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(n_samples, generator=generator)
        yield from order[: n_samples // size * size].view(-1, size).tolist()


@torch.no_grad()
def measure(net: nn.Module, test: Dataset, job: Job) -> tuple[float, float]:
    measures = Measures(build_loss(job.task), build_metrics(job.task))
    measures.reset()
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(TEST_SEED))
    chosen = order[: job.evaluation.subset or len(test)]
    net.eval()
    sums = torch.zeros(1 + len(measures.metrics))
    for indices in chosen.split(TEST_BATCH):
        batch = read_batch(test, indices.tolist(), table="data.test")
        outputs = batch.run(net)
        sums += len(indices) * torch.tensor(measures.of(outputs, batch.targets))
    net.train()
    held_out, metric, *_ = (sums / len(chosen)).tolist()
    return measures.whole().get(1, metric), held_out


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A job's task in one plain loop.")
    parser.add_argument("job", type=Path, help="a job file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rule", choices=sorted(LEARNING_RATES), default="adagrad")
    parser.add_argument("--learning-rate", type=float, help="0.1 sgd, 0.01 adagrad")
    parser.add_argument("--samples", type=int, help="(default: the job's epochs)")
    parser.add_argument("--reports", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        _run(load_job(options.job, overrides=options.set), options)
    except DistBeliefError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run(job: Job, options: argparse.Namespace) -> None:
    if job.data.test is None:
        raise JobError(f"{options.job} has no [data.test]: add what to measure on")
    prepare_data(job.task)
    n_train = len(build_dataset(job.data.train))
    n_samples = options.samples or round((job.stop.epochs or 1) * n_train)
    rate = options.learning_rate or LEARNING_RATES[options.rule]
    steps = max(1, n_samples // job.batch_size // options.reports)
    points: list[Point] = []
    for point in train(job, rule=options.rule, learning_rate=rate, steps=steps, seed=options.seed):
        points.append(point)
        print(f"{point.samples:,} samples: accuracy {point.accuracy:.1%}", file=sys.stderr)
        if len(points) == options.reports:
            break
    rows = {
        f"{point.samples:,} samples": {
            "seconds": f"{point.seconds:.1f}",
            "samples/s": f"{point.samples_per_second:,.0f}",
            "held-out accuracy": f"{point.accuracy:.1%}",
            "loss": f"{point.loss:.3f}",
        }
        for point in points
    }
    show(f"one process, {options.rule}, rate {rate:g}, batch {job.batch_size}", rows)
    settings = {"rule": options.rule, "learning_rate": rate, "seed": options.seed}
    curve = [asdict(point) for point in points]
    print(json.dumps({**settings, **curve[-1], "curve": curve}))


if __name__ == "__main__":
    sys.exit(main())
