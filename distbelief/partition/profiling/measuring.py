"""Measuring layers on this host: each that is unlike others, whole and in slices.

What costs most is measured first, and when time is up the rest is left to arithmetic;
so is what is too large, or fails.

All is measured twice, a while apart, and what differs by more than a tenth up to four
times, of which the median counts: not the best, for a machine that is disturbed now and
then is so while it trains too, and a prediction by its best moments is one that no step
reaches. One slice that seems twice as slow is enough for a plan that avoids it, and is
slower by a tenth than the one that would have been chosen.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from torch import nn

from distbelief.graph.kind import kind_of
from distbelief.graph.layer import INPUT, Layer, LayerGraph
from distbelief.partition.costs import N_BYTES, signature
from distbelief.partition.profiling.bench import Bench, Limits, Time, busy_seconds, undisturbed
from distbelief.partition.profiling.passes import agreed, differ
from distbelief.partition.profiling.profile import Profile, Slices, add, digest, load, this_host
from distbelief.program.tasks import work_of


N_PASSES_MAX: Final = 4
_N_BYTES_MAX: Final = 1 << 30
"""What one measurement may take; larger layers are left to arithmetic."""

_FAILURES: Final = (RuntimeError, ValueError, TypeError, IndexError)
"""A module may dislike random numbers, and memory may be too small."""

Progress = Callable[[int, int, str], None]
"""Told how many layers are measured, of how many, and which is next."""


def profiled(
    graph: LayerGraph,
    *,
    batch: int,
    modules: Mapping[str, nn.Module] | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Return this host's profile with all layers of a graph; measure what it lacks.

    Args:
        graph: With its loss, if it is to be trained.
        batch: Samples of a step.
        modules: Those that layers of kind "whole" call, not on the meta device; if
            absent, such layers are not measured.
        limits: How much to measure.
        progress: Told of each layer.
    """
    limits, host = limits or Limits(timer=busy_seconds), this_host()
    known = load(host)
    wanted = _wanted(graph, batch, known.layers if known else {}, modules or {})
    deadline = limits.clock() + limits.seconds
    found: dict[str, dict[str, Slices]] = {}
    try:
        with undisturbed():
            bench = Bench(graph, batch, modules or {}, limits, deadline)
            for index, (key, layer) in enumerate(wanted.items()):
                if bench.is_late:
                    break
                if progress is not None:
                    progress(index, len(wanted), layer.name)
                with suppress(*_FAILURES):
                    found[key] = bench.slices(layer)
            _cross_check(bench, {key: wanted[key] for key in found}, found)
    finally:  # also if somebody is tired of waiting
        profile = add(host, layers=found)
    return profile


def present(graph: LayerGraph, *, batch: int) -> Callable[[], dict[str, Time]]:
    """Return what tells what whole layers take just now, by their keys in a profile.

    One run each, so that it takes no longer than a step; what they compute with is kept
    for the next time. Layers that call a module are left out.

    Args:
        graph: With its loss, if it is trained.
        batch: Samples of a step.
    """
    runs: dict[str, Callable[[], Time]] = {}
    with undisturbed():
        limits = Limits(timer=busy_seconds)
        bench = Bench(graph, batch, {}, limits, deadline=float("inf"))
        for key, layer in _unlike(graph, batch, {}).items():
            with suppress(*_FAILURES):
                runs[key] = bench.ready(layer)

    def measure() -> dict[str, Time]:
        found: dict[str, Time] = {}
        with undisturbed():
            for key, run in runs.items():
                with suppress(*_FAILURES):
                    found[key] = run()
        return found

    return measure


def _cross_check(
    bench: Bench, layers: Mapping[str, Layer], found: dict[str, dict[str, Slices]]
) -> None:
    """Measure again what is found, and once more what was disturbed.

    Args:
        bench: Which measured it.
        layers: By their key.
        found: Is made better.
    """
    passes = {key: [slices] for key, slices in found.items()}
    doubtful = list(passes)
    for _ in range(N_PASSES_MAX - 1):
        for key in doubtful:
            if bench.is_late:
                return
            with suppress(*_FAILURES):
                passes[key].append(bench.slices(layers[key]))
            found[key] = agreed(passes[key])
        doubtful = [key for key in doubtful if differ(passes[key])]


def is_too_large(layer: Layer, *, batch: int) -> bool:
    """Return whether a layer takes more memory than a measurement may."""
    reads = kind_of(layer).reads(layer, layer.region)
    states = sum(r.n_elements for r in (layer.region, *reads)) * batch
    uses = kind_of(layer).uses(layer, layer.region).values()
    n_elements = states + sum(use.n_elements for use in uses)
    # Each has a gradient.
    return 2 * N_BYTES * n_elements > _N_BYTES_MAX


def _wanted(
    graph: LayerGraph, batch: int, known: Mapping[str, object], modules: Mapping[str, nn.Module]
) -> dict[str, Layer]:
    """Return the layers to measure, by their key, the most work first."""
    found = _unlike(graph, batch, modules)
    pairs = [(key, layer) for key, layer in found.items() if key not in known]
    pairs.sort(key=lambda pair: -work_of(pair[1], pair[1].region, partial=False).forward)
    return dict(pairs)


def _unlike(graph: LayerGraph, batch: int, modules: Mapping[str, nn.Module]) -> dict[str, Layer]:
    """Return layers of which none is like another, by their key."""
    found: dict[str, Layer] = {}
    for layer in graph.layers:
        if layer.kind == INPUT:
            continue
        if "module" in layer.options and layer.text("module") not in modules:
            continue
        if is_too_large(layer, batch=batch):
            continue
        found.setdefault(digest(signature(layer), batch=batch), layer)
    return found
