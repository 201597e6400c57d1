from pathlib import Path

import pytest

from experiments.images.categories import LETTERS, texts
from experiments.images.fonts import FontError, ImagesError, check_covers, faces


def test_no_font_is_in_both_parts_and_all_have_all_letters() -> None:
    train, test = faces("train"), faces("test")
    assert train
    assert test
    assert not {*train} & {*test}
    for face in train + test:
        check_covers(face, LETTERS)


def test_a_font_that_lacks_characters_is_named(tmp_path: Path) -> None:
    face = faces("train")[0]
    with pytest.raises(FontError, match=r"DejaVuSans.* lacks 1 of .*U\+4E00"):
        check_covers(face, "\u4e00a")
    broken = tmp_path / "broken.ttf"
    broken.write_bytes(b"no font")
    with pytest.raises(FontError, match=r"broken.ttf cannot be read"):
        check_covers(broken, "a")


def test_categories_differ_and_the_first_stay_the_first() -> None:
    assert len(set(LETTERS)) == len(LETTERS) == 145
    everything = texts(21_025)
    assert len(set(everything)) == 21_025
    assert texts(10) == everything[:10]
    for categories in (1, 21_026):
        with pytest.raises(ImagesError, match=f"categories = {categories}"):
            texts(categories)
