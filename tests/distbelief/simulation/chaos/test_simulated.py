"""Chaos: the schedule, both kinds of runs, the report."""

import io
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from distbelief.job.display.progress import WaitProgress
from distbelief.protocol import Progress
from distbelief.protocol.role import (
    ALL_MESSAGES,
    Action,
    Address,
    Event,
    PeerLost,
    Received,
    Seconds,
)
from distbelief.simulation.chaos import simulated
from distbelief.simulation.chaos.chaos_report import ChaosReport, IterationCount, rendered
from distbelief.simulation.chaos.local_faults import (
    FaultInjector,
    ProcessFaults,
    SupervisorUnderChaos,
)
from distbelief.simulation.chaos.schedule import KINDS, FaultEvent, faults_of, schedule
from distbelief.simulation.chaos.simulated import N_RUNS, NEAR, run_simulated_chaos
from distbelief.simulation.faults import CutOff, Drop, Kill, Pause, Slow
from distbelief.simulation.forecast.prepare import Preparation, PreparedJob
from distbelief.supervisor.view import JobView, RoleView
from tests.distbelief.simulation.forecast.jobs import SANDBLASTER, TEXT, small


ROLES = ["shard-0", "shard-1", "replica-0", "replica-1"]


def test_a_seed_always_gives_the_same_faults_and_another_one_others() -> None:
    assert schedule(7, ROLES) == schedule(7, ROLES)
    assert schedule(7, ROLES) != schedule(8, ROLES)
    times = [event.at for event in schedule(7, ROLES)]
    assert times == sorted(times)


def test_every_kind_of_blow_and_every_role_comes_up() -> None:
    drawn = [event for seed in range(20) for event in schedule(seed, ROLES)]
    assert {event.kind for event in drawn} == set(KINDS)
    assert {event.role for event in drawn} == set(ROLES)
    assert all(event.other != event.role for event in drawn)


COPIES = ["shard-0", "shard-0b", "shard-1", "shard-1b", "replica-0", "replica-1"]
SPLIT = ["shard-0", "shard-1", "replica-0.0", "replica-0.1", "evaluator", "evaluator.1"]
BATCHES = ["shard-0", "shard-1", "coordinator", "replica-0", "replica-1", "evaluator"]


@pytest.mark.parametrize(
    ("roles", "some", "never"),
    [
        (ROLES, ("shard-0", "replica-1"), ("shard-0", "shard-1")),
        (ROLES, ("shard-1", "replica-0"), ("replica-0", "replica-1")),
        (COPIES, ("shard-0", "shard-0b"), ("shard-0", "shard-1b")),
        (SPLIT, ("replica-0.0", "replica-0.1"), ("replica-0.0", "evaluator")),
        (SPLIT, ("evaluator", "evaluator.1"), ("evaluator", "shard-1")),
        (BATCHES, ("coordinator", "replica-1"), ("coordinator", "evaluator")),
    ],
)
def test_a_link_that_is_hit_is_one_that_is_used(
    roles: list[str], some: tuple[str, str], never: tuple[str, str]
) -> None:
    """Two shards were cut off from each other, which exchange no messages: no effect."""
    fault_events = [event for seed in range(400) for event in schedule(seed, roles)]
    links = {frozenset((b.role, b.other)) for b in fault_events if b.other is not None}
    assert frozenset(some) in links
    assert frozenset(never) not in links


def test_fault_events_are_faults_of_the_simulation_over_the_jobs_length() -> None:
    shard = Address("shard-0")

    def fault(**given: object) -> object:
        event = FaultEvent(role="shard-0", at=0.5, lasts=0.1, **given)  # type: ignore[arg-type]  # by name
        (found,) = faults_of(event, horizon=60.0, roles=["shard-0", "replica-0"])
        return found

    assert fault(kind="kill") == Kill(at=30.0, role=shard)
    assert fault(kind="pause") == Pause(at=30.0, role=shard, seconds=6.0)
    assert fault(kind="slow", factor=3.0) == Slow(at=30.0, role=shard, factor=3.0, seconds=6.0)
    assert fault(kind="cut off") == CutOff(at=30.0, a=shard, seconds=6.0)
    ends = (shard, Address("replica-0"))
    assert fault(kind="drop", probability=0.2) == Drop(
        probability=0.2, between=ends, at=30.0, seconds=6.0
    )


