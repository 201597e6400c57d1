"""Times layers on this host: each distinct layer, whole, in slices, and with fewer samples.

The most expensive layers come first; when time is up, the rest is left to arithmetic, and so are
layers that are too large, or fail.

Each layer is measured twice, some time apart; if a slice differs by more than a tenth, up to four
times. The median counts, not the minimum: a machine that is disturbed now and then is so in
training too. One slice measured at twice its time is enough for a plan that avoids it, and is 10 %
slower.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Final, final

import torch
from torch import nn

from distbelief.core.memory import keep_memory
from distbelief.graph.graph import Layer, LayerGraph
from distbelief.graph.operator import Call, Operator, PartialSums, Step, joined, operator_of
from distbelief.graph.region import Region
from distbelief.plans.compiler import with_gradient
from distbelief.plans.planner.candidates import cuts_of, summed_dims
from distbelief.plans.planner.cost_model import N_BYTES
from distbelief.plans.planner.profile import (
    INPUTS,
    SAMPLES,
    WHOLE,
    Profile,
    Slices,
    add,
    digest,
    load,
    this_host,
)
from distbelief.plans.step_cost import Passes
from distbelief.plans.tasks import work_of


# --- timing ---

N_RUNS: Final = 3
_N_PARTS: Final = (2, 4, 8, 16, 32, 64)
_N_MICRO_BATCHES: Final = (8, 4, 2)
# A slice that takes longer runs once after warming up: it is measured again later anyway.
_SECONDS_ENOUGH: Final = 0.1

_SHARE_MAX: Final = 0.25  # of the total time, for one layer


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    seconds: float = 60.0  # when to stop
    n_runs: int = N_RUNS  # runs per median, in each pass
    clock: Callable[[], float] = field(default=time.perf_counter)  # seconds
    timer: Callable[[], float] | None = None  # seconds of a measurement; None: `clock`


def busy_seconds() -> float:
    # With one thread the processor time: it excludes the time of other programs.
    is_one = torch.get_num_threads() == 1
    return time.thread_time() if is_one else time.perf_counter()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Enable gradients whatever the caller has set, and keep memory as training processes do."""
    # Memory returned to the system is faulted in again: as slow as computing a large gradient.
    keep_memory()
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield


_Given = tuple[list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]


