"""What every message is: typed, immutable, bounded."""

from typing import Annotated, final

import msgspec


# Bytes beside the header of a message, as arrays are: sent from where they lie.
#
# What is sent to many, or waits to be sent, is then held once, not once for each.


@final
class Blob:
    """Some bytes.

    Args:
        content: Nobody changes it.

    Attributes:
        content: That, read-only.
    """

    __slots__ = ("content",)

    def __init__(self, content: bytes | memoryview = b"") -> None:
        self.content = memoryview(content).toreadonly()

    def __len__(self) -> int:
        """Return how many."""
        return len(self.content)


Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, msgspec.Meta(max_length=65536)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]  # per second; 0.0: not measured


class AnyMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, eq=False):
    """Base of all messages: immutable, tagged by class name on the wire."""
