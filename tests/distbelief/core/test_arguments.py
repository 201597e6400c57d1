"""Wrong arguments of the public constructors: each message names the culprit and the way out."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import distbelief
import sandblaster
from distbelief.config.load import load_job
from distbelief.core.arguments import checked
from distbelief.core.errors import JobError
from distbelief.job.callbacks import HeldCallback
from distbelief.parameter_server import schedules
from distbelief.serve.server_loop import is_of_model
from distbelief.serve.session import in_order


# Without types: a type checker would find each of these mistakes.
public: Any = distbelief
of_rates: Any = schedules
minimize: Any = sandblaster.minimize
ADDRESS = "ipc:///nowhere/.supervisor.1?run=a&shards=1"
X = torch.zeros(4, 3)
RULE = distbelief.SGD(learning_rate=0.1)


def untyped(value: object) -> Any:  # noqa: ANN401 -- its purpose
    return value


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
    "momentum of DownpourSGD": (
        lambda: public.DownpourSGD(net().parameters(), server=ADDRESS, momentum=0.9),
        "DownpourSGD has no option 'momentum': it belongs to the rule of the server",
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
    "a callback that is none": (
        lambda: minimize(net(), "mse", (X, X), callback=3),
        "minimize: callback is 3; use a function of the result",
    ),
    "a directory that is none": (
        lambda: minimize(net(), "mse", (X, X), directory=3),
        "minimize: directory is 3; use text or a path or None",
    ),
    "an array as an option": (
        lambda: minimize(net(), "mse", (X, X), tol=X.numpy()),
        "tolerance: [[0. 0. 0.] [0. 0. 0.]",
    ),
    "one array as data": (
        lambda: minimize(net(), "mse", X.numpy()),
        "minimize: data are of ndarray: give inputs and targets",
    ),
    "a model without values": (
        lambda: minimize(net().to("meta"), "mse", (X, X)),
        "it is on the meta device, without values",
    ),
    "no parameters": (
        lambda: public.DownpourSGD(None, server=ADDRESS),
        "DownpourSGD: 'NoneType' object is not iterable: give it net.parameters()",
    ),
    "arrays as parameters": (
        lambda: public.DownpourSGD([X.numpy()], server=ADDRESS),
        "one of the params is numpy.ndarray: give it net.parameters()",
    ),
    "a rate that is text": (
        lambda: public.DownpourSGD(
            net().parameters(), server=ADDRESS, learning_rate="1", n_fetch=2
        ),
        "DownpourSGD: learning_rate is '1'; use a number or None",
    ),
    "no tensors of a server": (
        lambda: public.ParameterServer(None, rule=RULE),
        "parameters are None: give net, or net.parameters()",
    ),
    "one tensor of a server": (
        lambda: public.ParameterServer(X, rule=RULE),
        "parameters are tensor([[0., 0., 0.]",
    ),
    "buffers that are none": (
        lambda: public.ParameterServer(net().parameters(), rule=RULE, buffers=3),
        "buffers are 3: give net, or net.buffers()",
    ),
    "three things for a parameter": (
        lambda: public.ParameterServer([("a", X, X)], rule=RULE),
        "a parameter is a tuple of 3: give net.named_parameters()",
    ),
    "parameters without values": (
        lambda: public.ParameterServer(net().to("meta"), rule=RULE),
        "parameter 0 is on the meta device: give one with all its values",
    ),
    "a sparse parameter": (
        lambda: public.ParameterServer([X.to_sparse()], rule=RULE),
        "parameter 0 is a torch.sparse_coo tensor",
    ),
    "a state that is none": (
        lambda: is_of_model(untyped(3), "DownpourSGD"),
        "DownpourSGD: the state is 3: give net.state_dict()",
    ),
    "a net as a state": (
        lambda: in_order(untyped(net()), ["weight"], [X], user="ParameterServer"),
        "ParameterServer: the state is a Linear: give net.state_dict()",
    ),
    "no job": (lambda: load_job(untyped(None)), "the job is None: give the path of a job file"),
    "epochs of train": (
        lambda: public.train("job.toml", epochs=3),
        "train has no option 'epochs': give overrides={\"stop.epochs\": ...}",
    ),
    "a seed that is text": (
        lambda: public.simulate("job.toml", seed="1"),
        "simulate: seed is '1'; use a whole number",
    ),
    "a sweep that is text": (
        lambda: public.simulate("job.toml", sweep="replicas=2"),
        "simulate: sweep is 'replicas=2'; use a table or None",
    ),
    "no example": (lambda: public.plan(net()), "plan: missing a required argument: 'example'"),
    "a watch that is none": (lambda: HeldCallback(untyped(3)), "watch is 3; use a function"),
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


class Folder:
    """What names a file, and is no Path."""

    def __fspath__(self) -> str:
        return "runs"


def test_an_error_of_its_own_stays_where_arguments_fit() -> None:
    """Regression: a folder that is no Path took the blame for an error of the user's own."""

    @checked("scale", {})
    def scale(factor: float, *, by: int | None = None, into: str | Path | None = None) -> float:
        raise TypeError(f"of the user's function: {factor}, {by}, {into}")

    for fitting in (1, untyped(np.float32(2.0))):
        with pytest.raises(TypeError, match="of the user's function"):
            scale(fitting, by=untyped(np.int64(3)), into=untyped(Folder()))
    with pytest.raises(JobError, match=r"scale: by is \[3\]; use a whole number or None"):
        scale(1.0, by=untyped([3]))


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
