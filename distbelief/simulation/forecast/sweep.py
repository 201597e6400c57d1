"""Sweeps: the variants of a job, and the outcomes of their runs.

step time       of one replica: training time divided by its share of the steps
time to target  training time until the target of [stop] was met; the whole training time if
                only the final evaluation met it
utilization     share of the time in which the compute executor of a role had work
machine-hours   machines times hours, from the first process to the last
price           of each machine's hours, while it is there

    --sweep cluster.replicas=1,2,4 --sweep algorithm.n_push=1,5     six variants
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast, final

import msgspec
import numpy as np
from typing_extensions import override

from distbelief.config.job import Job, StopTable
from distbelief.core.drawing import Curve, plot
from distbelief.core.errors import JobError
from distbelief.core.frames import frame
from distbelief.protocol.role import Seconds
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.view import JobView, Point, Totals


if TYPE_CHECKING:
    from matplotlib.figure import Figure


@final
class Resource(msgspec.Struct, frozen=True, kw_only=True):
    """A shard, processor, card, link or switch, and the share of the time in which it worked."""

    kind: str  # "shard", "processor", "card", "link" or "switch"
    name: str  # "shard-0", "machine-3", "machine-0-machine-5", "switch-0"
    share: float  # of the time, 0 to 1; of all cores of a processor, of a card's busier direction


@final
class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The busiest resource of a run, and what one more of it would bring."""

    resource: str  # such as "cards of shards"
    share: float  # of the time in which it worked, 0 to 1
    more: str  # what was tried
    # Of the speed, or of the time to the target: 0.1 is 10 %. None: not tried
    gain: float | None
    why_not: str = ""  # why it was not tried


@final
class Outcome(Totals, frozen=True, kw_only=True):
    """What a run in virtual time ends with; `samples_per_second` is a mean over its training.

    Times are in virtual seconds, sizes in bytes, shares between 0 and 1, staleness in pushes,
    prices in the unit of the cluster file. `history` is its curve: seconds, samples, loss,
    held_out_loss and metric of each point.
    """

    seed: int  # of the run
    training_seconds: Seconds  # since the first replica began to train
    n_machines: int  # of the cluster, used by the job
    step_seconds: Seconds | None  # of a step of one replica, or of an iteration
    target_seconds: Seconds | None  # of training to the target; None: not reached, or no target
    traffic: Mapping[str, float]  # bytes of messages, by the kinds of the two roles
    utilisation: Mapping[str, float]  # share of the time with work, 0 to 1, by kind of role
    machine_hours: float  # machines times hours, from the first process to the last
    price: float | None = None  # of the machines while they are there; None if none has one
    resources: tuple[Resource, ...] = ()  # how busy each was, the busiest first
    restarts: int  # of all roles
    n_messages: int  # messages delivered
    digest: str  # of the trace: equal runs have equal digests
    history: tuple[Point, ...] = ()  # the curve, oldest point first

    @override
    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"
        ended = self.error or self.stop_reason
        return f"<Outcome seed {self.seed}: {self.training_seconds:.4g} s{loss}; {ended}>"

    def rows(self) -> list[dict[str, object]]:
        """Return the points of the curve as dictionaries."""
        return [cast("dict[str, object]", msgspec.to_builtins(point)) for point in self.history]

    def to_pandas(self) -> object:
        """Return `rows` as a pandas.DataFrame; JobError without pandas."""
        return frame(self.rows())

    def plot(self) -> "Figure":
        """Return a matplotlib figure of training and held-out loss over virtual seconds."""
        held_out = [(point.seconds, point.held_out_loss) for point in self.history]
        curves = {"training": losses(self), "held out": held_out}
        return plot(curves, x="virtual seconds", y="loss", title=f"seed {self.seed}")


def losses(run: Outcome) -> Curve:
    """Return the training loss over virtual seconds."""
    return [(point.seconds, point.loss) for point in run.history]


@final
class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of one metric over several seeds."""

    p10: float  # quantile 10 %
    p50: float  # the median
    p90: float  # quantile 90 %
    n: int  # number of runs that have this metric

    @staticmethod
    def of(values: Sequence[float | None]) -> "Spread | None":
        """Return the spread of the values that are not None; None if there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        p10, p50, p90 = (float(q) for q in np.quantile(known, [0.1, 0.5, 0.9]))
        return Spread(p10=p10, p50=p50, p90=p90, n=len(known))


# Metrics that are shown with their spread over seeds.
FIGURES: Final = (
    "step_seconds",
    "samples_per_second",
    "target_seconds",
    "training_seconds",
    "metric",
    "loss",
    "held_out_loss",
    "staleness_mean",
    "staleness_p95",
    "bytes_in",
    "bytes_out",
    "machine_hours",
    "price",
    "pushes_lost",
    # Of the algorithm, if it counts them.
    "steps_per_push",
    "clock_gap_max",
    "seconds_waited",
)


def has_target(job: Job) -> bool:
    """Return whether [stop] has a target: an accuracy or a loss."""
    return job.stop.accuracy is not None or job.stop.loss is not None


def reached_at(job: Job, view: JobView, *, higher_is_better: bool) -> Seconds | None:
    """Return the training time at which the target of [stop] was met; None if it was not."""
    if not has_target(job):
        return None
    if (view.stop_reason or "").endswith("reached"):
        return view.training_seconds
    target = StopTable(accuracy=job.stop.accuracy, loss=job.stop.loss)
    has_test = job.data.test is not None
    rules = StopRules(target, n_train=1, higher_is_better=higher_is_better, has_test=has_test)
    return None if rules.reason(view) is None else view.training_seconds


