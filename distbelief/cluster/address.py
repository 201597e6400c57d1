"""Address where hosts join a job: tcp://HOST:PORT?key=..., without key files ?secret=...

With key files the address contains no secret. Without them, anyone with the address is let in.
"""

from dataclasses import dataclass
from typing import Self, final
from urllib.parse import parse_qs, urlencode, urlsplit

from typing_extensions import override

from distbelief.errors import JobError
from distbelief.transport.address import Endpoint, number_of
from distbelief.transport.keys import KeyPair, public_key


@final
@dataclass(frozen=True, kw_only=True)
class JobAddress:
    """Where a job's supervisor listens."""

    host: str  # name or number, as the user wrote it
    port: int  # TCP port
    key: str = ""  # public key; "" for the server key in the host's allow-list
    secret: str = ""  # of a run without key files

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what `str` wrote, or a part of it.

        Raises:
            JobError: the text is not a job address.
        """
        try:
            parts = urlsplit(text)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
            query = parse_qs(parts.query)
        except ValueError:  # unbalanced brackets, a port that is not a number, ...
            scheme, host, port, query = "", None, None, {}
        if scheme != "tcp" or not host or not port or not text.isascii():
            raise JobError(
                f"{text!r} is not a job address: use the one that `distbelief train JOB.toml "
                "--listen tcp://HOST:PORT --keys DIR` prints, like tcp://10.0.0.1:7700?key=..."
            )
        key = public_key(query["key"][0]) if "key" in query else ""
        secret = query.get("secret", [""])[0]
        if secret:
            key = KeyPair.parse(secret).public
        return cls(host=host, port=port, key=key, secret=secret)

    @override
    def __str__(self) -> str:
        who = {"secret": self.secret} if self.secret else {"key": self.key}
        return f"{self.endpoint}?{urlencode(who)}"

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def place(self, key: str) -> Endpoint:
        return Endpoint(host=number_of(self.host), port=self.port, key=key)
