"""Key pairs, and their files: private, complete, with errors that name the problem and the fix."""

import os
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from distbelief.core.errors import JobError, StorageError
from distbelief.transport import keys as keys_module
from distbelief.transport.keys import Allowed, KeyFiles, KeyPair, public_key


ALLOW_MANY = """
import sys
from pathlib import Path
from distbelief.transport.keys import Allowed, KeyFiles

keys, n = KeyFiles(Path(sys.argv[1])), int(sys.argv[2])
sys.stdin.readline()
for i in range(20):
    keys.allow(Allowed(key=f"{100 * n + i:064x}", roles=("worker",), name="w"))
"""
WORKER = Allowed(key="a" * 64, roles=("worker",), name="lab-3")


@pytest.fixture
def keys(tmp_path: Path) -> KeyFiles:
    files = KeyFiles(tmp_path / "keys")
    files.make()
    return files


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)  # a user who is careless
    try:
        files = KeyFiles(tmp_path / "a" / "keys")
        public = files.make()
        files.allow(WORKER)
        files.begin_rotation()
    finally:
        os.umask(before)
    assert files.pair().public == public
    assert mode(files.directory) == 0o700
    names = {path.name: mode(path) for path in files.directory.iterdir()}
    assert names == {"secret.key": 0o600, "allowed": 0o600, "next.key": 0o600}
    with pytest.raises(JobError, match="has a key already"):
        files.make()


def test_a_missing_key_is_named_with_the_fix(tmp_path: Path) -> None:
    for directory in (tmp_path / "nothing", tmp_path):
        tmp_path.chmod(0o700)
        with pytest.raises(JobError, match="distbelief keys new"):
            KeyFiles(directory).pair()


@pytest.mark.parametrize("name", ["", "secret.key", "allowed"])
@pytest.mark.parametrize("open_to", [0o040, 0o004, 0o022])
def test_what_others_could_read_or_write_is_not_used(
    keys: KeyFiles, name: str, open_to: int
) -> None:
    keys.allow(WORKER)
    path = keys.directory / name
    path.chmod(mode(path) | open_to)
    read = keys.allowed if name == "allowed" else keys.pair
    with pytest.raises(JobError, match="open to other users") as caught:
        read()
    assert f"chmod {700 if not name else 600} {path}" in str(caught.value)


def test_another_users_directory_is_not_used(
    keys: KeyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(JobError, match="belongs to another user"):
        keys.pair()


def test_a_link_is_not_followed(keys: KeyFiles) -> None:
    secret = keys.directory / "secret.key"
    secret.rename(keys.directory / "elsewhere")
    secret.symlink_to("elsewhere")
    with pytest.raises(JobError, match="open to other users"):
        keys.pair()


def test_a_damaged_key_is_named_and_not_shown(keys: KeyFiles) -> None:
    secret = keys.directory / "secret.key"
    text = secret.read_text()[:40]
    secret.write_text(text)
    with pytest.raises(JobError, match="holds no key") as caught:
        keys.pair()
    assert text not in str(caught.value)


def test_errors_of_the_disk_are_reported(keys: KeyFiles, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot make"):
        KeyFiles(tmp_path / "file" / "keys").make()
    secret = keys.directory / "secret.key"
    secret.unlink()
    secret.mkdir(mode=0o700)
    with pytest.raises(StorageError, match="cannot read"):
        keys.pair()
    with pytest.raises(JobError, match="has a key already"):
        keys.make()


def test_keys_are_allowed_changed_and_revoked_by_key_or_name(keys: KeyFiles) -> None:
    assert keys.allowed() == ()
    other = Allowed(key="b" * 64, roles=("server",), name="lab-3")
    keys.allow(WORKER)
    keys.allow(other)
    both = Allowed(key=WORKER.key, roles=("worker", "server"), name="lab-4")
    keys.allow(both)
    assert keys.allowed() == (other, both)
    assert keys.revoke("lab-4") == (both,)
    assert keys.revoke(other.key) == (other,)
    assert keys.allowed() == ()
    with pytest.raises(JobError, match="'lab-3' is not on the allow-list; allowed: nob"):
        keys.revoke("lab-3")


def test_keys_that_are_allowed_at_the_same_time_are_all_kept(keys: KeyFiles) -> None:
    """Concurrent commands overwrote each other: of six keys two were left."""
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", ALLOW_MANY, str(keys.directory), str(n)],
            stdin=subprocess.PIPE,
            text=True,
        )
        for n in range(3)
    ]
    for command in commands:
        assert command.stdin is not None
        command.stdin.write("go\n")
        command.stdin.flush()
    for command in commands:
        command.communicate()
        assert command.returncode == 0
    assert len(keys.allowed()) == 60


def test_a_change_of_the_list_can_be_seen(keys: KeyFiles) -> None:
    seen = {keys.changed_at}
    keys.allow(WORKER)
    seen.add(keys.changed_at)
    keys.revoke(WORKER.name)
    seen.add(keys.changed_at)
    assert len(seen) == 3


