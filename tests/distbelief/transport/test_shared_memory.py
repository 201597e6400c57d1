"""FileMemory: memory shared by the processes of one host."""

import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from distbelief.core.errors import LocalProtocolError, MemoryGoneError, StorageError
from distbelief.core.memory import Memory, PrivateMemory
from distbelief.transport.shared_memory import FileMemory
from tests.elsewhere import waiting


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[FileMemory]:
    """The memory of one run, in the process that runs the job."""
    made = FileMemory.make(root=tmp_path)
    yield made
    made.remove_all()


@contextmanager
def process(program: str, *arguments: Path) -> Iterator["subprocess.Popen[str]"]:
    """A second process that has reported that it is ready and now waits."""
    program = f"import sys\nfrom pathlib import Path\n{program}\n"
    program += "print('ready', flush=True)\nsys.stdin.read()\n"
    with waiting(program, *arguments) as (child, said):
        assert said == "ready"
        yield child


CREATE = """
from distbelief.transport.shared_memory import FileMemory
memory = FileMemory(Path(sys.argv[1]))
region = memory.create("theirs", n_bytes=4096)
region[7] = 42
"""
ATTACH = """
from distbelief.transport.shared_memory import FileMemory
FileMemory(Path(sys.argv[1])).attach("mine")[7] += 1
"""
MAKE = """
from distbelief.transport.shared_memory import FileMemory
memory = FileMemory.make(root=Path(sys.argv[1]))
region = memory.create("theirs", n_bytes=4096)
"""


@pytest.fixture(params=["files", "private"])
def any_memory(request: pytest.FixtureRequest, memory: FileMemory) -> Memory:
    return memory if request.param == "files" else PrivateMemory(host="h", poison=True)


def other_role(memory: Memory) -> Memory:
    """Return the memory of another role on the same host."""
    return FileMemory(memory.directory) if isinstance(memory, FileMemory) else memory


@pytest.mark.parametrize("n_bytes", [0, 1, 4096, 1 << 20])
def test_a_new_region_is_zeroed_aligned_and_writable(any_memory: Memory, n_bytes: int) -> None:
    region = any_memory.create("a", n_bytes=n_bytes)
    assert region.shape == (n_bytes,)
    assert region.dtype == np.uint8
    assert not region.any()
    region[:] = 1
    assert region.ctypes.data % 64 == 0 or n_bytes == 0


def test_a_role_that_attaches_sees_what_is_written(any_memory: Memory) -> None:
    other = other_role(any_memory)
    region = any_memory.create("shard-0.1.values", n_bytes=100)
    seen = other.attach("shard-0.1.values")
    region[99] = 7
    assert seen.shape == (100,)
    assert seen[99] == 7
    assert other.host == any_memory.host != ""
    assert np.shares_memory(other.attach("shard-0.1.values"), seen)


def test_a_name_is_used_once(any_memory: Memory) -> None:
    any_memory.create("a", n_bytes=8)[0] = 5
    for memory in (any_memory, other_role(any_memory)):
        with pytest.raises(LocalProtocolError, match="'a' exists already"):
            memory.create("a", n_bytes=8)
    assert other_role(any_memory).attach("a")[0] == 5


@pytest.mark.parametrize("way", ["release", "disown"])
def test_a_region_given_up_is_gone_and_existing_mappings_stay_valid(
    any_memory: Memory, way: str
) -> None:
    any_memory.create("a", n_bytes=8)[:] = 7
    seen = other_role(any_memory).attach("a")
    for _ in range(2):  # as often as one likes
        getattr(any_memory, way)("a")
    is_poisoned = way == "release" and isinstance(any_memory, PrivateMemory)
    assert (seen == (0xFF if is_poisoned else 7)).all()
    with pytest.raises(MemoryGoneError, match=r"no region 'a' (on host 'h'|in /)"):
        other_role(any_memory).attach("a")


def test_roles_of_different_runs_share_no_host_name(tmp_path: Path) -> None:
    one, two = FileMemory.make(root=tmp_path), FileMemory.make(root=tmp_path)
    assert one.host != two.host
    assert len(one.host) <= 128  # it must fit a message
    one.remove_all()
    two.remove_all()


