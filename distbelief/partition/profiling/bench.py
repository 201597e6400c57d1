"""A bench on which layers are timed: whole, in slices, with fewer samples.

The median of a few runs after one that warms up, one of which is enough of what takes
long; forward and backward apart; on random numbers. With one thread it is the
processor's time, not the clock on the wall, which runs on while others have the
processor.

Memory is asked for as replicas do, and from then on as long as this process lives: who
gives back what a large gradient took faults its pages in anew, which takes as long as
computing it.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple, final

import torch
from torch import nn

from distbelief.allocator import keep_memory
from distbelief.graph.kind import LayerKind, PartialSums, Step, joined, kind_of
from distbelief.graph.layer import Layer, LayerGraph
from distbelief.graph.region import Region
from distbelief.partition.candidates import summed_dims
from distbelief.partition.profiling.profile import INPUTS, SAMPLES, WHOLE, Slices
from distbelief.program.gradients import with_gradient
from distbelief.program.tasks import work_of


N_RUNS: Final = 3
_N_PARTS: Final = (2, 4, 8, 16, 32, 64)
_N_MICRO_BATCHES: Final = (8, 4, 2)
_SECONDS_ENOUGH: Final = 0.1
"""A slice that takes longer is run once after warming up: it is measured again later,
and what a machine does meanwhile is another thing then."""

_SHARE_MAX: Final = 0.25
"""Of the time there is, for one layer."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much to measure.

    Attributes:
        seconds: When to stop.
        n_runs: Of which the median is taken, in each pass.
        clock: Seconds.
        timer: Seconds of what is measured; None: as by the clock.
    """

    seconds: float = 60.0
    n_runs: int = N_RUNS
    clock: Callable[[], float] = field(default=time.perf_counter)
    timer: Callable[[], float] | None = None


def busy_seconds() -> float:
    """Return the time of a processor, if one computes; else of the clock."""
    is_one = torch.get_num_threads() == 1
    return time.thread_time() if is_one else time.perf_counter()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Have gradients, also for a caller who wants none, and memory as replicas do."""
    keep_memory()
    with torch.inference_mode(mode=False), torch.enable_grad():
        yield


@final
class Time(NamedTuple):
    """Seconds of both passes."""

    forward: float
    backward: float


_Given = tuple[list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]


