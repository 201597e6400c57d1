"""Who may read what: the voices and sentences of each part.

No voice and no sentence of the test part is in the train part.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.speech import text
from experiments.speech.espeak import list_variants


PARTS = ("train", "test")
HELD_OUT_VARIANTS = 18  # of 104


@dataclass(frozen=True, slots=True, kw_only=True)
class Casting:
    """What the sessions of one part draw from."""

    part: str
    seed: int
    clean: bool  # no room, no noise, no warp
    variants: Sequence[str]
    sentences: Sequence[str]


def cast(part: str, *, seed: int, clean: bool) -> Casting:
    """The casting of one part; who is held out depends on no seed."""
    return Casting(
        part=part,
        seed=seed,
        clean=clean,
        variants=choose_variants(part),
        sentences=text.select(text.read_sentences(), part=part),
    )


def choose_variants(part: str) -> list[str]:
    variants = sorted(list_variants(), key=_hash)
    held_out, others = variants[:HELD_OUT_VARIANTS], variants[HELD_OUT_VARIANTS:]
    return sorted(held_out if part == "test" else others)


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
