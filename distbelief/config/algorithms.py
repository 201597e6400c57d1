"""Algorithms, found by name among the entry points of installed packages."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final, Protocol, cast

import msgspec

from distbelief.config.job import VerdictOf, done
from distbelief.core.formatting import nearest
from distbelief.errors import JobError, JobFileError


if TYPE_CHECKING:  # these import torch
    from distbelief.config.job import Job
    from distbelief.roles.role import Role
    from distbelief.task.task import BuildContext, RosterEntry


GROUP: Final = "distbelief.algorithms"  # entry-point group; each names an `Algorithm`


class Algorithm(Protocol):
    """What an entry point of the group `GROUP` names.

    It may also have an attribute `ends_by_itself`, and methods `verdict` and `check_cluster`.
    """

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> type[msgspec.Struct]: ...

    @property
    def fields(self) -> Sequence[str]:
        """Metrics it reports besides samples, loss and metric: counters of its coordinator."""
        ...

    def roster(
        self,
        config: object,
        *,
        n_replicas: int,
        n_shards: int,
        shard_copies: int = 1,
        evaluates: bool = True,
        n_machines: int | None = None,
    ) -> "list[RosterEntry]":
        """Return the roles of a job.

        `n_machines` is given only if replicas are split over several ranks by a plan.
        """
        ...

    def build(self, name: str, *, config: object, context: "BuildContext") -> "Role": ...


def roster_of(job: "Job", *, n_machines: int | None = None) -> "list[RosterEntry]":
    """Return the roles of a job.

    Args:
        job: The job.
        n_machines: Ranks of each replica; None if replicas are not split.

    Raises:
        JobError: its algorithm cannot split replicas.
    """
    algorithm = load(find(job.algorithm_name))
    numbers = {
        "n_replicas": job.cluster.replicas,
        "n_shards": job.cluster.shards,
        "shard_copies": job.cluster.shard_copies,
    }
    evaluates = job.data.test is not None
    if n_machines is None:
        return algorithm.roster(job.algorithm, **numbers, evaluates=evaluates)
    if "n_machines" not in inspect.signature(algorithm.roster).parameters:
        raise JobError(
            f"[cluster] partitions: algorithm {job.algorithm_name!r} cannot split a replica: "
            "leave partitions, plan and device out"
        )
    return algorithm.roster(job.algorithm, **numbers, evaluates=evaluates, n_machines=n_machines)


def coordinator_of(job: "Job") -> str | None:
    """Return the name of the role that drives the shards of this job, if there is one."""
    entries = roster_of(job)
    return next((e.name for e in entries if e.kind == "coordinator"), None)


def ends_by_itself(point: EntryPoint) -> bool:
    return bool(getattr(load(point), "ends_by_itself", False))


def fields_of(job: "Job") -> tuple[str, ...]:
    return tuple(load(find(job.algorithm_name)).fields)


def verdict_of(job: "Job") -> VerdictOf:
    """Return the function that judges a coordinator's end by its last counters."""
    verdict = getattr(load(find(job.algorithm_name)), "verdict", done)
    return cast("VerdictOf", verdict)


def check_cluster(job: "Job") -> None:
    """Reject a cluster that the algorithm cannot use.

    Raises:
        JobError: it names table and key.
    """
    algorithm = load(find(job.algorithm_name))
    check = getattr(algorithm, "check_cluster", None)
    if check is not None:
        check(job.cluster, job.algorithm)


def find(name: object) -> EntryPoint:
    """Return the entry point of this name, without importing it.

    Raises:
        JobFileError: it is not installed; the message lists those that are.
    """
    installed = _installed(tuple(sys.path))
    if isinstance(name, str) and name in installed:
        return installed[name]
    known = ", ".join(sorted(installed)) or "none; is the package itself installed?"
    near = nearest(str(name), installed) if installed else ""
    hint = near if near.startswith("Did") else ""
    raise JobFileError(f"is not installed. {hint} Installed: {known}".replace("  ", " "))


@cache  # it lists every directory of the path and reads a file of every package
def _installed(_path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def load(point: EntryPoint) -> Algorithm:
    """Return the algorithm itself; the import may take torch with it.

    Raises:
        JobFileError: it cannot be imported.
    """
    try:
        return cast("Algorithm", point.load())
    except (ImportError, AttributeError) as error:
        raise JobFileError(
            f"{point.value}, installed as algorithm {point.name!r}, cannot be imported: {error}"
        ) from error
