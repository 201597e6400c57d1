"""The loops that numba compiles, and numpy's, give the same bits."""

import numpy as np
import pytest
from scipy import sparse

from sandblaster.strads import compiled, kernels
from sandblaster.strads.columns import Columns


N_ROWS, N_COLUMNS = 37, 11


def matrix(density: float) -> "sparse.csc_array[np.float64]":
    generator = np.random.default_rng(2)
    made = generator.standard_normal((N_ROWS, N_COLUMNS))
    made[generator.random(made.shape) > density] = 0.0
    made[:, 4] = 0.0  # an empty column
    return sparse.csc_array(made)


def columns_of(*, dense: bool, centred: bool) -> Columns:
    whole = matrix(1.0 if dense else 0.3)
    x = whole.toarray() if dense else whole
    return Columns.of(x, range(1, N_COLUMNS), centred=centred)


def descended(columns: Columns) -> tuple[bytes, bytes, object]:
    generator = np.random.default_rng(3)
    values = np.where(np.arange(6) % 2, generator.standard_normal(6), 0.0)
    residual = generator.standard_normal(N_ROWS)
    result = columns.descend(
        np.array([8, 3, 0, 1, 9, 4]), values, residual, 0.25, threshold=0.4, n_passes=9, enough=1e-9
    )
    return values.tobytes(), residual.tobytes(), result


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("centred", [True, False])
def test_numpy_gives_the_bits_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, *, dense: bool, centred: bool
) -> None:
    columns = columns_of(dense=dense, centred=centred)
    monkeypatch.setattr(compiled, "_COMPILED", {kernels.loop: kernels.in_numpy})
    by_numpy = descended(columns)
    monkeypatch.setattr(compiled, "_COMPILED", {kernels.loop: kernels.loop})
    assert descended(columns) == by_numpy


@pytest.mark.parametrize("dense", [True, False])
def test_what_numba_compiles_gives_the_bits_of_the_loop(
    monkeypatch: pytest.MonkeyPatch, *, dense: bool
) -> None:
    pytest.importorskip("numba")
    assert kernels.best() is not kernels.in_numpy
    columns = columns_of(dense=dense, centred=True)
    by_numba = descended(columns)
    monkeypatch.setattr(compiled, "_COMPILED", {kernels.loop: kernels.loop})
    assert descended(columns) == by_numba


def test_a_pass_ends_where_nothing_moves_by_more_than_enough() -> None:
    columns = columns_of(dense=True, centred=False)
    values, residual = np.zeros(2), np.ones(N_ROWS)
    n_passes, _, change = columns.descend(
        np.array([0, 2]), values, residual, 0.0, threshold=0.0, n_passes=500, enough=1e-6
    )
    assert 1 < n_passes < 500
    assert change <= 1e-6
    np.testing.assert_allclose(columns.products(residual)[[0, 2]], 0.0, atol=1e-5)
