"""Programs of three functions: schedule, push, pull (STRADS: Kim et al., EuroSys 2016).

Not samples but variables of a model are dealt to those that compute:

    schedule    deals a round of tasks: which variables each block updates next. All tasks of a
                round see the same values, so they must not depend on each other by much (ST-1).
                In a flight, values may lack what the last rounds have added, by a fixed number
    push        computes, from one block of the data and the rows it takes, what to add to rows
    pull        makes new rows of the old ones and of the sums over all tasks of the round

The data are cut into blocks. Their number is of the program, and they decide what is computed;
which worker has which block changes no bit, since sums are added in the order of the tasks.

Variables are rows of named tables. `run` holds them in this process; in a job shards do
(`distbelief.parameter_server.rows`), and `cluster` and `worker` have the other roles.
"""

import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, repeat
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeAlias, TypeVar, cast

import msgspec
import numpy as np

from distbelief.core.errors import SettingError
from distbelief.parameter_server.rows import STALENESS_MAX, Rows, Values, add_up
from distbelief.protocol.vector_commands import Pull
from sandblaster.optimizers.termination import Reason


Block = TypeVar("Block")
Argument = TypeVar("Argument")
Report = TypeVar("Report")
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Generic[Argument]):
    """What one block computes in a round."""

    block: int
    argument: Argument  # what else `push` gets, such as the variables to update
    takes: Mapping[str, Rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed(Generic[Report]):
    """What a task has computed."""

    adds: Mapping[str, tuple[Rows, Values]]
    report: Report  # for `schedule`: numbers and changes of variables, never data


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight(Generic[Argument]):
    """Rounds of which `staleness` + 1 are computed at the same time.

    Round t takes tables with what rounds 0 to t - 1 - staleness of this flight have added, and
    nothing of later ones: so the bits are the same for any number of workers. The tasks of a block
    are computed in the order of rounds. Rounds are scheduled one ahead, while others are computed.
    """

    rounds: Iterable[Sequence[Task[Argument]]]
    staleness: int  # 0 to STALENESS_MAX

    def __post_init__(self) -> None:
        if not 0 <= self.staleness <= STALENESS_MAX:
            raise SettingError(f"staleness is {self.staleness}; use 0 to {STALENESS_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A pass is done, or all is."""

    objective: float
    n_updates: int  # of single variables, since the start
    # With which `schedule` goes on from here, where tables alone have all that blocks have
    # computed; None: somewhere else.
    state: object
    end: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Types:
    """Of what is sent and saved in a job, as msgspec takes them."""

    argument: object
    report: object
    state: object


Steps: TypeAlias = Generator[
    Sequence[Task[Argument]] | Flight[Argument] | Mark, Sequence[Report], Result_co
]


class Program(Protocol[Block, Argument, Report, Result_co]):
    """What is computed, and in which order. `tables` are the values at the start.

    `pulls` are by table; rows of others become old ones plus sums. Without `types` only `run` can
    run it. `bounds` are arguments that say only when it ends: a job that resumes may have others.
    `keeps_state` says that blocks keep more from round to round than what follows from data and
    tables; but not over marks with a state. A job resumes only with the same `checksum`, which
    is of what no table has, and with the same arrays `data`, which only the coordinator reads.
    """

    n_blocks: int
    tables: Mapping[str, Values]
    pulls: Mapping[str, Pull] = MappingProxyType({})
    types: Types | None = None
    bounds: Sequence[str] = ()
    keeps_state: bool = False
    checksum: int = 0
    data: Sequence[object] = ()

    def load(self, block: int) -> Block:
        """Return this block of the data, with what its worker keeps from round to round."""
        ...

    def schedule(self, state: object = None) -> Steps[Argument, Report, Result_co]:
        """Deal rounds, each with at most one task per block; receive reports in their order.

        Of a flight it receives those of all rounds. It may yield marks, which are progress, and go
        on from the state of one, with the tables of then.
        """
        ...

    def push(self, block: Block, argument: Argument, taken: Mapping[str, Values]) -> Pushed[Report]:
        """Compute one task. What was taken must not be changed."""
        ...


def run(
    program: Program[Block, Argument, Report, Result_co],
    *,
    workers: int = 1,
    watch: Callable[[Sequence[Report]], object] | None = None,
) -> tuple[Result_co, Mapping[str, Values]]:
    """Run a program in so many threads; return what its schedule returns, and the tables.

    `watch` receives the reports of each round. The bits are the same for any number of workers.
    """
    tables = {name: values.copy() for name, values in program.tables.items()}
    read_only = {name: values.view() for name, values in tables.items()}
    for view in read_only.values():
        view.flags.writeable = False
    blocks: dict[int, Block] = {}

    def computed(task: Task[Argument]) -> Pushed[Report]:
        if task.block not in blocks:
            blocks[task.block] = program.load(task.block)
        # A slice is a view, and stays as it is: rows change when all tasks have been computed.
        taken = {name: read_only[name][rows] for name, rows in task.takes.items()}
        return program.push(blocks[task.block], task.argument, taken)

    steps, reports = program.schedule(), list[Report]()

    def compute(tasks: Sequence[Task[Argument]]) -> list[Pushed[Report]]:
        pushed = list(pool.map(computed, tasks) if workers > 1 else map(computed, tasks))
        if watch is not None and pushed:
            watch([one.report for one in pushed])
        return pushed

    has_begun = False
    with ThreadPoolExecutor(workers) as pool:
        while True:
            try:
                step = steps.send(reports) if has_begun else next(steps)
            except StopIteration as end:
                return cast("Result_co", end.value), tables
            has_begun, reports = True, []
            if not isinstance(step, Mark):
                flight = step if isinstance(step, Flight) else Flight(rounds=[step], staleness=0)
                reports = _flown(flight, compute, tables, program.pulls)


def _flown(
    flight: Flight[Argument],
    compute: Callable[[Sequence[Task[Argument]]], list[Pushed[Report]]],
    tables: Mapping[str, Values],
    pulls: Mapping[str, Pull],
) -> list[Report]:
    reports: list[Report] = []
    waiting: deque[list[Pushed[Report]]] = deque()  # computed, and not added
    for tasks in chain(flight.rounds, repeat((), flight.staleness)):
        waiting.append(compute(tasks))
        if len(waiting) <= flight.staleness:
            continue
        pushed = waiting.popleft()
        reports += [one.report for one in pushed]
        for name, table in tables.items():
            adds = [one.adds[name] for one in pushed if name in one.adds]
            if adds:
                add_up(table, adds, pulls.get(name, Pull()))
    return reports


# --- as bytes ---


def checksum(*values: object) -> int:
    """Return a number that other arrays, dense or sparse by rows or columns, hardly have."""
    found = 0
    for one in values:
        parts = [one] if isinstance(one, np.ndarray) else [one.data, one.indices, one.indptr]  # type: ignore[attr-defined] # of scipy
        for part in parts:
            flat = part.reshape(-1, order="A")  # as it is in a file
            for first in range(0, flat.size, 1 << 20):
                some = flat[first : first + (1 << 20)]
                # scipy has indices in 32 or 64 bits.
                plain = some.astype(np.int64) if some.dtype.kind in "iu" else some
                found = zlib.crc32(np.ascontiguousarray(plain).data, found)
    return found


_COMPRESSED: Final = 1 << 16  # bytes: fewer are sent in less time than compressed
_TYPES: Final = ("<f8", "<i8", "<i4")


def packed(value: object) -> bytes:
    """Return arguments, reports and states as bytes: of msgspec's types, and arrays of numbers."""
    content = msgspec.msgpack.encode(value, enc_hook=_array_out)
    is_long = len(content) > _COMPRESSED
    return b"z" + zlib.compress(content, 1) if is_long else b"p" + content


def unpacked(content: bytes, kind: object) -> object:
    """Return what was packed, or raise msgspec.ValidationError."""
    try:
        plain = zlib.decompress(content[1:]) if content[:1] == b"z" else content[1:]
    except zlib.error as error:
        raise msgspec.ValidationError(str(error)) from None
    return msgspec.msgpack.decode(plain, type=kind, dec_hook=_array_in)


def _array_out(value: object) -> object:
    if isinstance(value, np.ndarray) and value.dtype.str in _TYPES:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot pack {value!r:.80}")


def _array_in(kind: type, value: object) -> object:
    del kind
    name, shape, content = msgspec.convert(value, tuple[str, tuple[int, ...], bytes])
    if name not in _TYPES:
        raise msgspec.ValidationError(f"no array: {name:.8}")
    return np.frombuffer(content, name).reshape(shape).copy()
