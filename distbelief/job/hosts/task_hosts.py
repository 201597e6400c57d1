"""Hosts in tasks of a cluster: Spark's, Ray's.

    task on a host of the cluster             the supervisor's process
      | writes its rows, then Report  ----->    |
      | <--------------------------- Answer     |   the job's address; or "send the rows"
      | runs the agent until the job ends       |

The agent is a process that leaves when its standard input ends, so nothing is left running if the
cluster kills the task, its host, or the driver. The cluster runs a lost task again elsewhere, which
writes the same rows and joins like any late host. What runs in a task is in `host_task`; its key
comes with its code. Parameters and gradients travel by this package's own messages.
"""

import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast, final

import msgspec

from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.job.hosts.host_task import Answer, HostTask, Options, Report
from distbelief.job.launch.role_process import modules_of, places_of
from distbelief.protocol.role import Seconds
from distbelief.transport.address import is_anywhere, own_address


if TYPE_CHECKING:
    from pyarrow import RecordBatch

    Link = Connection[bytes, bytes]

CLOSE_SECONDS: Final = 5.0  # for tasks to end with the job; then the cluster ends them
RESOURCE_SECONDS: Final = 20.0  # without a sign of a task, until the user is warned
AGAIN_SECONDS: Final = 2.0  # pause before tasks are started again
OVER: Final = "another task has its rows"


class Tasks(Protocol):
    """The tasks of one job, each with a part of the rows."""

    name: str  # of the cluster

    def run(self, task: HostTask, *, cores: int) -> None:
        """Run `task` for each part, one of so many cores in each host; return when all ended."""

    def cancel(self) -> None: ...

    def runs_again(self, stage: int) -> bool:
        """Return whether the tasks of a stage run again, whether they have ended or not."""


