import ast
import re
import tomllib
from pathlib import Path

import pytest

from distbelief.config.load import parse_job
from tests.docs.pages import ROOT, blocks, commands, is_soak, run


README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "docs" / "quickstart.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *sorted((ROOT / "docs" / "howto").glob("*.md")),
]
LINKED = [README, ROOT / "CONTRIBUTING.md", ROOT / "experiments" / "LOG.md"]
README_BYTES_MAX = 10_000


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.untraced
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=str(page.relative_to(ROOT)), marks=pytest.mark.soak if is_soak(page) else ()
        )
        for page in PAGES
    ],
)
def test_all_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run(blocks(page), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_the_page_is_found_and_can_be_read(page: Path) -> None:
    """Those of pages that only `make soak` runs, too."""
    text = page.read_text()
    assert 2 * len(blocks(page)) == len(re.findall(r"^ *```", text, re.MULTILINE))
    assert text.count("<!-- not run:") == sum(bool(b.reason) for b in blocks(page))
    for block in blocks(page):
        if block.kind == "python":
            ast.parse(block.text)
        elif block.kind == "toml" and "model" in tomllib.loads(block.text):
            parse_job(block.text, path="job.toml")


def test_tests_that_pages_name_exist() -> None:
    """Pages cite them as evidence: a test that was renamed would be none."""
    named = [
        (page, *found)
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for found in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
    ]
    assert len(named) > 10
    for page, path, name in named:
        functions = {
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert not name or name in functions, f"{page.name}: {path}::{name}"


def test_the_readme_is_short() -> None:
    assert README.stat().st_size <= README_BYTES_MAX


@pytest.mark.parametrize(
    "page", [page for page in LINKED if page.exists()], ids=lambda page: str(page.relative_to(ROOT))
)
def test_relative_links_outside_of_the_site_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_a_page_is_run_as_its_reader_would(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        '```python title="a.py"\nX = 3\n```\n'
        "```python\nimport a\n```\n"
        "text\n\n"
        '```python\nopen("found", "w").write(str(a.X))\n```\n'
        "```console\n$ cp found \\\n    copied   # a comment\noutput\n```\n"
        "<!-- not run: there is no such program -->\n```console\n$ nonesuch\n```\n"
    )
    run(blocks(page), tmp_path)
    assert (tmp_path / "copied").read_text() == "3"
    assert commands("$ a b  # why\nout\n$ c \\\n  d\n") == ["a b", "c    d"]
    page.write_text("```console\n$ false\n```\n")
    with pytest.raises(AssertionError, match=r"\$ false"):
        run(blocks(page), tmp_path)
