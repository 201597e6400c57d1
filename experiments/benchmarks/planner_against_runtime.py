"""Predicted against measured: does a step take as long as the planner says?

    python experiments/benchmarks/planner_against_runtime.py [--rounds 6] [--steps 2]
        [--limit 300] [--nets speech image] [--folder DIR] [--small]

Two machines of one thread each on this host, each on a core of its own, joined by
ZeroMQ; the speech net and the image net, split in the ways of `ways`, bad ones too.
Layers are measured here and now, and so is what a message takes; then each plan is
played through, and run, in turns of a few steps, all plans once a round.

    error_NET    mean of |predicted / measured - 1|
    rank_NET     Spearman's rank correlation of predicted and measured
    regret_NET   measured: the plan that the planner prefers / the fastest of all, - 1.
                 In turns of their own: of many that are alike, one is fastest by luck
    plans_NET    how many
    void_NET     turns that do not count: others had the processors, or the machine
                 became slower or faster meanwhile

A shared host changes its speed by a third within minutes. So whole layers are measured again before
and after each turn, in one process and in as many at once as the plan has machines (`pace`):
predictions are by the profile at that pace, and measured seconds that are compared are brought to
the profile's pace. All plans are run by the same two processes, and the median over turns counts.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Final, Self, cast

import msgspec
import torch
from msgspec.structs import replace
from scipy.stats import spearmanr

from distbelief.core.memory import keep_memory
from distbelief.plans.plan import Plan
from distbelief.plans.planner.profile import WHOLE, Profile, Slices
from distbelief.plans.planner.profiling.layer_timer import profiled
from distbelief.plans.planner.search import PlanningRequest, PlanSimulator, SimulatedPlan
from distbelief.plans.step_cost import StepCost
from experiments.benchmarks.measuring import measurement, workers
from experiments.benchmarks.measuring.workload import NetName, Workload
from experiments.benchmarks.plans.machines import kept_network, machines, order_by, plan_of, ways


# Seconds of the forward and backward pass of whole layers, by key
Pace = dict[str, tuple[float, float]]


class Paces(msgspec.Struct, frozen=True, kw_only=True):
    alone: Pace  # of a process while no other measures
    together: Pace  # of all of them at once

    @property
    def seconds(self) -> float:
        return sum(sum(passes) for pace in (self.alone, self.together) for passes in pace.values())

    def at(self, overlap: float) -> Pace:
        """Return the pace of a machine that computes this share while others compute as well."""
        return {
            key: (
                overlap * both[0] + (1.0 - overlap) * self.alone[key][0],
                overlap * both[1] + (1.0 - overlap) * self.alone[key][1],
            )
            for key, both in self.together.items()
            if key in self.alone
        }


def mean_pace(paces: Sequence[Pace]) -> Pace:
    return {
        key: (fmean(pace[key][0] for pace in paces), fmean(pace[key][1] for pace in paces))
        for key in set(paces[0]).intersection(*paces[1:])
    }


def at_pace(profile: Profile, pace: Pace) -> Profile:
    layers: dict[str, Mapping[str, Slices]] = dict(profile.layers)
    for key, (forward, backward) in pace.items():
        if key in layers:
            whole = layers[key][WHOLE]
            factors = _ratio(forward, whole.forward), _ratio(backward, whole.backward)
            layers[key] = {
                word: replace(
                    slices,
                    forward=tuple(factors[0] * seconds for seconds in slices.forward),
                    backward=tuple(factors[1] * seconds for seconds in slices.backward),
                )
                for word, slices in layers[key].items()
            }
    return replace(profile, layers=layers)


def _ratio(now: float, then: Sequence[float]) -> float:
    return now / then[-1] if then[-1] else 1.0


def overlap(price: StepCost) -> float:
    """Return which share of a plan's computing is done while other machines compute as well.

    They share memory and caches of this host: two layers at once take longer each.
    """
    n_tasks, found = price.simulated.n_tasks, price.simulated
    begins = [(float(begin), 1) for begin in found.starts[:n_tasks]]
    ends = [(float(end), -1) for end in found.ends[:n_tasks]]
    every = shared = last = 0.0
    n_computing = 0
    for at, change in sorted(begins + ends):
        computed = n_computing * (at - last)
        every += computed
        shared += computed if n_computing > 1 else 0.0
        n_computing, last = n_computing + change, at
    return shared / every if every else 0.0


# Of a turn that counts:
OTHERS_MAX: Final = 0.2  # processors that others may have
CHANGE_MAX: Final = 0.35  # share by which layers may become slower or faster meanwhile


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    plan: str  # its name
    seconds: float  # of a step, the median of those after the first
    cpu_seconds: float  # of all its processes, per step
    others: float  # processors that others kept busy meanwhile
    before: Paces  # how fast the machine was just before
    after: Paces  # and just after

    @property
    def is_void(self) -> bool:
        """Whether the machine was not alone, or another one before than after."""
        before, after = self.before.seconds, self.after.seconds
        changes = max(before / after, after / before) > 1.0 + CHANGE_MAX
        return self.others > OTHERS_MAX or changes

    def pace(self, overlap: float) -> Pace:
        return mean_pace([self.before.at(overlap), self.after.at(overlap)])


def counting(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns that count: all of a plan, if none of them does."""
    alone = {turn.plan for turn in turns if not turn.is_void}
    return [turn for turn in turns if not turn.is_void or turn.plan not in alone]


