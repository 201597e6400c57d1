"""What `distbelief partition` is asked, from words to things."""

import re
from collections.abc import Sequence
from typing import Final

from distbelief.errors import JobError
from distbelief.graph.capture import InputSpec


_INPUT: Final = re.compile(r"(\d+(?:x\d+)*)?(?::(\d+))?")


def input_spec(text: str) -> InputSpec:
    """Return the input that "3x200x200", or "128:30000" for words, means.

    Raises:
        JobError: it means none.
    """
    match = _INPUT.fullmatch(text.strip())
    if match is None or not text.strip():
        raise JobError(
            f"--input {text!r} is no shape: write the extents without the batch, as in "
            "3x200x200; for whole numbers their count behind it, as in 128:30000"
        )
    shape = tuple(int(extent) for extent in (match[1] or "").split("x") if extent)
    if 0 in shape:
        raise JobError(f"--input {text!r} has an extent of 0: use 1 or more")
    return InputSpec(shape=shape, n_values=int(match[2]) if match[2] else None)


def counts(text: str) -> list[int]:
    """Return the numbers that "1,2,4,8" means.

    Raises:
        JobError: it means none.
    """
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise JobError(f"--machines {text!r} are no numbers of machines: write for example 1,2,4,8")
    return found


def pins(texts: Sequence[str]) -> dict[str, str]:
    """Return what "conv1=grid:3x3" pins.

    Raises:
        JobError: it pins nothing.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, split = text.partition("=")
        if not (name and equals and split):
            raise JobError(f"--pin {text!r} pins nothing: write LAYER=SPLIT, as in conv1=grid:3x3")
        if found.setdefault(name, split) != split:
            raise JobError(f"--pin pins {name!r} twice: {found[name]} and {split}")
    return found
