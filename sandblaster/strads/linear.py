"""`Lasso`, `SparseLogisticRegression`, `sparse_path`: estimators as scikit-learn has them.

    model = sandblaster.Lasso(alpha=0.1).fit(x, y)
    model.coef_, model.dual_gap_               # the objective is above its minimum by no more

They take and refuse what scikit-learn's estimators do, and need no scikit-learn. How they compute:
`descent`.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, cast, final

import numpy as np
from scipy.special import expit
from typing_extensions import override

from distbelief.core.errors import SettingError
from sandblaster.strads import kernels
from sandblaster.strads.columns import (
    Columns,
    Labels,
    Mapped,
    Matrix,
    check_memory,
    check_width,
    checked_labels,
    checked_matrix,
    checked_targets,
    columns_of,
    of_sklearn,
)
from sandblaster.strads.descent import Descent, Solution
from sandblaster.strads.estimator import Estimator, check_numbers, check_workers
from sandblaster.strads.kernels import Floats
from sandblaster.strads.losses import Logistic, Loss, Squares
from sandblaster.strads.program import run


def sparse_path(  # noqa: PLR0913 -- of a problem, of a path, of a solver
    x: object,
    y: object,
    *,
    loss: Literal["squares", "logistic"] = "squares",
    alphas: Iterable[float] | None = None,
    n_alphas: int = 100,
    smallest: float = 1e-3,
    held_out: tuple[object, object] | None = None,
    patience: int | None = None,
    fit_intercept: bool = True,
    tol: float = 1e-4,
    max_iter: int = 100,
    n_blocks: int | None = None,
    workers: int = 1,
) -> Sequence[Solution]:
    """Solve a sparse linear model for one alpha after the other, each from the one before.

    Args:
        x: (n_samples, n_features), dense or scipy.sparse.
        y: (n_samples,) Targets; 0 or 1 for the logistic loss.
        loss: Of squares, |y - f|^2 / 2, or logistic; its mean over samples counts.
        alphas: Weights of the penalty; None: `n_alphas`, evenly on a logarithmic scale, from the
            smallest one with which all coefficients are 0, to `smallest` times that.
        n_alphas: How many, if `alphas` is None.
        smallest: The last of these, relative to the first.
        held_out: Other samples and targets, to be evaluated for each alpha.
        patience: The path ends after so many alphas without a better held-out loss.
        fit_intercept: Whether there is an intercept.
        tol: Duality gap at which an alpha is solved, relative to the loss of the best constant.
        max_iter: How often all columns may be scored for an alpha.
        n_blocks: As of `Lasso`.
        workers: As of `Lasso`.

    Returns:
        For each alpha a `Solution`: ids and values of the coefficients that are not zero,
        intercept, gap, held_out, n_updates. The best one is min(path, key=lambda s: s.held_out).

    Raises:
        SettingError: an argument, or the data, cannot be computed with.
    """
    user = "sparse_path"
    if loss not in {"squares", "logistic"}:
        raise SettingError(f"sparse_path: loss is {loss!r}; use 'squares' or 'logistic'")
    settings = _Settings(user, fit_intercept, tol, max_iter, n_blocks, workers)
    program = settings.path(
        x, y, Squares() if loss == "squares" else Logistic(), alphas=alphas, n_alphas=n_alphas,
        smallest=smallest, held_out=held_out, patience=patience,
    )  # fmt: skip
    return settings.solved(program)


def _path_targets(y: object, x: "Matrix | Mapped", loss: Loss, user: str) -> Floats:
    targets = checked_targets(y, x.shape[0], user=user)
    if isinstance(loss, Logistic) and not np.isin(targets, (0.0, 1.0)).all():
        raise SettingError(f"{user}: y of the logistic loss must be 0 or 1: give y == class")
    return targets


@dataclass(frozen=True, slots=True)
class _Settings:
    """How all of this module solves a problem."""

    user: str
    centred: bool
    tol: float
    max_iter: int
    n_blocks: int | None
    workers: int

    def program(  # noqa: PLR0913 -- one problem
        self,
        x: "Matrix | Mapped",
        y: Floats,
        loss: Loss,
        alphas: Sequence[float] | None,  # None: `shares` of the largest one
        *,
        shares: Sequence[float] = (),
        start: tuple[Floats, float] | None = None,
        held_out: "tuple[Matrix, Floats] | None" = None,
        patience: int | None = None,
        keeps_best: bool = False,
    ) -> Descent:
        given: Sequence[object] = [*(shares if alphas is None else alphas)]
        if not given:
            raise SettingError(f"{self.user}: alphas is empty; give at least one")
        for alpha in given:
            is_number = isinstance(alpha, int | float | np.number) and not isinstance(alpha, bool)
            if not (is_number and 0.0 < float(cast("float", alpha)) < np.inf):
                raise SettingError(
                    f"{self.user}: alpha is {alpha!r}; use a number above 0: without a penalty "
                    "any solver of least squares does"
                )
        check_numbers(self.user, max_iter=self.max_iter, workers=self.workers)
        if self.n_blocks is not None:
            check_numbers(self.user, n_blocks=self.n_blocks)
            check_workers(self.user, self.workers, self.n_blocks)
        if not isinstance(cast("object", self.centred), bool | np.bool_):
            raise SettingError(f"{self.user}: fit_intercept is {self.centred!r}; use true or false")
        tol: object = self.tol
        if not isinstance(tol, int | float | np.number) or not tol >= 0.0:
            raise SettingError(f"{self.user}: tol is {tol!r}; use a number of at least 0")
        kernels.best()  # compiled before threads ask for it
        n_blocks = min(self.workers, x.shape[1]) if self.n_blocks is None else self.n_blocks
        return Descent(
            x,
            y,
            loss,
            alphas=[float(cast("float", alpha)) for alpha in given],
            relative=alphas is None,
            n_blocks=n_blocks,
            centred=self.centred,
            tolerance=self.tol,
            max_iterations=self.max_iter,
            start=start,
            held_out=held_out,
            patience=patience,
            keeps_best=keeps_best,
        )

    def path(  # noqa: PLR0913 -- of a path
        self,
        x: object,
        y: object,
        loss: Loss,
        *,
        alphas: Iterable[float] | None = None,
        n_alphas: int = 100,
        smallest: float = 1e-3,
        held_out: tuple[object, object] | None = None,
        patience: int | None = None,
        keeps_best: bool = False,
    ) -> Descent:
        user, pair = self.user, cast("object", held_out)
        matrix = _matrix(x, user)
        if pair is not None and not (isinstance(pair, tuple) and len(pair) == 2):
            raise SettingError(f"{user}: held_out is no pair; give (x, y)")
        check_numbers(user, n_alphas=n_alphas, smallest=smallest)
        if not smallest < 1.0:
            raise SettingError(f"{user}: smallest is {smallest}; use a share of the first, below 1")
        if patience is not None:
            check_numbers(user, patience=patience)
        targets = _path_targets(y, matrix, loss, user)
        if targets.min() == targets.max():
            raise SettingError(f"{user}: all targets are {targets[0]}; give different ones")
        held = None
        if held_out is not None:
            others = checked_matrix(held_out[0], user=f"{user}: held_out")
            check_width(others.shape[1], matrix.shape[1], f"{user}: held_out")
            held = (others, _path_targets(held_out[1], others, loss, f"{user}: held_out"))
        elif patience is not None:
            raise SettingError(f"{user}: patience needs samples to evaluate: give held_out=(x, y)")
        return self.program(
            matrix,
            targets,
            loss,
            None if alphas is None else [*alphas],
            shares=np.geomspace(1.0, smallest, n_alphas).tolist(),
            held_out=held,
            patience=patience,
            keeps_best=keeps_best,
        )

    def solved(self, program: Descent) -> Sequence[Solution]:
        solutions, _ = run(program, workers=self.workers)
        for one in solutions:
            if not one.converged:
                warnings.warn(
                    f"the duality gap for alpha {one.alpha:.3g} is {one.gap:.3g} after "
                    f"{one.n_iterations} iterations: give more max_iter, or a larger tol",
                    of_sklearn("ConvergenceWarning", RuntimeWarning),
                    stacklevel=4,
                )
        return solutions


class _Linear(Estimator):
    """What both estimators share."""

    n_features_in_: int
    n_iter_: int
    n_updates_: int
    dual_gap_: float
    objective_: float

    def __init__(
        self,
        alpha: float = 0.01,
        *,
        fit_intercept: bool = True,
        tol: float = 1e-4,
        max_iter: int = 100,
        n_blocks: int | None = None,
        workers: int = 1,
        warm_start: bool = False,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter
        self.n_blocks = n_blocks
        self.workers = workers
        self.warm_start = warm_start

    @property
    def _settings(self) -> _Settings:
        return _Settings(
            type(self).__name__,
            self.fit_intercept,
            self.tol,
            self.max_iter,
            self.n_blocks,
            self.workers,
        )

    def path_program(self, x: object, y: object, **options: Any) -> Descent:  # type: ignore[explicit-any]  # noqa: ANN401 -- of a path
        """Return a path that ends at its best solution: options as of `sparse_path`, y 0 or 1.

        Raises:
            SettingError: as of `sparse_path`.
        """
        loss: Loss = Logistic() if isinstance(self, SparseLogisticRegression) else Squares()
        return self._settings.path(x, y, loss, keeps_best=True, **options)

    def _program(self, x: "Matrix | Mapped", y: Floats, loss: Loss) -> Descent:
        start = None
        fitted = cast("Mapping[str, object]", vars(self))
        if self.warm_start and "coef_" in fitted and self.n_features_in_ == x.shape[1]:
            coefficients = np.ravel(cast("Floats", fitted["coef_"])).copy()
            # What says nothing in these data would never be updated.
            used = np.flatnonzero(coefficients)
            some = columns_of(x, used)
            columns = Columns.of(some, range(len(used)), centred=self.fit_intercept)
            coefficients[used[columns.norms == 0.0]] = 0.0
            intercept = float(np.ravel(cast("Floats", fitted["intercept_"]))[0])
            start = coefficients, intercept if self.fit_intercept else 0.0
        return self._settings.program(x, y, loss, [self.alpha], start=start)

    def _solve(self, x: "Matrix | Mapped", y: Floats, loss: Loss) -> tuple[Floats, float]:
        """Fit; return coefficients, (n_features,), and intercept."""
        check_memory(x, 1.0, user=type(self).__name__)
        (found,) = self._settings.solved(self._program(x, y, loss))
        self.n_features_in_ = x.shape[1]
        self.n_iter_, self.n_updates_ = found.n_iterations, found.n_updates
        self.dual_gap_, self.objective_ = found.gap, found.objective
        coefficients = np.zeros(x.shape[1])
        coefficients[found.ids] = found.values
        return coefficients, found.intercept

    def _predictor(self, x: object) -> Floats:
        """Return X w + b of new samples."""
        fitted = cast("Mapping[str, Floats]", vars(self))
        name = type(self).__name__
        if "coef_" not in fitted:
            kind = of_sklearn("NotFittedError", SettingError)
            raise kind(f"This {name} instance is not fitted yet: call fit first")
        matrix = checked_matrix(x, user=name)
        check_width(matrix.shape[1], self.n_features_in_, name)
        product = matrix @ np.ravel(fitted["coef_"])
        return product + float(np.ravel(fitted["intercept_"])[0])


@final
class Lasso(_Linear):
    """Linear regression with an L1 penalty.

        minimize over w, b    |y - X w - b|^2 / (2 n_samples) + alpha |w|_1

    Args:
        alpha: Weight of the penalty, above 0.
        fit_intercept: Whether there is an intercept b, which is not penalized.
        tol: Duality gap at which fitting ends, relative to the loss of the best constant.
        max_iter: How often all columns may be scored.
        n_blocks: Groups of columns that are updated at the same time; None: one per worker.
            Results for other numbers differ by rounding and `tol`; for one, in no bit.
        workers: Threads.
        warm_start: Whether `fit` begins at the coefficients of the fit before.

    Attributes:
        coef_: (n_features,)
        intercept_: b.
        dual_gap_: The objective is above its minimum by no more.
        objective_: The minimized function at the end.
        n_iter_: How often all columns were scored.
        n_updates_: Updates of single coefficients.
        n_features_in_: Features of the samples fitted.
    """

    coef_: Floats
    intercept_: float

    def fit(self, X: object, y: object) -> Self:  # noqa: N803 -- scikit-learn's name
        """Fit to X, (n_samples, n_features), dense or scipy.sparse, and y, (n_samples,).

        Raises:
            SettingError: data or arguments cannot be computed with.
        """
        self.coef_, self.intercept_ = self._solve(*_checked(X, y), Squares())
        return self

    def program(self, X: object, y: object) -> Descent:  # noqa: N803 -- scikit-learn's name
        """Return what `fit` runs; SettingError as there."""
        return self._program(*_checked(X, y), Squares())

    def predict(self, X: object) -> Floats:  # noqa: N803 -- scikit-learn's name
        """Return X w + b, (n_samples,)."""
        return self._predictor(X)

    def score(self, X: object, y: object) -> float:  # noqa: N803 -- scikit-learn's name
        """Return the coefficient of determination, R^2: 1 is perfect, 0 that of the mean."""
        predicted = self.predict(X)
        targets = checked_targets(y, len(predicted), user="Lasso")
        deviations = targets - targets.mean()
        rest, total = np.dot(targets - predicted, targets - predicted), deviations @ deviations
        return float(1.0 - rest / total) if total else float(rest == 0.0)

    @override
    def __sklearn_tags__(self) -> object:
        return _tags("regressor")


@final
class SparseLogisticRegression(_Linear):
    """Logistic regression of two classes with an L1 penalty.

        minimize over w, b    mean of log(1 + exp(-s (x w + b))) + alpha |w|_1,  s = -1 or 1

    scikit-learn's C is 1 / (alpha n_samples).

    Args:
        alpha: Weight of the penalty, above 0; the others are those of `Lasso`.

    Attributes are those of `Lasso`, with `classes_`, (2,), `coef_`, (1, n_features), and
    `intercept_`, (1,).
    """

    coef_: Floats
    intercept_: Floats
    classes_: Labels

    def fit(self, X: object, y: object) -> Self:  # noqa: N803 -- scikit-learn's name
        """Fit to X, (n_samples, n_features), dense or scipy.sparse, and y, of two classes.

        Raises:
            SettingError: data or arguments cannot be computed with.
        """
        matrix, targets, classes = _classified(X, y)
        coefficients, intercept = self._solve(matrix, targets, Logistic())
        self.classes_ = classes
        self.coef_, self.intercept_ = coefficients[np.newaxis], np.array([intercept])
        return self

    def program(self, X: object, y: object) -> Descent:  # noqa: N803 -- scikit-learn's name
        """Return what `fit` runs; SettingError as there."""
        matrix, targets, _ = _classified(X, y)
        return self._program(matrix, targets, Logistic())

    def decision_function(self, X: object) -> Floats:  # noqa: N803 -- scikit-learn's name
        """Return X w + b, (n_samples,): above 0 where `classes_[1]` is predicted."""
        return self._predictor(X)

    def predict_proba(self, X: object) -> Floats:  # noqa: N803 -- scikit-learn's name
        """Return the probabilities of both classes, (n_samples, 2)."""
        f = self._predictor(X)
        return np.stack([expit(-f), expit(f)], axis=1)

    def predict(self, X: object) -> Labels:  # noqa: N803 -- scikit-learn's name
        """Return the more probable class of each sample."""
        is_second = self._predictor(X) > 0.0
        return self.classes_[is_second.astype(np.intp)]

    def score(self, X: object, y: object) -> float:  # noqa: N803 -- scikit-learn's name
        """Return the share of samples whose class is predicted."""
        predicted = self.predict(X)
        labels = checked_labels(y, len(predicted), user="SparseLogisticRegression")
        return float((predicted == labels).mean())

    @override
    def __sklearn_tags__(self) -> object:
        return _tags("classifier")


def _matrix(x: object, user: str) -> "Matrix | Mapped":
    """Return data, checked; those of a file are as its blocks are cut."""
    return x if isinstance(x, Mapped) else checked_matrix(x, user=user)


def _checked(x: object, y: object) -> "tuple[Matrix | Mapped, Floats]":
    matrix = _matrix(x, "Lasso")
    return matrix, checked_targets(y, matrix.shape[0], user="Lasso")


def _classified(x: object, y: object) -> "tuple[Matrix | Mapped, Floats, Labels]":
    """Return X, 1 for the second of two classes and else 0, and these."""
    user = "SparseLogisticRegression"
    matrix = _matrix(x, user)
    labels = checked_labels(y, matrix.shape[0], user=user)
    if labels.dtype.kind == "f" and (labels.astype(np.float64) % 1.0).any():
        raise SettingError(f"Unknown label type: {user} needs classes, y is continuous")
    classes = np.unique(labels)
    if len(classes) != 2:
        raise SettingError(
            f"{user}: y has {len(classes)} class{'es' * (len(classes) != 1)}. Only binary "
            "classification is supported: fit one model per class to y == class"
        )
    return matrix, (labels == classes[1]).astype(np.float64), classes


def _tags(kind: Literal["regressor", "classifier"]) -> object:
    """Return what scikit-learn asks estimators for; only it does, so it is installed."""
    from sklearn.utils import ClassifierTags, InputTags, RegressorTags, Tags, TargetTags  # noqa: PLC0415 -- loaded

    return Tags(
        estimator_type=kind,
        target_tags=TargetTags(required=True),
        classifier_tags=ClassifierTags(multi_class=False) if kind == "classifier" else None,
        regressor_tags=RegressorTags() if kind == "regressor" else None,
        input_tags=InputTags(sparse=True),
    )
