"""How much longer a step takes because machines vary.

"The typical cause of less-than-ideal speedups is variance in processing times across
the different machines, leading to many machines waiting for the single slowest machine
to finish a given phase of computation" (Dean et al. 2012, section 3). So each layer's
times are multiplied by numbers drawn per machine, and each phase waits for its slowest.

The draws are those of a machine and a layer, whatever the plan: plans are compared
under the same luck.
"""

from collections.abc import Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from distbelief.graph.layer import LayerGraph
from distbelief.program.cluster import Cluster
from distbelief.program.pricing import Price


N_DRAWS: Final = 100
QUANTILES: Final = (0.1, 0.5, 0.9)

Floats = NDArray[np.float64]


@final
class Jitter:
    """Draws for one graph on one cluster.

    Args:
        graph: Whose layers have draws of their own.
        cluster: All its machines; how much each varies.
        seed: Of the draws.
    """

    def __init__(self, graph: LayerGraph, cluster: Cluster, *, seed: int = 0) -> None:
        self._layers = {layer.name: index for index, layer in enumerate(graph.layers)}
        self._sigmas = np.array([machine.jitter for machine in cluster.machines])
        self._seed = seed
        self._drawn: dict[tuple[int, bool], Floats] = {}

    def quantiles(self, price: Price, quantiles: Sequence[float] = QUANTILES) -> tuple[float, ...]:
        """Return the seconds of a step that so many of the draws do not exceed.

        What the draws add to phases that follow each other is added to the simulated
        step. A machine that computes more regions of a layer draws once for all.
        """
        tasks = price.tasks
        durations = price.played.ends[: len(tasks)] - price.played.starts[: len(tasks)]
        rows: dict[tuple[int, bool], dict[int, float]] = {}
        for task, seconds in zip(tasks, durations.tolist(), strict=True):
            backward = task.phase in {"backward", "partial_backward"}
            row = rows.setdefault((self._layers[task.layer], backward), {})
            row[task.machine] = row.get(task.machine, 0.0) + seconds
        added: Floats = np.zeros(N_DRAWS)
        for (layer, backward), row in rows.items():
            machines = np.array(list(row))
            seconds_each = np.array(list(row.values()))
            factors = self._factors(layer, backward=backward)[:, machines]
            added += (factors * seconds_each).max(axis=1) - seconds_each.max()
        totals = price.step_seconds + added
        return tuple(float(q) for q in np.quantile(totals, quantiles))

    def _factors(self, layer: int, *, backward: bool) -> Floats:
        """Return the draws of a phase, (N_DRAWS, n_machines), the first ones shared."""
        if (layer, backward) not in self._drawn:
            self._drawn[layer, backward] = self._draw(layer, backward=backward)
        return self._drawn[layer, backward]

    def _draw(self, layer: int, *, backward: bool) -> Floats:
        generator = np.random.default_rng((self._seed, layer, int(backward)))
        # One row per machine: those of fewer machines are the first rows of more.
        half = generator.standard_normal((len(self._sigmas), N_DRAWS // 2)).T
        # Each with its mirror image, and a median of 1: jitter makes a machine uneven;
        # that a step becomes slower is because somebody waits for the slowest.
        normal = np.concatenate([half, -half])
        return np.asarray(np.exp(self._sigmas * normal))
