"""Each message that docs/howto/troubleshooting.md quotes is one of the program's."""

import ast
import re

import pytest

from tests.docs.pages import ROOT


PAGE = ROOT / "docs" / "howto" / "troubleshooting.md"
MESSAGES = re.findall(r"^\| `([^`]+)`", PAGE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """All text of the program, with "..." for what is filled in."""
    return [
        re.sub(r"\{[^}]*\}", "...", text)
        for package in ("distbelief", "sandblaster")
        for path in (ROOT / package).rglob("*.py")
        for text in map(_text, ast.walk(ast.parse(path.read_bytes())))
        if text
    ]


def _text(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) or "..." for part in parts)
        case _:
            return ""


def test_it_has_the_likely_ones() -> None:
    assert len(set(MESSAGES)) == len(MESSAGES) >= 15


@pytest.mark.parametrize("message", MESSAGES)
def test_the_program_says_so(message: str, texts: list[str]) -> None:
    assert any(message in text for text in texts)
