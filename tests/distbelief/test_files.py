import os
from pathlib import Path

import pytest

from distbelief import files
from distbelief.errors import StorageError
from distbelief.files import LineFile
from tests.distbelief.job.limits import largest_file


def test_lines_are_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\n")
    said: list[str] = []
    lines = LineFile(path, tell=said.append)
    lines.append("two")
    lines.append("odd: \udcff")
    assert path.read_text() == "one\ntwo\nodd: \\udcff\n"
    assert not said


def test_what_finds_no_room_is_dropped_and_told_of_once(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\n")
    said: list[str] = []
    lines = LineFile(path, tell=said.append)
    with largest_file(4):
        lines.append("two")
        lines.append("three")
    assert path.read_text() == "one\n"
    (told,) = said
    assert told.startswith(f"cannot write {path}: the file would be too large")


def test_a_log_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    said: list[str] = []
    lines = LineFile(path, tell=said.append)
    lines.append("lost")
    path.parent.mkdir()
    lines.append("kept")
    assert path.read_text() == "kept\n"
    assert len(said) == 1


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """As root, `--out /dev/null` would leave the machine with a file of that name."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write(pipe, b"a plan")
        assert os.read(reader, 100) == b"a plan"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]

    def fail(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=f"cannot write {pipe}: there is no space"):
        files.write_by(pipe, fail)
