"""The leader of a group of ranks, message by message."""

import msgspec
import pytest

from distbelief import protocol as wire
from distbelief.errors import RemoteProtocolError
from distbelief.worker.group import GENERATION_BITS, STOP_SECONDS, GroupLeader, Outgoing


GENERATION = (1 << GENERATION_BITS) + 1


def ready(generation: int, samples: int = 0, *, pushes: bool = True) -> wire.RankReady:
    return wire.RankReady(generation=generation, pushes=pushes, samples=samples)


def steps_done(
    generation: int, steps: int, *, ended: bool = False, square: float = 0.0
) -> wire.StepsDone:
    return wire.StepsDone(
        generation=generation,
        steps=steps,
        loss=2.0 * steps,
        samples=4 * steps,
        no_loss=0,
        clock=float(steps),
        ended=ended,
        square=square,
    )


def commit_token(
    generation: int,
    steps: int,
    *,
    position: int = 0,
    is_last: bool = False,
    ended: bool = False,
    agreed: int = 0,
    square: float = 0.0,
) -> wire.GrantSteps:
    return wire.GrantSteps(
        generation=generation,
        position=position,
        steps=steps,
        is_last=is_last,
        ended=ended,
        agreed=agreed,
        square=square,
    )


def as_text(out: Outgoing) -> list[tuple[int, str]]:
    return [(rank, repr(message)) for rank, message in out]


def same(out: Outgoing, *expected: tuple[int, wire.Message]) -> bool:
    return as_text(out) == as_text(list(expected))


def all_ended(leader: GroupLeader) -> bool:
    return leader.all_ended


def is_complete(leader: GroupLeader) -> bool:
    return leader.is_complete


def leader_of_two(*, steps_max: int | None = None) -> GroupLeader:
    """Return a leader that has granted steps to two ranks."""
    leader = GroupLeader(2, plan="p", steps_max=steps_max)
    gather = wire.StartEpoch(generation=GENERATION, plan="p")
    leader.joined(0, 1, 0.0)
    assert same(leader.start(1, 0.0), (0, gather), (1, gather))
    assert same(leader.joined(1, 5, 0.0), (1, gather))
    assert leader.begin(0.0) == []
    assert leader.hear(0, 1, ready(GENERATION, 8), 0.0) == []
    assert leader.waiting_for == {1}
    commit_tokens = commit_token(
        GENERATION, min(2, steps_max or 2), position=4, is_last=steps_max is not None
    )
    assert same(
        leader.hear(1, 5, ready(GENERATION, 4), 0.0), (0, commit_tokens), (1, commit_tokens)
    )
    return leader


def test_a_generation_begins_where_the_least_was_pushed() -> None:
    leader = leader_of_two()
    assert leader.is_running
    assert leader.generation_done().position == 4


def test_no_rank_is_more_than_two_steps_ahead() -> None:
    leader = leader_of_two()
    assert leader.hear(0, 1, steps_done(GENERATION, 1), 1.0) == []
    assert leader.hear(0, 1, steps_done(GENERATION, 2), 1.0) == []
    assert leader.slowest == 1
    commit_tokens = commit_token(GENERATION, 3, position=4, agreed=1)
    assert same(
        leader.hear(1, 5, steps_done(GENERATION, 1), 1.0), (0, commit_tokens), (1, commit_tokens)
    )
    assert leader.steps == 1
    done = leader.generation_done()
    assert (done.loss, done.samples, leader.clock) == (6.0, 12, 1.5)


def test_squared_norms_are_added_in_the_order_of_ranks() -> None:
    leader = leader_of_two()
    parts = 1e16, 1.0  # whose sum depends on nothing but their order, for three
    assert leader.hear(1, 5, steps_done(GENERATION, 1, square=parts[1]), 1.0) == []
    commit_tokens = commit_token(GENERATION, 3, position=4, agreed=1, square=sum(parts))
    out = leader.hear(0, 1, steps_done(GENERATION, 1, square=parts[0]), 1.0)
    assert same(out, (0, commit_tokens), (1, commit_tokens))
    # Told again until the next step is.
    assert same(leader.hear(1, 5, steps_done(GENERATION, 1, square=7.0), 1.0), (1, commit_tokens))
    leader.hear(0, 1, steps_done(GENERATION, 2, square=2.0), 1.0)
    commit_tokens = commit_token(GENERATION, 4, position=4, agreed=2, square=5.0)
    out = leader.hear(1, 5, steps_done(GENERATION, 2, square=3.0), 1.0)
    assert same(out, (0, commit_tokens), (1, commit_tokens))


