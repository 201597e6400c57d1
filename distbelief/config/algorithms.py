"""Algorithms are found by name among the entry points of installed packages."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final, Protocol, cast

import msgspec

from distbelief.config.job import Judge, done
from distbelief.core.formatting import nearest
from distbelief.errors import JobError, JobFileError


if TYPE_CHECKING:  # these import torch
    from distbelief.config.job import Job
    from distbelief.roles.role import Role
    from distbelief.task.task import BuildContext, RosterEntry


GROUP: Final = "distbelief.algorithms"
"""Entry-point group: each names an object as `Algorithm` describes it."""


class Algorithm(Protocol):
    """What an entry point of the group `GROUP` names."""

    @property
    def name(self) -> str:
        """As in the job file."""
        ...

    @property
    def config(self) -> type[msgspec.Struct]:
        """Struct of the [algorithm] table less its `name`; has `loss`, `batch_size`."""
        ...

    @property
    def fields(self) -> Sequence[str]:
        """Figures it reports besides samples, loss and metric.

        Those that nobody else knows are counters of its coordinator.
        """
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

        `n_machines` is given only where replicas are split over machines by a plan.
        """
        ...

    def build(self, name: str, *, config: object, context: "BuildContext") -> "Role":
        """Return the role of this name."""
        ...


def roster_of(job: "Job", *, n_machines: int | None = None) -> "list[RosterEntry]":
    """Return the roles of a job.

    Args:
        job: The job.
        n_machines: Of each replica, by whose plan they are split; None if they are not.

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
            f"[cluster] partitions: algorithm {job.algorithm_name!r} cannot split a "
            "replica over machines: leave partitions, plan and device out"
        )
    return algorithm.roster(job.algorithm, **numbers, evaluates=evaluates, n_machines=n_machines)


def coordinator_of(job: "Job") -> str | None:
    """Return the role that drives the shards of this job, if one does."""
    entries = roster_of(job)
    return next((e.name for e in entries if e.kind == "coordinator"), None)


def ends_by_itself(point: EntryPoint) -> bool:
    """Return whether its jobs need no rule in [stop].

    An algorithm says so by an attribute `ends_by_itself`.
    """
    return bool(getattr(load(point), "ends_by_itself", False))


def fields_of(job: "Job") -> tuple[str, ...]:
    """Return the figures that the algorithm of a job reports."""
    return tuple(load(find(job.algorithm_name)).fields)


def verdict_of(job: "Job") -> Judge:
    """Return what tells the meaning of a coordinator's end.

    An algorithm that has a coordinator has a method `verdict` for that.
    """
    verdict = getattr(load(find(job.algorithm_name)), "verdict", done)
    return cast("Judge", verdict)


def check_cluster(job: "Job") -> None:
    """Refuse a cluster that the algorithm cannot do with, as its table asks for it.

    Raises:
        JobError: it names table and key.
    """
    algorithm = load(find(job.algorithm_name))
    check = getattr(algorithm, "check_cluster", None)
    if check is not None:
        check(job.cluster, job.algorithm)


def find(name: object) -> EntryPoint:
    """Return the entry point of this name; nothing is imported yet.

    Raises:
        JobFileError: there is none; it lists those installed.
    """
    installed = _installed(tuple(sys.path))
    if isinstance(name, str) and name in installed:
        return installed[name]
    known = ", ".join(sorted(installed)) or "none; is the package itself installed?"
    near = nearest(str(name), installed) if installed else ""
    mend = near if near.startswith("Did") else ""
    raise JobFileError(f"is not installed. {mend} Installed: {known}".replace("  ", " "))


@cache  # every directory of the path is listed, and every package's file read
def _installed(_path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def load(point: EntryPoint) -> Algorithm:
    """Return the algorithm itself, which may import torch.

    Raises:
        JobFileError: it cannot be imported.
    """
    try:
        return cast("Algorithm", point.load())
    except (ImportError, AttributeError) as error:
        raise JobFileError(
            f"{point.value}, installed as algorithm {point.name!r}, cannot be imported: {error}"
        ) from error
