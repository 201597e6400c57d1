"""Drives one replica in a test: the test acts as shard, executor and clock."""

from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np
import torch
from torch import nn

from distbelief import protocol as wire
from distbelief.core.memory import PrivateMemory
from distbelief.core.vectors import Vector
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.protocol import role as rl
from distbelief.task import dry_run
from distbelief.task.data import Dataset, DataShard
from distbelief.transport.node import _compute
from distbelief.worker.build import whole_replica
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.local_executor import FlatModel, LocalExecutor
from distbelief.worker.training import Training
from tests.distbelief.examples import Frames, net
from tests.distbelief.parameter_server.pair import gather, scatter


SHARD = rl.Address("shard-0")
USUAL = {"loss": "", "batch_size": 4, "rule": {"name": "sgd", "learning_rate": 0.1}}


class Shard:
    """A shard reached by messages; it records pushes and applies none."""

    def __init__(self, values: Vector) -> None:
        self.values = values  # what a fetch returns
        self.samples = 0  # in SessionOpened
        self.clock = 0  # when nothing is pushed
        self.n_fetches = 0
        self.acknowledges = True  # pushes, at once
        self.pushed: list[tuple[wire.Push, Vector]] = []
        self._blocks: dict[int, Vector] = {}

    def answer(self, message: wire.Message) -> list[wire.Message]:
        match message:
            case wire.OpenSession():
                return [
                    wire.SessionOpened(
                        term=1,
                        clock=0,
                        samples=self.samples,
                        watermark=message.next_sequence - 1,
                        applied=0,
                        parameters_region="",
                        push_buffers_region="",
                    )
                ]
            case wire.Fetch():
                self.n_fetches += 1
                return [
                    wire.ParameterBlock(
                        request=message.request,
                        term=1,
                        block_index=0,
                        clock=self.clock + len(self.pushed),
                        values=self.values.copy(),
                    )
                ]
            case wire.PushBlock():
                self._blocks[message.sequence] = message.values.copy()
                return [wire.PushBlockAck(sequence=message.sequence, term=1, received=1)]
            case wire.Push():
                self.pushed.append((message, self._blocks[message.sequence]))
                return self.acknowledge() if self.acknowledges else []
            case _:
                return []

    def acknowledge(self) -> list[wire.Message]:
        return [
            wire.PushApplied(
                sequence=self.pushed[-1][0].sequence, term=1, clock=len(self.pushed), staleness=0
            )
        ]


