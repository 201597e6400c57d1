"""Network configuration: where the processes of one user listen, and with which keys.

listens at                  keys          messages
files in a directory        none needed   not encrypted, between processes of one user
TCP                         key files     encrypted, for keys on the allow-list
TCP, 127.0.0.1              of the run    encrypted, for holders of the printed address
TCP, another, --insecure    of the run    encrypted, for holders of the printed address
TCP, another                none          an error
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, Self

import msgspec

from distbelief.core.errors import JobError
from distbelief.transport import authenticator as auth
from distbelief.transport.address import in_url, is_loopback
from distbelief.transport.keys import KeyFiles, KeyPair
from distbelief.transport.zmq_transport import ZmqTransport


class KeyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The key files of a process and the keys it trusts; no secret, so files may hold it."""

    directory: str  # directory of this host's keys and its allow-list
    # What this side speaks as; "job": the supervisor of a job and its roles on the same host;
    # "host": a host that has joined a job, and the roles there.
    role: Literal["worker", "server", "job", "host"]
    # Public key that the user gave: a worker's server or a host's supervisor. The processes of a
    # server know each other by the key that they share.
    server_key: str = ""
    # Whether keys that the supervisor introduces are trusted; members of a job do so.
    believes: bool = False
    # Public key that this process keeps using after a key rotation; "": the present one.
    own_key: str = ""

    @property
    def public(self) -> str:
        return self._pair().public

    def pinned(self) -> Self:
        """Return a copy for child processes that keeps using the present key after a rotation."""
        return msgspec.structs.replace(self, own_key=self.public)

    def guard(
        self, *, log: Callable[[str, str], None], limits: auth.PeerLimits | None = None
    ) -> auth.CurveAuth:
        """Return the authenticator of one transport, or raise JobError."""
        files = KeyFiles(Path(self.directory))
        pair = self._pair()
        files.allowed()  # reports a broken allow-list at the start
        # Keys that need not be on the allow-list, and their roles, by what this side speaks as.
        trusted: dict[str, dict[str, tuple[str, ...]]] = {
            "worker": {self.server_key: ("server",)},
            # The same user's training loops on this host use the same key.
            "server": {pair.public: ("server", "worker")},
            "job": {pair.public: ("job",)},
            "host": {pair.public: ("guest",), self.server_key: ("job",)},
        }
        warn = partial(log, "warning")
        permissions = auth.Permissions(
            files,
            trusted=trusted[self.role],
            warn=warn,
            is_of_job=self.role in {"job", "host"},
            believes=self.believes,
        )
        return auth.CurveAuth(pair, permissions, warn=warn, limits=limits)

    def _pair(self) -> KeyPair:
        files = KeyFiles(Path(self.directory))
        return files.pair_of(self.own_key) if self.own_key else files.pair()


class ListenConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where all processes that one user starts on one host listen."""

    directory: str = ""  # directory of their sockets without TCP; only their user may enter it
    host: str = ""  # IP address of the interface that they listen at; "" without TCP
    # Port of the first process; 0: the system chooses. It chooses the ports of the others.
    port: int = 0
    secret: str = ""  # secret key of the run in hexadecimal digits; "" with key files
    keys: KeyConfig | None = None  # key files; None without

    @property
    def is_local(self) -> bool:
        """Whether only processes of this host can connect."""
        return not self.host or is_loopback(self.host)

    @property
    def is_open(self) -> bool:
        """Whether other hosts can connect with the secret alone."""
        return bool(self.secret) and not self.is_local

    def within(self, directory: Path) -> Self:
        """Return a copy that listens in this directory, unless it listens over TCP."""
        if self.host:
            return self
        return msgspec.structs.replace(self, directory=str(directory))

    def pinned(self) -> Self:
        return self if self.keys is None else msgspec.structs.replace(self, keys=self.keys.pinned())

    def check(self) -> None:
        """Raise JobError for a configuration that would accept strangers or send unencrypted."""
        if self.host and not (self.keys or self.secret):
            raise JobError(
                f"{self.host} can be reached from other hosts and needs keys: distbelief keys new, "
                "distbelief keys allow KEY NAME (--role host), or use 127.0.0.1, or --insecure"
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
        """Return the transport of one role, which starts it; or raise JobError."""
        bind = f"tcp://{in_url(self.host)}:{port or '*'}"
        if not (self.keys or self.host):
            bind = f"ipc://{self.directory}/.{name}.{incarnation}"
        return ZmqTransport(
            name=name,
            incarnation=incarnation,
            run=run,
            bind=bind,
            guard=self.guard(log=log),
            log=log,
        )

    def guard(self, *, log: Callable[[str, str], None]) -> auth.Authenticator:
        """Return the authenticator of one process, or raise JobError."""
        self.check()
        if self.keys is not None:
            return self.keys.guard(log=log)
        if self.host:
            return auth.RunAuth(KeyPair.parse(self.secret))
        return auth.DirectoryAuth(Path(self.directory))
