"""What one machine needs of a batch: of each input the regions that it reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, final

import torch

from distbelief.data.dataset import Dataset, read_batch
from distbelief.errors import JobError
from distbelief.graph.layer import INPUT, LayerGraph
from distbelief.graph.region import Region
from distbelief.roles import Action, Compute, Cost, Lane
from distbelief.runtime.machine.course import Chosen, Course
from distbelief.runtime.task.labels import check_labels, class_counts


READ: Final = "machine:read"
N_AHEAD: Final = 2
"""Steps whose portions are read or held: the present one, and the next."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """What there is of one batch.

    Attributes:
        life: In which it was read.
        step: Of which.
        inputs: Per input layer, of each region: (n_samples, *shape).
        targets: (n_samples, ...), whole, where they are wanted.
    """

    life: int
    step: int
    inputs: Mapping[str, Sequence[torch.Tensor]] = field(default_factory=dict)
    targets: torch.Tensor | None = None


@final
class PortionReader:
    """Reads portions, in the data lane.

    Args:
        dataset: Of pairs (input, target).
        graph: Whose inputs they are.
        reads: Per input layer, the regions that are needed.
        dtype: Of numbers that are not whole.
        keeps_targets: Whether whole targets are wanted.
        table: Table of the job file that names the data set, for messages.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        graph: LayerGraph,
        reads: Mapping[str, Sequence[Region]],
        dtype: torch.dtype,
        keeps_targets: bool = False,
        table: str = "data.train",
    ) -> None:
        self._dataset = dataset
        self._inputs = [layer for layer in graph.layers if layer.kind == INPUT]
        self._reads = reads
        self._n_classes = class_counts(graph)
        self._dtype = dtype
        self._keeps_targets = keeps_targets
        self._table = table
        if len(self._inputs) > 2:
            names = ", ".join(layer.name for layer in self._inputs)
            raise JobError(
                f"the model has inputs {names}: a data set gives pairs (input, "
                "target), so it can have one"
            )

    @property
    def reads_nothing(self) -> bool:
        """Whether this machine needs nothing of any batch."""
        return not (self._reads or self._keeps_targets)

    def read(self, life: int, step: int, chosen: Chosen) -> Portion:
        """Return the portion of these samples.

        Raises:
            JobError: the data set fails, or gives something else than the model takes.
        """
        indices = [int(index) for index in chosen.indices]
        batch = read_batch(self._dataset, indices, table=self._table)
        found: dict[str, list[torch.Tensor]] = {}
        for layer, value, what in zip(self._inputs, batch, ("inputs", "targets"), strict=False):
            if layer.name in self._n_classes:
                n_classes = self._n_classes[layer.name]
                check_labels(value, n_classes, indices=indices, table=self._table)
            if layer.name not in self._reads:
                continue
            if tuple(value.shape[1:]) != layer.shape:
                raise JobError(
                    f"[{self._table}] {what} have shape {list(value.shape[1:])}; the "
                    f"plan is for {list(layer.shape)}"
                )
            dtype = torch.int64 if layer.is_integer else self._dtype
            # Fresh tensors, so that the whole batch can be forgotten.
            found[layer.name] = [
                value[(slice(None), *region.slices)].to(dtype) for region in self._reads[layer.name]
            ]
        targets = batch[1] if self._keeps_targets else None
        return Portion(life=life, step=step, inputs=found, targets=targets)


@final
class PortionsAhead:
    """The portions of a life, each read once, a step ahead.

    Args:
        reader: Who reads.
        course: What.
    """

    def __init__(self, reader: PortionReader, course: Course) -> None:
        self._reader = reader
        self._course = course
        self._held: dict[int, Portion] = {}
        self._life = 0
        self._next = 0
        self._reading = False

    def begin(self, life: int) -> None:
        """Begin a life; portions of another one are forgotten."""
        self._life, self._next = life, 0
        self._held.clear()

    def take(self, step: int) -> Portion | None:
        """Return the portion of this step, if it has been read."""
        if self._reader.reads_nothing:
            return Portion(life=self._life, step=step)
        return self._held.pop(step, None)

    def read_ahead(self, step: int, *, stop: int) -> list[Action]:
        """Ask for one more portion, unless one is on its way.

        Args:
            step: The present one.
            stop: No step from this one on will be taken.
        """
        wanted = min(step + N_AHEAD, stop)
        if self._reading or self._reader.reads_nothing or self._next >= wanted:
            return []
        life, number, reader = self._life, self._next, self._reader
        chosen = self._course.batch(number)
        if not len(chosen.indices):
            return []  # there are no samples beyond: the last step comes before
        self._next += 1
        self._reading = True
        return [
            Compute(
                name=READ,
                work=lambda: reader.read(life, number, chosen),
                cost=Cost(n_bytes=1e3 * len(chosen.indices)),
                lane=Lane.DATA,
            )
        ]

    def have_read(self, result: object) -> None:
        """Keep what was asked for, if it is still wanted."""
        assert isinstance(result, Portion), result
        self._reading = False
        if result.life == self._life:
            self._held[result.step] = result
