"""ListenConfig: no process listens beyond its user without keys, unless configured."""

from pathlib import Path

import pytest
from hypothesis import given
from zmq.utils import z85

from distbelief.core.errors import JobError, TransportError
from distbelief.protocol import Message
from distbelief.transport.keys import KeyFiles, KeyPair
from distbelief.transport.listen_config import KeyConfig, ListenConfig
from tests.distbelief.protocol.message_strategies import messages


SECRET = "5fa1" * 16


def start(reach: ListenConfig) -> str:
    transport = reach.transport(
        name="supervisor", incarnation=1, run="run", log=lambda _level, _text: None
    )
    with transport:
        return transport.endpoint


@pytest.fixture
def ring(tmp_path: Path) -> KeyConfig:
    KeyFiles(tmp_path / "keys").make()
    return KeyConfig(directory=str(tmp_path / "keys"), role="server")


def test_by_default_only_this_user_reaches_it(tmp_path: Path) -> None:
    assert ListenConfig().is_local
    reach = ListenConfig().within(tmp_path)
    assert start(reach) == f"ipc://{tmp_path}/.supervisor.1"
    assert list(tmp_path.iterdir()) == []
    over_tcp = ListenConfig(host="127.0.0.1", secret=SECRET)
    assert over_tcp.within(tmp_path) == over_tcp


def test_beyond_it_keys_are_needed(ring: KeyConfig) -> None:
    with pytest.raises(JobError, match=r"distbelief keys new.*--role host"):
        start(ListenConfig(host="0.0.0.0"))
    endpoint = start(ListenConfig(host="0.0.0.0", keys=ring))
    assert endpoint.endswith(f"?key={ring.public}")
    with pytest.raises(JobError, match="distbelief keys new"):
        start(ListenConfig(host="127.0.0.1"))


def test_without_key_files_a_run_has_a_key_of_its_own() -> None:
    reach = ListenConfig(host="0.0.0.0", secret=SECRET)
    assert reach.is_open
    assert start(reach).endswith(f"?key={KeyPair.parse(SECRET).public}")
    assert not ListenConfig(host="127.0.0.1", secret=SECRET).is_open


@given(message=messages)
def test_no_message_holds_the_secret_of_its_run(message: Message) -> None:
    """Every header once held the run's token: a reader of the network could push."""
    reach = ListenConfig(host="127.0.0.1", secret=SECRET)
    transport = reach.transport(
        name="shard-0", incarnation=1, run="run", log=lambda _level, _text: None
    )
    frames = transport._codec.encode(message, sender="shard-0", incarnation=1)
    raw = bytes.fromhex(SECRET)
    for secret in (SECRET.encode(), raw, z85.encode(raw)):
        assert not any(secret in bytes(frame) for frame in frames)


def test_a_number_that_is_not_ours_is_named(ring: KeyConfig) -> None:
    with pytest.raises(TransportError, match="no interface of this host"):
        start(ListenConfig(host="198.51.100.7", keys=ring))


def test_a_ring_holds_no_key(ring: KeyConfig) -> None:
    secret = (Path(ring.directory) / "secret.key").read_text().strip()
    assert secret not in repr(ListenConfig(keys=ring))
