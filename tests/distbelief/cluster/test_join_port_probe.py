"""A knock tells a port where nobody listens from one that does not answer."""

import select
import socket

from distbelief.cluster import join
from distbelief.cluster.join import PortProbe
from distbelief.transport.address import Endpoint


def knock_at(listener: socket.socket) -> PortProbe:
    return PortProbe(Endpoint(host="127.0.0.1", port=listener.getsockname()[1]))


def test_where_somebody_listens_nobody_is_disturbed_for_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asks = knock_at(listener)
        assert not any(asks.finds_nobody(0.0) for _ in range(3))
        link, _ = listener.accept()
        with link:
            assert link.recv(1) == b""  # closed at once
        assert not asks.finds_nobody(1.0)
        assert not select.select([listener], [], [], 0.0)[0]  # no second one so soon
        asks.finds_nobody(join.SECONDS)
        assert select.select([listener], [], [], 5.0)[0]
        asks.close()


def test_a_port_that_is_shut_is_found_so_once_for_each_knock() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asks = knock_at(listener)
    assert [asks.finds_nobody(0.0), asks.finds_nobody(0.5)].count(True) == 1
    assert not asks.finds_nobody(1.0)
    later = join.SECONDS
    assert [asks.finds_nobody(later), asks.finds_nobody(later)].count(True) == 1


def test_where_no_way_leads_nothing_is_known() -> None:
    """A number of the class that no host has: the kernel refuses to send there."""
    asks = PortProbe(Endpoint(host="240.0.0.1", port=9))
    assert not any(asks.finds_nobody(float(now)) for now in range(3))
    asks.close()
