import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from distbelief.core.errors import JobError, PeerLostError, StorageError
from distbelief.job.run.directory import RunDirectory
from distbelief.parameter_server.rules import SGD, Adagrad, UpdateRule
from distbelief.serve.address import ServerAddress, parameter_specs
from distbelief.serve.server import ParameterServer
from distbelief.serve.server_process import ServerRequest
from distbelief.transport.shared_memory import FileMemory


NAMES = st.text(min_size=1, max_size=40)
KEY = "5f" * 32


@given(
    run=NAMES,
    memory=st.text(max_size=60),
    n_shards=st.integers(1, 999),
    shard_copies=st.integers(1, 2),
    which=st.sampled_from(["user", "key", "secret"]),
)
def test_an_address_is_read_as_written(
    run: str, memory: str, n_shards: int, shard_copies: int, which: str
) -> None:
    over_tcp = "tcp://127.0.0.1:41000"
    address = ServerAddress(
        endpoint="ipc:///dev/shm/x/.supervisor.1" if which == "user" else over_tcp,
        run=run,
        key=KEY if which == "key" else "",
        secret=KEY if which == "secret" else "",
        n_shards=n_shards,
        shard_copies=shard_copies,
        memory=memory,
    )
    assert ServerAddress.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:41000",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:41000",
        "tcp://127.0.0.1:41000?token=a&shards=1",  # as it was once
        "tcp://127.0.0.1:41000?run=a&shards=1",
        "tcp://127.0.0.1:41000?secret=a&run=a&shards=1",
        f"tcp://127.0.0.1:99999?secret={KEY}&run=a&shards=1",
        f"tcp://127.0.0.1:41000?secret={KEY}&run=a&shards=0",
        f"tcp://127.0.0.1:41000?secret={KEY}&run=a&shards=two",
        f"tcp://127.0.0.1:41000?secret={KEY}&run=a&shards=2&copies=3",
        f"http://127.0.0.1:41000?secret={KEY}&run=a&shards=1",
        f"ipc:///dev/shm/x?secret={KEY}&run=a&shards=1",
        "ipc://?run=a&shards=1",
        "tcp://12[7.0.0.1:41000?run=a&shards=1",  # urllib raises at these
        "tcp://12[]7:41000?run=a&shards=1",
    ],
)
def test_what_is_no_address_is_shown_with_what_is_one(text: str) -> None:
    with pytest.raises(JobError, match="use ParameterServer") as caught:
        ServerAddress.parse(text)
    assert repr(text) in str(caught.value)


def test_parameters_are_called_by_their_position() -> None:
    specs = parameter_specs(nn.Linear(3, 2).parameters())
    assert [(spec.name, spec.shape) for spec in specs] == [("000000", (2, 3)), ("000001", (2,))]


def test_no_parameters_and_doubles_are_refused() -> None:
    with pytest.raises(JobError, match=r"no parameters are given"):
        parameter_specs(iter(()))
    with pytest.raises(JobError, match=r"parameter 0 is torch.float64"):
        parameter_specs([nn.Parameter(torch.zeros(2, dtype=torch.float64))])


class Started(Exception):  # noqa: N818 -- it is none
    pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerRequest]:
    """The requests for which a process was to be started; none is."""
    requests: list[ServerRequest] = []

    def start(command: list[str], **_options: object) -> None:
        requests.append(msgspec.json.decode(Path(command[-1]).read_bytes(), type=ServerRequest))
        raise Started

    monkeypatch.setattr(subprocess, "Popen", start)
    return requests


def serve(directory: Path, net: nn.Module, *, rule: UpdateRule | None = None) -> None:
    rule = rule or SGD(learning_rate=0.1)
    with pytest.raises(Started):
        ParameterServer(net.parameters(), rule=rule, directory=directory).start()


@pytest.mark.parametrize("at", ["shard-0", "cut-00002/shard-1"])  # a run's, too
def test_a_directory_with_snapshots_of_something_else_is_refused_before_anything_starts(
    at: str, tmp_path: Path, started: list[ServerRequest]
) -> None:
    """They would be served instead of the parameters that were given."""
    kept = tmp_path / "snapshots" / at / "00007.safetensors"
    kept.parent.mkdir(parents=True)
    kept.touch()
    net = nn.Linear(3, 2)
    server = ParameterServer(net.parameters(), rule=SGD(learning_rate=0.1), directory=tmp_path)
    with pytest.raises(JobError) as caught:
        server.start()
    assert f"{tmp_path} holds the checkpoints of something else" in str(caught.value)
    assert "use another directory" in str(caught.value)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {kept.name, "lock"}
    assert not started


def test_a_server_continues_from_what_it_has_saved(
    tmp_path: Path, started: list[ServerRequest]
) -> None:
    """Regression: after a kill it said "use another, or remove", and what to remove was all."""
    serve(tmp_path, nn.Linear(3, 2))
    initial = started[0].initial_file.read_bytes()
    serve(tmp_path, nn.Linear(3, 2))  # without checkpoints it begins with what it is given
    assert started[1].initial_file.read_bytes() != initial
    initial = started[1].initial_file.read_bytes()
    kept = tmp_path / "snapshots" / "shard-0" / "00007.safetensors"
    kept.parent.mkdir(parents=True)
    kept.touch()
    serve(tmp_path, nn.Linear(3, 2))
    assert started[2].initial_file.read_bytes() == initial
    assert kept.exists()
    for net, options, what in (
        (nn.Linear(4, 2), {}, "model"),
        (nn.Linear(3, 2), {"rule": Adagrad(learning_rate=0.1)}, "rule"),
        (nn.Linear(3, 2), {"shards": 2}, "number of shards"),
    ):
        every: dict[str, Any] = {"rule": SGD(learning_rate=0.1), **options}
        with pytest.raises(JobError, match=f"another {what}: .*use the same, or a new directory"):
            ParameterServer(net.parameters(), directory=tmp_path, **every).start()


