"""The file server of a supervisor's host: hostile names and bytes, dead clients, restarts."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from distbelief.core.errors import LocalProtocolError, StorageError, TransportError
from distbelief.core.folders import LocalFolder
from distbelief.core.tensor_files import TensorFile, encoded
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.protocol.role import SUPERVISOR
from distbelief.transport import file_server
from distbelief.transport.address import Endpoint
from distbelief.transport.file_server import INITIAL, FileCall, FileServer, RemoteFolder, _pieces
from distbelief.transport.keys import Allowed, KeyFiles, new_secret
from distbelief.transport.listen_config import KeyConfig, ListenConfig
from tests.distbelief.job.run.test_durability import Disk
from tests.distbelief.limits import largest_file
from tests.processes.commands import poll


FILE = "shard-0/00001.safetensors"
CONTENT = np.random.default_rng(0).bytes(25_000)


class World:
    """A server of one run, and clients of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folder = LocalFolder(directory / "snapshots")
        self.initial: Path | None = None
        self.reach = ListenConfig(host="127.0.0.1", secret=new_secret())
        self.told: list[str] = []
        self.stack = ExitStack()

    def log(self, _level: str, text: str) -> None:
        self.told.append(text)

    def serve(self, reach: ListenConfig | None = None) -> FileServer:
        return FileServer(
            self.folder, self.initial, reach=reach or self.reach, run="run", log=self.log
        )

    def client(
        self,
        server: FileServer,
        *,
        reach: ListenConfig | None = None,
        run: str = "run",
        seconds: float = 30.0,
    ) -> RemoteFolder:
        folder = RemoteFolder(
            Endpoint.parse(server.endpoint),
            reach=reach or self.reach,
            run=run,
            log=self.log,
            silence_seconds=seconds,
        )
        self.stack.callback(folder.close)
        return folder

    def found(self) -> set[str]:
        """Return every file in or beside the folder."""
        root = self.directory
        return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(file_server, "CHUNK", 1000)
    world = World(tmp_path / "world")
    (tmp_path / "world").mkdir()
    with world.stack:
        yield world


DRAFT = "0123456789abcdef"


def begin(folder: RemoteFolder, *, draft: str = DRAFT, n_pieces: int = 25) -> None:
    """Send pieces of a file, as a client that dies before it finishes."""
    call = FileCall(do="write", name=FILE, draft=draft)
    folder._perform(islice(_pieces(call, [memoryview(CONTENT)]), n_pieces))


def finish(folder: RemoteFolder) -> int:
    end = FileCall(do="finish", name=FILE, draft=DRAFT, n_bytes=len(CONTENT))
    return folder._ask(end).n_bytes


HOSTILE = (
    "",
    "x",
    "/etc/passwd",
    "../x/y.safetensors",
    "shard-0/../../x.safetensors",
    "shard-0/..",
    "a/b/c.safetensors",
    ".hidden/x.safetensors",
    "shard-0/.x.safetensors",
    "shard-0/x.toml",
    "shard-0/x\n.safetensors",
    "shard-0/x.safetensors\n",
    "shard-0\\x.safetensors",
    "shard-0/x\0.safetensors",
    INITIAL,
)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_leads_out_of_the_folder(world: World, name: str) -> None:
    (world.directory / "x.safetensors").write_bytes(b"outside")
    with world.serve() as server:
        client = world.client(server)
        acts: list[Callable[[], object]] = [
            lambda: client.write(name, [memoryview(CONTENT)]),
            lambda: client.size(name),
            lambda: client.read(name, 0, memoryview(bytearray(1))),
            lambda: client.delete(name),
            lambda: client.names(f"{name}/"),
        ]
        for act in acts:
            with pytest.raises(StorageError, match="is not the name of a checkpoint"):
                act()
    assert world.found() == {"x.safetensors"}


def test_initial_values_are_read_by_ranges_and_never_written(world: World) -> None:
    values = np.arange(9000, dtype=np.float32)
    world.initial = world.directory / "mine.bin"
    LocalFolder(world.directory).write("mine.bin", encoded({"w": values}, {}))
    before = world.initial.read_bytes()
    with world.serve() as server:
        client = world.client(server)
        file = TensorFile(client, INITIAL)
        np.testing.assert_array_equal(file.array("w", 100, 8000), values[100:8000])
        acts: list[Callable[[], object]] = [
            lambda: client.write(INITIAL, [memoryview(b"x")]),
            lambda: client.delete(INITIAL),
        ]
        for act in acts:
            with pytest.raises(StorageError, match="is not the name"):
                act()
    assert world.initial.read_bytes() == before


