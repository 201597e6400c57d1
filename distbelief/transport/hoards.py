"""Hoards: messages that are begun and do not end.

What ZeroMQ had read of a connection at one look can, at the next, be but a part of one
message, unless it has been handed over: if at some moment between them none waited to
be read. Whoever sends more than any message has will not end it. Of a connection that
has said no whole word the key is not known; its address is.
"""

from collections.abc import Collection, Iterable

from distbelief.transport.connections import Peer
from distbelief.transport.peers import Caps, Record


_ALIKE = 8  # less than the cap


def objection(record: Record, caps: Caps) -> str | None:
    """Return what is wrong with the message that has come in parts so far."""
    held = _held(record)
    if held <= caps.unfinished_bytes_max:
        return None
    return f"{held} bytes wait, of a message that does not end"


def alike(
    records: Iterable[Record], caps: Caps, *, addresses: Collection[str]
) -> dict[Peer, tuple[Record, str]]:
    """Return what else comes from where messages do not end, and is like that.

    Each of many connections would come to the cap, and all at about the same time:
    until then they take the link, and the time to read it.

    Args:
        records: What is known of all connections.
        caps: What one may have.
        addresses: Of those who began such messages.
    """
    cuts: dict[Peer, tuple[Record, str]] = {}
    for record in records if addresses else ():
        is_alike = not record.key and record.peer[0] in addresses
        held = _held(record) if is_alike else 0
        if held > caps.unfinished_bytes_max / _ALIKE:
            why = f"{held} bytes wait, beside a message that does not end"
            cuts[record.peer] = record, why
    return cuts


def _held(record: Record) -> int:
    return record.n_taken - record.n_bytes