@final
class Bench:
    """Times layers of one graph, on random numbers.

    A time is the median of a few runs after a warm-up run; one run is enough if it takes long.
    """

    def __init__(
        self, graph: LayerGraph, batch: int, modules: Mapping[str, nn.Module], limits: Limits
    ) -> None:
        self._graph = graph
        self._batch = batch
        self._step = Step(training=True, modules=modules)
        self._limits = limits
        self._deadline = limits.clock() + limits.seconds
        self._joined = joined(graph)
        self._backward = with_gradient(graph)
        self._generator = torch.Generator("cpu").manual_seed(0)

    @property
    def is_late(self) -> bool:
        return self._limits.clock() >= self._deadline

    def ready(self, layer: Layer) -> Callable[[], Passes]:
        """Return a function that runs and times a whole layer once, without a warm-up run."""
        kind = operator_of(layer)
        given = self._given(kind, layer, layer.region, self._batch)
        return lambda: self._once(kind, layer, layer.region, given)

    def slices(self, layer: Layer) -> dict[str, dict[int, Passes]]:
        """Return the times of a layer along each dimension, by extent.

        The whole is always there; dimensions for which time is up are left out, so that a layer
        that takes long is not started again and again.
        """
        limits = self._limits
        until = min(self._deadline, limits.clock() + limits.seconds * _SHARE_MAX)
        whole = self._time(operator_of(layer), layer, layer.region, self._batch)
        found = {WHOLE: {1: whole}}
        for key, rule, slices in _cuts(layer, self._batch):
            rows: dict[int, Passes] = {}
            for extent, region, n_samples in slices:
                if limits.clock() >= until:
                    return found
                rows[extent] = self._time(rule, layer, region, n_samples)
            found[key] = {**rows, self._batch: whole} if key == SAMPLES else rows
        return found

    def _time(
        self, rule: Operator | PartialSums, layer: Layer, region: Region, n_samples: int
    ) -> Passes:
        given = self._given(rule, layer, region, n_samples)
        times: list[Passes] = []
        began = self._limits.clock()
        for _ in range(1 + self._limits.n_runs):
            if len(times) > 1 and self._limits.clock() - began > _SECONDS_ENOUGH:
                break
            times.append(self._once(rule, layer, region, given))
        return Passes(*map(median, zip(*times[1:], strict=True)))

    def _given(self, rule: Operator | PartialSums, layer: Layer, region: Region, n: int) -> _Given:
        inputs = [
            self._input(self._graph[name], part, n)
            for name, part in zip(layer.inputs, rule.reads(layer, region), strict=True)
        ]
        tensors = {
            argument: self._random(part.shape, trains=layer.tensors[argument].trains)
            for argument, part in rule.uses(layer, region).items()
        }
        leaves = [value for value in (*inputs, *tensors.values()) if value.requires_grad]
        return inputs, tensors, leaves

    def _once(
        self, rule: Operator | PartialSums, layer: Layer, region: Region, given: _Given
    ) -> Passes:
        inputs, tensors, leaves = given
        clock = self._limits.timer or self._limits.clock
        began = clock()
        result = rule.compute(Call(layer, region, inputs, tensors, self._step))
        forward = clock() - began
        if not leaves or not result.requires_grad:
            return Passes(forward, 0.0)
        gradient = torch.ones_like(result)
        ready = clock()
        torch.autograd.grad(result, leaves, gradient, allow_unused=True)
        return Passes(forward, clock() - ready)

    def _input(self, source: Layer, part: Region, n_samples: int) -> torch.Tensor:
        shape = (1 if source.name in self._joined else n_samples, *part.shape)
        if source.is_integer:
            return torch.zeros(shape, dtype=torch.int64, device="cpu")
        return self._random(shape, trains=source.name in self._backward)

    def _random(self, shape: tuple[int, ...], *, trains: bool) -> torch.Tensor:
        # Between 0.5 and 1.5: valid variances, and no infinite loss.
        generator = self._generator
        value = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
        value += 0.5
        return value.requires_grad_(trains)


_Cut = tuple[str, Operator | PartialSums, list[tuple[int, Region, int]]]


