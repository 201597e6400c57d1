"""Processes in a simulated cluster: start, end, launch, pause."""

import gc
from dataclasses import replace

import numpy as np
import pytest

from distbelief.core.errors import JobError, LocalProtocolError, PeerLostError, RemoteProtocolError
from distbelief.core.memory import Memory
from distbelief.protocol import Push, PushApplied, Stop, role as rl
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Kill, Pause, Slow, Supersede
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Link
from distbelief.simulation.trace import SimulationFailed
from tests.distbelief.simulation.toys import (
    STEADY,
    TESTER,
    A,
    B,
    C,
    Counter,
    Echo,
    Pinger,
    Scripted,
    block,
    cluster_of,
    from_tester,
    on_start,
    push,
)


INTRODUCED = ClusterOptions(introduce=True, machine=STEADY)


def counter(cluster: SimulatedCluster, name: rl.Address) -> float:
    return cluster.role(name).status()[1]["count"]


# ----------------------------------------------------------------- determinism


def ping(seed: int, *, faults: tuple[Kill, ...] = ()) -> SimulatedCluster:
    cluster = SimulatedCluster(
        {A: lambda _: Pinger(B, 20), B: lambda _: Echo()},
        seed=seed,
        options=ClusterOptions(introduce=True, faults=faults),
    )
    cluster.run()
    return cluster


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    assert ping(1).trace.digest == ping(1).trace.digest
    assert ping(1).trace.digest != ping(2).trace.digest


def test_a_pinger_gets_through_to_an_echo_and_halts() -> None:
    cluster = ping(1)
    assert cluster.halted == {A: None}
    assert cluster.alive == (B,)
    assert cluster.counts.delivered == 40
    assert cluster.now < 2.0


def test_it_gets_through_although_the_echo_is_killed_on_the_way() -> None:
    cluster = ping(1, faults=(Kill(at=0.0005, role=B, restart_after=3.0),))
    assert cluster.halted == {A: None}
    assert cluster.incarnation(B) == 2
    assert cluster.now > 3.0


def test_roles_are_connected_only_to_their_acquaintances() -> None:
    """Of 2,000 replicas each would be told of all others: four million events."""
    roles = {name: Scripted() for name in (A, B, C)}
    options = replace(INTRODUCED, acquainted=lambda one, other: B in {one, other})
    cluster_of(roles, options=options).run()
    assert [role.kinds.count("PeerJoined") for role in roles.values()] == [1, 2, 1]


def test_an_hour_of_silence_takes_no_events() -> None:
    cluster = cluster_of({A: Scripted()})
    cluster.run(until=3600.0, max_events=1)
    assert cluster.now == 3600.0


# ------------------------------------------------------------------- messages


def test_messages_of_one_link_keep_their_order_though_latency_varies() -> None:
    receiver = Scripted()
    sends = [rl.Send(receiver=B, message=push(n)) for n in range(1, 101)]
    options = ClusterOptions(introduce=True, link=Link(jitter=50.0), machine=STEADY)
    cluster_of({A: Scripted(on_start(*sends)), B: receiver}, options=options).run()
    assert receiver.sequences == list(range(1, 101))


def test_a_long_message_holds_up_the_next_one() -> None:
    receiver = Scripted()
    values = np.zeros(250_000, np.float32)  # 1 MB
    machines = {A: SimulatedMachine(host="one"), B: SimulatedMachine(host="two")}
    link = Link(latency_seconds=0.1, bytes_per_second=1e6, jitter=0.0)
    options = ClusterOptions(introduce=True, machines=machines, link=link)
    sends = [rl.Send(receiver=B, message=m) for m in (push(1), block(values), push(2))]
    cluster_of({A: Scripted(on_start(*sends)), B: receiver}, options=options).run()
    arrivals = [now for now, event in receiver.seen if isinstance(event, rl.Received)]
    assert arrivals == pytest.approx([0.1, 1.1, 1.1], abs=1e-3)


def test_what_goes_to_a_name_without_builder_waits_for_the_test() -> None:
    sender = Scripted(on_start(rl.Send(receiver=TESTER, message=push(3))))
    cluster = cluster_of({A: sender})
    cluster.run()
    (received,) = cluster.sent_to(TESTER)
    assert isinstance(received.message, Push)
    assert (received.sender, received.incarnation) == (A, 1)
    assert cluster.sent_to(rl.Address("nobody")) == ()


