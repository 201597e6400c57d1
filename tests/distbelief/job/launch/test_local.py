"""The launcher and its fork server, with children that do nothing of use."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest

from distbelief.core import files
from distbelief.job.launch import forkserver, local
from distbelief.job.launch.local import LocalLauncher
from distbelief.protocol.role import Address, Event, PeerJoined, PeerLost
from tests.processes.commands import alive, poll
from tests.processes.nursery import spawned


pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(120)]

Server: TypeAlias = "subprocess.Popen[bytes]"

ONE, TWO = Address("shard-0"), Address("shard-1")


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalLauncher]:
    """A launcher whose children fail at once: there is no spec.

    Its fork server is a fork of this process, which has imported all that it needs.
    """
    monkeypatch.setattr("distbelief.job.launch.local._spawned", spawned)
    with LocalLauncher() as launcher:
        launcher.serve(spec=tmp_path / "none.json", log_of=lambda name: tmp_path / f"{name}.log")
        yield launcher


@pytest.mark.parametrize(("is_clean", "how"), [(True, "_forked"), (False, "_spawned")])
def test_a_server_is_forked_only_from_a_process_that_is_clean(
    monkeypatch: pytest.MonkeyPatch, how: str, *, is_clean: bool
) -> None:
    server, used = spawned(), list[str]()

    def made_by(name: str) -> local._Server:
        used.append(name)
        return server

    for name in ("_forked", "_spawned"):
        monkeypatch.setattr(local, name, partial(made_by, name))
    monkeypatch.setattr(forkserver, "is_clean", lambda: is_clean)
    with LocalLauncher(forks=True):
        assert used == [how]


def next_losses(launcher: LocalLauncher, others: list[Event] | None = None) -> list[PeerLost]:
    losses: list[PeerLost] = []
    while not losses:
        ready, _, _ = select.select([launcher.fileno()], [], [], 60.0)
        assert ready, "nothing happened"
        events = launcher.events()
        losses = [e for e in events if isinstance(e, PeerLost)]
        if others is not None:
            others += [e for e in events if e not in losses]
    return losses


def test_a_failure_is_reported_once_with_its_log(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.launch(ONE, 3)
    begun: list[Event] = []
    (lost,) = next_losses(launcher, begun)
    assert (lost.peer, lost.incarnation) == (ONE, 3)
    assert lost.reason == f"ended with status 1 (see {tmp_path / 'shard-0.log'})"
    assert begun == [PeerJoined(peer=ONE, incarnation=3)]
    assert "none.json" in (tmp_path / "shard-0.log").read_text()
    assert launcher.n_ended == 1
    assert launcher.events() == []
    launcher.terminate(ONE)  # it is gone already: nothing happens
    launcher.terminate(TWO)  # it never was
    launcher.close()
    launcher.close()  # no harm


@pytest.mark.untraced
def test_a_fork_server_that_dies_ends_its_children_and_is_replaced(launcher: LocalLauncher) -> None:
    launcher.launch(ONE, 1)
    next_losses(launcher)
    server = launcher._server
    assert server is not None
    launcher._alive[TWO] = 1  # as if it ran
    server.kill()
    (lost,) = next_losses(launcher)
    assert (lost.peer, lost.incarnation) == (TWO, 1)
    assert lost.reason == "ended with the process that started it"
    launcher.launch(ONE, 2)
    (lost,) = next_losses(launcher)
    assert (lost.peer, lost.incarnation) == (ONE, 2)


def test_a_server_that_is_busy_importing_is_not_waited_for(
    launcher: LocalLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl+C while a job was about to try out its model took 5 s more: a process had
    been asked for, so the server, which had not heard of that yet, was waited for."""
    (tmp_path / "endless.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(forkserver, "MODULES_OF_RANKS", ("endless",))
    monkeypatch.setattr("distbelief.job.launch.local.CLOSE_SECONDS_MAX", 3600.0)
    # A server that starts now has the path of this moment.
    launcher.close()
    with LocalLauncher() as slow:
        slow.serve(
            spec=tmp_path / "none.json",
            log_of=lambda name: tmp_path / f"{name}.log",
            has_ranks=True,
        )
        slow.launch(ONE, 1)


CHILD = """
import os, sys, signal, time
from distbelief.job.launch import forkserver
from distbelief.core.signals import ABANDONED

def child(name, incarnation, spec):
    stubborn = name == "stubborn"
    asked = signal.SIG_IGN if stubborn else lambda *_: None
    signal.signal(ABANDONED, asked)
    print(name, incarnation, spec, sys.stdin.read() == "",
          signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
          "colorsys" in sys.modules, flush=True)
    signal.pause()
    print("saved", flush=True)
    return 0

forkserver.SAVE_SECONDS_MAX = 2.0
forkserver._program = lambda _program: child
signal.signal(signal.SIGINT, signal.SIG_IGN)
forkserver.ForkServer(requests=0, reports=1).serve()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A fork server without torch, whose children wait until they are asked to end."""
    path = {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | path,
    ) as server:
        yield server
        server.kill()


def ask(server: Server, request: forkserver.Request) -> None:
    assert server.stdin is not None
    server.stdin.write(msgspec.json.encode(request) + b"\n")
    server.stdin.flush()


def answer(server: Server) -> forkserver.Report:
    assert server.stdout is not None
    return msgspec.json.decode(server.stdout.readline(), type=forkserver.Report)  # type: ignore[no-any-return]


def close(server: Server, pids: list[int]) -> None:
    """Ask for nothing any more; the server ends then, and all its children."""
    assert server.stdin is not None
    server.stdin.close()
    assert server.wait(30.0) == 0
    assert alive(pids) == []


def start(server: Server, folder: Path, name: str, *, patience: float | None = None) -> int:
    """Start a child; return its process once it has written to its log."""
    log, spec = folder / f"{name}.log", "S" if patience is None else str(folder / "spec")
    request = forkserver.Start(
        program="role", name=name, incarnation=2, spec=spec, log=str(log), patience=patience
    )
    ask(server, request)
    begun = answer(server)
    assert isinstance(begun, forkserver.Begun)
    poll(lambda: log.exists() and log.read_text().endswith("\n"))
    return begun.pid


@pytest.mark.parametrize("imports", [False, True])
def test_a_child_has_its_own_log_what_the_server_imported_and_does_not_see_ctrl_c(
    server: Server, tmp_path: Path, *, imports: bool
) -> None:
    """All 32 machines of a split job imported torch's compiler, each on its own.

    On two cores that took them four minutes, in which some were taken for dead.
    """
    if imports:
        ask(server, forkserver.Import(modules=("colorsys", "there_is_no_such_module")))
    start(server, tmp_path, "replica-0.0")
    assert (tmp_path / "replica-0.0.log").read_text() == f"replica-0.0 2 S True True {imports}\n"


def test_a_module_with_a_thread_is_left_to_the_children(server: Server, tmp_path: Path) -> None:
    """A fork of a process with threads may find a lock held by one that it lacks."""
    module = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
    (tmp_path / "threads.py").write_text(module)
    ask(server, forkserver.Import(modules=("threads",)))
    log = str(tmp_path / "shard-0.log")
    start = forkserver.Start(program="role", name="shard-0", incarnation=2, spec="S", log=log)
    ask(server, start)
    assert isinstance(answer(server), forkserver.Begun)
    ended = answer(server)  # by a server without the thread: `role` has no spec
    assert isinstance(ended, forkserver.Ended)
    assert (ended.name, ended.status) == ("shard-0", 1)
    assert len(list(Path(f"/proc/{server.pid}/task").iterdir())) == 1


def test_what_an_import_prints_is_seen_by_nobody(tmp_path: Path) -> None:
    """It would stand in the job's screen, and on standard output among the reports."""
    (tmp_path / "loud.py").write_text("import sys\nprint('warned', file=sys.stderr)\n")
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    ) as loud:
        request = forkserver.Import(modules=("loud",))
        out, err = loud.communicate(msgspec.json.encode(request) + b"\n", timeout=60.0)
    assert (out, err) == (b"", b"")


