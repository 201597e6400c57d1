"""What `distbelief partition` does: plan, print, and write what was asked for."""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final

import torch
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from torch import nn

from distbelief.errors import StorageError
from distbelief.graph.capture import InputSpec
from distbelief.graph.layer import GraphError
from distbelief.partition.ordering import order_of
from distbelief.partition.outlook import WIDTH, Outlook, outlook_of
from distbelief.partition.reports import differing, explaining
from distbelief.program.plan import Plan, load


DEFAULT_CLUSTER: Final = "rack-10g"

_TELL_EVERY_SECONDS: Final = 2.0


@final
@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked.

    Attributes:
        model: Import path of what makes the model, for the plan file.
        inputs: Of the model.
        batch: Samples of a step.
        loss: Its name; "" to plan inference.
        counts: Numbers of machines.
        cluster: A ready-made cluster's name, the path of a file, or "here": machines
            like this one.
        pins: Per layer its split.
        exactly: Use all machines of each count.
        profile: Measure layers here, also for other machines.
        explain: Layers to explain.
        out: Where to write the plan for the most machines.
        picture: Where to draw it.
        timeline: Where to write its Chrome trace.
        as_json: JSON instead of tables.
    """

    model: str
    inputs: Sequence[InputSpec]
    batch: int
    loss: str
    counts: Sequence[int]
    cluster: str = DEFAULT_CLUSTER
    pins: Mapping[str, str]
    exactly: bool = False
    profile: bool = False
    explain: Sequence[str] = ()
    out: Path | None = None
    picture: Path | None = None
    timeline: Path | None = None
    as_json: bool = False


class Trial(Protocol):
    """What came of running a plan."""

    @property
    def passed(self) -> bool:
        """Whether all is as it should be."""
        ...

    def plain(self) -> Mapping[str, object]:
        """Return all of it as JSON has it."""
        ...

    def show(self, console: Console) -> None:
        """Print it."""
        ...


def run(
    request: Request,
    make: Callable[[], object],
    *,
    verify: Callable[[Outlook], Trial] | None = None,
) -> bool:
    """Plan and print; return whether the plan for the most machines fits.

    Args:
        request: What is asked.
        make: Makes the model; called on the meta device, so that it has no memory.
        verify: Runs that plan. If what comes of it is wrong, the plan does not fit.

    Raises:
        GraphError: the model cannot be captured, a pin is impossible, a count too high.
        StorageError: a file cannot be written.
    """
    console = _console(stderr=request.as_json)
    for path in (request.out, request.picture, request.timeline):
        _check_place(path)
    with console.status("capturing the model") as status:
        order = order_of(
            _made(request, make),
            request.inputs,
            batch=request.batch,
            loss=request.loss,
            counts=request.counts,
            cluster=request.cluster,
            pins=request.pins,
            exactly=request.exactly,
            profile=request.profile,
            tell=lambda what: status.update(escape(what)),
        )
    for layer in request.explain:
        explaining.check(order.graph, layer)
    with console.status("planning") as status:
        outlook = outlook_of(
            order,
            request.counts,
            model=request.model,
            loss=request.loss,
            tell=_Teller(console, status).tell,
        )
    explained = [outlook.explain(layer) for layer in request.explain]
    trial = _tried(outlook, verify, console)
    _print(outlook, trial, console, as_json=request.as_json)
    for table in explained:
        console.print(table)
    if request.out is not None:
        outlook.save(request.out)
    if request.timeline is not None:
        outlook.trace(request.timeline)
    if request.picture is not None:
        outlook.draw(request.picture)
    return outlook.fits and (trial is None or trial.passed)


def _tried(
    outlook: Outlook, verify: Callable[[Outlook], Trial] | None, console: Console
) -> Trial | None:
    """Run the plan, if that was asked for."""
    if verify is None:
        return None
    with console.status("running the plan"):
        return verify(outlook)


def _print(outlook: Outlook, trial: Trial | None, console: Console, *, as_json: bool) -> None:
    if as_json:
        tried = {} if trial is None else {"verified": trial.plain()}
        print(json.dumps({**outlook.plain(), **tried}))  # noqa: T201 -- was asked for
        return
    outlook.show(console)
    if trial is not None:
        trial.show(console)


def compare(one: Path, other: Path, *, as_json: bool) -> bool:
    """Print where two plan files differ; return whether they do not.

    Raises:
        GraphError: one of them is no plan, or there is no such file.
    """
    first, second = _plan_in(one), _plan_in(other)
    if as_json:
        rows = differing.differences(first, second)
        print(json.dumps(rows))  # noqa: T201 -- what was asked for
    else:
        names = (str(one), str(other))
        _console().print(differing.show(first, second, names=names))
    return first == second


def _plan_in(path: Path) -> Plan:
    try:
        return load(path)
    except StorageError as error:
        raise GraphError(f"{error}: name a file that --out has written") from error


def _check_place(path: Path | None) -> None:
    """Check that a file can be written there, before anything takes long."""
    if path is None:
        return
    if path.is_dir():
        raise GraphError(f"{path} is a directory: name a file in it")
    if not path.parent.is_dir():
        raise GraphError(f"{path}: there is no directory {path.parent}: make it first")


@final
class _Teller:
    """Shows what is being done; where nothing can be replaced, line by line.

    Lines are for those who wait, and for logs: one every few seconds is enough.

    Args:
        console: Where to.
        status: What is replaced if that is a terminal.
    """

    def __init__(self, console: Console, status: Status) -> None:
        self._console = console
        self._status = status
        self._told = -math.inf

    def tell(self, what: str) -> None:
        """Show it, or not."""
        if self._console.is_terminal:
            self._status.update(escape(f"planning: {what}"))
            return
        now = time.monotonic()
        if now - self._told >= _TELL_EVERY_SECONDS:
            self._told = now
            print(f"planning: {what}", file=sys.stderr)  # noqa: T201 -- progress


def _made(request: Request, make: Callable[[], object]) -> nn.Module:
    try:
        with torch.device("meta"):
            model = make()
    except Exception as error:
        raise GraphError(
            f"{request.model}() failed: {type(error).__name__}: {error}. It is called "
            "without arguments, on the meta device, where tensors have no values"
        ) from error
    if not isinstance(model, nn.Module):
        raise GraphError(
            f"{request.model} returns a {type(model).__name__}; it is to return a torch.nn.Module"
        )
    return model


def _console(*, stderr: bool = False) -> Console:
    """Return a console; where no terminal says how wide it is, one wide enough."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console
