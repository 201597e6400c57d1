"""The task as a map-style data set: an image of a glyph in, its category out.

Fonts of the test part are never seen in training (`fonts`). It is rendered type in the
shape of the paper's task, not its photographs: accuracies do not compare.
"""

import os
from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch.utils.data import Dataset
from typing_extensions import override

from experiments.cache import find_cache, show_progress
from experiments.images.album import Album, Recipe, ensure, open_album
from experiments.images.fonts import Part


COPIES: Final = {"train": 200, "test": 10}  # images of each category, where `copies` is not given
_MIDDLE: Final = 128.0
_SCALE: Final = 1 / 64.0


class Glyphs(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, album: Album, *, colours: int) -> None:
        self.album = album
        self._images = torch.from_numpy(album.images)  # (images, size, size), mapped
        self._labels = torch.from_numpy(album.labels)  # (images,)
        self._colours = colours

    def __len__(self) -> int:
        return len(self._labels)

    @override
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """One sample: an image (colours, size, size) float32, and its category."""
        images, labels = self.__getitems__([index])
        return images[0], int(labels[0])

    def __getitems__(
        self, indices: Sequence[int] | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch: images (n, colours, size, size) float32, categories (n,) int64."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        images = self._images.index_select(0, rows).to(torch.float32)
        images = images.sub_(_MIDDLE).mul_(_SCALE).unsqueeze(1)
        return images.expand(-1, self._colours, -1, -1), self._labels[rows]


def glyphs(
    part: str,
    *,
    categories: int = 400,
    copies: int | None = None,
    size: int = 32,
    colours: int = 1,
    cache: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> Glyphs:
    """Images of one part, "train" or "test"; they are drawn now if the cache lacks them.

    There are 2 to 21,025 categories, by default 200 copies of each for train and 10 for test, of
    `size` rows and columns, and 1 or 3 colours, all alike. `cache` is the folder of all albums, if
    not the user's cache directory; `seed` is of all that is left to chance.
    """
    recipe = _recipe(part, categories=categories, copies=copies, size=size, seed=seed)
    folder = ensure(recipe, folder=find_cache("images", cache))
    return Glyphs(open_album(folder), colours=colours)


def prepare(
    part: str,
    *,
    colours: int = 1,
    cache: str | os.PathLike[str] | None = None,
    **chosen: Any,  # noqa: ANN401 -- the other arguments of `glyphs`
) -> None:
    """Draw and check what `glyphs` with the same arguments will open.

    Call it once before several processes call `glyphs`.
    """
    del colours  # no pixel depends on them
    recipe = _recipe(part, **chosen)
    found = find_cache("images", cache)
    if not (found / recipe.name).exists():
        title = f"drawing {recipe.n_images:,} images, {part} part"
        with show_progress(title, n_frames=recipe.n_images, unit="images") as advance:
            ensure(recipe, folder=found, advance=advance)
    open_album(found / recipe.name, verify=True)


def _recipe(
    part: str, *, categories: int = 400, copies: int | None = None, size: int = 32, seed: int = 0
) -> Recipe:
    return Recipe(
        part=cast("Part", part),  # checked there
        categories=categories,
        copies=COPIES.get(part, 1) if copies is None else copies,
        size=size,
        seed=seed,
    )
