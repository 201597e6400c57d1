"""A keyring: by which keys a process speaks, and whom it believes; given by path."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from distbelief.transport.key_files import KeyFiles
from distbelief.transport.key_guard import Caps, KeyGuard
from distbelief.transport.speakers import Speakers


class Keyring(msgspec.Struct, frozen=True, kw_only=True):
    """Holds no key itself: it may be written down, and sent to one's own processes.

    Attributes:
        directory: Of this machine's keys and its allow-list.
        role: As what this side speaks.
        server_key: Public, of the server that a worker was told of by its user. A
            server's own processes know each other by the key that they share.
    """

    directory: str
    role: Literal["worker", "server"]
    server_key: str = ""

    @property
    def public(self) -> str:
        """This side's public key."""
        return KeyFiles(Path(self.directory)).pair().public

    def guard(
        self, *, log: Callable[[str, str], None], caps: Caps | None = None
    ) -> KeyGuard:
        """Return the guard of one transport.

        Raises:
            JobError: there is no key, or others could read it.
        """
        files = KeyFiles(Path(self.directory))
        pair = files.pair()
        files.allowed()  # what is wrong with it is told at the beginning, too

        def warn(text: str) -> None:
            log("warning", text)

        server = pair.public if self.role == "server" else self.server_key
        speakers = Speakers(files, trusted={server: ("server",)}, warn=warn)
        return KeyGuard(pair, speakers, warn=warn, caps=caps)
