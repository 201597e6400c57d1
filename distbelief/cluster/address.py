"""Where machines join a job: tcp://HOST:PORT?key=..., without keys ?secret=...

It has no secret in it where there are key files; without, whoever has it is let in.
"""

from dataclasses import dataclass
from typing import Self, final
from urllib.parse import parse_qs, urlencode, urlsplit

from typing_extensions import override

from distbelief.errors import JobError
from distbelief.transport.address import Endpoint, number_of, numbers_of
from distbelief.transport.keys import KeyPair, public_key


@final
@dataclass(frozen=True, kw_only=True)
class JobAddress:
    """Where a job's supervisor listens.

    Attributes:
        host: As its user wrote it.
        port: Of TCP.
        key: Public; "": the one that a machine's allow-list has as a server.
        secret: Of a run without key files.
    """

    host: str
    port: int
    key: str = ""
    secret: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote, or a part of it.

        Raises:
            JobError: it is no such address.
        """
        try:
            parts = urlsplit(text)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
            query = parse_qs(parts.query)
        except ValueError:  # brackets that do not close, a port that is no number, ...
            scheme, host, port, query = "", None, None, {}
        if scheme != "tcp" or not host or not port or not text.isascii():
            raise JobError(
                f"{text!r} is no address of a job: `distbelief train JOB.toml --listen "
                "tcp://HOST:PORT --keys DIR` prints it; it looks like "
                "tcp://10.0.0.1:7700?key=..."
            )
        key = public_key(query["key"][0]) if "key" in query else ""
        secret = query.get("secret", [""])[0]
        if secret:
            key = KeyPair.parse(secret).public
        return cls(host=host, port=port, key=key, secret=secret)

    @override
    def __str__(self) -> str:
        """Write it as one line."""
        who = {"secret": self.secret} if self.secret else {"key": self.key}
        return f"{self.endpoint}?{urlencode(who)}"

    @property
    def endpoint(self) -> str:
        """The address without what lets one in."""
        return f"tcp://{self.host}:{self.port}"

    def place(self, key: str) -> Endpoint:
        """Return where to connect to, if this is the supervisor's key."""
        return Endpoint(host=number_of(self.host), port=self.port, key=key)

    def is_left_by(self, place: Endpoint) -> bool:
        """Return whether the host's name has other numbers now than this place's.

        See `numbers_of`; False while nobody knows it.
        """
        try:
            return place.host not in numbers_of(self.host)
        except JobError:
            return False
