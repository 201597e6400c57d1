"""Predicted against measured: does a step take as long as the planner says?

    python experiments/benchmarks/planner_against_runtime.py [--rounds 2] [--seconds 2]
        [--nets speech image] [--folder DIR [--limit 100] [--profiles 2]]

Two machines of one thread each on this host, joined by ZeroMQ; the speech net and the
image net, split in the ways of `ways`, bad ones too. Layers are measured here and now,
and so is what a message takes; then each plan is played through, and run, in turns.

    error_NET    mean of |predicted / measured - 1|
    rank_NET     Spearman's rank correlation of predicted and measured
    regret_NET   measured: the plan that the planner prefers / the fastest of all, - 1.
                 In turns of their own: of many that are alike, one is fastest by luck
    plans_NET    how many
    void_NET     turns that were taken again: others had the processors, or the machine
                 became slower or faster meanwhile
    slower_NET   layers during turns / layers in the profile, the median
    drift_NET    the largest of that over the smallest, - 1
    raw_error_NET, raw_rank_NET    the same with predictions by the profile as it is

A host that is shared changes its speed by a third within minutes, and a prediction is
no better than its profile is new. So whole layers are measured again just before and
after each turn, in as many processes at once as the plan has machines (`pace`); each
prediction is by the profile at that pace, and measured seconds that are compared with
each other are brought to the profile's pace likewise.

In parts: with a folder, what has been found is kept there; with a limit, no turn begins
after so many seconds. The same command again goes on, until the figures are told. Not
only the first part measures layers and messages: their medians predict.
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
from distbelief.partition.planning import Order, player_of
from distbelief.partition.profiling.host import Network
from distbelief.partition.profiling.profile import load, this_host
from distbelief.program import plan as plans
from distbelief.program.plan import Plan
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.measurement import Spread
from experiments.benchmarks.measuring.workload import NetName, Workload
from experiments.benchmarks.plans.machines import (
    kept_network,
    merged,
    order_by,
    order_here,
    plan_of,
    replica,
)
from experiments.benchmarks.plans.pace import (
    Pace,
    Pacemaker,
    at_pace,
    mean_pace,
    slower,
)
from experiments.benchmarks.plans.ways import N_MACHINES, ways


PART: Final = "part-"
OTHERS_MAX: Final = 0.2
CHANGE_MAX: Final = 0.35
N_VOID_MAX: Final = 20
"""Of a turn that counts: processors that others may have, and by which share layers may
become slower or faster meanwhile. And so many turns may not count."""

N_FINALISTS: Final = 3
N_FINAL_ROUNDS: Final = 4
"""The plan that is preferred and the fastest others, until there are so many, meet
again: how often."""

BATCH_SIZES: Final[Mapping[NetName, int]] = {"speech": 256, "image": 64}


@final
class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one plan: medians over its steps.

    Attributes:
        seconds: Of a step.
        cpu_seconds: Of all its processes.
        n_bytes: Of memory.
        others: Processors that others kept busy meanwhile.
        before: The machine's pace just before.
        after: And just after.
    """

    seconds: float
    cpu_seconds: float
    n_bytes: int
    others: float
    before: Pace
    after: Pace

    @property
    def pace(self) -> Pace:
        """The machine's during the turn, as well as can be told."""
        return mean_pace([self.before, self.after])


@final
class Found(msgspec.Struct, kw_only=True):
    """What is known of one net.

    Attributes:
        turns: By the name of the way, whose plan lies beside this.
        parts: Numbers of the parts in which its layers were measured.
        n_void: Turns that did not count, for it was another machine then.
        final: Seconds of a step of those who met again.
    """

    turns: dict[str, list[Turn]]
    parts: list[int]
    n_void: int = 0
    final: dict[str, list[float]] = {}

    def save(self, folder: Path) -> None:
        """Keep it."""
        path = folder / "found.json"
        path.with_suffix(".new").write_bytes(msgspec.json.encode(self))
        path.with_suffix(".new").replace(path)


