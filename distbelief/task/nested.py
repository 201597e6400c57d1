"""Tensors in tuples, dictionaries and objects with fields."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import final

import torch
from typing_extensions import override


Path = tuple[str | int, ...]
"""Where a tensor stands: ("inputs", "mask"), ("logits",), ()."""


def tensors_of(value: object, path: Path = ()) -> dict[Path, torch.Tensor]:
    """Return the tensors in a value by their paths; everything else is left out."""
    found = leaves(value, path, lists=True)
    return {path: leaf for path, leaf in found.items() if isinstance(leaf, torch.Tensor)}


def leaves(value: object, path: Path, *, lists: bool = False) -> dict[Path, object]:
    """Return all parts that have no parts, by their paths; parts of lists only with `lists`."""
    parts: Iterable[tuple[str | int, object]]
    if isinstance(value, torch.Tensor | int):  # most are: the other questions take longer
        return {path: value}
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif hasattr(value, "_fields"):  # a named tuple
        parts = [(name, getattr(value, name)) for name in value._fields]
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        parts = [(name, getattr(value, name)) for name in names]
    elif isinstance(value, (tuple, list) if lists else tuple):
        parts = list(enumerate(value))
    elif lists and hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
        parts = [(n, part) for n, part in vars(value).items() if isinstance(part, torch.Tensor)]
    else:
        return {path: value}
    return {
        p: leaf
        for key, part in parts
        for p, leaf in leaves(part, (*path, key), lists=lists).items()
    }


@final
class Fields(dict[str | int, object]):
    """Entries by key, attribute or position, as an object with fields has them."""

    def __getattr__(self, name: str) -> object:
        if name in self:
            return self[name]
        raise AttributeError(f"there is no {name!r}, only {', '.join(map(str, self))}")

    @override
    def __getitem__(self, key: str | int, /) -> object:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def rebuilt(tensors: Mapping[Path, torch.Tensor]) -> object:
    """Return the value that has these tensors: a tensor, tuples, and `Fields` for the rest."""
    if () in tensors:
        return tensors[()]
    parts: dict[str | int, dict[Path, torch.Tensor]] = {}
    for (key, *rest), tensor in tensors.items():
        parts.setdefault(key, {})[tuple(rest)] = tensor
    found = {key: rebuilt(part) for key, part in parts.items()}
    if parts and all(isinstance(key, int) for key in parts):
        return tuple(found.get(index) for index in range(max(map(int, parts)) + 1))
    return Fields(found)


def shown_path(path: Path) -> str:
    return ".".join(map(str, path))


def moved(value: object, device: torch.device) -> object:
    """Return the same value with its tensors on this device."""
    match value:
        case torch.Tensor():
            return value.to(device, non_blocking=True)
        case dict():
            return {key: moved(part, device) for key, part in value.items()}
        case tuple() if hasattr(value, "_make"):
            return value._make(moved(part, device) for part in value)
        case tuple() | list():
            return type(value)(moved(part, device) for part in value)
        case _ if callable(move := getattr(value, "to", None)):  # an object of some library
            found: object = move(device)
            return found
        case _:
            return value
