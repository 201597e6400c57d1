"""Operators over sliding windows: convolutions and pooling (maximum, average, L2).

Split in space, a part needs a halo of its input, which `Window` computes. Positions outside of
[0, extent) are padding: no rank owns or sends them.
"""

import math
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final, Protocol, final

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

from distbelief.graph.graph import Layer, Option
from distbelief.graph.operator import Call, Cut, Operator, Work
from distbelief.graph.region import Interval, Region, Shape


# --- resizing ---

_FLOATS: Final = (torch.float32, torch.float64)


@final
class Resize(Operator):
    """What `torch.nn.functional.interpolate` computes: each output is a sum over a few inputs."""

    # Each dimension of space is resized by itself: output o is the sum of weights of its taps.
    # Split in space, a part needs a halo of its input.
    # input     (channels, *space), one to three dimensions of space
    # options   operation: "upsample_bilinear2d"; align: its align_corners, None without one;
    #           scales: the factors that it was given, separated by commas; "" for none
    name: ClassVar[str] = "resize"

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        spans = []
        for dim, (start, stop) in enumerate(output.intervals[1:]):
            places = [_taps(layer, dim, dtype)[0][start:stop].flatten() for dtype in _FLOATS]
            found = torch.cat(places).tolist()
            spans.append((min(found), max(found) + 1) if found else (0, 0))
        return (Region((output.intervals[0], *spans)),)

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        n = 4.0 * len(output.intervals[1:]) * output.n_elements
        read = self.reads(layer, output)[0].n_elements
        return Work(forward=n, backward=n, n_elements=float(read + output.n_elements))

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer, tile, outputs = call.layer, call.inputs[0], call.region.intervals[1:]
        if outputs == layer.region.intervals[1:]:
            options = (layer.text("operation"), layer.options["align"], _factors(layer))
            return _by_torch(*options, x=tile, sizes=layer.shape[1:])
        (read,) = self.reads(layer, call.region)
        for dim, (start, stop) in enumerate(outputs):
            places, weights = _taps(layer, dim, tile.dtype)
            places = (places[start:stop] - read.intervals[dim + 1][0]).to(tile.device)
            weights = weights[start:stop].to(tile)
            ones = (1,) * (len(outputs) - dim - 1)
            parts = [
                tile.index_select(dim + 2, place) * weight.view(-1, *ones)
                for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True)
            ]
            tile = sum(parts[1:], parts[0])
        return tile


def _factors(layer: Layer) -> tuple[float | None, ...]:
    words = layer.text("scales")
    return tuple(map(float, words.split(","))) if words else (None,) * len(layer.shape[1:])


def _by_torch(
    operation: str, align: Option, factors: Sequence[float | None], x: torch.Tensor, sizes: Shape
) -> torch.Tensor:
    more = factors if align is None else (align, *factors)
    result: torch.Tensor = getattr(torch.ops.aten, operation).default(x, list(sizes), *more)
    return result


