"""Cost models: seconds that a machine computes a region of a layer.

AnalyticCosts       a roofline with the figures of the cluster (Williams et al. 2009)
ProfiledCosts       times measured on this host, scaled to other machines
Variance            quantiles of a step, because machines vary

What messages cost is in `plans.step_simulator`, and for the solvers in `cost_tables`.
"""

from collections.abc import Mapping, Sequence
from typing import Final, final

import numpy as np

from distbelief.graph.graph import INPUT, Layer, LayerGraph
from distbelief.graph.operator import joined
from distbelief.graph.region import Region
from distbelief.plans.cluster import Cluster, FloatArray, Machine
from distbelief.plans.planner.candidates import summed_dims
from distbelief.plans.planner.profile import INPUTS, SAMPLES, WHOLE, Profile, Slices, digest
from distbelief.plans.step_cost import Passes, StepCost
from distbelief.plans.tasks import rule_of, work_of


# --- by arithmetic ---

N_BYTES: Final = 4  # per number


def single_sample(graph: LayerGraph) -> frozenset[str]:
    """Return the layers that read only statistics: they compute one sample."""
    single = joined(graph)
    return frozenset(name for name in single if single.issuperset(graph[name].inputs))


@final
class AnalyticCosts:
    """Costs by arithmetic.

        seconds = overhead + max(operations / flops, bytes / memory rate)

    `single` names the layers with one sample, see `single_sample`.
    """

    def __init__(
        self, cluster: Cluster, *, batch: int, single: frozenset[str] = frozenset()
    ) -> None:
        self.batch = batch
        self._cluster = cluster
        self._machines = cluster.machines
        # Equal machines share the index of the first: it is a quicker key than the machine.
        self._first = [cluster.machines.index(machine) for machine in cluster.machines]
        self._single = single
        self._known: dict[tuple[bytes, Region, int, bool, bool], Passes] = {}

    def with_batch(self, n_samples: int) -> "AnalyticCosts":
        return AnalyticCosts(self._cluster, batch=n_samples, single=self._single)

    def passes(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> Passes:
        first, single = self._first[machine], layer.name in self._single
        key = (layer.signature, region, first, partial, single)
        if key not in self._known:
            n_samples = 1 if single else self.batch
            self._known[key] = _roofline(
                layer, region, self._machines[first], n_samples, partial=partial
            )
        return self._known[key]


def _roofline(
    layer: Layer, region: Region, machine: Machine, n_samples: int, *, partial: bool
) -> Passes:
    if layer.kind == INPUT or not region.n_elements:
        return Passes(0.0, 0.0)
    work = work_of(layer, region, partial=partial)
    # A tensor that several layers use counts for each of them.
    tensors, trained = 0, 0
    for argument, part in rule_of(layer, partial=partial).uses(layer, region).items():
        tensors += N_BYTES * part.n_elements
        trained += N_BYTES * part.n_elements if layer.tensors[argument].trains else 0
    n_bytes = N_BYTES * work.n_elements * n_samples
    # Backward reads values again, and reads and writes gradients: twice the traffic.
    seconds = (
        machine.overhead + max(operations * n_samples / machine.flops, moved / machine.memory_rate)
        for operations, moved in (
            (work.forward, n_bytes + float(tensors)),
            (work.backward, 2 * n_bytes + float(tensors) + float(trained)),
        )
    )
    return Passes(*seconds)


# --- variance ---

N_DRAWS: Final = 100
QUANTILES: Final = (0.1, 0.5, 0.9)

_BACKWARD: Final = frozenset({"backward", "partial_backward"})
_N_TOGETHER: Final = 64  # phases whose draws fit in a cache


@final
class Variance:
    """Quantiles of a step under variance of the machines.

    "The typical cause of less-than-ideal speedups is variance in processing times across the
    different machines, leading to many machines waiting for the single slowest machine to finish a
    given phase of computation" (Dean et al. 2012, section 3). So the times of each layer are
    multiplied by draws per machine, and each phase waits for its slowest machine. The draws depend
    on machine and layer only: all plans are compared with the same draws.
    """

    def __init__(self, graph: LayerGraph, cluster: Cluster, *, seed: int = 0) -> None:
        self._layers = {layer.name: index for index, layer in enumerate(graph.layers)}
        self._sigmas = np.array([machine.jitter for machine in cluster.machines])
        self._seed = seed
        self._drawn: tuple[int, FloatArray] = (0, np.empty(0))

    def quantiles(
        self, step_cost: StepCost, quantiles: Sequence[float] = QUANTILES
    ) -> tuple[float, ...]:
        tasks, n_machines = step_cost.tasks, step_cost.compiled.n_machines
        durations = (step_cost.simulated.ends - step_cost.simulated.starts)[: len(tasks)]
        # Seconds by phase and machine: one draw for all regions of a layer on a machine.
        phases = [2 * self._layers[task.layer] + (task.phase in _BACKWARD) for task in tasks]
        cells = np.array(phases) * n_machines + [task.machine for task in tasks]
        n_phases = 2 * len(self._layers)
        totals = np.bincount(cells, durations, minlength=n_phases * n_machines)
        seconds = totals.reshape(n_phases, n_machines, 1)
        factors = self._factors(n_machines)
        # Only what the draws add to phases, as if they followed each other, is added to the step.
        step = np.full(N_DRAWS, step_cost.step_seconds)
        for first in range(0, n_phases, _N_TOGETHER):
            part = seconds[first : first + _N_TOGETHER]
            slowest = (factors[first : first + _N_TOGETHER] * part).max(axis=1)
            step += (slowest - part.max(axis=1)).sum(axis=0)
        return tuple(float(q) for q in np.quantile(step, quantiles))

    def _factors(self, n_machines: int) -> FloatArray:
        # The draws of each phase: (2 * n_layers, n_machines, N_DRAWS).
        if self._drawn[0] != n_machines:
            generators = [
                np.random.default_rng((self._seed, layer, backward))
                for layer in range(len(self._layers))
                for backward in (0, 1)
            ]
            # One row per machine: fewer machines have the first rows of more.
            size = (n_machines, N_DRAWS // 2)
            half = np.array([generator.standard_normal(size) for generator in generators])
            # Antithetic, with a median of 1: a machine does not become slower by itself, a step
            # does because it waits for the slowest machine.
            both = np.concatenate([half, -half], axis=2)
            self._drawn = (n_machines, np.exp(self._sigmas[:n_machines, np.newaxis] * both))
        return self._drawn[1]


# --- measured ---


@final
class ProfiledCosts:
    """Measured costs; by arithmetic where nothing has been measured.

    `machines` are costs by arithmetic; `host` are those of the measured host if the machines are
    others, for which measured / arithmetic is the same. `slower` is how much slower the host is now
    than when it was measured. `part` are costs by arithmetic of fewer samples than were measured:
    the share of the time that a whole layer takes with them holds for its slices too.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        machines: AnalyticCosts,
        host: AnalyticCosts | None = None,
        slower: float = 1.0,
        part: AnalyticCosts | None = None,
    ) -> None:
        self.profile = profile
        self.slower = slower
        self.is_absolute = host is None
        self.machines = machines
        self._host = host
        self._part = part
        self._digests: dict[bytes, str] = {}
        self._known: dict[tuple[bytes, Region, int, bool], Passes] = {}

    def passes(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> Passes:
        taken = self._passes(layer, region, machine, partial=partial)
        if self._part is None:
            return taken
        samples = self._slices(layer).get(SAMPLES)
        if samples is not None:
            shares = _shares(samples, self._part.batch, self.machines.batch)
            return Passes(taken.forward * shares[0], taken.backward * shares[1])
        # A layer that takes twice as long as by arithmetic does so with fewer samples too:
        # arithmetic gives the share of fewer samples, the measurement the factor.
        part, batch = (
            costs.passes(layer, region, machine, partial=partial)
            for costs in (self._part, self.machines)
        )
        times = zip(taken, part, batch, strict=True)
        return Passes(*(t * fewer / whole if whole else t for t, fewer, whole in times))

    def _passes(self, layer: Layer, region: Region, machine: int, *, partial: bool) -> Passes:
        if not self.knows(layer) or not region.n_elements:
            return self.machines.passes(layer, region, machine, partial=partial)
        key = (layer.signature, region, machine, partial)
        if key not in self._known:
            taken = self._scaled(layer, region, machine, partial=partial)
            of = Region.of(*layer.input_shapes[0]) if partial else layer.region
            if partial or region != of:
                whole = self._passes(layer, layer.region, machine, partial=False)
                # Never less than its share of the whole: a measurement may be less by chance, or
                # because it fits a cache, and then no lower bound would hold.
                share = region.n_elements / of.n_elements
                taken = Passes(*(max(t, share * w) for t, w in zip(taken, whole, strict=True)))
            self._known[key] = taken
        return self._known[key]

    def with_batch(self, n_samples: int) -> "ProfiledCosts":
        return ProfiledCosts(
            self.profile,
            machines=self.machines,
            host=self._host,
            slower=self.slower,
            part=self.machines.with_batch(n_samples),
        )

    def knows(self, layer: Layer) -> bool:
        return WHOLE in self._slices(layer)

    def _scaled(self, layer: Layer, region: Region, machine: int, *, partial: bool) -> Passes:
        # The measured times, as they would be on that machine.
        measured = self._measured(layer, region, partial=partial)
        if self._host is None:
            return measured
        there = self.machines.passes(layer, region, machine, partial=partial)
        here = self._host.passes(layer, region, 0, partial=partial)
        times = zip(measured, there, here, strict=True)
        return Passes(*(taken * (t / max(h, 1e-300)) for taken, t, h in times))

    def _measured(self, layer: Layer, region: Region, *, partial: bool) -> Passes:
        slices = self._slices(layer)
        of = layer.input_shapes[0] if partial else layer.shape
        summed = summed_dims(layer)[:1] if partial else ()
        base = slices.get(INPUTS, slices[WHOLE]) if partial else slices[WHOLE]
        forward, backward = base.forward[-1], base.backward[-1]
        # Cut along several dimensions: the product of the shares along each.
        for dim, (extent, whole) in enumerate(zip(region.shape, of, strict=True)):
            if extent < whole:
                key = INPUTS if dim in summed else str(dim)
                shares = _shares(slices.get(key), extent, whole)
                forward, backward = forward * shares[0], backward * shares[1]
        return Passes(forward, backward)

    def _slices(self, layer: Layer) -> Mapping[str, Slices]:
        signature = layer.signature
        if signature not in self._digests:
            self._digests[signature] = digest(signature, batch=self.machines.batch)
        return self.profile.layers.get(self._digests[signature], {})


def _shares(slices: Slices | None, extent: int, whole: int) -> tuple[float, float]:
    # A slice smaller than the smallest measured one takes the time of that one.
    if slices is None:
        return extent / whole, extent / whole
    forward, backward = (
        float(np.interp(extent, slices.extents, seconds)) / seconds[-1] if seconds[-1] else 0.0
        for seconds in (slices.forward, slices.backward)
    )
    return forward, backward
