"""A job broken for real: its processes on this host, and what they say to each other.

The schedule is that of the simulation, laid over the seconds that the job trains.
Processes are hit by signals (`hands`), messages on their way (`detour`). What comes of
it varies from run to run, as the machine does; the blows do not.
"""

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self, final

from rich.console import Console

from distbelief.forecast.chaos.detour import Detour
from distbelief.forecast.chaos.hands import Hands
from distbelief.forecast.chaos.schedule import PROCESS_KINDS, Blow, schedule
from distbelief.forecast.chaos.story import (
    Line,
    Story,
    end_line,
    in_order,
    restarts_of,
    told_lines,
)
from distbelief.forecast.chaos.turns import Turns
from distbelief.job.algorithms import roster_of
from distbelief.job.sections import Job
from distbelief.job.training import train
from distbelief.job.view import SupervisorView
from distbelief.roles import Seconds


HORIZON_SECONDS: Final = 30.0
"""Over which blows are laid if [stop] does not say how long the job trains."""

TURN_SECONDS: Final = 0.01


@final
class Attacker:
    """Deals the blows of a schedule. A context manager: within it, a thread does so.

    Args:
        blows: The schedule.
        horizon: Seconds that it is laid over, from when training begins.
        detour: Of all messages; without one, none is hit.
    """

    def __init__(
        self,
        blows: Sequence[Blow],
        *,
        horizon: Seconds,
        detour: Detour | None = None,
    ) -> None:
        self._due = [b for b in blows if detour is not None or b.kind in PROCESS_KINDS]
        self._horizon = horizon
        self._detour = detour
        self._hands = Hands()
        self._lock = threading.Lock()
        self._turns = Turns(self._attack, every=TURN_SECONDS)
        self._pids: dict[str, int] = {}
        self._began: Seconds | None = None  # training, by the clock of this process
        self._before: Seconds = 0.0  # of the job, when that was
        self.view = SupervisorView()
        self.lines: list[Line] = []

    def watch(self, view: SupervisorView) -> bool:
        """Take note of where processes are; the job is never to be ended."""
        with self._lock:
            self.view = view
            self._pids = {r.name: r.pid for r in view.roles if r.pid is not None}
            if self._began is None and view.samples:
                self._began, self._before = time.monotonic(), view.seconds
        return False

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
        self.lines.append(Line(seconds=seconds, what="blow", text=text))

    def _strike(self, blow: Blow, now: Seconds) -> bool:
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
                return self._hands.kill(pid)
            case "pause":
                return self._hands.pause(pid, now=now, seconds=seconds)
            case _:
                return self._hands.slow(
                    pid, now=now, seconds=seconds, factor=blow.factor
                )

    def __enter__(self) -> Self:
        """Begin."""
        self._turns.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End, and let everything go."""
        try:
            self._turns.end()
        finally:
            self._hands.release()


def break_really(job: Job, *, seed: int, console: Console) -> Story:
    """Run a job on this machine, and break it by the schedule of a seed.

    Args:
        job: The job.
        seed: Of the schedule.
        console: Where it is told where the run lies.

    Raises:
        JobError: the job cannot be run.
    """
    n_machines = job.cluster.partitions if job.cluster.is_split else None
    roles = [entry.name for entry in roster_of(job, n_machines=n_machines)]
    blows = schedule(seed, roles)
    horizon = job.stop.seconds or HORIZON_SECONDS
    with (
        Detour(seed) as detour,
        Attacker(blows, horizon=horizon, detour=detour) as attacker,
    ):
        run = train(job, show=False, watch=attacker.watch, detours=detour)
    view, summary = attacker.view, run.summary
    console.print(f"everything in {run.directory}", highlight=False, soft_wrap=True)
    lines = [*attacker.lines, *told_lines(view), end_line(view, summary.error)]
    return Story(
        job=job.name,
        seed=seed,
        real=True,
        horizon=horizon,
        blows=blows,
        lines=in_order(lines),
        error=summary.error,
        samples=summary.samples,
        metric_name=summary.metric_name,
        metric=summary.metric,
        undisturbed_seconds=None,
        seconds=summary.seconds,
        pushes_applied=summary.pushes_applied,
        pushes_lost=summary.pushes_lost,
        pushes_refused=summary.pushes_refused,
        messages_lost=detour.n_dropped,
        restarts=restarts_of(view),
        steps_again=None,
        digest=None,
    )