def test_a_directory_that_another_server_uses_is_refused(
    tmp_path: Path, started: list[ServerRequest]
) -> None:
    """Regression: two servers wrote checkpoints into one directory."""
    server = ParameterServer(
        nn.Linear(3, 2).parameters(), rule=SGD(learning_rate=0.1), directory=tmp_path
    )
    with RunDirectory.take(tmp_path), pytest.raises(StorageError, match="is still running"):
        server.start()
    assert not started


def test_a_directory_of_logs_is_taken(tmp_path: Path, started: list[ServerRequest]) -> None:
    (tmp_path / "snapshots" / "shard-0").mkdir(parents=True)
    (tmp_path / "shard-0.log").touch()
    serve(tmp_path, nn.Linear(3, 2))
    assert len(started) == 1


@pytest.mark.parametrize("is_killed", [True, False])
def test_what_a_killed_server_left_in_memory_is_swept(
    monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
) -> None:
    swept: list[str] = []
    monkeypatch.setattr(FileMemory, "sweep", lambda: swept.append("all"))
    server = ParameterServer(nn.Linear(3, 2).parameters(), rule=SGD(learning_rate=0.1))
    server._process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    if is_killed:
        server._process.kill()
    server.close()
    assert len(swept) == is_killed


BROKEN = {"name": "step", "n_pushes": 1.5, "decay": 0.1}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"shards": 1.5}, "shards is 1.5; use 1 to 4096"),
        ({"shards": "2"}, "shards is '2'; use 1 to 4096"),
        ({"shard_copies": 3}, "shard_copies is 3; use 1 to 2"),
        ({"snapshot_every": "fast"}, "snapshot_every is 'fast'; use seconds, more than 0"),
        ({"snapshot_every": 0}, "snapshot_every is 0; use seconds, more than 0"),
        ({"snapshot_every": math.inf}, "snapshot_every is inf; use seconds, more than 0"),
        ({"start_seconds_max": 0}, "start_seconds_max is 0; use seconds, more than 0"),
        ({"directory": 3}, "directory is 3; use a path"),
        ({"rule": SGD(learning_rate=0.0)}, "rule 'sgd': learning_rate is 0; use a number above 0"),
        ({"rule": SGD(learning_rate=True)}, "[rule] learning_rate = true: wants a number"),
        (
            {"rule": {"name": "sgd", "learning_rate": 0.1, "schedule": BROKEN}},
            "[rule.schedule] n_pushes = 1.5: wants a whole number",
        ),
    ],
)
def test_numbers_that_are_none_are_refused_before_anything_starts(
    options: dict[str, Any], error: str
) -> None:
    """The process printed a traceback; the error then was "not ready after 60 s", after 6."""
    net = nn.Linear(2, 1)
    with pytest.raises(JobError, match=re.escape(error)):
        ParameterServer(net.parameters(), **{"rule": SGD(learning_rate=0.1), **options})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rule": {"name": "AdaWm"}}, "[rule] name = \"AdaWm\": unknown. Did you mean 'AdamW'?"),
        ({"rule": {"name": "Adafactor"}}, "Its steps depend on whole tensors"),
        ({"rule": {"lr": 0.1}}, "[rule] lacks the key 'name': give it \"sgd\" or"),
        ({"rule": {"name": "NAdam", "learning_rate": 0.1}}, "Did you mean 'lr'?"),
        ({"rule": {"name": "NAdam", "lr": -1}}, "rule 'NAdam': lr is -1.0; use a finite"),
        ({"rule": {"name": "NAdam", "betas": [0.9]}}, "betas = [0.9]: wants a list: [...], of len"),
        ({"round": {"quorm": 0.7}}, "[round] has no key 'quorm'. Did you mean 'quorum'?"),
        ({"weight": "men"}, 'weight = "men": wants "mean" or "samples" or "sum"'),
        ({"staleness": "2"}, 'ParameterServer: staleness = "2": wants a whole number'),
        ({"staleness": -1}, "ParameterServer: staleness is -1; use 0 or more"),
    ],
)
def test_a_mistake_in_a_table_is_told_in_the_words_of_a_job_file(
    options: dict[str, Any], error: str
) -> None:
    """It showed msgspec's own: "Invalid value 'AdaWm' - at `$.name`"."""
    with pytest.raises(JobError, match=re.escape(error)):
        ParameterServer(nn.Linear(2, 1), **{"rule": SGD(learning_rate=0.1), **options})


def test_a_start_that_takes_too_long_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: "not ready after 60 s", and nothing of how to give it more."""
    monkeypatch.setattr("distbelief.serve.server.CLOSE_SECONDS_MAX", 0.0)  # it imports meanwhile
    net = nn.Linear(2, 1)
    rule = SGD(learning_rate=0.1)
    server = ParameterServer(
        net.parameters(), rule=rule, directory=tmp_path, start_seconds_max=1e-3
    )
    with pytest.raises(PeerLostError, match=r"not ready after 0.001 s: .*start_seconds_max"):
        server.start()