def test_children_are_ended_by_name(server: Server, tmp_path: Path) -> None:
    one = start(server, tmp_path, "shard-0")
    two = start(server, tmp_path, "shard-1")
    ask(server, forkserver.Kill(name="shard-0"))
    ended = answer(server)
    assert isinstance(ended, forkserver.Ended)
    assert (ended.name, ended.incarnation, ended.status) == ("shard-0", 2, -9)
    assert alive([one, two]) == [two]


def test_children_end_when_nobody_asks_any_more(server: Server, tmp_path: Path) -> None:
    """They were killed, and what a shard had acknowledged since it saved was lost.

    One that does not end when asked is ended by force.
    """
    pids = [start(server, tmp_path, f"shard-{k}") for k in range(3)]
    close(server, [*pids, start(server, tmp_path, "stubborn")])
    for k in range(3):
        assert (tmp_path / f"shard-{k}.log").read_text().endswith("saved\n")


def test_told_to_leave_the_server_ends_children_at_once(server: Server, tmp_path: Path) -> None:
    pid = start(server, tmp_path, "shard-0")
    ask(server, forkserver.Leave())
    close(server, [pid])
    assert "saved" not in (tmp_path / "shard-0.log").read_text()


def test_another_launcher_takes_over_the_children_of_one_that_was_killed(
    server: Server, tmp_path: Path
) -> None:
    role = start(server, tmp_path, "shard-0", patience=60.0)
    check = start(server, tmp_path, "check")
    assert server.stdin is not None
    server.stdin.close()
    poll(lambda: not alive([check]))  # it is of no use to another
    for _ in range(2):  # the second after the first was killed, too
        launcher = LocalLauncher(log_of=lambda name: tmp_path / f"{name}.log")
        poll(partial(launcher.adopt, tmp_path))
        assert (launcher.pid(ONE), alive([role])) == (role, [role])
        with pytest.raises(BlockingIOError):  # nobody sweeps it
            files.lock(tmp_path)
        vars(launcher)["_server"].stdin.close()
        vars(launcher)["_server"].stdout.close()

    def is_terminated() -> bool:  # by the user
        server.send_signal(signal.SIGTERM)  # too early if it has not noticed the launcher's end
        return server.poll() is not None

    poll(is_terminated)
    assert (tmp_path / "shard-0.log").read_text().endswith("saved\n")
    os.close(files.lock(tmp_path))


