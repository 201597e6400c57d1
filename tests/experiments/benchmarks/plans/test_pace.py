"""Profiles brought to the pace of a moment."""

import pytest

from distbelief.partition.profiling.profile import Host, Profile, Slices
from experiments.benchmarks.plans.pace import Paces, at_pace, mean_pace, slower


def slices(*forward: float) -> Slices:
    return Slices(
        extents=tuple(range(1, len(forward) + 1)),
        forward=forward,
        backward=tuple(2 * seconds for seconds in forward),
    )


PROFILE = Profile(
    host=Host(torch="2", processor="any", n_threads=1),
    date="",
    layers={
        "a": {"whole": slices(2.0), "0": slices(1.5, 2.5)},
        "b": {"whole": slices(1.0)},
        "c": {"whole": slices(0.0)},
    },
)


def test_slices_become_slower_as_the_whole_layer_has() -> None:
    found = at_pace(PROFILE, {"a": (4.0, 2.0), "c": (1.0, 1.0), "unknown": (1.0, 1.0)})
    assert found.layers["a"]["0"].forward == pytest.approx((3.0, 5.0))
    assert found.layers["a"]["0"].backward == pytest.approx((1.5, 2.5))
    assert found.layers["a"]["whole"].forward == (4.0,)
    assert found.layers["b"] == PROFILE.layers["b"]
    assert found.layers["c"] == PROFILE.layers["c"]  # took no time at all


def test_how_much_slower_is_said_of_all_that_both_know() -> None:
    assert slower(PROFILE, {"a": (4.0, 5.0), "unknown": (9.0, 9.0)}) == 1.5
    means = mean_pace([{"a": (1.0, 2.0)}, {"a": (3.0, 2.0), "b": (1.0, 1.0)}])
    assert means == {"a": (2.0, 2.0)}


def test_who_computes_half_of_the_time_beside_others_has_the_pace_between() -> None:
    paces = Paces(alone={"a": (1.0, 2.0)}, together={"a": (2.0, 6.0)})
    assert paces.at(0.0) == paces.alone
    assert paces.at(0.5) == {"a": (1.5, 4.0)}
    assert paces.at(1.0) == paces.together
    assert paces.seconds == 11.0
