"""metrics.jsonl: the curve of a run, one JSON object per line.

Each line is written before the next one begins, so a killed run leaves at most one cut line, the
last. Readers skip it; a resumed run removes it and appends.
"""

import errno
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Self, final

import msgspec

from distbelief.core import files
from distbelief.supervisor.view import JobView


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One line: the job at one moment. What was not measured yet is null."""

    time: float  # seconds of the job, previous sessions included
    step: int  # steps of all replicas together
    samples: int  # samples trained on, by all replicas together
    loss: float | None = None  # of training, mean since the line before
    held_out_loss: float | None = None  # as last measured
    metric_name: str = "accuracy"
    metric: float | None = None  # held out, as last measured
    samples_per_second: float | None = None  # over the last few seconds
    staleness_mean: float | None = None  # of the pushes applied, in pushes; so are the other two
    staleness_p95: float | None = None
    staleness_max: float | None = None
    bytes_in: int = 0  # received by all shards, in total
    bytes_out: int = 0  # sent by all shards, in total
    figures: dict[str, float] = {}  # what else the algorithm counts, by name

    @classmethod
    def of(cls, view: JobView) -> Self:
        shared = {name: getattr(view, name) for name in cls.__struct_fields__[1:]}
        return msgspec.convert(shared | {"time": round(view.seconds, 3)}, cls)


@final
class MetricsFile:
    """Appends to a metrics.jsonl; continues an existing one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._end = 0  # offset behind the last whole line

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Open the file; remove a cut last line."""
        try:
            # Unbuffered: bytes of a failed write must not appear later.
            self._file = self._path.open("a+b", buffering=0)
            self._end = _end_of_last_line(self._file)
            if self._end < self._file.seek(0, os.SEEK_END):
                self._file.truncate(self._end)
        except OSError as error:
            self.close()
            raise files.explained(error, self._path, doing="write") from error

    def append(self, measurement: Measurement) -> None:
        """Write one line to the operating system."""
        assert self._file is not None, "open() comes first"
        line = msgspec.json.encode(measurement) + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            raise files.explained(error, self._path, doing="write") from error
        self._end += len(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[Measurement]:
    """Return the whole lines of a metrics.jsonl; none if there is no such file."""
    try:
        return measurements_in(path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise files.explained(error, path, doing="read") from error


def measurements_in(content: bytes) -> list[Measurement]:
    decoder = msgspec.json.Decoder(Measurement)
    measurements: list[Measurement] = []
    for line in content.split(b"\n")[:-1]:  # the rest has no newline: a cut line
        try:
            measurements.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return measurements


def _end_of_last_line(file: FileIO) -> int:
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 4096)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
