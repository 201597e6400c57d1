"""A shard's state as a snapshot, and back, bit for bit.

What must be restored together lies in one snapshot: values, rule state, clock, and per
client the watermark, so that no push is applied twice to what was restored (Lee et al.
2015, RIFL: the completion record is written with the object that it is about).

    arrays   "values" (shard_size,), "state.NAME" (n_gradient,) per vector of the rule
    facts    format, layout, index, incarnation, clock, rule, clients, steps (as JSON)

A snapshot is not trusted: whatever does not fit raises `StorageError` and says what to
do. Incarnations only rise, in a resumed run too: a snapshot that is not of an earlier
incarnation cannot be told from one whose watermarks belong to other clients' pushes. Of
two copies of a shard the pairing stands for the incarnation (`messages`), and whoever
is told to lead compares.
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


# Another cut: what lay on S shards, as S' shards of the same tensors hold it.
#
#     S = 2     shard 0   a[0:128] | b[0:5]      shard 1   a[128:300]
#     S' = 3    shard 0   a[0:128]   shard 1   a[128:192] | b[0:5]   shard 2   a[192:300]
#
# Rules:
#
# * Every element takes along, bit for bit, its value and what the rule remembers of it.
#   There and back again is the same, to the bit.
# * Padding is as on a shard that begins: zero in the values, and in each vector of the
#   rule's state whatever the rule begins with. No push ever changes it.
# * Shards need not be at one clock: they never were (DB-5). A new one begins at the
#   largest of those whose elements it holds, for then no element's clock falls: no
#   schedule goes back, no momentum begins anew, and Adam does not correct again for a
#   bias that is gone. Elements that are some pushes behind count as having met pushes
#   of nothing. Staleness needs clocks to rise, no more. What was pushed in parts is
#   counted element by element, as it was (`steps`).
# * No shard is needed whole: what a new one lacks is read by ranges.

Read = Callable[[int, str, int, int], Vector]
"""read(shard_index, array, start, stop) -> elements [start, stop) of an old array.

Arrays have the names that they have in a snapshot: "values", "state.NAME".
"""

_VALUES: Final = "values"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What one new shard holds."""

    values: Vector  # (shard_size,)
    state: State  # each (n_gradient,)
    clock: int
    steps: StepCounts


@final
@dataclass(frozen=True, slots=True)
class Move:
    """Elements that stay together: where they were, and where they come to lie."""

    source_index: int  # of the old shard
    start: int  # in the old shard's vectors
    stop: int
    offset: int  # in the new shard's

    @property
    def end(self) -> int:
        """First element after them, in the new shard's vectors."""
        return self.offset + self.stop - self.start


@final
class Resharding:
    """From one layout to another.

    Args:
        old: Of the shards that are.
        new: Of those that are to be.

    Raises:
        ValueError: they are not of the same tensors.
    """

    def __init__(self, old: Layout, new: Layout) -> None:
        if old.tensors != new.tensors or old.dtype != new.dtype:
            raise ValueError(
                f"layout {old.fingerprint} is of other tensors than {new.fingerprint}: "
                "only the number of shards may differ"
            )
        self._new = new
        self._places: dict[int, list[tuple[int, int, int, int]]] = {}
        for source in range(old.n_shards):
            for segment in old.segments(source):
                place = (source, segment.start, segment.stop, segment.offset)
                self._places.setdefault(segment.tensor_index, []).append(place)

    def moves(self, k: int) -> Iterator[Move]:
        """Yield what comes to lie on new shard k, by rising offset."""
        for segment in self._new.segments(k):
            for source, start, stop, offset in self._places[segment.tensor_index]:
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
        """Return what new shard k holds.

        Args:
            k: Index of the new shard.
            rule: Whose state it is.
            clocks: Of the old shards, in order.
            steps: Likewise.
            read: Reads the old shards' arrays.
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
        # A shard that holds nothing counts pushes all the same.
        of_sources = tuple(sources or range(len(clocks)))
        return Content(
            values=values,
            state=state,
            clock=max(clocks[source] for source in of_sources),
            steps=self._steps(k, [(source, steps[source]) for source in of_sources]),
        )

    def _steps(self, k: int, sources: Sequence[tuple[int, StepCounts]]) -> StepCounts:
        """Return what the elements of new shard k have met on these old ones."""
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


# The snapshots that a shard was asked for, until they are taken.
#
#     Save -> waits -> being taken -> Saved
#
# Rules:
#
# * One that is safe is not taken again: whoever asks again for the last is told so.
# * At most `N_SAVES_MAX` wait; whoever asks for more is told that it is too much.
# * Without a supervisor nobody asks: what is in no snapshot is saved once, after those
#   that wait.

N_SAVES_MAX: Final = 8
"""Snapshots that may wait to be taken."""


@final
class CheckpointWriter:
    """Snapshots asked of one life of a shard."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Address]] = deque()  # label, who asked for it
        self._last = ""
        self._clock = 0  # of the newest, or of what this life began with
        self._saves_rest = False

    def begin_at(self, clock: int) -> None:
        """What the values are at this clock can be had from where they came from."""
        self._clock = clock

    def save_rest(self) -> None:
        """After those that wait save what is in none of them."""
        self._saves_rest = True

    def begin_next(self, *, clock: int) -> str | None:
        """Return the label of the one that is taken now, if one is to be."""
        if self._saves_rest and not self._waiting and clock != self._clock:
            self._saves_rest = False  # there is no time to try again
            self._waiting.append((NEWEST, SUPERVISOR))
        return self._waiting[0][0] if self._waiting else None

    def ask(self, sender: Address, label: str, *, clock: int) -> list[Action]:
        """Let this snapshot wait, or say at once how it stands with it."""
        if label == self._last:
            return [_saved(sender, label, clock=clock)]
        if (label, sender) in self._waiting:
            return []
        if len(self._waiting) >= N_SAVES_MAX:
            error = f"{N_SAVES_MAX} snapshots wait to be taken already: ask less often"
            return [_saved(sender, label, clock=clock, error=error)]
        self._waiting.append((label, sender))
        return []

    def refuse(self, sender: Address, label: str, *, clock: int, why_not: str) -> list[Action]:
        """Say that this shard takes none when it is asked by this sender."""
        return [_saved(sender, label, clock=clock, error=why_not)]

    def taken(self, event: Persisted, *, clock: int) -> list[Action]:
        """The oldest is safe, or failed."""
        label, requester = self._waiting.popleft()
        if event.error is None:
            self._last, self._clock = label, clock
        saved = _saved(requester, label, clock=clock, error=event.error)
        said = [_rest_saved(event, clock=clock)] if label == NEWEST else []
        return [*said, saved]


