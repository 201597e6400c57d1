"""Hypothesis strategies: any legal message, any array that may cross a process."""

import dataclasses
from collections.abc import Sequence
from typing import cast, get_args, get_type_hints

import msgspec
import numpy as np
from hypothesis import strategies as st

from distbelief import protocol as wire
from distbelief.core.vectors import ELEMENT_TYPES, Vector
from distbelief.protocol.fields import Rate
from distbelief.protocol.membership import Warnings
from distbelief.protocol.push_fetch import Payload
from distbelief.protocol.vector_commands import Axpy, Batch, Dot, Scalars, VectorName


counts = st.integers(0, 2**63 - 1)
names = st.text(max_size=128)
vector_names = st.sampled_from(["trial", "s0", "A-9_.x"])


@st.composite
def vectors(draw: st.DrawFn) -> Vector:
    """Any bits at all, NaN among them; sometimes none; sometimes not contiguous."""
    dtype = draw(st.sampled_from(list(ELEMENT_TYPES.values())))
    raw = draw(st.binary(max_size=256))
    values = np.frombuffer(raw[: len(raw) // 8 * 8], np.uint8).view(dtype)
    return values[:: draw(st.sampled_from([1, 2, -1]))]


_BY_HINT: list[tuple[object, st.SearchStrategy[object]]] = [
    (wire.Count, counts),
    (wire.Count | None, st.none() | counts),
    (wire.Name, names),
    (wire.Text, st.text(max_size=2000)),
    (wire.Text | None, st.none() | st.text(max_size=50)),
    (float, st.floats()),
    (Rate, st.floats(0.0, 1e18)),
    (Payload, st.sampled_from(["dense", msgspec.UNSET])),
    (bool, st.booleans()),
    (tuple[wire.Name, ...], st.lists(names, max_size=4).map(tuple)),
    (Warnings, st.lists(st.text(max_size=50), max_size=8).map(tuple)),
    (Vector, vectors()),
    (Vector | None, st.none() | vectors()),
    (dict[wire.Name, float], st.dictionaries(names, st.floats(), max_size=4)),
]


def _values_of(hint: object) -> st.SearchStrategy[object]:
    for known, strategy in _BY_HINT:
        if known == hint:
            return strategy
    raise NotImplementedError(f"add a strategy for {hint} to message_strategies")


def _structs_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    hints = get_type_hints(kind, include_extras=True)
    fields = {field.name: _values_of(hints[field.name]) for field in msgspec.structs.fields(kind)}
    return st.builds(kind, **fields)


def _tuples_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[object]:
    return st.lists(_structs_of(kind), max_size=3).map(tuple)


_BY_HINT += [
    (wire.SessionRecord, _structs_of(wire.SessionRecord)),
    (tuple[wire.SessionRecord, ...], _tuples_of(wire.SessionRecord)),
    (tuple[wire.PeerEntry, ...], _tuples_of(wire.PeerEntry)),
    (VectorName, vector_names),
    (Scalars, st.lists(st.floats(), max_size=3).map(tuple)),
    (
        Batch,
        st.lists(
            st.builds(Axpy, target=vector_names, a=st.floats(), x=vector_names)
            | st.builds(Dot, x=vector_names, y=vector_names),
            max_size=3,
        ).map(tuple),
    ),
]
_BY_HINT.append(
    (get_type_hints(wire.Savepoint, include_extras=True)["vectors"], st.just(("s0", "y0")))
)
_BY_HINT += [(wire.Savepoint | None, st.none() | _structs_of(wire.Savepoint))]
_BY_HINT += [
    (get_type_hints(kind, include_extras=True)[field], strategy)
    for kind, field, strategy in (
        (wire.Commit, "sets", _tuples_of(wire.GrantedChunk)),
        (wire.Commit, "void", st.lists(counts, max_size=3).map(tuple)),
        (wire.CommandDone, "cuts", _tuples_of(wire.CheckpointRecord)),
        (wire.Assignment, "versions", _tuples_of(wire.ShardVersion)),
        (wire.Assignment, "tasks", _tuples_of(wire.ChunkTask)),
        (wire.WorkReport, "results", _tuples_of(wire.ChunkResult)),
        (wire.ChunkOrder, "versions", _tuples_of(wire.ShardVersion)),
        (wire.ChunkOrder, "keeps", st.lists(counts, max_size=3).map(tuple)),
        (wire.ChunkStaged, "commit_tokens", st.lists(counts, max_size=3).map(tuple)),
        (wire.Offer, "cores", st.integers(1, 4096)),
        (wire.Offer, "devices", st.lists(names, max_size=3).map(tuple)),
        (wire.Assignments, "assignments", _tuples_of(wire.RoleAssignment)),
        (wire.RoleEnded, "reason", st.text(max_size=2048)),
        (wire.FileChunk, "content", st.binary(max_size=200).map(wire.Blob)),
    )
]
_BY_HINT += [
    (get_type_hints(wire.HostReport, include_extras=True)["ended"], _tuples_of(wire.RoleEnded))
]
_BY_HINT += [(wire.ChunkOrder | None, st.none() | _structs_of(wire.ChunkOrder))]
_BY_HINT += [(wire.Task, st.one_of([_structs_of(kind) for kind in get_args(wire.Task)]))]


def of_kind(kind: type[wire.Message]) -> st.SearchStrategy[wire.Message]:
    return cast("st.SearchStrategy[wire.Message]", _structs_of(kind))


messages = st.sampled_from(wire.MESSAGES).flatmap(of_kind)


def same(left: object, right: object) -> bool:
    """Whether two messages are equal, bit by bit where they hold arrays."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        equal = left.dtype == right.dtype and left.tobytes() == right.tobytes()
    elif isinstance(left, wire.Blob) and isinstance(right, wire.Blob):
        equal = left.content == right.content
    elif isinstance(left, msgspec.Struct) and type(left) is type(right):
        equal = all(
            same(getattr(left, name), getattr(right, name)) for name in left.__struct_fields__
        )
    else:
        equal = repr(left) == repr(right)  # NaN is NaN here, and -0.0 is not 0.0
    return equal


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One way to spoil the frames of a message."""

    frame: int
    start: int
    n_removed: int
    inserted: bytes

    def apply(self, frames: Sequence[bytes]) -> list[bytes]:
        spoilt = list(frames)
        index = self.frame % len(spoilt)
        frame = spoilt[index]
        start = self.start % (len(frame) + 1)
        spoilt[index] = frame[:start] + self.inserted + frame[start + self.n_removed :]
        return spoilt


mutations = st.builds(
    Mutation,
    frame=st.integers(0, 1),
    start=st.integers(0, 300),
    n_removed=st.integers(0, 8),
    inserted=st.binary(max_size=8)
    | st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\x91" * 9, b"\xc7\x0c\xff", b"\xcb"]),
)
