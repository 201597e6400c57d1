"""The process of a role, here in a thread; the test plays its supervisor."""

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import msgspec
import pytest
from typing_extensions import override

from distbelief import protocol as wire
from distbelief.config.job import Job
from distbelief.config.load import parse_job
from distbelief.job.launch import forkserver, role_process
from distbelief.job.launch.role_process import MemoryPressure, RoleSpec
from distbelief.parameter_server.layout import Layout
from distbelief.transport.listen_config import ListenConfig
from distbelief.worker.local_executor import FlatModel
from tests.distbelief.examples import initials_of, net
from tests.distbelief.jobs import small
from tests.links import link
from tests.processes.commands import poll


pytestmark = pytest.mark.processes

EXAMPLES = "tests.distbelief.examples"


def a_job(tmp_path: Path, *overrides: str) -> Job:
    text = small(f"{EXAMPLES}:net", f"{EXAMPLES}:frames")
    return parse_job(text, path=tmp_path / "job.toml", overrides=("model.initial=seed", *overrides))


class Supervised:
    """A role's process, and the messages that came from it."""

    def __init__(
        self, name: str, job: Job, folder: Path, *, allowed: tuple[str, ...] | None = None
    ) -> None:
        self.name = name
        self._allowed = allowed
        self.transport = link("supervisor", folder, run="t")
        self.heard: list[wire.Message] = []
        self.status: int | None = None
        self._job = job
        self._folder = folder

    @contextmanager
    def running(self) -> Iterator[None]:
        with self.transport:
            model = FlatModel(net())
            spec = RoleSpec(
                job=msgspec.Raw(self._job.to_json()),
                run="t",
                supervisor=self.transport.endpoint,
                memory="",
                snapshots=str(self._folder / "snapshots"),
                layout=Layout.of(model.specs(), n_shards=1).spec,
                initials=initials_of(model.module),
                initial_file=None,
                reach=ListenConfig(directory=str(self._folder)),
                allowed=self._allowed,
            )
            path = self._folder / "spec.json"
            path.write_bytes(msgspec.json.encode(spec))
            thread = threading.Thread(target=self._run, args=(str(path),))
            thread.start()
            try:
                yield
            finally:
                thread.join(30.0)
            assert not thread.is_alive()

    def _run(self, path: str) -> None:
        self.status = role_process.main(self.name, 2, path)

    def wait_for(self, kind: type[wire.Message]) -> wire.Message:
        poll(lambda: self._listen(kind), seconds=30.0)
        return next(message for message in self.heard if isinstance(message, kind))

    def _listen(self, kind: type[wire.Message]) -> bool:
        self.transport.poll(0.02)
        for envelope in self.transport.receive():
            assert (envelope.sender, envelope.incarnation) == (self.name, 2)
            self.heard.append(envelope.message)
        return any(isinstance(message, kind) for message in self.heard)

    def say(self, message: wire.Message) -> None:
        self.transport.send(self.name, message)

    def connect(self) -> None:
        join = self.wait_for(wire.Join)
        assert isinstance(join, wire.Join)
        self.transport.connect(self.name, 2, join.endpoint)
        self.say(wire.Peers(entries=()))

    def save(self) -> wire.Message:
        self.connect()
        self.say(wire.SaveCheckpoint(label="00001"))
        return self.wait_for(wire.CheckpointSaved)


@pytest.fixture(autouse=True)
def _same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_shard_lives_from_join_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = Supervised("shard-0", a_job(tmp_path), tmp_path)
    with shard.running():
        saved = shard.save()
        shard.say(wire.Stop(reason="enough"))
        shard.wait_for(wire.Finished)
    assert isinstance(saved, wire.CheckpointSaved)
    assert saved.error is None
    assert (tmp_path / "snapshots" / "shard-0" / "00001.safetensors").is_file()
    assert shard.status == 0
    assert any(isinstance(message, wire.Heartbeat) for message in shard.heard)
    assert "shard-0#2 info: ends: as planned" in capsys.readouterr().out


def test_a_role_that_imports_for_long_says_that_it_lives(tmp_path: Path) -> None:
    """On hosts that join it looked at what it may call first, and said nothing meanwhile."""
    go_on = tmp_path / "go-on"
    (tmp_path / "heavy.py").write_text(
        f"from pathlib import Path\nwhile not Path({str(go_on)!r}).exists():\n    pass\n"
        f"from {EXAMPLES} import net\nnet.__module__ = 'heavy'\n"
    )
    job = a_job(tmp_path, "model.factory=heavy:net")
    replica = Supervised("replica-0", job, tmp_path, allowed=("heavy",))
    with replica.running():
        try:
            replica.wait_for(wire.Heartbeat)
        finally:
            go_on.touch()
        failed = replica.wait_for(wire.Failed)
    assert isinstance(failed, wire.Failed)
    assert f"--allow-import {EXAMPLES}" in failed.error


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("no_dataset", "returned 7, not a data set"),
        ("failing", "missing a required argument: 'size'"),
    ],
)
def test_a_role_that_cannot_be_built_says_why(tmp_path: Path, factory: str, told: str) -> None:
    job = a_job(tmp_path, f"data.train.factory={EXAMPLES}:{factory}")
    replica = Supervised("replica-0", job, tmp_path)
    with replica.running():
        failed = replica.wait_for(wire.Failed)
    assert isinstance(failed, wire.Failed)
    assert told in failed.error
    assert failed.culprit_is_job
    assert replica.status == 1


