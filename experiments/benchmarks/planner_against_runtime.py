"""Predicted against measured: does a step take as long as the planner says?

    python experiments/benchmarks/planner_against_runtime.py [--rounds 2] [--seconds 3]
        [--nets speech image] [--folder DIR [--limit 100] [--profiles 2]]

Two machines of one thread each on this host, joined by ZeroMQ; the speech net and the
image net, split in the ways of `ways`, bad ones too. Layers are measured here and now,
and so is what a message takes; then each plan is played through, and run, in turns.

    error_NET    mean of |predicted / measured - 1|
    rank_NET     Spearman's rank correlation of predicted and measured
    regret_NET   measured: the plan that the planner prefers / the fastest of all, - 1
    plans_NET    how many
    void_NET     turns that were taken again: others had the processors, or these were
                 slower, or faster, than when layers were measured (by the probe)
    drift_NET    the most by which one machine, the plan "one", took longer, or less
                 long, in one turn than in its middle one: what no plan is to blame for

In parts: with a folder, what has been found is kept there; with a limit, no turn begins
after so many seconds. The same command again goes on, until the figures are told. Not
only the first part measures layers and messages, and the medians are what predicts: a
machine that becomes slower does so for predictions and for steps.
"""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, cast, final

import msgspec
import torch
from scipy.stats import spearmanr

from distbelief.allocator import keep_memory
from distbelief.partition.planning import Order, played
from distbelief.partition.profiling import probing
from distbelief.partition.profiling.host import Network
from distbelief.program import plan as plans
from distbelief.program.plan import Plan
from experiments.benchmarks import measurement
from experiments.benchmarks.machines import (
    kept_network,
    merged,
    order_here,
    plan_of,
    replica,
)
from experiments.benchmarks.measurement import Spread
from experiments.benchmarks.ways import N_MACHINES, ways
from experiments.benchmarks.workload import NetName, Workload


PART: Final = "part-"
OTHERS_MAX: Final = 0.2
CHANGE_MAX: Final = 0.15
N_VOID_MAX: Final = 50
"""Of a turn that counts: processors that others may have, and by which share its probe
may take longer than when layers were measured, or those then than it. And so many turns
may not count."""

BATCH_SIZES: Final[Mapping[NetName, int]] = {"speech": 256, "image": 64}


