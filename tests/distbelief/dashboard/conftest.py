"""A real browser: playwright and a Chromium, the one of playwright or that of the system."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


Browser = Any  # playwright's, which may be missing
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start it; a test is skipped where it is missing."""
    playwright: ModuleType = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed"
    )
    own = shutil.which("chromium") or shutil.which("chromium-browser")
    with playwright.sync_playwright() as running:
        if own is None and not Path(running.chromium.executable_path).exists():
            pytest.skip("there is no Chromium")
        made = running.chromium.launch(executable_path=own, args=OPTIONS)
        yield made
        made.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as made:
        yield made
