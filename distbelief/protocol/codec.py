"""Encodes messages to frames and back: one small header, then each array's raw bytes.

The header is an `Envelope` in msgpack: the run's name, the sender, its incarnation and the
message. An array is replaced by [frame, element type], a blob by [frame, "u1"]; the frames
follow in that order. A header that is too long, ill-typed, of another run, or that does not
fit its frames raises `RemoteProtocolError` before any memory is allocated.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from distbelief.core.errors import LocalProtocolError, RemoteProtocolError
from distbelief.core.vectors import BLOCK_BYTES, ELEMENT_TYPES, Vector
from distbelief.protocol import Blob, Count, Message, Name


Frame = bytes | memoryview

HEADER_BYTES_MAX = 1 << 20
FRAME_BYTES_MAX = 2 * BLOCK_BYTES  # of an array: blocks between ranks are larger
FRAMES_MAX = 2  # no message has more than one array or blob

JOINING = "join"
"""Replaces the run's name between the supervisor and hosts, which do not know it yet."""

_BLOB = "u1"
_CODES = {dtype: code for code, dtype in ELEMENT_TYPES.items()}


class AnotherRunError(RemoteProtocolError):
    """A message of another run: an old process, or a wrong address."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True, eq=False):
    run: Name  # no secret: it keeps two runs apart
    sender: Name
    incarnation: Count
    message: Message


class Codec:
    """Encodes and decodes the envelopes of one run. Not thread-safe.

    `strangers` is the prefix of senders that may use `JOINING` in place of the run's name.
    """

    def __init__(self, *, run: str, strangers: str | None = None) -> None:
        self._run = run
        self._strangers = strangers
        self._frames: Sequence[Frame] = ()
        self._n_used = 0
        self._frames_out: list[Frame] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._reference)
        self._decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(
            Envelope, dec_hook=self._found
        )

    def encode(
        self, message: Message, *, sender: str, incarnation: int, receiver: str = ""
    ) -> list[Frame]:
        """Return the frames of `message`; array frames share the array's memory.

        `receiver` matters only where it may be a host that does not know the run yet.
        LocalProtocolError if it is too large, or has values that no message can carry.
        """
        self._frames_out = []
        envelope = Envelope(
            run=JOINING if self._is_strange(receiver) else self._run,
            sender=sender,
            incarnation=incarnation,
            message=message,
        )
        try:
            header = self._encoder.encode(envelope)
        except (UnicodeEncodeError, OverflowError) as error:
            raise LocalProtocolError(f"cannot send {type(message).__name__}: {error}") from None
        if len(header) > HEADER_BYTES_MAX:
            raise LocalProtocolError(
                f"cannot send {type(message).__name__}: a header of {len(header)} bytes"
            )
        frames: list[Frame] = [header, *self._frames_out]
        self._frames_out = []
        return frames

    def decode(self, frames: Sequence[Frame]) -> Envelope:
        """Return the envelope of these frames.

        Its array is read-only and aligned; it shares the frame's memory if that is aligned.
        RemoteProtocolError says what is wrong with them.
        """
        if not 1 <= len(frames) <= FRAMES_MAX:
            raise RemoteProtocolError(f"{len(frames)} frames, not 1 to {FRAMES_MAX}")
        header, *arrays = frames
        if len(header) > HEADER_BYTES_MAX:
            raise RemoteProtocolError(
                f"a header of {len(header)} bytes, more than {HEADER_BYTES_MAX}"
            )
        self._frames, self._n_used = arrays, 0
        try:
            envelope = self._decoder.decode(header)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteProtocolError(f"an unreadable header: {error!s:.200}") from None
        finally:
            self._frames = ()
        strange = envelope.run == JOINING and self._is_strange(envelope.sender)
        if envelope.run != self._run and not strange:
            raise AnotherRunError(f"{envelope.sender!r} belongs to another run")
        if self._n_used != len(arrays):
            raise RemoteProtocolError(
                f"{len(arrays)} array frames, but {self._n_used} references to them"
            )
        return envelope

    def _is_strange(self, name: str) -> bool:
        return self._strangers is not None and name.startswith(self._strangers)

    def _reference(self, value: object) -> tuple[int, str]:
        # Replaces in the header what travels beside it.
        code: str | None
        content: memoryview | None
        if isinstance(value, Blob):
            code, content = _BLOB, value.content
        elif isinstance(value, np.ndarray):
            code = _CODES.get(value.dtype)
            content = None if code is None else _raw(value)
        else:
            raise LocalProtocolError(f"cannot send {type(value).__name__}: {value!r}")
        if code is None or content is None or len(content) > FRAME_BYTES_MAX:
            raise LocalProtocolError(
                f"cannot send {_described(value)}: only flat {', '.join(ELEMENT_TYPES)}, "
                f"{FRAME_BYTES_MAX} bytes at most"
            )
        self._frames_out.append(content)
        return len(self._frames_out) - 1, code

    def _found(self, expected: type, reference: object) -> Vector | Blob:
        if type(reference) is not list or len(reference) != 2:
            raise msgspec.ValidationError("no array reference")
        index, code = reference
        if type(index) is not int or type(code) is not str:
            raise msgspec.ValidationError("no array reference")
        dtype = None if expected is Blob else ELEMENT_TYPES.get(code)
        is_one = code == _BLOB if expected is Blob else dtype is not None
        if not is_one or index != self._n_used or index >= len(self._frames):
            raise msgspec.ValidationError(f"no such array: {index}, {code!r:.8}")
        self._n_used += 1
        frame = self._frames[index]
        if len(frame) > FRAME_BYTES_MAX:
            raise msgspec.ValidationError(f"{len(frame)} bytes cannot be a frame")
        if dtype is None:
            return Blob(frame)
        if len(frame) % dtype.itemsize:
            raise msgspec.ValidationError(f"{len(frame)} bytes cannot be {dtype}")
        array = np.frombuffer(frame, dtype=dtype)
        if not array.flags.aligned:  # ZeroMQ does not align small frames
            array = array.copy()
        array.flags.writeable = False
        return array


def _raw(array: Vector) -> memoryview | None:
    if array.ndim != 1:
        return None
    # `.view` and not a memoryview cast: an empty memoryview cannot be cast. Read-only
    # arrays stay read-only.
    return np.ascontiguousarray(array).view(np.uint8).data


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {value.shape}"
    return f"a {type(value).__name__}"
