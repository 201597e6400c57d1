"""Operators over sliding windows: convolutions and pooling (maximum, average, L2, adaptive).

Split in space, a part needs a halo of its input, which `Window` computes. Positions outside of
[0, extent) are padding: no rank owns or sends them.
"""

import math
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final, Protocol, final

import msgspec
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import Layer, Option
from distbelief.graph.operator import Call, Cut, Operator, Work
from distbelief.graph.ops.reductions import reduction_layer
from distbelief.graph.region import Interval, Region, Shape


# --- adaptive pooling ---


class _AdaptivePool(Operator, ABC):
    # Output o of n reads [floor(o H / n), ceil((o + 1) H / n)) of H inputs.
    # input     (channels, *space), one to three dimensions of space
    maximum: ClassVar[bool]

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return (_adaptive_input_region(layer, output),)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(_adaptive_input_region(layer, output).n_elements)
        return Work(forward=n, backward=n, n_elements=n + output.n_elements)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        return _pooled(call.layer, call.region, call.inputs[0], maximum=self.maximum)


@final
class AdaptiveAveragePool(_AdaptivePool):
    """The mean of each window: means over rows, then over columns."""

    name: ClassVar[str] = "adaptive_average_pool"
    maximum: ClassVar[bool] = False


@final
class AdaptiveMaxPool(_AdaptivePool):
    """The maximum of each window; the first of equal values gets the gradient."""

    name: ClassVar[str] = "adaptive_max_pool"
    maximum: ClassVar[bool] = True


