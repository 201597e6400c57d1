"""`DownpourSGD` and `Exchange`: the user's own training loop as a worker of a parameter server.

    with distbelief.ParameterServer(net.parameters(), rule=rule) as server:
        optimizer = distbelief.DownpourSGD(net.parameters(), server=server.address)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(net(inputs), targets).backward()
            optimizer.step()
        optimizer.finish()

`DownpourSGD` is the loop of Algorithm 1.1 (Dean et al. 2012): gradients go to the server, whose
rule is the optimizer. `Exchange` takes local steps by any torch optimizer, and now and then sends
how far they went. There is no thread: the worker role runs only inside these calls
(`ClientSession`), and messages wait in the socket meanwhile.
"""

import atexit
import math
import secrets
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import index
from pathlib import Path
from types import MethodType
from typing import ParamSpec, TypeVar, cast, final

import torch
from typing_extensions import override

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
from distbelief.worker.loop_worker import FETCH, INSTALLED, LEAVE, PUSHED, LoopWorker, StagedPush


TORN_WAIT_SECONDS = 1e-3
LOOK_SECONDS = 1e-4  # for messages, in a step that waits for nothing
JOIN_SECONDS_MAX = 10.0  # a server that runs answers at once
EXIT_SECONDS_MAX = 5.0  # at interpreter exit, for unfinished pushes

_P = ParamSpec("_P")
_R = TypeVar("_R")


