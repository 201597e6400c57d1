"""Hoards: messages that are begun and do not end.

What ZeroMQ has read of a connection, and has not handed over, while no message waits to
be read, can be but a part of one. Whoever sends more than any message has will not end
it. Of a connection that has said no whole word the key is not known; its address is.
"""

from collections.abc import Collection, Iterable, Mapping

from distbelief.transport.connections import Connection, Peer
from distbelief.transport.peers import Caps, Record


_ALIKE = 8  # less than the cap


def objection(connection: Connection, record: Record, caps: Caps) -> str | None:
    """Return what is wrong with the message that has come in parts so far."""
    held = _held(connection, record)
    if held <= caps.unfinished_bytes_max:
        return None
    return f"{held} bytes wait, of a message that does not end"


def alike(
    found: Iterable[Connection],
    records: Mapping[Peer, Record],
    caps: Caps,
    *,
    addresses: Collection[str],
) -> dict[Peer, tuple[Record, str]]:
    """Return what else comes from where messages do not end, and is like that.

    Each of many connections would come to the cap, and all at about the same time:
    until then they take the link, and the time to read it.

    Args:
        found: All connections.
        records: What is known of them.
        caps: What one may have.
        addresses: Of those who began such messages.
    """
    cuts: dict[Peer, tuple[Record, str]] = {}
    for connection in found if addresses else ():
        record, held = records[connection.peer], 0
        if not record.key and record.peer[0] in addresses:
            held = _held(connection, record)
        if held > caps.unfinished_bytes_max / _ALIKE:
            why = f"{held} bytes wait, beside a message that does not end"
            cuts[connection.peer] = record, why
    return cuts


def _held(connection: Connection, record: Record) -> int:
    return connection.n_bytes - connection.n_waiting - record.n_bytes
