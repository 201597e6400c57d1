"""Permissions: which key may speak as which role."""

from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from distbelief.core.errors import RemoteProtocolError
from distbelief.protocol import HeartbeatAck, Release
from distbelief.protocol.codec import JOINING, AnotherRunError, Codec
from distbelief.transport import authenticator as module
from distbelief.transport.address import Endpoint
from distbelief.transport.authenticator import (
    NOT_NOW,
    REFUSED,
    CurveAuth,
    NotIntroducedError,
    Permissions,
    Source,
)
from distbelief.transport.keys import Allowed, KeyFiles
from distbelief.transport.listen_config import KeyConfig, ListenConfig
from distbelief.transport.zmq_transport import ZmqTransport
from tests.distbelief.transport.test_zmq_transport import take


A, B, SERVER = "a" * 64, "b" * 64, "5" * 64


@pytest.fixture
def files(tmp_path: Path) -> KeyFiles:
    keys = KeyFiles(tmp_path / "keys")
    keys.make()
    keys.allow(Allowed(key=A, roles=("worker",), name="a"))
    keys.allow(Allowed(key=B, roles=("worker",), name="b"))
    return keys


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def permissions(files: KeyFiles, warnings: list[str]) -> Permissions:
    made = Permissions(files, trusted={SERVER: ("server",)}, warn=warnings.append)
    assert made.refresh()
    assert not made.refresh()
    return made


def test_a_key_has_a_bounded_number_of_names(
    permissions: Permissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "N_NAMES_MAX", 2)
    for n in range(5):
        assert permissions.may_speak(A, f"worker-{n}")
    assert permissions.may_speak(B, "worker-0")  # forgotten
    assert not permissions.may_speak(B, "worker-4")


def test_a_revoked_key_loses_its_names(files: KeyFiles, permissions: Permissions) -> None:
    assert permissions.may_speak(A, "worker-1")
    files.revoke("a")
    assert permissions.refresh()
    assert [permissions.admit(key) for key in (A, B, SERVER)] == [False, True, True]
    assert not permissions.may_speak(A, "worker-1")
    assert permissions.may_speak(B, "worker-1")


def test_a_member_rejects_a_revoked_key_that_the_supervisor_introduced(files: KeyFiles) -> None:
    """Shards accepted pushes of a host whose key was revoked during a job.

    The supervisor rejects that host and gives it up after a while; shards accepted it until its
    replica ran elsewhere.
    """
    files.allow(Allowed(key=A, roles=("host",), name="a"))
    shard = Permissions(files, trusted={}, warn=lambda _: None, is_of_job=True, believes=True)
    shard.refresh()
    elsewhere = "c" * 64  # on no list of this machine
    assert shard.introduce("replica-1", A)
    assert shard.introduce("replica-2", elsewhere)
    content = (files.directory / "allowed").read_bytes()
    (files.directory / "allowed").write_text("no entry\n")
    shard.refresh()
    assert shard.admit(A)  # nobody has said anything of it
    (files.directory / "allowed").write_bytes(content)
    files.revoke("a")
    shard.refresh()
    assert not shard.admit(A)
    assert shard.admit(elsewhere)
    files.allow(Allowed(key=A, roles=("host",), name="a"))
    shard.refresh()
    assert shard.admit(A)
    assert shard.may_speak(A, "replica-1")


def test_an_unreadable_allow_list_accepts_no_key(
    files: KeyFiles, permissions: Permissions, warnings: list[str]
) -> None:
    (files.directory / "allowed").write_text("everybody\n")
    assert permissions.refresh()
    assert not permissions.refresh()
    assert [permissions.admit(key) for key in (A, B, SERVER)] == [False, False, True]
    assert len(warnings) == 1
    assert "its keys are not accepted" in warnings[0]


ROLE_OF = {
    "worker-1": "worker",
    "worker-2": "worker",
    "shard-12": "server",
    "supervisor": "server",
    **dict.fromkeys(("worker", "supervisor-2", "x", ""), "nobody"),
}