def adaptive_pool_layers(name: str, source: Layer, *, sizes: Shape, maximum: bool) -> list[Layer]:
    """Return the cheapest layer that pools (channels, *space) to (channels, *sizes)."""
    extents = source.shape[1:]
    if set(sizes) == {1} and not maximum:  # a mean over all of space, which has partial sums
        dims = range(1, len(source.shape))
        return [reduction_layer(name, [source], function="mean", dims=dims)]
    layer = Layer.of(
        name,
        AdaptiveMaxPool.name if maximum else AdaptiveAveragePool.name,
        [source],
        (source.shape[0], *sizes),
    )
    if any(extent % size for extent, size in zip(extents, sizes, strict=True)):
        return [layer]
    # Windows of equal size: plain pooling.
    window = tuple(extent // size for extent, size in zip(extents, sizes, strict=True))
    zeros, ones = (0,) * len(sizes), (1,) * len(sizes)
    plain: dict[str, Option] = {"size": window, "stride": window, "padding": zeros}
    if maximum:
        options = plain | {"dilation": ones, "ceil": False}
    else:
        options = plain | {"ceil": False, "count_include_pad": True, "divisor": None}
    kind = "max_pool" if maximum else "average_pool"
    return [msgspec.structs.replace(layer, kind=kind, options=options)]


def _window(output: int, extent: int, n_outputs: int) -> Interval:
    return (output * extent // n_outputs, -(-(output + 1) * extent // n_outputs))


def _adaptive_input_region(layer: Layer, output: Region) -> Region:
    spans = []
    for (start, stop), extent, size in zip(
        output.intervals[1:], layer.input_shapes[0][1:], layer.shape[1:], strict=True
    ):
        if start == stop:
            spans.append((0, 0))
            continue
        first, last = _window(start, extent, size), _window(stop - 1, extent, size)
        spans.append((first[0], last[1]))
    return Region((output.intervals[0], *spans))


def _pooled(layer: Layer, output: Region, tile: torch.Tensor, *, maximum: bool) -> torch.Tensor:
    # Columns first: as in torch, the first of equal values in row-major order gets the gradient.
    read = _adaptive_input_region(layer, output)
    for dim in reversed(range(1, len(layer.shape))):
        offset = read.intervals[dim][0]
        extent, size = layer.input_shapes[0][dim], layer.shape[dim]
        slices = []
        for index in range(*output.intervals[dim]):
            start, stop = _window(index, extent, size)
            window = tile.narrow(dim + 1, start - offset, stop - start)
            if maximum:
                slices.append(window.max(dim + 1).values)
            else:
                slices.append(window.mean(dim + 1))
        tile = torch.stack(slices, dim + 1)
    return tile


# --- window sums ---
#
# Summing along rows, then along columns takes 2 k additions per output instead of k * k, each over
# all maps in the order of memory: a 5 x 5 pooling takes a third of the time of `avg_pool2d`, and a
# Gaussian mean of one map less than `conv2d`, whose gradient is made for many channels.

_ROWS, _COLUMNS = -2, -1


# Weights of a window along one dimension.
Weights = tuple[float, ...]


def gaussian(size: int) -> Weights:
    """Return the weights of a Gaussian of deviation size / 4; they sum to one."""
    middle = (size - 1) / 2
    weights = [math.exp(-0.5 * ((i - middle) / (size / 4)) ** 2) for i in range(size)]
    return tuple(weight / sum(weights) for weight in weights)


def window_sums(
    x: torch.Tensor, *, rows: Weights, columns: Weights, stride: Sequence[int] = (1, 1)
) -> torch.Tensor:
    """Return weighted sums over windows: (*maps, rows out, columns out).

        y[r, q] = sum over j of v[j] (sum over i of u[i] x[r s + i, q t + j])

    Args:
        x: (*maps, rows, columns).
        rows: Weights u of a window's rows.
        columns: Weights v of its columns.
        stride: Between windows: rows, columns.

    Raises:
        ValueError: No window fits.
    """
    sums: torch.Tensor = _WindowSums.apply(  # type: ignore[no-untyped-call]
        x, rows, columns, tuple(stride)
    )
    return sums


class _Context(Protocol):
    # What autograd keeps between the passes.

    weights: tuple[Weights, Weights]
    stride: tuple[int, int]
    shape: torch.Size


@final
class _WindowSums(torch.autograd.Function):
    # In the backward pass each element of the gradient goes to all places of its window.

    @staticmethod
    @override
    def forward(
        ctx: _Context, x: torch.Tensor, rows: Weights, columns: Weights, stride: tuple[int, int]
    ) -> torch.Tensor:
        ctx.weights, ctx.stride, ctx.shape = (rows, columns), stride, x.shape
        sums = _summed(x, _ROWS, weights=rows, stride=stride[0])
        return _summed(sums, _COLUMNS, weights=columns, stride=stride[1])

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        for dim in (_COLUMNS, _ROWS):
            gradient = _scattered(
                gradient,
                dim,
                weights=ctx.weights[dim],
                stride=ctx.stride[dim],
                extent=ctx.shape[dim],
            )
        return gradient, None, None, None


def _summed(x: torch.Tensor, dim: int, *, weights: Weights, stride: int) -> torch.Tensor:
    n_windows = (x.shape[dim] - len(weights)) // stride + 1
    if n_windows < 1:
        raise ValueError(f"a window of {len(weights)} does not fit into {x.shape[dim]} places")
    total = _strided(x, dim, 0, n_windows, stride) * weights[0]
    for i, weight in enumerate(weights[1:], 1):
        total.add_(_strided(x, dim, i, n_windows, stride), alpha=weight)
    return total


def _scattered(
    gradient: torch.Tensor, dim: int, *, weights: Weights, stride: int, extent: int
) -> torch.Tensor:
    # What each of `extent` places gets from the windows that contain it.
    shape = list(gradient.shape)
    shape[dim] = extent
    total = gradient.new_zeros(shape)
    for i, weight in enumerate(weights):
        part = _strided(total, dim, i, gradient.shape[dim], stride)
        part.add_(gradient, alpha=weight)
    return total


def _strided(x: torch.Tensor, dim: int, first: int, n: int, stride: int) -> torch.Tensor:
    indices = slice(first, first + (n - 1) * stride + 1, stride)
    return x[..., indices, :] if dim == _ROWS else x[..., indices]


# --- index arithmetic ---


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window along one dimension.

        stride 2, size 3, padding 1      output      0     1     2     3
                                         reads    -1..1  1..3  3..5  5..7

    Source of the index arithmetic: Dumoulin and Visin 2016, "A guide to convolution arithmetic for
    deep learning", relationships 6 and 13.
    """

    size: int  # number of inputs of one output
    stride: int = 1  # distance between the windows of neighboring outputs
    dilation: int = 1  # distance between neighboring inputs of a window
    padding: int = 0  # positions before input 0 and after the last one
    extra: int = 0  # further positions after the last one ("same" padding of even windows)
    ceil: bool = False  # whether a last window that begins inside but ends outside counts

    def __post_init__(self) -> None:
        for name in ("size", "stride", "dilation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("padding", "extra"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")

    @property
    def span(self) -> int:
        """Distance from the first input of a window to its last, both counted."""
        return (self.size - 1) * self.dilation + 1

    def n_outputs(self, extent: int) -> int:
        """Return how many windows fit over `extent` inputs; 0 if none does."""
        slack = extent + 2 * self.padding + self.extra - self.span
        if slack < 0:
            return 0
        if not self.ceil:
            return slack // self.stride + 1
        count = -(-slack // self.stride) + 1
        # As torch does: no window begins in the padding after the last input.
        starts_outside = (count - 1) * self.stride >= extent + self.padding
        return count - starts_outside

    def reads(self, outputs: Interval, *, extent: int) -> Interval:
        """Return the hull of the inputs that these outputs read, without padding.

        Args:
            outputs: [start, stop) of the outputs.
            extent: Number of inputs.
        """
        start, stop = outputs
        if start >= stop:
            return (0, 0)
        first = start * self.stride - self.padding
        end = (stop - 1) * self.stride - self.padding + self.span
        first, end = min(max(first, 0), extent), max(min(end, extent), 0)
        return (first, max(first, end))

    def pads(self, outputs: Interval, *, extent: int) -> Interval:
        """Return how many positions are missing before and after the interval of `reads`.

        A tile of the input, padded by so many, gives exactly these outputs when the window slides
        over it without further padding.
        """
        start, stop = outputs
        if start >= stop:
            return (0, 0)
        first = start * self.stride - self.padding
        end = (stop - 1) * self.stride - self.padding + self.span
        low, high = self.reads(outputs, extent=extent)
        before = min(max(0, -first), end - first)
        return (before, end - first - before - (high - low))


# --- convolution ---

_FUNCTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)


@final
class Convolution(Operator):
    """What `torch.nn.Conv1d`, `Conv2d` and `Conv3d` compute, with zero padding."""

    # Split in space, a part needs a halo of its input and the whole weight: that is replicated, and
    # its gradient summed. Split by channels, it needs the whole input, or its groups' channels.
    # tensors   weight (channels out, channels in / groups, *window); bias (channels out,)
    # options   stride, padding, extra, dilation: a number per dimension of space; groups
    name: ClassVar[str] = "convolution"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        groups = layer.integer("groups")
        unit = layer.shape[0] // groups if groups > 1 else 1
        return (Cut(0, unit), *(Cut(dim) for dim in range(1, len(layer.shape))))

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        n_channels, *extents = layer.input_shapes[0]
        channels = _groups(layer, output)
        n_per_group = n_channels // layer.integer("groups")
        spans = [
            window.reads(interval, extent=extent)
            for window, interval, extent in zip(
                convolution_windows(layer), output.intervals[1:], extents, strict=True
            )
        ]
        read = (channels[0] * n_per_group, channels[1] * n_per_group)
        return (Region((read, *spans)),)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        return {
            name: Region.of(*use.shape).replaced(0, output.intervals[0])
            for name, use in layer.tensors.items()
        }

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n_weights = math.prod(layer.tensors["weight"].shape[1:])
        operations = 2.0 * output.n_elements * n_weights
        (read,) = self.reads(layer, output)
        return Work(
            forward=operations,
            backward=2 * operations,
            n_elements=float(output.n_elements + read.n_elements),
        )

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        tile = padded(
            call.inputs[0], convolution_windows(layer), call.region, layer.input_shapes[0]
        )
        first, last = _groups(layer, call.region)
        convolve = _FUNCTIONS[len(layer.shape) - 2]
        return convolve(
            tile,
            call.tensors["weight"],
            call.tensors.get("bias"),
            stride=layer.integers("stride"),
            dilation=layer.integers("dilation"),
            groups=last - first,
        )


def convolution_windows(layer: Layer) -> tuple[Window, ...]:
    """Return the window of each dimension of space."""
    sizes = layer.tensors["weight"].shape[2:]
    options = ("stride", "padding", "extra", "dilation")
    return _windows(sizes, *(tuple(layer.integers(option)) for option in options))


@lru_cache(maxsize=256)
def _windows(
    sizes: Shape, stride: Shape, padding: Shape, extra: Shape, dilation: Shape
) -> tuple[Window, ...]:
    # Cached, because planners ask for the same layer very often.
    return tuple(
        Window(size=k, stride=s, padding=p, extra=e, dilation=d)
        for k, s, p, e, d in zip(sizes, stride, padding, extra, dilation, strict=True)
    )


def padded(
    tile: torch.Tensor,
    windows: Sequence[Window],
    output: Region,
    input_shape: Sequence[int],
    *,
    value: float = 0.0,
) -> torch.Tensor:
    """Return `tile`, (batch, channels, *space), with the padding that `output` sees."""
    pads: list[int] = []
    for window, interval, extent in zip(
        windows, output.intervals[1:], input_shape[1:], strict=True
    ):
        pads = [*window.pads(interval, extent=extent), *pads]  # torch: last dim first
    return functional.pad(tile, pads, value=value) if any(pads) else tile


def _groups(layer: Layer, output: Region) -> tuple[int, int]:
    # The groups whose channels `output` contains: [first, last).
    groups = layer.integer("groups")
    start, stop = output.intervals[0]
    if groups == 1:
        return (0, 1)
    n_per_group = layer.shape[0] // groups
    if start % n_per_group or stop % n_per_group:
        raise ValueError(
            f"channels {start}:{stop} of {layer.name!r} split a group of {n_per_group} channels"
        )
    return (start // n_per_group, stop // n_per_group)


# --- pooling ---

_MAXIMA: Final = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_AVERAGES: Final = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


class Pooling(Operator, ABC):
    """Base of operators that read every place of every window."""

    # input     (channels, *space), one to three dimensions of space
    # options   size, stride, padding: a number per dimension of space. Stride is never None:
    #           capturing replaces None by the window's size.

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        return (_input_region(layer, output),)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = float(output.n_elements * math.prod(layer.integers("size")))
        n_read = _input_region(layer, output).n_elements
        return Work(forward=n, backward=n, n_elements=float(output.n_elements + n_read))


@final
class MaxPool(Pooling):
    """The maximum of each window; the first of equal values gets the gradient."""

    # options   dilation: a number per dimension; ceil: whether a last window may end outside
    name: ClassVar[str] = "max_pool"

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        tile = padded(
            call.inputs[0],
            pooling_windows(layer),
            call.region,
            layer.input_shapes[0],
            value=-math.inf,
        )
        pool = _MAXIMA[len(layer.shape) - 2]
        pooled: torch.Tensor = pool(
            tile,
            layer.integers("size"),
            stride=layer.integers("stride"),
            dilation=layer.integers("dilation"),
        )
        return pooled


@final
class AveragePool(Pooling):
    """The sum of each window divided by its size, or by the number of places that count."""

    # options   ceil; count_include_pad; divisor: a number, or None
    name: ClassVar[str] = "average_pool"

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        n = math.prod(layer.integers("size"))
        pooled = means(layer, call.region, call.inputs[0])
        if layer.options["divisor"] is not None:
            return pooled * (n / layer.number("divisor"))
        counts = [
            _counts(layer, dim, window, interval)
            for dim, (window, interval) in enumerate(
                zip(pooling_windows(layer), call.region.intervals[1:], strict=True), start=1
            )
        ]
        if counts == [
            [size] * len(count) for size, count in zip(layer.integers("size"), counts, strict=True)
        ]:
            return pooled
        factor = pooled.new_full((), float(n))
        for count in counts:
            factor = factor.unsqueeze(-1) / pooled.new_tensor(count)
        return pooled * factor


def pooling_windows(layer: Layer) -> list[Window]:
    """Return the window of each dimension of space."""
    n_dims = len(layer.shape) - 1
    dilations = layer.options.get("dilation", (1,) * n_dims)
    assert isinstance(dilations, tuple), (layer.name, dilations)
    rows = zip(
        layer.integers("size"),
        layer.integers("stride"),
        layer.integers("padding"),
        dilations,
        strict=True,
    )
    ceil = bool(layer.options.get("ceil", False))
    return [
        Window(size=size, stride=stride, padding=padding, dilation=dilation, ceil=ceil)
        for size, stride, padding, dilation in rows
    ]


def _input_region(layer: Layer, output: Region) -> Region:
    spans = [
        window.reads(interval, extent=extent)
        for window, interval, extent in zip(
            pooling_windows(layer), output.intervals[1:], layer.input_shapes[0][1:], strict=True
        )
    ]
    return Region((output.intervals[0], *spans))


def means(layer: Layer, output: Region, tile: torch.Tensor) -> torch.Tensor:
    """Return the mean of each window, padding counted as zeros."""
    tile = padded(tile, pooling_windows(layer), output, layer.input_shapes[0])
    average = _AVERAGES[len(layer.shape) - 2]
    return average(tile, layer.integers("size"), stride=layer.integers("stride"))


def _counts(layer: Layer, dim: int, window: Window, interval: Interval) -> list[int]:
    # The number of places along `dim` that torch divides each output by.
    extent = layer.input_shapes[0][dim]
    pads = window.padding if layer.options["count_include_pad"] else 0
    counts = []
    for output in range(*interval):
        first = output * window.stride - window.padding
        last = min(first + window.size, extent + pads)
        counts.append(last - max(first, -pads))
    return counts


@final
class L2Pool2d(nn.Module):
    """sqrt(epsilon + sum of squares over each window); gradient 0 for a window of zeros.

    Source: Hyvarinen and Hoyer 2000, "Emergence of phase and shift invariant features"; unweighted
    in Le et al. 2012, section 3.1; weighted in Sermanet et al. 2012, "Convolutional neural networks
    applied to house numbers digit classification", section 2.1.

    Args:
        kernel_size: Rows and columns of the window, or one number for both.
        stride: Between windows; None for the window's size.
        padding: Zeros around the maps.
        epsilon: Keeps the gradient of weak windows small.
        gaussian: Whether to weight the squares by a Gaussian of deviation size / 4 in each
            dimension.
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        *,
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
        epsilon: float = 0.0,
        gaussian: bool = False,
    ) -> None:
        super().__init__()
        self.kernel_size = pair(kernel_size)
        self.stride = self.kernel_size if stride is None else pair(stride)
        self.padding = pair(padding)
        self.epsilon = epsilon
        self.gaussian = gaussian

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the pooled maps: (batch, maps, rows, columns)."""
        rows, columns = self.padding
        if rows or columns:
            x = functional.pad(x, (columns, columns, rows, rows))
        return _l2_pooled(
            x, self.kernel_size, self.stride, epsilon=self.epsilon, weighted=self.gaussian
        )

    @override
    def extra_repr(self) -> str:
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, epsilon={self.epsilon}, gaussian={self.gaussian}"
        )


@final
class L2Pool(Pooling):
    """sqrt(epsilon + sum of squares over the window)."""

    # options   epsilon, gaussian: as in the module
    name: ClassVar[str] = "l2_pool"

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        return _l2_pooled(
            padded(call.inputs[0], pooling_windows(layer), call.region, layer.input_shapes[0]),
            layer.integers("size"),
            layer.integers("stride"),
            epsilon=layer.number("epsilon"),
            weighted=bool(layer.options["gaussian"]),
        )


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """Return a number for rows and one for columns."""
    return value if isinstance(value, tuple) else (value, value)


def _l2_pooled(
    tile: torch.Tensor,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    *,
    epsilon: float,
    weighted: bool,
) -> torch.Tensor:
    rows, columns = (gaussian(n) if weighted else (1.0,) * n for n in size)
    sums = window_sums(tile.square(), rows=rows, columns=columns, stride=stride)
    return safe_sqrt(sums + epsilon)


def safe_sqrt(x: torch.Tensor) -> torch.Tensor:
    """Return the square root, with gradient 0 where x is 0 (torch: infinite)."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)
