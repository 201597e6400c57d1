"""A decoder, and legal bytes for it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import final

from distbelief.errors import DistBeliefError


Decode = Callable[[bytes], object]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """What reads bytes.

    Attributes:
        what: In words.
        seeds: Legal bytes.
        decode: Reads bytes, or refuses them by one of `refusals`.
        refusals: Exceptions that say so on purpose.
    """

    what: str
    seeds: tuple[bytes, ...]
    decode: Decode
    refusals: tuple[type[Exception], ...] = (DistBeliefError,)

    def takes(self, data: bytes) -> bool:
        """Return whether it takes these bytes; whatever else it raises is a finding."""
        try:
            self.decode(data)
        except self.refusals:
            return False
        return True


Open = Callable[[], AbstractContextManager[Decoder]]
"""A decoder may need a file, or the like, for as long as it is tried."""


def plain(make: Callable[[], Decoder]) -> Open:
    """Return how to open a decoder that needs nothing."""

    @contextmanager
    def opened() -> Iterator[Decoder]:
        yield make()

    return opened
