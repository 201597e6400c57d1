import errno
import io
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import load_file
from typing_extensions import override

from distbelief.config.load import parse_job
from distbelief.core.errors import StorageError
from distbelief.core.signals import EXIT_CODES
from distbelief.job.hosts.bootstrap import JobAddress
from distbelief.job.hosts.join_server import JoinServer
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.directory import RunDirectory
from distbelief.job.run.result import Run
from distbelief.job.run.summary import Summary, final_table
from distbelief.job.trainer import Trainer
from distbelief.parameter_server.layout import Layout
from distbelief.protocol.role import Snapshot
from distbelief.transport.keys import new_secret
from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.shared_memory import FileMemory
from distbelief.worker.local_executor import FlatModel
from tests.distbelief.examples import net
from tests.distbelief.jobs import small


EXAMPLES = "tests.distbelief.examples"
JOB = small(f"{EXAMPLES}:net", f"{EXAMPLES}:frames") + "[cluster]\nshards = 2\n"


class Full(io.StringIO):
    """A file on a full disk."""

    @override
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


class Desk:
    """A run that is about to end, and what it has said on the screen."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.run = stack.enter_context(RunDirectory.create(path / "run"))
        self.job = parse_job(JOB, path=path / "job.toml")
        memory = FileMemory.make(root=path)
        stack.callback(memory.remove_all)
        launcher = LocalLauncher()  # it has started nothing
        stack.callback(launcher.close)
        self.console = Console(file=io.StringIO(), record=True, width=400)
        self.layout = Layout.of(FlatModel(net()).specs(), n_shards=2)
        self.life = Trainer(
            self.job, self.run, memory=memory, launcher=launcher, console=self.console
        )
        self.life._layout = self.layout

    def save(self, *shards: int) -> None:
        store = CheckpointStore(self.run.snapshots, report=pytest.fail)
        for k in shards:
            values = np.ones(self.layout.shard_size(k), np.float32)
            snapshot = Snapshot(label="00001", arrays={"values": values}, facts={})
            store.save(f"shard-{k}", snapshot)

    def screen(self) -> str:
        return self.console.export_text()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with ExitStack() as stack:
        yield Desk(tmp_path, stack)


def test_a_session_begins_with_a_line_in_the_log(desk: Desk) -> None:
    with desk.life:
        pass
    log = desk.run.log_file("supervisor").read_text()
    assert log.endswith(f"supervisor info: begins in {desk.run.path}\n")


def test_a_log_that_finds_no_room_ends_nothing_and_is_reported_once(desk: Desk) -> None:
    desk.run.logs.rmdir()  # now nothing can be written there
    desk.life._log.log("info", "a word")
    desk.life._log.warn("another")
    (line,) = desk.screen().splitlines()
    log = desk.run.log_file("supervisor")
    assert line.startswith(f"cannot write {log}: ")
    assert line.endswith("The job continues without this log")


def test_a_log_that_all_may_read_has_no_secret_in_it(desk: Desk) -> None:
    """The run directory is open to others; whoever has the address is let in."""
    secret = new_secret()
    address = JobAddress(host="10.0.0.1", port=7700, secret=secret)
    hosting = JoinServer(reach=ListenConfig(host="10.0.0.1", secret=secret))
    with ExitStack() as lent:
        desk.life._accept_hosts(hosting, address, lent)
        file = desk.run.path / "address"
        assert JobAddress.parse(file.read_text().strip()).secret == secret
        assert file.stat().st_mode & 0o777 == 0o600
    assert not file.exists()
    assert secret in desk.screen()
    log = desk.run.log_file("supervisor").read_text()
    assert str(file) in log
    assert secret not in log


def test_ctrl_c_while_the_curve_is_drawn_loses_the_curve_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was done, and `minimize` raised KeyboardInterrupt in place of its result."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("distbelief.job.trainer.draw_curve", interrupted)
    desk.life.draw()
    assert not desk.life.exit_code


def test_a_screen_that_finds_no_room_ends_nothing_either(desk: Desk) -> None:
    """`distbelief train ... > a.log`, on the same disk."""
    desk.console.file = Full()
    desk.run.logs.rmdir()
    desk.life._log.log("info", "a word")


def test_what_every_shard_has_kept_becomes_the_model(desk: Desk) -> None:
    desk.save(0, 1)
    summary = desk.life.conclude()
    assert desk.life.exit_code == 0
    assert summary.error is None
    assert summary.model_error is None
    tensors = load_file(desk.run.model_file)
    assert tensors.keys() == net().state_dict().keys()


def test_without_a_checkpoint_of_each_shard_no_model_is_a_failure(desk: Desk) -> None:
    desk.save(0)
    desk.run.model_file.write_bytes(b"of an earlier life")
    summary = desk.life.conclude()
    why = (
        f"no model was written: there is no intact checkpoint of shard-1 in "
        f"{desk.run.snapshots}, and {desk.run.model_file} is from an earlier session"
    )
    assert summary.error == summary.model_error == why
    assert desk.life.exit_code == 1
    assert msgspec.json.decode(desk.run.summary_file.read_bytes(), type=Summary) == summary
    status = desk.run.read_status()
    assert status is not None
    assert (status.ended, status.error) == (True, why)
    desk.console.print(final_table(summary))
    assert desk.screen().count(why) == 1
    with pytest.raises(StorageError, match="no intact checkpoint of shard-1"):
        _ = Run(desk.run.path, summary, 1, desk.job).model


def test_who_interrupts_before_the_first_checkpoint_is_told_so_too(desk: Desk) -> None:
    desk.life.exit_code = 130
    summary = desk.life.conclude()
    assert desk.life.exit_code in EXIT_CODES.values()
    assert summary.error is None
    assert summary.model_error is not None
    desk.console.print(final_table(summary))
    assert "no intact checkpoint of shard-0, shard-1" in desk.screen()


@pytest.mark.parametrize("name", ["model_file", "summary_file"])
def test_a_last_file_that_cannot_be_written_costs_no_other(desk: Desk, name: str) -> None:
    desk.save(0, 1)
    blocked: Path = getattr(desk.run, name)
    blocked.mkdir()
    desk.console.print(final_table(desk.life.conclude()))
    assert desk.life.exit_code == 1
    assert desk.screen().count(f"cannot write {blocked}: ") == 1
    files = {desk.run.model_file, desk.run.summary_file, desk.run.status_file}
    assert all(file.is_file() for file in files - {blocked})


@pytest.mark.parametrize("became", ["nothing", "another directory", "a file"])
def test_a_run_directory_that_vanishes_is_reported_and_holds_not_everything(
    desk: Desk, became: str
) -> None:
    """The job ended with "everything in DIR" and status 0; or with "an unexpected error"."""
    path = desk.run.path
    path.rename(path.with_name("elsewhere"))
    if became == "another directory":
        path.mkdir()
    elif became == "a file":
        path.touch()
    with desk.life:
        summary = desk.life.conclude()
    assert desk.life.exit_code == 1
    shown = Console(record=True, width=1000, file=io.StringIO())
    shown.print(final_table(summary))
    end = shown.export_text()
    assert f"not everything is in {path}: {path} was moved or removed" in end
    assert "everything in" not in end
