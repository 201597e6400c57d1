"""Unfinished messages of one connection, or of many."""

from distbelief.transport import limits
from distbelief.transport.limits import PeerLimits, PeerRecord


CAPS = PeerLimits(unfinished_bytes_max=8000)


def begun(address: str, port: int, held: int, *, key: str = "") -> PeerRecord:
    """Return a record with `held` bytes read by ZeroMQ and not handed over."""
    peer = (address, port)
    return PeerRecord(peer=peer, key=key, since=0.0, n_bytes=500, n_taken=500 + held)


def test_more_than_any_message_has_is_an_unfinished_message() -> None:
    assert limits.objection(begun("10.0.0.1", 1, 8000), CAPS) is None
    why = limits.objection(begun("10.0.0.1", 1, 8001), CAPS)
    assert why == "8001 unread bytes: a message that does not end"


def test_messages_that_do_not_end_are_ended_together() -> None:
    """Each of 64 had to reach the limit by itself: 3.5 seconds of a full link."""
    records = [
        begun("10.0.0.1", 1, 8001),
        begun("10.0.0.1", 2, 1001),
        begun("10.0.0.1", 3, 1000),  # as far as an honest one would be
        begun("10.0.0.1", 4, 7000, key="5f"),  # said something before
        begun("10.0.0.2", 5, 7000),  # from elsewhere
    ]
    cuts = limits.alike(records, CAPS, addresses={"10.0.0.1"})
    assert [port for _, port in cuts] == [1, 2]
    record, why = cuts["10.0.0.1", 2]
    assert record is records[1]
    assert why == "1001 unread bytes, with others of a message that does not end"
    assert limits.alike(records, CAPS, addresses=()) == {}
