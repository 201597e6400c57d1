"""A machine's program as operations on slots, each written once: what is executed.

    instruction             operation   reads                   writes
    Fetch, Read, Receive    Enter       nothing                 a slot per region
    Forward, Partial        Task        states, parameters      the output
    Combine                 Join        contributions           the output
    Backward                Back        the output's gradient   of what was read
    Send, Push              Leave       a tensor per region     nothing

A slot holds a region of something for one micro-batch; those of parameters and of their
gradients are there once, for all. An operation waits for what writes the slots that it
reads, and for nothing else: the order of the program is only the order of preference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from distbelief.execution.slots import Gather
from distbelief.graph.graph import Layer
from distbelief.graph.region import Region
from distbelief.program.instructions import Fetch, Message, Read, Receive


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InputOp:
    """Something comes from outside: one tensor per region.

    Attributes:
        instruction: What.
        writes: A slot per region.
        items: If it is fetched: which these are of all that is.
        once: Whether all micro-batches share it.
    """

    instruction: Fetch | Read | Receive
    writes: tuple[int, ...]
    items: tuple[int, ...]
    once: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOp:
    """A region, or what a part contributes, is computed.

    Attributes:
        layer: Of which.
        region: Which, or which part.
        partial: Whether it is a part.
        reads: Its inputs, then its tensors.
        n_inputs: How many of these are inputs.
        words: The kind's words for its tensors.
        goes_back: Per input and tensor, whether its gradient is wanted.
        writes: The slot of the output.
        seed: The slot of its gradient, if that begins here.
        flops: For one sample.
    """

    layer: Layer
    region: Region
    partial: bool
    reads: tuple[Gather, ...]
    n_inputs: int
    words: tuple[str, ...]
    goes_back: tuple[bool, ...]
    writes: int
    seed: int | None
    flops: float
    once: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CombineOp:
    """Contributions, or gradients of what is combined, are put together."""

    layer: Layer
    reads: tuple[Gather, ...]
    writes: int
    seed: int | None
    once: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOp:
    """The gradients of what a task read.

    If another machine waits for what comes of the gradient of an input (`urgency`), and
    it has no work in common with those of the tensors, these are an operation of their
    own: it is done while messages travel (Qi et al. 2024, "Zero Bubble Pipeline
    Parallelism").

    Attributes:
        task: Which operation that was.
        reads: The gradient of its output; nothing if the operation before this one,
            of the same task, has read it.
        places: Of which of its inputs and tensors, inputs first.
        writes: A slot for each of these.
        flops: For one sample.
        is_last: Whether nothing goes back through the task after this.
        can_wait: Whether it is done when there is nothing else to do.
    """

    task: int
    reads: tuple[Gather, ...]
    places: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float
    is_last: bool = True
    can_wait: bool = False
    once: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOp:
    """Tensors go out: in a message, or (item) to the parameter server."""

    message: Message | None
    reads: tuple[Gather, ...]
    items: tuple[int, ...]
    once: bool


Operation = InputOp | ForwardOp | CombineOp | BackwardOp | OutputOp


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """What a machine does with one micro-batch.

    Attributes:
        operations: In the order of preference.
        once: Per slot, whether it is there once for all micro-batches.
        added: Slots that every micro-batch adds to.
        messages: Per index of the traffic and peer, the operation: sent, and received.
        items: Tensors and their regions that this machine keeps, as it fetches them.
        losses: Slots of the loss.
        averages: Slots of new running statistics, by the item that they replace.
        outputs: Slots of layers whose outputs are wanted: layer, region, slot.
        reads: Of inputs, the regions that it needs.
        joined: Layers whose output is one sample.
        integers: Layers whose output is whole numbers.
        counts: By item of a running average, the item that counts its steps.
    """

    operations: tuple[Operation, ...]
    once: tuple[bool, ...]
    added: frozenset[int]
    sent: Mapping[tuple[int, int], int]
    received: Mapping[tuple[int, int], int]
    items: tuple[tuple[str, Region], ...]
    losses: tuple[int, ...]
    averages: Mapping[int, int]
    outputs: tuple[tuple[str, Region, int], ...]
    reads: Mapping[str, tuple[Region, ...]]
    joined: frozenset[str]
    integers: frozenset[str]
    counts: Mapping[int, int] = field(default_factory=dict)

    @property
    def trained(self) -> frozenset[int]:
        """The items that get a gradient."""
        return frozenset(
            item
            for operation in self.operations
            if isinstance(operation, OutputOp)
            for item in operation.items
        )
