"""What `DownpourSGD` and `Exchange` share: the session of a user's loop with a parameter server.

    user's thread          compute | step | compute         | step | ...
    role "worker-..." in   thread  | here | thread          | here | ...

Between steps a thread runs the role, so that blocks travel while the user computes. It never
touches the user's tensors: those change only in `step` and `finish`. With shared memory there are
no blocks and no thread; the few messages wait in the socket. Ctrl+C acts between changes: while
`step` and `finish` wait, or at their end, so that the loop can still finish.
"""

import atexit
import math
import os
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import index
from pathlib import Path
from typing import final

import torch

from distbelief.core.memory import Memory, PrivateMemory
from distbelief.core.signals import HeldInterrupt
from distbelief.errors import DistBeliefError, JobError, PeerLostError, TransportError
from distbelief.parameter_server.client.client import ParameterClient
from distbelief.parameter_server.config import ClientConfig, Numbers
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.protocol import Join
from distbelief.roles.role import SUPERVISOR, Computed
from distbelief.serve.address import ServerAddress, parameter_specs
from distbelief.transport.node import BackgroundRunner, RoleRunner
from distbelief.transport.shared_memory import FileMemory
from distbelief.transport.zmq_transport import ANOTHER, REFUSED
from distbelief.worker import loop_worker as lw


