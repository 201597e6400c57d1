"""Images of one part on disk: made once, then mapped by every process.

    images.npy   uint8 (images, size, size)
    labels.npy   int64 (images,): the category
    album.json   what it was made from, and the SHA-256 of both arrays

Its name has a digest of all that decides its pixels: the
recipe, the fonts' files, the versions of Pillow and numpy, and the code that draws.
Image i is of category i mod n, so that the beginning of an album has all categories.
"""

import ast
import functools
import hashlib
import importlib.metadata
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from experiments import cache
from experiments.cache import Advance
from experiments.images import drawing, fonts
from experiments.images.categories import texts
from experiments.images.fonts import ImagesError, Part


FACTS: Final = "album.json"
ARRAYS: Final = ("images", "labels")
MAKERS: Final = ("album", "categories", "drawing")
SIZES: Final = (8, 256)
COPIES_MAX: Final = 100_000
LIBRARIES: Final = ("numpy", "Pillow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What an album is made from."""

    part: Part  # which fonts draw them
    categories: int  # how many there are
    copies: int  # images of each
    size: int  # rows and columns
    seed: int  # of all that is left to chance; each part has its own chance

    def __post_init__(self) -> None:
        if self.part not in ("train", "test"):
            raise ImagesError(f"part = {self.part!r}: use 'train' or 'test'")
        if not 1 <= self.copies <= COPIES_MAX:
            raise ImagesError(f"copies = {self.copies}: use 1 to {COPIES_MAX:,}")
        if not SIZES[0] <= self.size <= SIZES[1]:
            raise ImagesError(f"size = {self.size}: use {SIZES[0]} to {SIZES[1]}")
        if self.seed < 0:
            raise ImagesError(f"seed = {self.seed}: use 0 or more")

    @property
    def n_images(self) -> int:
        return self.categories * self.copies

    @property
    def name(self) -> str:
        described = [repr(self), *_makers()]
        described += map(fonts.hash_face, fonts.faces(self.part))
        digest = hashlib.sha256("\n".join(described).encode()).hexdigest()[:10]
        return f"{self.part}-{self.categories}x{self.copies}-{self.size}px-{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Album:
    """One that is there, its images mapped, not read."""

    folder: Path
    facts: dict[str, Any]
    images: NDArray[np.uint8]  # (images, size, size)
    labels: NDArray[np.int64]  # (images,)


def ensure(recipe: Recipe, *, folder: Path, advance: Advance = lambda _: None) -> Path:
    """Make an album in the cache `folder` if it is not there; return its own folder.

    `advance` is told how many images have been drawn since the last call.

    Raises:
        ImagesError, CacheError: it cannot be made: why, and what to do.
    """
    album = folder / recipe.name
    n_bytes = recipe.n_images * recipe.size**2 + (1 << 20)
    cache.build(album, partial(_make, recipe, advance), n_bytes=n_bytes)
    return album


def open_album(folder: Path, *, verify: bool = False) -> Album:
    """Map an album; with `verify` its hashes are compared, which reads all of it.

    Raises:
        CacheError: a file is missing, cut short, or not as it was written.
    """
    facts = cache.read_facts(folder / FACTS, ("images", "size"))
    n_images, size = facts["images"], facts["size"]
    shapes = {"images": (n_images, size, size), "labels": (n_images,)}
    album = Album(folder=folder, facts=facts, **cache.map_arrays(folder / FACTS, shapes))
    if verify:
        cache.verify(folder, facts)
    return album


def _make(recipe: Recipe, advance: Advance, folder: Path) -> None:
    faces = fonts.faces(recipe.part)
    written = texts(recipe.categories)
    for face in faces:
        fonts.check_covers(face, "".join(written))
    images = np.lib.format.open_memmap(
        folder / "images.npy",
        mode="w+",
        dtype=np.uint8,
        shape=(recipe.n_images, recipe.size, recipe.size),
    )
    rows = images.reshape(recipe.copies, recipe.categories, recipe.size, recipe.size)
    for category, text in enumerate(written):
        rows[:, category] = _draw(recipe, faces, category, text)
        advance(recipe.copies)
    images.flush()
    labels = np.tile(np.arange(recipe.categories), recipe.copies)
    np.save(folder / "labels.npy", labels.astype(np.int64))
    facts = {
        **asdict(recipe),
        "images": recipe.n_images,
        "fonts": {face.name: fonts.hash_face(face) for face in faces},
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
    }
    cache.write_facts(folder / FACTS, facts, arrays=ARRAYS)


def _draw(recipe: Recipe, faces: tuple[Path, ...], category: int, text: str) -> NDArray[np.uint8]:
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


@functools.cache
def _makers() -> tuple[str, ...]:
    """Return what else decides the pixels: versions, and the code's syntax trees."""
    folder = Path(__file__).parent
    trees = [ast.dump(ast.parse((folder / f"{name}.py").read_bytes())) for name in MAKERS]
    return (*trees, *(importlib.metadata.version(name) for name in LIBRARIES))