@final
class ClientSession:
    """A connection to a parameter server; call `join` before the first command.

    Args:
        parameters: The worker's parameters, in the order in which the server got them.
        address: The server's address.
        user: The class whose session it is, for errors.
        keys: Directory of this host's keys, for an address with a key.

    Raises:
        JobError: the address, the keys or the parameters are not valid.
        PeerLostError: a server on this host does not run.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        address: ServerAddress,
        *,
        user: str,
        keys: str | Path | None = None,
    ) -> None:
        self.address = address
        self._user = user
        self.closed = False
        for parameter in parameters:
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        # One flat tensor for each parameter, a view of its memory.
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
                f"{self._user}: the server at {address.endpoint} cannot be reached: {error}"
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
                    f"{self._user}: the server at {self.address.endpoint} does not allow this "
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
            raise PeerLostError(f"{self._user} is closed: make a new one to continue")
        if self.node.pump(until, timeout_seconds=timeout_seconds):
            return
        server = f"{self._user}: server {self.address.endpoint}"
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


class _ServerLoop:
    """What every loop does with its session: pushes, fetches, and its end."""

    _session: ClientSession
    _timeout_seconds: float
    _is_finished = True  # the server has everything
    _n_steps: int
    _sends: str  # what it pushes, for errors

    def _open(
        self,
        parameters: list[torch.nn.Parameter],
        server: str,
        *,
        timeout_seconds: float,
        keys: str | Path | None,
    ) -> None:
        """Join the server, and fetch its values."""
        self._timeout_seconds = timeout_seconds
        address = ServerAddress.parse(server)
        user = type(self).__name__
        self._session = ClientSession(parameters, address, user=user, keys=keys)
        # Not a bound method: that would keep this object alive.
        weakref.finalize(self, ClientSession.close, self._session)
        atexit.register(partial(_finish_at_exit, weakref.ref(self)))
        try:
            self._session.join(min(timeout_seconds, JOIN_SECONDS_MAX))
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
            self._timeout_seconds = timeout_seconds
        try:
            if not self._is_finished:
                self.finish()
        finally:
            self._session.close()

    def counters(self) -> dict[str, float]:
        """Return metrics: pushes sent, acknowledged and lost, staleness, bytes."""
        return self._session.client.counters()

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        self._session.wait(until, what, self._timeout_seconds)

    def _await_pushes(self) -> None:
        self._wait(lambda: self._session.client.unacknowledged == 0, "an acknowledgement")

    def _push(
        self,
        tensors: Sequence[torch.Tensor | None],
        *,
        n_gradients: int,
        samples: int,
        clocks: tuple[int, ...],
    ) -> None:
        """Push these, one for each parameter; None: it does not move, as in torch."""
        session = self._session
        self._wait(lambda: session.client.can_push, "room for a push")
        outcome = session.client.stage(
            tensors, session.values, fetched_clocks=clocks, skip_missing=True
        )()
        push = StagedPush(outcome=outcome, n_gradients=n_gradients, samples=samples)
        session.command(Computed(name=PUSHED, result=push), self._timeout_seconds)
        if not outcome.finite:
            which = ", ".join(str(int(name)) for name in outcome.culprits)
            raise JobError(
                f"{type(self).__name__}: step {self._n_steps}: NaN or infinity in the "
                f"{self._sends} of parameter {which} (from 0), which is not pushed: use a lower "
                "learning rate, or clip"
            )

    def _begin_fetch(self) -> None:
        self._session.command(Computed(name=FETCH), self._timeout_seconds)

    def _install(self, into: list[torch.Tensor]) -> bool:
        """Copy what has come of a fetch; return whether that was the rest of it."""
        session = self._session
        has_all = session.client.fetch_complete
        outcome = session.client.install(into)()
        session.command(Computed(name=INSTALLED, result=outcome), self._timeout_seconds)
        if outcome.torn and has_all:  # a torn fetch met a half-applied update
            session.node.pump(lambda: False, timeout_seconds=TORN_WAIT_SECONDS)
        return not outcome.torn

    def _fetch(self, into: list[torch.Tensor]) -> None:
        client = self._session.client
        self._wait(lambda: client.ready, "a session")
        self._begin_fetch()
        self._end_fetch(into)

    def _end_fetch(self, into: list[torch.Tensor]) -> None:
        client = self._session.client
        while True:
            # Blocks are copied while others are on their way.
            self._wait(lambda: client.installable, "parameters")
            if self._install(into):
                return


@final
class DownpourSGD(_ServerLoop, torch.optim.Optimizer):
    """Pushes gradients to a parameter server and fetches parameters from it.

    Any number of loops, in any number of processes, may use one server, each with a model of
    the same shapes. As in torch, a parameter whose `grad` is None does not move: here, if it
    had no gradient in any step of a push. Learning rate, weight decay and schedule belong to
    the server's rule; parameter groups that set them are rejected.

    Args:
        params: The model's parameters, in the order that the server was given them, or
            groups of them, each with a `learning_rate` of its own if needed.
        server: `ParameterServer.address`, or the line that `distbelief serve` prints.
        n_fetch: Steps between fetches.
        n_push: Steps between pushes.
        learning_rate: Of this worker's own steps between fetches and pushes (the server's
            rule has its own); required if n_fetch > 1. If only n_push > 1, a worker
            without it takes no steps of its own and only sums gradients.
        blocking: Wait until each push is applied before the next fetch; always on if
            n_fetch or n_push is above 1. One worker then trains like plain sequential
            SGD, if the server's rule is SGD with the same rate.
        overwrite_local_steps: A fetch overwrites the local steps whose gradients are not
            pushed yet, as in the paper, and waits only if `blocking`. By default they are
            repeated.
        timeout_seconds: How long a step may wait for the server.
        keys: Directory of this host's keys, for a server whose address has a key; by
            default the one that `distbelief keys` uses.

    Raises:
        JobError: the address, the parameters or the options are invalid.
        PeerLostError: the server does not answer in time.
    """

    def __init__(  # noqa: PLR0913 -- the options of one algorithm
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        server: str,
        n_fetch: int = 1,
        n_push: int = 1,
        learning_rate: float | None = None,
        blocking: bool = False,
        overwrite_local_steps: bool = False,
        timeout_seconds: float = 60.0,
        keys: str | Path | None = None,
    ) -> None:
        for name, value in (("n_fetch", n_fetch), ("n_push", n_push)):
            if not isinstance(cast("object", value), int) or value < 1:
                raise JobError(f"DownpourSGD: {name} is {value!r}; use a whole number, 1 or more")
        if n_fetch > 1 and (learning_rate is None or learning_rate <= 0):
            raise JobError(
                f"DownpourSGD: learning_rate is {learning_rate} with n_fetch {n_fetch};"
                " between fetches a worker steps by itself: give it a rate above 0"
            )
        torch.optim.Optimizer.__init__(self, params, {"learning_rate": learning_rate or 0.0})
        self._parameters = list(chain.from_iterable(group["params"] for group in self.param_groups))
        self._n_fetch, self._n_push = n_fetch, n_push
        is_seldom = n_fetch > 1 or n_push > 1
        self._keeps_local_steps = is_seldom and not overwrite_local_steps
        self._awaits_pushes = blocking or self._keeps_local_steps
        self._n_steps = self._n_accrued = self._samples = 0
        self._sends = "gradient"
        self._accrued: list[torch.Tensor | None] = [None] * len(self._parameters)
        self._accrued_clocks: tuple[int, ...] = ()
        self._open(self._parameters, server, timeout_seconds=timeout_seconds, keys=keys)

    @override
    def step(  # type: ignore[override]  # torch's are overloads; this is their union
        self, closure: Callable[[], float] | None = None, *, samples: int = 1
    ) -> float | None:
        """Push the gradients in `.grad` and fetch parameters, as due.

        Args:
            closure: Computes the loss and the gradients again, as in torch.
            samples: Number of samples of the gradient, for the server's count.

        Raises:
            PeerLostError: the server does not answer in time, or has ended.
            JobError: a gradient is NaN or infinite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        samples = _number_of_samples(samples, "DownpourSGD")
        with torch.no_grad():
            _follow(self._parameters, self._session.values, user="DownpourSGD")
            self._is_finished = False
            self._samples += samples
            self._accrue()
            if self._n_steps % self._n_push == 0:
                self._push_accrued()
            if (self._n_steps + 1) % self._n_fetch == 0:
                self._fetch_and_repeat()
            else:
                for parameter, rate in zip(self._parameters, self._rates(), strict=True):
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-rate)
            self._n_steps += 1
        return loss

    @override
    def finish(self) -> None:
        if self._session.closed:
            return
        with torch.no_grad():
            _follow(self._parameters, self._session.values, user="DownpourSGD")
            if self._n_accrued:
                self._push_accrued()
        self._await_pushes()
        self._fetch_and_repeat()
        self._is_finished = True

    @override
    def add_param_group(self, param_group: dict[str, object]) -> None:
        if "_parameters" in self.__dict__:
            raise JobError(
                "DownpourSGD: a group of parameters cannot be added: the server knows "
                f"the {len(self._parameters)} that it began with; pass all of them at once"
            )
        _plain(super().add_param_group)(_Group(param_group))

    @override
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        groups = cast("list[dict[str, object]]", state_dict["param_groups"])
        for group in groups:
            _Group(group)  # refuses what another optimizer saved
        _plain(super().load_state_dict)(state_dict)
        self.param_groups = [_Group(group) for group in self.param_groups]

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        _plain(super().zero_grad)(set_to_none)

    def _accrue(self) -> None:
        # Raw gradients, as a sum (DB-7); the clocks of the oldest one give the staleness.
        if not self._n_accrued:
            self._accrued_clocks = self._session.client.clocks
        for place, parameter in enumerate(self._parameters):
            if parameter.grad is None:
                continue
            sparse = parameter.grad.is_sparse  # of Embedding(sparse=True)
            gradient = (parameter.grad.to_dense() if sparse else parameter.grad).reshape(-1)
            so_far = self._accrued[place]
            if so_far is not None:
                so_far += gradient
            elif self._n_push == 1:
                self._accrued[place] = gradient  # staged before step() returns
            else:
                self._accrued[place] = gradient.clone()
        self._n_accrued += 1

    def _rates(self) -> list[float]:
        return [group["learning_rate"] for group in self.param_groups for _ in group["params"]]

    def _push_accrued(self) -> None:
        accrued, n_gradients = self._accrued, self._n_accrued
        self._n_accrued = 0
        self._accrued = [None] * len(self._parameters)
        self._push(
            accrued, n_gradients=n_gradients, samples=self._samples, clocks=self._accrued_clocks
        )

    def _fetch_and_repeat(self) -> None:
        if self._awaits_pushes:
            self._await_pushes()
        self._fetch(self._session.values)
        if self._keeps_local_steps:
            # Local steps that are not pushed yet are repeated from the fetched values.
            for accrued, values, rate in zip(
                self._accrued, self._session.values, self._rates(), strict=True
            ):
                if accrued is not None and rate:
                    values.add_(accrued, alpha=-rate)


