"""Variants of a job: all combinations of values, and the one to be suggested.

    --sweep cluster.replicas=1,2,4 --sweep algorithm.n_push=1,5     six variants

What a variant is compared by: the time to the target if [stop] asks for an accuracy or
a loss, else samples per second. A suggestion stays within a number of machines.
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

SHORT: Final[Mapping[str, str]] = {
    "replicas": "cluster.replicas",
    "partitions": "cluster.partitions",
    "shards": "cluster.shards",
    "n_fetch": "algorithm.n_fetch",
    "n_push": "algorithm.n_push",
}
"""Keys that are swept most may be written without their table."""


@final
class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One key of the job file, and the values it is to take."""

    key: str
    values: tuple[str, ...]

    @staticmethod
    def of(text: str) -> "Axis":
        """Return the axis that "KEY=1,2,4" means.

        Raises:
            JobError: it means none.
        """
        key, equals, values = text.partition("=")
        key = key.strip()
        split = tuple(value.strip() for value in _apart(values))
        key = SHORT.get(key, key)
        if not equals or "." not in key or not all(split):
            raise JobError(
                f"--sweep {text}: write TABLE.KEY=VALUE,VALUE,..., for example "
                f"cluster.replicas=1,2,4; or without the table, {', '.join(SHORT)}"
            )
        doubled = sorted({value for value in split if split.count(value) > 1})
        if doubled:
            raise JobError(f"--sweep {text}: {doubled[0]} is there twice")
        return Axis(key=key, values=split)


@final
class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One combination, and what came of it.

    Attributes:
        settings: By key.
        job: The job so.
        n_machines: That it takes.
        outcomes: One per seed.
        left_out: Why it was not run; None if it was, or is to be.
    """

    settings: Mapping[str, str]
    job: Job
    n_machines: int
    outcomes: tuple[Outcome, ...] = ()
    left_out: str | None = None

    @property
    def failure(self) -> str | None:
        """Why a run of it failed; None if none did."""
        return next((run.error for run in self.outcomes if run.error is not None), None)

    @property
    def spreads(self) -> dict[str, Spread]:
        """Of every figure."""
        return spreads(self.outcomes)


def _apart(values: str) -> Iterator[str]:
    """Yield what stands between commas that are in no brackets: "[1,2],[3]" is two."""
    depth = begin = 0
    for index, letter in enumerate(values):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            yield values[begin:index]
            begin = index + 1
    yield values[begin:]


def axes_of(texts: Sequence[str]) -> list[Axis]:
    """Return the axes of a sweep.

    Raises:
        JobError: one is no axis, is there twice, or there are too many combinations.
    """
    axes = [Axis.of(text) for text in texts]
    for axis in axes:
        if sum(other.key == axis.key for other in axes) > 1:
            raise JobError(f"--sweep {axis.key}: is there twice; list all its values")
    n_variants = 1
    for axis in axes:
        n_variants *= len(axis.values)
    if n_variants > N_VARIANTS_MAX:
        raise JobError(f"--sweep: {n_variants:,} combinations; use at most {N_VARIANTS_MAX:,}")
    return axes


def combinations(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    """Yield every combination, the last axis fastest; of no axis, the empty one."""
    keys = [axis.key for axis in axes]
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip(keys, values, strict=True))


def usual_axes(n_machines: int) -> list[Axis]:
    """Return what a suggestion is looked for among: doublings that may fit."""
    most = max(n_machines, 2)  # nothing fits one machine, which is told by and by
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
    """Return what is the lower the better a variant of this job is."""
    if has_target(job):
        return _target_seconds
    return _lack_of_speed


def best_of(variants: Sequence[Variant], *, n_machines: int) -> Variant:
    """Return the variant to be suggested.

    Raises:
        JobError: none fits the machines, comes to its end, or reaches the target.
    """
    few = [v for v in variants if v.n_machines <= n_machines]
    if not few:
        raise JobError(
            f"--machines {n_machines}: no configuration takes so few; the least is "
            f"{min(v.n_machines for v in variants)}"
        )
    ran = [v for v in few if v.outcomes]
    if not ran:
        raise JobError(
            f"--machines {n_machines}: none of {len(few)} configurations fits; {few[0].left_out}"
        )
    fitting = [v for v in ran if v.failure is None]
    if not fitting:
        raise JobError(f"none of {len(ran)} configurations comes to its end: {ran[0].failure}")
    rank = better(fitting[0].job)
    best = min(fitting, key=rank)
    if rank(best) == float("inf"):
        raise JobError(
            f"none of {len(fitting)} configurations reaches the target of [stop]: "
            "lower it, or give [stop] more samples or seconds"
        )
    return best


def _target_seconds(variant: Variant) -> float:
    """Return the median time to the target; a run that misses it takes for ever."""
    return median(
        float("inf") if run.target_seconds is None else run.target_seconds
        for run in variant.outcomes
    )


def _lack_of_speed(variant: Variant) -> float:
    found = variant.spreads.get("samples_per_second")
    return float("inf") if found is None else -found.p50