@final
class Bench:
    """Times layers of one graph.

    Args:
        graph: Whose layers.
        batch: Samples of a step.
        modules: Those that layers of kind "whole" call.
        limits: How much to measure.
        deadline: When to stop, by the clock of `limits`.
    """

    def __init__(
        self,
        graph: LayerGraph,
        batch: int,
        modules: Mapping[str, nn.Module],
        limits: Limits,
        deadline: float,
    ) -> None:
        self._graph = graph
        self._batch = batch
        self._step = Step(training=True, modules=modules)
        self._limits = limits
        self._deadline = deadline
        self._joined = joined(graph)
        self._backward = with_gradient(graph)
        self._generator = torch.Generator("cpu").manual_seed(0)

    @property
    def is_late(self) -> bool:
        """Whether time is up."""
        return self._limits.clock() >= self._deadline

    def ready(self, layer: Layer) -> Callable[[], Time]:
        """Return what runs a whole layer once, without warming up, and takes time."""
        kind = kind_of(layer)
        given = self._given(kind, layer, layer.region, self._batch)
        return lambda: self._once(kind, layer, layer.region, given)

    def slices(self, layer: Layer) -> dict[str, Slices]:
        """Return the times of a layer along each dimension.

        Returns:
            Of the whole at least; dimensions for which there is no time are left out,
            so that a layer that takes long is not begun again and again.
        """
        now = self._limits.clock()
        until = min(self._deadline, now + self._limits.seconds * _SHARE_MAX)
        whole = self._time(layer, layer.region)
        found = {WHOLE: _slices([(1, self._operations(layer, layer.region), whole)])}
        for word, partial, regions in _cuts(layer):
            rows = []
            for extent, region in regions:
                if self._limits.clock() >= until:
                    return found
                taken = self._time(layer, region, partial=partial)
                operations = self._operations(layer, region, partial=partial)
                rows.append((extent, operations, taken))
            found[word] = _slices(rows)
        rows = []
        for n_samples in sorted({self._batch // n for n in _N_MICRO_BATCHES} - {0}):
            if self._limits.clock() >= until:
                return found
            taken = self._time(layer, layer.region, n_samples=n_samples)
            operations = n_samples * work_of(layer, layer.region, partial=False).forward
            rows.append((n_samples, operations, taken))
        every = (self._batch, self._operations(layer, layer.region), whole)
        found[SAMPLES] = _slices([*rows, every])
        return found

    def _operations(self, layer: Layer, region: Region, *, partial: bool = False) -> float:
        return self._batch * work_of(layer, region, partial=partial).forward

    def _time(
        self, layer: Layer, region: Region, *, partial: bool = False, n_samples: int | None = None
    ) -> Time:
        kind = kind_of(layer)
        n = self._batch if n_samples is None else n_samples
        rule = kind.partial if partial and kind.partial else kind
        given = self._given(rule, layer, region, n)
        times: list[Time] = []
        began = self._limits.clock()
        for _ in range(1 + self._limits.n_runs):
            if len(times) > 1 and self._limits.clock() - began > _SECONDS_ENOUGH:
                break
            times.append(self._once(rule, layer, region, given))
        kept = times[1:]
        return Time(median(t.forward for t in kept), median(t.backward for t in kept))

    def _given(self, rule: LayerKind | PartialSums, layer: Layer, region: Region, n: int) -> _Given:
        inputs = [
            self._input(self._graph[name], part, n)
            for name, part in zip(layer.inputs, rule.reads(layer, region), strict=True)
        ]
        tensors = {
            word: self._random(part.shape, trains=layer.tensors[word].trains)
            for word, part in rule.uses(layer, region).items()
        }
        leaves = [value for value in (*inputs, *tensors.values()) if value.requires_grad]
        return inputs, tensors, leaves

    def _once(
        self, rule: LayerKind | PartialSums, layer: Layer, region: Region, given: _Given
    ) -> Time:
        inputs, tensors, leaves = given
        clock = self._limits.timer or self._limits.clock
        began = clock()
        result = rule.compute(layer, region, inputs, tensors, self._step)
        forward = clock() - began
        if not leaves or not result.requires_grad:
            return Time(forward, 0.0)
        gradient = torch.ones_like(result)
        ready = clock()
        torch.autograd.grad(result, leaves, gradient, allow_unused=True)
        return Time(forward, clock() - ready)

    def _input(self, source: Layer, part: Region, n_samples: int) -> torch.Tensor:
        n_samples = 1 if source.name in self._joined else n_samples
        if source.is_integer:
            shape = (n_samples, *part.shape)
            return torch.zeros(shape, dtype=torch.int64, device="cpu")
        value = self._random((n_samples, *part.shape), trains=False)
        return value.requires_grad_(source.name in self._backward)

    def _random(self, shape: tuple[int, ...], *, trains: bool) -> torch.Tensor:
        # Between 0.5 and 1.5: also good for variances, and no loss is infinite.
        generator = self._generator
        value = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
        value += 0.5
        return value.requires_grad_(trains)


def _cuts(layer: Layer) -> Iterator[tuple[str, bool, list[tuple[int, Region]]]]:
    """Yield what to call a dimension, whether it is summed over, and its slices.

    Slices are from the middle, whose halos are whole, and from small to large.
    """
    kind = kind_of(layer)
    for cut in () if layer.whole else kind.cuts(layer):
        regions = _middles(layer.region, cut.dim, unit=cut.unit)
        if len(regions) > 1:
            yield str(cut.dim), False, regions
    for dim in summed_dims(layer)[:1]:
        assert kind.partial is not None, layer.name
        unit = {cut.dim: cut.unit for cut in kind.partial.cuts(layer)}[dim]
        regions = _middles(Region.of(*layer.input_shapes[0]), dim, unit=unit)
        if len(regions) > 1:
            yield INPUTS, True, regions


def _middles(region: Region, dim: int, *, unit: int) -> list[tuple[int, Region]]:
    found = [(region.shape[dim], region)]
    for n_parts in _N_PARTS:
        if n_parts * unit <= region.shape[dim]:
            part = region.cut(dim, [1.0] * n_parts, unit=unit)[n_parts // 2]
            found.append((part.shape[dim], part))
    return sorted(dict(found).items())


def _slices(rows: list[tuple[int, float, Time]]) -> Slices:
    return Slices(
        extents=tuple(extent for extent, _, _ in rows),
        operations=tuple(operations for _, operations, _ in rows),
        forward=tuple(taken.forward for _, _, taken in rows),
        backward=tuple(taken.backward for _, _, taken in rows),
    )