def test_damage_to_a_checkpoint_is_told_not_suffered(tmp_path: Path) -> None:
    """A snapshot of another model: the shard ends, and says what to do."""
    shard = Supervised("shard-0", a_job(tmp_path), tmp_path)
    with shard.running():
        shard.save()
        shard.say(wire.Stop(reason="enough"))
    again = Supervised("shard-0", a_job(tmp_path), tmp_path)  # incarnation 2 again
    with again.running():
        again.connect()
        failed = again.wait_for(wire.Failed)
    assert isinstance(failed, wire.Failed)
    assert "count on from it" in failed.error
    assert not failed.culprit_is_job


class Full(io.StringIO):
    """A log on a full disk."""

    @override
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_without_room_ends_no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    role_process.log("shard-0", 1, "info", "a word")


class Hanging(io.StringIO):
    """A log on a disk that does not answer until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    @override
    def write(self, text: str) -> int:
        assert self.answers.wait(60.0)
        return super().write(text)


def test_a_log_that_hangs_holds_up_no_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The role wrote it in the thread that answers others: it could not even join, or
    went silent, and was taken for dead."""
    log = Hanging()
    monkeypatch.setattr(sys, "stdout", log)
    shard = Supervised("shard-0", a_job(tmp_path), tmp_path)
    with shard.running():
        try:
            shard.save()
            shard.wait_for(wire.Heartbeat)
            assert log.getvalue() == ""
        finally:
            log.answers.set()
            shard.say(wire.Stop(reason="enough"))
        shard.wait_for(wire.Finished)
    assert "shard-0#2 info: ends: as planned" in log.getvalue()


def test_a_child_without_room_for_last_words_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would go on with its parent's code, and end its own siblings."""

    class Ended(BaseException):
        pass

    def end(status: int) -> NoReturn:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(forkserver, "end_with_parent", lambda *_: None)
    monkeypatch.setattr(forkserver, "_redirect", lambda *_: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(forkserver, "_program", lambda _program: lambda *_: 3)
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", Full())
    start = forkserver.Start(program="role", name="shard-0", incarnation=1, spec="", log="")
    with pytest.raises(Ended) as caught:
        forkserver._run(start, parent=os.getpid())
    assert caught.value.args == (3,)


def test_a_role_lives_without_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, int]] = []

    def give(file: int, target: int) -> None:
        given.append((str(Path(f"/proc/self/fd/{file}").readlink()), target))
        closing.add(file)

    closing: set[int] = set()
    monkeypatch.setattr(os, "dup2", give)
    forkserver._redirect(str(tmp_path / "nowhere" / "shard-0.log"))
    for file in closing:
        os.close(file)
    assert given == [(os.devnull, target) for target in (0, 1, 2)]


def test_import_paths_come_first_and_once(tmp_path: Path) -> None:
    job = a_job(tmp_path)
    for _ in range(2):
        role_process.import_from(job)
    assert sys.path[: len(job.import_paths)] == list(job.import_paths)
    assert sys.path.count(str(tmp_path)) == 1


def test_pages_count_as_read_again_if_they_had_been_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is mapped and read for the first time faults as often."""
    faults = 100
    usage = SimpleNamespace(getrusage=lambda _: SimpleNamespace(ru_majflt=faults), RUSAGE_SELF=0)
    monkeypatch.setattr(role_process, "resource", usage)

    def say(where: str, stat: str, pressure: str, *, refaults: int, microseconds: int) -> None:
        (tmp_path / where).mkdir(parents=True, exist_ok=True)
        text = f"anon 7\nworkingset_refault_anon 5\nworkingset_refault_file {refaults}\n"
        (tmp_path / where / stat).write_text(text)
        text = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={microseconds}\nfull total=1\n"
        (tmp_path / where / pressure).write_text(text)

    assert MemoryPressure(tmp_path).counters() == {}  # an old Linux, or one without these
    for version, where, files in (
        ("4:memory:/a\n0::/\n", "proc", ("vmstat", "pressure/memory")),
        ("0::/jobs/a\n", "sys/fs/cgroup/jobs/a", ("memory.stat", "memory.pressure")),
    ):
        (tmp_path / "proc/pressure").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/self").mkdir(exist_ok=True)
        (tmp_path / "proc/self/cgroup").write_text(version)
        say(where, *files, refaults=1000, microseconds=4_000_000)
        pressure = MemoryPressure(tmp_path)
        faults += 50
        assert pressure.counters() == {"pages_read_again": 0, "seconds_stalled_for_memory": 0}
        faults += 30
        say(where, *files, refaults=1900, microseconds=4_500_000)
        assert pressure.counters() == {"pages_read_again": 30, "seconds_stalled_for_memory": 0.5}
        say(where, *files, refaults=2900, microseconds=4_500_000)  # of others
        assert pressure.counters() == {"pages_read_again": 30, "seconds_stalled_for_memory": 0.5}
    assert set(MemoryPressure().counters()) <= {"pages_read_again", "seconds_stalled_for_memory"}