# --- sweeps ---

N_VARIANTS_MAX: Final = 1000

# Frequent keys, which may be written without their table.
SHORT: Final[Mapping[str, str]] = {
    "replicas": "cluster.replicas",
    "partitions": "cluster.partitions",
    "shards": "cluster.shards",
    "n_fetch": "algorithm.n_fetch",
    "n_push": "algorithm.n_push",
    "every": "algorithm.exchange.every",
}


@final
class Axis(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    values: tuple[str, ...]

    @staticmethod
    def of(text: str) -> "Axis":
        """Parse "KEY=1,2,4"."""
        key, equals, values = text.partition("=")
        return Axis.named(key, [*_split_values(values)] if equals else [])

    @staticmethod
    def named(key: str, values: Sequence[str]) -> "Axis":
        """Return the axis of a key, which may be one of `SHORT`."""
        split = tuple(value.strip() for value in values)
        key = SHORT.get(key.strip(), key.strip())
        text = f"{key}={','.join(split)}"
        if not split or "." not in key or not all(split):
            raise JobError(
                f"--sweep {text}: write TABLE.KEY=VALUE,VALUE,..., for example "
                f"cluster.replicas=1,2,4; or without the table, {', '.join(SHORT)}"
            )
        doubled = sorted({value for value in split if split.count(value) > 1})
        if doubled:
            raise JobError(f"--sweep {text}: the value {doubled[0]} is given twice")
        return Axis(key=key, values=split)


@final
class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration of a forecast: an outcome for each seed, and their spreads."""

    settings: Mapping[str, str]  # value by key of the job file
    job: Job  # with these settings
    n_machines: int  # of the cluster, used by the job
    outcomes: tuple[Outcome, ...] = ()  # of the runs, one per seed
    left_out: str | None = None  # why it is not run
    limit: Limit | None = None  # what binds a row of a sweep, and what one more brings
    warnings: tuple[str, ...] = ()  # as of `train`; machines that it waits for
    # Machines of the ranks of each replica, where these differ in number
    replicas: dict[str, list[int]] = {}

    @property
    def failure(self) -> str | None:
        """The error of the first failed run."""
        return next((run.error for run in self.outcomes if run.error is not None), None)

    @property
    def spreads(self) -> dict[str, Spread]:
        """Quantiles over the seeds of each figure that a run has: p10, p50, p90 and n."""
        found = {
            name: Spread.of([getattr(run, name, run.figures.get(name)) for run in self.outcomes])
            for name in FIGURES
        }
        return {name: spread for name, spread in found.items() if spread is not None}

    @override
    def __repr__(self) -> str:
        name = ", ".join(f"{key}={value}" for key, value in self.settings.items()) or self.job.name
        return f"<Variant {name}: {self.left_out or [*self.outcomes]}>"

    def rows(self) -> list[dict[str, object]]:
        """Return a row for each seed: settings, n_machines, seed, limit and figures of its outcome.

        `limit` is the busiest resource, in a sweep. Figures have the units that `Outcome` has, or
        are those of the exchange: steps_per_push, clock_gap_max (exchanges) and seconds_waited.
        """
        limit = {} if self.limit is None else {"limit": self.limit.resource}
        settings = {key: _number(value) for key, value in self.settings.items()}
        names = (*FIGURES, "samples", "step", "stop_reason", "error")
        return [
            {**settings, "n_machines": self.n_machines, "seed": run.seed, **limit}
            | {name: getattr(run, name, run.figures.get(name)) for name in names}
            for run in self.outcomes
        ]

    def to_pandas(self) -> object:
        """Return `rows` as a pandas.DataFrame; JobError without pandas."""
        return frame(self.rows())

    def plot(self) -> "Figure":
        """Return a matplotlib figure: training loss over virtual seconds, of each seed."""
        curves = {f"seed {run.seed}": losses(run) for run in self.outcomes}
        title = short(self.settings) or self.job.name
        return plot(curves, x="virtual seconds", y="loss", title=title)


def short(settings: Mapping[str, str]) -> str:
    """Return settings as text, without the tables of their keys: "replicas 2, every 5"."""
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in settings.items())


def _number(value: str) -> object:
    """Return the number that a text is, so that rows sort by it; else the text."""
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if isinstance(found, int | float) else value


def _split_values(values: str) -> Iterator[str]:
    # Commas inside brackets and quotes do not separate: '[1,2],"a,b"' has two values.
    depth = begin = 0
    quote = ""
    for index, letter in enumerate(values):
        may_quote = depth > 0 or not values[begin:index].strip()
        if quote or (letter in "\"'" and may_quote):
            quote = "" if letter == quote else quote or letter
            continue
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            yield values[begin:index]
            begin = index + 1
    yield values[begin:]


def axes_of(texts: Sequence[str]) -> Sequence[Axis]:
    return checked_axes([Axis.of(text) for text in texts])


def checked_axes(axes: Sequence[Axis]) -> Sequence[Axis]:
    """Return axes of different keys with not too many combinations; else JobError."""
    for axis in axes:
        if sum(other.key == axis.key for other in axes) > 1:
            raise JobError(f"--sweep {axis.key} is given twice: list all its values in one")
    n_variants = 1
    for axis in axes:
        n_variants *= len(axis.values)
    if n_variants > N_VARIANTS_MAX:
        raise JobError(f"--sweep: {n_variants:,} combinations; use at most {N_VARIANTS_MAX:,}")
    return axes


def combinations(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    """Yield all combinations, the last axis varying fastest; without axes, one empty one."""
    keys = [axis.key for axis in axes]
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip(keys, values, strict=True))
