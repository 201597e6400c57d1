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
import socket
import struct
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

from distbelief.roles import Seconds
from distbelief.transport import connections


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
class Siege:
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
            self._listener = connections.listener(port)
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
