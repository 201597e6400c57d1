"""`fit` with real processes: from scripts, notebooks and threads, beside plain torch."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from typing_extensions import override

import distbelief
from distbelief.core.errors import JobError
from distbelief.supervisor.view import JobView
from distbelief.task.imports import OBJECTS
from tests.processes.commands import COMMAND, ended, printed


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.usefixtures("undrawn"),
    pytest.mark.timeout(180),
]

ADAGRAD = distbelief.Adagrad(learning_rate=0.05)


def problem(n: int = 1600) -> tuple[Tensor, Tensor]:
    """Three classes that lines separate."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 20, generator=generator)
    return x, (x @ torch.randn(20, 3, generator=generator)).argmax(1)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3))


def accuracy(module: nn.Module) -> float:
    x, y = problem()
    with torch.no_grad():
        return float((module(x).argmax(1) == y).float().mean())


def is_role(name: str) -> bool:
    """Whether this is the process of a role."""
    return Path("/proc/self/fd/1").readlink().name == f"{name}.log"


class Noted(Dataset[tuple[Tensor, Tensor]]):
    """Notes which samples replica 0 reads, in which order."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.x, self.y = problem()

    def __len__(self) -> int:
        return len(self.x)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        if is_role("replica-0"):
            with self.file.open("a") as file:
                file.write(" ".join(map(str, indices)) + "\n")
        return self.x[indices], self.y[indices]


@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        ({"name": "sgd", "learning_rate": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
        ({"name": "AdamW", "lr": 1e-3}, lambda p: torch.optim.AdamW(p, lr=1e-3)),
    ],
)
def test_one_replica_and_one_shard_are_plain_torch(
    tmp_path: Path, rule: dict[str, object], optimizer: Callable[[object], torch.optim.Optimizer]
) -> None:
    plain, data = net(), Noted(tmp_path / "order")
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    run = distbelief.fit(
        plain,
        data,
        loss=loss,
        batch_size=8,
        rule=rule,
        overrides={"algorithm.blocking": True},
        directory=tmp_path / "run",
        show=False,
    )
    assert (run.exit_code, run.summary.samples) == (0, 1600)
    batches = [[*map(int, line.split())] for line in data.file.read_text().splitlines()]
    used = batches[:200]  # what is read ahead is not used
    assert sorted(index for batch in used for index in batch) == [*range(1600)]
    own = optimizer(plain.parameters())
    for batch in used:
        own.zero_grad()
        loss(plain(data.x[batch]), data.y[batch]).backward()
        own.step()
    for one, other in zip(plain.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(one, other)


class Recurrent(nn.Module):
    """Has tensors that change in each forward, a counter, and what a copy must have of its own."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.lstm = nn.BatchNorm1d(20), nn.LSTM(4, 8, batch_first=True)
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))
        self.layers = [self.norm, self.last]
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        rows = self.layers[0](x).view(-1, 5, 4)
        return cast("Tensor", self.layers[1](self.lstm(rows)[0][:, -1]))


# The trial steps before the start went into the buffers with which training began.
def test_buffers_begin_and_end_as_in_plain_torch(tmp_path: Path) -> None:
    plain, data, loss = Recurrent(), Noted(tmp_path / "order"), nn.CrossEntropyLoss()
    run = distbelief.fit(
        plain,
        data,
        loss=loss,
        batch_size=8,
        rule={"name": "SGD", "lr": 0.1},
        epochs=0.1,
        overrides={"algorithm.blocking": True},
        directory=tmp_path / "run",
        show=False,
    )
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    for line in data.file.read_text().splitlines()[:20]:
        batch = [*map(int, line.split())]
        own.zero_grad()
        loss(plain(data.x[batch]), data.y[batch]).backward()
        own.step()
    assert run.model.steps == 20
    for (name, one), other in zip(
        plain.state_dict().items(), run.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, other, msg=name)


PROGRAM = """
import distbelief
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, hidden):  # which it does not keep
        super().__init__()
        self.first, self.last = nn.Linear(20, hidden), nn.Linear(hidden, 3)
        self.act = lambda x: x.tanh()

    def forward(self, x):
        return self.last(self.act(self.first(x)))

class Rows:
    def __init__(self, x, y):
        self.rows = [*zip(x, y)]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, index):
        return self.rows[index]

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)

class Hits:
    def reset(self):
        self.n = 0
    def update(self, outputs, targets):
        self.n += int((outputs.argmax(1) == targets).sum())
    def compute(self):
        return self.n

torch.manual_seed(0)
x = torch.randn(2000, 20)
y = (x @ torch.randn(20, 3)).argmax(1)
run = distbelief.fit(Net(32), Rows(x, y), loss=loss, batch_size=16, replicas=2, epochs=3,
    rule=distbelief.Adagrad(learning_rate=0.05), test=Rows(x[:500], y[:500]), metrics=Hits(),
    directory="run", show=False)
assert run.summary.metric > 450, run
print("hits" if (run.model(x).argmax(1) == y).sum() > 1800 else run)
"""


