"""The plan file: the placement of every layer, for one model, batch, loss and cluster.

    {"sha256": "9f86d081...",
    "plan": {
    "version": 1,
    ...
    "placements": {
    "conv1": {"cuts": [[], [16], [16]], "machines": [0, 1, 2, 3]},
    ...

One line per layer: plans can be compared line by line. The hash is of the plan's bytes; a file that
was edited or cut off is rejected before anything runs.
"""

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, final

import msgspec
from typing_extensions import override

from distbelief.core import files
from distbelief.graph.graph import INPUT, GraphError, LayerGraph
from distbelief.graph.region import Shape
from distbelief.plans.cluster import AtLeastOne, Cluster
from distbelief.plans.placement import Placement
from distbelief.plans.step_graph import statistics_of


VERSION: Final[Literal[1]] = 1
N_BYTES_MAX: Final = 1 << 24
_N_SHOWN: Final = 6  # differences in an error
_FromZero = Annotated[float, msgspec.Meta(ge=0)]


@final
class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the planner expects of the plan."""

    step_seconds: _FromZero  # median of one training step
    p10_seconds: _FromZero  # quantile 10 %
    p90_seconds: _FromZero  # quantile 90 %
    bound_seconds: _FromZero  # lower bound for every plan
    gap: _FromZero  # of the plan's cost to the best one's, at most: 0.03 is 3 %
    solver: str  # how the plan was found
    exact: bool = False  # whether the solver has proved that no plan of its candidates is better
    costs: str = ""  # where times come from: "assumed", "profile of 2026-11-20", ...


@final
class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    fingerprint: str  # of the cluster with these machines only
    n_machines: AtLeastOne  # the first ones of the cluster


@final
class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A placement for every layer, with everything that it is valid for."""

    version: Literal[1] = VERSION  # of the file format
    model: str = ""  # import path of the function that makes it, "module:function"; or ""
    graph: str  # fingerprint of the layer graph, the loss included
    inputs: Mapping[str, Shape]  # shape of each input, without the batch
    batch: AtLeastOne  # samples of one step
    loss: str  # name or import path
    cluster: Target  # the machines that it is for
    placements: Mapping[str, Placement]  # of each layer except inputs
    predicted: Prediction | None = None  # None for a plan that the planner has not made
    micro_batches: AtLeastOne = 1  # parts into which the batch is cut
    captured: bytes = b""  # the layer graph, by `packed`: ranks need not capture the model again

    def __post_init__(self) -> None:
        if self.micro_batches > self.batch:
            raise GraphError(
                f"micro_batches is {self.micro_batches} in the plan: use at most the batch, "
                f"{self.batch}"
            )
        for layer, placement in self.placements.items():
            placement.check_cells(layer, n_machines=self.cluster.n_machines)

    @override
    def __repr__(self) -> str:
        of, n = self.cluster.name, self.cluster.n_machines
        return f"<Plan of {self.model or 'a model'}, {n} machines of {of}, batch {self.batch}>"

    @property
    def machines(self) -> list[int]:
        """Those that compute something, by their index in the cluster."""
        return sorted(
            {machine for placed in self.placements.values() for machine in placed.computing}
        )

    def save(self, path: Path | str) -> None:
        """Write the plan file, whole or not at all; StorageError on failure."""
        files.write(Path(path), encode(self))

    def captured_graph(self) -> LayerGraph:
        """Return the plan's graph, with its loss; GraphError if it has none, or another one."""
        try:
            content = zlib.decompressobj().decompress(self.captured, N_BYTES_MAX)
            graph = msgspec.msgpack.decode(content, type=LayerGraph)
        except (zlib.error, msgspec.DecodeError, RecursionError) as error:
            raise GraphError(f"the plan has no layer graph ({error}): plan again") from None
        if graph.fingerprint != self.graph:
            raise GraphError(
                f"the plan is for layer graph {self.graph}, but holds {graph.fingerprint}: plan "
                "again"
            )
        return graph

    def check(self, graph: LayerGraph, *, batch: int, loss: str, cluster: Cluster | None) -> None:
        """Check that the plan is valid for this job.

        The graph has its loss; `cluster` is None if the figures of its machines are unknown.
        GraphError if it is not: names what differs, in the plan and here.
        """
        compared: list[tuple[str, object, object]] = [
            ("the loss", self.loss, loss),
            ("the batch", self.batch, batch),
            *_each("input", self.inputs, _inputs(graph)),
        ]
        if cluster is not None:
            n_planned = self.cluster.n_machines
            n = min(n_planned, len(cluster))
            figures = cluster.first(n).fingerprint
            compared.append(("the number of machines", n_planned, n))
            if n == n_planned and figures != self.cluster.fingerprint:
                planned = f"{self.cluster.name} ({self.cluster.fingerprint})"
                compared.append(("the cluster", planned, f"{cluster.name} ({figures})"))
        placed = {layer.name: "placed" for layer in graph.computed}
        # Another loss or input changes the graph too: it is compared only if those agree.
        differences = _differences(compared) or _differences(
            [
                *_each("layer", dict.fromkeys(self.placements, "placed"), placed),
                ("the layer graph's fingerprint", self.graph, graph.fingerprint),
            ]
        )
        if differences:
            raise GraphError(
                f"the plan does not fit: {'; '.join(differences)}. Plan again, or use "
                "it for what it was planned for"
            )
        statistics = statistics_of(graph) if self.micro_batches > 1 else ()
        if statistics:
            raise GraphError(
                f"micro_batches is {self.micro_batches} in the plan, but layer "
                f"{statistics[0]!r} has statistics of the whole batch, or may have: plan again"
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
    model: str = "",
    micro_batches: int = 1,
) -> Plan:
    """Return a checked plan with these placements.

    The graph has its loss; the plan may use all machines of the cluster, and no others. GraphError
    if a layer is missing, unknown, or cannot be computed as placed.
    """
    target = Target(name=cluster.name, fingerprint=cluster.fingerprint, n_machines=len(cluster))
    order = {layer.name: index for index, layer in enumerate(graph.layers)}
    # In the order of the graph, so that equal plans are equal files.
    names = sorted(placements, key=lambda name: order.get(name, len(order)))
    plan = Plan(
        model=model,
        graph=graph.fingerprint,
        inputs=_inputs(graph),
        batch=batch,
        loss=loss,
        cluster=target,
        placements={name: placements[name] for name in names},
        predicted=predicted,
        micro_batches=micro_batches,
        captured=packed(graph),
    )
    plan.check(graph, batch=batch, loss=loss, cluster=cluster)
    return plan


