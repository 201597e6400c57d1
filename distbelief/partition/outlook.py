"""What machines would buy for a model: the planner's answer, to print, keep or draw.

outlook = distbelief.plan(net, torch.zeros(64, 3, 32, 32), loss="cross_entropy",
                          machines=(1, 2, 4), cluster="rack-1g")
print(outlook)
outlook.save("plan.json")

The cluster "here" is of machines like this one, whose layers are measured.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from typing_extensions import override

from distbelief import files
from distbelief.partition.arguments import check_model, check_words, counts_of, examples_of, spec_of
from distbelief.partition.ordering import order_of
from distbelief.partition.planning import Order, Planned, Told, plan as plan_order
from distbelief.partition.reports import explaining, origin, report
from distbelief.partition.reports.picture import draw_plan
from distbelief.program.cluster import Cluster
from distbelief.program.plan import Plan, Prediction, plan_for
from distbelief.program.timeline import chrome_trace


WIDTH: Final = 130
"""Characters of a line, where no terminal says how many it has."""


@final
class Outlook:
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
        order: Order,
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
        return origin.origin(self.order)

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
        return explaining.show(self.planned[-1], layer)

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
) -> Outlook:
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
            network give `distbelief.partition.profiling.host.here(n, network=...)`.
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
    order = order_of(
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
    return outlook_of(order, counts, model=type(model).__name__, loss=loss)


def outlook_of(
    order: Order, counts: Sequence[int], *, model: str, loss: str, tell: Told = lambda _: None
) -> Outlook:
    """Plan for each number of machines; `tell` is told of each."""
    planned = plan_order(order, counts, tell=tell)
    done = {each.forecast.n_machines for each in planned}
    skipped = sorted(set(counts) - done)
    return Outlook(order, planned, model=model, loss=loss, skipped=skipped)
