"""Tensors that several machines use: who keeps which piece of them.

    weight of a convolution, image cut into 3 bands       used by 0, 1 and 2
    rows   0:5 | 5:11 | 11:16                             kept by 0  | 1 | 2

A range with several users is cut evenly among them, along its first dimension. Who
keeps a piece fetches it, sends it to the other users before the forward pass, adds up
their gradients after the backward pass, and pushes the sum. So a range has one version
and one gradient, and the server sees each number once.
"""

from collections.abc import Mapping, Sequence

from distbelief.graph.region import Region
from distbelief.program.boxes import shared_by


def pieces(uses: Mapping[int, Sequence[Region]], *, n_dims: int) -> list[tuple[int, Region]]:
    """Return who keeps which part of a tensor: all that is used, once.

    Args:
        uses: By machine; disjoint. The order of machines decides who keeps what.
        n_dims: Of the tensor.
    """
    return [piece for users, region in shared_by(uses, n_dims) for piece in _cut(users, region)]


def _cut(users: Sequence[int], region: Region) -> list[tuple[int, Region]]:
    if len(users) == 1 or not region.intervals or region.shape[0] == 1:
        return [(users[0], region)]
    parts = region.cut(0, [1.0] * len(users))
    owned = zip(users, parts, strict=True)
    return [(machine, part) for machine, part in owned if part.n_elements]
