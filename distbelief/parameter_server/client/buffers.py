"""Work for the executor: copies values into tensors, and tensors into push buffers.

Each number moves once: from the shard's published values (or received blocks) into the model's
tensors, and from the gradients into the push buffer, which in shared memory is the shard's own.
A draft copies each gradient as soon as it exists, while the backward pass continues.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from distbelief.errors import LocalProtocolError
from distbelief.parameter_server.client.fetch import ShardReader
from distbelief.parameter_server.client.push import StageTarget
from distbelief.parameter_server.layout import TensorSpec


_ITEMSIZE_MIN: Final = 4  # bytes of an element whose sums are taken as they are


@final
@dataclass(frozen=True, slots=True)
class FetchResult:
    """Result of an install."""

    # Shards with torn or missing values. Until an install leaves none, the tensors are a mixture
    # of versions: do not use them.
    torn: tuple[int, ...]
    clocks: tuple[int, ...]  # per shard, the clock of what was copied; -1 for those in `torn`


@final
@dataclass(frozen=True, slots=True)
class PushResult:
    """Result of a stage or a draft."""

    finite: bool  # whether all numbers are finite; if not, nothing is pushed
    culprits: tuple[str, ...] = ()  # names of the tensors with NaN or infinity


def install_work(
    readers: Mapping[int, ShardReader],
    tensors: Sequence[torch.Tensor],
    *,
    missing: Sequence[int],
    known: Mapping[int, int],
) -> Callable[[], FetchResult]:
    """Return the work that copies shards' values into `tensors`.

    Args:
        readers: Per index, the shards that are ready.
        tensors: Each (n_elements,), in the order of the layout or the selection.
        missing: Shards to read later.
        known: Per index, the clock of what was copied before; -1 for the others.
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


def stage_work(
    targets: Sequence[StageTarget], tensors: Sequence[torch.Tensor | None], *, names: Sequence[str]
) -> Callable[[], PushResult]:
    """Return the work that copies `tensors` into every shard's buffer and checks them.

    Args:
        targets: One per shard.
        tensors: Each (n_elements,), in the order of the layout or the selection; None for
            zeros.
        names: Names of the tensors.
    """

    def work() -> PushResult:
        # The sum shows NaN and infinity at a fortieth of the cost of a look at each element.
        total = 0.0
        for target in targets:
            target.exchange.gather(tensors)
            total += float(torch.from_numpy(target.values).sum())
        if math.isfinite(total):
            return PushResult(finite=True)
        return _check_each(tensors, names)

    return work


def _check_each(tensors: Sequence[torch.Tensor | None], names: Sequence[str]) -> PushResult:
    # A sum of finite numbers may overflow, so look at each element.
    culprits = tuple(
        name
        for name, tensor in zip(names, tensors, strict=True)
        if tensor is not None and not bool(torch.isfinite(tensor).all())
    )
    return PushResult(finite=not culprits, culprits=culprits)


def _total(tensor: torch.Tensor) -> float:
    # In half precision sums overflow where nothing is wrong.
    short = tensor.is_floating_point() and tensor.dtype.itemsize < _ITEMSIZE_MIN
    return float(tensor.sum(dtype=torch.float32 if short else None))


@final
class PushDraft:
    """A push that is filled tensor by tensor, in one executor.

    Args:
        targets: One per shard.
        tensors: All tensors of the push.
    """

    def __init__(self, targets: Sequence[StageTarget], tensors: Sequence[TensorSpec]) -> None:
        self._targets = targets
        self._tensors = tensors
        self._missing = set(range(len(tensors)))
        self._culprits: list[str] = []

    def put(self, index: int, tensor: torch.Tensor) -> None:
        """Copy one gradient, or the value of a buffer, into every shard's push buffer.

        Args:
            index: Of the tensor, in the order of the layout or the selection.
            tensor: (n_elements,); it may be overwritten as soon as this returns.

        Raises:
            LocalProtocolError: This tensor was put before.
            ValueError: It has another shape.
        """
        if index not in self._missing:
            raise LocalProtocolError(
                f"tensor {index} of {len(self._tensors)} does not exist or is in this draft "
                "already: sum gradients first"
            )
        for target in self._targets:
            target.exchange.put(index, tensor)
        self._missing.remove(index)
        if not math.isfinite(_total(tensor)):
            checked = _check_each([tensor], [self._tensors[index].name])
            self._culprits += checked.culprits

    def finish(self) -> PushResult:
        """Fill the rest with zeros; return whether all that was put is finite.

        Raises:
            LocalProtocolError: A buffer is missing; zeros would spoil its average.
        """
        for index in sorted(self._missing):
            spec = self._tensors[index]
            if spec.kind == "buffer" and spec.n_elements:
                raise LocalProtocolError(
                    f"buffer {spec.name!r} was not put into the draft of a push: put its value"
                )
            for target in self._targets:
                target.exchange.put(index, None)
        for target in self._targets:
            target.exchange.zero_padding()
        self._missing.clear()
        return PushResult(finite=not self._culprits, culprits=tuple(self._culprits))
