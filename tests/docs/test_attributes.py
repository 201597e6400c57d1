"""Results say what each of their attributes is, and the page of the Python API has all of it."""

import inspect
import runpy
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType

import pytest

import distbelief
import sandblaster
from tests.docs.pages import ROOT


HOOK = runpy.run_path(str(ROOT / "docs" / "hooks" / "attributes.py"))
PAGE = (ROOT / "docs" / "reference" / "python-api.md").read_text()
RESULTS = HOOK["MARK"].findall(PAGE)


class Found:
    """A result.

    Attributes:
        first: Of the
            docstring.
    """

    first: int
    second: int  # beside it
    # Above it, in
    # two lines
    third: int
    fourth: int

    @property
    def fifth(self) -> str:
        """In a docstring."""
        return ""


def test_what_is_looked_for_is_found() -> None:
    found = HOOK["attributes"](f"{__name__}.Found")
    assert {name: each.text for name, each in found.items()} == {
        "first": "Of the docstring.",
        "second": "beside it",
        "third": "Above it, in two lines",
        "fourth": "",
        "fifth": "In a docstring.",
    }


@pytest.mark.parametrize("name", [*RESULTS, "sandblaster.api.MinimizeResult"])
def test_every_attribute_of_a_result_has_its_sentence(name: str) -> None:
    found = HOOK["attributes"](name)
    assert found
    assert [each for each, attribute in found.items() if not attribute.text] == []


def public() -> Iterator[tuple[str, object]]:
    for package in (distbelief, sandblaster):
        for name in package.__all__:
            yield f"{package.__name__}.{name}", getattr(package, name)
    for name in RESULTS:
        module, _, of = name.rpartition(".")
        yield name, getattr(import_module(module), of)


def test_every_public_name_is_on_the_page_and_says_what_it_is() -> None:
    for name, value in public():
        assert f"::: {name}\n" in PAGE or name in RESULTS, name
        assert value.__doc__ or name in RESULTS, name


def test_every_public_method_and_property_says_what_it_is() -> None:
    silent = [
        f"{name}.{method}"
        for name, kind in public()
        if isinstance(kind, type) and name not in RESULTS
        for method, value in vars(kind).items()
        if not method.startswith("_")
        and isinstance(value, FunctionType | property | classmethod)
        and not inspect.getdoc(getattr(kind, method))
    ]
    assert silent == []
