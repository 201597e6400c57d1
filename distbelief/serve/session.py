"""The session of a process with a parameter server: its role, its transport, what it waits for."""

import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast, final

import torch

from distbelief.core.errors import JobError, PeerLostError, TransportError
from distbelief.core.memory import Memory, PrivateMemory
from distbelief.core.signals import HeldInterrupt
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.parameter_server.policy import DOWNPOUR, ExchangePolicy
from distbelief.parameter_server.shard_config import ClientConfig
from distbelief.protocol import Join
from distbelief.protocol.role import SUPERVISOR, Computed
from distbelief.serve.address import ServerAddress, parameter_specs
from distbelief.transport.node import BackgroundRunner, RoleRunner
from distbelief.transport.shared_memory import FileMemory
from distbelief.transport.zmq_transport import ANOTHER, REFUSED
from distbelief.worker import loop_worker as lw


LOGGING = logging.getLogger("distbelief.loop")
RETRY_SECONDS = 2.0  # the blocks under way take 1.4 s at 100 Mbit/s


@final
class ClientSession:
    """A connection to a parameter server; call `join` before the first command.

    Once `background` is used, everything but `check` and `close` needs to hold it.

    JobError if address, keys or parameters are not valid; PeerLostError if a server on this host
    does not run.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],  # in the order in which the server got them
        address: ServerAddress,
        *,
        user: str,  # the class whose session it is, for errors
        buffers: Sequence[torch.Tensor] = (),  # in that order, too
        keys: str | Path | None = None,  # directory of this host's keys, for an address with a key
        exchange: ExchangePolicy = DOWNPOUR,
        frozen: Collection[int] = (),  # parameters that are fetched once and never pushed
    ) -> None:
        specs = parameter_specs(parameters, buffers=buffers)
        self.address = address
        self._user = user
        self.now = time.monotonic
        self._is_closed = self._is_refused = False
        self._pid = os.getpid()
        # One flat tensor for each parameter and each buffer: a view of its memory, or, where that
        # has another order (channels_last), a copy.
        self.values = [tensor.detach().contiguous().view(-1) for tensor in (*parameters, *buffers)]
        memory: Memory = PrivateMemory(host="")
        if address.memory and Path(address.memory).is_dir():  # this process sees it
            memory = FileMemory(Path(address.memory))
        layout = Layout.of(specs, n_shards=address.n_shards)
        self.client = ParameterClient(
            ClientConfig.of(exchange, retry_seconds=RETRY_SECONDS),
            PartialView(layout, frozen={layout.tensors[place].name for place in frozen}),
            memory=memory,
            shard_copies=address.shard_copies,
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
                f"{self._user}: the server at {address.endpoint} cannot be reached: {error}"
            ) from None
        try:
            self._transport.connect(SUPERVISOR, 1, str(address.place()), watched=True)
        except BaseException:
            self._transport.close()
            raise
        join = Join(endpoint=self._transport.endpoint, host=memory.host, pid=0)
        self._worker = lw.LoopWorker(client=self.client, join=join)
        self.node = RoleRunner(self._worker, transport=self._transport, log=self._note)
        self.moves_blocks = not memory.host  # not through shared memory
        self._thread: BackgroundRunner | None = None
        if self.moves_blocks:
            self._thread = BackgroundRunner(self.node, name=f"{user}-blocks")
        self.background: AbstractContextManager[None] = self._thread or nullcontext()
        self.uninterrupted = HeldInterrupt(self.node.wake)

    @property
    def closed(self) -> bool:
        # A forked child, such as a DataLoader's, has neither the thread nor the sockets.
        return self._is_closed or os.getpid() != self._pid

    def _note(self, level: str, text: str) -> None:
        if level in {"warning", "error"}:
            LOGGING.warning("%s: %s", self._user, text)
            self._log = [*self._log[-9:], text]

    def join(self, timeout_seconds: float) -> None:
        self.wait(lambda: self._worker.has_joined, "a first answer", timeout_seconds)
        LOGGING.info("%s has joined the server at %s", self._user, self.address.endpoint)

    def command(self, command: Computed, timeout_seconds: float) -> None:
        """Perform one command of the worker's role, or raise PeerLostError."""
        if self.closed or not self.node.tell(command):
            self.wait(lambda: False, command.name, timeout_seconds)  # raises the reason

    def check(self) -> None:
        """Raise PeerLostError if the session is closed, or its role has ended in the thread.

        JobError if the server has refused these parameters.
        """
        if self.closed:
            raise PeerLostError(f"{self._user} is closed: make a new one to continue")
        if self.node.error is not None:
            kind, _, text = self.node.error.partition(": ")
            text = f"{self._user}: server {self.address.endpoint}: {text}"
            if kind != JobError.__name__:
                raise PeerLostError(text)
            hint = "" if "layout" not in text else ", with the parameters in the same order"
            raise JobError(text + hint)

    def wait(self, until: Callable[[], bool], what: str, timeout_seconds: float) -> None:
        """Run the role until `until()` is true; PeerLostError, with `what`, if it never is.

        The time limit begins anew whenever a block comes or is acknowledged: 1 GB over a slow link
        may take many minutes, and is no silence.

        JobError if the server does not allow this host's key, or not any more.
        """

        def is_decided() -> bool:
            self.uninterrupted.check()
            # ZeroMQ has given up for good: say it of whatever the loop waits for from now on.
            self._is_refused |= self._transport.has_failed(SUPERVISOR, REFUSED)
            if self._is_refused:
                allows = "no longer allows" if self._worker.has_joined else "does not allow"
                raise JobError(
                    f"{self._user}: the server at {self.address.endpoint} {allows} this "
                    f"host's key. On the server: distbelief keys allow {self._key} NAME"
                )
            return until()

        if not self.closed and self.node.pump(
            is_decided, timeout_seconds=timeout_seconds, progress=lambda: self.client.progress
        ):
            return
        self.check()
        hint = (
            "Is it running, and is this the address that it prints now? A server in "
            "another directory has another run=."
        )
        if self._transport.has_failed(SUPERVISOR, ANOTHER):
            hint = (
                "The process that listens there has not the key in the address: use the "
                "address that the server prints now."
            )
        raise PeerLostError(
            f"{self._user}: server {self.address.endpoint}: no answer within {timeout_seconds:g} s "
            f"(waiting for {what}). " + " ".join([hint, *self._log[-1:]])
        )

    def close(self) -> None:
        """Leave the server; unsent messages are sent, within a second."""
        if self.closed:
            return
        self._is_closed = True
        LOGGING.info("%s has left the server", self._user)
        if self._thread is None:
            self._leave()
        else:
            self._thread.end(self._leave)

    def _leave(self) -> None:
        if self._worker.has_joined:
            self.node.tell(Computed(name=lw.LEAVE))
        self.node.close()
        self._transport.close()


