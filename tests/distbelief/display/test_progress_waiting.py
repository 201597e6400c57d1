import io

import pytest
from rich.console import Console

from distbelief.display.progress import WaitProgress
from distbelief.supervisor.view import JobView


def test_in_a_pipe_nothing_is_said_but_lines() -> None:
    """An empty line came at the end, in the errors of whoever had asked for JSON."""
    said = io.StringIO()
    with WaitProgress(Console(file=said), n_runs=1) as waiting:
        waiting.begin("small, seed 0")
        waiting.end()
    assert not said.getvalue()


def lines_of(what: str, name: str, *, width: int) -> list[str]:
    """Return what is said in a pipe of something, and of one run."""
    said = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        WaitProgress(Console(file=said, width=width), n_runs=1) as waiting,
    ):
        patch.setattr("distbelief.display.progress.LINE_SECONDS", 0.0)
        waiting.say(what)
        waiting.begin(name)
        waiting.tell(JobView())
    return said.getvalue().splitlines()


def test_a_name_in_brackets_is_said_as_it_is() -> None:
    """It was taken for a style: the run of "small[red]" was called "small"."""
    said = lines_of("hidden [3]", "small[red], seed 0", width=200)
    assert said[0] == "hidden [3]"
    assert "small[red], seed 0" in said[1]


def test_a_line_is_not_broken_where_a_terminal_would_end() -> None:
    """With --json what was said on the way came in pieces of 80 characters."""
    what = "Measuring what the job's work takes on this host"
    assert len(lines_of(what, "replicas 16, shards 4, seed 0", width=40)) == 2


def test_on_a_terminal_there_is_a_bar_that_is_taken_away() -> None:
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=80)
    with WaitProgress(console, n_runs=1) as waiting:
        waiting.begin("small[red], seed 0")
        waiting.tell(JobView())
    assert "small[red], seed 0" in said.getvalue()
    assert said.getvalue().endswith("\x1b[2K")
