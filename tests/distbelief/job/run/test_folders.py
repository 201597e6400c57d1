"""Checkpoints in every kind of folder: on disk, at a URL, on the supervisor's host."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import overload

import numpy as np
import pytest
from typing_extensions import override

from distbelief.core.errors import StorageError
from distbelief.core.folders import Folder, LocalFolder
from distbelief.core.tensor_files import TensorFile, encoded
from distbelief.core.vectors import Vector
from distbelief.job.run import folders
from distbelief.job.run.checkpoints import N_KEPT, CheckpointStore
from distbelief.job.run.folders import absolute, folder_at
from distbelief.protocol.role import NEWEST, Snapshot
from distbelief.transport import file_server
from distbelief.transport.address import Endpoint
from distbelief.transport.file_server import FileServer, RemoteFolder
from distbelief.transport.keys import new_secret
from distbelief.transport.listen_config import ListenConfig
from tests.object_store import object_store


KINDS = ("local", "shared", "memory", "remote", "s3")
FILE = "shard-0/00001.safetensors"


def no_log(_level: str, _text: str) -> None:
    pass


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with object_store() as url:
        yield url


Opened = Callable[[], Folder]


@pytest.fixture(params=KINDS)
def opened(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Opened]:
    """Return a function that opens one folder, as each process does."""
    monkeypatch.setattr(file_server, "CHUNK", 1000)  # files have several pieces
    # A store's own minimum is 5 MiB.
    monkeypatch.setattr(folders, "BLOCK", 5 << 20 if request.param == "s3" else 1 << 16)
    name = f"{tmp_path.parent.name}/{tmp_path.name}"
    with ExitStack() as stack:
        match request.param:
            case "local":
                yield lambda: LocalFolder(tmp_path)
            case "shared":
                yield lambda: folder_at(f"file://{tmp_path}/shared")
            case "memory":
                monkeypatch.setattr(folders, "PROTOCOLS", ("memory",))
                yield lambda: folder_at(f"memory://{name}")
            case "s3":
                url = request.getfixturevalue("bucket")
                yield lambda: folder_at(f"{url}/{name}")
            case _:
                reach = ListenConfig(host="127.0.0.1", secret=new_secret())
                server = stack.enter_context(
                    FileServer(LocalFolder(tmp_path), None, reach=reach, run="run", log=no_log)
                )

                def remote() -> Folder:
                    endpoint = Endpoint.parse(server.endpoint)
                    folder = RemoteFolder(endpoint, reach=reach, run="run", log=no_log)
                    stack.callback(folder.close)
                    return folder

                yield remote


def saved(label: str, *, n: int = 30_000) -> Snapshot:
    values = np.arange(n, dtype=np.float32) + float(int(label) % 1000)
    more: dict[str, Vector] = {"none": values[:0], "state.sum": values.astype(np.float64)}
    return Snapshot(label=label, arrays={"values": values, **more}, facts={"clock": label})


def assert_same(one: Snapshot | None, other: Snapshot) -> None:
    assert one is not None
    assert (one.label, one.facts) == (other.label, other.facts)
    assert one.arrays.keys() == other.arrays.keys()
    for name, values in other.arrays.items():
        assert one.arrays[name].dtype == values.dtype
        np.testing.assert_array_equal(one.arrays[name], values)


def store_in(opened: Opened) -> tuple[CheckpointStore, list[str]]:
    told: list[str] = []
    return CheckpointStore(opened(), report=told.append), told


def test_every_process_finds_the_newest_checkpoint_bit_for_bit(opened: Opened) -> None:
    store, told = store_in(opened)
    other, _ = store_in(opened)
    assert other.newest("shard-0") is None
    for label in ("00001", "00002"):
        store.save("shard-0", saved(label))
        assert_same(other.newest("shard-0"), saved(label))
    store.save("shard-0", replace(saved("00009"), label=NEWEST))
    assert_same(other.newest("shard-0b"), replace(saved("00009"), label="00002"))
    assert other.newest("shard-1") is None
    assert told == []


def test_the_last_few_are_kept(opened: Opened) -> None:
    store, _ = store_in(opened)
    store.save("shard-1", saved("00001"))
    for n in range(1, N_KEPT + 3):
        store.save("shard-0", saved(f"{n:05d}"))
    assert store.labels("shard-0") == ["00003", "00004", "00005"]
    assert store.labels("shard-1") == ["00001"]
    assert store.fault("shard-0", "00002") == "it is missing"


def test_a_damaged_checkpoint_is_reported_and_skipped(opened: Opened) -> None:
    store, told = store_in(opened)
    for label in ("00001", "00002"):
        store.save("shard-0", saved(label))
    name = "shard-0/00002.safetensors"
    content = bytearray(store.folder.size(name))
    store.folder.read(name, 0, memoryview(content))
    longer = content + b"x"  # nobody noticed it
    content[-1] ^= 1
    for harmed, why in (
        (content, "its checksum does not match"),
        (content[:50_000], "bytes, not"),
        (longer, "bytes, not"),
    ):
        store.folder.write(name, [memoryview(harmed)])
        assert_same(store.newest("shard-0"), saved("00001"))
        assert f"checkpoint {store.place}/{name} is damaged and skipped (" in told[-1]
        assert why in told[-1]
    assert store.labels("shard-0") == ["00001", "00002"]


class Cut(Sequence[memoryview]):
    """Parts of a file whose writer dies after the first two of three."""

    def __init__(self, *, n_passes: int, n_bytes: int) -> None:
        self._n_passes, self._n_bytes = n_passes, n_bytes

    @override
    def __len__(self) -> int:
        return 3

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...
    @override
    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        raise NotImplementedError

    @override
    def __iter__(self) -> Iterator[memoryview]:
        self._n_passes -= 1
        for k in range(3):
            if k == 2 and self._n_passes == 0:
                raise InterruptedError("killed")
            yield memoryview(bytes(self._n_bytes))


def test_a_write_that_is_cut_leaves_the_file_as_it_was(opened: Opened) -> None:
    folder = opened()
    n_passes = 2 if isinstance(folder, RemoteFolder) else 1  # it counts the bytes first
    content = b"whole" * 1000
    for before in ([], [memoryview(content)]):
        if before:
            folder.write(FILE, before)
        with pytest.raises((InterruptedError, StorageError), match="killed"):
            folder.write(FILE, Cut(n_passes=n_passes, n_bytes=2 * folders.BLOCK))
        if not before:
            with pytest.raises(FileNotFoundError):
                opened().size(FILE)
            assert CheckpointStore(opened(), report=pytest.fail).labels("shard-0") == []
        else:
            assert opened().size(FILE) == len(content)
    found = bytearray(len(content))
    opened().read(FILE, 0, memoryview(found))
    assert found == content


def test_any_range_of_a_tensor_is_read_and_no_other(opened: Opened) -> None:
    folder = opened()
    values = np.arange(20_000, dtype=np.float32)
    folder.write(FILE, encoded({"a": values[:7], "b": values}, {"x": "y"}))
    file = TensorFile(opened(), FILE)
    assert file.facts == {"x": "y"}
    for start, stop in ((0, 1), (249, 251), (3, 19_999), (5, 5), (0, 20_000)):
        np.testing.assert_array_equal(file.array("b", start, stop), values[start:stop])
    with pytest.raises(EOFError):
        folder.read(FILE, folder.size(FILE) - 1, memoryview(bytearray(2)))


def test_deleting_twice_and_what_is_missing(opened: Opened) -> None:
    folder = opened()
    folder.write(FILE, [memoryview(b"x")])
    assert folder.names("shard-0") == ["00001.safetensors"]
    for _ in range(2):
        folder.delete(FILE)
    assert folder.names("shard-0") == []
    with pytest.raises(FileNotFoundError):
        folder.size(FILE)


@pytest.mark.parametrize("opened", [k for k in KINDS if k != "remote"], indirect=True)
def test_the_supervisor_renames(opened: Opened) -> None:
    folder = opened()
    folder.write(FILE, [memoryview(b"x")])
    folder.rename(FILE, f"{FILE}.incomplete")
    assert folder.names("shard-0") == ["00001.safetensors.incomplete"]


@pytest.mark.parametrize(
    "url",
    [
        "reference://::data:application/json;base64,e30=",
        "file://reference://::data:x",
        "simplecache::s3://bucket/x",
        "s3://bucket::reference://x",
        "http://host/x",
        "memory://x",  # tests allow it
        "S3://bucket/x",
        "nowhere://x/y",
    ],
)
def test_an_address_that_is_more_than_a_place_is_refused(url: str) -> None:
    """It went to fsspec, which takes it for a program: see `test_hostile_supervisor`."""
    with pytest.raises(StorageError, match="use a directory, or a URL of s3, gs or abfs"):
        folder_at(url)


def test_a_url_without_a_driver_says_so() -> None:
    with pytest.raises(StorageError, match=r"cannot use abfs://x/y: .*adlfs"):
        folder_at("abfs://x/y")


def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "PROTOCOLS", ("memory",))
    folder = folder_at("memory://gone")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no route")

    monkeypatch.setattr(folder._files, "info", fail)  # type: ignore[attr-defined]
    with pytest.raises(StorageError, match=rf"cannot read memory://gone/{FILE}: RuntimeError: no"):
        folder.size(FILE)


def test_a_place_is_the_same_from_every_directory(tmp_path: Path) -> None:
    assert absolute("s3://b/x") == "s3://b/x"
    assert absolute(f"file://{tmp_path}") == str(tmp_path)
    assert absolute("x") == str(Path("x").absolute())
