"""A peer of `hostile`: the honest one, or one who does what he can to be a burden.

    python -m experiments.benchmarks.network.hostile_peer KIND ARGUMENTS (JSON)

It says "ready", waits for a line with a number of seconds and a share of its core, and
tells at the end how often it tried. Each kind goes on as fast as a whole core lets it,
but for who burns: he rests for what is not his share.

    honest      pushes and fetches                    needs a key that is allowed
    random      connects, sends random bytes
    huge        sends frames larger than are taken    needs a key that is allowed
    hoard       begins messages that do not end       needs a key that is allowed
    drip        sends a byte now and then, by 300 connections
    replay      sends what it recorded of another's connection
    strangers   shows keys that are not allowed
    role        speaks as a shard                     needs a key that is allowed

Two are no attacks, but what any machine would suffer beside one:

    burn        keeps its own core, and sends nothing
    knock       asks for connections where nobody listens
"""

import json
import mmap
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import zmq

from distbelief.protocol import HeartbeatAck
from distbelief.protocol.codec import Codec
from distbelief.transport.keys import KeyFiles, KeyPair


GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48)
MEBIBYTE: Final = 1 << 20
N_DRIPS: Final = 300
DRIP_SECONDS: Final = 0.25
N_AT_ONCE: Final = 64
REST_SECONDS: Final = 0.001
CLOSED: Final = 7  # a port where nobody listens
N_PARTS: Final = 4000  # of a message: more than anybody takes


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer is told.

    Attributes:
        places: Host and port of all that listen.
        server_key: Their public key.
        keys: Directory of its own key.
        run: Name of the server's run.
        address: Of the server, for the honest one.
        counter: File in which the honest one counts.
    """

    places: list[tuple[str, int]]
    server_key: str
    keys: str
    run: str
    address: str
    counter: str


Attack = Callable[[Told, Callable[[], bool]], int]


def main() -> None:
    kind, told = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Told)
    if kind == "honest":
        _be_honest(told)
        return
    print("ready", flush=True)
    seconds, share = map(float, sys.stdin.readline().split())
    until = time.monotonic() + seconds
    begun, used = time.monotonic(), time.process_time()

    def goes_on() -> bool:
        now = time.monotonic()
        if kind == "burn" and time.process_time() - used > share * (now - begun):
            time.sleep(REST_SECONDS)
        return now < until

    n = {**ATTACKS, **CONTROLS}[kind](told, goes_on)
    print(json.dumps({"tries": n}), flush=True)


def _be_honest(told: Told) -> None:
    """Push and fetch until killed; count that where others can read it."""
    import torch  # noqa: PLC0415 -- attackers have no use for it

    import distbelief  # noqa: PLC0415 -- likewise

    torch.set_num_threads(1)
    net = torch.nn.Linear(512, 512)
    optimizer = distbelief.DownpourSGD(net.parameters(), server=told.address, keys=told.keys)
    with Path(told.counter).open("r+b") as file:
        counter = mmap.mmap(file.fileno(), 8)
    n = 0
    while True:
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 1e-6)
        optimizer.step()
        n += 1
        struct.pack_into("<q", counter, 0, n)


# --------------------------------------------------------------------- no attacks


def _burn(_: Told, goes_on: Callable[[], bool]) -> int:
    n = 0
    while goes_on():
        os.urandom(4096)
        n += 1
    return n


def _knock(told: Told, goes_on: Callable[[], bool]) -> int:
    closed = [(host, CLOSED) for host, _ in told.places]
    return _flood(told, goes_on, lambda _: b"", places=closed)


# ------------------------------------------------------------------- without a key


def _random(told: Told, goes_on: Callable[[], bool]) -> int:
    starts = (b"", GREETING, GREETING + b"\x04\xc8\x05HELLO\x01\x00")
    return _flood(told, goes_on, lambda n: starts[n % 3] + os.urandom(4096))


def _replay(told: Told, goes_on: Callable[[], bool]) -> int:
    recorded = _recorded(told)
    return _flood(told, goes_on, lambda _: recorded)


def _flood(
    told: Told,
    goes_on: Callable[[], bool],
    data: Callable[[int], bytes],
    *,
    places: Sequence[tuple[str, int]] | None = None,
) -> int:
    """Open connections and write to them, some dozens at a time."""
    places = places or told.places
    links: deque[socket.socket] = deque()
    n = 0
    while goes_on():
        link = socket.socket()
        link.settimeout(0.0)
        links.append(link)
        link.connect_ex(places[n % len(places)])
        link = links[max(0, len(links) - N_AT_ONCE // 2)]  # begun a moment ago
        with suppress(OSError):
            link.send(data(n))
        if len(links) > N_AT_ONCE:
            links.popleft().close()
        n += 1
    return n


def _recorded(told: Told) -> bytes:
    """Return what an allowed peer sends in its first tenth of a second."""
    recorded = b""
    with socket.create_server(("127.0.0.1", 0)) as middle, _member(told) as member:
        member.connect(f"tcp://127.0.0.1:{middle.getsockname()[1]}")
        member.send(_word(told, "worker-recorded"))
        near, _ = middle.accept()
        with near, socket.create_connection(told.places[0], 5.0) as far:
            until = time.monotonic() + 0.3
            near.settimeout(0.01)
            far.settimeout(0.01)
            while time.monotonic() < until:
                for one, other in ((near, far), (far, near)):
                    with suppress(TimeoutError):
                        part = one.recv(65536)
                        other.sendall(part)
                        recorded += part if one is near else b""
    return recorded


def _drip(told: Told, goes_on: Callable[[], bool]) -> int:
    links: list[tuple[socket.socket, int]] = []
    n = 0
    while goes_on():
        while len(links) < N_DRIPS:
            place = told.places[n % len(told.places)]
            with suppress(OSError):
                links.append((socket.create_connection(place, timeout=1.0), 0))
            n += 1
            if not goes_on():
                break
        kept = []
        for link, sent in links:
            try:
                link.send(GREETING[sent : sent + 1] or b"x")
                kept.append((link, sent + 1))
            except OSError:
                link.close()
        links = kept
        time.sleep(DRIP_SECONDS)
    return n


def _strangers(told: Told, goes_on: Callable[[], bool]) -> int:
    pairs = [KeyPair.new() for _ in range(64)]
    return _crowd(told, goes_on, lambda n: pairs[n % 64], None)


# ----------------------------------------------------------------- an allowed key


def _huge(told: Told, goes_on: Callable[[], bool]) -> int:
    pair = KeyFiles(Path(told.keys)).pair()
    return _crowd(told, goes_on, lambda _: pair, bytes(2 * MEBIBYTE))


def _hoard(told: Told, goes_on: Callable[[], bool]) -> int:
    """Begin 64 messages that do not end, each by a connection of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pair = KeyFiles(Path(told.keys)).pair()
    part, links = bytes(MEBIBYTE), []
    for index in range(64):
        link = _link(context, told, pair)
        link.sndhwm = 1 << 20  # of parts
        link.connect("tcp://{}:{}".format(*told.places[index % len(told.places)]))
        link.send_multipart([part] * N_PARTS, copy=False)  # all are the same memory
        links.append(link)
    while goes_on():
        time.sleep(0.01)
    return len(links)


