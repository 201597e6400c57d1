"""What a run says while it lasts: on the screen, and in the supervisor's log."""

import time
from contextlib import suppress
from typing import Final, final

from rich.console import Console

from distbelief import files
from distbelief.job.directory.run_directory import RunDirectory
from distbelief.roles import SUPERVISOR


HEEDED_MAX: Final = 8
"""Warnings of links that are said on the screen."""

_AGAIN: Final = " (so far "


@final
class Voice:
    """Speaks for a run. Nothing that it cannot say stops the run.

    Args:
        console: The screen.
        run: Whose log it writes.
    """

    def __init__(self, console: Console, run: RunDirectory) -> None:
        self.console = console
        self._heeded: set[str] = set()
        self._file = files.LineFile(
            run.log_file(SUPERVISOR),
            tell=lambda why: self.say(f"{why}. The job goes on without this log"),
        )

    def log(self, level: str, text: str) -> None:
        """Write it into the log."""
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
        self._file.append(f"{now} supervisor {level}: {text}")

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
        with suppress(OSError):  # a file on the same full disk, perhaps
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

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
