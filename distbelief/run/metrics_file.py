"""metrics.jsonl: the curve of a run, one JSON object a line.

A line is on its way to the disk before the next one is begun, so a killed run leaves
all lines but perhaps a cut last one. A reader ignores that one; whoever goes on with
the run removes it and appends.
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
    """One line: the job at one moment. Figures nobody has measured yet are null.

    Attributes:
        time: Seconds of the job, the lives before a resume included.
        step: Steps of all replicas together.
        samples: Samples trained on, by all replicas together.
        loss: Of training, mean since the line before.
        held_out_loss: As last measured.
        metric_name: What `metric` is.
        metric: Held out, as last measured.
        samples_per_second: Over the last few seconds.
        staleness_mean: Of the pushes applied; in pushes.
        staleness_p95: 95 of 100 pushes were no staler.
        staleness_max: The stalest.
        bytes_in: Received by all shards, in total.
        bytes_out: Sent by all shards, in total.
        figures: What else the algorithm counts, by name.
    """

    time: float
    step: int
    samples: int
    loss: float | None = None
    held_out_loss: float | None = None
    metric_name: str = "accuracy"
    metric: float | None = None
    samples_per_second: float | None = None
    staleness_mean: float | None = None
    staleness_p95: float | None = None
    staleness_max: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    figures: dict[str, float] = {}

    @classmethod
    def of(cls, view: JobView) -> Self:
        """Return the line of this view."""
        return cls(
            time=round(view.seconds, 3),
            step=view.step,
            samples=view.samples,
            loss=view.loss,
            held_out_loss=view.held_out_loss,
            metric_name=view.metric_name,
            metric=view.metric,
            samples_per_second=view.samples_per_second,
            staleness_mean=view.staleness_mean,
            staleness_p95=view.staleness_p95,
            staleness_max=view.staleness_max,
            bytes_in=view.bytes_in,
            bytes_out=view.bytes_out,
            figures=view.figures,
        )


@final
class MetricsFile:
    """Appends to a metrics.jsonl, which it goes on with if it exists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._end = 0  # offset behind the last whole line

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self) -> None:
        """Open the file; drop a cut last line.

        Raises:
            StorageError: it cannot be written.
        """
        try:
            # Unbuffered: what cannot be written must not come up again later.
            self._file = self._path.open("a+b", buffering=0)
            self._end = _end_of_last_line(self._file)
            if self._end < self._file.seek(0, os.SEEK_END):
                self._file.truncate(self._end)
        except OSError as error:
            self.close()
            raise files.explained(error, self._path, doing="write") from error

    def append(self, measurement: Measurement) -> None:
        """Write one line, and hand it to the operating system.

        Raises:
            StorageError: it cannot be written; the file ends with the line before.
        """
        assert self._file is not None, "open() comes first"
        line = msgspec.json.encode(measurement) + b"\n"
        try:
            _write_whole(self._file, line)
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._end)
            raise files.explained(error, self._path, doing="write") from error
        self._end += len(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> list[Measurement]:
    """Return the lines of a metrics.jsonl; none if there is no such file.

    Lines that are cut or damaged are left out.

    Raises:
        StorageError: the file cannot be read.
    """
    try:
        return measurements_in(path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise files.explained(error, path, doing="read") from error


def measurements_in(content: bytes) -> list[Measurement]:
    """Return the measurements in the content of such a file."""
    decoder = msgspec.json.Decoder(Measurement)
    measurements: list[Measurement] = []
    for line in content.split(b"\n")[:-1]:  # the rest has no newline: cut
        try:
            measurements.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return measurements


def _write_whole(file: FileIO, line: bytes) -> None:
    """Write all of the line; a disk that takes only a part of it is full."""
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _end_of_last_line(file: FileIO) -> int:
    """Return the offset behind the last newline."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 4096)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
