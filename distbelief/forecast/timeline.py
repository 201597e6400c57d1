"""A run in virtual time as a picture for a trace viewer: who worked on what when.

For chrome://tracing and ui.perfetto.dev, like the timeline of a planned step
(`program.timeline`): a process per role, with a row for each of its lanes.
"""

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from distbelief import files
from distbelief.errors import JobError, StorageError
from distbelief.forecast.ledger import Ledger, Span
from distbelief.roles import Address, Lane, Seconds


TraceEvent = dict[str, str | int | float | dict[str, str]]

N_BYTES_TRIED: Final = 1 << 16
"""Written to find out whether the disk takes anything; a timeline is often larger."""

_ROWS: Final = {Lane.COMPUTE: 0, Lane.DATA: 1}


def chrome_trace(ledger: Ledger) -> list[TraceEvent]:
    """Return the work of a run in the trace event format: to be written as JSON."""
    roles: dict[Address, int] = {}
    for span in ledger.spans:
        roles.setdefault(span.role, len(roles))
    trace: list[TraceEvent] = []
    for role, number in roles.items():
        trace.append(_name("process_name", number, 0, role))
        trace += [_name("thread_name", number, row, lane.value) for lane, row in _ROWS.items()]
    trace += [
        {
            "ph": "X",
            "pid": roles[span.role],
            "tid": _ROWS[span.lane],
            "name": span.name,
            "cat": span.name.partition(":")[2] or span.name,
            "ts": (end - span.seconds) * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"role": span.role},
        }
        for span, end in zip(ledger.spans, ends_of(ledger.spans), strict=True)
    ]
    return trace


def ends_of(spans: Sequence[Span]) -> list[Seconds]:
    """Return when each piece of work ended, as late as may be.

    That a process was told of it is later, where processes have to wake up and have
    events before it to handle; but a lane has one piece at a time, so each ended before
    the next of its lane began.
    """
    begins: dict[tuple[Address, Lane], Seconds] = {}
    ends = []
    for span in reversed(spans):
        lane = span.role, span.lane
        end = min(span.ends, begins.get(lane, math.inf))
        begins[lane] = end - span.seconds
        ends.append(end)
    return ends[::-1]


def check_place(path: Path) -> None:
    """Refuse a place where no timeline can be written, before a long run and not after.

    Raises:
        JobError: it names the place.
        StorageError: the disk takes nothing now.
    """
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise JobError(
            f"--trace {path}: nothing can be written there: name a file, in a "
            "directory that there is, and that you may write to"
        )
    if path.exists() and not path.is_file():
        return  # a device or a pipe would have been written to
    try:
        with tempfile.NamedTemporaryFile(
            dir=folder, prefix=f"{path.name}.", suffix=files.TEMPORARY
        ) as file:
            file.write(bytes(N_BYTES_TRIED))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _refused(path, error) from error


def write_trace(path: Path, ledger: Ledger) -> None:
    """Write the timeline of a run.

    Raises:
        StorageError: it cannot be written.
    """
    content = msgspec.json.encode({"traceEvents": chrome_trace(ledger)})
    try:
        files.write(path, content)
    except StorageError as error:
        if isinstance(error.__cause__, OSError):
            raise _refused(path, error.__cause__) from error
        raise


def _refused(path: Path, error: OSError) -> StorageError:
    """Return why nothing can be written; there is no run to go on with."""
    return StorageError(
        f"--trace {path}: cannot write the timeline: {error.strerror or error}: mend "
        "that, or name another place"
    )


def _name(what: str, process: int, row: int, text: str) -> TraceEvent:
    return {"ph": "M", "pid": process, "tid": row, "name": what, "args": {"name": text}}
