"""Limits on connections that ZeroMQ lacks: bytes, connection rates, a packet filter (Linux only).

ZeroMQ bounds frames and waiting messages, but not the parts of an unfinished message nor
a peer's rate, and it cannot close one connection. The kernel can: it lists the connections of
a port (netlink `sock_diag`) and closes them. Elsewhere only ZeroMQ's own limits hold.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys
import termios
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import zmq

from distbelief.roles.role import Seconds
from distbelief.transport.authenticator import Inbox


# Address and port of the other side.
Peer = tuple[str, int]

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
_HEAD: Final = struct.Struct("=BBBB")
_WAITING: Final = struct.Struct("=56xI")
_MESSAGE_BYTES: Final = 72
_ATTRIBUTE: Final = struct.Struct("=HH")
_ANSWER_BYTES_MAX: Final = 1 << 16


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """One connection at one moment."""

    peer: Peer  # address and port of the other side
    n_bytes: int  # bytes received so far, read by ZeroMQ or not
    n_waiting: int  # bytes that ZeroMQ has not read


def connections(port: int) -> list[Connection]:
    """Return the connections that peers have opened to this port."""
    try:
        return list(_listed(port))
    except (AttributeError, OSError, struct.error):  # no such kernel, or forbidden
        return [info for _, link in _links(port) if (info := _info(link)) is not None]


def at(descriptor: int, port: int) -> Connection | None:
    """Return the connection to this port that has this descriptor, if there is one."""
    link = _link(descriptor, port)
    return None if link is None else _info(link)


def cut(port: int, peers: Collection[Peer]) -> int:
    """Close the connections of these peers to this port; return how many there were."""
    n = 0
    for _, link in _links(port) if peers else ():
        with link, suppress(OSError):
            if link.getpeername()[:2] in peers:
                link.shutdown(socket.SHUT_RDWR)
                n += 1
    return n


def cut_descriptor(port: int, descriptor: int) -> bool:
    """Close the connection to this port that has this descriptor, if there is one."""
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


# --- netlink ---


def _listed(port: int) -> Iterator[Connection]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        request = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 1 << _INFO - 1, _STATES)
        request += _SOCKETS.pack(port, 0, b"", b"", 0, 0xFFFFFFFF, 0xFFFFFFFF)
        n_bytes = _HEADER.size + len(request)
        kernel.send(_HEADER.pack(n_bytes, _BY_FAMILY, _DUMP, 0, 0) + request)
        while True:
            answer = kernel.recv(_ANSWER_BYTES_MAX)
            while answer:
                size, kind, *_ = _HEADER.unpack_from(answer)
                if kind == _DONE:
                    return
                if kind == _ERROR or size < _HEADER.size:
                    raise OSError("the kernel does not list connections")
                yield _read(answer[_HEADER.size : size])
                answer = answer[(size + 3) & ~3 :]


def _read(message: bytes) -> Connection:
    sockets = _SOCKETS.unpack_from(message, _HEAD.size)
    at, n_bytes = _MESSAGE_BYTES, 0
    while at + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _INFO:
            (n_bytes,) = _BYTES_RECEIVED.unpack_from(message, at + _ATTRIBUTE.size)
        at += max(_ATTRIBUTE.size, (size + 3) & ~3)
    host = socket.inet_ntoa(sockets[3][:4])
    (n_waiting,) = _WAITING.unpack_from(message)
    return Connection(peer=(host, sockets[1]), n_bytes=n_bytes, n_waiting=n_waiting)


# --- descriptors ---


def _info(link: socket.socket) -> Connection | None:
    with link, suppress(OSError, struct.error):  # it may end at any moment
        option = socket.TCP_INFO
        info = link.getsockopt(socket.IPPROTO_TCP, option, _BYTES_RECEIVED.size)
        waiting = fcntl.ioctl(link, termios.FIONREAD, bytes(4))
        host, port = link.getpeername()[:2]
        return Connection(
            peer=(host, port),
            n_bytes=_BYTES_RECEIVED.unpack(info)[0],
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
    # A copy stays valid if ZeroMQ closes the original meanwhile.
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


# --- connection rates ---

_MONITOR: Final = "inproc://newcomers"  # of this transport's context alone


@final
class ConnectionRate:
    """Counts new connections to a port that have not proved an allowed key.

    Connections with an allowed key do not count, since all roles of a large job come at once,
    unless one key opens too many, or too many on which it sends nothing.

    Args:
        per_second_max: Connections per second of one key, over some seconds.
        burst_max: Connections of one key at once.
        silent_max: Connections of one key at once that sent nothing.
        ended_max: Those of them that have ended.
        own: This side's key, which has no limit.
    """

    def __init__(
        self,
        *,
        per_second_max: float,
        burst_max: float,
        silent_max: float,
        ended_max: float,
        own: str = "",
    ) -> None:
        self._own = own
        self._per_second_max = per_second_max
        self._burst_max = burst_max
        self._silent_max = silent_max
        self._ended_max = ended_max
        self._monitor: Inbox | None = None
        self._n = 0  # accepted since the last check
        self._n_admitted: Counter[str] = Counter()  # by key, since the last check
        self._n_spoke: Counter[str] = Counter()  # by key, since the last check
        self._levels: dict[str, float] = {}  # by key, of its bucket
        self._silent: dict[str, float] = {}  # by key: admitted, less those that spoke

    def listen(self, inbox: Inbox) -> None:
        inbox.monitor(_MONITOR, zmq.EVENT_ACCEPTED)
        self._monitor = inbox.context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.rcvhwm = 0  # with a limit ZeroMQ would block until it is read
        self._monitor.connect(_MONITOR)

    def admitted(self, key: str) -> None:
        self._n_admitted[key] += 1

    def spoke(self, key: str) -> None:
        self._n_spoke[key] += 1

    def mute(self, seconds: Seconds, *, n_open: int) -> list[str]:
        """Return keys with too many silent connections; call it before `look`.

        Args:
            seconds: Time since the last check.
            n_open: Open connections of any key that have sent nothing.
        """
        leaked = self._per_second_max * seconds
        silent: dict[str, float] = {}
        for key in (self._silent.keys() | self._n_admitted.keys()) - {self._own}:
            n = self._n_admitted[key] - self._n_spoke[key]
            level = max(0.0, self._silent.get(key, 0.0) - leaked + n)
            if level:
                silent[key] = level
        self._n_spoke.clear()
        n_max = min(self._silent_max, n_open + self._ended_max)
        found = [key for key, level in silent.items() if level > n_max]
        self._silent = {key: n for key, n in silent.items() if key not in found}
        return found

    def are_too_many(self) -> bool:
        # Too many at once, or so many silent ones that some may have ended.
        while self._monitor is not None and self._monitor.poll(0):
            self._monitor.recv_multipart()
            self._n += 1
        n_admitted = self._n_admitted.total()
        n_silent = n_admitted - self._n_spoke.total()
        return self._n - n_admitted > self._burst_max or n_silent > self._ended_max

    def look(self, seconds: Seconds) -> int:
        """Return how many came in the last `seconds` without an allowed key; may be negative."""
        self.are_too_many()
        n, self._n = self._n, 0
        n -= self._n_admitted.pop(self._own, 0)
        levels: dict[str, float] = {}
        for key in self._levels.keys() | self._n_admitted.keys():
            n_admitted = self._n_admitted[key]
            level = self._levels.get(key, 0.0) - self._per_second_max * seconds
            n_free = min(n_admitted, int(self._burst_max - max(0.0, level)))
            n -= max(0, n_free)
            level = min(max(0.0, level) + n_admitted, 2.0 * self._burst_max)
            if level:
                levels[key] = level
        self._levels = levels
        self._n_admitted.clear()
        return n

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close(0)
            self._monitor = None


@final
@dataclass(frozen=True, kw_only=True)
class PeerLimits:
    """What one peer may cost."""

    # Of one key, over some seconds.
    messages_per_second_max: float = 5_000.0  # blocks of 1 MiB: 40 Gbit/s
    burst_messages_max: float = 20_000.0  # of one key, at once
    unread_bytes_max: int = 1 << 28  # of one connection
    # Of one connection while no message waits: a part of one message, whose frames are two at most.
    unfinished_bytes_max: int = (2 << 20) + (1 << 17)
    # Of all connections of one key: a host's roles share one, and each may have 64 blocks in flight
    # to each shard.
    unread_bytes_of_key_max: int = 1 << 30
    connections_max: int = 1024  # of one address, that have sent nothing so far
    unheard_max: int = 64  # of one key, connections that ended without a message, at once
    # Of one key: a host's roles share one, with a link to every shard each.
    connections_of_key_max: int = 4096
    # New connections of each key, and of all without a key together.
    newcomers_per_second_max: float = 20.0
    burst_newcomers_max: float = 300.0  # the same, at once
    handshake_seconds_max: float = 5.0  # time to prove a key
    suspended_seconds: float = 30.0  # how long a peer that broke a rule is rejected
    watch_seconds: float = 0.25  # interval of the checks


@final
@dataclass(slots=True, kw_only=True)
class PeerRecord:
    """What is known of one connection."""

    peer: Peer  # address and port
    key: str = ""  # key of its messages so far
    descriptor: int | None = None  # ZeroMQ's file descriptor, once it has sent a message
    since: Seconds  # when it was first seen
    n_bytes: int = 0  # bytes that were read here, or discounted
    n_taken: int = 0  # bytes that ZeroMQ had read at the last check

    def discount(self, n: int, *, at_most: int) -> None:
        # Heartbeats arrive here as bytes without a message.
        self.n_bytes = max(self.n_bytes, min(self.n_bytes + n, at_most))


@final
@dataclass(slots=True)
class PeerTable:
    connections: dict[Peer, PeerRecord] = field(default_factory=dict)
    speaking: dict[int, PeerRecord] = field(default_factory=dict)  # by descriptor
    n_messages: Counter[str] = field(default_factory=Counter)  # by key, since the last check
    levels: dict[str, float] = field(default_factory=dict)  # by key, of its bucket
    suspended: dict[str, Seconds] = field(default_factory=dict)  # key -> until when
    barred: dict[str, Seconds] = field(default_factory=dict)  # address -> until when
    n_closed: int = 0  # connections without a key
    n_own: int = 0  # violations by this side's own key


# --- unfinished messages ---
#
# If no message waited to be read between two checks, the bytes that ZeroMQ had read at the first
# are part of one unfinished message.

_ALIKE = 8  # fraction of the limit


def objection(record: PeerRecord, caps: PeerLimits) -> str | None:
    """Return what is wrong with an unfinished message, or None."""
    held = _held(record)
    if held <= caps.unfinished_bytes_max:
        return None
    return f"{held} unread bytes: a message that does not end"


def alike(
    records: Iterable[PeerRecord], caps: PeerLimits, *, addresses: Collection[str]
) -> dict[Peer, tuple[PeerRecord, str]]:
    """Return further connections to cut: keyless ones of these addresses with unfinished messages.

    Each of many connections would reach the limit at about the same time, and use the link until
    then.
    """
    cuts: dict[Peer, tuple[PeerRecord, str]] = {}
    for record in records if addresses else ():
        is_alike = not record.key and record.peer[0] in addresses
        held = _held(record) if is_alike else 0
        if held > caps.unfinished_bytes_max / _ALIKE:
            why = f"{held} unread bytes, with others of a message that does not end"
            cuts[record.peer] = record, why
    return cuts


def _held(record: PeerRecord) -> int:
    return record.n_taken - record.n_bytes


N_WELCOME_MAX: Final = 1024
# While the filter is on, this many times fewer new connections are accepted.
SLOWDOWN: Final = 4.0

_ATTACH: Final = 26  # SO_ATTACH_FILTER
_DETACH: Final = 27
_FILTER: Final = struct.Struct("=HBBI")  # code, jump if so, jump if not, operand
_PROGRAM: Final = struct.Struct("@HP")
_LOAD_BYTE, _LOAD_WORD, _RETURN = 0x30, 0x20, 0x06
_IF_EQUAL, _IF_ABOVE, _IF_ANY = 0x15, 0x25, 0x45
_FLAGS, _SYN = 13, 0x02  # of a TCP header
_SOURCE: Final = 0xFFF00000 + 12  # SKF_NET_OFF: of the IP header
_CHANCE: Final = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
_ALL: Final = 0xFFFFFFFF


@final
@dataclass(kw_only=True)
class PacketFilter:
    """Drops part of the new connections to a port in the kernel when too many come.

    Accepting a connection costs ZeroMQ time even without a key. Addresses with a well-behaved peer
    are always accepted, others with probability `share`; TCP retries, and open connections notice
    nothing.
    """

    per_second_max: float  # new connections, over some time
    burst_max: float  # new connections at once
    share: float = 1.0  # of connections from other addresses, accepted now
    _level: float = 0.0
    _welcomes: bool = True
    _listener: socket.socket | None = None

    def look(self, port: int, n: int, seconds: Seconds, *, welcome: Collection[str]) -> str | None:
        """Count `n` new connections in `seconds`; return a line for the log, or None.

        Args:
            port: Port of the connections.
            n: How many.
            seconds: Time since the last check.
            welcome: Addresses of well-behaved peers.
        """
        leaked = self.per_second_max * seconds
        wanted = leaked if self.share == 1.0 else leaked / SLOWDOWN
        level = max(0.0, self._level + n - leaked)
        self._level = min(level, 2.0 * self.burst_max)  # so that it ends soon after the flood
        was = self.share
        if was == 1.0 and self._level <= self.burst_max:
            return None
        if was < 1.0 and self._level <= 0.0 and n / was <= leaked:
            self.share, self._welcomes = 1.0, True
            self._filter(port, None)
            return "accepting all new connections again"
        if n > 2.0 * wanted:
            self._welcomes = was == 1.0  # else they come from the accepted addresses
            self.share = max(2.0**-20, was * leaked / SLOWDOWN / n)
        self._filter(port, welcome if self._welcomes else ())
        if was < 1.0:
            return None
        return (
            f"{n} connections opened in {seconds:.2f} s, more than {self.burst_max:.0f} at once: "
            "accepting only some until there are fewer"
        )

    def end(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _filter(self, port: int, welcome: Collection[str] | None) -> None:
        if self._listener is None:
            self._listener = listener(port)
        if self._listener is None:
            return
        with suppress(OSError):
            if welcome is None:
                self._listener.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
            else:
                _attach(self._listener, program(welcome, share=self.share))


def program(welcome: Collection[str], *, share: float) -> bytes:
    """Return the cBPF filter; packets for which it returns 0 are dropped."""
    let_in = _FILTER.pack(_RETURN, 0, 0, _ALL)
    steps = [
        _FILTER.pack(_LOAD_BYTE, 0, 0, _FLAGS),
        _FILTER.pack(_IF_ANY, 1, 0, _SYN),  # connections that are open inherit it
        let_in,
        _FILTER.pack(_LOAD_WORD, 0, 0, _SOURCE),
    ]
    for address in sorted(welcome)[:N_WELCOME_MAX]:
        (number,) = struct.unpack("!I", socket.inet_aton(address))
        steps += [_FILTER.pack(_IF_EQUAL, 0, 1, number), let_in]
    steps += [
        _FILTER.pack(_LOAD_WORD, 0, 0, _CHANCE),
        _FILTER.pack(_IF_ABOVE, 1, 0, int(share * _ALL)),
        let_in,
        _FILTER.pack(_RETURN, 0, 0, 0),
    ]
    return b"".join(steps)


def _attach(listener: socket.socket, steps: bytes) -> None:
    memory = ctypes.create_string_buffer(steps, len(steps))
    n = len(steps) // _FILTER.size
    info = _PROGRAM.pack(n, ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH, info)
