"""In which order machines are used, so that the first k of them are good company.

    0 --- 2 --- 3      1 hangs on links a hundredth as fast: 0 2 3 1, so that three
     . . 1 . .         machines do without it

Layers are cut over the first k machines of an order, whatever k is. As they stand in
the cluster, the fastest first, is one order. Where links or bandwidths differ there is
another one: the machine that costs the others most to talk to comes last, and so on
with those that are left.
"""

from typing import Final

import numpy as np

from distbelief.partition.transfer import Network
from distbelief.program.cluster import Cluster


_TIE: Final = 1e-9


def arrangements(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return the orders of machines that are worth a try, as they stand first."""
    standing = tuple(range(len(cluster)))
    rates = Network.of(cluster).rates
    if not rates.ndim:
        return [standing]
    seconds = 1.0 / rates  # of a byte, to and from each other machine
    np.fill_diagonal(seconds, 0.0)
    slowness = np.array([1.0 / machine.flops for machine in cluster.machines])
    left = list(standing)
    last: list[int] = []
    while left:
        talking = seconds[np.ix_(left, left)].sum(axis=1)
        computing = slowness[left]
        # Both matter, and nobody has said yet how much of either there will be.
        costs = talking / max(np.median(talking), 1e-300)
        costs = costs + computing / np.median(computing)
        worst = np.flatnonzero(costs >= costs.max() * (1 - _TIE))[-1]
        last.append(left.pop(int(worst)))
    order = tuple(reversed(last))
    return [standing] if order == standing else [standing, order]
