"""Chaos with real processes: a job on this host under the same fault schedule as in simulation.

Processes get signals, messages pass through a proxy (`tcp_proxy`). The schedule is the same in
each run with the same seed, but the result varies, as the timing of processes does.
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


# The launcher sees only that a process was killed, and guesses the reason ("out of memory?").
# `KillAwareSupervisor` replaces that guess for kills by chaos.
KILLED: Final = "was killed by chaos"
_SIGNAL: Final = "SIGKILL"


@final
class KillAwareSupervisor:
    """Wraps a supervisor, and gives it the true reason for kills by chaos.

    Args:
        role: The supervisor.
        owns: Whether chaos has killed the process of a role; called once per death.
    """

    def __init__(self, role: Role, owns: Callable[[str], bool]) -> None:
        self._role = role
        self._owns = owns

    @property
    def accepts(self) -> frozenset[type]:
        return self._role.accepts

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        # A process that ended by itself at the same time keeps its own reason.
        if isinstance(event, PeerLost) and self._owns(event.peer) and _SIGNAL in event.reason:
            event = msgspec.structs.replace(event, reason=KILLED)
        return self._role.handle(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self._role.status()


# A process that is slowed down runs for `1 / factor` of each period, and is stopped otherwise.
PERIOD_SECONDS: Final = 0.1


@final
@dataclass(slots=True)
class _PausedProcess:
    until: Seconds
    factor: float | None  # None: it is stopped all the time
    begun: Seconds
    stopped: bool = False


@final
class ProcessFaults:
    """Kills, stops and slows processes by their ids; `release` continues all of them."""

    def __init__(self) -> None:
        self._held: dict[int, _PausedProcess] = {}

    def kill(self, pid: int) -> bool:
        """Kill a process; return whether it existed."""
        self._held.pop(pid, None)
        return _send(pid, signal.SIGKILL)

    def pause(self, pid: int, *, now: Seconds, seconds: Seconds) -> bool:
        """Stop a process for `seconds`; return whether it exists."""
        return self._hold(pid, _PausedProcess(until=now + seconds, factor=None, begun=now))

    def slow(self, pid: int, *, now: Seconds, seconds: Seconds, factor: float) -> bool:
        """Let a process run for `1 / factor` of the time; return whether it exists."""
        return self._hold(pid, _PausedProcess(until=now + seconds, factor=factor, begun=now))

    def turn(self, now: Seconds) -> None:
        """Stop and continue processes at their times; call it often."""
        for pid, held in list(self._held.items()):
            if now >= held.until:
                self._let_go(pid)
            else:
                self._set(pid, held, stopped=_is_to_stand(held, now))

    def release(self) -> None:
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


HORIZON_SECONDS: Final = 30.0  # length of the schedule if [stop] has no seconds

TURN_SECONDS: Final = 0.01

MakeSchedule = Callable[[Sequence[str]], Sequence[FaultEvent]]  # from the names of the roles


@final
class FaultInjector:
    """Injects the faults of a schedule, while its thread loop (`turns`) runs.

    Args:
        make_schedule: Called when the roles are known: only the supervisor knows over how many
            machines a replica is split.
        horizon: Length of the schedule in seconds, from the start of training.
        proxy: Proxy of all messages; None: no faults of messages.
    """

    def __init__(
        self, make_schedule: MakeSchedule, *, horizon: Seconds, proxy: TcpProxy | None = None
    ) -> None:
        self._make_schedule = make_schedule
        self.fault_events: tuple[FaultEvent, ...] = ()  # the schedule
        self._due: list[FaultEvent] = []
        self._horizon = horizon
        self._proxy = proxy
        self._process_faults = ProcessFaults()
        self._lock = threading.Lock()
        self.turns = ThreadLoop(
            self._inject_due, every=TURN_SECONDS, at_end=self._process_faults.release
        )
        self._pids: dict[str, int] = {}
        self._killed: set[str] = set()  # roles whose deaths are not reported yet
        self._began: Seconds | None = None  # start of training, by the clock of this process
        self._before: Seconds = 0.0  # seconds of the job at that time
        self.view = JobView()  # the last one
        self.lines: list[ReportLine] = []  # faults injected so far

    def watch(self, view: JobView) -> bool:
        """Callback of the trainer: stores the view; never stops the job (False)."""
        with self._lock:
            if not self.fault_events and view.roles:
                self._begin([role.name for role in view.roles])
            self.view = view
            self._pids = {r.name: r.pid for r in view.roles if r.pid is not None}
            if self._began is None and view.samples:
                self._began, self._before = time.monotonic(), view.seconds
            if view.stop_reason is not None:  # the job has ended
                self._due.clear()
        return False

    def owns(self, name: str) -> bool:
        """Return whether chaos killed this role; True only once per kill."""
        with self._lock:
            if name not in self._killed:
                return False
            self._killed.remove(name)
            return True

    def _begin(self, roles: Sequence[str]) -> None:
        self.fault_events = tuple(self._make_schedule(roles))
        hits_all = self._proxy is not None
        self._due = [b for b in self.fault_events if hits_all or b.kind in PROCESS_KINDS]

    def _inject_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            self._process_faults.turn(now)
            if self._began is None or not self._due:
                return
            event = self._due[0]
            if now - self._began < event.at * self._horizon:
                return
            del self._due[0]
            injected = self._inject(event, now)
            seconds = self._before + now - self._began
        text = event.text(self._horizon)
        if not injected:
            text += ": no such process"
        self.lines.append(ReportLine(seconds=seconds, what="fault", text=text))

    def _inject(self, event: FaultEvent, now: Seconds) -> bool:
        # Returns whether the process exists.
        seconds = event.lasts * self._horizon
        if event.kind not in PROCESS_KINDS:
            assert self._proxy is not None
            self._proxy.inject(event, now=now, seconds=seconds)
            return True
        pid = self._pids.get(event.role)
        if pid is None:
            return False
        match event.kind:
            case "kill":
                injected = self._process_faults.kill(pid)
                if injected:
                    self._killed.add(event.role)
                return injected
            case "pause":
                return self._process_faults.pause(pid, now=now, seconds=seconds)
            case _:
                return self._process_faults.slow(pid, now=now, seconds=seconds, factor=event.factor)


@final
class _RunUnderChaos:
    # Wraps the supervisor of a run, and leads its messages through the proxy.

    def __init__(self, proxy: TcpProxy, injector: FaultInjector) -> None:
        self._proxy = proxy
        self._injector = injector
        self.iterations = IterationCount()

    def through(self, name: str, endpoint: str) -> str:
        return self._proxy.through(name, endpoint)

    def around(self, supervisor: Role) -> Role:
        counting = self.iterations.around(self._proxy.around(supervisor))
        return KillAwareSupervisor(counting, self._injector.owns)


def run_local_chaos(job: Job, *, seed: int, console: Console) -> ChaosReport:
    """Run a job on this host under the fault schedule of a seed; print its run directory.

    Raises:
        JobError: the job cannot be run.
    """
    horizon = job.stop.seconds or HORIZON_SECONDS
    proxy = TcpProxy(seed)
    injector = FaultInjector(partial(schedule, seed), horizon=horizon, proxy=proxy)
    wrapped = _RunUnderChaos(proxy, injector)
    with proxy.turns, injector.turns:
        run = train(job, show=False, watch=injector.watch, detours=wrapped)
    view, summary = injector.view, run.summary
    has_coordinator = any(role.name == "coordinator" for role in view.roles)
    iterations = wrapped.iterations if has_coordinator else None
    where = f"run directory: {run.directory}"
    console.print(where, highlight=False, soft_wrap=True, markup=False)
    lines = [*injector.lines, *report_lines(view), end_line(view, summary.error)]
    return ChaosReport(
        job=job.name,
        seed=seed,
        real=True,
        horizon=horizon,
        fault_events=injector.fault_events,
        lines=in_order(lines),
        error=summary.error,
        exit_code=run.exit_code,
        samples=summary.samples,
        metric_name=summary.metric_name,
        metric=summary.metric,
        undisturbed_seconds=None,
        seconds=summary.seconds,
        pushes_applied=summary.pushes_applied,
        pushes_lost=summary.pushes_lost or 0,  # None only in a resumed run
        pushes_refused=summary.pushes_refused,
        messages_lost=proxy.n_dropped,
        restarts=restarts_of(view),
        steps_again=None,
        iterations_again=None if iterations is None else iterations.n_again,
        iterations_lost=None if iterations is None else iterations.n_lost,
        digest=None,
    )
