"""Factors of a matrix: against dense solutions, its kernel against numpy, the estimator."""

from collections.abc import Callable
from dataclasses import replace
from threading import current_thread, main_thread

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import sparse

import sandblaster
from distbelief.core.errors import SettingError
from sandblaster.strads import factor_kernel
from sandblaster.strads.factorization import MatrixFactorization
from sandblaster.strads.program import run


Dense = NDArray[np.float64]
RESHAPE = "Reshape your data: X.reshape(-1, 1) is one column, X.reshape(1, -1) one sample"


@pytest.fixture(autouse=True)
def in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile nothing: numpy gives the same bits, as one test claims."""
    module = "sandblaster.strads.factorization"
    monkeypatch.setattr(f"{module}.stepper", lambda: factor_kernel.step_in_numpy)
    monkeypatch.setattr(f"{module}.subtracter", lambda: factor_kernel.subtract_in_numpy)


def ratings(
    *, n_rows: int = 60, n_columns: int = 40, rank: int = 3, share: float = 0.5, noise: float = 0.0
) -> "tuple[sparse.csr_array[np.float64], Dense]":
    """Some entries of a matrix of that rank, and all of it."""
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((n_rows, rank)) @ rng.standard_normal((rank, n_columns))
    rows, columns = np.nonzero(rng.random(whole.shape) < share)
    values = whole[rows, columns] + noise * rng.standard_normal(len(rows))
    return sparse.coo_array((values, (rows, columns)), shape=whole.shape).tocsr(), whole


def clicks() -> "sparse.csr_array[np.float64]":
    """Rows of two kinds, each with columns of its own, clicked often or seldom."""
    rng = np.random.default_rng(0)
    likely = np.where(np.add.outer(np.arange(30) % 2, np.arange(20) % 2) % 2, 0.02, 0.5)
    return sparse.csr_array(rng.poisson(likely).astype(float))


def factorization(n_components: int = 3, **options: object) -> MatrixFactorization:
    rest: dict[str, object] = {"n_blocks": 4, "max_iter": 30, **options}
    return sandblaster.MatrixFactorization(n_components, **rest)  # type: ignore[arg-type]  # by name


def objective(model: MatrixFactorization, targets: Dense, weights: Dense) -> float:
    """Hu et al., equation 3, and the same of ratings, with biases: all pairs, dense."""
    u, v = model.row_factors_, model.components_
    errors = targets - u @ v - model.row_biases_[:, None] - model.column_biases_
    norms = sum((x**2).sum() for x in (u, v, model.row_biases_, model.column_biases_))
    return float((weights * errors**2).sum() + model.regularization * norms)


@pytest.mark.each_value
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("is_feedback", [False, True])
def test_st5_the_objective_is_the_dense_one_and_never_rises(
    *, biases: bool, is_feedback: bool
) -> None:
    if is_feedback:
        entries = clicks()
        model = factorization(biases=biases, implicit_strength=5.0, tol=-1).fit(entries)
        targets, weights = (entries.toarray() > 0).astype(float), 1 + 5 * entries.toarray()
    else:
        entries, _ = ratings(noise=0.1)
        model = factorization(biases=biases, tol=-1).fit(entries)
        targets, weights = entries.toarray() - model.mean_, (entries.toarray() != 0).astype(float)
    objectives = np.array(model.objectives_)
    assert objectives[-1] == pytest.approx(objective(model, targets, weights))
    assert (np.diff(objectives) <= 1e-9 * objectives[0]).all()
    assert model.row_biases_.any() == model.column_biases_.any() == biases


@pytest.mark.parametrize("n_together", [1, 2, 4, 8])  # 1: rank-one factors in turn, as in ST-5
@pytest.mark.parametrize("is_feedback", [False, True])
def test_st5_two_passes_are_those_of_dense_coordinate_descent(
    *, is_feedback: bool, n_together: int
) -> None:
    entries = clicks() if is_feedback else ratings(noise=0.1)[0]
    model = factorization(5, implicit_strength=2.0 if is_feedback else None, max_iter=2, tol=-1)
    program = replace(model.program(entries), n_together=n_together)
    known = entries.toarray()
    targets = (known > 0).astype(float) if is_feedback else known - program.mean
    weights = 1 + 2 * known if is_feedback else (known != 0).astype(float)
    v = program.tables["columns"][:, 0].reshape(5, -1).copy()
    u = np.zeros((5, len(known)))
    for _ in range(2):
        for first in range(0, 5, n_together):
            those = slice(first, first + n_together)
            rest = targets - u.T @ v + u[those].T @ v[those]
            for row, w in enumerate(weights):
                gram = (w * v[those]) @ v[those].T
                gram += 0.1 * np.eye(len(gram))
                u[those, row] = np.linalg.solve(gram, v[those] @ (w * rest[row]))
            for rank in range(*those.indices(5)):
                rest = targets - u.T @ v + np.outer(u[rank], v[rank])
                v[rank] = (weights * rest).T @ u[rank] / (weights.T @ u[rank] ** 2 + 0.1)
    _, tables = run(program)
    np.testing.assert_allclose(tables["rows"].reshape(u.shape), u, rtol=1e-9, atol=1e-12)
    found = tables["columns"][:, 0].reshape(v.shape)
    np.testing.assert_allclose(found, v, rtol=1e-9, atol=1e-12)


def dense_als(entries: Dense, rank: int, regularization: float) -> Dense:
    """All entries as predicted by alternating least squares, row by row."""
    known = entries != 0
    u, v = np.zeros((len(entries), rank)), np.random.default_rng(1).standard_normal((40, rank))
    for _ in range(200):
        for solved, other, mask, values in ((u, v, known, entries), (v, u, known.T, entries.T)):
            for row, some in enumerate(mask):
                gram = other[some].T @ other[some] + regularization * np.eye(rank)
                solved[row] = np.linalg.solve(gram, other[some].T @ values[row, some])
    return np.asarray(u @ v.T)


def test_st5_a_matrix_of_low_rank_is_found_with_the_error_of_dense_least_squares() -> None:
    entries, whole = ratings(rank=2)
    model = factorization(2, regularization=0.01, max_iter=400, tol=1e-10)
    shift = entries.data.mean()  # of this sample; the reference has no mean
    model.fit(entries)
    shifted = entries.toarray()
    shifted[shifted != 0] -= shift
    expected = np.sqrt(((dense_als(shifted, 2, 0.01) + shift - whole) ** 2).mean())
    rows, columns = np.indices(whole.shape)
    error = np.sqrt(((model.predict(rows, columns) - whole) ** 2).mean())
    assert error == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("is_feedback", [False, True])
def test_st5_same_bits_for_1_2_4_8_workers_and_again(*, is_feedback: bool) -> None:
    entries = clicks() if is_feedback else ratings()[0]
    tables = []
    for workers in (1, 1, 2, 4, 8):
        strength = 2.0 if is_feedback else None
        program = factorization(implicit_strength=strength, max_iter=3, n_blocks=8).program(entries)
        tables.append(run(program, workers=workers)[1])
    for other in tables[1:]:
        for name, values in tables[0].items():
            np.testing.assert_array_equal(values, other[name])


@pytest.mark.parametrize("size", [0.1, np.inf])
def test_kernel_and_numpy_compute_the_same_bits(size: float) -> None:
    entries, _ = ratings()
    n_rows, n_columns = entries.shape
    results = []
    kernels = (
        (factor_kernel.step, factor_kernel.subtract),
        (factor_kernel.step_in_numpy, factor_kernel.subtract_in_numpy),
        (factor_kernel.stepper(), factor_kernel.subtracter()),
    )
    for step, subtract in kernels:
        rng = np.random.default_rng(1)
        residuals, weights = entries.data.copy(), rng.random(entries.nnz)
        before, u, rest = rng.standard_normal((3, n_rows, 8))
        moved, v = rng.standard_normal((2, n_columns, 8))
        # Of a symmetric matrix with a large diagonal; one u stays, if that is infinite.
        gram = rng.random((8, 8))
        gram += gram.T + 3 * np.eye(8)
        gram[2, 2] += size
        arrays = (
            entries.indptr.astype(np.int64),
            entries.indices.astype(np.int32),
            residuals,
            weights,
        )
        old = u.copy()
        sums = step(*arrays, before, moved, u, v, rest, gram)
        subtract(*arrays, u, v)
        results.append((residuals, u, sums))
        stays = (old == u).all(axis=0)
        assert stays.tolist() == [size == np.inf and rank == 2 for rank in range(8)]
    for other in results[1:]:
        for mine, its in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize(("strength", "biases"), [(None, True), (3.0, False)])
def test_transform_gives_rows_the_factors_that_fit_ends_with(
    *, strength: float | None, biases: bool
) -> None:
    entries = ratings(noise=0.1)[0] if strength is None else clicks()
    model = factorization(2, implicit_strength=strength, biases=biases, max_iter=600, tol=1e-13)
    model.fit(entries)
    np.testing.assert_allclose(model.transform(entries), model.row_factors_, atol=2e-3)


def test_feedback_recommends_columns_of_the_rows_kind() -> None:
    model = factorization(2, implicit_strength=5.0).fit(clicks())
    rows, columns = np.indices((30, 20))
    expected = model.predict(rows, columns)
    alike = (rows + columns) % 2 == 0
    assert expected[alike].mean() > 0.4
    assert abs(expected[~alike].mean()) < 0.2


def test_it_ends_when_held_out_ratings_fit_no_better() -> None:
    entries, _ = ratings(rank=5, share=0.3, noise=1.0)
    rng = np.random.default_rng(0)
    coo, mask = entries.tocoo(), rng.random(entries.nnz) < 0.2
    rest, held_out = (
        sparse.coo_array(
            (coo.data[some], tuple(side[some] for side in coo.coords)), shape=coo.shape
        ).tocsr()
        for some in (~mask, mask)
    )
    model = factorization(5, max_iter=100, tol=-1, patience=2).fit(rest, held_out=held_out)
    errors = model.held_out_errors_
    assert 3 <= model.n_iter_ < 100
    assert min(errors[-2:]) >= min(errors[:-2])
    assert errors[-1] == pytest.approx(-model.score(held_out))


def test_held_out_feedback_is_ranked_by_its_share_of_better_columns() -> None:
    entries = clicks()
    held_out = sparse.coo_array(([1.0, 1.0], ([0, 1], [2, 3])), shape=entries.shape)
    model = factorization(2, implicit_strength=5.0, max_iter=3, tol=-1).fit(
        entries, held_out=held_out
    )
    expected = model.row_factors_[:2] @ model.components_
    shares = [(expected[0] > expected[0, 2]).mean(), (expected[1] > expected[1, 3]).mean()]
    assert model.held_out_errors_[-1] == pytest.approx(np.mean(shares))


def test_it_ends_when_the_objective_falls_no_more() -> None:
    model = factorization(max_iter=500, tol=1e-3).fit(ratings(noise=0.1)[0])
    before, last = model.objectives_[-2:]
    assert model.n_iter_ < 500
    assert before - last <= 1e-3 * before


def test_stored_zeros_are_ratings_and_dense_nan_is_unknown() -> None:
    dense = np.array([[1.0, 0.0, np.nan], [np.nan, 2.0, 3.0]])
    rows, columns = np.nonzero(~np.isnan(dense))
    entries = sparse.coo_array((dense[rows, columns], (rows, columns)), shape=dense.shape)
    models = [factorization(1, n_blocks=1).fit(x) for x in (dense, entries)]
    assert models[0].mean_ == 1.5
    np.testing.assert_array_equal(models[0].components_, models[1].components_)


def test_rows_and_columns_without_entries_have_no_factors() -> None:
    entries = ratings()[0].tolil()
    entries[3], entries[:, 5] = 0, 0
    model = factorization(biases=True).fit(entries.tocsr())
    assert not model.row_factors_[3].any()
    assert not model.components_[:, 5].any()
    assert np.isfinite(model.objectives_).all()


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        ([[1.0, np.inf]], {}, "X contains NaN or infinity; leave these entries out"),
        ([[np.nan]], {}, "X has no entries; give at least one"),
        ([1.0], {}, f"X has 1 dimensions, not 2. {RESHAPE}"),
        ([["a"]], {}, "X is of <U1; use numbers"),
        (np.ones((3, 3)), {"n_blocks": 4}, "n_blocks is 4, X has 3 rows; use n_blocks=3"),
        ([[1.0]], {"n_components": 0}, "n_components is 0; use a whole number, 1 or more"),
        ([[1.0]], {"tol": "small"}, "tol is 'small'; use a number; below 0 nothing ends early"),
        ([[1.0]], {"n_blocks": 0}, "n_blocks is 0; use a whole number, 1 or more"),
        ([[1.0]], {"regularization": 0}, "regularization is 0; use a number above 0"),
        ([[1.0]], {"implicit_strength": 0}, "implicit_strength is 0; use a number above 0"),
        ([[1.0, -2.0]], {"implicit_strength": 1}, "X has negative feedback, -2.0; leave it out"),
    ],
)
def test_what_cannot_be_factored_is_refused(
    x: object, options: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingError) as refused:
        factorization(**{"n_components": 1, "n_blocks": 1, **options}).fit(x)  # type: ignore[arg-type]  # by name
    assert str(refused.value) == f"MatrixFactorization: {message}"


def test_what_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="has no factors yet; call fit first"):
        factorization().predict([0], [0])
    model = factorization(max_iter=1).fit(ratings()[0])
    with pytest.raises(SettingError, match="there is no row 60; use 0 to 59"):
        model.predict([0, 60], [0, 0])
    with pytest.raises(SettingError, match="there is no column -1; use 0 to 39"):
        model.predict(0, -1)
    with pytest.raises(SettingError, match="held_out has no entries; give some or none"):
        model.fit(ratings()[0], held_out=sparse.csr_array((60, 40)))
    with pytest.raises(
        SettingError, match="X has 3 features, but MatrixFactorization is expecting 40"
    ):
        model.transform(np.ones((2, 3)))
    with pytest.raises(SettingError, match=r"X has shape \(2, 40\) and 80 entries; give ratings"):
        model.score(np.ones((2, 40)))
    with pytest.raises(SettingError, match=r"held_out has shape \(1, 1\), X \(60, 40\)"):
        model.fit(ratings()[0], held_out=[[1.0]])
    with pytest.raises(SettingError, match="feedback has no score"):
        factorization(implicit_strength=1.0, max_iter=1).fit(clicks()).score(clicks())


# --- what a user has found ---


def test_what_was_fitted_stays_whatever_is_prepared_or_set_later() -> None:
    ratings = sparse.csr_array(np.arange(1.0, 13.0).reshape(3, 4))
    model = MatrixFactorization(2, n_blocks=1).fit(ratings)
    before, transformed = model.predict([0], [0]), model.transform(ratings)
    model.program(ratings * 100)
    np.testing.assert_array_equal(model.predict([0], [0]), before)
    model.set_params(biases=True, regularization=7.0)
    np.testing.assert_array_equal(model.transform(ratings), transformed)
    # Zeros of feedback became known entries of an infinite target, and factors NaN.
    clicks = np.eye(3)
    model = MatrixFactorization(2, implicit_strength=1.0, max_iter=2).fit(clicks)
    transformed = model.transform(clicks)
    model.set_params(implicit_strength=None)
    np.testing.assert_array_equal(model.transform(clicks), transformed)


@pytest.mark.parametrize("strength", [1.0, 1e-300])
def test_feedback_that_hides_the_objective_is_refused(strength: float) -> None:
    # Strengths of 1e-20 have targets of 1e20. The objective, a difference of such numbers, was
    # -16777216.0 after each pass, and fitting ended after the second as if it had converged.
    clicks = 1e-20 * np.eye(4)
    with pytest.raises(SettingError, match="lost beside the weight 1 of all pairs"):
        MatrixFactorization(2, implicit_strength=strength).fit(clicks)
    model = MatrixFactorization(2, implicit_strength=1e20, max_iter=3).fit(clicks)
    assert (np.diff(model.objectives_) <= 0.0).all()


def test_kernels_are_compiled_before_threads_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each thread taught numba the rows of eight numbers, and compiled both kernels itself.
    asked: list[bool] = []
    for name in ("stepper", "subtracter"):
        kernel = getattr(factor_kernel, name)

        def ask(kernel: Callable[[], object] = kernel) -> object:
            asked.append(current_thread() is main_thread())
            return kernel()

        monkeypatch.setattr(f"sandblaster.strads.factorization.{name}", ask)
    MatrixFactorization(2, n_blocks=2, workers=2, max_iter=1).fit(np.eye(4))
    assert asked[:2] == [True, True]
    assert not all(asked)


def test_indices_that_are_no_whole_numbers_and_ratings_given_twice_are_refused() -> None:
    ratings = sparse.csr_array(np.arange(1.0, 13.0).reshape(3, 4))
    model = MatrixFactorization(2, n_blocks=1).fit(ratings)
    for wrong in ([1.9], [True], ["a"]):
        with pytest.raises(SettingError, match="give whole numbers"):
            model.predict(wrong, [0])
    with pytest.raises(SettingError, match="give pairs"):
        model.predict([0, 1, 2], [0, 1])
    twice = sparse.coo_array(([4.0, 5.0, 1.0], ([0, 0, 1], [0, 0, 1])), shape=(3, 4))
    with pytest.raises(SettingError, match="give one rating each"):
        MatrixFactorization(2, n_blocks=1).fit(twice)
    with pytest.raises(SettingError, match="not finite"), np.errstate(all="ignore"):
        MatrixFactorization(2, n_blocks=1).fit(ratings * 1e200)


def test_a_regularization_that_rounding_loses_is_refused_where_it_raises_the_objective() -> None:
    """The objective rose, a thousand times as large as before, and that was called converged."""
    rng = np.random.default_rng(23)
    known = rng.standard_normal((25, 2)) @ rng.standard_normal((2, 20))
    some = sparse.csr_array(np.where(rng.random(known.shape) < 0.3, known, 0.0))
    for tol in (1e-4, -1.0):
        with pytest.raises(SettingError, match=r"raised the objective from .* in pass 3: use a la"):
            factorization(8, n_blocks=1, regularization=1e-17, tol=tol).fit(some)
    found = factorization(8, n_blocks=1, regularization=1e-12, tol=-1.0).fit(some)
    assert (np.diff(found.objectives_) <= 1e-9 * (some.data**2).sum()).all()


def test_ratings_by_diagonals_are_those_of_any_format() -> None:
    """Zeros that fill its diagonals were refused, as ratings given twice."""
    ratings = sparse.csr_array(np.triu(np.arange(1.0, 13.0).reshape(3, 4), 1))
    models = [factorization(1, n_blocks=1).fit(x) for x in (ratings, ratings.todia())]
    np.testing.assert_array_equal(models[0].components_, models[1].components_)


def test_a_host_with_other_ratings_is_refused() -> None:
    ratings = sparse.csr_array(np.arange(1.0, 13.0).reshape(3, 4))
    here, there = (MatrixFactorization(2).program(one) for one in (ratings, ratings * 2))
    (task, *_) = here._round(0, None, anew=True)
    with pytest.raises(SettingError, match="ratings or held_out are others here: give all hosts"):
        there.push(there.load(0), task.argument, here.tables)
