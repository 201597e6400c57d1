"""What a network of one host allows at most: bare links, without a protocol.

    python -m experiments.benchmarks.bare.links KIND N_SERVERS N_ELEMENTS [ENDPOINT]

The same bytes between as many processes as ours, and the same update; but nothing is repeated,
checked, leased or decoded. Gradients are copied once, and go to each server over loopback:

    zmq_curve  pyzmq, PUSH to PULL as our transport, messages of 1 MiB that are sent
               without a copy, and copied once into place where they arrive; encrypted
    zmq_files  the same over sockets in files, not encrypted

Asked for n, it pushes and fetches n times, and answers the seconds of each push and fetch.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final, Self

import numpy as np
import torch
import zmq

from distbelief.core.memory import KEPT_BYTES_MAX, keep_memory
from distbelief.core.vectors import BLOCK_BYTES
from distbelief.transport.keys import KEY_BYTES, KeyPair
from experiments.benchmarks.bare.rpc_server import Slice
from experiments.benchmarks.measuring import workers


MESSAGES_MAX: Final = 128
IDLE_SECONDS_MAX: Final = 600
PUSH, FETCH, END, DONE = b"p", b"f", b"e", b"d"
HOST: Final = "127.0.0.1"
PAIR: Final = KeyPair.of(bytes(range(KEY_BYTES)))  # no secret: all processes of a benchmark know it


class ZmqLink:
    """Two connections, one for each way."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", kind: str) -> None:
        self._inbox, self._outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for one in (self._inbox, self._outbox):
            one.linger = 0
            one.set_hwm(MESSAGES_MAX)
            one.rcvtimeo = 1000 * IDLE_SECONDS_MAX  # whoever is forgotten ends
        if kind == "zmq_curve":
            PAIR.serve(self._inbox)
            PAIR.dial(self._outbox, PAIR.public)
        self._inbox.bind("ipc://*" if kind == "zmq_files" else f"tcp://{HOST}:*")
        self.endpoint = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)

    @classmethod
    def to(cls, endpoint: str, kind: str) -> Self:
        link = cls(zmq.Context(), kind)
        link.connect(endpoint)
        link.send_word(link.endpoint.encode())
        return link

    def connect(self, endpoint: str) -> None:
        self._outbox.connect(endpoint)

    def send_word(self, word: bytes) -> None:
        self._outbox.send(word)

    def receive_word(self) -> bytes:
        return self._inbox.recv()

    def send(self, values: memoryview) -> None:
        for start in range(0, len(values), BLOCK_BYTES):
            self._outbox.send(values[start : start + BLOCK_BYTES], copy=False)

    def receive(self, values: memoryview) -> None:
        for start in range(0, len(values), BLOCK_BYTES):
            block = self._inbox.recv(copy=False).buffer
            values[start : start + len(block)] = block


def bytes_of(vector: torch.Tensor) -> memoryview:
    return vector.numpy().view(np.uint8).data


def serve(link: ZmqLink, n_elements: int) -> None:
    mine, slot = Slice(n_elements), torch.zeros(n_elements)
    while (word := link.receive_word()) not in {END, b""}:
        if word == PUSH:
            link.receive(bytes_of(slot))
            mine.update(slot)
            link.send_word(DONE)
        else:
            link.send(bytes_of(mine.values))


class Client:
    """Pushes to all servers, and fetches from them, side by side."""

    def __init__(self, links: Sequence[ZmqLink], n_elements: int) -> None:
        self._links = links
        self._threads = ThreadPoolExecutor(len(links))
        self._gradients = [torch.randn(n_elements) for _ in links]
        self._slots = [torch.zeros(n_elements) for _ in links]
        self._values = [torch.zeros(n_elements) for _ in links]

    def push(self) -> None:
        self._side_by_side(self._push)

    def fetch(self) -> None:
        self._side_by_side(self._fetch)

    def end(self) -> None:
        for link in self._links:
            link.send_word(END)
        self._threads.shutdown()

    def _side_by_side(self, work: Callable[[int], None]) -> None:
        list(self._threads.map(work, range(len(self._links))))

    def _push(self, k: int) -> None:
        self._slots[k].copy_(self._gradients[k])
        self._links[k].send_word(PUSH)
        self._links[k].send(bytes_of(self._slots[k]))
        self._links[k].receive_word()

    def _fetch(self, k: int) -> None:
        self._links[k].send_word(FETCH)
        self._links[k].receive(bytes_of(self._values[k]))


def links_of(kind: str, n_servers: int, start: Callable[[str], None]) -> Iterator[ZmqLink]:
    """Start servers by the endpoint that they are to connect to; yield the links."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for _ in range(n_servers):
        link = ZmqLink(context, kind)
        start(link.endpoint)
        link.connect(link.receive_word().decode())
        yield link


def main(kind: str, n_servers: int, n_elements: int, endpoint: str = "") -> None:
    torch.set_num_threads(1)
    if endpoint:
        keep_memory(block_bytes_max=KEPT_BYTES_MAX)
        serve(ZmqLink.to(endpoint, kind), n_elements)
        return
    keep_memory()
    command = [sys.executable, "-m", "experiments.benchmarks.bare.links"]
    with ExitStack() as servers:

        def start(endpoint: str) -> None:
            arguments = [kind, str(n_servers), str(n_elements), endpoint]
            servers.enter_context(subprocess.Popen([*command, *arguments]))

        client = Client(list(links_of(kind, n_servers, start)), n_elements)
        workers.serve(lambda n: workers.timed_pairs(client.push, client.fetch, n))
        client.end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
