"""Algorithms, found by name among the entry points of installed packages."""

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final, Protocol, cast

import msgspec

from distbelief.config import toml
from distbelief.core.formatting import nearest
from distbelief.errors import JobFileError


if TYPE_CHECKING:  # these import torch
    from distbelief.config.job import Job
    from distbelief.roles.role import Role
    from distbelief.task.task import BuildContext


GROUP: Final = "distbelief.algorithms"  # entry-point group; each names an `Algorithm`


class Algorithm(Protocol):
    """What an entry point of the group `GROUP` names.

    It may also have an attribute `ends_by_itself`, a method `verdict`, which judges a coordinator's
    end by its last counters (`config.job.VerdictOf`), and methods `settled`, which completes its
    config by the [cluster] table, and `check_cluster`.
    """

    @property
    def config(self) -> type[msgspec.Struct]: ...

    @property
    def fields(self) -> Sequence[str]:
        """Metrics it reports besides samples, loss and metric: counters of its coordinator."""
        ...

    @property
    def coordinator(self) -> str | None:
        """The name of the role that drives the shards; None if replicas push on their own."""
        ...

    def build(self, name: str, *, config: object, context: "BuildContext") -> "Role": ...


def algorithm_of(job: "Job") -> Algorithm:
    return load(find(job.algorithm_name))


def coordinator_of(job: "Job") -> str | None:
    return algorithm_of(job).coordinator


def settled(job: "Job") -> "Job":
    """Return the job as its algorithm runs it on its cluster; JobError if it cannot."""
    algorithm = algorithm_of(job)
    settle = getattr(algorithm, "settled", None)
    if settle is not None:
        job = msgspec.structs.replace(job, algorithm=settle(job.cluster, job.algorithm))
    check = getattr(algorithm, "check_cluster", None)
    if check is not None:
        check(job.cluster, job.algorithm)
    return job


def find(name: object) -> EntryPoint:
    """Return the entry point of this name, without importing it."""
    if name is None:
        raise JobFileError("lacks the key 'name': give it text, such as \"downpour\"")
    installed = _installed(tuple(sys.path))
    if isinstance(name, str) and name in installed:
        return installed[name]
    known = ", ".join(sorted(installed)) or "none; is the package itself installed?"
    hint = nearest(str(name), installed, only_close=True)
    text = f"name = {toml.excerpt(name)} is not installed. {hint} Installed: {known}"
    raise JobFileError(text.replace("  ", " "))


@cache  # it lists every directory of the path and reads a file of every package
def _installed(_path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def load(point: EntryPoint) -> Algorithm:
    """Return the algorithm itself; the import may take torch with it."""
    try:
        return cast("Algorithm", point.load())
    except (ImportError, AttributeError) as error:
        raise JobFileError(
            f"{point.value}, installed as algorithm {point.name!r}, cannot be imported: {error}"
        ) from error
