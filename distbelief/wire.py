"""Messages to and from frames: one small header, then each array's raw bytes.

The header is an `Envelope` in msgpack: the run's token, the sender and its incarnation,
the message. In place of an array stands [frame, element type]; the frames follow in
that order. Nothing is trusted: a header that is too long, ill-typed, of another run, or
at odds with its frames raises `RemoteProtocolError` before any memory is taken.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from distbelief.errors import LocalProtocolError, RemoteProtocolError
from distbelief.messages import Count, Message, Name
from distbelief.vectors import BLOCK_BYTES, ELEMENT_TYPES, Vector


Frame = bytes | memoryview

HEADER_BYTES_MAX = 1 << 20
FRAME_BYTES_MAX = BLOCK_BYTES  # an array frame is one block at the most
FRAMES_MAX = 2  # no message has more than one array

JOINING = "join"
"""Token of messages between a supervisor and hosts, which do not know the run's yet."""

_CODES = {dtype: code for code, dtype in ELEMENT_TYPES.items()}


class AnotherRunError(RemoteProtocolError):
    """A message of another run came here: an old one, perhaps, or a wrong address."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, array_like=True, eq=False):
    """A message, and who sent it."""

    token: Name  # of the run: two runs on one host do not understand each other
    sender: Name
    incarnation: Count
    message: Message


class Wire:
    """Encodes and decodes the envelopes of one run. Not for several threads.

    Args:
        token: Of the run.
        strangers: How the names of those begin who may say `JOINING` instead.
    """

    def __init__(self, *, token: str, strangers: str | None = None) -> None:
        self._token = token
        self._strangers = strangers
        self._frames: Sequence[Frame] = ()
        self._n_used = 0
        self._arrays: list[memoryview] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._array_reference)
        self._decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(
            Envelope, dec_hook=self._array_at
        )

    def encode(
        self, message: Message, *, sender: str, incarnation: int, receiver: str = ""
    ) -> list[Frame]:
        """Return the frames of `message`; array frames share the array's memory.

        Args:
            message: What is to be sent.
            sender: By whom.
            incarnation: Of the sender.
            receiver: To whom, where that may be a stranger.

        Raises:
            LocalProtocolError: no receiver would accept it.
        """
        self._arrays = []
        envelope = Envelope(
            token=JOINING if self._is_strange(receiver) else self._token,
            sender=sender,
            incarnation=incarnation,
            message=message,
        )
        try:
            header = self._encoder.encode(envelope)
        except (UnicodeEncodeError, OverflowError) as error:
            raise LocalProtocolError(
                f"cannot send {type(message).__name__}: {error}"
            ) from None
        if len(header) > HEADER_BYTES_MAX:
            raise LocalProtocolError(
                f"cannot send {type(message).__name__}: its header has {len(header)} "
                f"bytes, more than {HEADER_BYTES_MAX}"
            )
        frames: list[Frame] = [header, *self._arrays]
        self._arrays = []
        return frames

    def decode(self, frames: Sequence[Frame]) -> Envelope:
        """Return the envelope of these frames.

        Its array is read-only and aligned; where it can, it shares the frame's memory.

        Raises:
            RemoteProtocolError: naming what is wrong with them.
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
        strange = envelope.token == JOINING and self._is_strange(envelope.sender)
        if envelope.token != self._token and not strange:
            raise AnotherRunError(f"{envelope.sender!r} belongs to another run")
        if self._n_used != len(arrays):
            raise RemoteProtocolError(
                f"{type(envelope.message).__name__} with {len(arrays)} array frames "
                f"but {self._n_used} references to them"
            )
        return envelope

    def _is_strange(self, name: str) -> bool:
        return self._strangers is not None and name.startswith(self._strangers)

    def _array_reference(self, value: object) -> tuple[int, str]:
        if not isinstance(value, np.ndarray):
            raise LocalProtocolError(f"cannot send {type(value).__name__}: {value!r}")
        code = _CODES.get(value.dtype)
        if code is None or value.ndim != 1 or value.nbytes > FRAME_BYTES_MAX:
            raise LocalProtocolError(
                f"cannot send an array of {value.dtype} and shape {value.shape}: only "
                f"{', '.join(ELEMENT_TYPES)}, flat, {FRAME_BYTES_MAX} bytes at most"
            )
        # An empty memoryview cannot be cast, and `.view` keeps read-only arrays so.
        self._arrays.append(np.ascontiguousarray(value).view(np.uint8).data)
        return len(self._arrays) - 1, code

    def _array_at(self, expected: type, reference: object) -> Vector:
        del expected
        if type(reference) is not list or len(reference) != 2:
            raise msgspec.ValidationError("no array reference")
        index, code = reference
        if type(index) is not int or type(code) is not str:
            raise msgspec.ValidationError("no array reference")
        dtype = ELEMENT_TYPES.get(code)
        if dtype is None or index != self._n_used or index >= len(self._frames):
            raise msgspec.ValidationError(f"no such array: {index}, {code!r:.8}")
        self._n_used += 1
        frame = self._frames[index]
        if len(frame) > FRAME_BYTES_MAX or len(frame) % dtype.itemsize:
            raise msgspec.ValidationError(f"{len(frame)} bytes cannot be {dtype}")
        array = np.frombuffer(frame, dtype=dtype)
        if not array.flags.aligned:  # ZeroMQ packs small frames as they come
            array = array.copy()
        array.flags.writeable = False
        return array
