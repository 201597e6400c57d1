import threading
from collections.abc import Iterator

import pytest

from distbelief.core.writer import Writer


PATIENCE_SECONDS = 60.0


class Paper:
    """What is written; takes nothing while it hangs."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.hangs = threading.Event()  # somebody has begun to write, and waits
        self.answers = threading.Event()
        self.answers.set()

    def write(self, line: str) -> None:
        if not self.answers.is_set():
            self.hangs.set()
            assert self.answers.wait(PATIENCE_SECONDS)
        self.lines.append(line)

    def hang(self, writer: Writer) -> None:
        """Hang from now on, with a first line under way."""
        writer.start()
        self.answers.clear()
        writer.write(lambda: self.write("first"))
        assert self.hangs.wait(PATIENCE_SECONDS)

    def finish(self, writer: Writer) -> None:
        self.answers.set()
        assert writer.close(seconds_max=PATIENCE_SECONDS)


def fail() -> None:
    raise ZeroDivisionError("a bug")


@pytest.fixture
def paper() -> Iterator[Paper]:
    paper = Paper()
    yield paper
    paper.answers.set()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def writer(paper: Paper, told: list[str]) -> Iterator[Writer]:
    writer = Writer("paper", tell=told.append, n_waiting_max=3)
    yield writer
    paper.finish(writer)


def test_all_that_was_handed_over_is_written_in_order(writer: Writer, paper: Paper) -> None:
    with writer:
        for n in range(3):
            writer.write(lambda n=n: paper.write(str(n)))  # type: ignore[misc]
    assert paper.lines == ["0", "1", "2"]


def test_nobody_waits_for_what_hangs(writer: Writer, paper: Paper) -> None:
    paper.hang(writer)
    writer.write(lambda: paper.write("second"))
    assert paper.lines == []
    paper.finish(writer)
    assert paper.lines == ["first", "second"]


def test_of_what_is_renewed_only_the_newest_is_written(writer: Writer, paper: Paper) -> None:
    paper.hang(writer)
    writer.renew("status", lambda: paper.write("old"))
    writer.write(lambda: paper.write("line"))
    writer.renew("status", lambda: paper.write("new"))
    paper.finish(writer)
    assert paper.lines == ["first", "new", "line"]


def test_lines_beyond_the_limit_are_counted(writer: Writer, paper: Paper, told: list[str]) -> None:
    paper.hang(writer)
    for _ in range(5):
        writer.write(lambda: paper.write("more"))
    paper.finish(writer)
    assert paper.lines == ["first", *["more"] * 3]
    assert told == ["lines dropped, as writing takes too long: 2"]


def test_a_failed_write_is_reported_alone(writer: Writer, paper: Paper, told: list[str]) -> None:
    with writer:
        writer.write(fail)
        writer.write(lambda: paper.write("line"))
    assert paper.lines == ["line"]
    assert told[0].startswith("not written, 1 so far: Traceback")
    assert "ZeroDivisionError" in told[0]


def test_the_end_waits_for_what_hangs_but_not_for_ever(writer: Writer, paper: Paper) -> None:
    paper.hang(writer)
    assert not writer.close(seconds_max=0.01)
    writer.write(lambda: paper.write("late"))  # is not waited for either
    assert paper.lines == []
    paper.finish(writer)
    assert paper.lines == ["first", "late"]


def test_without_its_thread_it_writes_at_once(writer: Writer, paper: Paper) -> None:
    writer.write(lambda: paper.write("before"))
    assert paper.lines == ["before"]
    with writer:
        pass
    writer.renew("x", lambda: paper.write("after"))
    assert paper.lines == ["before", "after"]
    with pytest.raises(ZeroDivisionError):
        writer.write(fail)
