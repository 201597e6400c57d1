"""Ctrl+C, SIGTERM and SIGHUP: caught while a job runs, so that it ends in good order.

SIGHUP comes when the terminal is closed. From then on each write to it is an error, so
standard input, output and error are led elsewhere. A process that ignores SIGHUP
(nohup) goes on doing so.
"""

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

ABANDONED: Final = signal.SIGUSR1
"""The fork server sends it to its children when the supervisor is gone."""


@final
class Caught:
    """Signals caught so far, and whom to tell."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.tell: Callable[[signal.Signals], None] = _ignore

    def catch(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal, and tell of it."""
        is_first = self.number is None
        self.number = self.number or signal.Signals(number)
        if number == signal.SIGHUP:
            leave_terminal()
            if not is_first:
                return  # shell and kernel both send it: that is no second request
        self.tell(signal.Signals(number))


def leave_terminal() -> None:
    """Let nothing read from, or write to, a terminal that is gone."""
    for descriptor in (0, 1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, descriptor)
                os.close(null)


def _ignore(_number: signal.Signals) -> None:
    """Nobody is there to be told yet."""


class _Terminated(KeyboardInterrupt):
    """A signal that ends this, while nobody else handles it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    if number == signal.SIGHUP:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it may come twice
        leave_terminal()
    raise _Terminated(number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this in good order, as Ctrl+C does."""
    taken = _untaken() if _is_main_thread() else []
    for number in taken:
        signal.signal(number, _terminate)
    try:
        yield
    except _Terminated as ending:
        raise SystemExit(EXIT_CODES[ending.number]) from None
    finally:
        for number in taken:
            if signal.getsignal(number) is not signal.SIG_IGN:  # a closed terminal
                signal.signal(number, signal.SIG_DFL)


def _untaken() -> list[signal.Signals]:
    """Return which of them would end this process at once."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    return [n for n in numbers if signal.getsignal(n) is signal.SIG_DFL]


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Have the same handlers afterwards, whatever a library thinks that we need."""
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
def caught_signals() -> Iterator[Caught]:
    """Catch Ctrl+C, SIGTERM and SIGHUP, if this is the thread that can."""
    caught = Caught()
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
            # What is still to be written is not to be ended by another one.
            signal.signal(number, signal.SIG_IGN if is_closed else handler)
