"""What hostile peers cost honest ones: throughput, and the server's memory.

    python experiments/benchmarks/hostile.py [--seconds 10] [--rounds 1] [--only KIND]
        [--small]

Not in `make bench`: only root may make network namespaces.

Three hosts at a switch (network namespaces): a server with keys and two shards, an
honest worker that pushes and fetches 1 MiB as fast as it can, and one attacker at a
time (`network.hostile_peer`), which goes on as fast as a whole core lets it. Before and
after nobody attacks.

The attacker's link carries 1 Gbit/s. Two cores are all there is. The attacker's
processes have one of them, and all that is honest the other: server, worker. What the
kernel does for what comes in at a host is done by the core of that host (receive packet
steering). So what an attacker's own machine would do is not charged to anybody, and all
that its victims do is. What is left of it (one memory, one cache, one kernel) shows in
turns that are no attacks: beside one that only burns its core, and one that asks for
connections where nobody listens. After each attack somebody burns as much of that core
as it took.

    throughput_kept   pushes a second beside the worst attacker, over those in the turns
                      before and after: 1.0 means that nobody noticed
    kept_over_burn    the same, over what is kept beside one who burns as much
    kept_less_knocks  the same, if what as many knocks at a closed port cost is no loss
    memory_over_cap   the most memory by which a process of the server grew, over the
                      cap on what one key may have there unread (`limits.PeerLimits`)
"""

import argparse
import json
import mmap
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Final, final

import msgspec

from distbelief.serve.server import ServerAddress
from distbelief.serve.server_process import ServerRequest
from distbelief.transport.keys import Allowed, KeyFiles
from distbelief.transport.limits import PeerLimits
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.network.hostile_peer import ATTACKS, CONTROLS, Told
from experiments.benchmarks.network.hosts import INTERFACE, Host, obstacle
from experiments.benchmarks.network.switch import switched


BITS_PER_SECOND: Final = 4e10  # no bottleneck: a full link is nobody's to mend
HOSTILE_BITS_PER_SECOND: Final = 1e9
HONEST_CORE, HOSTILE_CORE = "0", "1"
CORES: Final = (HONEST_CORE, HONEST_CORE, HOSTILE_CORE)  # server, worker, attacker
PORT: Final = 7700
SERVED: Final = "served"  # the server's directory
BURN: Final = "burn"
SMALL: Final = {"seconds": 1.0, "only": ("random",)}
NETS: Final = "from torch import nn\n\ndef make():\n    return nn.Linear(512, 512)\n"
SETTLE_SECONDS: Final = 0.1
WARM_SECONDS: Final = 1.0
PEACE_SECONDS: Final = 3.0
TICK_SECONDS: Final = 0.02
STATED_BYTES: Final = PeerLimits().unread_bytes_of_key_max


@final
@dataclass(slots=True, kw_only=True)
class Turn:
    """What came of one turn."""

    kind: str  # "" of nobody
    rate: float
    cpu: dict[str, float]  # seconds of processor a second, by side
    tries: int = 0
    grown: int = 0  # bytes


