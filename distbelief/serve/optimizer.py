"""`DownpourSGD`: the user's own training loop as a Downpour worker.

    with distbelief.ParameterServer(net.parameters(), rule=rule) as server:
        optimizer = distbelief.DownpourSGD(net.parameters(), server=server.address)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_function(net(inputs), targets).backward()
            optimizer.step()
        optimizer.finish()

`step()` is the loop of Algorithm 1.1 (Dean et al. 2012): gradients go to the server, whose rule is
the optimizer.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from numbers import Real
from pathlib import Path
from types import MethodType
from typing import ParamSpec, TypeVar, cast, final

import msgspec
import torch
from typing_extensions import override

from distbelief.core.arguments import checked
from distbelief.core.errors import JobError, PeerLostError
from distbelief.core.formatting import nearest
from distbelief.protocol import push_fetch as pf
from distbelief.serve.address import ServerAddress, Tensors
from distbelief.serve.server_loop import (
    ELSEWHERE,
    ServerLoop,
    is_of_model,
    number_of_samples,
    of_wrapped,
    uncompiled,
)
from distbelief.worker import loop_worker as lw
from distbelief.worker.exchange import Pace


_P = ParamSpec("_P")
_R = TypeVar("_R")


_OF_THE_SERVER = "it belongs to the rule of the server: ParameterServer(..., rule=...)"
_OF_THE_RULE = dict.fromkeys(
    ("momentum", "weight_decay", "betas", "eps", "nesterov", "schedule", "rule"), _OF_THE_SERVER
)


N_LOOKED_AT = 8  # first steps, in which all elements are compared


@final
class DownpourSGD(ServerLoop, torch.optim.Optimizer):
    """Pushes gradients to a parameter server and fetches parameters from it.

    Any number of loops, in any number of processes, may use one server, each with a model of
    the same shapes. As in torch, a parameter whose `grad` is None does not move: here, if it
    had no gradient in any step of a push. Frozen ones (`requires_grad = False`) are fetched
    once and never pushed. Weight decay and the like belong to the server's rule; parameter
    groups that set them are rejected.

    Args:
        params: The model's parameters, with names or without, or groups of them, each with an
            `lr` and a `learning_rate` of its own if needed. Without names on both sides they
            are in the order that the server was given them.
        server: `ParameterServer.address`, or the line that `distbelief serve` prints.
        buffers: The model, or its buffers, if the server has them: statistics of BatchNorm.
        lr: Rate at which the server's rule applies this worker's pushes, in place of its own
            `learning_rate`. It goes with each push, so torch's schedulers work on it, as on
            `param_groups[0]["lr"]`. By default the rule's rate and schedule count, and a
            scheduler, which reads 1.0 then, may not change it.
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
        timeout_seconds: How long a step may wait while nothing comes from the server.
        keys: Directory of this host's keys, for a server whose address has a key; by
            default the one that `distbelief keys` uses.

    Raises:
        JobError: the address, the parameters or the options are invalid.
        PeerLostError: the server does not answer in time.
    """

    @checked("DownpourSGD", ELSEWHERE | _OF_THE_RULE)
    def __init__(  # noqa: PLR0913 -- the options of one algorithm
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]],
        *,
        server: str,
        buffers: Tensors | None = None,
        lr: float | None = None,
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
                f"DownpourSGD: learning_rate is {learning_rate} with n_fetch {n_fetch}: between "
                "fetches a worker steps by itself: give it a rate above 0"
            )
        if isinstance(cast("object", params), torch.nn.Module):
            raise JobError("DownpourSGD: give it net.parameters(), not net")
        defaults = {"learning_rate": learning_rate or 0.0}
        if lr is not None:
            _check_rate("lr", lr)
            defaults["lr"] = lr
        try:
            torch.optim.Optimizer.__init__(self, params, defaults)
        except (TypeError, ValueError) as error:
            raise JobError(f"DownpourSGD: {error}: give it net.parameters()") from error
        address = ServerAddress.parse(server)
        self._order = self._order_of(self.param_groups, address)
        self._parameters = self._given(self.param_groups)
        self._take_buffers(buffers, address)
        self._n_steps = 0
        self._sends = "gradient"
        policy = address.exchange
        if policy.send == "delta":
            raise JobError(
                "DownpourSGD: the server takes local steps, not gradients: use distbelief.Exchange"
            )
        if self._server_rates() is not msgspec.UNSET and policy.round is not None:
            raise JobError(
                "DownpourSGD: lr is given, and the server applies the pushes of many workers at "
                "once (round): give its rule the rate and a schedule, or ParameterServer no round"
            )
        self._frozen = [
            place for place, one in enumerate(self._parameters) if not one.requires_grad
        ]
        self._open(
            self._parameters,
            address,
            policy,
            timeout_seconds=timeout_seconds,
            keys=keys,
            frozen=self._frozen,
            pace=Pace(
                n_fetch=n_fetch,
                n_push=n_push,
                # A worker that waits for others waits for its own pushes, too.
                blocking=blocking or policy.staleness is not None,
                overwrite_local_steps=overwrite_local_steps,
            ),
        )
        self._note_versions()
        # Then push t - 1 and the fetch for step t + 1 are under way during step t.
        self._fetches_ahead = self._session.moves_blocks and not self._state.pace.awaits_pushes
        self._is_fetching = False

    @override
    @uncompiled
    def step(  # type: ignore[override]  # torch's are overloads; this is their union
        self, closure: Callable[[], float] | None = None, *, samples: int | None = None
    ) -> float | None:
        """Push the gradients in `.grad` and fetch parameters, as due.

        Args:
            closure: Computes the loss and the gradients again, as in torch.
            samples: Number of samples of the gradient, for the server's count; by default 1.

        Raises:
            PeerLostError: the server does not answer in time, or has ended.
            JobError: a gradient is NaN or infinite, or something else has changed a parameter
                (a change through `.data` is seen in the first steps).
        """
        self._note_thread()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_groups()
        for place in self._frozen:
            if self._parameters[place].grad is not None:
                raise JobError(
                    f"DownpourSGD: parameter {place} has a gradient, but was frozen at first: call "
                    "finish(), and make a new DownpourSGD"
                )
        n_samples = number_of_samples(samples, "DownpourSGD", self._policy)
        self._refuse_changes()
        try:
            self._push_and_fetch(n_samples)
        finally:
            self._note_versions()
        return loss

    def _push_and_fetch(self, samples: int) -> None:
        with torch.no_grad(), self._session.uninterrupted, self._session.background:
            self._follow(self._parameters)
            self._enter()
            pace = self._state.pace
            is_due = pace.pushes_after(self._n_steps)
            if is_due:  # before anything is taken: a step that fails here can be repeated
                self._await_room()
            self._is_finished = False
            self._samples += samples
            gradients = self._gradients()
            self._state.add(gradients)
            self._state.count(self._session.client.clocks)
            push = self._stage_accrued() if is_due else None
            if push is not None and not self._fetches_ahead:
                self._issue(push)
            if pace.fetches_before(self._n_steps + 1):
                try:
                    self._fetch_and_repeat()
                except PeerLostError:
                    # What is staged must go out, or nothing is ever staged again.
                    if push is not None and self._fetches_ahead:
                        self._issue(push)
                    raise
            else:
                self._state.descend(gradients, self._rates())
            self._n_steps += 1
            if self._fetches_ahead:
                # First: behind the blocks of a push, the request would wait for the link.
                if pace.fetches_before(self._n_steps + 1):
                    self._begin_fetch()
                    self._is_fetching = True
                if push is not None:
                    self._issue(push)

    @override
    @of_wrapped
    def finish(self) -> None:
        """Push what is left, wait until it is applied, and fetch once more.

        The parameters are then the server's, with the pushes of all workers. PeerLostError if it
        does not answer in time.
        """
        if self._session.closed:
            return
        self._follow_groups()
        with torch.no_grad(), self._session.uninterrupted, self._session.background:
            self._follow(self._parameters)
            if self._state.n_unsent or self._session.client.owes_rest:
                self._issue(self._stage_accrued(is_last=True))
            self._await_pushes()
            self._step_out()
            self._state.hold()
            # What is under way may be older than the last push.
            self._fetch(self._session.values, exact=True)
            self._state.merge(contains_pushes=True)
            self._is_fetching = False
        self._note_versions()
        self._note_finished()

    @override
    def add_param_group(self, param_group: dict[str, object]) -> None:
        if "_parameters" in self.__dict__:
            raise JobError(
                "DownpourSGD: a group of parameters cannot be added: pass all of them at once"
            )
        _plain(super().add_param_group)(_Group(param_group))

    @override
    def state_dict(self) -> dict[str, object]:
        """Return the rates, and the number of steps as "steps"; the parameters are the server's.

        Call `finish` first: gradients that are not pushed are in no state.
        """
        return {**_plain(super().state_dict)(), "steps": self._n_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue with what `state_dict` has returned.

        With a model's state instead, as `net.state_dict()`: set the server's values to it, for all
        workers, and fetch them. Gradients that are not pushed yet are dropped.
        """
        if is_of_model(state_dict, "DownpourSGD"):
            self._load(state_dict, self._parameters)
            self._note_versions()
            return
        if not state_dict.keys() >= {"state", "param_groups"}:
            shown = ", ".join(map(str, state_dict)) or "empty"
            raise JobError(f"DownpourSGD: not a state of a DownpourSGD: {shown}")
        groups = cast("list[dict[str, object]]", state_dict["param_groups"])
        for group in groups:
            _Group(group)  # refuses what another optimizer saved
            if "learning_rate" not in group:
                raise JobError("DownpourSGD: not a state of a DownpourSGD, but of another one")
        if len({"lr" in group for group in (*groups, *self.param_groups)}) > 1:
            raise JobError(
                "DownpourSGD: lr is given here and not in the state, or there and not here: make "
                "both with lr, or both without"
            )
        steps = state_dict.get("steps", self._n_steps)
        if type(steps) is not int or steps < 0:
            raise JobError(
                f"DownpourSGD: steps of the state are {steps!r}: it is not of this class"
            )
        _plain(super().load_state_dict)(state_dict)
        self.param_groups = [_Group(group) for group in self.param_groups]
        self._n_steps = steps

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        _plain(super().zero_grad)(set_to_none)

    @override
    def _settle(self) -> None:
        self._await_pushes()
        if self._is_fetching:
            self._end_fetch(self._session.values)
            self._is_fetching = False
        self._state.discard()

    def _note_versions(self) -> None:
        self._write()
        self._versions = [one._version for one in self._parameters]  # noqa: SLF001 -- torch's own
        self._sums = self._bit_sums()

    def _bit_sums(self) -> list[torch.Tensor]:
        # Of the first steps: torch counts no change by `data`, and who clamps so does it in each.
        if self._n_steps >= N_LOOKED_AT:
            return []
        return [one.detach().resolve_neg().view(torch.int32).sum() for one in self._parameters]

    def _follow_groups(self) -> None:
        """Take parameters that have been put into the groups in place of others."""
        now = self._given(self.param_groups)
        for place, (one, known) in enumerate(zip(now, self._parameters, strict=True)):
            if one is not known:
                self._versions[place] = one._version  # noqa: SLF001 -- torch's own
                self._sums = []
        self._parameters = now

    def _refuse_changes(self) -> None:
        """Raise JobError if something else has changed a parameter since the last step."""
        sums = self._bit_sums() if self._sums else []
        for place, (parameter, known) in enumerate(
            zip(self._parameters, self._session.values, strict=False)
        ):
            is_changed = parameter._version != self._versions[place]  # noqa: SLF001 -- torch's own
            is_changed |= bool(sums) and not torch.equal(sums[place], self._sums[place])
            if parameter.data_ptr() != known.data_ptr() and parameter.shape.numel() == len(known):
                # Where the memory is new, the old one has the values.
                is_changed |= not torch.equal(parameter.detach().reshape(-1), known)
            if is_changed and place not in self._frozen and not self._are_served():
                raise JobError(
                    f"DownpourSGD: {self._called(place)} was changed between two steps, and the "
                    "next fetch would undo that: the server has the values. To set them there, use "
                    "load_state_dict(net.state_dict()) of this optimizer; to clamp or decay in "
                    "each step, distbelief.Exchange; to go on without the change, finish()"
                )

    def _are_served(self) -> bool:
        """Return whether the parameters are what the server has: a checkpoint of just now."""
        with torch.no_grad(), self._session.uninterrupted, self._session.background:
            if self._state.n_unsent or self._is_fetching or self._session.client.unacknowledged:
                return False
            self._follow(self._parameters)
            given = [one.clone() for one in self._session.values]
            self._fetch_anew()
            n = len(self._parameters)
            same = all(map(torch.equal, given[:n], self._session.values[:n]))
            if not same:
                torch._foreach_copy_(self._session.values, given)
                self._write()
        return same

    def _gradients(self) -> dict[int, torch.Tensor]:
        gradients: dict[int, torch.Tensor] = {}
        for place, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                sparse = parameter.grad.is_sparse  # of Embedding(sparse=True)
                dense = parameter.grad.to_dense() if sparse else parameter.grad
                gradients[place] = dense.reshape(-1)
        return gradients

    def _rates(self) -> list[float]:
        rates = [group["learning_rate"] for group in self.param_groups for _ in group["params"]]
        return [rates[place] for place in self._order]

    def _server_rates(self) -> pf.Rates:
        """Return the rates that go with a push: one, or one for each of the server's parameters."""
        given = [group.get("lr") for group in self.param_groups]
        if all(rate is None for rate in given):
            return msgspec.UNSET
        if None in given:
            raise JobError(
                f"DownpourSGD: parameter group {given.index(None)} has no lr, and others have: "
                "give each group one, or DownpourSGD(..., lr=...) for those without"
            )
        rates = [float(group["lr"]) for group in self.param_groups for _ in group["params"]]
        if len({*rates}) == 1:
            return (rates[0],)
        return tuple(rates[place] for place in self._order)

    def _stage_accrued(self, *, is_last: bool = False) -> lw.StagedPush:
        clocks = self._state.fetched_clocks(self._session.client.clocks)
        push = replace(self._stage(clocks, is_last=is_last), rates=self._server_rates())
        self._state.staged(finite=push.outcome.finite)
        self._state.sent(self._session.now(), finite=push.outcome.finite)
        return push

    def _fetch_and_repeat(self) -> None:
        follows = self._state.pace.awaits_pushes
        if follows:
            self._begin_fetch(lw.FETCH_AFTER)
        if self._policy.staleness is not None:
            self._await_turn()
        elif follows:
            self._await_pushes()
        self._state.hold()
        if follows:
            self._end_fetch(self._session.values)
        elif not self._fetches_ahead:
            self._fetch(self._session.values)
        elif self._is_fetching:  # not in the first step
            self._end_fetch(self._session.values)
            self._is_fetching = False
        contains_pushes = self._session.client.fetches_own_pushes
        self._state.merge(contains_pushes=contains_pushes, rates=self._rates())


