"""Which pushes a shard has lost: one that restarts from a snapshot loses its newest ones.

    number   1  2  3  4  5  6  7  8       seen = 8
    kept     x  x  x        x  x  x       4 and 5 were lost by a shard that restarted

A lost push is known by its number in the order of its client's pushes; lost by several shards, it
counts once.
"""

from collections.abc import Iterable


Lost = tuple[range, ...]  # of numbers, rising, without overlaps


def lost_after(lost: Lost, *, seen: int, kept: int) -> Lost:
    """Return the lost pushes if `kept` of the pushes up to `seen` are in the values now."""
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