TORN_WAIT_SECONDS = 1e-3
RETRY_SECONDS = 2.0  # the blocks under way take 1.4 s at 100 Mbit/s
LOOK_SECONDS = 1e-4  # for messages, in a step that waits for nothing
JOIN_SECONDS_MAX = 10.0  # a server that runs answers at once
EXIT_SECONDS_MAX = 5.0  # at interpreter exit, for unfinished pushes
_NOBODY = "workers have no number: any may come and go"
# Options of other libraries that a loop has none of
ELSEWHERE = {
    **dict.fromkeys(("rank", "world_size", "workers", "num_workers", "replicas"), _NOBODY),
    **dict.fromkeys(("process_group", "backend"), "give server, the address of a ParameterServer"),
    **dict.fromkeys(("address", "host", "master_addr", "port"), "it is server"),
    "timeout": "it is timeout_seconds",
}


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
        keys: str | Path | None = None,  # directory of this host's keys, for an address with a key
        numbers: Numbers = "float32",
        frozen: Collection[int] = (),  # parameters that are fetched once and never pushed
    ) -> None:
        specs = parameter_specs(parameters)
        self.address = address
        self._user = user
        self.now = time.monotonic
        self._is_closed = self._is_refused = False
        self._pid = os.getpid()
        for parameter in parameters:
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        # One flat tensor for each parameter, a view of its memory.
        self.values = [parameter.detach().view(-1) for parameter in parameters]
        memory: Memory = PrivateMemory(host="")
        if address.memory and Path(address.memory).is_dir():  # this process sees it
            memory = FileMemory(Path(address.memory))
        layout = Layout.of(specs, n_shards=address.n_shards)
        self.client = ParameterClient(
            ClientConfig(pushes=True, numbers=numbers, retry_seconds=RETRY_SECONDS),
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
            self._log = [*self._log[-9:], text]

    def join(self, timeout_seconds: float) -> None:
        self.wait(lambda: self._worker.has_joined, "a first answer", timeout_seconds)

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

        if not self.closed and self.node.pump(is_decided, timeout_seconds=timeout_seconds):
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
        if self._thread is None:
            self._leave()
        else:
            self._thread.end(self._leave)

    def _leave(self) -> None:
        if self._worker.has_joined:
            self.node.tell(Computed(name=lw.LEAVE))
        self.node.close()
        self._transport.close()


class ServerLoop:
    """What every loop does with its session: pushes, fetches, ticks, and its end."""

    _session: ClientSession
    _policy: ExchangePolicy
    _is_in = False  # other workers may wait for this one
    _timeout_seconds: float
    _is_finished = True  # the server has everything
    _n_steps: int
    _sends: str  # what it pushes, for errors

    def _open(
        self,
        parameters: list[torch.nn.Parameter],
        address: ServerAddress,
        policy: ExchangePolicy,
        *,
        timeout_seconds: float,
        keys: str | Path | None,
        frozen: Collection[int] = (),
    ) -> None:
        """Join the server, take part in its ticks, and fetch its values."""
        user = type(self).__name__
        self._timeout_seconds = _seconds(timeout_seconds, user)
        self._policy = policy
        self._session = ClientSession(
            parameters, address, user=user, keys=keys, numbers=policy.numbers, frozen=frozen
        )
        # Not a bound method: that would keep this object alive.
        weakref.finalize(self, ClientSession.close, self._session)
        atexit.register(partial(_finish_at_exit, weakref.ref(self)))
        try:
            self._session.join(min(timeout_seconds, JOIN_SECONDS_MAX))
            self._enter()  # first: a tick begins with a fetch
            self._fetch(self._session.values)
        except BaseException:
            self._session.close()
            raise

    def finish(self) -> None:
        """Push what is left, wait until it is applied, and fetch once more.

        The model then holds the server's values, with the pushes of all workers.

        Raises:
            PeerLostError: the server does not answer in time.
        """
        raise NotImplementedError

    def close(self, *, timeout_seconds: float | None = None) -> None:
        """Finish, unless that is done, then leave the server.

        Args:
            timeout_seconds: How long each answer may take; by default as in a step.

        Raises:
            PeerLostError: the server does not answer in time; the worker leaves anyway.
        """
        if timeout_seconds is not None:
            self._timeout_seconds = _seconds(timeout_seconds, type(self).__name__)
        try:
            if not self._is_finished:
                self.finish()
        finally:
            self._session.close()

    def counters(self) -> dict[str, float]:
        """Return metrics: pushes sent, acknowledged and lost, staleness, bytes."""
        with self._session.background:
            return self._session.client.counters()

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        self._session.wait(until, what, self._timeout_seconds)

    def _await_room(self) -> None:
        self._wait(lambda: self._session.client.can_push, "room for a push")

    def _await_pushes(self) -> None:
        client = self._session.client
        # A round may wait for other workers, for as long as the server answers.
        seconds = self._timeout_seconds if self._policy.round is None else math.inf
        self._session.wait(lambda: client.unacknowledged == 0, "an acknowledgement", seconds)

    def _enter(self) -> None:
        """Take part in ticks, if the server counts them; others may then wait for this worker."""
        if self._policy.counts_ticks and not self._is_in:
            self._wait(lambda: self._session.client.ready, "a session")
            enter = Computed(name=lw.ENTER, result=self._policy.staleness)
            self._session.command(enter, self._timeout_seconds)
            self._is_in = True
            self._await_turn()

    def _await_turn(self) -> None:
        """Wait until the next tick may begin: no worker is too far behind, no push is under way."""
        client = self._session.client
        self._session.wait(lambda: client.may_begin, "another worker", math.inf)

    def _step_out(self) -> None:
        if self._is_in:
            self._session.command(Computed(name=lw.STEP_OUT), self._timeout_seconds)
            self._is_in = False

    def _stage(
        self,
        tensors: Sequence[torch.Tensor | None],
        *,
        n_gradients: int,
        samples: int,
        clocks: tuple[int, ...],
    ) -> lw.StagedPush:
        """Copy a push to where `_issue` sends it from; the tensors may change then.

        One tensor for each parameter; None: it does not move, as in torch.
        """
        session = self._session
        self._await_room()
        outcome = session.client.stage(
            tensors, session.values, fetched_clocks=clocks, skip_missing=True
        )()
        return lw.StagedPush(outcome=outcome, n_gradients=n_gradients, samples=samples)

    def _issue(self, push: lw.StagedPush) -> None:
        self._session.command(Computed(name=lw.PUSHED, result=push), self._timeout_seconds)
        if not push.outcome.finite:
            which = ", ".join(str(int(name)) for name in push.outcome.culprits)
            raise JobError(
                f"{type(self).__name__}: step {self._n_steps}: NaN or infinity in the "
                f"{self._sends} of parameter {which} (from 0): use a lower learning rate, or clip"
            )

    def _begin_fetch(self, *, exact: bool = False) -> None:
        name = lw.FETCH_EXACTLY if exact else lw.FETCH
        self._session.command(Computed(name=name), self._timeout_seconds)

    def _install(self, into: list[torch.Tensor]) -> bool:
        """Copy what has come of a fetch; return whether that was the rest of it."""
        session = self._session
        has_all = session.client.fetch_complete
        outcome = session.client.install(into)()
        session.command(Computed(name=lw.INSTALLED, result=outcome), self._timeout_seconds)
        if outcome.torn and has_all:  # a torn fetch met a half-applied update
            session.node.pump(lambda: False, timeout_seconds=TORN_WAIT_SECONDS)
        return not outcome.torn

    def _fetch(self, into: list[torch.Tensor], *, exact: bool = False) -> None:
        client = self._session.client
        self._wait(lambda: client.ready, "a session")
        self._begin_fetch(exact=exact)
        self._end_fetch(into)

    def _end_fetch(self, into: list[torch.Tensor]) -> None:
        client = self._session.client
        while True:
            # Blocks are copied while others are on their way.
            self._wait(lambda: client.installable, "parameters")
            if self._install(into):
                return


def _finish_at_exit(reference: "weakref.ref[ServerLoop]") -> None:
    # A script that forgets `finish` should lose nothing while the server still answers.
    optimizer = reference()
    if optimizer is not None:
        try:
            optimizer.close(timeout_seconds=EXIT_SECONDS_MAX)
        except DistBeliefError as error:
            print(f"{type(optimizer).__name__}: at exit: {error}")  # noqa: T201 -- no log is left at exit


def follow(
    parameters: Sequence[torch.nn.Parameter], values: list[torch.Tensor], *, user: str
) -> None:
    """Make values views of the parameters again where `parameter.data` was replaced.

    JobError if the new memory is of another type, size, or on another device.
    """
    for place, (parameter, known) in enumerate(zip(parameters, values, strict=True)):
        if parameter.data_ptr() == known.data_ptr():
            continue
        now = (parameter.dtype, parameter.device, parameter.numel())
        if now != (known.dtype, known.device, known.numel()):
            raise JobError(
                f"{user}: parameter {place} has become {parameter.dtype} on {parameter.device}, "
                f"{parameter.numel()} elements: convert and move the model before it is made"
            )
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        values[place] = parameter.detach().view(-1)


def _seconds(timeout: object, user: str) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise JobError(f"{user}: timeout_seconds is {timeout!r}; use a number above 0")
    return float(timeout)


def number_of_samples(samples: int, user: str) -> int:
    try:
        number = index(samples)
    except TypeError:
        number = -1
    if number < 0:
        raise JobError(f"{user}: samples is {samples!r}; use a whole number, 0 or more")
    return number
