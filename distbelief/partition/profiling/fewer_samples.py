"""Costs of a micro-batch, from what a whole batch has been measured to take.

Measuring every layer again for each number of parts would take minutes. A layer that
takes twice as long as by arithmetic does so for reasons (its kernel, its memory access)
that are there with fewer samples too: so arithmetic says what fewer samples take, and
measurement how much longer than that it takes here.
"""

from typing import final

from distbelief.graph.layer import Layer
from distbelief.graph.region import Region
from distbelief.partition.costs import AnalyticCosts
from distbelief.program.pricing import Costs


@final
class FewerSamples:
    """Costs with fewer samples than were measured.

    Args:
        measured: Costs of the batch.
        batch: By arithmetic, of as many samples.
        part: By arithmetic, of the micro-batch.
    """

    def __init__(
        self, measured: Costs, *, batch: AnalyticCosts, part: AnalyticCosts
    ) -> None:
        self._measured = measured
        self._batch = batch
        self._part = part

    def forward(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> float:
        """Return the seconds of the forward pass."""
        return _scaled(
            self._measured.forward(layer, region, machine, partial=partial),
            self._part.forward(layer, region, machine, partial=partial),
            self._batch.forward(layer, region, machine, partial=partial),
        )

    def backward(
        self, layer: Layer, region: Region, machine: int, *, partial: bool = False
    ) -> float:
        """Return the seconds of the backward pass."""
        return _scaled(
            self._measured.backward(layer, region, machine, partial=partial),
            self._part.backward(layer, region, machine, partial=partial),
            self._batch.backward(layer, region, machine, partial=partial),
        )


def _scaled(measured: float, part: float, batch: float) -> float:
    return measured * part / batch if batch else measured
