"""The job file as frozen structs, one per table, checked and resolved.

Times are in seconds here; in the file they carry a unit ("10 s"). Importing this module does not
import torch, so an error in one of these tables is found at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from distbelief.config import tables, toml
from distbelief.config.algorithms import facts_of
from distbelief.core import units
from distbelief.core.errors import JobFileError


if TYPE_CHECKING:  # it imports torch
    from distbelief.task.task import DataSpec, ModelSpec, TaskSpec


AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Processes = Annotated[int, msgspec.Meta(ge=1, le=4096)]  # on one host
Replicas = Annotated[int, msgspec.Meta(ge=1, le=1 << 14)]  # as many as a shard has clients
Copies = Annotated[int, msgspec.Meta(ge=1, le=2)]  # a primary, and maybe a backup
Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]  # OpenMP crashes at too many
# "10 s", "1 epoch"
Period = Annotated[float, msgspec.Meta(gt=0, extra={"unit": "period"})]
Seconds = Annotated[float, msgspec.Meta(gt=0, extra={"unit": "time"})]  # "10 s" in the file
DEVICES: Final = ("cpu", "cuda")
PATIENCE_SECONDS: Final = 600.0
PATIENCE_SECONDS_MIN: Final = 2.0  # several heartbeats, each of which the supervisor answers


# Where shards run: on the supervisor's host, one on each host, or on the hosts of replicas.
ShardPlacement = Literal["here", "spread", "beside replicas"]
Rounding = Literal["same", "any"]

METRICS_MAX: Final = 32
FIT_MAX: Final = 64  # replicas of a job that takes as many as fit, on hosts that may join


class Elastic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Value of [cluster] replicas: they come and go with hosts, where data are dealt."""

    min: Replicas = 1  # training begins once so many are there
    max: Replicas | Literal["as many as fit"] = "as many as fit"  # the others wait for a host

    def __post_init__(self) -> None:
        if isinstance(self.max, int) and self.max < self.min:
            raise JobFileError(f"min = {self.min} and max = {self.max}: wants no more than max")


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Value of [cluster] partitions: each replica has the ranks that suit the hosts that joined."""

    max: Processes  # ranks of a replica


class ClusterTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replicas: Replicas | Elastic = 1  # each with its own part of the data, unless it is dealt
    shards: Processes = 1
    # Processes that keep each shard: with 2, a backup takes over at once when the primary is lost,
    # and no acknowledged push is lost.
    shard_copies: Copies = 1
    threads: Threads = 1  # of torch, in each process of a replica
    # Ranks per replica, or of each in turn, or at most; with more than one, each computes its part
    # of the model. The planner chooses the parts (plan.json in the run directory).
    partitions: Processes | tuple[Processes, ...] | Fit = 1
    plan: str | None = None  # path of a plan.json to use instead of `partitions`
    pins: tuple[
        str, ...
    ] = ()  # layers that the planner must split in a given way: "conv1=grid:3x3"
    # Compare split replicas with one process before the start, on some of the training data.
    proof: bool = True
    # Cluster that the planner plans for: a built-in name, the path of a cluster file, or "here" for
    # hosts like this one.
    machines: str = "here"
    device: str = "cpu"  # where replicas compute
    shared_memory: bool = True  # if false, roles of one host exchange messages, as between hosts
    # Folder or URL for the checkpoints; None: in the run directory.
    checkpoints: str | None = None
    placement: ShardPlacement = "here"  # of shards, where other hosts have joined
    rounding: Rounding = "same"  # of hosts that join
    # Silence of the supervisor after which every role ends, the shards once they have saved.
    patience: Seconds = PATIENCE_SECONDS

    def __post_init__(self) -> None:
        if self.patience < PATIENCE_SECONDS_MIN:
            raise JobFileError(
                f"patience = {units.show(self.patience, 'time')}: wants at least "
                f"{PATIENCE_SECONDS_MIN:g} s, or roles would end at every short pause"
            )
        if self.device not in DEVICES:
            raise JobFileError(f"device = {self.device!r}: wants {' or '.join(map(repr, DEVICES))}")
        if self.checkpoints == "":
            raise JobFileError('checkpoints = "": wants a folder or a URL, or leave it out')
        if self.plan is not None and not self.plan.endswith(".json"):
            raise JobFileError(
                f"plan = {self.plan!r}: wants the path of a plan.json "
                "(distbelief partition --out plan.json writes one)"
            )
        if self.pins and self.plan is not None:
            raise JobFileError(
                f"pins = {list(self.pins)!r} and plan = {self.plan!r}: the plan already "
                "says how layers are split; leave one of them out"
            )
        said, counts = f"partitions = {self.partitions_text}", self.partitions
        if isinstance(counts, tuple) and len(counts) != self.replicas:
            replicas = toml.excerpt(msgspec.to_builtins(self.replicas))
            raise JobFileError(
                f"{said} is for {len(counts)} replicas, and replicas = {replicas}: list as many "
                "numbers as there are replicas, or write one number for all"
            )
        if self.plan is not None and not isinstance(counts, int):
            raise JobFileError(
                f"{said} and plan = {self.plan!r}: one plan splits every replica alike; leave one "
                "of them out"
            )
        if self.pins and self.partitions_max == 1:
            raise JobFileError(
                f"pins = {list(self.pins)!r} with partitions = 1, which splits nothing: "
                "use more partitions, or leave pins out"
            )
        places: dict[str, str] = {}
        for pin in self.pins:
            name, _, split = pin.partition("=")
            if not (name and split):
                raise JobFileError(f"pins has {pin!r}: write LAYER=SPLIT, as in 'conv1=grid:3x3'")
            if places.setdefault(name, split) != split:
                raise JobFileError(
                    f"pins has {name!r} twice, {places[name]!r} and {split!r}: keep one"
                )

    @property
    def partitions_max(self) -> int:
        return max(self.partitions_wanted)

    @property
    def partitions_wanted(self) -> tuple[int, ...]:
        """The numbers of ranks that a replica may have."""
        match self.partitions:
            case Fit(max=most):
                return tuple(range(1, most + 1))
            case tuple():
                return tuple(sorted({*self.partitions}))
            case count:
                return (count,)

    @property
    def partitions_text(self) -> str:
        """The value of `partitions` as it stands in a job file."""
        return toml.excerpt(msgspec.to_builtins(self.partitions))

    def check_formed(self) -> None:
        """Raise JobFileError if the ranks of replicas follow from hosts, and none may join."""
        if isinstance(self.partitions, Fit):
            raise JobFileError(
                f"[cluster] partitions = {self.partitions_text} chooses by the hosts that join: "
                "add --listen (simulate: --cluster), or give a number or a list"
            )

    @property
    def n_replicas(self) -> int:
        """The number of replicas, or the most that there may be."""
        most = self.replicas.max if isinstance(self.replicas, Elastic) else self.replicas
        return most if isinstance(most, int) else FIT_MAX

    @property
    def replicas_min(self) -> int:
        return self.replicas.min if isinstance(self.replicas, Elastic) else 1

    def fitted(self, n_cores: int) -> ClusterTable:
        """Return the table for a job that stays on a host of so many cores."""
        if not isinstance(self.replicas, Elastic) or isinstance(self.replicas.max, int):
            return self
        most = max(self.replicas.min, n_cores // self.threads)
        replicas = msgspec.structs.replace(self.replicas, max=most)
        return msgspec.structs.replace(self, replicas=replicas)

    @property
    def is_split(self) -> bool:
        return self.plan is not None or self.partitions_max > 1

    @property
    def is_on_device(self) -> bool:
        """Whether replicas compute elsewhere than on the processor of their host."""
        return self.device != DEVICES[0]


class Passes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A period that is counted, by all replicas together: "1 epoch" in the file."""

    n: Annotated[float, msgspec.Meta(gt=0)]
    of: Literal["epoch", "sample", "step"]

    def n_samples(self, *, n_train: int, batch_size: int) -> int:
        each = {"epoch": n_train, "sample": 1, "step": batch_size}[self.of]
        return max(1, math.ceil(self.n * each))


class EvaluationTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # "accuracy", another known name, or an import path. None chooses by the loss ("accuracy" for
    # "cross_entropy"), and for your own loss by the targets ("accuracy" for whole numbers, else
    # "mse"). For your own function higher is better, unless it has higher_is_better = False.
    # Or a list of them: the first decides in [stop], and which values are the best.
    metric: str | tuple[str, ...] | None = None
    # Held-out samples of a regular evaluation; None means all. The last one of a job takes all.
    subset: AtLeastOne | None = None
    every: Period | Passes = 10.0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0  # for the choice of the subset
    averaged: bool = False  # evaluate the running averages that `ema` of the rule keeps

    def __post_init__(self) -> None:
        names = self.metric
        if isinstance(names, tuple) and not 0 < len(names) == len({*names}) <= METRICS_MAX:
            raise JobFileError(
                f"metric = {toml.excerpt(list(names))}: wants 1 to {METRICS_MAX} different names"
            )

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that it names."""
        return (self.metric,) if isinstance(self.metric, str) else self.metric or ()


class StopTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [stop]: the job ends by whichever of these comes first.

    At least one is needed, unless the algorithm ends by itself.
    """

    # Passes over the training data, by all replicas together
    epochs: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None
    samples: AtLeastOne | None = None  # trained on, by all replicas together
    steps: AtLeastOne | None = None  # of all replicas together: batch_size samples each
    seconds: Seconds | None = None  # training time; the file may also have a number of seconds
    # Target of the held-out metric: to reach, or to fall to where lower is better
    accuracy: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    loss: float | None = (
        None  # target of the held-out loss; without [data.test], of the training loss
    )
    # Evaluations in a row without an improvement of the held-out metric, after which it ends
    patience: AtLeastOne | None = None
    min_delta: Annotated[float, msgspec.Meta(ge=0)] | None = None  # smallest such improvement

    def __post_init__(self) -> None:
        if self.loss is not None and not math.isfinite(self.loss):
            raise JobFileError(f"loss = {self.loss}: wants a finite number")
        if self.min_delta is not None and self.patience is None:
            raise JobFileError(
                f"min_delta = {self.min_delta:g} is the smallest improvement for patience: add "
                "patience = 5, or leave min_delta out"
            )

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, name) is None for name in self.__struct_fields__)


class OutputTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    directory: str  # run directory, relative to the current directory
    report_every: Seconds = 2.0  # between lines of progress
    # Between checkpoints. Under a coordinator, where all replicas wait for a checkpoint, longer if
    # checkpoints would take more than 2 % of the time.
    snapshot_every: Seconds = 30.0
    # "best": the values of the best evaluation, too, in best.safetensors
    keep: Literal["last", "best"] = "last"
    # Import paths of functions and objects that see the job run
    callbacks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.directory.strip():
            raise JobFileError(
                'directory = "": name one, for example "runs/speech", or leave it out'
            )


class SourceTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [source], which the program adds to the stored job file."""

    file: str  # the job file, as it was named
    # Directories, absolute, where import paths are looked up first
    import_paths: tuple[str, ...] = ()


class DataTables(msgspec.Struct, frozen=True, kw_only=True):
    train: DataSpec
    test: DataSpec | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelSpec
    data: DataTables
    algorithm_name: str
    algorithm: msgspec.Struct  # the algorithm's own struct, from [algorithm] without its name
    cluster: ClusterTable
    evaluation: EvaluationTable
    stop: StopTable
    output: OutputTable
    name: str  # of the job; by default the run directory's name
    source: str  # the job file, as it was named
    import_paths: tuple[str, ...]  # Directories, absolute, where import paths are looked up first

    @property
    def task(self) -> TaskSpec:
        from distbelief.task.task import TaskSpec  # noqa: PLC0415 -- torch

        return TaskSpec(
            model=self.model,
            train=self.data.train,
            test=self.data.test,
            loss=self.loss,
            metric=self.evaluation.metric,
        )

    @property
    def loss(self) -> str:
        return facts_of(self).loss

    @property
    def batch_size(self) -> int:
        return facts_of(self).batch_size

    def to_tables(self) -> dict[str, object]:
        source = {"file": self.source, "import_paths": list(self.import_paths)}
        return {
            "name": self.name,
            "model": tables.encode(self.model),
            "data": {
                name: tables.encode(spec)
                for name, spec in (("train", self.data.train), ("test", self.data.test))
                if spec is not None
            },
            "algorithm": {"name": self.algorithm_name} | tables.encode(self.algorithm),
            **{
                name: tables.encode(getattr(self, name))
                for name in ("cluster", "evaluation", "stop", "output")
            },
            "source": source,
        }

    def to_toml(self) -> str:
        return toml.write(self.to_tables())

    def to_json(self) -> bytes:
        return msgspec.json.encode(self.to_tables())
