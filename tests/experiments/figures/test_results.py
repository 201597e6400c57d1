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
    assert statements('NAME = "a"') != statements('NAME = "b"')  # it is used


def test_another_statement_and_another_name_are_another_code(tmp_path: Path) -> None:
    codes: set[str] = set()
    for name, source in (("a.py", PLAIN), ("b.py", PLAIN), ("a.py", PLAIN + "N = 1\n")):
        root = tmp_path / str(len(codes))
        (root / "room" / "inner").mkdir(parents=True)
        (root / "room" / "inner" / name).write_text(source)
        codes.add(code_of("room", root=root))
        (root / "elsewhere.py").write_text(PLAIN)
        code_of.cache_clear()
        assert code_of("room", root=root) in codes
    assert len(codes) == 3


def test_a_kept_value_is_found_again_by_its_fingerprint_alone(tmp_path: Path) -> None:
    path = tmp_path / f"{slug('Downpour + Adagrad')}.json"
    assert path.name == "downpour---adagrad.json"
    this, that = fingerprint({"rate": 0.1}, "relu"), fingerprint({"rate": 0.1}, "tanh")
    assert kept(path, this, list[int]) is None
    keep(path, [1, 2], of=this)
    assert kept(path, fingerprint({"rate": 0.1}, "relu"), list[int]) == [1, 2]
    assert kept(path, that, list[int]) is None
