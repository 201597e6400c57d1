"""What a push and a fetch of 41,777,152 float32 cost, on one host.

    python experiments/benchmarks/parameter_server.py [--rounds 6] [--small]

A push is over when every shard has applied it by Adagrad and said so; a fetch, when the
values lie in the model's tensors. One client, `--shards` shards of one thread each:

    floor      in one process, one thread: one copy of 167 MB, one fused Adagrad update
    shared     our shards, values and slots in shared memory
    files      our shards, block messages over sockets in files, as between a user's processes
    tcp        our shards, block messages over TCP, encrypted, as between hosts
    rpc        torch.distributed.rpc over TCP: the same slices in as many processes, the
               same fused update; its fetch ends before the copy into the model
    rpc_local  the same with transports of tensorpipe's own choice: on one host, copies
               by the kernel from process to process
    zmq_files, zmq, zmq_curve   bare pyzmq over sockets in files, TCP, and TCP encrypted:
               the same blocks, copies and updates without a protocol
    sockets    the same over bare sockets: what the network could

    shared_memory_over_floor   (push + fetch) of `shared` / (copy + update): the strict
                               reading, for a fetch is a copy of its own
    shared_memory_over_copies  (push + fetch) of `shared` / (2 copies + update)
    push_over_floor            push of `shared` / (copy + update)
    fetch_over_copy            fetch of `shared` / copy
    tcp_over_zmq               (push + fetch) of `zmq_curve` / that of `tcp`
    files_over_zmq             (push + fetch) of `zmq_files` / that of `files`
    A_over_B                   (push + fetch) of B / that of A
    A_over_B_cpu               the same of processor time: other load changes it little
    peak_bytes_per_parameter   the most memory a shard's process has held, beyond that of
                               a shard with 64 parameters, per parameter: values 4,
                               Adagrad 4, two slots of the client 8
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, final

import msgspec
import torch

from distbelief.core.memory import keep_memory
from distbelief.parameter_server.optimizers import Adagrad
from distbelief.serve.server import ParameterServer
from distbelief.transport.config import ListenConfig
from distbelief.transport.keys import new_secret
from experiments.benchmarks.bare import links as bare_links, rpc_server
from experiments.benchmarks.bare.client import BareClient
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.measurement import Spread
from experiments.speech.model import acoustic_net


OURS: Final = ("shared", "files", "tcp")
BARE: Final = ("zmq_files", "zmq", "zmq_curve", "sockets")
CONTESTANTS: Final = ("floor", *OURS, "rpc", "rpc_local", *BARE)
COMPARED: Final = {  # figure -> ours, or the first; theirs
    "tcp_over_zmq": ("tcp", "zmq_curve"),
    "files_over_zmq": ("files", "zmq_files"),
    "files_over_sockets": ("files", "sockets"),
    "files_over_torch_rpc": ("files", "rpc"),
    "files_over_torch_rpc_local": ("files", "rpc_local"),
    "shared_over_torch_rpc_local": ("shared", "rpc_local"),
    "zmq_over_torch_rpc": ("zmq", "rpc"),
    "sockets_over_torch_rpc": ("sockets", "rpc"),
}
SMALL: Final = {"rounds": 1, "repetitions": 1}  # of a tiny net
LEARNING_RATE: Final = rpc_server.LEARNING_RATE
BYTES_EXPECTED: Final = 16  # per parameter: values, state, two slots
END_SECONDS_MAX: Final = 2.0


Seconds = tuple[list[float], list[float]]  # of each push, of each fetch


@final
@dataclass(slots=True)
class Times:
    """Seconds of each push (or update) and fetch (or copy) of one contestant."""

    measure: Callable[[int], Seconds]
    pushes: list[float] = field(default_factory=list)
    fetches: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of both, by turn

    @property
    def both(self) -> float:
        """Median of the push, plus that of the fetch."""
        return median(self.pushes) + median(self.fetches)

    def turn(self, n: int) -> None:
        """Push and fetch n times."""
        pids = measurement.family(os.getpid())
        used = measurement.cpu_seconds(pids)
        pushes, fetches = self.measure(n)
        self.pushes += pushes
        self.fetches += fetches
        self.cpu_seconds.append((measurement.cpu_seconds(pids) - used) / n)

    def forget(self) -> None:
        """The turns so far were to get warm."""
        self.pushes, self.fetches, self.cpu_seconds = [], [], []


def timing(push: Callable[[], None], fetch: Callable[[], None]) -> Callable[[int], Seconds]:
    """Return what measures these two."""

    def measure(n: int) -> Seconds:
        pushes, fetches = [], []
        for _ in range(n):
            begun = time.perf_counter()
            push()
            pushed = time.perf_counter()
            fetch()
            pushes.append(pushed - begun)
            fetches.append(time.perf_counter() - pushed)
        return pushes, fetches

    return measure


@final
class Floor:
    """One copy, one fused update: what any parameter server does at the least."""

    def __init__(self, n_elements: int) -> None:
        self._slice = rpc_server.Slice(n_elements)
        self._gradient = torch.randn(n_elements)
        self._slot = torch.zeros(n_elements)

    def update(self) -> None:
        """Apply what lies in the slot."""
        self._slice.update(self._slot)

    def copy(self) -> None:
        """Copy the gradient into the slot."""
        self._slot.copy_(self._gradient)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    keep_memory()  # as every replica does
    torch.set_num_threads(1)
    net = acoustic_net([64], 64) if options.small else acoustic_net([2560] * 4, 8192)
    parameters = list(net.parameters())
    n_elements = sum(parameter.numel() for parameter in parameters)
    gradients = [torch.randn(parameter.numel()) for parameter in parameters]
    names = [name for name in CONTESTANTS if name not in options.without]
    with TemporaryDirectory() as folder, ExitStack() as stack:
        empty_bytes = _bytes_of_an_empty_shard(Path(folder))
        floor = Floor(n_elements)
        times = {"floor": Times(timing(floor.update, floor.copy))}
        for name in [name for name in names if name in OURS]:
            server = ParameterServer(
                parameters,
                rule=Adagrad(learning_rate=LEARNING_RATE),
                shards=options.shards,
                shared_memory=name == "shared",
                directory=Path(folder) / name,
                snapshot_every=86_400.0,
            )
            if name == "tcp":
                reach = ListenConfig(host=bare_links.HOST, secret=new_secret())
                request = msgspec.structs.replace(server._request, reach=reach)  # noqa: SLF001
                server._request = request  # noqa: SLF001 -- users have `distbelief serve` for it
            client = stack.enter_context(_client(server, parameters))
            times[name] = Times(timing(_pusher(client, gradients), client.fetch))
        programs = {
            "rpc": _rpc(n_elements, options.shards, Path(folder) / "rpc", tcp=True),
            "rpc_local": _rpc(n_elements, options.shards, Path(folder) / "rpc_local", tcp=False),
            **{kind: _bare_links(kind, n_elements, options.shards) for kind in BARE},
        }
        for name in [name for name in names if name in programs]:
            times[name] = Times(stack.enter_context(_told(programs[name])))
        for name in names:
            times[name].turn(2)
            times[name].forget()
        for name in measurement.turns(names, n_rounds=options.rounds):
            times[name].turn(options.repetitions)
            _tell(name, times[name], options.repetitions)
        peaks = _peaks(Path(folder) / "shared")
    per_shard = n_elements / options.shards
    peak = (max(peaks, default=0) - empty_bytes) / per_shard
    measurement.conclude("parameter_server", _report(times, peak=peak, n_elements=n_elements))


@contextmanager
def _client(server: ParameterServer, parameters: list[torch.nn.Parameter]) -> Iterator[BareClient]:
    with server, BareClient(parameters, server.address) as client:
        yield client


def _pusher(client: BareClient, gradients: list[torch.Tensor]) -> Callable[[], None]:
    return lambda: client.push(gradients)


def _rpc(n_elements: int, n_servers: int, meeting: Path, *, tcp: bool) -> list[list[str]]:
    """Return the commands of a client and its servers."""
    size = -(-n_elements // n_servers)
    command = [sys.executable, "-m", rpc_server.__name__, str(meeting)]
    kind = "tcp" if tcp else "local"
    return [[*command, str(rank), str(n_servers), str(size), kind] for rank in range(n_servers + 1)]


def _bare_links(kind: str, n_elements: int, n_servers: int) -> list[list[str]]:
    """Return the command of a client, which starts its servers."""
    size = -(-n_elements // n_servers)
    command = [sys.executable, "-m", bare_links.__name__, kind]
    return [[*command, str(n_servers), str(size)]]


@contextmanager
def _told(commands: list[list[str]]) -> Iterator[Callable[[int], Seconds]]:
    """Start these, the first of which is told what to do; they are stopped else."""
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if rank else subprocess.PIPE,
            stdout=None if rank else subprocess.PIPE,
        )
        for rank, command in enumerate(commands)
    ]
    told, answers = processes[0].stdin, processes[0].stdout
    assert told is not None
    assert answers is not None

    def send_all(number: signal.Signals) -> None:
        for process in processes:
            process.send_signal(number)

    def measure(n: int) -> Seconds:
        send_all(signal.SIGCONT)
        told.write(b"%d\n" % n)
        told.flush()
        line = answers.readline()
        if not line:
            raise RuntimeError(f"{' '.join(commands[0])} has ended")
        send_all(signal.SIGSTOP)
        pushes, fetches = json.loads(line)
        return pushes, fetches

    try:
        yield measure
    finally:
        # Whoever has started others ends them when nobody tells it any more.
        send_all(signal.SIGCONT)
        told.close()
        with suppress(subprocess.TimeoutExpired):
            processes[0].wait(END_SECONDS_MAX)
        for process in processes:
            process.kill()
            process.wait()
        answers.close()


def _bytes_of_an_empty_shard(folder: Path) -> int:
    """Return the peak memory of a shard's process that holds next to nothing."""
    directory = folder / "empty"
    server = ParameterServer(
        [torch.nn.Parameter(torch.zeros(64))],
        rule=Adagrad(learning_rate=LEARNING_RATE),
        directory=directory,
    )
    parameters = [torch.nn.Parameter(torch.zeros(64))]
    with _client(server, parameters) as client:
        client.push([torch.ones(64)])
        client.fetch()
        return max(_peaks(directory))