def _cuts(layer: Layer, batch: int) -> Iterator[_Cut]:
    # Along each dimension: its key, what computes a slice, and the slices from small to large, as
    # (extent, region, samples). Slices are from the middle, where halos are complete.
    kind = operator_of(layer)
    dims: list[tuple[str, Operator | PartialSums, Region, int, int]] = [
        (str(cut.dim), kind, layer.region, cut.dim, cut.unit) for cut in cuts_of(layer)
    ]
    for dim in summed_dims(layer)[:1]:
        assert kind.partial is not None, layer.name
        unit = {cut.dim: cut.unit for cut in kind.partial.cuts(layer)}[dim]
        dims.append((INPUTS, kind.partial, Region.of(*layer.input_shapes[0]), dim, unit))
    for key, rule, region, dim, unit in dims:
        slices = {region.shape[dim]: region}
        for n_parts in _N_PARTS:
            if n_parts * unit <= region.shape[dim]:
                part = region.cut(dim, [1.0] * n_parts, unit=unit)[n_parts // 2]
                slices[part.shape[dim]] = part
        if len(slices) > 1:
            yield key, rule, [(extent, part, batch) for extent, part in sorted(slices.items())]
    fewer = sorted({batch // n for n in _N_MICRO_BATCHES} - {0})
    yield SAMPLES, kind, [(n, layer.region, n) for n in fewer]


# --- repeated measurements ---

DIFFERENCE_MAX: Final = 0.1  # share, between the best two measurements of a slice

# All measurements of a layer, by dimension and extent; some are missing if time was up.
_Samples = dict[str, dict[int, list[Passes]]]


def _medians(samples: _Samples) -> dict[str, Slices]:
    found = {}
    for key, rows in samples.items():
        times = [Passes(*map(median, zip(*each, strict=True))) for each in rows.values()]
        forward, backward = zip(*times, strict=True)
        found[key] = Slices(extents=tuple(rows), forward=forward, backward=backward)
    return found


def _differ(samples: _Samples) -> bool:
    # Whether the best two measurements of a slice differ by more than `DIFFERENCE_MAX`.
    return any(
        sorted(times)[:2][-1] > (1.0 + DIFFERENCE_MAX) * min(times)
        for rows in samples.values()
        for each in rows.values()
        for times in zip(*each, strict=True)
    )


N_PASSES_MAX: Final = 4
_N_BYTES_MAX: Final = 1 << 30  # memory of one measurement

# A module may reject random numbers, or memory may be too small.
FAILURES: Final = (RuntimeError, ValueError, TypeError, IndexError)

Progress = Callable[[int, int, str], None]  # progress(n_done, n_layers, next layer)


def profiled(
    graph: LayerGraph,
    *,
    batch: int,
    modules: Mapping[str, nn.Module] | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Return this host's profile with all layers of a graph; measure those that it lacks.

    Without their modules, not on the meta device, opaque layers are not measured. `progress` is
    called before each layer.
    """
    host, modules = this_host(), modules or {}
    known = load(host)
    wanted = [
        (key, layer)
        for key, layer in unlike(graph, batch=batch, modules=modules).items()
        if known is None or key not in known.layers
    ]
    # The most work first.
    wanted.sort(key=lambda pair: -work_of(pair[1], pair[1].region, partial=False).forward)
    samples: dict[str, _Samples] = {}
    doubtful = wanted
    try:
        with undisturbed():
            bench = Bench(graph, batch, modules, limits or Limits(timer=busy_seconds))
            for n_passes in range(N_PASSES_MAX):
                for index, (key, layer) in enumerate(doubtful):
                    if bench.is_late:
                        break
                    if progress is not None and not n_passes:
                        progress(index, len(wanted), layer.name)
                    with suppress(*FAILURES):
                        _add(bench.slices(layer), samples.setdefault(key, {}))
                # Each is measured twice, and once more while it differs.
                found = [(key, layer) for key, layer in wanted if samples.get(key)]
                doubtful = [each for each in found if not n_passes or _differ(samples[each[0]])]
    finally:  # after an interrupt too: keep what has been measured
        profile = add(host, layers={key: _medians(each) for key, each in samples.items() if each})
    return profile


def _add(times: Mapping[str, Mapping[int, Passes]], samples: _Samples) -> None:
    for key, rows in times.items():
        for extent, taken in rows.items():
            samples.setdefault(key, {}).setdefault(extent, []).append(taken)


def is_too_large(layer: Layer, *, batch: int) -> bool:
    """Return whether measuring a layer takes more memory than allowed."""
    kind = operator_of(layer)
    states = sum(r.n_elements for r in (layer.region, *kind.reads(layer, layer.region))) * batch
    tensors = sum(use.n_elements for use in kind.uses(layer, layer.region).values())
    # Each has a gradient.
    return 2 * N_BYTES * (states + tensors) > _N_BYTES_MAX


def unlike(graph: LayerGraph, *, batch: int, modules: Mapping[str, nn.Module]) -> dict[str, Layer]:
    """Return one layer of each signature that can be measured, by its key in a profile."""
    found: dict[str, Layer] = {}
    for layer in graph.computed:
        unknown = "module" in layer.options and layer.text("module") not in modules
        if not unknown and not is_too_large(layer, batch=batch):
            found.setdefault(digest(layer.signature, batch=batch), layer)
    return found
