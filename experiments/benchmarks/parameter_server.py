"""What a push and a fetch of 41,777,152 float32 cost, on one host.

    python experiments/benchmarks/parameter_server.py [--rounds 6] [--part memory] [--small]

A push is over when every shard has applied it by Adagrad and said so; a fetch, when the
values lie in the model's tensors. One client, `--shards` shards of one thread each:

    floor      in one process, one thread: one copy of 167 MB, one fused Adagrad update
    shared     our shards, values and slots in shared memory
    files      our shards, block messages over sockets in files, as between a user's processes
    tcp        our shards, block messages over TCP, encrypted, as between hosts
    rpc        torch.distributed.rpc over TCP: the same slices in as many processes, the
               same fused update; its fetch ends before the copy into the model
    zmq_files, zmq_curve   bare pyzmq over sockets in files, and TCP encrypted: the same
               blocks, copies and updates without a protocol

    shared_memory_over_floor   (push + fetch) of `shared` / (copy + update): the strict reading
    shared_memory_over_copies  (push + fetch) of `shared` / (2 copies + update)
    push_over_floor            push of `shared` / (copy + update)
    fetch_over_copy            fetch of `shared` / copy
    tcp_over_zmq               (push + fetch) of `zmq_curve` / that of `tcp`
    files_over_zmq             (push + fetch) of `zmq_files` / that of `files`
    A_over_B                   (push + fetch) of B / that of A
    A_over_B_cpu               the same of processor time: other load changes it little
    shard_memory_error         the most by which memory of a shard, beyond that of one with 64
                               parameters, was off what forecasts say: 20 million parameters,
                               SGD and Adagrad, 1, 2 and 4 clients, `shared` and `tcp`
    peak_bytes_per_parameter   the most memory a shard's process has held, beyond that of
                               a shard with 64 parameters, per parameter: values 4,
                               Adagrad 4, two slots of the client 8
"""

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, Self

import msgspec
import torch

from distbelief.core.memory import keep_memory
from distbelief.parameter_server.rules import SGD, Adagrad, UpdateRule
from distbelief.protocol.role import Computed
from distbelief.serve.address import ServerAddress
from distbelief.serve.server import ParameterServer
from distbelief.serve.session import ClientSession
from distbelief.simulation.forecast.placed_cluster import vectors_of_shard
from distbelief.transport.keys import new_secret
from distbelief.transport.listen_config import ListenConfig
from distbelief.worker.loop_worker import FETCH, INSTALLED, PUSHED, StagedPush
from experiments.benchmarks.bare import links as bare_links, rpc_server
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.workers import Pairs, Workers, module, timed_pairs
from experiments.speech.model import acoustic_net


TIMEOUT_SECONDS: Final = 300.0
TORN_WAIT_SECONDS: Final = 1e-3


