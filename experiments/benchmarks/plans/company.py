"""Machines that know many plans of one net: all of them compared at one moment.

One process per machine, each on a core of its own, takes steps by whichever plan it is
told (`bare.repertoire`), and measures the net's layers in between (`pace`). So plans
meet again and again within seconds, and a host that others use too, which is faster and
slower by a third within minutes, is so for all of them alike.
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self, final

import msgspec

from distbelief.program.plan import Plan
from experiments.benchmarks.bare.repertoire import Asked, Setting
from experiments.benchmarks.measuring import measurement, paced
from experiments.benchmarks.measuring.crews import Hand
from experiments.benchmarks.measuring.workload import Workload
from experiments.benchmarks.network.hosts import HERE
from experiments.benchmarks.plans.pace import Pace, Paces, mean_pace


END_SECONDS_MAX: Final = 20.0


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

    def __init__(
        self, workload: Workload, plans: Mapping[str, Plan], folder: Path
    ) -> None:
        self._n_machines = max(plan.cluster.n_machines for plan in plans.values())
        self._needed = {name: plan.cluster.n_machines for name, plan in plans.items()}
        self._log = folder / "machines.log"
        self._setting = folder / "setting.json"
        paths = {name: folder / f"{index}.json" for index, name in enumerate(plans)}
        for name, plan in plans.items():
            plan.save(paths[name])
        setting = Setting(
            workload=workload,
            plans={name: str(path) for name, path in paths.items()},
            n_machines=self._n_machines,
            folder=str(folder),
        )
        self._setting.write_bytes(msgspec.json.encode(setting))
        self._processes: list[subprocess.Popen[str]] = []
        self._n_paces = 0

    def __enter__(self) -> Self:
        """Start all, and wait until each has taken a step by every plan."""
        cores = sorted(os.sched_getaffinity(0))
        try:
            for index in range(self._n_machines):
                hand = Hand(
                    module="bare.repertoire",
                    arguments=[str(self._setting), str(index), HERE[index].address],
                    host=HERE[index],
                )
                self._processes.append(hand.start(self._log))
            for process in self._processes:
                said = self._line(process)
                assert said == paced.READY, said
            for index, process in enumerate(self._processes):
                measurement.bind(process.pid, cores[index % len(cores)])
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """End all."""
        self._end()

    @property
    def n_bytes(self) -> int:
        """Memory that they hold now, for all plans."""
        return measurement.shared_out_bytes(process.pid for process in self._processes)

    def take(self, plan: str, *, n_steps: int) -> Taken:
        """Take so many steps by a plan; each lasts as on the slowest machine."""
        busy, began = measurement.busy_seconds(), time.monotonic()
        asked = Asked(plan=plan, n_steps=n_steps)
        answers = [json.loads(line) for line in self._ask(asked, self._processes)]
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
        asked = self._processes[:n_machines]
        self._n_paces += 1
        alone = self._layers([asked[self._n_paces % n_machines]])
        return Paces(alone=alone, together=self._layers(asked) if asked[1:] else alone)

    def _layers(self, processes: "Sequence[subprocess.Popen[str]]") -> Pace:
        return mean_pace([json.loads(line) for line in self._ask(Asked(), processes)])

    def _ask(
        self, asked: Asked, processes: "Sequence[subprocess.Popen[str]]"
    ) -> list[str]:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(asked).decode() + "\n")
            process.stdin.flush()
        return [self._line(process) for process in processes]

    def _line(self, process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            said = self._log.read_text(errors="replace")[-4000:]
            raise RuntimeError(f"a machine has ended, {process.poll()}:\n{said}")
        return line

    def _end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.kill()  # they hold nothing that anybody wants
            process.wait(END_SECONDS_MAX)
            process.stdin.close()
            process.stdout.close()
