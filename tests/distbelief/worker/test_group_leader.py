"""The leader of a group of machines, message by message."""

import msgspec
import pytest

from distbelief.errors import RemoteProtocolError
from distbelief.protocol import (
    ChunkOrder,
    GrantSteps,
    HeartbeatAck,
    Message,
    RankReady,
    StartEpoch,
    StepsDone,
)
from distbelief.worker.group_leader import GENERATION_BITS, STOP_SECONDS, GroupLeader, Outgoing


GENERATION = (1 << GENERATION_BITS) + 1


def gathered(life: int, samples: int = 0, *, pushes: bool = True) -> RankReady:
    return RankReady(life=life, pushes=pushes, samples=samples)


def stepped(life: int, steps: int, *, ended: bool = False, square: float = 0.0) -> StepsDone:
    return StepsDone(
        life=life,
        steps=steps,
        loss=2.0 * steps,
        samples=4 * steps,
        no_loss=0,
        clock=float(steps),
        ended=ended,
        square=square,
    )


def proceed(
    life: int,
    steps: int,
    *,
    position: int = 0,
    is_last: bool = False,
    ended: bool = False,
    agreed: int = 0,
    square: float = 0.0,
) -> GrantSteps:
    return GrantSteps(
        life=life,
        position=position,
        steps=steps,
        is_last=is_last,
        ended=ended,
        agreed=agreed,
        square=square,
    )


def said(out: Outgoing) -> list[tuple[int, str]]:
    return [(machine, repr(message)) for machine, message in out]


def same(out: Outgoing, *expected: tuple[int, Message]) -> bool:
    return said(out) == said(list(expected))


def all_ended(leader: GroupLeader) -> bool:
    return leader.all_ended


def is_complete(leader: GroupLeader) -> bool:
    return leader.is_complete


def leader_of_two(*, steps_max: int | None = None) -> GroupLeader:
    """A leader that has told two machines to take steps."""
    leader = GroupLeader(2, plan="p", steps_max=steps_max)
    gather = StartEpoch(life=GENERATION, plan="p")
    leader.joined(0, 1, 0.0)
    assert same(leader.start(1, 0.0), (0, gather), (1, gather))
    assert same(leader.joined(1, 5, 0.0), (1, gather))
    assert leader.begin(0.0) == []
    assert leader.hear(0, 1, gathered(GENERATION, 8), 0.0) == []
    assert leader.waiting_for == {1}
    go = proceed(GENERATION, min(2, steps_max or 2), position=4, is_last=steps_max is not None)
    assert same(leader.hear(1, 5, gathered(GENERATION, 4), 0.0), (0, go), (1, go))
    return leader


def test_a_life_begins_where_the_least_was_pushed() -> None:
    leader = leader_of_two()
    assert leader.is_running
    assert leader.life_done().position == 4


def test_nobody_is_more_than_two_steps_ahead_of_all() -> None:
    leader = leader_of_two()
    assert leader.hear(0, 1, stepped(GENERATION, 1), 1.0) == []
    assert leader.hear(0, 1, stepped(GENERATION, 2), 1.0) == []
    assert leader.slowest == 1
    go = proceed(GENERATION, 3, position=4, agreed=1)
    assert same(leader.hear(1, 5, stepped(GENERATION, 1), 1.0), (0, go), (1, go))
    assert leader.steps == 1
    done = leader.life_done()
    assert (done.loss, done.samples, leader.clock) == (6.0, 12, 1.5)