# As a notebook does: pieces of text, in a namespace of no file, beside a thread.
HEAD, TAIL = PROGRAM.split("torch.manual_seed", 1)
KERNEL = f"""
import asyncio, io, sys, threading, types
cells = {[HEAD, f"torch.manual_seed{TAIL}"]!r}
threading.Thread(target=threading.Event().wait, daemon=True).start()
said, sys.stdout = sys.stdout, io.StringIO()
main = sys.modules['__main__'] = types.ModuleType('__main__')
async def run():
    for number, cell in enumerate(cells):
        exec(compile(cell, f'<cell {{number}}>', 'exec'), main.__dict__)
asyncio.run(run())
said.write(sys.stdout.getvalue())
"""


@pytest.mark.parametrize("text", [PROGRAM, KERNEL], ids=["script", "cell"])
def test_classes_of_the_main_program_reach_the_processes(tmp_path: Path, text: str) -> None:
    assert printed(tmp_path, text) == "hits\n"


@pytest.mark.parametrize("way", ["-c", pytest.param("-", marks=pytest.mark.soak)])
def test_so_do_those_of_a_program_without_a_file(tmp_path: Path, way: str) -> None:
    words = [sys.executable, way, *[PROGRAM] * (way == "-c")]
    done = subprocess.run(
        words, input=PROGRAM, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=150
    )
    assert done.stdout == "hits\n", done.stdout + done.stderr


def test_a_program_may_have_no_standard_output(tmp_path: Path) -> None:
    """Regression: 'NoneType' object has no attribute 'flush'."""
    program = (
        "import distbelief, torch; x = torch.randn(64, 2); "
        "run = distbelief.fit(torch.nn.Linear(2, 2), (x, x), loss='mse', batch_size=8, "
        "rule=distbelief.SGD(learning_rate=0.1), show=False, directory='run'); "
        "raise SystemExit(run.summary.samples)"
    )
    closed = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, program],
        cwd=tmp_path,
        check=False,
    )
    assert closed.returncode == 64


def test_two_replicas_train_a_copy_and_the_run_has_what_they_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, (x, y) = net(), problem()
    before = deepcopy(module.state_dict())
    run = distbelief.fit(
        module,
        (x.numpy(), y.numpy()),
        loss="cross_entropy",
        batch_size=16,
        rule=ADAGRAD,
        replicas=2,
        shards=2,
        epochs=3,
        test=(x, y),
        metrics=["accuracy", "loss"],
        directory=tmp_path / "run",
        overrides={"output.keep": "best", "evaluation.every": "1 epoch"},
    )
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert accuracy(run.model) == pytest.approx(run.summary.metric or 0.0)
    assert accuracy(run.model) > 0.85
    assert accuracy(run.best_model) == pytest.approx(run.summary.best_metric or 0.0)
    assert not run.model.training
    assert run.model is not run.best_model
    rows = run.metrics
    assert [row["samples"] for row in rows] == sorted(int(str(row["samples"])) for row in rows)
    assert rows[-1]["metric"] == run.summary.metric
    assert repr(run).startswith(f"<Run {tmp_path / 'run'}: 4,800 samples, loss 0.")
    assert "held-out accuracy 0." in repr(run)
    assert "run" in capsys.readouterr().out  # where the results are
    assert not OBJECTS


def test_a_directory_is_made_and_kept_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = distbelief.fit(net(), problem(), loss="cross_entropy", batch_size=16, rule=ADAGRAD)
    assert run.directory.parent == tmp_path
    assert (run.directory / "model.safetensors").is_file()
    assert str(run.directory) in capsys.readouterr().out.replace("\n", "")


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    @override
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(*problem(), strict=True)

    def __len__(self) -> int:
        return 1600


@pytest.mark.parametrize("data", [DataLoader(TensorDataset(*problem()), batch_size=8), Stream()])
def test_loaders_and_streams_are_data_too(tmp_path: Path, data: object) -> None:
    run = distbelief.fit(
        net(),
        data,
        loss="cross_entropy",
        batch_size=8,
        rule=ADAGRAD,
        epochs=2,
        directory=tmp_path / "run",
        show=False,
    )
    assert accuracy(run.model) > 0.85


