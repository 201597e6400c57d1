"""One machine of a replica as in a job, but without a parameter server; it knows several plans.

    python -m experiments.benchmarks.bare.machine SETTING MACHINE ADDRESS

    ["rows", 3]  ->  [0.7, 0.7, 0.7]                seconds of three steps by plan "rows"
    null         ->  {"9f0c...": [0.02, 0.04], ..}  seconds of the net's layers now: both passes

Steps, messages, node, network and shared memory are the runtime's; parameters stay, the batch is
always the same, and gradients are left where they are. So a step's computation is measured, and its
messages. Plans that are compared share everything else: processes, memory, cores, and the moment.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from distbelief.core.memory import Memory, PrivateMemory, keep_memory
from distbelief.graph.graph import LayerGraph
from distbelief.plans import plan as plans
from distbelief.plans.compiler import Compiled, compile_plan
from distbelief.plans.planner.profiling.layer_timer import (
    FAILURES,
    Bench,
    Limits,
    busy_seconds,
    undisturbed,
    unlike,
)
from distbelief.plans.step_cost import Passes
from distbelief.protocol import TransferAck, TransferBlock
from distbelief.protocol.role import (
    ALL_MESSAGES,
    Action,
    Address,
    Computed,
    Event,
    Received,
    Seconds,
    SetTimer,
    Started,
    TimerFired,
)
from distbelief.transport.shared_memory import FileMemory
from distbelief.worker.batches import BatchIndices, BatchSlice, micro_sizes
from distbelief.worker.execution.dataflow import dataflow
from distbelief.worker.execution.executor import PartitionExecutor, StepResult
from distbelief.worker.steps import StepOutcome, StepRunner, links_of
from experiments.benchmarks.bare.exchange import attached, take_step
from experiments.benchmarks.measuring.workers import serve, timed
from experiments.benchmarks.measuring.workload import Workload


N_WARM_STEPS: Final = 2  # of each plan
RESEND_SECONDS: Final = 0.25
_RESEND: Final = "resend"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    workload: Workload
    plans: dict[str, str]  # their files, by name
    n_machines: int
    folder: str  # where they exchange their addresses
    memory: str = ""  # directory of the memory that they share; "" if they share none


class _SameBatch:
    """Steps that all have the same samples."""

    def __init__(self, n_samples: int) -> None:
        self._chosen = BatchIndices(position=0, indices=np.arange(n_samples))

    def start(self, position: int) -> None:
        """Do nothing."""

    def batch(self, step: int) -> BatchIndices:
        del step
        return self._chosen


class BareMachine:
    """Takes one step for each `STEP`."""

    accepts = ALL_MESSAGES

    def __init__(
        self,
        compiled: Compiled,
        machine: int,
        *,
        workload: Workload,
        micro_batches: int,
        tensors: Mapping[str, torch.Tensor],
        memory: Memory,  # all machines that share some are on one host
        generation: int = 1,
    ) -> None:
        flow = dataflow(compiled, machine, loss="loss")
        self.n_done = 0  # steps that are done
        self.loss: float | None = None  # sum over the last step's samples, if computed here
        self.gradients: dict[int, torch.Tensor] = {}  # of the last step, per tensor and region
        self.items = flow.items
        self.names = [Address(f"machine-{m}") for m in range(compiled.n_machines)]
        self._host = memory.host
        execution = PartitionExecutor(flow)
        self._links = links_of(
            execution,
            self.names,
            machine,
            memory=memory,
            batch=workload.batch_size,
            micro_batches=micro_batches,
        )
        self._steps = StepRunner(
            execution,
            links=self._links,
            batch_plan=_SameBatch(workload.batch_size),
            micro_batches=micro_batches,
            training=True,
            seed=(0,),
        )
        self._generation = generation
        self._parameters = [tensors[name][region.slices].clone() for name, region in flow.items]
        samples = dict(zip(("input", "targets"), workload.samples(), strict=True))
        self._inputs = {
            name: [samples[name][(slice(None), *region.slices)].contiguous() for region in regions]
            for name, regions in flow.reads.items()
        }
        self._computing = False

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        actions: list[Action] = []
        begun: Sequence[Action] = ()
        match event:
            case Started():
                self._steps.begin(self._generation)
                actions = [*self._steps.place(now), *self._resend(now)]
                for link in self._links.values():
                    actions += link.join(self._host, self._generation, now)
            case TimerFired(name=name) if name == _RESEND:
                actions = self._resend(now)
            case TimerFired():
                begun = self._open()
            case Received(sender=sender, message=TransferBlock() | TransferAck() as message):
                peer = self.names.index(sender)
                # The generation in place of the incarnation: its memory is the plan's own.
                actions = self._steps.receive(peer, self._generation, message, now)
            case Computed():
                actions = self._computed(event, now)
            case _:
                pass
        if self._computing:
            return actions
        begun = begun or self._steps.chain()
        self._computing = bool(begun)
        return [*begun, *actions]  # it computes on while the driver sends

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "computing" if self._computing else "waiting", {}

    def _open(self) -> Sequence[Action]:
        self.gradients.clear()
        return self._steps.open(
            BatchSlice(generation=self._generation, step=self._steps.step, inputs=self._inputs),
            self._parameters,
            put=self.gradients.__setitem__,
            close=_close,
        )

    def _computed(self, event: Computed, now: Seconds) -> list[Action]:
        if event.error is not None:
            raise event.error
        self._computing = False
        assert isinstance(event.result, StepOutcome)
        actions = self._steps.ran(event.result, now)
        if event.result.found is not None:
            self.loss = event.result.found.loss
            self.n_done += 1
        return actions

    def _resend(self, now: Seconds) -> list[Action]:
        actions = [a for c in self._links.values() for a in c.remind(now)]
        return [*actions, SetTimer(name=_RESEND, at=now + RESEND_SECONDS)]


class Machine:
    """Bare machines of several plans, one of which computes at a time.

    The generation of each, by which messages are told apart, is its place in `plans`, from 1.
    """

    accepts = ALL_MESSAGES

    def __init__(self, plans: Mapping[str, BareMachine], names: Sequence[Address]) -> None:
        self.names = names
        self._plans = plans
        self._generations = list(plans.values())
        self._now = self._generations[0]

    @property
    def n_done(self) -> int:
        return self._now.n_done

    @property
    def loss(self) -> float | None:
        return self._now.loss

    def choose(self, plan: str) -> None:
        """Let the next step be one of this plan; gradients of others are freed."""
        self._now.gradients.clear()
        self._now = self._plans[plan]

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        match event:
            case Started():
                found = [each.handle(event, now) for each in self._generations]
                return [action for actions in found for action in actions]
            case Received(message=TransferBlock() | TransferAck() as message):
                return self._generations[message.generation - 1].handle(event, now)
            case _:
                return self._now.handle(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        return self._now.status()


def machine_of(setting: Setting, machine: int) -> Machine:
    workload = setting.workload
    tensors = workload.tensors()
    shared = setting.memory
    memory = FileMemory(Path(shared)) if shared else PrivateMemory(host="")
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
            memory=memory,
            generation=generation,
        )
    names = [Address(f"machine-{index}") for index in range(setting.n_machines)]
    return Machine(found, names)


def present(graph: LayerGraph, *, batch: int) -> Callable[[], dict[str, Passes]]:
    """Return a function that times all whole layers once, by their keys in a profile.

    A call takes no longer than a step; the inputs are kept for the next call. Opaque layers are
    left out.
    """
    runs: dict[str, Callable[[], Passes]] = {}
    with undisturbed():
        bench = Bench(graph, batch, {}, Limits(timer=busy_seconds))
        for key, layer in unlike(graph, batch=batch, modules={}).items():
            with suppress(*FAILURES):
                runs[key] = bench.ready(layer)

    def measure() -> dict[str, Passes]:
        found: dict[str, Passes] = {}
        with undisturbed():
            for key, run in runs.items():
                with suppress(*FAILURES):
                    found[key] = run()
        return found

    return measure


def main(given: str, machine: int, address: str) -> None:
    keep_memory()
    torch.set_num_threads(1)
    setting = msgspec.json.decode(given, type=Setting)
    workload = setting.workload
    role = machine_of(setting, machine)
    names, folder = role.names, Path(setting.folder)
    with attached(role, machine, names, address=address, folder=folder) as node:

        @cache
        def layers() -> Callable[[], object]:
            found = present(workload.graph(), batch=workload.batch_size)
            found()  # warms up
            return found

        def answer(request: tuple[str, int] | None) -> object:
            if request is None:
                return layers()()
            plan, n_steps = request
            role.choose(plan)
            return timed(lambda: take_step(node, role), n_steps=n_steps)

        for plan in setting.plans:
            answer((plan, N_WARM_STEPS))
        serve(answer)


def _close(found: StepResult) -> None:
    del found  # gradients stay where they are


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
