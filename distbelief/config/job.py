"""What the end of an algorithm that ends by itself means. Its import loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, Protocol, cast

import msgspec

from distbelief.config import toml
from distbelief.core import units
from distbelief.errors import JobFileError


# A job as frozen structs, one per table of the job file, checked and resolved.
#
# Times are in seconds here; in the file they carry a unit ("10 s"). Importing this module
# does not import torch, nor does a typing error in one of the tables defined here.

if TYPE_CHECKING:  # it imports torch
    from distbelief.task.task import DataSpec, ModelSpec, TaskSpec


QUANTITIES: Final[Mapping[str, Mapping[str, units.Dimension]]] = {
    "cluster": {"patience": "time"},
    "evaluation": {"every": "time"},
    "stop": {"seconds": "time"},
    "output": {"report_every": "time", "snapshot_every": "time"},
}
"""Which keys of which tables are written with units."""


AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Processes = Annotated[int, msgspec.Meta(ge=1, le=4096)]  # of one machine
Copies = Annotated[int, msgspec.Meta(ge=1, le=2)]  # one leads, one is its second
Threads = Annotated[int, msgspec.Meta(ge=1, le=1024)]  # OpenMP crashes at too many
Positive = Annotated[float, msgspec.Meta(gt=0)]
DEVICES: Final = ("cpu", "cuda")
PATIENCE_SECONDS: Final = 600.0
"""Of roles with a silent supervisor, unless the job says otherwise."""

PATIENCE_SECONDS_MIN: Final = 2.0
"""Several heartbeats, each of which the supervisor answers."""


class ClusterTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [cluster].

    Attributes:
        replicas: Model replicas, each with its own part of the data.
        shards: Parameter server shards.
        shard_copies: Processes that keep each shard: with 2, one takes over at once
            where the other is lost, and nothing acknowledged is lost with it.
        threads: Of torch, in each replica's process, or each of its machines'.
        partitions: Machines per replica: of more than one, each computes its part of
            the model. The planner says which part, and plan.json in the run directory.
        plan: Path of a plan.json to obey exactly, instead of `partitions`.
        pins: Layers that must be split so, for the planner: "conv1=grid:3x3".
        machines: What machines the planner plans for: a ready-made cluster's name, the
            path of a cluster file, or "here" for machines like this one.
        device: What replicas compute on: "cpu" or "cuda".
        shared_memory: Whether roles of one host share memory; false sends all values
            as messages, as between hosts.
        patience: Seconds without a word of the supervisor, after which every role ends,
            the shards once they have saved; "10 min" in the file.
    """

    replicas: Processes = 1
    shards: Processes = 1
    shard_copies: Copies = 1
    threads: Threads = 1
    partitions: Processes = 1
    plan: str | None = None
    pins: tuple[str, ...] = ()
    machines: str = "here"
    device: str = "cpu"
    shared_memory: bool = True
    patience: Positive = PATIENCE_SECONDS

    def __post_init__(self) -> None:
        """Refuse unknown devices, a plan that is none, and too little patience."""
        if self.patience < PATIENCE_SECONDS_MIN:
            raise JobFileError(
                f"patience = {units.show(self.patience, 'time')}: wants at least "
                f"{PATIENCE_SECONDS_MIN:g} s, or roles would end at every hiccup"
            )
        if self.device not in DEVICES:
            raise JobFileError(f"device = {self.device!r}: wants {' or '.join(map(repr, DEVICES))}")
        if self.plan is not None and not self.plan.endswith(".json"):
            raise JobFileError(
                f"plan = {self.plan!r}: wants the path of a plan.json, as "
                "distbelief partition --out plan.json writes it"
            )
        self._check_pins()

    def _check_pins(self) -> None:
        """Refuse pins that pin nothing, or that nobody would ask for."""
        if self.pins and self.plan is not None:
            raise JobFileError(
                f"pins = {list(self.pins)!r} beside plan = {self.plan!r}, which says "
                "already how layers are split: leave one of them out"
            )
        if self.pins and self.partitions == 1:
            raise JobFileError(
                f"pins = {list(self.pins)!r} with partitions = 1, where nothing is "
                "split: give more partitions, or leave them out"
            )
        places: dict[str, str] = {}
        for pin in self.pins:
            name, _, split = pin.partition("=")
            if not (name and split):
                raise JobFileError(
                    f"pins has {pin!r}, which pins nothing: write LAYER=SPLIT, as in "
                    "'conv1=grid:3x3'"
                )
            if places.setdefault(name, split) != split:
                raise JobFileError(
                    f"pins has {name!r} twice, {places[name]!r} and {split!r}: keep one"
                )

    @property
    def is_split(self) -> bool:
        """Whether a replica is made of machines, each of which has a part of it."""
        return self.plan is not None or self.partitions > 1 or self.device != DEVICES[0]


class EvaluationTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [evaluation].

    Attributes:
        metric: "accuracy", another known name, or an import path; None chooses by the
            loss ("accuracy" for "cross_entropy"), and for one of your own by the
            targets ("accuracy" for whole numbers, else "mse"). Of a function of your
            own higher is better, unless it has an attribute higher_is_better = False.
        subset: Held-out samples of a usual evaluation; None means all. The last one
            of a job always takes all.
        every: Seconds between evaluations; "10 s" in the file.
        seed: Of the choice of the subset.
    """

    metric: str | None = None
    subset: AtLeastOne | None = None
    every: Positive = 10.0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0


class StopTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [stop]: the job ends by whichever of these comes first.

    At least one is needed, unless the algorithm ends by itself.

    Attributes:
        epochs: Passes over the training data, by all replicas together.
        samples: Samples trained on, by all replicas together.
        seconds: Time of training; "10 min" in the file, or a number of seconds.
        accuracy: The held-out metric reaches this, 0 to 1: falls to it, where lower is
            better.
        loss: The held-out loss (without [data.test]: of training) falls to this.
    """

    epochs: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None
    samples: AtLeastOne | None = None
    seconds: Positive | None = None
    accuracy: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        """Refuse a loss that nothing can be compared with."""
        if self.loss is not None and not math.isfinite(self.loss):
            raise JobFileError(f"loss = {self.loss}: wants a finite number")

    @property
    def is_empty(self) -> bool:
        """Whether there is no rule at all."""
        return all(getattr(self, name) is None for name in self.__struct_fields__)


class OutputTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [output].

    Attributes:
        directory: Run directory, relative to the current directory.
        report_every: Seconds between lines of progress; "2 s" in the file.
        snapshot_every: Seconds between snapshots; "30 s" in the file. Under a
            coordinator, for whose snapshots all replicas wait, longer where these
            would take more than 2 % of the time.
    """

    directory: str
    report_every: Positive = 2.0
    snapshot_every: Positive = 30.0


class SourceTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [source], which the program writes into the job as it ran.

    Attributes:
        file: The job file, as it was named.
        import_paths: Directories, absolute, where import paths are looked up first.
    """

    file: str
    import_paths: tuple[str, ...] = ()


class DataTables(msgspec.Struct, frozen=True, kw_only=True):
    """Tables [data.train] and [data.test]."""

    train: DataSpec
    test: DataSpec | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job, checked and resolved.

    Attributes:
        model: Table [model].
        data: Tables [data.train] and [data.test].
        algorithm_name: [algorithm] name.
        algorithm: The rest of that table, a struct of the algorithm's own.
        cluster: Table [cluster].
        evaluation: Table [evaluation].
        stop: Table [stop].
        output: Table [output].
        name: What to call the job; by default the run directory's own name.
        source: The job file, as it was named.
        import_paths: Directories, absolute, where import paths are looked up first.
    """

    model: ModelSpec
    data: DataTables
    algorithm_name: str
    algorithm: msgspec.Struct
    cluster: ClusterTable
    evaluation: EvaluationTable
    stop: StopTable
    output: OutputTable
    name: str
    source: str
    import_paths: tuple[str, ...]

    @property
    def task(self) -> TaskSpec:
        """What is learnt: model, data, loss, metric."""
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
        """[algorithm] loss."""
        return cast("_Learns", self.algorithm).loss

    @property
    def batch_size(self) -> int:
        """Samples that a replica computes at once: its batch, or a portion of one."""
        portion: object = getattr(self.algorithm, "portion", None)
        if isinstance(portion, int):
            return portion
        return cast("_Learns", self.algorithm).batch_size

    def to_tables(self) -> dict[str, object]:
        """Return the job as plain tables, quantities with their units."""
        algorithm = {"name": self.algorithm_name} | _plain(self.algorithm)
        test = self.data.test
        return {
            "name": self.name,
            "model": _plain(self.model),
            "data": {"train": _plain(self.data.train)}
            | ({} if test is None else {"test": _plain(test)}),
            "algorithm": algorithm,
            "cluster": _plain(self.cluster, QUANTITIES["cluster"]),
            "evaluation": _plain(self.evaluation, QUANTITIES["evaluation"]),
            "stop": _plain(self.stop, QUANTITIES["stop"]),
            "output": _plain(self.output, QUANTITIES["output"]),
            "source": {"file": self.source, "import_paths": list(self.import_paths)},
        }

    def to_toml(self) -> str:
        """Return the job as a job file."""
        return toml.write(self.to_tables())

    def to_json(self) -> bytes:
        """Return the job as JSON, for `from_json` in another process."""
        return msgspec.json.encode(self.to_tables())


class _Learns(Protocol):
    """What the table of every algorithm has."""

    @property
    def loss(self) -> str: ...

    @property
    def batch_size(self) -> int: ...


def _plain(
    struct: msgspec.Struct, quantities: Mapping[str, units.Dimension] | None = None
) -> dict[str, object]:
    """Return a struct as a table: without None, quantities with their units."""
    table = cast("dict[str, object]", _without_none(msgspec.to_builtins(struct)))
    for key, dimension in (quantities or {}).items():
        if key in table:
            table[key] = units.show(cast("float", table[key]), dimension)
    return table


def _without_none(value: object) -> object:
    match value:
        case dict():
            return {k: _without_none(v) for k, v in value.items() if v is not None}
        case list() | tuple():
            return [_without_none(item) for item in value]
        case _:
            return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """On a coordinator that has ended.

    Attributes:
        reason: Why it has, for the user.
        failed: Whether the job has failed with it.
    """

    reason: str
    failed: bool = False


Judge = Callable[[Mapping[str, float]], Verdict]
"""From the last counters of a coordinator."""


def done(counters: Mapping[str, float]) -> Verdict:
    """Return what is said if nobody knows more."""
    del counters
    return Verdict(reason="the coordinator is done")
