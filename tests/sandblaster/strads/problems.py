"""Data with a known support, and the plainest way to solve a Lasso."""

import numpy as np
from numpy.typing import NDArray
from scipy import sparse


Floats = NDArray[np.float64]


def sparse_problem(
    n_samples: int = 200, n_features: int = 600, n_used: int = 12, per_column: int = 8
) -> "tuple[sparse.csc_array[np.float64], Floats]":
    generator = np.random.default_rng(0)
    rows = np.concatenate(
        [np.sort(generator.choice(n_samples, per_column, replace=False)) for _ in range(n_features)]
    )
    entries = (generator.standard_normal(len(rows)), rows, per_column * np.arange(n_features + 1))
    x = sparse.csc_array(entries, (n_samples, n_features))
    w = np.zeros(n_features)
    w[generator.choice(n_features, n_used, replace=False)] = generator.choice([-3.0, 3.0], n_used)
    return x, x @ w + 0.1 * generator.standard_normal(n_samples)


def correlated_problem(
    n_samples: int = 60, n_features: int = 48, correlation: float = 0.7
) -> tuple[Floats, Floats]:
    """Return dense columns of which any two have this correlation."""
    generator = np.random.default_rng(1)
    common = generator.standard_normal((n_samples, 1))
    own = generator.standard_normal((n_samples, n_features))
    x = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own
    w = np.zeros(n_features)
    w[::7] = 1.0
    return x, x @ w + 0.1 * generator.standard_normal(n_samples)


def plain_lasso(x: Floats, y: Floats, alpha: float, *, n_passes: int = 3000) -> Floats:
    """Return what coordinate descent finds, one column after the other, without any help."""
    w, residual = np.zeros(x.shape[1]), y.copy()
    for _ in range(n_passes):
        for column in range(x.shape[1]):
            norm = x[:, column] @ x[:, column]
            target = norm * w[column] + x[:, column] @ residual
            new = np.sign(target) * max(abs(target) - len(y) * alpha, 0.0) / norm
            residual += x[:, column] * (w[column] - new)
            w[column] = new
    return w


def lasso_objective(x: Floats, y: Floats, w: Floats, alpha: float) -> float:
    rest = y - x @ w
    return float(rest @ rest / (2 * len(y)) + alpha * np.abs(w).sum())
