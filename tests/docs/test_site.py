"""The built site in a real browser: on a screen and a phone, by day and by night.

It needs mkdocs, playwright and a Chromium: the one of playwright, or that of the system.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from os import environ
from pathlib import Path
from typing import Any

import pytest

from tests.distbelief.dashboard.conftest import browser
from tests.docs.pages import ROOT


pytestmark = [pytest.mark.soak, pytest.mark.processes, pytest.mark.timeout(600)]

__all__ = ["browser"]  # a fixture

Page = Any  # these are playwright's, which may be missing
Browser = Any

# Tables and pictures that reach out of the page, or of a box that scrolls.
CLIPPED = """() => [...document.querySelectorAll('table, p > img, pre')].filter(each => {
    let box = each;
    while (box && !['auto', 'scroll'].includes(getComputedStyle(box).overflowX))
        box = box.parentElement;
    return !box && each.getBoundingClientRect().right > innerWidth + 1;
}).map(each => each.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("playwright") is None:
        pytest.skip("mkdocs or playwright is not installed")
    folder = tmp_path_factory.mktemp("site")
    options = ["--strict", "--quiet", "--clean", "--site-dir", str(folder)]
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", *options],
        cwd=ROOT,
        env=environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=True,
    )
    return folder


@pytest.fixture(params=[(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def page(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    width, scheme = request.param
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked: list[str] = []
    opened.on("request", lambda each: asked.append(each.url))
    yield opened
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    opened.close()


def test_every_page_fits_and_asks_nobody(site: Path, page: Page) -> None:
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    assert len(pages) > 30
    wide = {}
    for path in pages:
        page.goto(path.as_uri())
        is_wide = page.evaluate("document.documentElement.scrollWidth > innerWidth")
        clipped = page.evaluate(CLIPPED)
        if is_wide or clipped:
            wide[path.name] = clipped
    assert wide == {}


def test_what_is_copied_holds_no_prompt(site: Path, page: Page) -> None:
    page.goto((site / "quickstart.html").as_uri())
    block = page.locator("pre code", has_text="distbelief train job.toml").first
    block.evaluate("each => each.toggleAttribute('data-md-copying', true)")  # as its button does
    assert block.inner_text().strip() == "distbelief train job.toml"


def test_drawings_suit_the_dark(site: Path, page: Page) -> None:
    page.goto((site / "index.html").as_uri())
    turned = page.locator("p > img[src$='.svg']").first.evaluate(
        "each => getComputedStyle(each).filter"
    )
    is_dark = page.evaluate("document.body.dataset.mdColorScheme") == "slate"
    assert turned.startswith("invert") == is_dark
