"""Bytes beside the header of a message, as arrays are: sent from where they lie.

What is sent to many, or waits to be sent, is then held once, not once for each.
"""

from typing import final


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