@final
class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one plan: medians over its steps.

    Attributes:
        seconds: Of a step.
        cpu_seconds: Of all its processes.
        n_bytes: Of memory.
        others: Processors that others kept busy meanwhile.
        probe: Seconds of `probing`, just before or after, whichever took longer.
    """

    seconds: float
    cpu_seconds: float
    n_bytes: int
    others: float
    probe: float


@final
class Found(msgspec.Struct, kw_only=True):
    """What is known of one net.

    Attributes:
        turns: By the name of the way, whose plan lies beside this.
        parts: Numbers of the parts in which its layers were measured.
        probes: Seconds of `probing` when layers were measured, each time.
        n_void: Turns that did not count, for it was another machine then.
    """

    turns: dict[str, list[Turn]]
    parts: list[int]
    probes: list[float]
    n_void: int = 0

    def save(self, folder: Path) -> None:
        """Keep it."""
        path = folder / "found.json"
        path.with_suffix(".new").write_bytes(msgspec.json.encode(self))
        path.with_suffix(".new").replace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    began = time.monotonic()
    keep_memory()  # as machines do, and
    torch.set_num_threads(1)  # so: what is measured of layers depends on both
    figures: dict[str, float] = {}
    n_left = 0
    with ExitStack() as stack:
        folder = options.folder or Path(
            stack.enter_context(TemporaryDirectory(prefix="distbelief-against-"))
        )
        part = _next_part(folder)
        between = kept_network(part, seconds=options.seconds / 4)
        print(
            f"between machines {between.bandwidth / 1e9:.2f} GB/s, "
            f"{1e6 * (between.latency + between.message_overhead):.0f} us, "
            f"{1e6 * between.handling:.0f} us of a core at each end",
            flush=True,
        )
        for net in options.nets:
            found = _found(net, between, folder, part, options)
            until = began + options.limit
            n_left += _run(net, found, folder / net, options, until=until)
        for net in () if n_left else options.nets:
            figures |= _told(net, folder, options)
    if n_left:
        print(f"{n_left} turns are left: run this again")
    else:
        measurement.conclude("planner_against_runtime", figures)


def compared(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, float]:
    """Return how well predictions do: error, rank, regret, plans."""
    names = list(predicted)
    errors = [abs(predicted[name] / measured[name] - 1.0) for name in names]
    rank = spearmanr(
        [predicted[name] for name in names], [measured[name] for name in names]
    )
    preferred = min(names, key=lambda name: predicted[name])
    return {
        "error": sum(errors) / len(errors),
        "rank": float(cast("float", rank.statistic)),
        "regret": measured[preferred] / min(measured.values()) - 1.0,
        "plans": len(names),
    }


def predictions(order: Order, found: Mapping[str, Plan]) -> dict[str, float]:
    """Return the seconds of a step of each plan, as the planner plays it through."""
    return {
        name: played(
            order,
            plan.placements,
            n_machines=N_MACHINES,
            micro_batches=plan.micro_batches,
        ).step_seconds
        for name, plan in found.items()
    }


def _next_part(folder: Path) -> Path:
    """Return a cache of its own: what was measured before is measured again."""
    part = folder / f"{PART}{len(list(folder.glob(f'{PART}*')))}"
    part.mkdir(parents=True)
    os.environ["XDG_CACHE_HOME"] = str(part)
    return part


def _found(
    net: NetName,
    between: Network,
    folder: Path,
    part: Path,
    options: argparse.Namespace,
) -> Found:
    """Return what is known of a net; measure its layers, and plan if nobody has."""
    place = folder / net
    kept = place / "found.json"
    found = Found(turns={}, parts=[], probes=[])
    if kept.exists():
        found = msgspec.json.decode(kept.read_bytes(), type=Found)
    if found.turns and len(found.parts) >= options.profiles:
        return found
    place.mkdir(exist_ok=True)
    workload = _workload(net, options)
    order = order_here(workload, between, stages=True)
    found.parts.append(int(part.name.removeprefix(PART)))
    found.probes.append(probing.seconds())
    if not found.turns:
        for name, way in ways(order).items():
            plan_of(way, order, loss=workload.loss).save(_plan(place, name))
            found.turns[name] = []
    found.save(place)
    return found


def _lacking(found: Found, options: argparse.Namespace) -> list[str]:
    """Return whose turn it is, one after the other."""
    names = list(found.turns)
    return [
        name
        for index, name in enumerate(measurement.turns(names, n_rounds=options.rounds))
        if len(found.turns[name]) <= index // len(names)
    ]


def _run(
    net: NetName,
    found: Found,
    place: Path,
    options: argparse.Namespace,
    *,
    until: float,
) -> int:
    """Let plans take the turns that they lack; return how many are left."""
    workload = _workload(net, options)
    while lacking := _lacking(found, options):
        if time.monotonic() > until:
            return len(lacking)
        name = lacking[0]
        probe = probing.seconds()
        # Not all at once: that would take too much memory.
        with TemporaryDirectory(prefix="distbelief-against-") as folder:
            plan = plans.load(_plan(place, name))
            crew = replica(name, plan, workload=workload, folder=Path(folder))
            with crew:
                crew.turn(seconds=options.seconds)
        turn = Turn(
            seconds=crew.step.median,
            cpu_seconds=crew.cpu_seconds[-1],
            n_bytes=crew.n_bytes,
            others=crew.others[-1],
            probe=max(probe, probing.seconds()),
        )
        if _is_void(turn, found) and found.n_void < N_VOID_MAX:
            found.n_void += 1
        else:
            found.turns[name].append(turn)
        found.save(place)
    return 0


def _is_void(turn: Turn, found: Found) -> bool:
    """Return whether it was another machine than the one that was measured."""
    then, now = median(found.probes), turn.probe
    changes = max(now / then, then / now) > 1.0 + CHANGE_MAX
    return turn.others > OTHERS_MAX or changes


def _told(net: NetName, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Print what was found of a net; return its figures."""
    place = folder / net
    found = msgspec.json.decode((place / "found.json").read_bytes(), type=Found)
    predicted = _predicted(net, found, folder, options)
    taken = {
        name: Spread.of([1e3 * turn.seconds for turn in turns])
        for name, turns in found.turns.items()
    }
    rows = {
        name: {
            "predicted, ms": f"{1e3 * predicted[name]:.1f}",
            "step, ms": taken[name].show(),
            "predicted / measured": f"{1e3 * predicted[name] / taken[name].median:.3f}",
            "CPU ms": f"{1e3 * min(t.cpu_seconds for t in found.turns[name]):.0f}",
            "memory": f"{max(t.n_bytes for t in found.turns[name]) / 2**20:,.0f} MiB",
            "probe": f"{1e3 * max(turn.probe for turn in found.turns[name]):.2f}",
            "others": f"{max(turn.others for turn in found.turns[name]):.2f}",
        }
        for name in sorted(taken, key=lambda name: taken[name].median)
    }
    measurement.show(f"{net}, load {measurement.load():.1f}", rows)
    measured = {name: spread.median / 1e3 for name, spread in taken.items()}
    one = taken["one"]
    figures = {
        **compared(predicted, measured),
        "void": found.n_void,
        "drift": max(one.high / one.median, one.median / one.low) - 1.0,
    }
    return {f"{key}_{net}": value for key, value in figures.items()}


def _predicted(
    net: NetName, found: Found, folder: Path, options: argparse.Namespace
) -> dict[str, float]:
    """Return what the planner expects of each plan by the medians of all parts."""
    parts = [folder / f"{PART}{number}" for number in found.parts]
    between = [kept_network(part, seconds=0.0) for part in parts]
    place = folder / net
    os.environ["XDG_CACHE_HOME"] = str(place)
    merged(parts)
    network = Network(*(median(figures) for figures in zip(*between, strict=True)))
    order = order_here(_workload(net, options), network, stages=True)
    return predictions(
        order, {name: plans.load(_plan(place, name)) for name in found.turns}
    )


def _plan(place: Path, name: str) -> Path:
    return place / f"{name.replace(' ', '_')}.plan.json"


def _workload(net: NetName, options: argparse.Namespace) -> Workload:
    small: bool = options.small
    return Workload(net=net, batch_size=8 if small else BATCH_SIZES[net], small=small)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=2, help="turns of each")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a turn")
    parser.add_argument(
        "--nets", nargs="+", default=list(BATCH_SIZES), choices=list(BATCH_SIZES)
    )
    parser.add_argument("--folder", type=Path, help="keep there what is found; go on")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds to begin turns in"
    )
    parser.add_argument(
        "--profiles", type=int, default=2, help="parts that measure layers"
    )
    parser.add_argument("--small", action="store_true", help="tiny nets, for a look")
    options = parser.parse_args(arguments)
    if options.limit < float("inf") and options.folder is None:
        parser.error("a --limit needs a --folder, or what was found is lost")
    return options


if __name__ == "__main__":
    main()
