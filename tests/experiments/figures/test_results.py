from pathlib import Path

from experiments.figures.results import code_of, fingerprint, keep, kept, slug, statements


PLAIN = "def area(side: float) -> float:\n    return side * side\n"
TOLD = '''"""Areas."""


def area(side: float) -> float:
    """Return what a square covers."""
    return side * side  # by Euclid
'''


def test_comments_documentation_and_layout_are_no_statements() -> None:
    assert statements(TOLD) == statements(PLAIN)
    assert statements('class A:\n    """Empty."""\n') == "class A:\n    pass"
    assert statements('N = 1\n"""How many."""\n') == "N = 1"


def test_texts_that_are_used_are_statements() -> None:
    assert statements('NAME = "a"') != statements('NAME = "b"')


def test_another_statement_and_another_name_are_another_code(tmp_path: Path) -> None:
    codes: set[str] = set()
    for name, source in (("a.py", PLAIN), ("b.py", PLAIN), ("a.py", PLAIN + "N = 1\n")):
        root = tmp_path / str(len(codes))
        (root / "room" / "inner").mkdir(parents=True)
        (root / "room" / "inner" / name).write_text(source)
        codes.add(code_of("room", root=root))
    assert len(codes) == 3


def test_what_is_elsewhere_is_of_no_account(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text(PLAIN)
    before = code_of("room", root=tmp_path)
    (tmp_path / "b.py").write_text(PLAIN)
    code_of.cache_clear()
    assert code_of("room", root=tmp_path) == before


def test_a_kept_value_is_found_again_by_its_fingerprint_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert kept(path, "this", list[int]) is None
    keep(path, [1, 2], of="this")
    assert kept(path, "this", list[int]) == [1, 2]
    assert kept(path, "that", list[int]) is None


def test_fingerprints_tell_parts_apart() -> None:
    one, other = fingerprint({"rate": 0.1}, "relu"), fingerprint({"rate": 0.1}, "tanh")
    assert one != other
    assert one == fingerprint({"rate": 0.1}, "relu")


def test_a_slug_is_part_of_a_file_name() -> None:
    assert slug("Downpour + Adagrad") == "downpour---adagrad"
