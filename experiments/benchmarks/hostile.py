"""What a hostile peer costs an honest one: throughput beside it.

    python experiments/benchmarks/hostile.py [--seconds 5] [--rounds 2] [--only KIND ...] [--small]

Not in `make bench`: it takes both cores. A server with keys and an honest worker share one core,
one hostile process at a time has the other and goes on as fast as it can:

    flood       valid messages with an allowed key: more than its token bucket holds
    malformed   invalid messages with an allowed key
    strangers   connections with keys that are not allowed: each costs a handshake, which only a
                firewall prevents
    burn        control: sends nothing, only keeps its core busy

    kept_KIND         pushes per second beside it, over those in the turns before and after
    throughput_kept   the worst of `flood` and `malformed`, over `burn`
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Final

import torch
import zmq
from torch import nn

import distbelief
from distbelief.protocol import Heartbeat
from distbelief.protocol.codec import Codec
from distbelief.serve.address import ServerAddress
from distbelief.transport.keys import Allowed, KeyFiles, KeyPair
from experiments.benchmarks.measuring import measurement


HONEST_CORE, HOSTILE_CORE = 0, 1
SMALL: Final = {"seconds": 0.5, "rounds": 1, "only": ("flood",)}
NETS: Final = "from torch import nn\n\ndef make():\n    return nn.Linear(512, 512)\n"
PEACE_SECONDS: Final = 2.0
N_AT_ONCE: Final = 64
Attack = Callable[[ServerAddress, KeyPair], Iterator[None]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of an attack")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS))
    options = measurement.options_of(parser, arguments, small=SMALL)
    kinds = [kind for kind in ATTACKS if kind in {"burn", *(options.only or ATTACKS)}]
    kept: dict[str, list[float]] = {kind: [] for kind in kinds}
    with TemporaryDirectory(prefix="distbelief-") as name:
        for kind in measurement.turns(kinds, n_rounds=options.rounds):
            with _server(Path(name)) as address:
                kept[kind].append(_turn(kind, Path(name), address, options.seconds))
    means = {kind: mean(values) for kind, values in kept.items()}
    rows = {kind: {"throughput kept": f"{value:.2f}"} for kind, value in means.items()}
    measurement.show(f"One hostile process, load {measurement.load():.1f}", rows)
    bounded = [means[kind] for kind in ("flood", "malformed") if kind in means]
    figures = {f"kept_{kind}": value for kind, value in means.items()}
    worst = min(bounded, default=means["burn"]) / means["burn"]
    measurement.conclude("hostile", figures | {"throughput_kept": worst})


def _turn(kind: str, folder: Path, address: str, seconds: float) -> float:
    net = nn.Linear(512, 512)
    worker = distbelief.DownpourSGD(net.parameters(), server=address, keys=folder / "worker")
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 1e-6)

    def rate(seconds: float) -> float:
        begun, n = time.perf_counter(), 0
        while time.perf_counter() < begun + seconds:
            worker.step()
            n += 1
        return n / (time.perf_counter() - begun)

    rate(0.5)  # warm
    before = rate(PEACE_SECONDS)
    words = ["-m", "experiments.benchmarks.hostile", kind, address, str(folder / "hostile")]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()  # ready
        during = rate(seconds)
        attacker.kill()
    after = rate(PEACE_SECONDS)
    worker.close()
    print(f"{kind:>10}  {before:6.0f} {during:6.0f} {after:6.0f} pushes/s", flush=True)
    return during / mean([before, after])


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    (folder / "nets.py").write_text(NETS)
    files = {name: KeyFiles(folder / name) for name in ("server", "worker", "hostile")}
    for name, keys in files.items():
        if not keys.directory.exists():
            keys.make()
            allowed = Allowed(key=keys.pair().public, roles=("worker",), name=name)
            files["server"].allow(allowed)
    words = ["serve", "nets:make", "--keys", "server", "--bind", "tcp://127.0.0.1:*"]
    command = str(Path(sys.executable).with_name("distbelief"))
    os.sched_setaffinity(0, {HONEST_CORE})  # of this process, the honest worker, and the server
    with subprocess.Popen(
        [command, *words, "--from-scratch", "--learning-rate", "1e-6"],
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if "on this host" in line)
            yield line.split()[-1].partition("&memory")[0]
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()


# --- attacks: each yields after every try ---


def _burn(_address: ServerAddress, _pair: KeyPair) -> Iterator[None]:
    while True:
        os.urandom(4096)
        yield


def _send(address: ServerAddress, pair: KeyPair, sender: str) -> Iterator[None]:
    beat = Heartbeat(state="", counters={})
    message = bytes(Codec(run=address.run).encode(beat, sender=sender, incarnation=1)[0])
    link = _link(zmq.Context(), address, pair)
    while True:
        link.send(message)
        yield


def _strangers(address: ServerAddress, _pair: KeyPair) -> Iterator[None]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pairs = [KeyPair.new() for _ in range(N_AT_ONCE)]
    while True:
        links = [_link(context, address, pair) for pair in pairs]
        time.sleep(0.02)
        for link in links:
            link.close(0)
        yield


def _link(
    context: "zmq.Context[zmq.Socket[bytes]]", address: ServerAddress, pair: KeyPair
) -> "zmq.Socket[bytes]":
    link = context.socket(zmq.PUSH)
    link.linger = 0
    link.reconnect_ivl = 1
    pair.dial(link, address.key)
    link.connect(address.endpoint)
    return link


ATTACKS: Final[Mapping[str, Attack]] = {
    "flood": partial(_send, sender="worker-hostile"),
    "malformed": partial(_send, sender="shard-0"),  # a name that is not its own
    "strangers": _strangers,
    "burn": _burn,
}


def _attack(kind: str, address: str, keys: str) -> None:
    os.sched_setaffinity(0, {HOSTILE_CORE})
    tries = ATTACKS[kind](ServerAddress.parse(address), KeyFiles(Path(keys)).pair())
    next(tries)
    print("ready", flush=True)
    for _ in tries:
        pass


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in ATTACKS:
        _attack(*sys.argv[1:])
    else:
        main()