class Plans:
    """Machines that take turns by several plans; a context manager."""

    def __init__(self, workload: Workload, plans: Mapping[str, Plan], folder: Path) -> None:
        self._needed = {name: plan.cluster.n_machines for name, plan in plans.items()}
        self._machines = machines("machines", plans, workload=workload, folder=folder)
        self._n_paces = 0
        self._last: tuple[int, Paces] | None = None  # machines, and their last pace

    def __enter__(self) -> Self:
        self._machines.__enter__()
        self._machines.bind()
        return self

    def __exit__(self, *_error: object) -> None:
        self._machines.end()

    def steps(self, plan: str, *, n_steps: int) -> workers.Turn:
        """Take so many steps by a plan, beside the first, which warms up."""
        taken = self._machines.turn(n_steps=1 + n_steps, request=lambda n: (plan, n))
        return taken._replace(steps=taken.steps[1:])

    def rounds(self, *, n_rounds: int, n_steps: int, seconds_max: float) -> Iterator[Turn]:
        """Yield the turns of all plans, one of each a round; after `seconds_max` no other round."""
        until = time.monotonic() + seconds_max
        plans = list(self._needed)
        for index, plan in enumerate(measurement.turns(plans, n_rounds=n_rounds)):
            if index and index % len(plans) == 0 and time.monotonic() > until:
                return
            yield self._turn(plan, n_steps=n_steps)

    def _turn(self, plan: str, *, n_steps: int) -> Turn:
        n_machines = self._needed[plan]
        last, self._last = self._last, None
        before = last[1] if last and last[0] == n_machines else self.paces(n_machines)
        taken = self.steps(plan, n_steps=n_steps)
        after = self.paces(n_machines)
        self._last = n_machines, after
        return Turn(
            plan=plan,
            seconds=taken.seconds,
            cpu_seconds=taken.cpu_seconds,
            others=taken.others,
            before=before,
            after=after,
        )

    def paces(self, n_machines: int) -> Paces:
        """Measure all layers: on one of so many machines, then on all at once.

        Which one it is changes from time to time: cores are not all as fast.
        """
        self._n_paces += 1
        alone = self._layers([self._n_paces % n_machines])
        if n_machines == 1:
            return Paces(alone=alone, together=alone)
        return Paces(alone=alone, together=self._layers(range(n_machines)))

    def _layers(self, of: Sequence[int]) -> Pace:
        return mean_pace(self._machines.ask(None, of=of))


N_FINALISTS: Final = 3  # the plan that is preferred and the fastest others, until there are so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    predicted: dict[str, float]  # by the profile
    brought: dict[str, float]  # measured, as they would have been at the profile's pace

    @property
    def preferred(self) -> str:
        return min(self.predicted, key=self.predicted.__getitem__)

    @property
    def finalists(self) -> list[str]:
        others = sorted(self.brought, key=self.brought.__getitem__)
        return list(dict.fromkeys([self.preferred, *others]))[:N_FINALISTS]