def test_what_a_killed_client_leaves_is_no_file_and_is_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.serve() as server:
        client = world.client(server)
        begin(client)
        begin(client, draft="f" * 16, n_pieces=3)
        store = CheckpointStore(client, report=pytest.fail)
        assert store.labels("shard-0") == []
        assert store.newest("shard-0") is None
        assert len(world.found()) == 2
        monkeypatch.setattr(file_server, "DRAFT_SECONDS_MAX", -1.0)
        assert store.labels("shard-0") == []
        assert world.found() == set()


def test_calls_that_are_repeated_have_no_second_effect(world: World) -> None:
    with world.serve() as server:
        client = world.client(server)
        begin(client, n_pieces=20)
        assert finish(client) == 0
        begin(client)
        for _ in range(2):
            assert finish(client) == len(CONTENT)
            begin(client)  # late
        client.write(FILE, [memoryview(b"newer")])
    assert (world.folder.path / FILE).read_bytes() == b"newer"
    assert world.found() == {f"snapshots/{FILE}"}


def test_a_write_goes_on_after_a_restart_of_the_server(world: World) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world.reach = msgspec.structs.replace(world.reach, port=port)
    first = world.stack.enter_context(ExitStack())
    client = world.client(first.enter_context(world.serve()))
    client._perform(iter([(FileCall(do="names", name="shard-0"), memoryview(b""))]))
    restarts = [0]
    perform = client._perform

    def restarting(calls: Iterator[tuple[FileCall, memoryview]], *take: object) -> None:
        def cut() -> Iterator[tuple[FileCall, memoryview]]:
            for number, call in enumerate(calls):
                if number == 20 and not restarts[0]:
                    restarts[0] += 1
                    first.close()
                    world.stack.enter_context(world.serve())
                yield call

        perform(cut(), *take)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_server, "REPEAT_SECONDS", 0.2)
        patch.setattr(client, "_perform", restarting)
        client.write(FILE, [memoryview(CONTENT)])
        found = bytearray(len(CONTENT))
        client.read(FILE, 0, memoryview(found))
    assert restarts == [1]
    assert found == CONTENT
    assert world.found() == {f"snapshots/{FILE}"}


