"""Optimizers and schedulers of torch, made from tables.

A table has the name of a class of `torch.optim`, or of `torch.optim.lr_scheduler`, as "name", and
its keywords. Its key "schedule" is such a table of a scheduler, and its key "groups" a table from
patterns of names to the keywords that differ for parameters of such names: the first that fits.
"""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from typing import Final, cast

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from distbelief.core.errors import SettingError
from distbelief.core.formatting import nearest
from distbelief.core.muon import Muon


Table = Mapping[str, object]

# They need the loss, a second pass, sparse gradients, or a function. Of rules of shards, which have
# parts of matrices, Muon is left out, too.
_UNFIT: Final = {"LBFGS", "SparseAdam", "Muon", "ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR"}
_WRAPPED: Final = ("add_param_group", "step", "zero_grad")
_RAISED: Final = TypeError, ValueError, AssertionError, LookupError, RuntimeError, ArithmeticError
OF_WHOLE_TENSORS: Final = {"Adafactor", "Muon"}  # the others treat each element by itself
_OWN: Final = {"Muon": Muon}  # which in torch is for matrices only


@cache  # asked for at each start of a replica, and a simulation has thousands
def kinds_of(module: object, base: type) -> Mapping[str, type]:
    """Return the classes of a module of torch that can be made from a table, by name."""
    return {
        name: kind
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, base) and kind is not base and name[0] != "_" and name not in _UNFIT
    }


def made(
    table: Table,
    parameters: Sequence[nn.Parameter],
    *,
    where: str,
    names: Sequence[str] = (),  # of the parameters, for groups; (): all are in no group
) -> tuple[Optimizer, LRScheduler | None]:
    """Return the optimizer of a table, and its scheduler if it has one; or raise SettingError."""
    keywords = {key: value for key, value in table.items() if key not in {"schedule", "groups"}}
    groups = _groups(table, where=where)
    kinds = {**kinds_of(torch.optim, Optimizer), **_OWN}
    name = _known(keywords.pop("name", None), kinds, where=where)
    _check_keywords(kinds[name], keywords, where=f"{where} {name}")
    for pattern, other in groups.items():
        place = f"{where}.groups {pattern!r}"
        _check_keywords(kinds[name], other, where=f"{place}: {name}")
        with explaining(name, other, where=place):  # it checks the keywords of no group
            optimizer(name, [nn.Parameter(torch.zeros(1))], {**keywords, **other})
    with explaining(name, keywords, where=f"{where} {name}"):
        one = optimizer(name, _grouped(parameters, names, groups), keywords)
    if keywords.get("lr") == 0:
        raise SettingError(
            f"{where}.lr is 0: no local step would move anything; use a number above 0"
        )
    schedule = table.get("schedule")
    if schedule is None:
        return one, None
    return one, _scheduler(schedule, one, where=f"{where}.schedule")


def _groups(table: Table, *, where: str) -> dict[str, Table]:
    groups = table.get("groups", {})
    if not isinstance(groups, Mapping) or not all(isinstance(x, Mapping) for x in groups.values()):
        raise SettingError(
            f"{where}.groups is {groups!r}; use a table of patterns and keywords, such as "
            '{ "*.bias" = { weight_decay = 0.0 } }'
        )
    for pattern, keywords in groups.items():
        if {"name", "schedule"} & keywords.keys():
            raise SettingError(
                f"{where}.groups {pattern!r} has a name or schedule: all groups have the same "
                "optimizer and scheduler, so give those keywords only that differ"
            )
    return dict(groups)


def _grouped(
    parameters: Sequence[nn.Parameter], names: Sequence[str], groups: Mapping[str, Table]
) -> list[nn.Parameter] | list[dict[str, object]]:
    if not groups or not names:
        return list(parameters)
    found: dict[str | None, list[nn.Parameter]] = {None: [], **{pattern: [] for pattern in groups}}
    for name, parameter in zip(names, parameters, strict=True):
        found[next((one for one in groups if fnmatchcase(name, one)), None)].append(parameter)
    # Also those without parameters, so that a scheduler with a number for each group fits.
    return [{"params": ones, **({} if key is None else groups[key])} for key, ones in found.items()]


