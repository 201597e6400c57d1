"""Block worker: computes the tasks of rounds, from rows that it takes from the shards.

    coordinator        here              shards
      | Assignment ----> | TakeRows ------> |
      |                  | <--- RowsTaken   |
      |                  | push, as work    |
      |                  | AddRows -------> |  staged under the number of the attempt
      |                  | <--- RowsAdded   |
      | <--- WorkReport  |                  |

Every message is repeated until it is answered, or an assignment no longer names its task; of a
shard with two copies, to both: the primary answers. Blocks are loaded when their first task comes,
and stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, cast, final

import msgspec
import numpy as np

from distbelief import protocol as wire
from distbelief.core.errors import RemoteProtocolError
from distbelief.core.reliable import Backoff
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.rows import Part, Rows, Tables, Values
from distbelief.parameter_server.shard_config import copy_names, shard_of
from distbelief.protocol import role as rl
from sandblaster.chunks import COORDINATOR
from sandblaster.optimizers import base
from sandblaster.strads.method import AnyProgram, Span, check_size
from sandblaster.strads.program import Pushed, packed, unpacked


_RETRY: Final = "rows:retry"
_REPORT: Final = "rows:report"

Accepted = wire.Assignment | wire.RowsTaken | wire.RowsAdded | wire.StartTraining | wire.Stop


class _Phase(Enum):
    IDLE = "waiting for work"
    TAKING = "taking rows"
    COMPUTING = "computing"
    ADDING = "adding to rows"


@final
@dataclass(slots=True, kw_only=True, eq=False)
class _Attempt:
    number: int
    block: int
    content: bytes
    seconds: rl.Seconds = 0.0
    report: bytes = b""
    is_staged: bool = False


@final
class BlockWorker:
    """The role `replica-INDEX` of a job that runs a program."""

    accepts: Final = rl.message_types(Accepted)

    def __init__(
        self,
        program: AnyProgram,
        *,
        layout: Layout,
        shard_copies: int = 1,
        await_begin: bool = True,
        retry_seconds: rl.Seconds = 0.5,
        retry_seconds_max: rl.Seconds = 2.0,
    ) -> None:
        assert program.types is not None
        self._program = program
        self._types = program.types
        self._tables = Tables(layout)
        names = (copy_names(k, shard_copies) for k in range(layout.n_shards))
        self._copies = {copies[0]: copies for copies in names}
        self._primaries = {shard: shard for shard in self._copies}  # as far as one knows
        self._blocks: dict[int, object] = {}
        self._begun = not await_begin
        self._incarnation = 0
        self._series = self._version = self._evaluation = self._command = 0
        self._attempts: dict[int, _Attempt] = {}  # in the order to compute
        self._phase = _Phase.IDLE
        self._current: _Attempt | None = None
        self._is_busy = False  # the executor has work, perhaps for nobody
        self._argument: object = None
        self._taken: dict[str, Values] = {}
        self._parts: dict[int, tuple[str, Rows]] = {}  # taken: table, and places in `_taken`
        self._unanswered: dict[tuple[int, int], rl.Send] = {}  # by shard (of adds) and part
        self._n_parts = 0  # that were ever taken
        self._backoff = Backoff(retry_seconds, retry_seconds_max)
        self._pauses = retry_seconds, retry_seconds_max  # between reports: at work, and idle
        self._stopped_by: rl.Address | None = None
        self._n_computed, self._seconds = 0, 0.0

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        actions: list[rl.Action] = []
        match event:
            case rl.Started():
                self._incarnation = event.incarnation
                actions += self._report(now)
            case rl.Received():
                actions += self._receive(event, now)
            case rl.TimerFired(name=name) if name == _RETRY:
                actions += self._again(now)
            case rl.TimerFired():
                actions += self._report(now)
            case rl.PeerJoined(peer=peer) if peer == COORDINATOR:
                actions += self._report(now)
            case rl.Computed():
                actions += self._computed(event, now)
            case _:
                pass
        if self._stopped_by is not None:
            return self._exit()
        return [*actions, *self._next(now)]

    def status(self) -> tuple[str, Mapping[str, float]]:
        state = self._phase.value if self._begun else "waiting for begin"
        return state, {
            "samples": float(self._n_computed),
            "seconds_computing": self._seconds,
            "blocks": float(len(self._blocks)),
        }

    # --- the coordinator ---

    def _receive(self, event: rl.Received, now: rl.Seconds) -> list[rl.Action]:
        message = cast("Accepted", event.message)
        match message:
            case wire.StartTraining():
                self._begun = True
                return self._report(now)
            case wire.Stop():
                self._stopped_by = event.sender
                return []
            case wire.Assignment():
                return self._assigned(message, now)
            case wire.RowsTaken():
                self._primaries[shard_of(event.sender)] = event.sender
                return self._rows_taken(message)
            case wire.RowsAdded():
                self._primaries[shard_of(event.sender)] = event.sender
                return self._rows_added(event.sender, message, now)

    def _assigned(self, message: wire.Assignment, now: rl.Seconds) -> list[rl.Action]:
        if message.replica_incarnation != self._incarnation or message.series < self._series:
            return []
        if (message.series, message.version) > (self._series, self._version):
            known = self._attempts
            if (message.series, message.evaluation) != (self._series, self._evaluation):
                known = {}
            self._series, self._version = message.series, message.version
            self._evaluation, self._command = message.evaluation, message.command
            self._attempts = {
                task.attempt: known.get(task.attempt)
                or _Attempt(number=task.attempt, block=task.chunk_index, content=task.content)
                for task in message.tasks
            }
            current = self._current
            if current is not None and self._attempts.get(current.number) is not current:
                self._phase, self._current, self._unanswered = _Phase.IDLE, None, {}
        return self._report(now)

    def _report(self, now: rl.Seconds) -> list[rl.Action]:
        if not self._begun:
            return []
        room, results = base.N_BYTES_MAX, list[wire.ChunkResult]()
        for one in self._attempts.values():
            if one.is_staged and (len(one.report) <= room or not results):
                room -= len(one.report)  # the others follow when these are known
                result = wire.ChunkResult(
                    attempt=one.number,
                    n_examples=1,
                    loss=0.0,
                    seconds=one.seconds,
                    staged=True,
                    content=one.report,
                )
                results.append(result)
        report = wire.WorkReport(
            series=self._series,
            version=self._version,
            evaluation=self._evaluation,
            n_computed=0,
            results=tuple(results),
        )
        at = now + self._pauses[self._current is None]
        return [rl.Send(receiver=COORDINATOR, message=report), rl.SetTimer(name=_REPORT, at=at)]

    def _exit(self) -> list[rl.Action]:
        if self._is_busy:
            return []
        assert self._stopped_by is not None
        finished = wire.Finished(counters=dict(self.status()[1]))
        return [rl.Send(receiver=self._stopped_by, message=finished), rl.Exit()]

    # --- a task ---

    def _next(self, now: rl.Seconds) -> list[rl.Action]:
        if self._phase is _Phase.IDLE and not self._is_busy:
            waiting = (one for one in self._attempts.values() if not one.is_staged)
            if (one := next(waiting, None)) is not None:
                return self._begin(one, now)
        return []

    def _begin(self, one: _Attempt, now: rl.Seconds) -> list[rl.Action]:
        self._current, self._phase = one, _Phase.TAKING
        kind = tuple[self._types.argument, dict[str, Span]]  # type: ignore[name-defined]
        try:
            self._argument, takes = cast(
                "tuple[object, dict[str, Span]]", unpacked(one.content, kind)
            )
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"a task that cannot be read: {error}") from None
        self._taken, self._parts, self._unanswered = {}, {}, {}
        for table, span in takes.items():
            rows = span.rows
            shape = self._tables.n_rows(table, rows), *self._tables.shapes[table][1:]
            self._taken[table] = np.empty(shape)
            for part in self._tables.parts(table, rows):
                self._n_parts += 1
                self._parts[self._n_parts] = table, part.places
                self._unanswered[0, self._n_parts] = _send(part, self._take(table, part))
        return self._compute() if not self._unanswered else self._first(now)

    def _take(self, table: str, part: Part) -> wire.TakeRows:
        start, stop, rows = _wired(part.rows)
        return wire.TakeRows(
            series=self._series,
            number=self._command,
            part=self._n_parts,
            table=table,
            start=start,
            stop=stop,
            rows=rows,
        )

    def _rows_taken(self, message: wire.RowsTaken) -> list[rl.Action]:
        is_awaited = self._phase is _Phase.TAKING and (0, message.part) in self._unanswered
        if not is_awaited or (message.series, message.number) != (self._series, self._command):
            return []
        table, places = self._parts[message.part]
        there = self._taken[table][places]
        if message.values.size != there.size:
            raise RemoteProtocolError(f"{message.values.size} numbers, not {there.size}")
        self._taken[table][places] = message.values.reshape(there.shape)
        del self._unanswered[0, message.part]
        return [] if self._unanswered else self._compute()

    def _compute(self) -> list[rl.Action]:
        one, argument, taken = self._current, self._argument, self._taken
        assert one is not None
        self._phase, self._is_busy = _Phase.COMPUTING, True
        for values in taken.values():
            values.flags.writeable = False

        def work() -> tuple[_Attempt, Pushed[object]]:
            if one.block not in self._blocks:
                self._blocks[one.block] = self._program.load(one.block)
            return one, self._program.push(self._blocks[one.block], argument, taken)

        n_bytes = sum(values.nbytes for values in taken.values())
        return [rl.Compute(name="push", work=work, cost=rl.Cost(n_bytes=4.0 * n_bytes + 1e4))]

    def _computed(self, event: rl.Computed, now: rl.Seconds) -> list[rl.Action]:
        self._is_busy = False
        if event.error is not None:
            raise event.error
        one, pushed = cast("tuple[_Attempt, Pushed[object]]", event.result)
        self._n_computed += 1
        self._seconds += event.seconds
        if one is not self._current:
            return []
        one.seconds, one.report = event.seconds, packed(pushed.report)
        check_size(one.report, "report")
        self._phase = _Phase.ADDING
        parts = [
            (table, values, part)
            for table, (rows, values) in pushed.adds.items()
            for part in self._tables.parts(table, rows)
        ]
        numbers: dict[int, int] = {}
        counts = [part.shard for _, _, part in parts]
        for table, values, part in parts:
            start, stop, rows = _wired(part.rows)
            some = np.ravel(values[part.places])
            number = numbers.get(part.shard, 0)
            numbers[part.shard] = number + 1
            message = wire.AddRows(
                series=self._series,
                number=self._command,
                token=one.number,
                part=number,
                n_parts=counts.count(part.shard),
                table=table,
                start=start,
                stop=stop,
                n_rows=0 if rows is None else len(rows),
                values=some if rows is None else np.concatenate([rows.astype(np.float64), some]),
            )
            self._unanswered[part.shard, number] = _send(part, message)
        return self._first(now) if self._unanswered else self._staged(now)

    def _rows_added(
        self, sender: rl.Address, message: wire.RowsAdded, now: rl.Seconds
    ) -> list[rl.Action]:
        one, key = self._current, (_index_of(sender), message.part)
        if one is None or (message.series, message.token) != (self._series, one.number):
            return []
        if self._phase is not _Phase.ADDING or self._unanswered.pop(key, None) is None:
            return []
        return [] if self._unanswered else self._staged(now)

    def _staged(self, now: rl.Seconds) -> list[rl.Action]:
        assert self._current is not None
        self._current.is_staged = True
        self._phase, self._current = _Phase.IDLE, None
        return self._report(now)

    # --- repetitions ---

    def _first(self, now: rl.Seconds) -> list[rl.Action]:
        self._backoff.start(now)
        sends = [
            msgspec.structs.replace(send, receiver=self._primaries[send.receiver])
            for send in self._unanswered.values()
        ]
        return [*sends, rl.SetTimer(name=_RETRY, at=self._backoff.due)]

    def _again(self, now: rl.Seconds) -> list[rl.Action]:
        if not self._unanswered:
            return []
        self._backoff.repeat(now)
        sends = [
            msgspec.structs.replace(send, receiver=copy)
            for send in self._unanswered.values()
            for copy in self._copies[send.receiver]
        ]
        return [*sends, rl.SetTimer(name=_RETRY, at=self._backoff.due)]


def _send(part: Part, message: wire.TakeRows | wire.AddRows) -> rl.Send:
    return rl.Send(receiver=rl.Address(f"shard-{part.shard}"), message=message)


def _index_of(shard: rl.Address) -> int:
    index = shard_of(shard).removeprefix("shard-")
    return int(index) if index.isdecimal() else -1


def _wired(rows: Rows) -> tuple[int, int, "np.ndarray[tuple[int], np.dtype[np.int64]] | None"]:
    return (rows.start, rows.stop, None) if isinstance(rows, slice) else (0, 0, rows)
