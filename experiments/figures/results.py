"""Where runs are kept, so that a figure can be drawn again, or gone on with.

A kept file says what it is of: a fingerprint of all that it depends on. One that is of
something else (another net, other machines, another rate) is not taken for what is
asked for.
"""

import hashlib
import os
from pathlib import Path
from typing import Final, TypeVar

import msgspec


FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "results"

_Value = TypeVar("_Value")


def fingerprint(*parts: object) -> str:
    """Return 16 hexadecimal digits of what msgspec can write as JSON."""
    text = msgspec.json.encode(parts, order="deterministic")
    return hashlib.sha256(text).hexdigest()[:16]


def keep(path: Path, value: object, *, of: str) -> None:
    """Write a value as JSON, with what it is of; whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.encode({"of": of, "value": value})
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(text + b"\n")
    unfinished.replace(path)


def kept(path: Path, of: str, kind: type[_Value]) -> _Value | None:
    """Return what was kept, if it was, and is of this."""
    if not path.is_file():
        return None
    found = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    if msgspec.json.decode(found["of"], type=str) != of:
        return None
    return msgspec.json.decode(found["value"], type=kind)


def cache() -> Path:
    """Return the folder of what is quickly made again: warm starts."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "distbelief" / "figures"


def slug(text: str) -> str:
    """Return a text as a part of a file's name."""
    return "".join(c if c.isalnum() else "-" for c in text.lower())
