"""Log of a run or of a host: lines on the screen, and in a log file.

Inside `in_threads`, threads write, so that the role waits for neither disk nor screen. What goes to
the file goes to Python's `logging`, too, for programs that embed the library.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, final

from distbelief.core import files, formatting
from distbelief.core.errors import StorageError
from distbelief.core.writer import Writer, log_line


DISK_SECONDS_MAX: Final = 10.0  # for the last writes when a run ends
SCREEN_SECONDS_MAX: Final = 1.0

SHOWN_MAX: Final = 8  # link warnings on the screen; more go to the log only

_LOGGING: Final = logging.getLogger("distbelief.job")

_AGAIN: Final = " (so far "  # begins the count in a repeated warning of the transport


@final
class RunLog:
    """Writes the log of a run. A failed write never stops the run."""

    def __init__(self, file: Path, role: str, *, tell: Callable[[str], object]) -> None:
        self._role = role
        self._tell = tell
        self.disk = Writer("disk", tell=self.warn)
        self._screen = Writer("screen", tell=self.warn)
        self._shown: set[str] = set()
        self._file = files.LineFile(
            file, tell=lambda why: self.print(f"{why}. The job continues without this log")
        )

    def log(self, level: str, text: str) -> None:
        self.disk.write(partial(self._file.append, log_line(self._role, level, text)))
        number = logging.getLevelNamesMapping()[level.upper()]
        if _LOGGING.isEnabledFor(number):  # the program's handlers may be slow, too
            self.disk.write(partial(_LOGGING.log, number, "%s: %s", self._role, text))

    def log_link(self, level: str, text: str) -> None:
        """Write a line into the log; show a warning on the screen as well, once.

        So a user who waits for hosts sees that one is rejected, and why.
        """
        self.log(level, text)
        warning = text.partition(_AGAIN)[0]
        if level != "warning" or warning in self._shown:
            return
        if len(self._shown) < SHOWN_MAX:
            self._shown.add(warning)
            self.print(f"{warning} (the supervisor's log has all of these)")

    def print(self, text: str) -> None:
        self.show(partial(self._tell, formatting.plain(text)))

    def show(self, draw: Callable[[], object], *, key: str | None = None) -> None:
        """Draw on the screen; of one `key` only the newest pending drawing."""
        job = partial(_drawn, draw)
        self._screen.write(job) if key is None else self._screen.renew(key, job)

    @contextmanager
    def in_threads(self) -> Iterator[None]:
        """Let threads write to disk and screen inside the block."""
        self.disk.start()
        self._screen.start()
        try:
            yield
        finally:
            if not self.disk.close(seconds_max=DISK_SECONDS_MAX):
                self.print(
                    f"the run directory has not accepted writes for {DISK_SECONDS_MAX:.0f} s: "
                    "still waiting for it"
                )
            self._screen.close(seconds_max=SCREEN_SECONDS_MAX)

    def warned(self, write: Callable[[], object]) -> Callable[[], None]:
        """Return `write` such that a `StorageError` of it only warns: training continues."""

        def run() -> None:
            try:
                write()
            except StorageError as error:
                self.warn(str(error))

        return run

    def announce(self, text: str) -> None:
        self.print(text)
        self.log("info", text)

    def warn(self, text: str) -> None:
        self.log("warning", text)

    def warn_user(self, text: str) -> None:
        self.print(text)
        self.warn(text)


def _drawn(draw: Callable[[], object]) -> None:
    # OSError: a full disk. SystemExit: rich raises it when a pipe's reader is gone. The run needs
    # no screen.
    with suppress(OSError, SystemExit):
        draw()
