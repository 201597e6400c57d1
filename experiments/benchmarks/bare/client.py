"""A client of a parameter server that pushes and fetches when told, one at a time.

`DownpourSGD` without its steps: the same role, in the caller's thread, so that a push
and a fetch can be timed each by itself.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self, final

import torch

from distbelief.core.memory import Memory, PrivateMemory
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.client.link import ClientConfig
from distbelief.parameter_server.layout import Layout
from distbelief.protocol import Join
from distbelief.roles.role import SUPERVISOR, Address, Computed
from distbelief.serve.server import ServerAddress, listen_config_towards, parameter_specs
from distbelief.transport.node import RoleRunner
from distbelief.transport.shared_memory import FileMemory
from distbelief.worker.loop_worker import FETCH, INSTALLED, PUSHED, LoopWorker, StagedPush


TIMEOUT_SECONDS: Final = 60.0
TORN_WAIT_SECONDS: Final = 1e-3


@final
class BareClient:
    """A worker of the server at `address`; use it in a `with` statement.

    Args:
        parameters: What is fetched is copied into these.
        address: `ParameterServer.address`.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], address: str) -> None:
        server = ServerAddress.parse(address)
        memory: Memory = PrivateMemory(host="")
        if server.memory:
            memory = FileMemory(Path(server.memory))
        layout = Layout.of(parameter_specs(parameters), n_shards=server.n_shards)
        self._client = ParameterClient(
            ClientConfig(pushes=True),
            layout=layout,
            shards=[Address(f"shard-{k}") for k in range(server.n_shards)],
            memory=memory,
        )
        self._values = [parameter.detach().view(-1) for parameter in parameters]
        place = server.place()
        self._transport = listen_config_towards(place, secret=server.secret).transport(
            name=f"worker-{id(self)}", incarnation=1, run=server.run, log=_say
        )
        self._transport.start()
        self._transport.connect(SUPERVISOR, 1, str(place))
        join = Join(endpoint=self._transport.endpoint, host=memory.host, pid=0)
        self._worker = LoopWorker(client=self._client, join=join)
        self._node = RoleRunner(self._worker, transport=self._transport, log=_say)

    def __enter__(self) -> Self:
        self._wait(lambda: self._worker.has_joined)
        self._wait(lambda: self._client.ready)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._node.close()
        self._transport.close()

    def push(self, gradients: Sequence[torch.Tensor]) -> None:
        """Push; return when every shard has applied it."""
        client = self._client
        self._wait(lambda: client.can_push)
        outcome = client.stage(gradients, self._values)()
        push = StagedPush(outcome=outcome, n_gradients=1, samples=1)
        self._command(Computed(name=PUSHED, result=push))
        self._wait(lambda: client.unacknowledged == 0)

    def fetch(self) -> None:
        """Fetch; return when the values are in the parameters."""
        client = self._client
        self._command(Computed(name=FETCH))
        while True:
            self._wait(lambda: client.fetch_complete)
            outcome = client.install(self._values)()
            self._command(Computed(name=INSTALLED, result=outcome))
            if not outcome.torn:
                return
            self._node.pump(lambda: False, timeout_seconds=TORN_WAIT_SECONDS)

    def _command(self, command: Computed) -> None:
        if not self._node.tell(command):
            self._wait(lambda: False)  # says why

    def _wait(self, until: Callable[[], bool]) -> None:
        if not self._node.pump(until, timeout_seconds=TIMEOUT_SECONDS):
            raise RuntimeError(self._node.error or "the server does not answer")


def _say(level: str, text: str) -> None:
    if level != "info":
        print(f"{level}: {text}", flush=True)
