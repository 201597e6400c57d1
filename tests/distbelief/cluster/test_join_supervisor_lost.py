"""What a machine sees of the supervisor, beside what that says to it."""

from types import SimpleNamespace
from typing import cast

from distbelief.cluster.join import SupervisorMonitor
from distbelief.transport.address import Endpoint
from distbelief.transport.zmq_transport import ZmqTransport


def test_a_supervisor_that_stood_still_has_no_other_key() -> None:
    """A machine stopped for 25 s was said to have another key than its address."""
    closed = SimpleNamespace(is_refused=lambda _: False, has_other_key=lambda _: True)
    said: list[str] = []
    lookout = SupervisorMonitor(
        cast("ZmqTransport", closed),
        key="k",
        place=Endpoint(host="127.0.0.1", port=9),
        tell=said.append,
    )
    lookout.look(is_alone=False, is_known=True)
    assert not any("another key" in text for text in said)
    lookout.look(is_alone=False, is_known=False)
    assert any("another key" in text and "prints there" in text for text in said)
    lookout.close()
