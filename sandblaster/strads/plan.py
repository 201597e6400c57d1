"""Which variables may change at once: the rounds of one pass (STRADS ST-1).

Each task of a round minimizes along its own variables, as if the others stood still. That lowers
the objective by at least c |u|^2 / 2 in all, u_j = |x_j| times the change of w_j. Changed together
the tasks differ from that by c times the products of x_j.x_k over pairs of different tasks, which
is at most c sum u_j^2 I_j / 2, where

    I_j = sum over k of other tasks of |correlation of x_j and x_k|

So if no I_j is above 1, no round raises the objective; with a bound of 1/2, at least half of what
the tasks promise is kept.
"""

from typing import Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from sandblaster.strads.columns import Columns, Csc


Ints = NDArray[np.int64]
Csr: TypeAlias = "sparse.csr_array[np.float64]"

_DENSE: Final = 0.05  # share of elements from which a dense product is faster


def correlations(columns: Columns) -> Csr:
    """Return the sizes of the correlations of sparse columns."""
    matrix = cast("Csc", columns.matrix)
    n_rows, n = matrix.shape
    is_dense = matrix.nnz > _DENSE * n_rows * n
    whole = matrix.toarray() if is_dense else matrix
    product = whole.T @ whole
    if columns.sums.any():
        product = product - np.outer(columns.sums, columns.sums / n_rows)
    scales = 1.0 / np.sqrt(np.where(columns.norms > 0.0, columns.norms, np.inf))
    scaling = sparse.diags_array(scales)
    return sparse.csr_array(abs(scaling @ sparse.csr_array(product) @ scaling))


def rounds(
    sizes: Csr,  # (n, n) of correlations
    blocks: Ints,  # (n,) which block has which variable
    bound: float,
    before: Ints,  # (n,) the round of each variable before, or -1
) -> Ints:
    """Return a round for each variable, such that no I_j is above `bound`: the first that fits.

    Variables stay in their round of before; the correlations among them have not changed.
    """
    chosen = before.copy()
    entries = sizes.tocoo()
    first, second = entries.coords
    apart = blocks[first] != blocks[second]
    first, second, values = first[apart], second[apart], entries.data[apart]
    crossing = sparse.csr_array((values, (first, second)), sizes.shape)
    crossing.sort_indices()
    together = (chosen[first] == chosen[second]) & (chosen[first] >= 0)
    sums = np.zeros(len(chosen))
    np.add.at(sums, first[together], values[together])
    n_rounds = int(chosen.max(initial=-1)) + 1
    for one in np.flatnonzero(chosen < 0).tolist():
        part = slice(int(crossing.indptr[one]), int(crossing.indptr[one + 1]))
        others, size = crossing.indices[part], crossing.data[part]
        placed = chosen[others] >= 0
        others, size = others[placed], size[placed]
        theirs = chosen[others]
        own = np.bincount(theirs, size, n_rounds)
        over = np.bincount(theirs, sums[others] + size > bound, n_rounds)
        fits = np.flatnonzero((own <= bound) & (over == 0))
        mine = int(fits[0]) if len(fits) else n_rounds
        n_rounds = max(n_rounds, mine + 1)
        chosen[one] = mine
        met = theirs == mine
        sums[others[met]] += size[met]
        sums[one] = own[mine] if len(fits) else 0.0
    return chosen
