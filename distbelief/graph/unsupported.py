"""Refuses what a graph of operations would lose, and restores what a forward writes.

random numbers             of Python or NumPy: the graph would keep those that were drawn once
attributes                 that the forward writes: restored; that it reads in its next call: an
                           error
hooks on a forward         are traced, or run with an opaque module
hooks on a gradient        run with an opaque module only
hooks on a parameter       never run: an error
a replaced forward         is traced like any other
max_norm of an embedding   would change rows behind the parameter server's back: an error
"""

import random  # noqa: TID251 -- to see whether a forward has used it
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType, NoneType
from typing import Final, final
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from distbelief.graph.graph import GraphError


def has_gradient_hooks(module: nn.Module) -> bool:
    hooks = (module._backward_hooks, module._backward_pre_hooks)  # noqa: SLF001 -- torch has no public way to ask
    return any(hooks)


def is_replaced(module: nn.Module) -> bool:
    """Return whether the instance's forward differs from its class's."""
    return "forward" in vars(module)


def opaque_reason(module: nn.Module) -> str | None:
    """Return why a module cannot be split although its type could; None if it can."""
    for path, part in module.named_modules():
        whose = f"its part {path!r}" if path else "it"
        if part._forward_hooks or part._forward_pre_hooks or has_gradient_hooks(part):  # noqa: SLF001
            return f"{whose} has hooks, so it cannot be split"
        if is_replaced(part):
            return f"{whose} has a forward that was replaced on the instance"
    return None


def refuse_parameter_hooks(module: nn.Module) -> None:
    """Raise `GraphError` if a parameter has a hook: a rank's tensors are copies without it."""
    for name, parameter in module.named_parameters():
        later = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or later:  # noqa: SLF001
            raise GraphError(lost_hook(name))


def refuse_bounded_tables(module: nn.Module) -> None:
    """Raise `GraphError` for tables with `max_norm`, which rewrite their rows when read."""
    for path, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm:
            raise GraphError(
                f"{path or 'the model'} is an {type(part).__name__} with max_norm = "
                f"{part.max_norm:g}, which rewrites rows without the parameter server: leave it "
                "out, and bound the rows in the forward (torch.renorm)"
            )


def refuse_scripts(module: nn.Module) -> None:
    """Raise `GraphError` for modules of TorchScript: no rank can give them its tensors."""
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise GraphError(
                f"{path or 'the model'} is compiled by torch.jit.script or trace, which cannot be "
                "split: use the module that it was made from, or one process per replica "
                "(partitions = 1)"
            )


Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator


@contextmanager
def no_other_generators(root: nn.Module) -> Iterator[None]:
    """Raise `GraphError` if numbers are drawn from any generator but torch's own meanwhile."""
    before = _states(root)
    yield
    for name, state in _states(root).items():
        if before.get(name, state) != state:
            raise GraphError(
                f"the forward draws random numbers of {name}: the ranks of a replica would draw "
                "different ones: use torch.nn.Dropout, or torch.rand in its own module"
            )


def _states(root: nn.Module) -> dict[str, object]:
    found: dict[str, object] = {
        "Python's `random`": random.getstate(),
        "numpy.random": _plain(np.random.get_state()),  # noqa: NPY002 -- the user's
    }
    for path, part in root.named_modules():
        for word, value in vars(part).items():
            if isinstance(value, Generator):
                found[f"its {f'{path}.{word}'.lstrip('.')!r}"] = _state(value)
    return found


def _state(generator: Generator) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    return _plain(generator.get_state())


def _plain(state: object) -> object:
    # As values that compare as one, which arrays do not; to write their numbers takes long.
    return pytree.tree_map_only(np.ndarray, np.ndarray.tobytes, state)


# --- what a forward keeps ---

_N_ELEMENTS_MAX: Final = 1000  # of a list or dictionary that is looked into
_PLAIN: Final = (NoneType, bool, int, float, complex, str, bytes, torch.Size)
_CLOSED: Final = (*_PLAIN, nn.Module, torch.Tensor, type, ModuleType, FunctionType, Generator)
_GONE: Final = object()


@final
@dataclass(frozen=True, slots=True)
class Change:
    """A key of a dictionary (an attribute of a module or an object) or all of a list, changed."""

    name: str
    table: "_Table"
    key: object
    value: object

    def make(self) -> None:
        if isinstance(self.table, dict):
            self.table.pop(self.key, None)
            if self.value is not _GONE:
                self.table[self.key] = self.value
        else:
            assert isinstance(self.value, list)
            _refill(self.table, self.value)


_Table = dict[object, object] | list[object] | deque[object] | set[object]
_Copy = dict[object, object] | list[object]


