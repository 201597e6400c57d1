"""What `distbelief partition` is asked, from words to things."""

import json
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final

import msgspec
import torch
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table
from torch import nn
from typing_extensions import override

from distbelief.core import files
from distbelief.errors import JobError, StorageError
from distbelief.graph.capture import InputSpec
from distbelief.graph.graph import GraphError
from distbelief.partition import report, report as report_module
from distbelief.partition.plan_picture import draw_plan
from distbelief.partition.planner import Planned, plan as plan_order, planning_request
from distbelief.partition.search import PlanningRequest, Told
from distbelief.program.chrome_trace import chrome_trace
from distbelief.program.cluster import Cluster
from distbelief.program.plan import Plan, Prediction, load, plan_for


# What `distbelief.plan` is given, checked before anything takes long.


def check_model(model: object) -> None:
    """Check that it is a module.

    Raises:
        GraphError: it is not.
    """
    if not isinstance(model, nn.Module):
        raise GraphError(
            f"the model is {_shown(model)}: give a torch.nn.Module, which may be on the meta device"
        )


def examples_of(example: object) -> list[torch.Tensor]:
    """Return an example of each input, all of the same batch.

    Raises:
        GraphError: it is none.
    """
    found = [example] if isinstance(example, torch.Tensor) else example
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        raise GraphError(
            f"the example is {_shown(example)}: give a tensor (batch, *shape), or one per input"
        )
    for tensor in found:
        if not isinstance(tensor, torch.Tensor):
            raise GraphError(
                f"the example of an input is {_shown(tensor)}: give a tensor "
                "(batch, *shape), as torch.as_tensor makes it"
            )
        if tensor.is_complex() or tensor.is_quantized:
            raise GraphError(
                f"the example of an input is of {tensor.dtype}: give floating point "
                "or whole numbers"
            )
    shapes = [list(tensor.shape) for tensor in found]
    if len({tuple(shape[:1]) for shape in shapes}) != 1 or not shapes[0]:
        raise GraphError(
            "the example is no batch: give a tensor (batch, *shape), or one per input, "
            f"not {shapes}"
        )
    if any(0 in shape for shape in shapes):
        raise GraphError(
            f"the example has an extent of 0: {shapes}; give a batch of 1 or more, "
            "none of whose dimensions is empty"
        )
    return list(found)


def spec_of(example: torch.Tensor) -> InputSpec:
    """Return the input that a batch is an example of."""
    n_values = None
    if not example.is_floating_point():
        n_values = int(example.max()) + 1 if not example.is_meta else 1
    return InputSpec(shape=tuple(example.shape[1:]), n_values=n_values)


def counts_of(machines: object) -> list[int]:
    """Return the numbers of machines.

    Raises:
        GraphError: they are none.
    """
    found = (machines,) if isinstance(machines, int) else machines
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        found = (None,)
    # True is an int too, and no number of machines.
    counts = [n for n in found if type(n) is int]
    if len(counts) < len(found):
        raise GraphError(
            f"machines is {_shown(machines)}: give a number, such as 8, or several, "
            "such as (1, 2, 4, 8)"
        )
    return counts


def check_words(
    *, loss: object, cluster: object, pins: object, flags: Mapping[str, object]
) -> None:
    """Check the types of what else a plan depends on.

    Raises:
        GraphError: one is of another.
    """
    if not isinstance(loss, str):
        raise GraphError(
            f"loss is {_shown(loss)}: give its name, such as 'cross_entropy', or '' for none"
        )
    if not isinstance(cluster, str | Path | Cluster):
        raise GraphError(
            f"cluster is {_shown(cluster)}: give the name of one, such as 'rack-10g', "
            "the path of a file, or a Cluster"
        )
    if not isinstance(pins, Mapping) or not all(
        isinstance(word, str) for pair in pins.items() for word in pair
    ):
        raise GraphError(
            f"pins is {_shown(pins)}: give a split per layer, such as {{'conv1': 'grid:3x3'}}"
        )
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise GraphError(f"{name} is {_shown(flag)}: give True or False")


def _shown(value: object) -> str:
    """Return a value and its type, cut short."""
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{text} ({type(value).__name__})"


# What machines would buy for a model: the planner's answer, to print, keep or draw.
#
# outlook = distbelief.plan(net, torch.zeros(64, 3, 32, 32), loss="cross_entropy",
#                           machines=(1, 2, 4), cluster="rack-1g")
# Then `print(outlook)` and `outlook.save("plan.json")`.
#
# The cluster "here" is of machines like this one, whose layers are measured.

WIDTH: Final = 130
"""Characters of a line, where no terminal says how many it has."""


