"""Ctrl+C and SIGTERM: caught while a job runs, so that it ends in good order."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn, final


EXIT_CODES: Final = {signal.SIGINT: 130, signal.SIGTERM: 143}  # 128 + the signal
REASONS: Final = {signal.SIGINT: "Ctrl+C", signal.SIGTERM: "terminated (SIGTERM)"}


@final
class Caught:
    """Signals caught so far, and whom to tell."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.tell: Callable[[signal.Signals], None] = _ignore

    def catch(self, number: int, _frame: FrameType | None) -> None:
        """Note a signal, and tell of it."""
        self.number = self.number or signal.Signals(number)
        self.tell(signal.Signals(number))


def _ignore(_number: signal.Signals) -> None:
    """Nobody is there to be told yet."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM, while nobody else handles it."""


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise _Terminated


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this in good order, as Ctrl+C does: nothing is left behind."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except _Terminated:
        raise SystemExit(EXIT_CODES[signal.SIGTERM]) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Have the same handlers afterwards, whatever a library thinks that we need."""
    if threading.current_thread() is not threading.main_thread():
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
    """Catch Ctrl+C and SIGTERM, if this is the thread that can."""
    caught = Caught()
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.signal(number, caught.catch) for number in EXIT_CODES}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
