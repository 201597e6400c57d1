"""A shard on a host without the supervisor's disk: starts, saves, is killed, and is restored."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.torch import save_file

from distbelief import protocol as wire
from distbelief.config.load import parse_job
from distbelief.core.folders import LocalFolder
from distbelief.job.launch.role_process import RoleSpec
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.parameter_server.layout import Layout
from distbelief.protocol.role import Snapshot
from distbelief.transport.file_server import FileServer
from distbelief.transport.keys import new_secret
from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.zmq_transport import ZmqTransport
from distbelief.worker.local_executor import FlatModel
from tests.distbelief.examples import net
from tests.distbelief.jobs import small
from tests.distbelief.parameter_server.pair import gather
from tests.processes.commands import poll


pytestmark = [pytest.mark.processes, pytest.mark.slow]

RUN = "run"
MAIN = """import sys
from distbelief.job.launch.role_process import main
sys.exit(main(*{arguments!r}))
"""


class Host:
    """A directory that stands for a host, where one incarnation of the shard runs."""

    def __init__(self, directory: Path, spec: RoleSpec, incarnation: int) -> None:
        directory.mkdir()
        self.directory = directory
        self.incarnation = incarnation
        file = directory / "spec.json"
        file.write_bytes(msgspec.json.encode(spec))
        code = MAIN.format(arguments=("shard-0", incarnation, str(file)))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=directory, env=environment
        )


class Supervised:
    """The supervisor of a shard, and its disk."""

    def __init__(self, folder: Path) -> None:
        reach = ListenConfig(host="127.0.0.1", secret=new_secret())
        log = lambda _level, _text: None  # noqa: E731
        self.snapshots = folder / "snapshots"
        self.store = CheckpointStore(self.snapshots, report=pytest.fail)
        self.folder = folder
        self.values = net()
        self.layout = Layout.of(FlatModel(self.values).specs(), n_shards=1)
        self.initial = folder / "initial.safetensors"
        save_file(dict(FlatModel(self.values).named_tensors()), self.initial)
        self.files = FileServer(
            LocalFolder(self.snapshots), self.initial, reach=reach, run=RUN, log=log
        )
        self.transport: ZmqTransport = reach.transport(
            name="supervisor", incarnation=1, run=RUN, log=log
        )
        self.reach = reach
        self.heard: list[wire.Message] = []

    @contextmanager
    def host(self, name: str, incarnation: int) -> Iterator[Host]:
        text = small("tests.distbelief.examples:net", "tests.distbelief.examples:frames")
        spec = RoleSpec(
            job=msgspec.Raw(parse_job(text, path=self.folder / "job.toml").to_json()),
            run=RUN,
            supervisor=self.transport.endpoint,
            files=self.files.endpoint,
            layout=self.layout.spec,
            initial_file="",
            reach=self.reach,
        )
        host = Host(self.folder / name, spec, incarnation)
        self.heard.clear()
        try:
            join = self.wait_for(wire.Join)
            assert isinstance(join, wire.Join)
            self.transport.connect("shard-0", incarnation, join.endpoint)
            self.transport.send("shard-0", wire.Peers(entries=()))
            yield host
        finally:
            host.process.kill()
            host.process.wait()

    def save(self, label: str) -> Snapshot:
        self.heard.clear()
        self.transport.send("shard-0", wire.SaveCheckpoint(label=label))
        saved = self.wait_for(wire.CheckpointSaved)
        assert isinstance(saved, wire.CheckpointSaved)
        assert saved.error is None
        found = self.store.newest("shard-0")
        assert found is not None
        assert found.label == label
        return found

    def wait_for(self, kind: type[wire.Message]) -> wire.Message:
        poll(lambda: self._listen(kind), seconds=50.0)
        return next(message for message in self.heard if isinstance(message, kind))

    def _listen(self, kind: type[wire.Message]) -> bool:
        self.transport.poll(0.02)
        self.heard += [envelope.message for envelope in self.transport.receive()]
        return any(isinstance(message, kind) for message in self.heard)


def test_a_shard_restarts_on_another_host_from_its_newest_checkpoint(tmp_path: Path) -> None:
    world = Supervised(tmp_path)
    with world.files, world.transport:
        with world.host("one", 1) as host:
            first = world.save("00001")
            host.process.send_signal(signal.SIGKILL)
        expected = np.zeros_like(first.arrays["values"])
        gather(world.layout, 0, FlatModel(world.values).values, expected)
        assert first.arrays["values"].tobytes() == expected.tobytes()
        # As if it had been trained: what is restored is not what it starts with.
        trained = {"values": first.arrays["values"] * np.float32(1.5) + np.float32(1e-7)}
        world.store.save("shard-0", Snapshot(label="00002", arrays=trained, facts=first.facts))
        with world.host("two", 2):
            second = world.save("00003")
        assert second.arrays["values"].tobytes() == trained["values"].tobytes()
        assert world.store.labels("shard-0") == ["00001", "00002", "00003"]
    for name in ("one", "two"):
        assert [file.name for file in (tmp_path / name).iterdir()] == ["spec.json"]
