"""Quantities with units, as in a job file: "2 s", "4 GiB", "1 Gbit/s".

A number without a unit is rejected. Inside the program a time is a float in seconds, a size
an int in bytes, a rate a float in bytes per second, and computing speed a float in FLOP/s.

    time    us  ms  s  min  h  d
    bytes   B  kB  MB  GB  TB  (powers of 1000)    KiB  MiB  GiB  TiB  (of 1024)
    rate    B/s kB/s MB/s GB/s  KiB/s MiB/s GiB/s   bit/s kbit/s Mbit/s Gbit/s (1000)
    compute FLOP/s  kFLOP/s  MFLOP/s  GFLOP/s  TFLOP/s  PFLOP/s  (1000)
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from difflib import get_close_matches
from typing import Annotated, Final, Literal

from msgspec import Meta

from distbelief.core.errors import JobFileError


Dimension = Literal["time", "period", "bytes", "rate", "compute"]

# Fields of a struct that are written with units in files (`config.tables.units_of`).
Time = Annotated[float, Meta(extra={"unit": "time"})]
Bytes = Annotated[float, Meta(extra={"unit": "bytes"})]
Rate = Annotated[float, Meta(extra={"unit": "rate"})]
Compute = Annotated[float, Meta(extra={"unit": "compute"})]

_BYTES = {"B": "1", "kB": "1e3", "MB": "1e6", "GB": "1e9", "TB": "1e12"} | {
    f"{prefix}iB": str(1024**power) for power, prefix in enumerate("KMGT", start=1)
}
_BITS = {"bit/s": "0.125", "kbit/s": "125", "Mbit/s": "125e3", "Gbit/s": "125e6"}
_TIMES = {"us": "1e-6", "ms": "1e-3", "s": "1", "min": "60", "h": "3600", "d": "86400"}
_SCALES: Mapping[Dimension, Mapping[str, str]] = {
    "time": _TIMES,
    "period": _TIMES,  # or counted: see `parse_count`
    "bytes": _BYTES,
    "rate": {f"{unit}/s": scale for unit, scale in _BYTES.items()} | _BITS,
    "compute": {f"{prefix}FLOP/s": f"1e{3 * n}" for n, prefix in enumerate(["", *"kMGTP"])},
}

UNITS: Mapping[Dimension, Mapping[str, Decimal]] = {
    dimension: {unit: Decimal(scale) for unit, scale in scales.items()}
    for dimension, scales in _SCALES.items()
}

_EXAMPLES: Mapping[Dimension, str] = {
    "time": '"2 s"',
    "period": '"10 s" or "1 epoch"',
    "bytes": '"4 GiB"',
    "rate": '"1 Gbit/s"',
    "compute": '"20 GFLOP/s"',
}
_SHOWN: Mapping[Dimension, tuple[str, ...]] = {
    **dict.fromkeys(("time", "period"), ("d", "h", "min", "s", "ms", "us")),
    "bytes": ("TiB", "GiB", "MiB", "KiB", "GB", "MB", "kB", "B"),
    "rate": ("Gbit/s", "Mbit/s", "kbit/s", "B/s"),
    "compute": ("PFLOP/s", "TFLOP/s", "GFLOP/s", "MFLOP/s", "kFLOP/s", "FLOP/s"),
}
_BASE: Mapping[Dimension, str] = {
    "time": "s",
    "period": "s",
    "bytes": "B",
    "rate": "B/s",
    "compute": "FLOP/s",
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*(\S.*?)?\s*")
_TEXT_MAX = 64
_DAYS_MAX: Final = 36_500  # a hundred years
TIME_MAX: Final = _DAYS_MAX * 86_400.0


def parse(value: object, dimension: Dimension) -> float:
    """Return a quantity in seconds, bytes, bytes per second or FLOP/s.

    The result is the nearest float, and never negative. Raises JobFileError: `value` is not a
    quantity of this dimension; says how to fix it.
    """
    example = _EXAMPLES[dimension]
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        raise JobFileError(f'{value} has no unit: write "{value} {_BASE[dimension]}"')
    if not isinstance(value, str):
        raise JobFileError(f"{value!r} is no quantity: write for example {example}")
    match = _PATTERN.fullmatch(value) if len(value) <= _TEXT_MAX else None
    if match is None:
        raise JobFileError(f'"{value[:_TEXT_MAX]}" is no quantity: write for example {example}')
    number, unit = match.groups()
    if unit is None:
        raise JobFileError(f'"{value}" has no unit: write "{number} {_BASE[dimension]}"')
    scale = UNITS[dimension].get(unit)
    if scale is None:
        alike = [u for u in UNITS[dimension] if u.lower() == unit.lower()]
        near = alike or get_close_matches(unit, UNITS[dimension], n=1)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        known = ", ".join([*UNITS[dimension], *(COUNTED if dimension == "period" else ())])
        raise JobFileError(f"\"{value}\" has the unknown unit '{unit}'. {hint}Known: {known}")
    result = float(Decimal(number) * scale)
    if dimension in {"time", "period"} and result > TIME_MAX:
        raise JobFileError(f'"{value}": wants at most "{_DAYS_MAX} d"')
    if not math.isfinite(result):
        raise JobFileError(f'"{value}" is too large')
    return result


COUNTED: Final = ("epochs", "samples", "steps")
_COUNT: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(epoch|sample|step)s?\s*")


def parse_count(value: object) -> tuple[float, str] | None:
    """Return number and unit of a counted period, (1.0, "epoch"); None if it is none."""
    match = _COUNT.fullmatch(value) if isinstance(value, str) and len(value) <= _TEXT_MAX else None
    return None if match is None else (float(match[1]), match[2])


def show_count(n: float, unit: str) -> str:
    return f"{Decimal(repr(n)).normalize():f} {unit}{'' if n == 1 else 's'}"


def show(quantity: float, dimension: Dimension) -> str:
    """Return a short text that `parse` reads back as exactly `quantity`."""
    for decimals in (0, 3):
        for unit in _SHOWN[dimension]:
            count = Decimal(quantity) / UNITS[dimension][unit]
            text = f"{round(count, decimals).normalize():f} {unit}"
            if 1 <= count < 10_000 and parse(text, dimension) == quantity:
                return text
    return f"{quantity!r} {_BASE[dimension]}"
