"""Field types of messages: each is bounded, so that decoding takes bounded memory."""

from typing import Annotated, final

import msgspec


@final
class Blob:
    """Bytes that travel beside the header of a message, as arrays do.

    They are sent from where they lie: many messages can share them. Do not change them.
    """

    __slots__ = ("content",)

    def __init__(self, content: bytes | memoryview = b"") -> None:
        self.content = memoryview(content).toreadonly()

    def __len__(self) -> int:
        return len(self.content)


Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# Of samples, steps, bytes, ...: exact as a float, and sums of a thousand fit into 64 bits.
Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Duration = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]  # seconds
Text = Annotated[str, msgspec.Meta(max_length=65536)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
# What roles pack for each other; all of a message together have 1 MiB.
Content = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]  # per second; 0.0: not measured


class AnyMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, eq=False):
    """Base of all messages: immutable, tagged by class name on the wire."""
