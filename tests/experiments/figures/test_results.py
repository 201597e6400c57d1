from pathlib import Path

from experiments.figures.results import fingerprint, keep, kept, slug


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    keep(tmp_path / "a.json", [1, 2], of="this")
    assert kept(tmp_path / "a.json", "this", list[int]) == [1, 2]


def test_what_is_of_something_else_is_not_taken_for_it(tmp_path: Path) -> None:
    keep(tmp_path / "a.json", [1, 2], of="this")
    assert kept(tmp_path / "a.json", "that", list[int]) is None


def test_what_was_not_kept_is_not_found(tmp_path: Path) -> None:
    assert kept(tmp_path / "a.json", "this", list[int]) is None


def test_fingerprints_tell_parts_apart() -> None:
    one, other = fingerprint({"rate": 0.1}, "relu"), fingerprint({"rate": 0.1}, "tanh")
    assert one != other
    assert one == fingerprint({"rate": 0.1}, "relu")


def test_a_slug_is_part_of_a_file_name() -> None:
    assert slug("Downpour + Adagrad") == "downpour---adagrad"
