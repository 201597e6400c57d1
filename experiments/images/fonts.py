"""Fonts: which designs there are, which draw training images, which only test images.

Two scripts. "han" draws the 20,902 Chinese characters that all of the designs below
have; each comes with a Debian package. "latin" needs nothing installed: pairs of
letters, in the fonts that matplotlib brings along. Whole designs are held out: a test
image is never drawn in a font, nor in another weight of a font, that training saw.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import matplotlib as mpl
from matplotlib.ft2font import FT2Font

from experiments.cache import hash_file
from experiments.images.errors import FontError


Script = Literal["han", "latin"]
Part = Literal["train", "test"]

FOLDERS: Final = (
    Path("/usr/share/fonts"),
    Path("/usr/local/share/fonts"),
    Path("~/.local/share/fonts"),
    Path("~/.fonts"),
)
# What tests, where it is there: a brush and a serif; else the last design found
HAN_HELD_OUT: Final = ("TW-Kai", "HanaMin")

PACKAGES: Final = (
    "fonts-droid-fallback fonts-wqy-zenhei fonts-babelstone-han fonts-hanazono "
    "fonts-noto-cjk fonts-lxgw-wenkai fonts-cns11643-kai"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """One face of a font file."""

    design: str  # weights and slants of one design are held out together
    file: str  # its name; the path, once it is found
    index: int = 0  # within the file


HAN: Final = (
    Face(design="Droid Sans", file="DroidSansFallbackFull.ttf"),
    Face(design="Zen Hei", file="wqy-zenhei.ttc"),
    Face(design="Noto Sans", file="NotoSansCJK-Regular.ttc", index=2),
    Face(design="Noto Sans", file="NotoSansCJK-Bold.ttc", index=2),
    Face(design="Noto Serif", file="NotoSerifCJK-Regular.ttc", index=2),
    Face(design="Noto Serif", file="NotoSerifCJK-Bold.ttc", index=2),
    Face(design="WenKai", file="LXGWWenKai-Regular.ttf"),
    Face(design="WenKai", file="LXGWWenKai-Bold.ttf"),
    Face(design="BabelStone Han", file="BabelStoneHan.ttf"),
    Face(design="TW-Kai", file="TW-Kai-98_1.ttf"),
    Face(design="HanaMin", file="HanaMinA.ttf"),
)
LATIN: Final = (
    *(
        Face(design="DejaVu", file=f"DejaVu{style}.ttf")
        for style in (
            *("Sans", "Sans-Bold", "Sans-Oblique", "Sans-BoldOblique"),
            *("SansMono", "SansMono-Bold", "SansMono-Oblique"),
            *("Serif", "Serif-Bold", "Serif-Italic", "Serif-BoldItalic"),
        )
    ),
    Face(design="STIX", file="STIXGeneral.ttf"),
    Face(design="STIX", file="STIXGeneralBol.ttf"),
)


def choose_script(script: str, *, folders: Sequence[Path] = FOLDERS) -> Script:
    """Return the script meant: with "auto", "han" if two of its designs are there."""
    match script:
        case "han" | "latin":
            return "han" if script == "han" else "latin"
        case "auto":
            designs = {face.design for face in find(HAN, folders)}
            return "han" if len(designs) > 1 else "latin"
        case _:
            raise FontError(f"script = {script!r}: use 'auto', 'han' or 'latin'")


def faces(script: Script, part: Part, *, folders: Sequence[Path] = FOLDERS) -> tuple[Face, ...]:
    if script == "latin":
        found = find(LATIN, [Path(mpl.get_data_path()) / "fonts" / "ttf"])
        held_out = {"STIX"}
    else:
        found = find(HAN, folders)
        designs = [face.design for face in found]
        held_out = set(designs) & set(HAN_HELD_OUT) or set(designs[-1:])
    test = tuple(face for face in found if face.design in held_out)
    train = tuple(face for face in found if face.design not in held_out)
    if not train or not test:
        raise FontError(_too_few(script, found, folders))
    return test if part == "test" else train


def find(wanted: Iterable[Face], folders: Sequence[Path]) -> list[Face]:
    paths: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.expanduser().rglob("*.[ot]t[fc]")):
            paths.setdefault(path.name, path)
    return [
        Face(design=face.design, file=str(paths[face.file]), index=face.index)
        for face in wanted
        if face.file in paths
    ]


def check_covers(face: Face, text: Iterable[str]) -> None:
    try:
        covered = _covered(face)
    except (OSError, RuntimeError) as error:
        raise FontError(f"{face.file} cannot be read: {error}") from error
    missing = sorted({each for each in text if ord(each) not in covered})
    if missing:
        shown = ", ".join(f"U+{ord(each):04X}" for each in missing[:5])
        raise FontError(
            f"{face.file} lacks {len(missing)} of the characters, {shown} among them: "
            "it is another version than expected; remove it, or use script = 'latin'"
        )


def hash_face(face: Face) -> str:
    return hash_file(Path(face.file))


@functools.cache
def _covered(face: Face) -> frozenset[int]:
    return frozenset(FT2Font(face.file, face_index=face.index).get_charmap())


def _too_few(script: Script, found: Sequence[Face], folders: Sequence[Path]) -> str:
    names = sorted({face.design for face in found})
    have = f"only {', '.join(names)} is there" if names else "there is none"
    if script == "latin":
        return f"matplotlib's fonts are incomplete ({have}): install matplotlib anew"
    return (
        f"script = 'han' needs fonts of two designs, one of them held out; {have} in "
        f"{', '.join(map(str, folders))}. Any two of these Debian packages will do: "
        f"{PACKAGES}. Or use script = 'latin', which needs none"
    )
