"""Chaos with real processes: a job on this host under the same fault schedule as in simulation.

Processes get signals. Faults of links and messages are left to the simulation. The schedule is
the same in each run with the same seed, but the result varies, as the timing of processes does.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self, final

import msgspec
from rich.console import Console

from distbelief.config.job import Job
from distbelief.job.trainer import run_job
from distbelief.protocol.role import Action, Event, PeerLost, Role, Seconds
from distbelief.simulation.chaos.chaos_report import (
    ChaosReport,
    IterationCount,
    ReportLine,
    completed,
)
from distbelief.simulation.chaos.schedule import PROCESS_KINDS, FaultEvent, schedule
from distbelief.supervisor.view import JobView


# A process that is slowed down runs for `1 / factor` of each period, and is stopped otherwise.
PERIOD_SECONDS: Final = 0.1


@final
@dataclass(slots=True)
class _SlowedProcess:
    begun: Seconds
    until: Seconds
    factor: float
    stopped: bool

    def stands_at(self, now: Seconds) -> bool:
        phase = ((now - self.begun) % PERIOD_SECONDS) / PERIOD_SECONDS
        return phase >= 1.0 / self.factor


@final
class ProcessFaults:
    """Kills, stops and slows processes by their ids; `release` continues all of them."""

    def __init__(self) -> None:
        self._held: dict[int, _SlowedProcess] = {}

    def kill(self, pid: int) -> bool:
        """Kill a process; return whether it existed."""
        self._held.pop(pid, None)
        return _send(pid, signal.SIGKILL)

    def slow(self, pid: int, *, now: Seconds, seconds: Seconds, factor: float) -> bool:
        """Let a process run for 1 / factor of the time (inf: never); return whether it exists."""
        before = self._held.get(pid)
        stopped = before is not None and before.stopped
        held = self._held[pid] = _SlowedProcess(now, now + seconds, factor, stopped)
        return self._set(pid, held, stopped=held.stands_at(now))

    def turn(self, now: Seconds) -> None:
        """Stop and continue processes at their times; call it often."""
        for pid, held in list(self._held.items()):
            if now >= held.until:
                self._let_go(pid)
            else:
                self._set(pid, held, stopped=held.stands_at(now))

    def release(self) -> None:
        for pid in list(self._held):
            self._let_go(pid)

    def _set(self, pid: int, held: _SlowedProcess, *, stopped: bool) -> bool:
        if held.stopped == stopped:
            return True
        there = _send(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
        held.stopped = stopped
        if not there:
            self._held.pop(pid, None)
        return there

    def _let_go(self, pid: int) -> None:
        if self._held.pop(pid).stopped:
            _send(pid, signal.SIGCONT)


def _send(pid: int, what: signal.Signals) -> bool:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, what)
        return True
    return False


# --- the schedule ---

HORIZON_SECONDS: Final = 30.0  # length of the schedule if [stop] has no seconds

TURN_SECONDS: Final = 0.01

# The launcher sees only that a process was killed, and guesses the reason ("out of memory?").
KILLED: Final = "was killed by chaos"
_SIGNAL: Final = "SIGKILL"

MakeSchedule = Callable[[Sequence[str]], Sequence[FaultEvent]]  # from the names of the roles


@final
class FaultInjector:
    """Injects the faults of a schedule into processes, while its `with` block runs.

    The schedule covers `horizon` seconds from the start of training. `make_schedule` is called when
    the roles are known: only the supervisor knows over how many machines a replica is split.
    """

    def __init__(self, make_schedule: MakeSchedule, *, horizon: Seconds) -> None:
        self._make_schedule = make_schedule
        self.fault_events: tuple[FaultEvent, ...] = ()  # of the schedule, those of processes
        self._due: list[FaultEvent] = []
        self._horizon = horizon
        self._process_faults = ProcessFaults()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._pids: dict[str, int] = {}
        self._killed: set[str] = set()  # roles whose deaths are not reported yet
        self._began: Seconds | None = None  # start of training, by the clock of this process
        self._before: Seconds = 0.0  # seconds of the job at that time
        self.view = JobView()  # the last one
        self.lines: list[ReportLine] = []  # faults injected so far

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._ended.set()
        self._thread.join()
        self._process_faults.release()
        if self._error is not None and error is None:
            raise self._error

    def watch(self, view: JobView) -> bool:
        """Callback of the trainer: stores the view; never stops the job (False)."""
        with self._lock:
            if not self.fault_events and view.roles:
                drawn = self._make_schedule([role.name for role in view.roles])
                self.fault_events = tuple(e for e in drawn if e.kind in PROCESS_KINDS)
                self._due = list(self.fault_events)
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

    def turn(self) -> None:
        """Inject what is due; the thread calls it often."""
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

    def _work(self) -> None:
        while not self._ended.wait(TURN_SECONDS):
            try:
                self.turn()
            except Exception as error:  # noqa: BLE001 -- raised at the end of the `with` block
                self._error = error
                return

    def _inject(self, event: FaultEvent, now: Seconds) -> bool:
        # Returns whether the process exists.
        pid = self._pids.get(event.role)
        if pid is None:
            return False
        if event.kind == "kill":
            injected = self._process_faults.kill(pid)
            if injected:
                self._killed.add(event.role)
            return injected
        seconds = event.lasts * self._horizon
        factor = math.inf if event.kind == "pause" else event.factor
        return self._process_faults.slow(pid, now=now, seconds=seconds, factor=factor)


@final
@dataclass(slots=True)
class SupervisorUnderChaos:
    """Wraps the supervisor of a real run: names the kills, and counts iterations."""

    role: Role
    injector: FaultInjector
    iterations: IterationCount

    @property
    def accepts(self) -> frozenset[type]:
        return self.role.accepts

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        self.iterations.count(event)
        # A process that ended by itself at the same time keeps its own reason.
        if isinstance(event, PeerLost) and self.injector.owns(event.peer):
            reason = KILLED if _SIGNAL in event.reason else event.reason
            event = msgspec.structs.replace(event, reason=reason)
        return self.role.handle(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self.role.status()


def run_local_chaos(job: Job, *, seed: int, console: Console) -> ChaosReport:
    """Run a job on this host under the fault schedule of a seed; print its run directory.

    JobError if the job cannot be run.
    """
    horizon = job.stop.seconds or HORIZON_SECONDS
    injector = FaultInjector(lambda roles: schedule(seed, roles), horizon=horizon)
    iterations = IterationCount()

    def around(supervisor: Role) -> Role:
        return SupervisorUnderChaos(supervisor, injector, iterations)

    with injector:
        run = run_job(job, show=False, callbacks=[injector.watch], around=around)
    where = f"run directory: {run.directory}"
    console.print(where, highlight=False, soft_wrap=True, markup=False)
    report = ChaosReport(
        job=job.name,
        seed=seed,
        real=True,
        horizon=horizon,
        fault_events=injector.fault_events,
        error=run.summary.error,
        exit_code=run.exit_code,
    )
    return completed(
        report, injector.view, run.summary, faults=injector.lines, iterations=iterations
    )
