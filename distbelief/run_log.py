"""What a run says while it lasts: on the screen, and in the supervisor's log.

While roles are to be answered (`apart`) neither disk nor screen is waited for.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, final

from rich.console import Console

from distbelief.core import files
from distbelief.core.writer import Writer
from distbelief.roles.role import SUPERVISOR
from distbelief.run.directory import RunDirectory


DISK_SECONDS_MAX: Final = 10.0
SCREEN_SECONDS_MAX: Final = 1.0
"""How long a run that ends waits for what is still to be written there."""

HEEDED_MAX: Final = 8
"""Warnings of links that are said on the screen."""

_AGAIN: Final = " (so far "


@final
class RunLog:
    """Speaks for a run. Nothing that it cannot say stops the run.

    Args:
        console: The screen.
        run: Whose log it writes.

    Attributes:
        console: The screen.
        disk: Writes the files of the run.
    """

    def __init__(self, console: Console, run: RunDirectory) -> None:
        self.console = console
        self.disk = Writer("disk", tell=self.warn)
        self._screen = Writer("screen", tell=self.warn)
        self._heeded: set[str] = set()
        self._file = files.LineFile(
            run.log_file(SUPERVISOR),
            tell=lambda why: self.say(f"{why}. The job goes on without this log"),
        )

    def log(self, level: str, text: str) -> None:
        """Write it into the log."""
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
        line = f"{now} supervisor {level}: {text}"
        self.disk.write(partial(self._file.append, line))

    def heed(self, level: str, text: str) -> None:
        """Write it into the log; say a warning on the screen as well, once.

        Who waits for machines there sees that one is not let in, and why. A flood of
        them stays in the log.
        """
        self.log(level, text)
        warning = text.partition(_AGAIN)[0]
        if level != "warning" or warning in self._heeded:
            return
        if len(self._heeded) < HEEDED_MAX:
            self._heeded.add(warning)
            self.say(f"{warning} (all of these are in the supervisor's log)")

    def say(self, text: str) -> None:
        """Say it on the screen, where it stays."""
        self.show(lambda: self.console.print(text, markup=False, highlight=False, soft_wrap=True))

    def show(self, draw: Callable[[], object], *, key: str | None = None) -> None:
        """Draw on the screen; of one key only what is newest, if it is waited for."""
        job = partial(_drawn, draw)
        if key is None:
            self._screen.write(job)
        else:
            self._screen.renew(key, job)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let threads write to disk and screen, so that nobody waits for them."""
        self.disk.start()
        self._screen.start()
        try:
            yield
        finally:
            if not self.disk.close(seconds_max=DISK_SECONDS_MAX):
                self.say(
                    f"the run directory takes nothing for {DISK_SECONDS_MAX:.0f} s: "
                    "still waiting for it"
                )
            self._screen.close(seconds_max=SCREEN_SECONDS_MAX)

    def announce(self, text: str) -> None:
        """Say it, and write it into the log."""
        self.say(text)
        self.log("info", text)

    def warn(self, text: str) -> None:
        """Write a warning into the log."""
        self.log("warning", text)

    def alarm(self, text: str) -> None:
        """Write a warning into the log, and say it."""
        self.say(text)
        self.warn(text)


def _drawn(draw: Callable[[], object]) -> None:
    # A file on a full disk, perhaps; by SystemExit rich tells that a pipe's reader has
    # gone, and says no more. The run needs no screen.
    with suppress(OSError, SystemExit):
        draw()
