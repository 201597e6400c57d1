"""Train networks larger, and data more, than one machine holds.

DistBelief (Dean et al. 2012) rebuilt: many model replicas train asynchronously against
a sharded parameter server, on ordinary, unequal, failing machines.

    run = distbelief.train("job.toml")           # what `distbelief train` does
    run.model                                    # the trained torch module
    distbelief.simulate("job.toml", cluster="rack-1g")   # `distbelief simulate`

    rule = distbelief.Adagrad(learning_rate=0.02)
    with distbelief.ParameterServer(net.parameters(), rule=rule) as server:
        optimizer = distbelief.DownpourSGD(net.parameters(), server=server.address)

    outlook = distbelief.plan(net, example, loss="cross_entropy", machines=(1, 2, 4))
    print(outlook)                               # what `distbelief partition` prints

Names are imported when first used: `import distbelief` alone does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from distbelief.errors import (
        DistBeliefError as DistBeliefError,
        JobError as JobError,
        PeerLostError as PeerLostError,
        StorageError as StorageError,
    )
    from distbelief.forecast.api import simulate as simulate
    from distbelief.optimizer import DownpourSGD as DownpourSGD
    from distbelief.parameter_server.optimizers import (
        SGD as SGD,
        Adagrad as Adagrad,
        Adam as Adam,
        Momentum as Momentum,
        RMSprop as RMSprop,
    )
    from distbelief.partition.api import plan as plan
    from distbelief.run.result import Run as Run
    from distbelief.serve.server import ParameterServer as ParameterServer
    from distbelief.trainer import train as train

_HOMES = {
    "DistBeliefError": "distbelief.errors",
    "JobError": "distbelief.errors",
    "PeerLostError": "distbelief.errors",
    "StorageError": "distbelief.errors",
    "Run": "distbelief.run.result",
    "train": "distbelief.trainer",
    "simulate": "distbelief.forecast.api",
    "DownpourSGD": "distbelief.optimizer",
    "ParameterServer": "distbelief.serve.server",
    "plan": "distbelief.partition.api",
    "SGD": "distbelief.parameter_server.optimizers",
    "Adagrad": "distbelief.parameter_server.optimizers",
    "Adam": "distbelief.parameter_server.optimizers",
    "Momentum": "distbelief.parameter_server.optimizers",
    "RMSprop": "distbelief.parameter_server.optimizers",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 -- derived, so that the two cannot differ


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'distbelief' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(_HOMES)
