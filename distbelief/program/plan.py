"""A plan as a file: who computes what, for which model, batch and cluster.

    {"sha256": "9f86d081...",
    "plan": {
    "version": 1,
    ...
    "placements": {
    "conv1": {"cuts": [[], [16], [16]], "machines": [0, 1, 2, 3]},
    ...
    }
    }}

One line per layer, so that two plans can be compared line by line. The hash is of the
plan's bytes: a file that was edited or cut off is refused, and so is a plan for
another model, batch, loss or cluster, before anything runs.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, final

import msgspec

from distbelief.core import files
from distbelief.graph.graph import INPUT, GraphError, LayerGraph
from distbelief.graph.region import Shape
from distbelief.program.cluster import Cluster
from distbelief.program.placement import Placement
from distbelief.program.step_graph import statistics_of


VERSION: Final[Literal[1]] = 1
N_BYTES_MAX: Final = 1 << 24
_N_NAMES: Final = 5


@final
class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the planner says of its plan.

    Attributes:
        step_seconds: Median time of one training step.
        p10_seconds: Of ten steps one is faster.
        p90_seconds: Of ten steps one is slower.
        bound_seconds: No plan of its candidates is faster, as far as it knows.
        gap: How far the plan's cost may be above the best one's: 0.03 is 3 %.
        solver: Which one found it.
        exact: Whether the solver proved that there is none better.
        costs: Where times come from: "assumed", "profile of 2026-11-20", ...
    """

    step_seconds: float
    p10_seconds: float
    p90_seconds: float
    bound_seconds: float
    gap: float
    solver: str
    exact: bool = False
    costs: str = ""

    def __post_init__(self) -> None:
        for name in ("step", "p10", "p90", "bound"):
            _check_number(f"{name}_seconds", getattr(self, f"{name}_seconds"))
        _check_number("gap", self.gap)


@final
class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machines that a plan is for.

    Attributes:
        name: Of their cluster.
        fingerprint: Of the cluster with these machines only.
        n_machines: How many: the first ones of the cluster.
    """

    name: str
    fingerprint: str
    n_machines: int


@final
class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who computes what.

    Attributes:
        version: Of the file's format.
        model: Import path of the function that makes it: "module:function"; or "".
        graph: Fingerprint of the layer graph, the loss included.
        inputs: Shape of each of its inputs, without the batch.
        batch: Samples of one step.
        loss: Its name or import path.
        cluster: What it is planned for.
        placements: Of each layer but the inputs.
        predicted: What the planner expects of it; None if nobody asked.
        micro_batches: Into how many parts a batch is cut.
    """

    version: Literal[1] = VERSION
    model: str = ""
    graph: str
    inputs: Mapping[str, Shape]
    batch: int
    loss: str
    cluster: Target
    placements: Mapping[str, Placement]
    predicted: Prediction | None = None
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name, count in (
            ("batch", self.batch),
            ("n_machines", self.cluster.n_machines),
            ("micro_batches", self.micro_batches),
        ):
            if count < 1:
                raise GraphError(f"{name} is {count} in the plan; use 1 or more")
        if self.micro_batches > self.batch:
            raise GraphError(
                f"micro_batches is {self.micro_batches} in the plan, for a batch of "
                f"{self.batch}; use as many or fewer"
            )
        for layer, placement in self.placements.items():
            _check_machines(layer, placement, n_machines=self.cluster.n_machines)

    @property
    def machines(self) -> list[int]:
        """The machines that have anything to do; others of the cluster are idle."""
        return sorted(
            {machine for placed in self.placements.values() for machine in placed.computing}
        )

    def save(self, path: Path | str) -> None:
        """Write it, whole or not at all.

        Raises:
            StorageError: it cannot be; a file that was there is as it was.
        """
        files.write(Path(path), encode(self))

    def check(self, graph: LayerGraph, *, batch: int, loss: str, cluster: Cluster | None) -> None:
        """Check that it is a plan for this and no other job.

        Args:
            graph: The model's, the loss appended.
            batch: Samples of one step.
            loss: As the plan has it.
            cluster: At least the machines it was planned for; None if nobody knows
                their figures.

        Raises:
            GraphError: it is not: what differs, in the plan and here; or a layer cannot
                be computed as it is placed.
        """
        differences = [
            *_differing("the loss", self.loss, loss),
            *_differing("the batch", self.batch, batch),
            *_differing_inputs(self.inputs, _inputs(graph)),
            *_differing_cluster(self.cluster, cluster),
        ]
        # A graph with another loss or input has another fingerprint in any case.
        differences = differences or _differing_graph(self, graph)
        if differences:
            raise GraphError(
                f"the plan does not fit: {'; '.join(differences)}. Plan again, or use "
                "it for what it was planned for"
            )
        statistics = statistics_of(graph) if self.micro_batches > 1 else ()
        if statistics:
            raise GraphError(
                f"micro_batches is {self.micro_batches} in the plan, and layer "
                f"{statistics[0]!r} has statistics of the whole batch, which would be "
                "those of a part: plan again"
            )
        for name, placement in self.placements.items():
            placement.check(graph[name], n_machines=self.cluster.n_machines)


