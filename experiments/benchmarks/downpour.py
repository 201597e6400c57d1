"""What talking to the shards costs two replicas, and what DDP pays for its own talk.

    python experiments/benchmarks/downpour.py [--rounds 4] [--seconds 12] [--small]

The paper's speech net (41,777,152 parameters), random samples in memory, Adagrad, one
thread per process, two processes that train. Per batch size:

    alone     two plain loops side by side that say no word to anybody: the ceiling
    kept      the same, but they keep memory that is freed, as replicas do, which saves a fifth
    downpour  `distbelief train`: two replicas, two shards, shared memory, a fetch and a
              push in each step (n_fetch = n_push = 1)
    ddp       torch's DistributedDataParallel over gloo, two ranks

All are started, take some steps to get warm, and then take turns. A turn's rate is
samples per second over whole steps, both processes together, without its first steps.

    downpour_bsN, ddp_bsN    over `alone`, medians
    downpour_bsN_over_kept   over `kept`, two processes with the same allocator setting
"""

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from distbelief.config import toml
from experiments.benchmarks.bare.plain_loop import Setting
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.track import OVER, Track
from experiments.benchmarks.measuring.workers import Program, Workers, module


CONTESTANTS: Final = ("alone", "downpour", "ddp", "kept")
SMALL: Final = {"rounds": 1, "seconds": 0.7, "batch_sizes": [8]}  # of a tiny net
N_PROCESSES: Final = 2  # that train, of each contestant
N_SHARDS: Final = 2
N_WARM_STEPS: Final = 4
N_SKIPPED: Final = 2  # first steps of a turn
N_LONGER_MAX: Final = 6  # times that a turn may be longer than asked for
START_SECONDS_MAX: Final = 120.0
QUIET_SECONDS: Final = 0.2
QUIET_SECONDS_MAX: Final = 30.0
LEARNING_RATE: Final = 1e-3


@dataclass(slots=True)
class Contestant:
    """Processes that train together, and what their turns came to."""

    index: int
    processes: Workers
    rates: list[float] = field(default_factory=list)  # samples per second
    cpu_shares: list[float] = field(default_factory=list)  # seconds per 1000 samples
    n_bytes: int = 0  # of all its processes, at the end of some turn


