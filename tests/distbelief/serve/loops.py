"""Users' training loops and the shards of their server, on one simulated cluster.

`DownpourSGD`, its role and the shards are the real ones; only the session differs: it lets
virtual time pass where the real one waits at a socket.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import cast

import pytest
import torch
from torch import nn

import distbelief
from distbelief.core.memory import Memory
from distbelief.core.signals import HeldInterrupt
from distbelief.core.vectors import Vector
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy, Numbers
from distbelief.parameter_server.rules import UpdateRule
from distbelief.parameter_server.shard import Shard
from distbelief.parameter_server.shard_config import ClientConfig, ShardConfig
from distbelief.protocol import Join, PeerEntry, Peers
from distbelief.protocol.role import SUPERVISOR, Address, Computed, Received
from distbelief.serve.address import ServerAddress, parameter_specs
from distbelief.serve.session import RETRY_SECONDS
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.machines import ClusterOptions, SimulatedMachine
from distbelief.simulation.network import Link
from distbelief.worker.loop_worker import LoopWorker
from tests.distbelief.parameter_server.pair import gather, scatter


class Server:
    """Shards that begin with the parameters' values, and some loops; host "": no shared memory."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        rule: UpdateRule,
        n_shards: int = 2,
        n_loops: int = 1,
        host: str = "host-0",
        link: Link | None = None,
        numbers: Numbers = "float32",
        policy: ExchangePolicy = DOWNPOUR,
        preset: str = "",
        buffers: Sequence[torch.Tensor] = (),
        names: Sequence[str] = (),
    ) -> None:
        self.host = host
        self.policy = policy
        self.preset, self.names, self.n_buffers = preset, tuple(names), len(buffers)
        self.turns: Turns | None = None
        specs = parameter_specs(parameters, buffers=buffers)
        self.layout = Layout.of(specs, n_shards=n_shards)
        frozen = [
            spec.name for spec, one in zip(specs, parameters, strict=False) if not one.requires_grad
        ]
        self.shards = [Address(f"shard-{k}") for k in range(n_shards)]
        self.workers = [Address(f"worker-{i}") for i in range(n_loops)]
        self.free = list(self.workers)
        first = [one.detach().reshape(-1).clone() for one in (*parameters, *buffers)]

        def initial(k: int) -> Vector:
            vector = torch.zeros(self.layout.shard_size(k)).numpy()
            gather(self.layout, k, first, vector)
            return cast("Vector", vector)

        def shard(k: int, memory: Memory) -> Shard:
            config = ShardConfig(index=k, layout=self.layout, rule=rule, policy=policy)
            values = partial(initial, k)
            return Shard(config, memory=memory, initialise=values)

        def worker(memory: Memory) -> LoopWorker:
            client = ParameterClient(
                ClientConfig.of(ExchangePolicy(numbers=numbers), retry_seconds=RETRY_SECONDS),
                PartialView(self.layout, frozen=frozen),
                memory=memory,
            )
            join = Join(endpoint="", host=memory.host, pid=0)
            return LoopWorker(client=client, join=join)

        roles: dict[Address, Callable[[Memory], LoopWorker | Shard]] = {
            **{name: partial(shard, k) for k, name in enumerate(self.shards)},
            **dict.fromkeys(self.workers, worker),
        }
        options = ClusterOptions(
            introduce=True, machine=SimulatedMachine(host=host), link=link or Link()
        )
        self.simulation = SimulatedCluster(roles, seed=0, options=options)

    def compute(self, seconds: float) -> None:
        """Let time pass as while a user computes: the roles run on, and other loops."""
        end = self.simulation.now + seconds
        if self.turns is None:
            self.simulation.run(until=end)
        else:
            self.turns.wait(lambda: self.simulation.now >= end)

    def run_together(self, *loops: Callable[[], None]) -> None:
        """Run loops that wait for each other."""
        self.turns = Turns(self.simulation, loops)
        try:
            self.turns.run()
        finally:
            self.turns = None

    def values(self) -> list[torch.Tensor]:
        """Return the shards' values as flat tensors, in the order of the parameters."""
        tensors = [torch.zeros(spec.n_elements) for spec in self.layout.tensors]
        for k, name in enumerate(self.shards):
            shard = self.simulation.role(name)
            assert isinstance(shard, Shard)
            scatter(self.layout, k, shard.values.vector, tensors)
        return tensors

    def samples(self, worker: str) -> tuple[int, int | None]:
        """Return a worker's samples that the shards know, in all and of its last push."""
        roles = [self.simulation.role(name) for name in self.shards]
        sessions = [r._sessions.get(Address(worker)) for r in roles if isinstance(r, Shard)]
        (counts,) = {(one.samples, one.n_samples) for one in sessions if one is not None}
        return counts

    def optimizer(
        self, monkeypatch: pytest.MonkeyPatch, params: object, **options: object
    ) -> distbelief.DownpourSGD:
        """Return the optimizer of one more loop."""
        address = self._address(monkeypatch)
        return distbelief.DownpourSGD(
            params,  # type: ignore[arg-type]
            server=address,
            **options,  # type: ignore[arg-type]
        )

    def exchange(
        self, monkeypatch: pytest.MonkeyPatch, inner: torch.optim.Optimizer, **options: object
    ) -> distbelief.Exchange:
        """Return the exchange of one more loop."""
        address = self._address(monkeypatch)
        return distbelief.Exchange(inner, server=address, **options)  # type: ignore[arg-type]

    def _address(self, monkeypatch: pytest.MonkeyPatch) -> str:
        server = self

        class OfThis(SimulatedSession):
            def __init__(
                self,
                parameters: list[nn.Parameter],
                _address: object,
                *,
                buffers: Sequence[torch.Tensor],
                **_options: object,
            ) -> None:
                super().__init__(server, [*parameters, *buffers])

        monkeypatch.setattr("distbelief.serve.server_loop.ClientSession", OfThis)
        monkeypatch.setattr("distbelief.serve.session.ClientSession", OfThis)
        address = ServerAddress(
            endpoint="ipc:///nowhere/.supervisor.1",
            run="t",
            n_shards=len(self.shards),
            memory="",
            exchange=self.policy,
            preset=self.preset,
            n_buffers=self.n_buffers,
            names=self.names,
        )
        return str(address)


