"""The leader of a group of ranks, message by message."""

import pytest

from distbelief import protocol as wire
from distbelief.core.errors import RemoteProtocolError
from distbelief.worker.batches import Limits
from distbelief.worker.group import (
    GENERATION_BITS,
    STOP_SECONDS,
    GroupLeader,
    GroupRank,
    Outgoing,
    group_rank_of,
    member_names,
    rank_name,
)


FIRST = (1 << GENERATION_BITS) + 1  # generation of a leader's first incarnation


def shown(out: Outgoing) -> list[str]:
    """Return messages as "RANK: generation N" and "RANK: grant STEPS at POSITION ..."."""
    found = []
    for rank, message in out:
        if isinstance(message, wire.StartGeneration):
            assert message.plan == "p"
            text = f"generation {message.generation - FIRST}" + (
                " of a chunk" if message.chunk else ""
            )
        else:
            assert isinstance(message, wire.GrantSteps)
            text = f"{message.generation - FIRST}: {message.steps} steps at {message.position}"
            text += ", last" * message.is_last + ", ended" * message.ended
            if message.agreed:
                text += f", {message.agreed} agreed, square {message.square:g}"
        found.append(f"{rank}: {text}")
    return found


def both(text: str) -> list[str]:
    return [f"0: {text}", f"1: {text}"]


class Ranks:
    """A leader, and the messages of its ranks."""

    def __init__(self, leader: GroupLeader) -> None:
        self.leader = leader
        self.now = 0.0
        self.incarnations = {0: 1, 1: 5}

    def hear(self, rank: int, message: wire.Message) -> list[str]:
        incarnation = self.incarnations.get(rank, 1)
        return shown(self.leader.hear(rank, incarnation, message, self.now))

    def ready(
        self, rank: int, samples: int = 0, *, generation: int = 0, pushes: bool = True
    ) -> list[str]:
        generation += FIRST
        return self.hear(
            rank, wire.RankReady(generation=generation, pushes=pushes, samples=samples)
        )

    def done(
        self,
        rank: int,
        steps: int,
        *,
        generation: int = 0,
        ended: bool = False,
        square: float = 0.0,
        loss: float | None = None,
    ) -> list[str]:
        report = wire.StepsDone(
            generation=FIRST + generation,
            steps=steps,
            loss=2.0 * steps if loss is None else loss,
            samples=4 * steps,
            no_loss=0,
            clock=float(steps),
            ended=ended,
            square=square,
        )
        return self.hear(rank, report)

    def both_ready(
        self, samples: int = 0, *, generation: int = 0, pushes: bool = True
    ) -> list[str]:
        self.ready(0, samples, generation=generation, pushes=pushes)
        return self.ready(1, samples, generation=generation, pushes=pushes)

    def both_done(self, steps: int, *, generation: int = 0) -> None:
        for rank in (0, 1):
            self.done(rank, steps, generation=generation)

    def remind(self, *, after: float = 0.0) -> list[str]:
        self.now += after
        return shown(self.leader.remind(self.now))

    def is_ended(self) -> bool:
        return self.leader.all_ended


def pair(*, steps_max: int | None = None) -> Ranks:
    """Return a leader that has granted steps to two ranks."""
    leader = GroupLeader(2, plan="p", limits=Limits(steps_max=steps_max))
    ranks = Ranks(leader)
    leader.joined(0, 1, 0.0)
    assert shown(leader.start(1, 0.0)) == both("generation 0")
    assert shown(leader.joined(1, 5, 0.0)) == ["1: generation 0"]
    assert not leader.begin(0.0)
    assert ranks.ready(0, 8) == []
    assert leader.waiting_for == {1}
    last = "" if steps_max is None else ", last"
    assert ranks.ready(1, 4) == both(f"0: {min(2, steps_max or 2)} steps at 4{last}")
    ranks.now = 1.0
    return ranks


def limited(limits: Limits, *, begins: bool = True) -> Ranks:
    """Return a leader of two ranks that are not ready yet."""
    ranks = Ranks(GroupLeader(2, plan="p", limits=limits, begins=begins))
    ranks.leader.joined(0, 1, 0.0)
    ranks.leader.start(1, 0.0)
    ranks.leader.joined(1, 5, 0.0)
    return ranks


def test_a_generation_begins_where_the_least_was_pushed() -> None:
    leader = pair().leader
    assert leader.is_running
    assert leader.generation_done().position == 4


def test_no_rank_is_more_than_two_steps_ahead() -> None:
    ranks = pair()
    assert ranks.done(0, 1) == ranks.done(0, 2) == []
    assert ranks.leader.slowest == 1
    assert ranks.done(1, 1) == both("0: 3 steps at 4, 1 agreed, square 0")
    assert ranks.leader.steps == 1
    done = ranks.leader.generation_done()
    assert (done.loss, done.samples, ranks.leader.clock) == (6.0, 12, 1.5)