class _Group(dict[str, object]):
    """A parameter group that rejects options of the server's rule."""

    def __init__(self, group: Mapping[str, object]) -> None:
        super().__init__()
        for key, value in group.items():
            self._put(key, value)

    def __missing__(self, key: str) -> object:
        if key in _OF_SCHEDULERS:  # what a scheduler that changes nothing reads
            return 1.0
        raise _refusal(key) if key in _OF_THE_RULE else KeyError(key)

    @override
    def __setitem__(self, key: str, value: object) -> None:
        if key in {"lr"} | _NOTES and "lr" not in self:
            if value != 1.0 or key not in _OF_SCHEDULERS:
                raise JobError(_NO_RATE)
            return
        self._put(key, value)

    def _put(self, key: str, value: object) -> None:
        if key not in _GROUP_KEYS:
            raise _refusal(key)
        if key in _RATES:
            _check_rate(key, value)
        super().__setitem__(key, value)

    @override
    def setdefault(self, key: str, default: object = None, /) -> object:
        if key not in self:
            put = self._put if key == "lr" else self.__setitem__  # by torch, of a group without it
            put(key, default)
        return self[key]


_NO_RATE = (
    "DownpourSGD: no lr is given, so the rate is that of the server's rule, which no scheduler of "
    "torch changes: give DownpourSGD(..., lr=...), or the rule schedule="
)
_RATES = {"lr", "learning_rate"}
_OF_SCHEDULERS = {"lr", "initial_lr"}
# What torch's schedulers note in a group
_NOTES = {"initial_lr", "max_lr", "min_lr", "swa_lr"}
_GROUP_KEYS = {"params", "param_names"} | _RATES | _NOTES


def _check_rate(key: str, value: object) -> None:
    is_rate = isinstance(value, Real) and not isinstance(value, bool)  # numpy's numbers, too
    if not (is_rate and 0.0 <= cast("float", value) < math.inf):
        raise JobError(f"DownpourSGD: {key} is {value!r}; use a number, 0 or more")


def _refusal(key: str) -> JobError:
    close = "" if key in _OF_THE_RULE else nearest(key, _GROUP_KEYS - _NOTES, only_close=True)
    why = close or _OF_THE_SERVER
    return JobError(f"DownpourSGD: parameter groups have no {key!r}: {why}")


def _plain(method: Callable[_P, _R]) -> Callable[_P, _R]:
    # torch wraps these methods to keep torch.compile away from them, which imports the compiler at
    # the first call: six seconds in every worker, again after each restart.
    function = getattr(method, "__wrapped__", None)
    if function is None or "torch._dynamo" in sys.modules:
        return method
    owner = cast("MethodType", method).__self__
    return cast("Callable[_P, _R]", MethodType(function, owner))
