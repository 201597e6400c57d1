"""`DistBeliefModel`: a trained model as a stage of pyspark.ml, which adds a column.

    model = distbelief.spark.fit(dataframe, "job.toml", inputs="features", targets="label")
    model.transform(dataframe)                                 # adds "prediction"

The values of a model go once to each executor (a broadcast of safetensors); the job's function
makes its module once in each process. A saved stage is JSON and parquet: nothing is pickled.
"""

import uuid
from collections.abc import Iterator
from functools import reduce
from typing import Final, Self, final

import msgspec
import numpy as np
import pyarrow as pa
import torch
from pyspark.broadcast import Broadcast
from pyspark.ml import Model
from pyspark.ml.model_cache import ModelCache
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)
from pyspark.sql import DataFrame
from pyspark.sql.functions import struct
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, LongType
from safetensors.torch import load
from torch import nn
from typing_extensions import override

from distbelief.config.load import job_from_json
from distbelief.core.errors import JobError
from distbelief.job.launch.role_process import import_from
from distbelief.job.run.result import Run
from distbelief.spark.columns import Columns, bytes_of, finite_numbers_of, lists_of, selected
from distbelief.spark.rows import samples_of
from distbelief.task.task import build_model


CHUNK_BYTES: Final = 1 << 26  # of a saved model, in a row
_TYPES: Final = {"float32": FloatType, "float64": DoubleType, "int64": LongType}


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What a saved model has beside its values."""

    job: str  # as JSON
    columns: Columns
    dtype: str  # of an output; of one that is no tensor its type
    shape: tuple[int, ...]


def param(name: str, doc: str) -> "Param[object]":
    """Return a param of any value."""
    return Param(Params._dummy(), name, doc, TypeConverters.identity)  # noqa: SLF001 -- as pyspark's own


class Columned(Params):
    """The params of both stages."""

    predictionCol = param("predictionCol", "the column that transform adds")  # noqa: N815 -- pyspark.ml's name
    batchSize = param("batchSize", "rows of one call of the model")  # noqa: N815 -- as its names


@final
class DistBeliefModel(Model, Columned, MLWritable, MLReadable["DistBeliefModel"]):
    """A trained model: `transform` adds its outputs for each row as a column.

    `run` is the job that trained it; None if it was loaded.
    """

    def __init__(self, saved: Saved, values: bytes, run: Run | None = None) -> None:
        super().__init__()
        self._setDefault(predictionCol="prediction", batchSize=1024)
        self.run = run
        self.saved, self.values = saved, values
        self._sent: Broadcast[bytes] | None = None
        self._token = uuid.uuid4()

    @classmethod
    def of(cls, run: Run, columns: Columns, inputs: torch.Tensor) -> Self:
        """Return the model of a run; `inputs` are some rows."""
        with torch.inference_mode():
            made = run.model(inputs)
        is_tensor = isinstance(made, torch.Tensor)
        saved = Saved(
            job=run.job.to_json().decode(),
            columns=msgspec.structs.replace(columns, target=None),
            dtype=str(made.dtype)[6:] if is_tensor else f"a {type(made).__name__}",
            shape=tuple(made.shape[1:]) if is_tensor else (),
        )
        return cls(saved, (run.directory / "model.safetensors").read_bytes(), run)

    @property
    def module(self) -> nn.Module:
        """The trained module, in evaluation mode."""
        return _module(self.saved, self.values)

    @override
    def _transform(self, dataset: DataFrame) -> DataFrame:
        saved, token = self.saved, self._token
        name, size = self.getOrDefault("predictionCol"), self.getOrDefault("batchSize")
        if not isinstance(name, str) or not name:
            raise JobError(f"predictionCol is {name!r}; use the name of a column")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise JobError(f"batchSize is {size!r}; use a whole number from 1")
        if taken := _same_name(name, dataset):
            raise JobError(f"there is a column {taken!r} already: drop it, or set predictionCol")
        if saved.dtype not in _TYPES:
            raise JobError(
                f"the model returns {saved.dtype}, of which transform makes no column: use "
                "run.model or module, or let forward return one tensor"
            )
        context = dataset.sparkSession.sparkContext
        sent = self._sent = self._sent or context.broadcast(self.values)

        def predict(batches: Iterator[pa.StructArray]) -> Iterator[pa.Array]:
            module = ModelCache.get(token)
            if module is None:
                torch.set_num_threads(1)
                module = _module(saved, sent.value)
                ModelCache.add(token, module)
            decoders = saved.columns.decoders()
            for batch in batches:
                parts = [np.empty((0, *saved.shape), saved.dtype)]
                for start in range(0, len(batch), size):
                    rows = pa.RecordBatch.from_struct_array(batch.slice(start, size))
                    keys = rows.schema.names
                    arrays = [
                        bytes_of(column, saved.columns.names[key])
                        if key in decoders
                        else finite_numbers_of(column, saved.columns.names[key])
                        for key, column in zip(keys, rows.columns, strict=True)
                    ]
                    inputs, _ = samples_of(arrays, keys, saved.columns, decoders)
                    with torch.inference_mode():
                        parts.append(module(inputs).numpy())
                yield lists_of(np.concatenate(parts))

        kind: DataType = _TYPES[saved.dtype]()
        kind = reduce(lambda inner, _: ArrayType(inner), saved.shape, kind)
        predict.__annotations__ = {"batches": Iterator[pa.Array], "return": Iterator[pa.Array]}
        added = arrow_udf(predict, kind)(struct(*selected(dataset, saved.columns)))
        return dataset.withColumn(name, added)

    @override
    def write(self) -> "_Writer":
        return _Writer(self)

    @classmethod
    @override
    def read(cls) -> "_Reader":
        return _Reader()


def _same_name(name: str, dataset: DataFrame) -> str | None:
    """Return the column that one of this name would replace: to Spark, cases are alike."""
    if dataset.sparkSession.conf.get("spark.sql.caseSensitive") == "true":
        return name if name in dataset.columns else None
    return next((one for one in dataset.columns if one.lower() == name.lower()), None)


def _module(saved: Saved, values: bytes) -> nn.Module:
    job = job_from_json(saved.job.encode())
    import_from(job)
    module = build_model(job.model)
    module.load_state_dict(load(values))
    return module.eval()


@final
class _Writer(MLWriter):
    def __init__(self, model: DistBeliefModel) -> None:
        super().__init__()
        self._model = model

    @override
    def saveImpl(self, path: str) -> None:
        more = {"model": msgspec.to_builtins(self._model.saved)}
        DefaultParamsWriter.saveMetadata(self._model, path, self.sparkSession, extraMetadata=more)
        values = self._model.values
        parts = [values[at : at + CHUNK_BYTES] for at in range(0, len(values), CHUNK_BYTES)]
        table = pa.table({"part": [*range(len(parts))], "values": parts})
        self.sparkSession.createDataFrame(table).coalesce(1).write.parquet(f"{path}/values")


@final
class _Reader(MLReader[DistBeliefModel]):
    @override
    def load(self, path: str) -> DistBeliefModel:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        table = self.sparkSession.read.parquet(f"{path}/values").orderBy("part").toArrow()
        model = DistBeliefModel(
            msgspec.convert(metadata["model"], Saved), b"".join(table["values"].to_pylist())
        )
        model._resetUid(metadata["uid"])  # noqa: SLF001 -- as pyspark's own readers
        DefaultParamsReader.getAndSetParams(model, metadata)
        return model
