"""How good the planner's plans are, and how long it takes to find them.

    python experiments/benchmarks/planner.py [--tries 2000] [--nets speech vgg11]
        [--small]

One thread. First the paper's pair on cluster commodity-2012 with up to 144 machines; then known
nets at their full size on cluster rack-1g with 2, 4 and 8 machines: large ones with 4 only, unless
`--tries` asks for more. A step's seconds are the simulated median over draws of the jitter; random
plans that lack memory do not count.

    seconds_144             planning for 144 machines: solver, search and baselines; of
                            the slower of the pair
    seconds_table_NET       planning the whole table, capture included
    worst_over_search       plan / the best that a random search finds among the
                            planner's own candidates, beginning with the plan; the
                            highest over nets and machines. At 1 it found none better
    worst_over_even         plan / every layer over all machines; at most 1
    worst_over_whole_layer  plan / runs of whole layers; at most 1
    speed_up_NET_N          over one machine, with up to N of them
    best_machines_speech    the fewest that reach the highest speed-up

Half of the moves of the random search change neighbours together, to splits that are called alike.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from distbelief.plans.cluster import Cluster
from distbelief.plans.cluster_file import load_cluster
from distbelief.plans.planner.cost_model import Variance
from distbelief.plans.planner.planner import Planned, plan
from distbelief.plans.planner.search import PlanningRequest, PlanSimulator
from distbelief.plans.planner.solvers.problem import Choice, Problem
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.plans.nets import IMAGES, NETS, SPEECH, Net


SecondsOf = Callable[[Choice], float]
_N_DRAWN: Final = 3
_PATIENCE: Final = 40  # moves in a row without a gain, after which it begins elsewhere


def search(
    problem: Problem,
    words: Sequence[Sequence[str]],
    seconds_of: SecondsOf,
    starts: Sequence[Choice],
    *,
    tries: int,
    seed: int,
) -> float:
    draws = _Draws(problem, words, seed=seed)
    waiting = list(starts)
    best = now = np.inf
    choice: Choice | None = None
    failed = 0
    for _ in range(tries):
        if choice is None or failed >= _PATIENCE:
            choice = waiting.pop(0) if waiting else draws.start()
            now, failed = seconds_of(choice), 0
        else:
            other = draws.move(choice)
            seconds = seconds_of(other)
            failed = 0 if seconds < now else failed + 1
            if seconds <= now:
                choice, now = other, seconds
        best = min(best, now)
    return float(best)


class _Draws:
    def __init__(self, problem: Problem, words: Sequence[Sequence[str]], *, seed: int) -> None:
        self._problem = problem
        self._places = [{word: index for index, word in enumerate(row)} for row in words]
        self._words = words
        self._rng = np.random.default_rng(seed)

    def start(self) -> Choice:
        """Return a choice of few words: every run of nodes is split alike."""
        choice = tuple(int(self._rng.integers(n)) for n in self._problem.sizes)
        node = 0
        while node < len(choice):
            choice = self._alike(choice, node, until=self._end(node))
            node = self._end(node)
        return choice

    def move(self, choice: Choice) -> Choice:
        node = int(self._rng.integers(len(choice)))
        changed = (*choice[:node], self._drawn(choice, node), *choice[node + 1 :])
        if self._rng.random() < 0.5:
            return changed
        return self._alike(changed, node, until=self._end(node))

    def _end(self, node: int) -> int:
        return node + 1 + int(self._rng.geometric(0.25))

    def _drawn(self, choice: Choice, node: int) -> int:
        """Return, of a few candidates, the one that the solver's model likes best."""
        totals = self._problem.costs[node]
        for neighbour, table in self._problem.neighbours[node]:
            totals = totals + table[:, choice[neighbour]]
        drawn = self._rng.integers(len(totals), size=_N_DRAWN)
        return int(min(drawn, key=lambda index: totals[index]))

    def _alike(self, choice: Choice, node: int, *, until: int) -> Choice:
        word = self._words[node][choice[node]]
        changed = list(choice)
        for other in range(node + 1, min(until, len(choice))):
            changed[other] = self._places[other].get(word, changed[other])
        return tuple(changed)