@final
class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step of each plan.

    Attributes:
        predicted: By the profile.
        measured: As taken, in the middle.
        brought: As they would have been at the profile's pace, in the middle.
        slower: Layers during each turn / in the profile.
    """

    predicted: dict[str, float]
    measured: dict[str, float]
    brought: dict[str, float]
    slower: list[float]


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
            n_left += _meet_again(net, folder, options, until=began + options.limit)
        for net in () if n_left else options.nets:
            figures |= _told(net, folder, options)
    if n_left:
        print(f"{n_left} turns are left: run this again")
    else:
        measurement.conclude("planner_against_runtime", figures)


def compared(
    predicted: Mapping[str, float], measured: Mapping[str, float]
) -> dict[str, float]:
    """Return how well predictions do: error, rank."""
    names = list(predicted)
    errors = [abs(predicted[name] / measured[name] - 1.0) for name in names]
    rank = spearmanr(
        [predicted[name] for name in names], [measured[name] for name in names]
    )
    return {
        "error": sum(errors) / len(errors),
        "rank": float(cast("float", rank.statistic)),
    }


def finalists(judged: Judged) -> list[str]:
    """Return the plan that is preferred, and the fastest others."""
    preferred = min(judged.predicted, key=judged.predicted.__getitem__)
    others = sorted(judged.brought, key=judged.brought.__getitem__)
    return list(dict.fromkeys([preferred, *others]))[:N_FINALISTS]


def regret(judged: Judged, final: Mapping[str, Sequence[float]]) -> float:
    """Return by which share the preferred plan is slower than the fastest one."""
    preferred = finalists(judged)[0]
    return median(final[preferred]) / min(map(median, final.values())) - 1.0


def predictions(order: Order, found: Mapping[str, Plan]) -> dict[str, float]:
    """Return the seconds of a step of each plan, as the planner would print them."""
    player = player_of(order)
    return {
        name: player.way(
            name,
            plan.placements,
            n_machines=plan.cluster.n_machines,
            micro_batches=plan.micro_batches,
        ).seconds[1]
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
    found = Found(turns={}, parts=[])
    if kept.exists():
        found = msgspec.json.decode(kept.read_bytes(), type=Found)
    if found.turns and len(found.parts) >= options.profiles:
        return found
    place.mkdir(exist_ok=True)
    workload = _workload(net, options)
    order = order_here(workload, between, stages=True)
    found.parts.append(int(part.name.removeprefix(PART)))
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
    if not _lacking(found, options):
        return 0
    workload = _workload(net, options)
    with Pacemaker(workload, N_MACHINES, place) as pacemaker:
        paces: dict[int, Pace] = {}  # by machines, the last
        while lacking := _lacking(found, options):
            if time.monotonic() > until:
                return len(lacking)
            name = lacking[0]
            plan = plans.load(_plan(place, name))
            n = plan.cluster.n_machines
            before = paces.pop(n, None) or pacemaker.measure(n)
            # Not all at once: that would take too much memory.
            with TemporaryDirectory(prefix="distbelief-against-") as folder:
                crew = replica(name, plan, workload=workload, folder=Path(folder))
                with crew:
                    crew.turn(seconds=options.seconds)
            after = pacemaker.measure(n)
            paces = {n: after}
            turn = Turn(
                seconds=crew.step.median,
                cpu_seconds=crew.cpu_seconds[-1],
                n_bytes=crew.n_bytes,
                others=crew.others[-1],
                before=before,
                after=after,
            )
            n_void_max = 0 if options.small else N_VOID_MAX
            if is_void(turn) and found.n_void < n_void_max:
                found.n_void += 1
            else:
                found.turns[name].append(turn)
            found.save(place)
    return 0


def is_void(turn: Turn) -> bool:
    """Return whether the machine was not alone, or another one before than after."""
    before, after = (
        sum(sum(seconds) for seconds in pace.values())
        for pace in (turn.before, turn.after)
    )
    changes = max(before / after, after / before) > 1.0 + CHANGE_MAX
    return turn.others > OTHERS_MAX or changes


def _meet_again(
    net: NetName, folder: Path, options: argparse.Namespace, *, until: float
) -> int:
    """Let finalists take turns, all of them alive, if they have not yet.

    Returns:
        How many turns are left, if it is too late.
    """
    place = folder / net
    found = _kept(place)
    names = finalists(_judged(net, found, folder, options))
    workload = _workload(net, options)
    if set(names) == found.final.keys():
        return 0
    if time.monotonic() > until:
        return N_FINAL_ROUNDS * len(names)
    with TemporaryDirectory(prefix="distbelief-against-") as name, ExitStack() as stack:
        crews = {
            each: stack.enter_context(
                replica(
                    each,
                    plans.load(_plan(place, each)),
                    workload=workload,
                    folder=Path(name),
                )
            )
            for each in names
        }
        for each in measurement.turns(names, n_rounds=N_FINAL_ROUNDS):
            crews[each].turn(seconds=options.seconds)
        found.final = {each: crew.seconds for each, crew in crews.items()}
    found.save(place)
    return 0


def _kept(place: Path) -> Found:
    return msgspec.json.decode((place / "found.json").read_bytes(), type=Found)


def _told(net: NetName, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Print what was found of a net; return its figures."""
    found = _kept(folder / net)
    judged = _judged(net, found, folder, options)
    rows = {name: _row(name, judged, found) for name in _by_seconds(judged.brought)}
    measurement.show(f"{net}, load {measurement.load():.1f}", rows)
    figures = {
        **compared(judged.predicted, judged.brought),
        "regret": regret(judged, found.final),
        "plans": len(rows),
        "void": found.n_void,
        "slower": median(judged.slower),
        "drift": max(judged.slower) / min(judged.slower) - 1.0,
        **{
            f"raw_{key}": value
            for key, value in compared(judged.predicted, judged.measured).items()
        },
    }
    return {f"{key}_{net}": value for key, value in figures.items()}


