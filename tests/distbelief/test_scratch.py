"""Folders for a while: gone at the end, or else with the next."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from distbelief.errors import StorageError
from distbelief.scratch import scratch


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


HOLDER = """
import sys, tempfile
from distbelief.scratch import scratch

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
    with (
        pytest.raises(StorageError, match=r"cannot make .*nowhere.*No such file"),
        scratch(),
    ):
        pass
