"""Tasks and messages of a step.

A task computes a region of a layer on one rank. In a step a rank sends another rank at most one
message of each kind and name, however many layers read it there (DB-2).
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, final

import msgspec

from distbelief.graph.graph import Layer
from distbelief.graph.operator import Operator, PartialSums, Work, operator_of, sums_of
from distbelief.graph.region import Region
from distbelief.plans.placement import Placement


MessageKind = Literal[
    "state",  # from the rank that computed it to a reader
    "gradient",  # from a reader back to the rank that computed the state
    "partial",  # from a part of the inputs to the rank that combines
    "partial_gradient",  # from the rank that combines back to a part of the inputs
    "parameter",  # from the owner to a user
    "parameter_gradient",  # from a user back to the owner
]


@final
class Message(msgspec.Struct, frozen=True, kw_only=True):
    kind: MessageKind
    name: str  # of the layer or tensor
    sender: int  # a rank
    receiver: int
    regions: tuple[Region, ...]  # disjoint; of the layer's output, or of the tensor
    n_bytes: int  # for the whole batch


Phase = Literal["forward", "partial", "combine", "backward", "partial_backward"]


@final
class Task(msgspec.Struct, frozen=True, kw_only=True):
    layer: str
    machine: int
    phase: Phase
    region: Region  # of the output; of the first input in a partial phase
    n_bytes: float = 0.0  # that combining reads and writes, for the whole batch

    @property
    def is_partial(self) -> bool:
        return self.phase in {"partial", "partial_backward"}


class Needed(NamedTuple):
    reads: list[tuple[str, Region]]  # other layers
    uses: list[tuple[str, Region]]  # tensors, by name
    writes: Region | None  # if partial, the region of the output to which it adds


def tasks_of(layer: Layer, placement: Placement, *, batch: int) -> Iterator[Task]:
    """Yield the tasks of a layer's forward pass, `combine` tasks last."""
    partial = placement.combine is not None
    cells = list(placement.cells(layer.input_shapes[0] if partial else layer.shape))
    phase: Phase = "partial" if partial else "forward"
    for machine, region in cells:
        yield Task(layer=layer.name, machine=machine, phase=phase, region=region)
    if not partial:
        return
    # Each combining task reads all summands of its region, and writes the sum.
    written = sum(written_by(layer, region).n_elements for _, region in cells)
    n_summands = written / max(1, layer.region.n_elements)
    for machine, region in placement.owners(layer):
        yield Task(
            layer=layer.name,
            machine=machine,
            phase="combine",
            region=region,
            n_bytes=4.0 * (1 + n_summands) * region.n_elements * batch,
        )


def rule_of(layer: Layer, *, partial: bool) -> Operator | PartialSums:
    """Return what computes a layer, whole regions or partial sums."""
    return sums_of(layer) if partial else operator_of(layer)


def needed(layer: Layer, region: Region, *, partial: bool) -> Needed:
    """Return what a task needs; `region` is of the first input if `partial`."""
    rule = rule_of(layer, partial=partial)
    uses = rule.uses(layer, region)
    return Needed(
        reads=list(zip(layer.inputs, rule.reads(layer, region), strict=True)),
        uses=[(layer.tensors[argument].name, used) for argument, used in uses.items()],
        writes=written_by(layer, region) if partial else None,
    )


def written_by(layer: Layer, region: Region) -> Region:
    """Return the part of the output to which this part of the first input adds."""
    return sums_of(layer).writes(layer, region)


def work_of(layer: Layer, region: Region, *, partial: bool) -> Work:
    kind = operator_of(layer)
    if not partial:
        return kind.work(layer, region)
    # A part takes its share of the whole layer, and writes everything to which it adds.
    whole = kind.work(layer, layer.region)
    share = region.n_elements / max(1, Region.of(*layer.input_shapes[0]).n_elements)
    return Work(
        forward=share * whole.forward,
        backward=share * whole.backward,
        n_elements=share * whole.n_elements + written_by(layer, region).n_elements,
    )
