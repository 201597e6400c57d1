"""What the programs of this folder have in common: options, and a word on progress."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self, final

from rich.console import Console

from distbelief.display.progress import WaitProgress
from distbelief.forecast.prepare import Preparation
from distbelief.forecast.run import Tell
from experiments.figures.entries import Entry


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a program was called with."""

    run: bool  # whether what is missing is run
    seeds: int  # how many are shown
    only: str  # part of the label of what is run

    def wants(self, entry: Entry) -> bool:
        """Whether it is one of those that were asked for."""
        return self.only in entry.label


def options_from(
    documentation: str | None, arguments: Sequence[str] | None, *, entries: Sequence[Entry]
) -> Options:
    """Read the command line of a program with this module documentation.

    Args:
        documentation: Of the module.
        arguments: Of the command line; None: those of the process.
        entries: Among which --only chooses; it has to choose one at least.
    """
    description = (documentation or "").split("\n", 1)[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--run", action="store_true", help="run what is missing")
    parser.add_argument("--seeds", type=int, default=5, help="0 to so many less one")
    parser.add_argument("--only", default="", help='run such as "[20]"')
    found = parser.parse_args(arguments)
    options = Options(run=found.run, seeds=found.seeds, only=found.only)
    if not any(map(options.wants, entries)):
        known = ", ".join(dict.fromkeys(entry.label for entry in entries))
        parser.error(f"--only {found.only!r} is part of no label: there are {known}")
    return options


@final
class Runs:
    """Runs, one after the other, and how far they are. A context manager.

    Attributes:
        staging: Keeps what the jobs of one seed have in common.
    """

    def __init__(self, n_runs: int) -> None:
        self.staging = Preparation()
        self._console = Console(soft_wrap=True)
        self._waiting = WaitProgress(self._console, n_runs=n_runs)

    @contextmanager
    def one(self, what: str) -> Iterator[Tell]:
        """Begin a run; what it yields is to be told how far it is."""
        self._waiting.begin(what)
        yield self._waiting.tell
        self._waiting.end()

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def __enter__(self) -> Self:
        self.staging.__enter__()
        self._waiting.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._waiting.__exit__(kind, error, trace)
        self.staging.__exit__(kind, error, trace)
