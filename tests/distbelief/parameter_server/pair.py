"""A driver small enough for a test to control everything: roles, links, work, timers.

Messages go through the codec, in order per link. Work runs when the test (or `settle`) calls for
it, never inside `handle`; time passes when the test says so.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from distbelief.core.errors import RemoteProtocolError
from distbelief.core.memory import Memory, PrivateMemory
from distbelief.core.vectors import Vector
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.fetches import FetchResult
from distbelief.parameter_server.client.pushes import PushResult
from distbelief.parameter_server.layout import Layout, PartialView, TensorSpec
from distbelief.parameter_server.rules import SGD, UpdateRule
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ClientConfig, ShardConfig
from distbelief.parameter_server.tensor_copies import TensorCopier
from distbelief.protocol import Message
from distbelief.protocol.codec import Codec
from distbelief.protocol.role import (
    ALL_MESSAGES,
    Action,
    Address,
    CancelTimer,
    Compute,
    Computed,
    Event,
    Exit,
    Persist,
    Persisted,
    Received,
    Report,
    Role,
    Seconds,
    Send,
    SetTimer,
    Snapshot,
    Started,
    TimerFired,
)


CLIENT = Address("replica-0")
OTHER = Address("replica-1")
READER = Address("evaluator")
SHARD = Address("shard-0")
TEST = Address("supervisor")
M = TypeVar("M", bound=Message)

PLUS_ONE = SGD(learning_rate=1.0)  # applied to a gradient of -1, that is

SMALL = (TensorSpec(name="w", shape=(100,)), TensorSpec(name="m", shape=(3,)))
LARGE = (TensorSpec(name="w", shape=(300_000,)),)  # 3 blocks on one shard


def layout_of(
    tensors: Sequence[TensorSpec] = SMALL, *, n_shards: int = 1, n_buffers: int = 0
) -> Layout:
    """Return a layout in float64; the last `n_buffers` tensors given are buffers."""
    n_parameters = len(tensors) - n_buffers
    specs = [
        TensorSpec(name=t.name, shape=t.shape, kind="buffer") if i >= n_parameters else t
        for i, t in enumerate(tensors)
    ]
    return Layout.of(specs, n_shards=n_shards, dtype="float64")


def zeros_of(layout: Layout) -> list[torch.Tensor]:
    return [torch.zeros(spec.n_elements, dtype=torch.float64) for spec in layout.tensors]


def full_of(layout: Layout, value: float) -> list[torch.Tensor]:
    return [torch.full_like(zeros, value) for zeros in zeros_of(layout)]


def numbered(layout: Layout) -> list[torch.Tensor]:
    """Return the tensors of a layout, all elements different and none zero."""
    dtype = torch.float64 if layout.spec.dtype == "float64" else torch.float32
    tensors = []
    start = 1
    for spec in layout.tensors:
        tensors.append(torch.arange(start, start + spec.n_elements, dtype=dtype))
        start += spec.n_elements
    return tensors


def gather(layout: Layout, k: int, tensors: Sequence[torch.Tensor | None], vector: Vector) -> None:
    """Copy shard k's part of `tensors` into its vector; None for zeros."""
    put_all(PartialView(layout).copier(k), tensors, vector)


def put_all(copier: TensorCopier, tensors: Sequence[torch.Tensor | None], vector: Vector) -> None:
    for index, tensor in enumerate(tensors):
        copier.put(index, tensor, vector)
    copier.zero_padding(vector)


def scatter(layout: Layout, k: int, vector: Vector, tensors: Sequence[torch.Tensor]) -> None:
    """Copy shard k's vector into `tensors`."""
    PartialView(layout).copier(k).scatter(vector, tensors)


def sent(actions: Sequence[Action], kind: type[M]) -> list[M]:
    """Return the messages of this kind among the actions, in order."""
    return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def shard_of(
    layout: Layout,
    memory: Memory,
    *,
    index: int = 0,
    rule: UpdateRule = PLUS_ONE,
    pin_seconds_max: Seconds = 10.0,
    n_copies: int = 2,
    n_clients_max: int = 4096,
    initialise: Callable[[], Vector] | None = None,
) -> Shard:
    config = ShardConfig(
        index=index,
        layout=layout,
        rule=rule,
        pin_seconds_max=pin_seconds_max,
        n_copies=n_copies,
        n_clients_max=n_clients_max,
    )
    zeros = partial(np.zeros, layout.shard_size(index), layout.dtype)
    return Shard(config, memory=memory, initialise=initialise or zeros)


