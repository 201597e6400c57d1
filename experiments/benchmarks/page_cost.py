"""What the live page costs a job: windows with and without it, in turns, of one run.

    python experiments/benchmarks/page_cost.py [--rounds 10] [--seconds 8] [--small]

`distbelief train` of the net of `distbelief demo`, with one replica and one shard, so that two
processors have room for the page. In every other window the process of `--dashboard` serves it; a
reader takes its stream of events, as a browser does, and `/metrics` every second.

    rate    samples a second with the page over those without, medians: of the replica's own count
            and clock, both as of its last heartbeat (target 0.995)
    work    processor seconds for a sample without over those with, of all processes, the page's
            among them: so much is lost where no processor is free
    page    share of a processor that the process of the page takes
    start   processor seconds that its start takes, once

Not in `make bench`: half of its time is waiting for windows that are long enough.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Final, NamedTuple
from urllib.request import urlopen

from distbelief.cli.demo import JOB
from distbelief.config import toml
from distbelief.dashboard.beside import page_beside
from distbelief.dashboard.bottleneck import SPENT
from distbelief.dashboard.server import listen
from distbelief.job.run.directory import RunDirectory
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.measurement import Spread


COMMAND: Final = Path(sys.executable).with_name("distbelief")
CHANGES: Final[dict[str, dict[str, object]]] = {
    "cluster": {"replicas": 1, "shards": 1},
    "evaluation": {"every": "1 h"},
    "stop": {"seconds": "1 h"},
}
START_SECONDS: Final = 2.0  # of the page, and of training, which no window has
SMALL: Final = {"rounds": 1, "seconds": 2}


class Cost(NamedTuple):
    rate: float  # samples a second
    work: float  # processor seconds for a thousand samples
    page: float  # processors that the page takes
    start: float  # processor seconds


class Reading(NamedTuple):
    samples: float
    clock: float  # seconds, of the replica


def reading(run: RunDirectory) -> Reading:
    """Return what the replica has said last; both are 0 before it trains."""
    status = run.read_status()
    for role in () if status is None else status.view.roles:
        if role.name == "replica-0":
            spent = sum(n for name, n in role.counters.items() if name.startswith(SPENT))
            return Reading(role.counters.get("samples", 0.0), spent)
    return Reading(0.0, 0.0)


@contextmanager
def read_page(run: RunDirectory) -> Iterator[None]:
    """Serve the page, and read it as a browser and Prometheus would."""
    listening, over = listen("127.0.0.1:0"), Event()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    readers = [Thread(target=work, args=(url, over)) for work in (_events, _scrapes)]
    with page_beside(run.path, listening):
        for reader in readers:
            reader.start()
        yield
        over.set()
    for reader in readers:
        reader.join()


def window(run: RunDirectory, job: int, *, seconds: float, page: bool) -> Cost:
    """Let the job train for so long, with or without the page; return what it took."""
    with read_page(run) if page else nullcontext():
        time.sleep(START_SECONDS)
        pages = [
            pid for pid in measurement.family(os.getpid()) if pid not in measurement.family(job)
        ]
        pages.remove(os.getpid())
        start = measurement.cpu_seconds(pages)
        before, begun = reading(run), time.monotonic()
        used = measurement.cpu_seconds([*measurement.family(job), *pages])
        time.sleep(seconds)
        used = measurement.cpu_seconds([*measurement.family(job), *pages]) - used
        took = time.monotonic() - begun
        after = reading(run)
        own = measurement.cpu_seconds(pages) - start
    rate = (after.samples - before.samples) / (after.clock - before.clock)
    return Cost(rate, 1000.0 * used / (rate * took), own / took, start)


def _events(url: str, over: Event) -> None:
    while not over.is_set():
        with suppress(OSError), urlopen(f"{url}events", timeout=5) as stream:
            while not over.is_set() and stream.readline():
                pass
        over.wait(0.1)  # not there yet, or no longer


def _scrapes(url: str, over: Event) -> None:
    while not over.wait(1.0):
        with suppress(OSError), urlopen(f"{url}metrics", timeout=5) as page:
            page.read()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=8)
    options = measurement.options_of(parser, arguments, small=SMALL)
    with TemporaryDirectory() as place:
        file, run = Path(place) / "job.toml", RunDirectory(Path(place) / "runs/demo", lock=None)
        file.write_text(toml.write(JOB | CHANGES))
        with subprocess.Popen(
            [COMMAND, "train", file], cwd=place, stdout=subprocess.DEVNULL
        ) as process:
            while not reading(run).samples and process.poll() is None:
                time.sleep(0.2)
            turn = partial(window, run, process.pid, seconds=options.seconds)
            contestants = {"without": partial(turn, page=False), "with": partial(turn, page=True)}
            found = measurement.interleaved(contestants, n_rounds=options.rounds)
            process.send_signal(signal.SIGINT)
    rows = {
        name: {
            "samples/s": Spread.of(cost.rate for cost in costs).show(),
            "processor s for 1,000": Spread.of(cost.work for cost in costs).show(3),
        }
        for name, costs in found.items()
    }
    measurement.show("the live page", rows)
    middle = {
        name: Cost(*(median(values) for values in zip(*costs, strict=True)))
        for name, costs in found.items()
    }
    figures = {
        "rate": middle["with"].rate / middle["without"].rate,
        "work": middle["without"].work / middle["with"].work,
        "page": middle["with"].page,
        "start": middle["with"].start,
    }
    measurement.conclude("page_cost", figures)


if __name__ == "__main__":
    main()
