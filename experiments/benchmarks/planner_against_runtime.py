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
    slower_NET   layers during turns / layers in the profile, the median
    drift_NET    the largest of that over the smallest, - 1
    raw_error_NET, raw_rank_NET    the same with predictions by the profile as it is

A host that is shared changes its speed by a third within minutes, and a prediction is no better
than its profile is new. So whole layers are measured again just before and after each turn, in one
process and in as many at once as the plan has machines (`pace`); each prediction is by the profile
at that pace, and measured seconds that are compared with each other are brought to the profile's
pace likewise. And so all plans are known to the same two processes (`turn`), and of each the median
over its turns counts: one turn in a process of its own says more of that minute than of the plan.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import torch

from distbelief.core.memory import keep_memory
from distbelief.partition.profiling.layer_timer import profiled
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.measurement import Spread
from experiments.benchmarks.measuring.workload import NetName, Workload
from experiments.benchmarks.plans.machines import kept_network, order_by, plan_of, ways
from experiments.benchmarks.plans.turns import (
    Plans,
    Turn,
    Verdict,
    compared,
    counting,
    regret,
    verdict,
)


N_FINAL_ROUNDS: Final = 6  # how often the finalists meet again

SMALL: Final = {"rounds": 1, "steps": 1, "nets": ("speech",)}  # of tiny nets

_NETWORK_SECONDS: Final = 0.5

BATCH_SIZES: Final[Mapping[NetName, int]] = {"speech": 256, "image": 64}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each plan")
    parser.add_argument("--steps", type=int, default=2, help="of a turn that count")
    parser.add_argument(
        "--limit",
        type=float,
        default=300.0,
        help="seconds after which no other round begins; a net takes two minutes more",
    )
    parser.add_argument("--nets", nargs="+", default=list(BATCH_SIZES), choices=list(BATCH_SIZES))
    parser.add_argument("--folder", type=Path, help="keep what was measured there")
    options = measurement.options_of(parser, arguments, small=SMALL)
    keep_memory()  # as machines do, and
    torch.set_num_threads(1)  # so: what is measured of layers depends on both
    figures: dict[str, float] = {}
    for net in options.nets:
        with ExitStack() as stack:
            folder = options.folder or Path(
                stack.enter_context(TemporaryDirectory(prefix="distbelief-against-"))
            )
            figures |= _figures(net, folder / net, options)
    measurement.conclude("planner_against_runtime", figures)


def _figures(net: NetName, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Measure layers of a net, then plans; print a table and return what was found."""
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
        final: dict[str, list[float]] = {name: [] for name in found.finalists}
        for name in measurement.turns(found.finalists, n_rounds=N_FINAL_ROUNDS):
            final[name].append(machines.steps(name, n_steps=options.steps).seconds)
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
        "slower": median(found.slower),
        "drift": max(found.slower) / min(found.slower) - 1.0,
        **{f"raw_{key}": value for key, value in compared(found.predicted, found.measured).items()},
    }
    return {f"{key}_{net}": value for key, value in found_figures.items()}


def _row(
    name: str, found: Verdict, turns: Sequence[Turn], final: Mapping[str, Sequence[float]]
) -> dict[str, str]:
    own = [turn for turn in turns if turn.plan == name]
    predicted, brought = found.predicted[name], found.brought[name]
    return {
        "predicted, ms": f"{1e3 * predicted:.0f}",
        "step, ms": Spread.of([1e3 * turn.seconds for turn in own]).show(0),
        "at the profile's pace": f"{1e3 * brought:.0f}",
        "predicted / that": f"{predicted / brought:.3f}",
        "again, ms": f"{1e3 * median(final[name]):.0f}" if name in final else "",
        "CPU ms": f"{1e3 * median(turn.cpu_seconds for turn in own):.0f}",
        "others": f"{max(turn.others for turn in own):.2f}",
    }


if __name__ == "__main__":
    main()
