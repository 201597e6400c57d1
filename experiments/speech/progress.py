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
    begun, n_done = time.monotonic(), 0
    next_line = begun + LINE_SECONDS
    rate = TextColumn(f"{{task.fields[rate]:,.0f}} {unit}/s")
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), rate)
    bar = Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    with bar:
        task = bar.add_task(title, total=n_frames, rate=0.0)

        def advance(frames: int) -> None:
            nonlocal n_done, next_line
            n_done += frames
            now = time.monotonic()
            speed = n_done / max(1e-9, now - begun)
            bar.update(task, advance=frames, rate=speed)
            if console.is_terminal or (now < next_line and n_done < n_frames):
                return
            next_line = now + LINE_SECONDS
            left = max(0.0, (n_frames - n_done) / max(1e-9, speed))
            share = min(1.0, n_done / n_frames)
            line = f"{title}: {share:4.0%}, {speed:,.0f} {unit}/s, {left:.0f} s left"
            console.print(line, highlight=False, soft_wrap=True)

        yield advance
