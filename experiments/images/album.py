"""Images of one part on disk: made once, then mapped by every process.

    images.npy   uint8 (images, size, size)
    labels.npy   int64 (images,): the category
    album.json   what it was made from, and the SHA-256 of both arrays

An album is filled in a sibling folder and renamed when all of it is on disk, so that
what is there is whole. Its name has a digest of all that decides its pixels: the
recipe, the fonts' files, the versions of Pillow and numpy, and the code that draws.
Image i is of category i mod n, so that the beginning of an album has all categories.
"""

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from experiments.images import drawing, fonts
from experiments.images.categories import texts
from experiments.images.errors import AlbumError
from experiments.images.fonts import Part, Script
from experiments.speech.lock import hold_lock


FACTS: Final = "album.json"
ARRAYS: Final = ("images", "labels")
MAKERS: Final = ("album", "categories", "drawing")
SIZES: Final = (8, 256)
COPIES_MAX: Final = 100_000
LIBRARIES: Final = ("numpy", "Pillow")

Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What an album is made from."""

    script: Script  # what is written in the images
    part: Part  # which fonts draw them
    categories: int  # how many there are
    copies: int  # images of each
    size: int  # rows and columns
    seed: int  # of all that is left to chance; each part has its own chance

    def __post_init__(self) -> None:
        if self.part not in ("train", "test"):
            raise AlbumError(f"part = {self.part!r}: use 'train' or 'test'")
        if not 1 <= self.copies <= COPIES_MAX:
            raise AlbumError(f"copies = {self.copies}: use 1 to {COPIES_MAX:,}")
        if not SIZES[0] <= self.size <= SIZES[1]:
            raise AlbumError(f"size = {self.size}: use {SIZES[0]} to {SIZES[1]}")
        if self.seed < 0:
            raise AlbumError(f"seed = {self.seed}: use 0 or more")

    @property
    def n_images(self) -> int:
        return self.categories * self.copies

    @property
    def name(self) -> str:
        described = [repr(self), *_makers()]
        described += map(fonts.hash_face, fonts.faces(self.script, self.part))
        digest = hashlib.sha256("\n".join(described).encode()).hexdigest()[:10]
        return f"{self.part}-{self.categories}x{self.copies}-{self.size}px-{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Album:
    """One that is there, its images mapped, not read."""

    folder: Path
    facts: dict[str, Any]
    images: NDArray[np.uint8]  # (images, size, size)
    labels: NDArray[np.int64]  # (images,)


def find_cache(cache: str | os.PathLike[str] | None) -> Path:
    """The folder of all albums: `cache`, or the user's cache directory."""
    if cache is not None:
        return Path(cache).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "distbelief" / "images"


def ensure(recipe: Recipe, *, cache: Path, advance: Advance = lambda _: None) -> Path:
    """Make an album if it is not there; return its folder.

    Args:
        recipe: Of it.
        cache: Folder of all albums.
        advance: Told how many images have been drawn since the last call.

    Raises:
        ImagesError: it cannot be made: why, and what to do.
    """
    folder = cache / recipe.name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with hold_lock(cache / f"{recipe.name}.lock"):
            if not folder.exists():
                _make(recipe, folder, advance)
    except OSError as error:
        reason = error.strerror or str(error)
        raise AlbumError(
            f"{cache} cannot be written: {reason}. Name another folder with "
            "`cache` in the [data] arguments"
        ) from error
    return folder


def open_album(folder: Path, *, verify: bool = False) -> Album:
    """Map an album; with `verify` its hashes are compared, which reads all of it.

    Raises:
        AlbumError: a file is missing, cut short, or not as it was written.
    """
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        # Copy-on-write: never written, but torch wants a writable buffer.
        images, labels = (
            np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in ARRAYS
        )
        n_images, size = int(facts["images"]), int(facts["size"])
        whole = images.shape == (n_images, size, size) and labels.shape == (n_images,)
        if verify:
            whole = whole and all(
                _hash(folder / f"{name}.npy") == facts["sha256"][name] for name in ARRAYS
            )
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise _damaged(folder, str(error)) from error
    if not whole:
        raise _damaged(folder, f"its arrays are not those that {FACTS} tells of")
    return Album(folder=folder, facts=facts, images=images, labels=labels)


def _make(recipe: Recipe, folder: Path, advance: Advance) -> None:
    faces = fonts.faces(recipe.script, recipe.part)
    written = texts(recipe.script, recipe.categories)
    for face in faces:
        fonts.check_covers(face, "".join(written))
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        shape = (recipe.copies, recipe.categories, recipe.size, recipe.size)
        n_bytes = int(np.prod(shape))
        free = shutil.disk_usage(partial).free
        if free < n_bytes + (1 << 20):
            raise AlbumError(
                f"{folder.parent}: {n_bytes / 1e6:,.0f} MB are needed and only "
                f"{free / 1e6:,.0f} MB are free: make room, or name another folder "
                "with `cache` in the [data] arguments"
            )
        images = np.lib.format.open_memmap(
            partial / "images.npy",
            mode="w+",
            dtype=np.uint8,
            shape=(recipe.n_images, recipe.size, recipe.size),
        )
        rows = images.reshape(shape)
        for category, text in enumerate(written):
            rows[:, category] = _draw(recipe, faces, category, text)
            advance(recipe.copies)
        images.flush()
        labels = np.tile(np.arange(recipe.categories), recipe.copies)
        np.save(partial / "labels.npy", labels.astype(np.int64))
        _write_facts(recipe, partial, faces)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _draw(
    recipe: Recipe, faces: tuple[fonts.Face, ...], category: int, text: str
) -> NDArray[np.uint8]:
    """Return all images of a category: (copies, size, size)."""
    part = ("train", "test").index(recipe.part)
    rng = np.random.default_rng([recipe.seed, part, category])
    glyphs = [drawing.draw_glyph(face, text, size=recipe.size) for face in faces[: recipe.copies]]
    return np.stack(
        [
            drawing.photograph(
                glyphs[copy % len(glyphs)], rng, size=recipe.size, conditions=drawing.Conditions()
            )
            for copy in range(recipe.copies)
        ]
    )


def _write_facts(recipe: Recipe, folder: Path, faces: tuple[fonts.Face, ...]) -> None:
    facts = {
        **asdict(recipe),
        "images": recipe.n_images,
        "fonts": {Path(face.file).name: fonts.hash_face(face) for face in faces},
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "sha256": {name: _hash(folder / f"{name}.npy") for name in ARRAYS},
    }
    document = json.dumps(facts, indent=1) + "\n"
    (folder / FACTS).write_text(document, encoding="utf-8")


@functools.cache
def _makers() -> tuple[str, ...]:
    """Return what else decides the pixels: versions, and the code's syntax trees."""
    folder = Path(__file__).parent
    trees = [ast.dump(ast.parse((folder / f"{name}.py").read_bytes())) for name in MAKERS]
    return (*trees, *(importlib.metadata.version(name) for name in LIBRARIES))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(folder: Path, reason: str) -> AlbumError:
    return AlbumError(
        f"{folder} cannot be used: {reason}. Delete this folder and start again; it "
        "will be made anew"
    )
