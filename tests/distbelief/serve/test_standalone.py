"""The directory of a standalone server, and when it does not continue from it."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from torch import nn

from distbelief.core.errors import JobError, StorageError
from distbelief.job.run_log import RunLog
from distbelief.parameter_server.rules import SGD, Momentum, UpdateRule
from distbelief.parameter_server.schedules import Cosine
from distbelief.serve import server_process
from distbelief.serve.address import ServerAddress, parameter_specs
from distbelief.serve.server_process import ServerRequest, run_server, serve as run_until_it_ends
from distbelief.supervisor.membership import Kind
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.transport.address import Endpoint
from distbelief.transport.keys import KeyPair
from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.node import RoleRunner
from tests.distbelief.supervisor.test_supervisor import Desk


SECRET = "5f" * 32
PUBLIC = KeyPair.parse(SECRET).public


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerRequest]:
    """What was to be served, without serving it."""
    requests: list[ServerRequest] = []

    def serve(request: ServerRequest, _watch: object, *, tell: object) -> None:
        assert tell is not None
        requests.append(request)

    monkeypatch.setattr(server_process, "serve", serve)
    return requests


def serve(
    directory: Path,
    *,
    tell: Callable[[str], object] = pytest.fail,
    model: nn.Module | None = None,
    rule: UpdateRule | None = None,
    shards: int = 2,
    reach: ListenConfig | None = None,
    from_scratch: bool = False,
) -> None:
    """Be `distbelief serve` with these options."""
    parameters = list((model or nn.Linear(3, 2)).parameters())
    request = ServerRequest(
        tensors=parameter_specs(parameters),
        rule=rule or SGD(learning_rate=0.1),
        n_shards=shards,
        shard_copies=1,
        snapshot_every=30.0,
        reach=reach or ListenConfig(),
    )
    run_server(request, parameters, directory, tell=tell, from_scratch=from_scratch)  # type: ignore[arg-type]


def test_the_same_directory_means_to_go_on(tmp_path: Path, served: list[ServerRequest]) -> None:
    said: list[str] = []
    directory = tmp_path / "runs" / "server"
    serve(directory, tell=said.append)
    initial = (directory / "initial.safetensors").read_bytes()
    assert said == []
    serve(directory, tell=said.append)
    one, other = served
    assert one.run == other.run != ""
    assert said == [f"continuing from the checkpoints in {directory}"]
    assert (directory / "initial.safetensors").read_bytes() == initial
    assert directory.stat().st_mode & 0o777 == 0o700


def test_an_address_over_tcp_lasts(tmp_path: Path, served: list[ServerRequest]) -> None:
    directory = tmp_path / "server"
    for secret in ("5f" * 32, "6e" * 32):
        reach = ListenConfig(host="127.0.0.1", port=7700, secret=secret)
        serve(directory, reach=reach, tell=lambda _text: None)
    assert [request.reach.secret for request in served] == ["5f" * 32] * 2
    serve(directory, tell=lambda _text: None)
    assert served[-1].reach == ListenConfig()


def test_nobody_else_may_read_the_secret_whatever_becomes_of_the_directory(
    tmp_path: Path, served: list[ServerRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the directory's mode kept the file from others: a copy of it did not."""
    modes: list[int] = []
    replace = Path.replace

    def seen(path: Path, target: Path) -> Path:
        modes.append(path.stat().st_mode & 0o777)
        return replace(path, target)

    before = os.umask(0)  # a user who is careless
    try:
        directory = tmp_path / "server"
        serve(directory)
        file = directory / "request.json"
        assert file.stat().st_mode & 0o777 == 0o600
        file.chmod(0o644)  # as earlier versions left it
        monkeypatch.setattr(Path, "replace", seen)
        serve(directory, tell=lambda _text: None)
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(served) == 2


def test_from_scratch_keeps_what_was_aside(tmp_path: Path, served: list[ServerRequest]) -> None:
    directory = tmp_path / "server"
    serve(directory)
    saved = directory / "snapshots" / "shard-0" / "00007.safetensors"
    saved.parent.mkdir(parents=True)
    saved.write_bytes(b"damaged")
    initial = (directory / "initial.safetensors").read_bytes()
    said: list[str] = []
    serve(directory, tell=said.append, model=nn.Linear(4, 2), from_scratch=True)
    aside = directory / "aside-1"
    assert said == [f"starting from scratch; earlier files are in {aside}"]
    kept = aside / "snapshots" / "shard-0" / "00007.safetensors"
    assert kept.read_bytes() == b"damaged"
    assert (aside / "initial.safetensors").read_bytes() == initial
    assert not saved.exists()
    before, now = served
    assert before.run != now.run  # so that no worker goes on with what was


