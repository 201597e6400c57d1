import shutil
from pathlib import Path

import matplotlib as mpl
import pytest

from experiments.images.categories import HAN_FIRST, LETTERS, texts
from experiments.images.errors import FontError, ImagesError
from experiments.images.fonts import FOLDERS, HAN, Face, check_covers, choose_script, faces, find


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files named as Han fonts are, which they are not."""
    source = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    for face in HAN[:4]:
        shutil.copy(source, tmp_path / face.file)
    return tmp_path


def test_no_design_is_in_both_parts(folder: Path) -> None:
    for script, folders in (("latin", FOLDERS), ("han", [folder])):
        name = choose_script(script)
        train = {face.design for face in faces(name, "train", folders=folders)}
        test = {face.design for face in faces(name, "test", folders=folders)}
        assert train
        assert test
        assert not train & test
    for face in faces("latin", "train") + faces("latin", "test"):
        check_covers(face, LETTERS)


def test_the_last_design_is_held_out_where_the_usual_ones_are_missing(folder: Path) -> None:
    test = faces("han", "test", folders=[folder])
    assert {face.design for face in test} == {"Noto Sans"}
    assert len(test) == 2
    (folder / "HanaMinA.ttf").write_bytes(b"")
    test = faces("han", "test", folders=[folder])
    assert [face.design for face in test] == ["HanaMin"]


def test_han_is_chosen_where_two_designs_are_there(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert choose_script("auto", folders=[folder]) == "han"
    assert choose_script("auto", folders=[empty]) == "latin"
    with pytest.raises(FontError, match="'greek': use 'auto', 'han' or 'latin'"):
        choose_script("greek")


def test_too_few_fonts_are_told_with_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(FontError, match=r"there is none.*fonts-noto-cjk.*'latin'"):
        faces("han", "train", folders=[tmp_path])


def test_a_font_that_lacks_characters_is_named(folder: Path) -> None:
    (face,) = find(HAN[:1], [folder])
    with pytest.raises(FontError, match=r"DroidSans.* lacks 1 of .*U\+4E00"):
        check_covers(face, chr(HAN_FIRST) + "a")
    broken = folder / "broken.ttf"
    broken.write_bytes(b"no font")
    with pytest.raises(FontError, match=r"broken.ttf cannot be read"):
        check_covers(Face(design="x", file=str(broken)), "a")


def test_categories_differ_and_the_first_stay_the_first() -> None:
    assert len(set(LETTERS)) == len(LETTERS) == 145
    for script in ("latin", "han"):
        name = choose_script(script)
        everything = texts(name, 20_902)
        assert len(set(everything)) == 20_902
        assert texts(name, 10) == everything[:10]
    assert {len(text) for text in texts("han", 50)} == {1}
    for categories in (1, 20_903):
        with pytest.raises(ImagesError, match=f"categories = {categories}"):
            texts("latin", categories)
