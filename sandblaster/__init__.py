"""Sandblaster: batch optimization over the shards of a parameter server.

A coordinator that never sees a parameter runs L-BFGS, conjugate gradients, gradient descent
or OWL-QN by commands to the shards, and assigns chunks of the batch to workers as they
become free (Dean et al. 2012, section 4.2).

    result = sandblaster.minimize(net, "cross_entropy", (x, y), replicas=4, shards=2)

In a job file the same is `[algorithm] name = "sandblaster"`. Names are imported on first
use: `import sandblaster` alone does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from sandblaster.api import minimize as minimize
    from sandblaster.optimizers.termination import Reason as Reason
    from sandblaster.strads.factorization import MatrixFactorization as MatrixFactorization
    from sandblaster.strads.linear import (
        Lasso as Lasso,
        SparseLogisticRegression as SparseLogisticRegression,
        sparse_path as sparse_path,
    )
    from sandblaster.strads.topics import LatentDirichletAllocation as LatentDirichletAllocation

_HOMES = {
    "Lasso": "sandblaster.strads.linear",
    "LatentDirichletAllocation": "sandblaster.strads.topics",
    "MatrixFactorization": "sandblaster.strads.factorization",
    "Reason": "sandblaster.optimizers.termination",
    "SparseLogisticRegression": "sandblaster.strads.linear",
    "minimize": "sandblaster.api",
    "sparse_path": "sandblaster.strads.linear",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605 -- derived, so that the two cannot differ


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'sandblaster' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
