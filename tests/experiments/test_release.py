"""A release that lacks a file, or carries a stranger, is not tagged."""

import tarfile
import zipfile
from pathlib import Path

from experiments.release import IN_SOURCES, IN_WHEEL, METADATA, problems


def built(folder: Path, *, wheel: set[str], sources: set[str], version: str) -> Path:
    about = "".join(f"{name}: {version}\n" for name in sorted(METADATA))
    with zipfile.ZipFile(folder / "d-1-py3-none-any.whl", "w") as made:
        for name in wheel:
            made.writestr(name, "")
        made.writestr("d-1.dist-info/METADATA", about)
    (folder / "empty").write_text("")
    with tarfile.open(folder / "d-1.tar.gz", "w:gz") as archive:
        for name in sources:
            archive.add(folder / "empty", f"d-1/{name}")
    return folder


def test_a_whole_release_lacks_only_its_heading(tmp_path: Path) -> None:
    folder = built(tmp_path, wheel=IN_WHEEL, sources=IN_SOURCES, version="9.9")
    assert problems(folder) == ("9.9", ["CHANGELOG.md has no heading ## [9.9]"])


def test_what_lacks_or_does_not_belong_is_named(tmp_path: Path) -> None:
    assert problems(tmp_path)[1][0].endswith("has 0 wheels and 0 archives: build again")
    wheel = IN_WHEEL - {"distbelief/py.typed"} | {"tests/conftest.py"}
    folder = built(tmp_path, wheel=wheel, sources=IN_SOURCES - {"LICENSE"}, version="Unreleased")
    assert problems(folder)[1] == [
        "the wheel lacks distbelief/py.typed",
        "the sources lack LICENSE",
        "the wheel has tests",
    ]
