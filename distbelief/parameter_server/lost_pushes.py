"""Lost pushes, by their number in the order of a client's pushes.

    number   1  2  3  4  5  6  7  8       seen = 8
    kept     x  x  x        x  x  x       4 and 5 were lost by a shard that restarted

A shard that restarts from a snapshot loses its newest pushes. A push lost by several shards counts
as one lost push.
"""

from collections.abc import Iterable


Lost = tuple[range, ...]  # of numbers, rising, without overlaps


def lost_after(lost: Lost, *, seen: int, kept: int) -> Lost:
    """Return the lost pushes if `kept` of the pushes seen so far are in the values.

    Args:
        lost: Pushes lost before.
        seen: Number of the newest push that ever was in the values.
        kept: How many pushes are in the values.
    """
    if kept + n_lost([lost]) > seen:  # another copy of the shard had them after all
        lost = ()
    first, before = kept + 1, list[range]()
    for part in lost:
        if part.start > first:
            break
        first += len(part)
        before.append(part)
    return (*before, *([range(first, seen + 1)] if first <= seen else []))


def n_lost(of_shards: Iterable[Lost]) -> int:
    """Return how many pushes at least one of these shards has lost."""
    parts = sorted((part.start, part.stop) for lost in of_shards for part in lost)
    n, end = 0, 0
    for start, stop in parts:
        n += max(0, stop - max(start, end))
        end = max(end, stop)
    return n
