"""What two machines of one core each buy, and what else two cores could do.

    python experiments/benchmarks/model_parallel.py [--rounds 3] [--seconds 2] [--small]
        [--parts speech_bs64 speech_bs256 image 1gbit 100mbit] [--folder DIR]

A step is forward and backward of one batch, without fetch and push. Contestants, all
with memory kept (`allocator`), one thread per process if not said otherwise:

    torch           one process, the whole net
    1 machine       the runtime of a job, everything on one machine
    2 machines      the same, by the plan that the planner prefers for two machines
    2 threads       as `torch`, with two threads
    dtensor         torch's tensor parallelism over gloo, two ranks
    side by side    two of `torch` that do not talk: per step of both; nobody is faster

The speech net with batches of 64 and 256, the image net cut into rows or columns, then
the speech net between two network namespaces with a link of 1 Gbit/s and 100 Mbit/s.
For these the planner is told what a message takes there, and may choose stages.

    speech_bs64, speech_bs256, image   1 machine, or torch if it is faster, / 2 machines
    speech_bs256_over_two_threads      2 threads / 2 machines
    speech_..._over_dtensor            dtensor / 2 machines
    ..._apart                          half of side by side / 2 machines: 1 if talking,
                                       and waiting for each other, cost nothing

Cores differ, and change their speed within minutes. So each process with one thread has a core to
itself; one process alone computes on each core in turn, and the mean of both counts. "2 machines"
has a turn between any two others, each of which is divided by those beside it; of the rounds the
median counts. With a folder, what was measured of layers is kept for parts in other runs.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import torch

from distbelief.core.memory import keep_memory
from distbelief.plans.planner.planner import plan
from distbelief.plans.planner.profiling.this_host import Network
from distbelief.plans.planner.search import PlanningRequest, PlanSimulator
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.workers import Workers, module
from experiments.benchmarks.measuring.workload import NetName, Workload
from experiments.benchmarks.network import hosts
from experiments.benchmarks.network.hosts import HERE, Host
from experiments.benchmarks.plans.machines import (
    N_MACHINES,
    Way,
    by_places,
    kept_network,
    machines,
    network,
    on_one_machine,
    order_here,
    plan_of,
)


IMAGES: Final = 64  # samples of a step of the image net
SPEECH: Final = {"speech_bs64": 64, "speech_bs256": 256}
LINKS: Final = {"1gbit": 1e9, "100mbit": 1e8}
IMAGE: Final = "image"
PARTS: Final = (*SPEECH, IMAGE, *LINKS)
SMALL: Final = {"rounds": 1, "seconds": 0.2}  # of tiny nets
ONE: Final = ("torch", "1 machine")
APART: Final = "side by side"
TWO: Final = "2 machines"
N_RANKS: Final = 2
PLAN: Final = "plan"  # the only one of machines
PLAIN: Final = ("torch", "2 threads", "dtensor", APART)  # others than machines
OVER: Final = {"2 threads": "over_two_threads", "dtensor": "over_dtensor"}


class Turn(NamedTuple):
    name: str  # whose
    round: int  # of all turns
    core: int  # of the first process
    seconds: float = 0.0  # of a step


class Contest:
    """Workers that compute the same batch in turns."""

    def __init__(self, workload: Workload, folder: Path, *, ends: Sequence[Host] = HERE) -> None:
        self.workers: dict[str, Workers] = {}
        self._workload = workload
        self._folder = folder
        self._ends = ends
        folder.mkdir()

    def whole(self, name: str, *, n_threads: int = 1, n_processes: int = 1) -> None:
        program = module("bare.whole_net", self._workload, n_threads, n_threads=n_threads)
        self.workers[name] = Workers(name, [program] * n_processes, self._folder)

    def machines(self, name: str, way: Way, order: PlanningRequest) -> None:
        plan = plan_of(way, order, loss=self._workload.loss)
        self.workers[name] = machines(
            name, {PLAN: plan}, workload=self._workload, folder=self._folder, ends=self._ends
        )

    def dtensor(self) -> None:
        meeting = self._folder / "meeting"
        programs = [
            module(
                *("peers.dtensor", self._workload, rank, N_RANKS, meeting),
                host=host,
                environment={"GLOO_SOCKET_IFNAME": host.interface},
            )
            for rank, host in enumerate(self._ends)
        ]
        self.workers["dtensor"] = Workers("dtensor", programs, self._folder)

    def hold(self, title: str, options: argparse.Namespace) -> dict[str, float]:
        """Let all take turns; return by how many times each is slower than `TWO`."""
        taken: list[Turn] = []
        with ExitStack() as stack:
            for each in self.workers.values():
                stack.enter_context(each)
            for turn in turns(list(self.workers), n_rounds=options.rounds):
                each, by_plan = self.workers[turn.name], turn.name not in PLAIN
                done = each.turn(
                    seconds=options.seconds,
                    request=(lambda n: (PLAN, n)) if by_plan else int,
                    first_core=turn.core,
                )
                taken.append(turn._replace(seconds=done.seconds))
        found = ratios(taken)
        rows = {name: each.row() for name, each in self.workers.items()}
        for name, values in found.items():
            rows[name]["/ 2 machines"] = measurement.Spread.of(values).show(2)
        measurement.show(f"{title}, load {measurement.load():.1f}", rows)
        return {name: median(values) for name, values in found.items()}


def turns(names: Sequence[str], *, n_rounds: int) -> Iterator[Turn]:
    """Yield whose turn it is: `TWO` between any two others, at both ends too.

    Processes change cores: in a round, who has one only; in every other one, the rest.
    """
    for index in range(n_rounds):
        core = index % 2
        yield Turn(TWO, index, core)
        others = [
            Turn(name, index, other)
            for name in names
            if name != TWO
            for other in ((0, 1) if name in ONE else (core,))
        ]
        for turn in others if index % 2 == 0 else reversed(others):
            yield turn
            yield Turn(TWO, index, core)


def ratios(taken: Sequence[Turn]) -> dict[str, list[float]]:
    """Return, of each round, a step over those of `TWO` just before and just after."""
    found: dict[str, list[float]] = {}
    for _, group in groupby(taken, key=lambda turn: turn.round):
        row = list(group)  # TWO, another, TWO, another, ..., TWO
        beside: dict[str, list[float]] = {}
        for before, turn, after in zip(row[:-2:2], row[1:-1:2], row[2::2], strict=True):
            two = mean((before.seconds, after.seconds))
            beside.setdefault(turn.name, []).append(turn.seconds / two)
        for name, values in beside.items():  # of both cores
            found.setdefault(name, []).append(mean(values))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--folder", type=Path, help="keep there what is measured once")
    options = measurement.options_of(parser, arguments, small=SMALL)
    keep_memory()  # as machines do, and
    torch.set_num_threads(1)  # so: what is measured of layers depends on both
    figures: dict[str, float] = {}
    parts = [part for part in PARTS if part in options.parts]
    obstacle = hosts.obstacle() if any(part in LINKS for part in parts) else None
    with TemporaryDirectory(prefix="distbelief-parallel-") as name:
        folder, kept = Path(name), options.folder or Path(name)
        kept.mkdir(exist_ok=True)
        # Layers are measured now, or in another part of this, not once for all.
        os.environ["XDG_CACHE_HOME"] = str(kept)
        seconds = options.seconds / 4
        here = kept_network(kept, seconds=seconds)
        for part in parts:
            if part not in LINKS:
                figures |= _part(part, here, folder, options)
            elif not obstacle:
                with hosts.switched(N_RANKS, bits_per_second=LINKS[part]) as lan:
                    place = folder / f"{part}-network"
                    place.mkdir()
                    between = network(place, ends=lan.hosts, seconds=seconds)
                    figures |= _part(part, between, folder, options, ends=lan.hosts)
    if obstacle:
        print(f"no links: {obstacle}")
    measurement.conclude("model_parallel", figures)


def preferred(order: PlanningRequest) -> tuple[Way, str]:
    done = plan(replace(order, exactly=True), [N_MACHINES])[-1].best
    way = Way(placements=done.placements, micro_batches=done.cost.micro_batches)
    return way, f"{done.method}, {1e3 * done.seconds[1]:.0f} ms expected"


def _part(
    part: str,
    between: Network,
    folder: Path,
    options: argparse.Namespace,
    *,
    ends: Sequence[Host] = HERE,
) -> dict[str, float]:
    net: NetName = "image" if part == IMAGE else "speech"
    batch_size = IMAGES if part == IMAGE else SPEECH.get(part, max(SPEECH.values()))
    small: bool = options.small
    workload = Workload(net=net, batch_size=8 if small else batch_size, small=small)
    order = order_here(workload, between, stages=part in LINKS)
    contest = Contest(workload, folder / part, ends=ends)
    if part not in LINKS:
        contest.whole("torch")
        contest.machines("1 machine", on_one_machine(order.graph), order)
        contest.whole(APART, n_processes=2)
    way, how = preferred(order)
    if part == IMAGE:
        simulator = PlanSimulator(order)
        name, by_place = min(
            by_places(order).items(),
            key=lambda item: simulator.cost(item[1].placements, n_machines=N_MACHINES).step_seconds,
        )
        how = f"cut into {name}; planner: {how}"
        contest.machines(TWO, by_place, order)
        contest.machines("planner", way, order)
    else:
        contest.machines(TWO, way, order)
    if part in SPEECH:
        contest.whole("2 threads", n_threads=2)
    if part != IMAGE:
        contest.dtensor()
    slower = contest.hold(f"{part}, batch {workload.batch_size}: {how}", options)
    key = f"speech_{part}" if part in LINKS else part
    figures = {f"{key}_{word}": slower[name] for name, word in OVER.items() if name in slower}
    if part not in LINKS:
        figures[key] = min(slower[name] for name in ONE)
        figures[f"{key}_apart"] = slower[APART] / N_MACHINES
    return figures | _raw(key, contest)


def _raw(key: str, contest: Contest) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, each in contest.workers.items():
        start = f"{key}_{name.replace(' ', '_')}"
        figures[f"{start}_ms"] = 1e3 * each.step.median
        figures[f"{start}_cpu_ms"] = 1e3 * each.cpu.median
        figures[f"{start}_bytes"] = each.n_bytes_max
    return figures


if __name__ == "__main__":
    main()
