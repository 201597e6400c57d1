"""What one machine does in a step, as data: the instructions of its program.

    Fetch, Read                     from the parameter server; from the data
    Send, Receive                   one message to, or from, another machine
    Forward, Partial, Combine       compute a region of a layer
    Backward                        its gradient, added to those of what it read
    Reduce, Push                    gradients of the tensors this machine keeps

    kind of message       from                    to
    state                 who computed it         who reads it
    gradient              who read it             who computed it: a state's way back
    partial               a part of the inputs    who combines
    partial_gradient      who combined            a part of the inputs
    parameter             who keeps it            who uses it
    parameter_gradient    who uses it             who keeps it

Sends do not wait; receives do. A machine sends another at most one message of each kind
and name in a step, however many layers there read it (DB-2).
"""

from typing import Literal, final

import msgspec

from distbelief.graph.region import Region


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
        region: As in the `Forward` or `Partial` that it belongs to.
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
