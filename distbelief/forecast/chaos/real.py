"""A job broken for real: its processes on this host, and what they say to each other.

The schedule is that of the simulation, laid over the seconds that the job trains.
Processes are hit by signals (`hands`), messages on their way (`detour`). What comes of
it varies from run to run, as the machine does; the blows do not.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, final

from rich.console import Console

from distbelief.forecast.chaos.confession import Confessed
from distbelief.forecast.chaos.detour import Detour
from distbelief.forecast.chaos.hands import Hands
from distbelief.forecast.chaos.iterations import Iterations
from distbelief.forecast.chaos.schedule import PROCESS_KINDS, Blow, schedule
from distbelief.forecast.chaos.story import Line, Story, end_line, in_order, restarts_of, told_lines
from distbelief.forecast.chaos.turns import Turns
from distbelief.job.configuration.sections import Job
from distbelief.job.display.view import SupervisorView
from distbelief.job.training import train
from distbelief.roles import Role, Seconds


HORIZON_SECONDS: Final = 30.0
"""Over which blows are laid if [stop] does not say how long the job trains."""

TURN_SECONDS: Final = 0.01

Plot = Callable[[Sequence[str]], Sequence[Blow]]
"""Given the names of the roles; returns what is done to them, in order of time."""


@final
class Attacker:
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

    def __init__(self, plot: Plot, *, horizon: Seconds, detour: Detour | None = None) -> None:
        self._plot = plot
        self.blows: tuple[Blow, ...] = ()
        self._due: list[Blow] = []
        self._horizon = horizon
        self._detour = detour
        self._hands = Hands()
        self._lock = threading.Lock()
        self.turns = Turns(self._attack, every=TURN_SECONDS, at_end=self._hands.release)
        self._pids: dict[str, int] = {}
        self._killed: set[str] = set()  # whose deaths nobody has told of yet
        self._began: Seconds | None = None  # training, by the clock of this process
        self._before: Seconds = 0.0  # of the job, when that was
        self.view = SupervisorView()
        self.lines: list[Line] = []

    def watch(self, view: SupervisorView) -> bool:
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
                struck = self._hands.kill(pid)
                if struck:
                    self._killed.add(blow.role)
                return struck
            case "pause":
                return self._hands.pause(pid, now=now, seconds=seconds)
            case _:
                return self._hands.slow(pid, now=now, seconds=seconds, factor=blow.factor)


@final
class _Arranged:
    """A run whose messages take detours, and whose supervisor is told who killed.

    Attributes:
        iterations: That its supervisor was told of.
    """

    def __init__(self, detour: Detour, attacker: Attacker) -> None:
        self._detour = detour
        self._attacker = attacker
        self.iterations = Iterations()

    def through(self, name: str, endpoint: str) -> str:
        """Return where `name` is to be found, in place of `endpoint`."""
        return self._detour.through(name, endpoint)

    def around(self, supervisor: Role) -> Role:
        """Return the supervisor as one who sends everybody there."""
        overheard = self.iterations.around(self._detour.around(supervisor))
        return Confessed(overheard, self._attacker.owns)


def break_really(job: Job, *, seed: int, console: Console) -> Story:
    """Run a job on this machine, and break it by the schedule of a seed.

    Args:
        job: The job.
        seed: Of the schedule.
        console: Where it is told where the run lies.

    Raises:
        JobError: the job cannot be run.
    """
    horizon = job.stop.seconds or HORIZON_SECONDS
    detour = Detour(seed)
    attacker = Attacker(partial(schedule, seed), horizon=horizon, detour=detour)
    arranged = _Arranged(detour, attacker)
    with detour.turns, attacker.turns:
        run = train(job, show=False, watch=attacker.watch, detours=arranged)
    view, summary = attacker.view, run.summary
    has_coordinator = any(role.name == "coordinator" for role in view.roles)
    iterations = arranged.iterations if has_coordinator else None
    where = f"everything in {run.directory}"
    console.print(where, highlight=False, soft_wrap=True, markup=False)
    lines = [*attacker.lines, *told_lines(view), end_line(view, summary.error)]
    return Story(
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
