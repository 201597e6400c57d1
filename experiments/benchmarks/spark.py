"""A job on the rows of a Spark DataFrame, beside local processes and pyspark's TorchDistributor.

    python experiments/benchmarks/spark.py [--rounds 2] [--rows 40000] [--epochs 8] [--small]

Not in `make bench`: it needs the extra `spark`, a large package, and Java 17. About 5 minutes.

Each turn is a process with a session of its own, two executors of one core. Two replicas train
a small net on the same rows:

    spark                distbelief.spark.fit: one replica beside each executor
    local                the same job, the replicas are processes of this machine
    distributor          TorchDistributor: DistributedDataParallel in two executors; the DataFrame
                         is written to parquet, as TorchDistributor passes no rows
    distributor-local    the same with local_mode=True: two processes beside the driver

Both train the same batches of 32 a replica, and count the samples of both replicas. But `spark`
and `local` push and fetch at each step, through a shard: 10,000 updates where DDP makes 5,000. For
this net, of 19,000 parameters, an exchange costs about as much as the step: a job that takes 16 or
64 local steps (preset `local`) needs about half the processor time for a sample.

    throughput_over_*    samples a second of `spark` while it trains, over those of another
    cpu_over_local       processor time for a sample while it trains, JVMs included, over local
    start_seconds_*      from the call to the first step that is seen
    lines_*              of the user's code: functions here, without what measures
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import distbelief
from distbelief.supervisor.view import JobView
from experiments.benchmarks.measuring import measurement


if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SMALL: Final = {"rounds": 1, "rows": 4000, "epochs": 2}
MASTER: Final = "local-cluster[2,1,2048]"
ROOT: Final = Path(__file__).parents[2]
BATCH: Final = 32
INPUTS: Final = 64
LOCAL: Final = "local"
CONTESTANTS: Final = ("spark", LOCAL, "distributor", "distributor-local")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 256), nn.Tanh(), nn.Linear(256, 10))


def arrays(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, INPUTS, generator=generator)
    return x, (x @ torch.randn(INPUTS, 10, generator=generator)).argmax(1)


def tensors(rows: int) -> TensorDataset:
    return TensorDataset(*arrays(rows))


# --- what a user writes ---


def job_of(folder: str, epochs: int) -> dict[str, dict[str, object]]:
    return {
        "model": {"factory": "experiments.benchmarks.spark:net"},
        "algorithm": {
            "name": "downpour",
            "loss": "cross_entropy",
            "batch_size": BATCH,
            "rule": {"name": "adagrad", "learning_rate": 0.03},
        },
        "stop": {"epochs": epochs},
        "output": {"directory": f"{folder}/run"},
    }


def by_spark(frame: "DataFrame", folder: str, epochs: int, clock: "Clock") -> None:
    from distbelief import spark  # noqa: PLC0415 -- an extra

    job = job_of(folder, epochs)
    spark.fit(frame, job, inputs="x", targets="y", callbacks=[clock], show=False)


def by_distributor(
    frame: "DataFrame", folder: str, epochs: int, *, local_mode: bool
) -> list[tuple[float, float]]:
    from pyspark.ml.torch.distributor import TorchDistributor  # noqa: PLC0415 -- an extra

    def train(path: str, epochs: int) -> list[tuple[float, float]]:
        from pyarrow import parquet  # noqa: PLC0415 -- an extra
        from torch import distributed  # noqa: PLC0415 -- as its users' code
        from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415
        from torch.utils.data import DataLoader, DistributedSampler  # noqa: PLC0415

        times: list[tuple[float, float]] = []  # measures
        distributed.init_process_group("gloo")
        table = parquet.read_table(path)
        x = torch.tensor(np.stack(table["x"].to_numpy()))
        data = TensorDataset(x, torch.tensor(table["y"].to_numpy()))
        sampler = DistributedSampler(data)  # type: ignore[var-annotated]
        loader = DataLoader(data, BATCH, sampler=sampler)
        model = DistributedDataParallel(net())
        optimizer = torch.optim.Adagrad(model.parameters(), 0.03)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                now = time.monotonic(), time.process_time()  # measures
                times = [*times[:1], now]  # measures
        if distributed.get_rank() == 0:
            torch.save(model.module.state_dict(), f"{path}.pt")
        distributed.destroy_process_group()
        return times  # measures

    path = f"{folder}/rows.parquet"
    frame.write.parquet(path)
    distributor = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
    return distributor.run(train, path, epochs)  # type: ignore[no-any-return]


def by_local(rows: int, folder: str, epochs: int, clock: "Clock") -> None:
    data = {"factory": "experiments.benchmarks.spark:tensors", "arguments": {"rows": rows}}
    job = job_of(folder, epochs) | {"data": {"train": data}, "cluster": {"replicas": 2}}
    job["source"] = {"file": "benchmark", "import_paths": [str(ROOT)]}
    distbelief.train(job, callbacks=[clock], show=False)


def lines_of(function: Callable[..., object]) -> int:
    """Return the lines of a function's body without blank ones, comments and what measures."""
    body = inspect.getsource(function).partition(":\n")[2].splitlines()
    return sum(bool(line.strip()) and "# measures" not in line for line in body)


