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
from typing import Literal, Self

import msgspec

from distbelief.errors import JobError
from distbelief.transport.authenticator import Authenticator, DirectoryAuth, RunAuth
from distbelief.transport.curve_auth import CurveAuth, Permissions
from distbelief.transport.keys import KeyFiles, KeyPair
from distbelief.transport.limits import PeerLimits
from distbelief.transport.zmq_transport import ZmqTransport


# A keyring: by which keys a process speaks, and whom it believes; given by path.


class KeyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Holds no key itself: it may be written down, and sent to one's own processes.

    Attributes:
        directory: Of this machine's keys and its allow-list.
        role: As what this side speaks; "job": the supervisor of a job, and its roles on
            the same machine; "host": a machine that has joined, and the roles there.
        server_key: Public, of the server that a worker, or the supervisor that a host,
            was told of by its user. A server's own processes know each other by the key
            that they share.
        believes: Whether whoever is introduced by the supervisor is believed to be
            that one; so do members of a job.
    """

    directory: str
    role: Literal["worker", "server", "job", "host"]
    server_key: str = ""
    believes: bool = False
    own_key: str = ""

    @property
    def public(self) -> str:
        """This side's public key."""
        return self._pair(KeyFiles(Path(self.directory))).public

    def pinned(self) -> Self:
        """Return the same for processes that come later: they speak by the key of now.

        Raises:
            JobError: there is no key, or others could read it.
        """
        return msgspec.structs.replace(self, own_key=self.public)

    def guard(
        self, *, log: Callable[[str, str], None], caps: PeerLimits | None = None
    ) -> CurveAuth:
        """Return the guard of one transport.

        Raises:
            JobError: there is no key, or others could read it.
        """
        files = KeyFiles(Path(self.directory))
        pair = self._pair(files)
        files.allowed()  # what is wrong with it is told at the beginning, too

        def warn(text: str) -> None:
            log("warning", text)

        speakers = Permissions(
            files,
            trusted=self._trusted(pair),
            warn=warn,
            is_of_job=self.role in {"job", "host"},
            believes=self.believes,
        )
        return CurveAuth(pair, speakers, warn=warn, caps=caps)

    def _pair(self, files: KeyFiles) -> KeyPair:
        return files.pair_of(self.own_key) if self.own_key else files.pair()

    def _trusted(self, pair: KeyPair) -> dict[str, tuple[str, ...]]:
        """Return the keys that need not be on the allow-list, and their roles."""
        match self.role:
            case "worker":
                return {self.server_key: ("server",)}
            case "server":  # its user's own loops on this machine have no other key
                return {pair.public: ("server", "worker")}
            case "job":
                return {pair.public: ("job",)}
            case "host":
                return {pair.public: ("guest",), self.server_key: ("job",)}


class ListenConfig(msgspec.Struct, frozen=True, kw_only=True):
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
    keys: KeyConfig | None = None

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

    def _guard(self, log: Callable[[str, str], None]) -> Authenticator:
        if self.keys is not None:
            return self.keys.guard(log=log)
        if self.host:
            return RunAuth(KeyPair.parse(self.secret))
        return DirectoryAuth(Path(self.directory))