def test_squared_norms_are_added_once_all_ranks_have_reported() -> None:
    ranks = pair()
    assert ranks.done(1, 1, square=1.0) == []
    assert ranks.done(0, 1, square=2.0) == both("0: 3 steps at 4, 1 agreed, square 3")
    # Told again until the next step is.
    assert ranks.done(1, 1, square=7.0) == ["1: 0: 3 steps at 4, 1 agreed, square 3"]
    ranks.done(0, 2, square=2.0)
    assert ranks.done(1, 2, square=3.0) == both("0: 4 steps at 4, 2 agreed, square 5")


def test_losses_and_squared_norms_are_added_in_the_order_of_ranks() -> None:
    sums = []
    for order in ((0, 1, 2), (0, 2, 1)):
        ranks = Ranks(GroupLeader(3, plan="p", limits=Limits(first=1)))
        ranks.incarnations[1] = 1
        ranks.leader.begin(0.0)
        ranks.leader.start(1, 0.0)
        for rank in range(3):
            ranks.ready(rank)
        for rank in order:
            part = (1e16, 1.0, -1e16)[rank]
            ranks.done(rank, 1, loss=part, square=part)
        sums.append((ranks.leader.generation_done().loss, ranks.leader.square))
    assert sums[0] == sums[1]


def test_a_repeated_report_is_answered_again() -> None:
    ranks = pair()
    ranks.done(0, 1)
    assert ranks.done(0, 1) == ranks.ready(0, 8) == ["0: 0: 2 steps at 4"]
    assert ranks.done(0, 0) == []  # overtaken
    assert ranks.done(0, 9, generation=-1) == []
    assert ranks.remind(after=99.0) == []


def test_a_new_incarnation_begins_a_new_generation() -> None:
    ranks = pair()
    leader = ranks.leader
    ranks.done(0, 1)
    ranks.incarnations[1] = 6
    assert ranks.ready(1, generation=-FIRST) == [*both("generation 1"), "1: generation 1"]
    assert not leader.is_running
    assert leader.granted == leader.steps == 0
    assert leader.slowest is None
    assert ranks.remind() == both("generation 1")
    ranks.incarnations[1] = 5
    assert ranks.ready(1, generation=1) == []  # an earlier incarnation
    ranks.incarnations[1] = 6
    ranks.ready(0, 12, generation=1)
    assert ranks.remind() == ["1: generation 1"]
    assert ranks.ready(1, 8, generation=1) == both("1: 2 steps at 8")


