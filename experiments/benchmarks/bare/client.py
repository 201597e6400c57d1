"""A client of a parameter server that pushes and fetches when told, one at a time.

`DownpourSGD` without its steps: the same session, so that a push and a fetch can be timed each by
itself.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self, final

import torch

from distbelief.roles.role import Computed
from distbelief.serve.address import ServerAddress
from distbelief.serve.client_session import ClientSession
from distbelief.worker.loop_worker import FETCH, INSTALLED, PUSHED, StagedPush


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
        self._session = ClientSession(list(parameters), ServerAddress.parse(address))
        self._client = self._session.client

    def __enter__(self) -> Self:
        self._session.join(TIMEOUT_SECONDS)
        self._wait(lambda: self._client.ready)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._session.close()

    def push(self, gradients: Sequence[torch.Tensor]) -> None:
        """Push; return when every shard has applied it."""
        client = self._client
        self._wait(lambda: client.can_push)
        outcome = client.stage(gradients, self._session.values)()
        push = StagedPush(outcome=outcome, n_gradients=1, samples=1)
        self._command(Computed(name=PUSHED, result=push))
        self._wait(lambda: client.unacknowledged == 0)

    def fetch(self) -> None:
        """Fetch; return when the values are in the parameters."""
        client = self._client
        self._command(Computed(name=FETCH))
        while True:
            self._wait(lambda: client.fetch_complete)
            outcome = client.install(self._session.values)()
            self._command(Computed(name=INSTALLED, result=outcome))
            if not outcome.torn:
                return
            self._session.node.pump(lambda: False, timeout_seconds=TORN_WAIT_SECONDS)

    def _command(self, command: Computed) -> None:
        self._session.command(command, TIMEOUT_SECONDS)

    def _wait(self, until: Callable[[], bool]) -> None:
        self._session.wait(until, "an answer", TIMEOUT_SECONDS)
