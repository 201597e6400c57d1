"""Signal handlers for Ctrl+C, SIGTERM and SIGHUP (sent when a terminal closes)."""

import errno
import os
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn, final


EXIT_CODES: Final = {  # 128 + the signal
    signal.SIGINT: 130,
    signal.SIGTERM: 143,
    signal.SIGHUP: 129,
}
REASONS: Final = {
    signal.SIGINT: "Ctrl+C",
    signal.SIGTERM: "terminated (SIGTERM)",
    signal.SIGHUP: "the terminal was closed (SIGHUP)",
}

ABANDONED: Final = signal.SIGUSR1  # from the fork server to its children: supervisor lost


@final
class CaughtSignals:
    """The first signal caught, and the callback for every signal."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.tell: Callable[[signal.Signals], object] = repr  # nobody listens yet

    def catch(self, number: int, _frame: FrameType | None) -> None:
        is_first = self.number is None
        self.number = self.number or signal.Signals(number)
        if number == signal.SIGHUP:
            leave_terminal()
            if not is_first:
                return  # shell and kernel both send SIGHUP: not a second request to stop
        self.tell(signal.Signals(number))


def leave_terminal() -> None:
    """Redirect standard streams to /dev/null if their terminal is closed: writes would fail."""
    for descriptor in (0, 1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, descriptor)
                os.close(null)


class _Terminated(KeyboardInterrupt):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    if number == signal.SIGHUP:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it may arrive twice
        leave_terminal()
    raise _Terminated(number)


@final
class HeldInterrupt:
    """Ctrl+C waits for the end of the block, or for `check`: nothing is left half done.

    Does nothing outside the main thread. Not to be nested.
    """

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake  # called at once: ends a wait whose end checks
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if _is_main_thread() and callable(handler):
            signal.signal(signal.SIGINT, self._hold)
            self._handler = handler

    def __exit__(self, *_error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self.check()
            self._handler = None

    def check(self) -> None:
        """Do now what a held Ctrl+C does: usually raise KeyboardInterrupt."""
        held, self._held = self._held, None
        if held is not None and self._handler is not None:
            self._handler(*held)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held = number, frame
        self._wake()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, as Ctrl+C does, so that cleanup code runs."""
    numbers = (signal.SIGTERM, signal.SIGHUP) if _is_main_thread() else ()
    replaced = [n for n in numbers if signal.getsignal(n) is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, _terminate)
    try:
        yield
    except _Terminated as ending:
        raise SystemExit(EXIT_CODES[ending.number]) from None
    finally:
        for number in replaced:
            # `_terminate` set SIG_IGN if the terminal was closed; that must stay.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the signal handlers at the end: some libraries replace them."""
    if not _is_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in EXIT_CODES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def caught_signals() -> Iterator[CaughtSignals]:
    """Catch Ctrl+C, SIGTERM and SIGHUP; does nothing outside the main thread."""
    caught = CaughtSignals()
    if not _is_main_thread():
        yield caught
        return
    numbers = [
        number
        for number in EXIT_CODES
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, caught.catch) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            is_closed = number == caught.number == signal.SIGHUP
            # After a closed terminal, a second SIGHUP must not interrupt the final writes.
            signal.signal(number, signal.SIG_IGN if is_closed else handler)
