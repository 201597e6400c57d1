"""Figure 3: how much faster a step of one replica is on several machines, of four nets.

    python -m experiments.figures.speedup [--only NAME]

From the planner: the best plan that it finds for cluster commodity-2012 with up to so
many machines, and every layer cut evenly over all of them; at the median of the
machines' jitter. What was planned is kept in
experiments/figures/results.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, final

import msgspec
import torch

from distbelief.partition.costs import AnalyticCosts, single_sample
from distbelief.partition.planning import Order, plan
from distbelief.program.cluster_file import load_cluster
from experiments.benchmarks.nets import IMAGES, SPEECH, Net
from experiments.figures.results import RESULTS
from experiments.images.model import paper_net


COUNTS: Final = (1, 2, 4, 8, 16, 32, 81, 128)

NETS: Final[dict[str, Net]] = {
    "speech 42M": SPEECH,
    "images 80M": replace(IMAGES, make=lambda: paper_net("80M")),
    "images 330M": replace(IMAGES, make=lambda: paper_net("330M")),
    "images 1.7B": IMAGES,
}


@final
class SpeedUp(msgspec.Struct, frozen=True, kw_only=True):
    """One net on so many machines.

    Attributes:
        net: Its name.
        machines: That there are.
        used: That the plan uses.
        seconds: Of a step: tenth, median, ninetieth of its draws of jitter.
        speed_up: Of the median, over that of one machine.
        even: Of every layer cut evenly over all machines, likewise.
    """

    net: str
    machines: int
    used: int
    seconds: tuple[float, float, float]
    speed_up: float
    even: float


def speed_ups(name: str) -> list[SpeedUp]:
    """Return a net's speed-ups; what was planned before is read from its file."""
    path = RESULTS / f"speedup-{name.replace(' ', '-')}.json"
    if path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=list[SpeedUp])
    net, cluster = NETS[name], load_cluster("commodity-2012")
    graph = net.graph()
    costs = AnalyticCosts(cluster, batch=net.batch, single=single_sample(graph))
    order = Order(
        graph=graph,
        cluster=cluster,
        batch=net.batch,
        costs=costs,
        pins={},
        search=True,
    )
    found = [
        SpeedUp(
            net=name,
            machines=done.forecast.n_machines,
            used=len(done.forecast.used),
            seconds=done.forecast.seconds,
            speed_up=done.forecast.speed_up,
            even=done.forecast.one_machine_seconds
            / done.baselines.get("even", done.forecast.one_machine_seconds),
        )
        for done in plan(order, COUNTS)
    ]
    RESULTS.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan what is missing, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", help="part of a net's name")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found: list[SpeedUp] = []
    for name in NETS:
        if options.only and options.only not in name:
            continue
        found += speed_ups(name)
        for each in found[-len(COUNTS) :]:
            print(
                f"{each.net:12} {each.machines:4} machines, {each.used:3} used: "
                f"{each.seconds[1]:.4g} s, {each.speed_up:.2f}x, "
                f"evenly {each.even:.2f}x",
                flush=True,
            )
    from experiments.figures.drawing import draw_speed_up  # noqa: PLC0415 -- slow

    draw_speed_up(found)


if __name__ == "__main__":
    main()
