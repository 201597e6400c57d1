"""Sliding windows: which inputs some outputs of a convolution or pooling read.

    stride 2, size 3, padding 1      output      0     1     2     3
                                     reads    -1..1  1..3  3..5  5..7

Positions outside of [0, extent) are padding: nobody owns them and nobody sends them.
Source of the index arithmetic: Dumoulin and Visin 2016, "A guide to convolution
arithmetic for deep learning", relationships 6 and 13.
"""

from dataclasses import dataclass
from typing import final

from distbelief.graph.region import Interval


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window along one dimension.

    Attributes:
        size: Inputs of one output.
        stride: Inputs between the windows of neighbouring outputs.
        dilation: Inputs between neighbours in a window.
        padding: Positions before input 0, and after the last one.
        extra: Positions more after the last one ("same" padding of even windows).
        ceil: Whether a last window that begins inside, but ends outside, counts.
    """

    size: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    extra: int = 0
    ceil: bool = False

    def __post_init__(self) -> None:
        for name in ("size", "stride", "dilation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; use at least 1")
        for name in ("padding", "extra"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use 0 or more")

    @property
    def reach(self) -> int:
        """From the first input of a window to its last, both counted."""
        return (self.size - 1) * self.dilation + 1

    def n_outputs(self, extent: int) -> int:
        """Return how many windows fit over `extent` inputs; 0 if none does."""
        room = extent + 2 * self.padding + self.extra - self.reach
        if room < 0:
            return 0
        if not self.ceil:
            return room // self.stride + 1
        count = -(-room // self.stride) + 1
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
        end = (stop - 1) * self.stride - self.padding + self.reach
        first, end = min(max(first, 0), extent), max(min(end, extent), 0)
        return (first, max(first, end))

    def pads(self, outputs: Interval, *, extent: int) -> Interval:
        """Return how many positions are missing before and after what `reads` returns.

        A tile of the input, padded by so many, gives exactly these outputs when the
        window slides over it without padding of its own.
        """
        start, stop = outputs
        if start >= stop:
            return (0, 0)
        first = start * self.stride - self.padding
        end = (stop - 1) * self.stride - self.padding + self.reach
        low, high = self.reads(outputs, extent=extent)
        before = min(max(0, -first), end - first)
        return (before, end - first - before - (high - low))
