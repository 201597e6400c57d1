"""What hosts download: documents in chunks, the rate of the link, the job spec of a run."""

from collections import deque
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from distbelief.config.load import job_from_json
from distbelief.core.errors import JobError, RemoteProtocolError
from distbelief.job.hosts import bootstrap
from distbelief.job.hosts.bootstrap import (
    ASK_SECONDS,
    DOCUMENT_BYTES_MAX,
    FileDownload,
    JobAddress,
    localized,
    read_job_spec,
    write_job_spec,
)
from distbelief.job.hosts.join_server import JoinServer
from distbelief.job.launch.role_process import RoleSpec
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.protocol import Blob, FileChunk, FileRequest, hosts
from distbelief.protocol.hosts import CHUNK_BYTES_MAX
from distbelief.transport.keys import KeyPair
from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.shared_memory import FileMemory
from tests.distbelief.jobs import speech


@given(
    content=st.binary(max_size=50),
    size=st.integers(1, 9),
    times=st.lists(st.integers(0, 2), max_size=40),
)
def test_a_document_arrives_in_spite_of_losses(content: bytes, size: int, times: list[int]) -> None:
    now, reading = 0.0, FileDownload("d", 0.0)
    ask = reading.ask(now)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "CHUNK_BYTES_MAX", size)
        for n in [*times, *[1] * 200]:
            chunk = FileChunk.of("d", content, ask.offset)
            for _ in range(n):
                if reading.take(chunk, now):
                    ask = reading.ask(now)
            now += 2 * now + ASK_SECONDS  # longer than any pause so far
            ask = reading.ask_again(now) or ask
    assert reading.content == content
    assert reading.ask_again(3 * now) is None


@pytest.mark.parametrize("chunk_seconds", [0.1, 0.7, 1.0, 3.0, 8.0])
def test_a_slow_link_does_not_fill_with_the_same_chunk(chunk_seconds: float) -> None:
    """Each half second without news was one more question, and one more answer.

    Of each chunk there were more than of the one before, and all else that a machine
    waits for came after them.
    """
    content, heartbeat_seconds, free_at, n_sent = bytes(6 * CHUNK_BYTES_MAX), 0.5, 0.0, 0
    reading = FileDownload("d", 0.0)
    coming: deque[tuple[float, FileChunk]] = deque()

    def send(ask: FileRequest | None, now: float) -> None:
        nonlocal free_at, n_sent
        if ask is not None:
            free_at, n_sent = max(now, free_at) + chunk_seconds, n_sent + 1
            coming.append((free_at, FileChunk.of("d", content, ask.offset)))

    send(reading.ask(0.0), 0.0)
    for beat in range(round(30 * chunk_seconds / heartbeat_seconds)):
        now = beat * heartbeat_seconds
        while coming and coming[0][0] <= now:
            at, chunk = coming.popleft()
            if reading.take(chunk, at) and reading.content is None:
                send(reading.ask(at), at)
        send(reading.ask_again(now), now)
    assert reading.content == content
    assert n_sent <= 6 + 6


@pytest.mark.parametrize(
    ("offset", "n_bytes", "content"),
    [(0, 3, b"four"), (0, DOCUMENT_BYTES_MAX + 1, b"x"), (0, 1, b"")],
)
def test_a_chunk_that_makes_no_sense_is_refused(offset: int, n_bytes: int, content: bytes) -> None:
    chunk = FileChunk(document="d", offset=offset, n_bytes=n_bytes, content=Blob(content))
    with pytest.raises(RemoteProtocolError, match="bytes of d at 0"):
        FileDownload("d", 0.0).take(chunk, 0.0)


def test_a_document_does_not_change_its_length() -> None:
    reading, ab = FileDownload("d", 0.0), Blob(b"ab")
    assert reading.take(FileChunk(document="d", offset=0, n_bytes=4, content=ab), 1.0)
    assert not reading.take(FileChunk(document="e", offset=2, n_bytes=4, content=ab), 1.0)
    with pytest.raises(RemoteProtocolError, match="before: 4"):
        reading.take(FileChunk(document="d", offset=2, n_bytes=5, content=ab), 1.0)
    with pytest.raises(RemoteProtocolError, match="it has 3 bytes"):
        FileChunk.of("d", b"abc", 4)


@pytest.mark.parametrize("bandwidth", [1e5, 1.25e8, 1e15])
def test_the_rate_is_that_of_the_fastest_chunk(bandwidth: float) -> None:
    """Another program's turn is not the rate of the link."""
    content, now = bytes(3 * CHUNK_BYTES_MAX), 0.0
    probe = FileDownload("p", now)
    for disturbed in (0.08, 0.0, 0.5):
        ask = probe.ask(now)
        now += CHUNK_BYTES_MAX / bandwidth + disturbed
        assert probe.take(FileChunk.of("p", content, ask.offset), now)
        again = FileChunk.of("p", content, ask.offset)
        assert not probe.take(again, now + 1e-5)  # what comes twice does not count
    assert probe.rate == pytest.approx(min(bandwidth, CHUNK_BYTES_MAX / 1e-6), rel=0.01)


