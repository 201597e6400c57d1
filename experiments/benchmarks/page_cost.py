"""What the live page costs a job: samples a second with and without, in turns.

    python experiments/benchmarks/page_cost.py [--rounds 7] [--seconds 20] [--small]

`distbelief train` of the net of `distbelief demo`, two replicas and two shards, for some seconds.
With the page, a reader takes its stream of events, as a browser does, and `/metrics` every second.

    rate    samples a second with the page over those without, medians (target 0.995)
    work    processor seconds for a sample without over those with, of all processes, start included

Not in `make bench`: with a page it wants more than two cores, or the rate is that of their sharing.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Final, NamedTuple
from urllib.request import urlopen

from distbelief.cli.demo import JOB
from distbelief.config import toml
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.measurement import Spread


COMMAND: Final = Path(sys.executable).with_name("distbelief")
SMALL: Final = {"rounds": 1, "seconds": 2}


class Cost(NamedTuple):
    rate: float  # samples a second
    work: float  # processor seconds for a thousand samples


def run(*, page: bool, seconds: int) -> Cost:
    """Train; return what it took."""
    with TemporaryDirectory() as place:
        job = Path(place) / "job.toml"
        job.write_text(toml.write(JOB | {"stop": {"seconds": f"{seconds} s"}}))
        before = _children()
        command: list[str | Path] = [COMMAND, "train", job, "--json", *["--dashboard"] * page]
        with subprocess.Popen(
            command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            over = Event()
            readers = []
            assert process.stdout is not None
            assert process.stderr is not None
            if page:
                url = process.stderr.readline().split()[-1]  # it is printed first
                for work in (_events, _scrapes):
                    readers.append(Thread(target=work, args=(url, over)))
                    readers[-1].start()
            summary = json.loads(process.stdout.read())
            over.set()
            process.stderr.read()
        for reader in readers:
            reader.join()
        return Cost(
            summary["samples_per_second"], 1000 * (_children() - before) / summary["samples"]
        )


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _events(url: str, over: Event) -> None:
    while not over.is_set():
        try:
            with urlopen(f"{url}events", timeout=5) as stream:
                while not over.is_set() and stream.readline():
                    pass
        except OSError:  # not there yet, or no longer
            time.sleep(0.1)


def _scrapes(url: str, over: Event) -> None:
    while not over.wait(1.0):
        try:
            with urlopen(f"{url}metrics", timeout=5) as page:
                page.read()
        except OSError:
            continue


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=int, default=20)
    options = measurement.options_of(parser, arguments, small=SMALL)
    contestants = {
        name: partial(run, page=page, seconds=options.seconds)
        for name, page in (("without", False), ("with", True))
    }
    found = measurement.interleaved(contestants, n_rounds=options.rounds)
    rows = {
        name: {
            "samples/s": Spread.of(cost.rate for cost in costs).show(),
            "processor s for 1,000": Spread.of(cost.work for cost in costs).show(3),
        }
        for name, costs in found.items()
    }
    measurement.show("the live page", rows)
    rate = {name: median(cost.rate for cost in costs) for name, costs in found.items()}
    work = {name: median(cost.work for cost in costs) for name, costs in found.items()}
    figures = {"rate": rate["with"] / rate["without"], "work": work["without"] / work["with"]}
    measurement.conclude("page_cost", figures)


if __name__ == "__main__":
    main()
