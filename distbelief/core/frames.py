"""Results as data frames of pandas, which is imported when the first is asked for."""

from collections.abc import Mapping, Sequence
from importlib import import_module

from distbelief.core.errors import JobError


def frame(rows: Sequence[Mapping[str, object]]) -> object:
    """Return a pandas.DataFrame of these rows; JobError without pandas."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise JobError("to_pandas() needs pandas: pip install pandas; or use the rows") from None
    return pandas.DataFrame([*rows])