@final
class Attributes:
    """The attributes of all modules, and what the lists, tables and objects among them hold."""

    def __init__(self, module: nn.Module) -> None:
        self._tables: list[tuple[str, _Table, _Copy]] = []  # name, what may change, a copy
        seen: set[int] = set()
        for path, part in module.named_modules():
            for name, table in _tables(path, vars(part), seen):
                copied = dict(table) if isinstance(table, dict) else list(table)
                self._tables.append((name, table, copied))

    def changes(self) -> list[Change]:
        found = []
        for name, table, before in self._tables:
            if isinstance(before, dict) and isinstance(table, dict):
                keys = dict.fromkeys((*before, *table))
                pairs = [(key, before.get(key, _GONE), table.get(key, _GONE)) for key in keys]
                found += [
                    Change(f"{name}.{key}".lstrip("."), table, key, now)
                    for key, old, now in pairs
                    if not _same(old, now)
                ]
            elif not _same(tuple(before), tuple(table)):
                found.append(Change(name, table, None, list(table)))
        return found

    def restore(self) -> None:
        changed = {id(change.table) for change in self.changes()}
        for _, table, before in self._tables:
            if id(table) in changed or _in_other_order(table, before):
                _refill(table, before)


def _in_other_order(table: _Table, before: _Copy) -> bool:
    return isinstance(before, dict) and list(table) != list(before)


def _refill(table: _Table, content: _Copy) -> None:
    table.clear()
    if isinstance(table, list | deque):
        table.extend(content)
    elif isinstance(table, set):
        table |= set(content)
    elif isinstance(content, dict):
        table.update(content)


def _tables(name: str, value: object, seen: set[int]) -> Iterator[tuple[str, _Table]]:
    if isinstance(value, _CLOSED) or id(value) in seen:
        return
    seen.add(id(value))
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict | list | deque | set):
        yield name, value
    elif not isinstance(value, tuple):
        if hasattr(value, "__dict__"):
            yield from _tables(name, vars(value), seen)
        return
    # A library's own tuples may count something else, or nothing.
    n_items = tuple.__len__(value) if isinstance(value, tuple) else len(value)
    if n_items <= _N_ELEMENTS_MAX or name.count(".") < 1:
        items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield from _tables(f"{name}.{key}".lstrip("."), item, seen)


def _same(one: object, other: object) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, _PLAIN) and bool(one == other or one != one)  # noqa: PLR0124 -- NaN


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules, whatever a forward writes into them."""
    before = Attributes(module)
    try:
        yield
    finally:
        before.restore()


@final
class Reading(TorchFunctionMode):
    """Notes the tensors that depend on data, and refuses those that an earlier call has kept."""

    def __init__(
        self,
        inputs: Iterable[torch.Tensor],
        own: Iterable[torch.Tensor],
        kept: Iterable[Change] = (),
    ) -> None:
        super().__init__()
        self._own = {id(tensor): tensor for tensor in own}  # of the model
        self._of_data = self._own | {id(tensor): tensor for tensor in inputs}
        self._kept = {
            id(x): change.name for change in kept for x in _tensors_of(change.value, set())
        }

    @override
    def __torch_function__(
        self,
        func: Callable[[object], object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = pytree.tree_leaves((args, kwargs))
        for value in given:
            if id(value) in self._kept and isinstance(value, torch.Tensor):
                raise RememberedError(remembered(self._kept[id(value)]))
        found = func(*args, **(kwargs or {}))
        if any(id(value) in self._of_data for value in given):
            written = args[:1] if found is None else found
            self._of_data |= {
                id(x): x for x in pytree.tree_leaves(written) if isinstance(x, torch.Tensor)
            }
        return found

    def left(self, changes: Iterable[Change]) -> list[Change]:
        """Return the changes but those that keep the model's tensors, or constants."""

        def is_made_again(change: Change) -> bool:
            tensors = list(_tensors_of(change.value, set()))
            return bool(tensors) and all(
                id(x) in self._own or id(x) not in self._of_data for x in tensors
            )

        return [change for change in changes if not is_made_again(change)]


def _tensors_of(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    items: list[object] = list(value) if isinstance(value, tuple) else []
    for _, table in _tables("", value, seen):
        items += table.values() if isinstance(table, dict) else table
    # Recurrent layers of torch keep weak references to their weights, made anew in each forward.
    found = (item() if isinstance(item, ReferenceType) else item for item in items)
    yield from (item for item in found if isinstance(item, torch.Tensor))


def refuse_progress(once: Iterable[Change], twice: Iterable[Change]) -> None:
    """Raise `RememberedError` if a second call changes plain attributes once more, as counters."""
    for change in twice:
        earlier = {id(one.table): one for one in once if one.key == change.key}
        one = earlier.get(id(change.table))
        if one is None or not list(_tensors_of((one.value, change.value), set())):
            raise RememberedError(remembered(change.name))


class RememberedError(GraphError):
    """A forward depends on what an earlier one has kept."""


def remembered(name: str) -> str:
    return (
        f"the forward reads {name!r}, which an earlier call of it has changed: each rank would "
        "have a state of its own: compute it from the inputs, or use one process per replica "
        "(partitions = 1)"
    )


def lost_hook(name: str) -> str:
    return (
        f"parameter {name!r} has a hook on its gradient (register_hook), which would "
        "not run: change the gradient in the model's forward instead"
    )


def lost_change(name: str) -> str:
    return (
        f"the forward changes {name!r}, a tensor of the model, in place or by assigning "
        "another: the change would be lost: keep such state outside of the model"
    )
