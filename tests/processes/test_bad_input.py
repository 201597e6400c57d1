"""Bad input, and bad luck, as a user runs it: one message that names culprit and mend."""

import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
import zmq
from safetensors import safe_open
from torch import nn

import distbelief
from distbelief.core.errors import DistBeliefError, JobError, StorageError
from distbelief.transport.shared_memory import FileMemory
from tests.distbelief.jobs import small
from tests.processes.commands import COMMAND, LONG, Command, alive, ended, poll, sets, train


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(240)]

MODULE = """
import time
from pathlib import Path

import torch
from torch import nn


def net(width=4):
    return nn.Linear(width, 3)


def heavy():
    module = nn.Linear(4, 3)
    module.register_buffer("pad", torch.zeros(15_000))
    return module


def all_kinds():
    return Mixed()


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.rest = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        return self.rest(self.two(self.one(x))) * self.frozen


def single():
    return Single()


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        return x[:, :3] * self.scale


class Points:
    def __init__(self, n, seed, spoilt, how):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 4, generator=generator)
        self.y = self.x[:, :3].argmax(1)
        self.spoilt, self.how = spoilt, how

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x, y = self.x[index], self.y[index]
        if index != self.spoilt and self.spoilt >= 0:
            return x, y
        match self.how:
            case "raise":
                raise ValueError("this sample is damaged")
            case "label":
                return x, torch.tensor(9)
            case "nan":
                return x * float("nan"), y
        return x, y


def points(n=96, seed=0, spoilt=-1, how=""):
    return Points(n, seed, spoilt, how)


def slow():
    Path("trying").touch()
    time.sleep(60)
"""

PREPARING = """
import time
from pathlib import Path

from bad import points


def prepare():
    Path("preparing").touch()
    time.sleep(60)
"""