def _peaks(directory: Path) -> list[int]:
    """Return the peak memory of each shard that writes its log there."""
    return [
        measurement.peak_bytes(pid)
        for name, pid in measurement.roles_in(directory).items()
        if name.startswith("shard")
    ]


def _tell(name: str, times: Times, n: int) -> None:
    push, fetch = (1000 * median(of[-n:]) for of in (times.pushes, times.fetches))
    words = ("update", "copy") if name == "floor" else ("push", "fetch")
    print(
        f"{name:9} {words[0]} {push:7.1f} ms  {words[1]} {fetch:7.1f} ms  "
        f"{1000 * times.cpu_seconds[-1]:7.1f} CPU ms  load {measurement.load():.1f}",
        flush=True,
    )


def _report(times: dict[str, Times], *, peak: float, n_elements: int) -> dict[str, float]:
    rows, figures = {}, {}
    for name, of in times.items():
        push = Spread.of([1000 * seconds for seconds in of.pushes])
        fetch = Spread.of([1000 * seconds for seconds in of.fetches])
        cpu = Spread.of([1000 * seconds for seconds in of.cpu_seconds])
        rows[name] = {
            "push (or update), ms": push.show(),
            "fetch (or copy), ms": fetch.show(),
            "CPU, ms": cpu.show(),
        }
        words = ("update", "copy") if name == "floor" else ("push", "fetch")
        figures[f"{name}_{words[0]}_ms"] = push.median
        figures[f"{name}_{words[1]}_ms"] = fetch.median
        figures[f"{name}_cpu_ms"] = cpu.median
    title = f"{n_elements:,} float32, load {measurement.load():.1f}"
    measurement.show(title, rows)
    floor, copy = times["floor"].both, median(times["floor"].fetches)
    ratios: dict[str, float] = {}
    if "shared" in times:
        shared = times["shared"]
        ratios |= {
            "shared_memory_over_floor": shared.both / floor,
            "push_over_floor": median(shared.pushes) / floor,
            "fetch_over_copy": median(shared.fetches) / copy,
            "shared_memory_over_copies": shared.both / (floor + copy),
            "peak_bytes_per_parameter": peak,
            "bytes_per_parameter_expected": BYTES_EXPECTED,
        }
    for key, (ours, theirs) in COMPARED.items():
        if ours in times and theirs in times:
            ratios[key] = times[theirs].both / times[ours].both
            cpu_seconds = median(times[theirs].cpu_seconds), median(times[ours].cpu_seconds)
            ratios[f"{key}_cpu"] = cpu_seconds[0] / cpu_seconds[1]
    return ratios | figures


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each")
    parser.add_argument("--repetitions", type=int, default=5, help="in a turn")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument(
        "--without", nargs="+", default=[], choices=CONTESTANTS[1:], help="leave out"
    )
    return measurement.options_of(parser, arguments, small=SMALL)


if __name__ == "__main__":
    main()
