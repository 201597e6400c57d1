"""Rows of partitions, as files of Arrow beside the hosts that read them: pieces of the data.

A task writes its partition once (`columns.write_rows`); roles on its host map the file into memory.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast, final

import msgspec
import numpy as np
import torch

from distbelief.core.errors import JobError
from distbelief.spark.columns import TARGET, Columns, Decode, Numbers, numbers_of


if TYPE_CHECKING:
    import pyarrow as pa

PATH: Final = f"{__name__}:dataframe"  # the factory, in jobs
HELD_OUT: Final = f"{__name__}:held_out"


def samples_of(
    arrays: Sequence[object], keys: Sequence[str], columns: Columns, decoders: dict[str, Decode]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return inputs and targets of rows; an array of bytes is a list."""
    found = {
        key: _decoded(cast("list[bytes]", one), decoders[key], columns.names[key])
        if key in decoders
        else torch.from_numpy(np.require(cast("Numbers", one), requirements=["C", "W"]))
        for key, one in zip(keys, arrays, strict=True)
    }
    target = found.pop(TARGET, None)
    inputs = list(found.values())
    if len(inputs) == 1:
        return inputs[0], target
    kind = torch.float64 if columns.dtype == "float64" else torch.float32
    if not any(one.is_floating_point() for one in inputs):
        kind = torch.int64
    return torch.stack([one.to(kind) for one in inputs], dim=1), target


def _decoded(values: list[bytes], decode: Decode, name: str) -> torch.Tensor:
    made = [torch.as_tensor(decode(value)) for value in values]
    if any(one.shape != made[0].shape for one in made):
        raise JobError(f"decode of column {name!r} made tensors of several shapes: make one of all")
    return torch.stack(made)


@final
class RowFile:
    """The rows of a file, mapped into memory: a map-style data set."""

    def __init__(self, file: Path, columns: Columns) -> None:
        import pyarrow as pa  # noqa: PLC0415 -- an extra

        reader = pa.ipc.open_file(pa.memory_map(str(file)))
        batches = [reader.get_batch(k) for k in range(reader.num_record_batches)]
        self._columns, self._keys = columns, list(reader.schema.names)
        self._decoders = columns.decoders()
        self._stops = [*accumulate(batch.num_rows for batch in batches)]
        # Of each column, by batch: views of numbers, or Arrow's bytes
        self._parts: list[list[object]] = [
            [
                part if key in self._decoders else numbers_of(part, columns.names[key])
                for part in (batch.column(k) for batch in batches)
            ]
            for k, key in enumerate(self._keys)
        ]

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self.__getitems__([row])
        return inputs[0], targets[0]

    def __getitems__(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = np.asarray(rows, np.int64)
        which = np.searchsorted(self._stops, wanted, side="right")
        inner = wanted - np.asarray([0, *self._stops], np.int64)[which]
        arrays = [
            self._bytes(parts, which, inner)
            if key in self._decoders
            else _gathered(cast("list[Numbers]", parts), which, inner)
            for key, parts in zip(self._keys, self._parts, strict=True)
        ]
        inputs, targets = samples_of(arrays, self._keys, self._columns, self._decoders)
        assert targets is not None
        return inputs, targets

    def _bytes(self, parts: list[object], which: Numbers, inner: Numbers) -> list[bytes]:
        of = cast("list[pa.Array]", parts)
        return [of[k][i].as_py() for k, i in zip(which.tolist(), inner.tolist(), strict=True)]


def _gathered(parts: list[Numbers], which: Numbers, inner: Numbers) -> Numbers:
    found: Numbers = np.empty((len(which), *parts[0].shape[1:]), parts[0].dtype)
    for k in np.unique(which):
        chosen = which == k
        found[chosen] = parts[k][inner[chosen]]
    return found


@final
class Partitions:
    """The partitions of a DataFrame as pieces, which lie where their tasks wrote them."""

    def __init__(
        self, directory: Path, rows: Mapping[str, int], fingerprint: str, columns: Columns
    ) -> None:
        self.fingerprint = fingerprint
        self._directory, self._rows, self._columns = directory, rows, columns
        self._files: dict[str, RowFile] = {}

    def pieces(self) -> Mapping[str, int]:
        return self._rows

    def here(self) -> list[str]:
        return [name for name in self._rows if (self._directory / name).is_file()]

    def read(self, piece: str, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if piece not in self._files:
            self._files[piece] = RowFile(self._directory / piece, self._columns)
        return self._files[piece].__getitems__(rows)


def place_of(directory: str) -> Path:
    """Return the directory of rows: beside the host's agent, or the driver's `directory`."""
    beside = Path.cwd() / Path(directory).name
    return beside if beside.is_dir() else Path(directory)


def dataframe(
    *, directory: str, rows: dict[str, int], fingerprint: str, columns: dict[str, object]
) -> Partitions:
    """Return the training data of a job, as `distbelief.spark.fit` names it."""
    return Partitions(place_of(directory), rows, fingerprint, msgspec.convert(columns, Columns))


def held_out(*, directory: str, file: str, columns: dict[str, object]) -> RowFile:
    """Return held-out data, which lie beside the driver."""
    return RowFile(place_of(directory) / file, msgspec.convert(columns, Columns))
