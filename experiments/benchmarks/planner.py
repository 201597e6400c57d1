"""How good the planner's plans are, and how long it takes to find them.

    python experiments/benchmarks/planner.py [--tries 2000] [--nets speech vgg16]
        [--small]

One thread. First the paper's pair on cluster commodity-2012 with 1, 2, 4, 8, 16, 32, 81
and 144 machines; then known nets at their full size on cluster rack-1g with 2, 4 and 8
machines: large ones with 4 only, unless `--tries` asks for more. A step's seconds are
the simulated median over draws of the jitter, by which the planner chooses and which it
prints; random plans that lack memory do not count.

    seconds_144             planning for 144 machines: solver, search and baselines; of
                            the slower of the pair
    seconds_table_NET       planning the whole table, capture included
    worst_over_search       plan / the best that a random search finds among the
                            planner's own candidates, beginning with the plan; the
                            highest over nets and machines. At 1 it found none better
    worst_over_even         plan / every layer over all machines; at most 1
    worst_over_whole_layer  plan / runs of whole layers; at most 1
    worst_over_metis        plan / what METIS makes of the same cells as `even`; only if
                            pymetis is there, of the extra peers
    speed_up_NET_N          over one machine, with up to N of them
    best_machines_speech    the fewest that reach the highest speed-up
"""

import argparse
import math
import time
from collections.abc import Sequence
from typing import Final

import torch

from distbelief.graph.graph import LayerGraph
from distbelief.partition.cost_model import AnalyticCosts, Variance, single_sample
from distbelief.partition.planner import Planned, each_plan, plan
from distbelief.partition.search import PlanningRequest, PlanSimulator
from distbelief.partition.solvers.problem import Choice
from distbelief.program.cluster import Cluster
from distbelief.program.cluster_file import load_cluster
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.plans import rivals
from experiments.benchmarks.plans.nets import IMAGES, NETS, SPEECH, Net


COUNTS: Final = (1, 2, 4, 8, 16, 32, 81, 144)
FEW: Final = (2, 4, 8)
LARGE: Final = 150  # layers above which a net is planned for one number of machines only

SMALL: Final = {"machines": (1, 2), "nets": ("speech",), "tries": 3}

_TRIES: Final = 100
_EVENTS_MAX: Final = 60_000  # tasks and messages that a search plays through, by default


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--machines", type=int, nargs="+", default=COUNTS, help="of the paper's pair"
    )
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument(
        "--tries",
        type=int,
        help=f"plans that a random search plays through; by default at most {_TRIES}, "
        "fewer of large nets",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random searches")
    options = measurement.options_of(parser, arguments, small=SMALL)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    rows: dict[str, dict[str, str]] = {}
    old = load_cluster("commodity-2012")
    for name, net in (("speech", SPEECH), ("images", IMAGES)):
        figures |= _table(name, net, old, options.machines)
    best = max(_speed_ups(figures, "speech").items(), key=lambda item: item[1])
    figures["best_machines_speech"] = best[0]
    figures[f"seconds_{max(options.machines)}"] = max(
        figures.pop(f"seconds_last_{name}") for name in ("speech", "images")
    )
    worst = {"search": 0.0, "even": 0.0, "whole_layer": 0.0}
    if rivals.IS_INSTALLED:
        worst["metis"] = 0.0
    else:
        print("METIS is left out: pip install pymetis", flush=True)
    rack = load_cluster("rack-1g")
    for name in options.nets:
        for row, ratios in _compared(name, NETS[name], rack, options).items():
            rows[row] = {key: f"{value:.3f}" for key, value in ratios.items()}
            worst = {key: max(worst[key], ratios[f"/ {key}"]) for key in worst}
    measurement.show(f"on {rack.name}, load {measurement.load():.1f}", rows)
    figures |= {f"worst_over_{key}": value for key, value in worst.items()}
    measurement.conclude("planner", figures)


def order_of(
    graph: LayerGraph, cluster: Cluster, *, batch: int, search: bool = True
) -> PlanningRequest:
    costs = AnalyticCosts(cluster, batch=batch, single=single_sample(graph))
    return PlanningRequest(
        graph=graph, cluster=cluster, batch=batch, costs=costs, pins={}, search=search
    )


def choice_of(done: Planned) -> Choice | None:
    return done.solved.decoder.choice(done.best.placements)


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

    words = [
        [candidate.label for candidate in node.candidates] for node in done.solved.decoder.nodes
    ]
    starts = [choice for choice in (choice_of(done), done.solved.solution.choice) if choice]
    best = rivals.search(done.solved.problem, words, seconds_of, starts, tries=tries, seed=seed)
    return done.median / best


def _table(name: str, net: Net, cluster: Cluster, counts: Sequence[int]) -> dict[str, float]:
    begun = time.perf_counter()
    order = order_of(net.graph(), cluster, batch=net.batch)
    last = time.perf_counter()
    figures: dict[str, float] = {}
    rows = {}
    for done in each_plan(order, counts):
        # Some smaller numbers of machines are planned though not asked for: their time
        # counts as that of the next row.
        now = time.perf_counter()
        seconds, last = now - last, now
        rows[f"{done.n_machines}"] = {
            "used": f"{len(done.used)}",
            "step, s": f"{done.median:.4g}",
            "speed-up": f"{done.speed_up:.2f}",
            "over bound": f"{done.best.cost.step_seconds / done.lower_bound:.2f}",
            "by": done.best.method,
            "planned in, s": f"{seconds:.1f}",
        }
        figures[f"speed_up_{name}_{done.n_machines}"] = done.speed_up
        figures[f"seconds_last_{name}"] = seconds
    figures[f"seconds_table_{name}"] = last - begun
    measurement.show(f"{name} on {cluster.name}", rows)
    return figures


def _compared(
    name: str, net: Net, cluster: Cluster, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    graph = net.graph()
    order = order_of(graph, cluster, batch=net.batch)
    thorough = options.tries is not None
    few = FEW if thorough or len(graph.layers) <= LARGE else FEW[1:2]
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
        if rivals.IS_INSTALLED:
            ratios["/ metis"] = done.median / _metis_seconds(order, done)
        row = f"{name}, {done.n_machines}"
        rows[row] = ratios | {"speed-up": done.speed_up}
        shown = "  ".join(f"{key} {value:.4f}" for key, value in rows[row].items())
        print(f"{row:16} {shown}  {tries} tries, {done.best.method}", flush=True)
    return rows


def _metis_seconds(order: PlanningRequest, done: Planned) -> float:
    n_machines = done.n_machines
    cluster = order.cluster.first(n_machines)
    placed = rivals.metis(order.graph, cluster, batch=order.batch, costs=order.costs)
    return PlanSimulator(order).way("metis", placed, n_machines=n_machines).seconds[1]


def _speed_ups(figures: dict[str, float], name: str) -> dict[int, float]:
    start = f"speed_up_{name}_"
    return {
        int(key.removeprefix(start)): round(value, 6)
        for key, value in figures.items()
        if key.startswith(start)
    }


if __name__ == "__main__":
    main()
