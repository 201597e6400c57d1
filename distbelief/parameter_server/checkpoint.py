"""A shard's state as a snapshot and back, bit for bit, also for another number of shards.

    arrays   "values" (shard_size,), "state.NAME" (n_gradient,) per vector of the rule
    facts    format, layout, index, incarnation, clock, rule, clients, steps (as JSON)

One snapshot holds everything that must be restored together: values, rule state, clock, and the
watermark of each client, so that no restored push is applied twice (Lee et al. 2015, RIFL: the
completion record is written with the object that it describes).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, final

import msgspec
import numpy as np

from distbelief.core.vectors import Element, Vector
from distbelief.errors import RemoteProtocolError, StorageError
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.optimizers import State, StepCounts, UpdateRule
from distbelief.parameter_server.session_state import Session
from distbelief.parameter_server.slices import IndexRanges, ShardSlice
from distbelief.protocol import CheckpointSaved
from distbelief.roles.role import (
    NEWEST,
    SUPERVISOR,
    Action,
    Address,
    Persisted,
    Report,
    Send,
    Snapshot,
)


# --- reshard ---
#
#     S = 2     shard 0   a[0:128] | b[0:5]      shard 1   a[128:300]
#     S' = 3    shard 0   a[0:128]   shard 1   a[128:192] | b[0:5]   shard 2   a[192:300]

Read = Callable[[int, str, int, int], Vector]
"""read(shard_index, array, start, stop) -> elements [start, stop) of an old array.

Arrays have the names that they have in a snapshot: "values", "state.NAME".
"""

_VALUES: Final = "values"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The arrays and counts of one new shard."""

    values: Vector  # (shard_size,)
    state: State  # each (n_gradient,)
    clock: int
    steps: StepCounts


@final
@dataclass(frozen=True, slots=True)
class Move:
    """A run of elements: its place in an old shard's vectors and in the new one's."""

    source_index: int  # of the old shard
    start: int  # in the old shard's vectors
    stop: int
    offset: int  # in the new shard's vectors

    @property
    def end(self) -> int:
        return self.offset + self.stop - self.start


@final
class Resharding:
    """Moves every element, with its value and its optimizer state, to another number of shards.

    Shards have different clocks (DB-5). A new shard starts at the largest clock of its sources,
    so that no element's clock falls: a schedule would go back, and Adam would repeat its bias
    correction.

    Args:
        old: Current layout.
        new: Wanted layout.

    Raises:
        ValueError: The layouts have different tensors.
    """

    def __init__(self, old: Layout, new: Layout) -> None:
        if old.tensors != new.tensors or old.dtype != new.dtype:
            raise ValueError(
                f"layouts {old.fingerprint} and {new.fingerprint} have different tensors: "
                "only the number of shards may differ"
            )
        self._new = new
        self._old_segments: dict[int, list[tuple[int, int, int, int]]] = {}
        for source in range(old.n_shards):
            for segment in old.segments(source):
                place = (source, segment.start, segment.stop, segment.offset)
                self._old_segments.setdefault(segment.tensor_index, []).append(place)

    def moves(self, k: int) -> Iterator[Move]:
        """Yield the runs of elements of new shard k, by rising offset."""
        for segment in self._new.segments(k):
            for source, start, stop, offset in self._old_segments[segment.tensor_index]:
                first, last = max(start, segment.start), min(stop, segment.stop)
                if first < last:
                    yield Move(
                        source,
                        offset + first - start,
                        offset + last - start,
                        segment.offset + first - segment.start,
                    )

    def shard(
        self,
        k: int,
        *,
        rule: UpdateRule,
        clocks: Sequence[int],
        steps: Sequence[StepCounts],
        read: Read,
    ) -> Content:
        """Return the content of new shard k.

        Args:
            k: Index of the new shard.
            rule: Update rule of the state.
            clocks: Clocks of the old shards, in order.
            steps: Push counts of the old shards, in order.
            read: Reads the old shards' arrays, by ranges.
        """
        n_gradient, dtype = self._new.n_gradient(k), self._new.dtype
        values: Vector = np.zeros(self._new.shard_size(k), dtype)
        state = rule.state(n_gradient, dtype)
        sources: set[int] = set()
        for move in self.moves(k):
            sources.add(move.source_index)
            here = slice(move.offset, move.end)
            there = (move.start, move.stop)
            values[here] = read(move.source_index, _VALUES, *there)
            if move.offset >= n_gradient:
                continue  # a buffer: the rule knows nothing of it
            for name, vector in state.items():
                vector[here] = read(move.source_index, f"state.{name}", *there)
        # An empty shard still needs a clock.
        of_sources = tuple(sources or range(len(clocks)))
        return Content(
            values=values,
            state=state,
            clock=max(clocks[source] for source in of_sources),
            steps=self._steps(k, [(source, steps[source]) for source in of_sources]),
        )

    def _steps(self, k: int, sources: Sequence[tuple[int, StepCounts]]) -> StepCounts:
        result = StepCounts(max(steps.n_whole for _, steps in sources))
        moves = list(self.moves(k))
        for source, steps in sources:
            for ranges, n_pushes in steps.parts:
                moved = IndexRanges.union(
                    ranges.clipped(move.start, move.stop).shifted(move.offset - move.start)
                    for move in moves
                    if move.source_index == source
                )
                result.add(ShardSlice.of(moved, self._new), n_pushes=n_pushes)
        return result


