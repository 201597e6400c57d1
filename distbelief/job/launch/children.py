"""What every forked process does: it ends with its parent, and never returns into it."""

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn


_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Let the kernel send this signal when `parent` ends."""
    set_death_signal(number)
    if os.getppid() != parent:  # it ended before prctl took effect
        os._exit(1)


def set_death_signal(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def run_child(work: Callable[[], int]) -> NoReturn:
    """Do the work of this process, and end it with the status that the work returns."""
    status = 1
    try:
        status = work()
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else 1
    except BaseException:  # noqa: BLE001 -- every error goes to the log
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # the disk of the log may be full
                stream.flush()
        # Not `sys.exit`: registered exit handlers belong to the parent.
        os._exit(status)
