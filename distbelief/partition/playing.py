"""Plans played through: what each would come to, under the same luck for all.

A planner looks at many plans that differ in a layer or two. What is alike in them is
worked out once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from distbelief.graph.layer import LayerGraph
from distbelief.partition.jitter import Jitter
from distbelief.program.cluster import Cluster
from distbelief.program.compilation import Known, compile_plan
from distbelief.program.placement import Placement
from distbelief.program.pricing import Costs, Price, price


@final
@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to place all layers.

    Attributes:
        method: Who found it.
        placements: Of every layer but inputs.
        price: How it was played through.
        seconds: Of a step; quantiles over draws of the jitter.
        overrun: By what share the fullest machine exceeds its memory; 0 if none does.
        model_seconds: What it costs in the solver's model, if that knows it.
    """

    method: str
    placements: Mapping[str, Placement]
    price: Price
    seconds: tuple[float, float, float]
    overrun: float
    model_seconds: float | None = None

    @property
    def micro_batches(self) -> int:
        """Into how many parts the batch is cut."""
        return self.price.micro_batches

    @property
    def penalised(self) -> float:
        """The median, much longer if memory is short: what a search makes small."""
        return self.seconds[1] * (1.0 + 1e3 * self.overrun)

    @property
    def rank(self) -> tuple[float, float]:
        """What ways are sorted by, the best first."""
        return (self.overrun, self.seconds[1])


@final
class Player:
    """Plays plans of one graph through.

    Args:
        graph: With its loss, if it is to be trained.
        cluster: All machines.
        batch: Samples of a step.
        costs: Of computing.
        costs_for: Costs with so many samples, for micro-batches.
    """

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        *,
        batch: int,
        costs: Costs,
        costs_for: Callable[[int], Costs] | None = None,
    ) -> None:
        self._graph = graph
        self._cluster = cluster
        self._batch = batch
        self._costs = {1: costs}
        self._costs_for = costs_for
        self._known: dict[int, Known] = {}
        self._jitter = Jitter(graph, cluster)

    def price(
        self, placements: Mapping[str, Placement], *, n_machines: int, micro_batches: int = 1
    ) -> Price:
        """Return the price of a plan on the first machines."""
        if micro_batches not in self._costs:
            assert self._costs_for is not None
            self._costs[micro_batches] = self._costs_for(self._batch // micro_batches)
        if micro_batches not in self._known:
            # Nobody searches among plans in several parts: there is one of each.
            self._known[micro_batches] = Known(self._graph, n_plans=4 if micro_batches == 1 else 1)
        compiled = compile_plan(
            self._graph,
            placements,
            batch=self._batch // micro_batches,
            n_machines=n_machines,
            known=self._known[micro_batches],
        )
        return price(
            compiled,
            self._cluster.first(n_machines),
            self._costs[micro_batches],
            micro_batches=micro_batches,
        )

    def way(
        self,
        method: str,
        placements: Mapping[str, Placement],
        *,
        n_machines: int,
        micro_batches: int = 1,
    ) -> Way:
        """Return a plan played through on the first machines."""
        done = self.price(placements, n_machines=n_machines, micro_batches=micro_batches)
        p10, p50, p90 = self._jitter.quantiles(done)
        caps = [machine.memory for machine in self._cluster.machines[:n_machines]]
        return Way(
            method=method,
            placements=placements,
            price=done,
            seconds=(p10, p50, p90),
            overrun=overrun(done, caps),
        )


def overrun(done: Price, caps: Sequence[float]) -> float:
    """Return by what share the fullest machine exceeds its memory; 0 if it fits."""
    used = zip(done.memory_bytes, caps, strict=True)
    return max(0.0, *(n_bytes / cap - 1.0 for n_bytes, cap in used))
