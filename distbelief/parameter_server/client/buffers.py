"""What a client runs in the compute lane: values to tensors, tensors to slots.

Each number is moved once: from the shard's published values (or the blocks received)
straight into the model's tensors, and from the gradients straight into the slot, which
in shared memory is the shard's own. That a push is finite is seen from its sum, which
costs a fortieth of looking at each element.

A push may also be drafted: each gradient is copied as soon as it is there, while the
backward pass goes on below it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from distbelief.errors import LocalProtocolError
from distbelief.parameter_server.client.fetch import ShardReader
from distbelief.parameter_server.client.push import StagedSlot
from distbelief.parameter_server.layout import TensorSpec


_ITEMSIZE_MIN: Final = 4  # bytes of an element whose sums are taken as they are


@final
@dataclass(frozen=True, slots=True)
class FetchResult:
    """What an install did.

    Attributes:
        torn: Shards whose values were not whole, or not there yet. Until an install
            leaves none, the tensors are a mixture and must not be used.
        clocks: Per shard, the clock of what was copied; -1 for those in `torn`.
    """

    torn: tuple[int, ...]
    clocks: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class PushResult:
    """What a stage did.

    Attributes:
        finite: Whether all that is to be pushed is; if not, nothing is.
        culprits: Names of the tensors that are not.
    """

    finite: bool
    culprits: tuple[str, ...] = ()


def installing(
    readers: Mapping[int, ShardReader],
    tensors: Sequence[torch.Tensor],
    *,
    missing: Sequence[int],
    known: Mapping[int, int],
) -> Callable[[], FetchResult]:
    """Return the work that copies shards' values into `tensors`.

    Args:
        readers: Per shard index, of those that can be read.
        tensors: Each (n_elements,), in the order of the layout or the selection.
        missing: Shards that are to be read later.
        known: Per shard index, the clock of what was copied before; -1 for the others.
    """

    def work() -> FetchResult:
        clocks = dict(known)
        torn = list(missing)
        for index, reader in readers.items():
            clock = reader.read(tensors)
            if clock is None:
                torn.append(index)
            else:
                clocks[index] = clock
        return FetchResult(torn=tuple(sorted(torn)), clocks=tuple(clocks.values()))

    return work


def staging(
    slots: Sequence[StagedSlot], tensors: Sequence[torch.Tensor | None], *, names: Sequence[str]
) -> Callable[[], PushResult]:
    """Return the work that copies `tensors` into every shard's slot, and checks them.

    Args:
        slots: One per shard.
        tensors: Each (n_elements,), in the order of the layout or the selection; None
            for zeros.
        names: Of the tensors.
    """

    def work() -> PushResult:
        total = 0.0
        for slot in slots:
            slot.exchange.gather(tensors)
            total += float(torch.from_numpy(slot.values).sum())
        if math.isfinite(total):
            return PushResult(finite=True)
        return _looked_at(tensors, names)

    return work


def _looked_at(tensors: Sequence[torch.Tensor | None], names: Sequence[str]) -> PushResult:
    """Look at each element: the sum of finite numbers may overflow."""
    culprits = tuple(
        name
        for name, tensor in zip(names, tensors, strict=True)
        if tensor is not None and not bool(torch.isfinite(tensor).all())
    )
    return PushResult(finite=not culprits, culprits=culprits)


def _total(tensor: torch.Tensor) -> float:
    """Return the sum: not finite if an element is not, or if it overflows."""
    # In half precision sums overflow where nothing is wrong.
    short = tensor.is_floating_point() and tensor.dtype.itemsize < _ITEMSIZE_MIN
    return float(tensor.sum(dtype=torch.float32 if short else None))


@final
class PushDraft:
    """A push that is filled tensor by tensor; for one lane.

    Args:
        slots: One per shard.
        tensors: All that there are.
    """

    def __init__(self, slots: Sequence[StagedSlot], tensors: Sequence[TensorSpec]) -> None:
        self._slots = slots
        self._tensors = tensors
        self._missing = set(range(len(tensors)))
        self._culprits: list[str] = []

    def put(self, index: int, tensor: torch.Tensor) -> None:
        """Copy one gradient, or the value of a buffer, into every shard's slot.

        Args:
            index: Of the tensor, in the order of the layout or the selection.
            tensor: (n_elements,) it may be overwritten as soon as this returns.

        Raises:
            LocalProtocolError: that one was put before.
            ValueError: it has another shape.
        """
        if index not in self._missing:
            raise LocalProtocolError(
                f"tensor {index} of {len(self._tensors)} was put into this draft "
                "before, or there is none: sum gradients first"
            )
        for slot in self._slots:
            slot.exchange.put(index, tensor)
        self._missing.remove(index)
        if not math.isfinite(_total(tensor)):
            looked_at = _looked_at([tensor], [self._tensors[index].name])
            self._culprits += looked_at.culprits

    def finish(self) -> PushResult:
        """Fill the rest with zeros; return whether all that was put is finite.

        Raises:
            LocalProtocolError: a buffer is missing, whose average zeros would spoil.
        """
        for index in sorted(self._missing):
            spec = self._tensors[index]
            if spec.kind == "buffer" and spec.n_elements:
                raise LocalProtocolError(
                    f"buffer {spec.name!r} was not put into the draft of a push: put its value"
                )
            for slot in self._slots:
                slot.exchange.put(index, None)
        for slot in self._slots:
            slot.exchange.zero_padding()
        self._missing.clear()
        return PushResult(finite=not self._culprits, culprits=tuple(self._culprits))