COUNTS: Final = (1, 2, 4, 8, 16, 32, 81, 144)
FEW: Final = (2, 4, 8)
LARGE: Final = 150  # layers above which a net is planned for one number of machines only
SMALL: Final = {"machines": (1, 2), "nets": ("speech",), "tries": 3}
_TRIES: Final = 100
_EVENTS_MAX: Final = 60_000  # tasks and messages that a search plays through, by default


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--machines", type=int, nargs="+", default=COUNTS, help="of the paper's pair")
    add("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    tries = f"plans that a random search plays through; by default {_TRIES}, fewer of large nets"
    add("--tries", type=int, help=tries)
    add("--seed", type=int, default=0, help="of the random searches")
    options = measurement.options_of(parser, arguments, small=SMALL)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    rows: dict[str, dict[str, str]] = {}
    old = load_cluster("commodity-2012")
    for name, net in (("speech", SPEECH), ("images", IMAGES)):
        figures |= _table(name, net, old, options.machines)
    start = "speed_up_speech_"
    speed_ups = {key: round(value, 6) for key, value in figures.items() if key.startswith(start)}
    best = max(speed_ups, key=speed_ups.__getitem__)
    figures["best_machines_speech"] = int(best.removeprefix(start))
    last = [figures.pop(f"seconds_last_{name}") for name in ("speech", "images")]
    figures[f"seconds_{max(options.machines)}"] = max(last)
    worst = {"search": 0.0, "even": 0.0, "whole_layer": 0.0}
    rack = load_cluster("rack-1g")
    for name in options.nets:
        for row, ratios in _compared(name, NETS[name], rack, options).items():
            rows[row] = {key: f"{value:.3f}" for key, value in ratios.items()}
            worst = {key: max(worst[key], ratios[f"/ {key}"]) for key in worst}
    measurement.show(f"on {rack.name}, load {measurement.load():.1f}", rows)
    figures |= {f"worst_over_{key}": value for key, value in worst.items()}
    measurement.conclude("planner", figures)


def over_search(order: PlanningRequest, done: Planned, *, tries: int, seed: int = 0) -> float:
    """Return the plan's seconds over the best that random search finds."""
    jitter, player = Variance(order.graph, order.cluster), PlanSimulator(order)
    n_machines = done.n_machines
    caps = [machine.memory for machine in order.cluster.first(n_machines).machines]

    def seconds_of(choice: Choice) -> float:
        price = player.cost(done.solved.decoder(choice), n_machines=n_machines)
        used = zip(price.memory_bytes, caps, strict=True)
        if not done.lacking and any(n_bytes > cap for n_bytes, cap in used):
            return math.inf
        return jitter.quantiles(price, [0.5])[0]

    solved = done.solved
    words = [[candidate.label for candidate in node.candidates] for node in solved.decoder.nodes]
    planned = solved.decoder.choice(done.best.placements)
    starts = [choice for choice in (planned, solved.solution.choice) if choice]
    best = search(solved.problem, words, seconds_of, starts, tries=tries, seed=seed)
    return done.median / best


def _table(name: str, net: Net, cluster: Cluster, counts: Sequence[int]) -> dict[str, float]:
    begun = time.perf_counter()
    order = net.order(cluster)
    starts: dict[int, float] = {}

    def note(what: str) -> None:
        starts.setdefault(int(what.partition(" ")[0]), time.perf_counter())

    found = plan(order, counts, notify=note)
    times = [*starts.values(), time.perf_counter()]
    taken = dict(zip(starts, np.diff(times).tolist(), strict=True))
    figures: dict[str, float] = {}
    rows = {}
    for done in found:
        rows[f"{done.n_machines}"] = {
            "used": f"{len(done.used)}",
            "step, s": f"{done.median:.4g}",
            "speed-up": f"{done.speed_up:.2f}",
            "over bound": f"{done.best.cost.step_seconds / done.lower_bound:.2f}",
            "by": done.best.method,
            "planned in, s": f"{taken[done.n_machines]:.1f}",
        }
        figures[f"speed_up_{name}_{done.n_machines}"] = done.speed_up
        figures[f"seconds_last_{name}"] = taken[done.n_machines]
    figures[f"seconds_table_{name}"] = times[-1] - begun
    measurement.show(f"{name} on {cluster.name}", rows)
    return figures


def _compared(
    name: str, net: Net, cluster: Cluster, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    order = net.order(cluster)
    thorough = options.tries is not None
    few = FEW if thorough or len(order.graph.layers) <= LARGE else FEW[1:2]
    rows = {}
    for done in plan(order, few):
        compiled = done.best.cost.compiled
        n_events = len(compiled.tasks) + compiled.n_messages
        tries = options.tries if thorough else min(_TRIES, _EVENTS_MAX // n_events)
        ratios = {
            "/ search": over_search(order, done, tries=tries, seed=options.seed),
            "/ even": done.median / done.baselines["even"],
            "/ whole_layer": done.median / done.baselines["whole layers"],
        }
        row = f"{name}, {done.n_machines}"
        rows[row] = ratios | {"speed-up": done.speed_up}
        shown = "  ".join(f"{key} {value:.4f}" for key, value in rows[row].items())
        print(f"{row:16} {shown}  {tries} tries, {done.best.method}", flush=True)
    return rows


if __name__ == "__main__":
    main()
