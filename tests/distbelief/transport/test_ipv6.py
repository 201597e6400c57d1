"""Addresses in brackets, and host names, wherever a user or a peer writes one."""

import socket
from pathlib import Path

import pytest

from distbelief.core.folders import LocalFolder
from distbelief.job.hosts.bootstrap import JobAddress
from distbelief.job.hosts.join_server import JoinServer
from distbelief.protocol import SaveCheckpoint
from distbelief.serve.address import ServerAddress
from distbelief.serve.options import listen_config
from distbelief.transport.address import Endpoint, refuses
from distbelief.transport.file_server import FileServer, RemoteFolder
from distbelief.transport.keys import new_secret
from distbelief.transport.listen_config import ListenConfig
from tests.distbelief.transport.test_zmq_transport import labels, take


KEY = "5f" * 32


def no_log(_level: str, _text: str) -> None:
    pass


@pytest.fixture
def reach() -> ListenConfig:
    """Where processes of this host listen by IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this host has no IPv6: {error}")
    return listen_config("tcp://[::1]:*", keys=None, insecure=False)


def test_roles_send_each_other_messages(reach: ListenConfig) -> None:
    assert reach.is_local
    with (
        reach.transport(name="shard-0", incarnation=1, run="r", log=no_log) as one,
        reach.transport(name="replica-0", incarnation=1, run="r", log=no_log) as other,
    ):
        assert one.endpoint.startswith("tcp://[::1]:")
        other.connect("shard-0", 1, one.endpoint)
        other.send("shard-0", SaveCheckpoint(label="there"))
        assert labels(take(one, 1)) == ["there"]
        one.connect("replica-0", 1, other.endpoint)
        one.send("replica-0", SaveCheckpoint(label="back"))
        assert labels(take(other, 1)) == ["back"]
    assert refuses(one.endpoint)  # nothing listens there any more


def test_all_interfaces_take_both_kinds(reach: ListenConfig) -> None:
    everywhere = ListenConfig(host="::", secret=reach.secret)
    assert not everywhere.is_local
    with everywhere.transport(name="shard-0", incarnation=1, run="r", log=no_log) as one:
        for number, host in enumerate(("127.0.0.1", "::1")):
            own = ListenConfig(host=host, secret=reach.secret)
            name = f"replica-{number}"
            with own.transport(name=name, incarnation=1, run="r", log=no_log) as other:
                place = Endpoint.parse(one.endpoint).seen_from(host)
                other.connect("shard-0", 1, str(place))
                other.send("shard-0", SaveCheckpoint(label=host))
                assert labels(take(one, 1)) == [host]


def test_checkpoints_go_to_the_supervisors_host(reach: ListenConfig, tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    with FileServer(folder, None, reach=reach, run="run", log=no_log) as server:
        place = Endpoint.parse(server.endpoint)
        remote = RemoteFolder(place, reach=reach, run="run", log=no_log)
        remote.write("shard-0/00001.safetensors", [memoryview(b"values")])
        assert remote.size("shard-0/00001.safetensors") == 6
        remote.close()


@pytest.mark.parametrize("host", ["[::1]", "[fd00::7]", "10.0.0.1", "lab-3.example"])
def test_every_address_is_read_as_it_is_written(host: str) -> None:
    job = JobAddress.parse(f"tcp://{host}:7791?key={KEY}")
    assert str(job) == f"tcp://{host}:7791?key={KEY}"
    server = ServerAddress.parse(f"tcp://{host}:7791?key={KEY}&run=r&shards=2&copies=1")
    assert str(server).startswith(f"tcp://{host}:7791?")
    if "lab" not in host:
        assert job.place(KEY).endpoint == server.place().endpoint == f"tcp://{host}:7791"


@pytest.mark.parametrize(
    ("bind", "host"),
    [
        ("tcp://[::1]:7791", "::1"),
        ("tcp://[0:0:0::1]:7791", "::1"),
        ("tcp://localhost:7791", "127.0.0.1"),
    ],
)
def test_servers_listen_there(bind: str, host: str) -> None:
    found = listen_config(bind, keys=None, insecure=False)
    assert (found.host, found.port) == (host, 7791)
    assert found.is_local
    endpoint = str(Endpoint(host=host, port=7791))
    address = JoinServer(reach=found).address(endpoint)
    assert JobAddress.parse(str(address)).endpoint == endpoint


def test_another_host_needs_keys_by_ipv6_too() -> None:
    open_to_all = ListenConfig(host="fd00::7", secret=new_secret())
    assert open_to_all.is_open
