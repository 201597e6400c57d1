"""The warm start, as the coordinator sees it."""

from distbelief.protocol import CheckpointSaved, SaveCheckpoint, StartTraining, Stop
from distbelief.protocol.role import SUPERVISOR, Action, Address, Send, SetTimer
from sandblaster.coordinator.warm_start import TIMER, WarmStart


A, B = Address("replica-0"), Address("replica-1")
SHARDS = (Address("shard-0"), Address("shard-1"))


def warm_start_of(n_replicas: int, *joined: Address) -> WarmStart:
    warm_start = WarmStart(n_replicas, shards=SHARDS, second_copies={}, retry_seconds=0.5)
    for name in joined:
        warm_start.replica_joined(name, 0.0)
    return warm_start


def said(actions: list[Action]) -> list[tuple[Address, type]]:
    return [(a.receiver, type(a.message)) for a in actions if isinstance(a, Send)]


def test_it_is_over_when_all_workers_are_done() -> None:
    warm_start = warm_start_of(2)
    assert not warm_start.is_over
    assert said(warm_start.replica_joined(A, 1.0)) == [(A, StartTraining)]
    assert said(warm_start.replica_joined(B, 1.0)) == [(B, StartTraining)]
    assert said(warm_start.replica_joined(B, 1.5)) == [
        (B, StartTraining)
    ]  # the first message may be lost
    assert warm_start.replica_finished(A, 3.0) == [SetTimer(name=TIMER, at=4.0)]
    assert A in warm_start.done
    assert warm_start.replica_joined(A, 3.0) == []
    assert not warm_start.is_over
    assert warm_start.replica_finished(B, 3.5) == []
    assert warm_start.is_over


def test_late_workers_are_stopped_and_awaited() -> None:
    warm_start = warm_start_of(3, A, B)
    warm_start.replica_finished(A, 2.0)
    for now in (3.0, 3.5):  # until it has stopped
        actions = warm_start.timer(now)
        assert said(actions) == [(B, Stop)]
        assert actions[-1] == SetTimer(name=TIMER, at=now + 0.5)
        assert not warm_start.is_over
    assert warm_start.replica_joined(Address("replica-2"), 3.6) == []  # too late to begin
    warm_start.replica_finished(B, 4.0)
    assert warm_start.is_over


def test_a_lost_worker_is_not_awaited() -> None:
    warm_start = warm_start_of(2, A, B)
    warm_start.replica_finished(A, 2.0)
    warm_start.lost(B)
    warm_start.timer(3.0)
    assert warm_start.is_over
    warm_start.lost(A)
    assert warm_start.is_over  # no worker trains any more


def test_a_worker_that_is_lost_after_its_share_says_again_whether_it_is_done() -> None:
    """A shard that restarted meanwhile may have lost its last pushes."""
    warm_start = warm_start_of(2, A, B)
    warm_start.replica_finished(A, 2.0)
    warm_start.lost(A)
    warm_start.replica_finished(B, 2.5)
    assert not warm_start.is_over
    assert said(warm_start.replica_joined(A, 2.6)) == [(A, StartTraining)]
    warm_start.replica_finished(A, 2.7)
    assert warm_start.is_over


def test_a_worker_that_finished_for_an_earlier_coordinator_counts() -> None:
    warm_start = warm_start_of(1)
    assert warm_start.replica_finished(A, 7.0) == [SetTimer(name=TIMER, at=7.5)]
    assert warm_start.is_over


def saved(label: str, error: str | None = None) -> CheckpointSaved:
    return CheckpointSaved(label=label, clock=7, error=error)


def answers(actions: list[Action]) -> list[tuple[str, str | None]]:
    """Return what is reported to the supervisor."""
    return [
        (action.message.label, action.message.error)
        for action in actions
        if isinstance(action, Send)
        and action.receiver == SUPERVISOR
        and isinstance(action.message, CheckpointSaved)
    ]


def test_it_is_saved_when_every_shard_is() -> None:
    """Nothing was: a job killed in a warm start of hours had lost all of it."""
    saves = warm_start_of(1)
    assert said(saves.save("00001")) == [(name, SaveCheckpoint) for name in SHARDS]
    assert saves.shard_saved(SHARDS[0], saved("00001")) == []
    assert saves.shard_saved(SHARDS[0], saved("00001")) == []  # once more
    assert said(saves.save("00001")) == [
        (SHARDS[1], SaveCheckpoint)
    ]  # the first message may be lost
    assert answers(saves.shard_saved(SHARDS[1], saved("00001"))) == [("00001", None)]
    assert answers(saves.save("00001")) == [("00001", None)]  # the answer may be lost, too
    assert saves.shard_saved(SHARDS[1], saved("00001")) == []
    assert len(saves.save("00002")) == 2
    assert saves.shard_saved(SHARDS[1], saved("00001")) == []  # of the one before


def test_a_shard_that_could_not_save_is_named_and_asked_again() -> None:
    saves = warm_start_of(1)
    saves.save("00001")
    saves.shard_saved(SHARDS[0], saved("00001", "the disk is full"))
    actions = saves.shard_saved(SHARDS[1], saved("00001"))
    assert answers(actions) == [("00001", "shard-0: the disk is full")]
    assert said(saves.save("00001")) == [(SHARDS[0], SaveCheckpoint)]
    assert answers(saves.shard_saved(SHARDS[0], saved("00001"))) == [("00001", None)]


def test_it_waits_for_nobody_who_is_lost_for_good() -> None:
    """It waited for ever: the only replica of a warm start would never finish."""
    warm_start = warm_start_of(1, A)
    warm_start.lost(A)
    assert not warm_start.is_over
    warm_start.lost(A, for_good=True)
    assert warm_start.is_over


def test_others_than_its_replicas_do_not_train() -> None:
    warm_start = warm_start_of(1, A)
    assert warm_start.replica_joined(B, 1.0) == []
    warm_start.replica_finished(A, 3.0)
    assert warm_start.is_over


def test_of_two_copies_both_are_asked_and_the_primary_answers() -> None:
    second = {name: Address(f"{name}b") for name in SHARDS}
    saves = WarmStart(1, shards=SHARDS, second_copies=second, retry_seconds=0.5)
    assert [name for name, _ in said(saves.save("00001"))] == [*SHARDS, *second.values()]
    assert saves.shard_saved(SHARDS[0], saved("00001")) == []
    assert answers(saves.shard_saved(SHARDS[1], saved("00001"))) == [("00001", None)]
