"""The plain thing: one process, one thread, one torch optimiser; no cluster.

    python -m experiments.speech.baseline experiments/speech/demo.toml --rule sgd

It takes net, initial values, data, batch size and loss from a job file, so that what
Downpour does is compared with the same samples through the same net. It prints a table
and, as its last line, the same as JSON.
"""

import argparse
import importlib
import json
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from experiments.speech.data import PhoneFrames, frames, prepare
from experiments.speech.errors import SpeechError


LEARNING_RATES = {"sgd": 0.3, "adagrad": 0.01}
TEST_BATCH = 4_096
TEST_SEED = 1  # of the choice of held-out frames


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, and when to look at it."""

    rule: str
    learning_rate: float
    batch_size: int
    n_samples: int
    n_test: int  # held-out frames, chosen at random once
    n_reports: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement on held-out frames."""

    samples: int
    seconds: float  # of training, measurement left out
    accuracy: float
    loss: float


def train(
    net: nn.Module, *, train_part: PhoneFrames, test_part: PhoneFrames, plan: Plan
) -> Iterator[Point]:
    if plan.rule == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=plan.learning_rate)
    else:
        optimizer = torch.optim.Adagrad(net.parameters(), lr=plan.learning_rate)
    batches = draw_batches(len(train_part), size=plan.batch_size, seed=plan.seed)
    n_steps = max(plan.n_reports, plan.n_samples // plan.batch_size)
    marks = {n_steps * (i + 1) // plan.n_reports for i in range(plan.n_reports)}
    seconds = 0.0
    for step in range(1, n_steps + 1):
        begin = time.monotonic()
        inputs, targets = train_part.__getitems__(next(batches))
        optimizer.zero_grad()
        functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        seconds += time.monotonic() - begin
        if step in marks:
            accuracy, loss = measure(net, test_part, n_samples=plan.n_test)
            yield Point(
                samples=step * plan.batch_size, seconds=seconds, accuracy=accuracy, loss=loss
            )


def draw_batches(n_samples: int, *, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Batches of indices without end; every epoch is a new permutation."""
    if size > n_samples:
        raise SpeechError(f"batch_size = {size} is more than the {n_samples} frames")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(n_samples, generator=generator)
        yield from order[: n_samples // size * size].split(size)


@torch.no_grad()
def measure(net: nn.Module, part: PhoneFrames, *, n_samples: int) -> tuple[float, float]:
    """Accuracy and mean cross-entropy on `n_samples` frames, the same every time."""
    generator = torch.Generator().manual_seed(TEST_SEED)
    chosen = torch.randperm(len(part), generator=generator)[:n_samples]
    n_right, loss = 0, 0.0
    for indices in chosen.split(TEST_BATCH):
        inputs, targets = part.__getitems__(indices)
        scores = net(inputs)
        n_right += int((scores.argmax(dim=1) == targets).sum())
        loss += float(functional.cross_entropy(scores, targets, reduction="sum"))
    return n_right / len(chosen), loss / len(chosen)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plan of the command line; see the module's head."""
    parser = argparse.ArgumentParser(description="Plain SGD on a speech job's task.")
    parser.add_argument("job", type=Path, help="a job file of this folder")
    parser.add_argument("--rule", choices=sorted(LEARNING_RATES), default="sgd")
    parser.add_argument("--learning-rate", type=float, help="0.3 sgd, 0.01 adagrad")
    parser.add_argument("--samples", type=int, help="(default: the job's epochs)")
    parser.add_argument("--reports", type=int, default=5)
    parser.add_argument("--cache", help="folder of the corpora")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        _run(options)
    except SpeechError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    job = tomllib.loads(options.job.read_text(encoding="utf-8"))
    train_part, test_part = _open_parts(job["data"], cache=options.cache)
    epochs = job.get("stop", {}).get("epochs", 1)
    plan = Plan(
        rule=options.rule,
        learning_rate=options.learning_rate or LEARNING_RATES[options.rule],
        batch_size=job["algorithm"]["batch_size"],
        n_samples=options.samples or round(epochs * len(train_part)),
        n_test=job.get("evaluation", {}).get("subset", len(test_part)),
        n_reports=options.reports,
        seed=options.seed,
    )
    torch.manual_seed(plan.seed)
    net = _make_net(job["model"])
    points = []
    for point in train(net, train_part=train_part, test_part=test_part, plan=plan):
        points.append(point)
        print(
            f"{point.samples:,} samples: accuracy {point.accuracy:.1%}, "
            f"loss {point.loss:.3f}, {_rate(point):,.0f} samples/s",
            file=sys.stderr,
        )
    Console().print(_tabulate(points, plan=plan))
    curve = [asdict(point) for point in points]
    summary = {**asdict(plan), **curve[-1], "samples_per_second": _rate(points[-1])}
    print(json.dumps({**summary, "curve": curve}))


def _open_parts(tables: dict[str, Any], *, cache: str | None) -> tuple[PhoneFrames, PhoneFrames]:
    """Train and test part as the job's [data] describes them."""
    parts = []
    for name in ("train", "test"):
        arguments = tables[name].get("arguments", {})
        if cache is not None:
            arguments = {**arguments, "cache": cache}
        prepare(**arguments)
        parts.append(frames(**arguments))
    return parts[0], parts[1]


def _make_net(table: dict[str, Any]) -> nn.Module:
    module, _, function = table["factory"].partition(":")
    net = getattr(importlib.import_module(module), function)(**table.get("arguments", {}))
    assert isinstance(net, nn.Module)
    return net


def _rate(point: Point) -> float:
    return point.samples / max(1e-9, point.seconds)


def _tabulate(points: Sequence[Point], *, plan: Plan) -> Table:
    title = f"one process, {plan.rule}, rate {plan.learning_rate:g}"
    table = Table(title=f"{title}, batch {plan.batch_size}")
    for column in ("samples", "seconds", "samples/s", "held-out accuracy", "loss"):
        table.add_column(column, justify="right")
    for point in points:
        table.add_row(
            f"{point.samples:,}",
            f"{point.seconds:.1f}",
            f"{_rate(point):,.0f}",
            f"{point.accuracy:.1%}",
            f"{point.loss:.3f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