def plan_for(
    graph: LayerGraph,
    placements: Mapping[str, Placement],
    *,
    batch: int,
    loss: str,
    cluster: Cluster,
    predicted: Prediction | None = None,
) -> Plan:
    """Return the plan that places the layers of `graph` so, checked.

    Args:
        graph: The model's, the loss appended.
        placements: Of each layer but the inputs.
        batch: Samples of one step.
        loss: Its name or import path.
        cluster: All machines it may use, and no others.
        predicted: What the planner expects of it.

    Raises:
        GraphError: layers are missing or unknown, or cannot be computed so.
    """
    target = Target(name=cluster.name, fingerprint=cluster.fingerprint, n_machines=len(cluster))
    order = {layer.name: index for index, layer in enumerate(graph.layers)}
    names = sorted(placements, key=lambda name: order.get(name, len(order)))
    plan = Plan(
        graph=graph.fingerprint,
        inputs=_inputs(graph),
        batch=batch,
        loss=loss,
        cluster=target,
        placements={name: placements[name] for name in names},
        predicted=predicted,
    )
    plan.check(graph, batch=batch, loss=loss, cluster=cluster)
    return plan


def load(path: Path | str) -> Plan:
    """Return the plan in a file.

    Raises:
        GraphError: it is no plan, is of another version, or was edited or cut off.
        StorageError: it cannot be read.
    """
    path = Path(path)
    try:
        with path.open("rb") as opened:
            content = opened.read(N_BYTES_MAX + 1)
    except OSError as error:
        raise files.explained(error, path, doing="read the plan in") from error
    try:
        return decode(content)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from None


def encode(plan: Plan) -> bytes:
    """Return the content of its file."""
    placements = [
        b"%s: %s" % (msgspec.json.encode(name), msgspec.json.encode(placement))
        for name, placement in plan.placements.items()
    ]
    values = {
        name: msgspec.json.encode(getattr(plan, name))
        for name in plan.__struct_fields__
        if name != "placements"
    } | {"placements": b"{\n%s\n}" % b",\n".join(placements)}
    lines = [b'"%s": %s' % (name.encode(), value) for name, value in values.items()]
    body = b"{\n%s\n}" % b",\n".join(lines)
    return b'{"sha256": "%s",\n"plan": %s}\n' % (_hash(body).encode(), body)


