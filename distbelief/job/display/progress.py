"""Progress of a job on the console: a live screen on a terminal, plain lines elsewhere.

On a terminal the screen is redrawn in place and vanishes at the end; messages stay above it. In a
pipe or a CI log the same values come as one line every few seconds. Colours follow NO_COLOR and the
terminal. The driver says when to draw; the clock is read only for the time of day of a message.
"""

import datetime as dt
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self, final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.control import Control
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import ControlType, Segment
from rich.status import Status
from rich.text import Text

from distbelief.core import formatting
from distbelief.job.display.screen import Screen, left, phase_of
from distbelief.supervisor.view import JobView


LINE_SECONDS: Final = 5.0  # between two plain lines
_STATUS_SECONDS: Final = 2.0


@final
class WaitProgress:
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
        share = view.progress or 0.0
        self._bar.update(self._task, completed=self._n_done + min(share, 0.999))
        now = time.monotonic()
        if not self._console.is_terminal and now - self._printed_at >= LINE_SECONDS:
            self._printed_at = now
            metric = formatting.metric(view.metric, view.metric_name)
            self._print(
                f"run {self._n_done + 1} of {self._n_runs} {self._what}: "
                f"{formatting.duration(view.seconds)} of virtual time, {view.samples:,} samples, "
                f"{view.metric_name} {metric}"
            )

    def end(self) -> None:
        self._n_done += 1
        self._bar.update(self._task, completed=self._n_done)

    # No line breaks: programs read these lines.
    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.quiet:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar.live.is_started:  # else rich ends it with an empty line
            self._bar.stop()


def status_line(console: Console, status: Status) -> Callable[[str], None]:
    """Return a function that shows an activity: in one line that changes, or a line now and then.

    The lines go to standard error.
    """
    printed_at = -math.inf

    def show(what: str) -> None:
        nonlocal printed_at
        now = time.monotonic()
        if console.is_terminal:
            status.update(escape(what))
        elif now - printed_at >= _STATUS_SECONDS:
            printed_at = now
            print(what, file=sys.stderr, flush=True)  # noqa: T201 -- progress

    return show


_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}


def local_time() -> dt.datetime:
    return dt.datetime.now().astimezone()


@final
class ProgressLine:
    def __init__(
        self,
        name: str,  # of the job
        *,
        console: Console | None = None,  # by default standard output
        report_every: float = 2.0,  # seconds of the job between two plain lines
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

    def start(self) -> None:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # Only `update` refreshes it: no background thread.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            self._drawn: tuple[RenderableType, ConsoleOptions] = "", self._console.options

    def stop(self) -> None:
        """End; the screen vanishes, messages stay."""
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):  # the terminal may be gone
                self._unwrap()
                live.update(Text(), refresh=True)
                live.stop()

    def update(self, view: JobView) -> None:
        if self._live is not None:
            self._unwrap()
        for message in view.messages:
            if message.number > self._n_shown:
                self._n_shown = message.number
                ago = dt.timedelta(seconds=max(0.0, view.seconds - message.seconds))
                text = Text(f"{self._time_of_day() - ago:%H:%M:%S}  ", "dim")
                self._print(text.append(message.text, _STYLES[message.level]))
        if self._live is not None:
            self._drawn = Screen(view, name=self._name), self._console.options
            self._live.update(self._drawn[0], refresh=True)
        elif view.phase != self._phase or view.seconds >= self._next_line:
            self._print(self._line(view))
            self._next_line = view.seconds + self._report_every
        self._phase = view.phase

    def _unwrap(self) -> None:
        """Erase the rows that a terminal has added to the screen by wrapping, if it is narrower."""
        screen, then = self._drawn
        width = self._console.width
        if width < then.max_width:
            lines = self._console.render_lines(screen, then, pad=False)[: then.max_height]
            n_rows = sum(max(Segment.get_line_length(line) - 1, 0) // width for line in lines)
            up = ((ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2))
            self._console.control(Control((ControlType.ERASE_IN_LINE, 2), *(up * n_rows)))
            self._drawn = "", self._console.options

    def _line(self, view: JobView) -> Text:
        mean, name = view.staleness_mean, view.metric_name
        parts = [
            f"{self._time_of_day():%H:%M:%S}",
            phase_of(view),
            view.progress is not None and formatting.percent(view.progress),
            view.samples and f"{view.samples:,} samples",
            view.samples_per_second is not None and f"{formatting.rate(view.samples_per_second)}/s",
            view.loss is not None and f"loss {formatting.figure(view.loss)}",
            view.metric is not None and f"held-out {name} {formatting.metric(view.metric, name)}",
            *(f"{other} {formatting.metric(value, other)}" for other, value in view.others.items()),
            mean is not None and f"staleness {formatting.staleness(mean, view.staleness_p95)}",
            *formatting.named(view.figures),
            left(view),
        ]
        return Text(formatting.joined("  ", parts))

    def _print(self, text: Text) -> None:
        # rich guesses the width of a pipe: do not break lines there.
        self._console.print(text, soft_wrap=self._live is None, highlight=False, markup=False)