def printed(report: ChaosReport) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(rendered(report))
    return capture.get()


@pytest.mark.untraced
def test_a_job_broken_twice_by_one_seed_breaks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distbelief.simulation.chaos.simulated.LENGTH_SECONDS", 15.0)
    with Preparation() as preparation:
        prepared = preparation.stage(small())
        report = run_simulated_chaos(prepared, seed=3)
        assert run_simulated_chaos(prepared, seed=3) == report
    assert report.error is None
    assert report.exit_code == 0
    assert report.undisturbed_seconds is not None
    times = [line.seconds for line in report.lines]
    assert times == sorted(times)
    assert report.lines[-1].text.startswith("ended: ")
    text = printed(report)
    assert "Lost: " in text
    assert "Repeated: " in text
    assert "To repeat this run exactly: distbelief chaos JOB.toml --seed 3 (trace " in text
    ended = msgspec.structs.replace(report, lines=report.lines[-1:])
    told = f"{len(report.fault_events)} more faults were scheduled after its end"
    assert told not in text
    assert told in printed(ended)
    assert "stop.seconds" not in printed(ended)
    # A job that trains for 5 s had 3 of 13 faults; the report says how to have all of them.
    real = msgspec.structs.replace(ended, real=True, horizon=30.0)
    assert (
        f"{told}: the schedule is for 30 s of training; "
        "--set stop.seconds=N makes it N" in printed(real)
    )


