"""`fit` by scikit-learn's conventions, so that its pipelines and searches take torch modules."""

from collections.abc import Callable, Mapping
from typing import Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from typing_extensions import override

from distbelief.core.errors import JobError
from distbelief.core.files import scratch
from distbelief.job.fit import fit
from distbelief.job.run.summary import Summary
from distbelief.task.initializers import lost


try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import Tags, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("estimators need scikit-learn: pip install distbelief[sklearn]") from error


Module = nn.Module | Callable[[int, int], nn.Module]
Floats = NDArray[np.float32]
Labels = NDArray[np.float64 | np.int64 | np.bool_ | np.str_ | np.object_]


class _Estimator(BaseEstimator):  # type: ignore[misc] # it has no types
    def __init__(  # noqa: PLR0913 -- options of fit
        self,
        module: Module,
        *,
        loss: object = None,
        rule: object = None,
        batch_size: int = 32,
        epochs: float = 10.0,
        replicas: int = 1,
        shards: int = 1,
        random_state: int | np.int64 | np.random.RandomState | None = 0,
        overrides: Mapping[str, object] | None = None,
    ) -> None:
        self.module = module
        self.loss = loss
        self.rule = rule
        self.batch_size = batch_size
        self.epochs = epochs
        self.replicas = replicas
        self.shards = shards
        self.random_state = random_state
        self.overrides = overrides

    module_: nn.Module
    summary_: Summary

    def _fit(self, x: Floats, y: Labels, *, loss: str, n_outputs: int) -> Self:
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(np.iinfo(np.int32).max)
        seed = int(seed)
        module = self.module
        if not isinstance(module, nn.Module):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = module(x.shape[1], n_outputs)
        with scratch() as directory:
            run = fit(
                module,
                (x, y),
                loss=self.loss or loss,
                batch_size=max(1, min(self.batch_size, len(x) // self.replicas)),
                rule=self.rule or {"name": "adam", "learning_rate": 0.01},
                epochs=self.epochs,
                replicas=self.replicas,
                shards=self.shards,
                directory=directory / "run",
                # Alone, a replica has nobody's pushes to miss: the same bits each time.
                overrides={
                    "algorithm.seed": seed,
                    "algorithm.blocking": self.replicas == 1,
                    **(self.overrides or {}),
                },
                show=False,
            )
            self.module_, self.summary_ = run.model, run.summary
        return self

    def _outputs(self, x: object) -> torch.Tensor:
        check_is_fitted(self)
        inputs = validate_data(self, x, reset=False, dtype=np.float32)
        with torch.no_grad():
            return cast("torch.Tensor", self.module_(torch.from_numpy(inputs)))


class DistBeliefClassifier(ClassifierMixin, _Estimator):  # type: ignore[misc] # as above
    """A classifier by a torch module, trained by `distbelief.fit`.

    Args:
        module: Of rows of features to a score for each class; or a function (n_features, n_classes)
            that makes one. One that is given trains from its present values, and stays as it is.
        loss: As of `fit`; None: "cross_entropy".
        rule: As of `fit`; None: Adam with a learning rate of 0.01.
        batch_size: Samples of one step of one replica.
        epochs: Passes over the data.
        replicas: Processes that train; one alone gives the same bits each time.
        shards: Processes that hold the parameters.
        random_state: Seed of the order of samples, and of what `module` draws if it is a function;
            a RandomState, or None, draws another for each fit.
        overrides: Other keys of a job.

    Attributes:
        module_: The trained module.
        classes_: (n_classes,)
        summary_: Figures of the run.
        n_features_in_: Features of the samples fitted.
    """

    classes_: Labels

    def fit(self, X: object, y: object) -> Self:  # noqa: N803 -- scikit-learn's name
        """Fit to X, (n_samples, n_features), and labels y, (n_samples,).

        Raises:
            ValueError: X or y is no such array.
            JobError: the module cannot be trained on them.
        """
        x, labels = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(labels)
        self.classes_, numbers = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y has 1 class: a classifier needs two")
        return self._fit(x, numbers, loss="cross_entropy", n_outputs=len(self.classes_))

    def predict_proba(self, X: object) -> Floats:  # noqa: N803 -- scikit-learn's name
        """Return the softmax of the module's scores, (n_samples, n_classes)."""
        return cast("Floats", self._scores(X).softmax(1).numpy())

    def predict(self, X: object) -> Labels:  # noqa: N803 -- scikit-learn's name
        """Return the class of the largest score, (n_samples,)."""
        largest = self._scores(X).argmax(1).numpy()
        return cast("Labels", self.classes_[largest])

    def _scores(self, x: object) -> torch.Tensor:
        scores = self._outputs(x)
        wanted = (len(scores), len(self.classes_))
        if scores.shape != wanted:
            raise JobError(f"module returns {tuple(scores.shape)}: return scores, {wanted}")
        return scores


class DistBeliefRegressor(RegressorMixin, _Estimator):  # type: ignore[misc] # as above
    """A regression by a torch module, trained by `distbelief.fit`.

    Args:
        module: Of rows of features to (n_samples, n_outputs), or a function (n_features, n_outputs)
            that makes one; for the others see `DistBeliefClassifier`.
        loss: As of `fit`; None: "mse".

    The attributes are those of `DistBeliefClassifier`.
    """

    def fit(self, X: object, y: object) -> Self:  # noqa: N803 -- scikit-learn's name
        """Fit to X, (n_samples, n_features), and y, (n_samples,) or (n_samples, n_outputs).

        Raises:
            ValueError: X or y is no such array.
            JobError: the module cannot be trained on them.
        """
        x, targets = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)
        self._is_flat = targets.ndim == 1
        given = torch.from_numpy(np.asarray(targets, np.float64).reshape(len(x), -1))
        if what := lost(given, given.float()):
            raise ValueError(f"y has {what}, which float32 has not: scale y")
        columns = given.float().numpy()
        return self._fit(x, columns, loss="mse", n_outputs=columns.shape[1])

    def predict(self, X: object) -> NDArray[np.float64]:  # noqa: N803 -- scikit-learn's name
        """Return what the module returns, in the shape of y."""
        outputs = cast("NDArray[np.float64]", self._outputs(X).double().numpy())
        return outputs[:, 0] if self._is_flat else outputs

    @override
    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
