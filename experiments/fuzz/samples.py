"""Legal values of any type that msgspec reads: what mutations begin with."""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar, final

import numpy as np
from msgspec import inspect

from distbelief.core.vectors import ELEMENT_TYPES
from distbelief.protocol import Blob


Choice = TypeVar("Choice")

N_ITEMS: Final = 3
_WORDS: Final = (
    *("", "replica-1", "replica-1.2", "shard-0", "host-5f", "supervisor", "brief"),
    *("trial", "s0", "tcp://127.0.0.1:41000", "0", "-1", "é\u2028", "a" * 128),
)
_NUMBERS: Final = (0, 1, 2, 3, 7, 64, 255, 65536, (1 << 31) - 1, (1 << 63) - 1)
_REALS: Final = (0.0, -0.0, 1.5, -1e300, float("inf"), float("nan"))


@final
class Sampler:
    """Draws legal values.

    Args:
        draw: Returns a number from 0 to its argument - 1.
    """

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw
        self._plainest: dict[type, Callable[[], object]] = {
            inspect.NoneType: lambda: None,
            inspect.BoolType: lambda: bool(draw(2)),
            inspect.FloatType: lambda: self._one_of(_REALS),
            Blob: lambda: Blob(bytes(draw(200))),
            inspect.AnyType: lambda: self._one_of(_WORDS),
            inspect.CustomType: self._array,
        }

    def of(self, kind: object) -> object:
        return self._value(inspect.type_info(kind))

    def _value(self, told: inspect.Type) -> object:
        match told:
            case inspect.StructType() | inspect.DataclassType():
                return told.cls(**{f.name: self._value(f.type) for f in told.fields})
            case inspect.Metadata():
                return self._value(told.type)
            case inspect.UnionType():
                return self._value(self._one_of(told.types))
            case inspect.VarTupleType() | inspect.ListType():
                items = [self._value(told.item_type) for _ in range(self._n(told))]
                return tuple(items) if isinstance(told, inspect.VarTupleType) else items
            case inspect.DictType():
                keys = [self._value(told.key_type) for _ in range(self._draw(N_ITEMS))]
                return {key: self._value(told.value_type) for key in keys}
            case _:
                return self._plain(told)

    def _plain(self, told: inspect.Type) -> object:
        match told:
            case inspect.IntType():
                low = told.ge if told.ge is not None else 0
                high = told.le if told.le is not None else 1 << 30
                return min(max(self._one_of(_NUMBERS), low), high)
            case inspect.FloatType() if told.ge is not None and told.le is not None:
                within = [real for real in _REALS if told.ge <= real <= told.le]
                return self._one_of([float(told.ge), float(told.le), *within])
            case inspect.StrType():
                named = told.pattern is not None  # of a vector
                return "s0" if named else self._one_of(_WORDS)[: told.max_length]
            case inspect.TupleType():
                return tuple(self._value(item) for item in told.item_types)
            case inspect.LiteralType():
                return self._one_of(told.values)
            case _:
                blob = isinstance(told, inspect.CustomType) and told.cls is Blob
                return self._plainest[Blob if blob else type(told)]()

    def _array(self) -> object:
        dtype = self._one_of(list(ELEMENT_TYPES.values()))
        return np.zeros(self._draw(16), dtype)

    def _n(self, told: inspect.VarTupleType | inspect.ListType) -> int:
        least = told.min_length or 0
        return max(least, min(self._draw(N_ITEMS), told.max_length or N_ITEMS))

    def _one_of(self, choices: Sequence[Choice]) -> Choice:
        return choices[self._draw(len(choices))]
