"""The session of `DownpourSGD` with its parameter server.

There is no thread: the worker's role runs only inside the calls of `ClientSession`. Messages
that arrive in between wait in the socket.
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import final

import torch

from distbelief.core.memory import Memory, PrivateMemory
from distbelief.errors import JobError, PeerLostError, TransportError
from distbelief.parameter_server.client.client import ClientConfig, ParameterClient
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.replication import all_copy_names
from distbelief.protocol import Join
from distbelief.roles.role import SUPERVISOR, Computed
from distbelief.serve.address import ServerAddress, parameter_specs
from distbelief.transport.node import RoleRunner
from distbelief.transport.shared_memory import FileMemory
from distbelief.worker.loop_worker import LEAVE, LoopWorker


@final
class ClientSession:
    """A connection to a parameter server; call `join` before the first command.

    Args:
        parameters: The worker's parameters, in the order in which the server got them.
        address: The server's address.
        keys: Directory of this host's keys, for an address with a key.

    Attributes:
        values: One flat tensor for each parameter, a view of its memory.

    Raises:
        JobError: the address, the keys or the parameters are not valid.
        PeerLostError: a server on this host does not run.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        address: ServerAddress,
        *,
        keys: str | Path | None = None,
    ) -> None:
        self.address = address
        self.closed = False
        for parameter in parameters:
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        self.values = [parameter.detach().view(-1) for parameter in parameters]
        shards, backups = all_copy_names(address.n_shards, address.shard_copies)
        memory: Memory = PrivateMemory(host="")
        if address.memory and Path(address.memory).is_dir():  # this process sees it
            memory = FileMemory(Path(address.memory))
        self.client = ParameterClient(
            ClientConfig(pushes=True),
            layout=Layout.of(parameter_specs(parameters), n_shards=address.n_shards),
            shards=shards,
            memory=memory,
            backups=backups,
        )
        self._log: list[str] = []
        listen = address.listen_config(keys)
        self._key = "" if listen.keys is None else listen.keys.public
        self._transport = listen.transport(
            name=f"worker-{secrets.token_hex(6)}", incarnation=1, run=address.run, log=self._note
        )
        try:
            self._transport.start()
        except TransportError as error:
            if not listen.directory:
                raise
            raise PeerLostError(
                f"DownpourSGD: the server at {address.endpoint} cannot be reached: {error}"
            ) from None
        try:
            self._transport.connect(SUPERVISOR, 1, str(address.place()), watched=True)
        except BaseException:
            self._transport.close()
            raise
        join = Join(endpoint=self._transport.endpoint, host=memory.host, pid=0)
        self._worker = LoopWorker(client=self.client, join=join)
        self.node = RoleRunner(self._worker, transport=self._transport, log=self._note)

    def _note(self, level: str, text: str) -> None:
        if level in {"warning", "error"}:
            self._log = [*self._log[-9:], text]

    def join(self, timeout_seconds: float) -> None:
        """Join the server.

        Raises:
            JobError: the server does not allow this host's key.
            PeerLostError: the server does not answer in time.
        """

        def is_decided() -> bool:
            if not self._worker.has_joined and self._transport.is_refused(SUPERVISOR):
                raise JobError(
                    f"DownpourSGD: the server at {self.address.endpoint} does not allow this "
                    f"host's key. On the server: distbelief keys allow {self._key} NAME"
                )
            return self._worker.has_joined

        self.wait(is_decided, "a first answer", timeout_seconds)

    def command(self, command: Computed, timeout_seconds: float) -> None:
        """Perform one command of the worker's role.

        Raises:
            PeerLostError: the server has ended, or the session is closed.
        """
        if self.closed or not self.node.tell(command):
            self.wait(lambda: False, command.name, timeout_seconds)  # raises the reason

    def wait(self, until: Callable[[], bool], what: str, timeout_seconds: float) -> None:
        """Run the role until `until()` is true; `what` names the event in the error.

        Raises:
            PeerLostError: it does not happen in time, or the session is closed.
        """
        if self.closed:
            raise PeerLostError("DownpourSGD is closed: make a new one to continue")
        if self.node.pump(until, timeout_seconds=timeout_seconds):
            return
        server = f"DownpourSGD: server {self.address.endpoint}"
        if self.node.error is not None:
            raise PeerLostError(f"{server}: {self.node.error}")
        hint = (
            "Is it running, and is this the address that it prints now? A server in "
            "another directory has another run=."
        )
        if self._transport.has_other_key(SUPERVISOR):
            hint = (
                "The process that listens there has not the key in the address: use the "
                "address that the server prints now."
            )
        raise PeerLostError(
            f"{server}: no answer within {timeout_seconds:g} s (waiting for {what}). "
            + " ".join([hint, *self._log[-1:]])
        )

    def close(self) -> None:
        """Leave the server; unsent messages are sent, within a second."""
        if not self.closed:
            self.closed = True
            if self._worker.has_joined:
                self.node.tell(Computed(name=LEAVE))
            self.node.close()
            self._transport.close()