def in_order(
    state: Mapping[str, object], names: Sequence[str], tensors: Sequence[torch.Tensor], *, user: str
) -> list[torch.Tensor]:
    """Return what a model's state has for these tensors, in their order and types.

    JobError if something is missing, has another shape, or is there for no tensor.
    """
    if not names:
        raise JobError(
            f"{user}: the server does not know what its tensors are called: give ParameterServer "
            "the module, or net.named_parameters()"
        )
    if not isinstance(cast("object", state), Mapping):
        raise JobError(f"{user}: the state is a {type(state).__name__}: give net.state_dict()")
    found: list[torch.Tensor] = []
    for name, tensor in zip(names, tensors, strict=True):
        value = state.get(name)
        if not isinstance(value, torch.Tensor) or value.shape != tensor.shape:
            there = list(value.shape) if isinstance(value, torch.Tensor) else "nothing"
            raise JobError(
                f"{user}: the state has {there} as {name!r}, where the server has "
                f"{list(tensor.shape)}: give the state of the model that is served"
            )
        found.append(value.detach().to(tensor.dtype, copy=True).contiguous())
    for name in state.keys() - set(names):
        # A tied tensor has several names, and the server knows one.
        if not any(torch.equal(one, cast("torch.Tensor", state[name])) for one in found):
            raise JobError(
                f"{user}: the state has {name!r}, which is not served: give ParameterServer the "
                "module, so that its buffers are"
            )
    return found


def set_values(
    values: Sequence[torch.Tensor],  # parameters, then buffers, in the server's order
    address: ServerAddress,
    *,
    user: str,
    timeout_seconds: float,
    keys: str | Path | None = None,
) -> None:
    """Set the server's values, frozen ones too; its rule keeps its state."""
    n = len(values) - address.n_buffers
    parameters = [torch.nn.Parameter(value, requires_grad=False) for value in values[:n]]
    session = ClientSession(parameters, address, user=user, buffers=values[n:], keys=keys)
    try:
        session.join(timeout_seconds)
        client = session.client
        session.wait(lambda: client.can_push, "room for a push", timeout_seconds)
        outcome = client.draft().put_all(session.values, session.values)
        if not outcome.finite:
            raise JobError(f"{user}: the state has NaN or infinite values: it would spoil all")
        push = lw.StagedPush(outcome=outcome, n_gradients=0, samples=0, sets=True)
        session.command(Computed(name=lw.PUSHED, result=push), timeout_seconds)
        session.wait(lambda: client.unacknowledged == 0, "an acknowledgement", timeout_seconds)
    finally:
        session.close()