# --- a turn ---


class Clock:
    """A callback that notes when the first samples and nine tenths of all are seen.

    It notes the processor time until then, too. No more often: that reads files of each thread.
    """

    def __init__(self, n_samples: int) -> None:
        self.wanted = [1, n_samples * 9 // 10]
        self.seen: list[tuple[float, int, float]] = []  # when, samples, processor seconds

    def on_step(self, view: JobView) -> None:
        if self.wanted and view.samples >= self.wanted[0]:
            del self.wanted[0]
            self.seen.append((time.monotonic(), view.samples, spent()))


def spent() -> float:
    """Return the processor seconds of this process and its descendants, also of ended ones."""
    ticks = 0
    for pid in measurement.family(os.getpid()):
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it has just ended
            continue
        ticks += sum(map(int, text.rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def turn(name: str, rows: int, epochs: int, folder: str) -> dict[str, float]:
    frame = None if name == LOCAL else frame_of(rows)
    begun, samples, cpu = time.monotonic(), rows * epochs, float("nan")
    clock = Clock(samples)
    if frame is not None and name != "spark":
        begin, end = by_distributor(frame, folder, epochs, local_mode=name.endswith("local"))
        samples -= 2 * BATCH  # of the first step
        (first, used), (last, used_then) = begin, end
        cpu = 2 * (used_then - used) / samples * 1e6  # of both processes, without JVMs
    else:
        if frame is None:
            by_local(rows, folder, epochs, clock)
        else:
            by_spark(frame, folder, epochs, clock)
        (first, before, used), (last, after, used_then) = clock.seen
        samples = after - before
        cpu = (used_then - used) / samples * 1e6
    if frame is not None:
        frame.sparkSession.stop()
    return {"start": first - begun, "rate": samples / (last - first), "cpu": cpu}


def frame_of(rows: int) -> "DataFrame":
    from pyspark.sql import SparkSession  # noqa: PLC0415 -- an extra

    builder: Any = SparkSession.builder
    options = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    options |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    for key, value in options.items():
        builder = builder.config(key, value)
    session = builder.master(MASTER).getOrCreate()
    file = Path(os.environ["ROWS"])
    if not file.exists():
        import pyarrow as pa  # noqa: PLC0415 -- an extra
        from pyarrow import parquet  # noqa: PLC0415 -- an extra

        x, y = arrays(rows)
        parquet.write_table(pa.table({"x": [*x.numpy()], "y": y.numpy()}), file)
    return session.read.parquet(str(file)).repartition(2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--only", nargs="+", default=["spark", LOCAL, "distributor", "distributor-local"]
    )
    parser.add_argument("--turn", nargs=2, help=argparse.SUPPRESS)  # a name, a folder
    options = measurement.options_of(parser, arguments, small=SMALL)
    if options.turn:
        print(json.dumps(turn(options.turn[0], options.rows, options.epochs, options.turn[1])))
        return
    with TemporaryDirectory(prefix="distbelief-spark-") as place:

        def run(name: str) -> Mapping[str, float]:
            with TemporaryDirectory(dir=place) as folder:
                command = [sys.executable, "-P", __file__, "--turn", name, folder]
                command += ["--rows", str(options.rows), "--epochs", str(options.epochs)]
                paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
                more = {
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "PYSPARK_PYTHON": sys.executable,
                    "ROWS": str(Path(place) / "rows.parquet"),
                }
                ended = subprocess.run(
                    command,
                    env={**os.environ, **more},
                    stdout=subprocess.PIPE,
                    check=True,
                    text=True,
                )
            found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
            print(name, found, flush=True)
            return found

        found = measurement.interleaved(
            {name: partial(run, name) for name in options.only}, n_rounds=options.rounds
        )
    report(found)


def report(found: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    columns = (
        ("start", "start, s", 1),
        ("rate", "samples/s", 0),
        ("cpu", "processor us/sample", 0),
    )
    rows = {
        name: {
            title: measurement.Spread.of(each[key] for each in turns).show(digits)
            for key, title, digits in columns
        }
        for name, turns in found.items()
    }
    measurement.show("Two replicas", rows)
    middle = {
        name: {key: median(each[key] for each in turns) for key in turns[0]}
        for name, turns in found.items()
    }
    figures = {f"start_seconds_{name}": each["start"] for name, each in middle.items()}
    if "spark" in middle:
        ours = middle["spark"]
        figures |= {
            f"throughput_over_{name}": ours["rate"] / each["rate"]
            for name, each in middle.items()
            if name != "spark"
        }
        figures |= {
            f"cpu_over_{name}": ours["cpu"] / each["cpu"]
            for name, each in middle.items()
            if name != "spark"
        }
    figures |= {
        "lines_spark": lines_of(job_of) + lines_of(by_spark),
        "lines_distributor": lines_of(by_distributor),
    }
    measurement.conclude("spark", figures)


if __name__ == "__main__":
    main()
