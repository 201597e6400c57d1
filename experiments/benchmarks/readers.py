"""Samples a second where reading costs as much as a step: reader processes and torch's DataLoader.

    python experiments/benchmarks/readers.py [--rounds 3] [--steps 150] [--small]

A small convolutional net on augmented images, one thread per process. `distbelief train` with one
replica and one shard, and a plain loop with `DataLoader`, each with 0, 1 and 2 workers, take turns.
The transform is repeated until a batch of it takes as long as a step.

    over_loader_N    distbelief over the plain loop, with N workers each, medians
    gain_N           distbelief with N workers over distbelief with none
    start_N          seconds of a job of one step, from command to end

Not in `make bench`: with its processes it takes minutes, and wants more than two cores.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from distbelief.config import toml
from distbelief.core.memory import keep_memory
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.measurement import Spread


HERE: Final = "experiments.benchmarks.readers"
COMMAND: Final = Path(sys.executable).with_name("distbelief")
WORKERS: Final = (0, 1, 2)
SMALL: Final = {"rounds": 1, "steps": 4}
BATCH_SIZE: Final = 64
N_IMAGES: Final = 4096
SIDE: Final = 32
LEARNING_RATE: Final = 0.01


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """Images, flipped, cropped and blurred at random."""

    def __init__(self, n_blurs: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = N_IMAGES, 3, SIDE, SIDE
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        self.n_blurs = n_blurs

    def __len__(self) -> int:
        return N_IMAGES

    @override
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = functional.pad(self.images[index].float() / 255.0, (4, 4, 4, 4))
        top, left = torch.randint(9, (2,)).tolist()
        image = image[:, top : top + SIDE, left : left + SIDE]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        for _ in range(self.n_blurs):
            image = functional.avg_pool2d(image, 3, stride=1, padding=1)
        return image, index % 10


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def plain_loop(n_blurs: int, n_workers: int, n_steps: int) -> float:
    """Take steps in this process; return samples per second, without the first fifth."""
    keep_memory()  # as replicas do
    torch.set_num_threads(1)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    data = Augmented(n_blurs)
    begun, n_done = time.perf_counter(), 0
    while True:
        loader = DataLoader(data, BATCH_SIZE, shuffle=True, drop_last=True, num_workers=n_workers)
        for inputs, targets in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            n_done += 1
            if n_done == n_steps // 5:
                begun = time.perf_counter()
            if n_done == n_steps:
                n_timed = n_steps - n_steps // 5
                return n_timed * BATCH_SIZE / (time.perf_counter() - begun)


def loader_rate(n_blurs: int, n_workers: int, n_steps: int) -> float:
    command = [sys.executable, "-m", HERE, "--plain", json.dumps([n_blurs, n_workers, n_steps])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def job_rate(folder: Path, n_blurs: int, n_workers: int, n_steps: int) -> tuple[float, float]:
    """Return samples per second, without the first fifth, and seconds of the whole command."""
    data = {"factory": f"{HERE}:Augmented", "arguments": {"n_blurs": n_blurs}}
    job = folder / "job.toml"
    rule = {"name": "sgd", "learning_rate": LEARNING_RATE}
    tables = {
        "model": {"factory": f"{HERE}:net"},
        "data": {"train": {**data, "num_workers": n_workers}},
        "algorithm": {
            "name": "downpour",
            "loss": "cross_entropy",
            "batch_size": BATCH_SIZE,
            "rule": rule,
        },
        "cluster": {"replicas": 1, "shards": 1},
        "stop": {"samples": n_steps * BATCH_SIZE},
        "output": {
            "directory": str(folder / "run"),
            "report_every": "100 ms",
            "snapshot_every": "1 h",
        },
    }
    job.write_text(toml.write(tables))
    begun = time.perf_counter()
    with TemporaryDirectory(dir=folder) as run:
        more = ["--set", f"output.directory={run}/run"]
        subprocess.run([COMMAND, "train", job, *more], check=True, capture_output=True, text=True)
        seconds = time.perf_counter() - begun
        lines = (Path(run) / "run" / "metrics.jsonl").read_text().splitlines()
    told = [(line["time"], line["step"]) for line in map(json.loads, lines)]
    timed = [(at, n) for at, n in told if n_steps / 5 <= n < n_steps] or told
    (first, before), (last, after) = timed[0], timed[-1]
    return (after - before) * BATCH_SIZE / max(last - first, 1e-9), seconds


def first_of(job: Callable[[], tuple[float, float]]) -> float:
    return job()[0]


def balanced() -> int:
    """Return how many blurs take as long for a batch as a step."""
    torch.set_num_threads(1)
    model, inputs = net(), torch.rand(BATCH_SIZE, 3, SIDE, SIDE)
    targets = torch.zeros(BATCH_SIZE, dtype=torch.int64)

    def step() -> None:
        functional.cross_entropy(model(inputs), targets).backward()

    def read(data: Augmented) -> None:
        for index in range(BATCH_SIZE):
            data[index]

    goal, none, many = (
        seconds_of(one) for one in (step, partial(read, Augmented(0)), partial(read, Augmented(50)))
    )
    return max(0, round(50 * (goal - none) / (many - none)))


def seconds_of(work: Callable[[], None]) -> float:
    def timed() -> float:
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    return median(timed() for _ in range(7))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    options = measurement.options_of(parser, arguments, small=SMALL)
    if options.plain is not None:
        print(plain_loop(*json.loads(options.plain)))
        return
    n_blurs = balanced()
    with TemporaryDirectory() as place:
        folder = Path(place)
        ours = {n: partial(job_rate, folder, n_blurs, n, options.steps) for n in WORKERS}
        theirs = {n: partial(loader_rate, n_blurs, n, options.steps) for n in WORKERS}
        contestants: dict[tuple[str, int], Callable[[], float]] = {}
        for n in WORKERS:
            contestants["distbelief", n] = partial(first_of, ours[n])
            contestants["DataLoader", n] = theirs[n]
        rates = measurement.interleaved(contestants, n_rounds=options.rounds)
        starts = {
            n: [job_rate(folder, n_blurs, n, 1)[1] for _ in range(options.rounds)] for n in WORKERS
        }
    rows = {
        f"{name}, {n} workers": {"samples/s": Spread.of(found).show()}
        for (name, n), found in rates.items()
    }
    measurement.show(f"batches of {BATCH_SIZE}, {n_blurs} blurs each", rows)
    middle = {key: median(found) for key, found in rates.items()}
    figures = {
        f"over_loader_{n}": middle["distbelief", n] / middle["DataLoader", n] for n in WORKERS
    }
    figures |= {f"gain_{n}": middle["distbelief", n] / middle["distbelief", 0] for n in WORKERS[1:]}
    figures |= {f"start_{n}": median(found) for n, found in starts.items()}
    measurement.conclude("readers", figures)


if __name__ == "__main__":
    main()