def test_a_repeated_report_is_answered_again() -> None:
    leader = leader_of_two()
    leader.hear(0, 1, steps_done(GENERATION, 1), 1.0)
    commit_tokens = commit_token(GENERATION, 2, position=4)
    assert same(leader.hear(0, 1, steps_done(GENERATION, 1), 2.0), (0, commit_tokens))
    assert same(leader.hear(0, 1, ready(GENERATION, 8), 2.0), (0, commit_tokens))
    assert leader.hear(0, 1, steps_done(GENERATION, 0), 2.0) == []  # overtaken
    assert leader.hear(0, 1, steps_done(GENERATION - 1, 9), 2.0) == []
    assert leader.remind(100.0) == []


def test_a_new_incarnation_begins_a_new_generation() -> None:
    leader = leader_of_two()
    leader.hear(0, 1, steps_done(GENERATION, 1), 1.0)
    again = wire.StartEpoch(generation=GENERATION + 1, plan="p")
    out = leader.hear(1, 6, ready(0), 2.0)
    assert same(out, (0, again), (1, again), (1, again))
    assert not leader.is_running
    assert leader.granted == leader.steps == 0
    assert leader.slowest is None
    assert same(leader.remind(3.0), (0, again), (1, again))
    assert leader.hear(1, 5, ready(GENERATION + 1), 3.0) == []  # an earlier incarnation
    leader.hear(0, 1, ready(GENERATION + 1, 12), 3.0)
    assert same(leader.remind(3.0), (1, again))
    commit_tokens = commit_token(GENERATION + 1, 2, position=8)
    out = leader.hear(1, 6, ready(GENERATION + 1, 8), 3.0)
    assert same(out, (0, commit_tokens), (1, commit_tokens))


