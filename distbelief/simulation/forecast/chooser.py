"""Searches for the best configuration of a job on a cluster, in three stages.

1. priced    a formula, from one short run of a replica and a shard: samples per second of all
             combinations of replicas, shards and placement
2. tried     short runs in virtual time; the search moves on while they become better
3. run       whole runs with real gradients, with all seeds, of the best and of the front

With a target in [stop], or by loss, whole runs also decide on what changes how the job learns:
`every`, staleness, the share of a round, the precision of messages, and the presets that the
formula has as the fastest. Without one, the fastest of these would be the one that exchanges
least, whatever it learns: they stay as they are.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from statistics import median
from typing import Final, final

import msgspec
import numpy as np

from distbelief.config.algorithms import facts_of
from distbelief.config.job import Job
from distbelief.config.presets import PRESETS
from distbelief.core.errors import JobError
from distbelief.job.display.progress import WaitProgress
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.protocol.role import SUPERVISOR, Address
from distbelief.simulation.forecast.prepare import PreparedJob
from distbelief.simulation.forecast.run import Trial, first_word
from distbelief.simulation.forecast.sweep import Axis, Outcome, Variant, has_target


Cost = Callable[[Variant], float]  # the lower the better
Point = tuple[int, ...]  # the index of a value on each axis

BY: Final = ("time", "loss", "price")  # what a suggestion has least of
AS_GIVEN: Final = "as given"  # of an axis: the job file's own value, or its preset's, or none
PRESET: Final = "algorithm.preset"
ROUTE: Final = "algorithm.exchange.route"

N_PRICED_MAX: Final = 2000  # combinations that the formula prices; of more, every other one
N_TRIED_MAX: Final = 40  # short runs
N_PRESETS: Final = 3  # the fastest by the formula, that whole runs try
N_RUN_MAX: Final = 40  # whole runs with one seed, where there is a target
N_STARTS: Final = 3
N_LAST: Final = 4  # that are run with all seeds
N_OF_FRONT: Final = 4  # others that are, too: cheaper ones, or faster ones
STEPS_OF_TRIAL: Final = 12  # of each replica in a short run, or so many exchanges
EXCHANGES_OF_TRIAL: Final = 4


def cost_by(by: str) -> Cost:
    """Return by which variants are compared: a median over seeds; infinite if a run fails.

    time     seconds to the target of [stop]; without one, those of a million samples
    loss     held-out loss at the end
    price    of the machines to the target; without one, of a million samples; machine-hours if
             no machine has a price
    """

    def cost(variant: Variant) -> float:
        if variant.failure is not None or not variant.outcomes:
            return math.inf
        return median(_figure(variant, run, by) for run in variant.outcomes)

    return cost


def _figure(variant: Variant, run: Outcome, by: str) -> float:
    loss = run.loss if run.held_out_loss is None else run.held_out_loss
    if loss is not None and not math.isfinite(loss):
        return math.inf  # however fast it diverges
    if by == "loss":
        return math.inf if loss is None else loss
    aims = has_target(variant.job)
    if (aims and run.target_seconds is None) or not (run.samples and run.samples_per_second):
        return math.inf
    if by == "price":
        price = run.machine_hours if run.price is None else run.price
        return price if aims else price * 1e6 / run.samples
    return run.target_seconds if aims and run.target_seconds else 1e6 / run.samples_per_second


def best_of(variants: Sequence[Variant], *, n_machines: int, by: str = "time") -> Variant:
    """Return the best variant within so many machines; JobError if there is none."""
    few = [v for v in variants if v.n_machines <= n_machines]
    if not few:
        raise JobError(
            f"--machines {n_machines}: no configuration uses so few; use at least "
            f"{min(v.n_machines for v in variants)}"
        )
    ran = [v for v in few if v.outcomes]
    if not ran:
        raise JobError(
            f"--machines {n_machines}: none of {len(few)} configurations fits; {few[0].left_out}"
        )
    fitting = [v for v in ran if v.failure is None]
    if not fitting:
        raise JobError(f"none of {len(ran)} configurations completes: {ran[0].failure}")
    cost, time = cost_by(by), cost_by("time")
    best = min(fitting, key=lambda v: (cost(v), time(v)))  # of what costs nothing the fastest
    if cost(best) == math.inf:
        why = "has a finite loss: use a lower learning rate"
        if by != "loss" and has_target(best.job):
            why = "reaches the target of [stop]: lower it"
        raise JobError(
            f"none of {len(fitting)} configurations {why}, or give [stop] more samples or seconds"
        )
    return best


def front_of(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return the variants than which none is both faster and cheaper, the fastest first."""
    time, price = cost_by("time"), cost_by("price")
    ran = [v for v in variants if time(v) < math.inf]
    found: list[Variant] = []
    for variant in sorted(ran, key=lambda v: (time(v), price(v))):
        if not found or price(variant) < price(found[-1]):
            found.append(variant)
    return tuple(found)