def test_a_file_that_was_written_survives_a_loss_of_power(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its content could be left unforced, and every test passed."""
    disk = Disk(world.directory)
    monkeypatch.setattr(os, "fsync", disk.fsync)
    with world.serve() as server:
        world.client(server).write(FILE, [memoryview(CONTENT)])
    disk.lose_power()
    assert (world.folder.path / FILE).read_bytes() == CONTENT


def test_a_draft_that_is_lost_is_sent_again_and_not_for_ever(world: World) -> None:
    with world.serve() as server:
        client = world.client(server)
        finish, n_lost = server._finish, [0]

        def lose(call: FileCall) -> int:
            if n_lost[0] < n_max:
                n_lost[0] += 1
                server._draft(call).unlink()
            return finish(call)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "_finish", lose)
            n_max = 2
            client.write(FILE, [memoryview(CONTENT)])
            assert (world.folder.path / FILE).read_bytes() == CONTENT
            n_max = 9
            with pytest.raises(StorageError, match="its parts were lost there 3 times"):
                client.write(FILE, [memoryview(CONTENT)])


def test_without_an_answer_the_host_and_what_to_check_are_named(world: World) -> None:
    with world.serve() as server:
        client = world.client(server, seconds=0.3)
    with pytest.raises(StorageError) as caught:
        client.write(FILE, [memoryview(CONTENT)])
    place = Endpoint.parse(server.endpoint).endpoint
    assert str(caught.value) == (
        f"cannot write {FILE} on the supervisor's host ({place}): no answer for 0.3 s: check that "
        "the job still runs there, and that this port can be reached from here"
    )


def test_another_run_is_served_nothing(world: World) -> None:
    with world.serve() as server:
        client = world.client(server, run="another")
        with pytest.raises(StorageError, match="this port belongs to another run by now"):
            client.names("shard-0")


def test_a_full_disk_is_told_with_its_reason_and_leaves_no_file(world: World) -> None:
    with world.serve() as server:
        client = world.client(server)
        client.write(FILE, [memoryview(b"old")])
        with largest_file(4096), pytest.raises(StorageError) as caught:
            client.write(FILE, [memoryview(CONTENT)])
        assert "the supervisor's host (tcp://127.0.0.1:" in str(caught.value)
        assert "the file would be too large" in str(caught.value)
        client.write("shard-0/00002.safetensors", [memoryview(CONTENT)])
    assert (world.folder.path / FILE).read_bytes() == b"old"
    assert set(world.folder.names("shard-0")) >= {"00001.safetensors", "00002.safetensors"}


def test_only_the_supervisor_renames(world: World) -> None:
    with world.serve() as server, pytest.raises(LocalProtocolError, match="only the supervisor"):
        world.client(server).rename(FILE, "x")


def test_a_port_in_use_is_named(world: World) -> None:
    with world.serve() as server:
        port = Endpoint.parse(server.endpoint).port
        again = world.serve(msgspec.structs.replace(world.reach, port=port))
        with pytest.raises(TransportError, match="another process does"):
            again.__enter__()


# --- who may connect


@pytest.fixture
def keys(world: World) -> dict[str, KeyFiles]:
    names = ("supervisor", "host", "stranger")
    found = {name: KeyFiles(world.directory.parent / name) for name in names}
    for one in found.values():
        one.make()
    allow = Allowed(key=found["host"].pair().public, roles=("host",), name="ada")
    found["supervisor"].allow(allow)
    return found


def reach_of(keys: dict[str, KeyFiles], who: str) -> ListenConfig:
    ring = (
        KeyConfig(directory=str(keys[who].directory), role="job")
        if who == "supervisor"
        else KeyConfig(
            directory=str(keys[who].directory),
            role="host",
            server_key=keys["supervisor"].pair().public,
            believes=True,
        )
    )
    return ListenConfig(host="127.0.0.1", keys=ring)


def test_hosts_on_the_allow_list_are_served_and_nobody_else(
    world: World, keys: dict[str, KeyFiles]
) -> None:
    with world.serve(reach_of(keys, "supervisor")) as server:
        client = world.client(server, reach=reach_of(keys, "host"))
        client.write(FILE, [memoryview(CONTENT)])
        stranger = world.client(server, reach=reach_of(keys, "stranger"), seconds=0.5)
        with pytest.raises(StorageError, match="no answer"):
            stranger.size(FILE)
        assert any("its key is not allowed" in text for text in world.told)
        keys["supervisor"].revoke("ada")
        client._silence_seconds = 1.0
        with pytest.raises(StorageError, match="no answer"):
            poll(lambda: client.size(FILE) == 0, seconds=5.0)
        with pytest.raises(StorageError, match="no answer"):
            client.size(FILE)


def test_the_secret_of_another_run_opens_nothing(world: World) -> None:
    with world.serve() as server:
        other = msgspec.structs.replace(world.reach, secret=new_secret())
        with pytest.raises(TransportError, match="does not have the key of this run"):
            world.client(server, reach=other).names("shard-0")


def test_bytes_that_are_no_call_cut_off_their_sender_only(
    world: World, keys: dict[str, KeyFiles]
) -> None:
    with world.serve(reach_of(keys, "supervisor")) as server:
        client = world.client(server, reach=reach_of(keys, "host"), seconds=0.5)
        assert client.names("shard-0") == []
        own = world.client(server, reach=reach_of(keys, "supervisor"))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        world.stack.callback(context.destroy, linger=0)
        dealer = context.socket(zmq.DEALER)
        world.stack.callback(dealer.close, 0)
        endpoint = Endpoint.parse(server.endpoint)
        client._guard.dial(dealer, SUPERVISOR, endpoint)
        dealer.connect(endpoint.endpoint)
        for frames in ([b"junk"], [b"{}", b""], [b"x"] * 9):
            dealer.send_multipart(frames)
        poll(lambda: any("it sent an invalid call" in text for text in world.told))
        with pytest.raises(StorageError, match="no answer"):
            client.names("shard-0")
        assert own.names("shard-0") == []


def test_files_of_others_in_the_folder_do_not_stop_the_server(world: World) -> None:
    (world.folder.path / "shard-0").mkdir(parents=True)
    for name in (b"\xff.safetensors", b"00001 (copy).safetensors", b"00001.safetensors"):
        (world.folder.path / "shard-0" / os.fsdecode(name)).touch()
    with world.serve() as server:
        assert world.client(server).names("shard-0") == ["00001.safetensors"]


def test_many_clients_write_at_once(world: World) -> None:
    with world.serve() as server:
        clients = [world.client(server) for _ in range(4)]
        names = [f"shard-{k}/00001.safetensors" for k in range(4)]
        threads = [
            threading.Thread(target=client.write, args=(name, [memoryview(CONTENT)]))
            for client, name in zip(clients, names, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert world.found() == {f"snapshots/{name}" for name in names}
    assert all((world.folder.path / name).read_bytes() == CONTENT for name in names)
