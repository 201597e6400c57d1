"""The inner optimizer: a class of torch.optim, and its schedule, by their names and keywords."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Final, cast, final

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from distbelief.core.formatting import nearest


Table = Mapping[str, object]  # the class's name as key "name", and its keywords

# They need the loss, a second pass, sparse gradients, matrices only, or a function.
_UNFIT: Final = {"LBFGS", "SparseAdam", "Muon", "ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR"}
OF_WHOLE_TENSORS: Final = {"Adafactor"}  # the others treat each element by itself


def check_inner(table: Table) -> None:
    """Raise ValueError unless this table makes an optimizer, and a schedule if it has one."""
    _, schedule = _built(table, [nn.Parameter(torch.zeros(1))])
    if schedule is not None:
        try:
            _advance(schedule, 1)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"inner.schedule {type(schedule).__name__}: {error}") from None


def _advance(schedule: LRScheduler, n_steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a schedule that is repeated without steps
        for _ in range(n_steps):
            schedule.step()


def _built(
    table: Table, parameters: Sequence[nn.Parameter]
) -> tuple[Optimizer, LRScheduler | None]:
    keywords = {key: value for key, value in table.items() if key != "schedule"}
    optimizer = _make(keywords, torch.optim, Optimizer, parameters, where="inner")
    assert isinstance(optimizer, Optimizer)
    if keywords.get("lr") == 0:
        raise ValueError("inner.lr is 0: no local step would move anything; use a number above 0")
    schedule = table.get("schedule")
    return optimizer, None if schedule is None else _schedule(schedule, optimizer)


def _schedule(table: object, optimizer: Optimizer) -> LRScheduler:
    if not isinstance(table, Mapping):
        raise ValueError(  # noqa: TRY004 -- of a job file
            f"inner.schedule is {table!r}; "
            'use a table, such as { name = "CosineAnnealingLR", T_max = 1000 }'
        )
    keywords = dict(cast("Table", table))
    inner = keywords.get("schedulers")
    if isinstance(inner, list | tuple):  # of SequentialLR or ChainedScheduler
        keywords["schedulers"] = [_schedule(each, optimizer) for each in inner]
    scheduler = _make(keywords, lr_scheduler, LRScheduler, optimizer, where="inner.schedule")
    assert isinstance(scheduler, LRScheduler)
    return scheduler


def _make(table: Table, module: object, base: type, argument: object, *, where: str) -> object:
    known = [
        name
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, base) and kind is not base and name[0] != "_" and name not in _UNFIT
    ]
    keywords = dict(table)
    name = keywords.pop("name", None)
    if name in _UNFIT:
        raise ValueError(
            f"{where} has name = {name!r}, which does not fit here. {_hint('', known)}"
        )
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{where} has name = {name!r}, which torch has not. {_hint(name, known)}")
    kind = getattr(module, name)
    try:
        # A chain of schedulers gets its optimizer from them.
        return kind(**keywords) if name == "ChainedScheduler" else kind(argument, **keywords)
    except (TypeError, ValueError, AssertionError, IndexError, RuntimeError) as error:
        text = str(error).replace(f"{name}.__init__() ", "")
        if isinstance(error, TypeError) and text == str(error):  # of an operation on a value
            given = ", ".join(f"{key} = {value!r}" for key, value in keywords.items())
            text = f"torch does not accept {given}: use values of the types that it documents"
        raise ValueError(f"{where} {name}: {text or type(error).__name__}") from None


def _hint(name: object, known: Sequence[str]) -> str:
    # As in other libraries: "adamw".
    same = [each for each in known if each.lower() == str(name).lower()]
    return f"Did you mean {same[0]!r}?" if same else nearest(str(name), known)


@final
class InnerOptimizer:
    """The optimizer of one replica, or of one rank of it. It is made at the first step."""

    def __init__(
        self,
        table: Table,
        values: Mapping[int, torch.Tensor],  # flat, of what is trained, by item
        *,
        shapes: Sequence[Sequence[int]] | None = None,  # per item; None: flat
    ) -> None:
        self._table = table
        self._parameters = {
            item: nn.Parameter(value if shapes is None else value.view(*shapes[item]))
            for item, value in values.items()
        }
        self._optimizer: tuple[Optimizer, LRScheduler | None] | None = None
        self._n_scheduled = 0

    def forget(self) -> None:
        """Begin anew, with fresh state."""
        self._optimizer = None

    def step(self, gradients: Mapping[int, torch.Tensor], number: int) -> None:
        """Take a step; `number` is that of the replica's whole training, for the schedule."""
        if self._optimizer is None:
            self._optimizer = _built(self._table, list(self._parameters.values()))
            self._n_scheduled = 0
        optimizer, schedule = self._optimizer
        if schedule is not None and self._n_scheduled < number:
            _advance(schedule, number - self._n_scheduled)
            self._n_scheduled = number
        for item, parameter in self._parameters.items():
            gradient = gradients.get(item)
            parameter.grad = None if gradient is None else gradient.view_as(parameter)
        optimizer.step()
        optimizer.zero_grad()