def packed(graph: LayerGraph) -> bytes:
    """Return a graph as it is in plans: JSON would lose infinite numbers."""
    return zlib.compress(msgspec.msgpack.encode(graph))


def load(path: Path | str) -> Plan:
    """Return the plan in a file.

    GraphError if it is not a plan, has another version, or was edited or cut off; StorageError if
    the file cannot be read.
    """
    path = Path(path)
    with files.explaining(path, doing="read the plan in"), path.open("rb") as opened:
        content = opened.read(N_BYTES_MAX + 1)
    try:
        return decode(content)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from None


def encode(plan: Plan) -> bytes:
    placements = [
        b"%s: %s" % (msgspec.json.encode(name), msgspec.json.encode(placement))
        for name, placement in plan.placements.items()
    ]
    values = {
        name: msgspec.json.encode(getattr(plan, name))
        for name in plan.__struct_fields__
        if name != "placements"
    } | {"placements": b"{\n%s\n}" % b",\n".join(placements)}
    # One line per msgspec document: put together by hand, so that each layer has a line.
    lines = [b'"%s": %s' % (name.encode(), value) for name, value in values.items()]
    body = b"{\n%s\n}" % b",\n".join(lines)
    return b'{"sha256": "%s",\n"plan": %s}\n' % (_hash(body).encode(), body)


def decode(content: bytes) -> Plan:
    """Return the plan that `encode` wrote; GraphError if it is not a plan, or was changed."""
    if len(content) > N_BYTES_MAX:
        raise GraphError(f"is larger than {N_BYTES_MAX} bytes: name a plan file")
    try:
        document = msgspec.json.decode(content, type=_Document)
        body = bytes(document.plan)  # as written: the hash is of these bytes
        if _hash(body) != document.sha256:
            raise GraphError(
                f"was edited: its hash is {_hash(body)}, but the file says "
                f"{document.sha256[:64]}. Plan again"
            )
        # Before the rest: fields of another version would be errors of their own.
        version = msgspec.json.decode(body, type=_Version).version
        if version != VERSION:
            raise GraphError(
                f"is a plan of version {version}, this program reads version "
                f"{VERSION}: plan again, or use the program that wrote it"
            )
        return msgspec.json.decode(body, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GraphError(f"is not a plan, or cut off: {error}. Plan again") from None


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


def _each(
    what: str, planned: Mapping[str, object], here: Mapping[str, object]
) -> list[tuple[str, object, object]]:
    names = {**planned, **here}
    return [(f"{what} {name!r}", planned.get(name), here.get(name)) for name in names]


def _differences(compared: Iterable[tuple[str, object, object]]) -> list[str]:
    def shown(value: object) -> str:
        if isinstance(value, tuple):
            value = list(value)
        return "absent" if value is None else repr(value)

    found = [
        f"{what} is {shown(planned)} in the plan and {shown(here)} here"
        for what, planned, here in compared
        if planned != here
    ]
    more = len(found) - _N_SHOWN
    return [*found[:_N_SHOWN], f"{more} more differences"] if more > 0 else found
