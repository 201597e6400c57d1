import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distbelief.core.files import Scratch, scratch, sweep
from distbelief.errors import StorageError


@pytest.fixture(autouse=True)
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
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().strip())
        (place / "distbelief-scratch-of-no-directory").touch()
        with scratch() as ours:
            assert sorted(path for path in place.iterdir()) == sorted([theirs, ours])
            assert (theirs / "weights").stat().st_size == 1000
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert list(place.iterdir()) == [theirs]
    with scratch() as ours:
        assert list(place.iterdir()) == [ours]


def test_where_there_is_no_room_for_one_the_error_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place / "nowhere"))
    with pytest.raises(StorageError, match=r"cannot make .*nowhere.*No such file"), scratch():
        pass


def test_a_child_that_inherits_the_lock_holds_the_folder_too(place: Path) -> None:
    """The owner of a `ParameterServer` is killed while its shards still save there."""
    made = Scratch.make()
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        pass_fds=[made.held],
    ) as child:
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