class Fragile(Noted):
    @override
    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        if is_role("replica-1"):
            raise OSError("the disk with the data is gone")
        return self.x[indices], self.y[indices]


def test_a_run_that_fails_raises_with_the_culprit(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"^fit: .*the disk with the data is gone.*run$") as raised:
        distbelief.fit(
            net(),
            Fragile(tmp_path / "order"),
            loss="cross_entropy",
            batch_size=16,
            rule=ADAGRAD,
            replicas=2,
            directory=tmp_path / "run",
            show=False,
        )
    assert "replica 1" in str(raised.value)
    assert not OBJECTS


def test_open_files_are_refused_in_the_check_rather_than_read_by_all(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(bytes(100))
    with (tmp_path / "rows").open("rb") as file:

        class Rows(Noted):
            @override
            def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
                file.seek(0)
                file.read(8)
                return super().__getitems__(indices)

        with pytest.raises(JobError, match="Bad file descriptor"):
            distbelief.fit(
                net(),
                Rows(tmp_path / "order"),
                loss="cross_entropy",
                batch_size=16,
                rule=ADAGRAD,
                directory=tmp_path / "run",
                show=False,
            )
        assert file.seek(0) == 0  # here it is open
    assert not (tmp_path / "run").exists()


def test_ctrl_c_ends_it_in_order_and_resume_goes_on(tmp_path: Path) -> None:
    pressed: list[int] = []

    def press(view: JobView) -> None:
        if view.samples > 3000 and not pressed:
            pressed.append(view.samples)
            os.kill(os.getpid(), signal.SIGINT)

    common = {
        "loss": "cross_entropy",
        "batch_size": 16,
        "rule": ADAGRAD,
        "show": False,
        "directory": tmp_path / "run",
    }
    first = distbelief.fit(net(), problem(), epochs=10_000, callbacks=[press], **common)  # type: ignore[arg-type] # options
    assert (first.exit_code, first.summary.stop_reason) == (130, "Ctrl+C")
    assert accuracy(first.model) > 0.6
    goal = first.summary.samples + 3200
    again = distbelief.fit(
        net(),
        problem(),
        resume=first.directory,
        epochs=goal / 1600,
        **common | {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},  # type: ignore[arg-type] # options
    )
    log = "".join(file.read_text() for file in first.directory.rglob("*.log"))
    assert "loss: cross_entropy before, :CrossEntropyLoss[ignore_index=-100, label_smoo" in log
    assert again.directory == first.directory
    assert again.summary.samples >= goal
    with pytest.raises(JobError, match="data"):
        distbelief.fit(net(), problem(800), resume=first.directory, **common)  # type: ignore[arg-type] # options
    done = ended(tmp_path, COMMAND, "train", "--resume", "run")
    assert "an object of the program that called distbelief.fit" in done.stderr + done.stdout


def test_a_program_that_has_computed_with_threads_may_fork(tmp_path: Path) -> None:
    """Regression: the child waited for threads of OpenMP that only its parent had."""
    before, found = torch.get_num_threads(), list[float]()
    torch.set_num_threads(2)
    try:
        torch.randn(600, 600).sin().matmul(
            torch.randn(600, 600, requires_grad=True)
        ).sum().backward()

        def work() -> None:
            run = distbelief.fit(
                net(),
                problem(),
                loss="cross_entropy",
                batch_size=400,
                rule=ADAGRAD,
                epochs=40,
                directory=tmp_path / "run",
                overrides={"cluster.threads": 2},
                show=False,
            )
            found.append(accuracy(run.model))

        work()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert min(found) > 0.8
    assert len(found) == 2


@pytest.mark.usefixtures("forked_roles")
def test_a_job_of_tables_is_trained_as_its_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    job = {
        "model": {"factory": "tiny:net"},
        "data": {"train": {"factory": "tiny:frames"}},
        "algorithm": {
            "name": "downpour",
            "loss": "cross_entropy",
            "batch_size": 20,
            "rule": ADAGRAD,
        },
        "stop": {"epochs": 5},
        "output": {"directory": folder / "runs" / "tables"},
    }
    run = distbelief.train(job, {"stop.epochs": 1, "cluster.shards": 2}, show=False)
    assert (run.summary.samples, run.summary.n_shards) == (2000, 2)
    again = distbelief.train("tiny.toml", {"stop.epochs": 1}, show=False)
    assert again.summary.samples == pytest.approx(2000, abs=200)
    overrides = {"data.train.factory": "tiny:fragile", "output.directory": "runs/fragile"}
    with pytest.raises(JobError, match=r"train: .*the disk with the data is gone.*runs/fragile"):
        distbelief.train("tiny.toml", overrides, show=False)
