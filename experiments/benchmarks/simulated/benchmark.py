"""What `simulation` measures: speed, memory and truth of the simulated cluster.

    python experiments/benchmarks/simulation.py [--only speed memory large truth]
        [--jobs alone two shards paused slowed split sandblaster] [--small]
                                of `truth`: each some two minutes

One thread, processor time. Roles are those of a job as it is run, on a rack of
10 Gbit/s with cards that all flows share; the net they train is small and stands for
the paper's speech net of 42 million parameters, in as many blocks (`scales`).

    messages_per_second         Downpour, 20 replicas, 10 shards, every message encoded
                                and decoded, contents in the digest
    messages_per_second_priced  the same, messages passed on, only their order noted
    messages_per_second_driver  the same as the first with two roles that only answer
                                each other: what the driver takes
    messages_per_second_passed  likewise as the second
    driver_over_roles           time of the driver over that of the roles and their work, in
                                the first
    kilobytes_per_replica       priced; from 100 to 400 replicas on 20 shards, what each
                                shard keeps for it included
    memory_growth               that over the same from 25 to 100: 1 is linear in roles
    sandblaster_seconds         only if asked for (`large`): 2000 replicas, 100
                                batches, 8 shards
    step_time_error             simulated against real on this host, the worst of the
    samples_per_second_error    jobs below; a share
    staleness_error             likewise; of jobs that push to a clock
    bytes_differ                jobs whose bytes were not the same to the last one
    others                      cores taken by what is not of this benchmark; the worst
"""

import argparse
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch

from distbelief.forecast.calibration import Stopwatch
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.simulated.clusters import answering, downpour, sandblaster
from experiments.benchmarks.simulated.truth import CASES, truth


N_REPLICAS: Final = (25, 100, 400)
N_REPLICAS_SMALL: Final = (1, 2, 3)
"""Of which memory is looked at."""

SMALL: Final = {"jobs": ("alone",)}  # and each part in small


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parts = ("speed", "memory", "large", "truth")
    usual = ("speed", "memory", "truth")
    parser.add_argument("--only", nargs="+", choices=parts, default=usual)
    parser.add_argument("--jobs", nargs="+", choices=CASES, default=tuple(CASES))
    options = measurement.options_of(parser, arguments, small=SMALL)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    run: dict[str, Callable[[], dict[str, float]]] = {
        "speed": partial(speed, small=options.small),
        "memory": partial(memory, small=options.small),
        "large": partial(large, small=options.small),
        "truth": partial(truth, options.jobs, small=options.small),
    }
    for part in options.only:
        figures |= run[part]()
    measurement.conclude("simulation", figures)


# ---------------------------------------------------------------------------- figures


def speed(*, small: bool) -> dict[str, float]:
    figures = {}
    n_replicas, n_shards, n_words = (2, 1, 20) if small else (20, 10, 2000)
    for key, priced in (("", False), ("_priced", True)):
        built = downpour(n_replicas, n_shards, steps=4, priced=priced)
        n, seconds = built.run()
        figures[f"messages_per_second{key}"] = n / seconds
        print(f"Downpour{key}: {n} messages in {seconds:.2f} s", flush=True)
    watch = Stopwatch()
    built = downpour(n_replicas, n_shards, steps=4, priced=False, watch=watch)
    built.cluster.run(until=0.0)
    began = _seconds_of(watch)
    _, seconds = built.run()
    of_roles = _seconds_of(watch) - began
    figures["driver_over_roles"] = (seconds - of_roles) / of_roles
    for key, priced in (("_driver", False), ("_passed", True)):
        cluster = answering(n_pairs=20, n_words=n_words, priced=priced)
        cluster.run(until=0.0)
        began = time.process_time()
        cluster.run(max_events=1 << 60)
        seconds = time.process_time() - began
        n = cluster.counts.delivered
        figures[f"messages_per_second{key}"] = n / seconds
        print(f"answers{key}: {n} messages in {seconds:.2f} s", flush=True)
    return figures


def _seconds_of(watch: Stopwatch) -> float:
    pieces = (piece for every in watch.work.values() for piece in every)
    return watch.handling + sum(seconds for seconds, _ in pieces)


def memory(*, small: bool) -> dict[str, float]:
    """Take a step; what a replica takes must not depend on how many there are.

    Each number of them in a process of its own: what one lets go of the next would use
    again, and it would not be counted. What the first few take once is taken off.
    """
    context = multiprocessing.get_context("spawn")
    taken = {}
    few, some, many = N_REPLICAS_SMALL if small else N_REPLICAS
    for n_replicas in (few, some, many):
        with context.Pool(1) as pool:
            taken[n_replicas] = pool.apply(_bytes_of, (n_replicas,))
    per_replica = (taken[many] - taken[some]) / (many - some)
    at_first = (taken[some] - taken[few]) / (some - few)
    print(f"bytes of so many replicas and their pairs: {taken}", flush=True)
    return {
        "kilobytes_per_replica": per_replica / 1000,
        "memory_growth": per_replica / max(1.0, at_first),
    }


def large(*, small: bool) -> dict[str, float]:
    built = sandblaster(*((4, 2) if small else (2000, 8)), batches=2 if small else 100)
    n, seconds = built.run()
    print({name: error for name, error in built.cluster.halted.items() if error})
    virtual = built.cluster.now
    print(f"Sandblaster: {n} messages, {virtual:.0f} virtual s in {seconds:.0f} s")
    return {"sandblaster_seconds": seconds}


def _bytes_of(n_replicas: int) -> int:
    """Return what a job of so many takes, after a step of each."""
    torch.set_num_threads(1)
    downpour(1, 20, steps=1, priced=True).run()  # modules, buffers, data
    gc.collect()
    before = _resident_bytes()
    built = downpour(n_replicas, 20, steps=1, priced=True)
    built.run()
    return _resident_bytes() - before


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
