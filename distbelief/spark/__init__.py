"""Training on the rows of a Spark DataFrame, and predicting columns of one.

    model = distbelief.spark.fit(dataframe, "job.toml", inputs="features", targets="label")
    model.transform(dataframe)                   # adds a column "prediction"

`DistBelief` and `DistBeliefModel` are the same as stages of a pyspark.ml's Pipeline.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from distbelief.spark.model import DistBeliefModel as DistBeliefModel
    from distbelief.spark.stages import DistBelief as DistBelief
    from distbelief.spark.training import fit as fit

# Roles on executors read rows, and import no pyspark.
_MODULES = {
    "DistBelief": "distbelief.spark.stages",
    "DistBeliefModel": "distbelief.spark.model",
    "fit": "distbelief.spark.training",
}

__all__ = sorted(_MODULES)  # noqa: PLE0605 -- derived, so that the two cannot differ


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'distbelief.spark' has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ImportError as error:
        raise ImportError(f"distbelief.spark: {error}: pip install 'distbelief[spark]'") from error
