"""Programs run by the roles of a job: short jobs, in which coverage is measured."""

from dataclasses import replace
from typing import get_args

import pytest

from distbelief.protocol.role import Address
from distbelief.simulation.faults import Kill, Slow
from sandblaster.chunks import COORDINATOR
from tests.simulation.programs import Rounds, Which


@pytest.mark.parametrize("which", get_args(Which))
def test_a_worker_that_is_killed_changes_no_bit(which: Which) -> None:
    scene = Rounds(which=which)
    end = scene.moments(lambda _: True)[-1]
    kill = Kill(at=0.6 * end, role=Address("replica-0"), restart_after=0.01)
    again = replace(scene, faults=(kill,), saves=(0.3 * end,))
    again.play()
    assert again.cluster.incarnation(Address("replica-0")) == 2


def test_a_slow_worker_changes_no_bit() -> None:
    slow = Slow(at=0.005, role=Address("replica-1"), factor=400.0, seconds=10.0)
    Rounds(which="lasso", faults=(slow,)).play()


@pytest.mark.parametrize("which", ["factors", "mixing"])
def test_shares_of_a_worker_s_time_count_nothing_twice(which: Which) -> None:
    """The tasks of a round are assigned together; each waited for those before it, which was
    counted as staging: 70 % of the time, where computing took 79 %."""
    scene = Rounds(which=which, n_replicas=1)
    scene.play()
    computing = scene.status(scene.replicas[0])["seconds_computing"] / scene.now
    assert scene.status(COORDINATOR)["computing_share"] == pytest.approx(computing, rel=0.1)
