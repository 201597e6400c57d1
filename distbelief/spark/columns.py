"""Columns of a DataFrame, or a Ray Dataset, as tensors: of which type, and how they are read.

    column of                          tensor of a sample
    ---------------------------------  ------------------------------------------------
    numbers, decimals                  ()          float32, or `Columns.dtype`
    whole numbers, true and false      ()          int64
    arrays of these, also nested       their sizes, the same in all rows
    vectors of pyspark.ml              (size,)
    bytes                              what a function of the user makes of them
    several columns of numbers         (columns,)

Spark itself casts (`selected`), so that only numbers and bytes leave it, as Arrow; Ray's blocks
are Arrow (`cast_blocks`). Nothing is pickled. They stay Arrow in files (`write_rows`, `rows`), and
arrays are views of these. Imports no torch, so that a task of Spark or Ray does not.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from distbelief.core.errors import JobError
from distbelief.task.imports import resolve


if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

Numbers = NDArray[np.float32 | np.float64 | np.int64]
Decode = Callable[[bytes], object]
TARGET: Final = "target"


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The columns of samples; those of `selected` are called input-0, input-1, ..., target."""

    inputs: tuple[str, ...]
    target: str | None = None
    # Import path of f(bytes) -> tensor or array, by column
    decode: dict[str, str] = {}
    dtype: Literal["float32", "float64"] = "float32"  # of numbers that are no whole numbers

    @property
    def names(self) -> dict[str, str]:
        """The columns by what `selected` calls them."""
        named = {f"input-{k}": name for k, name in enumerate(self.inputs)}
        return named if self.target is None else named | {TARGET: self.target}

    def decoders(self) -> dict[str, Decode]:
        return {
            key: cast("Decode", resolve(self.decode[name], table="decode"))
            for key, name in self.names.items()
            if name in self.decode
        }


def selected(dataframe: "DataFrame", columns: Columns) -> "list[Column]":
    """Return the expressions of these columns, cast; JobError if one has no tensors."""
    from pyspark.errors import AnalysisException  # noqa: PLC0415 -- an extra
    from pyspark.sql.types import BinaryType  # noqa: PLC0415 -- an extra

    types = {field.name: field.dataType for field in dataframe.schema.fields}
    unknown = [name for name in (*columns.names.values(), *columns.decode) if name not in types]
    if unknown:
        raise JobError(f"there is no column {unknown[0]!r}: the DataFrame has {', '.join(types)}")
    try:
        given = {name: dataframe[f"`{name.replace('`', '``')}`"] for name in columns.names.values()}
    except AnalysisException as error:  # to Spark, Label is another column of the name label
        why = str(error).partition(" SQLSTATE")[0]
        raise JobError(
            f"a column has a name that another one has: rename or drop it: {why}"
        ) from None
    found = [
        _cast(given[name], types[name], name, columns).alias(key)
        for key, name in columns.names.items()
    ]
    if len(columns.inputs) > 1:
        for name in columns.inputs:
            if isinstance(types[name], BinaryType) or not _is_number(types[name]):
                raise JobError(
                    f"inputs are several columns, and {name!r} is of type "
                    f"{types[name].simpleString()}: several must be numbers, which become one "
                    "vector; or give one column of vectors or arrays"
                )
    return found


def _cast(column: "Column", kind: "DataType", name: str, columns: Columns) -> "Column":
    from pyspark.ml.functions import vector_to_array  # noqa: PLC0415 -- an extra
    from pyspark.ml.linalg import VectorUDT  # noqa: PLC0415 -- an extra
    from pyspark.sql import types as t  # noqa: PLC0415 -- an extra
    from pyspark.sql.functions import when  # noqa: PLC0415 -- an extra

    number = t.FloatType() if columns.dtype == "float32" else t.DoubleType()

    def cast_of(kind: "DataType") -> "DataType | None":
        if isinstance(kind, t.IntegralType | t.BooleanType):
            return t.LongType()
        if isinstance(kind, t.FractionalType):
            return number
        if isinstance(kind, t.ArrayType):
            inner = cast_of(kind.elementType)
            return inner and t.ArrayType(inner)
        return None

    if isinstance(kind, t.BinaryType):
        if name in columns.decode:
            return column
        raise JobError(
            f"column {name!r} has bytes: give decode={{{name!r}: 'module:function'}}, a function "
            "of bytes that returns a tensor"
        )
    if name in columns.decode:
        raise JobError(f"decode has {name!r}, which is of type {kind.simpleString()}, not of bytes")
    if isinstance(kind, VectorUDT):
        # vector_to_array fails at a missing one, and names no column.
        return when(column.isNotNull(), vector_to_array(column, columns.dtype))
    wanted = cast_of(kind)
    if wanted is None:
        raise JobError(
            f"column {name!r} is of type {kind.simpleString()}, which is no tensor: give numbers, "
            "arrays, vectors of pyspark.ml, or bytes (StringIndexer makes numbers of text, and "
            "unix_date or unix_timestamp of times; labels are whole ones: .cast('int'))"
        )
    return column.cast(wanted)


def _is_number(kind: "DataType") -> bool:
    from pyspark.sql.types import BooleanType, NumericType  # noqa: PLC0415 -- an extra

    return isinstance(kind, NumericType | BooleanType)