def undecided(best: Variant, variants: Sequence[Variant], *, by: str) -> list[Variant]:
    """Return the others of which a run was at least as good as the worst of the best one's.

    Those with a failed run are not among them.
    """

    def of(variant: Variant) -> list[float]:
        return [_figure(variant, run, by) for run in variant.outcomes]

    whole = [v for v in variants if v is not best and v.outcomes and v.failure is None]
    return [v for v in whole if min(of(v)) <= max(of(best))]


# --- what is searched ---


def counts(most: int) -> list[int]:
    """Return numbers up to `most`: all up to 8, then four for each doubling, and the last two."""
    found = set(range(1, min(most, 8) + 1)) | {most, max(most - 1, 1)}
    found |= {n * 2**k for k in range(20) for n in (8, 10, 12, 14) if n * 2**k <= most}
    return sorted(found)


def usual_axes(job: Job, n_machines: int, *, learns: bool) -> list[Axis]:
    """Return what a suggestion searches; `learns`: also what changes how the job learns."""
    most = max(n_machines, 2)  # no job fits one machine; `best_of` reports that
    shards = counts(most)
    axes = {
        "cluster.replicas": [str(n) for n in counts(most - 1)],
        "cluster.shards": [str(n) for n in shards],
        "cluster.placement": ["spread", "here", "beside replicas"],
    }
    policy = facts_of(job).policy
    if policy is not None and _may_be_a_ring(policy):
        axes[ROUTE] = ["server", "ring"]
    if policy is not None and learns:
        axes |= _learning_axes(policy, n_push=getattr(job.algorithm, "n_push", None))
    return [Axis(key=key, values=tuple(values)) for key, values in axes.items()]


def _may_be_a_ring(policy: ExchangePolicy) -> bool:
    try:
        msgspec.structs.replace(policy, route="ring")
    except ValueError:
        return False
    return True