def decode(content: bytes) -> Plan:
    """Return the plan that `encode` wrote.

    Raises:
        GraphError: it is none, or not as it was written.
    """
    if len(content) > N_BYTES_MAX:
        raise GraphError(f"is larger than {N_BYTES_MAX} bytes: no plan")
    try:
        document = msgspec.json.decode(content, type=_Document)
        body = bytes(document.plan)
        if _hash(body) != document.sha256:
            raise GraphError(
                f"was edited after it was written: its hash is {_hash(body)}, and it "
                f"says {document.sha256[:64]}. Plan again"
            )
        version = msgspec.json.decode(body, type=_Version).version
        if version != VERSION:
            raise GraphError(
                f"is a plan of version {version}; this program reads version "
                f"{VERSION}: plan again, or use the program that wrote it"
            )
        return msgspec.json.decode(body, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GraphError(f"is no plan, or cut off: {error}. Plan again") from None


@final
class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: str
    plan: msgspec.Raw


@final
class _Version(msgspec.Struct, frozen=True):
    version: int


def _hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _inputs(graph: LayerGraph) -> dict[str, Shape]:
    return {layer.name: layer.shape for layer in graph.layers if layer.kind == INPUT}


def _check_number(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise GraphError(f"{name} is {value} in the plan; use a number, 0 or more")


def _check_machines(layer: str, placement: Placement, *, n_machines: int) -> None:
    """Check what can be checked without the layer."""
    parts = [placement]
    if placement.combine is not None:
        parts.append(placement.combine)
        if placement.combine.combine is not None:
            raise GraphError(f"{layer!r} combines twice")
    for part in parts:
        _check_cells(layer, part)
        for machine in part.machines:
            if not 0 <= machine < n_machines:
                raise GraphError(
                    f"{layer!r} is placed on machine {machine}; the plan is for "
                    f"{n_machines}, counted from 0"
                )


def _check_cells(layer: str, placement: Placement) -> None:
    n_cells = math.prod(placement.grid)
    if len(placement.machines) != n_cells:
        raise GraphError(
            f"{layer!r} is cut into {n_cells} cells, for which "
            f"{len(placement.machines)} machines are named"
        )
    for cuts in placement.cuts:
        if list(cuts) != sorted(cuts) or (cuts and cuts[0] < 0):
            raise GraphError(f"{layer!r} is cut at {list(cuts)}: cuts ascend, from 0 on")


def _differing(what: str, planned: object, here: object) -> list[str]:
    if planned == here:
        return []
    return [f"{what} is {planned!r} in the plan and {here!r} here"]


def _differing_inputs(planned: Mapping[str, Shape], here: Mapping[str, Shape]) -> list[str]:
    def shown(shapes: Mapping[str, Shape], name: str) -> str:
        return str(list(shapes[name])) if name in shapes else "absent"

    return [
        f"input {name!r} is {shown(planned, name)} in the plan and {shown(here, name)} here"
        for name in {**planned, **here}
        if planned.get(name) != here.get(name)
    ]


def _differing_cluster(planned: Target, cluster: Cluster | None) -> list[str]:
    if cluster is None:
        return []
    if len(cluster) < planned.n_machines:
        size = f"{planned.n_machines} machines"
        return [f"it is for {size}, and cluster {cluster.name!r} has {len(cluster)}"]
    here = cluster.first(planned.n_machines).fingerprint
    if here == planned.fingerprint:
        return []
    text = (
        f"the first {planned.n_machines} machines are those of cluster "
        f"{planned.name!r} ({planned.fingerprint}) in the plan and of "
        f"{cluster.name!r} ({here}) here"
    )
    return [text]


def _differing_graph(plan: Plan, graph: LayerGraph) -> list[str]:
    layers = [layer.name for layer in graph.layers if layer.kind != INPUT]
    missing = [name for name in layers if name not in plan.placements]
    unknown = [name for name in plan.placements if name not in layers]
    return [
        *([f"it places no layer {_listed(missing)}"] if missing else []),
        *([f"it places {_listed(unknown)}, not among the layers"] if unknown else []),
        *_differing("the layer graph's fingerprint", plan.graph, graph.fingerprint),
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_N_NAMES])
    rest = len(names) - _N_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