def test_repeated_steps_count_once() -> None:
    ranks = limited(Limits(steps_max=5, n_steps=lambda a, b: (b - a) // 4))
    assert ranks.both_ready(8) == both("0: 2 steps at 8")
    ranks.both_done(3)
    ranks.leader.new_generation(0.0)
    ranks.both_ready(12, generation=1)  # of three, one was pushed
    ranks.both_done(3, generation=1)
    assert ranks.leader.granted == 4
    assert ranks.leader.is_last


def test_after_the_last_step_all_ranks_end_together() -> None:
    ranks = pair(steps_max=1)
    assert ranks.done(0, 1, ended=True) == ["0: 0: 1 steps at 4, last"]
    assert not ranks.is_ended()  # rank 1 may still need it
    assert ranks.done(1, 1, ended=True) == both("0: 1 steps at 4, last, ended")
    assert ranks.is_ended()
    assert ranks.done(1, 1, ended=True) == ["1: 0: 1 steps at 4, last, ended"]
    assert not ranks.leader.missing


def test_stop_keeps_the_steps_already_granted() -> None:
    ranks = pair()
    assert shown(ranks.leader.stop(1.0)) == both("0: 2 steps at 4, last")
    ranks.done(0, 2)
    assert ranks.done(1, 1) == both("0: 2 steps at 4, last, 1 agreed, square 0")
    assert ranks.leader.granted == 2


def test_the_group_ends_without_a_silent_rank() -> None:
    ranks = pair()
    ranks.leader.stop(1.0)
    assert ranks.remind(after=STOP_SECONDS) == []
    assert ranks.remind(after=1.0) == both("generation 1")
    assert ranks.ready(0, 12, generation=1) == []
    assert ranks.remind(after=STOP_SECONDS + 1) == ["0: 1: 0 steps at 12, last"]
    assert ranks.leader.missing == {1}
    ranks.done(0, 0, generation=1, ended=True)
    assert ranks.is_ended()


def test_a_rank_that_has_ended_stays_until_all_pushes_are_applied() -> None:
    """Regression: it exited once all had computed the last step.

    A leader that died with its last push in flight then waited for that rank for ever.
    """
    ranks = pair(steps_max=1)
    ranks.done(0, 1)
    last = "0: 1 steps at 4, last, 1 agreed, square 0"
    assert ranks.done(1, 1) == both(last)
    assert ranks.done(1, 1, ended=True) == [f"1: {last}"]
    assert not ranks.is_ended()


def test_after_a_stop_no_rank_waits_for_one_lost_for_good() -> None:
    """Regression: a paused rank delayed the end by 40 s after the supervisor had given it up."""
    ranks = pair()
    ranks.leader.stop(1.0)
    assert shown(ranks.leader.lost(1, 2.0)) == ["0: generation 1"]
    assert ranks.leader.lost(1, 2.0) == []
    assert ranks.ready(0, 12, generation=1) == ["0: 1: 0 steps at 12, last"]
    ranks.done(0, 0, generation=1, ended=True)
    assert ranks.is_ended()
    assert ranks.leader.missing == {1}


def test_a_rank_lost_after_the_last_step_costs_no_step() -> None:
    ranks = pair(steps_max=1)
    ranks.done(1, 1)
    ranks.done(0, 1)
    last = "0: 1 steps at 4, last"
    assert shown(ranks.leader.lost(1, 2.0)) == [f"0: {last}, 1 agreed, square 0"]
    assert ranks.done(0, 1, ended=True) == [f"0: {last}, ended, 1 agreed, square 0"]
    assert ranks.is_ended()
    assert ranks.leader.lost(0, 3.0) == []


def test_a_leader_that_restarts_after_the_others_have_ended_ends_too() -> None:
    """Regression: it waited for ever for ranks that had exited and are not restarted."""
    ranks = Ranks(GroupLeader(2, plan="p", limits=Limits(steps_max=1)))
    ranks.leader.joined(0, 1, 0.0)
    ranks.leader.start(1, 0.0)
    ranks.leader.begin(0.0)
    assert shown(ranks.leader.lost(1, 0.0)) == ["0: generation 1"]
    assert ranks.ready(0, 4, generation=1) == ["0: 1: 0 steps at 4, last"]
    ranks.done(0, 0, generation=1, ended=True)
    assert ranks.is_ended()


def test_nothing_is_granted_before_the_start() -> None:
    ranks = limited(Limits(), begins=False)
    assert ranks.both_ready(pushes=False) == []
    assert shown(ranks.leader.begin(0.0)) == both("0: 2 steps at 0")
    assert ranks.leader.begin(0.0) == []


def test_a_generation_may_have_its_own_position_and_length() -> None:
    ranks = limited(Limits(first=0))
    assert ranks.both_ready(pushes=False) == both("0: 0 steps at 0")
    complete = [ranks.leader.is_complete]
    assert ranks.leader.clock == 0.0
    ranks.leader.new_generation(0.0, position=1, limit=1)
    assert ranks.both_ready(generation=1, pushes=False) == both("1: 1 steps at 1")
    complete.append(ranks.leader.is_complete)
    ranks.both_done(1, generation=1)
    assert [*complete, ranks.leader.is_complete] == [True, False, True]


def test_a_leader_rejects_other_messages() -> None:
    with pytest.raises(RemoteProtocolError, match="rank 1 sent its leader HeartbeatAck"):
        pair().hear(1, wire.HeartbeatAck())


def test_a_generation_for_a_chunk_carries_its_order_until_a_rank_is_lost() -> None:
    ranks = pair()
    chunk = wire.GroupChunk(
        series=1, evaluation=1, versions=(), attempt=3, start=0, stop=4, keeps=()
    )
    out = ranks.leader.new_generation(1.0, position=0, limit=2, chunk=chunk)
    assert shown(out) == ranks.remind() == both("generation 1 of a chunk")
    assert shown(ranks.leader.joined(1, 6, 1.2)) == both("generation 2")


def test_grants_stop_at_the_allowed_samples() -> None:
    ranks = limited(Limits(n_steps=lambda a, b: -((a - b) // 4)), begins=False)
    leader = ranks.leader
    ranks.both_ready(8)
    assert shown(leader.begin(0.0, samples=14)) == both("0: 2 steps at 8")
    held = []
    for steps in (1, 2):
        ranks.both_done(steps)
        held.append((leader.granted, leader.is_held))
    assert held == [(2, False), (2, True)]
    assert shown(leader.begin(0.0, samples=18)) == both("0: 3 steps at 8, 2 agreed, square 0")
    assert not leader.is_held
    assert leader.begin(0.0, samples=19) == []


def test_a_name_gives_group_and_rank() -> None:
    assert rank_name(3, 0) == "replica-3.0"
    assert group_rank_of("replica-3.12") == GroupRank("replica-3", 12)
    assert GroupRank("replica-3", 12).replica == 3
    assert group_rank_of("evaluator") == GroupRank("evaluator", 0)
    assert group_rank_of("evaluator.2") == GroupRank("evaluator", 2)
    assert GroupRank("evaluator", 2).replica is None
    assert member_names("evaluator", 2) == ["evaluator", "evaluator.1"]


@pytest.mark.parametrize(
    "name", ["replica-3", "shard-0", "evaluator.0", "evaluator.01", "replica-x.1", ""]
)
def test_other_names_are_no_ranks(name: str) -> None:
    assert group_rank_of(name) is None
