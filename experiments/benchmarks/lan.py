"""Jobs over hosts at a switch: what passes their links, and how fast, beside the forecast.

    python experiments/benchmarks/lan.py [--only CASE] [--seconds 40] [--small]

Jobs over network namespaces. Not in `make bench`: only root may make these.

Bytes on the links of four hosts, 1 Gbit/s each:

    beyond_CASE      the share by which the links had more than that, both ways, all hosts
    beyond_worst     that of the worst link

Samples per second with one, two and four shards, `placement = "spread"`: a net of 41.8 million
parameters, an exchange in each step, four replicas on hosts of their own, and one more host, the
supervisor's. A step is small. Connections are encrypted, as always. Two processors carry all hosts
here, and encryption would be their limit at 1 Gbit/s: so each card has 250 Mbit/s each way.

    shards_N         samples per second, as a share of what the busiest card allows
    forecast_error   of those foretold before the run, the largest

A blocking exchange of one replica with shards on another host, 250 Mbit/s: the layers of its net
sleep, and a push takes 0.3 of a step. Steps whose blocks leave while they compute, and others, take
turns of three within one job. Without other costs they take 1.3 and 1.3 + 0.3 / N times as long
as without an exchange (`docs/explanation/exchanges.md`).

    overlap_N        steps per second with N shards if blocks leave early, over those if they do not

Seconds of a step by twelve plans (replicas, shards, ranks, models, data, rates of links) that
`--draw` chose: a number draws twelve, so that no model was fitted to them. Forecasts, the median of
three seeds, are made from what `network.forecasts` measures (`--only plans`, 15 minutes). Shorter
runs differ: replicas that wait for one link fall into step, and out of it, for up to 20 s.

    plans_error      mean of |forecast / measured - 1|; plans_worst: the largest
    plans_within     how many are within 5 %
    plans_rank       Spearman's rank correlation of forecast and measured
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import msgspec
import numpy as np

from distbelief.config.job import Job
from distbelief.job.run.directory import RunDirectory
from distbelief.plans.cluster import Machine, uniform
from distbelief.protocol.role import SUPERVISOR, Address
from distbelief.simulation.cluster_options import options_for
from distbelief.simulation.driver import Builder
from distbelief.simulation.faults import Fault
from distbelief.simulation.forecast.placed_cluster import PlacedCluster
from distbelief.simulation.forecast.prepare import Preparation, PreparedJob
from distbelief.simulation.forecast.run import run_simulated
from distbelief.simulation.machines import ClusterOptions
from distbelief.simulation.trace import Traffic
from distbelief.supervisor.view import JobView
from experiments.benchmarks.bare import paced_layers
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.network import jobs
from experiments.benchmarks.network.forecasts import N_MACHINES, OVERRIDES, site
from experiments.benchmarks.network.hosts import Lan, obstacle, switched
from experiments.benchmarks.planner_against_runtime import compared
from experiments.benchmarks.simulated.truth import SANDBLAST, Case, side_of


SECONDS_MAX: Final = 240.0
TICK_SECONDS: Final = 0.02
READY: Final = " is ready: "  # of the message about a host
TASK: Final = "experiments.benchmarks.simulated.task"
_MACHINE: Final = Machine(flops=2e10, memory_rate=1e10, bandwidth=1.25e8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    roles: tuple[str, ...]  # that ran at this host
    received: int  # as its interface counted
    sent: int  # likewise
    foretold_received: float  # of the messages of its roles
    foretold_sent: float  # likewise


def links_of(lan: Lan, case: Case) -> Sequence[Link]:
    """Run a job over all hosts; return what passed each of their links."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="distbelief-")))
        placement, before, _ = _run(folder, lan, case, stack)
        after = [lan.n_bytes(host) for host in lan.hosts]
    traffic, names = _foretell(case.job, placement)
    links = []
    for index, (b, a) in enumerate(zip(before, after, strict=True)):
        here = [name for name in names if placement.get(name, 0) == index]
        there = [name for name in names if placement.get(name, 0) != index]
        links.append(
            Link(
                roles=tuple(name for name in here if placement.get(name) == index),
                received=a[0] - b[0],
                sent=a[1] - b[1],
                foretold_received=_between(traffic, there, here),
                foretold_sent=_between(traffic, here, there),
            )
        )
    return links


# -------------------------------------------------------------------------- for real


