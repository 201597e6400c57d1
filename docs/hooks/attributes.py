"""MkDocs hook: puts tables of the attributes of results into reference/python-api.md.

`<!-- attributes of distbelief.Run -->` becomes a table. The words are those of the class: of
"Attributes:" in its docstring, of a property's docstring, or of the comment at a field. One
without words fails the build, and the test `tests/docs/test_attributes.py`.
"""

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from importlib import import_module
from typing import NamedTuple

from distbelief.supervisor.view import Totals


MARK = re.compile(r"<!-- attributes of ([\w.]+) -->")
_OF_OTHERS = ("builtins", "msgspec", "scipy")
_OF_DOCSTRING = re.compile(r"^    (\w+): (.+(?:\n {8,}.+)*)", re.MULTILINE)


class Attribute(NamedTuple):
    type: str  # as it is written
    text: str  # "" if nothing is said of it


def on_page_markdown(markdown: str, **_: object) -> str:
    """Replace the marks by tables (called by MkDocs for each page)."""
    return MARK.sub(lambda mark: "\n".join(_lines(mark[1])), markdown)


def attributes(name: str) -> dict[str, Attribute]:
    """Return the public attributes of a class, those of its bases first.

    What runs, outcomes and views share, `Totals`, has a table of its own.
    """
    module, _, of = name.rpartition(".")
    kind: type = getattr(import_module(module), of)
    shared = () if kind is Totals else Totals.__mro__
    found: dict[str, Attribute] = {}
    for base in reversed(kind.__mro__):
        if base not in shared and not base.__module__.startswith(_OF_OTHERS):
            found |= dict(_own(base))
            for each, text in _of_docstring(base):
                found[each] = Attribute(found[each].type if each in found else "", text)
    return found


def _own(kind: type) -> Iterator[tuple[str, Attribute]]:
    source = textwrap.dedent(inspect.getsource(kind))
    comments = _comments(source)
    lines = source.splitlines()
    (top,) = ast.parse(source).body
    assert isinstance(top, ast.ClassDef)
    for node in top.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                n = node.end_lineno or node.lineno
                above: list[str] = []
                while lines[node.lineno - 2 - len(above)].lstrip().startswith("#"):
                    above.insert(0, comments[node.lineno - 1 - len(above)])
                text = " ".join([*above, comments.get(n, "")]).strip()
            case ast.FunctionDef(name=name, returns=ast.expr() as annotation) if any(
                ast.unparse(each).endswith("property") for each in node.decorator_list
            ):
                text = (ast.get_docstring(node) or "").replace("\n\n", " ").replace("\n", " ")
            case _:
                continue
        if not name.startswith("_"):
            yield name, Attribute(ast.unparse(annotation), text)


def _comments(source: str) -> dict[int, str]:
    """Return the comments by their lines, without those for tools."""
    return {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:)", token.string)
    }


def _of_docstring(kind: type) -> Iterator[tuple[str, str]]:
    _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    for name, text in _OF_DOCSTRING.findall(section.partition("\n\n")[0]):
        yield name, " ".join(text.split())


def _lines(name: str) -> Iterator[str]:
    yield from ("| attribute | type | what it is |", "|---|---|---|")
    for attribute, (kind, text) in attributes(name).items():
        if not text:
            raise ValueError(f"{name}.{attribute} has no comment and no docstring")
        unit = " (seconds)" if "Seconds" in kind else ""
        types = kind.replace("Seconds", "float").strip("'\"").split(" | ")
        shown = " or ".join(f"`{each}`" for each in types if each)
        yield f"| `{attribute}` | {shown} | {text[0].upper()}{text[1:].removesuffix('.')}{unit} |"
