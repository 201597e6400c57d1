"""Permissions: which key may speak as which role."""

from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from distbelief.transport import authenticator as module
from distbelief.transport.authenticator import Permissions
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