def test_the_test_can_play_a_peer() -> None:
    cluster = SimulatedCluster({B: lambda _: Echo()}, seed=1, options=INTRODUCED)
    cluster.run()
    cluster.post(B, from_tester(push(5)))
    cluster.run()
    (received,) = cluster.sent_to(TESTER)
    assert isinstance(received.message, PushApplied)
    assert received.message.sequence == 5


def test_a_message_that_had_not_left_dies_with_its_sender() -> None:
    receiver = Scripted()
    machines = {A: SimulatedMachine(host="one"), B: SimulatedMachine(host="two")}
    link = Link(latency_seconds=0.0, bytes_per_second=1e6, jitter=0.0)
    options = ClusterOptions(
        introduce=True, machines=machines, link=link, faults=(Kill(at=0.5, role=A),)
    )
    values = np.zeros(250_000, np.float32)  # a second on its way out
    sends = [rl.Send(receiver=B, message=m) for m in (push(1), block(values))]
    cluster = cluster_of({A: Scripted(on_start(*sends)), B: receiver}, options=options)
    cluster.run()
    assert receiver.sequences == [1]
    assert receiver.kinds.count("Received") == 1
    assert cluster.counts.lost == 1


def test_a_message_to_an_earlier_incarnation_reaches_nobody() -> None:
    receiver = Scripted()
    options = ClusterOptions(
        introduce=True,
        machine=STEADY,
        link_within_host=Link(latency_seconds=1.0),
        faults=(Kill(at=0.5, role=B, restart_after=0.1),),
    )
    cluster = cluster_of(
        {A: Scripted(on_start(rl.Send(receiver=B, message=push(1)))), B: receiver}, options=options
    )
    cluster.run()
    assert receiver.sequences == []
    assert cluster.incarnation(B) == 2


@pytest.mark.parametrize("restart_after", [0.1, 2.0])
def test_a_message_to_an_earlier_incarnation_reaches_the_next_if_it_has_its_port(
    restart_after: float,
) -> None:
    """It arrives at time 1, and waits if need be."""
    receiver = Scripted()
    options = ClusterOptions(
        introduce=True,
        machine=STEADY,
        link_within_host=Link(latency_seconds=1.0, jitter=0.0),
        port_reuse=1.0,
        faults=(Kill(at=0.5, role=B, restart_after=restart_after),),
    )
    sender = Scripted(on_start(rl.Send(receiver=B, message=push(1))))
    cluster_of({A: sender, B: receiver}, options=options).run()
    last = [now for now, event in receiver.seen if isinstance(event, rl.Received)]
    assert last == [pytest.approx(max(1.0, 0.5 + restart_after), abs=1e-3)]
    started = receiver.kinds.index("Started", 1)
    assert "Received" in receiver.kinds[started:]


# ---------------------------------------------------------------- introduction


def test_introduced_roles_hear_of_every_new_incarnation_of_the_others() -> None:
    a, b = Scripted(), Scripted()
    cluster = cluster_of({A: a, B: b})
    cluster.run()
    cluster.restart(B)
    cluster.run()
    assert [e for _, e in a.seen if isinstance(e, rl.PeerJoined)] == [
        rl.PeerJoined(peer=B, incarnation=1),
        rl.PeerJoined(peer=B, incarnation=2),
    ]
    assert b.seen[0][1] == rl.Started(incarnation=1)
    assert b.seen[2][1] == rl.Started(incarnation=2)
    assert b.seen[3][1] == rl.PeerJoined(peer=A, incarnation=1)


def test_without_introduction_only_connected_roles_and_the_supervisor_are_reached() -> None:
    supervisor, b, c = Scripted(), Scripted(), Scripted()
    connect = rl.Connect(peer=B, incarnation=1, endpoint="", host="host-0")
    a = Scripted(
        on_start(
            connect, *(rl.Send(receiver=peer, message=push(1)) for peer in (rl.SUPERVISOR, B, C))
        )
    )
    roles = {rl.SUPERVISOR: supervisor, A: a, B: b, C: c}
    cluster = cluster_of(roles, options=ClusterOptions())
    cluster.run()
    assert [role.sequences for role in roles.values()] == [[1], [], [1], []]
    assert cluster.counts.lost == 1
    assert "not connected to c" in cluster.trace.table()


