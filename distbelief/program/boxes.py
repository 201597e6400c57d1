"""Many regions at once: unions as disjoint regions, and arrays of them.

An array of boxes is (n_boxes, n_dims, 2): start and stop of each dimension.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from distbelief.graph.region import Region


IntArray = npt.NDArray[np.int64]


def disjoint(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Return disjoint regions, none empty, that hold what any of these holds."""
    found: list[Region] = []
    for region in sorted(set(regions), key=lambda r: (-r.n_elements, r.intervals)):
        rest = [region] if region.n_elements else []
        for other in found:
            rest = [piece for part in rest for piece in part.minus(other)]
            if not rest:
                break
        found += rest
    return tuple(sorted(found, key=lambda r: r.intervals))


def to_array(regions: Sequence[Region], n_dims: int) -> IntArray:
    """Return them as (n_regions, n_dims, 2)."""
    rows = [region.intervals for region in regions]
    return np.array(rows, dtype=np.int64).reshape(len(rows), n_dims, 2)


def to_regions(boxes: IntArray) -> tuple[Region, ...]:
    """Return (n_boxes, n_dims, 2) as regions."""
    rows: list[list[list[int]]] = boxes.tolist()
    return tuple(Region(tuple((a, b) for a, b in row)) for row in rows)


def n_elements(boxes: IntArray) -> IntArray:
    """Return how many indices each box holds: (n_boxes,)."""
    lengths: IntArray = boxes[:, :, 1] - boxes[:, :, 0]
    return np.asarray(lengths.prod(axis=1), dtype=np.int64)


def overlaps(ours: IntArray, theirs: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return what every two boxes, one of each, have in common.

    Args:
        ours: (n, n_dims, 2)
        theirs: (m, n_dims, 2)

    Returns:
        Which of ours and which of theirs, (k,) each, in this order, and their
        common boxes, (k, n_dims, 2); none is empty.
    """
    meet = np.ones((len(ours), len(theirs)), dtype=np.bool_)
    for dim in range(ours.shape[1]):
        start = np.maximum.outer(ours[:, dim, 0], theirs[:, dim, 0])
        meet &= start < np.minimum.outer(ours[:, dim, 1], theirs[:, dim, 1])
    i, j = np.nonzero(meet)
    starts = np.maximum(ours[i, :, 0], theirs[j, :, 0])
    stops = np.minimum(ours[i, :, 1], theirs[j, :, 1])
    return i, j, np.stack([starts, stops], axis=2)


def shared_by(
    uses: Mapping[int, Sequence[Region]], n_dims: int
) -> list[tuple[tuple[int, ...], Region]]:
    """Return regions, each with all who use it: disjoint, none empty.

    Args:
        uses: What each uses; disjoint.
        n_dims: Of the tensor.

    Returns:
        Users, in the order of `uses`, and region.
    """
    users = list(uses)
    boxes = to_array([r for regions in uses.values() for r in regions], n_dims)
    if not len(boxes):
        return []
    edges = [np.unique(boxes[:, dim]) for dim in range(n_dims)]
    marks = np.zeros((*(len(edge) - 1 for edge in edges), len(users)), dtype=np.bool_)
    for index, regions in enumerate(uses.values()):
        for region in regions:
            where: list[slice[int, int, None] | int] = []
            for edge, (start, stop) in zip(edges, region, strict=True):
                first, last = np.searchsorted(edge, (start, stop)).tolist()
                where.append(slice(first, last))
            marks[(*where, index)] = True
    cells: dict[bytes, list[Region]] = {}
    packed = np.packbits(marks, axis=-1)
    intervals = [list(pairwise(edge.tolist())) for edge in edges]
    for place in np.ndindex(*marks.shape[:-1]):
        cell = Region(tuple(row[k] for row, k in zip(intervals, place, strict=True)))
        cells.setdefault(packed[place].tobytes(), []).append(cell)
    found = []
    for code, regions in cells.items():
        bits = np.unpackbits(np.frombuffer(code, dtype=np.uint8), count=len(users))
        who = tuple(users[index] for index in np.flatnonzero(bits))
        found += [(who, region) for region in joined_up(regions) if who]
    return found


def joined_up(cells: Sequence[Region]) -> list[Region]:
    """Return the same as fewer regions: neighbours along one dimension become one.

    Args:
        cells: Disjoint.
    """
    regions = list(cells)
    n_dims = len(regions[0].intervals) if regions else 0
    for dim in reversed(range(n_dims)):
        rows: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = {}
        for region in regions:
            others = (*region.intervals[:dim], *region.intervals[dim + 1 :])
            rows.setdefault(others, []).append(region.intervals[dim])
        regions = [
            Region((*others[:dim], interval, *others[dim:]))
            for others, intervals in rows.items()
            for interval in _runs(intervals)
        ]
    return regions


def _runs(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
