"""The tables of the reference are made from the code, and miss nothing."""

import importlib.util
import re
from types import ModuleType

import pytest

from distbelief.config.job import Job
from tests.docs.pages import ROOT


HOOKS = ROOT / "docs" / "hooks"


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HOOKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_key_of_a_job_file_has_type_default_and_effect() -> None:
    page = hook("job_file_page")
    keys = list(page.keys())  # refuses keys without an entry, and entries without a key
    assert len(keys) > 100
    for key in keys:
        assert key.type, key
        assert key.effect.endswith("."), key
        assert "None" not in f"{key.type}{key.default}", key
    every = next(key for key in keys if (key.table, key.name) == ("evaluation", "every"))
    assert (every.type, every.default) == ("text", '"10 s"')
    assert "time" in every.unit


def test_the_page_has_every_table_of_a_job() -> None:
    page = hook("job_file_page")
    written = page.on_page_markdown(f"# Job file\n{page.MARKER}\n")
    tables = set(re.findall(r"^## \[(\w+)", written, re.MULTILINE))
    values = {"algorithm_name", "name", "import_paths"}  # keys, and what [source] holds
    assert tables == set(Job.__struct_fields__) - values
    assert page.on_page_markdown("a page") == "a page"


@pytest.mark.parametrize("name", ["train", "keys rotate", "simulate"])
def test_the_command_line_page_has_every_command(name: str) -> None:
    page = hook("command_line_page")
    written = page.on_page_markdown(page.MARKER)
    assert f"## distbelief {name}" in written
    assert "[dim]" not in written
    assert page.on_page_markdown("a page") == "a page"
