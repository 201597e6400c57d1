"""Recurrent layers (LSTM, GRU, tanh, relu) as one layer per time step, split by units.

    x (steps, size) --> gates (steps, n_gates, units)
                          |            |            |
                        step 0 ----> step 1 ----> step 2      state (1 or 2, units)
                          |            |            |
                          '------------+------------'--> cat: hidden states (steps, units)

A part is some of the units: their rows of each gate's weight, their row of the gates, and the whole
hidden state of the step before, which ranks exchange. The cell of an LSTM stays where it is.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Protocol, final

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import Layer, TensorUse
from distbelief.graph.operator import Call, Cut, Operator, Work
from distbelief.graph.region import Interval, Region


N_GATES: Final = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def by_gate(tensors: Sequence[TensorUse], n_gates: int) -> dict[str, TensorUse]:
    """Return a weight, and its bias, once for each gate, whose rows follow each other in it."""
    words = zip(("weight", "bias"), tensors, strict=False)
    return {f"{word}{i}": use for word, use in words for i in range(n_gates)}


def _rows(layer: Layer, units: Interval) -> dict[str, Region]:
    # Some rows of each gate, or all in one box.
    n_units, found = layer.shape[-1], {}
    for word, use in layer.tensors.items():
        whole, gate = Region.of(*use.shape), int(word[-1])
        if units != (0, n_units):
            rows = (gate * n_units + units[0], gate * n_units + units[1])
            found[word] = whole.replaced(0, rows)
        elif not gate:
            found[word] = whole
    return found


# --- products ---

# torch's own LSTM uses it. MKL, which all else uses, takes twice as long on processors of AMD.
_ONEDNN: Final = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + b."""
    if _ONEDNN is None or x.device.type != "cpu" or x.dtype != torch.float32:
        return functional.linear(x, weight, bias)
    rows = x.flatten(0, -2).contiguous()
    # Each gradient is computed only if it is asked for.
    product: torch.Tensor = _Product.apply(rows, weight.detach())  # type: ignore[no-untyped-call]
    biases: torch.Tensor = _Biases.apply(weight, bias, rows.detach())  # type: ignore[no-untyped-call]
    found: torch.Tensor = (product + biases).unflatten(0, x.shape[:-1])
    return found


def _by_onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    assert _ONEDNN is not None
    found: torch.Tensor = _ONEDNN(x, weight, None, "none", [], "")
    return found


class _Context(Protocol):
    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...


@final
class _Product(torch.autograd.Function):
    # x W^T, with a gradient for x only: that of W may wait.

    @staticmethod
    @override
    def forward(ctx: _Context, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return _by_onednn(x, weight)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight,) = ctx.saved_tensors
        return _by_onednn(gradient.contiguous(), weight.t()), None


@final
class _Biases(torch.autograd.Function):
    # b for each row of x, with the gradients of W and b.

    @staticmethod
    @override
    def forward(
        ctx: _Context, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        row = x.new_zeros(()) if bias is None else bias
        return row.expand(x.shape[0], weight.shape[0])

    @staticmethod
    @override
    @once_differentiable
    def backward(
        ctx: _Context, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (x,) = ctx.saved_tensors
        for_bias = gradient.sum(0) if ctx.needs_input_grad[1] else None
        return _by_onednn(gradient.contiguous().t(), x.t()), for_bias, None


# --- operators ---


def _sums(call: Call, x: torch.Tensor) -> torch.Tensor:
    # What x adds to the gates: (batch, ..., n_gates, units).
    found = [
        torch.cat(parts) if len(parts) > 1 else parts[0]
        for start in ("weight", "bias")
        if (parts := [part for word, part in call.tensors.items() if word.startswith(start)])
    ]
    first, last = call.region.intervals[-1]
    gates: torch.Tensor = linear(x, *found).unflatten(-1, (-1, last - first))
    return gates


@final
class Gates(Operator):
    """What the inputs of all steps add to the gates: x W^T + b."""

    # input     x (steps, size)
    # tensors   weight0, ... (n_gates * units, size), bias0, ...: each has all gates; bias optional
    # output    shape (steps, n_gates, units)
    name: ClassVar[str] = "gates"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return (Cut(0), Cut(2))

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return (Region((output.intervals[0], (0, layer.input_shapes[0][1]))),)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        return _rows(layer, output.intervals[-1])

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        return self.product_work(layer, output, 2.0 * output.n_elements * layer.input_shapes[0][1])

    @override
    def compute(self, call: Call) -> torch.Tensor:
        return _sums(call, call.inputs[0])


@final
class RecurrentStep(Operator):
    """The state after one step: the hidden state, and the cell of an LSTM."""

    # inputs    gates (steps, n_gates, units); the state before (..., units), twice for an LSTM: the
    #           hidden state is its first row, the cell its last one; no state: zeros
    # tensors   weight0, ... (n_gates * units, units), bias0, ...: each has all gates; bias optional
    # options   cell: a key of `N_GATES`; step: its row of the gates
    # output    shape (1, units); of an LSTM (2, units)
    name: ClassVar[str] = "recurrent"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return (Cut(1),)

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        (_, n_gates, n_units), *states = layer.input_shapes
        step, units = layer.integer("step"), output.intervals[1]
        reads = [Region(((step, step + 1), (0, n_gates), units))]
        if states:
            reads.append(Region(((0, 1), (0, n_units))))
        if len(states) > 1:
            n_rows = states[1][0]
            reads.append(Region(((n_rows - 1, n_rows), units)))
        return tuple(reads)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        return _rows(layer, output.intervals[1])

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        _, n_gates, n_units = layer.input_shapes[0]
        start, stop = output.intervals[1]
        return self.product_work(layer, output, 2.0 * n_gates * (stop - start) * n_units)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        gates, *states = call.inputs
        shape = (gates.shape[0], call.layer.shape[1])
        hidden = states[0].squeeze(1) if states else gates.new_zeros(shape)
        given, added = gates.squeeze(1), _sums(call, hidden)
        cell = call.layer.text("cell")
        if cell == "gru":
            reset, update = torch.sigmoid(given[:, :2] + added[:, :2]).unbind(1)
            new = torch.tanh(given[:, 2] + reset * added[:, 2])
            own = hidden[:, slice(*call.region.intervals[1])]
            return (new + update * (own - new)).unsqueeze(1)
        sums = given + added
        if cell != "lstm":
            return torch.tanh(sums) if cell == "rnn_tanh" else torch.relu(sums)
        enters, keeps, new, leaves = sums.unbind(1)
        memory = torch.sigmoid(enters) * torch.tanh(new)
        if states:
            memory = memory + torch.sigmoid(keeps) * states[1].squeeze(1)
        return torch.stack([torch.sigmoid(leaves) * torch.tanh(memory), memory], 1)
