"""Make docs/images/page.png: the page of `distbelief demo`, when most of it is done.

    python -m tests.distbelief.dashboard.page_picture

It needs playwright and a Chromium, and takes half a minute.
"""

import subprocess
import sys
import tempfile

from tests.distbelief.dashboard.conftest import chromium
from tests.docs.pages import ROOT


COMMAND = [sys.executable, "-c", "from distbelief.cli.entry import main; main()"]
SHARE = 0.6  # of the run


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*COMMAND, "demo", "--dashboard"], cwd=folder, stdout=subprocess.PIPE, text=True
        ) as run,
        chromium() as browser,
    ):
        assert run.stdout is not None
        address = run.stdout.readline().split()[1]
        next(line for line in run.stdout if line.startswith("demo:"))  # it has a directory
        page = browser.new_page(viewport={"width": 1280, "height": 704})
        page.goto(address)
        page.wait_for_function(f"() => runs[0]?.state?.view?.progress > {SHARE}", timeout=120_000)
        page.evaluate(
            "document.querySelector('.path').textContent = 'runs/demo'"
        )  # not this host's
        page.screenshot(path=ROOT / "docs" / "images" / "page.png")


if __name__ == "__main__":
    main()
