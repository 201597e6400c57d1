"""What a machine that loses its power finds on its disk afterwards.

A disk that keeps what it was forced to keep, and nothing else: of a file the content at
its last fsync, of a directory the names at its last fsync. A file whose directory was
forced, and which itself was not, has its name and no content, as on real disks.
"""

import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.directory import RunDirectory
from distbelief.protocol.role import Snapshot


class Disk:
    """Notes what is forced, and forgets all else when the power fails.

    Args:
        root: A directory that has always been there.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._contents: dict[int, bytes] = {}  # by inode, as last forced
        self._names: dict[int, dict[str, int]] = {root.stat().st_ino: {}}
        self._fsync = os.fsync

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        found = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(found.st_mode):
            names = {each.name: each.lstat().st_ino for each in path.iterdir()}
            self._names[found.st_ino] = names
        else:
            self._contents[found.st_ino] = path.read_bytes()

    def lose_power(self) -> None:
        kinds = {each.lstat().st_ino: each.is_dir() for each in self._root.rglob("*")}
        for each in self._root.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        names = self._names[self._root.stat().st_ino]
        self._bring_back(self._root, names, kinds)

    def _bring_back(self, place: Path, names: dict[str, int], kinds: dict[int, bool]) -> None:
        for name, inode in names.items():
            if inode not in kinds:
                continue  # removed since, and that reached the disk first
            if kinds[inode]:
                (place / name).mkdir()
                self._bring_back(place / name, self._names.get(inode, {}), kinds)
            else:
                (place / name).write_bytes(self._contents.get(inode, b""))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(tmp_path)
    monkeypatch.setattr(os, "fsync", disk.fsync)
    return disk


def saved(n: int) -> Snapshot:
    values = np.full(100, n, np.float32)
    return Snapshot(label=f"{n:05d}", arrays={"values": values}, facts={"clock": "1"})


def newest(directory: Path) -> str | None:
    snapshot = CheckpointStore(directory, report=pytest.fail).newest("shard-0")
    return None if snapshot is None else snapshot.label


@pytest.mark.parametrize("n_saved", [1, 2, 5])
def test_a_checkpoint_that_was_saved_survives(tmp_path: Path, disk: Disk, n_saved: int) -> None:
    """Both calls of fsync could be left out, and every test passed.

    From then on its pushes are acknowledged as safe. It has to be there with its
    content (the file was forced), its name (its directory was), and its directory (the
    one above was), which a first snapshot makes.
    """
    with RunDirectory.create(tmp_path / "runs" / "demo") as run:
        store = CheckpointStore(run.snapshots, report=pytest.fail)
        for n in range(1, n_saved + 1):
            store.save("shard-0", saved(n))
        disk.lose_power()
        assert newest(run.snapshots) == f"{n_saved:05d}"


def test_one_that_is_being_saved_costs_no_older_one(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The power fails at any of the moments between two of its steps."""
    replace = Path.replace

    def fail(_path: Path, _target: Path) -> None:
        disk.lose_power()
        raise InterruptedError("the power has failed")

    with RunDirectory.create(tmp_path / "demo") as run:
        store = CheckpointStore(run.snapshots, report=pytest.fail)
        store.save("shard-0", saved(1))
        monkeypatch.setattr(Path, "replace", fail)
        with pytest.raises(Exception, match="the power has failed"):
            store.save("shard-0", saved(2))
        monkeypatch.setattr(Path, "replace", replace)
        assert newest(run.snapshots) == "00001"
        store.save("shard-0", saved(3))
        assert newest(run.snapshots) == "00003"


def test_a_file_that_was_replaced_is_the_old_one_or_the_new_one(tmp_path: Path, disk: Disk) -> None:
    with RunDirectory.create(tmp_path / "demo") as run:
        run.write(run.job_file, "old")
        run.write(run.job_file, "new")
        disk.lose_power()
        assert run.job_file.read_text() == "new"
