"""Code blocks of a Markdown page, and how each of them is run.

A page is run from top to bottom in a folder of its own, as a reader would:

    python or toml with a title  written to the file of that name
    python                      run; all blocks up to the next console block share names
    toml                        must be valid when merged into the page's last job file
    console                     the lines that begin with $ are run
    text                        output, pictures: nothing to run

A block below a line `<!-- not run: REASON -->` is not run. A page with a line
`<!-- soak: REASON -->` is run by `make soak` only.
"""

import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from os import environ
from pathlib import Path

from distbelief.config import toml
from distbelief.config.load import parse_job
from tests.processes.nursery import Forked


ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SECONDS_MAX = 120.0

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.+?) -->\n\s*)?"
    r"^(?P<indent> *)```(?P<kind>[a-z]*)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_SOAK = re.compile(r"^<!-- soak: .+ -->$", re.MULTILINE)
_FORKABLE = re.compile(r"distbelief (train|status|keys) [^|;&<>~$`*]*|python \w+\.py")


@dataclass(frozen=True)
class Block:
    """One code block of a page."""

    kind: str
    text: str
    line: int
    title: str | None = None
    reason: str | None = None  # why it is not run


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    return [
        Block(
            kind=match["kind"],
            text=re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE),
            line=text.count("\n", 0, match.start("kind")) + 1,
            title=match["title"],
            reason=match["reason"],
        )
        for match in _FENCE.finditer(text)
    ]


def is_soak(path: Path) -> bool:
    return _SOAK.search(path.read_text()) is not None


def run(page: list[Block], folder: Path) -> None:
    """Run the blocks of a page in this folder."""
    job: str | None = None
    script: list[str] = []
    for block in page:
        if block.reason is not None or block.kind == "text":
            continue
        if block.title is not None:
            (folder / block.title).write_text(block.text)
            job = block.text if block.kind == "toml" else job
        elif block.kind == "python":
            script.append(block.text)
        elif block.kind == "toml":
            assert job is not None, f"line {block.line}: a fragment of which job?"
            check_fragment(job, block)
        elif block.kind == "console":
            run_script(script, folder)
            for command in commands(block.text):
                run_command(command, folder)
        else:
            raise AssertionError(f"line {block.line}: how is {block.kind!r} run?")
    run_script(script, folder)


def run_script(script: list[str], folder: Path) -> None:
    """Run these pieces in one Python process, and forget them."""
    if script:
        (folder / "blocks_of_the_page.py").write_text("\n".join(script))
        script.clear()
        run_command("python blocks_of_the_page.py", folder)


def commands(text: str) -> list[str]:
    """Return the commands of a console block; a line that ends in \\ goes on."""
    joined = text.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.startswith("$ ")]
    return [re.sub(r"\s+#.*$", "", line[2:]) for line in lines]


def run_command(command: str, folder: Path) -> None:
    if _FORKABLE.fullmatch(command):  # begins at once, without importing torch
        with Forked(shlex.split(command)[1:], folder=folder) as forked:
            output, _ = forked.communicate(timeout=SECONDS_MAX)
            assert forked.returncode == 0, f"$ {command}\n{output}"
        return
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environ | {"PATH": f"{BIN}:{environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"


def check_fragment(job: str, block: Block) -> None:
    """Read the page's job file with the tables of this block in it."""
    tables = _merged(tomllib.loads(job), tomllib.loads(block.text))
    parse_job(toml.write(tables), path="job.toml")


def _merged(old: dict[str, object], new: dict[str, object]) -> dict[str, object]:
    if "name" in new:
        return new
    merged = old | new
    for key in old.keys() & new.keys():
        before, after = old[key], new[key]
        if isinstance(before, dict) and isinstance(after, dict):
            merged[key] = _merged(before, after)
    return merged