def test_what_all_have_of_a_gradient_is_added_in_the_order_of_machines() -> None:
    leader = leader_of_two()
    parts = 1e16, 1.0  # whose sum depends on nothing but their order, for three
    assert leader.hear(1, 5, stepped(GENERATION, 1, square=parts[1]), 1.0) == []
    go = proceed(GENERATION, 3, position=4, agreed=1, square=sum(parts))
    told = leader.hear(0, 1, stepped(GENERATION, 1, square=parts[0]), 1.0)
    assert same(told, (0, go), (1, go))
    # Told again until the next step is.
    assert same(leader.hear(1, 5, stepped(GENERATION, 1, square=7.0), 1.0), (1, go))
    leader.hear(0, 1, stepped(GENERATION, 2, square=2.0), 1.0)
    go = proceed(GENERATION, 4, position=4, agreed=2, square=5.0)
    told = leader.hear(1, 5, stepped(GENERATION, 2, square=3.0), 1.0)
    assert same(told, (0, go), (1, go))


def test_who_says_the_same_again_is_told_again() -> None:
    leader = leader_of_two()
    leader.hear(0, 1, stepped(GENERATION, 1), 1.0)
    go = proceed(GENERATION, 2, position=4)
    assert same(leader.hear(0, 1, stepped(GENERATION, 1), 2.0), (0, go))
    assert same(leader.hear(0, 1, gathered(GENERATION, 8), 2.0), (0, go))
    assert leader.hear(0, 1, stepped(GENERATION, 0), 2.0) == []  # overtaken
    assert leader.hear(0, 1, stepped(GENERATION - 1, 9), 2.0) == []
    assert leader.remind(100.0) == []


def test_a_new_incarnation_begins_a_new_life() -> None:
    leader = leader_of_two()
    leader.hear(0, 1, stepped(GENERATION, 1), 1.0)
    again = StartEpoch(life=GENERATION + 1, plan="p")
    out = leader.hear(1, 6, gathered(0), 2.0)
    assert same(out, (0, again), (1, again), (1, again))
    assert not leader.is_running
    assert leader.granted == leader.steps == 0
    assert leader.slowest is None
    assert same(leader.remind(3.0), (0, again), (1, again))
    assert leader.hear(1, 5, gathered(GENERATION + 1), 3.0) == []  # of the life before
    leader.hear(0, 1, gathered(GENERATION + 1, 12), 3.0)
    assert same(leader.remind(3.0), (1, again))
    go = proceed(GENERATION + 1, 2, position=8)
    out = leader.hear(1, 6, gathered(GENERATION + 1, 8), 3.0)
    assert same(out, (0, go), (1, go))


