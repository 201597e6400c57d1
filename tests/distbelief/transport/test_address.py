"""Endpoints: addresses and keys, no names that a peer could make this host look up."""

import socket

import pytest
from hypothesis import given, strategies as st

from distbelief.core.errors import JobError, TransportError
from distbelief.transport import address
from distbelief.transport.address import Endpoint, number_of, own_address_towards


HOSTS = st.ip_addresses().map(str).filter(lambda host: "%" not in host)
KEYS = st.one_of(st.just(""), st.text("0123456789abcdef", min_size=64, max_size=64))


@given(host=HOSTS, port=st.integers(1, 65535), key=KEYS)
def test_an_endpoint_is_parsed_as_written(host: str, port: int, key: str) -> None:
    place = Endpoint(host=host, port=port, key=key)
    assert Endpoint.parse(str(place)) == place
    assert place.endpoint == f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
    assert len(str(place)) <= 128  # a name in messages


@given(path=st.text("abz/._-+:", min_size=1, max_size=120))
def test_a_path_is_read_as_written(path: str) -> None:
    place = Endpoint(path=f"/{path}")
    assert Endpoint.parse(str(place)) == place == place.seen_from("10.0.0.1")


@pytest.mark.parametrize(
    "text",
    [
        "tcp://10.0.0.1:0",
        "tcp://10.0.0.1:65536",
        "tcp://10.0.0.256:1",
        "tcp://1.2.3:4000",
        "tcp://host:4000",
        "tcp://10.0.0.1:*",
        "tcp://::1:4000",
        "tcp://[10.0.0.1]:4000",
        "tcp://[fe80::1%eth0]:4000",
        "tcp://[1:2:3:4:5:6:7:8:9]:4000",
        "tcp://[]:4000",
        "inproc://zeromq.zap.01",
        "ipc://tmp/x",
        "ipc://@tmp",
        "ipc:///tmp/x?y",
        "ipc:///tmp/x\n",
        "tcp://10.0.0.1:4000?key=",
        f"tcp://10.0.0.1:4000?key={'A' * 64}",
        f"tcp://10.0.0.1:4000?key={'a' * 65}",
        f"tcp://10.0.0.1:4000?key={'a' * 64}\n",
        "tcp://10.0.0.1:4000;10.0.0.2:5000",
    ],
)
def test_only_an_address_with_a_port_or_a_path_is_an_endpoint(text: str) -> None:
    with pytest.raises(TransportError, match="not an endpoint"):
        Endpoint.parse(text)


def test_anywhere_is_where_the_supervisor_was_found() -> None:
    anywhere = Endpoint(host="0.0.0.0", port=7, key="a" * 64)
    assert anywhere.seen_from("10.0.0.1") == Endpoint(host="10.0.0.1", port=7, key="a" * 64)
    assert Endpoint(host="::", port=7).seen_from("fd00::1").endpoint == "tcp://[fd00::1]:7"
    somewhere = Endpoint(host="10.0.0.2", port=7)
    assert somewhere.seen_from("10.0.0.1") == somewhere


def test_only_files_and_the_loopback_are_local() -> None:
    places = [
        Endpoint(path="/x"),
        *(Endpoint(host=h) for h in ("127.0.0.1", "::1", "10.0.0.1", "0.0.0.0", "::", "fd00::1")),
    ]
    assert [place.is_local for place in places] == [True, True, True, False, False, False, False]


def test_users_may_name_hosts() -> None:
    assert number_of("localhost") == number_of("127.0.0.1") == "127.0.0.1"
    assert number_of("*") == "0.0.0.0"
    assert number_of("::1") == number_of("0:0::1") == "::1"
    for host in ("no.such.host.invalid", "fe80::1%lo", "::g", "a..b"):
        with pytest.raises(JobError, match=f"host '{host}' has no address"):
            number_of(host)


def test_this_machine_is_found_by_its_own_number() -> None:
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    assert own_address_towards("0.0.0.0") == "127.0.0.1"
    assert own_address_towards("::") == "127.0.0.1"
    assert own_address_towards("::1") == "::1"


def test_a_name_with_addresses_of_both_kinds_is_its_ipv4_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lookup(host: str, _port: None, **_: int) -> list[tuple[object, ...]]:
        numbers = {"both": ("fd00::7", "10.0.0.7"), "six": ("fe80::7", "fd00::7")}[host]
        places = [(n, 0, 0, int(n.startswith("fe80"))) if ":" in n else (n, 0) for n in numbers]
        return [(0, 0, 0, "", place) for place in places]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert number_of("both") == "10.0.0.7"
    assert number_of("six") == "fd00::7"


def test_without_a_default_route_it_is_found_by_an_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hosts of a cluster without a default route announced 127.0.0.1 to others."""

    def no_route(host: str) -> str:
        raise TransportError(f"no route from this machine to {host}")

    numbers = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "eth1": "10.0.1.7"}
    names = [(1, "lo"), (2, "unplugged"), (3, "eth0"), (4, "eth1")]
    monkeypatch.setattr(address, "own_address_towards", no_route)
    monkeypatch.setattr(address, "interface_address", numbers.get)
    monkeypatch.setattr(socket, "if_nameindex", lambda: names)
    assert address.own_address() == "10.0.0.7"
    monkeypatch.setattr(socket, "if_nameindex", lambda: names[:2])
    assert address.own_address() == "127.0.0.1"


def test_an_interface_is_asked_for_its_number() -> None:
    assert address.interface_address("lo") == "127.0.0.1"
    assert address.interface_address("nosuch0") is None