def compared(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    taken = [measured[name] for name in predicted]
    pairs = list(zip(predicted.values(), taken, strict=True))
    rank = cast("float", spearmanr(list(predicted.values()), taken).statistic)
    return {"error": fmean(abs(one / other - 1.0) for one, other in pairs), "rank": float(rank)}


def regret(preferred: str, final: Mapping[str, Sequence[float]]) -> float:
    """Return by which share the preferred plan is slower than the fastest one."""
    return median(final[preferred]) / min(map(median, final.values())) - 1.0


def verdict(
    turns: Sequence[Turn],
    plans: Mapping[str, Plan],
    profile: Profile,
    order_by: Callable[[Profile], PlanningRequest],
) -> Verdict:
    found = simulated(order_by(profile), plans)
    predicted = {name: way.seconds[1] for name, way in found.items()}
    shared = {name: overlap(way.cost) for name, way in found.items()}
    brought: dict[str, list[float]] = {name: [] for name in plans}
    for turn in turns:
        name = turn.plan
        order = order_by(at_pace(profile, turn.pace(shared[name])))
        then = simulated(order, {name: plans[name]})[name].seconds[1]
        brought[name].append(turn.seconds * predicted[name] / then)
    return Verdict(predicted=predicted, brought={name: median(brought[name]) for name in brought})


def simulated(order: PlanningRequest, plans: Mapping[str, Plan]) -> dict[str, SimulatedPlan]:
    player = PlanSimulator(order)
    found: dict[str, SimulatedPlan] = {}
    for name, plan in plans.items():
        n_machines, micro_batches = plan.cluster.n_machines, plan.micro_batches
        found[name] = player.way(
            name, plan.placements, n_machines=n_machines, micro_batches=micro_batches
        )
    return found


N_FINAL_ROUNDS: Final = 6  # how often the finalists meet again
SMALL: Final = {"rounds": 1, "steps": 1, "nets": ("speech",)}  # of tiny nets
_NETWORK_SECONDS: Final = 0.5
BATCH_SIZES: Final[Mapping[NetName, int]] = {"speech": 256, "image": 64}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each plan")
    parser.add_argument("--steps", type=int, default=2, help="of a turn that count")
    limit = "seconds after which no other round begins; a net takes two minutes more"
    parser.add_argument("--limit", type=float, default=300.0, help=limit)
    parser.add_argument("--nets", nargs="+", default=list(BATCH_SIZES), choices=list(BATCH_SIZES))
    parser.add_argument("--folder", type=Path, help="keep what was measured there")
    options = measurement.options_of(parser, arguments, small=SMALL)
    keep_memory()  # as machines do, and
    torch.set_num_threads(1)  # so: what is measured of layers depends on both
    figures: dict[str, float] = {}
    for net in options.nets:
        with TemporaryDirectory(prefix="distbelief-against-") as folder:
            figures |= _figures(net, (options.folder or Path(folder)) / net, options)
    measurement.conclude("planner_against_runtime", figures)


def _figures(net: NetName, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    folder.mkdir(parents=True)
    os.environ["XDG_CACHE_HOME"] = str(folder)  # what was measured before is not used
    small: bool = options.small
    workload = Workload(net=net, batch_size=8 if small else BATCH_SIZES[net], small=small)
    between = kept_network(folder, seconds=_NETWORK_SECONDS)
    print(
        f"between machines {between.bandwidth / 1e9:.2f} GB/s, "
        f"{1e6 * (between.latency + between.message_overhead):.0f} us, "
        f"{1e6 * between.handling:.0f} us of a core at each end",
        flush=True,
    )
    profile = profiled(workload.graph(), batch=workload.batch_size)
    order_of = partial(order_by, workload=workload, between=between, stages=True)
    order = order_of(profile)
    plans = {name: plan_of(way, order, loss=workload.loss) for name, way in ways(order).items()}
    with Plans(workload, plans, folder) as machines:
        every: list[Turn] = []
        for turn in machines.rounds(
            n_rounds=options.rounds, n_steps=options.steps, seconds_max=options.limit
        ):
            every.append(turn)
            (folder / "turns.json").write_bytes(msgspec.json.encode(every))
        turns = counting(every)
        found = verdict(turns, plans, profile, order_of)

        def seconds(name: str) -> float:
            return machines.steps(name, n_steps=options.steps).seconds

        final = measurement.interleaved(
            {name: partial(seconds, name) for name in found.finalists}, n_rounds=N_FINAL_ROUNDS
        )
    rows = {
        name: _row(name, found, turns, final)
        for name in sorted(found.brought, key=found.brought.__getitem__)
    }
    measurement.show(f"{net}, load {measurement.load():.1f}", rows)
    found_figures = {
        **compared(found.predicted, found.brought),
        "regret": regret(found.preferred, final),
        "plans": len(plans),
        "void": len(every) - len(turns),
    }
    return {f"{key}_{net}": value for key, value in found_figures.items()}


def _row(
    name: str, found: Verdict, turns: Sequence[Turn], final: Mapping[str, Sequence[float]]
) -> dict[str, str]:
    own = [turn for turn in turns if turn.plan == name]
    predicted, brought = found.predicted[name], found.brought[name]
    return {
        "predicted, ms": f"{1e3 * predicted:.0f}",
        "step, ms": measurement.Spread.of([1e3 * turn.seconds for turn in own]).show(0),
        "at the profile's pace": f"{1e3 * brought:.0f}",
        "predicted / that": f"{predicted / brought:.3f}",
        "again, ms": f"{1e3 * median(final[name]):.0f}" if name in final else "",
        "CPU ms": f"{1e3 * median(turn.cpu_seconds for turn in own):.0f}",
        "others": f"{max(turn.others for turn in own):.2f}",
    }


if __name__ == "__main__":
    main()
