"""What a small message takes of the processors of this host, both ends together."""

import secrets
import time
from typing import Final

from distbelief.messages import Alive
from distbelief.roles import Seconds
from distbelief.transport.zmq_transport import ZmqTransport


N_MESSAGES: Final = 300
N_WARM: Final = 30
WAIT_SECONDS_MAX: Final = 1.0


def seconds_of_message() -> Seconds:
    """Return the processor time of a message to another process, and of its receipt.

    Two transports of this process talk to each other; their threads count as well.
    """
    token = secrets.token_hex(16)
    one = ZmqTransport(name="one", incarnation=1, token=token, log=_silent)
    other = ZmqTransport(name="other", incarnation=1, token=token, log=_silent)
    with one, other:
        one.connect("other", 1, other.endpoint)
        other.connect("one", 1, one.endpoint)
        for _ in range(N_WARM):
            _there_and_back(one, other)
        begun = time.process_time()
        for _ in range(N_MESSAGES):
            _there_and_back(one, other)
        return (time.process_time() - begun) / (2 * N_MESSAGES)


def _there_and_back(one: ZmqTransport, other: ZmqTransport) -> None:
    one.send("other", Alive())
    _await(other)
    other.send("one", Alive())
    _await(one)


def _await(transport: ZmqTransport) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < deadline:
        if any(True for _ in transport.receive()):
            return
        transport.poll(WAIT_SECONDS_MAX)


def _silent(level: str, text: str) -> None:
    del level, text
