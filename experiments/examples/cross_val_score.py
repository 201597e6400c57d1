"""A torch module in a pipeline of scikit-learn, judged by five-fold cross-validation."""

from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

import distbelief


def net(n_features: int, n_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(n_features, 64), nn.ReLU(), nn.Linear(64, n_classes))


x, y = load_digits(return_X_y=True)
classifier = distbelief.DistBeliefClassifier(net, epochs=8, replicas=2, shards=2)
scores = cross_val_score(make_pipeline(StandardScaler(), classifier), x, y, cv=5)
print(f"accuracy {scores.mean():.1%} +- {scores.std():.1%}")
