"""A supervisor's node answers, whatever becomes of its files and its terminal."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from rich.console import Console
from typing_extensions import override

from distbelief.config.job import StopTable
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.run.directory import RunDirectory
from distbelief.job.run.metrics_file import read_metrics
from distbelief.job.trainer import Trainer
from distbelief.protocol import HeartbeatAck, role as rl
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.transport.node import RoleRunner
from distbelief.transport.shared_memory import FileMemory
from tests.distbelief.jobs import speech
from tests.links import link


PATIENCE_SECONDS = 30.0
N_ROUNDS = 50


class Echo:
    """Sends itself messages, and says so in its log, then ends."""

    accepts = rl.ALL_MESSAGES

    def __init__(self) -> None:
        self.n_answered = 0

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        del now
        self.n_answered += isinstance(event, rl.Received)
        if self.n_answered == N_ROUNDS:
            return [rl.Exit()]
        said = rl.Report(text=f"round {self.n_answered}")
        return [said, rl.Send(receiver=rl.SUPERVISOR, message=HeartbeatAck())]

    def status(self) -> tuple[str, dict[str, float]]:
        return "echoing", {}


class Terminal(StringIO):
    """Somebody has stopped it, or `less` shows the first page of it."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()
        self.answers.set()

    @override
    def write(self, text: str) -> int:
        assert self.answers.wait(2 * PATIENCE_SECONDS)
        return super().write(text)


class Desk:
    """One run whose node ticks as a job's does; nothing of it is real but its files."""

    def __init__(self, run: RunDirectory, stack: ExitStack) -> None:
        self.run = run
        self.terminal = Terminal()
        console = Console(file=self.terminal)
        launcher = LocalLauncher()  # it has started nothing
        stack.callback(launcher.close)
        memory = FileMemory.make(root=run.path)
        stack.callback(memory.remove_all)
        self._trainer = Trainer(speech(), run, memory=memory, launcher=launcher, console=console)
        self.log = self._trainer._log
        self._trainer._metrics.open()
        stack.callback(self._trainer._metrics.close)
        stop = StopRules(StopTable(epochs=1), n_train=1)
        self._supervisor = Supervisor(SupervisorConfig(roster=(("shard-0", "shard"),), stop=stop))
        self._supervisor._records.append(self._supervisor.view(0.0))
        sockets = Path(stack.enter_context(TemporaryDirectory()))
        self._transport = stack.enter_context(link(rl.SUPERVISOR, sockets))
        self._transport.connect(rl.SUPERVISOR, 1, self._transport.endpoint)

    def answer(self, *, until: Callable[[], None]) -> int:
        """Run a role that has much to answer; then let what hangs go on.

        Returns:
            How many messages it answered while something hung.
        """
        echo = Echo()
        late = threading.Timer(PATIENCE_SECONDS, until)
        late.start()
        with self.log.in_threads():
            node = RoleRunner(echo, transport=self._transport, log=self.log.log)
            error = node.run(partial(self._trainer.tick, self._supervisor), tick_seconds=0.0)
            hung = late.is_alive()
            late.cancel()
            until()
        late.join()
        assert error is None
        return echo.n_answered if hung else 0


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(stack.enter_context(RunDirectory.create(tmp_path / "run")), stack)


def test_nobody_waits_for_a_terminal_that_takes_nothing(desk: Desk) -> None:
    """`train | less`: as soon as the pipe was full, no role had an answer any more."""
    desk.terminal.answers.clear()
    assert desk.answer(until=desk.terminal.answers.set) == N_ROUNDS
    assert "starting" in desk.terminal.getvalue()


@pytest.mark.parametrize("name", ["status.tmp", "logs/supervisor.log"])
def test_nobody_waits_for_a_run_directory_that_hangs(desk: Desk, name: str) -> None:
    """A pipe hangs whoever opens it to write: as a disk does that is gone for a while.

    After 22 s all roles had ended, for nobody had answered them.
    """
    pipe = desk.run.path / name
    os.mkfifo(pipe)
    readers: list[int] = []

    def read() -> None:
        readers.append(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))

    try:
        assert desk.answer(until=read) == N_ROUNDS
    finally:
        for reader in readers:
            os.close(reader)
    assert len(read_metrics(desk.run.metrics_file)) == 1  # nothing is lost of them


def test_what_was_written_last_is_on_the_disk_at_the_end(desk: Desk) -> None:
    assert desk.answer(until=lambda: None) == N_ROUNDS
    log = desk.run.log_file(rl.SUPERVISOR).read_text().splitlines()
    assert log[-1].endswith(f"round {N_ROUNDS - 1}")
    assert len(log) == N_ROUNDS
    status = desk.run.read_status()
    assert status is not None
    assert status.name == "speech-demo"
    assert len(read_metrics(desk.run.metrics_file)) == 1
