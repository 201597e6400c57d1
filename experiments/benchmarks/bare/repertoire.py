"""A machine that knows several plans of one net, and takes steps by the one it is told.

    python -m experiments.benchmarks.bare.repertoire SETTING.json MACHINE ADDRESS

    parent                              process
      | <------------------- "ready"      |
      | {"plan": "rows", "n_steps": 3} -> |
      | <- [[0.7, 0.7, 0.7], 2.1]         |   seconds of each, and of the processor
      | {} -----------------------------> |
      | <- {"9f0c...": [0.02, 0.04], ...} |   layers now: both passes, by key
      | (end of input) -----------------> |   it ends

What is compared shares everything then but its plan: processes, memory, cores, and the
moment, for one step of each takes seconds, and starting a replica takes ten. Messages
are marked with their plan as a job's are with the generation of the replica.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, final

import msgspec
import torch

from distbelief.core.memory import keep_memory
from distbelief.partition.profiling.layer_timer import present
from distbelief.program import plan as plans
from distbelief.program.compiler import compile_plan
from distbelief.protocol import TransferAck, TransferBlock
from distbelief.roles.role import ALL_MESSAGES, Action, Address, Event, Received, Seconds, Started
from distbelief.transport.node import RoleRunner
from distbelief.worker.batches import micro_sizes
from experiments.benchmarks.bare.machine import BareMachine
from experiments.benchmarks.measuring import paced
from experiments.benchmarks.measuring.meeting import attached, take_step
from experiments.benchmarks.measuring.workload import Workload


N_WARM_STEPS: Final = 1
"""Of each plan, before anything is measured."""


@final
class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What machines compute.

    Attributes:
        workload: The net and the batch.
        plans: Their files, by name.
        n_machines: How many there are.
        folder: Where they tell each other their addresses.
    """

    workload: Workload
    plans: dict[str, str]
    n_machines: int
    folder: str


@final
class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a line of the standard input says; nothing: measure layers.

    Attributes:
        plan: Its name.
        n_steps: How many.
    """

    plan: str | None = None
    n_steps: int = 0


@final
class Repertoire:
    """Bare machines of several plans, one of which computes at a time.

    Args:
        machines: By the name of the plan; the generation of each is its place, from 1.
        names: Of the processes.
    """

    accepts = ALL_MESSAGES

    def __init__(self, machines: Mapping[str, BareMachine], names: Sequence[Address]) -> None:
        self.names = names
        self._machines = dict(machines)
        self._lives = list(machines.values())
        self._now = self._lives[0]

    @property
    def n_done(self) -> int:
        """Steps of the present plan that are done."""
        return self._now.n_done

    @property
    def loss(self) -> float | None:
        """Sum over the samples in the last of them, if it is computed here."""
        return self._now.loss

    def choose(self, plan: str) -> None:
        """Let the next step be one of this plan; of others gradients are forgotten."""
        self._now.gradients.clear()
        self._now = self._machines[plan]

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        match event:
            case Started():
                found = [each.handle(event, now) for each in self._lives]
                return [action for actions in found for action in actions]
            case Received(message=TransferBlock() | TransferAck() as message):
                return self._lives[message.generation - 1].handle(event, now)
            case _:
                return self._now.handle(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what it does."""
        return self._now.status()


def repertoire(setting: Setting, machine: int) -> Repertoire:
    """Return one machine; a plan for fewer machines it does not know."""
    workload = setting.workload
    tensors = workload.tensors()
    found: dict[str, BareMachine] = {}
    for generation, (name, path) in enumerate(setting.plans.items(), 1):
        plan = plans.load(path)
        compiled = compile_plan(
            workload.graph(),
            plan.placements,
            batch=micro_sizes(workload.batch_size, plan.micro_batches)[0],
            n_machines=setting.n_machines,
        )
        found[name] = BareMachine(
            compiled,
            machine,
            workload=workload,
            micro_batches=plan.micro_batches,
            tensors=tensors,
            generation=generation,
        )
    names = [Address(f"machine-{index}") for index in range(setting.n_machines)]
    return Repertoire(found, names)


def main(path: str, machine: int, address: str) -> None:
    keep_memory()
    torch.set_num_threads(1)
    setting = msgspec.json.decode(Path(path).read_bytes(), type=Setting)
    workload = setting.workload
    role = repertoire(setting, machine)
    with attached(role, machine, role.names, address=address, folder=Path(setting.folder)) as node:
        for plan in setting.plans:
            _steps(node, role, Asked(plan=plan, n_steps=N_WARM_STEPS))
        layers = present(workload.graph(), batch=workload.batch_size)
        layers()  # warms up
        print(paced.READY, flush=True)
        for line in sys.stdin:
            asked = msgspec.json.decode(line, type=Asked)
            found: object = _steps(node, role, asked) if asked.plan else layers()
            print(json.dumps(found), flush=True)


def _steps(node: RoleRunner, role: Repertoire, asked: Asked) -> tuple[list[float], float]:
    assert asked.plan is not None
    role.choose(asked.plan)
    began = time.process_time()
    times = paced.timed(lambda: take_step(node, role), n_steps=asked.n_steps)
    return times, time.process_time() - began


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