@final
@dataclass(kw_only=True)
class Field:
    """The three hosts, and who runs there."""

    folder: Path
    hosts: Sequence[Host]
    server: "subprocess.Popen[str]"
    address: ServerAddress
    counter: mmap.mmap
    turns: list[Turn] = field(default_factory=list)
    n_keys: int = 0

    @property
    def n_pushes(self) -> int:
        """How often the honest worker has pushed so far."""
        found: tuple[int] = struct.unpack_from("<q", self.counter, 0)
        return found[0]

    def turn(self, kind: str, seconds: float, *, share: float = 1.0) -> None:
        """Measure for so long, beside an attacker of this kind; "" for nobody.

        Args:
            kind: Of attack.
            seconds: For so long.
            share: Of his core, that he may take.
        """
        with ExitStack() as stack:
            attacker = stack.enter_context(self._attacker(kind)) if kind else None
            pids = measurement.family(self.server.pid)
            before = _resident(pids)
            if attacker is not None:
                assert attacker.stdin is not None
                attacker.stdin.write(f"{seconds + SETTLE_SECONDS} {share}\n")
                attacker.stdin.flush()
            time.sleep(SETTLE_SECONDS)
            grown, n, used = 0, self.n_pushes, self._cpu(pids, attacker)
            begun = now = time.perf_counter()
            while now < begun + seconds:
                time.sleep(TICK_SECONDS)
                now = time.perf_counter()
                after = _resident(pids)
                grown = max(grown, *(after[pid] - before.get(pid, 0) for pid in after))
            rate = (self.n_pushes - n) / (now - begun)
            cpu = {
                side: (total - used[side]) / (now - begun)
                for side, total in self._cpu(pids, attacker).items()
            }
            tries = 0
            if attacker is not None:
                said, _ = attacker.communicate(timeout=20)
                tries = json.loads(said.splitlines()[-1])["tries"] if said else 0
        turn = Turn(kind=kind, rate=rate, cpu=cpu, tries=tries, grown=grown)
        self.turns.append(turn)
        print(
            f"{kind or 'nobody':>10}  {rate:7.1f} pushes/s  {tries:>7,} tries  "
            f"grown {grown / 2**20:6.1f} MiB  "
            + "  ".join(f"{side} {share:.2f}" for side, share in cpu.items()),
            flush=True,
        )

    def _cpu(
        self, pids: Sequence[int], attacker: "subprocess.Popen[str] | None"
    ) -> dict[str, float]:
        hostile = [] if attacker is None else measurement.family(attacker.pid)
        return {
            "server": measurement.cpu_seconds(pids),
            "attacker": measurement.cpu_seconds(hostile),
        }

    @contextmanager
    def _attacker(self, kind: str) -> Iterator["subprocess.Popen[str]"]:
        """Start one, with a key that nobody has seen yet."""
        self.n_keys += 1
        keys = self.folder / f"hostile-{self.n_keys}"
        KeyFiles(keys).make()
        _allow(self.folder / "server-keys", keys, f"hostile-{self.n_keys}")
        told = Told(
            places=list(_listening(self.hosts[0])),
            server_key=self.address.key,
            keys=str(keys),
            run=self.address.run,
            address=str(self.address),
            counter="",
        )
        process = _peer(self.hosts[2], HOSTILE_CORE, kind, told)
        try:
            assert process.stdout is not None
            process.stdout.readline()  # ready
            yield process
        finally:
            process.kill()
            process.communicate()


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if (why := obstacle()) is not None:
        raise SystemExit(why)
    turns: list[Turn] = []
    for kind in measurement.turns(options.only or [*CONTROLS, *ATTACKS], n_rounds=options.rounds):
        with _field() as arena:  # a server that has not been besieged lately
            arena.turn("", WARM_SECONDS)
            arena.turns.clear()
            arena.turn("", PEACE_SECONDS)
            arena.turn(kind, options.seconds)
            arena.turn("", PEACE_SECONDS)
            if kind in ATTACKS:
                share = arena.turns[1].cpu["attacker"]
                arena.turn(BURN, options.seconds, share=share)
                arena.turn("", PEACE_SECONDS)
            turns += arena.turns
    report(turns)


def report(turns: Sequence[Turn]) -> None:
    """Print what each attacker cost, and the figures as the last line."""
    kept: dict[str, list[float]] = {}
    burnt: dict[str, list[float]] = {}  # beside one who burns as much as an attack
    grown: dict[str, int] = {}
    rows: dict[str, dict[str, str]] = {}
    attack = ""
    for before, turn, after in zip(turns, turns[1:], turns[2:], strict=False):
        if not turn.kind:
            continue
        share = turn.rate / mean([before.rate, after.rate])
        if turn.kind == BURN and attack:
            burnt.setdefault(attack, []).append(share)
            attack = ""
            continue
        attack = turn.kind if turn.kind in ATTACKS else ""
        kept.setdefault(turn.kind, []).append(share)
        grown[turn.kind] = max(turn.grown, grown.get(turn.kind, 0))
        rows[turn.kind] = {
            "tries": f"{turn.tries:,}",
            "server's cores": f"{turn.cpu['server']:.2f}",
            "attacker's": f"{turn.cpu['attacker']:.2f}",
        }
    means = {kind: mean(values) for kind, values in kept.items()}
    over = {kind: means[kind] / mean(values) for kind, values in burnt.items()}
    for kind, cells in rows.items():
        cells["throughput kept"] = measurement.Spread.of(kept[kind]).show(3)
        cells["over burn"] = f"{over[kind]:.3f}" if kind in over else ""
        cells["grown by"] = f"{grown[kind] / 2**20:.1f} MiB"
    measurement.show("One attacker with a core of its own", rows)
    figures = {f"kept_{kind}": value for kind, value in means.items()}
    figures |= {f"over_burn_{kind}": value for kind, value in over.items()}
    tries = {kind: mean(t.tries for t in turns if t.kind == kind) for kind in means}
    a_knock = (1.0 - means.get("knock", 1.0)) / max(1.0, tries.get("knock", 1.0))
    less = {k: means[k] + a_knock * tries[k] for k in means if k in ATTACKS}
    figures |= {f"less_knocks_{kind}": value for kind, value in less.items()}
    figures |= {
        "throughput_kept": min((means[k] for k in less), default=1.0),
        "kept_over_burn": min(over.values(), default=1.0),
        "kept_less_knocks": min(less.values(), default=1.0),
        "memory_over_cap": max(grown.values()) / STATED_BYTES,
    }
    measurement.conclude("hostile", figures)


