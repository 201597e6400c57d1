"""What people are told while they wait."""

import io

import pytest
from rich.console import Console

from distbelief.forecast.waiting import Waiting
from distbelief.job.display.view import SupervisorView


def test_in_a_pipe_nothing_is_said_but_lines() -> None:
    """An empty line came at the end, in the errors of whoever had asked for JSON."""
    said = io.StringIO()
    with Waiting(Console(file=said), n_runs=1) as waiting:
        waiting.begin("small, seed 0")
        waiting.end()
    assert not said.getvalue()


def test_a_name_in_brackets_is_said_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for a style: the run of "small[red]" was called "small"."""
    monkeypatch.setattr("distbelief.forecast.waiting.LINE_SECONDS", 0.0)
    said = io.StringIO()
    with Waiting(Console(file=said, width=200), n_runs=1) as waiting:
        waiting.say("hidden [3]")
        waiting.begin("small[red], seed 0")
        waiting.tell(SupervisorView())
    assert "hidden [3]\n" in said.getvalue()
    assert "small[red], seed 0" in said.getvalue()


def test_a_line_is_not_broken_where_a_terminal_would_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With --json what was said on the way came in pieces of 80 characters."""
    monkeypatch.setattr("distbelief.forecast.waiting.LINE_SECONDS", 0.0)
    said = io.StringIO()
    with Waiting(Console(file=said, width=40), n_runs=1) as waiting:
        waiting.say("Measuring what the job's work takes on this host")
        waiting.begin("replicas 16, shards 4, seed 0")
        waiting.tell(SupervisorView())
    assert len(said.getvalue().splitlines()) == 2


def test_on_a_terminal_there_is_a_bar_that_is_taken_away() -> None:
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=80)
    with Waiting(console, n_runs=1) as waiting:
        waiting.begin("small[red], seed 0")
        waiting.tell(SupervisorView())
    assert "small[red], seed 0" in said.getvalue()
    assert said.getvalue().endswith("\x1b[2K")
