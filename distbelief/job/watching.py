"""What is done at each tick of a running job: it is shown, measured and written down.

view of the job -> who asked to watch it, the display, status.json
records         -> metrics.jsonl
"""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Final, Self, TypeVar, final

from distbelief.errors import StorageError
from distbelief.job.directory.metrics import Measurement, MetricsFile
from distbelief.job.directory.run_directory import RunDirectory, Status
from distbelief.job.display.progress import Progress
from distbelief.job.display.view import SupervisorView
from distbelief.job.supervision.supervisor import Supervisor
from distbelief.job.voice import Voice


STATUS_SECONDS: Final = 1.0
DRAWING_SECONDS: Final = 2.0
"""Of training, after which what draws the curve is imported."""

T = TypeVar("T")
Watch = Callable[[SupervisorView], bool]
"""Told what is to be seen of a job, now and then; returns whether to end it."""


@final
class HeldBack:
    """A watcher whose error ends the job in good order, and is raised only then.

    It is raised at the end of a `with` block around the job, as it was. Until then the
    watcher is called no more: whoever fails once is likely to fail again.

    Args:
        watch: Who may raise something.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._error: BaseException | None = None

    def __call__(self, view: SupervisorView) -> bool:
        """Return whether to end the job."""
        if self._error is not None:
            return True
        try:
            return self._watch(view)
        except BaseException as error:  # noqa: BLE001 -- SystemExit, too, can wait
            self._error = error
            return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Raise what was raised.

        It goes before what the block raises, which may be due to it, and which Python
        keeps as its context.
        """
        if self._error is not None:
            raise self._error


@final
class Watching:
    """Looks at one supervisor.

    Args:
        supervisor: Of the job.
        look: Returns what is to be seen at a time.
        display: Where it is shown, by the voice.
        metrics: Where measurements are written.
        run: Whose status is written.
        name: Of the job.
        voice: Writes all that; warns of what cannot be written.
        watch: Called with each view; returns whether to end the job.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        look: Callable[[float], SupervisorView],
        display: Progress,
        metrics: MetricsFile,
        run: RunDirectory,
        name: str,
        voice: Voice,
        watch: Watch | None,
    ) -> None:
        self._supervisor = supervisor
        self._look = look
        self._display = display
        self._metrics = metrics
        self._run = run
        self._name = name
        self._voice = voice
        self._watch = watch
        self._may_draw = False
        self._status_at = 0.0

    def tick(self) -> None:
        """Look once."""
        now = time.monotonic()
        view = self._look(now)
        if self._watch is not None and self._watch(view):
            self._supervisor.wind_up("it was told to stop")
        self._voice.show(partial(self._display.update, view), key="view")
        for record in self._supervisor.take_records():
            measurement = Measurement.of(record)
            self._voice.disk.write(partial(self._try, self._metrics.append, measurement))
        if now - self._status_at >= STATUS_SECONDS:
            self._status_at = now
            status = status_of(self._name, view)
            self._voice.disk.renew("status", partial(self._try, self._run.write_status, status))
        if view.training_seconds > DRAWING_SECONDS and not self._may_draw:
            # Its import takes most of a second, which Ctrl+C would have to wait for.
            self._may_draw = True
            name = "distbelief.job.directory.curve"
            threading.Thread(target=import_module, args=(name,), daemon=True).start()

    def _try(self, write: Callable[[T], None], what: T) -> None:
        try:
            write(what)
        except StorageError as error:  # the training itself does not need it
            self._voice.warn(str(error))


def status_of(
    name: str, view: SupervisorView, *, ended: bool = False, error: str | None = None
) -> Status:
    """Return what other programs are to know of this job now."""
    return Status(
        name=name,
        pid=os.getpid(),
        written=time.time(),  # noqa: TID251 -- the time of day, for other programs
        view=view,
        ended=ended,
        error=error,
    )
