"""Scales: a small task in place of a large one, at the large one's price.

A role really works, on a net that is small. What it costs, and what it sends, is
multiplied, so that virtual time and bytes are those of the large net:

    small task                      large task
    vector of shard k, m_k numbers  n_k numbers     frames, bytes: n_k / m_k
    a step of f operations          F operations    flops: F / f
    a batch of b bytes              B bytes         data: B / b

So a role of 42 million parameters takes a few kilobytes, and its losses, line searches
and staleness are still those of something that learns.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from distbelief import vectors
from distbelief.errors import LocalProtocolError
from distbelief.parameter_server.copies.copies import shard_of
from distbelief.parameter_server.layout.layout import Layout
from distbelief.roles import Address, Cost, Lane
from distbelief.vectors import n_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """By what the figures of one role are multiplied.

    Attributes:
        flops: Operations of its compute lane.
        n_bytes: Bytes of that, and of what it persists.
        data_bytes: Work of its data lane, which is all about the bytes of samples.
        frame_bytes: Bytes of the arrays in messages from it; of those between a shard
            and another role the shard's counts, either way.
    """

    flops: float = 1.0
    n_bytes: float = 1.0
    data_bytes: float = 1.0
    frame_bytes: float = 1.0

    def __post_init__(self) -> None:
        for name in ("flops", "n_bytes", "data_bytes", "frame_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"a scale's {name} is {getattr(self, name)}; use 0 or more")

    def of(self, cost: Cost, lane: Lane) -> Cost:
        """Return the cost of the large task's work."""
        if lane is Lane.DATA:  # whatever that is counted in
            flops = n_bytes = waiting = self.data_bytes
        else:
            flops, n_bytes, waiting = self.flops, self.n_bytes, 1.0
        return Cost(
            flops=cost.flops * flops, n_bytes=cost.n_bytes * n_bytes, waiting=cost.waiting * waiting
        )


ONE: Final = Scale()


def frame_scale(scales: Mapping[Address, Scale], sender: Address, receiver: Address) -> float:
    """Return by what the array bytes of a message between these two are multiplied."""
    if not scales:
        return 1.0
    shard = receiver if receiver.startswith("shard") else sender
    return scale_of(scales, shard).frame_bytes


def scales_for(
    small: Layout, large: Layout, names: Mapping[Address, float], *, data_bytes: float = 1.0
) -> dict[Address, Scale]:
    """Return the scales of a job whose roles work on a small net.

    Args:
        small: How the small net lies on the shards.
        large: How the large one would, on as many.
        names: All roles but shards, and by what their operations are multiplied: those
            of a step of the large net over those of the small one, by whatever each
            takes for its cost.
        data_bytes: Bytes of a sample of the large task over those of the small one.

    Raises:
        LocalProtocolError: the layouts have another number of shards.
    """
    if small.n_shards != large.n_shards:
        raise LocalProtocolError(
            f"a net on {small.n_shards} shards cannot stand for one on "
            f"{large.n_shards}: cut both alike"
        )
    sizes = [(_bytes(small, k), _bytes(large, k)) for k in range(small.n_shards)]
    whole = sum(n for _, n in sizes) / max(1, sum(m for m, _ in sizes))
    scales = {
        name: Scale(flops=flops, n_bytes=whole, data_bytes=data_bytes, frame_bytes=whole)
        for name, flops in names.items()
    }
    for k, (m, n) in enumerate(sizes):
        ratio = n / max(1, m)
        shard = Scale(flops=ratio, n_bytes=ratio, frame_bytes=ratio)
        scales[Address(f"shard-{k}")] = shard
    return scales


def block_bytes_for(small: Layout, large: Layout) -> int:
    """Return the size of blocks, so that there are about as many as of large vectors.

    Blocks as they are would carry far more of a large vector than 1 MiB each: clients
    would take those for lost, and ask again.
    """
    counts = [
        (_bytes(small, k), n_blocks(large.shard_size(k), itemsize=large.dtype.itemsize))
        for k in range(small.n_shards)
    ]
    itemsize = small.dtype.itemsize
    return max(-(-m // (n * itemsize)) * itemsize for m, n in counts) or itemsize


@contextmanager
def blocks_of(n_bytes: int | None) -> Iterator[None]:
    """Let vectors be cut into blocks of another size, in all of this process."""
    before = vectors.BLOCK_BYTES
    vectors.BLOCK_BYTES = before if n_bytes is None else n_bytes
    try:
        yield
    finally:
        vectors.BLOCK_BYTES = before


def scale_of(scales: Mapping[Address, Scale], name: Address) -> Scale:
    """Return the scale of a role; both copies of a shard have one."""
    return scales.get(name) or scales.get(shard_of(name)) or ONE


def _bytes(layout: Layout, k: int) -> int:
    return layout.shard_size(k) * layout.dtype.itemsize