def test_a_server_of_which_all_is_damaged_does_not_begin_anew(
    tmp_path: Path, served: list[ServerRequest]
) -> None:
    """It did, with no word but in its log."""
    serve(tmp_path)
    (request,) = served
    snapshots = tmp_path / "snapshots"
    for k in range(2):
        saved = snapshots / f"shard-{k}" / "00007.safetensors"
        saved.parent.mkdir(parents=True)
        saved.write_bytes(b"")
    with pytest.raises(StorageError) as caught:
        run_until_it_ends(request, lambda *_: None, tell=pytest.fail)
    assert f"all checkpoints of shard-0 are damaged: {snapshots}" in str(caught.value)
    assert "--from-scratch" in str(caught.value)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (
            {"model": nn.Linear(4, 2)},
            "model: parameter 0 of shape [2, 3], not parameter 0 of shape [2, 4]",
        ),
        ({"rule": Momentum(learning_rate=0.1)}, 'rule: name "sgd", not "momentum"'),
        ({"rule": SGD(learning_rate=0.2)}, "rule: learning_rate 0.1, not 0.2"),
        (
            {"rule": SGD(learning_rate=0.1, schedule=Cosine(n_pushes=9))},
            'rule: schedule.name "constant", not "cosine"',
        ),
        ({"shards": 3}, "number of shards: 2, not 3"),
    ],
)
def test_another_thing_is_not_gone_on_with(
    tmp_path: Path, served: list[ServerRequest], other: dict[str, Any], what: str
) -> None:
    serve(tmp_path / "server")
    with pytest.raises(JobError, match=re.escape(f"has another {what}: use the same")):
        serve(tmp_path / "server", **other)
    assert len(served) == 1


def test_what_is_not_its_own_is_left_alone(tmp_path: Path, served: list[ServerRequest]) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(JobError, match="is not the directory of a server"):
        serve(tmp_path)
    with pytest.raises(StorageError, match="cannot make"):
        serve(tmp_path / "thesis.tex")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "request.json").write_text("{")
    with pytest.raises(JobError, match="is damaged"):
        serve(damaged)
    with pytest.raises(JobError, match="distbelief keys new"):
        serve(damaged, reach=ListenConfig(host="0.0.0.0"))
    assert served == []


@pytest.mark.parametrize(
    ("reach", "place", "said"),
    [
        (ListenConfig(), "ipc:///dev/shm/x/.supervisor.1", ["this host"]),
        (
            ListenConfig(host="127.0.0.1", secret=SECRET),
            f"tcp://127.0.0.1:7?key={PUBLIC}",
            ["this host", "keep it secret"],
        ),
        (
            ListenConfig(host="10.0.0.1", secret=SECRET),
            f"tcp://10.0.0.1:7?key={PUBLIC}",
            ["other hosts", "this host", "NOT SECURE"],
        ),
        (
            ListenConfig(host="10.0.0.1"),
            f"tcp://10.0.0.1:7?key={'a' * 64}",
            ["other hosts", "this host"],
        ),
        (
            ListenConfig(host="0.0.0.0"),
            f"tcp://0.0.0.0:7?key={'a' * 64}",
            ["other hosts", "other IP addresses", "this host"],
        ),
    ],
)
def test_a_user_sees_the_addresses(
    tmp_path: Path, served: list[ServerRequest], reach: ListenConfig, place: str, said: list[str]
) -> None:
    serve(tmp_path / "server")
    request = msgspec.structs.replace(served[0], reach=reach)
    terminal = server_process._Terminal(request)
    lines = terminal._address_lines(request.address(place, run="t", memory="/dev/shm/x"))
    assert len(lines) == len(said)
    assert all(text in line for text, line in zip(said, lines, strict=True))
    for line in lines:
        if "://" in line:
            address = ServerAddress.parse(line.split()[-1])
            assert address.run == "t"
            assert address.secret == reach.secret
            assert address.place().key == Endpoint.parse(place).key
            assert bool(address.memory) == ("this host" in line)


def test_a_server_that_could_not_go_on_does_not_say_that_it_has_ended_well(tmp_path: Path) -> None:
    """It said that its directory holds what was trained, and exited with 0."""
    said: list[str] = []
    supervisor = SimpleNamespace(shutdown=SimpleNamespace(error=None, interrupted=False))
    node = SimpleNamespace(run=lambda _: "a bug", error="a bug", post=pytest.fail)
    terminal = server_process._Terminal(cast("ServerRequest", None))
    log = RunLog(tmp_path / "supervisor.log", "supervisor", tell=said.append)
    address = cast("ServerAddress", None)
    terminal.watch(cast("RoleRunner", node), cast("Supervisor", supervisor), address, log)
    assert said == []
    outcome = server_process._outcome(
        cast("RoleRunner", node), cast("Supervisor", supervisor), tmp_path
    )
    assert outcome == f"a bug: {tmp_path} has the state of the last checkpoint"


def test_workers_that_are_gone_are_not_counted() -> None:
    """It told of "2 workers" when all loops but one had ended long ago."""
    roster: tuple[tuple[str, Kind], ...] = (("shard-0", "shard"),)
    desk = Desk(SupervisorConfig(roster=roster, stop=None, admits_guests=True))
    desk.join("shard-0", "worker-1")
    desk.pass_time(11.0, beats=("shard-0",))
    assert server_process._workers(desk.supervisor.view(desk.now)) == "0 workers"
    desk.join("worker-2")
    assert server_process._workers(desk.supervisor.view(desk.now)) == "1 worker"
