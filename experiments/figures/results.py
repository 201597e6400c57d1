"""Where runs are kept, so that a figure can be drawn again, or continued.

A kept file carries a fingerprint of all that it depends on: one of another net, other machines or
another rate is not taken. `code_of` is the fingerprint of code: statements count; comments,
documentation and layout do not.
"""

import ast
import functools
import hashlib
from pathlib import Path
from typing import Final, TypeVar

import msgspec


FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER / "results"
ROOT: Final = FOLDER.parents[1]  # of the repository
_WITH_BODY: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_Value = TypeVar("_Value")


def fingerprint(*parts: object) -> str:
    text = msgspec.json.encode(parts, order="deterministic")
    return hashlib.sha256(text).hexdigest()[:16]


def keep(path: Path, value: object, *, of: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(msgspec.json.encode({"of": of, "value": value}) + b"\n")
    unfinished.replace(path)


def kept(path: Path, of: str, kind: type[_Value]) -> _Value | None:
    if not path.is_file():
        return None
    found = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    if msgspec.json.decode(found["of"], type=str) != of:
        return None
    return msgspec.json.decode(found["value"], type=kind)


def slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower())


@functools.cache
def code_of(*folders: str, root: Path = ROOT) -> str:
    """Return 16 hexadecimal digits of all modules in these folders, which are paths from `root`."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(statements(path.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:16]


def statements(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _WITH_BODY):
            node.body = [each for each in node.body if not _is_text(each)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
