"""`distbelief join`: machines come, die, leave, and are refused; the job goes on.

The other "machine" is another directory with keys of its own, and nothing shares memory.
"""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from distbelief.transport.keys import Allowed, KeyFiles
from tests.processes.commands import MODULE, SLOW, Command, alive, poll, sets, train, write_job
from tests.processes.nursery import Forked


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.untraced,
    pytest.mark.timeout(180),
]


@dataclass
class Machine:
    """One that joins, or has joined."""

    process: Forked

    @property
    def said(self) -> str:
        return self.process.said

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 60.0) -> int:
        self.process.communicate(seconds)
        return self.process.returncode


@dataclass(frozen=True)
class Land:
    """Two directories, as if on two machines."""

    here: Path
    there: Path

    @contextmanager
    def joined(
        self,
        command: Command,
        *options: str,
        cores: int = 1,
        allow: str = "tiny",
        has_keys: bool = True,
    ) -> Iterator[Machine]:
        """Let a machine join; nothing of it is left after the block."""
        find = find_address if has_keys else find_secret_address
        poll(lambda: find(command))
        words = ["join", find(command)]
        words += ["--keys", "keys"] if has_keys else []
        words += ["--cores", str(cores), "--allow-import", allow, *options]
        with Forked(words, folder=self.there, leads=True) as process:
            try:
                yield Machine(process)
            finally:
                with suppress(ProcessLookupError):  # it has ended
                    os.killpg(process.pid, signal.SIGKILL)


def find_address(command: Command) -> str:
    """Return where a job listens, without its key; "" as long as it says nothing."""
    found = re.findall(r'join "(tcp://[0-9.:]+)', command.told())
    return found[-1] if found else ""


def find_secret_address(command: Command) -> str:
    """Return where a job without key files listens; "" as long as it says nothing."""
    file = command.run / "address"
    return file.read_text().strip() if file.is_file() else ""


@pytest.fixture
def land(tmp_path: Path) -> Land:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        KeyFiles(folder / "keys").make()
    write_job(here)
    (there / "tiny.py").write_text(MODULE)
    allow(here, there, "host")
    allow(there, here, "server")
    return Land(here, there)


def allow(at: Path, whom: Path, role: str) -> None:
    key = KeyFiles(whom / "keys").pair().public
    KeyFiles(at / "keys").allow(Allowed(key=key, roles=(role,), name=role))


def listening(land: Land, *options: str, replicas: int) -> AbstractContextManager[Command]:
    listen = ("--listen", "tcp://127.0.0.1:0", "--keys", "keys")
    job = sets(f"cluster.replicas={replicas}", "cluster.shared_memory=false")
    return train(land.here, *listen, *job, *options)


def test_machines_are_refused_come_and_die(land: Land) -> None:
    """One job for all of it: to begin one takes most of the time. They leave in the next test."""
    options = (*SLOW, "--cores", "1")
    with listening(land, *options, replicas=2) as command:
        _refused(land, command)
        with land.joined(command) as machine:
            poll(lambda: command.told().count("replica 1: on ") == 1)
            command.trains()
            machine.kill()
            poll(lambda: "replica 1 lost with it" in command.told())
            command.trains()
        with land.joined(command) as machine:
            poll(lambda: command.told().count("replica 1: on ") == 2)
            command.trains()
            command.signal(signal.SIGINT)
            assert command.wait() == 130, command.output
            assert machine.wait() == 0, machine.said
    states = [host["state"] for host in command.summary()["hosts"]]
    assert sorted(states) == ["gone", "ready", "rejected", "rejected"]


def _refused(land: Land, command: Command) -> None:
    """With other data of the same number it trained on them; so it did with another loss."""
    other = MODULE.replace("manual_seed(seed)", "manual_seed(seed + 1)")
    (land.there / "tiny.py").write_text(other)
    with (
        land.joined(command, allow="experiments.speech") as for_imports,
        land.joined(command) as for_code,
    ):
        assert for_imports.wait() == 1, for_imports.said
        assert for_code.wait() == 1, for_code.said
        assert for_imports.said.count("--allow-import tiny") == 1  # it used to be printed twice
        assert "module tiny has another source here than where the job began" in for_code.said
    assert "cannot take part: [model] 'tiny:net'" in command.told()
    (land.there / "tiny.py").write_text(MODULE)


@pytest.mark.soak
def test_a_job_ends_and_so_does_the_machine_that_joined(land: Land) -> None:
    start = listening(land, "--hosts", "1", "--cores", "1", replicas=2)
    with start as command, land.joined(command) as machine:
        assert command.wait() == 0, command.output
        assert machine.wait() == 0, machine.said
    assert re.search(r"replica 1: on \S+ \(host-", command.output)
    assert len(list((land.there / "runs" / "joined").rglob("replica-1.log"))) == 1
    assert not command.pids("replica-1")


@pytest.mark.soak
@pytest.mark.parametrize("placement", ["here", "spread"])
def test_nothing_is_lost_where_a_machine_leaves(land: Land, placement: str) -> None:
    options = [*SLOW, *sets(f'cluster.placement="{placement}"'), "--hosts", "1", "--cores", "1"]
    with listening(land, *options, replicas=2) as command:
        with land.joined(command) as machine:
            command.trains(1000)
            groups = {group for _, group in shards(command).values()}
            assert (machine.process.pid in groups) == (placement == "spread")
            machine.process.send_signal(signal.SIGINT)
            assert machine.wait() == 130, machine.said
        poll(lambda: "replica 1 has left with" in command.told())
        KeyFiles(land.here / "keys").revoke("host")
        with land.joined(command) as machine:
            poll(lambda: "rejects the key of this host" in machine.said)
            allow(land.here, land.there, "host")  # it tries again by itself
            poll(lambda: "ready" in machine.said)
        command.signal(signal.SIGINT)
        assert command.wait() == 130, command.output
    assert command.summary()["pushes_lost"] == 0


