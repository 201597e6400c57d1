"""The planner's API: `distbelief.plan` and the command `distbelief partition`.

    result = distbelief.plan(net, torch.zeros(64, 3, 32, 32), loss="cross_entropy",
                             machines=(1, 2, 4), cluster="rack-1g")
    print(result)
    result.save("plan.json")

All arguments are checked before anything that takes long. The cluster "here" has machines like this
one, whose layers are measured.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from typing_extensions import override

from distbelief.core import files, notebook
from distbelief.core.arguments import checked
from distbelief.core.drawing import plot
from distbelief.core.errors import JobError
from distbelief.core.frames import frame
from distbelief.graph.capture import InputSpec
from distbelief.graph.graph import GraphError
from distbelief.plans.cluster import Cluster
from distbelief.plans.plan import Plan, Prediction, plan_for
from distbelief.plans.planner import plan_report
from distbelief.plans.planner.plan_picture import draw_plan
from distbelief.plans.planner.planner import Planned, Request, plan as make_plans, planning_request
from distbelief.plans.planner.search import Notify, PlanningRequest
from distbelief.plans.step_cost import chrome_trace


if TYPE_CHECKING:
    from matplotlib.figure import Figure


# --- arguments of `distbelief.plan` ---


def examples_of(example: object) -> list[torch.Tensor]:
    """Return an example of each input, all with the same batch size.

    GraphError if `example` is no tensor and no sequence of tensors, or its shapes are wrong.
    """
    found = [example] if isinstance(example, torch.Tensor) else example
    if isinstance(found, Mapping):
        found = list(found.values())
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        raise _wrong("example", example, "give a tensor (batch, *shape), or one per input")
    for tensor in found:
        if not isinstance(tensor, torch.Tensor):
            fix = "give a tensor (batch, *shape), for example by torch.as_tensor"
            raise _wrong("the example of an input", tensor, fix)
        if tensor.is_complex() or tensor.is_quantized:
            raise GraphError(
                f"the example of an input has dtype {tensor.dtype}: give floating point "
                "numbers or integers"
            )
    shapes = [list(tensor.shape) for tensor in found]
    if len({tuple(shape[:1]) for shape in shapes}) != 1 or not shapes[0]:
        raise GraphError(
            f"example has shapes {shapes}: give a tensor (batch, *shape), or one per input, "
            "all with the same batch"
        )
    if any(0 in shape for shape in shapes):
        raise GraphError(f"example has an extent of 0: {shapes}: use 1 or more")
    return list(found)


def spec_of(example: torch.Tensor) -> InputSpec:
    n_values = None
    if not example.is_floating_point():
        n_values = int(example.max()) + 1 if not example.is_meta else 1
    is_mask = example.dtype == torch.bool
    return InputSpec(shape=tuple(example.shape[1:]), n_values=n_values, is_mask=is_mask)


def counts_of(machines: object) -> list[int]:
    """Return the numbers of machines; raise GraphError if `machines` has no such type."""
    found = (machines,) if isinstance(machines, int) else machines
    # `type`, not isinstance: True is an int too.
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        found = (None,)
    if any(type(n) is not int for n in found):
        fix = "give a number, such as 8, or several, such as (1, 2, 4, 8)"
        raise _wrong("machines", machines, fix)
    return list(found)


def _check_types(*, pins: object, **given: object) -> None:
    a_flag, a_cluster = "give True or False", "a name, such as 'rack-10g', the path of a file"
    for name, kind, fix in (
        ("model", nn.Module, "give a torch.nn.Module, which may be on the meta device"),
        ("loss", str, "give its name, such as 'cross_entropy', or '' for none"),
        ("cluster", (str, Path, Cluster), f"give {a_cluster}, or a Cluster"),
        ("exactly", bool, a_flag),
        ("profile", bool, a_flag),
    ):
        if not isinstance(given[name], kind):
            raise _wrong(name, given[name], fix)
    if not isinstance(pins, Mapping) or not all(
        isinstance(word, str) for pair in pins.items() for word in pair
    ):
        raise _wrong("pins", pins, "give a split per layer, such as {'conv1': 'grid:3x3'}")


def _wrong(name: str, value: object, fix: str) -> GraphError:
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return GraphError(f"{name} is {text} ({type(value).__name__}): {fix}")


# --- planning result ---


@final
@dataclass(frozen=True, repr=False)
class PlanningResult:
    """Plans for several numbers of machines, in ascending order.

    `rows()`: of each its machines, those used, step_seconds (p10, p50, p90), speed_up over one
    machine, efficiency (that over the machines used), the shares of their time compute,
    communication, sync and wait (0 to 1), memory_bytes of each machine, fits, the offenders
    (machines that lack memory), lower_bound_seconds of any plan, in_model_gap (how far it may be
    from the best of the candidates; 0.1 is 10 %), its limit in words, the method that found it,
    and bytes that cross in a step.
    """

    request: PlanningRequest  # what was asked for
    planned: Sequence[Planned]  # a plan and its cost for each number of machines
    skipped: Sequence[int] = ()  # numbers of machines for which pins allow no plan

    @property
    def fits(self) -> bool:
        """Whether the plan for the most machines fits into their memory."""
        return not self.planned[-1].lacking

    @property
    def remarks(self) -> list[str]:
        """The sentences below the table."""
        remarks = plan_report.remarks(self.planned, self.request)
        if self.skipped:
            counts = ", ".join(map(str, self.skipped))
            remarks.insert(0, f"{counts} machines: left out, a pin needs more")
        return remarks

    def table(self, width: int = plan_report.WIDTH) -> Table:
        """Return the rows as a table, with the columns that fit in `width` characters."""
        request = self.request
        title = (
            f"{request.model}: {request.graph.n_parameters:,} parameters, batch "
            f"{request.batch}, cluster {request.cluster.name}"
        )
        return plan_report.table(self.planned, title=title, width=width)

    @override
    def __repr__(self) -> str:
        plans = (f"{one.n_machines}: {plan_report.seconds(one.median)}" for one in self.planned)
        return f"<PlanningResult {self.request.model}, a step on machines {', '.join(plans)}>"

    def rows(self) -> list[plan_report.Plain]:
        """Return a row for each number of machines."""
        return [plan_report.plain(one) for one in self.planned]

    def to_pandas(self) -> object:
        """Return `rows` as a pandas.DataFrame; JobError without pandas."""
        return frame(self.rows())

    def plot(self) -> "Figure":
        """Return a matplotlib figure: seconds of a step over the numbers of machines.

        Beside the median and its quantiles stands what one machine takes, divided by their number.
        `draw` draws the plan itself.
        """
        quantiles = enumerate(("10 %", "median", "90 %"))
        curves = {
            name: [(float(one.n_machines), one.best.seconds[k]) for one in self.planned]
            for k, name in quantiles
        }
        curves["one machine's, divided by their number"] = [
            (float(one.n_machines), one.one_machine_seconds / one.n_machines)
            for one in self.planned
        ]
        last = self.planned[-1]
        title = (
            f"{self.request.model} on {self.request.cluster.name}: {last.speed_up:.2f}x on "
            f"{last.n_machines} machines"
        )
        return plot(curves, x="machines", y="seconds of a step", title=title, repeats=True)

    def plain(self) -> plan_report.Plain:
        """Return what `distbelief partition --json` prints."""
        return {
            "model": self.request.model,
            "parameters": self.request.graph.n_parameters,
            "batch": self.request.batch,
            "cluster": self.request.cluster.name,
            "rows": self.rows(),
            "remarks": self.remarks,
        }

    def show(self, console: Console) -> None:
        """Print the table and the remarks."""
        shown = self.table(console.width)
        console.print(shown)
        meanings = plan_report.MEANINGS
        heads = [str(column.header) for column in shown.columns]
        told = "; ".join(f"{name}: {meanings[name]}" for name in heads if name in meanings)
        console.print(f" {told}", style="dim")
        for remark in self.remarks:
            # In a pipe a remark is one line, however long.
            console.print(
                f" {remark}", style="dim", markup=False, soft_wrap=not console.is_terminal
            )

    def _repr_html_(self) -> str:
        return notebook.html(self.show)

    def explain(self, layer: str) -> Table:
        """Return every split of a layer, for the most machines, and why it was not chosen.

        GraphError if there is no such layer.
        """
        return plan_report.show_alternatives(self.planned[-1], layer)

    @property
    def plan(self) -> Plan:
        """The plan for the most machines."""
        request, done = self.request, self.planned[-1]
        p10, p50, p90 = done.best.seconds
        predicted = Prediction(
            step_seconds=p50,
            p10_seconds=p10,
            p90_seconds=p90,
            bound_seconds=done.lower_bound,
            gap=done.gap or 0.0,
            solver=done.best.method,
            exact=done.solved.solution.exact,
            costs=plan_report.costs_of(request),
        )
        return plan_for(
            request.graph,
            done.best.placements,
            batch=request.batch,
            loss=request.loss,
            cluster=done.cluster,
            predicted=predicted,
            model=request.model,
            micro_batches=done.best.cost.micro_batches,
        )

    def save(self, path: Path | str) -> None:
        """Write the plan for the most machines; raise StorageError on failure."""
        self.plan.save(path)

    def draw(self, path: Path | str) -> None:
        """Draw the plan for the most machines as PNG; raise StorageError on failure."""
        done = self.planned[-1]
        draw_plan(
            Path(path),
            self.request.graph,
            done.best.placements,
            traffic=done.best.cost.traffic,
            title=f"{self.request.model} on {len(done.used)} machines of "
            f"{self.request.cluster.name}: {plan_report.seconds(done.median)} a step, "
            f"{done.speed_up:.2f}x one machine",
        )

    def trace(self, path: Path | str) -> None:
        """Write the Chrome trace of a step; raise StorageError on failure."""
        files.write(Path(path), json.dumps(chrome_trace(self.planned[-1].best.cost)).encode())

    @override
    def __str__(self) -> str:
        console = Console(width=plan_report.WIDTH, highlight=False, color_system=None)
        with console.capture() as written:
            self.show(console)
        return written.get().rstrip()


@checked("plan", {"partitions": "it is machines", "batch_size": "it is that of the example"})
def plan(
    model: nn.Module,
    example: torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor],
    *,
    loss: str = "",
    machines: int | Sequence[int] = 1,
    cluster: str | Path | Cluster = "rack-10g",
    pins: Mapping[str, str] | None = None,
    exactly: bool = False,
    profile: bool = False,
) -> PlanningResult:
    """Split a model over machines and estimate how fast a training step is.

    With `cluster="here"` or `profile`, each distinct layer is measured on this machine's CPU, once.
    That may take a minute; the times are kept in ~/.cache/distbelief. Layers that are too large to
    measure are estimated by arithmetic; the last line below the table says how many.

    Args:
        model: On any device, the meta device included; it is not changed.
        example: A batch of its input, or of each input, in order or by keyword: (batch, *shape).
            Only the shapes count, and the largest value of integers.
        loss: torch's name of the loss, or "one_vs_all"; "model" for the one that it returns; the
            import path of f(outputs, batch), of a batch by keyword; "" for none.
        machines: The number of machines, or several numbers; a row for each.
        cluster: The name of a cluster of this package, the path of a file, or a cluster; or "here":
            machines like this one, with an assumed network. For another network give
            `distbelief.plans.planner.profiling.this_host.here(n, network=...)`.
        pins: Per layer, a required split: {"conv1": "grid:3x3"}.
        exactly: Use all machines, even if fewer were faster.
        profile: Scale the cluster's layer times by measured / estimated time on this machine.

    GraphError if the model cannot be captured, a pin is impossible, or the cluster has fewer
    machines.
    """
    pins = pins or {}
    _check_types(
        model=model, loss=loss, cluster=cluster, pins=pins, exactly=exactly, profile=profile
    )
    examples = examples_of(example)
    asked = Request(
        model=type(model).__name__,
        inputs=(
            {name: spec_of(x) for name, x in example.items()}
            if isinstance(example, Mapping)
            else [spec_of(x) for x in examples]
        ),
        batch=len(examples[0]),
        loss=loss,
        counts=counts_of(machines),
        cluster=cluster,
        pins=pins,
        exactly=exactly,
        profile=profile,
    )
    return planning_result(planning_request(model, asked), asked.counts)


def planning_result(
    request: PlanningRequest, counts: Sequence[int], *, notify: Notify = lambda _: None
) -> PlanningResult:
    """Plan for each number of machines, ascending."""
    planned = make_plans(request, counts, notify=notify)
    skipped = sorted(set(counts) - {each.n_machines for each in planned})  # pins need more machines
    return PlanningResult(request, tuple(planned), skipped)


def pins(texts: Sequence[str]) -> dict[str, str]:
    """Return the pins in texts like "conv1=grid:3x3"; raise JobError if one is wrong."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, split = text.partition("=")
        if not (name and equals and split):
            raise JobError(f"--pin {text!r} pins nothing: write LAYER=SPLIT, like conv1=grid:3x3")
        if found.setdefault(name, split) != split:
            raise JobError(f"--pin pins {name!r} twice: {found[name]} and {split}: give one")
    return found