class _Group(dict[str, object]):
    """A parameter group that rejects options of the server's rule; torch asks for "lr"."""

    def __init__(self, group: Mapping[str, object]) -> None:
        super().__init__()
        for key, value in group.items():
            self[key] = value

    def __missing__(self, key: str) -> object:
        raise _refusal(key) if key in _OF_THE_RULE else KeyError(key)

    @override
    def __setitem__(self, key: str, value: object) -> None:
        if key not in _GROUP_KEYS:
            raise _refusal(key)
        is_rate = isinstance(value, int | float) and 0.0 <= value < math.inf
        if key == "learning_rate" and not is_rate:
            raise JobError(f"DownpourSGD: learning_rate is {value}; use 0 or more")
        super().__setitem__(key, value)

    @override
    def setdefault(self, key: str, default: object = None, /) -> object:
        if key not in self:
            self[key] = default
        return self[key]


_GROUP_KEYS = {"params", "param_names", "learning_rate"}
_OF_THE_RULE = {"lr", "initial_lr", "momentum", "weight_decay", "betas"}


def _refusal(key: str) -> JobError:
    why = "it belongs to the rule of the server: ParameterServer(..., rule=...)"
    if key in {"lr", "initial_lr"}:
        why = "torch's schedulers do not work: give the server's rule learning_rate= and schedule="
    return JobError(f"DownpourSGD: parameter groups have no {key!r}: {why}")