def _learning_axes(policy: ExchangePolicy, *, n_push: int | None) -> dict[str, list[str]]:
    axes: dict[str, list[str]] = {}

    def numbers(key: str, values: Sequence[float]) -> None:
        axes[key] = [f"{value:.12g}" for value in sorted(set(values))]

    if policy.route == "ring":
        return {}
    if not isinstance(policy.every, int):  # "auto", or epochs
        pass
    elif policy.send == "delta":
        every = policy.every
        numbers("algorithm.exchange.every", [max(1, every // 4), max(1, every // 2), every])
        axes["algorithm.exchange.every"] += [str(2 * every), str(4 * every)]
    elif n_push is not None and policy.every == 1:
        numbers("algorithm.n_push", [n_push, 2 * n_push, 4 * n_push, 8 * n_push])
    if policy.staleness is not None and policy.round is None:
        numbers("algorithm.exchange.staleness", [0, policy.staleness, 2 * policy.staleness + 1])
    if policy.round is not None and policy.round.quorum < 1.0:
        quorum = policy.round.quorum
        numbers("algorithm.exchange.round.quorum", [quorum / 2, quorum, (1.0 + quorum) / 2])
    if policy.push is None and policy.fetch is None:
        axes["algorithm.exchange.numbers"] = ["float32", "bfloat16"]
        axes["algorithm.exchange.push"] = [AS_GIVEN, '{codec = "int8"}', '{codec = "int4"}']
    return axes


# --- stage 1: a formula ---


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a sample takes, from a run of one replica and one shard."""

    flops: float  # seconds of computing, times the operations per second of that machine's core
    waiting: float  # seconds beside computing and sending
    n_bytes: float  # between the replica and the shard, both directions together
    overlap: float  # share of the time to send them in which the replica waits
    shard: float  # seconds of the shard's work

    @staticmethod
    def of(trial: Trial, outcome: Outcome) -> "Prices":
        cluster, places = trial.host.cluster, trial.host.placement(trial.job)
        one, samples = cluster.machines[_place(places, "replica")], max(outcome.samples, 1)
        sent = outcome.traffic.get("replica - shard", 0.0) / samples
        kinds = [*trial.job.kinds.values()]
        n_replicas = trial.job.job.cluster.n_replicas
        alone = outcome.training_seconds * n_replicas / samples
        busy = {
            kind: share * outcome.seconds * kinds.count(kind) / samples
            for kind, share in outcome.utilisation.items()
        }
        ranks = kinds.count("rank") / n_replicas
        computing = min(busy.get("replica", busy.get("rank", alone) / max(ranks, 1)), alone)
        rate = cluster.rate(_place(places, "shard"), _place(places, "replica"))
        sending = sent / rate
        return Prices(
            flops=computing * one.flops / one.cores,
            waiting=max(0.0, alone - computing - sending),
            n_bytes=sent,
            overlap=min(1.0, (alone - computing) / sending) if sending else 0.0,
            shard=busy.get("shard", 0.0),
        )

    def speed(self, trial: Trial) -> float:
        """Return about how many samples a second a variant computes."""
        cluster, places = trial.host.cluster, trial.host.placement(trial.job)
        holders = [place for name, place in places.items() if first_word(name) == "shard"]
        parts = {place: holders.count(place) / len(holders) for place in holders}
        ranks: dict[str, list[int]] = {}
        for name, place in places.items():
            if first_word(name) == "replica":
                ranks.setdefault(name.partition(".")[0], []).append(place)
        speeds = [
            1.0 / max(self._seconds(trial, place, parts) for place in own) for own in ranks.values()
        ]
        policy = facts_of(trial.job.job).policy
        waits = policy is not None and (policy.staleness is not None or policy.round is not None)
        early = policy is not None and policy.round is not None and policy.round.early
        speed = min(speeds) * len(speeds) if waits and not early else sum(speeds)
        load = max(
            (part * self.shard * speed / cluster.machines[place].cores)
            + part * self.n_bytes / 2 * speed / _card(trial, place)
            for place, part in parts.items()
        )
        return speed / max(1.0, load)

    def _seconds(self, trial: Trial, place: int, parts: Mapping[int, float]) -> float:
        cluster = trial.host.cluster
        machine = cluster.machines[place]
        slowest = max(
            max(part / cluster.rate(place, other), part / cluster.rate(other, place))
            for other, part in parts.items()
        )
        sending = self.n_bytes * max(slowest, 0.5 / _card(trial, place))
        return self.flops * machine.cores / machine.flops + self.waiting + self.overlap * sending


def _place(places: Mapping[Address, int], kind: str) -> int:
    return next((n for name, n in places.items() if first_word(name) == kind), places[SUPERVISOR])


def _card(trial: Trial, place: int) -> float:
    machine = trial.host.cluster.machines[place]
    return min(machine.bandwidth, machine.upload)


# --- the search ---


@final
@dataclass(kw_only=True)
class Search:
    """The combinations of some axes: what is known of each, and which to try next."""

    job: Job
    axes: Sequence[Axis]  # none: the usual ones
    n_machines: int
    prepare: Callable[[Mapping[str, str]], Trial]  # JobError if there is no such job
    progress: WaitProgress
    seed: int
    by: str
    stage: Callable[[Job], PreparedJob]
    notes: list[str] = field(default_factory=list)  # on presets, for the user
    _error: JobError | None = None
    others: list[Trial] = field(default_factory=list)  # what to run where all of the best fail
    _has_presets: bool = False  # as an axis of the search's own
    _step_seconds: float | None = None  # of one replica, as the first run has them
    _known: dict[Point, tuple[Trial, Variant] | None] = field(default_factory=dict)

    def best(self) -> list[Trial]:
        """Return what to run with all seeds: the best, and some of the front."""
        learns = self.by == "loss" or has_target(self.job)
        is_given = bool(self.axes)
        self.axes = self.axes or usual_axes(self.job, self.n_machines, learns=learns)
        points = self._starts()
        if not points:
            return []
        by: str = "price" if self.by == "price" else "time"
        found = self._climb(points, by, self._system, n_max=N_TRIED_MAX, is_short=True)
        if learns:
            starts = [*found][:N_STARTS]
            if starts and not is_given and facts_of(self.job).policy is not None:
                self._add_presets(starts[0])
                starts, points = ([(*p, 0) for p in some] for some in (starts, points))
            axes = range(len(self.axes))
            found = self._climb(starts, self.by, axes, n_max=N_RUN_MAX, is_short=False)
        front = front_of([*found.values()])
        last = [*found][:N_LAST] or points[:1]  # none reaches the target: `best_of` says so
        others = [p for p, one in found.items() if p not in last and any(one is f for f in front)]
        last += others[:N_OF_FRONT]
        self.others = [self._trial(point) for point in found if point not in last]
        return [self._trial(point) for point in last]

    @property
    def left_out(self) -> list[Variant]:
        """Variants that do not fit; those with too many machines only if all have too many."""
        known = [one[1] for one in self._known.values() if one is not None]
        found = [one for one in known if one.left_out is not None]
        few = [one for one in found if one.n_machines <= self.n_machines]
        return few if few or len(found) < len(known) else found

    @property
    def _system(self) -> list[int]:
        # Axes that change how fast a job is, and not how it learns.
        names = ("cluster.", ROUTE)
        return [k for k, axis in enumerate(self.axes) if axis.key.startswith(names)]

    def _starts(self) -> list[Point]:
        own, system = self._own.to_tables(), self._system
        values = [
            range(len(axis.values)) if k in system else [_given(axis, own)]
            for k, axis in enumerate(self.axes)
        ]
        while math.prod(map(len, values)) > N_PRICED_MAX:
            values = [sorted({*some[::2], some[-1]}) for some in values]
        points = [point for point in product(*values) if self._fits(point)]
        if self._error is not None and not any(self._known.values()):
            raise self._error
        prices = self._prices(self._trial(points[0])) if points else None
        any_order = [points[n] for n in np.random.default_rng(self.seed).permutation(len(points))]
        if prices is None:
            return any_order
        speeds = {point: prices.speed(self._trial(point)) for point in points}
        fastest = sorted(points, key=lambda point: -speeds[point])
        cheapest = min(points, key=lambda point: self._hour(point) / speeds[point])
        # Where these fail, the smallest may hold, or any other.
        return [*dict.fromkeys([*fastest[:N_STARTS], cheapest, points[0], *any_order])]

    def _prices(self, trial: Trial) -> Prices | None:
        trial = self._short(trial)
        found = trial.completed(trial.variant(), seeds=[self.seed], progress=self.progress)
        if found.failure is not None or not any(run.samples for run in found.outcomes):
            return None
        if self._step_seconds is None:
            self._step_seconds = found.outcomes[0].step_seconds
        return Prices.of(trial, found.outcomes[0])

    def _add_presets(self, point: Point) -> None:
        """Make the presets that are the fastest there, by the formula, one more axis."""
        place = self._settings(point) | dict.fromkeys(self._learning, AS_GIVEN)
        # A ring of one sends nothing: what a preset sends is priced by way of a shard.
        small = {"cluster.replicas": "1", "cluster.shards": "1", ROUTE: "server"}
        own, speeds, clash = facts_of(self._own), dict[str, float](), list[str]()
        for name in PRESETS:
            try:
                one, there = (self.prepare({**place, **at, PRESET: name}) for at in (small, {}))
            except JobError:  # the job's own settings do not go with it
                clash.append(name)
                continue
            facts = facts_of(there.job.job)
            if there.job.job.algorithm == self._own.algorithm:
                continue
            assert facts.policy is not None
            assert own.policy is not None
            if facts.policy.send != own.policy.send and facts.rule == own.rule:
                clash.append(name)  # a rule for gradients would be that of sums of steps
            elif (prices := self._prices(one)) is not None:
                speeds[name] = prices.speed(there)
        best = sorted(speeds, key=lambda name: -speeds[name])[:N_PRESETS]
        names = ", ".join(best)
        self.notes.append(f"presets: {len(speeds)} priced; tried, the fastest: {names or 'none'}")
        if clash:
            self.notes.append(
                f"presets left out, as the job's own [algorithm] rule or other keys are not for "
                f"them: {', '.join(clash)}"
            )
        self._has_presets = True
        self.axes = [*self.axes, Axis(key=PRESET, values=(AS_GIVEN, *best))]
        known, self._known = self._known, {}
        for before, found in known.items():
            self._known[(*before, 0)] = found
            if found is not None:
                settings = {**found[0].settings, PRESET: AS_GIVEN}
                variant = msgspec.structs.replace(found[1], settings=settings)
                self._known[(*before, 0)] = replace(found[0], settings=settings), variant

    @cached_property
    def _own(self) -> Job:
        return self.stage(self.job).job

    @property
    def _learning(self) -> list[str]:
        return [axis.key for axis in self.axes if axis.key.startswith("algorithm.")]

    def _settings(self, point: Point) -> dict[str, str]:
        pairs = [*zip(self.axes, point, strict=True)]
        settings = {axis.key: axis.values[n] for axis, n in pairs}
        if not self._has_presets or settings[PRESET] == AS_GIVEN:
            return settings
        # What the search has not moved is the preset's.
        own = self._own.to_tables()
        still = [axis.key for axis, n in pairs if n == _given(axis, own) and axis.key != PRESET]
        return settings | {key: AS_GIVEN for key in still if key in self._learning}

    def _hour(self, point: Point) -> float:
        trial = self._trial(point)
        price = trial.host.price(trial.job, (), seconds=3600.0)
        return float(trial.host.n_needed(trial.job)) if price is None else price

    def _fits(self, point: Point) -> bool:
        if point not in self._known:
            try:
                trial = self.prepare(self._settings(point))
                self._known[point] = trial, trial.variant(machines=self.n_machines)
            except JobError as error:  # values that do not go together
                self._known[point], self._error = None, error
        known = self._known[point]
        return known is not None and known[1].left_out is None

    def _trial(self, point: Point) -> Trial:
        known = self._known[point]
        assert known is not None, f"{point} is no job"
        return known[0]

    def _climb(
        self, starts: Sequence[Point], by: str, axes: Sequence[int], *, n_max: int, is_short: bool
    ) -> dict[Point, Variant]:
        """Move from the starts to better neighbours; return what completed, the best first.

        Of the starts the first few are run, and more until one of them completes.
        """
        cost, time = cost_by(by), cost_by("time")
        ran, known = dict[Point, Variant](), dict[Point, float]()

        def run(point: Point) -> None:
            if point in known or len(ran) >= n_max or not self._fits(point):
                return
            trial = self._trial(point)
            if any(self._trial(other).job.job == trial.job.job for other in ran):
                return  # a preset may have what a setting says
            trial = self._short(trial) if is_short else trial
            found = trial.completed(trial.variant(), seeds=[self.seed], progress=self.progress)
            ran[point], known[point] = found, cost(found)
            if found.left_out is not None:
                self._known[point] = trial, found

        for n, point in enumerate(starts):
            if n <= N_STARTS or min(known.values()) == math.inf:
                run(point)
        done = set[Point]()
        while True:
            # The best one whose neighbours are not all known yet, of a few.
            best = [p for p in known if known[p] < math.inf]
            best.sort(key=lambda p: (known[p], time(ran[p])))
            ahead = next((p for p in best[:N_STARTS] if p not in done), None)
            if ahead is None or len(ran) >= n_max:
                return {point: ran[point] for point in best}
            done.add(ahead)
            for point in self._neighbours(ahead, axes):
                run(point)

    def _neighbours(self, point: Point, axes: Sequence[int]) -> Iterator[Point]:
        moves: list[dict[int, int]] = []
        for k in axes:
            values = self.axes[k].values
            steps = [-1, 1] if _is_ordered(values) else range(1, len(values))
            moves += [{k: step} for step in steps]
        counted = [k for k in axes if self.axes[k].key in {"cluster.replicas", "cluster.shards"}]
        if len(counted) == 2:  # machines move from one to the other
            one, other = counted
            moves += [{one: 1, other: -1}, {one: -1, other: 1}, {one: 1, other: 1}]
        for move in moves:
            moved = list(point)
            for k, step in move.items():
                moved[k] += step
                if not _is_ordered(self.axes[k].values):
                    moved[k] %= len(self.axes[k].values)
            if all(0 <= n < len(axis.values) for n, axis in zip(moved, self.axes, strict=True)):
                yield tuple(moved)

    def _short(self, trial: Trial) -> Trial:
        """Return the same with less to do, by time: at the end of a share of samples replicas wait.

        A run under a coordinator, on machines that come and go, or with exchanges by epochs is
        not cut short.
        """
        job, nothing = trial.job.job, dict.fromkeys(("accuracy", "loss", "patience", "min_delta"))
        stop = msgspec.structs.replace(job.stop, **nothing)
        policy = facts_of(job).policy
        every = 1 if policy is None or policy.every == "auto" else policy.every
        is_whole = "coordinator" in trial.job.kinds.values() or trial.host.loses_machines
        if isinstance(every, int) and not is_whole:
            n = max(STEPS_OF_TRIAL, EXCHANGES_OF_TRIAL * every)
            if self._step_seconds is None:  # the first run of all
                n *= job.cluster.n_replicas
                stop = msgspec.structs.replace(stop, steps=min(n, stop.steps or n))
            else:
                seconds = n * self._step_seconds
                stop = msgspec.structs.replace(stop, seconds=min(seconds, stop.seconds or seconds))
        algorithm = job.algorithm
        if getattr(algorithm, "warm_start_steps", 0):  # one replica trains alone
            algorithm = msgspec.structs.replace(algorithm, warm_start_steps=0)
        short = self.stage(msgspec.structs.replace(job, stop=stop, algorithm=algorithm))
        return replace(trial, job=trial.host.formed(short))


def _is_ordered(values: Sequence[str]) -> bool:
    try:
        list(map(float, values))
    except ValueError:
        return False
    return True


def _given(axis: Axis, own: object) -> int:
    # The job file's own value; where the axis has it not, the one in the middle.
    for key in axis.key.split("."):
        own = own.get(key) if isinstance(own, Mapping) else None
    said = AS_GIVEN if own is None else str(own)
    return axis.values.index(said) if said in axis.values else len(axis.values) // 2
