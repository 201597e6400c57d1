"""How much faster a step of one replica is on several machines: planned, and kept.

From the planner: the best plan that it finds for cluster commodity-2012 with up to so many
machines, and every layer cut evenly over all of them; at the median of the machines' jitter.
"""

from dataclasses import replace
from typing import Final

import msgspec

from distbelief.plans.cluster_file import load_cluster
from distbelief.plans.planner.planner import plan
from experiments.benchmarks.plans.nets import IMAGES, SPEECH, Net
from experiments.figures.results import RESULTS
from experiments.images.model import paper_net


COUNTS: Final = (1, 2, 4, 8, 16, 32, 81, 128)

NETS: Final[dict[str, Net]] = {
    "speech 42M": SPEECH,
    "images 80M": replace(IMAGES, make=lambda: paper_net("80M")),
    "images 330M": replace(IMAGES, make=lambda: paper_net("330M")),
    "images 1.7B": IMAGES,
}


class SpeedUp(msgspec.Struct, frozen=True, kw_only=True):
    net: str  # its name
    machines: int  # that there are
    used: int  # that the plan uses
    # of a step: tenth, median, ninetieth of its draws of jitter
    seconds: tuple[float, float, float]
    speed_up: float  # of the median, over that of one machine
    even: float  # of every layer cut evenly over all machines, likewise


def speed_ups(name: str) -> list[SpeedUp]:
    """Return a net's speed-ups; what was planned before is read from its file."""
    path = RESULTS / f"speedup-{name.replace(' ', '-')}.json"
    if path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=list[SpeedUp])
    order = NETS[name].order(load_cluster("commodity-2012"))
    found = [
        SpeedUp(
            net=name,
            machines=done.n_machines,
            used=len(done.used),
            seconds=done.best.seconds,
            speed_up=done.speed_up,
            even=done.one_machine_seconds / done.baselines.get("even", done.one_machine_seconds),
        )
        for done in plan(order, COUNTS)
    ]
    RESULTS.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return found
