"""What is known of the peers at one port, and what one of them may cost."""

from collections import Counter
from dataclasses import dataclass, field
from typing import final

from distbelief.roles import Seconds
from distbelief.transport.connections import Peer


@final
@dataclass(frozen=True, kw_only=True)
class Caps:
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
class Record:
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
class Books:
    """Of all peers."""

    connections: dict[Peer, Record] = field(default_factory=dict)
    speaking: dict[int, Record] = field(default_factory=dict)  # by descriptor
    n_messages: Counter[str] = field(default_factory=Counter)  # by key, since a look
    levels: dict[str, float] = field(default_factory=dict)  # by key, of its bucket
    suspended: dict[str, Seconds] = field(default_factory=dict)  # key -> until when
    barred: dict[str, Seconds] = field(default_factory=dict)  # address -> until when
    n_closed: int = 0  # connections of who has not shown a key
    n_own: int = 0  # offences of this side's own key
