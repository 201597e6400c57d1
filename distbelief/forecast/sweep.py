"""Sweeps: the variants of a job, and the best one to suggest.

    --sweep cluster.replicas=1,2,4 --sweep algorithm.n_push=1,5     six variants

Variants are compared by the time to the target of [stop], or by samples per second if there
is no target. A suggestion stays within a number of machines.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Final, final

import msgspec

from distbelief.config.job import Job
from distbelief.errors import JobError
from distbelief.forecast.result import Outcome, Spread, has_target, spreads


N_VARIANTS_MAX: Final = 1000

# Frequent keys, which may be written without their table.
SHORT: Final[Mapping[str, str]] = {
    "replicas": "cluster.replicas",
    "partitions": "cluster.partitions",
    "shards": "cluster.shards",
    "n_fetch": "algorithm.n_fetch",
    "n_push": "algorithm.n_push",
}


@final
class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """A key of the job file, and its values in the sweep."""

    key: str
    values: tuple[str, ...]

    @staticmethod
    def of(text: str) -> "Axis":
        """Parse "KEY=1,2,4"."""
        key, equals, values = text.partition("=")
        key = key.strip()
        split = tuple(value.strip() for value in _split_values(values))
        key = SHORT.get(key, key)
        if not equals or "." not in key or not all(split):
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
    """One combination of values, and the outcomes of its runs."""

    settings: Mapping[str, str]  # value by key of the job file
    job: Job
    n_machines: int
    outcomes: tuple[Outcome, ...] = ()  # one per seed
    left_out: str | None = None  # why it is not run

    @property
    def failure(self) -> str | None:
        """The error of the first failed run."""
        return next((run.error for run in self.outcomes if run.error is not None), None)

    @property
    def spreads(self) -> dict[str, Spread]:
        return spreads(self.outcomes)


def _split_values(values: str) -> Iterator[str]:
    # Commas inside brackets do not separate: "[1,2],[3]" has two values.
    depth = begin = 0
    for index, letter in enumerate(values):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            yield values[begin:index]
            begin = index + 1
    yield values[begin:]


def axes_of(texts: Sequence[str]) -> list[Axis]:
    """Parse the axes of a sweep."""
    axes = [Axis.of(text) for text in texts]
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


def usual_axes(n_machines: int) -> list[Axis]:
    """Return the axes that a suggestion searches: powers of two that may fit."""
    most = max(n_machines, 2)  # no job fits one machine; `best_of` reports that
    doublings = list(itertools.takewhile(lambda n: n < most, _doublings()))
    replicas = sorted({*doublings, max(n_machines - 2, 1)})
    shards = [n for n in doublings if n <= max(n_machines // 4, 1)]
    return [
        Axis(key="cluster.replicas", values=tuple(map(str, replicas))),
        Axis(key="cluster.shards", values=tuple(map(str, shards))),
    ]


def _doublings() -> Iterator[int]:
    return (2**k for k in itertools.count())


def better(job: Job) -> Callable[[Variant], float]:
    """Return the objective by which variants are compared; lower is better."""
    if has_target(job):
        return _target_seconds
    return _negative_speed


def best_of(variants: Sequence[Variant], *, n_machines: int) -> Variant:
    """Return the best variant."""
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
    rank = better(fitting[0].job)
    best = min(fitting, key=rank)
    if rank(best) == float("inf"):
        raise JobError(
            f"none of {len(fitting)} configurations reaches the target of [stop]: "
            "lower it, or give [stop] more samples or seconds"
        )
    return best


def _target_seconds(variant: Variant) -> float:
    # The median over seeds; a run that misses the target counts as infinite.
    return median(
        float("inf") if run.target_seconds is None else run.target_seconds
        for run in variant.outcomes
    )


def _negative_speed(variant: Variant) -> float:
    found = variant.spreads.get("samples_per_second")
    return float("inf") if found is None else -found.p50
