"""What is read aloud: sentences from the interpreter's own documentation.

No text is stored in the repository. The help topics and the docstrings of the standard
library are on every machine that can run this; they differ a little from one release of
Python to the next, so every corpus records the SHA-256 of its sentences.
"""

import ast
import functools
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics


LITERAL_BLOCK = re.compile(r"::\n\n(?:[ \t]+.*\n|\n)+")
MARKUP = re.compile(r":[a-z]+:(?=`)|[`*|\"]")
PARAGRAPH_END = re.compile(r"\n\s*\n")
SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z])")
PLAIN_SENTENCE = re.compile(r"[A-Z][A-Za-z ,.;:'()!?-]{24,159}(?<=[.!?])")
FEWEST_WORDS = 5
# Tests, programs and tables: there is little prose in them.
PROGRAMS = {"test", "idlelib", "lib2to3", "turtledemo", "tkinter", "ensurepip"}
TABLES = {"encodings", "pydoc_data", "__pycache__"}
PACKAGES = {"site-packages", "dist-packages"}
HELD_OUT_ONE_IN = 10


@functools.cache
def read_sentences() -> tuple[str, ...]:
    passages = [*topics.values(), *_docstrings(Path(sysconfig.get_path("stdlib")))]
    return tuple(sorted({line for text in passages for line in split(text)}))


def split(text: str) -> Iterator[str]:
    """The sentences of `text` that can be read aloud; code and lists are dropped."""
    prose = LITERAL_BLOCK.sub("\n\n", text + "\n")
    for paragraph in PARAGRAPH_END.split(prose):
        line = " ".join(MARKUP.sub("", paragraph).split())
        for sentence in SENTENCE_END.split(line):
            if PLAIN_SENTENCE.fullmatch(sentence) and sentence.count(" ") >= (FEWEST_WORDS - 1):
                yield sentence


def select(sentences: Sequence[str], *, part: str) -> list[str]:
    """The sentences of one part; about one in ten is held out, by its own hash.

    The hash, not the position, decides: a sentence stays in its part when another
    release of Python adds or drops its neighbours.
    """
    held_out = part == "test"
    return [line for line in sentences if _is_held_out(line) == held_out]


def hash_sentences(sentences: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(sentences).encode()).hexdigest()


def _is_held_out(sentence: str) -> bool:
    digest = hashlib.sha256(sentence.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def _docstrings(library: Path) -> Iterator[str]:
    not_read = PROGRAMS | TABLES | PACKAGES
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        if path.parent.name in not_read:
            continue
        tree = _parse(path)
        if tree is not None:
            yield from _walk(tree)


def _walk(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """Docstrings of a definition and of the definitions directly inside it."""
    yield ast.get_docstring(node) or ""
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef):
            yield from _walk(inner)


def _parse(path: Path) -> ast.Module | None:
    """The syntax tree of a file, or None where this interpreter cannot read it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in strings
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return None
