"""Computations of single regions: which there are, and what they need and cost."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, final

import msgspec

from distbelief.graph.kind import Work, kind_of
from distbelief.graph.layer import Layer
from distbelief.graph.region import Region
from distbelief.program.placement import Placement


Phase = Literal["forward", "partial", "combine", "backward", "partial_backward"]


@final
class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One computation.

    Attributes:
        layer: Of which layer.
        machine: Whose.
        phase: Which half of the step, and of what.
        region: Of the output; of the first input if the phase is of partial outputs.
        flops: Floating point operations, for the whole batch.
        n_bytes: Read and written, likewise; tensors count once.
    """

    layer: str
    machine: int
    phase: Phase
    region: Region
    flops: float
    n_bytes: float

    @property
    def is_partial(self) -> bool:
        """Whether it is of a part of the first input."""
        return self.phase in {"partial", "partial_backward"}


class Needed(NamedTuple):
    """What a task needs.

    Attributes:
        reads: Of other layers.
        uses: Of tensors, by their names.
        writes: The region of the output that it adds to, if it is partial.
    """

    reads: list[tuple[str, Region]]
    uses: list[tuple[str, Region]]
    writes: Region | None


def tasks_of(layer: Layer, placement: Placement, *, batch: int) -> Iterator[Task]:
    """Yield the tasks of a layer's forward pass, those that combine at the end."""
    partial = placement.combine is not None
    shape = layer.input_shapes[0] if partial else layer.shape
    for machine, region in placement.cells(shape):
        uses = needed(layer, region, partial=partial).uses
        n_parameters = sum(used.n_elements for _, used in uses)
        work = work_of(layer, region, partial=partial)
        yield Task(
            layer=layer.name,
            machine=machine,
            phase="partial" if partial else "forward",
            region=region,
            flops=work.forward * batch,
            n_bytes=4.0 * (work.n_elements * batch + n_parameters),
        )
    if not partial:
        return
    written = sum(written_by(layer, region).n_elements for _, region in placement.cells(shape))
    n_summands = written / max(1, layer.region.n_elements)
    for machine, region in placement.owners(layer):
        yield Task(
            layer=layer.name,
            machine=machine,
            phase="combine",
            region=region,
            flops=float(region.n_elements * batch),
            n_bytes=4.0 * (1 + n_summands) * region.n_elements * batch,
        )


def backward_of(task: Task, layer: Layer, *, batch: int) -> Task:
    """Return the task that goes back through one of a forward pass."""
    work = work_of(layer, task.region, partial=task.is_partial)
    return msgspec.structs.replace(
        task,
        phase="partial_backward" if task.is_partial else "backward",
        flops=work.backward * batch,
        n_bytes=2 * task.n_bytes,  # as much again, for gradients
    )


def needed(layer: Layer, region: Region, *, partial: bool) -> Needed:
    """Return what computing this region, or this part of the first input, needs."""
    kind = kind_of(layer)
    if partial:
        assert kind.partial is not None, layer.name
        reads = kind.partial.reads(layer, region)
        uses = kind.partial.uses(layer, region)
        writes: Region | None = kind.partial.writes(layer, region)
    else:
        reads, uses = kind.reads(layer, region), kind.uses(layer, region)
        writes = None
    return Needed(
        reads=list(zip(layer.inputs, reads, strict=True)),
        uses=[(layer.tensors[word].name, used) for word, used in uses.items()],
        writes=writes,
    )


def written_by(layer: Layer, region: Region) -> Region:
    """Return the part of the output that this part of the first input adds to."""
    rule = kind_of(layer).partial
    assert rule is not None, layer.name
    return rule.writes(layer, region)


def work_of(layer: Layer, region: Region, *, partial: bool) -> Work:
    """Return what a task costs for one sample.

    Partial sums take their share of the whole, but each writes all that it adds to.
    """
    kind = kind_of(layer)
    if not partial:
        return kind.work(layer, region)
    assert kind.partial is not None, layer.name
    whole = kind.work(layer, layer.region)
    share = region.n_elements / max(1, Region.of(*layer.input_shapes[0]).n_elements)
    written = kind.partial.writes(layer, region).n_elements
    return Work(
        forward=share * whole.forward,
        backward=share * whole.backward,
        n_elements=share * whole.n_elements + written,
    )