TICK_SECONDS = 1e-3


class Turns:
    """Loops in threads, one at a time: while one waits for messages, the next one runs.

    Once all wait, virtual time passes until one need not. So the order is always the same.
    """

    def __init__(self, simulation: SimulatedCluster, loops: Sequence[Callable[[], None]]) -> None:
        self._simulation = simulation
        self._untils: dict[int, Callable[[], bool]] = dict.fromkeys(range(len(loops)), lambda: True)
        self._batons = [threading.Semaphore(0) for _ in loops]
        self._threads = [
            threading.Thread(target=self._run, args=(index, loop), daemon=True)
            for index, loop in enumerate(loops)
        ]
        self._now = 0
        self._over = threading.Semaphore(0)
        self._error: BaseException | None = None

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        self._pass_on()
        self._over.acquire()
        if self._error is not None:
            raise self._error

    def wait(self, until: Callable[[], bool]) -> None:
        me = self._now
        self._untils[me] = until
        self._pass_on()
        self._batons[me].acquire()

    def _run(self, me: int, loop: Callable[[], None]) -> None:
        self._batons[me].acquire()
        try:
            loop()
            del self._untils[me]
            self._pass_on()
        except BaseException as error:  # noqa: BLE001 -- raised by `run`
            self._error = error
            self._over.release()

    def _pass_on(self) -> None:
        if not self._untils:
            self._over.release()
            return
        end = self._simulation.now + 60.0
        while not any(until() for until in self._untils.values()):
            assert self._simulation.now < end, "all loops wait"
            self._simulation.run(until=self._simulation.now + TICK_SECONDS)
        n = len(self._batons)
        order = [(self._now + 1 + i) % n for i in range(n)]
        self._now = next(i for i in order if i in self._untils and self._untils[i]())
        self._batons[self._now].release()


class SimulatedSession:
    """Replaces `optimizer.ClientSession`, in virtual time."""

    def __init__(self, server: Server, tensors: Sequence[torch.Tensor]) -> None:
        self.values = [tensor.detach().contiguous().view(-1) for tensor in tensors]
        self.closed = False
        self.node = self
        self.background = nullcontext()
        self.uninterrupted = HeldInterrupt(lambda: None)
        self.moves_blocks = not server.host
        self.now = lambda: server.simulation.now
        self._server = server
        self._name = server.free.pop(0)
        self._simulation = server.simulation
        self._simulation.run(until=self._simulation.now + 0.01)
        worker = self._simulation.role(self._name)
        assert isinstance(worker, LoopWorker)
        self.client = worker.client

    def join(self, _timeout_seconds: float) -> None:
        entries = tuple(
            PeerEntry(name=name, incarnation=1, endpoint="", host="")
            for name in self._server.shards
        )
        peers = Peers(entries=entries)
        event = Received(sender=SUPERVISOR, incarnation=1, message=peers)
        self._simulation.post(self._name, event)
        self._simulation.run(until=self._simulation.now)

    def check(self) -> None:
        if self.closed:
            raise distbelief.PeerLostError("Exchange is closed")

    def command(self, command: Computed, _timeout_seconds: float) -> None:
        self._simulation.post(self._name, command)
        self._simulation.run(until=self._simulation.now)

    def wait(self, until: Callable[[], bool], what: str, _seconds: float) -> None:
        if self._server.turns is not None:
            self._server.turns.wait(until)
        else:
            self._simulation.run_until(until, within=60.0)
        assert until(), what

    def pump(self, _until: Callable[[], bool], *, timeout_seconds: float) -> bool:
        self._simulation.run(until=self._simulation.now + timeout_seconds)
        return False

    def close(self) -> None:
        self.closed = True