def test_connecting_anew_to_the_same_incarnation_keeps_the_order() -> None:
    connect = rl.Connect(peer=B, incarnation=1, endpoint="", host="host-0")
    actions: list[rl.Action] = []
    for n in range(1, 31):
        actions += [rl.Send(receiver=B, message=push(n)), connect]
    receiver = Scripted()
    a = Scripted(on_start(connect, *actions))
    cluster_of({A: a, B: receiver}, options=ClusterOptions()).run()
    assert receiver.sequences == list(range(1, 31))


def test_connecting_to_the_next_incarnation_reaches_it() -> None:
    def answer(event: rl.Event, _: rl.Seconds) -> list[rl.Action]:
        n = 1 if isinstance(event, rl.Started) else 2
        connect = rl.Connect(peer=B, incarnation=n, endpoint="", host="host-0")
        again = [rl.SetTimer(name="again", at=3.0)] if n == 1 else []
        return [connect, rl.Send(receiver=B, message=push(n)), *again]

    receiver = Scripted()
    options = ClusterOptions(faults=(Kill(at=1.0, role=B, restart_after=1.0),))
    cluster_of({A: Scripted(answer), B: receiver}, options=options).run()
    assert receiver.sequences == [1, 2]


# ------------------------------------------------------------ launch, terminate


def supervising(
    *actions: rl.Action, launch_seconds: float = 0.5
) -> tuple[SimulatedCluster, Scripted]:
    supervisor = Scripted(on_start(*actions))
    cluster = SimulatedCluster(
        {rl.SUPERVISOR: lambda _: supervisor, A: lambda _: Counter()},
        seed=1,
        options=ClusterOptions(start=(rl.SUPERVISOR,), launch_seconds=launch_seconds),
    )
    return cluster, supervisor


def test_a_launched_role_starts_later_with_the_incarnation_asked_for() -> None:
    cluster, _ = supervising(rl.Launch(name=A, incarnation=4))
    cluster.run(until=0.4)
    assert cluster.alive == (rl.SUPERVISOR,)
    cluster.run(until=0.6)
    assert cluster.incarnation(A) == 4


@pytest.mark.parametrize("how", ["killed", "halted"])
def test_the_supervisor_learns_that_a_role_it_launched_is_gone(how: str) -> None:
    cluster, supervisor = supervising(rl.Launch(name=A, incarnation=1))
    cluster.run()
    if how == "killed":
        cluster.kill(A)
    else:
        cluster.post(A, from_tester(Stop(reason="enough")))
    cluster.run()
    last = supervisor.seen[-1][1]
    assert isinstance(last, rl.PeerLost)
    assert (last.peer, last.incarnation) == (A, 1)
    assert how in last.reason


def test_a_role_terminated_before_it_started_never_starts() -> None:
    cluster, supervisor = supervising(rl.Launch(name=A, incarnation=1), rl.Terminate(name=A))
    cluster.run()
    assert cluster.alive == (rl.SUPERVISOR,)
    assert supervisor.kinds == ["Started", "PeerLost"]


def test_terminate_ends_a_role_and_its_zombies() -> None:
    def answer(event: rl.Event, _: rl.Seconds) -> list[rl.Action]:
        match event:
            case rl.Started():
                return [
                    rl.Launch(name=A, incarnation=1),
                    rl.Launch(name=A, incarnation=2),
                    rl.SetTimer(name="end", at=5.0),
                ]
            case rl.TimerFired():
                return [rl.Terminate(name=A)]
            case _:
                return []

    supervisor = Scripted(answer)
    cluster = SimulatedCluster(
        {rl.SUPERVISOR: lambda _: supervisor, A: lambda _: Counter()},
        seed=1,
        options=ClusterOptions(start=(rl.SUPERVISOR,)),
    )
    cluster.run()
    lost = [event for _, event in supervisor.seen if isinstance(event, rl.PeerLost)]
    assert [event.incarnation for event in lost] == [1, 2]
    assert cluster.alive == (rl.SUPERVISOR,)


def test_an_incarnation_that_does_not_rise_ends_the_run() -> None:
    cluster, _ = supervising(rl.Launch(name=A, incarnation=2), rl.Launch(name=A, incarnation=2))
    with pytest.raises(SimulationFailed, match="each start needs a higher number"):
        cluster.run()