class Race:
    """The contestants of one batch size; fills in folder, contestant and ranks of the setting."""

    def __init__(self, setting: Setting, *, seconds: float) -> None:
        self._setting = setting
        self._folder = Path(setting.folder)
        self._seconds = seconds
        self._track = Track(self._folder)
        self.contestants: dict[str, Contestant] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        with ExitStack() as stack:
            for index, name in enumerate(CONTESTANTS):
                self._track.give(index)
                processes = stack.enter_context(
                    Workers(name, self._programs(name, index), self._folder, serve=False)
                )
                stack.callback(processes.signal, signal.SIGTERM)
                self.contestants[name] = Contestant(index, processes)
                self._warm_up(self.contestants[name])
            stack.callback(self._track.give, OVER)
            yield

    def turn(self, name: str) -> None:
        """Let one contestant run, and measure it; longer, if its steps are too few."""
        contestant = self.contestants[name]
        pids = contestant.processes.pids
        begun, rate = time.monotonic(), None
        with measurement.usage(lambda: measurement.cpu_seconds(pids)) as used:
            self._track.give(contestant.index)
            while rate is None:
                time.sleep(self._seconds)
                seconds = time.monotonic() - begun
                rate = self._rate(contestant, begun, begun + seconds)
                if rate is None and seconds > N_LONGER_MAX * self._seconds:
                    raise RuntimeError(
                        f"{name}: its processes take no {N_SKIPPED + 2} steps each in "
                        f"{seconds:.0f} s: raise --seconds"
                    )
        contestant.rates.append(rate)
        contestant.cpu_shares.append(1000.0 * used.cpu_seconds / (rate * used.seconds))
        contestant.n_bytes = max(contestant.n_bytes, measurement.shared_out_bytes(pids))
        self._rest(contestant)
        print(
            f"batch {self._setting.batch_size:4d}  {name:9}  {rate:8,.1f} samples/s  "
            f"{contestant.cpu_shares[-1]:6.2f} CPU s per 1000  "
            f"load {measurement.load():.1f}",
            flush=True,
        )

    # ------------------------------------------------------------------ start, end

    def _programs(self, name: str, index: int) -> list[Program]:
        if name == "downpour":
            job = self._folder / "job.toml"
            job.write_text(self._job(index))
            command = str(Path(sys.executable).with_name("distbelief"))
            return [Program(command=[command, "train", str(job)])]
        setting = msgspec.structs.replace(
            self._setting,
            contestant=index,
            n_ranks=N_PROCESSES if name == "ddp" else 1,
            keeps_memory=name == "kept",
        )
        return [module("bare.plain_loop", setting, rank) for rank in range(N_PROCESSES)]

    def _job(self, index: int) -> str:
        setting, folder = self._setting, toml.inline(self._setting.folder)
        return f"""
[model]
factory = "experiments.speech.model:acoustic_net"
[model.arguments]
hidden = {setting.hidden}
states = {setting.n_classes}
inputs = {setting.n_inputs}
[data.train]
factory = "experiments.benchmarks.measuring.track:paced_frames"
[data.train.arguments]
folder = {folder}
contestant = {index}
n_inputs = {setting.n_inputs}
n_classes = {setting.n_classes}
[algorithm]
name = "downpour"
loss = "cross_entropy"
batch_size = {setting.batch_size}
n_fetch = 1
n_push = 1
rule = {{ name = "adagrad", learning_rate = {setting.learning_rate} }}
[cluster]
replicas = {N_PROCESSES}
shards = {N_SHARDS}
threads = 1
[stop]
seconds = "24 h"
[output]
directory = {toml.inline(f"{setting.folder}/run")}
snapshot_every = "24 h"  # the others take none
"""

    def _warm_up(self, contestant: Contestant) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            alive = set(contestant.processes.pids)
            steps = self._track.steps(contestant.index)
            n_steps = [len(steps[pid]) for pid in alive & steps.keys() if len(steps[pid])]
            if len(n_steps) >= N_PROCESSES and min(n_steps) >= N_WARM_STEPS:
                break
            if contestant.processes.status is not None or time.monotonic() > deadline:
                raise contestant.processes.failure("does not run")
            time.sleep(0.1)
        self._rest(contestant)

    def _rest(self, contestant: Contestant) -> None:
        self._track.give(len(CONTESTANTS))  # nobody's
        deadline = time.monotonic() + QUIET_SECONDS_MAX
        used = contestant.processes.cpu_seconds()
        while time.monotonic() < deadline:
            time.sleep(QUIET_SECONDS)
            before, used = used, contestant.processes.cpu_seconds()
            if used - before <= 0.25 * QUIET_SECONDS:
                return

    # ------------------------------------------------------------------ measurement

    def _rate(self, contestant: Contestant, begin: float, end: float) -> float | None:
        """Return samples per second, over whole steps of each process.

        None if one of them has too few: leaving it out would tell half of the rate.
        """
        alive = set(contestant.processes.pids)
        rates = []
        for pid, times in self._track.steps(contestant.index).items():
            own = times[(times >= begin) & (times < end)][N_SKIPPED:]
            if pid in alive and len(own) > 1:
                rates.append((len(own) - 1) / float(own[-1] - own[0]))
        if len(rates) < N_PROCESSES:
            return None
        return self._setting.batch_size * sum(rates)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=4, help="turns of each")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a turn")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 256])
    options = measurement.options_of(parser, arguments, small=SMALL)
    figures: dict[str, float] = {}
    for batch_size in options.batch_sizes:
        with TemporaryDirectory(prefix="distbelief-downpour-") as folder:
            setting = Setting(
                folder=folder,
                contestant=-1,
                n_ranks=1,
                hidden=[64, 64] if options.small else [2560] * 4,
                n_inputs=440,
                n_classes=64 if options.small else 8192,
                batch_size=batch_size,
                learning_rate=LEARNING_RATE,
            )
            race = Race(setting, seconds=options.seconds)
            with race.open():
                for name in measurement.turns(CONTESTANTS, n_rounds=options.rounds):
                    race.turn(name)
        figures |= _report(race.contestants, batch_size=batch_size)
    measurement.conclude("downpour", figures)


def _report(contestants: dict[str, Contestant], *, batch_size: int) -> dict[str, float]:
    rates = {name: measurement.Spread.of(c.rates) for name, c in contestants.items()}
    ceiling = rates["alone"].median
    rows = {
        name: {
            "samples/s": rates[name].show(),
            "of alone": f"{rates[name].median / ceiling:.3f}",
            "CPU s per 1000": measurement.Spread.of(contestant.cpu_shares).show(2),
            "memory": f"{contestant.n_bytes / 2**20:,.0f} MiB",
        }
        for name, contestant in contestants.items()
    }
    measurement.show(f"batch {batch_size}, load {measurement.load():.1f}", rows)
    figures: dict[str, float] = {}
    for name, contestant in contestants.items():
        key = f"{name}_bs{batch_size}"
        if name in {"downpour", "ddp"}:
            figures[key] = rates[name].median / ceiling
        cpu = measurement.Spread.of(contestant.cpu_shares)
        figures[f"{key}_samples_per_second"] = rates[name].median
        figures[f"{key}_cpu_seconds_per_1000"] = cpu.median
        figures[f"{key}_bytes"] = contestant.n_bytes
    over_kept = rates["downpour"].median / rates["kept"].median
    return figures | {f"downpour_bs{batch_size}_over_kept": over_kept}


if __name__ == "__main__":
    main()