@dataclass(eq=False)
class Loop:
    """The least role around a client."""

    accepts = ALL_MESSAGES

    client: ParameterClient

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        if isinstance(event, Started):
            return self.client.start(event.incarnation, now)
        return self.client.handle(event, now)

    def status(self) -> tuple[str, Mapping[str, float]]:
        return "looping", self.client.counters()

    def validate(self) -> None:
        self.client.validate()


@dataclass(kw_only=True)
class Bench:
    """Roles on a bench: shards and clients of one layout."""

    layout: Layout
    memory: Memory = field(default_factory=lambda: PrivateMemory(poison=True))
    now: Seconds = 0.0
    roles: dict[Address, Role] = field(default_factory=dict)
    incarnations: dict[Address, int] = field(default_factory=dict)
    messages: deque[tuple[Address, Received]] = field(default_factory=deque)
    work: deque[tuple[Address, Compute | Persist]] = field(default_factory=deque)
    timers: dict[tuple[Address, str], Seconds] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    halted: dict[Address, Exit] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    to_test: list[Received] = field(default_factory=list)
    refused: list[RemoteProtocolError] = field(default_factory=list)
    lose: Callable[[Address, Message], bool] = lambda _receiver, _message: False
    disk_error: str | None = None
    wire: Codec = field(default_factory=lambda: Codec(run="bench"))

    def start(self, name: Address, role: Role, *, restored: Snapshot | None = None) -> None:
        """Begin an incarnation of `name`; whatever its last one had under way is gone."""
        self.kill(name)
        self.roles[name] = role
        incarnation = self.incarnations.get(name, 0) + 1
        self.incarnations[name] = incarnation
        self.deliver(name, Started(incarnation=incarnation, restored=restored))

    def kill(self, name: Address) -> None:
        """Its work and timers are gone, and so is what was on the way to it."""
        self.roles.pop(name, None)
        self.work = deque(item for item in self.work if item[0] != name)
        self.messages = deque(item for item in self.messages if item[0] != name)
        self.timers = {key: at for key, at in self.timers.items() if key[0] != name}

    def add_shard(
        self,
        name: Address = SHARD,
        *,
        restored: Snapshot | None = None,
        memory: Memory | None = None,
        rule: UpdateRule = PLUS_ONE,
        n_copies: int = 2,
        pin_seconds_max: Seconds = 10.0,
        n_clients_max: int = 4096,
        initialise: Callable[[], Vector] | None = None,
    ) -> Shard:
        shard = shard_of(
            self.layout,
            memory or self.memory,
            index=int(name.removeprefix("shard-")),
            rule=rule,
            n_copies=n_copies,
            pin_seconds_max=pin_seconds_max,
            n_clients_max=n_clients_max,
            initialise=initialise,
        )
        self.start(name, shard, restored=restored)
        return shard

    def add_client(
        self,
        name: Address = CLIENT,
        *,
        config: ClientConfig | None = None,
        memory: Memory | None = None,
        view: PartialView | None = None,
    ) -> ParameterClient:
        client = ParameterClient(
            config or ClientConfig(pushes=name != READER),
            view or PartialView(self.layout),
            memory=memory or self.memory,
        )
        self.start(name, Loop(client))
        return client

    def deliver(self, name: Address, event: Event) -> None:
        role = self.roles.get(name)
        if role is None:
            return
        try:
            actions = role.handle(event, self.now)
        except RemoteProtocolError as error:
            self.refused.append(error)
            return
        self.perform(name, actions)
        if isinstance(role, Shard | Loop):
            role.validate()

    def send(self, sender: Address, receiver: Address, message: Message, *, life: int = 0) -> None:
        """Put a message on its way, through the codec."""
        incarnation = life or self.incarnations.get(sender, 1)
        frames = self.wire.encode(message, sender=sender, incarnation=incarnation)
        envelope = self.wire.decode([bytes(frame) for frame in frames])
        received = Received(sender=sender, incarnation=incarnation, message=envelope.message)
        if receiver == TEST:
            self.to_test.append(received)
        elif not self.lose(receiver, message):
            self.messages.append((receiver, received))

    def perform(self, name: Address, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self.send(name, action.receiver, action.message)
                case SetTimer():
                    self.timers[name, action.name] = action.at
                case CancelTimer():
                    self.timers.pop((name, action.name), None)
                case Compute() | Persist():
                    self.work.append((name, action))
                case Report():
                    self.reports.append(action)
                case Exit():
                    self.halted[name] = action
                    self.kill(name)
                case _:
                    raise AssertionError(action)

    def run_work(self) -> None:
        """Run the oldest piece of work, and tell its role."""
        name, work = self.work.popleft()
        event: Event
        if isinstance(work, Persist):
            if self.disk_error is None:
                self.snapshots.append(copy_of(work.snapshot))
            event = Persisted(label=work.snapshot.label, error=self.disk_error)
        else:
            try:
                event = Computed(name=work.name, result=work.work())
            except Exception as error:  # noqa: BLE001 - told to the role
                event = Computed(name=work.name, error=error)
        self.deliver(name, event)

    def pass_messages(self) -> None:
        """Deliver all that is on its way, and what that brings about."""
        for _ in range(10_000):
            if not self.messages:
                return
            name, event = self.messages.popleft()
            self.deliver(name, event)
        raise AssertionError("messages without end")

    def settle(self) -> None:
        """Deliver all messages and run all work, until there is none."""
        self.pass_messages()
        while self.work:
            self.run_work()
            self.pass_messages()

    def advance(self, seconds: Seconds, *, settle: bool = True) -> None:
        """Let time pass: fire what comes due, and settle after each."""
        end = self.now + seconds
        while True:
            due = [(at, key) for key, at in self.timers.items() if at <= end]
            if not due:
                break
            at, key = min(due)
            del self.timers[key]
            self.now = max(self.now, at)
            self.deliver(key[0], TimerFired(name=key[1]))
            if settle:
                self.settle()
        self.now = end

    def begin_fetch(self, name: Address = CLIENT) -> None:
        self.perform(name, self.client(name).begin_fetch(self.now))

    def install(self, tensors: Sequence[torch.Tensor], name: Address = CLIENT) -> FetchResult:
        client = self.client(name)
        outcome = client.install(tensors)()
        self.perform(name, client.installed(outcome, self.now))
        return outcome

    def fetch(self, name: Address = CLIENT) -> list[torch.Tensor]:
        """Fetch, wait, install."""
        tensors = full_of(self.layout, np.nan)
        self.begin_fetch(name)
        self.settle()
        assert self.client(name).fetch_complete
        assert self.install(tensors, name).torn == ()
        self.settle()
        return tensors

    def push(
        self, value: float = -1.0, name: Address = CLIENT, *, buffers: float = 0.0, samples: int = 0
    ) -> PushResult:
        """Stage and send a gradient of `value` everywhere; do not wait."""
        values = full_of(self.layout, buffers)
        return self.push_tensors(full_of(self.layout, value), values, name, samples=samples)

    def push_tensors(
        self,
        gradients: Sequence[torch.Tensor | None],
        values: Sequence[torch.Tensor],
        name: Address = CLIENT,
        *,
        samples: int = 1,
        skip_missing: bool = False,
    ) -> PushResult:
        """Stage and send gradients, and the values of buffers; do not wait."""
        client = self.client(name)
        pairs = zip(client.view.tensors, gradients, values, strict=True)
        touched = [one if spec.kind == "parameter" else value for spec, one, value in pairs]
        draft = client.draft(touched=touched if skip_missing else None)
        outcome = draft.put_all(gradients, values)
        actions = client.staged(outcome, n_gradients=1, samples=samples, now=self.now)
        self.perform(name, actions)
        return outcome

    def client(self, name: Address = CLIENT) -> ParameterClient:
        role = self.roles[name]
        assert isinstance(role, Loop)
        return role.client

    def counters(self, name: Address = SHARD) -> Mapping[str, float]:
        return self.roles[name].status()[1]


def copy_of(snapshot: Snapshot) -> Snapshot:
    """Return what a disk would give back."""
    arrays = {name: array.copy() for name, array in snapshot.arrays.items()}
    return replace(snapshot, arrays=arrays)