@pytest.mark.untraced
@pytest.mark.parametrize("text", [pytest.param(TEXT, marks=pytest.mark.soak), SANDBLASTER])
def test_a_job_of_any_size_is_about_a_minute_long(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small net took 0.2 s of training: it was over before a silence was told.

    On far too fast machines it had ended long before the supervisor heard of it, and
    the length that was then corrected was mostly the time until then.
    """
    monkeypatch.setattr("distbelief.simulation.forecast.run.N_EVENTS_BETWEEN", 50)
    monkeypatch.setattr("distbelief.job.display.progress.LINE_SECONDS", 0.0)
    said = io.StringIO()
    console = Console(file=said, width=200)
    with Preparation() as preparation, WaitProgress(console, n_runs=N_RUNS) as progress:
        prepared = preparation.stage(small(text=text))
        report = run_simulated_chaos(prepared, seed=3, progress=progress)
    assert report.undisturbed_seconds is not None
    assert 60 / NEAR <= report.undisturbed_seconds <= 60 * NEAR + 2  # to begin and end
    # While it was found out nothing was said: of three runs, only of the last one.
    told = said.getvalue()
    assert f"run 1 of {N_RUNS} small, undisturbed: " in told
    assert f"run {N_RUNS} of {N_RUNS} small, seed 3: " in told


@pytest.mark.untraced
def test_a_job_that_ends_by_the_clock_is_as_long_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No machines make it longer: slower ones would only learn less meanwhile."""
    slownesses: list[float] = []
    run = simulated._run

    def observed(prepared: PreparedJob, **given: Any) -> simulated._SimulatedChaos:  # noqa: ANN401 -- handed on
        slownesses.append(given["slowness"])
        return run(prepared, **given)

    monkeypatch.setattr(simulated, "_run", observed)
    with Preparation() as preparation:
        prepared = preparation.stage(small("stop={seconds=0.2}"))
        report = run_simulated_chaos(prepared, seed=3)
    assert slownesses == [1.0, 1.0]
    assert report.undisturbed_seconds is not None
    assert report.undisturbed_seconds < 2.0


@pytest.mark.untraced
def test_steps_that_met_an_update_are_not_steps_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but an evaluator was killed in a job of 898 steps: "Repeated: 4,275".

    A step whose parameters are being written meanwhile is tried once more, in a moment.
    """
    monkeypatch.setattr("distbelief.simulation.chaos.simulated.LENGTH_SECONDS", 15.0)
    with Preparation() as preparation:
        prepared = preparation.stage(small())
        roles = [entry.name for entry in prepared.roster]
        seeds = (s for s in range(1000) if not _kills(schedule(s, roles)))
        report = run_simulated_chaos(prepared, seed=next(seeds))
    assert report.steps_again is not None
    assert report.steps_again <= 2 * 2  # of two replicas: done, and not told of any more


def _kills(fault_events: Sequence[FaultEvent]) -> bool:
    return any(event.kind == "kill" for event in fault_events)


@pytest.mark.untraced
def test_a_sandblaster_job_comes_to_its_end_and_tells_what_it_did_again() -> None:
    """A shard came back from its snapshot, and the job from iteration 37 to 32.

    The report had only "Lost: 0 acknowledged pushes", and "steps not counted".
    """
    with Preparation() as preparation:
        prepared = preparation.stage(small(text=SANDBLASTER))
        roles = [entry.name for entry in prepared.roster]
        seeds = (s for s in range(1000) if _loses_a_shard(schedule(s, roles)))
        report = run_simulated_chaos(prepared, seed=next(seeds))
    assert report.error is None
    assert report.steps_again is None
    assert report.iterations_again
    assert report.iterations_lost == 0
    text = printed(report)
    assert "Lost: 0 iterations, 0 acknowledged pushes" in text
    assert f"Repeated: {report.iterations_again} iteration" in text


def _loses_a_shard(fault_events: Sequence[FaultEvent]) -> bool:
    return any(
        event.kind == "kill" and event.role.startswith("shard") and 0.5 < event.at < 0.8
        for event in fault_events
    )


def test_iterations_reported_before_are_done_again_or_lost() -> None:
    iterations = IterationCount()
    coordinator = Address("coordinator")
    events = [_progress(coordinator, step) for step in (0, 1, 2, 4, 2, 3)]
    events.insert(4, _progress(Address("replica-0"), 1))
    for event in events:
        iterations.count(event)
    assert (iterations.n_again, iterations.n_lost) == (2, 1)


def _progress(sender: Address, step: int) -> Received:
    message = Progress(step=step, samples=1, loss=1.0, seconds_computing=0.0, seconds_waiting=0.0)
    return Received(sender=sender, incarnation=1, message=message)


# ------------------------------------------------------------------ real processes


@pytest.fixture
def victim() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def await_state(pid: int, states: str) -> None:
    deadline = time.monotonic() + 10.0
    while state_of(pid) not in states:
        assert time.monotonic() < deadline, state_of(pid)
        time.sleep(0.002)


def test_a_paused_process_goes_on_when_its_time_is_up(victim: int) -> None:
    process_faults = ProcessFaults()
    assert process_faults.slow(victim, now=0.0, seconds=2.0, factor=math.inf)
    await_state(victim, "T")
    process_faults.turn(1.9)
    assert state_of(victim) == "T"
    process_faults.turn(2.0)
    await_state(victim, "SR")


def test_a_slowed_process_runs_its_part_of_each_period(victim: int) -> None:
    process_faults = ProcessFaults()
    assert process_faults.slow(victim, now=0.0, seconds=2.0, factor=4.0)
    for now, states in [(0.02, "SR"), (0.03, "T"), (0.09, "T"), (0.11, "SR")]:
        process_faults.turn(now)
        await_state(victim, states)
    process_faults.turn(0.15)
    await_state(victim, "T")
    process_faults.release()
    await_state(victim, "SR")


def test_who_is_gone_cannot_be_hit(victim: int) -> None:
    process_faults = ProcessFaults()
    assert process_faults.kill(victim)
    os.waitpid(victim, 0)
    assert not process_faults.kill(victim)
    assert not process_faults.slow(victim, now=0.0, seconds=1.0, factor=math.inf)
    process_faults.slow(victim, now=0.0, seconds=1.0, factor=2.0)  # found out when it is due
    process_faults.turn(0.09)
    process_faults.turn(5.0)


def test_the_schedule_is_for_the_roles_that_there_are() -> None:
    """Once they were guessed from [cluster] partitions, which a `plan` overrides."""
    seen: list[str] = []

    def make_schedule(roles: Sequence[str]) -> Sequence[FaultEvent]:
        seen.extend(roles)
        return schedule(0, roles)

    injector = FaultInjector(make_schedule, horizon=1.0)
    injector.watch(JobView())
    assert not injector.fault_events
    names = ("shard-0", "replica-0.0", "replica-0.1")
    roles = tuple(RoleView(name=name, state="computing") for name in names)
    injector.watch(JobView(roles=roles))
    injector.watch(JobView(roles=roles))
    assert seen == list(names)
    assert {event.role for event in injector.fault_events} <= set(names)


def begun(injector: FaultInjector, victim: int, **view: object) -> FaultInjector:
    role = RoleView(name="replica-0", state="computing", pid=victim)
    injector.watch(JobView(samples=1, roles=(role,), **view))  # type: ignore[arg-type]  # by name
    return injector


KILL = FaultEvent(kind="kill", role="replica-0", at=0.0)


def test_the_attacker_strikes_whom_the_supervisor_knows(victim: int) -> None:
    fault_events = [
        KILL,
        FaultEvent(kind="drop", role="shard-0", at=0.0, lasts=0.1, probability=0.5),
        FaultEvent(kind="cut off", role="shard-0", at=0.0, lasts=0.1),
        FaultEvent(kind="pause", role="shard-0", at=0.0, lasts=0.1),
    ]
    injector = begun(FaultInjector(lambda _: fault_events, horizon=0.1), victim)
    with injector:
        await_state(victim, "Z")
        deadline = time.monotonic() + 10.0
        while len(injector.lines) < 2 and time.monotonic() < deadline:
            time.sleep(0.002)
    assert [line.text for line in injector.lines] == [
        "kill replica-0",
        "pause shard-0 for 0.0 s: no such process",
    ]
    assert injector.fault_events == (fault_events[0], fault_events[3])


def test_a_pause_of_the_schedule_stops_its_process(victim: int) -> None:
    pause = FaultEvent(kind="pause", role="replica-0", at=0.0, lasts=100.0)
    injector = begun(FaultInjector(lambda _: [pause], horizon=1.0), victim)
    injector.turn()
    await_state(victim, "T")


def _interrupt(injector: FaultInjector) -> None:
    injector._thread.join(60.0)
    raise KeyboardInterrupt


def test_what_fails_in_the_thread_is_raised_at_the_end_and_hides_nothing(victim: int) -> None:
    """A thread that dies unnoticed leaves a job that seems to survive every fault."""

    def failing() -> FaultInjector:
        broken = msgspec.structs.replace(KILL, kind="slow", factor=0.0)
        return begun(FaultInjector(lambda _: [broken], horizon=0.1), victim)

    with pytest.raises(ZeroDivisionError), failing() as injector:
        injector._thread.join(60.0)
    with pytest.raises(KeyboardInterrupt), failing() as injector:
        _interrupt(injector)


class Listener:
    """A role that records its events."""

    accepts = ALL_MESSAGES

    def __init__(self) -> None:
        self.count: list[Event] = []

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        del now
        self.count.append(event)
        return ()

    def status(self) -> tuple[str, dict[str, float]]:
        return "listening", {}


def test_a_kill_by_chaos_is_not_taken_for_a_lack_of_memory(victim: int) -> None:
    """Each line "x kill replica-1" had one below it that said "(out of memory?)"."""
    injector = begun(FaultInjector(lambda _: [KILL], horizon=0.1), victim)
    injector.turn()
    await_state(victim, "Z")
    supervisor = Listener()
    aware = SupervisorUnderChaos(supervisor, injector, IterationCount())
    guess = "was ended by signal SIGKILL (out of memory?)"
    for incarnation in (1, 2):  # the second by somebody else
        name = Address("replica-0")
        lost = PeerLost(peer=name, incarnation=incarnation, reason=guess)
        aware.handle(lost, now=1.0)
    told = [event.reason for event in supervisor.count if isinstance(event, PeerLost)]
    assert told == ["was killed by chaos", guess]
    assert aware.status() == supervisor.status()


def test_who_ended_by_itself_was_not_killed_by_chaos(victim: int) -> None:
    injector = begun(FaultInjector(lambda _: [KILL], horizon=0.1), victim)
    injector.turn()
    supervisor = Listener()
    reason = "ended with status 1 (see logs/replica-0.log)"
    lost = PeerLost(peer=Address("replica-0"), incarnation=1, reason=reason)
    SupervisorUnderChaos(supervisor, injector, IterationCount()).handle(lost, now=1.0)
    assert supervisor.count == [lost]


def test_a_job_that_is_over_is_left_alone(victim: int) -> None:
    """Blows once fell on processes that were gone, and stood below the job's end."""
    injector = begun(FaultInjector(lambda _: [KILL], horizon=0.1), victim, stop_reason="done")
    injector.turn()
    assert injector.fault_events == (KILL,)
    assert not injector.lines
    assert state_of(victim) in "SR"
