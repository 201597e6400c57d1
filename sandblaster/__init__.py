"""Sandblaster: batch optimisation over the shards of a parameter server.

A coordinator that never sees a parameter drives L-BFGS, conjugate gradients, gradient
descent or OWL-QN by small commands to the shards, and deals small portions of the batch
to whichever replica is free (Dean et al. 2012, section 4.2).

    result = sandblaster.minimize(net, "cross_entropy", (x, y), replicas=4, shards=2)

In a job file the same is `[algorithm] name = "sandblaster"`. Names are imported when
first used: `import sandblaster` alone does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from sandblaster.api import minimize as minimize
    from sandblaster.optimizers.termination import Reason as Reason

_HOMES = {"Reason": "sandblaster.optimizers.termination", "minimize": "sandblaster.api"}

__all__ = sorted(_HOMES)  # noqa: PLE0605 -- derived, so that the two cannot differ


def __getattr__(name: str) -> object:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sandblaster' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(_HOMES)