@final
class PlanningResult:
    """Plans for several numbers of machines, the most last.

    Args:
        order: What was planned.
        planned: The plans, ascending by machines.
        model: Import path of what makes the model, or what else it is called.
        loss: Its name; "" if there is none.
        skipped: Numbers of machines for which pins allow no plan.
    """

    def __init__(
        self,
        order: PlanningRequest,
        planned: Sequence[Planned],
        *,
        model: str,
        loss: str,
        skipped: Sequence[int] = (),
    ) -> None:
        self.order = order
        self._skipped = skipped
        self.planned = tuple(planned)
        self._model = model
        self._loss = loss

    @property
    def fits(self) -> bool:
        """Whether the plan for the most machines fits their memory."""
        return self.planned[-1].forecast.fits

    @property
    def origin(self) -> str:
        """Where the costs are from, in a sentence."""
        return report_module.origin(self.order)

    @property
    def remarks(self) -> list[str]:
        """What a reader should know beside the table, a sentence each."""
        remarks = report.remarks(
            [done.forecast for done in self.planned],
            caps=[machine.memory for machine in self.order.cluster.machines],
            whole=[(x.name, x.whole) for x in self.order.graph.layers if x.whole],
            origin=self.origin,
        )
        if self._skipped:
            counts = ", ".join(map(str, self._skipped))
            remarks.insert(0, f"{counts} machines: left out, a pin wants more")
        return remarks

    def table(self) -> Table:
        """Return a row for each number of machines."""
        order = self.order
        title = (
            f"{self._model}: {order.graph.n_parameters:,} parameters, batch "
            f"{order.batch}, cluster {order.cluster.name}"
        )
        return report.table([done.forecast for done in self.planned], title=title)

    def plain(self) -> report.Plain:
        """Return all of it as JSON has it."""
        return {
            "model": self._model,
            "parameters": self.order.graph.n_parameters,
            "batch": self.order.batch,
            "cluster": self.order.cluster.name,
            "rows": [report.plain(done.forecast) for done in self.planned],
            "remarks": self.remarks,
        }

    def show(self, console: Console) -> None:
        """Print the table and the remarks."""
        console.print(self.table())
        for remark in self.remarks:
            console.print(f" {remark}", style="dim", markup=False, soft_wrap=True)

    def explain(self, layer: str) -> Table:
        """Return every split of a layer, for the most machines, and why it lost.

        Raises:
            GraphError: there is no such layer.
        """
        return report_module.show_alternatives(self.planned[-1], layer)

    @property
    def plan(self) -> Plan:
        """The plan for the most machines."""
        done = self.planned[-1]
        forecast = done.forecast
        p10, p50, p90 = forecast.seconds
        predicted = Prediction(
            step_seconds=p50,
            p10_seconds=p10,
            p90_seconds=p90,
            bound_seconds=forecast.lower_bound,
            gap=forecast.gap or 0.0,
            solver=forecast.method,
            exact=done.solution.exact,
            costs=self.origin,
        )
        made = plan_for(
            self.order.graph,
            forecast.placements,
            batch=self.order.batch,
            loss=self._loss,
            cluster=self.order.cluster.first(forecast.n_machines),
            predicted=predicted,
        )
        return msgspec.structs.replace(
            made, model=self._model, micro_batches=forecast.micro_batches
        )

    def save(self, path: Path | str) -> None:
        """Write the plan for the most machines.

        Raises:
            StorageError: it cannot be written.
        """
        self.plan.save(path)

    def draw(self, path: Path | str) -> None:
        """Draw that plan, as PNG.

        Raises:
            StorageError: it cannot be written.
        """
        done = self.planned[-1]
        forecast = done.forecast
        crossing: dict[str, int] = {}
        for way in done.price.traffic:
            n_bytes = int(way.n_bytes.sum())
            crossing[way.name] = crossing.get(way.name, 0) + n_bytes
        draw_plan(
            Path(path),
            self.order.graph,
            forecast.placements,
            crossing=crossing,
            title=f"{self._model} on {len(forecast.used)} machines of "
            f"{self.order.cluster.name}: {report.seconds(forecast.median)} a step, "
            f"{forecast.speed_up:.2f}x one machine",
        )

    def trace(self, path: Path | str) -> None:
        """Write a step of that plan as a Chrome trace.

        Raises:
            StorageError: it cannot be written.
        """
        trace = json.dumps(chrome_trace(self.planned[-1].price)).encode()
        files.write(Path(path), trace)

    @override
    def __str__(self) -> str:
        """Write the table and the remarks."""
        console = Console(width=WIDTH, highlight=False, color_system=None)
        with console.capture() as written:
            self.show(console)
        return written.get().rstrip()