def _rest_saved(event: Persisted, *, clock: int) -> Report:
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
    """All of a shard that outlives it."""

    incarnation: int  # of the shard, in the sense of `messages`; 0: of none yet
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
            "steps": msgspec.json.encode(state.steps.words().tolist()).decode(),
        },
    )


def restore(snapshot: Snapshot, *, identity: ShardIdentity, incarnation: int | None) -> ShardState:
    """Return the state that the snapshot holds, in arrays of its own.

    Args:
        snapshot: The newest whole one of this shard.
        identity: What it must agree with.
        incarnation: Of the shard now; the snapshot must be of an earlier one. None if
            nobody can say yet: then the state is of the snapshot's incarnation.

    Raises:
        StorageError: it is damaged, or of another shard, layout, rule or run.
    """
    return _Reader(snapshot, identity).read(incarnation=incarnation)


@final
class _Reader:
    """Reads one snapshot, and knows what to say of it."""

    def __init__(self, snapshot: Snapshot, identity: ShardIdentity) -> None:
        self._snapshot = snapshot
        self._identity = identity

    def read(self, *, incarnation: int | None) -> ShardState:
        """Check everything, then copy."""
        identity, layout = self._identity, self._identity.layout
        self._expect("format", FORMAT, mend="it was written by another version")
        self._expect(
            "layout",
            layout.fingerprint,
            mend="resume with the model and the number of shards it was made with",
        )
        self._expect("index", str(identity.index), mend="it belongs to another shard")
        self._expect("rule", identity.rule.name, mend="resume with that rule, or start anew")
        earlier = self._count("incarnation")
        if incarnation is not None and earlier >= incarnation:
            raise self._error(
                f"incarnation is {earlier}, and this shard's only {incarnation}: a "
                "resumed run must go on counting incarnations where the first ended"
            )
        size, n_gradient = (layout.shard_size(identity.index), layout.n_gradient(identity.index))
        state = identity.rule.state(n_gradient, layout.dtype)
        unknown = self._snapshot.arrays.keys() - {"values", *(f"state.{name}" for name in state)}
        if unknown:
            raise self._error(f"arrays {sorted(unknown)} mean nothing to this shard")
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
                f"fact {name!r} is missing; delete it, and the one before is used"
            ) from None

    def _expect(self, name: str, value: str, *, mend: str) -> None:
        found = self._fact(name)
        if found != value:
            raise self._error(f"{name} is {found!r}, not {value!r}: {mend}")

    def _count(self, name: str) -> int:
        text = self._fact(name)
        if not text.isdecimal() or len(text) > 18:
            raise self._error(
                f"{name} is {text!r}, not a count; delete it, and the one before is used"
            )
        return int(text)

    def _array(self, name: str, size: int, dtype: np.dtype[Element]) -> Vector:
        array = self._snapshot.arrays.get(name)
        if array is None:
            raise self._error(f"array {name!r} is missing; delete it, and the one before is used")
        if array.shape != (size,) or array.dtype != dtype:
            raise self._error(
                f"array {name!r} has shape {array.shape} and dtype {array.dtype}, not "
                f"({size},) and {dtype}; delete it, and the one before is used"
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
                f"steps cannot be read ({error}); delete it, and the one before is used"
            ) from None

    def _clients(self) -> Iterable[Session]:
        try:
            clients = msgspec.json.decode(self._fact("clients"), type=dict[str, _ClientFacts])
        except msgspec.MsgspecError as error:
            raise self._error(
                f"clients cannot be read ({error}); delete it, and the one before is used"
            ) from None
        for name, facts in clients.items():
            yield Session(
                name=Address(name),
                incarnation=facts.incarnation,
                watermark=facts.watermark,
                applied=facts.applied,
                samples=facts.samples,
                staleness=facts.staleness,
                told_staleness=facts.staleness,
            )
