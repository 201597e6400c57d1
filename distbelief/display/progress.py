"""Progress of a job on the console: a live screen on a terminal, plain lines elsewhere.

On a terminal the screen is redrawn in place and vanishes at the end; messages stay above it. In a
pipe or a CI log the same values come as one line every few seconds. Colours follow NO_COLOR and the
terminal. The driver says when to draw; the clock is read only for the time of day of a message.
"""

import datetime as dt
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from distbelief.core import formatting
from distbelief.display.screen import Screen, left, phase_of
from distbelief.roles.role import Seconds
from distbelief.supervisor.view import JobView, Message


LINE_SECONDS: Final = 5.0  # between two plain lines


@final
class WaitProgress:
    """Progress of a number of simulated runs, as a context manager.

    Args:
        console: Where to; a quiet one shows nothing.
        n_runs: How many there will be.
    """

    def __init__(self, console: Console, *, n_runs: int) -> None:
        self._console = console
        self._n_runs = n_runs
        self._n_done = 0
        self._what = ""
        self._printed_at = time.monotonic()
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
        self._what = what
        self._bar.update(self._task, description=what)

    def say(self, what: str) -> None:
        """Show an activity that is not a run."""
        self._bar.update(self._task, description=what)
        if not self._console.is_terminal:
            self._print(what)

    def tell(self, view: JobView) -> None:
        """Show the progress of the present run."""
        share = view.progress or 0.0
        self._bar.update(self._task, completed=self._n_done + min(share, 0.999))
        now = time.monotonic()
        if not self._console.is_terminal and now - self._printed_at >= LINE_SECONDS:
            self._printed_at = now
            self._print(self._line(view.seconds, view))

    def end(self) -> None:
        self._n_done += 1
        self._bar.update(self._task, completed=self._n_done)

    # No line breaks: programs read these lines.
    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _line(self, seconds: Seconds, view: JobView) -> str:
        metric = formatting.metric(view.metric, view.metric_name)
        return (
            f"run {self._n_done + 1} of {self._n_runs} {self._what}: "
            f"{formatting.duration(seconds)} of virtual time, {view.samples:,} samples, "
            f"{view.metric_name} {metric}"
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.quiet:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar.live.is_started:  # else rich ends it with an empty line
            self._bar.stop()


_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


def local_time() -> dt.datetime:
    return dt.datetime.now().astimezone()


@final
class ProgressLine:
    """Shows the views of one job as they come.

    Args:
        name: Of the job.
        console: Where to; by default standard output. A console that is no terminal gets plain
            lines.
        report_every: Seconds of the job between two plain lines.
        time_of_day: For the time beside messages.
    """

    def __init__(
        self,
        name: str,
        *,
        console: Console | None = None,
        report_every: float = 2.0,
        time_of_day: Callable[[], dt.datetime] = local_time,
    ) -> None:
        self._name = name
        self._console = Console() if console is None else console
        self._report_every = report_every
        self._time_of_day = time_of_day
        self._live: Live | None = None
        self._n_shown = 0  # number of the last message shown
        self._phase = ""
        self._next_line = 0.0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin; on a terminal the screen is shown."""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # Only `update` refreshes it: no background thread.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def update(self, view: JobView) -> None:
        """Show the latest view and its new messages."""
        for message in view.messages:
            if message.number > self._n_shown:
                self._show_message(message, view)
        if self._live is not None:
            self._live.update(Screen(view, name=self._name), refresh=True)
        elif view.phase != self._phase or view.seconds >= self._next_line:
            self._print(self._line(view))
            self._next_line = view.seconds + self._report_every
        self._phase = view.phase

    def stop(self) -> None:
        """End; the screen vanishes, messages stay."""
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):  # the terminal may be gone
                live.update(Text(), refresh=True)
                live.stop()

    def print(self, content: RenderableType) -> None:
        self._console.print(content, highlight=False)

    def _show_message(self, message: Message, view: JobView) -> None:
        self._n_shown = message.number
        ago = dt.timedelta(seconds=max(0.0, view.seconds - message.seconds))
        text = Text(f"{self._time_of_day() - ago:%H:%M:%S}  ", "dim")
        text.append(message.text, _STYLES[message.level])
        self._print(text)

    def _line(self, view: JobView) -> Text:
        parts = [f"{self._time_of_day():%H:%M:%S}", phase_of(view)]
        if view.progress is not None:
            parts.append(f"{view.progress:.0%}".replace("%", " %"))
        if view.samples:
            parts.append(f"{view.samples:,} samples")
        if view.samples_per_second is not None:
            parts.append(f"{formatting.rate(view.samples_per_second)}/s")
        if view.loss is not None:
            parts.append(f"loss {formatting.figure(view.loss)}")
        if view.metric is not None:
            value = formatting.metric(view.metric, view.metric_name)
            parts.append(f"held-out {view.metric_name} {value}")
        if view.staleness_mean is not None:
            staleness = formatting.staleness(view.staleness_mean, view.staleness_p95)
            parts.append(f"staleness {staleness}")
        parts += formatting.named(view.figures)
        parts.append(left(view))
        return Text("  ".join(part for part in parts if part))

    def _print(self, text: Text) -> None:
        # rich guesses the width of a pipe: do not break lines there.
        self._console.print(text, soft_wrap=self._live is None, highlight=False, markup=False)