class RoleBench:
    """A role with one shard, whose actions wait for the test."""

    role: rl.Role  # set by the subclass

    def __init__(self, model: FlatModel, *, pushes: bool = True) -> None:
        self.layout = Layout.of(model.specs(), n_shards=1)
        values = np.zeros(self.layout.shard_size(0), np.float32)
        gather(self.layout, 0, model.values, values)
        self.shard = Shard(values)
        self.client = ParameterClient(
            ClientConfig(pushes=pushes), PartialView(self.layout), memory=PrivateMemory(host="")
        )
        self.computes: list[rl.Compute] = []  # requested, and has not run
        self.timers: dict[str, float] = {}
        self.reported: list[wire.Message] = []  # to others than the shard
        self.reports: list[rl.Report] = []  # its log
        self.saving: list[rl.Snapshot] = []  # whose `Persisted` has not come
        self.to_shard: list[wire.Message] = []  # sent, not yet arrived
        self._halted = False
        self.has_started = False
        self.now = 0.0

    def feed(self, event: rl.Event) -> list[rl.Action]:
        """Handle an event and record its actions."""
        actions = list(self.role.handle(event, self.now))
        for action in actions:
            match action:
                case rl.Send(receiver=receiver, message=message):
                    (self.to_shard if receiver == SHARD else self.reported).append(message)
                case rl.Compute():
                    self.computes.append(action)
                case rl.SetTimer():
                    self.timers[action.name] = action.at
                case rl.Report():
                    self.reports.append(action)
                case rl.Persist():
                    self.saving.append(action.snapshot)
                case rl.Exit():
                    self._halted = True
                case _:
                    raise AssertionError(action)
        return actions

    def receive(self, message: wire.Message, *, sender: str = rl.SUPERVISOR) -> list[rl.Action]:
        return self.feed(rl.Received(sender=rl.Address(sender), incarnation=1, message=message))

    def deliver(self) -> None:
        """Let the shard answer until no message is left."""
        while self.to_shard:
            for answer in self.shard.answer(self.to_shard.pop(0)):
                self.receive(answer, sender=SHARD)

    def acknowledge(self) -> None:
        for message in self.shard.acknowledge():
            self.receive(message, sender=SHARD)

    def compute(self, name: str = "") -> rl.Compute:
        """Run the oldest work, or the oldest of this name."""
        wanted = next(c for c in self.computes if name in c.name)
        self.computes.remove(wanted)
        self.feed(msgspec.structs.replace(_compute(wanted), seconds=0.25))
        return wanted

    def start(self, restored: rl.Snapshot | None = None) -> Self:
        """Start the role; the shard opens a session."""
        self.has_started = True
        self.feed(rl.Started(incarnation=1 if restored is None else 2, restored=restored))
        self.deliver()
        return self

    def run_while_it_can(self) -> list[str]:
        """Run until it waits for others than the shard; return the names of its work."""
        names: list[str] = []
        self.deliver()
        while self.computes:
            names.append(self.compute().name)
            self.deliver()
            assert len(names) < 1000
        return names

    def has_halted(self) -> bool:
        return self._halted

    @property
    def pending(self) -> list[str]:
        return [compute.name for compute in self.computes]

    @property
    def state(self) -> str:
        return self.role.status()[0]


class Bench(RoleBench):
    """A replica that trains a whole model."""

    def __init__(  # what a test may vary
        self,
        *,
        module: nn.Module | None = None,
        dataset: Dataset | None = None,
        n_samples: int = 64,
        await_begin: bool = False,
        samples_max: int | None = None,
        **settings: object,
    ) -> None:
        self.config = msgspec.convert(USUAL | settings, DownpourSettings)
        self.model = FlatModel(net() if module is None else module)
        super().__init__(self.model)
        self.dataset = Frames(n_samples=n_samples) if dataset is None else dataset
        self.data_shard = DataShard(len(self.dataset), replica_index=0, n_replicas=1, seed=0)
        self.role = self.replica = whole_replica(
            self.config,
            client=self.client,
            executor=LocalExecutor(
                self.model,
                self.dataset,
                loss=nn.functional.cross_entropy,
                names=dry_run.Names(model="net", loss="cross_entropy", data="data.train"),
                clip_norm=self.config.clip_norm,
                seed=(0, 0),
            ),
            data_shard=self.data_shard,
            await_begin=await_begin,
            samples_max=samples_max,
        )
        assert isinstance(self.replica.program, Training)
        self.counters = self.replica.program.counters

    def run_until_step(self, step: int) -> None:
        for _ in range(1000):
            if self.counters.steps >= step:
                return
            self.deliver()
            self.compute()
        raise AssertionError(f"step {step} never came: {self.replica.status()}")

    def run_to_the_end(self) -> Self:
        if not self.has_started:
            self.start()
        self.run_while_it_can()
        assert self.has_halted(), self.replica.status()
        return self

    def sums_pushed(self) -> list[list[torch.Tensor]]:
        """Return each push as flat tensors, in the order of the layout."""
        found: list[list[torch.Tensor]] = []
        for _, vector in self.shard.pushed:
            tensors = [torch.zeros(spec.n_elements) for spec in self.layout.tensors]
            scatter(self.layout, 0, vector, tensors)
            found.append(tensors)
        return found

    def sent(self, kind: type[wire.Message]) -> Sequence[wire.Message]:
        """Return undelivered messages to the shard, of one type."""
        return [message for message in self.to_shard if isinstance(message, kind)]
