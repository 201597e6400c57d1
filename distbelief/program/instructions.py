"""Computations of single regions: which there are, and what they need and cost."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, final

import msgspec

from distbelief.graph.graph import Layer
from distbelief.graph.operator import Work, operator_of
from distbelief.graph.region import Region
from distbelief.program.placement import Placement


# What one machine does in a step, as data: the instructions of its program.
#
#     Fetch, Read                     from the parameter server; from the data
#     Send, Receive                   one message to, or from, another machine
#     Forward, Partial, Combine       compute a region of a layer
#     Backward                        its gradient, added to those of what it read
#     Reduce, Push                    gradients of the tensors this machine keeps
#
#     kind of message       from                    to
#     state                 who computed it         who reads it
#     gradient              who read it             who computed it: a state's way back
#     partial               a part of the inputs    who combines
#     partial_gradient      who combined            a part of the inputs
#     parameter             who keeps it            who uses it
#     parameter_gradient    who uses it             who keeps it
#
# Sends do not wait; receives do. A machine sends another at most one message of each kind
# and name in a step, however many layers there read it (DB-2).

MessageKind = Literal[
    "state", "gradient", "partial", "partial_gradient", "parameter", "parameter_gradient"
]


@final
class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What goes from one machine to another.

    Attributes:
        kind: What it is part of.
        name: Of the layer, or of the tensor.
        sender: Machine.
        receiver: Another one.
        regions: Disjoint; of the layer's output (of what partial outputs are of), or of
            the tensor.
        n_bytes: For the whole batch.
    """

    kind: MessageKind
    name: str
    sender: int
    receiver: int
    regions: tuple[Region, ...]
    n_bytes: int


@final
class Fetch(msgspec.Struct, frozen=True):
    """Parameter server -> machine: what it keeps of a tensor."""

    tensor: str
    regions: tuple[Region, ...]


@final
class Read(msgspec.Struct, frozen=True):
    """Data -> machine: what it needs of an input layer."""

    layer: str
    regions: tuple[Region, ...]


@final
class Send(msgspec.Struct, frozen=True):
    """Send this message, and go on at once."""

    message: Message


@final
class Receive(msgspec.Struct, frozen=True):
    """Wait for this message; add what it holds if it is a gradient or partial."""

    message: Message


@final
class Forward(msgspec.Struct, frozen=True):
    """Compute a region of a layer's output."""

    layer: str
    region: Region


@final
class Partial(msgspec.Struct, frozen=True):
    """Compute what a part of a layer's first input contributes to its output."""

    layer: str
    part: Region


@final
class Combine(msgspec.Struct, frozen=True):
    """Put contributions together, the own one and those received: an output region."""

    layer: str
    region: Region


@final
class Backward(msgspec.Struct, frozen=True):
    """Add the gradients of what a region, or a part, read and used.

    Attributes:
        layer: Which.
        region: As in the `ReplicatePush` or `Partial` that it belongs to.
        partial: Whether it belongs to a `Partial`.
    """

    layer: str
    region: Region
    partial: bool = False


@final
class Reduce(msgspec.Struct, frozen=True):
    """The gradient of what it keeps of a tensor is the sum of its own and others'."""

    tensor: str
    regions: tuple[Region, ...]


@final
class Push(msgspec.Struct, frozen=True):
    """Machine -> parameter server: the gradient of what it keeps of a tensor."""

    tensor: str
    regions: tuple[Region, ...]


Instruction = Fetch | Read | Send | Receive | Forward | Partial | Combine | Backward | Reduce | Push


@final
class Program(msgspec.Struct, frozen=True):
    """All that one machine does in a step.

    Attributes:
        machine: Which.
        instructions: In this order.
    """

    machine: int
    instructions: tuple[Instruction, ...]


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
    kind = operator_of(layer)
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
    rule = operator_of(layer).partial
    assert rule is not None, layer.name
    return rule.writes(layer, region)


def work_of(layer: Layer, region: Region, *, partial: bool) -> Work:
    """Return what a task costs for one sample.

    Partial sums take their share of the whole, but each writes all that it adds to.
    """
    kind = operator_of(layer)
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
