"""Places: where a role listens, and by which key it is known there.

    ipc:///dev/shm/DIRECTORY/.shard-0.1   a socket of this machine and user
    tcp://10.0.0.1:41000?key=HEX          encrypted, for the holder of this public key
    tcp://0.0.0.0:41000?key=HEX           on the machine where the supervisor was found

A peer names places too, so those of TCP are numbers only: no name is looked up for it.
Each guard connects to one kind of places.
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

from distbelief.errors import JobError, TransportError
from distbelief.transport.keys import KEY_PATTERN


ANYWHERE: Final = "0.0.0.0"  # noqa: S104 -- stands for "all interfaces" in addresses
LOOPBACK: Final = "127.0.0.1"

PLACE_CHARACTERS_MAX: Final = 128  # as many as a `messages.bounds.Name`

_SOMEWHERE: Final = "192.0.2.1"  # RFC 5737: nobody is there; only the route matters
_INTERFACE: Final = struct.Struct("16s4x4s232x")  # ifreq (linux/if.h), its name, number
_ASK_NUMBER: Final = 0x8915  # SIOCGIFADDR
_PLACE: Final = re.compile(
    rf"tcp://(?P<host>[0-9.]{{7,15}}):(?P<port>[0-9]{{1,5}})"
    rf"(\?key=(?P<key>{KEY_PATTERN}))?"
)
_FILE: Final = re.compile(r'ipc://(?P<path>/[!"$&->@-~]+)')


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where somebody listens.

    Attributes:
        host: A number; `ANYWHERE`: that of the supervisor.
        port: Of TCP.
        key: Public, in hexadecimal digits.
        path: Of a socket of this machine, in place of all else.
    """

    host: str = ""
    port: int = 0
    key: str = ""
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote, perhaps on another machine.

        Raises:
            TransportError: it is no place.
        """
        is_short = len(text) <= PLACE_CHARACTERS_MAX
        if is_short and (file := _FILE.fullmatch(text)):
            return cls(path=file["path"])
        found = _PLACE.fullmatch(text) if is_short else None
        if found is not None and 1 <= int(found["port"]) <= 65535:
            try:
                host = str(ipaddress.IPv4Address(found["host"]))
            except ValueError:
                pass
            else:
                return cls(host=host, port=int(found["port"]), key=found["key"] or "")
        raise TransportError(
            f"{text[:PLACE_CHARACTERS_MAX]!r} is no place where a peer can listen: it "
            "looks like tcp://10.0.0.1:41000, and ?key= with 64 hexadecimal digits"
        )

    @property
    def endpoint(self) -> str:
        """What ZeroMQ connects to."""
        return f"ipc://{self.path}" if self.path else f"tcp://{self.host}:{self.port}"

    @override
    def __str__(self) -> str:
        """Write it as one line."""
        return f"{self.endpoint}?key={self.key}" if self.key else self.endpoint

    def seen_from(self, supervisor_host: str) -> "Endpoint":
        """Return the place for one who found the supervisor at this host."""
        return replace(self, host=supervisor_host) if self.host == ANYWHERE else self


def is_local(endpoint: str) -> bool:
    """Return whether only this machine has this endpoint."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        return True
    host, _, _ = address.rpartition(":")
    try:
        return scheme == "tcp" and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to anything


def number_of(host: str) -> str:
    """Return the number of a host that the user named.

    Raises:
        JobError: it has none.
    """
    return ANYWHERE if host == "*" else numbers_of(host)[0]


def numbers_of(host: str) -> list[str]:
    """Return all numbers that the name of a host stands for just now.

    It may take as long as whoever knows names takes to answer.

    Raises:
        JobError: there are none.
    """
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter of "a..b"
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise JobError(
            f"there is no address of a host {host!r} ({why}): use its "
            "number, such as 10.0.0.1 (IPv6 is not supported)"
        ) from None
    return [str(entry[4][0]) for entry in found]


def own_number_towards(host: str) -> str:
    """Return the number by which `host` can reach this machine, by its routes."""
    if host == ANYWHERE or ipaddress.IPv4Address(host).is_loopback:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: only a route is chosen
        except OSError as error:
            raise TransportError(
                f"there is no way from this machine to {host}: {error.strerror}"
            ) from None
        return str(probe.getsockname()[0])


def own_number() -> str:
    """Return the number by which other machines most likely reach this one.

    By its default route; where there is none, as in a cluster's own network, the number
    of the first interface that is not the loopback; without any, that of the loopback.
    """
    with suppress(TransportError):
        return own_number_towards(_SOMEWHERE)
    for _, name in socket.if_nameindex():
        number = interface_number(name)
        if number is not None and not ipaddress.IPv4Address(number).is_loopback:
            return number
    return LOOPBACK


def interface_number(name: str) -> str | None:
    """Return the number of an interface of this machine, if it has one (on Linux)."""
    asked = _INTERFACE.pack(name.encode(), bytes(4))
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernel:
        _, number = _INTERFACE.unpack(fcntl.ioctl(kernel, _ASK_NUMBER, asked))
        return socket.inet_ntoa(number)
    return None
