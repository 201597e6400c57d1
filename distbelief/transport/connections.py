"""The connections to a port as the kernel knows them: who, and how many bytes so far.

ZeroMQ bounds the frames of a message and the messages that wait, but not the parts of a
message that never ends, nor what one peer sends in a second; and it cannot close one
connection. The kernel can: every open descriptor of this process that is a connection
to the port is looked at by way of a copy of its own, which stays what it is even if
ZeroMQ closes the original meanwhile. Only Linux tells so much; elsewhere there is
nothing to see, and ZeroMQ's own bounds are all there is.
"""

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final


_DESCRIPTORS: Final = Path("/proc/self/fd")
_BYTES_RECEIVED: Final = struct.Struct("=128xQ")  # of tcp_info (linux/tcp.h)
_LISTENING: Final = socket.SO_ACCEPTCONN


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """One connection, at one moment.

    Attributes:
        descriptor: By which ZeroMQ knows it.
        peer: Address and port of the other side.
        n_bytes: Received so far, read by ZeroMQ or not.
    """

    descriptor: int
    peer: tuple[str, int]
    n_bytes: int


def connections(port: int) -> Iterator[Connection]:
    """Yield the connections that others have opened to this port."""
    for descriptor, link in _links(port):
        with link, suppress(OSError, struct.error):  # it may end at any moment
            option = socket.TCP_INFO
            told = link.getsockopt(socket.IPPROTO_TCP, option, _BYTES_RECEIVED.size)
            host, peer_port = link.getpeername()[:2]
            yield Connection(
                descriptor=descriptor,
                peer=(host, peer_port),
                n_bytes=_BYTES_RECEIVED.unpack(told)[0],
            )


def cut(port: int, descriptor: int, peer: tuple[str, int] | None = None) -> bool:
    """Close a connection to this port, for both sides; return whether there was one.

    Args:
        port: Nothing else is closed.
        descriptor: Its own.
        peer: Nor, if given, is what somebody else has opened since under this number.
    """
    link = _link(descriptor, port)
    if link is None:
        return False
    with link, suppress(OSError):
        if peer is None or link.getpeername()[:2] == peer:
            link.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _links(port: int) -> Iterator[tuple[int, socket.socket]]:
    if sys.platform != "linux":
        return
    for descriptor in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
        link = _link(descriptor, port)
        if link is not None:
            yield descriptor, link


def _link(descriptor: int, port: int) -> socket.socket | None:
    """Return a copy of this descriptor if it is a connection to the port."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        link = socket.socket(fileno=copy)
    except OSError:  # it is none
        os.close(copy)
        return None
    with suppress(OSError, IndexError, TypeError):
        if (
            link.family == socket.AF_INET
            and link.type == socket.SOCK_STREAM
            and link.getsockname()[1] == port
            and not link.getsockopt(socket.SOL_SOCKET, _LISTENING)
        ):
            return link
    link.close()
    return None
