import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distbelief.core import files
from distbelief.core.files import LineFile
from distbelief.errors import StorageError
from tests.distbelief.limits import largest_file


def test_lines_are_added_and_what_finds_no_room_is_dropped_and_reported_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\n")
    said: list[str] = []
    lines = LineFile(path, tell=said.append)
    lines.append("two")
    lines.append("odd: \udcff")
    kept = "one\ntwo\nodd: \\udcff\n"
    assert path.read_text() == kept
    assert not said
    with largest_file(len(kept)):
        lines.append("lost")
        lines.append("too")
    assert path.read_text() == kept
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


WRITER = """
import sys
from pathlib import Path
from distbelief.core import files

def fill(draft):
    draft.write_bytes(bytes(1000))
    print(flush=True)
    sys.stdin.read()

files.write_by(Path(sys.argv[1]), fill)
"""


def test_drafts_of_the_killed_go_with_the_next_file_and_those_of_the_living_stay(
    tmp_path: Path,
) -> None:
    """A shard that was killed while it saved left a whole snapshot for good."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        (draft,) = tmp_path.iterdir()
        (tmp_path / "mine.tmp").touch()
        files.write(tmp_path / "b", b"")
        assert {path.name for path in tmp_path.iterdir()} == {draft.name, "mine.tmp", "b"}
        writer.kill()
    files.write(tmp_path / "c", b"")
    assert {path.name for path in tmp_path.iterdir()} == {"mine.tmp", "b", "c"}


def test_a_disk_on_which_nothing_can_be_locked_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_file: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    files.write(tmp_path / "a", b"content")
    assert (tmp_path / "a").read_bytes() == b"content"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_draft_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes beside it, between the making and the lock."""
    swept: list[Path] = []

    def late(path: Path) -> int:
        if not swept:
            swept.append(path)
            assert files.remove_if_free(path)
        return lock(path)

    lock = files.lock
    monkeypatch.setattr(files, "lock", late)
    files.write(tmp_path / "a", b"content")
    assert len(swept) == 1
    assert (tmp_path / "a").read_bytes() == b"content"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
