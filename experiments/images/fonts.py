"""Fonts: which designs draw training images, which only test images.

They are those that matplotlib brings along. A whole design is held out: a test image is never
drawn in a font, nor in another weight of a font, that training saw.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import matplotlib as mpl
from matplotlib.ft2font import FT2Font

from experiments.cache import hash_file


Part = Literal["train", "test"]


class ImagesError(Exception):
    """Base class of every error that this folder raises on purpose; it is for the user."""


class FontError(ImagesError):
    """A font is missing, cannot be read, or lacks a character."""


# By the part whose images they draw: the designs DejaVu and STIX.
FILES: Final[dict[Part, tuple[str, ...]]] = {
    "train": tuple(
        f"DejaVu{style}.ttf"
        for style in (
            *("Sans", "Sans-Bold", "Sans-Oblique", "Sans-BoldOblique"),
            *("SansMono", "SansMono-Bold", "SansMono-Oblique"),
            *("Serif", "Serif-Bold", "Serif-Italic", "Serif-BoldItalic"),
        )
    ),
    "test": ("STIXGeneral.ttf", "STIXGeneralBol.ttf"),
}


def faces(part: Part) -> tuple[Path, ...]:
    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    return tuple(folder / name for name in FILES[part])


def check_covers(face: Path, text: Iterable[str]) -> None:
    try:
        covered = _covered(face)
    except (OSError, RuntimeError) as error:
        raise FontError(f"{face} cannot be read: {error}") from error
    missing = sorted({each for each in text if ord(each) not in covered})
    if missing:
        shown = ", ".join(f"U+{ord(each):04X}" for each in missing[:5])
        raise FontError(
            f"{face} lacks {len(missing)} of the characters, {shown} among them: "
            "it is another version than expected; install matplotlib anew"
        )


def hash_face(face: Path) -> str:
    return hash_file(face)


@functools.cache
def _covered(face: Path) -> frozenset[int]:
    return frozenset(FT2Font(face).get_charmap())