def test_other_users_may_not_enter_the_directory(memory: FileMemory) -> None:
    memory.create("a", n_bytes=8)
    assert stat.S_IMODE(memory.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((memory.directory / "a").stat().st_mode) == 0o600


NO_NAMES = ["", ".", "..", "../a", "/etc/passwd", "a/b", ".a", "-a", "a\0b", "a" * 201]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_cannot_be_a_path(memory: FileMemory, name: str) -> None:
    with pytest.raises(LocalProtocolError, match="invalid region name"):
        memory.create(name, n_bytes=8)
    with pytest.raises(MemoryGoneError, match="invalid region name"):
        memory.attach(name)
    memory.release(name)


def test_a_link_out_of_the_directory_is_not_followed(memory: FileMemory, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    (memory.directory / "a").symlink_to(outside)
    with pytest.raises(MemoryGoneError):
        memory.attach("a")


def test_what_cannot_be_mapped_cannot_be_attached(memory: FileMemory) -> None:
    (memory.directory / "a").mkdir()
    with pytest.raises(MemoryGoneError):
        memory.attach("a")
    (memory.directory / "a").rmdir()
    os.mkfifo(memory.directory / "a")
    assert memory.attach("a").shape == (0,)  # what has no size has no bytes


def test_without_room_the_error_names_path_bytes_and_fix(memory: FileMemory) -> None:
    with pytest.raises(StorageError) as caught:
        memory.create("a", n_bytes=1 << 50)
    text = str(caught.value)
    assert str(memory.directory.parent) in text
    assert "1,125,899,906,842,624 bytes needed" in text
    assert "free" in text
    assert "--shm-size" in text
    assert list(memory.directory.iterdir()) == []
    memory.create("a", n_bytes=8)  # the name is not used up
    with pytest.raises(LocalProtocolError, match="'a' exists already"):
        memory.create("a", n_bytes=8)
    assert [path.name for path in memory.directory.iterdir()] == ["a"]


def test_a_directory_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot create .*/nowhere/a: No such file"):
        FileMemory(tmp_path / "nowhere").create("a", n_bytes=8)
    with pytest.raises(StorageError, match=r"cannot make .*: No such file"):
        FileMemory.make(root=tmp_path / "nowhere")


def test_a_process_that_only_attached_removes_nothing(memory: FileMemory) -> None:
    memory.create("a", n_bytes=8)
    other = FileMemory(memory.directory)
    other.attach("a")
    other.close()
    assert FileMemory(memory.directory).attach("a").shape == (8,)


def test_the_end_of_a_run_removes_its_directory(tmp_path: Path) -> None:
    memory = FileMemory.make(root=tmp_path)
    memory.create("a", n_bytes=8)
    FileMemory(memory.directory).create("b", n_bytes=8)
    memory.remove_all()
    memory.remove_all()
    assert list(tmp_path.iterdir()) == []


def test_memory_files_lie_in_memory_or_where_temporary_files_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = FileMemory.make()
    assert memory.directory.parent in {Path("/dev/shm"), Path(tempfile.gettempdir())}
    memory.remove_all()
    monkeypatch.setattr("os.access", lambda *_: False)  # as if there were no /dev/shm
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = FileMemory.make()
    assert memory.directory.parent == tmp_path
    assert FileMemory.sweep() == []
    memory.remove_all()


@pytest.mark.usefixtures("memory")
def test_a_sweep_removes_no_run_that_lives_and_nothing_foreign(tmp_path: Path) -> None:
    (tmp_path / "distbelief-no-directory").write_text("a file")
    (tmp_path / "distbelief-a-link").symlink_to(tmp_path)
    (tmp_path / "distbelief-nowhere-link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    before = sorted(tmp_path.iterdir())
    assert FileMemory.sweep(root=tmp_path) == []
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.root
def test_a_sweep_removes_nothing_of_another_user(tmp_path: Path) -> None:
    theirs = tmp_path / "distbelief-1-theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, -1)
    assert FileMemory.sweep(root=tmp_path) == []
    assert theirs.exists()


@pytest.mark.processes
def test_a_process_that_attached_and_ended_leaves_the_region_in_place(memory: FileMemory) -> None:
    region = memory.create("mine", n_bytes=8)
    with process(ATTACH, memory.directory) as child:
        child.communicate("")
        assert child.returncode == 0
    assert region[7] == 1
    with process(ATTACH, memory.directory):
        assert region[7] == 2


@pytest.mark.processes
def test_regions_of_a_role_that_was_killed_can_be_removed_and_others_not(
    memory: FileMemory,
) -> None:
    memory.create("mine", n_bytes=8)
    with process(CREATE, memory.directory) as child:
        seen = FileMemory(memory.directory).attach("theirs")
        assert seen[7] == 42
        assert memory.remove_orphans() == []
        child.kill()
        child.wait()
        assert memory.remove_orphans() == ["theirs"]
    assert seen[7] == 42  # who has it may look
    assert memory.attach("mine").shape == (8,)


@pytest.mark.processes
def test_a_sweep_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    with process(MAKE, tmp_path) as child:
        (directory,) = tmp_path.iterdir()
        assert FileMemory.sweep(root=tmp_path) == []
        child.kill()
        child.wait()
        assert FileMemory.sweep(root=tmp_path) == [directory]
    assert list(tmp_path.iterdir()) == []
