"""How far a build is: a bar on a terminal, plain lines everywhere else."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


LINE_SECONDS = 5.0

Advance = Callable[[int], None]


@contextmanager
def show_progress(title: str, *, n_frames: int, unit: str = "frames") -> Iterator[Advance]:
    """Report on stderr; the function it yields takes the frames made since last time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _print_lines(console, title, n_frames=n_frames, unit=unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn(f"{{task.fields[rate]:,.0f}} {unit}/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=n_frames, rate=0.0)
        rate = _Rate()

        def advance(frames: int) -> None:
            progress.update(task, advance=frames, rate=rate.advance(frames))

        yield advance


class _Rate:
    """Frames a second since it was made."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self.n_frames = 0

    def advance(self, frames: int) -> float:
        self.n_frames += frames
        return self.n_frames / max(1e-9, time.monotonic() - self._begin)


def _print_lines(console: Console, title: str, *, n_frames: int, unit: str) -> Advance:
    rate = _Rate()
    next_line = time.monotonic() + LINE_SECONDS

    def advance(frames: int) -> None:
        nonlocal next_line
        speed = rate.advance(frames)
        done = rate.n_frames >= n_frames
        if time.monotonic() < next_line and not done:
            return
        next_line = time.monotonic() + LINE_SECONDS
        left = max(0.0, (n_frames - rate.n_frames) / max(1e-9, speed))
        share = min(1.0, rate.n_frames / n_frames)
        line = f"{title}: {share:4.0%}, {speed:,.0f} {unit}/s, {left:.0f} s left"
        console.print(line, highlight=False, soft_wrap=True)

    return advance
