"""The plain thing: one process, one thread, one torch optimiser; no cluster.

    python -m experiments.images.baseline experiments/images/demo.toml [--rule sgd]

It takes net, data, batch size and loss from a job file, so that what Downpour does is
compared with the same samples through the same net. It prints a table and, as its last
line, the same as JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from distbelief.config.job import Job
from distbelief.config.load import load_job
from distbelief.data.dataset import Dataset, read_batch
from distbelief.errors import DistBeliefError
from distbelief.task.task import build_dataset, build_loss, build_metric, build_model, prepare
from experiments.images.errors import ImagesError


LEARNING_RATES = {"sgd": 0.1, "adagrad": 0.02}
TEST_BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, and when to look at it."""

    rule: str
    learning_rate: float
    n_samples: int
    n_reports: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement of all held-out samples."""

    samples: int
    seconds: float  # of training, measurement left out
    accuracy: float
    loss: float


def train(job: Job, plan: Plan) -> Iterator[Point]:
    assert job.data.test is not None
    net, loss = build_model(job.model), build_loss(job.task)
    data = build_dataset(job.data.train)
    test = build_dataset(job.data.test, table="data.test")
    optimizer = (
        torch.optim.SGD(net.parameters(), lr=plan.learning_rate)
        if plan.rule == "sgd"
        else torch.optim.Adagrad(net.parameters(), lr=plan.learning_rate)
    )
    n_steps = max(plan.n_reports, plan.n_samples // job.batch_size)
    marks = {n_steps * (i + 1) // plan.n_reports for i in range(plan.n_reports)}
    batches = draw_batches(len(data), size=job.batch_size, seed=plan.seed)
    seconds = 0.0
    for step in range(1, n_steps + 1):
        begin = time.monotonic()
        inputs, targets = read_batch(data, next(batches))
        optimizer.zero_grad()
        loss(net(inputs), targets).backward()
        optimizer.step()
        seconds += time.monotonic() - begin
        if step in marks:
            accuracy, held_out = measure(net, test, job)
            yield Point(
                samples=step * job.batch_size, seconds=seconds, accuracy=accuracy, loss=held_out
            )


def draw_batches(n_samples: int, *, size: int, seed: int) -> Iterator[list[int]]:
    """Batches of indices without end; every epoch is a new permutation."""
    if size > n_samples:
        raise ImagesError(f"batch_size = {size} is more than the {n_samples} images")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(n_samples, generator=generator)
        for batch in order[: n_samples // size * size].split(size):
            yield batch.tolist()


@torch.no_grad()
def measure(net: nn.Module, test: Dataset, job: Job) -> tuple[float, float]:
    """Return the metric and the loss of all held-out samples."""
    metric, loss = build_metric(job.task), build_loss(job.task)
    net.eval()
    sums = torch.zeros(2)
    for begin in range(0, len(test), TEST_BATCH):
        chosen = range(begin, min(begin + TEST_BATCH, len(test)))
        inputs, targets = read_batch(test, chosen, table="data.test")
        outputs = net(inputs)
        sums[0] += len(chosen) * float(metric(outputs, targets))
        sums[1] += len(chosen) * float(loss(outputs, targets))
    net.train()
    accuracy, held_out = (sums / len(test)).tolist()
    return accuracy, held_out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plan of the command line; see the module's head."""
    parser = argparse.ArgumentParser(description="A job's task in one plain loop.")
    parser.add_argument("job", type=Path, help="a job file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rule", choices=sorted(LEARNING_RATES), default="adagrad")
    parser.add_argument("--learning-rate", type=float, help="0.1 sgd, 0.02 adagrad")
    parser.add_argument("--samples", type=int, help="(default: the job's epochs)")
    parser.add_argument("--reports", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        _run(load_job(options.job, overrides=options.set), options)
    except (DistBeliefError, ImagesError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run(job: Job, options: argparse.Namespace) -> None:
    if job.data.test is None:
        raise ImagesError(f"{options.job} has no [data.test]: add what to measure on")
    prepare(job.data.train, table="data.train")
    prepare(job.data.test, table="data.test")
    n_train = len(build_dataset(job.data.train))
    plan = Plan(
        rule=options.rule,
        learning_rate=options.learning_rate or LEARNING_RATES[options.rule],
        n_samples=options.samples or round((job.stop.epochs or 1) * n_train),
        n_reports=options.reports,
        seed=options.seed,
    )
    points = []
    for point in train(job, plan):
        points.append(point)
        print(
            f"{point.samples:,} samples: accuracy {point.accuracy:.1%}, "
            f"loss {point.loss:.3f}, {point.samples / point.seconds:,.0f} samples/s",
            file=sys.stderr,
        )
    Console().print(_tabulate(points, plan, job))
    curve = [asdict(point) for point in points]
    print(json.dumps({**asdict(plan), **curve[-1], "curve": curve}))


def _tabulate(points: Sequence[Point], plan: Plan, job: Job) -> Table:
    title = f"one process, {plan.rule}, rate {plan.learning_rate:g}"
    table = Table(title=f"{title}, batch {job.batch_size}")
    for column in ("samples", "seconds", "held-out accuracy", "loss"):
        table.add_column(column, justify="right")
    for point in points:
        table.add_row(
            f"{point.samples:,}",
            f"{point.seconds:.1f}",
            f"{point.accuracy:.1%}",
            f"{point.loss:.3f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
