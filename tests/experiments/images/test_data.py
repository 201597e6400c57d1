import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.cache import CacheError
from experiments.images import drawing
from experiments.images.album import Recipe, ensure, open_album
from experiments.images.data import glyphs, prepare
from experiments.images.fonts import ImagesError


SMALL: dict[str, Any] = {"categories": 4, "copies": 3, "size": 16}
RECIPE = Recipe(part="train", categories=4, copies=3, size=16, seed=0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("albums")
    ensure(RECIPE, folder=folder)
    return folder


def test_a_batch_is_its_samples(cache: Path) -> None:
    data = glyphs("train", **SMALL, cache=cache)
    assert len(data) == 12
    images, labels = data.__getitems__([5, 0, 5])
    assert images.shape == (3, 1, 16, 16)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert labels.tolist() == [1, 0, 1]
    image, label = data[5]
    assert torch.equal(image, images[0])
    assert label == 1
    assert -2.0 <= float(images.min()) < float(images.max()) <= 2.0
    coloured, _ = glyphs("train", **SMALL, cache=cache, colours=3).__getitems__([5])
    assert coloured.shape == (1, 3, 16, 16)
    assert torch.equal(coloured[0, 0], images[0, 0])
    assert torch.equal(coloured[0, 2], images[0, 0])


def test_the_same_recipe_gives_the_same_pixels_and_more_copies_begin_with_them(
    cache: Path, tmp_path: Path
) -> None:
    first = open_album(cache / RECIPE.name, verify=True)
    second = open_album(ensure(RECIPE, folder=tmp_path), verify=True)
    assert first.facts["sha256"] == second.facts["sha256"]
    assert len({image.tobytes() for image in first.images}) == RECIPE.n_images
    more = Recipe(part="train", categories=5, copies=4, size=16, seed=0)
    many = open_album(ensure(more, folder=tmp_path))
    both = [list(many.labels).index(category) for category in range(4)]
    np.testing.assert_array_equal(many.images[both], first.images[:4])


def test_parts_and_seeds_are_drawn_apart() -> None:
    names = {
        Recipe(part=part, categories=2, copies=1, size=8, seed=seed).name
        for part in ("train", "test")
        for seed in (0, 1)
    }
    assert len(names) == 4


def test_prepare_draws_once_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare("test", **SMALL, cache=tmp_path)
    assert "drawing 12 images, test part: 100%" in capsys.readouterr().err
    prepare("test", **SMALL, cache=tmp_path)
    assert capsys.readouterr().err == ""
    assert len(glyphs("test", **SMALL, cache=tmp_path)) == 12


def test_damage_is_found_and_told_with_its_mend(tmp_path: Path) -> None:
    folder = ensure(RECIPE, folder=tmp_path)
    content = bytearray((folder / "images.npy").read_bytes())
    content[-1] ^= 1
    (folder / "images.npy").write_bytes(content)
    open_album(folder)  # not read
    with pytest.raises(CacheError, match=r"images.npy cannot be used: its SHA.*Delete the folder"):
        open_album(folder, verify=True)
    (folder / "labels.npy").unlink()
    with pytest.raises(CacheError, match=r"labels\.npy"):
        open_album(folder)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"part": "dev"}, "part = 'dev': use 'train' or 'test'"),
        ({"copies": 0}, "copies = 0: use 1 to 100,000"),
        ({"size": 4}, "size = 4: use 8 to 256"),
        ({"seed": -1}, "seed = -1: use 0 or more"),
        ({"categories": 1}, "categories = 1: use a number from 2"),
    ],
)
def test_impossible_recipes_are_refused(changed: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ImagesError, match=text):
        glyphs(**{"part": "train", **SMALL, **changed}, cache=tmp_path)


def test_a_full_disk_is_told_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 100

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage)
    with pytest.raises(CacheError, match=r"only 0 MB are free; building .* needs 1 MB: make space"):
        ensure(RECIPE, folder=tmp_path)
    assert not list(tmp_path.glob("*.partial"))
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"cannot write .*file.*XDG_CACHE_HOME"):
        ensure(RECIPE, folder=tmp_path / "file")


def test_a_glyph_fills_its_square_in_any_font() -> None:
    from experiments.images.fonts import faces  # noqa: PLC0415

    for face in faces("train") + faces("test"):
        box = drawing.draw_glyph(face, "Wi", size=32).getbbox()
        assert box is not None
        longest = max(box[2] - box[0], box[3] - box[1])
        assert 48 <= longest <= 62, face
