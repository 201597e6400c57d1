"""The post: what travels for a message, how large that is, and what comes of it.

*Encoded*: every message is written to frames and read again, as between real processes;
no array is shared by accident, and what cannot be sent is found out. *Passed on*: the
message itself travels; only its array is copied, as early, or as late if it is lent, as
a frame would be. The sizes of headers are those of the first message of each kind
where all are about alike; of the others they are measured.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, cast, final, get_args

import msgspec

from distbelief.messages import (
    Acknowledge,
    Credit,
    Fetch,
    Message,
    ParameterBlock,
    Push,
    PushBlock,
    PushCredit,
    StateBlock,
    Transfer,
)
from distbelief.roles import Address, Received, Send
from distbelief.vectors import Vector
from distbelief.wire import Frame, Wire


_ALIKE: Final = frozenset(
    {Acknowledge, Credit, Fetch, ParameterBlock, Push, PushBlock, PushCredit, StateBlock, Transfer}
)


_ARRAYS: Final[Mapping[type[Message], str]] = {
    kind: field.name
    for kind in get_args(Message)
    for field in msgspec.structs.fields(kind)
    if field.type in {Vector, Vector | None}
}
"""The field of each message that is an array: no message has more than one."""


class Post(Protocol):
    """How messages travel.

    Attributes:
        size: Of what was sent last: bytes of its header, and of its array.
    """

    size: tuple[int, int]

    def sent(self, action: Send, *, sender: Address, incarnation: int) -> object:
        """Return what travels."""
        ...

    def received(self, payload: object) -> Received:
        """Return what it is to its receiver."""
        ...


@final
class Encoded:
    """Messages as frames.

    Args:
        run: Its name.
    """

    def __init__(self, run: str) -> None:
        self._wire = Wire(run=run)
        self.size = (0, 0)

    def sent(self, action: Send, *, sender: Address, incarnation: int) -> object:
        """Return the frames; copies, for what its owner does to an array is not seen.

        A header is a copy as it is.

        Raises:
            LocalProtocolError: no receiver would accept it.
        """
        frames = self._wire.encode(action.message, sender=sender, incarnation=incarnation)
        if len(frames) == 1:
            self.size = len(frames[0]), 0
            return frames
        self.size = len(frames[0]), sum(map(len, frames[1:]))
        return frames if action.lent else [bytes(frame) for frame in frames]

    def received(self, payload: object) -> Received:
        """Return the message that these frames hold."""
        frames = cast("Sequence[Frame]", payload)
        if len(frames) > 1:
            frames = [bytes(frame) for frame in frames]
        envelope = self._wire.decode(frames)
        return Received(
            sender=Address(envelope.sender),
            incarnation=envelope.incarnation,
            message=envelope.message,
        )


@final
class _Lent(msgspec.Struct, eq=False):
    """An event whose array may yet change."""

    event: Received


@final
class PassedOn:
    """Messages themselves.

    Args:
        run: Its name.
    """

    def __init__(self, run: str) -> None:
        self._wire = Wire(run=run)
        self._headers: dict[type[Message], int] = {}
        self.size = (0, 0)

    def sent(self, action: Send, *, sender: Address, incarnation: int) -> object:
        """Return the event that it will be, its array copied unless it is lent."""
        message = action.message
        kind = type(message)
        header = self._headers.get(kind)
        if header is None:
            frames = self._wire.encode(message, sender=sender, incarnation=incarnation)
            header = len(frames[0])
            if kind in _ALIKE:
                self._headers[kind] = header
        name = _ARRAYS.get(kind)
        if name is None:
            self.size = header, 0
            return Received(sender=sender, incarnation=incarnation, message=message)
        array: Vector | None = getattr(message, name)
        self.size = header, 0 if array is None else array.nbytes
        if array is not None and not action.lent:
            message = _copied(message, name, array)
        event = Received(sender=sender, incarnation=incarnation, message=message)
        return _Lent(event) if array is not None and action.lent else event

    def received(self, payload: object) -> Received:
        """Return that event, its array copied if it was lent."""
        if isinstance(payload, Received):
            return payload
        assert isinstance(payload, _Lent)
        event = payload.event
        message, name = event.message, _ARRAYS[type(event.message)]
        return Received(
            sender=event.sender,
            incarnation=event.incarnation,
            message=_copied(message, name, getattr(message, name)),
        )


def _copied(message: Message, name: str, array: Vector) -> Message:
    """Return the message with an array of its own, which nobody can write to."""
    copy = array.copy()
    copy.flags.writeable = False
    return msgspec.structs.replace(message, **{name: copy})