def _run(
    folder: Path, lan: Lan, case: Case, stack: ExitStack, *options: str, imports: str = TASK
) -> tuple[Mapping[Address, int], Sequence[tuple[int, int]], JobView]:
    """Return the hosts of roles that are not on the first one, and the last view of the job.

    Between them: what the links had had when all hosts were ready.
    """
    hosts = lan.hosts
    jobs.lay_out(folder, case.text, n_hosts=len(hosts))
    words = [*options, *(word for override in case.overrides for word in ("--set", override))]
    job, *_ = jobs.start(folder, hosts, *words, imports=imports, stack=stack)
    run = RunDirectory(folder / "0" / "runs" / "simulation", lock=None)
    readings: list[Reading] = []
    began = math.inf
    while job.poll() is None:
        status = run.read_status()
        if status is not None and not status.ended:  # the last one is written after its view
            began = min(began, status.written - status.view.seconds)
            # The status is up to a second old, in which a small job may send all that it sends.
            if sum(host.state == "ready" for host in status.view.hosts) == len(hosts) - 1:
                break
        now = time.time()  # noqa: TID251 -- the time of day, as in the status
        readings.append(Reading(now, [lan.n_bytes(host) for host in hosts]))
        time.sleep(TICK_SECONDS)
    said, _ = job.communicate(timeout=SECONDS_MAX)
    status = run.read_status()
    if job.returncode or status is None:
        raise RuntimeError(f"the job ended with {job.returncode}: {said}")
    before = reading_before(readings, began + ready_after(status.view)).counts
    placement = {
        Address(log.stem): index
        for index in range(1, len(hosts))
        for log in (folder / f"{index}").glob("runs/joined/*/logs/*-*.log")
    }
    return placement, before, status.view


class Reading(NamedTuple):
    """What the links had carried at one time."""

    at: float  # seconds since 1970
    counts: Sequence[tuple[int, int]]  # bytes received and sent by each host


def ready_after(view: JobView) -> float:
    """Return after how many seconds of a job its last host was ready."""
    said = [message.seconds for message in view.messages if READY in message.text]
    if not said:
        raise RuntimeError("no host was ready before the job ended")
    return max(said)


def reading_before(readings: Sequence[Reading], at: float) -> Reading:
    """Return the last reading of the links until then."""
    return max((one for one in readings if one.at <= at), default=readings[0])


# ------------------------------------------------------------------- overlap of a step

PACED: Final = "experiments.benchmarks.bare.paced_layers"
N_LAYERS: Final = 4
N_PARAMETERS: Final = 1 << 23  # in all
PUSH_SHARE: Final = 0.3  # of the seconds of a step
N_TURNS: Final = 8
_BLOCKING: Final = (
    f"model.factory='{PACED}:net'",
    f"algorithm.loss='{PACED}:mean'",
    "algorithm.batch_size=4",
    "algorithm.blocking=true",
    "algorithm.rule={ name = 'sgd', learning_rate = 1.0 }",
    f"data.train={{ factory = '{PACED}:samples', arguments = {{ n_samples = 64 }} }}",
    "cluster.replicas=1",
)