class Naming(RuleBasedStateMachine):
    """In any order of messages and introductions, a name has one key, of the right role.

    It is the key that was introduced last, else the first that used it.
    """

    roles: ClassVar[dict[str, tuple[str, ...]]] = {
        A: ("worker",), B: ("worker", "server"), SERVER: ("server",)
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.permissions = Permissions(
            KeyFiles(Path("/nonexistent")), trusted=self.roles, warn=lambda _text: None
        )
        self.permissions.refresh()
        self.owner: dict[str, str] = {}

    keys = st.sampled_from([A, B, SERVER, "c" * 64])
    names = st.sampled_from(list(ROLE_OF))

    @rule(key=keys, name=names)
    def speak(self, key: str, name: str) -> None:
        before = self.owner.get(name)
        may = key == before or (before is None and ROLE_OF[name] in self.roles.get(key, ()))
        assert self.permissions.may_speak(key, name) == may
        if may:
            self.owner[name] = key

    @rule(key=keys, name=names)
    def introduce(self, key: str, name: str) -> None:
        may = ROLE_OF[name] in self.roles.get(key, ())
        assert self.permissions.introduce(name, key) == may
        if may:
            self.owner[name] = key


TestNaming = Naming.TestCase


OTHER = "c" * 64


class Keys:
    """Key files of the supervisor's host, and of a host that joins."""

    def __init__(self, directory: Path) -> None:
        self.here, self.there = KeyFiles(directory / "here"), KeyFiles(directory / "to")
        self.key, self.its_key = self.here.make(), self.there.make()
        self.here.allow(Allowed(key=self.its_key, roles=("host",), name="h"))

    def ring(self, role: str, *, believes: bool = False) -> KeyConfig:
        if role == "job":
            directory = str(self.here.directory)
            return KeyConfig(directory=directory, role="job", believes=believes)
        return KeyConfig(
            directory=str(self.there.directory), role="host", server_key=self.key, believes=True
        )

    def guard(self, role: str, *, believes: bool = False) -> CurveAuth:
        return self.ring(role, believes=believes).guard(log=lambda _level, _text: None)

    def transport(self, name: str, role: str, *, run: str, believes: bool = False) -> ZmqTransport:
        reach = ListenConfig(host="127.0.0.1", keys=self.ring(role, believes=believes))
        return reach.transport(name=name, incarnation=1, run=run, log=lambda _level, _text: None)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def test_a_role_speaks_with_the_key_of_the_host_that_it_was_placed_on(keys: Keys) -> None:
    authenticator = keys.guard("job")
    there, here = Source(keys.its_key, 3), Source(keys.key, 4)
    authenticator.check(there, "host-1")
    with pytest.raises(NotIntroducedError):
        authenticator.check(there, "replica-1")
    authenticator.assign_name("replica-1", "host-1")
    authenticator.check(there, "replica-1")
    with pytest.raises(NotIntroducedError):
        authenticator.check(here, "replica-1")
    authenticator.assign_name("replica-1", "supervisor")
    authenticator.check(here, "replica-1")
    with pytest.raises(NotIntroducedError):
        authenticator.check(there, "replica-1")


def test_a_host_that_is_allowed_as_a_worker_only_gets_the_missing_command(keys: Keys) -> None:
    """Without --role host, a host was accepted and then waited for a reply in vain."""
    keys.here.allow(Allowed(key=OTHER, roles=("worker",), name="w"))
    authenticator = keys.guard("job")
    request = [b"1.0", b"1", b"", b"10.0.0.3", b"", b"CURVE", bytes.fromhex(OTHER)]
    verdict = authenticator.judge(request)
    assert verdict.status == REFUSED
    assert f"distbelief keys allow {OTHER} NAME --role host" in verdict.remark
    keys.here.allow(Allowed(key=OTHER, roles=("worker", "host"), name="w"))
    assert authenticator.judge(request).admitted


def test_no_other_key_speaks_as_the_supervisor(keys: Keys) -> None:
    authenticator = keys.guard("job", believes=True)
    with pytest.raises(RemoteProtocolError) as caught:
        authenticator.check(Source(keys.its_key, 3), "supervisor")
    assert not isinstance(caught.value, NotIntroducedError)


def test_a_member_believes_whom_it_is_introduced_to(keys: Keys) -> None:
    authenticator = keys.guard("host")
    request = [b"1.0", b"1", b"", b"10.0.0.3", b"", b"CURVE", bytes.fromhex(OTHER)]
    assert authenticator.judge(request).status == NOT_NOW
    permissions = authenticator._permissions
    assert permissions.introduce("replica-7", OTHER)
    assert not permissions.introduce("supervisor", OTHER)
    assert authenticator.judge(request).admitted
    authenticator.check(Source(OTHER, 3), "replica-7")
    with pytest.raises(NotIntroducedError):
        authenticator.check(Source(OTHER, 3), "replica-8")


def test_a_host_may_leave_out_the_run_and_other_roles_may_not(keys: Keys) -> None:
    host = keys.transport("host-1", "host", run=JOINING)
    supervisor = keys.transport("supervisor", "job", run="run")
    with host, supervisor:
        host.connect("supervisor", 0, supervisor.endpoint)
        assert host.send("supervisor", HeartbeatAck())
        assert take(supervisor, 1)[0].sender == "host-1"
        supervisor.connect("host-1", 1, host.endpoint)
        dismissed = Release(incarnation=1, again=False, reason="")
        assert supervisor.send("host-1", dismissed)
        assert take(host, 1)[0].sender == "supervisor"


def test_only_a_host_may_leave_out_the_run() -> None:
    joining = Codec(run=JOINING)
    wire = Codec(run="run", strangers="host-")
    strange = joining.encode(HeartbeatAck(), sender="replica-1", incarnation=1)
    with pytest.raises(AnotherRunError):
        wire.decode(strange)
    with pytest.raises(AnotherRunError):
        Codec(run="run").decode(joining.encode(HeartbeatAck(), sender="host-1", incarnation=1))


def test_a_replica_there_and_a_shard_here_speak_once_they_are_introduced(keys: Keys) -> None:
    """The first message is early: it is dropped, and the connection stays open."""
    replica = keys.transport("replica-1", "host", run="run")
    shard = keys.transport("shard-0", "job", run="run", believes=True)
    with replica, shard:
        replica.connect("shard-0", 1, shard.endpoint)
        assert replica.send("shard-0", HeartbeatAck())
        for _ in range(100):
            shard.poll(0.05)
            assert not list(shard.receive())
            if shard.n_malformed:
                break
        assert shard.n_malformed == 1
        shard.connect("replica-1", 1, replica.endpoint)
        assert replica.send("shard-0", HeartbeatAck())
        assert take(shard, 1)[0].sender == "replica-1"
        assert Endpoint.parse(replica.endpoint).key == keys.its_key


def test_a_connection_waits_for_the_supervisors_introduction(keys: Keys, tmp_path: Path) -> None:
    """It was rejected, and a replica that had moved to another host stood still for 5 s."""
    third = KeyFiles(tmp_path / "third")
    third.make()
    ring = KeyConfig(
        directory=str(third.directory), role="host", server_key=keys.key, believes=True
    )
    reach = ListenConfig(host="127.0.0.1", keys=ring)
    shard = reach.transport(name="shard-0", incarnation=1, run="run", log=lambda _l, _t: None)
    replica = keys.transport("replica-1", "host", run="run")
    with shard, replica:
        shard.connect("replica-1", 1, replica.endpoint)
        assert shard.send("replica-1", HeartbeatAck())
        for _ in range(10):
            replica.poll(0.05)
            assert not list(replica.receive())
        replica.connect("shard-0", 1, shard.endpoint)
        assert take(replica, 1)[0].sender == "shard-0"
        assert replica.n_refused == 0