@contextmanager
def _field() -> Iterator[Field]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="distbelief-")))
        lan = stack.enter_context(switched(3, bits_per_second=BITS_PER_SECOND))
        lan.limit(lan.hosts[2], bits_per_second=HOSTILE_BITS_PER_SECOND)
        for host, core in zip(lan.hosts, CORES, strict=True):
            _steer(host, core)
        (folder / "nets.py").write_text(NETS)
        for name in ("server-keys", "worker-keys"):
            KeyFiles(folder / name).make()
        _allow(folder / "server-keys", folder / "worker-keys", "honest")
        server = stack.enter_context(_serving(folder, lan.hosts[0]))
        address = _address(server, folder, lan.hosts[0])
        (folder / "counter").write_bytes(bytes(8))
        file = stack.enter_context((folder / "counter").open("r+b"))
        told = Told(
            places=[],
            server_key=address.key,
            keys=str(folder / "worker-keys"),
            run=address.run,
            address=str(address),
            counter=str(folder / "counter"),
        )
        worker = _peer(lan.hosts[1], HONEST_CORE, "honest", told)
        stack.callback(worker.communicate)
        stack.callback(worker.kill)
        arena = Field(
            folder=folder,
            hosts=lan.hosts,
            server=server,
            address=address,
            counter=mmap.mmap(file.fileno(), 8),
        )
        while arena.n_pushes < 20:
            if worker.poll() is not None:
                raise SystemExit(f"the honest worker ended: {worker.communicate()}")
            time.sleep(TICK_SECONDS)
        yield arena


@contextmanager
def _serving(folder: Path, host: Host) -> Iterator["subprocess.Popen[str]"]:
    words = ["serve", "nets:make", "--shards", "2", "--keys", "server-keys"]
    words += ["--bind", _endpoint(host), "--learning-rate", "1e-6"]
    words += ["--directory", SERVED]
    command = str(Path(sys.executable).with_name("distbelief"))
    process = subprocess.Popen(
        [*_at(host, HONEST_CORE), command, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=20)
        process.kill()


def _address(server: "subprocess.Popen[str]", folder: Path, host: Host) -> ServerAddress:
    """Return where the server will be; it may still be starting."""
    file = folder / SERVED / "request.json"
    while not file.is_file():
        if server.poll() is not None:
            raise SystemExit(f"the server ended: {server.communicate()[0]}")
        time.sleep(TICK_SECONDS)
    request = msgspec.json.decode(file.read_bytes(), type=ServerRequest)
    return ServerAddress(
        endpoint=_endpoint(host),
        run=request.run,
        key=KeyFiles(folder / "server-keys").pair().public,
        n_shards=request.n_shards,
        shard_copies=request.shard_copies,
        memory="",
    )


def _endpoint(host: Host) -> str:
    return f"tcp://{host.address}:{PORT}"


def _peer(host: Host, core: str, kind: str, told: Told) -> "subprocess.Popen[str]":
    words = ["-m", "experiments.benchmarks.network.hostile_peer", kind]
    return subprocess.Popen(
        [*_at(host, core), sys.executable, *words, msgspec.json.encode(told).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _at(host: Host, core: str) -> list[str]:
    return [*host.prefix, "taskset", "-c", core]


def _steer(host: Host, core: str) -> None:
    """Let what comes in at this host be handled by this core."""
    mask = f"{1 << int(core):x}"
    queue = f"/sys/class/net/{INTERFACE}/queues/rx-0/rps_cpus"
    words = [*host.prefix, "sh", "-c", f"echo {mask} > {queue}"]
    subprocess.run(words, check=True)


def _listening(host: Host) -> Iterator[tuple[str, int]]:
    """Yield where somebody listens at this host (Linux: /proc/net/tcp)."""
    words = [*host.prefix, "cat", "/proc/net/tcp"]
    told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    for line in told.splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":  # LISTEN
            yield host.address, int(fields[1].rpartition(":")[2], 16)


def _allow(at: Path, whom: Path, name: str) -> None:
    key = KeyFiles(whom).pair().public
    KeyFiles(at).allow(Allowed(key=key, roles=("worker",), name=name))


def _resident(pids: Sequence[int]) -> dict[int, int]:
    """Return the bytes of memory of these processes."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found[pid] = pages * mmap.PAGESIZE
    return found


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of an attack")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", action="append", choices=[*CONTROLS, *ATTACKS])
    return measurement.options_of(parser, arguments, small=SMALL)


if __name__ == "__main__":
    main()
