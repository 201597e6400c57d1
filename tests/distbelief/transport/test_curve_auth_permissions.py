"""Permissions: which key may speak as which role."""

from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from distbelief.transport import authenticator as module
from distbelief.transport.authenticator import SPEAKS_AS, Permissions
from distbelief.transport.keys import Allowed, KeyFiles


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


@pytest.mark.parametrize(
    ("key", "name", "may"),
    [
        (A, "worker-1", True),
        (A, "worker", False),
        (A, "shard-0", False),
        (A, "supervisor", False),
        (A, "", False),
        (SERVER, "supervisor", True),
        (SERVER, "supervisor-2", False),
        (SERVER, "shard-12", True),
        (SERVER, "worker-1", False),
        ("c" * 64, "worker-1", False),
    ],
)
def test_a_key_speaks_for_its_roles_only(
    permissions: Permissions,
    key: str,
    name: str,
    may: bool,  # noqa: FBT001 -- a parameter of the test
) -> None:
    assert permissions.may_speak(key, name) is may
    assert permissions.introduce(name, key) is may


def test_a_name_belongs_to_the_first_key_that_uses_it(permissions: Permissions) -> None:
    assert permissions.may_speak(A, "worker-1")
    assert not permissions.may_speak(B, "worker-1")
    assert permissions.may_speak(A, "worker-1")


def test_an_introduced_key_has_the_name(permissions: Permissions) -> None:
    assert permissions.may_speak(A, "worker-1")
    assert permissions.introduce("worker-1", B)
    assert permissions.may_speak(B, "worker-1")
    assert not permissions.may_speak(A, "worker-1")
    assert not permissions.introduce("worker-1", SERVER)
    assert permissions.may_speak(B, "worker-1")


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


class Naming(RuleBasedStateMachine):
    """In any order of messages and introductions, a name has one key, of the right role."""

    def __init__(self) -> None:
        super().__init__()
        self.permissions = Permissions(
            KeyFiles(Path("/nonexistent")),
            trusted={A: ("worker",), B: ("worker", "server"), SERVER: ("server",)},
            warn=lambda _text: None,
        )
        self.permissions.refresh()
        self.owner: dict[str, str] = {}

    keys = st.sampled_from([A, B, SERVER, "c" * 64])
    names = st.sampled_from(["worker-1", "worker-2", "shard-1", "supervisor", "x"])

    @rule(key=keys, name=names)
    def speak(self, key: str, name: str) -> None:
        before = self.owner.get(name)
        if self.permissions.may_speak(key, name):
            assert before in {None, key}
            self.owner[name] = key

    @rule(key=keys, name=names)
    def introduce(self, key: str, name: str) -> None:
        if self.permissions.introduce(name, key):
            self.owner[name] = key

    @invariant()
    def roles_hold(self) -> None:
        roles = {A: ["worker"], B: ["worker", "server"], SERVER: ["server"]}
        for name, key in self.owner.items():
            starts = [start for role in roles[key] for start in SPEAKS_AS[role]]
            assert any(name.startswith(start) for start in starts)


TestNaming = Naming.TestCase
