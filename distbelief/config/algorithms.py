"""Algorithms, found by name among the entry points of installed packages."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast, final

import msgspec

from distbelief.config import toml
from distbelief.core.errors import JobError, JobFileError
from distbelief.core.formatting import nearest


if TYPE_CHECKING:  # these import torch
    from torch import nn

    from distbelief.config.job import ClusterTable, Job
    from distbelief.core.pieces import Pieces
    from distbelief.core.spans import Epochs
    from distbelief.parameter_server.policy import ExchangePolicy
    from distbelief.parameter_server.rules import UpdateRule
    from distbelief.protocol.role import Role
    from distbelief.task.task import BuildContext, TaskSpec


Config = TypeVar("Config", bound=msgspec.Struct)

GROUP: Final = "distbelief.algorithms"  # entry-point group; each names an `Algorithm`


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    reason: str  # why it has ended, for the user
    failed: bool = False  # whether the job has failed with it


def done(counters: Mapping[str, float]) -> Verdict:
    """Return the verdict for a coordinator whose end is no failure."""
    del counters
    return Verdict(reason="the coordinator is done")


def has_program(module: "nn.Module") -> bool:
    """Return whether a model is a program of rounds (`sandblaster.strads`)."""
    return getattr(getattr(module, "program", None), "types", None) is not None


def refuse_programs(module: "nn.Module", task: "TaskSpec", n_replicas: int) -> None:
    """Raise JobError for a program: gradients of a loss know nothing of what it minimizes."""
    del n_replicas
    if has_program(module):
        raise JobError(
            f"[model] {task.model.factory} is a program, which this algorithm does not run: use "
            '[algorithm] name = "sandblaster", method = "strads"'
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the program has to know of an [algorithm] table, whatever its keys are."""

    loss: str  # torch's name of it, or an import path
    batch_size: int  # samples that a replica computes at once
    exchanges: float = 2.0  # fetches and pushes of all parameters for each such batch
    seed: int = 0  # of the order of samples and of the model's random numbers
    rule: "UpdateRule | None" = None  # by which shards apply pushes; None: they only sum them
    warm_start_rule: "UpdateRule | None" = None  # by which they do before, if it is another
    n_vectors: int = 0  # that each copy of a shard holds for a coordinator, for its whole part
    inner: Mapping[str, object] | None = None  # the optimizer of local steps
    threads: int | None = (
        None  # of each replica, that share its parameters; None: one that does not
    )
    n_small_batches: int = 1  # of a step of theirs
    takes_sparse: bool = False  # gradients may be sparse
    policy: "ExchangePolicy | None" = None  # how replicas exchange
    # From the numbers of samples and replicas: how they are dealt. None: each replica has a part of
    # its own.
    epochs: "Callable[[int, Pieces | None, int], Epochs] | None" = None
    # From the numbers of samples and replicas: how many parts of each batch of all are dealt
    parts: "Callable[[int, int], int] | None" = None
    in_ring: bool = False  # replicas talk to each other
    bounds: Sequence[str] = ()  # of [model] arguments, which a resumed run may change
    epoch_share: float = 1.0  # of an epoch of dealt samples; what is left then is not waited for
    # From the number of samples done, n_samples and n_replicas: the steps of replica 0 alone that
    # are left.
    warm_start_left: Callable[[int, int, int], int] = lambda *_: 0
    warm_start_samples: int = 0  # of one or all replicas, before the algorithm begins
    ends_by_itself: bool = False  # so that [stop] may be empty
    # Of the module, the task and n_replicas: raises JobError if that cannot be trained.
    check: "Callable[[nn.Module, TaskSpec, int], None]" = refuse_programs
    verdict: Callable[[Mapping[str, float]], Verdict] = done  # by a coordinator's last counters


class Algorithm(Protocol[Config]):
    """What an entry point of the group `GROUP` names; `Config` is the struct of its table."""

    @property
    def config(self) -> type[Config]:
        """The struct of the [algorithm] table, without its `name`."""
        ...

    @property
    def fields(self) -> Sequence[str]:
        """Metrics it reports besides samples, loss and metric: counters of its coordinator."""
        ...

    @property
    def coordinator(self) -> str | None:
        """The name of the role that drives the shards; None if replicas push on their own."""
        ...

    def facts(self, config: Config, /) -> Facts: ...

    def settled(self, config: Config, cluster: "ClusterTable", /) -> Config:
        """Return the config as it runs on this cluster; JobError if it cannot."""
        ...

    def build(self, name: str, *, config: Config, context: "BuildContext") -> "Role":
        """Return the role of this name, in its own process; may take long, starts nothing."""
        ...


def algorithm_of(job: "Job") -> Algorithm[msgspec.Struct]:
    return load(find(job.algorithm_name))


def coordinator_of(job: "Job") -> str | None:
    return algorithm_of(job).coordinator


def facts_of(job: "Job") -> Facts:
    return algorithm_of(job).facts(job.algorithm)


def cores_of(job: "Job") -> int:
    """Return how many cores each process of a replica keeps busy."""
    return job.cluster.threads * (facts_of(job).threads or 1)


def settled(job: "Job") -> "Job":
    """Return the job as its algorithm runs it on its cluster; JobError if it cannot."""
    settled = algorithm_of(job).settled(job.algorithm, job.cluster)
    return msgspec.structs.replace(job, algorithm=settled)


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


def load(point: EntryPoint) -> Algorithm[msgspec.Struct]:
    """Return the algorithm itself; the import may take torch with it."""
    try:
        return cast("Algorithm[msgspec.Struct]", point.load())
    except (ImportError, AttributeError) as error:
        raise JobFileError(
            f"{point.value}, installed as algorithm {point.name!r}, cannot be imported: {error}"
        ) from error
