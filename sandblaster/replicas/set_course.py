"""Which samples the machines of a replica compute: in each life, those of one set."""

from typing import final

from distbelief.errors import RemoteProtocolError
from distbelief.messages import SetOrder
from distbelief.runtime.machine.course import Chosen
from sandblaster.replicas.samples import Samples


@final
class SetCourse:
    """The portions of the set that a life is about, one in each step.

    Args:
        samples: The order of the data.
        portion_size: Examples of a portion; the last of a set may have fewer.

    Attributes:
        order: What the present life is about; None if about nothing.
    """

    def __init__(self, samples: Samples, *, portion_size: int) -> None:
        self.order: SetOrder | None = None
        self._samples = samples
        self._portion_size = portion_size
        self._life = 0
        self._next: SetOrder | None = None  # of the life that begins

    def know(self, life: int, order: SetOrder | None) -> None:
        """A life is about this; words of older lives say nothing.

        Raises:
            RemoteProtocolError: no set is like that.
        """
        n_samples = self._samples.n_samples
        if order is not None and not 0 < order.stop - order.start <= n_samples:
            raise RemoteProtocolError(
                f"a set of positions {order.start} to {order.stop} was ordered, of "
                f"{n_samples} samples"
            )
        if life > self._life:
            self._life, self._next = life, order

    def start(self, position: int) -> None:
        """Begin the life that is known of."""
        del position  # the order says it
        self.order = self._next

    def n_steps(self, order: SetOrder) -> int:
        """Return how many steps a life about this has."""
        return -(-(order.stop - order.start) // self._portion_size)

    def is_last(self, step: int) -> bool:
        """Return whether the present life ends with this step."""
        return self.order is not None and step == self.n_steps(self.order) - 1

    def batch(self, step: int) -> Chosen:
        """Return the samples of this step; none beyond the last."""
        order = self.order
        start = stop = 0
        if order is not None:
            start = min(order.start + step * self._portion_size, order.stop)
            stop = min(start + self._portion_size, order.stop)
        position = start % self._samples.n_samples
        return Chosen(position=position, indices=self._samples.at(start, stop))
