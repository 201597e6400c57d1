"""DirectoryAuth: members of one host meet in a directory that only their user may enter."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from distbelief.core.errors import TransportError
from distbelief.protocol import SaveCheckpoint
from distbelief.transport.authenticator import DirectoryAuth, open_private
from tests.distbelief.transport.test_zmq_transport import labels, take
from tests.links import link


NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda path: path.chmod(0o750), "other users may enter it.*chmod 700"),
        (lambda path: path.chmod(0o777), "other users may enter it.*chmod 700"),
        (lambda path: path.rmdir(), "does not exist; the process that made it"),
        (lambda path: (path.rmdir(), path.touch()), "Not a directory"),
        (lambda path: (path.rmdir(), path.symlink_to("/")), "symbolic link"),
        pytest.param(lambda path: os.chown(path, NOBODY, -1), "another user", marks=AS_ROOT),
    ],
)
def test_a_directory_that_others_could_enter_is_refused(
    tmp_path: Path, prepare: Callable[[Path], object], why: str
) -> None:
    """After a run, its name in /dev/shm may belong to another user."""
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    prepare(directory)
    with pytest.raises(TransportError, match=why) as caught:
        link("a", directory).start()
    assert str(directory) in str(caught.value)


def test_a_new_listener_at_a_path_gets_no_messages_for_the_old_one(tmp_path: Path) -> None:
    """ZeroMQ keeps reconnecting to a path, which another user may have made again."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    with link("b", run) as b, link("a", run) as a:
        b.connect("a", 1, a.endpoint)
        a.close()
        shutil.rmtree(run)
        run.mkdir(mode=0o777)  # as another user's, for whom this path is as good
        with link("a", tmp_path) as thief:
            (run / ".a.1").symlink_to(tmp_path / ".a.1")
            b.send("a", SaveCheckpoint(label="for a only"))
            for _ in range(50):  # 0.5 s: ten times as long as until it tries again
                thief.poll(0.01)
                assert not list(thief.receive())


def test_the_path_of_a_directory_may_be_long(tmp_path: Path) -> None:
    """A socket's path may have 107 bytes; a descriptor's path is shorter."""
    room = 128 - len(f"ipc://{tmp_path}//.member.1")
    directory = tmp_path / ("d" * room)
    directory.mkdir(mode=0o700)
    with link("member", directory) as member:
        assert len(member.endpoint) == 128  # as many as a message's field takes
        assert len(member.endpoint) > 107 + len("ipc://")
        member.connect("member", 1, member.endpoint)
        member.send("member", SaveCheckpoint(label="x"))
        assert labels(take(member, 1)) == ["x"]
    with pytest.raises(TransportError, match="set TMPDIR to a shorter directory"):
        link("members", directory).start()


def test_all_members_are_in_the_one_directory(tmp_path: Path) -> None:
    with link("a", tmp_path) as a:
        for elsewhere in (
            f"ipc://{tmp_path}/below/.b.1",
            f"ipc://{tmp_path}/..",
            f"ipc://{tmp_path}/",
            "ipc:///tmp/.b.1",
            "tcp://127.0.0.1:7700",
        ):
            with pytest.raises(TransportError, match=r"keys new|not an endpoint"):
                a.connect("b", 1, elsewhere)


def test_a_socket_in_use_is_not_replaced(tmp_path: Path) -> None:
    """ZeroMQ removes a socket file at the path that it binds."""
    with link("a", tmp_path) as a:
        with pytest.raises(TransportError, match="another member listens there"):
            link("a", tmp_path).start()
        a.connect("a", 1, a.endpoint)
        a.send("a", SaveCheckpoint(label="still here"))
        assert labels(take(a, 1)) == ["still here"]
    assert list(tmp_path.iterdir()) == []


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    with link("warm", tmp_path):
        pass
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with link("a", tmp_path):
            pass
        with pytest.raises(TransportError):
            link("a", tmp_path / "gone").start()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_authenticator_that_never_listened_has_nothing_to_close(tmp_path: Path) -> None:
    DirectoryAuth(tmp_path).close()
    descriptor = open_private(tmp_path)
    os.close(descriptor)
