"""What `distbelief partition` does: plan, print, and write what was asked for."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import msgspec
import torch
from rich.console import Console
from torch import nn

from distbelief import files
from distbelief.graph.capture import InputSpec, capture
from distbelief.graph.layer import GraphError, LayerGraph
from distbelief.graph.losses import append_loss
from distbelief.partition import differing, explaining, report
from distbelief.partition.costs import AnalyticCosts, single_sample
from distbelief.partition.picture import draw_plan
from distbelief.partition.planning import Order, Planned, plan
from distbelief.program.cluster_file import load_cluster
from distbelief.program.plan import Plan, Prediction, load, plan_for
from distbelief.program.timeline import chrome_trace


DEFAULT_CLUSTER: Final = "rack-10g"
WIDTH: Final = 120


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
        cluster: A ready-made cluster's name, or the path of a file.
        pins: Per layer its split.
        exactly: Use all machines of each count.
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
    explain: Sequence[str] = ()
    out: Path | None = None
    picture: Path | None = None
    timeline: Path | None = None
    as_json: bool = False


def run(request: Request, make: Callable[[], object]) -> bool:
    """Plan and print; return whether the plan for the most machines fits.

    Args:
        request: What is asked.
        make: Makes the model; called on the meta device, so that it has no memory.

    Raises:
        GraphError: the model cannot be captured, a pin is impossible, a count too high.
        StorageError: a file cannot be written.
    """
    console = _console(stderr=request.as_json)
    with console.status("capturing the model"):
        graph = _graph(request, make)
        cluster = load_cluster(request.cluster)
    costs = AnalyticCosts(cluster, batch=request.batch, single=single_sample(graph))
    order = Order(
        graph=graph,
        cluster=cluster,
        batch=request.batch,
        costs=costs,
        pins=request.pins,
        exactly=request.exactly,
    )
    with console.status("planning") as status:
        planned = plan(
            order, request.counts, tell=lambda what: status.update(f"planning: {what}")
        )
    origin = (
        f"Costs: {cluster.origin} figures of cluster {cluster.name!r}, no measured "
        f"layer. {cluster.note}"
    )
    _print(request, order, planned, console, origin=origin)
    _write(request, order, planned[-1], origin=origin)
    return planned[-1].forecast.fits


def compare(one: Path, other: Path, *, as_json: bool) -> bool:
    """Print where two plan files differ; return whether they do not.

    Raises:
        GraphError: one of them is no plan.
    """
    first, second = load(one), load(other)
    if as_json:
        rows = differing.differences(first, second)
        print(json.dumps(rows))  # noqa: T201 -- what was asked for
    else:
        names = (str(one), str(other))
        _console().print(differing.show(first, second, names=names))
    return first == second


def _console(*, stderr: bool = False) -> Console:
    """Return a console; where no terminal says how wide it is, one wide enough."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def _graph(request: Request, make: Callable[[], object]) -> LayerGraph:
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise GraphError(
            f"{request.model} returns a {type(model).__name__}; it is to return a "
            "torch.nn.Module"
        )
    graph = capture(model, request.inputs)
    return append_loss(graph, request.loss) if request.loss else graph


def _print(
    request: Request,
    order: Order,
    planned: Sequence[Planned],
    console: Console,
    *,
    origin: str,
) -> None:
    forecasts = [done.forecast for done in planned]
    graph = order.graph
    whole = [(layer.name, layer.whole) for layer in graph.layers if layer.whole]
    remarks = report.remarks(
        forecasts,
        caps=[machine.memory for machine in order.cluster.machines],
        whole=whole,
        origin=origin,
    )
    if request.as_json:
        content = {
            "model": request.model,
            "parameters": graph.n_parameters,
            "batch": order.batch,
            "cluster": order.cluster.name,
            "rows": [report.plain(forecast) for forecast in forecasts],
            "remarks": remarks,
        }
        print(json.dumps(content))  # noqa: T201 -- what was asked for
        return
    title = (
        f"{request.model}: {graph.n_parameters:,} parameters, batch {order.batch}, "
        f"cluster {order.cluster.name}"
    )
    console.print(report.table(forecasts, title=title))
    for remark in remarks:
        console.print(f" {remark}", style="dim", markup=False, soft_wrap=True)
    for name in request.explain:
        console.print(explaining.show(planned[-1], name))


def _write(request: Request, order: Order, done: Planned, *, origin: str) -> None:
    forecast = done.forecast
    if request.out is not None:
        _plan_file(request, order, done, origin=origin).save(request.out)
    if request.timeline is not None:
        trace = json.dumps(chrome_trace(done.price)).encode()
        files.write(request.timeline, trace)
    if request.picture is not None:
        crossing: dict[str, int] = {}
        for way in done.price.compiled.traffic:
            n_bytes = int(way.n_bytes.sum())
            crossing[way.name] = crossing.get(way.name, 0) + n_bytes
        draw_plan(
            request.picture,
            order.graph,
            forecast.placements,
            crossing=crossing,
            title=f"{request.model} on {len(forecast.used)} machines of "
            f"{order.cluster.name}: {report.seconds(forecast.median)} a step, "
            f"{forecast.speed_up:.2f}x one machine",
        )


def _plan_file(request: Request, order: Order, done: Planned, *, origin: str) -> Plan:
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
        costs=origin,
    )
    made = plan_for(
        order.graph,
        forecast.placements,
        batch=order.batch,
        loss=request.loss,
        cluster=order.cluster.first(forecast.n_machines),
        predicted=predicted,
    )
    return msgspec.structs.replace(made, model=request.model)
