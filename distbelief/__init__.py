"""Distributed training of neural networks: DistBelief (Dean et al. 2012) rebuilt on torch.

Many model replicas train asynchronously against a sharded parameter server, on hosts that
may be slow, unequal or fail. Models and data may be larger than one host.

    run = distbelief.fit(net, (x, y), loss="cross_entropy", batch_size=32,
                         rule=distbelief.Adagrad(learning_rate=0.05), replicas=2)
    run.model                                    # the trained torch module
    distbelief.train("job.toml")                 # what `distbelief train` does
    distbelief.simulate("job.toml", cluster="rack-1g")   # `distbelief simulate`

    rule = distbelief.Adagrad(learning_rate=0.02)
    with distbelief.ParameterServer(net.parameters(), rule=rule) as server:
        optimizer = distbelief.DownpourSGD(net.parameters(), server=server.address)

    result = distbelief.plan(net, example, loss="cross_entropy", machines=(1, 2, 4))
    print(result)                                # what `distbelief partition` prints
"""

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING


if sys.platform != "linux":
    raise ImportError(
        f"distbelief runs on Linux, and this is {sys.platform}: its processes share memory and "
        "descriptors as Linux has them. Use a Linux host, a container, or WSL 2 on Windows"
    )
logging.getLogger("distbelief").addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from distbelief.core.errors import (
        DistBeliefError as DistBeliefError,
        JobError as JobError,
        PeerLostError as PeerLostError,
        StorageError as StorageError,
    )
    from distbelief.dashboard.widget import live as live
    from distbelief.job.estimators import (
        DistBeliefClassifier as DistBeliefClassifier,
        DistBeliefRegressor as DistBeliefRegressor,
    )
    from distbelief.job.fit import fit as fit
    from distbelief.job.run.result import Run as Run
    from distbelief.job.trainer import train as train
    from distbelief.parameter_server.rules import (
        SGD as SGD,
        Adagrad as Adagrad,
        Adam as Adam,
        DelayedNesterov as DelayedNesterov,
        Momentum as Momentum,
        RMSprop as RMSprop,
    )
    from distbelief.parameter_server.schedules import (
        Constant as Constant,
        Cosine as Cosine,
        Exponential as Exponential,
        InverseTime as InverseTime,
        Linear as Linear,
        Step as Step,
    )
    from distbelief.plans.planner.planning_result import plan as plan
    from distbelief.serve.exchange import Exchange as Exchange
    from distbelief.serve.optimizer import DownpourSGD as DownpourSGD
    from distbelief.serve.server import ParameterServer as ParameterServer
    from distbelief.simulation.forecast.simulate import simulate as simulate

# Names are imported on first use, so that `import distbelief` alone does not load torch.
_NAMES = {
    "distbelief.core.errors": ("DistBeliefError", "JobError", "PeerLostError", "StorageError"),
    "distbelief.simulation.forecast.simulate": ("simulate",),
    "distbelief.serve.exchange": ("Exchange",),
    "distbelief.serve.optimizer": ("DownpourSGD",),
    "distbelief.parameter_server.rules": (
        "SGD",
        "Adagrad",
        "Adam",
        "DelayedNesterov",
        "Momentum",
        "RMSprop",
    ),
    "distbelief.parameter_server.schedules": (
        "Constant",
        "Cosine",
        "Exponential",
        "InverseTime",
        "Linear",
        "Step",
    ),
    "distbelief.plans.planner.planning_result": ("plan",),
    "distbelief.serve.server": ("ParameterServer",),
    "distbelief.dashboard.widget": ("live",),
    "distbelief.job.estimators": ("DistBeliefClassifier", "DistBeliefRegressor"),
    "distbelief.job.fit": ("fit",),
    "distbelief.job.run.result": ("Run",),
    "distbelief.job.trainer": ("train",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)  # noqa: PLE0605 -- derived, so that the two cannot differ


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'distbelief' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
