"""A siege: so many come to a port that those who are there already would suffer.

Each that comes takes ZeroMQ's time, also one that has no key: it has to be let in to be
asked. So newcomers have a bucket that leaks; when it runs over, the kernel lets in only
some of them (a filter of the listening socket, for which there are no half measures
such as closing what is open already):

    who comes from                              is let in
    where somebody is that keeps the rules      always; unless too many still come
    anywhere else                               now and then, by chance

as seldom as it takes for a part of what the bucket leaks. Whoever is not let in is not
refused either: TCP tries again, a second later, then less and less often. Connections
that are open do not notice. Only Linux has such filters; elsewhere all are let in.
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


# The connections to a port as the kernel knows them: who, and how many bytes so far.
#
# ZeroMQ bounds the frames of a message and the messages that wait, but not the parts of a
# message that never ends, nor what one peer sends in a second; and it cannot close one
# connection. The kernel can. It is asked for all connections of the port at once (by
# netlink, `sock_diag`), for there may be hundreds, several times a second; where it does
# not answer, every descriptor of this process is looked at.
#
# A descriptor is looked at by way of a copy of its own, which stays what it is even if
# ZeroMQ closes the original meanwhile. Only Linux tells so much; elsewhere there is
# nothing to see, and ZeroMQ's own bounds are all there is.

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


# Newcomers to a port: how many have come that are not known to be let in.
#
# ZeroMQ tells of each connection that it has accepted, and asks later, when it has proved
# a key, whether that one is let in. Whoever is, does not count: the roles of a large job
# all come at once. But only so many of one key, or else its holder could keep the server
# busy with nothing but handshakes; and whose key opens connection after connection, and
# says nothing that ZeroMQ takes, is out for no good: sooner if they end so, for honest
# ones wait until there is something to say.

_WORDS: Final = "inproc://newcomers"  # of this transport's context alone


@final
class ConnectionRate:
    """To the port of one inbox.

    Args:
        per_second_max: Of one key that is let in, over some seconds.
        burst_max: Likewise, at once.
        silent_max: Connections of one key on which nothing was said, at once.
        ended_max: Of them, that have ended.
        own: A key of which any number may come: this side's.
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
        self._words: Inbox | None = None
        self._n = 0  # accepted since the last look
        self._n_admitted: Counter[str] = Counter()  # by key, since the last look
        self._n_spoke: Counter[str] = Counter()  # likewise
        self._levels: dict[str, float] = {}  # by key, of its bucket
        self._silent: dict[str, float] = {}  # by key: admitted, less those that spoke

    def listen(self, inbox: Inbox) -> None:
        """Be told of all that this socket accepts, from before it is bound."""
        inbox.monitor(_WORDS, zmq.EVENT_ACCEPTED)
        self._words = inbox.context.socket(zmq.PAIR)
        self._words.linger = 0
        self._words.rcvhwm = 0  # else ZeroMQ would wait for us to read
        self._words.connect(_WORDS)

    def admitted(self, key: str) -> None:
        """One has proved this key, and is let in."""
        self._n_admitted[key] += 1

    def spoke(self, key: str) -> None:
        """A connection of this key has said its first word."""
        self._n_spoke[key] += 1

    def mute(self, seconds: Seconds, *, n_open: int) -> list[str]:
        """Return keys of too many connections that never say anything; before `look`.

        Args:
            seconds: Since the last look.
            n_open: Connections of anybody that have said nothing, and are here.
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
        """Return whether more have come since the last look than may at once.

        Or if so many were let in, and have said nothing yet, that some may have ended.
        """
        while self._words is not None and self._words.poll(0):
            self._words.recv_multipart()
            self._n += 1
        n_admitted = self._n_admitted.total()
        n_silent = n_admitted - self._n_spoke.total()
        return self._n - n_admitted > self._burst_max or n_silent > self._ended_max

    def look(self, seconds: Seconds) -> int:
        """Return how many have come since the last look, less those let in meanwhile.

        Fewer than none, if some had come before it.

        Args:
            seconds: Since the last look.
        """
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
        """Be told no more."""
        if self._words is not None:
            self._words.close(0)
            self._words = None


# What is known of the peers at one port, and what one of them may cost.


@final
@dataclass(frozen=True, kw_only=True)
class PeerLimits:
    """What one peer may cost.

    Attributes:
        messages_per_second_max: Of one key, over some seconds.
        burst_messages_max: Of one key, at once.
        unread_bytes_max: Of one connection.
        unfinished_bytes_max: Of one connection, in ZeroMQ, though no message waits: it
            can be but a part of one, and two frames are the most that any has.
        unread_bytes_of_key_max: Of all connections of one key: a machine's roles share
            one, and each may have 64 blocks on their way to each shard.
        connections_max: Of one address, that have said nothing so far.
        unheard_max: Connections of one key that have ended with nothing said, at once.
        connections_of_key_max: Of one key: the roles of a machine, each with a link to
            every shard of the other, share one.
        newcomers_per_second_max: Connections that are opened, over some seconds: of
            each key, and of all together that prove none.
        burst_newcomers_max: Likewise, at once.
        handshake_seconds_max: To prove one's key.
        suspended_seconds: How long who broke a rule stays out.
        watch_seconds: Between two looks.
    """

    messages_per_second_max: float = 5_000.0  # blocks of 1 MiB: 40 Gbit/s
    burst_messages_max: float = 20_000.0
    unread_bytes_max: int = 1 << 28
    unfinished_bytes_max: int = (2 << 20) + (1 << 17)
    unread_bytes_of_key_max: int = 1 << 30
    connections_max: int = 1024
    unheard_max: int = 64
    connections_of_key_max: int = 4096
    newcomers_per_second_max: float = 20.0
    burst_newcomers_max: float = 300.0
    handshake_seconds_max: float = 5.0
    suspended_seconds: float = 30.0
    watch_seconds: float = 0.25


@final
@dataclass(slots=True, kw_only=True)
class PeerRecord:
    """What is known of one connection.

    Attributes:
        peer: Address and port.
        key: Of its messages so far.
        descriptor: By which ZeroMQ knows it, once it has said something.
        since: When it was first seen.
        n_bytes: That have been read here, or are forgiven.
        n_taken: That ZeroMQ had read at the last look.
    """

    peer: Peer
    key: str = ""
    descriptor: int | None = None
    since: Seconds
    n_bytes: int = 0
    n_taken: int = 0

    def forgive(self, n: int, *, at_most: int) -> None:
        """Take so many for read, if so many have come."""
        self.n_bytes = max(self.n_bytes, min(self.n_bytes + n, at_most))


@final
@dataclass(slots=True)
class PeerTable:
    """Of all peers."""

    connections: dict[Peer, PeerRecord] = field(default_factory=dict)
    speaking: dict[int, PeerRecord] = field(default_factory=dict)  # by descriptor
    n_messages: Counter[str] = field(default_factory=Counter)  # by key, since a look
    levels: dict[str, float] = field(default_factory=dict)  # by key, of its bucket
    suspended: dict[str, Seconds] = field(default_factory=dict)  # key -> until when
    barred: dict[str, Seconds] = field(default_factory=dict)  # address -> until when
    n_closed: int = 0  # connections of who has not shown a key
    n_own: int = 0  # offences of this side's own key


# Hoards: messages that are begun and do not end.
#
# What ZeroMQ had read of a connection at one look can, at the next, be but a part of one
# message, unless it has been handed over: if at some moment between them none waited to
# be read. Whoever sends more than any message has will not end it. Of a connection that
# has said no whole word the key is not known; its address is.

_ALIKE = 8  # less than the cap


def objection(record: PeerRecord, caps: PeerLimits) -> str | None:
    """Return what is wrong with the message that has come in parts so far."""
    held = _held(record)
    if held <= caps.unfinished_bytes_max:
        return None
    return f"{held} bytes wait, of a message that does not end"


def alike(
    records: Iterable[PeerRecord], caps: PeerLimits, *, addresses: Collection[str]
) -> dict[Peer, tuple[PeerRecord, str]]:
    """Return what else comes from where messages do not end, and is like that.

    Each of many connections would come to the cap, and all at about the same time:
    until then they take the link, and the time to read it.

    Args:
        records: What is known of all connections.
        caps: What one may have.
        addresses: Of those who began such messages.
    """
    cuts: dict[Peer, tuple[PeerRecord, str]] = {}
    for record in records if addresses else ():
        is_alike = not record.key and record.peer[0] in addresses
        held = _held(record) if is_alike else 0
        if held > caps.unfinished_bytes_max / _ALIKE:
            why = f"{held} bytes wait, beside a message that does not end"
            cuts[record.peer] = record, why
    return cuts


def _held(record: PeerRecord) -> int:
    return record.n_taken - record.n_bytes


N_WELCOME_MAX: Final = 1024
SIEGED: Final = 4.0
"""By which newcomers are fewer in a siege: who keeps the rules is let in besides."""

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
    """Of one port.

    Attributes:
        per_second_max: Newcomers, over some time.
        burst_max: At once.
        share: Of newcomers from anywhere, that are let in now.
    """

    per_second_max: float
    burst_max: float
    share: float = 1.0
    _level: float = 0.0
    _welcomes: bool = True
    _listener: socket.socket | None = None

    def look(self, port: int, n: int, seconds: Seconds, *, welcome: Collection[str]) -> str | None:
        """Take note of who has come in so many seconds; return what there is to tell.

        Args:
            port: That they came to.
            n: How many.
            seconds: Since the last look.
            welcome: Addresses of those who keep the rules.
        """
        leaked = self.per_second_max * seconds
        wanted = leaked if self.share == 1.0 else leaked / SIEGED
        level = max(0.0, self._level + n - leaked)
        self._level = min(level, 2.0 * self.burst_max)  # it is to end some time
        was = self.share
        if was == 1.0 and self._level <= self.burst_max:
            return None
        if was < 1.0 and self._level <= 0.0 and n / was <= leaked:
            self.share, self._welcomes = 1.0, True
            self._filter(port, None)
            return "newcomers are let in again"
        if n > 2.0 * wanted:
            self._welcomes = was == 1.0  # else they come from where nobody should
            self.share = max(2.0**-20, was * leaked / SIEGED / n)
        self._filter(port, welcome if self._welcomes else ())
        if was < 1.0:
            return None
        return (
            f"{n} connections were opened in {seconds:.2f} s, more than "
            f"{self.burst_max:.0f} at once: until there are fewer, only some are let in"
        )

    def end(self) -> None:
        """Let go of the port."""
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
    """Return the filter (cBPF): what it returns 0 for is dropped.

    Args:
        welcome: Addresses from which all are let in.
        share: Of the others, that are.
    """
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
    told = _PROGRAM.pack(n, ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH, told)
