"""Names in back-ticks, in pages, docstrings and comments, are names that exist."""

import ast
import builtins
import io
import keyword
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from tests.docs.pages import ROOT


SOURCES = sorted(
    path
    for package in ("distbelief", "sandblaster", "experiments", "docs/hooks")
    for path in (ROOT / package).rglob("*.py")
)
WRITTEN = [path for path in SOURCES if path.parts[len(ROOT.parts)] in {"distbelief", "sandblaster"}]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])

QUOTED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)|counters? \"(\w+)\"")
"""A name, or names with dots between them; and the counter of a role."""


BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)

ELSEWHERE = {
    # of Spark, and of those who trained on it
    *(
        "AdaptiveThresholdAlgorithm",
        "FixedThresholdAlgorithm",
        "PYSPARK_SUBMIT_ARGS",
        "StringIndexer",
        "ParameterAveragingTrainingMaster",
        "Pipeline",
        "SharedTrainingMaster",
        "addPyFile",
        "aggregationDepth",
        "asynchronous",
        "authenticate",
        "batchSizePerWorker",
        "maxFailures",
        "ml",
        "pyspark",
        "repartition",
        "save_path",
        "worker_num",
        "workersPerNode",
    ),
    *("ProcessPortion", "startAsynchronouslyFetchingParameters"),  # algorithms of the paper
    *("startAsynchronouslyPushingGradients", "dcsrch"),
    *(
        "n_x",
        "waits_NAME",
        "seconds_waited_for_NAME",
        "spent_STATE",
    ),  # with a name in place of a word
    *("__getitems__", "_call_impl", "DistributedDataParallel"),  # torch's
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "gcsfs", "adlfs", "defaultMode"),
    *("lr_find", "load_state", "resume_from_checkpoint", "optimizer_cls_and_kwargs"),  # trainers'
    *("on_train_begin", "on_train_end", "on_train_epoch_end"),
    *("mkdocs", "pyproject", "sbatch", "toml", "yml"),
}
"""Names of others, and names that stand for several."""


@cache
def known() -> set[str]:
    """Return every name of the source, and of what it is built on."""
    names = {*ELSEWHERE, *dir(builtins), *keyword.kwlist, *sys.stdlib_module_names}
    for module in (torch, nn, nn.functional, torch.optim, torch.optim.lr_scheduler, np):
        names |= set(dir(module))
    names |= {*dir(torch.Tensor), *dir(nn.Module), *dir(nn.LSTM(1, 1)), *dir(subprocess)}
    for path in SOURCES:
        names |= {path.stem, *path.relative_to(ROOT).parts}
        for node in ast.walk(ast.parse(path.read_text())):
            names |= names_of(node)
    for path in (ROOT / "docs" / "reference" / "job_keys.toml", ROOT / "pyproject.toml"):
        names |= set(re.findall(r"[\w.]+", " ".join(keys_of(tomllib.loads(path.read_text())))))
    return names


def names_of(node: ast.AST) -> set[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
            return {name}
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return {name}
        case ast.keyword(arg=str(name)):
            return {name}
        case ast.alias(name=name, asname=other):
            return {*name.split("."), other or name}
        case ast.Constant(value=str(text)) if len(text) < 60 and " " not in text:  # keys, tags
            return set(re.findall(r"\w+", text))
        case _:
            return set()


def keys_of(table: object) -> Iterator[str]:
    if isinstance(table, dict):
        for key, value in table.items():
            yield key
            yield from keys_of(value)


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a module, with their first lines."""
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_doc = token.type == tokenize.STRING and token.string.startswith('"""')
        if token.type == tokenize.COMMENT or is_doc:
            yield token.start[0], token.string


def unknown(text: str) -> list[str]:
    found = [first or second for first, second in QUOTED.findall(text)]
    return [name for name in found if not {*name.strip(".").split(".")} <= known()]


def test_what_is_looked_for_is_found() -> None:
    text = '`Shard.no_such_thing()`, `torch.zeros`, `a-b`, ``` `no_such` ```, counter "no_such"'
    assert unknown(text) == ["Shard.no_such_thing", "no_such", "no_such"]


def test_names_in_docstrings_and_comments_exist() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in WRITTEN
        for line, text in texts_of(path)
        for name in unknown(text)
    ]
    assert found == []


def test_names_in_pages_exist() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in PAGES
        for name in unknown(
            re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        )
    ]
    assert found == []