def test_a_launcher_that_took_over_starts_and_ends_processes(
    server: Server, tmp_path: Path
) -> None:
    role = start(server, tmp_path, "shard-0", patience=60.0)
    assert server.stdin is not None
    server.stdin.close()
    with LocalLauncher(log_of=lambda name: tmp_path / f"{name}.log") as launcher:
        poll(lambda: launcher.adopt(tmp_path))
        launcher.terminate(ONE)
        (lost,) = next_losses(launcher)
        assert (lost.peer, lost.incarnation, alive([role])) == (ONE, 2, [])
        launcher.launch(TWO, 5)
        poll(lambda: launcher.events() == [PeerJoined(peer=TWO, incarnation=5)])
        pid = launcher.pid(TWO)
        assert pid is not None
    assert not alive([pid])
    assert server.wait(30.0) == 0


def test_sigterm_is_the_supervisors_business_while_it_lives(server: Server, tmp_path: Path) -> None:
    """A service manager sends it to all: shards left before they could report."""
    pids = [start(server, tmp_path, f"shard-{k}") for k in range(2)]
    for pid in (*pids, server.pid):
        os.kill(pid, signal.SIGTERM)
    pids.append(start(server, tmp_path, "shard-2"))
    assert alive(pids) == pids
    assert "saved" not in (tmp_path / "shard-0.log").read_text()
    close(server, pids)


def test_children_end_with_the_server_however_it_ends(server: Server, tmp_path: Path) -> None:
    pids = [start(server, tmp_path, f"shard-{k}") for k in range(3)]
    os.kill(server.pid, signal.SIGKILL)
    poll(lambda: not alive(pids), seconds=10.0)