def test_steps_that_are_taken_again_count_once() -> None:
    leader = GroupLeader(1, plan="p", steps_max=5, n_steps=lambda a, b: (b - a) // 4)
    leader.begin(0.0)
    leader.joined(0, 1, 0.0)
    leader.start(1, 0.0)
    out = leader.hear(0, 1, gathered(GENERATION, 8), 0.0)
    assert same(out, (0, proceed(GENERATION, 2, position=8)))
    leader.hear(0, 1, stepped(GENERATION, 3), 0.0)
    leader.new_life(0.0)
    leader.hear(0, 1, gathered(GENERATION + 1, 12), 0.0)  # of three, one was pushed
    leader.hear(0, 1, stepped(GENERATION + 1, 3), 0.0)
    assert leader.granted == 4
    assert leader.is_last


def test_after_the_last_step_all_end_together() -> None:
    leader = leader_of_two(steps_max=1)
    last = proceed(GENERATION, 1, position=4, is_last=True)
    assert same(leader.hear(0, 1, stepped(GENERATION, 1, ended=True), 1.0), (0, last))
    assert not all_ended(leader)  # machine 1 may still need it
    gone = proceed(GENERATION, 1, position=4, is_last=True, ended=True)
    told = leader.hear(1, 5, stepped(GENERATION, 1, ended=True), 1.0)
    assert same(told, (0, gone), (1, gone))
    assert all_ended(leader)
    assert same(leader.hear(1, 5, stepped(GENERATION, 1, ended=True), 2.0), (1, gone))
    assert leader.missing == frozenset()


def test_stop_leaves_what_is_granted() -> None:
    leader = leader_of_two()
    last = proceed(GENERATION, 2, position=4, is_last=True)
    assert same(leader.stop(1.0), (0, last), (1, last))
    leader.hear(0, 1, stepped(GENERATION, 2), 1.0)
    last = proceed(GENERATION, 2, position=4, is_last=True, agreed=1)
    assert same(leader.hear(1, 5, stepped(GENERATION, 1), 1.0), (0, last), (1, last))
    assert leader.granted == 2


def test_the_end_is_made_without_who_does_not_answer() -> None:
    leader = leader_of_two()
    leader.stop(1.0)
    assert leader.remind(1.0 + STOP_SECONDS) == []
    again = StartEpoch(life=GENERATION + 1, plan="p")
    now = 2.0 + STOP_SECONDS
    assert same(leader.remind(now), (0, again), (1, again))
    assert leader.hear(0, 1, gathered(GENERATION + 1, 12), now) == []
    last = proceed(GENERATION + 1, 0, position=12, is_last=True)
    assert same(leader.remind(now + STOP_SECONDS + 1), (0, last))
    assert leader.missing == {1}
    leader.hear(0, 1, stepped(GENERATION + 1, 0, ended=True), now)
    assert all_ended(leader)


def test_who_has_ended_stays_until_what_the_others_pushed_is_applied() -> None:
    """It went when all had computed the last step: a leader that died with its last
    push under way waited for it for ever."""
    leader = leader_of_two(steps_max=1)
    leader.hear(0, 1, stepped(GENERATION, 1), 1.0)
    last = proceed(GENERATION, 1, position=4, is_last=True, agreed=1)
    assert same(leader.hear(1, 5, stepped(GENERATION, 1), 1.0), (0, last), (1, last))
    assert same(leader.hear(1, 5, stepped(GENERATION, 1, ended=True), 1.0), (1, last))
    assert not all_ended(leader)


def test_after_a_stop_nobody_waits_for_a_machine_that_is_gone_for_good() -> None:
    """One of two stood still when the job came to its end: that took 40 s more, though
    the supervisor had ended it after 10."""
    leader = leader_of_two()
    leader.stop(1.0)
    again = StartEpoch(life=GENERATION + 1, plan="p")
    assert same(leader.lost(1, 2.0), (0, again))
    assert leader.lost(1, 2.0) == []
    last = proceed(GENERATION + 1, 0, position=12, is_last=True)
    assert same(leader.hear(0, 1, gathered(GENERATION + 1, 12), 2.0), (0, last))
    leader.hear(0, 1, stepped(GENERATION + 1, 0, ended=True), 2.0)
    assert all_ended(leader)
    assert leader.missing == {1}


def test_who_is_lost_after_the_last_step_costs_no_step() -> None:
    leader = leader_of_two(steps_max=1)
    leader.hear(1, 5, stepped(GENERATION, 1), 1.0)
    leader.hear(0, 1, stepped(GENERATION, 1), 1.0)
    last = proceed(GENERATION, 1, position=4, is_last=True, agreed=1)
    assert same(leader.lost(1, 2.0), (0, last))
    gone = proceed(GENERATION, 1, position=4, is_last=True, agreed=1, ended=True)
    assert same(leader.hear(0, 1, stepped(GENERATION, 1, ended=True), 2.0), (0, gone))
    assert all_ended(leader)
    assert leader.lost(0, 3.0) == []


def test_a_leader_that_begins_anew_after_the_others_have_ended_ends_too() -> None:
    """It waited for ever: those it gathers have gone, and are not started again."""
    leader = GroupLeader(2, plan="p", steps_max=1)
    leader.joined(0, 2, 0.0)
    leader.start(2, 0.0)
    leader.begin(0.0)
    life = leader.life + 1
    assert same(leader.lost(1, 0.0), (0, StartEpoch(life=life, plan="p")))
    last = proceed(life, 0, position=4, is_last=True)
    assert same(leader.hear(0, 2, gathered(life, 4), 0.0), (0, last))
    leader.hear(0, 2, stepped(life, 0, ended=True), 0.0)
    assert all_ended(leader)


def test_before_a_begin_nothing_is_granted() -> None:
    leader = GroupLeader(1, plan="p")
    leader.joined(0, 1, 0.0)
    leader.start(1, 0.0)
    assert leader.hear(0, 1, gathered(GENERATION, pushes=False), 0.0) == []
    go = proceed(GENERATION, 2)
    assert same(leader.begin(0.0), (0, go))
    assert leader.begin(0.0) == []


def test_a_life_may_have_its_own_place_and_length() -> None:
    leader = GroupLeader(1, plan="p", limit=0)
    leader.begin(0.0)
    leader.joined(0, 1, 0.0)
    leader.start(1, 0.0)
    out = leader.hear(0, 1, gathered(GENERATION, pushes=False), 0.0)
    assert same(out, (0, proceed(GENERATION, 0)))
    assert is_complete(leader)
    assert leader.clock == 0.0
    leader.new_life(0.0, position=1, limit=1)
    out = leader.hear(0, 1, gathered(GENERATION + 1, pushes=False), 0.0)
    assert same(out, (0, proceed(GENERATION + 1, 1, position=1)))
    assert not is_complete(leader)
    leader.hear(0, 1, stepped(GENERATION + 1, 1), 0.0)
    assert is_complete(leader)


def test_a_leader_is_not_told_anything_else() -> None:
    with pytest.raises(RemoteProtocolError, match="rank 1 sent its leader HeartbeatAck"):
        leader_of_two().hear(1, 5, HeartbeatAck(), 0.0)


def test_a_life_about_an_order_is_told_of_it_and_a_lost_machine_ends_it() -> None:
    leader = leader_of_two()
    order = ChunkOrder(epoch=1, evaluation=1, versions=(), attempt=3, start=0, stop=4, keeps=())
    told = leader.new_life(1.0, position=0, limit=2, order=order)
    gather = StartEpoch(life=GENERATION + 1, plan="p", order=order)
    assert same(told, (0, gather), (1, gather))
    assert same(leader.remind(1.1), (0, gather), (1, gather))
    gather = StartEpoch(life=GENERATION + 2, plan="p")
    assert same(leader.joined(1, 6, 1.2), (0, gather), (1, gather))


def test_losses_are_added_in_the_order_of_machines_whoever_was_first() -> None:
    losses = []
    for order in ((0, 1, 2), (2, 1, 0)):
        leader = GroupLeader(3, plan="p", limit=1)
        leader.begin(0.0)
        leader.joined(0, 1, 0.0)
        leader.start(1, 0.0)
        for machine in range(3):
            leader.hear(machine, 1, gathered(GENERATION, 0), 0.0)
        for machine in order:
            said = msgspec.structs.replace(stepped(GENERATION, 1), loss=(1e16, 1.0, -1e16)[machine])
            leader.hear(machine, 1, said, 1.0)
        losses.append(leader.life_done().loss)
        assert leader.square == 0.0
    assert losses[0] == losses[1]


def test_no_more_steps_are_granted_than_samples_are_allowed() -> None:
    leader = GroupLeader(1, plan="p", n_steps=lambda a, b: -((a - b) // 4))
    leader.start(1, 0.0)
    leader.hear(0, 1, gathered(GENERATION, samples=8), 0.0)
    assert same(leader.begin(0.0, samples=14), (0, proceed(GENERATION, 2, position=8)))
    leader.hear(0, 1, stepped(GENERATION, 1), 0.0)
    assert (leader.granted, leader.is_held) == (2, False)
    leader.hear(0, 1, stepped(GENERATION, 2), 0.0)
    assert (leader.granted, leader.is_held) == (2, True)
    out = leader.begin(0.0, samples=30)
    assert same(out, (0, proceed(GENERATION, 4, position=8, agreed=2)))
    assert not leader.is_held
    assert leader.begin(0.0, samples=31) == []  # nobody may be three steps ahead
