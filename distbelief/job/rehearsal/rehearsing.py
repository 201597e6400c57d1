"""What a machine of a rehearsal computes for: some steps on arrays, kept in files."""

from collections.abc import Mapping, Sequence
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from distbelief.data.subset import Indices
from distbelief.job.rehearsal.rehearsal import Rehearsal
from distbelief.messages import Begin, Evaluate, Stop
from distbelief.roles import Action, Computed, Seconds
from distbelief.runtime.execution.execution import Found, Put
from distbelief.runtime.execution.operations import Dataflow
from distbelief.runtime.machine.course import Chosen
from distbelief.runtime.machine.duty import Install
from distbelief.runtime.machine.leading import Leader, Outgoing
from distbelief.runtime.machine.portions import Portion


OUTPUT: Final = "output.npy"

Array = NDArray[np.float32 | np.float64 | np.int64]


def gradient_file(tensor: int) -> str:
    """Return the name of the file of a tensor's gradient."""
    return f"gradient-{tensor}.npy"


@final
class Pairs:
    """Arrays as a data set; targets of zeros where there are none.

    Args:
        inputs: (n_samples, *shape).
        targets: (n_samples, *shape).
    """

    def __init__(self, inputs: Array, targets: Array | None) -> None:
        self._inputs, self._targets = inputs, targets

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one sample."""
        inputs, targets = self.__getitems__([index])
        return inputs[0], targets[0]

    def __getitems__(self, indices: list[int], /) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch."""
        inputs = torch.from_numpy(np.array(self._inputs[indices]))
        if self._targets is None:
            return inputs, torch.zeros(len(indices))
        return inputs, torch.from_numpy(np.array(self._targets[indices]))


@final
class SameCourse:
    """All samples, at every step.

    Args:
        n_samples: How many.
    """

    def __init__(self, n_samples: int) -> None:
        self._indices: Indices = np.arange(n_samples, dtype=np.int64)

    def start(self, position: int) -> None:
        """Begin anywhere: all steps are alike."""

    def batch(self, step: int) -> Chosen:
        """Return all samples."""
        return Chosen(position=step * len(self._indices), indices=self._indices)


@final
class Rehearsing:
    """What a machine of a rehearsal computes for; see `runtime.machine.Duty`.

    Args:
        rehearsal: What it is told.
        flow: What it computes.
        values: Flat, one per item.

    Attributes:
        values: Likewise.
        n_done: Steps it has taken.
        ends: When each step was over.
        loss: Of the last step, summed over its samples, if it is known here.
    """

    def __init__(
        self, rehearsal: Rehearsal, flow: Dataflow, values: Sequence[torch.Tensor]
    ) -> None:
        self.values = values
        self.n_done = 0
        self.ends: list[Seconds] = []
        self.loss: float | None = None
        self._rehearsal = rehearsal
        self._flow = flow
        self._chosen: Chosen | None = None
        self._gradients: dict[int, torch.Tensor] = {}

    @property
    def pushed(self) -> int | None:
        """Nothing is pushed."""
        return None

    @property
    def is_settled(self) -> bool:
        """Nothing is under way."""
        return True

    @property
    def is_due(self) -> bool:
        """Nothing is to be waited for."""
        return False

    @property
    def clock(self) -> float | None:
        """No shards, no clocks."""
        return None

    def may_fetch(self, *, ahead: bool) -> bool:
        """Never fetch: all values are here."""
        del ahead
        return False

    def begin(self, position: int, now: Seconds) -> None:
        """Begin; time counts from here."""
        del position
        self.ends = [now]

    def drop(self) -> None:
        """Nothing has accrued."""

    def fetches_at(self, step: int) -> bool:
        """Never fetch: all values are here."""
        del step
        return False

    def installing(self, work: Install) -> Install:
        """Return the work of an install as it is."""
        return work

    def fetched(self, seconds: Seconds) -> bool:
        """Never called."""
        del seconds
        return True

    def open(self, step: int, chosen: Chosen, portion: Portion) -> Put:
        """Keep the gradients of this step."""
        del step, portion
        self._chosen = chosen
        self._gradients = {}
        return self._put

    def _put(self, item: int, gradient: torch.Tensor) -> None:
        self._gradients[item] = gradient

    def close(self, found: Found) -> object:
        """Write what is wanted of this step."""
        assert self._chosen is not None
        rehearsal, rows = self._rehearsal, self._chosen.indices
        is_last = self.n_done + 1 == rehearsal.n_steps
        if is_last or not rehearsal.trains:
            self._write(found, rows)
        if is_last and rehearsal.trains:
            self._write_gradients()
        return None

    def _write(self, found: Found, rows: Indices) -> None:
        if not found.outputs:
            return
        output = np.load(self._rehearsal.path(OUTPUT), mmap_mode="r+")
        for _, region, value in found.outputs:
            # Two lists of indices would be paired: rows are consecutive here.
            span = slice(int(rows[0]), int(rows[-1]) + 1)
            output[(span, *region.slices)] = value.detach().cpu().numpy()
        output.flush()

    def _write_gradients(self) -> None:
        order = _order(self._rehearsal)
        for item, gradient in self._gradients.items():
            name, region = self._flow.items[item]
            path = self._rehearsal.path(gradient_file(order[name]))
            whole = np.load(path, mmap_mode="r+")
            whole[region.slices] = gradient.detach().cpu().view(region.shape).numpy()
            whole.flush()

    def closed(
        self, result: object, found: Found, chosen: Chosen, now: Seconds
    ) -> Sequence[Action]:
        """A step is over."""
        del result, chosen
        self.n_done += 1
        self.ends.append(now)
        if found.loss is not None:
            self.loss = found.loss
        return []

    def work(self, *, final: bool) -> Sequence[Action]:
        """Nothing comes between steps."""
        del final
        return []

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Never called."""
        del event, now
        return []

    def command(self, leader: Leader, message: Begin | Evaluate | Stop, now: Seconds) -> Outgoing:
        """Nobody commands here."""
        del leader, message, now
        return []

    def report(
        self, leader: Leader, now: Seconds, *, final: bool
    ) -> tuple[Sequence[Action], Outgoing]:
        """Nobody is told."""
        del leader, now, final
        return [], []

    def figures(self) -> Mapping[str, float]:
        """No counters."""
        return {}


def _order(rehearsal: Rehearsal) -> dict[str, int]:
    """Return the number of each tensor's file."""
    with safe_open(rehearsal.weights, framework="pt") as file:
        return {name: index for index, name in enumerate(sorted(file.keys()))}
