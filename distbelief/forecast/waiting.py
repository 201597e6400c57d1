"""What people see while they wait: a bar on a terminal, plain lines in a pipe."""

import time
from types import TracebackType
from typing import Final, Self, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from distbelief.job.display import words
from distbelief.job.display.view import SupervisorView
from distbelief.roles import Seconds


LINE_SECONDS: Final = 5.0
"""Between two plain lines."""


@final
class Waiting:
    """Tells how far a number of runs are. A context manager.

    Args:
        console: Where; a quiet one shows nothing.
        n_runs: How many there will be.
    """

    def __init__(self, console: Console, *, n_runs: int) -> None:
        self._console = console
        self._n_runs = n_runs
        self._n_done = 0
        self._what = ""
        self._said_at = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=float(n_runs))

    def begin(self, what: str) -> None:
        """Begin with the next run."""
        self._what = what
        self._bar.update(self._task, description=what)

    def say(self, what: str) -> None:
        """Say what is being done that is no run."""
        self._bar.update(self._task, description=what)
        if not self._console.is_terminal:
            self._print(what)

    def tell(self, view: SupervisorView) -> None:
        """Tell how far the present run is."""
        share = view.progress or 0.0
        self._bar.update(self._task, completed=self._n_done + min(share, 0.999))
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said_at >= LINE_SECONDS:
            self._said_at = now
            self._print(self._line(view.seconds, view))

    def end(self) -> None:
        """The present run is over."""
        self._n_done += 1
        self._bar.update(self._task, completed=self._n_done)

    def _print(self, line: str) -> None:
        """Print a line as it is: programs read lines, not what fits a terminal."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _line(self, seconds: Seconds, view: SupervisorView) -> str:
        metric = words.metric(view.metric, view.metric_name)
        return (
            f"run {self._n_done + 1} of {self._n_runs} {self._what}: "
            f"{words.duration(seconds)} of virtual time, {view.samples:,} samples, "
            f"{view.metric_name} {metric}"
        )

    def __enter__(self) -> Self:
        """Show the bar, on a terminal."""
        if self._console.is_terminal and not self._console.quiet:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        if self._bar.live.is_started:  # else rich ends it with an empty line
            self._bar.stop()