def test_launching_a_name_without_builder_ends_the_run() -> None:
    cluster, _ = supervising(rl.Launch(name=rl.Address("shrad-0"), incarnation=1))
    with pytest.raises(SimulationFailed, match=r"builder for 'shrad-0'; there .* for .*, a"):
        cluster.run()


def no_data(_: Memory) -> Counter:
    raise JobError("no data in ''")


def test_a_role_that_cannot_be_built_is_lost_to_its_supervisor() -> None:
    supervisor = Scripted(on_start(rl.Launch(name=A, incarnation=1)))
    cluster = SimulatedCluster(
        {rl.SUPERVISOR: lambda _: supervisor, A: no_data},
        seed=1,
        options=ClusterOptions(start=(rl.SUPERVISOR,)),
    )
    cluster.run()
    last = supervisor.seen[-1][1]
    assert isinstance(last, rl.PeerLost)
    assert last.reason == "could not be built: no data in ''"


def test_a_role_that_cannot_be_built_ends_a_run_without_supervisor() -> None:
    cluster = SimulatedCluster({A: no_data}, seed=1)
    with pytest.raises(SimulationFailed, match="a#1 could not be built: no data"):
        cluster.run()


# --------------------------------------------------------------- kill, restart


def test_a_new_incarnation_begins_with_nothing_of_the_old_one() -> None:
    cluster = SimulatedCluster({A: lambda _: Counter()}, seed=1, options=INTRODUCED)
    cluster.run()
    cluster.post(A, from_tester(push(1)))
    cluster.run()
    assert counter(cluster, A) == 1
    cluster.restart(A)
    assert counter(cluster, A) == 0
    assert cluster.incarnation(A) == 2


def test_a_killed_role_gets_no_answer_and_no_timer() -> None:
    role = Scripted(
        on_start(
            rl.SetTimer(name="t", at=2.0),
            rl.Compute(name="c", work=lambda: None, cost=rl.Cost(flops=2.0)),
        )
    )
    cluster = cluster_of({A: role})
    cluster.run(until=1.0)
    cluster.kill(A)
    cluster.kill(A)  # once more does nothing
    cluster.run()
    assert role.kinds == ["Started"]
    assert cluster.alive == ()
    assert cluster.halted == {}


@pytest.mark.parametrize("n_performed", [0, 1, 2, 3])
def test_a_role_can_be_killed_between_any_two_actions(n_performed: int) -> None:
    def answer(event: rl.Event, _: rl.Seconds) -> list[rl.Action]:
        if isinstance(event, rl.Received):
            return [rl.Send(receiver=B, message=push(n)) for n in (1, 2)]
        return []

    receiver = Scripted()
    kill = Kill(at=1.0, role=A, after_actions=n_performed)
    options = ClusterOptions(introduce=True, machine=STEADY, faults=(kill,))
    cluster = cluster_of({A: Scripted(answer), B: receiver}, options=options)
    cluster.run()
    cluster.post(A, from_tester(push(1)))
    cluster.run()
    assert cluster.alive == (B,)
    # What it sent had not left the process when it died.
    assert receiver.sequences == []
    assert cluster.counts.lost == min(n_performed, 2)


def test_a_kill_in_mid_event_is_called_off_if_there_is_no_event() -> None:
    kill = Kill(at=1.0, role=A, after_actions=0, restart_after=2.0)
    options = ClusterOptions(introduce=True, faults=(kill,))
    cluster = cluster_of({A: Scripted(on_start())}, options=options)
    cluster.run()
    cluster.post(A, from_tester(push(1)))
    cluster.run()
    assert cluster.incarnation(A) == 1
    assert cluster.alive == (A,)


def test_a_kill_of_whoever_is_gone_or_not_yet_there_does_nothing() -> None:
    faults = (Kill(at=1.0, role=A, restart_after=1.0), Kill(at=1.0, role=B))
    options = ClusterOptions(start=(A,), faults=faults)
    roles = {A: Scripted(on_start(rl.Exit())), B: Scripted()}
    cluster = cluster_of(roles, options=options)
    cluster.run()
    assert cluster.halted == {A: None}
    assert cluster.incarnation(A) == 1


def test_a_kill_does_not_restart_what_was_restarted_meanwhile() -> None:
    options = ClusterOptions(faults=(Kill(at=1.0, role=A, restart_after=1.0),))
    cluster = cluster_of({A: Scripted()}, options=options)
    cluster.run(until=1.5)
    cluster.restart(A)
    cluster.run()
    assert cluster.incarnation(A) == 2


