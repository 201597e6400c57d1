"""What a machine obeys, and what it refuses."""

import math

import pytest

from distbelief.errors import JobError, RemoteProtocolError
from distbelief.execution.executor import StepResult
from distbelief.protocol import GrantSteps, StartEpoch
from distbelief.worker.group import GroupState, Phase


def living() -> GroupState:
    """A machine that runs in life 5."""
    found = GroupState("replica-0.1", plan="p")
    assert found.gather(StartEpoch(life=5, plan="p"))
    found.phase = Phase.GATHERED
    assert found.proceed(proceed(5, steps=2))
    return found


def proceed(life: int, *, steps: int, is_last: bool = False) -> GrantSteps:
    return GrantSteps(life=life, position=0, steps=steps, is_last=is_last, ended=False)


def test_grants_only_rise() -> None:
    machine = living()
    assert not machine.proceed(proceed(5, steps=4, is_last=True))
    assert not machine.proceed(proceed(5, steps=3))
    assert machine.granted == 4
    assert machine.is_over(4)
    assert not machine.is_over(3)


def test_losses_are_summed_where_they_are_computed() -> None:
    machine = living()
    for loss in (None, 3.0, math.nan):
        machine.add(StepResult(loss=loss, averages={}, outputs=()), 4)
    stepped = machine.stepped(2, clock=None, square=3.0)
    assert stepped.square == 3.0
    assert (stepped.loss, stepped.samples, stepped.no_loss) == (3.0, 4, 4)
    assert (stepped.steps, stepped.clock, stepped.ended) == (2, -1.0, False)
    machine.gather(StartEpoch(life=6, plan="p"))
    assert machine.stepped(0, clock=2.0, square=0.0).samples == 0
    assert machine.gathered(None).pushes is False
    assert machine.gathered(8).samples == 8


def test_what_is_of_a_life_that_is_over_is_refused() -> None:
    machine = living()
    with pytest.raises(RemoteProtocolError, match="sent StartEpoch of life 4, after life 5"):
        machine.gather(StartEpoch(life=4, plan="p"))
    with pytest.raises(RemoteProtocolError, match="sent GrantSteps of life 4"):
        machine.proceed(proceed(4, steps=9))


def test_nobody_proceeds_who_has_not_gathered() -> None:
    machine = living()
    with pytest.raises(RemoteProtocolError, match="life 6 before it has gathered"):
        machine.proceed(proceed(6, steps=1))
    machine.gather(StartEpoch(life=6, plan="p"))
    with pytest.raises(RemoteProtocolError, match="life 6 before it has gathered"):
        machine.proceed(proceed(6, steps=1))
    assert not machine.gather(StartEpoch(life=6, plan="p"))


def test_another_plan_is_the_job_s_fault() -> None:
    with pytest.raises(JobError, match=r"has plan q, replica-0\.1 has p: start all"):
        living().gather(StartEpoch(life=6, plan="q"))
