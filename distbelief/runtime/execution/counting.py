"""BatchNorm's count of its steps, which no layer computes: kept beside its averages.

torch counts in `num_batches_tracked`. A machine that replaces the running mean from its
first channel on keeps that count too, as one more item: fetched and pushed as running
averages are, and one higher after every step that replaced them.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Final

from distbelief.graph.region import Region
from distbelief.runtime.execution.operations import Dataflow


_MEAN: Final = "running_mean"
_COUNT: Final = "num_batches_tracked"


def with_counts(flow: Dataflow, saved: Collection[str]) -> Dataflow:
    """Return the dataflow of a machine that counts what it averages.

    Args:
        flow: Without that.
        saved: Names of the tensors that the shards hold.
    """
    items, counts = list(flow.items), {}
    for item in sorted(flow.averages):
        name, region = flow.items[item]
        stem, word = name[: -len(_MEAN)], name[-len(_MEAN) :]
        begins = all(interval[0] == 0 for interval in region.intervals)
        if word == _MEAN and begins and stem + _COUNT in saved:
            counts[item] = len(items)
            items.append((stem + _COUNT, Region.of()))
    return replace(flow, items=tuple(items), counts=counts)
