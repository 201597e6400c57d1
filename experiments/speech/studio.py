"""Runs recording sessions, several at once, each in a process of its own.

Every session is forked from this process, in which the synthesiser was started and has
said nothing: so its audio depends on nothing but its number. A fork copies only the
thread that calls it, so the process that holds a studio must not have started torch.

Results come in the order of their index, whichever session ends first. Every wait has a
bound: a session that dies or hangs ends the work with an error that names it.
"""

import io
import os
import selectors
import signal
import time
from collections.abc import Generator
from dataclasses import dataclass, field, fields
from typing import NoReturn

import numpy as np

from experiments.speech.casting import Casting
from experiments.speech.errors import SessionError
from experiments.speech.espeak import Espeak
from experiments.speech.session import Recording, hold_session


SESSION_SECONDS = 120.0  # a session takes about half a second
PIPE_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class _Booth:
    """A session in progress, seen from outside."""

    index: int
    process: int
    pipe: int
    deadline: float
    received: list[bytes] = field(default_factory=list)


class Studio:
    """Holds the sessions of one casting, `n_workers` at a time."""

    def __init__(
        self,
        espeak: Espeak,
        *,
        casting: Casting,
        n_workers: int,
        session_seconds: float = SESSION_SECONDS,
    ) -> None:
        self._espeak = espeak
        self._casting = casting
        self._n_workers = n_workers
        self._session_seconds = session_seconds
        self._selector = selectors.DefaultSelector()
        self._booths: dict[int, _Booth] = {}

    def hold_sessions(self, first: int) -> Generator[Recording, None, None]:
        """Sessions `first`, `first` + 1, ... for as long as the caller wants more."""
        finished: dict[int, Recording] = {}
        wanted = started = first
        try:
            while True:
                while started < wanted + 2 * self._n_workers and (
                    len(self._booths) < self._n_workers
                ):
                    self._open(started)
                    started += 1
                finished.update(self._wait())
                while wanted in finished:
                    yield finished.pop(wanted)
                    wanted += 1
        finally:
            for booth in list(self._booths.values()):
                os.kill(booth.process, signal.SIGKILL)
                self._close(booth)
            self._selector.close()

    def _open(self, index: int) -> None:
        pipe, child_pipe = os.pipe()
        process = os.fork()
        if process == 0:
            # With no reader left, writing fails, and so no child outlives its parent.
            for descriptor in (pipe, *self._booths):
                os.close(descriptor)
            _hold_and_exit(child_pipe, self._espeak, casting=self._casting, index=index)
        os.close(child_pipe)
        deadline = time.monotonic() + self._session_seconds
        booth = _Booth(index=index, process=process, pipe=pipe, deadline=deadline)
        self._booths[pipe] = booth
        self._selector.register(pipe, selectors.EVENT_READ)

    def _wait(self) -> dict[int, Recording]:
        """Read what has come, until a session ends; its index and recording."""
        nearest = min(booth.deadline for booth in self._booths.values())
        ready = self._selector.select(max(0.0, nearest - time.monotonic()))
        for key, _ in ready:
            booth = self._booths[key.fd]
            block = os.read(booth.pipe, PIPE_BYTES)
            if block:
                booth.received.append(block)
            else:
                return {booth.index: self._finish(booth)}
        self._check_deadlines()
        return {}

    def _finish(self, booth: _Booth) -> Recording:
        status = self._close(booth)
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            raise SessionError(f"{self._name(booth)} was ended by {name}")
        answer = b"".join(booth.received)
        if os.WEXITSTATUS(status) != 0:
            reason = answer.decode("utf-8", "replace")
            raise SessionError(f"{self._name(booth)} failed: {reason}")
        return _unpack(answer)

    def _check_deadlines(self) -> None:
        for booth in self._booths.values():
            if time.monotonic() >= booth.deadline:
                raise SessionError(
                    f"{self._name(booth)} did not end in "
                    f"{self._session_seconds:g} s and was stopped"
                )

    def _close(self, booth: _Booth) -> int:
        del self._booths[booth.pipe]
        self._selector.unregister(booth.pipe)
        os.close(booth.pipe)
        return os.waitpid(booth.process, 0)[1]

    def _name(self, booth: _Booth) -> str:
        return f"recording session {booth.index} of the {self._casting.part} part"


def _hold_and_exit(pipe: int, espeak: Espeak, *, casting: Casting, index: int) -> NoReturn:
    """What a forked child does: one session, written to the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    status = 1
    try:
        try:
            answer = _pack(hold_session(espeak, casting=casting, index=index))
            status = 0
        except Exception as error:  # noqa: BLE001 - crosses to the parent as text
            answer = f"{type(error).__name__}: {error}".encode()
        with open(pipe, "wb") as stream:
            stream.write(answer)
    except BaseException:  # noqa: BLE001 - nobody listens any more
        status = 1
    finally:
        os._exit(status)  # never back into the parent's code


def _pack(recording: Recording) -> bytes:
    buffer = io.BytesIO()
    arrays = {entry.name: np.asarray(getattr(recording, entry.name)) for entry in fields(Recording)}
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def _unpack(answer: bytes) -> Recording:
    with np.load(io.BytesIO(answer), allow_pickle=False) as arrays:
        return Recording(
            voice=str(arrays["voice"]),
            energies=arrays["energies"],
            contexts=arrays["contexts"],
            phones=tuple(arrays["phones"].tolist()),
            lengths=arrays["lengths"],
            sentences=arrays["sentences"],
        )
