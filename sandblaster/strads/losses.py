"""Losses of a linear predictor f, as the programs of coordinate descent need them.

    P(w, b) = value(f) + alpha |w|_1        value is a mean over samples, f = X w + b

`value` curves by at most `curvature` / n in each f_i. So around any f it is at most

    curvature |residual - (change of f)|^2 / (2 n) + constant

and coordinate descent on that lowers P too. With u = s `dual_vector`, and s such that no |x_j.u|
is above alpha n, `dual_value` is at most the minimum of P: P less that is the duality gap (Fercoq,
Gramfort & Salmon 2015; Ndiaye et al. 2017). If there is an intercept the sum of u must be 0, too.
`y` and `f` are (n_samples,); `constant` is the best b without any column.
"""

from typing import Final, TypeAlias, final

import numpy as np
from scipy.special import expit, xlogy

from sandblaster.strads.kernels import Floats


@final
class Squares:
    """|y - f|^2 / (2 n)."""

    curvature: Final = 1.0

    def value(self, y: Floats, f: Floats) -> float:
        return float(np.dot(y - f, y - f)) / (2 * len(y))

    def residual(self, y: Floats, f: Floats) -> Floats:
        return y - f

    def dual_vector(self, y: Floats, f: Floats, *, centred: bool) -> Floats:
        residual = y - f
        return residual - residual.mean() if centred else residual

    def dual_value(self, y: Floats, vector: Floats, largest: float) -> float:
        square, product = float(np.dot(vector, vector)), float(np.dot(vector, y))
        if square == 0.0:
            return 0.0
        scale = min(max(product / square, -largest), largest)
        return scale * (2 * product - scale * square) / (2 * len(y))

    def constant(self, y: Floats, *, centred: bool) -> float:
        return float(y.mean()) if centred else 0.0


@final
class Logistic:
    """log(1 + exp(f)) - y f, y 0 or 1."""

    curvature: Final = 0.25

    def value(self, y: Floats, f: Floats) -> float:
        return float((np.logaddexp(0.0, f) - y * f).mean())

    def residual(self, y: Floats, f: Floats) -> Floats:
        return (y - expit(f)) / self.curvature

    def dual_vector(self, y: Floats, f: Floats, *, centred: bool) -> Floats:
        vector = y - expit(f)
        if centred:  # less of the class that weighs more
            positive, negative = vector[y > 0].sum(), -vector[y <= 0].sum()
            least = min(positive, negative)
            vector = np.where(y > 0, vector * (least / positive), vector * (least / negative))
        return vector

    def dual_value(self, y: Floats, vector: Floats, largest: float) -> float:  # noqa: ARG002 -- of `Squares`
        sizes = min(largest, 1.0) * np.abs(vector)
        return -float((xlogy(sizes, sizes) + xlogy(1 - sizes, 1 - sizes)).mean())

    def constant(self, y: Floats, *, centred: bool) -> float:
        return float(np.log(y.mean() / (1 - y.mean()))) if centred else 0.0


Loss: TypeAlias = Squares | Logistic