def _role(told: Told, goes_on: Callable[[], bool]) -> int:
    pair = KeyFiles(Path(told.keys)).pair()
    return _crowd(told, goes_on, lambda _: pair, _word(told, "shard-0"))


def _crowd(
    told: Told, goes_on: Callable[[], bool], pair: Callable[[int], KeyPair], message: bytes | None
) -> int:
    """Come with a key, say something, leave: some dozens at a time."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links: deque[zmq.Socket[bytes]] = deque()
    n = 0
    while goes_on():
        try:
            link = _link(context, told, pair(n))
        except zmq.ZMQError:  # those that are being closed take files, too
            time.sleep(0.001)
            continue
        links.append(link)
        link.connect("tcp://{}:{}".format(*told.places[n % len(told.places)]))
        if message is not None:
            link.send(message)
        if len(links) > N_AT_ONCE:
            links.popleft().close(0)
        n += 1
    return n


def _link(
    context: "zmq.Context[zmq.Socket[bytes]]", told: Told, pair: KeyPair
) -> "zmq.Socket[bytes]":
    link = context.socket(zmq.PUSH)
    link.linger = 0
    link.reconnect_ivl = 1
    link.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(pair.public))
    link.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.reveal())
    link.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(told.server_key))
    return link


def _member(told: Told) -> "zmq.Socket[bytes]":
    return _link(zmq.Context(), told, KeyFiles(Path(told.keys)).pair())


def _word(told: Told, sender: str) -> bytes:
    wire = Codec(run=told.run)
    return bytes(wire.encode(HeartbeatAck(), sender=sender, incarnation=1)[0])


ATTACKS: Final[Mapping[str, Attack]] = {
    "random": _random,
    "huge": _huge,
    "hoard": _hoard,
    "drip": _drip,
    "replay": _replay,
    "strangers": _strangers,
    "role": _role,
}
CONTROLS: Final[Mapping[str, Attack]] = {"burn": _burn, "knock": _knock}


if __name__ == "__main__":
    main()
