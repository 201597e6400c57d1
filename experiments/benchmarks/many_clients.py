"""Processor time of one shard per message, by the number of its clients; many real clients.

    python experiments/benchmarks/many_clients.py [--only messages loopback] [--clients 1000]
        [--small]

`messages`: one shard handles the messages of 10, 100, 1,000 and 10,000 clients; nothing travels.
Work on the 64 parameters is left out. Each policy (a row): microseconds per

    push     the Push, its block, and the result of its work; the n-th part of a round of n
    enter    OpenSession of a client that was not in
    leave    OpenSession of a client that was

Not in `make bench`: a thousand clients are a thousand threads.

    growth_*        the slowest policy's time with the most clients over that with the fewest
    bytes_*         memory of the shard per client, with the most clients; push buffers left out

`loopback`: so many clients, threads of a few processes, each of which pushes to one server
of this host as fast as it can:

    pushes_per_second, least_share    the least pushes of a client over the mean of all
"""

import argparse
import gc
import json
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
import numpy as np
import torch

from distbelief.config.presets import PRESETS
from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.parameter_server.rules import SGD
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.protocol import Message, push_fetch as pf
from distbelief.protocol.role import Address, Compute, Computed, Event, Received, Started
from distbelief.serve.server import ParameterServer
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.parameter_server import BareClient


N_ELEMENTS: Final = 64
LAYOUT: Final = Layout.of([TensorSpec(name="w", shape=(N_ELEMENTS,))], n_shards=1)
PRESET_NAMES: Final = ("downpour", "local", "ssp", "diloco", "decoupled-diloco")
OPEN: Final = pf.OpenSession(layout=LAYOUT.fingerprint, pushes=True, host="", next_sequence=1)


class OneShard:
    """A shard and its clients, all of which are in."""

    def __init__(self, preset: str, n_clients: int) -> None:
        table = PRESETS[preset].get("exchange", {})
        policy = msgspec.convert(table, ExchangePolicy)
        self.counts_ticks = policy.counts_ticks
        config = ShardConfig(
            index=0,
            layout=LAYOUT,
            rule=SGD(learning_rate=1.0),
            policy=policy,
            n_clients_max=n_clients,
        )
        zeros = np.zeros(LAYOUT.shard_size(0), LAYOUT.dtype)
        self._shard = Shard(config, memory=PrivateMemory(), initialise=zeros.copy)
        self._gradient = zeros
        self._n_pushes = dict.fromkeys((Address(f"replica-{n}") for n in range(n_clients)), 0)
        self._entries = dict.fromkeys(self._n_pushes, 0)
        self.names = list(self._n_pushes)
        self.spent = 0.0  # seconds of the shard, work left out
        self._handle(Started(incarnation=1))
        for name in self.names:
            self.enter(name)

    def _handle(self, event: Event) -> None:
        events = deque([event])
        while events:
            event = events.popleft()
            began = time.perf_counter()
            actions = self._shard.handle(event, 0.0)
            self.spent += time.perf_counter() - began
            events += [
                Computed(name=action.name, result=action.work())
                for action in actions
                if isinstance(action, Compute)
            ]

    def _receive(self, name: Address, message: Message) -> None:
        self._handle(Received(sender=name, incarnation=1, message=message))

    def enter(self, name: Address) -> None:
        self._entries[name] += 1
        entries = self._entries[name] if self.counts_ticks else msgspec.UNSET
        sequence = self._n_pushes[name] + 1
        self._receive(name, msgspec.structs.replace(OPEN, entries=entries, next_sequence=sequence))

    leave = enter  # a change of what it was before

    def push(self, name: Address) -> None:
        self._n_pushes[name] += 1
        n = self._n_pushes[name]
        session = self._shard._sessions.get(name)  # noqa: SLF001 -- a client would know its tick
        assert session is not None
        tick = session.tick if session.tick is msgspec.UNSET else session.tick + 1
        block = pf.PushBlock(sequence=n, term=1, block_index=0, values=self._gradient)
        push = pf.Push(
            sequence=n,
            term=1,
            fetched_clock=self._shard.values.clock,
            n_gradients=1,
            samples=n,
            n_samples=1,
            tick=tick,
        )
        self._receive(name, block)
        self._receive(name, push)


