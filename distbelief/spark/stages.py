"""`DistBelief`: the estimator of a pyspark.ml's Pipeline.

DistBelief(job="job.toml", inputs="features", targets="label").fit(dataframe)
"""

from typing import final

from pyspark.ml import Estimator
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable
from pyspark.sql import DataFrame
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.spark.model import Columned, DistBeliefModel, param
from distbelief.spark.training import ELSEWHERE, fit


@final
class DistBelief(
    Estimator["DistBeliefModel"], Columned, DefaultParamsWritable, DefaultParamsReadable
):
    """Trains a job on a DataFrame; the params are the options of `distbelief.spark.fit`."""

    job = param("job", "the path of a job file, or its tables")
    inputs = param("inputs", "the column of inputs, or several of numbers")
    targets = param("targets", "the column of targets")
    decode = param("decode", "import paths of functions of bytes, by column")
    dtype = param("dtype", "of numbers that are no whole numbers")
    hosts = param("hosts", "hosts to use")
    cores = param("cores", "cores of each host")
    listen = param("listen", "where executors reach the driver")
    keys = param("keys", "directory of keys")
    insecure = param("insecure", "whether the address is enough to join")
    overrides = param("overrides", "values of single keys of the job")
    show = param("show", "whether to show progress")

    def __init__(self, **params: object) -> None:
        super().__init__()
        self._setDefault(predictionCol="prediction", batchSize=1024)
        unknown = [name for name in params if not self.hasParam(name)]
        if unknown:
            hint = ELSEWHERE.get(unknown[0]) or "it has " + ", ".join(p.name for p in self.params)
            raise JobError(f"DistBelief has no param {unknown[0]!r}: {hint}")
        self._set(**params)

    @override
    def _fit(self, dataset: DataFrame) -> "DistBeliefModel":
        given = {one.name: value for one, value in self.extractParamMap().items()}
        own = {one.name for one in Columned().params}
        model = fit(dataset, **{name: value for name, value in given.items() if name not in own})
        self._copyValues(model)
        return model
