"""What benchmarks have in common: turns, medians, processor time and memory, the end.

Whatever is compared takes turns within one run (A B C, C B A, ...), so that a machine
that becomes slower spoils no ratio; of each contestant the median is told, and how far
its turns lie apart. Processor time and memory are read from Linux's /proc.
"""

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self, TypeVar

from rich.console import Console
from rich.table import Table


Name = TypeVar("Name")

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(median=median(values), low=min(values), high=max(values))

    def show(self, digits: int = 1) -> str:
        """Return it as "median (low to high)"."""
        low, high = f"{self.low:,.{digits}f}", f"{self.high:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({low} to {high})"


def options_of(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *, small: Mapping[str, object]
) -> argparse.Namespace:
    """Parse the command line, with one more option, the same in all benchmarks.

    Args:
        parser: With all others.
        arguments: None: those of this process.
        small: What `--small` puts in place of the usual values. What is given beside
            it counts all the same.
    """
    parser.add_argument(
        "--small", action="store_true", help="the least of everything, to see it run"
    )
    if parser.parse_args(arguments).small:
        parser.set_defaults(**small)
    return parser.parse_args(arguments)


def turns(contestants: Sequence[Name], *, n_rounds: int) -> Iterator[Name]:
    """Yield each contestant once a round, in every other round the other way around."""
    for index in range(n_rounds):
        yield from contestants if index % 2 == 0 else reversed(contestants)


def family(pid: int) -> list[int]:
    """Return a process and all its descendants that live now."""
    pids = [pid]
    for parent in pids:  # grows meanwhile
        for thread in _children_files(parent):
            with suppress(OSError):
                pids += map(int, thread.read_text().split())
    return pids


def families(pids: Iterable[int]) -> list[int]:
    return sorted({member for pid in pids for member in family(pid)})


def bind(pid: int, core: int) -> None:
    """Let all threads of a process run on this core only, those to come included."""
    for thread in (_PROC / str(pid) / "task").iterdir():
        with suppress(OSError):  # it has just ended
            os.sched_setaffinity(int(thread.name), {core})


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time that these processes have taken so far."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            # After the name, in parentheses, which may hold anything: man 5 proc.
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_SECOND


def roles_in(directory: Path) -> dict[str, int]:
    """Return the processes of roles among this one's, by the role that each is.

    Args:
        directory: Where they write their logs: what a role prints goes there, too.
    """
    found, directory = {}, directory.resolve()
    for pid in family(os.getpid()):
        with suppress(OSError):  # it has just ended
            log = (_PROC / str(pid) / "fd" / "1").readlink()
            if log.parent == directory and log.suffix == ".log":
                found[log.stem] = pid
    return found


def busy_seconds() -> float:
    """Return the time that all processors were busy so far, with whatever it was.

    What other guests of the same hardware took of them counts too.
    """
    first = (_PROC / "stat").read_text(encoding="ascii").splitlines()[0].split()
    user, nice, system, _idle, _iowait, *others = map(int, first[1:9])
    return (user + nice + system + sum(others)) / _TICKS_PER_SECOND


def shared_out_bytes(pids: Iterable[int]) -> int:
    """Return the memory that these processes hold now, what they share counted once."""
    return sum(_kilobytes(pid, "smaps_rollup", "Pss:") for pid in pids) * 1024


def peak_bytes(pid: int) -> int:
    """Return the most memory that this process has held, shared memory included."""
    return _kilobytes(pid, "status", "VmHWM:") * 1024


def load() -> float:
    """Return how many processes of the whole machine wanted to run in the last minute.

    Told beside the figures: those of others are in them.
    """
    return os.getloadavg()[0]


def show(title: str, rows: Mapping[str, Mapping[str, str]]) -> None:
    """Print a table: one row per contestant, one column per key of theirs."""
    table = Table(title=title)
    table.add_column("")
    columns = list(dict.fromkeys(key for cells in rows.values() for key in cells))
    for column in columns:
        table.add_column(column, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *(cells.get(column, "") for column in columns))
    console = Console()
    console.print(table, crop=False, width=max(console.width, 110))


def conclude(benchmark: str, figures: Mapping[str, float]) -> None:
    rounded = {key: float(f"{value:.4g}") for key, value in figures.items()}
    print(json.dumps({"benchmark": benchmark, "figures": rounded}), flush=True)


def _children_files(pid: int) -> list[Path]:
    return list((_PROC / str(pid) / "task").glob("*/children"))


def _kilobytes(pid: int, file: str, key: str) -> int:
    with suppress(OSError):
        for line in (_PROC / str(pid) / file).read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1])
    return 0