@final
class Exchange(_ServerLoop):
    """Takes local steps by a torch optimizer, and exchanges their sum with a parameter server.

        step        1      2      ...    every   every + 1    ...
        inner       x      x      x      x       x            x
        push                             a - x                       then a := x
        fetch                                    ........ a'         x := a' + (x - a), a := a'

    a (the anchor) is what the server has of this worker: the values at the last exchange. Push and
    fetch are under way while the next steps are taken, and no local step is lost or sent twice: the
    steps since the push are kept when the fetched values a' come in. Each exchange moves as many
    bytes as one of `DownpourSGD`, so with `every` steps between two a slow link carries `every`
    times less (local SGD, Stich 2019; DiLoCo, Douillard et al. 2023; the sign of a - x is DP-1 of
    Dpplee3).

    The server's rule applies what is pushed as if it were a gradient: `SGD(learning_rate=1.0)` adds
    up the steps of all workers, 1.0 / n averages those of n workers, and momentum is DiLoCo's outer
    optimizer. Any scheduler of torch may be used with the inner optimizer, whose state stays here.

    Args:
        inner: Takes the local steps. Its parameters are those that the server was given, in the
            same order.
        server: `ParameterServer.address`, or the line that `distbelief serve` prints.
        every: Steps between two exchanges.
        timeout_seconds: How long a step may wait for the server.
        keys: Directory of this host's keys, for a server whose address has a key; by
            default the one that `distbelief keys` uses.

    Raises:
        JobError: the address, the parameters or the options are invalid.
        PeerLostError: the server does not answer in time.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        server: str,
        every: int = 64,
        timeout_seconds: float = 60.0,
        keys: str | Path | None = None,
    ) -> None:
        if not isinstance(cast("object", inner), torch.optim.Optimizer):
            raise JobError(
                f"Exchange: inner is {inner!r}; use an optimizer of torch, such as "
                "torch.optim.SGD(net.parameters(), lr=0.1)"
            )
        if isinstance(inner, DownpourSGD):
            raise JobError("Exchange: inner is a DownpourSGD, which has a server of its own")
        if not isinstance(cast("object", every), int) or every < 1:
            raise JobError(f"Exchange: every is {every!r}; use a whole number, 1 or more")
        self.inner = inner
        self._every = every
        parameters = self._parameters()
        self._n_parameters = len(parameters)
        self._n_steps = self._n_unsent = self._samples = 0
        self._sends = "change"
        self._is_pushed = False  # a push waits for its acknowledgement; then a fetch begins
        self._is_fetching = False
        self._open(parameters, server, timeout_seconds=timeout_seconds, keys=keys)
        self._anchor = [values.clone() for values in self._session.values]
        self._fetched = [torch.empty_like(values) for values in self._anchor]

    def step(self, closure: Callable[[], float] | None = None, *, samples: int = 1) -> float | None:
        """Take a local step; exchange, if that is due.

        Args:
            closure: Computes the loss and the gradients again, as in torch.
            samples: Number of samples of the gradient, for the server's count.

        Raises:
            PeerLostError: the server does not answer in time, or has ended.
            JobError: a parameter has become NaN or infinite.
        """
        if len(self._parameters()) != self._n_parameters:
            raise JobError(
                "Exchange: a group of parameters was added to the inner optimizer; the server "
                f"knows the {self._n_parameters} that it began with: pass all of them at once"
            )
        if self._session.closed:  # a local step would reach nobody
            raise PeerLostError("Exchange is closed: make a new one to continue")
        samples = _number_of_samples(samples, "Exchange")
        _follow(self._parameters(), self._session.values, user="Exchange")
        loss: float | None = self.inner.step(closure)
        self._is_finished = False
        self._n_steps += 1
        self._n_unsent += 1
        self._samples += samples
        with torch.no_grad():
            self._receive()
            if self._n_steps % self._every == 0:
                self._exchange()
        return loss

    def zero_grad(self) -> None:
        """Forget the gradients, as the inner optimizer does."""
        self.inner.zero_grad()

    @override
    def finish(self) -> None:
        if self._session.closed:
            return
        with torch.no_grad():
            _follow(self._parameters(), self._session.values, user="Exchange")
            if self._n_unsent:
                self._exchange()
            self._end_exchange()
            # Once more: other workers may have pushed since.
            self._fetch(self._fetched)
            self._merge()
        self._is_finished = True

    def _parameters(self) -> list[torch.nn.Parameter]:
        return list(chain.from_iterable(group["params"] for group in self.inner.param_groups))

    def _exchange(self) -> None:
        # The anchor is needed until the last fetch is merged: if the link is slower than `every`
        # steps, this is where the worker waits for it.
        self._end_exchange()
        values, anchor = self._session.values, self._anchor
        changes = [
            then - now if parameter.requires_grad else None
            for parameter, now, then in zip(self._parameters(), values, anchor, strict=True)
        ]
        self._push(
            changes,
            n_gradients=self._n_unsent,
            samples=self._samples,
            clocks=self._session.client.clocks,
        )
        torch._foreach_copy_(anchor, values)
        self._n_unsent = 0
        self._is_pushed = True
        self._receive()

    def _receive(self) -> None:
        """Continue the exchange as far as messages have come; do not wait for any."""
        client = self._session.client
        if self._is_pushed or self._is_fetching:
            self._session.node.pump(lambda: False, timeout_seconds=LOOK_SECONDS)
        # A fetch before the acknowledgement might not have the own steps (SSP-4).
        if self._is_pushed and client.unacknowledged == 0 and client.ready:
            self._begin_fetch()
            self._is_pushed, self._is_fetching = False, True
        if self._is_fetching and client.installable and self._install(self._fetched):
            self._merge()

    def _end_exchange(self) -> None:
        if self._is_pushed:
            self._await_pushes()
            self._fetch(self._fetched)
            self._merge()
        elif self._is_fetching:
            self._end_fetch(self._fetched)
            self._merge()

    def _merge(self) -> None:
        self._is_pushed = self._is_fetching = False
        values = self._session.values
        # Exactly the fetched values where there was no step since the push.
        torch._foreach_sub_(values, self._anchor)
        torch._foreach_add_(values, self._fetched)
        self._anchor, self._fetched = self._fetched, self._anchor


def _follow(
    parameters: Sequence[torch.nn.Parameter], values: list[torch.Tensor], *, user: str
) -> None:
    """Make values views of the parameters again where `parameter.data` was replaced.

    Raises:
        JobError: the new memory is of another type, size, or on another device.
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


def _number_of_samples(samples: int, user: str) -> int:
    try:
        number = index(samples)
    except TypeError:
        number = -1
    if number < 0:
        raise JobError(f"{user}: samples is {samples!r}; use a whole number, 0 or more")
    return number


def _finish_at_exit(reference: "weakref.ref[_ServerLoop]") -> None:
    # A script that forgets `finish` should lose nothing while the server still answers.
    optimizer = reference()
    if optimizer is not None:
        try:
            optimizer.close(timeout_seconds=EXIT_SECONDS_MAX)
        except (PeerLostError, JobError) as error:
            print(f"{type(optimizer).__name__}: at exit: {error}")  # noqa: T201 -- no log is left at exit


def _plain(method: Callable[_P, _R]) -> Callable[_P, _R]:
    # torch wraps these methods to keep torch.compile away from them, which imports the compiler at
    # the first call: six seconds in every worker, again after each restart.
    function = getattr(method, "__wrapped__", None)
    if function is None or "torch._dynamo" in sys.modules:
        return method
    owner = cast("MethodType", method).__self__
    return cast("Callable[_P, _R]", MethodType(function, owner))
