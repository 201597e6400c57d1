"""Block worker: computes the tasks of rounds, from rows that it takes from the shards.

    coordinator        here              shards
      | Assignment ----> | TakeRows ------> |
      |                  | <--- RowsTaken   |
      |                  | push, as work    |
      |                  | AddRows -------> |  staged under the number of the attempt
      |                  | <--- RowsAdded   |
      | <--- WorkReport  |                  |

While one task is computed, the next one takes its rows, and earlier ones add theirs. Rows that a
task before has taken are asked for only if they may have changed. Every message is repeated until
it is answered, or an assignment no longer names its task; of a shard with two copies, to both: the
primary answers. Blocks are loaded when their first task comes, and stay.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
_PART_BITS: Final = 32

Accepted = wire.Assignment | wire.RowsTaken | wire.RowsAdded | wire.StartTraining | wire.Stop


class _Phase(Enum):
    WAITING = "waiting for work"
    TAKING = "taking rows"
    COMPUTING = "computing"
    ADDING = "adding to rows"
    STAGED = "reporting"


@final
@dataclass(slots=True, kw_only=True, eq=False)
class _Attempt:
    """Attributes: as of `ChunkTask`; what is taken, and what shards have not answered."""

    number: int
    block: int
    content: bytes
    after: int
    adds_after: int
    backoff: Backoff
    phase: _Phase = _Phase.WAITING
    argument: object = None
    taken: dict[str, Values] = field(default_factory=dict)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)  # where rows are [start, stop)
    parts: dict[int, tuple[str, Rows]] = field(default_factory=dict)  # table, places in `taken`
    # By shard (of adds) and part.
    unanswered: dict[tuple[int, int], rl.Send] = field(default_factory=dict)
    seconds: rl.Seconds = 0.0
    report: bytes = b""
    adds: bool = False

    @property
    def timer(self) -> str:
        return f"{_RETRY}:{self.number}"


@final
@dataclass(frozen=True, slots=True)
class _Known:
    """Rows [start, stop) of a table, as they are after a command of the series."""

    span: tuple[int, int]
    after: int
    values: Values


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
        self._series = self._version = self._evaluation = 0
        self._attempts: dict[int, _Attempt] = {}  # in the order to compute
        self._is_busy = False  # the executor has work, perhaps for nobody
        self._known: dict[str, _Known] = {}  # by table: what was taken last
        self._part = 0  # the number of what was asked for last
        self._pauses = retry_seconds, retry_seconds_max  # between reports: at work, and idle
        self._stopped_by: rl.Address | None = None
        self._n_computed, self._seconds = 0, 0.0

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        actions: list[rl.Action] = []
        match event:
            case rl.Started():
                self._incarnation = event.incarnation
                # An earlier incarnation may still ask, and its answers come here: no number twice.
                self._part = event.incarnation << _PART_BITS
                actions += self._report(now)
            case rl.Received():
                actions += self._receive(event, now)
            case rl.TimerFired(name=name) if name.startswith(_RETRY):
                actions += self._again(name, now)
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
        phases = [one.phase for one in self._attempts.values()]
        least = (_Phase.COMPUTING, _Phase.ADDING, _Phase.TAKING, _Phase.WAITING)
        state = next((one for one in least if one in phases), _Phase.WAITING).value
        return state if self._begun else "waiting for begin", {
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
            if message.series > self._series:
                self._known = {}
            self._series, self._version = message.series, message.version
            self._evaluation = message.evaluation
            self._attempts = {
                task.attempt: known.get(task.attempt)
                or _Attempt(
                    number=task.attempt,
                    block=task.chunk_index,
                    content=task.content,
                    after=task.after,
                    adds_after=task.adds_after,
                    backoff=Backoff(*self._pauses),
                )
                for task in message.tasks
            }
        return self._report(now)

    def _report(self, now: rl.Seconds) -> list[rl.Action]:
        if not self._begun:
            return []
        room, results = base.N_BYTES_MAX, list[wire.ChunkResult]()
        for one in self._attempts.values():
            if one.phase is _Phase.STAGED and (len(one.report) <= room or not results):
                room -= len(one.report)  # the others follow when these are known
                result = wire.ChunkResult(
                    attempt=one.number,
                    n_examples=1,
                    loss=0.0,
                    seconds=one.seconds,
                    staged=True,
                    content=one.report,
                    adds=one.adds,
                )
                results.append(result)
        report = wire.WorkReport(
            series=self._series,
            version=self._version,
            evaluation=self._evaluation,
            n_computed=0,
            results=tuple(results),
        )
        is_idle = all(one.phase is _Phase.STAGED for one in self._attempts.values())
        at = now + self._pauses[is_idle]
        return [rl.Send(receiver=COORDINATOR, message=report), rl.SetTimer(name=_REPORT, at=at)]

    def _exit(self) -> list[rl.Action]:
        if self._is_busy:
            return []
        assert self._stopped_by is not None
        finished = wire.Finished(counters=dict(self.status()[1]))
        return [rl.Send(receiver=self._stopped_by, message=finished), rl.Exit()]

    # --- a task ---

    def _next(self, now: rl.Seconds) -> list[rl.Action]:
        """Compute the first task that is left, and have the one after it take its rows."""
        actions: list[rl.Action] = []
        done = {_Phase.ADDING, _Phase.STAGED}
        left = [one for one in self._attempts.values() if one.phase not in done]
        for one in left[:2]:
            if one.phase is _Phase.WAITING:
                actions += self._begin(one, now)
            if one.unanswered:
                break  # the next one may need less, once these rows are here
        if left and not self._is_busy and left[0].phase is _Phase.TAKING and not left[0].unanswered:
            actions += self._compute(left[0])
        return actions

    def _begin(self, one: _Attempt, now: rl.Seconds) -> list[rl.Action]:
        one.phase = _Phase.TAKING
        kind = tuple[self._types.argument, dict[str, Span]]  # type: ignore[name-defined]
        try:
            one.argument, takes = cast(
                "tuple[object, dict[str, Span]]", unpacked(one.content, kind)
            )
        except msgspec.MsgspecError as error:
            raise RemoteProtocolError(f"a task that cannot be read: {error}") from None
        for table, span in takes.items():
            rows, after, known = span.rows, 0, None
            if isinstance(rows, slice):
                one.spans[table] = span.start, span.stop
                known = self._known.get(table)
            if known and known.span == one.spans[table] and known.after <= one.after:
                one.taken[table], after = known.values, known.after
                if after == one.after:
                    continue
            else:
                shape = self._tables.n_rows(table, rows), *self._tables.shapes[table][1:]
                one.taken[table] = np.empty(shape)
            for part in self._tables.parts(table, rows):
                self._part += 1
                one.parts[self._part] = table, part.places
                start, stop, indices = _wired(part.rows)
                message = wire.TakeRows(
                    series=self._series,
                    number=one.after,
                    part=self._part,
                    table=table,
                    start=start,
                    stop=stop,
                    rows=indices,
                    known=after,
                )
                one.unanswered[0, self._part] = _send(part, message)
        if not one.unanswered:
            self._has_taken(one)
        return self._first(one, now)

    def _has_taken(self, one: _Attempt) -> None:
        for table, values in one.taken.items():
            values.flags.writeable = False
            if table in one.spans:
                self._known[table] = _Known(one.spans[table], one.after, values)

    def _rows_taken(self, message: wire.RowsTaken) -> list[rl.Action]:
        for one in self._attempts.values():
            if one.phase is _Phase.TAKING and (0, message.part) in one.unanswered:
                break
        else:
            return []
        if (message.series, message.number) != (self._series, one.after):
            return []
        table, places = one.parts[message.part]
        if not message.unchanged:
            if not one.taken[table].flags.writeable:  # others have it, too
                one.taken[table] = one.taken[table].copy()
            there = one.taken[table][places]
            if message.values.size != there.size:
                raise RemoteProtocolError(f"{message.values.size} numbers, not {there.size}")
            one.taken[table][places] = message.values.reshape(there.shape)
        del one.unanswered[0, message.part]
        if not one.unanswered:
            self._has_taken(one)
        return []

    def _compute(self, one: _Attempt) -> list[rl.Action]:
        argument, taken = one.argument, one.taken
        one.phase, self._is_busy = _Phase.COMPUTING, True

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
        if self._attempts.get(one.number) is not one:
            return []
        one.seconds, one.report = event.seconds, packed(pushed.report)
        check_size(one.report, "report")
        one.phase, one.taken = _Phase.ADDING, {}
        parts = [
            (table, values, part)
            for table, (rows, values) in pushed.adds.items()
            for part in self._tables.parts(table, rows)
        ]
        one.adds = bool(parts)
        numbers: dict[int, int] = {}
        counts = Counter(part.shard for _, _, part in parts)
        for table, values, part in parts:
            start, stop, rows = _wired(part.rows)
            some = np.ravel(values[part.places])
            number = numbers.get(part.shard, 0)
            numbers[part.shard] = number + 1
            message = wire.AddRows(
                series=self._series,
                number=one.adds_after,
                token=one.number,
                part=number,
                n_parts=counts[part.shard],
                table=table,
                start=start,
                stop=stop,
                n_rows=0 if rows is None else len(rows),
                values=some if rows is None else np.concatenate([rows.astype(np.float64), some]),
            )
            one.unanswered[part.shard, number] = _send(part, message)
        return self._first(one, now) if one.unanswered else self._staged(one, now)

    def _rows_added(
        self, sender: rl.Address, message: wire.RowsAdded, now: rl.Seconds
    ) -> list[rl.Action]:
        one, key = self._attempts.get(message.token), (_index_of(sender), message.part)
        if one is None or message.series != self._series or one.phase is not _Phase.ADDING:
            return []
        if one.unanswered.pop(key, None) is None or one.unanswered:
            return []
        return self._staged(one, now)

    def _staged(self, one: _Attempt, now: rl.Seconds) -> list[rl.Action]:
        one.phase = _Phase.STAGED
        return self._report(now)

    # --- repetitions ---

    def _first(self, one: _Attempt, now: rl.Seconds) -> list[rl.Action]:
        if not one.unanswered:
            return []
        one.backoff.start(now)
        sends = [
            msgspec.structs.replace(send, receiver=self._primaries[send.receiver])
            for send in one.unanswered.values()
        ]
        return [*sends, rl.SetTimer(name=one.timer, at=one.backoff.due)]

    def _again(self, timer: str, now: rl.Seconds) -> list[rl.Action]:
        one = next((one for one in self._attempts.values() if one.timer == timer), None)
        if one is None or not one.unanswered:
            return []
        one.backoff.repeat(now)
        sends = [
            msgspec.structs.replace(send, receiver=copy)
            for send in one.unanswered.values()
            for copy in self._copies[send.receiver]
        ]
        return [*sends, rl.SetTimer(name=one.timer, at=one.backoff.due)]


def _send(part: Part, message: wire.TakeRows | wire.AddRows) -> rl.Send:
    return rl.Send(receiver=rl.Address(f"shard-{part.shard}"), message=message)


def _index_of(shard: rl.Address) -> int:
    index = shard_of(shard).removeprefix("shard-")
    return int(index) if index.isdecimal() else -1


def _wired(rows: Rows) -> tuple[int, int, "np.ndarray[tuple[int], np.dtype[np.int64]] | None"]:
    return (rows.start, rows.stop, None) if isinstance(rows, slice) else (0, 0, rows)
