"""A shard's state as a snapshot and back, bit for bit, also for another number of shards.

    arrays   "values" (shard_size,), "state.NAME" (n_gradient,) per vector of the rule
    facts    format, layout, index, incarnation, clock, rule, clients, steps (as JSON), applied

One snapshot holds everything that must be restored together: values, rule state, clock, and the
watermark of each client, so that no restored push is applied twice (Lee et al. 2015, RIFL: the
completion record is written with the object that it describes).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Final, final

import msgspec
import numpy as np

from distbelief.core.errors import RemoteProtocolError, RestoreError
from distbelief.core.spans import NOTHING, Spans
from distbelief.core.vectors import Element, Vector
from distbelief.parameter_server.layout import Layout, Segment
from distbelief.parameter_server.ranges import IndexRanges
from distbelief.parameter_server.rules import State, UpdateRule, initial_state
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.slices import ShardSlice
from distbelief.parameter_server.step_counts import StepCounts
from distbelief.protocol import CheckpointSaved, Count, SessionRecord, role as rl


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """Everything of a shard that a restart restores."""

    incarnation: int  # or term, if the shard has two copies; 0 before the first
    clock: int
    values: Vector  # (shard_size,)
    state: State  # each (n_gradient,)
    clients: tuple[SessionRecord, ...]
    steps: StepCounts
    applied: Spans = NOTHING  # positions of the pushes in the values, where data are dealt


# --- reshard ---
#
#     S = 2     shard 0   a[0:128] | b[0:5]      shard 1   a[128:300]
#     S' = 3    shard 0   a[0:128]   shard 1   a[128:192] | b[0:5]   shard 2   a[192:300]

Read = Callable[[int, str, int, int], Vector]
"""read(shard_index, array, start, stop) -> elements [start, stop) of an old array.

Arrays have the names that they have in a snapshot: "values", "state.NAME".
"""

_VALUES: Final = "values"


def reshard(
    old: Layout,
    new: Layout,
    k: int,
    *,
    rule: UpdateRule,
    clocks: Sequence[int],
    steps: Sequence[StepCounts],
    read: Read,
    applied: Sequence[Spans] = (),
) -> ShardState:
    """Return the state of new shard k, in incarnation 0 and without clients, or raise ValueError.

    Every element keeps its value and its optimizer state. `clocks`, `steps` (push counts) and
    `applied` (dealt positions) are those of the old shards, in order. What not all sources of a new
    shard have applied is dealt again, to all its elements. Shards have different clocks (DB-5). A
    new shard starts at the largest clock of its sources, so that no element's clock falls: a
    schedule would go back, and Adam would repeat its bias correction.
    """
    if old.tensors != new.tensors or old.dtype != new.dtype:
        raise ValueError(
            f"layouts {old.fingerprint} and {new.fingerprint} differ in more than shards"
        )
    n_gradient, size = new.n_gradient(k), new.shard_size(k)
    values: Vector = np.zeros(size, new.dtype)
    state = initial_state(rule, new, k)
    moves = list(_moves(old, new, k))
    for source, start, stop, offset in moves:
        here = slice(offset, offset + stop - start)
        values[here] = read(source, _VALUES, start, stop)
        if offset < n_gradient:  # the rule knows nothing of buffers
            for name, vector in state.items():
                vector[here] = read(source, f"state.{name}", start, stop)
    # An empty shard still needs a clock.
    sources = {source for source, *_ in moves} or range(len(clocks))
    counts = StepCounts(max(steps[source].n_whole for source in sources))
    for source in sources:
        for ranges, n_pushes in steps[source].parts:
            moved = IndexRanges.union(
                ranges.clipped(start, stop).shifted(offset - start)
                for index, start, stop, offset in moves
                if index == source
            )
            counts.add(ShardSlice(size, dtype=new.dtype, ranges=moved), n_pushes=n_pushes)
    return ShardState(
        incarnation=0,
        clock=max(clocks[source] for source in sources),
        values=values,
        state=state,
        clients=(),
        steps=counts,
        applied=reduce(and_, (applied[source] for source in sources)) if applied else NOTHING,
    )


def _moves(old: Layout, new: Layout, k: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield old shard, [start, stop) there, and offset in new shard k, by rising offset."""
    placed: dict[int, list[tuple[int, Segment]]] = {}
    for source in range(old.n_shards):
        for one in old.segments(source):
            placed.setdefault(one.tensor_index, []).append((source, one))
    for segment in new.segments(k):
        for source, one in placed[segment.tensor_index]:
            first, last = max(one.start, segment.start), min(one.stop, segment.stop)
            if first < last:
                begin, end = (one.offset + at - one.start for at in (first, last))
                yield source, begin, end, segment.offset + first - segment.start


# --- writer ---

N_SAVES_MAX: Final = 8
"""Limit of waiting checkpoints."""


