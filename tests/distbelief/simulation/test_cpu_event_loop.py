"""The event loop: events take time of the process that handles them."""

from dataclasses import replace

import msgspec
import pytest

from distbelief.protocol import Heartbeat, Stop
from distbelief.roles.role import (
    Action,
    Compute,
    Computed,
    Cost,
    Event,
    Exit,
    PeerJoined,
    Persist,
    Received,
    Seconds,
    TimerFired,
)
from distbelief.simulation.cpu import EventCost, Processor, label_of
from distbelief.simulation.faults import Fault, Kill, Pause, Slow
from distbelief.simulation.machines import ClusterOptions
from tests.distbelief.simulation.toys import (
    STEADY,
    A,
    B,
    Handler,
    Scripted,
    cluster_of,
    counted,
    on_start,
)


WORK = Compute(name="work-1", work=lambda: None, cost=Cost(flops=1.0))


def beat(number: int) -> Received:
    message = Heartbeat(state="up", counters={"n": float(number)})
    return Received(sender=B, incarnation=1, message=message)


def test_events_of_a_kind_have_a_name() -> None:
    assert label_of(beat(1)) == "Heartbeat"
    assert label_of(Computed(name="apply:12")) == "Computed apply:"
    assert label_of(TimerFired(name="tick")) == "TimerFired tick"
    assert label_of(PeerJoined(peer=A, incarnation=1)) == "PeerJoined"


def run(
    *events: tuple[Seconds, Event],
    cores: float = 1,
    wake: Seconds = 0.0,
    handing: tuple[Seconds, Seconds] = (0.0, 0.0),
    faults: tuple[Fault, ...] = (),
    answer: Handler = lambda *_: (),
) -> list[tuple[Seconds, Event]]:
    """Return what A has handled, when: a heartbeat takes 1 s, other events 0.5 s."""
    role = Scripted(answer)
    begins, answers = handing
    handling = EventCost(seconds={"Heartbeat": 1.0}, other=0.5, begins=begins, answers=answers)
    options = ClusterOptions(
        machine=replace(STEADY, host="h", handling=handling),
        processors={"h": Processor(cores=cores, bytes_per_second=1e9, wake_seconds=wake)},
        faults=faults,
    )
    cluster = cluster_of({A: role}, options=options)
    cluster.run(until=0.0)
    for at, event in events:
        cluster.run(until=at)
        cluster.post(A, event)
    cluster.run()
    return role.seen


def times(seen: list[tuple[Seconds, Event]]) -> list[Seconds]:
    return [now for now, _ in seen]


def numbers(seen: list[tuple[Seconds, Event]]) -> list[float]:
    """Of the heartbeats, in order."""
    return [
        event.message.counters["n"]
        for _, event in seen
        if isinstance(event, Received) and isinstance(event.message, Heartbeat)
    ]


def test_events_wait_for_those_before_them_and_take_their_time() -> None:
    """Drawn:

    time       0   1   2   3   4
    arrive     S      bb
    handled      S       b   b
    """
    seen = run((1.75, beat(1)), (1.75, beat(2)))
    assert times(seen) == [0.5, 2.75, 3.75]
    assert numbers(seen) == [1, 2]


def test_handling_takes_a_core_from_work() -> None:
    """The work, 1 s, is handed out at 0.5 s; the heartbeat, 1 s, comes at once."""
    seen = run((0.5, beat(1)), answer=on_start(WORK))
    assert [(now, label_of(event)) for now, event in seen] == [
        (0.5, "Started"),
        (2.5, "Heartbeat"),
        (3.0, "Computed work-"),
    ]
    two = run((0.5, beat(1)), answer=on_start(WORK), cores=2)
    assert times(two) == [0.5, 1.5, 2.0]


def test_who_sleeps_while_all_cores_are_taken_wakes_late() -> None:
    seen = run((1.0, beat(1)), answer=on_start(WORK), wake=0.25)
    # Work until 1.5 s; the heartbeat begins at 1.25 s and has half of 0.5 s by 1.75 s.
    assert times(seen)[:2] == [0.5, pytest.approx(2.5)]
    alone = run((3.0, beat(1)), wake=0.25)
    assert times(alone) == [0.5, 4.0]


def test_an_executor_and_its_process_wake_each_other_and_that_takes_a_while() -> None:
    """The work, 1 s, is handed out at 0.5 s, begins at 0.75 s, and its answer waits."""
    handing = (0.25, 0.125)
    seen = run(answer=on_start(WORK), handing=handing)
    assert times(seen) == [0.5, 0.75 + 1.0 + 0.125 + 0.5]
    # Who is awake anyway handles the answer when it comes to that.
    busy = run((1.5, beat(1)), answer=on_start(WORK), handing=handing, cores=2)
    assert [(now, label_of(event)) for now, event in busy[1:]] == [
        (2.5, "Heartbeat"),
        (3.0, "Computed work-"),
    ]


