"""Users' training loops and the shards of their server, on one simulated cluster.

`DownpourSGD`, its role and the shards are the real ones; only the session differs: it lets
virtual time pass where the real one waits at a socket.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import cast

import pytest
import torch
from torch import nn

import distbelief
from distbelief.core.memory import Memory
from distbelief.core.vectors import Vector
from distbelief.parameter_server.client.client import ClientConfig, Numbers, ParameterClient
from distbelief.parameter_server.config import ShardConfig
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.optimizers import UpdateRule
from distbelief.parameter_server.shard import Shard
from distbelief.protocol import Join, PeerEntry, Peers
from distbelief.roles.role import SUPERVISOR, Address, Computed, Received
from distbelief.serve.address import ServerAddress, parameter_specs
from distbelief.simulation.cluster import SimulatedCluster
from distbelief.simulation.machines import ClusterOptions, Machine
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
    ) -> None:
        self.host = host
        specs = parameter_specs(parameters)
        self.layout = Layout.of(specs, n_shards=n_shards)
        self.shards = [Address(f"shard-{k}") for k in range(n_shards)]
        self.workers = [Address(f"worker-{i}") for i in range(n_loops)]
        self.free = list(self.workers)
        first = [parameter.detach().reshape(-1).clone() for parameter in parameters]

        def initial(k: int) -> Vector:
            vector = torch.zeros(self.layout.shard_size(k)).numpy()
            gather(self.layout, k, first, vector)
            return cast("Vector", vector)

        def shard(k: int, memory: Memory) -> Shard:
            config = ShardConfig(index=k, layout=self.layout, rule=rule)
            values = partial(initial, k)
            return Shard(config, memory=memory, initialise=values)

        def worker(memory: Memory) -> LoopWorker:
            client = ParameterClient(
                ClientConfig(pushes=True, numbers=numbers),
                layout=self.layout,
                shards=self.shards,
                memory=memory,
            )
            join = Join(endpoint="", host=memory.host, pid=0)
            return LoopWorker(client=client, join=join)

        roles: dict[Address, Callable[[Memory], LoopWorker | Shard]] = {
            **{name: partial(shard, k) for k, name in enumerate(self.shards)},
            **dict.fromkeys(self.workers, worker),
        }
        options = ClusterOptions(introduce=True, machine=Machine(host=host), link=link or Link())
        self.simulation = SimulatedCluster(roles, seed=0, options=options)

    def compute(self, seconds: float) -> None:
        """Let time pass as while a user computes: the roles run on."""
        self.simulation.run(until=self.simulation.now + seconds)

    def values(self) -> list[torch.Tensor]:
        """Return the shards' values as flat tensors, in the order of the parameters."""
        tensors = [torch.zeros(spec.n_elements) for spec in self.layout.tensors]
        for k, name in enumerate(self.shards):
            shard = self.simulation.role(name)
            assert isinstance(shard, Shard)
            scatter(self.layout, k, shard._values.vector, tensors)
        return tensors

    def optimizer(
        self, monkeypatch: pytest.MonkeyPatch, params: object, **options: float | bool | None
    ) -> distbelief.DownpourSGD:
        """Return the optimizer of one more loop."""
        address = self._address(monkeypatch)
        return distbelief.DownpourSGD(
            params,  # type: ignore[arg-type]
            server=address,
            **options,  # type: ignore[arg-type]
        )

    def exchange(
        self, monkeypatch: pytest.MonkeyPatch, inner: torch.optim.Optimizer, *, every: int = 64
    ) -> distbelief.Exchange:
        """Return the exchange of one more loop."""
        return distbelief.Exchange(inner, server=self._address(monkeypatch), every=every)

    def _address(self, monkeypatch: pytest.MonkeyPatch) -> str:
        server = self

        class OfThis(SimulatedSession):
            def __init__(
                self, parameters: list[nn.Parameter], _address: object, **_options: object
            ) -> None:
                super().__init__(server, parameters)

        monkeypatch.setattr("distbelief.server_loop.ClientSession", OfThis)
        address = ServerAddress(
            endpoint="ipc:///nowhere/.supervisor.1", run="t", n_shards=len(self.shards), memory=""
        )
        return str(address)


class SimulatedSession:
    """Replaces `optimizer.ClientSession`, in virtual time."""

    def __init__(self, server: Server, parameters: list[nn.Parameter]) -> None:
        self.values = [parameter.detach().view(-1) for parameter in parameters]
        self.closed = False
        self.node = self
        self.background = nullcontext()
        self.moves_blocks = not server.host
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

    def check(self) -> None:
        if self.closed:
            raise distbelief.PeerLostError("Exchange is closed")

    def command(self, command: Computed, _timeout_seconds: float) -> None:
        self._simulation.post(self._name, command)
        self._simulation.run(until=self._simulation.now)

    def wait(self, until: Callable[[], bool], what: str, _seconds: float) -> None:
        self._simulation.run_until(until, within=60.0)
        assert until(), what

    def pump(self, _until: Callable[[], bool], *, timeout_seconds: float) -> bool:
        self._simulation.run(until=self._simulation.now + timeout_seconds)
        return False

    def close(self) -> None:
        self.closed = True