def _by_seconds(seconds: Mapping[str, float]) -> list[str]:
    return sorted(seconds, key=seconds.__getitem__)


def _row(name: str, judged: Judged, found: Found) -> dict[str, str]:
    turns = found.turns[name]
    predicted, brought = judged.predicted[name], judged.brought[name]
    again = found.final.get(name)
    return {
        "predicted, ms": f"{1e3 * predicted:.0f}",
        "step, ms": Spread.of([1e3 * turn.seconds for turn in turns]).show(0),
        "at the profile's pace": f"{1e3 * brought:.0f}",
        "predicted / that": f"{predicted / brought:.3f}",
        "again, ms": f"{1e3 * median(again):.0f}" if again else "",
        "CPU ms": f"{1e3 * min(turn.cpu_seconds for turn in turns):.0f}",
        "MiB": f"{max(turn.n_bytes for turn in turns) / 2**20:,.0f}",
        "others": f"{max(turn.others for turn in turns):.2f}",
    }


def _judged(
    net: NetName, found: Found, folder: Path, options: argparse.Namespace
) -> Judged:
    """Return what the planner expects of each plan by the medians of all parts."""
    parts = [folder / f"{PART}{number}" for number in found.parts]
    between = [kept_network(part, seconds=0.0) for part in parts]
    place = folder / net
    os.environ["XDG_CACHE_HOME"] = str(place)
    merged(parts)
    profile = load(this_host())
    assert profile is not None
    network = Network(*(median(figures) for figures in zip(*between, strict=True)))
    workload = _workload(net, options)
    ways = {name: plans.load(_plan(place, name)) for name in found.turns}
    predicted = predictions(order_by(profile, workload, network, stages=True), ways)
    brought: dict[str, float] = {}
    for name, turns in found.turns.items():
        then = []
        for turn in turns:
            at = at_pace(profile, turn.pace)
            order = order_by(at, workload, network, stages=True)
            expected = predictions(order, {name: ways[name]})[name]
            then.append(turn.seconds * predicted[name] / expected)
        brought[name] = median(then)
    return Judged(
        predicted=predicted,
        measured={
            name: median(turn.seconds for turn in turns)
            for name, turns in found.turns.items()
        },
        brought=brought,
        slower=[
            slower(profile, turn.pace)
            for turns in found.turns.values()
            for turn in turns
        ],
    )


def _plan(place: Path, name: str) -> Path:
    return place / f"{name.replace(' ', '_')}.plan.json"


def _workload(net: NetName, options: argparse.Namespace) -> Workload:
    small: bool = options.small
    return Workload(net=net, batch_size=8 if small else BATCH_SIZES[net], small=small)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=2, help="turns of each")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
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