def test_no_answer_of_an_executor_overtakes_the_one_before_it() -> None:
    """Drawn, the process asleep until 2.0 s but for a heartbeat:

    time       0.5      1.5      1.75     2.0      2.6       3.1      3.6
    lane       work-1   done     work-2 done
    handled                  [heartbeat          ]  work-1   work-2

    The process of a replica slept when a torn copy was done, and was woken by a message
    when the step after it was: it took the step for done before the copy, copied again
    in the middle of the first copy, and the forecast of the job ended there.
    """
    short = Compute(name="next-2", work=lambda: None, cost=Cost(flops=0.25))
    seen = run((1.6, beat(1)), answer=on_start(WORK, short), handing=(0.0, 0.5), cores=3)
    assert [(now, label_of(event)) for now, event in seen[1:]] == [
        (2.6, "Heartbeat"),
        (3.1, "Computed work-"),
        (3.6, "Computed next-"),
    ]


def test_that_something_is_saved_is_no_earlier_reported_than_the_work_before_it() -> None:
    """It was told to a process that slept at once, and work when it had woken up."""
    save = Persist(snapshot=counted(1))  # takes less than 0.5 s
    seen = run(answer=on_start(WORK, save), handing=(0.0, 0.5))
    assert [label_of(event) for _, event in seen] == ["Started", "Computed work-", "Persisted"]


def test_an_executor_does_not_wake_up_in_a_pause_nor_after_death() -> None:
    """Handed out at 0.5 s, it would begin at 0.75 s."""
    pause, kill = Pause(at=0.6, role=A, seconds=2.0), Kill(at=0.6, role=A)
    paused = run(answer=on_start(WORK), handing=(0.25, 0.0), faults=(pause,))
    assert times(paused) == [0.5, 2.6 + 1.0 + 0.5]
    killed = run(answer=on_start(WORK), handing=(0.25, 0.0), faults=(kill,))
    assert times(killed) == [0.5]


def test_a_paused_process_handles_nothing_and_forgets_no_order() -> None:
    events = [(0.25, beat(1)), (1.5, beat(2)), (5.0, beat(3))]
    seen = run(*events, faults=(Pause(at=1.0, role=A, seconds=2.0),))
    assert numbers(seen) == [1, 2, 3]
    assert times(seen) == [0.5, 3.5, 4.5, 6.0]


def test_an_event_that_comes_to_an_idle_paused_process_waits() -> None:
    seen = run((1.5, beat(1)), faults=(Pause(at=1.0, role=A, seconds=2.0),))
    assert times(seen) == [0.5, 4.0]


def test_who_is_killed_handles_nothing_more() -> None:
    faults = (Kill(at=2.25, role=A),)
    assert times(run((1.0, beat(1)), (1.5, beat(2)), faults=faults)) == [0.5, 2.0]
    assert times(run((1.5, beat(1)), (3.0, beat(2)), faults=faults)) == [0.5]


def test_who_halts_handles_nothing_more() -> None:
    def answer(event: Event, now: Seconds) -> list[Action]:
        del now
        return [Exit()] if isinstance(event, Received) else []

    stop = Received(sender=B, incarnation=1, message=Stop(reason="over"))
    assert times(run((1.0, stop), (1.0, beat(2)), answer=answer)) == [0.5, 1.5]


def test_work_in_vain_costs_nothing() -> None:
    """What part of it there is to do is asked when its turn comes."""
    parts = iter([1.0, 0.5, 0.0])
    work = msgspec.structs.replace(WORK, remaining=lambda: next(parts))
    seen = run(answer=on_start(work, work, work), cores=2)
    computed = [event.seconds for _, event in seen if isinstance(event, Computed)]
    assert computed == pytest.approx([1.0, 0.5, 0.0])
    assert times(seen) == pytest.approx([0.5, 2.0, 2.5, 3.0])


def test_a_slowed_role_leaves_more_of_the_cores_to_others() -> None:
    """A's second of work takes 4 s of a quarter of a core, B's goes on beside it.

    Both handle their start, half a second, on one core and a quarter: until 0.8 s. In
    the end A handles the answer, half a second as well, at its own pace: in 2 s.
    """
    roles = {name: Scripted(on_start(WORK)) for name in (A, B)}
    options = ClusterOptions(
        machine=replace(STEADY, host="h", handling=EventCost(other=0.5)),
        processors={"h": Processor(cores=1.25, bytes_per_second=1e9)},
        faults=(Slow(at=0.0, role=A, factor=4.0, seconds=9.0),),
    )
    cluster_of(roles, options=options).run()
    assert times(roles[A].seen) == pytest.approx([0.8, 6.8])
    assert times(roles[B].seen) == pytest.approx([0.8, 2.3])
