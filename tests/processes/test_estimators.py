"""Estimators over `fit`, as scikit-learn's own checks and searches use them."""

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from distbelief import DistBeliefClassifier, DistBeliefRegressor
from distbelief.core.errors import JobError


pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.usefixtures("undrawn"),
    pytest.mark.timeout(300),
]


def net(n_features: int, n_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(n_features, 16), nn.Tanh(), nn.Linear(16, n_outputs))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # the checks have warnings of their own
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [DistBeliefClassifier, DistBeliefRegressor])
def test_scikit_learn_finds_nothing_to_object_to(
    kind: type[DistBeliefClassifier | DistBeliefRegressor],
) -> None:
    results = check_estimator(kind(net, epochs=40), on_fail=None, on_skip=None)
    failed = [one for one in results if one["status"] not in {"passed", "skipped"}]
    assert failed == []
    assert len(results) > 40


def test_cross_validation_and_a_search_take_it() -> None:
    x, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    estimator = make_pipeline(StandardScaler(), DistBeliefClassifier(net, epochs=15))
    scores = cross_val_score(estimator, x, names, cv=3)
    assert scores.mean() > 0.9
    search = GridSearchCV(DistBeliefClassifier(net), {"epochs": [1, 20]}, cv=2).fit(x, names)
    assert search.best_params_ == {"epochs": 20}
    found = search.best_estimator_
    assert set(found.predict(x)) <= set(names)
    np.testing.assert_allclose(found.predict_proba(x).sum(1), 1.0, rtol=1e-5)


def test_one_replica_gives_the_same_bits_and_two_learn_as_well() -> None:
    x, y = load_iris(return_X_y=True)
    first, again = (DistBeliefClassifier(net, epochs=2).fit(x, y) for _ in range(2))
    assert (first.predict_proba(x) == again.predict_proba(x)).all()
    scaled = StandardScaler().fit_transform(x)
    two = DistBeliefClassifier(net, epochs=60, replicas=2, shards=2, batch_size=16)
    assert two.fit(scaled, y).score(scaled, y) > 0.85


def test_random_states_are_those_of_scikit_learn() -> None:
    x, y = load_iris(return_X_y=True)
    one, same, other, drawn = (
        DistBeliefClassifier(net, epochs=1, random_state=state).fit(x, y).predict_proba(x)
        for state in (np.random.RandomState(3), np.random.RandomState(3), np.int64(3), None)
    )
    assert (one == same).all()
    assert not (one == other).all()
    assert drawn.shape == one.shape


def test_a_module_is_trained_from_its_values_and_stays() -> None:
    x = np.random.default_rng(0).normal(size=(200, 3))
    y = np.stack([x @ [1.0, 2.0, 3.0], x[:, 0]], axis=1)
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    model = DistBeliefRegressor(module, epochs=60, rule={"name": "sgd", "learning_rate": 0.1})
    assert model.fit(x, y).score(x, y) > 0.99
    assert (module.weight == before).all()
    assert model.predict(x).shape == (200, 2)


def test_scores_of_another_shape_are_refused() -> None:
    x, y = load_iris(return_X_y=True)
    wide = DistBeliefClassifier(nn.Linear(4, 5), epochs=1).fit(x, y)
    with pytest.raises(JobError, match=r"module returns \(150, 5\): return scores, \(150, 3\)"):
        wide.predict(x)


def test_targets_beyond_float32_are_refused() -> None:
    """They became infinite."""
    y = np.array([1.0, -1e300, 1.0])
    with pytest.raises(ValueError, match=r"y has -1e\+300 at \[1, 0\], which float32 has not"):
        DistBeliefRegressor(nn.Linear(2, 1)).fit(np.ones((3, 2)), y)
