"""Presets of table [algorithm]: the papers as choices of one exchange.

A preset fills the keys that a job does not give. `distbelief presets` lists them.
"""

import textwrap
from collections.abc import Mapping
from typing import Final, cast

from distbelief.config import toml
from distbelief.core.errors import JobFileError
from distbelief.core.formatting import nearest


Table = Mapping[str, object]

_ADD: Final = {"name": "sgd", "learning_rate": 1.0}  # a delta, as it is
_OUTER: Final = {"name": "momentum", "learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
_ADAMW: Final = {"name": "AdamW", "lr": 1e-3}
_INT4: Final = {"codec": "int4"}
# Sooner than the others, a slow replica gives what it has.
_EARLY: Final = {"quorum": 0.75, "grace_seconds": 30.0, "early": True}
_LOCAL_ROUNDS: Final = {
    "send": "delta",
    "every": 24,
    "staleness": 0,
    "round": _EARLY,
    "weight": "samples",
    "push": _INT4,
    "fetch": _INT4,
}
_SGD: Final = {"name": "SGD", "lr": 0.1}

PRESETS: Final[Mapping[str, Table]] = {
    "downpour": {"rule": {"name": "adagrad", "learning_rate": 0.02}},
    "hogwild": {
        "rule": _ADD,
        "inner": _SGD,
        "exchange": {"send": "delta", "every": 4},
        "lockfree": {"threads": 4},
    },
    "adam-2014": {
        "rule": {"name": "sgd", "learning_rate": 0.1},
        "exchange": {"every": 4, "push": {"codec": "factors"}},
        "lockfree": {"threads": 4},
    },
    "ssp": {"rule": _ADD, "inner": _SGD, "exchange": {"send": "delta", "staleness": 3}},
    "local": {
        "rule": _ADD,
        "inner": _ADAMW,
        "exchange": {"send": "delta", "every": 64, "weight": "mean", "numbers": "bfloat16"},
    },
    "local-rounds": {"rule": _ADD, "inner": _ADAMW, "exchange": _LOCAL_ROUNDS},
    "muloco": {"rule": _ADD, "inner": {"name": "Muon", "lr": 1e-2}, "exchange": _LOCAL_ROUNDS},
    "dpplee3-asgd": {"rule": _ADD, "inner": _SGD, "exchange": {"send": "delta", "every": 10}},
    "diloco": {
        "rule": _OUTER,
        "inner": _ADAMW,
        "exchange": {"send": "delta", "every": 64, "staleness": 0, "round": {}, "weight": "mean"},
    },
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
    "dl4j-averaging": {
        "rule": _ADD,
        "inner": _SGD,
        "exchange": {"send": "delta", "every": 5, "staleness": 0, "round": {}, "weight": "mean"},
    },
    "horovod": {
        "rule": {"name": "sgd", "learning_rate": 0.1},
        "exchange": {"staleness": 0, "round": {}, "weight": "mean", "route": "ring"},
    },
    "poseidon": {
        "rule": {"name": "sgd", "learning_rate": 0.1},
        "exchange": {"staleness": 0, "round": {}, "weight": "mean", "push": {"codec": "auto"}},
    },
    "strom": {
        "rule": {"name": "sgd", "learning_rate": 0.1},
        "exchange": {
            "staleness": 0,
            "round": {},
            "push": {"codec": "threshold", "tau": 0.004},
            "fetch": "changed",
        },
    },
    "dl4j-sharing": {
        "rule": _ADD,
        "inner": _SGD,
        "exchange": {
            "send": "delta",
            "push": {"codec": "threshold", "tau": 0.001, "adaptive": {}, "clip": 5.0},
            "fetch": "changed",
        },
    },
    "sparseloco": {
        "rule": _ADD,
        "inner": _ADAMW,
        "exchange": {
            "send": "delta",
            "every": 64,
            "staleness": 0,
            "round": {},
            "weight": "mean",
            "push": {"codec": "top-k", "share": 0.03, "bits": 2, "decay": 0.95},
            "fetch": "changed",
        },
    },
}
ABOUT: Final[Mapping[str, str]] = {
    "downpour": "Asynchronous gradients, Adagrad at the shards (Dean et al. 2012).",
    "hogwild": "Threads of a replica share its parameters without locks (Niu et al. 2011).",
    "adam-2014": "Threads, and gradients as factors for the shards (Chilimbi et al. 2014, Adam).",
    "ssp": "Asynchronous, but never more than 3 steps ahead of the slowest (Ho et al. 2013).",
    "local": "For slow links: many local steps, half the bytes, no waiting.",
    "local-rounds": "Mean of 24 local steps, in 4 bits; a slow replica takes fewer (Stich 2019).",
    "muloco": "The same with Muon, for batches of many rows (Therien et al. 2025).",
    "dpplee3-asgd": "Local steps are added as they come (Dpplee3's asynchronous mode).",
    "diloco": "Rounds of local steps, whose mean is an outer gradient (Douillard et al. 2023).",
    "decoupled-diloco": "Rounds that three of four replicas close; the others get 2 s.",
    "dl4j-averaging": "Parameters are averaged every 5 steps, inner state is not (DL4J on Spark).",
    "horovod": "One mean gradient of all replicas per step, by a ring (Sergeev & Del Balso 2018).",
    "poseidon": "One mean gradient per step; dense layers as factors (Zhang et al. 2017).",
    "strom": "Gradients as steps of one size, where they reach it; the rest waits (Strom 2015).",
    "dl4j-sharing": "The same of local steps, at a size that adapts (DL4J's gradient sharing).",
    "sparseloco": "DiLoCo, of the largest 3 % of a difference, as 2 bits (Sarfi et al. 2025).",
}


_PUSH: Final = 'of [algorithm.exchange]: push = { codec = "threshold", tau = 0.001'
_KNOBS: Final = {
    "mode": (
        'It is preset of [algorithm]: "dpplee3-asgd" is asynchronous, "dl4j-averaging" '
        'synchronous, and "hogwild" has threads that share the memory of a replica.'
    ),
    "frequency frequency_num": (
        "It is every of [algorithm.exchange]: every = 10 counts batches, and "
        'every = "1 epoch" passes of a replica over its share.'
    ),
    "server_optimizer set_server_optimizer": (
        'It is rule of [algorithm]: rule = { name = "sgd", learning_rate = 1.0 }.'
    ),
    "worker_optimizer set_worker_optimizer": (
        'It is inner of [algorithm]: inner = { name = "SGD", lr = 0.1 }.'
    ),
    "worker_num": "It is replicas of [cluster].",
    "target_accuracy": "It is accuracy of [stop], with held-out data: accuracy = 0.98.",
    "save_path": "It is directory of [output], where model.safetensors is at the end.",
    "backup backup_path": (
        "It is checkpoints of [cluster], where they are, and snapshot_every of [output], how often."
    ),
    "averaging_frequency": (
        'It is every of [algorithm.exchange], with preset = "dl4j-averaging": every = 5.'
    ),
    "aggregation_depth": (
        "There is no tree of executors that would add up: shards do. Leave it out."
    ),
    "threshold_algorithm": f"It is push {_PUSH}, adaptive = {{}} }}.",
    "residual_clipping residual_post_processor": (
        f"It is clip and clip_every {_PUSH}, clip = 5.0, clip_every = 5 }}."
    ),
}
# What knobs of Dpplee3 and DL4J are here, by their names in Python and Java.
KNOBS: Final[Mapping[str, str]] = {
    spelling: text
    for names, text in _KNOBS.items()
    for name in names.split()
    for spelling in (name, name[0] + name.title().replace("_", "")[1:])
}


_CHOICES: Final = {
    "Fast links, equal machines": "horovod; plain asynchrony: downpour",
    "Slow links, or replicas of unequal speed": "local-rounds; large batches: muloco",
    "Replicas that may be lost for long": "decoupled-diloco",
    "As in a paper": "the others, below",
}


def table() -> str:
    """Return the presets as lines of at most 80 characters: which to use, and what each is."""
    rows = [["preset", "every", "send", "ahead", "round", "push", "fetch", "inner"]]
    for name, preset in PRESETS.items():
        exchange = cast("Table", preset.get("exchange", {}))
        folded = cast("Table | None", exchange.get("round"))
        usual = {"every": 1, "send": "gradient", "staleness": "any"}
        numbers = exchange.get("numbers", "float32")
        chosen = {**usual, **exchange}
        for key in ("push", "fetch"):
            way = exchange.get(key, numbers)
            chosen[key] = way["codec"] if isinstance(way, Mapping) else way
        chosen["round"] = "-" if folded is None else f"{folded.get('quorum', 1.0):.0%}"
        keys = ("every", "send", "staleness", "round", "push", "fetch")
        inner = cast("Table", preset.get("inner", {})).get("name", "-")
        rows.append([str(cell) for cell in (name, *(chosen[key] for key in keys), inner)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        [
            *(f"{when + ':':42}{which}" for when, which in _CHOICES.items()),
            "",
            *(
                textwrap.fill(f"{name:16}  {about}", 80, subsequent_indent=" " * 18)
                for name, about in ABOUT.items()
            ),
            "",
            *(
                "  ".join(
                    cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                ).rstrip()
                for row in rows
            ),
            "",
            "every: steps between two exchanges; ahead: how many steps a replica may be",
            "before the slowest; round: the share of replicas that closes one.",
            "All keys of a preset, as in a job file: distbelief presets NAME",
        ]
    )


def expand(table: Table) -> dict[str, object]:
    """Return a table [algorithm] with what its key `preset` stands for, or raise JobFileError."""
    given = {key: value for key, value in table.items() if key != "preset"}
    name = table.get("preset")
    if name is None:
        return given
    if not isinstance(name, str) or name not in PRESETS:
        hint = nearest(str(name), PRESETS, only_close=True)
        known = f"Known: {', '.join(PRESETS)}"
        raise JobFileError(
            " ".join(filter(None, [f"preset = {toml.excerpt(name)} is not known.", hint, known]))
        )
    return _merged(PRESETS[name], given)


def filled(table: Table) -> set[str]:
    """Return the keys of a table [algorithm] that its preset has filled, at any depth."""
    return _filled(PRESETS.get(str(table.get("preset")), {}), table)


def _filled(preset: Table, given: Table) -> set[str]:
    keys = {key for key in preset if key not in given}
    for key, value in preset.items():
        own = given.get(key, {})
        if isinstance(value, Mapping) and isinstance(own, Mapping):
            keys |= _filled(cast("Table", value), cast("Table", own))
    return keys


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