@final
class CheckpointWriter:
    """The requested checkpoints of one shard incarnation, at most `N_SAVES_MAX` waiting."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[str, rl.Address]] = deque()  # label, requester
        # After the waiting checkpoints, save once more if the values are newer.
        self.saves_unsaved = False
        self._last: str | None = None
        self.clock = 0  # of the newest checkpoint, or of the restored one

    def begin_next(self, *, clock: int) -> str | None:
        if self.saves_unsaved and not self.waiting and clock != self.clock:
            self.saves_unsaved = False  # one attempt only: the shard is about to exit
            self.waiting.append((rl.NEWEST, rl.SUPERVISOR))
        return self.waiting[0][0] if self.waiting else None

    def ask(
        self, sender: rl.Address, label: str, *, clock: int, why_not: str | None
    ) -> list[rl.Action]:
        """Queue a checkpoint, or answer at once: `why_not`, if it cannot be made here."""
        if why_not is None and label != self._last:  # a repeated request is on disk
            if (label, sender) in self.waiting:
                return []
            if len(self.waiting) < N_SAVES_MAX:
                self.waiting.append((label, sender))
                return []
            why_not = f"{N_SAVES_MAX} checkpoints are waiting already: request them less often"
        return [_saved(sender, label, clock=clock, error=why_not)]

    def taken(self, event: rl.Persisted, *, clock: int) -> list[rl.Action]:
        label, requester = self.waiting.popleft()
        error = event.error
        if error is None:
            self._last, self.clock = label, clock
        saved = _saved(requester, label, clock=clock, error=error)
        if label != rl.NEWEST:
            return [saved]
        if error is None:
            return [rl.Report(text=f"saved at clock {clock}"), saved]
        return [rl.Report(text=f"could not save: {error}", level="error"), saved]


def _saved(receiver: rl.Address, label: str, *, clock: int, error: str | None) -> rl.Action:
    return rl.Send(
        receiver=receiver, message=CheckpointSaved(label=label, clock=clock, error=error)
    )


# --- snapshots ---

FORMAT = "distbelief-shard-1"

_ASIDE: Final = "; move its file away to use the one before"


def take(label: str, state: ShardState, *, config: ShardConfig) -> rl.Snapshot:
    """Return a snapshot that shares the arrays of `state`."""
    clients = {one.name: msgspec.to_builtins(one) for one in state.clients}
    for client in clients.values():
        del client["name"]
    arrays = {"values": state.values}
    arrays |= {f"state.{name}": vector for name, vector in state.state.items()}
    applied = msgspec.json.encode(state.applied.to_wire()).decode()
    return rl.Snapshot(
        label=label,
        arrays=arrays,
        facts=({"applied": applied} if state.applied else {})
        | {
            "format": FORMAT,
            "layout": config.layout.fingerprint,
            "index": str(config.index),
            "incarnation": str(state.incarnation),
            "clock": str(state.clock),
            "rule": config.rule.label,
            "clients": msgspec.json.encode(clients).decode(),
            "steps": msgspec.json.encode(state.steps.to_wire().tolist()).decode(),
        },
    )


class _Facts(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: Count
    clock: Count
    clients: str
    steps: str | None = None  # None: written before clients could hold parts
    applied: str = "[]"


def restore(snapshot: rl.Snapshot, *, config: ShardConfig, incarnation: int | None) -> ShardState:
    """Return the state in the snapshot, with arrays of its own, or raise RestoreError.

    The shard's incarnation must be later than the snapshot's. None if it is not known yet: the
    state then has the incarnation of the snapshot.
    """
    layout, index = config.layout, config.index
    size, n_gradient = layout.shard_size(index), layout.n_gradient(index)

    def error(what: str) -> RestoreError:
        name = f"snapshot {snapshot.label!r} of shard {index}"
        return RestoreError(f"{name} cannot be restored: {what}")

    def array(name: str, size: int, dtype: np.dtype[Element]) -> Vector:
        found = snapshot.arrays.get(name)
        if found is None:
            raise error(f"array {name!r} is missing{_ASIDE}")
        if found.shape != (size,) or found.dtype != dtype:
            raise error(
                f"array {name!r} is {found.shape} of {found.dtype}, not {size} of {dtype}{_ASIDE}"
            )
        return found.copy()

    for name, value, fix in (
        ("format", FORMAT, "it was written by another version"),
        ("layout", layout.fingerprint, "resume with the model and number of shards of its run"),
        ("index", str(index), "it belongs to another shard"),
        ("rule", config.rule.label, "resume with that rule, or start a new run"),
    ):
        if snapshot.facts.get(name) != value:
            raise error(f"{name} is {snapshot.facts.get(name)!r}, not {value!r}: {fix}")
    try:
        facts = msgspec.convert(snapshot.facts, _Facts, strict=False)  # counts are texts
        by_name = msgspec.json.decode(facts.clients, type=dict[str, dict[str, int]])
        records = [{**client, "name": name} for name, client in by_name.items()]
        clients = msgspec.convert(records, tuple[SessionRecord, ...])
        steps = StepCounts(facts.clock)
        if facts.steps is not None:
            words = msgspec.json.decode(facts.steps, type=list[Count])
            steps = StepCounts.read(np.array(words, np.int64), size=size)
        applied = Spans.from_wire(msgspec.json.decode(facts.applied, type=list[Count]))
    except (msgspec.MsgspecError, RemoteProtocolError) as damage:
        raise error(f"its facts cannot be read ({damage}){_ASIDE}") from None
    # Watermarks of the same or a later incarnation belong to other pushes of the clients.
    if incarnation is not None and facts.incarnation >= incarnation:
        raise error(
            f"its incarnation is {facts.incarnation}, the shard's {incarnation}: count on from it"
        )
    state = initial_state(config.rule, layout, index)
    unknown = snapshot.arrays.keys() - {_VALUES, *(f"state.{name}" for name in state)}
    if unknown:
        raise error(f"arrays {sorted(unknown)} are unknown to this shard")
    return ShardState(
        incarnation=facts.incarnation if incarnation is None else incarnation,
        clock=facts.clock,
        values=array(_VALUES, size, layout.dtype),
        state={
            name: array(f"state.{name}", n_gradient, vector.dtype) for name, vector in state.items()
        },
        clients=clients,
        steps=steps,
        applied=applied,
    )