# --- writer ---

N_SAVES_MAX: Final = 8
"""Limit of waiting checkpoints."""


@final
class CheckpointWriter:
    """The requested checkpoints of one shard incarnation, at most `N_SAVES_MAX` waiting."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Address]] = deque()  # label, requester
        self._last = ""
        self._clock = 0  # of the newest checkpoint, or of the restored one
        self._saves_unsaved = False

    def begin_at(self, clock: int) -> None:
        self._clock = clock

    def save_unsaved(self) -> None:
        """After the waiting checkpoints, save once more if the values are newer."""
        self._saves_unsaved = True

    def begin_next(self, *, clock: int) -> str | None:
        if self._saves_unsaved and not self._waiting and clock != self._clock:
            self._saves_unsaved = False  # one attempt only: the shard is about to exit
            self._waiting.append((NEWEST, SUPERVISOR))
        return self._waiting[0][0] if self._waiting else None

    def ask(self, sender: Address, label: str, *, clock: int) -> list[Action]:
        """Queue a checkpoint, or answer at once."""
        # A repeated request for a checkpoint that is on disk.
        if label == self._last:
            return [_saved(sender, label, clock=clock)]
        if (label, sender) in self._waiting:
            return []
        if len(self._waiting) >= N_SAVES_MAX:
            error = f"{N_SAVES_MAX} checkpoints are waiting already: request them less often"
            return [_saved(sender, label, clock=clock, error=error)]
        self._waiting.append((label, sender))
        return []

    def refuse(self, sender: Address, label: str, *, clock: int, why_not: str) -> list[Action]:
        return [_saved(sender, label, clock=clock, error=why_not)]

    def taken(self, event: Persisted, *, clock: int) -> list[Action]:
        label, requester = self._waiting.popleft()
        if event.error is None:
            self._last, self._clock = label, clock
        saved = _saved(requester, label, clock=clock, error=event.error)
        report = [_report_unsaved(event, clock=clock)] if label == NEWEST else []
        return [*report, saved]


def _report_unsaved(event: Persisted, *, clock: int) -> Report:
    if event.error is None:
        return Report(text=f"saved at clock {clock}")
    return Report(text=f"could not save: {event.error}", level="error")


def _saved(receiver: Address, label: str, *, clock: int, error: str | None = None) -> Action:
    return Send(receiver=receiver, message=CheckpointSaved(label=label, clock=clock, error=error))


FORMAT = "distbelief-shard-1"

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _ClientFacts(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: _Count
    watermark: _Count
    applied: _Count
    samples: _Count
    staleness: _Count


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """Everything of a shard that a restart restores."""

    incarnation: int  # or term, if the shard has two copies; 0 before the first
    clock: int
    values: Vector  # (shard_size,)
    state: State  # each (n_gradient,)
    clients: tuple[Session, ...]
    steps: StepCounts


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIdentity:
    """What a snapshot must agree with."""

    index: int
    layout: Layout
    rule: UpdateRule


def take(label: str, state: ShardState, *, identity: ShardIdentity) -> Snapshot:
    """Return a snapshot that shares the arrays of `state`."""
    clients = {
        client.name: _ClientFacts(
            incarnation=client.incarnation,
            watermark=client.watermark,
            applied=client.applied,
            samples=client.samples,
            staleness=client.staleness,
        )
        for client in state.clients
    }
    arrays = {"values": state.values}
    arrays |= {f"state.{name}": vector for name, vector in state.state.items()}
    return Snapshot(
        label=label,
        arrays=arrays,
        facts={
            "format": FORMAT,
            "layout": identity.layout.fingerprint,
            "index": str(identity.index),
            "incarnation": str(state.incarnation),
            "clock": str(state.clock),
            "rule": identity.rule.name,
            "clients": msgspec.json.encode(clients).decode(),
            "steps": msgspec.json.encode(state.steps.to_wire().tolist()).decode(),
        },
    )


def restore(snapshot: Snapshot, *, identity: ShardIdentity, incarnation: int | None) -> ShardState:
    """Return the state in the snapshot, with arrays of its own.

    Args:
        snapshot: The newest complete snapshot of this shard.
        identity: What it must agree with.
        incarnation: The shard's incarnation, which must be later than the snapshot's. None if
            it is not known yet: the state then has the incarnation of the snapshot.

    Raises:
        StorageError: It is damaged, or of another shard, layout, rule or run.
    """
    return _Reader(snapshot, identity).read(incarnation=incarnation)


@final
class _Reader:
    def __init__(self, snapshot: Snapshot, identity: ShardIdentity) -> None:
        self._snapshot = snapshot
        self._identity = identity

    def read(self, *, incarnation: int | None) -> ShardState:
        identity, layout = self._identity, self._identity.layout
        self._expect("format", FORMAT, fix="it was written by another version")
        self._expect(
            "layout",
            layout.fingerprint,
            fix="resume with the model and number of shards of the run that wrote it",
        )
        self._expect("index", str(identity.index), fix="it belongs to another shard")
        self._expect("rule", identity.rule.name, fix="resume with that rule, or start a new run")
        earlier = self._count("incarnation")
        # Watermarks of the same or a later incarnation belong to other pushes of the clients.
        if incarnation is not None and earlier >= incarnation:
            raise self._error(
                f"its incarnation is {earlier} and the shard's is {incarnation}: "
                "continue the count of incarnations in a resumed run"
            )
        size, n_gradient = (layout.shard_size(identity.index), layout.n_gradient(identity.index))
        state = identity.rule.state(n_gradient, layout.dtype)
        unknown = self._snapshot.arrays.keys() - {"values", *(f"state.{name}" for name in state)}
        if unknown:
            raise self._error(f"arrays {sorted(unknown)} are unknown to this shard")
        return ShardState(
            incarnation=earlier if incarnation is None else incarnation,
            clock=self._count("clock"),
            values=self._array("values", size, layout.dtype),
            state={
                name: self._array(f"state.{name}", n_gradient, vector.dtype)
                for name, vector in state.items()
            },
            clients=tuple(self._clients()),
            steps=self._steps(size),
        )

    def _error(self, what: str) -> StorageError:
        return StorageError(
            f"snapshot {self._snapshot.label!r} of shard {self._identity.index} cannot "
            f"be restored: {what}"
        )

    def _fact(self, name: str) -> str:
        try:
            return self._snapshot.facts[name]
        except KeyError:
            raise self._error(
                f"fact {name!r} is missing; delete it to use the one before"
            ) from None

    def _expect(self, name: str, value: str, *, fix: str) -> None:
        found = self._fact(name)
        if found != value:
            raise self._error(f"{name} is {found!r}, not {value!r}: {fix}")

    def _count(self, name: str) -> int:
        text = self._fact(name)
        if not text.isdecimal() or len(text) > 18:
            raise self._error(f"{name} is {text!r}, not a count; delete it to use the one before")
        return int(text)

    def _array(self, name: str, size: int, dtype: np.dtype[Element]) -> Vector:
        array = self._snapshot.arrays.get(name)
        if array is None:
            raise self._error(f"array {name!r} is missing; delete it to use the one before")
        if array.shape != (size,) or array.dtype != dtype:
            raise self._error(
                f"array {name!r} has shape {array.shape} and dtype {array.dtype}, not "
                f"({size},) and {dtype}; delete it to use the one before"
            )
        return array.copy()

    def _steps(self, size: int) -> StepCounts:
        text = self._snapshot.facts.get("steps")
        if text is None:  # written before clients could hold parts
            return StepCounts(self._count("clock"))
        try:
            words = msgspec.json.decode(text, type=list[_Word])
            return StepCounts.read(np.array(words, np.int64), size=size)
        except (msgspec.MsgspecError, RemoteProtocolError) as error:
            raise self._error(
                f"steps cannot be read ({error}); delete it to use the one before"
            ) from None

    def _clients(self) -> Iterable[Session]:
        try:
            clients = msgspec.json.decode(self._fact("clients"), type=dict[str, _ClientFacts])
        except msgspec.MsgspecError as error:
            raise self._error(
                f"clients cannot be read ({error}); delete it to use the one before"
            ) from None
        for name, facts in clients.items():
            yield Session(
                name=Address(name),
                incarnation=facts.incarnation,
                watermark=facts.watermark,
                applied=facts.applied,
                samples=facts.samples,
                staleness=facts.staleness,
                confirmed_staleness=facts.staleness,
            )
