"""Wrong arguments of the public constructors: each message names the culprit and the way out."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distbelief
import sandblaster
from distbelief.core.errors import JobError
from distbelief.parameter_server import schedules


# Without types: a type checker would find each of these mistakes.
public: Any = distbelief
of_rates: Any = schedules
minimize: Any = sandblaster.minimize
ADDRESS = "ipc:///nowhere/.supervisor.1?run=a&shards=1"
X = torch.zeros(4, 3)


def net() -> nn.Module:
    return nn.Linear(3, 2)


def inner() -> torch.optim.Optimizer:
    return torch.optim.SGD(net().parameters(), lr=0.1)


# What users of torch, Lightning, Accelerate and DDP write, and what is said.
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a rate without its name": (
        lambda: public.Adagrad(0.1),
        "Adagrad: 0.1 needs a name: learning_rate=, schedule=",
    ),
    "an option without its name": (  # Regression: it was taken as epsilon
        lambda: public.Adagrad(0.1, learning_rate=0.1),
        "Adagrad: 0.1 needs a name",
    ),
    "lr of a rule": (
        lambda: public.SGD(lr=0.1),
        "SGD has no option 'lr': did you mean 'learning_rate'?",
    ),
    "parameters of a rule": (lambda: public.Adam([1], learning_rate=0.1), "Adam: [1] needs a name"),
    "no rate": (public.Adam, "Adam: missing a required argument: 'learning_rate'"),
    "betas": (
        lambda: public.Adam(learning_rate=0.1, betas=(0.9, 0.99)),
        "Adam has no option 'betas': give beta1 and beta2",
    ),
    "momentum of plain SGD": (
        lambda: public.SGD(learning_rate=0.1, momentum=0.9),
        "SGD has no option 'momentum': use Momentum",
    ),
    "alpha of RMSprop": (
        lambda: public.RMSprop(learning_rate=0.1, alpha=0.9),
        "RMSprop has no option 'alpha': it is smoothing",
    ),
    "T_max of a schedule": (
        lambda: of_rates.Cosine(T_max=100),
        "Cosine has no option 'T_max': it knows n_warm_up, n_pushes, floor",
    ),
    "a rate below 0": (
        lambda: public.SGD(learning_rate=-1.0),
        "rule 'sgd': learning_rate is -1.0; use a finite number, 0 or more",
    ),
    "groups that are none": (
        lambda: public.SGD(learning_rate=0.1, groups=3),
        "rule 'sgd': groups is 3; use a rule for each pattern of names",
    ),
    "lr of DownpourSGD": (
        lambda: public.DownpourSGD(net().parameters(), lr=0.1),
        "DownpourSGD has no option 'lr': it belongs to the rule of the server",
    ),
    "a server without its name": (
        lambda: public.DownpourSGD(net().parameters(), ADDRESS),
        f"DownpourSGD: {ADDRESS!r} needs a name: server=",
    ),
    "a net for DownpourSGD": (
        lambda: public.DownpourSGD(net(), server=ADDRESS),
        "DownpourSGD: give it net.parameters(), not net",
    ),
    "world_size": (
        lambda: public.DownpourSGD(net().parameters(), server=ADDRESS, world_size=3),
        "DownpourSGD has no option 'world_size': workers have no number",
    ),
    "lr of Exchange": (
        lambda: public.Exchange(inner(), server=ADDRESS, lr=0.1),
        "Exchange has no option 'lr': it belongs to the inner optimizer",
    ),
    "n_push of Exchange": (
        lambda: public.Exchange(inner(), server=ADDRESS, n_push=4),
        "Exchange has no option 'n_push': it is every",
    ),
    "lr of a server": (
        lambda: public.ParameterServer(net().parameters(), lr=0.1),
        "ParameterServer has no option 'lr': give the rule its options",
    ),
    "no rule": (
        lambda: public.ParameterServer(net().parameters()),
        "ParameterServer: rule is None; use one, as distbelief.SGD(learning_rate=0.1)",
    ),
    "an optimizer of torch as rule": (
        lambda: public.ParameterServer(net().parameters(), rule=inner()),
        "ParameterServer: rule is SGD ( Parameter Group 0",
    ),
    "workers of minimize": (
        lambda: minimize(net(), "mse", (X, X), workers=3),
        "minimize has no option 'workers': it is replicas",
    ),
    "lr of minimize": (
        lambda: minimize(net(), "mse", (X, X), lr=0.1),
        "minimize has no option 'lr': a line search finds each step's length",
    ),
    "a method without its name": (
        lambda: minimize(net(), "mse", (X, X), "l-bfgs"),
        "minimize: 'l-bfgs' needs a name: method=",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_argument_is_refused_with_the_way_out(mistake: str) -> None:
    """Regression: these were bare TypeErrors of Python, ValueErrors, or nothing was said."""
    call, said = MISTAKES[mistake]
    with pytest.raises(JobError, match=re.escape(said)):
        call()


LAZY: dict[str, Callable[[nn.Module], object]] = {
    "ParameterServer": lambda lazy: distbelief.ParameterServer(
        lazy.parameters(), rule=distbelief.SGD(learning_rate=0.1)
    ),
    "DownpourSGD": lambda lazy: distbelief.DownpourSGD(lazy.parameters(), server=ADDRESS),
    "Exchange": lambda lazy: distbelief.Exchange(
        torch.optim.SGD(lazy.parameters(), lr=0.1), server=ADDRESS
    ),
    "minimize": lambda lazy: sandblaster.minimize(lazy, "mse", (X, X)),
}


@pytest.mark.parametrize("user", LAZY)
def test_a_lazy_module_is_named(user: str) -> None:
    """Regression: torch's own RuntimeError about an uninitialized parameter."""
    with pytest.raises(JobError, match=r"has no shape yet.*replace .* Lazy module by one"):
        LAZY[user](nn.LazyLinear(2))
