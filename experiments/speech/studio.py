"""Runs recording sessions, several at once, each in a process of its own.

Every session is forked from this process, in which the synthesiser was started and has said
nothing: so its audio depends on nothing but its number. A fork copies only the thread that calls
it, so the process that holds a studio must not have started torch.

Results come in the order of their index, whichever session ends first. Every wait has a bound: a
session that dies or hangs ends the work with an error that names it.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NoReturn

from experiments.speech.casting import Casting
from experiments.speech.errors import SessionError
from experiments.speech.espeak import Espeak
from experiments.speech.session import Recording, hold_session


SESSION_SECONDS = 120.0  # a session takes about half a second


@dataclass(slots=True, kw_only=True)
class _Booth:
    """A session in progress, seen from outside."""

    index: int
    process: BaseProcess
    pipe: "Connection[object, object]"
    deadline: float


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
        self._booths: list[_Booth] = []

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
                finished |= self._wait()
                while wanted in finished:
                    yield finished.pop(wanted)
                    wanted += 1
        finally:
            for booth in self._booths:
                booth.process.kill()
                booth.process.join()
                booth.pipe.close()

    def _open(self, index: int) -> None:
        fork = multiprocessing.get_context("fork")
        pipe, child_pipe = fork.Pipe(duplex=False)
        # With no reader left, writing fails, and so no child outlives its parent.
        readers = [pipe, *(booth.pipe for booth in self._booths)]
        process = fork.Process(target=self._hold_and_exit, args=(child_pipe, readers, index))
        process.start()
        child_pipe.close()
        deadline = time.monotonic() + self._session_seconds
        self._booths.append(_Booth(index=index, process=process, pipe=pipe, deadline=deadline))

    def _wait(self) -> dict[int, Recording]:
        """Wait until sessions end; return their recordings by index."""
        nearest = min(booth.deadline for booth in self._booths)
        ready = wait([b.pipe for b in self._booths], max(0.0, nearest - time.monotonic()))
        found = {b.index: self._finish(b) for b in list(self._booths) if b.pipe in ready}
        for booth in self._booths:
            if time.monotonic() >= booth.deadline:
                raise SessionError(
                    f"{self._name(booth)} did not end in {self._session_seconds:g} s "
                    "and was stopped"
                )
        return found

    def _finish(self, booth: _Booth) -> Recording:
        answer: object = ""
        with suppress(EOFError):  # it was killed
            answer = booth.pipe.recv()
        booth.process.join()
        booth.pipe.close()
        self._booths.remove(booth)
        status = booth.process.exitcode or 0
        if status < 0:
            raise SessionError(f"{self._name(booth)} was ended by {signal.Signals(-status).name}")
        if not isinstance(answer, Recording):
            raise SessionError(f"{self._name(booth)} failed: {answer}")
        return answer

    def _name(self, booth: _Booth) -> str:
        return f"recording session {booth.index} of the {self._casting.part} part"

    def _hold_and_exit(
        self,
        pipe: "Connection[object, object]",
        readers: "list[Connection[object, object]]",
        index: int,
    ) -> NoReturn:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for reader in readers:
            reader.close()
        answer: object
        try:
            try:
                answer = hold_session(self._espeak, casting=self._casting, index=index)
            except Exception as error:  # noqa: BLE001 - crosses to the parent as text
                answer = f"{type(error).__name__}: {error}"
            pipe.send(answer)
        finally:
            os._exit(0)  # never back into the parent's code
