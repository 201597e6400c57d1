"""Endpoints: the address at which a role listens, and its public key.

    ipc:///dev/shm/DIRECTORY/.shard-0.1   a Unix socket of this host and user
    tcp://10.0.0.1:41000?key=HEX          encrypted, for the holder of this public key
    tcp://[fd00::1]:41000?key=HEX         the same by IPv6
    tcp://0.0.0.0:41000?key=HEX           on the host at which the supervisor was found; or [::]

Peers send endpoints, so TCP endpoints hold an IP address only: no name is resolved.
"""

import fcntl
import ipaddress
import re
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Self, final

from typing_extensions import override

from distbelief.core.errors import JobError, TransportError
from distbelief.transport.keys import KEY_PATTERN


ANYWHERE: Final = "0.0.0.0"  # noqa: S104 -- stands for "all interfaces" in addresses
_ANYWHERE_6: Final = "::"  # the same, for IPv6 and IPv4
LOOPBACK: Final = "127.0.0.1"
ENDPOINT_CHARACTERS_MAX: Final = 128  # the limit of a name on the wire
_UNUSED_ADDRESS: Final = "192.0.2.1"  # RFC 5737: assigned to nobody; only its route matters
_UNUSED_ADDRESS_6: Final = "2001:db8::1"  # RFC 3849
_INTERFACE: Final = struct.Struct("16s4x4s232x")  # ifreq (linux/if.h): name, address
_SIOCGIFADDR: Final = 0x8915
_TCP: Final = re.compile(
    rf"tcp://(\[(?P<six>[0-9a-f:.]{{2,45}})\]|(?P<host>[0-9.]{{7,15}})):(?P<port>[0-9]{{1,5}})"
    rf"(\?key=(?P<key>{KEY_PATTERN}))?"
)
_IPC: Final = re.compile(r'ipc://(?P<path>/[!"$&->@-~]+)')


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a role listens: `path` for a Unix socket, else `host` and `port`."""

    host: str = ""  # IP address; `is_anywhere` stands for the supervisor's host
    port: int = 0
    key: str = ""  # public key in hexadecimal digits; "" without encryption
    path: str = ""  # of the Unix socket; "" for TCP

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the output of `str(endpoint)`, possibly sent by a peer; or raise TransportError."""
        is_short = len(text) <= ENDPOINT_CHARACTERS_MAX
        if is_short and (file := _IPC.fullmatch(text)):
            return cls(path=file["path"])
        found = _TCP.fullmatch(text) if is_short else None
        if found is not None and 1 <= int(found["port"]) <= 65535:
            with suppress(ValueError):
                six = found["six"]
                four = None if six else ipaddress.IPv4Address(found["host"])
                host = str(four or ipaddress.IPv6Address(six))
                return cls(host=host, port=int(found["port"]), key=found["key"] or "")
        raise TransportError(
            f"{text[:ENDPOINT_CHARACTERS_MAX]!r} is not an endpoint: use tcp://HOST:PORT?key=KEY"
        )

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.path}" if self.path else f"tcp://{in_url(self.host)}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only processes of this host can reach it."""
        return bool(self.path) or is_loopback(self.host)

    @override
    def __str__(self) -> str:
        return f"{self.endpoint}?key={self.key}" if self.key else self.endpoint

    def seen_from(self, supervisor_host: str) -> "Endpoint":
        """Return the endpoint for a caller that reached the supervisor at this host."""
        return replace(self, host=supervisor_host) if is_anywhere(self.host) else self


def in_url(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if is_six(host) else host


def is_six(host: str) -> bool:
    """Return whether a host is an IPv6 address."""
    return ":" in host


def is_anywhere(host: str) -> bool:
    """Return whether this stands for all interfaces of a host."""
    return host in {ANYWHERE, _ANYWHERE_6}


def is_loopback(host: str) -> bool:
    """Return whether only this host reaches the address."""
    return ipaddress.ip_address(host).is_loopback


def number_of(host: str) -> str:
    """Resolve a host ("*": all interfaces), or raise JobError; blocks for DNS.

    Of a name with addresses of both kinds, it is the IPv4 address.
    """
    if host == "*":
        return ANYWHERE
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        # An address with a scope ("%eth0"), which comes last, means nothing elsewhere.
        numbers = [str(place[0]) for *_, place in found if not any(place[3:])]
        return min((str(ipaddress.ip_address(number)) for number in numbers), key=is_six)
    except (OSError, ValueError) as error:  # ValueError: a name such as "a..b", or no address
        why = error.strerror if isinstance(error, OSError) else "not a host name"
        raise JobError(
            f"host {host!r} has no address ({why}): use its IP address, such as 10.0.0.1"
        ) from None


def refuses(endpoint: str) -> bool:
    """Return whether no role lives at this endpoint any more; blocks for 1 s.

    One that does greets at once. A process that is ending may still take a connection, and breaks
    it; one that is stopped, or behind a broken link, says nothing: it may come back.
    """
    try:
        place = Endpoint.parse(endpoint)
        family = socket.AF_INET6 if is_six(place.host) else socket.AF_INET
        with socket.socket(family if place.host else socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect((place.host, place.port) if place.host else place.path)
            return not probe.recv(1)
    except (ConnectionRefusedError, ConnectionResetError, FileNotFoundError):
        return True
    except (OSError, TransportError):  # no route, or no answer
        return False


def own_address_towards(host: str) -> str:
    """Return the address at which `host` can reach this host, by the routing table."""
    if is_anywhere(host):
        return LOOPBACK
    if is_loopback(host):
        return "::1" if is_six(host) else LOOPBACK
    family = socket.AF_INET6 if is_six(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # UDP: sends nothing, only chooses a route
        except OSError as error:
            raise TransportError(f"no route from this host to {host}: {error.strerror}") from None
        return str(probe.getsockname()[0])


def own_address() -> str:
    """Return the address at which other hosts most likely reach this host.

    That is the address of the default route; without one, as in a cluster's private network, of the
    first interface that is not the loopback; then that of the IPv6 route; without any, the loopback
    address.
    """
    with suppress(TransportError):
        return own_address_towards(_UNUSED_ADDRESS)
    for _, name in socket.if_nameindex():
        number = interface_address(name)
        if number is not None and not is_loopback(number):
            return number
    with suppress(TransportError):
        return own_address_towards(_UNUSED_ADDRESS_6)
    return LOOPBACK


def interface_address(name: str) -> str | None:
    """Return the IPv4 address of a network interface, if it has one (Linux only)."""
    request = _INTERFACE.pack(name.encode(), bytes(4))
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        _, number = _INTERFACE.unpack(fcntl.ioctl(kernel, _SIOCGIFADDR, request))
        return socket.inet_ntoa(number)
    return None
