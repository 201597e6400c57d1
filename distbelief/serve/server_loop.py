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
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Concatenate, NoReturn, ParamSpec, Self, TypeVar, cast

import torch
from typing_extensions import override

from distbelief.core.errors import DistBeliefError, JobError
from distbelief.core.formatting import nearest
from distbelief.parameter_server.policy import ExchangePolicy
from distbelief.protocol.role import Computed
from distbelief.serve.address import ServerAddress, Tensors, check_memory, named
from distbelief.serve.session import LOGGING, ClientSession, in_order, set_values
from distbelief.worker import loop_worker as lw
from distbelief.worker.exchange import Bindings, ExchangeState, Pace, bind_again, bindings_of


TORN_WAIT_SECONDS = 1e-3
LOOK_SECONDS = 1e-4  # for messages, in a step that waits for nothing
JOIN_SECONDS_MAX = 10.0  # a server that runs answers at once
EXIT_SECONDS_MAX = 5.0  # at interpreter exit, for unfinished pushes
TURN_SECONDS = 5.0  # of waiting, after which a loop looks whether its own thread is the cause
_NOBODY = "workers have no number: any may come and go"
# Options of other libraries that a loop has none of
ELSEWHERE = {
    **dict.fromkeys(("rank", "world_size", "workers", "num_workers", "replicas"), _NOBODY),
    **dict.fromkeys(("process_group", "backend"), "give server, the address of a ParameterServer"),
    **dict.fromkeys(("address", "host", "master_addr", "port"), "it is server"),
    "timeout": "it is timeout_seconds",
}


# Of loops that others may wait for: the server's endpoint, and the thread that last stepped it, or
# has made it.
_STEPPING: "weakref.WeakKeyDictionary[ServerLoop, tuple[str, threading.Thread]]" = (
    weakref.WeakKeyDictionary()
)

Groups = Sequence[Mapping[str, object]]  # of an optimizer

_L = TypeVar("_L", bound="ServerLoop")
_P = ParamSpec("_P")
_R = TypeVar("_R")


def of_wrapped(method: Callable[Concatenate[_L, _P], _R]) -> Callable[Concatenate[_L, _P], _R]:
    """Let a method act on the loop itself where it is called of a wrapper.

    Those of Lightning and Fabric are of a subclass of the optimizer's class, with no state: what
    is set there, or has a default in the class, is not that of the loop.
    """

    @wraps(method)
    def run(self: _L, /, *args: _P.args, **options: _P.kwargs) -> _R:
        return method(cast("_L", self._itself() or self), *args, **options)

    return run