@pytest.mark.soak
def test_a_machine_joins_by_the_secret_of_a_run(land: Land) -> None:
    listen = ("--listen", "tcp://127.0.0.1:0", "--hosts", "1", "--cores", "1")
    start = train(land.here, *listen, *sets("cluster.replicas=2"))
    with start as command, land.joined(command, has_keys=False) as machine:
        poll(command.is_training)
        secret = find_secret_address(command).partition("?secret=")[2]
        assert command.wait() == 0, command.output
        assert machine.wait() == 0, machine.said
    assert secret in command.output  # for its user to see, and nobody else
    for place in (land.here, land.there):
        files = [path for path in place.rglob("*") if path.is_file()]
        assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert [host["state"] for host in command.summary()["hosts"]] == ["ready"]


def shards(command: Command) -> dict[str, tuple[str, int]]:
    """Return the state of each copy of a shard, and the process group of its host."""
    found: dict[str, tuple[str, int]] = {}
    for name, row in command.roles().items():
        if name.startswith("shard") and isinstance(row["pid"], int) and alive([row["pid"]]):
            found[name] = str(row["state"]), os.getpgid(row["pid"])
    return found


def is_whole(command: Command) -> bool:
    """Whether each shard has a primary and a backup, on two hosts."""
    found = shards(command)
    pairs = [(found.get(f"shard-{k}"), found.get(f"shard-{k}b")) for k in range(2)]
    return command.view().get("phase") == "training" and all(
        one is not None
        and other is not None
        and {one[0], other[0]} == {"primary", "backup"}
        and one[1] != other[1]
        for one, other in pairs
    )


def test_hosts_that_run_shards_die_and_leave(land: Land) -> None:
    """One is killed with a primary, the next one leaves: no acknowledged push is lost."""
    options = sets('cluster.placement="spread"', "cluster.shards=2", "cluster.shard_copies=2")
    options += [*SLOW, "--cores", "1", "--hosts", "2"]
    with (
        listening(land, *options, replicas=2) as command,
        land.joined(command) as one,
        land.joined(command) as other,
    ):
        poll(lambda: is_whole(command))
        groups = {group for _, group in shards(command).values()}
        assert {one.process.pid, other.process.pid} < groups  # and the supervisor's own
        command.trains()
        leads = {group for state, group in shards(command).values() if state == "primary"}
        killed, left = (one, other) if one.process.pid in leads else (other, one)
        assert killed.process.pid in leads
        killed.kill()
        poll(lambda: "takes over, nothing acknowledged is lost" in command.told())
        poll(lambda: is_whole(command))
        command.trains()
        left.process.send_signal(signal.SIGINT)
        assert left.wait() == 130, left.said
        command.trains()
        command.signal(signal.SIGINT)
        assert command.wait() == 130, command.output
    assert command.summary()["pushes_lost"] == 0
    assert "will be lost" not in command.told()


def pids_of(command: Command, names: list[str]) -> list[int]:
    pids = (command.roles()[name]["pid"] for name in names)
    return [pid for pid in pids if isinstance(pid, int)]


SLOW_MACHINES = """
[[machines]]
count = 2
flops = "1 GFLOP/s"
memory_rate = "1 GB/s"
bandwidth = "1 Gbit/s"
"""


@pytest.mark.soak
def test_hosts_of_unlike_memory_form_unlike_replicas(land: Land) -> None:
    """A large one holds the whole net, 281 kB; two small ones a half each, 142 kB."""
    (land.here / "slow.toml").write_text(SLOW_MACHINES)
    options = [*sets("cluster.partitions={max=2}", "cluster.machines=slow.toml"), *SLOW]
    options += sets("model.arguments.width=512", "model.initial=seed")
    with (
        listening(land, *options, "--cores", "0", "--hosts", "3", replicas=2) as command,
        land.joined(command, "--memory", "200 kB"),
        land.joined(command, "--memory", "1 MB") as large,
        land.joined(command, "--memory", "200 kB"),
    ):
        poll(command.is_training, seconds=150.0)
        command.trains()
        ranks = [name for name in command.roles() if name.startswith("replica")]
        assert ranks == ["replica-0.0", "replica-1.0", "replica-1.1"], command.told()
        pids = pids_of(command, ranks)
        groups = [os.getpgid(pid) for pid in pids]
        assert len(set(groups)) == 3
        assert groups[0] == large.process.pid
        os.kill(pids[-1], signal.SIGKILL)
        poll(lambda: "replica 1.1 was ended by signal SIGKILL" in command.told())
        poll(lambda: pids_of(command, ranks[2:]) not in ([], pids[2:]), seconds=150.0)
        command.trains()
        assert pids_of(command, ranks[:2]) == pids[:2]
        command.signal(signal.SIGINT)
        assert command.wait() == 130, command.output
    assert command.summary()["n_machines"] == [1, 2]
    names = {path.name for path in command.run.glob("plan*.json")}
    assert names == {"plan.json", "plan-1.json"}
