"""The estimators: scikit-learn's conventions, every form of data, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

import sandblaster
from distbelief.core.errors import JobError, SettingError
from sandblaster import Lasso, SparseLogisticRegression, sparse_path
from tests.sandblaster.strads.problems import Floats, correlated_problem, sparse_problem


X, Y = correlated_problem(correlation=0.1)
LABELS = np.where(Y.mean() < Y, "yes", "no")
ESTIMATORS = [Lasso, SparseLogisticRegression]


def targets_of(kind: type) -> Any:  # noqa: ANN401 -- numbers or labels
    return Y if kind is Lasso else LABELS


# --- conventions ---


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_parameters_are_got_and_set_by_name(kind: type[Lasso]) -> None:
    model = kind(0.5, tol=1e-3)
    assert model.get_params() == {
        "alpha": 0.5, "fit_intercept": True, "tol": 1e-3, "max_iter": 100, "n_blocks": None,
        "workers": 1, "warm_start": False,
    }  # fmt: skip
    assert model.set_params(alpha=0.1, workers=2) is model
    assert repr(model) == f"{kind.__name__}(alpha=0.1, tol=0.001, workers=2)"
    with pytest.raises(JobError, match=r"has no parameter 'C': "):
        model.set_params(C=1.0)


def test_a_lasso_predicts_and_scores() -> None:
    model = Lasso(0.01).fit(X, Y)
    assert model.coef_.shape == (X.shape[1],)
    np.testing.assert_allclose(model.predict(X), X @ model.coef_ + model.intercept_)
    assert model.score(X, Y) > 0.98
    assert Lasso(1e9).fit(X, Y).score(X, Y) == pytest.approx(0.0)
    assert model.dual_gap_ <= 1e-4 * Y.var() / 2
    assert model.n_iter_ >= 2
    assert model.n_updates_ > 0


def test_logistic_regression_predicts_labels_and_probabilities() -> None:
    model = SparseLogisticRegression(0.01).fit(X, LABELS)
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.coef_.shape == (1, X.shape[1])
    assert model.score(X, LABELS) > 0.95
    probabilities = model.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    is_second = probabilities[:, 1] > 0.5
    assert (model.predict(X) == model.classes_[is_second.astype(int)]).all()
    assert ((model.decision_function(X) > 0) == is_second).all()


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_estimator_that_was_not_fitted_predicts_nothing(kind: type[Lasso]) -> None:
    with pytest.raises(ValueError, match="is not fitted yet: call fit first"):
        kind().predict(X)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_warm_start_begins_where_the_last_fit_ended(kind: type[Lasso]) -> None:
    model = kind(0.02, warm_start=True, tol=1e-8).fit(X, targets_of(kind))
    assert model.fit(X, targets_of(kind)).n_updates_ == 0


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_unfinished_fit_warns_with_its_gap(kind: type[Lasso]) -> None:
    with pytest.warns(Warning, match=r"gap for alpha 0.01 is .* after 2 iterations: give more"):
        kind(0.01, tol=1e-12, max_iter=2).fit(X, targets_of(kind))


@pytest.mark.filterwarnings("ignore")  # the checks have warnings of their own
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_scikit_learn_finds_nothing_to_object_to(kind: type[Lasso]) -> None:
    checks = pytest.importorskip("sklearn.utils.estimator_checks")
    results = checks.check_estimator(kind(0.01), on_fail=None, on_skip=None)
    failed = [one for one in results if one["status"] not in {"passed", "skipped"}]
    assert failed == []
    assert len(results) > 40


def test_the_objective_is_that_of_scikit_learn() -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    model = Lasso(0.03, tol=1e-10).fit(X, Y)
    theirs = linear.Lasso(0.03, tol=1e-12, max_iter=100_000).fit(X, Y)
    np.testing.assert_allclose(model.coef_, theirs.coef_, atol=1e-6)
    assert model.intercept_ == pytest.approx(theirs.intercept_, abs=1e-6)
    rest = Y - theirs.predict(X)
    least = rest @ rest / (2 * len(Y)) + 0.03 * np.abs(theirs.coef_).sum()
    assert model.objective_ == pytest.approx(least, rel=1e-9)


# --- forms of data ---


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("n_blocks", [1, 3])
def test_orders_of_dense_data_give_the_same_bits(
    kind: type[Lasso], n_blocks: int, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", np.asfortranarray(X))
    forms = [X, np.asfortranarray(X), X.tolist(), np.load(tmp_path / "x.npy", mmap_mode="r")]
    found = [
        np.asarray(kind(0.02, n_blocks=n_blocks).fit(form, targets_of(kind)).coef_).tobytes()
        for form in forms
    ]
    assert len(set(found)) == 1


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ESTIMATORS)
@pytest.mark.parametrize("form", [sparse.csr_array, sparse.csc_matrix, sparse.coo_array])
def test_sparse_data_give_what_dense_ones_do(kind: type[Lasso], form: Any) -> None:  # noqa: ANN401 -- any of several
    x, numbers = sparse_problem(n_samples=80, n_features=60)
    y = numbers if kind.__name__ == "Lasso" else (numbers > 0).astype(np.float64)
    dense = kind(0.01, tol=1e-10).fit(x.toarray(), y)
    model = kind(0.01, tol=1e-10).fit(form(x), y)
    np.testing.assert_allclose(model.coef_, dense.coef_, atol=1e-6)
    np.testing.assert_allclose(model.intercept_, dense.intercept_, atol=1e-6)
    np.testing.assert_allclose(
        np.asarray(model.predict(form(x)) == y), np.asarray(dense.predict(x) == y)
    )


def test_entries_given_twice_count_as_their_sum() -> None:
    once = sparse.csc_array((np.array([3.0, 1.0]), ([0, 1], [0, 0])), (3, 1))
    twice = sparse.coo_array((np.array([1.0, 2.0, 1.0]), ([0, 0, 1], [0, 0, 0])), (3, 1))
    y = np.array([2.0, 1.0, 0.0])
    assert Lasso(0.01).fit(once, y).coef_ == Lasso(0.01).fit(twice, y).coef_


def test_data_are_not_changed() -> None:
    x, y = sparse_problem(n_samples=50, n_features=20)
    before = (x.data.tobytes(), y.tobytes())
    Lasso(0.01, n_blocks=3).fit(x, y)
    assert (x.data.tobytes(), y.tobytes()) == before


# --- refusals ---


def nan_in(x: Floats) -> Floats:
    x = x.copy()
    x[3, 2] = np.nan
    return x


FAR = X + 1e6 * (np.arange(X.shape[1]) == 5)

REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (nan_in(X), Y, {}, "X contains NaN or infinity; replace or drop these samples"),
    (sparse.csc_array(nan_in(X)), Y, {}, "X contains NaN or infinity"),
    (X, np.where(Y[2] == Y, np.inf, Y), {}, "y contains NaN or infinity; drop these samples"),
    (X[:, 0], Y, {}, r"X has 1 dimensions, not 2. Reshape your data: X.reshape\(-1, 1\)"),
    (X[:0], Y[:0], {}, r"X has 0 sample\(s\)"),
    (X, Y[:-1], {}, r"y has shape \(59,\); give one target per sample, \(60,\)"),
    (X, None, {}, "y is None: give one per sample"),
    (X, LABELS, {}, "y is not of numbers"),
    (X + 1j, Y, {}, "X is complex"),
    (X, Y, {"n_blocks": 49}, "n_blocks is 49 for 48 columns; use 1 to 48"),
    (X, Y, {"alpha": 0.0}, "alpha is 0.0; use a number above 0: without a penalty"),
    (X, Y, {"alpha": "0.1"}, "alpha is '0.1'; use a number above 0"),
    (X, Y, {"tol": -1.0}, "tol is -1.0; use a number of at least 0"),
    (X, Y, {"workers": 0}, "workers is 0; use a whole number, 1 or more"),
    (FAR, Y, {}, "column 5 of X varies by less than .*: subtract the mean from it first"),
]


@pytest.mark.parametrize(("x", "y", "options", "message"), REFUSED)
def test_what_cannot_be_computed_is_refused_in_one_sentence(
    x: object, y: object, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        Lasso(**options).fit(x, y)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Y, "y is continuous"),
        (np.zeros(60, int), "y has 1 class. Only binary"),
        (np.arange(60) % 3, "y has 3 classes. Only binary .*: fit one model per class"),
    ],
)
def test_classes_other_than_two_are_refused(labels: Floats, message: str) -> None:
    with pytest.raises(JobError, match=message):
        SparseLogisticRegression().fit(X, labels)


def test_samples_of_another_width_are_refused() -> None:
    with pytest.raises(JobError, match="X has 47 features, but Lasso is expecting 48"):
        Lasso().fit(X, Y).predict(X[:, 1:])


# --- paths ---


@pytest.mark.parametrize("loss", ["squares", "logistic"])
def test_a_path_begins_where_all_coefficients_are_zero(loss: Any) -> None:  # noqa: ANN401 -- any of several
    y = Y if loss == "squares" else (LABELS == "yes").astype(float)
    path = sparse_path(X, y, loss=loss, n_alphas=5, smallest=0.1, tol=1e-6)
    assert [len(one.ids) > 0 for one in path] == [False, True, True, True, True]
    np.testing.assert_allclose([one.alpha / path[0].alpha for one in path], np.geomspace(1, 0.1, 5))
    assert all(one.converged for one in path)


def test_a_path_finds_the_alpha_that_held_out_samples_prefer() -> None:
    x, y = sparse_problem()
    path = sparse_path(x[:150], y[:150], held_out=(x[150:], y[150:]), patience=3)
    best = min(path, key=lambda one: one.held_out)
    assert path.index(best) == len(path) - 4
    model = Lasso(best.alpha).fit(x[:150], y[:150])
    rest = y[150:] - model.predict(x[150:])
    assert best.held_out == pytest.approx(rest @ rest / (2 * len(rest)), rel=0.05)


LABELS_01 = (Y > 0).astype(float)

REFUSED_PATHS: list[tuple[dict[str, Any], str]] = [
    ({"patience": 3}, r"patience needs samples .*: give held_out=\(x, y\)"),
    ({"y": np.ones(len(Y))}, "all targets are 1.0; give different ones"),
    ({"x": np.ones((len(Y), 2))}, "no column varies with the targets; give others"),
    ({"loss": "logistic"}, "y of the logistic loss must be 0 or 1: give y == class"),
    ({"loss": "hinge"}, "loss is 'hinge'; use 'squares' or 'logistic'"),
    (
        {"loss": "logistic", "y": LABELS_01, "held_out": (X, 2 * LABELS_01 - 1)},
        "held_out: y of the logistic loss must be 0 or 1",
    ),
    ({"held_out": (X[:, 1:], Y)}, "X has 47 features, but sparse_path: held_out is expecting 48"),
    ({"alphas": [0.1, 0.0]}, "alpha is 0.0; use a number above 0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED_PATHS)
def test_paths_without_an_answer_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"x": X, "y": Y, **options}
    with pytest.raises(JobError, match=message):
        sparse_path(given.pop("x"), given.pop("y"), **given)


def test_the_package_names_them() -> None:
    assert {"Lasso", "SparseLogisticRegression", "sparse_path"} <= {*sandblaster.__all__}


# --- what a user has found ---


@pytest.mark.parametrize("mean", [3e4, 1e7, 1.7e9])
def test_a_column_whose_variation_is_lost_is_refused_and_not_taken_as_constant(mean: float) -> None:
    x = np.random.default_rng(0).normal(size=(50, 5))
    y = 2.0 * x[:, 0]
    x[:, 0] += 10 * mean
    for given in (x, sparse.csc_array(x)):
        with pytest.raises(SettingError, match="column 0 of X varies by less"):
            Lasso(0.01).fit(given, y)


@pytest.mark.parametrize("scale", [1e-170, 1e170])
def test_a_column_whose_squares_leave_float64_is_refused(scale: float) -> None:
    for centred in (False, True):
        with pytest.raises(SettingError, match="so small or large that their squares are lost"):
            Lasso(0.01, fit_intercept=centred).fit(X * scale, Y)
    with pytest.raises(SettingError, match="scale y"):
        Lasso(0.01).fit(X, Y * 1e160)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_warm_start_keeps_nothing_that_cannot_be_updated(*, is_sparse: bool) -> None:
    model = Lasso(0.01, warm_start=True).fit(X, Y + 10.0)
    assert model.coef_[0]
    other = X.copy()
    other[:, 0] = 0.0
    given = sparse.csc_array(other) if is_sparse else other
    model.set_params(fit_intercept=False).fit(given, Y)
    assert model.intercept_ == 0.0
    assert model.coef_[0] == 0.0
    cold = Lasso(0.01, fit_intercept=False).fit(given, Y)
    assert model.objective_ == pytest.approx(cold.objective_, abs=2e-4 * float(Y @ Y))


def test_alphas_may_be_numbers_of_any_kind_and_are_not_empty() -> None:
    path = sparse_path(X, Y, alphas=np.array([2, 1]))
    assert [one.alpha for one in path] == [2.0, 1.0]
    assert Lasso(np.float16(0.1)).fit(X, Y).dual_gap_ > 0.0  # type: ignore[arg-type] # a user's
    with pytest.raises(SettingError, match="alpha is True"):
        Lasso(True).fit(X, Y)  # noqa: FBT003 -- a user's mistake
    with pytest.raises(SettingError, match="alphas is empty"):
        sparse_path(X, Y, alphas=[])
    wrong: dict[str, Any]
    for wrong in ({"n_alphas": 0}, {"smallest": 2.0}, {"n_blocks": 2.5}, {"patience": 0}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            sparse_path(X, Y, held_out=(X, Y), **wrong)


def test_sparse_data_of_any_format_and_memory_are_the_same_numbers() -> None:
    entries = np.array([100, 100, 50], np.int8), (np.array([0, 0, 1]), np.array([0, 0, 0]))
    small = sparse.coo_array(entries, shape=(3, 1))
    y = np.array([200.0, 50.0, 0.0])
    assert Lasso(0.01).fit(small, y).coef_ == pytest.approx(1.0, abs=0.01)
    columns = sparse.csc_array(X)
    strided = np.repeat(columns.data, 2)[::2]
    other = sparse.csc_array((strided, columns.indices, columns.indptr), shape=columns.shape)
    np.testing.assert_array_equal(
        Lasso(0.01).fit(other, Y).coef_, Lasso(0.01).fit(columns, Y).coef_
    )


def test_small_problems_take_one_block_also_with_many_workers() -> None:
    # With four it took 300 times as long: thousands of rounds of a few variables.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 20)) + 5.0
    y = (x - 5.0).sum(axis=1) + rng.normal(size=50)
    one, four = (Lasso(0.01, fit_intercept=False, workers=workers).fit(x, y) for workers in (1, 4))
    np.testing.assert_allclose(one.coef_, four.coef_, rtol=1e-9)
