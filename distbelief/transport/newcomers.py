"""Newcomers to a port: how many have come that are not known to be let in.

ZeroMQ tells of each connection that it has accepted, and asks later, when it has proved
a key, whether that one is let in. Whoever is, does not count: the roles of a large job
all come at once. But only so many of one key, or else its holder could keep the server
busy with nothing but handshakes; and whose key opens connection after connection, and
says nothing that ZeroMQ takes, is out for no good: sooner if they end so, for honest
ones wait until there is something to say.
"""

from collections import Counter
from typing import Final, final

import zmq

from distbelief.roles import Seconds
from distbelief.transport.guard import Inbox


_WORDS: Final = "inproc://newcomers"  # of this transport's context alone


@final
class Newcomers:
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
