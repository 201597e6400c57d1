"""What every message is: typed, immutable, bounded."""

from typing import Annotated

import msgspec


Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, msgspec.Meta(max_length=65536)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Rate = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]  # per second; 0.0: not measured


class AnyMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, eq=False):
    """Base of all messages: immutable, tagged by class name on the wire."""
