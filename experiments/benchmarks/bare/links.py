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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

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

    def __init__(self, kind: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.inbox, self.outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for one in (self.inbox, self.outbox):
            one.linger = 0
            one.set_hwm(MESSAGES_MAX)
            one.rcvtimeo = 1000 * IDLE_SECONDS_MAX  # whoever is forgotten ends
        if kind == "zmq_curve":
            PAIR.serve(self.inbox)
            PAIR.dial(self.outbox, PAIR.public)
        self.inbox.bind("ipc://*" if kind == "zmq_files" else f"tcp://{HOST}:*")
        self.endpoint = self.inbox.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, vector: torch.Tensor) -> None:
        values = vector.numpy().view(np.uint8).data
        for start in range(0, len(values), BLOCK_BYTES):
            self.outbox.send(values[start : start + BLOCK_BYTES], copy=False)

    def receive(self, vector: torch.Tensor) -> None:
        values = vector.numpy().view(np.uint8).data
        for start in range(0, len(values), BLOCK_BYTES):
            block = self.inbox.recv(copy=False).buffer
            values[start : start + len(block)] = block


def serve(link: ZmqLink, client: str, n_elements: int) -> None:
    link.outbox.connect(client)
    link.outbox.send(link.endpoint.encode())
    mine, slot = Slice(n_elements), torch.zeros(n_elements)
    while (word := link.inbox.recv()) not in {END, b""}:
        if word == PUSH:
            link.receive(slot)
            mine.update(slot)
            link.outbox.send(DONE)
        else:
            link.send(mine.values)


class Client:
    """Pushes to all servers, and fetches from them, side by side."""

    def __init__(self, links: Sequence[ZmqLink], n_elements: int) -> None:
        self._links = links
        self._threads = ThreadPoolExecutor(len(links))
        self._gradients = [torch.randn(n_elements) for _ in links]
        self._slots = [torch.zeros(n_elements) for _ in links]
        self._values = [torch.zeros(n_elements) for _ in links]

    def push(self) -> None:
        list(self._threads.map(self._push, range(len(self._links))))

    def fetch(self) -> None:
        list(self._threads.map(self._fetch, range(len(self._links))))

    def end(self) -> None:
        for link in self._links:
            link.outbox.send(END)
        self._threads.shutdown()

    def _push(self, k: int) -> None:
        self._slots[k].copy_(self._gradients[k])
        self._links[k].outbox.send(PUSH)
        self._links[k].send(self._slots[k])
        self._links[k].inbox.recv()

    def _fetch(self, k: int) -> None:
        self._links[k].outbox.send(FETCH)
        self._links[k].receive(self._values[k])


def main(kind: str, n_servers: int, n_elements: int, endpoint: str = "") -> None:
    torch.set_num_threads(1)
    if endpoint:
        keep_memory(block_bytes_max=KEPT_BYTES_MAX)
        serve(ZmqLink(kind), endpoint, n_elements)
        return
    keep_memory()
    command = [sys.executable, "-m", "experiments.benchmarks.bare.links", *sys.argv[1:4]]
    with ExitStack() as servers:
        links = [ZmqLink(kind) for _ in range(n_servers)]
        for link in links:
            servers.enter_context(subprocess.Popen([*command, link.endpoint]))
            link.outbox.connect(link.inbox.recv().decode())
        client = Client(links, n_elements)
        workers.serve(lambda n: workers.timed_pairs(client.push, client.fetch, n))
        client.end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
