"""Hypothesis strategies: any legal message, any array that may cross a process."""

import dataclasses
from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np
from hypothesis import strategies as st
from msgspec import inspect

from distbelief import protocol as wire
from distbelief.core.vectors import ELEMENT_TYPES, Vector


counts = st.integers(0, 2**63 - 1)
names = st.text(max_size=128)


@st.composite
def vectors(draw: st.DrawFn) -> Vector:
    """Any bits at all, NaN among them; sometimes none; sometimes not contiguous."""
    dtype = draw(st.sampled_from(list(ELEMENT_TYPES.values())))
    raw = draw(st.binary(max_size=256))
    values = np.frombuffer(raw[: len(raw) // 8 * 8], np.uint8).view(dtype)
    return values[:: draw(st.sampled_from([1, 2, -1]))]


_PLAIN: dict[type, st.SearchStrategy[object]] = {
    inspect.BoolType: st.booleans(),
    inspect.NoneType: st.none(),
    inspect.BytesType: st.binary(max_size=100),
}


def _values_of(kind: inspect.Type) -> st.SearchStrategy[object]:  # noqa: PLR0911 -- a case each
    match kind:
        case inspect.IntType():
            return st.integers(kind.ge, kind.le)
        case inspect.FloatType():
            return st.floats(kind.ge, kind.le)
        case inspect.BoolType() | inspect.NoneType() | inspect.BytesType():
            return _PLAIN[type(kind)]
        case inspect.StrType():
            text = st.text(max_size=min(kind.max_length or 50, 2048))
            return st.sampled_from(["trial", "s0", "A-9_.x"]) if kind.pattern else text
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.UnionType():
            return st.one_of([_values_of(each) for each in kind.types])
        case inspect.VarTupleType():
            items = _values_of(kind.item_type)
            return st.lists(items, min_size=kind.min_length or 0, max_size=3).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(_values_of, kind.item_types))
        case inspect.DictType():
            return st.dictionaries(
                _values_of(kind.key_type), _values_of(kind.value_type), max_size=4
            )
        case inspect.CustomType():
            return st.binary(max_size=200).map(wire.Blob) if kind.cls is wire.Blob else vectors()
        case inspect.StructType():
            return _structs_of(kind)
        case _:
            raise NotImplementedError(f"add a strategy for {kind} to message_strategies")


def _structs_of(kind: inspect.StructType) -> st.SearchStrategy[object]:
    fields = {field.name: _values_of(field.type) for field in kind.fields}
    for field in kind.fields:
        if not field.required and field.default is field.default_factory:  # neither: may be unset
            fields[field.name] |= st.just(msgspec.UNSET)
    return st.builds(kind.cls, **fields)


def of_kind(kind: type[wire.Message]) -> st.SearchStrategy[wire.Message]:
    return cast("st.SearchStrategy[wire.Message]", _values_of(inspect.type_info(kind)))


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