def test_repeated_steps_count_once() -> None:
    leader = GroupLeader(1, plan="p", steps_max=5, n_steps=lambda a, b: (b - a) // 4)
    leader.begin(0.0)
    leader.joined(0, 1, 0.0)
    leader.start(1, 0.0)
    out = leader.hear(0, 1, ready(GENERATION, 8), 0.0)
    assert same(out, (0, commit_token(GENERATION, 1, position=8)))
    leader.hear(0, 1, steps_done(GENERATION, 3), 0.0)
    leader.new_generation(0.0)
    leader.hear(0, 1, ready(GENERATION + 1, 12), 0.0)  # of three, one was pushed
    leader.hear(0, 1, steps_done(GENERATION + 1, 3), 0.0)
    assert leader.granted == 4
    assert leader.is_last


def test_after_the_last_step_all_ranks_end_together() -> None:
    leader = leader_of_two(steps_max=1)
    last = commit_token(GENERATION, 1, position=4, is_last=True)
    assert same(leader.hear(0, 1, steps_done(GENERATION, 1, ended=True), 1.0), (0, last))
    assert not all_ended(leader)  # rank 1 may still need it
    gone = commit_token(GENERATION, 1, position=4, is_last=True, ended=True)
    out = leader.hear(1, 5, steps_done(GENERATION, 1, ended=True), 1.0)
    assert same(out, (0, gone), (1, gone))
    assert all_ended(leader)
    assert same(leader.hear(1, 5, steps_done(GENERATION, 1, ended=True), 2.0), (1, gone))
    assert leader.missing == frozenset()


def test_stop_keeps_the_steps_already_granted() -> None:
    leader = leader_of_two()
    last = commit_token(GENERATION, 2, position=4, is_last=True)
    assert same(leader.stop(1.0), (0, last), (1, last))
    leader.hear(0, 1, steps_done(GENERATION, 2), 1.0)
    last = commit_token(GENERATION, 2, position=4, is_last=True, agreed=1)
    assert same(leader.hear(1, 5, steps_done(GENERATION, 1), 1.0), (0, last), (1, last))
    assert leader.granted == 2


def test_the_group_ends_without_a_silent_rank() -> None:
    leader = leader_of_two()
    leader.stop(1.0)
    assert leader.remind(1.0 + STOP_SECONDS) == []
    again = wire.StartEpoch(generation=GENERATION + 1, plan="p")
    now = 2.0 + STOP_SECONDS
    assert same(leader.remind(now), (0, again), (1, again))
    assert leader.hear(0, 1, ready(GENERATION + 1, 12), now) == []
    last = commit_token(GENERATION + 1, 0, position=12, is_last=True)
    assert same(leader.remind(now + STOP_SECONDS + 1), (0, last))
    assert leader.missing == {1}
    leader.hear(0, 1, steps_done(GENERATION + 1, 0, ended=True), now)
    assert all_ended(leader)


def test_a_rank_that_has_ended_stays_until_all_pushes_are_applied() -> None:
    """Regression: it exited once all had computed the last step.

    A leader that died with its last push in flight then waited for that rank for ever.
    """
    leader = leader_of_two(steps_max=1)
    leader.hear(0, 1, steps_done(GENERATION, 1), 1.0)
    last = commit_token(GENERATION, 1, position=4, is_last=True, agreed=1)
    assert same(leader.hear(1, 5, steps_done(GENERATION, 1), 1.0), (0, last), (1, last))
    assert same(leader.hear(1, 5, steps_done(GENERATION, 1, ended=True), 1.0), (1, last))
    assert not all_ended(leader)


def test_after_a_stop_no_rank_waits_for_one_lost_for_good() -> None:
    """Regression: a paused rank delayed the end by 40 s after the supervisor had given it up."""
    leader = leader_of_two()
    leader.stop(1.0)
    again = wire.StartEpoch(generation=GENERATION + 1, plan="p")
    assert same(leader.lost(1, 2.0), (0, again))
    assert leader.lost(1, 2.0) == []
    last = commit_token(GENERATION + 1, 0, position=12, is_last=True)
    assert same(leader.hear(0, 1, ready(GENERATION + 1, 12), 2.0), (0, last))
    leader.hear(0, 1, steps_done(GENERATION + 1, 0, ended=True), 2.0)
    assert all_ended(leader)
    assert leader.missing == {1}


def test_a_rank_lost_after_the_last_step_costs_no_step() -> None:
    leader = leader_of_two(steps_max=1)
    leader.hear(1, 5, steps_done(GENERATION, 1), 1.0)
    leader.hear(0, 1, steps_done(GENERATION, 1), 1.0)
    last = commit_token(GENERATION, 1, position=4, is_last=True, agreed=1)
    assert same(leader.lost(1, 2.0), (0, last))
    gone = commit_token(GENERATION, 1, position=4, is_last=True, agreed=1, ended=True)
    assert same(leader.hear(0, 1, steps_done(GENERATION, 1, ended=True), 2.0), (0, gone))
    assert all_ended(leader)
    assert leader.lost(0, 3.0) == []


def test_a_leader_that_restarts_after_the_others_have_ended_ends_too() -> None:
    """Regression: it waited for ever for ranks that had exited and are not restarted."""
    leader = GroupLeader(2, plan="p", steps_max=1)
    leader.joined(0, 2, 0.0)
    leader.start(2, 0.0)
    leader.begin(0.0)
    generation = leader.generation + 1
    assert same(leader.lost(1, 0.0), (0, wire.StartEpoch(generation=generation, plan="p")))
    last = commit_token(generation, 0, position=4, is_last=True)
    assert same(leader.hear(0, 2, ready(generation, 4), 0.0), (0, last))
    leader.hear(0, 2, steps_done(generation, 0, ended=True), 0.0)
    assert all_ended(leader)


def test_nothing_is_granted_before_the_start() -> None:
    leader = GroupLeader(1, plan="p")
    leader.joined(0, 1, 0.0)
    leader.start(1, 0.0)
    assert leader.hear(0, 1, ready(GENERATION, pushes=False), 0.0) == []
    commit_tokens = commit_token(GENERATION, 1)
    assert same(leader.begin(0.0), (0, commit_tokens))
    assert leader.begin(0.0) == []


def test_a_generation_may_have_its_own_position_and_length() -> None:
    leader = GroupLeader(1, plan="p", limit=0)
    leader.begin(0.0)
    leader.joined(0, 1, 0.0)
    leader.start(1, 0.0)
    out = leader.hear(0, 1, ready(GENERATION, pushes=False), 0.0)
    assert same(out, (0, commit_token(GENERATION, 0)))
    assert is_complete(leader)
    assert leader.clock == 0.0
    leader.new_generation(0.0, position=1, limit=1)
    out = leader.hear(0, 1, ready(GENERATION + 1, pushes=False), 0.0)
    assert same(out, (0, commit_token(GENERATION + 1, 1, position=1)))
    assert not is_complete(leader)
    leader.hear(0, 1, steps_done(GENERATION + 1, 1), 0.0)
    assert is_complete(leader)


def test_a_leader_rejects_other_messages() -> None:
    with pytest.raises(RemoteProtocolError, match="rank 1 sent its leader HeartbeatAck"):
        leader_of_two().hear(1, 5, wire.HeartbeatAck(), 0.0)


def test_a_generation_for_a_chunk_carries_its_order_until_a_rank_is_lost() -> None:
    leader = leader_of_two()
    order = wire.ChunkOrder(
        epoch=1, evaluation=1, versions=(), attempt=3, start=0, stop=4, keeps=()
    )
    out = leader.new_generation(1.0, position=0, limit=2, order=order)
    gather = wire.StartEpoch(generation=GENERATION + 1, plan="p", order=order)
    assert same(out, (0, gather), (1, gather))
    assert same(leader.remind(1.1), (0, gather), (1, gather))
    gather = wire.StartEpoch(generation=GENERATION + 2, plan="p")
    assert same(leader.joined(1, 6, 1.2), (0, gather), (1, gather))


def test_losses_and_squared_norms_are_added_in_the_order_of_ranks() -> None:
    sums = []
    for order in ((0, 1, 2), (0, 2, 1)):
        leader = GroupLeader(3, plan="p", limit=1)
        leader.begin(0.0)
        leader.joined(0, 1, 0.0)
        leader.start(1, 0.0)
        for rank in range(3):
            leader.hear(rank, 1, ready(GENERATION, 0), 0.0)
        for rank in order:
            part = (1e16, 1.0, -1e16)[rank]
            done = steps_done(GENERATION, 1)
            report = msgspec.structs.replace(done, loss=part, square=part)
            leader.hear(rank, 1, report, 1.0)
        sums.append((leader.generation_done().loss, leader.square))
    assert sums[0] == sums[1]


def test_grants_stop_at_the_allowed_samples() -> None:
    leader = GroupLeader(1, plan="p", n_steps=lambda a, b: -((a - b) // 4))
    leader.start(1, 0.0)
    leader.hear(0, 1, ready(GENERATION, samples=8), 0.0)
    assert same(leader.begin(0.0, samples=14), (0, commit_token(GENERATION, 1, position=8)))
    leader.hear(0, 1, steps_done(GENERATION, 1), 0.0)
    assert (leader.granted, leader.is_held) == (2, False)
    leader.hear(0, 1, steps_done(GENERATION, 2), 0.0)
    assert (leader.granted, leader.is_held) == (2, True)
    out = leader.begin(0.0, samples=30)
    assert same(out, (0, commit_token(GENERATION, 3, position=8, agreed=2)))
    assert not leader.is_held
    assert leader.begin(0.0, samples=31) == []  # a single rank has nobody to be ahead of
