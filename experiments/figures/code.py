"""Of which code a result is: what modules do, whatever they say of it.

Comments, documentation and layout are of no account: only another statement is another
code.
"""

import ast
import hashlib
from functools import cache
from pathlib import Path
from typing import Final


ROOT: Final = Path(__file__).parents[2]
"""Of the repository."""

_WITH_BODY: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_NOTHING: Final = ast.Pass()


@cache
def code_of(*folders: str, root: Path = ROOT) -> str:
    """Return 16 hexadecimal digits of all modules in these folders.

    Args:
        folders: Paths from the root; what is in folders within them counts too.
        root: Where they are.
    """
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
            node.body = [each for each in node.body if not _is_text(each)] or [_NOTHING]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
