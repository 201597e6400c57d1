import errno
import fcntl
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distbelief.core import files
from distbelief.core.errors import StorageError
from distbelief.core.files import LineFile, Scratch, scratch, sweep
from tests.distbelief.limits import largest_file
from tests.elsewhere import waiting


def test_lines_are_appended_and_one_without_room_is_dropped_and_reported(tmp_path: Path) -> None:
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


def test_drafts_of_killed_processes_go_with_the_next_file_others_stay(tmp_path: Path) -> None:
    """A shard that was killed while it saved left a whole snapshot for good."""
    with waiting(WRITER, tmp_path / "a"):
        (draft,) = tmp_path.iterdir()
        (tmp_path / "mine.tmp").touch()
        files.write(tmp_path / "b", b"")
        assert {path.name for path in tmp_path.iterdir()} == {draft.name, "mine.tmp", "b"}
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


def test_a_draft_is_not_swept_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes beside it, between the making and the lock."""
    swept: list[Path] = []

    def late(path: Path, *, shared: bool = False) -> int:
        monkeypatch.setattr(files, "lock", lock)
        swept.append(path)
        files.write(tmp_path / "b", b"other")
        return lock(path, shared=shared)

    lock = files.lock
    monkeypatch.setattr(files, "lock", late)
    files.write(tmp_path / "a", b"content")
    assert len(swept) == 1
    assert (tmp_path / "a").read_bytes() == b"content"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


HOLDER = """
import sys, tempfile
from distbelief.core.files import scratch

tempfile.tempdir = sys.argv[1]
with scratch() as folder:
    (folder / "weights").write_bytes(bytes(1000))
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_private_and_gone_at_the_end(place: Path) -> None:
    with scratch() as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    assert list(place.iterdir()) == []


def test_folders_of_the_living_stay_and_those_of_the_killed_go(place: Path) -> None:
    """`partition --verify` that was killed left weights and gradients for good."""
    with waiting(HOLDER, place) as (_, said):
        theirs = Path(said)
        (place / "distbelief-scratch-of-no-directory").touch()
        with scratch() as ours:
            assert sorted(path for path in place.iterdir()) == sorted([theirs, ours])
            assert (theirs / "weights").stat().st_size == 1000
    assert list(place.iterdir()) == [theirs]
    with scratch() as ours:
        assert list(place.iterdir()) == [ours]


def test_a_folder_that_cannot_be_made_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place / "nowhere"))
    with pytest.raises(StorageError, match=r"cannot make .*nowhere.*No such file"), scratch():
        pass


def test_a_child_that_inherits_the_lock_holds_the_folder_too(place: Path) -> None:
    """The owner of a `ParameterServer` is killed while its shards still save there."""
    made = Scratch.make()
    program = "import sys; print(flush=True); sys.stdin.read()"
    with waiting(program, pass_fds=(made.held,)) as (child, _):
        os.close(made.held)  # as if this process had been killed
        assert sweep("distbelief-*", root=place) == []
        child.communicate()
    assert sweep("distbelief-*", root=place) == [made.path]
    assert list(place.iterdir()) == []


def test_what_belongs_to_others_or_leads_elsewhere_is_left(place: Path) -> None:
    other = place / "distbelief-of-another-user"
    other.mkdir()
    try:
        os.chown(other, os.geteuid() + 1, -1)
    except PermissionError:
        other.rmdir()  # only root may give a directory away
    target = place / "thesis"
    target.mkdir()
    (place / "distbelief-link").symlink_to(target)
    before = sorted(place.iterdir())
    assert sweep("distbelief-*", root=place) == []
    assert sorted(place.iterdir()) == before


def test_two_that_sweep_at_once_remove_each_folder_once(place: Path) -> None:
    left = [place / f"distbelief-{k}" for k in range(50)]
    for folder in left:
        folder.mkdir()
        (folder / "weights").touch()
    with ThreadPoolExecutor(2) as pool:
        swept = list(pool.map(lambda _: sweep("distbelief-*", root=place), range(2)))
    assert set(swept[0]) | set(swept[1]) == set(left)
    assert list(place.iterdir()) == []