def messages(*, small: bool) -> dict[str, float]:
    numbers = (4, 16) if small else (10, 100, 1000, 10_000)
    n_each = 32 if small else 2000
    rows: dict[str, dict[str, str]] = {}
    figures: dict[str, float] = {}
    for preset in PRESET_NAMES:
        kinds = ("push", "leave", "enter") if OneShard(preset, 1).counts_ticks else ("push",)
        shards = {n: OneShard(preset, n) for n in numbers}
        for kind in kinds:
            times: dict[int, list[float]] = {n: [] for n in numbers}
            for n in measurement.turns(numbers, n_rounds=1 if small else 5):
                times[n].append(_measured(shards[n], kind, n_each))
            found = {n: median(each) for n, each in times.items()}
            rows[f"{preset}, {kind}"] = {f"{n:,}": f"{1e6 * t:.1f}" for n, t in found.items()}
            growth = found[numbers[-1]] / found[numbers[0]]
            figures[f"growth_{kind}"] = max(growth, figures.get(f"growth_{kind}", 0.0))
        figures[f"bytes_{preset}"] = _bytes_of(preset, numbers[-1])
    measurement.show("processor microseconds of a shard, by the number of its clients", rows)
    return figures


def _measured(shard: OneShard, kind: str, n_each: int) -> float:
    """Return the seconds of one message of this kind; afterwards all clients are in again."""
    names = shard.names
    # Rounds end with the last of all: so each has a push in each turn.
    chosen = list(islice(cycle(names), max(n_each // len(names), 1) * len(names)))
    if kind != "push":
        chosen = names[:n_each]
    gc.collect()
    first, other = (shard.push, None) if kind == "push" else (shard.leave, shard.enter)
    if kind == "enter":
        _each(chosen, shard.leave)
    shard.spent = 0.0
    _each(chosen, first)
    spent = shard.spent
    if kind == "leave" and other is not None:
        _each(chosen, other)
    return spent / len(chosen)


def _each(names: Sequence[Address], call: Callable[[Address], None]) -> None:
    for name in names:
        call(name)


def _bytes_of(preset: str, n_clients: int) -> float:
    """Return what the shard has for each client, beside its two push buffers' memory."""
    gc.collect()
    tracemalloc.start()
    shard = OneShard(preset, n_clients)
    names, before = len(shard.names), tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return before / names


# ---------------------------------------------------------------------------- loopback

SECONDS: Final = 10.0  # of which pushes are counted


def loopback(n_clients: int, n_processes: int) -> dict[str, float]:
    """Let clients in threads of a few processes push; ended, their server ends, too."""
    command = [sys.executable, "-m", "experiments.benchmarks.many_clients"]
    n_each = n_clients // n_processes
    with TemporaryDirectory() as folder:
        server = ParameterServer(
            [torch.nn.Parameter(torch.zeros(N_ELEMENTS))],
            rule=SGD(learning_rate=1e-6),
            directory=Path(folder) / "run",
            shared_memory=False,
        )
        with server:
            words = [*command, "--address", server.address, "--clients", str(n_each)]
            processes = [
                subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                for _ in range(n_processes)
            ]
            for process in processes:  # all clients are there
                assert process.stdout is not None
                process.stdout.readline()
            found = [json.loads(process.communicate("begin\n")[0]) for process in processes]
    counts = [n for one in found for n in one]
    return {
        "pushes_per_second": sum(counts) / SECONDS,
        "least_share": min(counts) / (sum(counts) / len(counts)),
        "clients": float(len(counts)),
    }


def clients(address: str, n: int) -> None:
    """Push with so many clients once told so; print how often each has."""
    counts, is_over = [0] * n, threading.Event()
    all_are_there = threading.Barrier(n + 1)

    def run(index: int) -> None:
        gradients = [torch.ones(N_ELEMENTS)]
        with BareClient([torch.nn.Parameter(torch.zeros(N_ELEMENTS))], address) as client:
            all_are_there.wait()
            while not is_over.is_set():
                client.push(gradients)
                counts[index] += 1

    threads = [threading.Thread(target=run, args=(index,)) for index in range(n)]
    for thread in threads:
        thread.start()
    all_are_there.wait()
    print("here", flush=True)
    sys.stdin.readline()
    before = list(counts)
    time.sleep(SECONDS)
    print(json.dumps([after - n for n, after in zip(before, counts, strict=True)]), flush=True)
    is_over.set()
    for thread in threads:
        thread.join()


PARTS: Final = ("messages", "loopback")
N_PROCESSES: Final = 4


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--clients", type=int, default=1000, help="of `loopback`")
    parser.add_argument("--address", help=argparse.SUPPRESS)  # of its server, to its processes
    options = measurement.options_of(parser, arguments, small={"clients": 8})
    torch.set_num_threads(1)
    if options.address is not None:
        clients(options.address, options.clients)
        return
    figures: dict[str, float] = {}
    if "messages" in options.only:
        figures |= messages(small=options.small)
    if "loopback" in options.only:
        figures |= loopback(options.clients, N_PROCESSES)
    measurement.conclude("many_clients", figures)


if __name__ == "__main__":
    main()
