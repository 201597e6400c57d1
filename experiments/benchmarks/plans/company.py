"""Machines that know many plans of one net: all of them compared at one moment.

One process per machine, each on a core of its own, takes steps by whichever plan it is
told (`bare.repertoire`), and measures the net's layers in between (`pace`). So plans
meet again and again within seconds, and a host that others use too, which is faster and
slower by a third within minutes, is so for all of them alike.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, final

import msgspec

from distbelief.program.plan import Plan
from experiments.benchmarks.bare.repertoire import Asked, Setting
from experiments.benchmarks.measuring import measurement
from experiments.benchmarks.measuring.hands import Hand, Hands
from experiments.benchmarks.measuring.workload import Workload
from experiments.benchmarks.network.hosts import HERE
from experiments.benchmarks.plans.pace import Pace, Paces, mean_pace


class Taken(NamedTuple):
    """Steps of one plan, one after the other.

    Attributes:
        seconds: Of each.
        cpu_seconds: Of all machines, per step.
        others: Processors that others kept busy meanwhile.
    """

    seconds: list[float]
    cpu_seconds: float
    others: float


@final
class Company:
    """The processes; a context manager.

    Args:
        workload: The net and the batch.
        plans: By name.
        folder: For what they are told, and say when they fail.
    """

    def __init__(self, workload: Workload, plans: Mapping[str, Plan], folder: Path) -> None:
        n_machines = max(plan.cluster.n_machines for plan in plans.values())
        self._needed = {name: plan.cluster.n_machines for name, plan in plans.items()}
        paths = {name: folder / f"{index}.json" for index, name in enumerate(plans)}
        for name, plan in plans.items():
            plan.save(paths[name])
        setting = Setting(
            workload=workload,
            plans={name: str(path) for name, path in paths.items()},
            n_machines=n_machines,
            folder=str(folder),
        )
        file = folder / "setting.json"
        file.write_bytes(msgspec.json.encode(setting))
        hands = [
            Hand(
                module="bare.repertoire",
                arguments=[str(file), str(index), HERE[index].address],
                host=HERE[index],
            )
            for index in range(n_machines)
        ]
        self._hands = Hands("machines", hands, folder)
        self._n_paces = 0

    def __enter__(self) -> Self:
        """Start all, and wait until each has taken a step by every plan."""
        self._hands.__enter__()
        self._hands.bind()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """End all."""
        self._hands.end()

    @property
    def n_bytes(self) -> int:
        """Memory that they hold now, for all plans."""
        return measurement.shared_out_bytes(self._hands.pids)

    def take(self, plan: str, *, n_steps: int) -> Taken:
        """Take so many steps by a plan; each lasts as on the slowest machine."""
        busy, began = measurement.busy_seconds(), time.monotonic()
        asked = Asked(plan=plan, n_steps=n_steps)
        answers = [json.loads(line) for line in self._ask(asked)]
        computed = sum(cpu_seconds for _, cpu_seconds in answers)
        others = measurement.busy_seconds() - busy - computed
        return Taken(
            seconds=[max(each) for each in zip(*(a[0] for a in answers), strict=True)],
            cpu_seconds=computed / n_steps,
            others=max(others, 0.0) / (time.monotonic() - began),
        )

    def n_machines(self, plan: str) -> int:
        """Return how many machines a plan needs."""
        return self._needed[plan]

    def paces(self, n_machines: int) -> Paces:
        """Measure all layers: on one of so many machines, then on all at once.

        Which one it is changes from time to time: cores are not all as fast.
        """
        self._n_paces += 1
        alone = self._layers([self._n_paces % n_machines])
        if n_machines == 1:
            return Paces(alone=alone, together=alone)
        return Paces(alone=alone, together=self._layers(range(n_machines)))

    def _layers(self, machines: Sequence[int]) -> Pace:
        return mean_pace([json.loads(line) for line in self._ask(Asked(), machines)])

    def _ask(self, asked: Asked, machines: Sequence[int] | None = None) -> list[str]:
        return self._hands.ask(msgspec.json.encode(asked).decode(), of=machines)
