"""A keyring: by which keys a process speaks, and whom it believes; given by path."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

import msgspec

from distbelief.transport.key_files import KeyFiles
from distbelief.transport.key_guard import KeyGuard
from distbelief.transport.keys import KeyPair
from distbelief.transport.peers import Caps
from distbelief.transport.speakers import Speakers


class Keyring(msgspec.Struct, frozen=True, kw_only=True):
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

    def guard(self, *, log: Callable[[str, str], None], caps: Caps | None = None) -> KeyGuard:
        """Return the guard of one transport.

        Raises:
            JobError: there is no key, or others could read it.
        """
        files = KeyFiles(Path(self.directory))
        pair = self._pair(files)
        files.allowed()  # what is wrong with it is told at the beginning, too

        def warn(text: str) -> None:
            log("warning", text)

        speakers = Speakers(
            files,
            trusted=self._trusted(pair),
            warn=warn,
            is_of_job=self.role in {"job", "host"},
            believes=self.believes,
        )
        return KeyGuard(pair, speakers, warn=warn, caps=caps)

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
