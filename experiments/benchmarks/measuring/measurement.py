"""Turns, spreads, processor time and memory, tables, and the JSON line of a benchmark.

Whatever is compared takes turns within one run (A B C, C B A, ...), so that a machine that becomes
slower changes no ratio; of each contestant the median is reported, and how far its turns lie
apart. Processor time and memory are read from Linux's /proc.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self, TypeVar

from rich.console import Console
from rich.table import Table


Name = TypeVar("Name")
Found = TypeVar("Found")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


# ----------------------------------------------------------------- options, turns, tables


def options_of(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *, small: Mapping[str, object]
) -> argparse.Namespace:
    """Parse the command line with one more option, `--small`, the same in all benchmarks.

    It replaces the defaults by those in `small`; options that are given count all the same.
    """
    parser.add_argument(
        "--small", action="store_true", help="the least of everything, to see it run"
    )
    if not parser.parse_args(arguments).small:
        return parser.parse_args(arguments)
    parser.set_defaults(**dict.fromkeys(small))  # argparse would append to a default
    options = parser.parse_args(arguments)
    for name, value in small.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def turns(contestants: Sequence[Name], *, n_rounds: int) -> Iterator[Name]:
    """Yield each contestant once a round, in every other round the other way around."""
    for index in range(n_rounds):
        yield from contestants if index % 2 == 0 else reversed(contestants)


def interleaved(
    contestants: Mapping[Name, Callable[[], Found]], *, n_rounds: int
) -> dict[Name, list[Found]]:
    """Run each contestant once a round, in turns; return what each has found."""
    found: dict[Name, list[Found]] = {name: [] for name in contestants}
    for name in turns(list(contestants), n_rounds=n_rounds):
        found[name].append(contestants[name]())
    return found


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float], *, scale: float = 1.0) -> Self:
        scaled = [scale * value for value in values]
        return cls(median=median(scaled), low=min(scaled), high=max(scaled))

    def show(self, digits: int = 1) -> str:
        low, high = f"{self.low:,.{digits}f}", f"{self.high:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({low} to {high})"


def show(title: str, rows: Mapping[str, Mapping[str, str]]) -> None:
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


# -------------------------------------------------------------------------- from /proc


def family(pid: int) -> list[int]:
    """Return a process and all its living descendants."""
    pids = [pid]
    for parent in pids:  # grows meanwhile
        for children in (_PROC / str(parent) / "task").glob("*/children"):
            with suppress(OSError):
                pids += map(int, children.read_text().split())
    return pids


def families(pids: Iterable[int]) -> list[int]:
    return sorted({member for pid in pids for member in family(pid)})


def roles_in(directory: Path) -> dict[str, int]:
    """Return the processes of roles, by role: those with a log in `directory`."""
    found, directory = {}, directory.resolve()
    for process in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or belongs to another user
            log = (process / "fd" / "1").readlink()
            if log.parent == directory and log.suffix == ".log":
                found[log.stem] = int(process.name)
    return found


def bind(pid: int, core: int) -> None:
    """Let all threads of a process, later ones included, run on this core only."""
    for thread in (_PROC / str(pid) / "task").iterdir():
        with suppress(OSError):  # it has just ended
            os.sched_setaffinity(int(thread.name), {core})


def cpu_seconds(pids: Iterable[int]) -> float:
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            # After the name, in parentheses, which may hold anything: man 5 proc.
            fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_SECOND


def own_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def busy_seconds() -> float:
    """Return the time that all processors were busy so far, with whatever it was.

    What other guests of the same hardware took of them counts too. 0 without /proc/stat.
    """
    with suppress(OSError):
        first = (_PROC / "stat").read_text(encoding="ascii").splitlines()[0].split()
        user, nice, system, _idle, _iowait, *others = map(int, first[1:9])
        return (user + nice + system + sum(others)) / _TICKS_PER_SECOND
    return 0.0


@dataclass(slots=True)
class Usage:
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of those who are measured
    others: float = 0.0  # processors that everybody else kept busy, on average


@contextmanager
def usage(cpu_seconds_so_far: Callable[[], float] = own_seconds) -> Iterator[Usage]:
    """Measure what is used meanwhile; a turn that shared the processors measures nothing."""
    found = Usage()
    begun, used, busy = time.monotonic(), cpu_seconds_so_far(), busy_seconds()
    yield found
    found.seconds = max(time.monotonic() - begun, 1e-9)
    found.cpu_seconds = cpu_seconds_so_far() - used
    found.others = max(busy_seconds() - busy - found.cpu_seconds, 0.0) / found.seconds


def shared_out_bytes(pids: Iterable[int]) -> int:
    """Return the memory that these processes hold now, what they share counted once."""
    return sum(_kilobytes(pid, "smaps_rollup", "Pss:") for pid in pids) * 1024


def peak_bytes(pid: int) -> int:
    """Return the most memory that this process has held, shared memory included."""
    return _kilobytes(pid, "status", "VmHWM:") * 1024


def load() -> float:
    """Return how many processes of the whole machine wanted to run in the last minute."""
    return os.getloadavg()[0]


def _kilobytes(pid: int, file: str, key: str) -> int:
    with suppress(OSError):
        for line in (_PROC / str(pid) / file).read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1])
    return 0