def test_only_hosts_on_the_supervisors_machine_use_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that Ray started on the same machine sent every step through TCP: 0.70 as fast."""
    memory = FileMemory.make(root=tmp_path)
    received = read_job_spec(write_job_spec(spec_of(memory=str(memory.directory))))

    def found() -> Path | None:
        return received.memory_here

    assert found() == memory.directory
    memory.directory.chmod(0o755)  # not this user's alone
    assert found() is None
    memory.directory.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "this_machine", lambda: f"{received.machine}0")
        assert found() is None
        assert msgspec.structs.replace(received, machine="").memory_here is None
    memory.remove_all()
    assert found() is None
    unshared = read_job_spec(write_job_spec(spec_of(memory="")))
    assert unshared.memory_here is None


def spec_of(*overrides: str, memory: str = "/dev/shm/x") -> RoleSpec:
    job = speech(*overrides, path="/home/ada/nets/speech.toml")
    layout = Layout.of([TensorSpec(name="w", shape=(3, 2), kind="parameter")], n_shards=1)
    return RoleSpec(
        job=msgspec.Raw(job.to_json()),
        run="name",
        supervisor="tcp://127.0.0.1:1",
        memory=memory,
        snapshots="/home/ada/runs/x/snapshots",
        layout=layout.spec,
        initials={},
        initial_file="/home/ada/weights.safetensors",
    )


def test_a_job_spec_has_the_plan_and_no_path_of_the_supervisors(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    received = read_job_spec(
        write_job_spec(msgspec.structs.replace(spec_of(), plans={3: str(plan)}))
    )
    assert received.plans == {3: "{}"}
    assert received.shares
    assert not any((received.spec.memory, received.spec.snapshots, received.spec.supervisor))
    assert not received.spec.plans
    assert received.spec.initial_file == ""  # the file server has it
    assert received.spec.files == ""
    assert not read_job_spec(write_job_spec(spec_of(memory=""))).shares


@pytest.mark.parametrize(
    ("overrides", "snapshots"),
    [((), ""), (("cluster.checkpoints=/mnt/runs",), "/home/ada/runs/x/snapshots")],
)
def test_hosts_save_at_the_file_server_unless_the_job_names_a_place(
    overrides: tuple[str, ...], snapshots: str
) -> None:
    job, files = speech(*overrides), "tcp://0.0.0.0:7"
    cluster = JoinServer(reach=ListenConfig()).cluster(job, spec_of(*overrides), files=files)
    spec = read_job_spec(cluster.job_spec).spec
    assert (spec.files, spec.snapshots) == (files, snapshots)


def test_a_job_spec_says_where_hosts_find_checkpoints_and_initial_values() -> None:
    files, shared = "tcp://0.0.0.0:7", "s3://b/x"
    content = write_job_spec(spec_of(), files=files, snapshots=shared)
    spec = read_job_spec(content).spec
    assert (spec.files, spec.snapshots, spec.initial_file) == (files, shared, "")


def test_a_job_looks_for_its_files_where_the_host_has_them(tmp_path: Path) -> None:
    spec = spec_of('data.train.arguments={ files = ["./a.npy", "../b.npy"], other = "/data/c" }')
    content, patience = localized(spec.job, tmp_path)
    job, here = job_from_json(bytes(content)), str(tmp_path)
    assert job.import_paths == (here,)
    assert job.data.train.arguments == {
        "files": [f"{here}/a.npy", "/home/ada/b.npy"],
        "other": "/data/c",
    }
    assert job.source == "/home/ada/nets/speech.toml"
    # How long the host waits for the supervisor.
    assert patience == 600.0
    assert localized(spec_of("cluster.patience=90 s").job, tmp_path)[1] == 90.0


@pytest.mark.parametrize("content", [b"", b"{}", b'{"spec":{"job":1}}', b"\xff"])
def test_an_invalid_job_spec_is_rejected(content: bytes) -> None:
    with pytest.raises(JobError, match="same version"):
        read_job_spec(content)
    for job in (b"[1", b"1", b"{}", b'{"source":{"import_paths":[1]}}', b'{"\xd8":1}'):
        with pytest.raises(JobError, match="job cannot be read"):
            localized(msgspec.Raw(job), Path())


KEY = "ab" * 32
SECRET = "5f" * 32
PAIR = KeyPair.parse(SECRET)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (f"tcp://10.0.0.1:7700?key={KEY}", JobAddress(host="10.0.0.1", port=7700, key=KEY)),
        (
            f"tcp://node-3.example.org:1?secret={SECRET}",
            JobAddress(host="node-3.example.org", port=1, key=PAIR.public, secret=SECRET),
        ),
    ],
)
def test_printed_addresses_are_read_and_keys_show_no_secret(text: str, address: JobAddress) -> None:
    assert str(address) == text
    assert JobAddress.parse(text) == address
    half = JobAddress(host=address.host, port=address.port)
    assert JobAddress.parse(text.partition("?")[0]) == half


def test_a_secret_that_is_none_is_not_shown() -> None:
    with pytest.raises(JobError, match="copy the whole address") as caught:
        JobAddress.parse(f"tcp://h:1?secret={SECRET[:-1]}")
    assert SECRET[:8] not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "tcp://h", "h:1", "http://h:1", "tcp://:1", "tcp://h:99999"),
        *("tcp://h[:1", "tcp://h]:1", "tcp://1[]0:7", "tcp://h:1?secret=\udcc9"),  # fuzz
    ],
)
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(JobError, match="is not a job address"):
        JobAddress.parse(text)
    with pytest.raises(JobError, match="not a public key"):
        JobAddress.parse("tcp://h:1?key=abc")