def test_asking_for_a_role_that_has_not_begun_names_those_that_have() -> None:
    cluster = cluster_of({A: Scripted(), B: Scripted()}, options=ClusterOptions())
    with pytest.raises(KeyError, match="'a' has not started; started roles: none"):
        cluster.role(A)
    cluster.run()
    with pytest.raises(KeyError, match="'c' has not started; started roles: a, b"):
        cluster.kill(C)


# ----------------------------------------------------------------------- pause


def test_a_paused_role_gets_everything_later_and_in_order() -> None:
    role = Scripted(on_start(rl.SetTimer(name="t", at=2.0)))
    sends = [rl.Send(receiver=A, message=push(n)) for n in range(1, 6)]

    def answer(event: rl.Event, _: rl.Seconds) -> list[rl.Action]:
        match event:
            case rl.Started():
                return [rl.SetTimer(name="t", at=1.5)]
            case rl.TimerFired():
                return list(sends)
            case _:
                return []

    options = ClusterOptions(
        introduce=True, machine=STEADY, faults=(Pause(at=1.0, role=A, seconds=4.0),)
    )
    cluster = cluster_of({A: role, B: Scripted(answer)}, options=options)
    cluster.run(until=4.9)
    assert role.kinds == ["Started", "PeerJoined"]
    cluster.run()
    assert {now for now, _ in role.seen[2:]} == {5.0}
    assert role.kinds[2:] == ["Received"] * 5 + ["TimerFired"]
    assert role.sequences == [1, 2, 3, 4, 5]


def test_what_arrives_at_the_end_of_a_pause_comes_after_what_waited() -> None:
    options = ClusterOptions(
        introduce=True,
        link_within_host=Link(latency_seconds=1.0, bytes_per_second=1e12, jitter=0),
        faults=(Pause(at=1.5, role=B, seconds=1.5),),
    )

    def answer(event: rl.Event, now: rl.Seconds) -> list[rl.Action]:
        if isinstance(event, (rl.Started, rl.TimerFired)) and now < 5:
            return [
                rl.Send(receiver=B, message=push(int(now) + 1)),
                rl.SetTimer(name="t", at=now + 1),
            ]
        return []

    receiver = Scripted()
    cluster_of({A: Scripted(answer), B: receiver}, options=options).run()
    assert receiver.sequences == [1, 2, 3, 4, 5]
    assert receiver.seen[3][0] == 3.0


def test_work_under_way_stands_still_during_a_pause() -> None:
    work = rl.Compute(name="c", work=lambda: None, cost=rl.Cost(flops=2.0))
    role = Scripted(on_start(work, work))
    faults = (Pause(at=1.0, role=A, seconds=3.0), Pause(at=2.0, role=A, seconds=4.0))
    options = ClusterOptions(machine=STEADY, faults=faults)
    cluster_of({A: role}, options=options).run()
    assert [now for now, _ in role.seen] == [0.0, 7.0, 9.0]


def test_a_pause_within_a_pause_changes_nothing() -> None:
    role = Scripted(on_start(rl.SetTimer(name="t", at=2.0)))
    faults = (Pause(at=1.0, role=A, seconds=3.0), Pause(at=2.0, role=A, seconds=1.0))
    options = ClusterOptions(faults=(*faults, Pause(at=1.0, role=B, seconds=1.0)), start=(A,))
    cluster_of({A: role, B: Scripted()}, options=options).run()
    assert role.seen[-1] == (4.0, rl.TimerFired(name="t"))


def test_a_zombie_wakes_beside_its_successor_and_still_speaks() -> None:
    """A paused role is taken for dead; its messages carry the old incarnation."""

    def supervise(event: rl.Event, _: rl.Seconds) -> list[rl.Action]:
        match event:
            case rl.Started():
                return [rl.Launch(name=A, incarnation=1), rl.SetTimer(name="impatience", at=3.0)]
            case rl.TimerFired():
                return [rl.Launch(name=A, incarnation=2)]
            case _:
                return []

    def live(event: rl.Event, now: rl.Seconds) -> list[rl.Action]:
        if isinstance(event, (rl.Started, rl.TimerFired)):
            return [
                rl.Send(receiver=rl.SUPERVISOR, message=push(int(now))),
                rl.SetTimer(name="beat", at=now + 1),
            ]
        return []

    supervisor = Scripted(supervise)
    cluster = SimulatedCluster(
        {rl.SUPERVISOR: lambda _: supervisor, A: lambda _: Scripted(live)},
        seed=1,
        options=ClusterOptions(
            start=(rl.SUPERVISOR,), faults=(Pause(at=1.0, role=A, seconds=5.0),)
        ),
    )
    cluster.run(until=6.2)
    heard = [event.incarnation for _, event in supervisor.seen
             if isinstance(event, rl.Received)]  # fmt: skip
    assert heard == [1, 2, 2, 2, 1]