def check_names(patterns: Iterable[str], names: Iterable[str], *, where: str) -> None:
    """Raise SettingError if a group is that of none of these parameters."""
    names = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SettingError(
                f"{where} has {pattern!r}, and no parameter's name is like that: use a name, "
                f"or a pattern such as '*.bias'. {nearest(pattern, names)}"
            )


def check(table: Table, *, where: str) -> None:
    """Raise SettingError unless the table makes an optimizer, and a scheduler if it has one."""
    _, scheduler = made(table, [nn.Parameter(torch.zeros(1))], where=where)
    if scheduler is not None:
        name, keywords = type(scheduler).__name__, cast("Table", table["schedule"])
        with explaining(name, keywords, where=f"{where}.schedule {name}"):
            advance(scheduler, 1)


def advance(scheduler: LRScheduler, n_steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a scheduler that is repeated without steps
        for _ in range(n_steps):
            scheduler.step()


def optimizer(
    name: str, parameters: Sequence[nn.Parameter] | Sequence[Table], keywords: Table
) -> Optimizer:
    """Return an optimizer of a class of torch; raises what torch raises about its keywords."""
    made: Optimizer = _plain(name)(parameters, **keywords)
    return made


@cache
def _plain(name: str) -> type:
    # Without the wrappers that keep torch.compile away from its methods: they import the compiler
    # at the first call, six seconds of every process.
    kind = _OWN.get(name) or getattr(torch.optim, name)
    methods = {each: inspect.unwrap(getattr(kind, each)) for each in _WRAPPED}
    methods["step"] = torch.no_grad()(methods["step"])
    return type(name, (kind,), methods)


@contextmanager
def explaining(name: str, keywords: Table, *, where: str) -> Iterator[None]:
    """Turn what torch raises about keywords of this class into a SettingError."""
    try:
        yield
    except _RAISED as error:
        text = str(error).replace(f"{name}.__init__() ", "")
        # Of an operation on a value.
        if isinstance(error, TypeError | LookupError) and text == str(error):
            given = ", ".join(
                f"{key} = {value!r}" for key, value in keywords.items() if key != "name"
            )
            text = f"torch does not accept {given}: use values of the types that it documents"
        raise SettingError(f"{where}: {text or type(error).__name__}") from None


def _scheduler(table: object, optimizer: Optimizer, *, where: str) -> LRScheduler:
    if not isinstance(table, Mapping):
        raise SettingError(
            f"{where} is {table!r}; "
            'use a table, such as { name = "CosineAnnealingLR", T_max = 1000 }'
        )
    keywords = dict(cast("Table", table))
    inner = keywords.get("schedulers")
    if isinstance(inner, list | tuple):  # of SequentialLR or ChainedScheduler
        keywords["schedulers"] = [_scheduler(each, optimizer, where=where) for each in inner]
    kinds = kinds_of(lr_scheduler, LRScheduler)
    name = _known(keywords.pop("name", None), kinds, where=where)
    # A chain of schedulers gets its optimizer from them.
    arguments = () if name == "ChainedScheduler" else (optimizer,)
    _check_keywords(kinds[name], keywords, where=f"{where} {name}")
    with explaining(name, keywords, where=f"{where} {name}"):
        scheduler: LRScheduler = kinds[name](*arguments, **keywords)
    return scheduler


def _check_keywords(kind: type, keywords: Table, *, where: str) -> None:
    known = [
        key for key in inspect.signature(kind).parameters if key not in {"params", "optimizer"}
    ]
    for key in keywords:
        if key not in known:
            raise SettingError(f"{where} has no keyword {key!r}. {nearest(key, known)}")


def _known(name: object, kinds: Mapping[str, type], *, where: str) -> str:
    if name in _UNFIT and name not in kinds:
        raise SettingError(
            f"{where} has name = {name!r}, which does not fit here. {nearest('', kinds)}"
        )
    if not isinstance(name, str) or name not in kinds:
        hint = nearest(str(name), kinds)
        raise SettingError(f"{where} has name = {name!r}, which torch has not. {hint}")
    return name