JOB = small(
    "bad:net",
    "bad:points",
    data={"test": {"factory": "bad:points", "arguments": {"seed": 1}}},
    stop={"epochs": 3},
    output={"directory": "runs/tiny", "snapshot_every": "300 ms"},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bad.py").write_text(MODULE)
    (tmp_path / "preparing.py").write_text(PREPARING)
    (tmp_path / "tiny.toml").write_text(JOB)
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(5)\n")
    return tmp_path


def assert_nothing_is_left(command: Command) -> None:
    assert "Traceback" not in command.output
    poll(lambda: not alive(command.all_pids()), seconds=60.0)
    assert not command.shared_memory()


def assert_snapshots_are_whole(run: Path) -> None:
    snapshots = list((run / "snapshots").glob("*/*.safetensors"))
    assert snapshots
    for path in snapshots:
        with safe_open(path, framework="numpy") as file:
            assert file.metadata()
    assert not list(run.rglob("*.tmp"))


def test_shared_memory_without_room_is_named() -> None:
    memory = FileMemory.make()
    try:
        with pytest.raises(StorageError, match=r"no room|space"):
            memory.create("region", n_bytes=1 << 60)
    finally:
        memory.remove_all()


# ------------------------------------------------------------------ what a run meets


@pytest.mark.untraced
def test_mistakes_before_a_run_leave_nothing_but_their_message(folder: Path) -> None:
    weights = sets("model.initial=./nowhere.safetensors")
    leaves = sets("data.train.factory=leaves:points")
    with train(folder, *weights) as first, train(folder, *leaves) as second:
        assert first.wait() == second.wait() == 2
        assert "[model] initial: cannot read initial values from" in first.output
        assert "importing leaves failed: SystemExit: 5" in second.output
        for command in (first, second):
            assert len(command.output.splitlines()) == 1
            assert_nothing_is_left(command)
    assert not list((folder / "runs").iterdir())


@pytest.mark.soak
def test_a_sample_that_is_found_bad_in_mid_run_is_named(folder: Path) -> None:
    """In training it ends the job; in the last evaluation, too, and at once."""
    train_raise = sets("data.train.arguments={spoilt=70, how='raise'}")
    test_label = sets("data.test.arguments={spoilt=70, how='label'}")
    with (
        train(folder, *train_raise, *sets("output.directory=runs/a"), run="a") as one,
        train(folder, *test_label, *sets("output.directory=runs/b"), run="b") as two,
    ):
        for command in (one, two):
            assert command.wait(seconds=60.0) == 1, command.output
            assert_nothing_is_left(command)
    assert "ValueError: this sample is damaged" in " ".join(one.output.split())
    assert "[data.test] sample 70 has label 9" in " ".join(two.output.split())


@pytest.mark.soak
def test_a_sample_that_is_no_number_is_named_and_left_out(folder: Path) -> None:
    """By one of more replicas, of a model with fewer elements than shards."""
    options = sets(
        "data.train.arguments={spoilt=70, how='nan'}",
        "model.factory=bad:single",
        "cluster.replicas=3",
        "cluster.shards=3",
    )
    elsewhere = folder / "else where"
    elsewhere.mkdir()
    with train(elsewhere, *options, job=("../tiny.toml",)) as command:
        assert command.wait() == 0, command.output
        assert_nothing_is_left(command)
        assert not re.search(r"loss +nan", command.output)
        logs = (command.run / "logs").glob("replica-*.log")
        said = "".join(log.read_text() for log in logs)
        assert "sample 70 has NaN or infinite values" in said


@pytest.mark.soak
@pytest.mark.root
def test_a_full_disk_keeps_earlier_snapshots_and_the_job_goes_on(folder: Path) -> None:
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    options = sets("model.factory=bad:heavy", "output.directory=disk/run")
    try:
        with train(folder, *options, *sets("stop.seconds=2 s"), *LONG) as command:
            assert command.wait() == 1
            assert "could not save its checkpoint" in command.output
            assert "there is no space left: free some" in command.output
            assert_nothing_is_left(command)
        assert_snapshots_are_whole(disk / "run")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ------------------------------------------------------------------------ the network


def listening(pids: list[int]) -> set[int]:
    """Return the TCP ports at which these processes listen."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                sockets.update(re.findall(r"socket:\[(\d+)\]", str(descriptor.readlink())))
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {
        int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in sockets
    }


def throw_at(path: Path, stack: ExitStack, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\0NULL" + bytes(48)
    half = (
        b"\xff",
        greeting[:20],
        greeting + b"\x06\xff" + b"\xff" * 8 + secrets.token_bytes(50_000),
        secrets.token_bytes(4000),
        b"GET / HTTP/1.1\r\n\r\n",
    )
    for content in half:
        line = stack.enter_context(socket.socket(socket.AF_UNIX))
        line.settimeout(1.0)
        line.connect(str(path))
        line.settimeout(0)
        with suppress(OSError):
            line.send(content)
    for kind in (zmq.PUSH, zmq.DEALER):
        for name in (b"", b"supervisor"):
            peer = stack.enter_context(context.socket(kind))
            peer.linger = 0
            if name:  # by a mechanism that nobody asks for
                peer.plain_username, peer.plain_password = name, b"guess"
            peer.connect(f"ipc://{path}")
            for _ in range(10):
                try:
                    peer.send_multipart([secrets.token_bytes(500)] * 3, zmq.DONTWAIT)
                except zmq.Again:
                    break


@pytest.mark.untraced
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_strangers_at_every_socket_change_nothing_of_what_is_sent(folder: Path) -> None:
    """Not of tensors of all kinds, which here do not go by shared memory."""
    options = sets(
        "model.factory=bad:all_kinds",
        "cluster.shared_memory=false",
        "algorithm.batch_size=5000",
        "output.directory=runs/größe und",
        "stop.seconds=2 s",
    )
    job = (str(folder / "tiny.toml"),)
    with train(folder, *options, *LONG, run="größe und", job=job) as command:
        poll(command.is_training, seconds=60.0)
        assert not listening([command.process.pid, *alive(command.all_pids())])
        (memory,) = command.shared_memory()
        sockets = [path for path in memory.iterdir() if path.is_socket()]
        assert len(sockets) == 4  # supervisor, shard, replica, evaluator
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with ExitStack() as stack:
            stack.callback(context.destroy, 0)
            for path in sockets:
                throw_at(path, stack, context)
            assert command.wait() == 0, command.output
        assert_nothing_is_left(command)
        assert (command.run / "model.safetensors").is_file()


# ------------------------------------------------------------------- ends, at any time


def end(command: Command, number: signal.Signals, *, code: int) -> None:
    begun = time.monotonic()
    command.signal(number)
    assert command.wait() == code, command.output
    # Two seconds is the promise; the curve is drawn by a machine that has other work.
    assert time.monotonic() - begun < 5.0
    assert_nothing_is_left(command)


@pytest.mark.soak
def test_a_signal_before_the_training_leaves_nothing(folder: Path) -> None:
    prepare = sets("data.train.factory=preparing:points", "output.directory=runs/a")
    check_it = sets("model.factory=bad:slow", "output.directory=runs/b")
    with train(folder, *prepare, run="a") as first, train(folder, *check_it, run="b") as second:
        poll((folder / "preparing").exists, seconds=60.0)
        end(first, signal.SIGINT, code=130)
        poll((folder / "trying").exists, seconds=60.0)
        end(second, signal.SIGTERM, code=143)
    assert not list((folder / "runs").iterdir())


@pytest.mark.soak
def test_a_run_that_is_running_ended_or_killed_says_so_and_goes_on(folder: Path) -> None:
    def say(*arguments: str) -> str:
        done = ended(folder, COMMAND, *arguments)
        assert "Traceback" not in done.stderr
        return " ".join((done.stdout + done.stderr).split())

    assert "no run found in" in say("status")
    with train(folder, *LONG, *sets("cluster.patience=2 s")) as command:
        poll(command.is_training, seconds=60.0)
        poll(lambda: list(command.run.glob("snapshots/*/*")), seconds=60.0)
        assert f"process {command.process.pid}" in say("status")
        assert "is still running" in say("train", "--resume", "runs/tiny")
        left = command.shared_memory()
        command.signal(signal.SIGKILL)
        command.wait()
        assert "its supervisor was killed, and its roles train on" in say("status")
        poll(lambda: not alive(command.all_pids()), seconds=60.0)
    assert "not running, and did not end properly" in say("status")
    assert "no such directory" in say("status", "runs/nowhere")
    with train(folder, "--resume", "runs/tiny", *LONG, job=()) as again:
        poll(lambda: again.status().get("pid") == again.process.pid, seconds=60.0)
        assert not any(path.exists() for path in left)  # swept
        end(again, signal.SIGINT, code=130)
    assert_snapshots_are_whole(folder / "runs" / "tiny")
    assert "interrupted" in say("status")


# ------------------------------------------------------------------------ the library


def test_the_library_is_light_to_import_and_tells_mistakes_as_the_command_does() -> None:
    code = "import sys, distbelief; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
    rule = distbelief.Adagrad(learning_rate=0.1)
    with pytest.raises(JobError, match="use 1 to 4096"):
        distbelief.ParameterServer([], rule=rule, shards=1 << 40)
    with pytest.raises(JobError, match="no parameters are given"):
        distbelief.ParameterServer([], rule=rule)


@pytest.mark.soak
def test_wrong_use_of_a_loop_is_told_and_none_of_it_hangs() -> None:
    net = nn.Linear(4, 3)
    rule = distbelief.Adagrad(learning_rate=0.1)
    nobody = f"tcp://127.0.0.1:1?secret={'5f' * 32}&run=a&shards=1"

    def refused(parameters: object, **options: object) -> str:
        begun = time.monotonic()
        with pytest.raises(DistBeliefError) as caught:
            distbelief.DownpourSGD(parameters, **options)  # type: ignore[arg-type]
        assert time.monotonic() - begun < 10.0
        return str(caught.value)

    assert "is no address" in refused(net.parameters(), server="127.0.0.1:80")
    assert "is no address" in refused(net.parameters(), server=nobody + "9" * 12)
    assert "n_fetch is 0" in refused(net.parameters(), server=nobody, n_fetch=0)
    said = refused(net.parameters(), server=nobody, timeout_seconds=0.3)
    assert "no answer within 0.3 s" in said
    with pytest.raises(JobError, match=r"use one, as distbelief\.SGD"):
        distbelief.ParameterServer(net.parameters(), rule="sgd")  # type: ignore[arg-type]
    server = distbelief.ParameterServer(net.parameters(), rule=rule, shards=2)
    with server:
        other = refused([net.weight], server=server.address)
        assert other.count("refuses this client: it has") == 1
        optimizer = distbelief.DownpourSGD(
            net.parameters(), server=server.address, timeout_seconds=5.0
        )
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.close()
        with pytest.raises(DistBeliefError, match="is closed"):
            optimizer.step()
        last = distbelief.DownpourSGD(net.parameters(), server=server.address)
    with pytest.raises(DistBeliefError, match="the server has ended") as caught:
        last.step()
    assert str(caught.value).count("the server has ended") == 1
