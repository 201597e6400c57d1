"""Presets of table [algorithm]: the papers as choices of one exchange.

A preset fills the keys that a job does not give. `distbelief presets` lists them.
"""

from collections.abc import Mapping
from typing import Final, cast

from distbelief.config import toml
from distbelief.core.formatting import nearest
from distbelief.errors import JobFileError


Table = Mapping[str, object]

_ADD: Final = {"name": "sgd", "learning_rate": 1.0}  # a delta, as it is
_OUTER: Final = {"name": "momentum", "learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
_ADAMW: Final = {"name": "AdamW", "lr": 1e-3}
_SGD: Final = {"name": "SGD", "lr": 0.1}

PRESETS: Final[Mapping[str, Table]] = {
    # Dean et al. 2012, section 4.1: asynchronous gradients, Adagrad at the shards.
    "downpour": {"rule": {"name": "adagrad", "learning_rate": 0.02}},
    # Niu et al. 2011, with shards that apply one push after the other.
    "hogwild": {"rule": {"name": "sgd", "learning_rate": 0.1}},
    # Ho et al. 2013: asynchronous, but never more than 3 steps ahead of the slowest.
    "ssp": {"rule": _ADD, "inner": _SGD, "exchange": {"send": "delta", "staleness": 3}},
    # The advice for slow links: many local steps, half the bytes, no waiting.
    "local": {
        "rule": _ADD,
        "inner": _ADAMW,
        "exchange": {"send": "delta", "every": 64, "weight": "mean", "numbers": "bfloat16"},
    },
    # Dpplee3's asynchronous mode (PyTorch on Spark): deltas are added as they come.
    "dpplee3-asgd": {"rule": _ADD, "inner": _SGD, "exchange": {"send": "delta", "every": 10}},
    # Douillard et al. 2023.
    "diloco": {
        "rule": _OUTER,
        "inner": _ADAMW,
        "exchange": {"send": "delta", "every": 64, "staleness": 0, "round": {}, "weight": "mean"},
    },
    # Rounds without waiting: three of four workers are enough, the others get 2 s.
    "decoupled-diloco": {
        "rule": _OUTER,
        "inner": _ADAMW,
        "exchange": {
            "send": "delta",
            "every": 64,
            "round": {"quorum": 0.75, "grace_seconds": 2.0},
            "weight": "samples",
            "numbers": "bfloat16",
        },
    },
    # DL4J on Spark: parameters are averaged every 5 steps.
    "dl4j-averaging": {
        "rule": _ADD,
        "inner": _SGD,
        "exchange": {"send": "delta", "every": 5, "staleness": 0, "round": {}, "weight": "mean"},
    },
    # Sergeev & Del Balso 2018: one mean gradient of all workers per step, by way of the shards.
    "horovod": {
        "rule": {"name": "sgd", "learning_rate": 0.1},
        "exchange": {"staleness": 0, "round": {}, "weight": "mean"},
    },
}


def expand(table: Table) -> dict[str, object]:
    """Return a table [algorithm] whose key `preset` is replaced by what it stands for.

    Raises:
        JobFileError: there is no such preset.
    """
    given = {key: value for key, value in table.items() if key != "preset"}
    name = table.get("preset")
    if name is None:
        return given
    if not isinstance(name, str) or name not in PRESETS:
        hint = nearest(str(name), PRESETS, only_close=True)
        raise JobFileError(
            f"preset = {toml.excerpt(name)} is not known. {hint} Known: {', '.join(PRESETS)}"
        )
    return _merged(PRESETS[name], given)


def _merged(preset: Table, given: Table) -> dict[str, object]:
    merged = dict(preset)
    for key, value in given.items():
        merged[key] = value
        usual = preset.get(key)
        if isinstance(usual, Mapping) and isinstance(value, Mapping):
            one, other = cast("Table", usual), cast("Table", value)
            # A rule or an optimizer of another name has other keys.
            if other.get("name", one.get("name")) == one.get("name"):
                merged[key] = _merged(one, other)
    return merged