# ------------------------------------------------------------------------ slow


def test_a_role_taken_for_dead_goes_on_beside_its_next_incarnation() -> None:
    built: list[Scripted] = []

    def build(_: Memory) -> Scripted:
        built.append(Scripted(beat))
        return built[-1]

    cluster = SimulatedCluster(
        {A: build}, seed=0, options=ClusterOptions(faults=(Supersede(at=1.5, role=A),))
    )
    cluster.run(until=4.0)
    assert cluster.incarnation(A) == 2
    assert [len(role.seen) for role in built] == [5, 3]  # at 0 … 4, at 1.5 … 3.5


def test_slow_work_takes_longer_while_it_lasts() -> None:
    work = rl.Compute(name="c", work=lambda: None, cost=rl.Cost(flops=1.0))
    role = Scripted(on_start(work, work, work))
    faults = (
        Slow(at=0.5, role=A, factor=4.0, seconds=2.0),
        Slow(at=0.5, role=B, factor=9.0, seconds=9.0),
    )
    options = ClusterOptions(machine=STEADY, faults=faults)
    cluster_of({A: role, B: Scripted()}, options=options).run()
    assert [now for now, _ in role.seen] == [0.0, 1.0, 5.0, 6.0]


# ---------------------------------------------------------------------- errors


def raising(error: Exception) -> Scripted:
    def answer(event: rl.Event, _: rl.Seconds) -> list[rl.Action]:
        if isinstance(event, rl.Received):
            raise error
        return []

    return Scripted(answer)


def poked(role: Scripted) -> SimulatedCluster:
    cluster = cluster_of({A: role}, seed=17)
    cluster.run()
    cluster.post(A, from_tester(push(1)))
    cluster.run()
    return cluster


def test_a_remote_protocol_error_drops_the_event_and_the_role_goes_on() -> None:
    cluster = poked(raising(RemoteProtocolError("'tester' pushed to a toy")))
    assert cluster.alive == (A,)
    assert cluster.counts.refused == 1
    assert "refused: 'tester' pushed to a toy" in cluster.trace.table()


def test_any_other_error_of_ours_halts_the_role() -> None:
    cluster = poked(raising(PeerLostError("shard-0 is silent for 60 s")))
    assert cluster.halted == {A: "PeerLostError: shard-0 is silent for 60 s"}


@pytest.mark.parametrize(
    "error", [AssertionError("n < 0"), KeyError("x"), LocalProtocolError("illegal")]
)
def test_a_bug_in_a_role_ends_the_run_and_names_the_seed(error: Exception) -> None:
    with pytest.raises(SimulationFailed, match="seed 17") as caught:
        poked(raising(error))
    assert caught.value.seed == 17
    assert f"a#1 raised {type(error).__name__}" in str(caught.value)
    assert caught.value.__cause__ is error


def test_an_array_that_cannot_be_sent_ends_the_run() -> None:
    values = np.zeros((2, 2), np.float32)
    sender = Scripted(on_start(rl.Send(receiver=B, message=block(values))))
    with pytest.raises(SimulationFailed, match=r"a#1 .*cannot send an array"):
        cluster_of({A: sender, B: Scripted()}).run()


def test_a_timer_at_no_time_ends_the_run() -> None:
    role = Scripted(on_start(rl.SetTimer(name="t", at=float("nan"))))
    with pytest.raises(SimulationFailed, match="scheduled at time NaN"):
        cluster_of({A: role}).run()


def test_reports_are_kept() -> None:
    line = rl.Report(text="a slot is late", level="warning")
    cluster = cluster_of({A: Scripted(on_start(line))})
    cluster.run()
    assert cluster.reports == ((A, line),)
    assert "warning: a slot is late" in cluster.trace.table()


