"""A job broken for real: its processes on this host, and what they say to each other.

The schedule is that of the simulation, laid over the seconds that the job trains.
Processes are hit by signals (`hands`), messages on their way (`detour`). What comes of
it varies from run to run, as the machine does; the blows do not.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, final

import msgspec
from rich.console import Console

from distbelief.chaos.report import (
    ChaosReport,
    IterationCount,
    ReportLine,
    end_line,
    in_order,
    report_lines,
    restarts_of,
)
from distbelief.chaos.schedule import PROCESS_KINDS, FaultEvent, schedule
from distbelief.chaos.tcp_proxy import TcpProxy, ThreadLoop
from distbelief.config.job import Job
from distbelief.roles.role import Action, Event, PeerLost, Role, Seconds
from distbelief.supervisor.view import JobView
from distbelief.trainer import train


# Kills dealt by chaos itself, told to the supervisor as such.
#
# Who starts processes sees only that one was killed, and can but guess why: "out of
# memory?". Here it is known.

KILLED: Final = "was killed by chaos"
_SIGNAL: Final = "SIGKILL"


@final
class KillAwareSupervisor:
    """A supervisor who is told which kills were chaos's own.

    Args:
        role: The supervisor.
        owns: Whether chaos has killed the process of a role; asked once per death.
    """

    def __init__(self, role: Role, owns: Callable[[str], bool]) -> None:
        self._role = role
        self._owns = owns

    @property
    def accepts(self) -> frozenset[type]:
        return self._role.accepts

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        # What ended by itself at the same moment keeps its own reason.
        if isinstance(event, PeerLost) and self._owns(event.peer) and _SIGNAL in event.reason:
            event = msgspec.structs.replace(event, reason=KILLED)
        return self._role.handle(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it is doing."""
        return self._role.status()


# Hands on real processes: kill them, stop them, let them go on; by their ids.
#
# A process that is slowed down is stopped most of the time: of each tenth of a second it
# runs the `1 / factor`-th part.

PERIOD_SECONDS: Final = 0.1


@final
@dataclass(slots=True)
class _PausedProcess:
    """A process that is stopped now and then."""

    until: Seconds
    factor: float | None  # None: it stands still all the time
    begun: Seconds
    stopped: bool = False


@final
class ProcessFaults:
    """What they hold is let go when its time is up, or by `release`."""

    def __init__(self) -> None:
        self._held: dict[int, _PausedProcess] = {}

    def kill(self, pid: int) -> bool:
        """End a process; return whether there was one."""
        self._held.pop(pid, None)
        return _send(pid, signal.SIGKILL)

    def pause(self, pid: int, *, now: Seconds, seconds: Seconds) -> bool:
        """Stop a process for so long; return whether there is one."""
        return self._hold(pid, _PausedProcess(until=now + seconds, factor=None, begun=now))

    def slow(self, pid: int, *, now: Seconds, seconds: Seconds, factor: float) -> bool:
        """Let a process run a part of the time only; return whether there is one."""
        return self._hold(pid, _PausedProcess(until=now + seconds, factor=factor, begun=now))

    def turn(self, now: Seconds) -> None:
        """Stop and let go what is due: to be called often."""
        for pid, held in list(self._held.items()):
            if now >= held.until:
                self._let_go(pid)
            else:
                self._set(pid, held, stopped=_is_to_stand(held, now))

    def release(self) -> None:
        """Let everything go."""
        for pid in list(self._held):
            self._let_go(pid)

    def _hold(self, pid: int, held: _PausedProcess) -> bool:
        before = self._held.get(pid)
        held.stopped = before is not None and before.stopped
        self._held[pid] = held
        return self._set(pid, held, stopped=_is_to_stand(held, held.begun))

    def _set(self, pid: int, held: _PausedProcess, *, stopped: bool) -> bool:
        if held.stopped == stopped:
            return True
        there = _send(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
        held.stopped = stopped
        if not there:
            self._held.pop(pid, None)
        return there

    def _let_go(self, pid: int) -> None:
        held = self._held.pop(pid)
        if held.stopped:
            _send(pid, signal.SIGCONT)


def _is_to_stand(held: _PausedProcess, now: Seconds) -> bool:
    if held.factor is None:
        return True
    phase = ((now - held.begun) % PERIOD_SECONDS) / PERIOD_SECONDS
    return phase >= 1.0 / held.factor


def _send(pid: int, what: signal.Signals) -> bool:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, what)
        return True
    return False


HORIZON_SECONDS: Final = 30.0
"""Over which blows are laid if [stop] does not say how long the job trains."""

TURN_SECONDS: Final = 0.01

Plot = Callable[[Sequence[str]], Sequence[FaultEvent]]
"""Given the names of the roles; returns what is done to them, in order of time."""


