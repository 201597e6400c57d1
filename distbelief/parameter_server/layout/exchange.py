"""Copies between a model's tensors and one shard's vector of them, made often."""

from collections import deque
from collections.abc import Sequence
from typing import final

import torch

from distbelief.parameter_server.layout.segments import Segment, padded
from distbelief.parameter_server.layout.tensors import (
    TensorSpec,
    as_tensor,
    check_tensor,
    check_tensors,
)
from distbelief.vectors import ALIGNMENT, Vector


@final
class Exchange:
    """One shard's vector, cut once into views for copies made again and again.

    Args:
        tensors: All tensors, in the layout's order.
        segments: What the vector holds of them.
        vector: (shard_size,) may be read-only if nothing is gathered into it.
    """

    def __init__(
        self, tensors: Sequence[TensorSpec], segments: Sequence[Segment], vector: Vector
    ) -> None:
        whole = as_tensor(vector)
        self._tensors = tensors
        self._views = {  # by tensor, of which a shard has one segment at the most
            segment.tensor_index: (
                segment,
                whole[segment.offset : segment.offset + segment.n_elements],
            )
            for segment in segments
        }
        self._padding = [
            whole[end : padded(end)]
            for segment in segments
            if (end := segment.offset + segment.n_elements) % ALIGNMENT
        ]

    def gather(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy this shard's part of `tensors` into the vector, and zero its padding.

        Args:
            tensors: Each (n_elements,), in the layout's order, of any real dtype;
                None stands for zeros.

        Raises:
            ValueError: a tensor is missing, or has another shape.
        """
        check_tensors(self._tensors, tensors)
        for index in self._views:
            self._put(index, tensors[index])
        self.zero_padding()

    def put(self, index: int, tensor: torch.Tensor | None) -> None:
        """Copy this shard's part of one tensor into the vector; see `gather`."""
        check_tensor(self._tensors[index], tensor)
        self._put(index, tensor)

    def _put(self, index: int, tensor: torch.Tensor | None) -> None:
        if index not in self._views:
            return
        segment, view = self._views[index]
        with torch.no_grad():
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor[segment.start : segment.stop])

    def zero_padding(self) -> None:
        """Fill what lies between the segments with zeros."""
        for view in self._padding:
            view.zero_()

    def scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the vector's elements into `tensors`, which keep all others.

        Args:
            tensors: Each (n_elements,), in the layout's order. Tensors of integers
                receive the nearest integer: averages of counts are none.

        Raises:
            ValueError: a tensor is missing, or has another shape.
        """
        check_tensors(self._tensors, tensors)
        for segment, view in self._views.values():
            _copy(view, tensors[segment.tensor_index][segment.start : segment.stop])


def _copy(values: torch.Tensor, tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(values if tensor.is_floating_point() else values.round())


def scatter_blocks(
    specs: Sequence[TensorSpec],
    segments: Sequence[Segment],
    blocks: Sequence[Vector],
    tensors: Sequence[torch.Tensor],
) -> None:
    """Copy a vector that lies in consecutive blocks; see `Exchange.scatter`.

    Args:
        specs: All tensors, in the layout's order.
        segments: What the vector holds of them.
        blocks: Together (shard_size,); they may be read-only.
        tensors: Each (n_elements,), in the layout's order.
    """
    check_tensors(specs, tensors)
    left = deque(segments)
    end = 0
    for block in blocks:
        begin, end = end, end + len(block)
        values = as_tensor(block)
        while left and left[0].offset < end:
            segment = left[0]
            first = max(begin, segment.offset)
            last = min(end, segment.offset + segment.n_elements)
            # `first` may lie beyond `last`, in padding that begins a block.
            at = segment.start - segment.offset
            if first < last:
                tensor = tensors[segment.tensor_index][first + at : last + at]
                _copy(values[first - begin : last - begin], tensor)
            if segment.offset + segment.n_elements > end:
                break  # the next block goes on with it
            left.popleft()