class BareClient:
    """A worker of the server at `address`; use it in a `with` statement."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], address: str) -> None:
        self._session = ClientSession(
            list(parameters), ServerAddress.parse(address), user=type(self).__name__
        )
        self._client = self._session.client

    def __enter__(self) -> Self:
        self._session.join(TIMEOUT_SECONDS)
        self._wait(lambda: self._client.ready)
        return self

    def __exit__(self, *_error: object) -> None:
        self._session.close()

    def push(self, gradients: Sequence[torch.Tensor]) -> None:
        client = self._client
        self._wait(lambda: client.can_push)
        outcome = client.draft().put_all(gradients, self._session.values)
        push = StagedPush(outcome=outcome, n_gradients=1, samples=1)
        self._command(Computed(name=PUSHED, result=push))
        self._wait(lambda: client.unacknowledged == 0)

    def fetch(self) -> None:
        self.begin_fetch()
        self.end_fetch()

    def begin_fetch(self) -> None:
        self._command(Computed(name=FETCH))

    def end_fetch(self) -> None:
        client = self._client
        while True:
            self._wait(lambda: client.installable)
            has_all = client.fetch_complete
            outcome = client.install(self._session.values)()
            self._command(Computed(name=INSTALLED, result=outcome))
            if not outcome.torn:
                return
            if has_all:
                self._session.node.pump(lambda: False, timeout_seconds=TORN_WAIT_SECONDS)

    def _command(self, command: Computed) -> None:
        self._session.command(command, TIMEOUT_SECONDS)

    def _wait(self, until: Callable[[], bool]) -> None:
        self._session.wait(until, "an answer", TIMEOUT_SECONDS)


OURS: Final = ("shared", "files", "tcp")
BARE: Final = ("zmq_files", "zmq_curve")
CONTESTANTS: Final = ("floor", *OURS, "rpc", *BARE)
COMPARED: Final = {  # figure -> ours, or the first; theirs
    "tcp_over_zmq": ("tcp", "zmq_curve"),
    "files_over_zmq": ("files", "zmq_files"),
    "files_over_torch_rpc": ("files", "rpc"),
}
SMALL: Final = {"rounds": 1, "repetitions": 20}  # of a tiny net
LEARNING_RATE: Final = rpc_server.LEARNING_RATE
BYTES_EXPECTED: Final = 16  # per parameter: values, state, two slots


@dataclass(slots=True)
class Times:
    measure: Callable[[int], Pairs]
    pushes: list[float] = field(default_factory=list)
    fetches: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of both, by turn

    @property
    def both(self) -> float:
        return median(self.pushes) + median(self.fetches)

    def turn(self, n: int) -> None:
        pids = measurement.family(os.getpid())
        with measurement.usage(lambda: measurement.cpu_seconds(pids)) as used:
            pushes, fetches = self.measure(n)
        self.pushes += pushes
        self.fetches += fetches
        self.cpu_seconds.append(used.cpu_seconds / n)


def _floor(n_elements: int) -> Times:
    """Return one fused update, and one copy: what any parameter server does at the least."""
    gradient, slot = torch.randn(n_elements), torch.zeros(n_elements)
    update = partial(rpc_server.Slice(n_elements).update, slot)
    return Times(partial(timed_pairs, update, partial(slot.copy_, gradient)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=6, help="turns of each")
    parser.add_argument("--repetitions", type=int, default=5, help="in a turn")
    parser.add_argument("--shards", type=int, default=2)
    others = CONTESTANTS[1:]
    parser.add_argument("--part", choices=("times", "memory"), help="only this one")
    parser.add_argument("--without", nargs="+", default=[], choices=others, help="leave out")
    options = measurement.options_of(parser, arguments, small=SMALL)
    keep_memory()  # as every replica does
    torch.set_num_threads(1)
    figures = {} if options.part == "memory" else _times(options)
    if options.part != "times":
        figures |= _memory(64_000 if options.small else 20_000_000)
    measurement.conclude("parameter_server", figures)


def _times(options: argparse.Namespace) -> dict[str, float]:
    net = acoustic_net([64], 64) if options.small else acoustic_net([2560] * 4, 8192)
    parameters = list(net.parameters())
    n_elements = sum(parameter.numel() for parameter in parameters)
    gradients = [torch.randn(parameter.numel()) for parameter in parameters]
    names = [name for name in CONTESTANTS if name not in options.without]
    with TemporaryDirectory() as folder, ExitStack() as stack:
        empty_bytes = _bytes_of_an_empty_shard(Path(folder))
        times = {"floor": _floor(n_elements)}
        for name in [name for name in names if name in OURS]:
            directory, rule = Path(folder) / name, Adagrad(learning_rate=LEARNING_RATE)
            server = _server_of(name, parameters, directory, rule=rule, n_shards=options.shards)
            stack.enter_context(server)
            client = stack.enter_context(BareClient(parameters, server.address))
            times[name] = Times(partial(timed_pairs, partial(client.push, gradients), client.fetch))
        size = -(-n_elements // options.shards)
        programs = {kind: [module("bare.links", kind, options.shards, size)] for kind in BARE}
        programs["rpc"] = [
            module("bare.rpc_server", Path(folder) / "rpc", rank, options.shards, size)
            for rank in range(options.shards + 1)
        ]
        for name in [name for name in names if name in programs]:
            # They are stopped between turns: tensorpipe polls without a pause.
            workers = Workers(f"{name}-workers", programs[name], Path(folder), stopped=True)
            times[name] = Times(partial(_asked, stack.enter_context(workers)))
        for name in names:
            times[name].measure(2)  # warms up
        for name in measurement.turns(names, n_rounds=options.rounds):
            times[name].turn(options.repetitions)
            _print(name, times[name], options.repetitions)
        peaks = _peaks(Path(folder) / "shared")
    per_shard = n_elements / options.shards
    peak = (max(peaks, default=0) - empty_bytes) / per_shard
    return _report(times, peak=peak, n_elements=n_elements)


def _server_of(
    way: str,
    parameters: Sequence[torch.nn.Parameter],
    directory: Path,
    *,
    rule: UpdateRule,
    n_shards: int = 1,
) -> ParameterServer:
    server = ParameterServer(
        parameters,
        rule=rule,
        shards=n_shards,
        shared_memory=way == "shared",
        directory=directory,
        snapshot_every=86_400.0,
        start_seconds_max=600.0,  # other processes may take most of this host
    )
    if way == "tcp":
        reach = ListenConfig(host=bare_links.HOST, secret=new_secret())
        request = msgspec.structs.replace(server._request, reach=reach)  # noqa: SLF001
        server._request = request  # noqa: SLF001 -- users have `distbelief serve` for it
    return server


def _memory(n_elements: int) -> dict[str, float]:
    """Measure what shards hold, beside what forecasts say."""
    rows, worst = {}, 0.0
    for way in ("shared", "tcp"):
        (empty,) = _bytes_held(64, way, rule=SGD(learning_rate=LEARNING_RATE), numbers=(1,))
        for rule in (SGD(learning_rate=LEARNING_RATE), Adagrad(learning_rate=LEARNING_RATE)):
            numbers = (1, 2, 4)
            for n, held in zip(
                numbers, _bytes_held(n_elements, way, rule=rule, numbers=numbers), strict=True
            ):
                vectors = vectors_of_shard(rule, n_clients=n, by_blocks=way == "tcp")
                found, foretold = (held - empty) / n_elements, 4 * vectors
                worst = max(worst, abs(found / foretold - 1.0))
                rows[f"{way} {rule.name} {n}"] = {
                    "bytes per parameter": f"{found:.2f}",
                    "foretold": str(foretold),
                }
                print(f"{way} {rule.name} {n}", rows[f"{way} {rule.name} {n}"], flush=True)
    measurement.show(f"memory of a shard of {n_elements:,} parameters, by clients", rows)
    return {"shard_memory_error": worst}


def _bytes_held(
    n_elements: int, way: str, *, rule: UpdateRule, numbers: Sequence[int]
) -> list[int]:
    """Return what a shard has held with so many clients, which join one after the other."""
    parameters = [torch.nn.Parameter(torch.zeros(n_elements))]
    gradients = [torch.ones(n_elements)]
    clients: list[BareClient] = []
    held = []
    with TemporaryDirectory() as folder, ExitStack() as stack:
        directory = Path(folder) / "run"
        server = stack.enter_context(_server_of(way, parameters, directory, rule=rule))
        for n in numbers:
            while len(clients) < n:
                client = BareClient(parameters, server.address)
                clients.append(stack.enter_context(client))
            first, *others = clients
            for _ in range(2):  # each has two push buffers
                first.begin_fetch()  # while it reads, others push and read what is newer
                for client in others:
                    client.push(gradients)
                    client.fetch()
                first.end_fetch()
                first.push(gradients)
            held.append(max(_peaks(directory)))
    return held


def _asked(workers: Workers, n: int) -> Pairs:
    pushes, fetches = workers.ask(n, of=[0])[0]
    return pushes, fetches


def _bytes_of_an_empty_shard(folder: Path) -> int:
    directory = folder / "empty"
    server = ParameterServer(
        [torch.nn.Parameter(torch.zeros(64))],
        rule=Adagrad(learning_rate=LEARNING_RATE),
        directory=directory,
    )
    parameters = [torch.nn.Parameter(torch.zeros(64))]
    with server, BareClient(parameters, server.address) as client:
        client.push([torch.ones(64)])
        client.fetch()
        return max(_peaks(directory))


def _peaks(directory: Path) -> list[int]:
    return [
        measurement.peak_bytes(pid)
        for name, pid in measurement.roles_in(directory).items()
        if name.startswith("shard")
    ]


def _print(name: str, times: Times, n: int) -> None:
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
        push, fetch, cpu = (
            measurement.Spread.of(seconds, scale=1e3)
            for seconds in (of.pushes, of.fetches, of.cpu_seconds)
        )
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
            ratios[f"{key}_cpu"] = cpu_seconds[0] / max(cpu_seconds[1], 1e-3)
    return ratios | figures


if __name__ == "__main__":
    main()
