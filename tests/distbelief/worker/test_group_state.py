"""A rank's state: messages of the leader that it applies or rejects."""

import math

import pytest

from distbelief.errors import JobError, RemoteProtocolError
from distbelief.execution.executor import StepResult
from distbelief.protocol import GrantSteps, StartEpoch
from distbelief.worker.group import GroupState, Phase


def running_state() -> GroupState:
    """Return the state of a rank that runs in generation 5."""
    state = GroupState("replica-0.1", plan="p")
    assert state.start_epoch(StartEpoch(generation=5, plan="p"))
    state.phase = Phase.GATHERED
    assert state.commit_token(commit_token(5, steps=2))
    return state


def commit_token(generation: int, *, steps: int, is_last: bool = False) -> GrantSteps:
    return GrantSteps(generation=generation, position=0, steps=steps, is_last=is_last, ended=False)


def test_grants_only_rise() -> None:
    state = running_state()
    assert not state.commit_token(commit_token(5, steps=4, is_last=True))
    assert not state.commit_token(commit_token(5, steps=3))
    assert state.granted == 4
    assert state.is_over(4)
    assert not state.is_over(3)


def test_losses_are_summed_where_they_are_computed() -> None:
    state = running_state()
    for loss in (None, 3.0, math.nan):
        state.add(StepResult(loss=loss, averages={}, outputs=()), 4)
    stepped = state.steps_message(2, clock=None, square=3.0)
    assert stepped.square == 3.0
    assert (stepped.loss, stepped.samples, stepped.no_loss) == (3.0, 4, 4)
    assert (stepped.steps, stepped.clock, stepped.ended) == (2, -1.0, False)
    state.start_epoch(StartEpoch(generation=6, plan="p"))
    assert state.steps_message(0, clock=2.0, square=0.0).samples == 0
    assert state.ready_message(None).pushes is False
    assert state.ready_message(8).samples == 8


def test_messages_of_an_earlier_generation_are_rejected() -> None:
    state = running_state()
    with pytest.raises(
        RemoteProtocolError, match="sent StartEpoch of generation 4, after generation 5"
    ):
        state.start_epoch(StartEpoch(generation=4, plan="p"))
    with pytest.raises(RemoteProtocolError, match="sent GrantSteps of generation 4"):
        state.commit_token(commit_token(4, steps=9))


def test_a_grant_before_the_rank_is_ready_is_rejected() -> None:
    state = running_state()
    with pytest.raises(RemoteProtocolError, match="generation 6 before it was ready"):
        state.commit_token(commit_token(6, steps=1))
    state.start_epoch(StartEpoch(generation=6, plan="p"))
    with pytest.raises(RemoteProtocolError, match="generation 6 before it was ready"):
        state.commit_token(commit_token(6, steps=1))
    assert not state.start_epoch(StartEpoch(generation=6, plan="p"))


def test_a_different_plan_is_a_job_error() -> None:
    with pytest.raises(JobError, match=r"has plan q, replica-0\.1 has p: start all"):
        running_state().start_epoch(StartEpoch(generation=6, plan="q"))
