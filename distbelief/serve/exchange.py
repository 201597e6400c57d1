"""`Exchange`: local steps by any torch optimizer, whose sum goes to a parameter server.

    inner = torch.optim.AdamW(net.parameters(), lr=1e-3)
    exchange = distbelief.Exchange(inner, server=server.address, every=64)
    for inputs, targets in loader:
        exchange.zero_grad()
        loss_function(net(inputs), targets).backward()
        exchange.step()
    exchange.finish()

What the steps since the last exchange have changed goes to the server as one push.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, final

import torch
from typing_extensions import override

from distbelief.core.arguments import checked
from distbelief.core.errors import JobError
from distbelief.parameter_server.policy import ExchangePolicy, Numbers
from distbelief.serve.address import ServerAddress, Tensors, exchange_policy
from distbelief.serve.optimizer import DownpourSGD
from distbelief.serve.server_loop import (
    ELSEWHERE,
    LOOK_SECONDS,
    ServerLoop,
    is_of_model,
    number_of_samples,
    of_wrapped,
    uncompiled,
)
from distbelief.worker import loop_worker as lw
from distbelief.worker.exchange import EVERY_MIN, Pace


_OF_INNER = {
    **dict.fromkeys(
        ("lr", "learning_rate", "momentum", "weight_decay", "betas"),
        "it belongs to the inner optimizer, as in Exchange(torch.optim.SGD(params, lr=0.1), ...)",
    ),
    "rule": "it belongs to the server: ParameterServer(..., rule=...)",
    **dict.fromkeys(("n_push", "n_fetch", "sync_every", "local_steps"), "it is every"),
}


# By identity of a parameter: the loop that has begun to train it last.
_TRAINED_BY: "weakref.WeakValueDictionary[int, Exchange]" = weakref.WeakValueDictionary()


@final
class Exchange(ServerLoop, torch.optim.Optimizer):
    """Takes local steps by a torch optimizer, and exchanges their sum with a parameter server.

    To a loop it is that optimizer: groups of parameters and state are those of `inner`, so that
    torch's schedulers and gradient scalers take either.

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
    optimizer. The state of the inner optimizer stays here.

    Args:
        inner: Takes the local steps. What else changes parameters after a step, such as clamping,
            weight decay by hand or a projection, counts as part of that step. Its parameters are
            those that the server was given, in the same order unless both sides have names.
        server: `ParameterServer.address`, or the line that `distbelief serve` prints.
        buffers: The model, or its buffers, if the server has them: statistics of BatchNorm.
        preset: How to exchange, by the name of a paper (see `distbelief presets`); by default as
            the server was told. The next two replace choices of it.
        every: Steps between two exchanges, by default 64; "auto" fits them to the link, so that it
            is busy for at most 80 % of the time.
        numbers: As they are sent to another host and back; "bfloat16" halves the bytes. The server
            keeps float32, and the values that `finish` fetches are exact.
        timeout_seconds: How long a step may wait while nothing comes from the server.
        keys: Directory of this host's keys, for a server whose address has a key; by
            default the one that `distbelief keys` uses.

    Raises:
        JobError: the address, the parameters or the options are invalid.
        PeerLostError: the server does not answer in time.
    """

    @checked("Exchange", ELSEWHERE | _OF_INNER)
    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        server: str,
        buffers: Tensors | None = None,
        preset: str | None = None,
        every: int | Literal["auto"] | None = None,
        numbers: Numbers | None = None,
        timeout_seconds: float = 60.0,
        keys: str | Path | None = None,
    ) -> None:
        if not isinstance(cast("object", inner), torch.optim.Optimizer):
            raise JobError(
                f"Exchange: inner is {inner!r}; use an optimizer such as torch.optim.SGD(...)"
            )
        if isinstance(inner, DownpourSGD):
            raise JobError("Exchange: inner is a DownpourSGD, which has a server of its own")
        address = ServerAddress.parse(server)
        policy = _policy(address, preset, every=every, numbers=numbers)
        self.inner = inner
        self._order = self._order_of(inner.param_groups, address)
        self._take_buffers(buffers, address)
        parameters = self._parameters()
        self._n_parameters = len(parameters)
        self._n_steps = 0
        self._left_at = self._compute_seconds = 0.0  # waits for the server not included
        self._sends = "change"
        self._way_back = "; take_back() goes back to the last exchange"
        self._is_fetching = self._is_stepping = False  # the fetch that follows each push has begun
        # Frozen parameters are fetched once, here, and never pushed.
        self._trained = [one.requires_grad for one in parameters]
        frozen = [place for place, trains in enumerate(self._trained) if not trains]
        self._open(
            parameters,
            address,
            policy,
            timeout_seconds=timeout_seconds,
            keys=keys,
            frozen=frozen,
            pace=Pace(
                n_push=EVERY_MIN if policy.every == "auto" else int(policy.every), sends_delta=True
            ),
        )
        # What comes between two steps: it must not change the model.
        self._fetched = [
            values if place in frozen else values.clone()
            for place, values in enumerate(self._session.values)
        ]
        if hasattr(inner, "_optimizer_step_pre_hooks"):  # not of wrappers
            inner.register_step_pre_hook(partial(_refuse_alone, weakref.ref(self)))

    # torch's constructor is not called: it would keep groups and state of its own.

    def __getattr__(self, name: str) -> object:
        if name.startswith("_optimizer_"):  # hooks
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[explicit-any, override]
        """Groups of parameters of the inner optimizer."""
        return self.inner.param_groups

    @property
    @override
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[explicit-any, override]
        """State of the inner optimizer, by parameter."""
        return self.inner.state

    @property
    @override
    def defaults(self) -> dict[str, Any]:  # type: ignore[explicit-any, override]
        """Default options of the inner optimizer."""
        return self.inner.defaults

    @override
    def add_param_group(self, param_group: dict[str, object]) -> None:
        raise JobError(
            "Exchange: a group of parameters cannot be added: pass all of them to the inner "
            "optimizer at once"
        )

    @override
    @uncompiled
    def step(  # type: ignore[override]  # torch's are overloads; this is their union
        self, closure: Callable[[], float] | None = None, *, samples: int | None = None
    ) -> float | None:
        """Take a local step; exchange, if that is due.

        Args:
            closure: Computes the loss and the gradients again, as in torch.
            samples: Number of samples of the gradient, for the server's count; by default 1.

        Raises:
            PeerLostError: the server does not answer in time, or has ended.
            JobError: a parameter has become NaN or infinite: `take_back` goes on without.
        """
        if sum(len(group["params"]) for group in self.inner.param_groups) != self._n_parameters:
            raise JobError(
                "Exchange: a group of parameters was added to the inner optimizer: "
                "pass all of them at once"
            )
        if [one.requires_grad for one in self._parameters()] != self._trained:
            raise JobError(
                "Exchange: requires_grad of a parameter has changed: call finish(), and make a new "
                "Exchange"
            )
        self._note_thread()
        samples = number_of_samples(samples, "Exchange", self._policy)
        self._follow(self._parameters())
        if self._is_finished:
            self._refuse_changes()
            _TRAINED_BY.update((id(one), self) for one in self._parameters() if one.requires_grad)
        self._is_stepping = True
        try:
            loss: float | None = self.inner.step(closure)
        finally:
            self._is_stepping = False
        self._read()
        self._is_finished = False
        self._n_steps += 1
        self._state.count(self._session.client.clocks)
        self._samples += samples
        with torch.no_grad(), self._session.uninterrupted, self._session.background:
            if self._n_steps > 1:
                self._compute_seconds += self._session.now() - self._left_at
            try:
                self._enter()
                self._receive()
                if self._state.pushes_after(self._n_steps):
                    self._exchange()
            finally:
                self._write()
            self._left_at = self._session.now()
        return loss

    @of_wrapped
    def take_back(self) -> None:
        """Take back the local steps that are not pushed, and go on from the server's values.

        For a loop in which a parameter has become NaN. As in the replicas of a job the state of
        the inner optimizer, which led there, is lost.

        Raises:
            PeerLostError: the server does not answer in time.
        """
        self._session.check()
        with torch.no_grad(), self._session.uninterrupted, self._session.background:
            self._follow(self._parameters())
            self._settle()
            self._fetch_anew()
        self.inner.state.clear()

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as the inner optimizer does."""
        self.inner.zero_grad(set_to_none)

    @override
    def state_dict(self) -> dict[str, object]:
        """Return the inner optimizer's state, and the steps between exchanges as "every".

        The parameters are the server's. Call `finish` first: steps that are not pushed are in no
        state.
        """
        return {**self.inner.state_dict(), "every": self._state.pace.n_push}

    @override
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue with what `state_dict` has returned.

        With a model's state instead, as `net.state_dict()`: set the server's values to it, for all
        workers, and fetch them. Steps that are not pushed yet are dropped.

        Raises:
            JobError: it is the state of something else.
        """
        if is_of_model(state_dict, "Exchange"):
            self._load(state_dict, self._parameters())
            return
        inner = dict(state_dict)
        every = inner.pop("every", None)
        if not isinstance(every, int) or inner.keys() != {"state", "param_groups"}:
            shown = ", ".join(map(str, state_dict)) or "empty"
            raise JobError(f"Exchange: not a state of an Exchange: {shown}")
        self.inner.load_state_dict(inner)
        if self._policy.every == "auto":  # otherwise as it was given here
            self._state.pace = replace(self._state.pace, n_push=every)

    @override
    def _counted(self) -> dict[str, float]:
        return {**super()._counted(), "every": self._state.pace.n_push}

    @override
    @of_wrapped
    def finish(self) -> None:
        """Push what is left, wait until it is applied, and fetch once more.

        The parameters are then the server's, with the pushes of all workers. PeerLostError if it
        does not answer in time.
        """
        if self._session.closed:
            return
        with torch.no_grad(), self._session.uninterrupted, self._session.background:
            self._follow(self._parameters())
            if self._is_finished:
                self._refuse_changes()
            elif not self._state.n_unsent and self._state.where_changed():
                self._state.count(self._session.client.clocks)  # what has followed the last step
            if self._state.n_unsent or self._session.client.owes_rest:
                self._exchange(is_last=True)
            self._end_exchange()
            self._step_out()
            # Once more: other workers may have pushed since.
            self._fetch(self._fetched, exact=True)
            self._merge()
            self._write()
        self._note_finished()

    @property
    def _steps_alone(self) -> bool:
        return self._is_finished and not (self._is_stepping or self._session.closed)

    def _parameters(self) -> list[torch.nn.Parameter]:
        return self._given(self.inner.param_groups)

    @override
    def _settle(self) -> None:
        self._end_exchange()

    def _refuse_changes(self) -> None:
        """Raise JobError if values were changed before the first step after an exchange of all."""
        for place in self._state.where_changed():
            raise JobError(
                f"Exchange: {self._called(place)} was changed since the server's values came, "
                "and before any step: each worker would add that change. To set the values of "
                "the server, use load_state_dict(net.state_dict()) of this Exchange or of "
                "ParameterServer; changes after a step, such as clamping, count as part of it"
            )

    def _refuse_shared(self) -> None:
        """Raise JobError if another Exchange has begun to train a parameter."""
        for place, one in enumerate(self._parameters()):
            if self._trained[place] and _TRAINED_BY.get(id(one), self) is not self:
                raise JobError(
                    f"Exchange: {self._called(place)} is trained by another Exchange since then, "
                    "and each would push the steps of both: give one Exchange all parameters, or "
                    "finish() the first one before"
                )

    def _exchange(self, *, is_last: bool = False) -> None:
        self._refuse_shared()
        # The anchor is needed until the last fetch is merged: if the link is slower than `every`
        # steps, this is where the worker waits for it.
        self._end_exchange()
        # Steps since the last push are repeated from what was fetched, so that has their clocks.
        self._issue(self._stage(self._session.client.clocks, is_last=is_last))
        self._state.staged()
        self._state.sent(self._session.now())
        if self._policy.staleness is None:
            self._receive()
        else:  # a tick begins with a fetch: no local step before it
            self._begin_fetch(lw.FETCH_AFTER)
            self._is_fetching = True
            self._await_turn()
            self._end_exchange()

    def _receive(self) -> None:
        """Continue the exchange as far as messages have come; do not wait for any."""
        client = self._session.client
        if self._state.fetch_due:
            self._session.node.pump(lambda: False, timeout_seconds=LOOK_SECONDS)
            if not self._is_fetching:
                # A fetch before the acknowledgement might not have the own steps (SSP-4).
                self._begin_fetch(lw.FETCH_AFTER)
                self._is_fetching = True
        if self._is_fetching and client.installable and self._install(self._fetched):
            self._merge()

    def _end_exchange(self) -> None:
        if self._is_fetching:
            self._await_pushes()  # perhaps a round waits for other workers
            self._end_fetch(self._fetched)
            self._merge()
        elif self._state.fetch_due:
            self._await_pushes()
            self._fetch(self._fetched)
            self._merge()

    def _merge(self) -> None:
        self._is_fetching = False
        self._state.fetched()
        step_seconds = self._compute_seconds / max(self._n_steps - 1, 1)
        self._state.fit_to_link(self._session.now(), step_seconds=step_seconds)
        self._state.merge_from(self._fetched)


def _refuse_alone(exchange: "weakref.ref[Exchange]", *_: object) -> None:
    """Raise JobError if the inner optimizer is to step where nothing would send that."""
    itself = exchange()
    if itself is not None and itself._steps_alone:  # noqa: SLF001 -- its hook
        raise JobError(
            "Exchange: step() of its inner optimizer is called, and no other worker would get that "
            "step: call step() of the Exchange, or first close() of it"
        )


def _policy(address: ServerAddress, preset: str | None, **given: object) -> ExchangePolicy:
    server = address.exchange
    if address.preset and server.send == "gradient":
        raise JobError(
            f"Exchange: the server has preset {address.preset!r}, whose rule takes gradients: use "
            "distbelief.DownpourSGD, or give ParameterServer a preset of local steps"
        )
    usual = server.chosen
    if preset is not None:
        usual = {}
    elif server.send == "gradient":
        usual |= {"every": 64, "send": "delta"}
    policy = exchange_policy("Exchange", usual, preset, **given)
    if policy.n_epochs is not None:
        raise JobError(
            f'Exchange: every is "{policy.every}", and the data of your loop are not known here: '
            "give steps, as every=len(loader)"
        )
    if policy.send == "gradient":
        raise JobError(f"Exchange: preset {preset!r} sends gradients: use distbelief.DownpourSGD")
    for name in ("staleness", "round", "weight", "damping"):
        own, others = getattr(policy, name), getattr(server, name)
        if own != others:
            raise JobError(
                f"Exchange: {name} is {own!r} with preset {preset!r}, and {others!r} at the "
                "server: give ParameterServer the same preset"
            )
    return policy