def _taps(layer: Layer, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    # The inputs that each output reads along a dimension of space, and their weights: both
    # (outputs, taps).
    return _taps_of(
        layer.text("operation"),
        layer.options["align"],
        _factors(layer),
        dim=dim,
        extent=layer.input_shapes[0][dim + 1],
        size=layer.shape[dim + 1],
        dtype=dtype if dtype in _FLOATS else _FLOATS[0],
    )


@lru_cache(maxsize=256)  # as for windows
def _taps_of(
    operation: str,
    align: Option,
    factors: tuple[float | None, ...],
    *,
    dim: int,
    extent: int,
    size: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    # torch resizes the rows of the identity, as channels: so the weights are its own.
    own = tuple(factor if i == dim else None for i, factor in enumerate(factors))
    extents, sizes = ([n if i == dim else 1 for i in range(len(factors))] for n in (extent, size))
    rows = torch.eye(extent, dtype=dtype, device="cpu").view(1, extent, *extents)
    weights = _by_torch(operation, align, own, rows, tuple(sizes)).view(extent, size).T
    has = (weights != 0).to(torch.int8)
    places = has.topk(int(has.sum(1).max()), dim=1).indices
    chosen = weights.gather(1, places)
    return torch.where(chosen != 0, places, places[:, :1]), chosen


# --- window sums ---
#
# Summing along rows, then along columns takes 2 k additions per output instead of k * k, each over
# all maps in the order of memory: a 5 x 5 pooling takes a third of the time of `avg_pool2d`, and a
# Gaussian mean of one map less than `conv2d`, whose gradient is made for many channels.

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

        y[r, q] = sum over j of columns[j] (sum over i of rows[i] x[r s + i, q t + j])

    x is (*maps, rows, columns); the strides are s and t. ValueError if no window fits.
    """
    return sums_along(sums_along(x, -2, rows, stride[0]), -1, columns, stride[1])


def sums_along(x: torch.Tensor, dim: int, weights: Weights, stride: int = 1) -> torch.Tensor:
    """Return weighted sums over windows along the last dimension or that before it."""
    sums: torch.Tensor = _WindowSums.apply(x, dim, weights, stride)  # type: ignore[no-untyped-call]
    return sums


class _Context(Protocol):
    # What autograd keeps between the passes.

    window: tuple[int, Weights, int]
    shape: torch.Size


@final
class _WindowSums(torch.autograd.Function):
    # In the backward pass each element of the gradient goes to all places of its window.

    @staticmethod
    @override
    def forward(
        ctx: _Context, x: torch.Tensor, dim: int, weights: Weights, stride: int
    ) -> torch.Tensor:
        ctx.window, ctx.shape = (dim, weights, stride), x.shape
        n_windows = (x.shape[dim] - len(weights)) // stride + 1
        if n_windows < 1:
            raise ValueError(f"a window of {len(weights)} does not fit into {x.shape[dim]} places")
        total = _strided(x, dim, 0, n_windows, stride) * weights[0]
        for i, weight in enumerate(weights[1:], 1):
            total.add_(_strided(x, dim, i, n_windows, stride), alpha=weight)
        return total

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        dim, weights, stride = ctx.window
        total = gradient.new_zeros(ctx.shape)
        for i, weight in enumerate(weights):
            part = _strided(total, dim, i, gradient.shape[dim], stride)
            part.add_(gradient, alpha=weight)
        return total, None, None, None


def _strided(x: torch.Tensor, dim: int, first: int, n: int, stride: int) -> torch.Tensor:
    indices = slice(first, first + (n - 1) * stride + 1, stride)
    return x[..., indices, :] if dim == -2 else x[..., indices]


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
        """Return the hull of the inputs, of `extent`, that these outputs read, without padding."""
        if outputs[0] >= outputs[1]:
            return (0, 0)
        first, end = self._spanned(outputs)
        first, end = min(max(first, 0), extent), max(min(end, extent), 0)
        return (first, max(first, end))

    def pads(self, outputs: Interval, *, extent: int) -> Interval:
        """Return how many positions are missing before and after the interval of `reads`.

        A tile of the input, padded by so many, gives exactly these outputs when the window slides
        over it without further padding.
        """
        if outputs[0] >= outputs[1]:
            return (0, 0)
        first, end = self._spanned(outputs)
        low, high = self.reads(outputs, extent=extent)
        before = min(max(0, -first), end - first)
        return (before, end - first - before - (high - low))

    def _spanned(self, outputs: Interval) -> Interval:
        # With padding.
        first = outputs[0] * self.stride - self.padding
        return (first, (outputs[1] - 1) * self.stride - self.padding + self.span)


def read_by(
    windows: Sequence[Window], outputs: Sequence[Interval], extents: Sequence[int]
) -> list[Interval]:
    """Return the hull of the inputs that these outputs read in each dimension, without padding."""
    return [
        window.reads(interval, extent=extent)
        for window, interval, extent in zip(windows, outputs, extents, strict=True)
    ]


def padded(
    tile: torch.Tensor,
    windows: Sequence[Window],
    outputs: Sequence[Interval],
    extents: Sequence[int],
    *,
    value: float = 0.0,
) -> torch.Tensor:
    """Return a tile of what `read_by` returns, with the padding that these outputs see."""
    pads: list[int] = []
    for window, interval, extent in zip(windows, outputs, extents, strict=True):
        pads = [*window.pads(interval, extent=extent), *pads]  # torch: last dim first
    return functional.pad(tile, pads, value=value) if any(pads) else tile


class Windowed(Operator, ABC):
    """Base of operators that read, for a part in space, a halo of the same channels."""

    # input     (channels, *space), one to three dimensions of space
    # options   size, stride, padding, dilation, extra: a number per dimension of space; without a
    #           size, that of the weight; without dilation or extra, ones or zeros
    #           ceil: whether a last window may end outside; False if absent

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        spans = read_by(_windows(layer), output.intervals[1:], layer.input_shapes[0][1:])
        return (Region((output.intervals[0], *spans)),)


def _windows(layer: Layer) -> tuple[Window, ...]:
    given = layer.options
    sizes = layer.integers("size") if "size" in given else layer.tensors["weight"].shape[2:]
    n = len(sizes)
    return _windows_of(
        sizes,
        layer.integers("stride"),
        layer.integers("padding"),
        layer.integers("dilation") if "dilation" in given else (1,) * n,
        layer.integers("extra") if "extra" in given else (0,) * n,
        ceil=bool(given.get("ceil", False)),
    )


@lru_cache(maxsize=256)
def _windows_of(
    sizes: Shape, stride: Shape, padding: Shape, dilation: Shape, extra: Shape, *, ceil: bool
) -> tuple[Window, ...]:
    # Cached, because planners ask for the same layer very often.
    return tuple(
        Window(size=k, stride=s, padding=p, dilation=d, extra=e, ceil=ceil)
        for k, s, p, d, e in zip(sizes, stride, padding, dilation, extra, strict=True)
    )


def tile_of(call: Call, *, value: float = 0.0) -> torch.Tensor:
    """Return the input of a windowed operator with the padding that its region sees."""
    layer = call.layer
    outputs, extents = call.region.intervals[1:], layer.input_shapes[0][1:]
    return padded(call.inputs[0], _windows(layer), outputs, extents, value=value)


# --- convolution ---

_FUNCTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)


@final
class Convolution(Windowed):
    """What `torch.nn.Conv1d`, `Conv2d` and `Conv3d` compute, with zero padding."""

    # Split in space, a part needs a halo of its input and the whole weight: that is replicated, and
    # its gradient summed. Split by channels, it needs the whole input, or its groups' channels.
    # inputs    x, and optionally a weight that is computed, one for all samples
    # tensors   weight (channels out, channels in / groups, *window); bias (channels out,)
    # options   those of a window; groups
    name: ClassVar[str] = "convolution"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return _whole_groups(layer)

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        (read,) = super().reads(layer, output)
        read = read.replaced(0, _channels_read(layer, output))
        weights = [Region.of(*shape) for shape in layer.input_shapes[1:]]
        return (read, *(weight.replaced(0, output.intervals[0]) for weight in weights))

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        return {
            name: Region.of(*use.shape).replaced(0, output.intervals[0])
            for name, use in layer.tensors.items()
        }

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        computed = layer.input_shapes[1:]
        shape = computed[0] if computed else layer.tensors["weight"].shape
        return self.product_work(layer, output, 2.0 * output.n_elements * math.prod(shape[1:]))

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer = call.layer
        first, last = _groups(layer, call.region)
        convolve = _FUNCTIONS[len(layer.shape) - 2]
        return convolve(
            tile_of(call),
            call.inputs[1][0] if len(call.inputs) > 1 else call.tensors["weight"],
            call.tensors.get("bias"),
            stride=layer.integers("stride"),
            dilation=layer.integers("dilation"),
            groups=last - first,
        )


def _whole_groups(layer: Layer) -> tuple[Cut, ...]:
    groups = layer.integer("groups")
    unit = layer.shape[0] // groups if groups > 1 else 1
    return (Cut(0, unit), *(Cut(dim) for dim in range(1, len(layer.shape))))


def _channels_read(layer: Layer, output: Region) -> Interval:
    first, last = _groups(layer, output)
    n_per_group = layer.input_shapes[0][0] // layer.integer("groups")
    return (first * n_per_group, last * n_per_group)


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


_TRANSPOSED = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)


@final
class TransposedConvolution(Operator):
    """What `torch.nn.ConvTranspose1d`, `ConvTranspose2d` and `ConvTranspose3d` compute."""

    # Input i is added to outputs i * stride - padding + k * dilation, k of each place in a window.
    # inputs    those of a convolution
    # tensors   weight (channels in, channels out / groups, *window); bias (channels out,)
    # options   size, stride, padding and dilation, a number per dimension of space; groups
    name: ClassVar[str] = "transposed_convolution"

    @override
    def cuts(self, layer: Layer) -> tuple[Cut, ...]:
        return _whole_groups(layer)

    @override
    def reads(self, layer: Layer, output: Region) -> tuple[Region, ...]:
        spans = []
        for dim, (window, (start, stop)) in enumerate(_spaces(layer, output), start=1):
            extent = layer.input_shapes[0][dim]
            first, last = (at + window.padding for at in (start - window.span, stop - 1))
            first = max(0, min(extent - 1, first // window.stride + 1))
            last = min(extent, last // window.stride + 1)
            # At least one: none adds to outputs that lie between windows.
            spans.append((first, max(first + 1, last)) if start < stop else (0, 0))
        weights = (self._weight(layer, output, shape) for shape in layer.input_shapes[1:])
        return (Region((_channels_read(layer, output), *spans)), *weights)

    @override
    def uses(self, layer: Layer, output: Region) -> Mapping[str, Region]:
        uses = {"bias": Region((output.intervals[0],))}
        if "weight" in layer.tensors:
            uses["weight"] = self._weight(layer, output, layer.tensors["weight"].shape)
        return {word: uses[word] for word in layer.tensors}

    @staticmethod
    def _weight(layer: Layer, output: Region, shape: Shape) -> Region:
        if layer.integer("groups") == 1:
            return Region.of(*shape).replaced(1, output.intervals[0])
        return Region.of(*shape).replaced(0, _channels_read(layer, output))

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        # Every place of every window counts.
        n_inputs = layer.input_shapes[0][0] // layer.integer("groups")
        places = math.prod(layer.integers("size")) / math.prod(layer.integers("stride"))
        return self.product_work(layer, output, 2.0 * output.n_elements * n_inputs * places)

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer, region = call.layer, call.region
        weight = call.inputs[1][0] if len(call.inputs) > 1 else call.tensors["weight"]
        groups, strides = _groups(layer, region), layer.integers("stride")
        found: torch.Tensor = _TRANSPOSED[len(layer.shape) - 2](
            call.inputs[0],
            weight,
            stride=strides,
            dilation=layer.integers("dilation"),
            groups=groups[1] - groups[0],
        )
        pads: list[int] = []
        places = [slice(None), slice(None)]
        (read, *_) = self.reads(layer, region)
        for dim, (window, (start, stop)) in enumerate(_spaces(layer, region), start=1):
            before = read.intervals[dim][0] * window.stride - window.padding - start
            after = stop - start - before - found.shape[dim + 1]
            pads = [max(0, before), max(0, after), *pads]  # torch: last dim first
            places.append(slice(max(0, -before), max(0, -before) + stop - start))
        found = functional.pad(found, pads)[tuple(places)]
        if "bias" in call.tensors:
            found = found + call.tensors["bias"].view(-1, *(1,) * (found.dim() - 2))
        return found


def _spaces(layer: Layer, output: Region) -> list[tuple[Window, Interval]]:
    return list(zip(_windows(layer), output.intervals[1:], strict=True))


# --- pooling ---

_MAXIMA: Final = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_AVERAGES: Final = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


@final
class Pool(Windowed):
    """The maximum, average or L2 norm of each window."""

    # options   function: "max": the first of equal values gets the gradient
    #                     "average": divided by the number of places that count; more options are
    #                     count_include_pad, and divisor: a number, or None
    #                     "l2": sqrt(epsilon + sum of squares), as `L2Pool2d` computes it
    name: ClassVar[str] = "pool"

    @override
    def work(self, layer: Layer, output: Region) -> Work:
        # Every place of every window counts.
        n = float(output.n_elements * math.prod(layer.integers("size")))
        (read,) = self.reads(layer, output)
        return Work(forward=n, backward=n, n_elements=float(output.n_elements + read.n_elements))

    @override
    def compute(self, call: Call) -> torch.Tensor:
        layer, n_dims = call.layer, len(call.layer.shape) - 1
        size, stride = layer.integers("size"), layer.integers("stride")
        match layer.text("function"):
            case "max":
                tile, dilation = tile_of(call, value=-math.inf), layer.integers("dilation")
                largest: torch.Tensor = _MAXIMA[n_dims - 1](tile, size, stride, dilation=dilation)
                return largest
            case "l2":
                return _l2_pooled(tile_of(call), size, stride, epsilon=layer.number("epsilon"))
            case _:
                mean: torch.Tensor = _AVERAGES[n_dims - 1](tile_of(call), size, stride)
                return _recounted(call, mean)


def _recounted(call: Call, mean: torch.Tensor) -> torch.Tensor:
    # Windows over padding, or with another divisor, are divided by another number.
    layer, sizes = call.layer, call.layer.integers("size")
    if layer.options["divisor"] is not None:
        return mean * (math.prod(sizes) / layer.number("divisor"))
    factor = torch.full((), float(math.prod(sizes)), dtype=mean.dtype)
    places = zip(_windows(layer), call.region.intervals[1:], layer.input_shapes[0][1:], strict=True)
    for window, interval, extent in places:
        pads = window.padding if layer.options["count_include_pad"] else 0
        first = torch.arange(*interval) * window.stride - window.padding
        counts = (first + window.size).clamp(max=extent + pads) - first.clamp(min=-pads)
        factor = factor.unsqueeze(-1) / counts
    return mean if bool((factor == 1).all()) else mean * factor.to(mean.device)


@final
class L2Pool2d(nn.Module):
    """sqrt(epsilon + sum of squares over each window); gradient 0 for a window of zeros.

    Source: Hyvarinen and Hoyer 2000, "Emergence of phase and shift invariant features"; Le et al.
    2012, section 3.1.

    Arguments are named as for `torch.nn.AvgPool2d`; `epsilon` keeps the gradient of weak windows
    small.
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        *,
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
        epsilon: float = 0.0,
    ) -> None:
        super().__init__()
        self.kernel_size = pair(kernel_size)
        self.stride = self.kernel_size if stride is None else pair(stride)
        self.padding = pair(padding)
        self.epsilon = epsilon

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the pooled maps: (batch, maps, rows, columns)."""
        rows, columns = self.padding
        if rows or columns:
            x = functional.pad(x, (columns, columns, rows, rows))
        return _l2_pooled(x, self.kernel_size, self.stride, epsilon=self.epsilon)

    @override
    def extra_repr(self) -> str:
        return (
            f"kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, epsilon={self.epsilon}"
        )


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """Return a number for rows and one for columns."""
    return value if isinstance(value, tuple) else (value, value)


def _l2_pooled(
    tile: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], *, epsilon: float
) -> torch.Tensor:
    rows, columns = ((1.0,) * n for n in size)
    sums = window_sums(tile.square(), rows=rows, columns=columns, stride=stride)
    return safe_sqrt(sums + epsilon)


def safe_sqrt(x: torch.Tensor) -> torch.Tensor:
    """Return the square root, with gradient 0 where x is 0 (torch: infinite)."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)