@pytest.mark.parametrize(
    "content",
    [
        "{key} worker lab-3 \n",
        "  {key}  worker \t lab-3\n",
        "   \n{key} worker lab-3\n \t\n  # nobody else\n",
        "\ufeff{key} worker lab-3\r\n\r\n",
        "\ufeff# mine\n{key} worker lab-3",
    ],
    ids=["end", "between", "blank lines", "byte order mark", "and a comment"],
)
def test_spaces_and_comments_in_the_list_are_ignored(keys: KeyFiles, content: str) -> None:
    """A space at the end of one line rejected all other keys of a running server."""
    path = keys.directory / "allowed"
    path.touch(mode=0o600)
    path.write_text(content.format(key=WORKER.key))
    assert keys.allowed() == (WORKER,)
    keys.allow(WORKER)
    assert path.read_text() == f"{WORKER.key} worker lab-3\n"


@pytest.mark.parametrize(
    "line", ["{key} worker two words", "{key}\u00a0worker x", "{key} worker\ufeff x"]
)
def test_what_could_mean_something_is_still_refused(keys: KeyFiles, line: str) -> None:
    path = keys.directory / "allowed"
    path.touch(mode=0o600)
    path.write_text(line.format(key=WORKER.key))
    with pytest.raises(JobError, match="invalid entry"):
        keys.allowed()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Allowed(key="a" * 64, roles=("root",), name="x"), "unknown role 'root': use"),
        (Allowed(key="a" * 64, roles=(), name="x"), "invalid entry"),
        (Allowed(key="a" * 63, roles=("worker",), name="x"), "invalid entry"),
        (Allowed(key="a" * 64, roles=("worker",), name="two words"), "invalid name"),
        (Allowed(key="a" * 64, roles=("worker",), name="two\nlines"), "invalid name"),
        (Allowed(key="a" * 64, roles=("worker",), name="x "), "invalid name"),
    ],
)
def test_an_invalid_entry_is_not_written(keys: KeyFiles, entry: Allowed, said: str) -> None:
    with pytest.raises(JobError, match=said):
        keys.allow(entry)
    assert keys.allowed() == ()


def test_the_list_is_bounded(keys: KeyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "N_ALLOWED_MAX", 1)
    keys.allow(WORKER)
    with pytest.raises(JobError, match="revoke some"):
        keys.allow(Allowed(key="b" * 64, roles=("worker",), name="x"))
    path = keys.directory / "allowed"
    path.write_text(path.read_text() * 2)
    with pytest.raises(JobError, match="has 2 keys, at most 1"):
        keys.allowed()


def test_a_key_is_exchanged_in_two_steps(keys: KeyFiles) -> None:
    old = keys.pair().public
    assert keys.next_pair() is None
    with pytest.raises(JobError, match="distbelief keys rotate"):
        keys.finish_rotation()
    new = keys.begin_rotation()
    assert keys.begin_rotation() == new  # until it is finished
    assert keys.pair().public == old
    assert keys.finish_rotation() == new
    assert keys.pair().public == new != old
    assert keys.next_pair() is None


def test_what_runs_finds_the_key_that_it_began_with(keys: KeyFiles) -> None:
    old = keys.pair()
    new = keys.begin_rotation()
    keys.finish_rotation()
    assert keys.pair_of(old.public).secret == old.secret
    assert keys.pair_of(new).public == new
    assert mode(keys.directory / "former.key") == 0o600
    keys.begin_rotation()
    keys.finish_rotation()
    with pytest.raises(JobError, match=f"no longer has the key {old.public}"):
        keys.pair_of(old.public)


def test_no_secret_is_in_an_error_of_any_kind(keys: KeyFiles) -> None:
    secret = keys.pair().secret.hex()
    (keys.directory / "secret.key").write_text(f"{secret} {secret}\n")
    with pytest.raises(JobError) as caught:
        keys.pair()
    assert secret not in f"{caught.value!r}{caught.value.__context__!r}"
    assert KeyPair.new().secret.hex() not in str(caught.value)


def test_a_pair_is_known_by_its_secret_which_no_text_shows() -> None:
    pair = KeyPair.new()
    assert KeyPair.of(pair.secret).public == pair.public
    assert KeyPair.new().public != pair.public
    for text in (repr(pair), str(pair), f"{[pair]!r}"):
        assert pair.secret.hex() not in text
        assert repr(pair.secret) not in text
    assert public_key(f" {pair.public.upper()}\n") == pair.public  # as users paste it


@given(text=st.text(max_size=70))
def test_what_is_no_public_key_is_shown(text: str) -> None:
    is_key = len(text.strip()) == 64 and set(text.strip().lower()) <= set(string.hexdigits.lower())
    if is_key:
        assert public_key(text) == text.strip().lower()
        return
    with pytest.raises(JobError, match="not a public key") as caught:
        public_key(text)
    assert repr(text) in str(caught.value)
