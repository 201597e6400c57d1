import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from distbelief.core.signals import CaughtSignals, caught_signals, ended_by_signals


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def caught_of(*numbers: signal.Signals) -> tuple[CaughtSignals, list[signal.Signals]]:
    told: list[signal.Signals] = []
    with caught_signals() as caught:
        caught.tell = told.append
        for number in numbers:
            signal.raise_signal(number)
    return caught, told


def test_a_closed_terminal_is_handled_as_ctrl_c_is() -> None:
    """SIGHUP ended a run at once, without snapshot or model."""
    caught, told = caught_of(signal.SIGHUP)
    assert (caught.number, told) == (signal.SIGHUP, [signal.SIGHUP])


@pytest.mark.parametrize(
    ("sent", "counted"),
    [
        ([signal.SIGHUP, signal.SIGHUP], [signal.SIGHUP]),
        ([signal.SIGINT, signal.SIGHUP], [signal.SIGINT]),
        ([signal.SIGHUP, signal.SIGTERM], [signal.SIGHUP, signal.SIGTERM]),
    ],
)
def test_it_is_no_second_request_that_would_end_all_at_once_but_others_are(
    sent: list[signal.Signals], counted: list[signal.Signals]
) -> None:
    """The shell sends SIGHUP, and so does the kernel when the shell has ended."""
    assert caught_of(*sent)[1] == counted


def test_after_it_no_other_ends_what_is_still_to_be_written() -> None:
    written: list[str] = []
    with ended_by_signals():
        caught_of(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        written.append("the model")
    assert written == ["the model"]


def test_who_ignores_it_goes_on_doing_so() -> None:
    """`nohup distbelief train ...`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert caught_of(signal.SIGHUP)[1] == []
    with ended_by_signals():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_before_there_is_a_job_it_ends_in_good_order(number: signal.Signals) -> None:
    done: list[str] = []

    def work() -> None:
        with ended_by_signals(), ExitStack() as stack:
            stack.callback(done.append, "temporary files are gone")
            signal.raise_signal(number)

    with pytest.raises(SystemExit) as ending:
        work()
    assert ending.value.code == 128 + number
    assert done


COMMAND = """
import fcntl, signal, sys, termios
from pathlib import Path
from rich.console import Console
from distbelief.job.display.progress import ProgressLine
from distbelief.supervisor.view import JobView
from distbelief.core.signals import caught_signals

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
console = Console(force_terminal=True)
with caught_signals() as caught:
    progress = ProgressLine("demo", console=console)
    progress.start()
    progress.update(JobView())
    while not caught.number:
        signal.pause()
    progress.stop()
    console.print("a table")
    print("gone", file=sys.stderr, flush=True)
    Path(sys.argv[1]).write_text("the model")
sys.exit(129)
"""


def test_a_terminal_that_is_gone_breaks_no_ending(tmp_path: Path) -> None:
    """Each write to it was an error: the final table, the screen's end."""
    model = tmp_path / "model"
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(model)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        os.read(ours, 1)  # it draws: so it catches signals
        os.close(ours)
        assert process.wait(30) == 129
    assert model.read_text() == "the model"