def uncompiled(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep torch.compile away from a method; only there, as that imports the compiler."""
    # `torch.compiler.disable`, at the first call
    apart = torch._disable_dynamo(method)  # type: ignore[attr-defined]  # noqa: SLF001

    @wraps(method)
    def run(*args: _P.args, **options: _P.kwargs) -> _R:
        return (apart if torch.compiler.is_compiling() else method)(*args, **options)

    return run


def _list_in(group: Mapping[str, object], key: str) -> list[object]:
    return cast("list[object]", group.get(key, []))


class ServerLoop:
    """What every loop does with its session: pushes, fetches, ticks, and its end."""

    _session: ClientSession
    _itself: "weakref.ref[ServerLoop]"
    _policy: ExchangePolicy
    _is_in = False  # other workers may wait for this one
    _timeout_seconds: float
    _is_finished = True  # the server has everything
    _n_steps: int
    _sends: str  # what it pushes, for errors
    _way_back = ""  # after NaN
    _address: ServerAddress
    _keys: str | Path | None
    _names: tuple[str, ...]  # of the server's tensors, if it knows them
    _order: list[int]  # of the server's parameters: which of the loop's each is
    _tensors: list[torch.Tensor]  # the buffers
    _bindings: Bindings
    _state: ExchangeState
    _samples = 0  # of all steps
    _copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()  # tensors, and their values in order

    def _given(self, groups: Groups) -> list[torch.nn.Parameter]:
        """Return the parameters of an optimizer's groups, in the server's order."""
        parameters = [one for group in groups for one in _list_in(group, "params")]
        if len(parameters) != len(self._order):
            raise JobError(
                f"{type(self).__name__}: {len(self._order)} parameters were given at first, and "
                f"the groups have {len(parameters)} now: pass all of them at once"
            )
        return [cast("torch.nn.Parameter", parameters[place]) for place in self._order]

    def _order_of(self, groups: Groups, address: ServerAddress) -> list[int]:
        names: list[str] = []
        for group in groups:
            known = _list_in(group, "param_names") or [""] * len(_list_in(group, "params"))
            names += map(str, known)
        return address.places(names, user=type(self).__name__)

    def _take_buffers(self, buffers: Tensors | None, address: ServerAddress) -> None:
        user = type(self).__name__
        self._address, self._names = address, address.names
        names, given = named([] if buffers is None else buffers, what="buffer")
        if len(given) != address.n_buffers:
            way_out = "give buffers=net, here and to ParameterServer (or ParameterServer(net))"
            first = f", as {address.names[-address.n_buffers]!r}" if address.names else ""
            there = f"{address.n_buffers} buffers{first}" if address.n_buffers else "no buffers"
            raise JobError(
                f"{user}: the server has {there}, and {len(given)} are given here: {way_out}"
            )
        places = address.places(names, user=user, of_buffers=True)
        self._tensors = [given[place] for place in places]
        self._bindings = bindings_of(buffers) if isinstance(buffers, torch.nn.Module) else ()

    def _open(
        self,
        parameters: list[torch.nn.Parameter],
        address: ServerAddress,
        policy: ExchangePolicy,
        *,
        timeout_seconds: float,
        keys: str | Path | None,
        frozen: Collection[int],
        pace: Pace,
    ) -> None:
        """Join the server, take part in its ticks, and fetch its values."""
        user = type(self).__name__
        self._timeout_seconds = _seconds(timeout_seconds, user)
        self._policy, self._keys = policy, keys
        self._session = ClientSession(
            parameters,
            address,
            user=user,
            buffers=self._tensors,
            keys=keys,
            exchange=policy,
            frozen=frozen,
        )
        self._state = ExchangeState(
            self._session.values,
            self._session.client.view,
            pace,
            trained=[place for place in range(len(parameters)) if place not in frozen],
            copies=pace.n_push > 1,  # otherwise gradients are staged before `step` returns
            fits_link=policy.every == "auto",
        )
        self._itself = weakref.ref(self)
        self._note_thread()
        # Not a bound method: that would keep this object alive.
        weakref.finalize(self, ClientSession.close, self._session)
        atexit.register(partial(_finish_at_exit, weakref.ref(self)))
        try:
            self._session.join(min(timeout_seconds, JOIN_SECONDS_MAX))
            self._enter()  # first: a tick begins with a fetch
            self._fetch_anew(exact=False)
            tensors = [*parameters, *self._tensors]
            self._copies = follow(tensors, self._session.values, user=user)
            self._write()
        except BaseException:
            self._session.close()
            raise

    def _load(self, state: Mapping[str, object], parameters: Sequence[torch.Tensor]) -> None:
        """Set the server's values to a model's state, and fetch them."""
        self._session.check()
        self._follow(parameters)
        tensors, user = [*parameters, *self._tensors], type(self).__name__
        values = in_order(state, self._names, tensors, user=user)
        with torch.no_grad(), self._session.background:
            self._settle()
            self._session.client.forget_rest()
        set_values(
            values, self._address, user=user, timeout_seconds=self._timeout_seconds, keys=self._keys
        )
        with torch.no_grad(), self._session.uninterrupted, self._session.background:
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            self._fetch_anew()
        self._is_finished = True

    def _fetch_anew(self, *, exact: bool = True) -> None:
        """Take the server's values, whatever is here."""
        self._state.drop()
        self._state.hold()
        self._fetch(self._session.values, exact=exact)
        self._state.merge(contains_pushes=True)
        self._state.fetched()
        self._write()

    def _settle(self) -> None:
        """Wait for what is under way, and drop what is not sent."""
        raise NotImplementedError

    def finish(self) -> None:
        """Push what is left, wait until it is applied, and fetch once more."""
        raise NotImplementedError

    def _note_finished(self) -> None:
        self._is_finished = True
        LOGGING.info("%s has finished after %d steps", type(self).__name__, self._n_steps)

    @of_wrapped
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
            _STEPPING.pop(self, None)
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        """Close; after an error that of the block is raised, not what follows from it."""
        if kind is None:
            self.close()
            return
        with suppress(DistBeliefError):
            self.close(timeout_seconds=EXIT_SECONDS_MAX)

    @override
    def __reduce_ex__(self, protocol: object, /) -> NoReturn:
        user = type(self).__name__
        raise JobError(
            f"{user} cannot be copied or pickled: it is one worker's connection to its server. "
            f"Copy the model and state_dict(), or make another {user}"
        )

    @of_wrapped
    def counters(self, *names: str) -> dict[str, float]:
        """Return what this loop has counted, for a log or a progress bar.

            bar.set_postfix(optimizer.counters("pushes_sent", "staleness_mean"))

        Args:
            names: Which to return, in this order; by default all: `steps`, `samples`,
                `pushes_sent`, `pushes_acknowledged`, `pushes_lost`, `bytes_in`, `bytes_out` (also
                through shared memory), `staleness_mean`, `staleness_p95`, `staleness_max`
                (of pushes, in pushes of others), `torn_reads`, `non_finite`, and those of ticks
                and codecs, if the server has them.

        Raises:
            JobError: there is no counter of such a name.
        """
        with self._session.background:
            counted = self._counted()
        for name in names:
            if name not in counted:
                raise JobError(f"counters: {nearest(name, counted)}")
        return {name: counted[name] for name in names or counted}

    def _counted(self) -> dict[str, float]:
        own = {"steps": float(self._n_steps), "samples": float(self._samples)}
        counted = own | self._session.client.counters()
        # Whole numbers, as a progress bar shows them
        return {key: int(each) if each.is_integer() else each for key, each in counted.items()}

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        self._session.wait(until, what, self._timeout_seconds)

    def _await_room(self) -> None:
        self._wait(lambda: self._session.client.can_push, "room for a push")

    def _await_pushes(self) -> None:
        client = self._session.client

        def are_applied() -> bool:
            return client.unacknowledged == 0

        if self._policy.round is None:
            self._wait(are_applied, "an acknowledgement")
        else:  # a round may wait for other workers, for as long as the server answers
            self._await_others(are_applied, "an acknowledgement")

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
        self._await_others(lambda: client.may_begin, "another worker")

    def _await_others(self, until: Callable[[], bool], what: str) -> None:
        began = self._session.now()

        def is_over() -> bool:
            if self._session.now() - began > TURN_SECONDS:
                self._refuse_turns()
            return until()

        self._session.wait(is_over, what, math.inf)

    def _refuse_turns(self) -> None:
        """Raise JobError if this loop waits for one that its own thread steps."""
        others = (one for one, where in _STEPPING.items() if where == _STEPPING.get(self))
        other = next((one for one in others if one is not self), None)
        if other is not None:
            raise JobError(
                f"{type(self).__name__}: it waits for another {type(other).__name__} of this "
                "server, which the same thread steps, so that neither would go on: step each in a "
                "thread or process of its own, or first finish() the other"
            )

    def _note_thread(self) -> None:
        self._session.check()  # a local step would reach nobody
        _STEPPING[self] = self._address.endpoint, threading.current_thread()

    def _step_out(self) -> None:
        if self._is_in:
            self._session.command(Computed(name=lw.STEP_OUT), self._timeout_seconds)
            self._is_in = False
        _STEPPING.pop(self, None)

    def _stage(self, clocks: tuple[int, ...], *, is_last: bool = False) -> lw.StagedPush:
        """Copy a push to where `_issue` sends it from; the tensors may change then.

        A tensor without a gradient does not move, as in torch. The last push carries what a codec
        has held back.
        """
        self._await_room()
        state, client = self._state, self._session.client
        touched = state.touched if state.n_unsent else None
        draft = client.draft(fetched_clocks=clocks, touched=touched, is_last=is_last)
        state.put_into(draft, is_rest=not state.n_unsent)
        n_gradients, outcome = state.n_unsent, draft.finish()
        return lw.StagedPush(
            outcome=outcome,
            n_gradients=n_gradients,
            samples=self._samples,
            in_turn=state.pace.awaits_pushes,
        )

    def _issue(self, push: lw.StagedPush) -> None:
        self._session.command(Computed(name=lw.PUSHED, result=push), self._timeout_seconds)
        if not push.outcome.finite:
            which = ", ".join(self._called(int(name)) for name in push.outcome.culprits)
            what, way = f"the {self._sends} of ", "use a lower learning rate, or clip"
            if all(int(name) >= len(self._order) for name in push.outcome.culprits):
                what, way = "", "register it with persistent=False, as a mask, or use large numbers"
            raise JobError(
                f"{type(self).__name__}: step {self._n_steps}: NaN or infinity in {what}{which} "
                f"(from 0): {way}{self._way_back}"
            )

    def _called(self, place: int) -> str:
        """Return what to call a tensor in an error."""
        n_parameters = len(self._order)
        kind = "parameter" if place < n_parameters else "buffer"
        name = f"{kind} {place if place < n_parameters else place - n_parameters}"
        return f"{name}, {self._names[place]!r}," if self._names else name

    def _follow(self, parameters: Sequence[torch.Tensor]) -> None:
        bind_again(self._bindings)
        tensors = [*parameters, *self._tensors]
        self._copies = follow(tensors, self._session.values, user=type(self).__name__)
        self._read()

    def _read(self) -> None:
        """Copy what has changed in tensors whose memory has another order."""
        for tensor, copy in self._copies:
            copy.copy_(tensor.detach())

    def _write(self) -> None:
        """Copy what has changed in the values of such tensors."""
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)

    def _begin_fetch(self, name: str = lw.FETCH) -> None:
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
        self._begin_fetch(lw.FETCH_EXACTLY if exact else lw.FETCH)
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
    parameters: Sequence[torch.Tensor], values: list[torch.Tensor], *, user: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make values views of the parameters again where `parameter.data` was replaced.

    Returns those whose memory has another order, with their values, which are a copy then.
    JobError if the new memory is of another type, size, or on another device.
    """
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    has_moved = False
    for place, (parameter, known) in enumerate(zip(parameters, values, strict=True)):
        is_in_order = parameter.is_contiguous()
        if is_in_order and parameter.data_ptr() == known.data_ptr():
            continue
        now = (parameter.dtype, parameter.device, parameter.numel())
        if now != (known.dtype, known.device, known.numel()):
            raise JobError(
                f"{user}: parameter {place} has become {parameter.dtype} on {parameter.device}, "
                f"{parameter.numel()} elements: convert and move the model before it is made"
            )
        has_moved = True
        if is_in_order:
            values[place] = parameter.detach().view(-1)
            continue
        if parameter.data_ptr() == known.data_ptr():  # the same memory, in another order now
            values[place] = known.clone()
        copies.append((parameter, values[place].view(parameter.shape)))
    if has_moved:
        check_memory(parameters)
    return copies


def _seconds(timeout: object, user: str) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise JobError(f"{user}: timeout_seconds is {timeout!r}; use a number above 0")
    return float(timeout)


def number_of_samples(samples: int | None, user: str, policy: ExchangePolicy) -> int:
    if samples is None:
        if policy.weight == "samples":
            raise JobError(
                f"{user}: the server weights pushes by their samples (weight), and step was not "
                "told how many: step(samples=len(targets)); where a trainer calls step, give "
                'ParameterServer weight="mean"'
            )
        return 1
    try:
        number = index(samples)
    except TypeError:
        number = -1
    if number < 0:
        raise JobError(f"{user}: samples is {samples!r}; use a whole number, 0 or more")
    return number


def is_of_model(state: Mapping[str, object], user: str) -> bool:
    """Return whether this is a model's state, not an optimizer's; JobError if it is neither."""
    if not isinstance(cast("object", state), Mapping):
        shown = " ".join(repr(state).split())[:60]
        raise JobError(
            f"{user}: the state is {shown}: give net.state_dict(), or what state_dict() "
            "of this optimizer returned"
        )
    return bool(state) and all(isinstance(value, torch.Tensor) for value in state.values())
