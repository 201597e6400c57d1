"""Tables of pages whose rows are code, and how each row is run.

    | wish | here | ...                      a row: its name, and lines of code between <br>
    | a frame | `fit(frame)`<br>refused: *give arrays* |     raises a JobError that says that

The page's own block `names.py` comes first. What its rows need of a user's program, such as a
logger, is here: `program`.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from typer.testing import CliRunner
from typing_extensions import override

from distbelief import ParameterServer, Run
from distbelief.cli.main import app
from distbelief.core.errors import JobError
from distbelief.supervisor.view import JobView
from tests.docs.pages import ROOT, blocks


Names = dict[str, object]

_SEPARATOR = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Row:
    wish: str
    code: str
    refused: str | None  # what the error says
    others: tuple[str, ...]  # how other libraries do it


def rows_of(page: Path) -> list[Row]:
    found = []
    for line in page.read_text().splitlines():
        if not line.startswith("| ") or line.startswith("| wish "):
            continue
        wish, here, *others = (cell.strip() for cell in _SEPARATOR.split(line)[1:-1])
        pieces = here.replace("\\|", "|").split("<br>")
        code = [piece[1:-1] for piece in pieces if piece.startswith("`")]
        said = [piece for piece in pieces if not piece.startswith("`")]
        refused = None if not said else said[0].removeprefix("refused: *").removesuffix("*")
        found.append(Row(wish, "\n".join(code), refused, tuple(others)))
    return found


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Takes its time, so that a signal comes in the middle of an epoch."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.002)
        return self.x[index], self.y[index]


class Notes:
    """A callback, as of a user."""

    seen: ClassVar[list[str]] = []

    def on_end(self, run: Run) -> None:
        assert run.summary.samples
        self.seen.append("on_end")


class Logger:
    def __init__(self) -> None:
        self.figures: list[float] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        assert (name, step >= 0) == ("loss", True)
        self.figures.append(value)


def program(page: Path) -> Names:
    """Return the names of the page's first block, and of a user's program."""
    names: Names = {"__name__": "__main__"}
    (block,) = (one for one in blocks(page) if one.title == "names.py")
    torch.manual_seed(0)
    exec(block.text, names)
    net, x, y = (cast("nn.Module", names["net"]), *(cast("Tensor", names[n]) for n in "xy"))
    terminated: list[int] = []

    def terminate(view: JobView) -> None:
        if view.samples > 40 and not terminated:
            terminated.append(view.samples)
            os.kill(os.getpid(), signal.SIGTERM)

    def train(optimizer: torch.optim.Optimizer, *schedulers: object) -> None:
        loss = nn.functional.cross_entropy
        before = loss(net(x), y).item()
        for inputs, targets in zip(x.split(20), y.split(20), strict=True):
            optimizer.zero_grad()
            loss(net(inputs), targets).backward()
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()  # type: ignore[attr-defined]  # one of torch
        optimizer.finish()  # type: ignore[attr-defined]  # of own loops
        names["gain"] = before - loss(net(x), y).item()

    def command(*arguments: str) -> None:
        names["shown"] = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout

    frame = type("DataFrame", (), {"__module__": "pandas.core.frame"})()
    names |= {
        "before": deepcopy(net.state_dict()),
        "old": {"0.weight": torch.ones(16, 8)},
        "frame": frame,
        "writer": Logger(),
        "Slow": lambda: Slow(x, y),
        "Notes": Notes,
        "terminate": terminate,
        "train": train,
        "command": command,
    }
    return names


@contextmanager
def served(page: Path) -> Iterator[ParameterServer]:
    """Serve a copy of the page's model to its own loops."""
    names = program(page)
    with ParameterServer(cast("nn.Module", names["net"]), rule=names["sgd"]) as server:  # type: ignore[arg-type]
        yield server


def run(row: Row, names: Names, check: Callable[[Names], object] | None) -> None:
    """Run the code of a row, and check what it did; a refused one says so."""
    if row.refused is not None:
        with pytest.raises(JobError, match=re.escape(row.refused)):
            exec(row.code, names)
        return
    exec(row.code, names)
    assert check is not None, f"{row.wish}: how is it checked?"
    assert check(names) is not False, row.wish


PAGE = ROOT / "docs" / "howto" / "wishes.md"
COMING_FROM = PAGE.with_name("coming-from.md")