def cast_blocks(blocks: "Iterable[pa.Table]", columns: Columns) -> "Iterator[pa.RecordBatch]":
    """Yield the rows of blocks of a Ray Dataset, cast; JobError if a column has no tensors."""
    import pyarrow as pa  # noqa: PLC0415 -- an extra

    for block in blocks:
        if not block.num_rows:
            continue
        names = {*columns.names.values(), *columns.decode}
        known = ", ".join(block.column_names)
        if unknown := sorted(names - {*block.column_names}):
            raise JobError(f"there is no column {unknown[0]!r}: the Dataset has {known}")
        if several := [name for name in names if block.column_names.count(name) > 1]:
            raise JobError(f"several columns are called {several[0]!r}: the Dataset has {known}")
        found = {
            key: _cast_block(block[name], name, columns) for key, name in columns.names.items()
        }
        for name, key in zip(columns.inputs, found, strict=False):
            if len(columns.inputs) > 1 and not pa.types.is_primitive(found[key].type):
                raise JobError(f"inputs are several columns, and {name!r} is no number: give one")
        yield from pa.table(found).to_batches(max_chunksize=1 << 16)


def _cast_block(column: "pa.ChunkedArray", name: str, columns: Columns) -> "pa.Array":
    import pyarrow as pa  # noqa: PLC0415 -- an extra

    def cast_of(kind: "pa.DataType") -> "pa.DataType | None":
        if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            return pa.int64()
        if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return pa.float32() if columns.dtype == "float32" else pa.float64()
        if pa.types.is_nested(kind) and hasattr(kind, "value_type"):  # lists of every kind
            inner = cast_of(kind.value_type)
            return inner and pa.list_(inner)
        return None

    array = column.combine_chunks()
    if array.null_count:
        raise JobError(f"column {name!r} has missing values (null): fill or drop them")
    is_bytes = pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
    if is_bytes != (name in columns.decode):
        raise JobError(f"column {name!r} is of type {array.type}: decode is for columns of bytes")
    if is_bytes:
        return array
    if hasattr(array, "to_numpy_ndarray"):  # tensors of one shape
        tensors = array.to_numpy_ndarray()
        if not tensors.size:
            raise JobError(f"column {name!r} has arrays of 0 numbers: there is nothing to read")
        array = lists_of(tensors)
    wanted = cast_of(array.type)
    if wanted is None:
        raise JobError(f"column {name!r} is of type {array.type}, which is no tensor of one shape")
    try:
        return array.cast(wanted)
    except pa.ArrowInvalid as error:
        raise JobError(f"column {name!r}: {error}") from None


def numbers_of(array: "pa.Array", name: str) -> Numbers:
    """Return numbers of Arrow as a view, (rows, ...); JobError if values are missing or uneven."""
    import pyarrow as pa  # noqa: PLC0415 -- an extra

    n, shape = len(array), [len(array)]
    while True:
        if array.null_count:
            raise JobError(f"column {name!r} has missing values (null): fill or drop them")
        if not pa.types.is_list(array.type):
            break
        sizes = np.diff(array.offsets.to_numpy())
        if len(sizes) and (sizes != sizes[0]).any():
            k = int(np.flatnonzero(sizes != sizes[0])[0])
            raise JobError(
                f"column {name!r} has arrays of {sizes[0]} and of {sizes[k]} numbers: all rows "
                "need the same (pad or cut them)"
            )
        if n and not sizes[0]:
            raise JobError(f"column {name!r} has arrays of 0 numbers: there is nothing to read")
        shape.append(int(sizes[0]) if len(sizes) else 0)
        array = array.flatten()
    return cast("Numbers", array.to_numpy(zero_copy_only=True).reshape(shape if n else (0,)))


def finite_numbers_of(array: "pa.Array", name: str) -> Numbers:
    """Do as `numbers_of`; refuse infinity of float32, which a cast makes of larger numbers."""
    numbers = numbers_of(array, name)
    if numbers.dtype == np.float32 and (bad := np.argwhere(np.isinf(numbers))).size:
        why = f"row {bad[0][0]} of a batch is infinite, or was beyond float32"
        raise JobError(f"column {name!r}: {why}: scale or drop such rows")
    return numbers


def lists_of(outputs: Numbers) -> "pa.Array":
    """Return outputs as Arrow, a list for each row and each further dimension."""
    import pyarrow as pa  # noqa: PLC0415 -- an extra

    found = pa.array(outputs.reshape(-1))
    for size in map(int, reversed(outputs.shape[1:])):
        stops = np.arange(0, len(found) + 1, size, dtype=np.int32)
        found = pa.ListArray.from_arrays(stops, found)
    return found


def bytes_of(array: "pa.Array", name: str) -> list[bytes]:
    """Return bytes of Arrow; JobError if values are missing."""
    if array.null_count:
        raise JobError(f"column {name!r} has missing values (null): drop them")
    return cast("list[bytes]", array.to_pylist())


def write_rows(
    batches: "Iterable[pa.RecordBatch]", file: Path, *, columns: Columns
) -> tuple[int, str, str]:
    """Write rows to a file; return their number, a checksum of the values, types and shapes."""
    import pyarrow as pa  # noqa: PLC0415 -- an extra

    n, checksum, form = 0, 0, ""
    with file.open("wb") as sink:
        writer = None
        for batch in batches:
            if not batch.num_rows:
                continue
            one = []
            for key, array in zip(batch.schema.names, batch.columns, strict=True):
                name = columns.names[key]
                if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
                    for value in bytes_of(array, name):
                        checksum = zlib.crc32(value, checksum)
                    one.append(f"{name}: bytes")
                    continue
                numbers = finite_numbers_of(array, name)
                checksum = zlib.crc32(np.ascontiguousarray(numbers).data.cast("B"), checksum)
                one.append(f"{name}: {numbers.dtype}{list(numbers.shape[1:])}")
            form = form or ", ".join(one)
            if form != ", ".join(one):
                raise JobError(f"rows differ: {form} and {', '.join(one)}: all need the same sizes")
            writer = writer or pa.ipc.new_file(sink, batch.schema)
            writer.write_batch(batch)
            n += batch.num_rows
        if writer is not None:
            writer.close()
    return n, f"{checksum:08x}", form