@final
class FaultInjector:
    """Deals the blows of a schedule, while it takes `turns`.

    Args:
        plot: Makes the schedule, once it is known who there is: of a replica that is
            split, only the supervisor knows over how many machines.
        horizon: Seconds that it is laid over, from when training begins.
        detour: Of all messages; without one, none is hit.

    Attributes:
        turns: In each, what is due is dealt; at their end everything is let go.
        blows: The schedule, once there is one.
        view: What the supervisor last knew.
        lines: What was dealt so far.
    """

    def __init__(self, plot: Plot, *, horizon: Seconds, detour: TcpProxy | None = None) -> None:
        self._plot = plot
        self.blows: tuple[FaultEvent, ...] = ()
        self._due: list[FaultEvent] = []
        self._horizon = horizon
        self._detour = detour
        self._hands = ProcessFaults()
        self._lock = threading.Lock()
        self.turns = ThreadLoop(self._attack, every=TURN_SECONDS, at_end=self._hands.release)
        self._pids: dict[str, int] = {}
        self._killed: set[str] = set()  # whose deaths nobody has told of yet
        self._began: Seconds | None = None  # training, by the clock of this process
        self._before: Seconds = 0.0  # of the job, when that was
        self.view = JobView()
        self.lines: list[ReportLine] = []

    def watch(self, view: JobView) -> bool:
        """Take note of where processes are; the job is never to be ended."""
        with self._lock:
            if not self.blows and view.roles:
                self._begin([role.name for role in view.roles])
            self.view = view
            self._pids = {r.name: r.pid for r in view.roles if r.pid is not None}
            if self._began is None and view.samples:
                self._began, self._before = time.monotonic(), view.seconds
            if view.stop_reason is not None:  # who has ended cannot be hit
                self._due.clear()
        return False

    def owns(self, name: str) -> bool:
        """Return whether the death of this role was dealt here; said once of each."""
        with self._lock:
            if name not in self._killed:
                return False
            self._killed.remove(name)
            return True

    def _begin(self, roles: Sequence[str]) -> None:
        self.blows = tuple(self._plot(roles))
        hits_all = self._detour is not None
        self._due = [b for b in self.blows if hits_all or b.kind in PROCESS_KINDS]

    def _attack(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._hands.turn(now)
            if self._began is None or not self._due:
                return
            blow = self._due[0]
            if now - self._began < blow.at * self._horizon:
                return
            del self._due[0]
            struck = self._strike(blow, now)
            seconds = self._before + now - self._began
        text = blow.text(self._horizon)
        if not struck:
            text += ": nobody there"
        self.lines.append(ReportLine(seconds=seconds, what="blow", text=text))

    def _strike(self, blow: FaultEvent, now: Seconds) -> bool:
        """Deal a blow; return whether there was whom to deal it to."""
        seconds = blow.lasts * self._horizon
        if blow.kind not in PROCESS_KINDS:
            assert self._detour is not None
            self._detour.strike(blow, now=now, seconds=seconds)
            return True
        pid = self._pids.get(blow.role)
        if pid is None:
            return False
        match blow.kind:
            case "kill":
                struck = self._hands.kill(pid)
                if struck:
                    self._killed.add(blow.role)
                return struck
            case "pause":
                return self._hands.pause(pid, now=now, seconds=seconds)
            case _:
                return self._hands.slow(pid, now=now, seconds=seconds, factor=blow.factor)


@final
class _RunUnderChaos:
    """A run whose messages take detours, and whose supervisor is told who killed.

    Attributes:
        iterations: That its supervisor was told of.
    """

    def __init__(self, detour: TcpProxy, attacker: FaultInjector) -> None:
        self._detour = detour
        self._attacker = attacker
        self.iterations = IterationCount()

    def through(self, name: str, endpoint: str) -> str:
        """Return where `name` is to be found, in place of `endpoint`."""
        return self._detour.through(name, endpoint)

    def around(self, supervisor: Role) -> Role:
        """Return the supervisor as one who sends everybody there."""
        overheard = self.iterations.around(self._detour.around(supervisor))
        return KillAwareSupervisor(overheard, self._attacker.owns)


def run_local_chaos(job: Job, *, seed: int, console: Console) -> ChaosReport:
    """Run a job on this machine, and break it by the schedule of a seed.

    Args:
        job: The job.
        seed: Of the schedule.
        console: Where it is told where the run lies.

    Raises:
        JobError: the job cannot be run.
    """
    horizon = job.stop.seconds or HORIZON_SECONDS
    detour = TcpProxy(seed)
    attacker = FaultInjector(partial(schedule, seed), horizon=horizon, detour=detour)
    arranged = _RunUnderChaos(detour, attacker)
    with detour.turns, attacker.turns:
        run = train(job, show=False, watch=attacker.watch, detours=arranged)
    view, summary = attacker.view, run.summary
    has_coordinator = any(role.name == "coordinator" for role in view.roles)
    iterations = arranged.iterations if has_coordinator else None
    where = f"everything in {run.directory}"
    console.print(where, highlight=False, soft_wrap=True, markup=False)
    lines = [*attacker.lines, *report_lines(view), end_line(view, summary.error)]
    return ChaosReport(
        job=job.name,
        seed=seed,
        real=True,
        horizon=horizon,
        blows=attacker.blows,
        lines=in_order(lines),
        error=summary.error,
        exit_code=run.exit_code,
        samples=summary.samples,
        metric_name=summary.metric_name,
        metric=summary.metric,
        undisturbed_seconds=None,
        seconds=summary.seconds,
        pushes_applied=summary.pushes_applied,
        pushes_lost=summary.pushes_lost or 0,  # known, of a new run
        pushes_refused=summary.pushes_refused,
        messages_lost=detour.n_dropped,
        restarts=restarts_of(view),
        steps_again=None,
        iterations_again=None if iterations is None else iterations.n_again,
        iterations_lost=None if iterations is None else iterations.n_lost,
        digest=None,
    )
