"""Reach: from where the processes of one server, or a worker, can be reached, and how.

listens at                  keys          messages
files in a directory        none needed   in the clear, among processes of one user
TCP                         key files     encrypted; who has an allowed key
TCP, 127.0.0.1              of the run    encrypted; whoever has the printed address
TCP, another, --insecure    of the run    likewise
TCP, another                none          refused
"""

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from distbelief.errors import JobError
from distbelief.transport.directory_guard import DirectoryGuard
from distbelief.transport.guard import Guard, RunGuard
from distbelief.transport.keyring import Keyring
from distbelief.transport.keys import KeyPair
from distbelief.transport.zmq_transport import ZmqTransport


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """Of all processes that one user starts on one machine.

    Attributes:
        directory: Where they listen, if not over TCP; only their user may enter it.
        host: Number of the interface that they listen at; "": of none.
        port: Of the first of them; 0: the system chooses. The others' it does choose.
        secret: Of the run, in hexadecimal digits, where there are no key files.
        keys: By which the processes speak, and whom they believe.
    """

    directory: str = ""
    host: str = ""
    port: int = 0
    secret: str = ""
    keys: Keyring | None = None

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can reach them."""
        return not self.host or ipaddress.IPv4Address(self.host).is_loopback

    @property
    def is_open(self) -> bool:
        """Whether other machines can reach them, by the secret alone."""
        return bool(self.secret) and not self.is_local

    def within(self, directory: Path) -> Self:
        """Return the same; who listens at no interface does so in this directory."""
        if self.host:
            return self
        return msgspec.structs.replace(self, directory=str(directory))

    def pinned(self) -> Self:
        """Return the same for processes that come later: they speak by the key of now.

        Raises:
            JobError: there is no key, or others could read it.
        """
        if self.keys is None:
            return self
        return msgspec.structs.replace(self, keys=self.keys.pinned())

    def check(self) -> None:
        """Refuse what would let in strangers, or let out what is not theirs.

        Raises:
            JobError: naming what there is to choose from.
        """
        if self.host and not (self.keys or self.secret):
            raise JobError(
                f"{self.host} can be reached from other machines, and without keys "
                "whoever reads the network could read and change what is trained: "
                "make a key (distbelief keys new) and let the others in (distbelief "
                "keys allow KEY NAME; machines that join a job, with --role host); or "
                "stay at 127.0.0.1; or, among friends, --insecure: then whoever has "
                "the address that is printed is let in"
            )

    def transport(
        self,
        *,
        name: str,
        incarnation: int,
        run: str,
        log: Callable[[str, str], None],
        port: int = 0,
    ) -> ZmqTransport:
        """Return the transport of one role, for it to start.

        Raises:
            JobError: `check` is against it, or there is no key.
        """
        self.check()
        bind = f"tcp://{self.host}:{port or '*'}"
        if not self.host:
            bind = f"ipc://{self.directory}/.{name}.{incarnation}"
        return ZmqTransport(
            name=name, incarnation=incarnation, run=run, bind=bind, guard=self._guard(log), log=log
        )

    def _guard(self, log: Callable[[str, str], None]) -> Guard:
        if self.keys is not None:
            return self.keys.guard(log=log)
        if self.host:
            return RunGuard(KeyPair.parse(self.secret))
        return DirectoryGuard(Path(self.directory))
