"""What the source must not have: ways to run what came in, and keys on the way out."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for package in ("distbelief", "sandblaster")
    for path in sorted((ROOT / package).rglob("*.py"))
]

UNPICKLERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "joblib"}
UNPICKLERS |= {"cloudpickle", "dbm", "jsonpickle", "yaml"}
RUNNERS = {"eval", "exec", "compile", "__import__"}

KNOWS_SECRETS = {"keys.py", "key_files.py"}
"""Of `distbelief/transport`: who makes, keeps and uses the bytes of secret keys."""


def nodes_of(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def modules_of(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [name.name for name in names]
        case ast.ImportFrom(module=str(module), names=names):
            return [module, *(f"{module}.{name.name}" for name in names)]
        case _:
            return []


def objection(node: ast.AST) -> str | None:
    """Return what is wrong with a piece of source, if anything is."""
    found = {name.split(".")[0] for name in modules_of(node)} & UNPICKLERS
    if found:
        return f"imports {found}"
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in RUNNERS:
            return f"calls {name}"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")):
            return "calls torch.load"
        case ast.keyword(arg="allow_pickle", value=ast.Constant(value=False)):
            return None
        case ast.keyword(arg="allow_pickle" | "weights_only"):
            return "lets objects in"
        case _:
            return None


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import os, marshal",
        "torch.load(f)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=really)",
        "eval(text)",
    ],
)
def test_what_is_looked_for_is_found(text: str) -> None:
    assert any(objection(node) for node in ast.walk(ast.parse(text)))


def test_nothing_that_comes_in_is_unpickled_or_run() -> None:
    assert len(SOURCES) > 200
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', '?')}: {why}"
        for path in SOURCES
        for node in nodes_of(path)
        if (why := objection(node)) is not None
    ]
    assert found == []


def test_secret_keys_are_shown_to_sockets_and_key_files_only() -> None:
    for path in SOURCES:
        reveals = [
            node
            for node in nodes_of(path)
            if isinstance(node, ast.Attribute) and node.attr == "reveal"
        ]
        knows = path.parent.name == "transport" and path.name in KNOWS_SECRETS
        assert knows or not reveals, path