def _overlaps(case: str, n_shards: int, *, small: bool) -> dict[str, float]:
    """Return how many times as fast the steps of a job are whose blocks leave early."""
    n_parameters = N_PARAMETERS // (64 if small else 1)
    push_seconds = 32 * n_parameters / BITS_PER_SECOND
    step_seconds = push_seconds / PUSH_SHARE
    n_steps = 2 * paced_layers.TURN * (1 if small else N_TURNS // 2) + 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="distbelief-")))
        said = folder / "said"
        said.mkdir()
        arguments = {
            "n_layers": N_LAYERS,
            "n_parameters": n_parameters // N_LAYERS,
            "seconds": step_seconds / N_LAYERS,
            "said": f"'{said}'",
        }
        table = ", ".join(f"{key} = {value}" for key, value in arguments.items())
        overrides = (
            *_BLOCKING,
            f"model.arguments={{ {table} }}",
            f"algorithm.max_steps={n_steps}",
            f"cluster.shards={n_shards}",
        )
        lan = stack.enter_context(switched(2, bits_per_second=BITS_PER_SECOND))
        used = stack.enter_context(measurement.usage(lambda: 0.0))
        paced = Case(name=case, overrides=overrides)
        _run(folder, lan, paced, stack, "--cores", "0", imports=PACED)
        texts = [path.read_text().splitlines() for path in said.iterdir()]
        lines = [line.split() for line in max(texts, key=len)]
    seconds: dict[str, list[float]] = {"0": [], "1": []}
    for (begun, how), (ended, _) in pairwise(lines):
        seconds[how].append((float(ended) - float(begun)) / step_seconds)
    without, early = (measurement.Spread.of(seconds[how]) for how in "01")
    bounds = 1.0 + PUSH_SHARE * (1.0 + 1.0 / n_shards), 1.0 + PUSH_SHARE
    rows = {
        name: {"steps": spread.show(3), "bound": f"{bound:.3f}"}
        for name, spread, bound in zip(
            ("blocks leave after the step", "while it computes"),
            (without, early),
            bounds,
            strict=True,
        )
    }
    title = f"{case}: seconds of a step of {step_seconds:.2f} s, over those without an exchange"
    measurement.show(f"{title}; {used.others:.1f} processors busy", rows)
    return {case: without.median / early.median}


# -------------------------------------------------------------------- in virtual time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hosts:
    """Machines of a simulation, like those of the real run."""

    placement: Mapping[Address, int]
    n: int

    def n_needed(self, staged: PreparedJob) -> int:
        del staged
        return self.n

    def options(self, staged: PreparedJob, *, faults: Sequence[Fault] = ()) -> ClusterOptions:
        places = {name: self.placement.get(name, 0) for name in staged.kinds}
        cluster = uniform("lan", _MACHINE, self.n, latency=1e-4)
        options = options_for(cluster, places)
        return replace(options, start=(SUPERVISOR,), faults=tuple(faults))

    def builders(self, staged: PreparedJob) -> dict[Address, Builder]:
        return staged.builders()


def _foretell(job: Job, placement: Mapping[Address, int]) -> tuple[Traffic, Sequence[Address]]:
    """Return what the roles of this job, so placed, send; and all their names."""
    with Preparation() as staging:
        staged = staging.stage(job)
        hosts = _Hosts(placement=placement, n=1 + max(placement.values(), default=0))
        ended = run_simulated(staged, hosts, seed=0)
    if ended.outcome.error is not None:
        raise RuntimeError(f"the job in virtual time ended: {ended.outcome.error}")
    return ended.simulation.traffic, list(staged.kinds)


def _between(traffic: Traffic, senders: Sequence[Address], receivers: Sequence[Address]) -> float:
    return sum(
        traffic.between(sender, receiver)
        for sender in _shortest(senders)
        for receiver in _shortest(receivers)
    )


def _shortest(names: Sequence[Address]) -> Sequence[Address]:
    """Leave out names that begin with another: `Traffic` goes by beginnings."""
    return [one for one in names if not any(one != n and one.startswith(n) for n in names)]


# -------------------------------------------------------------- what the cards allow


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Samples per second of a job whose shards are spread over the hosts."""

    foretold: float
    allowed: float  # by the busiest card
    real: float
    processors: float  # that were busy during the job, start included

    @property
    def error(self) -> float:
        return abs(self.foretold / self.real - 1.0)


def speed_of(lan: Lan, case: Case, *, bits_per_second: float) -> Speed:
    """Foretell the speed of a job, then run it; its supervisor has a host without a replica."""
    job, bandwidth = case.job, bits_per_second / 8
    machine = msgspec.structs.replace(_MACHINE, bandwidth=bandwidth)
    cluster = uniform("lan", machine, len(lan.hosts), latency=1e-4)
    hosts = PlacedCluster(cluster=cluster, reference=machine, rates=None, together=False)
    with Preparation() as staging:
        staged = staging.stage(job)
        ended = run_simulated(staged, hosts, seed=0)
    layout = staged.layout
    n_bytes = [layout.shard_size(k) * layout.dtype.itemsize for k in range(layout.n_shards)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="distbelief-")))
        used = stack.enter_context(measurement.usage(lambda: 0.0))
        placement, _, view = _run(folder, lan, case, stack, "--cores", "0")
    rates = [
        side_of(one, job, error=None).samples_per_second or math.nan for one in (ended.view, view)
    ]
    n_replicas = job.cluster.n_replicas
    busiest = bytes_of_busiest(placement, n_bytes, n_replicas=n_replicas)
    return Speed(
        foretold=rates[0],
        allowed=n_replicas * job.batch_size * bandwidth / busiest,
        real=rates[1],
        processors=used.others,
    )


def bytes_of_busiest(
    placement: Mapping[Address, int], n_bytes: Sequence[int], *, n_replicas: int
) -> int:
    """Return what the busiest card receives if each replica pushes and fetches once.

    It sends as much: fetches by what it receives in pushes, and the other way around.
    """
    received: Counter[int] = Counter()
    for shard, n in enumerate(n_bytes):
        for replica in range(n_replicas):
            ends = {placement.get(Address(f"shard-{shard}"), 0)}
            ends ^= {placement.get(Address(f"replica-{replica}"), 0)}
            received.update(dict.fromkeys(ends, n))  # none if both are on one host
    return max(received.values())


# ------------------------------------------------------------------ steps of many plans

PLANS_CASE: Final = "plans"
N_PLANS: Final = 12
N_SEEDS: Final = 3  # of a forecast
WITHIN: Final = 0.05
_SELDOM: Final = (
    "algorithm.n_push=4",
    "algorithm.n_fetch=4",
    "algorithm.local_learning_rate=0.001",
)


def drawn_plans(draw: int, n: int) -> list[tuple[float, tuple[str, ...]]]:
    """Return megabits a second of each card, and what is not as in `OVERRIDES`."""
    chance, plans = np.random.default_rng(draw), list[tuple[float, tuple[str, ...]]]()
    while len(plans) < n:
        partitions = 2 if chance.random() < 0.25 else 1
        replicas = int(chance.integers(1, (N_MACHINES - 1) // partitions, endpoint=True))
        placement = chance.choice(("here", "spread", "beside replicas"))
        shards_max = replicas if placement == "beside replicas" else 4
        shards = int(chance.integers(1, shards_max, endpoint=True))
        own = [f"cluster.replicas={replicas}", f"cluster.shards={shards}"]
        own += [f"cluster.placement='{placement}'"]
        own += [f"model.arguments.hidden={chance.choice((192, 256, 384, 512))}"]  # 0.8 to 4.1 MB
        own += [f"data.train.arguments.seconds={chance.uniform(0.1, 0.3):.2f}"]
        if partitions > 1:
            own += [f"cluster.partitions={partitions}", "algorithm.batch_size=128"]
        elif chance.random() < 0.25:
            own += _SELDOM
        plans.append((round(chance.uniform(40.0, 160.0)), tuple(own)))
    return plans


def _plans(draw: int, *, seconds: float, small: bool) -> dict[str, float]:
    """Return how far the seconds of a step are from their forecasts."""
    foretold: dict[str, float] = {}
    measured: dict[str, float] = {}
    rows: dict[str, dict[str, str]] = {}
    with site() as here:
        for mbits, own in drawn_plans(draw, 2 if small else N_PLANS):
            keys = (one.removeprefix(f"{one.partition('=')[0].rpartition('.')[0]}.") for one in own)
            name = f"{mbits} Mbit/s, {', '.join(keys)}".replace("'", "")
            case = Case(name=name, overrides=(*OVERRIDES, f"stop.seconds={seconds}", *own))
            bits, together = 1e6 * mbits, case.job.cluster.n_replicas * case.job.batch_size
            told = [here.forecast(case, bits_per_second=bits, seed=n) for n in range(N_SEEDS)]
            with measurement.usage(lambda: 0.0) as used:
                ran = here.run(case, bits_per_second=bits)
            foretold[name], measured[name] = together / median(told), together / ran
            rows[name] = {
                "forecast, s": f"{foretold[name]:.4f}",
                "of seeds": f"{together / max(told):.4f} to {together / min(told):.4f}",
                "measured": f"{measured[name]:.4f}",
                "forecast / that": f"{foretold[name] / measured[name]:.3f}",
                "busy processors": f"{used.others:.2f}",
            }
            print(name, rows[name], flush=True)
    measurement.show(f"a step of each replica; load {measurement.load():.1f}", rows)
    errors = [abs(foretold[name] / measured[name] - 1.0) for name in measured]
    return {f"{PLANS_CASE}_{key}": value for key, value in compared(foretold, measured).items()} | {
        f"{PLANS_CASE}_worst": max(errors),
        f"{PLANS_CASE}_within": sum(error <= WITHIN for error in errors),
    }


N_HOSTS: Final = 4
_STEPS: Final = "algorithm.max_steps=25"
_WHOLE: Final = ("cluster.replicas=4",)
_SPLIT: Final = ("cluster.replicas=2", "cluster.partitions=2")
_TINY: Final = ("model.arguments.hidden=128",)

# Jobs over all four
CASES: Final[Mapping[str, Case]] = {
    "downpour": Case(name="downpour", overrides=(*_WHOLE, _STEPS)),
    "split": Case(name="split", overrides=(*_SPLIT, _STEPS)),
    "sandblaster": Case(name="sandblaster", text=SANDBLAST, overrides=_WHOLE),
    "split_sandblaster": Case(name="split_sandblaster", text=SANDBLAST, overrides=_SPLIT),
}

BITS_PER_SECOND: Final = 2.5e8  # of each card, where speed is measured
_SPREAD: Final = (
    *_WHOLE,
    "cluster.placement='spread'",
    "model.arguments.hidden=3657",  # 41.8 million parameters
    "algorithm.batch_size=8",
    "algorithm.max_steps=6",
    "output.report_every='0.25 s'",
    "output.snapshot_every='1 h'",
)
SPEEDS: Final[Mapping[str, Case]] = {
    f"shards_{n}": Case(name=f"shards_{n}", overrides=(*_SPREAD, f"cluster.shards={n}"))
    for n in (1, 2, 4)
}

OVERLAPS: Final = {f"overlap_{n}": n for n in (1, 4)}
SMALL: Final = {
    "only": ("downpour", "shards_2", "overlap_4", PLANS_CASE),
    "seconds": 3.0,
}  # with a tiny net


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    every = [*CASES, *SPEEDS, *OVERLAPS, PLANS_CASE]
    parser.add_argument("--only", action="append", choices=every)
    parser.add_argument("--seconds", type=float, default=40.0, help="of a run of a plan")
    parser.add_argument("--draw", type=int, default=1, help="this number chooses the plans")
    options = measurement.options_of(parser, arguments, small=SMALL)
    if (why := obstacle()) is not None:
        raise SystemExit(why)
    names = options.only or every
    tiny = _TINY if options.small else ()
    known = {**CASES, **SPEEDS}
    chosen = {
        n: replace(known[n], overrides=(*known[n].overrides, *tiny)) for n in names if n in known
    }
    figures = _beyond_of({name: case for name, case in chosen.items() if name in CASES})
    figures |= _shares_of({name: case for name, case in chosen.items() if name in SPEEDS})
    for name in names:
        if name in OVERLAPS:
            figures |= _overlaps(name, OVERLAPS[name], small=options.small)
    if PLANS_CASE in names:
        figures |= _plans(options.draw, seconds=options.seconds, small=options.small)
    measurement.conclude("lan", figures)


def _beyond_of(cases: Mapping[str, Case]) -> dict[str, float]:
    found: dict[str, Sequence[Link]] = {}
    rows = {}
    for name, case in cases.items():
        with switched(N_HOSTS, bits_per_second=1e9) as lan:
            found[name] = links_of(lan, case)
        for index, link in enumerate(found[name]):
            rows[f"{name} {index}"] = {
                "roles": ", ".join(link.roles) or "shards, replica 0, supervisor",
                "in: foretold": f"{link.foretold_received / 1e6:,.2f} MB",
                "link": f"{link.received / 1e6:,.2f} MB",
                "out: foretold": f"{link.foretold_sent / 1e6:,.2f} MB",
                "link ": f"{link.sent / 1e6:,.2f} MB",
                "beyond": f"{_beyond([link]):+.2%}",
            }
            print(f"{name} {index}", rows[f"{name} {index}"], flush=True)
    if not found:
        return {}
    measurement.show(f"{N_HOSTS} hosts at a switch, 1 Gbit/s each", rows)
    worst = max(abs(_beyond([link])) for links in found.values() for link in links)
    return {f"beyond_{n}": _beyond(links) for n, links in found.items()} | {"beyond_worst": worst}


def _shares_of(cases: Mapping[str, Case]) -> dict[str, float]:
    found: dict[str, Speed] = {}
    rows = {}
    for name, case in cases.items():
        with switched(N_HOSTS + 1, bits_per_second=BITS_PER_SECOND) as lan:
            found[name] = speed = speed_of(lan, case, bits_per_second=BITS_PER_SECOND)
        rows[name] = {
            "samples/s: foretold": f"{speed.foretold:.3f}",
            "allowed": f"{speed.allowed:.3f}",
            "real": f"{speed.real:.3f}",
            "share": f"{speed.real / speed.allowed:.3f}",
            "error": f"{speed.error:.3f}",
            "busy processors": f"{speed.processors:.2f}",
        }
        print(name, rows[name], flush=True)
    if not found:
        return {}
    measurement.show(f"{N_HOSTS + 1} hosts at a switch, {BITS_PER_SECOND / 1e6:.0f} Mbit/s", rows)
    shares = {name: speed.real / speed.allowed for name, speed in found.items()}
    return shares | {"forecast_error": max(speed.error for speed in found.values())}


def _beyond(links: Sequence[Link]) -> float:
    passed = sum(link.received + link.sent for link in links)
    return passed / sum(x.foretold_received + x.foretold_sent for x in links) - 1.0


if __name__ == "__main__":
    main()
