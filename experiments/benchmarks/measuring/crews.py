"""Crews: processes that take the same steps at the same time, as `paced` tells them.

A step of a crew takes as long as that of its slowest process; what is told of a turn is
the median over its steps. All crews live at once and take turns, so that a machine that
becomes slower spoils no ratio. How many processors others had meanwhile is told too: a
turn that had to share them says nothing of what it measures.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self, final

from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.hands import Hand, Hands
from experiments.benchmarks.measuring.measurement import Spread


@final
class Crew:
    """Processes that step together; a context manager.

    Args:
        name: Of the crew.
        hands: Its processes.
        folder: For what they say when they fail.
    """

    def __init__(self, name: str, hands: Sequence[Hand], folder: Path) -> None:
        self.name = name
        self.seconds: list[float] = []  # of a step, per turn
        self.cpu_seconds: list[float] = []  # of a step, all processes together
        self.others: list[float] = []  # processors that others kept busy, per turn
        self.n_bytes = 0  # at the end of some turn
        self.told: list[list[float]] = []  # by each process, of the last turn's steps
        self._hands = Hands(name, hands, folder)

    def __enter__(self) -> Self:
        self._hands.__enter__()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._hands.end()

    @property
    def step(self) -> Spread:
        return Spread.of(self.seconds)

    def turn(self, *, seconds: float, first_core: int | None = None) -> list[float]:
        """Take steps for about so long, two at least; return the seconds of each.

        Args:
            seconds: How long.
            first_core: Where the first process computes, which has a core to itself;
                the second on the next one, and so on. None: wherever there is room.
        """
        if first_core is not None:
            self._hands.bind(first_core)
        pids = measurement.families(self._hands.pids)
        used, busy = measurement.cpu_seconds(pids), measurement.busy_seconds()
        began = time.monotonic()
        self.told = [[] for _ in self._hands.pids]
        steps = self._steps(2)
        n_more = round(seconds / median(steps)) - len(steps)
        steps += self._steps(n_more) if n_more > 0 else []
        taken = measurement.cpu_seconds(pids) - used
        busy = measurement.busy_seconds() - busy
        self.others.append(max(busy - taken, 0.0) / (time.monotonic() - began))
        self.cpu_seconds.append(taken / len(steps))
        self.n_bytes = max(self.n_bytes, measurement.shared_out_bytes(pids))
        self.seconds.append(median(steps))
        return steps

    def row(self) -> dict[str, str]:
        return {
            "step, ms": Spread.of([1e3 * value for value in self.seconds]).show(),
            "CPU ms": Spread.of([1e3 * value for value in self.cpu_seconds]).show(),
            "memory": f"{self.n_bytes / 2**20:,.0f} MiB",
            "others": f"{max(self.others):.2f}",
        }

    def _steps(self, n_steps: int) -> list[float]:
        told = [json.loads(line) for line in self._hands.ask(str(n_steps))]
        self.told = [a + b for a, b in zip(self.told, told, strict=True)]
        return [max(each) for each in zip(*told, strict=True)]
