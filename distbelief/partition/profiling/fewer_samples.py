"""Costs of a micro-batch, from what a whole batch has been measured to take.

Measuring every slice again for each number of parts would take minutes. What share of a
layer's time fewer samples take is measured of the whole layer (a quarter of them takes
more than a quarter: the weights are read all the same), and holds for its slices.

Where that has not been measured: a layer that takes twice as long as by arithmetic does
so for reasons that are there with fewer samples too. So arithmetic says what fewer
samples take, and measurement how much longer than that it takes here.
"""

from collections.abc import Callable
from typing import final

from distbelief.graph.layer import Layer
from distbelief.graph.region import Region
from distbelief.partition.costs import AnalyticCosts
from distbelief.program.pricing import Costs


Shares = Callable[[Layer, int], tuple[float, float] | None]
"""shares(layer, n_samples) -> of forward and backward pass, or None if not measured."""


@final
class FewerSamples:
    """Costs with fewer samples than were measured.

    Args:
        measured: Costs of the batch.
        batch: By arithmetic, of as many samples.
        part: By arithmetic, of the micro-batch.
        shares: What share of the batch's time so many samples take.
    """

    def __init__(
        self,
        measured: Costs,
        *,
        batch: AnalyticCosts,
        part: AnalyticCosts,
        shares: Shares = lambda _layer, _n_samples: None,
    ) -> None:
        self._measured = measured
        self._batch = batch
        self._part = part
        self._shares = shares

    def forward(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> float:
        """Return the seconds of the forward pass."""
        measured = self._measured.forward(layer, region, machine, partial=partial)
        shares = self._shares(layer, self._part.batch)
        if shares is not None:
            return measured * shares[0]
        return _scaled(
            measured,
            self._part.forward(layer, region, machine, partial=partial),
            self._batch.forward(layer, region, machine, partial=partial),
        )

    def backward(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> float:
        """Return the seconds of the backward pass."""
        measured = self._measured.backward(layer, region, machine, partial=partial)
        shares = self._shares(layer, self._part.batch)
        if shares is not None:
            return measured * shares[1]
        return _scaled(
            measured,
            self._part.backward(layer, region, machine, partial=partial),
            self._batch.backward(layer, region, machine, partial=partial),
        )


def _scaled(measured: float, part: float, batch: float) -> float:
    return measured * part / batch if batch else measured
