"""A rank's dataflow: operations on slots, each written once or, if a gradient, added to.

    operation                         reads                   writes
    InputOp: fetch, read, receive     nothing                 one slot per region
    ForwardOp                         inputs, parameters      the output
    CombineOp                         contributions           the output
    BackwardOp                        the output's gradient   gradients of what was read
    OutputOp: send, push              one tensor per region   nothing

A slot holds one region for one micro-batch; slots of parameters and their gradients exist
once for all. An operation waits only for the writers of its slots; their order is priority.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from distbelief.graph.graph import Layer
from distbelief.graph.region import Region
from distbelief.plans.tasks import Message
from distbelief.worker.execution.slots import Gather


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InputOp:
    """Something comes from outside, one tensor per region: a message, input data, or parameters."""

    message: Message | None  # from another rank
    layer: str | None  # the input layer whose data is read
    items: tuple[int, ...]  # if parameters are fetched: their indices in `Dataflow.items`
    writes: tuple[int, ...]  # one slot per region
    once: bool  # whether all micro-batches share it


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOp:
    """Computes a region of a layer's output, or its partial sum."""

    layer: Layer
    region: Region  # of the output, or of the summed dimension if `partial`
    partial: bool
    reads: tuple[Gather, ...]  # the layer's inputs, then its tensors
    n_inputs: int  # how many of `reads` are inputs
    tensor_names: tuple[str, ...]  # the operator's argument names of the tensors
    needs_gradient: tuple[bool, ...]  # per input and tensor
    writes: int  # the slot of the output
    seed: int | None  # the slot of its gradient, if the backward pass begins here
    flops: float  # for one sample
    once: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CombineOp:
    """Combines contributions to an output, or gradients of a combined output."""

    layer: Layer
    reads: tuple[Gather, ...]
    writes: int
    seed: int | None
    once: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOp:
    """Computes the gradients of what a forward operation read.

    The gradients of tensors are an operation of their own if another rank waits for those of
    the inputs and the two share no work: they run while messages travel (Qi et al. 2024, "Zero
    Bubble Pipeline Parallelism").
    """

    forward: int  # index of the forward operation
    # The gradient of its output; empty if an earlier operation of the same forward has read it.
    reads: tuple[Gather, ...]
    places: tuple[int, ...]  # positions in the forward operation's `reads`, inputs first
    writes: tuple[int, ...]  # one slot per place
    flops: float  # for one sample
    is_last: bool = True  # no other operation needs the autograd graph after this one
    can_wait: bool = False  # runs when nothing else can
    once: bool = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOp:
    """Tensors leave: in a message, or (items) to the parameter server."""

    message: Message | None
    reads: tuple[Gather, ...]
    items: tuple[int, ...]
    once: bool


Operation = InputOp | ForwardOp | CombineOp | BackwardOp | OutputOp


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """What a rank computes for one micro-batch."""

    operations: tuple[Operation, ...]  # in order of priority
    once: tuple[bool, ...]  # per slot, whether it exists once for all micro-batches
    added: frozenset[int]  # slots that every micro-batch adds to
    # Operation by (index of the message in the traffic, receiver).
    sent: Mapping[tuple[int, int], int]
    # Operation by (index of the message in the traffic, sender).
    received: Mapping[tuple[int, int], int]
    # Tensors and their regions that this rank keeps, as it fetches them.
    items: tuple[tuple[str, Region], ...]
    losses: tuple[int, ...]  # slots of the loss
    averages: Mapping[int, int]  # slots of new running averages, by the item that they replace
    # Layers whose outputs are wanted: layer, region, slot.
    outputs: tuple[tuple[str, Region, int], ...]
    reads: Mapping[str, tuple[Region, ...]]  # of each input layer, the regions needed
    joined: frozenset[str]  # layers whose output is one sample for the whole batch
    integers: frozenset[str]  # layers with an integer output
    # By item of a running average, the item that counts its steps.
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
