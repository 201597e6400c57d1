"""The connections to a port as the kernel knows them: who, and how many bytes so far.

ZeroMQ bounds the frames of a message and the messages that wait, but not the parts of a
message that never ends, nor what one peer sends in a second; and it cannot close one
connection. The kernel can. It is asked for all connections of the port at once (by
netlink, `sock_diag`), for there may be hundreds, several times a second; where it does
not answer, every descriptor of this process is looked at.

A descriptor is looked at by way of a copy of its own, which stays what it is even if
ZeroMQ closes the original meanwhile. Only Linux tells so much; elsewhere there is
nothing to see, and ZeroMQ's own bounds are all there is.
"""

import fcntl
import os
import socket
import struct
import sys
import termios
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final


Peer = tuple[str, int]
"""Address and port of the other side."""

_DESCRIPTORS: Final = Path("/proc/self/fd")
_BYTES_RECEIVED: Final = struct.Struct("=128xQ")  # of tcp_info (linux/tcp.h)
_LISTENING: Final = socket.SO_ACCEPTCONN

# linux/netlink.h, linux/sock_diag.h, linux/inet_diag.h
_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_DUMP: Final = 0x301
_DONE: Final = 3
_ERROR: Final = 2
_INFO: Final = 2  # tcp_info
_STATES: Final = 1 << 1 | 1 << 8  # established; closed by the other side
_HEADER: Final = struct.Struct("=IHHII")
_REQUEST: Final = struct.Struct("=BBBxI")
_SOCKETS: Final = struct.Struct(">HH16s16sIII")  # ports and addresses, of both sides
_TOLD: Final = struct.Struct("=BBBB")
_WAITING: Final = struct.Struct("=56xI")
_MESSAGE_BYTES: Final = 72
_ATTRIBUTE: Final = struct.Struct("=HH")
_ANSWER_BYTES_MAX: Final = 1 << 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """One connection, at one moment.

    Attributes:
        peer: The other side.
        n_bytes: Received so far, read by ZeroMQ or not.
        n_waiting: Of them, those that ZeroMQ has not read.
    """

    peer: Peer
    n_bytes: int
    n_waiting: int


def connections(port: int) -> list[Connection]:
    """Return the connections that others have opened to this port."""
    try:
        return list(_listed(port))
    except (AttributeError, OSError, struct.error):  # no such kernel, or forbidden
        return [told for _, link in _links(port) if (told := _told(link)) is not None]


def at(descriptor: int, port: int) -> Connection | None:
    """Return the connection to this port that has this descriptor, if one has."""
    link = _link(descriptor, port)
    return None if link is None else _told(link)


def cut(port: int, peers: Collection[Peer]) -> int:
    """Close connections to this port, for both sides; return how many there were.

    Args:
        port: Nothing else is closed.
        peers: Of these.
    """
    n = 0
    for _, link in _links(port) if peers else ():
        with link, suppress(OSError):
            if link.getpeername()[:2] in peers:
                link.shutdown(socket.SHUT_RDWR)
                n += 1
    return n


def cut_descriptor(port: int, descriptor: int) -> bool:
    """Close the connection to this port that has this descriptor, if one has."""
    link = _link(descriptor, port)
    if link is None:
        return False
    with link, suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
        return True
    return False


def listener(port: int) -> socket.socket | None:
    """Return a copy of the socket that listens at this port."""
    for _, link in _links(port, listening=True):
        return link
    return None


# -------------------------------------------------------------------------- netlink


def _listed(port: int) -> Iterator[Connection]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        asked = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 1 << _INFO - 1, _STATES)
        asked += _SOCKETS.pack(port, 0, b"", b"", 0, 0xFFFFFFFF, 0xFFFFFFFF)
        n_bytes = _HEADER.size + len(asked)
        kernel.send(_HEADER.pack(n_bytes, _BY_FAMILY, _DUMP, 0, 0) + asked)
        while True:
            answer = kernel.recv(_ANSWER_BYTES_MAX)
            while answer:
                size, kind, *_ = _HEADER.unpack_from(answer)
                if kind == _DONE:
                    return
                if kind == _ERROR or size < _HEADER.size:
                    raise OSError("the kernel does not tell of connections")
                yield _read(answer[_HEADER.size : size])
                answer = answer[(size + 3) & ~3 :]


def _read(message: bytes) -> Connection:
    sockets = _SOCKETS.unpack_from(message, _TOLD.size)
    at, n_bytes = _MESSAGE_BYTES, 0
    while at + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _INFO:
            (n_bytes,) = _BYTES_RECEIVED.unpack_from(message, at + _ATTRIBUTE.size)
        at += max(_ATTRIBUTE.size, (size + 3) & ~3)
    host = socket.inet_ntoa(sockets[3][:4])
    (n_waiting,) = _WAITING.unpack_from(message)
    return Connection(peer=(host, sockets[1]), n_bytes=n_bytes, n_waiting=n_waiting)


# ---------------------------------------------------------------------- descriptors


def _told(link: socket.socket) -> Connection | None:
    with link, suppress(OSError, struct.error):  # it may end at any moment
        option = socket.TCP_INFO
        told = link.getsockopt(socket.IPPROTO_TCP, option, _BYTES_RECEIVED.size)
        waiting = fcntl.ioctl(link, termios.FIONREAD, bytes(4))
        host, port = link.getpeername()[:2]
        return Connection(
            peer=(host, port),
            n_bytes=_BYTES_RECEIVED.unpack(told)[0],
            n_waiting=int.from_bytes(waiting, sys.byteorder),
        )
    return None


def _links(port: int, *, listening: bool = False) -> Iterator[tuple[int, socket.socket]]:
    if sys.platform != "linux":
        return
    for descriptor in [int(path.name) for path in _DESCRIPTORS.iterdir()]:
        link = _link(descriptor, port, listening=listening)
        if link is not None:
            yield descriptor, link


def _link(descriptor: int, port: int, *, listening: bool = False) -> socket.socket | None:
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
            and bool(link.getsockopt(socket.SOL_SOCKET, _LISTENING)) == listening
        ):
            return link
    link.close()
    return None
