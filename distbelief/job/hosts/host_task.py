"""What a task of a cluster runs: it writes its rows, and is a host of the job then.

Imports no torch: a task writes and reports rows while its host, a process, imports what roles need.
"""

import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import msgspec

from distbelief.core.errors import JobError
from distbelief.job.launch.forkserver import ONE_THREAD


if TYPE_CHECKING:
    from pyarrow import RecordBatch

    Link = Connection[bytes, bytes]

CHUNK_BYTES: Final = 1 << 20
ROWS: Final = "rows"  # directory of what tasks write, until it gets its name
JOINED: Final = "joined"  # directory of a host that has begun


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """task -> supervisor's process: what it has written."""

    part: int  # the partition
    stage: int = 0  # of the cluster's job, if that has any
    task: int = 0  # grows with every task that is started
    rows: int = 0
    checksum: str = ""  # of all values, in order
    form: str = ""  # types and shapes, alike in all parts that have rows


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """supervisor's process -> task: what to do."""

    refusal: str = ""  # fail, with this reason; may come after `join`, too
    sends_rows: bool = False  # send the file of rows, then wait for another answer
    rows_as: str = ""  # name of the directory of rows
    join: bytes = b""  # run a host with these options; b"": end


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a host, as of `JoinOptions`."""

    address: str
    keys: str
    cores: int
    allowed: tuple[str, ...]
    places: tuple[str, ...]
    paths: tuple[str, ...]  # where the job's modules lie on the supervisor's host


def file_of(part: int) -> str:
    return f"part-{part:05}.arrow"


@final
@dataclass(frozen=True, kw_only=True)
class HostTask:
    """What runs in a task: it writes the rows of a partition, and is a host of the job then."""

    door: tuple[str, int]  # where the supervisor's process listens for tasks
    key: bytes
    # Writes rows to a file; returns number, checksum and form
    write: "Callable[[Iterable[RecordBatch], Path], tuple[int, str, str]] | None"

    def run(
        self, batches: "Iterable[RecordBatch]", report: Report, *, files: str, place: str
    ) -> None:
        """Take part with these rows; `files` are on the import path, `place` is for them."""
        directory = Path(tempfile.mkdtemp(prefix="distbelief-", dir=place or None))
        try:
            self._take_part(batches, report, directory, files)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _take_part(
        self, batches: "Iterable[RecordBatch]", report: Report, directory: Path, files: str
    ) -> None:
        rows = directory / ROWS
        rows.mkdir()
        file = rows / file_of(report.part)
        with _agent(directory, files) as agent:
            if self.write is None:
                for _ in batches:
                    pass
            else:
                n, checksum, form = self.write(batches, file)
                report = msgspec.structs.replace(report, rows=n, checksum=checksum, form=form)
            with Client(self.door, authkey=self.key) as link:
                link.send_bytes(msgspec.json.encode(report))
                while (answer := msgspec.json.decode(link.recv_bytes(), type=Answer)).sends_rows:
                    _send_file(link, file)
                if answer.refusal:
                    raise JobError(answer.refusal)
                if answer.join:
                    if answer.rows_as:
                        rows.rename(directory / answer.rows_as)
                    _run(agent, answer.join, link)


def run_blocks(
    task: HostTask,
    part: int,
    read: "Callable[[Sequence[object]], Iterable[RecordBatch]] | None",
    *blocks: object,
) -> None:
    """What Ray runs in a task."""
    # Ray's workers are at 15, where a busy node leaves them hardly any time.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    rows = read(blocks) if read is not None else ()
    task.run(rows, Report(part=part), files=str(Path.cwd()), place="")


@contextmanager
def _agent(directory: Path, files: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Start the host's process, which imports torch while rows are written, and end it."""
    paths = [str(Path(path).absolute()) for path in sys.path if path]
    # A session of its own: signals to the worker are not for the job.
    with subprocess.Popen(  # noqa: S603 -- ourselves
        [sys.executable, "-P", "-m", __name__, files],
        cwd=directory,  # where a role finds its rows
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as agent:
        try:
            yield agent
        finally:
            assert agent.stdin is not None
            with suppress(BrokenPipeError):
                agent.stdin.close()  # ends a host that still runs
            if agent.poll() is None and not (directory / JOINED).exists():
                agent.kill()  # it only imports: nobody waits for that


def _run(agent: "subprocess.Popen[bytes]", options: bytes, link: "Link") -> None:
    assert agent.stdin is not None
    assert agent.stdout is not None
    with suppress(BrokenPipeError):  # it has ended: its output says why
        agent.stdin.write(options + b"\n")
        agent.stdin.flush()  # it stays open while the task lives
    refusal = ""
    with selectors.DefaultSelector() as ready:
        ready.register(agent.stdout, selectors.EVENT_READ)
        ready.register(link, selectors.EVENT_READ)
        while agent.stdout in ready.get_map():
            for key, _ in ready.select():
                if key.fileobj is link:
                    ready.unregister(link)
                    with suppress(EOFError, OSError):  # the supervisor's process has ended
                        refusal = msgspec.json.decode(link.recv_bytes(), type=Answer).refusal
                        agent.stdin.close()  # the host leaves
                elif text := os.read(key.fd, CHUNK_BYTES):
                    sys.stderr.buffer.write(text)  # to the executor's log
                    sys.stderr.flush()
                else:
                    ready.unregister(agent.stdout)
    if refusal:
        raise JobError(refusal)
    if agent.wait() < 0:  # else it would end the same again: the job has its reason
        raise ChildProcessError(f"the host was ended by signal {-agent.returncode}")


def main() -> int:
    """Run a host in the current directory, which is removed at the end."""
    from distbelief.job.launch import forkserver  # noqa: PLC0415 -- while it waits

    forkserver.import_frozen((*forkserver.MODULES, "distbelief.job.hosts.join"))
    from distbelief.job.hosts.agent import JoinOptions  # noqa: PLC0415 -- torch
    from distbelief.job.hosts.join import join  # noqa: PLC0415 -- torch

    directory = Path.cwd()
    try:
        # The bare descriptor: what a buffered reader had read on would not end the host.
        line = b""
        while not line.endswith(b"\n"):
            if not (byte := os.read(0, 1)):
                return 0  # its task has ended
            line += byte
        given = msgspec.json.decode(line, type=Options)
        # The directories of the supervisor's host where they exist here, and the cluster's files.
        places = [*filter(os.path.isdir, given.paths), sys.argv[1]]
        sys.path += places
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*([before] if before else []), *places])
        options = JoinOptions(
            address=given.address,
            is_held=True,
            keys=Path(given.keys) if given.keys else None,
            cores=given.cores,
            allowed=given.allowed,
            places=given.places,
            code=Path(places[0]),
            directory=directory / JOINED,
        )
        # What this process has imported its roles need not import again.
        return join(options, tell=lambda text: print(text, flush=True), forks=True)  # noqa: T201 -- to the executor's log
    finally:
        shutil.rmtree(directory, ignore_errors=True)  # its task may have been killed


def _send_file(link: "Link", file: Path) -> None:
    with file.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            link.send_bytes(chunk)
    link.send_bytes(b"")


if __name__ == "__main__":
    sys.exit(main())
