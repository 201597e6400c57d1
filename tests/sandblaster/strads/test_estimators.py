"""Topics and factors as scikit-learn's estimators, and what they refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from scipy import sparse
from typing_extensions import override

from distbelief.core.errors import JobError
from sandblaster import LatentDirichletAllocation, MatrixFactorization
from sandblaster.strads import columns, jobs


Dense = np.ndarray[tuple[int, int], np.dtype[np.float64]]


class Counting(LatentDirichletAllocation):
    """With counts where scikit-learn's checks give real numbers."""

    @override
    def fit(self, X: Any, y: object = None, *, held_out: object = None) -> "Counting":
        super().fit(_counts(X), y, held_out=held_out)
        return self

    @override
    def transform(self, X: Any) -> Any:
        return super().transform(_counts(X))

    @override
    def score(self, X: Any, y: object = None) -> float:
        return super().score(_counts(X), y)


def _counts(x: Any) -> Any:  # noqa: ANN401 -- whatever the checks give
    if sparse.issparse(x):
        return sparse.csr_array(cast("Dense", x)).rint()  # of any format
    given = np.asarray(x)
    try:
        return np.rint(given.astype(float)) if given.dtype.kind in "fO" else x
    except (TypeError, ValueError):
        return x  # refused


class Transforming(MatrixFactorization):
    """Without what takes pairs of row and column, or the very rows of fit."""

    predict = property()
    score = property()


IN_OTHER_WORDS = {
    "check_positive_only_tag_during_fit": "'a count of X is negative', not 'negative values'"
}


@pytest.mark.filterwarnings("ignore")  # the checks have warnings of their own
@pytest.mark.parametrize(
    "estimator",
    [
        Counting(2, max_iter=5, n_blocks=1),
        Transforming(2, regularization=1.0, max_iter=50, tol=1e-6, n_blocks=1),
    ],
)
def test_scikit_learn_finds_nothing_to_object_to(estimator: object) -> None:
    checks = pytest.importorskip("sklearn.utils.estimator_checks")
    results = checks.check_estimator(
        estimator, on_fail=None, on_skip=None, expected_failed_checks=IN_OTHER_WORDS
    )
    failed = [one for one in results if one["status"] not in {"passed", "skipped", "xfail"}]
    assert failed == []
    assert len(results) > 40


@pytest.mark.parametrize("make", [jobs.topics, jobs.factors])
def test_dense_data_whose_copy_does_not_fit_are_refused(
    make: Callable[..., object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They were copied until the host had no memory left."""
    np.save(tmp_path / "x.npy", np.ones((10, 10), np.int64))
    sparse.save_npz(tmp_path / "x.npz", sparse.csr_array(np.eye(10)))
    monkeypatch.setattr(columns, "free_bytes", lambda: 799)
    says = r"X, 10 x 10, takes 0.0 GB here, .* of memory are free: use more hosts, or a sparse X"
    with pytest.raises(JobError, match=says):
        make(str(tmp_path / "x.npy"), n_blocks=1)
    monkeypatch.setattr(columns, "free_bytes", lambda: 1600)
    make(str(tmp_path / "x.npz"), n_blocks=1)