@final
class TaskHosts:
    """The hosts that a cluster provides to one job: `begin`, then `start`, then `close`.

    A task with rows to write runs a host only if it has some. Each has so many `cores`; `keys` is a
    directory on the hosts, or "".
    """

    def __init__(
        self,
        tasks: Tasks,
        *,
        host: str,  # where tasks reach this process
        write: "Callable[[Iterable[RecordBatch], Path], tuple[int, str, str]] | None" = None,
        keys: str = "",
    ) -> None:
        self._tasks = tasks
        self._host = host
        self._write = write
        self._keys = keys
        self._key = secrets.token_bytes(32)
        self._changed = threading.Condition()  # guards all below
        self.parts: dict[int, Report] = {}
        self._links: dict[int, Link] = {}  # of tasks that wait for an answer
        self._newest: dict[int, int] = {}  # the task of each part which ran again
        self._go: Answer | None = None
        self._texts: list[str] = []
        self._failure: str | None = None
        self._closes = False
        self._listener: Listener | None = None
        self._door = host, 0
        self._job: threading.Thread | None = None
        self._begun_at: Seconds | None = None
        self.n_parts = 0
        self.cores = 1
        self.job: Job | None = None  # set before `start`
        self.rows_as = ""  # what the job calls the rows

    def begin(self, *, n_parts: int, cores: int) -> None:
        """Let the cluster start the tasks, one of `cores` in each host if it can."""
        self.n_parts, self.cores = n_parts, cores
        self._listener = listener = Listener((self._host, 0), backlog=128)
        host, port = cast("tuple[str, int]", listener.address)
        self._door = own_address() if is_anywhere(host) else host, port
        threading.Thread(target=self._accept, args=[listener], daemon=True).start()
        self._job = threading.Thread(target=self._run, daemon=True)
        self._job.start()

    def wait(self, tell: Callable[[str], object]) -> None:
        """Return once all tasks have written their rows; JobError if the cluster gives up."""
        with self._changed:
            while len(self.parts) < self.n_parts and self._failure is None:
                n = len(self.parts)
                if not self._changed.wait(RESOURCE_SECONDS) and len(self.parts) == n:
                    tell(self._missing())
            if self._failure is not None:
                raise JobError(f"{self._tasks.name}: {self._failure}")

    def _missing(self) -> str:
        return (
            f"{self._tasks.name} runs {len(self.parts)} of {self.n_parts} hosts: each needs "
            f"{self.cores} free cores until the job ends; use fewer hosts if there are no more"
        )

    def copy_rows(self, part: int, file: Path) -> None:
        """Bring the rows that a task has written to a file here."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: part in self._links or self._failure is not None)
                if self._failure is not None:
                    raise JobError(f"{self._tasks.name}: {self._failure}")
                link = self._links[part]
            try:
                link.send_bytes(msgspec.json.encode(Answer(sends_rows=True)))
                with file.open("wb") as content:
                    while chunk := link.recv_bytes():
                        content.write(chunk)
            except (EOFError, OSError):  # its host is lost: another task will write them
                with self._changed:
                    self._links.pop(part, None)
            else:
                return

    def start(self, address: str, *, directory: Path) -> None:
        """Let the tasks run their hosts; what these log stays with the executors."""
        del directory
        assert self.job is not None
        options = Options(
            address=address,
            keys=self._keys,
            cores=self.cores,
            allowed=modules_of(self.job),
            places=places_of(self.job),
            paths=self.job.import_paths,
        )
        with self._changed:
            self._go = Answer(join=msgspec.json.encode(options), rows_as=self.rows_as)
            self._changed.notify_all()

    def news(self, now: Seconds) -> list[str]:
        with self._changed:
            texts, self._texts = self._texts, []
            self._begun_at = now if self._begun_at is None else self._begun_at
            is_late = now - self._begun_at > RESOURCE_SECONDS
            if is_late and len(self.parts) < self.n_parts:
                self._begun_at = float("inf")
                texts.append(self._missing())
        return texts

    def __call__(self, view: object) -> None:
        """End the job, of which this is a callback, if lost rows cannot come back."""
        del view
        if self._failure is not None:
            raise JobError(f"{self._tasks.name}: {self._failure}")

    def close(self) -> None:
        """End the tasks: those of a job that has ended end by themselves."""
        with self._changed:
            self._closes = True
            self._changed.notify_all()
        if self._job is not None:
            self._job.join(CLOSE_SECONDS if self._go else 0.0)
            if self._job.is_alive():
                with suppress(Exception):  # the cluster may have ended
                    self._tasks.cancel()
                self._job.join(CLOSE_SECONDS)
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):  # ends the wait for another task
                socket.create_connection(self._door, CLOSE_SECONDS).close()
            listener.close()

    # --- threads ---

    def _run(self) -> None:
        task = HostTask(door=self._door, key=self._key, write=self._write)
        while True:
            try:
                self._tasks.run(task, cores=self.cores)
            except Exception as error:  # noqa: BLE001 -- of Java, too
                if not self._is_to_go_on(_cause(error)):
                    return
            else:
                with self._changed:
                    # Spark runs no task for rows that it knows to be none.
                    self.parts |= {
                        part: Report(part=part)
                        for part in {*range(self.n_parts)} - {*self.parts}
                        if self._go is None
                    }
                    self._changed.notify_all()
                return

    def _is_to_go_on(self, why: str) -> bool:
        """Note why the cluster has ended the tasks; return whether to start them again."""
        with self._changed:
            if self._go is None or self._failure is not None:
                self._failure = self._failure or why
                self._texts.append(f"{self._tasks.name}: {self._failure}")
                self._changed.notify_all()
                return False
            self._texts.append(
                f"{self._tasks.name} has ended the hosts ({why}); starting them again"
            )
            return not self._changed.wait_for(lambda: self._closes, AGAIN_SECONDS)

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                link = listener.accept()
            except OSError:
                return
            if self._closes:
                link.close()
                return
            threading.Thread(target=self._answer, args=[link], daemon=True).start()

    def _answer(self, link: "Link") -> None:
        with link, suppress(EOFError, OSError, msgspec.MsgspecError):
            try:
                deliver_challenge(link, self._key)
                answer_challenge(link, self._key)
            except Exception:  # noqa: BLE001 -- a stranger
                return
            report = msgspec.json.decode(link.recv_bytes(), type=Report)
            is_again = self._tasks.runs_again(report.stage)

            def is_over() -> bool:
                return self._newest.get(report.part, 0) > report.task

            with self._changed:
                if is_again:
                    newest = self._newest.get(report.part, 0)
                    self._newest[report.part] = max(newest, report.task)
                refusal = self._misfit(report)
                if not (refusal or is_over()):
                    self.parts[report.part] = report
                    self._links[report.part] = link
                self._failure = self._failure or refusal or None
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._go or self._closes or self._failure or is_over()
                )
                if self._links.get(report.part) is link:
                    del self._links[report.part]
                answer = Answer()
                if self._failure is not None:
                    answer = Answer(refusal=self._failure)
                elif is_over():
                    answer = Answer(refusal=OVER)
                elif self._go is not None and (report.rows or self._write is None):
                    answer = self._go
            link.send_bytes(msgspec.json.encode(answer))
            if answer.join:
                with self._changed:
                    self._changed.wait_for(lambda: self._closes or is_over())
                if is_over():
                    link.send_bytes(msgspec.json.encode(Answer(refusal=OVER)))

    def _misfit(self, report: Report) -> str:
        """Return why these rows do not fit what tasks have reported before, or ""."""
        before = self.parts.get(report.part)
        if before is not None and (before.rows, before.checksum) != (report.rows, report.checksum):
            return (
                f"partition {report.part} was read again and has other rows, or another order: "
                "write the rows to parquet and read that, or sort within partitions by a key"
            )
        if report.rows:
            for other in self.parts.values():
                if other.rows and other.form != report.form:
                    return (
                        f"partition {other.part} has {other.form}, and partition {report.part} has "
                        f"{report.form}: all rows need the same"
                    )
        return ""


def _cause(error: Exception) -> str:
    """Return the line of an error that names the cause."""
    lines = [line.strip() for line in str(error).splitlines()]
    ours = [line for line in lines if "JobError:" in line]
    found = next(iter(ours[-1:]), next((line for line in lines if line), type(error).__name__))
    return found.rpartition("JobError: ")[2][:1000]