def plan(
    model: nn.Module,
    example: torch.Tensor | Sequence[torch.Tensor],
    *,
    loss: str = "",
    machines: int | Sequence[int] = 1,
    cluster: str | Path | Cluster = "rack-10g",
    pins: Mapping[str, str] | None = None,
    exactly: bool = False,
    profile: bool = False,
) -> PlanningResult:
    """Return which machine is to compute what, and how fast that would be.

    With `cluster="here"`, or `profile`, each layer that is unlike others is measured on
    this machine's CPU, once: that may take a minute, and is kept in ~/.cache/distbelief
    for the next time. What is too large for that is left to arithmetic; the last line
    below the table says how many layers are.

    Args:
        model: On any device, the meta device included; nothing of it is changed.
        example: A batch of its input, or of each: (batch, *shape). Of what it holds
            only the shapes matter, and the largest of whole numbers.
        loss: torch's name of the loss, or "one_vs_all"; "" for none.
        machines: How many there may be; a row for each number.
        cluster: A ready-made one's name, the path of a file, or a cluster; or "here":
            machines like this one, whose network nobody has measured. For another
            network give `distbelief.partition.profiling.this_host.here(n, network=...)`.
        pins: Per layer how it must be split: {"conv1": "grid:3x3"}.
        exactly: Use all machines, even if fewer were faster.
        profile: What layers take longer here than by arithmetic, they do on machines of
            the cluster too.

    Raises:
        GraphError: the model cannot be captured, a pin is impossible, the cluster has
            fewer machines.
    """
    check_model(model)
    examples = examples_of(example)
    counts = counts_of(machines)
    check_words(
        loss=loss, cluster=cluster, pins=pins or {}, flags={"exactly": exactly, "profile": profile}
    )
    order = planning_request(
        model,
        [spec_of(x) for x in examples],
        batch=len(examples[0]),
        loss=loss,
        counts=counts,
        cluster=cluster,
        pins=pins or {},
        exactly=exactly,
        profile=profile,
    )
    return planning_result(order, counts, model=type(model).__name__, loss=loss)


def planning_result(
    order: PlanningRequest,
    counts: Sequence[int],
    *,
    model: str,
    loss: str,
    tell: Told = lambda _: None,
) -> PlanningResult:
    """Plan for each number of machines; `tell` is told of each."""
    planned = plan_order(order, counts, tell=tell)
    done = {each.forecast.n_machines for each in planned}
    skipped = sorted(set(counts) - done)
    return PlanningResult(order, planned, model=model, loss=loss, skipped=skipped)


# What `distbelief partition` does: plan, print, and write what was asked for.

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
    verify: Callable[[PlanningResult], Trial] | None = None,
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
        order = planning_request(
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
        report.check(order.graph, layer)
    with console.status("planning") as status:
        outlook = planning_result(
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
    outlook: PlanningResult, verify: Callable[[PlanningResult], Trial] | None, console: Console
) -> Trial | None:
    """Run the plan, if that was asked for."""
    if verify is None:
        return None
    with console.status("running the plan"):
        return verify(outlook)


def _print(
    outlook: PlanningResult, trial: Trial | None, console: Console, *, as_json: bool
) -> None:
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
        rows = report.differences(first, second)
        print(json.dumps(rows))  # noqa: T201 -- what was asked for
    else:
        names = (str(one), str(other))
        _console().print(report.show_differences(first, second, names=names))
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


_INPUT: Final = re.compile(r"(\d+(?:x\d+)*)?(?::(\d+))?")


def input_spec(text: str) -> InputSpec:
    """Return the input that "3x200x200", or "128:30000" for words, means.

    Raises:
        JobError: it means none.
    """
    match = _INPUT.fullmatch(text.strip())
    if match is None or not text.strip():
        raise JobError(
            f"--input {text!r} is no shape: write the extents without the batch, as in "
            "3x200x200; for whole numbers their count behind it, as in 128:30000"
        )
    shape = tuple(int(extent) for extent in (match[1] or "").split("x") if extent)
    if 0 in shape:
        raise JobError(f"--input {text!r} has an extent of 0: use 1 or more")
    return InputSpec(shape=shape, n_values=int(match[2]) if match[2] else None)


def counts(text: str) -> list[int]:
    """Return the numbers that "1,2,4,8" means.

    Raises:
        JobError: it means none.
    """
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 1:
        raise JobError(f"--machines {text!r} are no numbers of machines: write for example 1,2,4,8")
    return found


def pins(texts: Sequence[str]) -> dict[str, str]:
    """Return what "conv1=grid:3x3" pins.

    Raises:
        JobError: it pins nothing.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, split = text.partition("=")
        if not (name and equals and split):
            raise JobError(f"--pin {text!r} pins nothing: write LAYER=SPLIT, as in conv1=grid:3x3")
        if found.setdefault(name, split) != split:
            raise JobError(f"--pin pins {name!r} twice: {found[name]} and {split}")
    return found