# ---------------------------------------------------------------------- bounds


def beat(_: rl.Event, now: rl.Seconds) -> list[rl.Action]:
    return [rl.SetTimer(name="beat", at=now + 1)]


def test_a_run_without_end_ends_at_max_events() -> None:
    with pytest.raises(SimulationFailed, match="not ended after 50 events"):
        cluster_of({A: Scripted(beat)}).run(max_events=50)


def test_a_condition_that_never_holds_ends_the_run() -> None:
    cluster = cluster_of({A: Scripted(beat)})
    with pytest.raises(SimulationFailed, match=r"does not hold by 10\.0 s"):
        cluster.run_until(lambda: False, within=10.0)
    with pytest.raises(SimulationFailed, match="has not ended after 5 events"):
        cluster.run_until(lambda: False, max_events=5)
    with pytest.raises(SimulationFailed, match="does not hold by"):
        cluster_of({A: Scripted()}).run_until(lambda: False, within=float("inf"))


def test_a_condition_is_asked_after_every_event() -> None:
    role = Scripted(beat)
    cluster = cluster_of({A: role})
    cluster.run_until(lambda: len(role.seen) == 4)
    assert cluster.now == 3.0


def test_roles_that_answer_each_other_in_no_time_are_stopped() -> None:
    role = Scripted(lambda _, now: [rl.SetTimer(name="again", at=now)])
    with pytest.raises(SimulationFailed, match="no time has passed"):
        cluster_of({A: role}).run()


def test_a_broken_invariant_ends_the_run() -> None:
    role = Scripted(beat)
    cluster = cluster_of({A: role}, seed=9)

    def few_events(_: HandledEvent) -> None:
        assert len(role.seen) < 3, "too many events"

    cluster.observe(few_events)
    with pytest.raises(SimulationFailed, match=r"seed 9 .*broken: too many events"):
        cluster.run()


def test_an_observer_sees_each_event_and_what_was_done_of_what_was_asked() -> None:
    """The kill cuts the second answer short: of two actions one is performed."""
    seen: list[HandledEvent] = []
    twice = Scripted(lambda *_: [rl.Report(text="one"), rl.Report(text="two")])
    cluster = cluster_of({A: twice})
    cluster.observe(seen.append)
    cluster.inject(Kill(at=1.0, role=A, after_actions=1))
    cluster.run(until=2.0)
    cluster.post(A, rl.TimerFired(name="late"))
    cluster.run(until=3.0)
    assert [(h.name, h.incarnation, len(h.actions)) for h in seen] == [(A, 1, 2), (A, 1, 1)]
    assert seen[0].role is twice
    assert not cluster.is_alive(A)


def test_what_happens_to_the_dead_is_not_heard() -> None:
    """A killed role is told nothing, and nobody is introduced to it."""
    a, b = Scripted(), Scripted()
    cluster = cluster_of({A: a, B: b})
    cluster.run()
    cluster.kill(A)
    cluster.post(A, from_tester(push(1)))
    cluster.restart(B)
    cluster.run()
    assert a.kinds == ["Started", "PeerJoined"]
    assert b.kinds == ["Started", "PeerJoined", "Started"]


def test_links_can_be_chosen_by_their_ends() -> None:
    b, c = Scripted(), Scripted()
    sends = [rl.Send(receiver=peer, message=push(1)) for peer in (B, C)]
    slow = Link(latency_seconds=2.0, jitter=0.0)
    options = ClusterOptions(introduce=True, links={(A, C): slow})
    cluster_of({A: Scripted(on_start(*sends)), B: b, C: c}, options=options).run()
    assert b.seen[-1][0] < 0.01
    assert c.seen[-1][0] == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("often", [700, 0, 1 << 30])  # 0: it is turned off
def test_the_collector_of_the_process_is_left_as_it_was(often: int) -> None:
    before = gc.get_threshold()
    during: list[int] = []

    def look(_: HandledEvent) -> None:
        during.append(gc.get_threshold()[0])

    try:
        gc.set_threshold(often, *before[1:])
        cluster = cluster_of({A: Scripted()})
        cluster.observe(look)
        cluster.run()
        assert gc.get_threshold() == (often, *before[1:])
    finally:
        gc.set_threshold(*before)
    assert during == [50_000 if often == 700 else often]
