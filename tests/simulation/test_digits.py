"""What replicas learn of scikit-learn's digits, in virtual time: figures, three seeds.

`python -m pytest -s -m soak tests/simulation/test_digits.py` prints them. Two replicas
begin as in `experiments/digits/digits.toml`: one alone, the other 20 steps later.
"""

from functools import cache

import pytest
import torch
from torch.utils.data import TensorDataset

from distbelief.parameter_server.rules import SGD
from distbelief.protocol import StartTraining
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec
from distbelief.worker.downpour_settings import DownpourSettings
from experiments.digits import digits
from tests.simulation.test_downpour import Cluster


pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

SHUFFLED = "experiments.digits.digits:images"
SORTED = "tests.simulation.test_digits:images_by_class"
WARM_START_STEPS = 20
SEEDS = range(3)


def images_by_class(part: str) -> TensorDataset:
    """Return the digits as an image folder has them: all zeros, all ones, ..."""
    inputs, targets = digits.images(part).tensors
    order = targets.argsort(stable=True)
    return TensorDataset(inputs[order], targets[order])


@cache
def accuracy(
    seed: int,
    *,
    n_replicas: int = 2,
    n: int = 1,
    overwrite_local_steps: bool = False,
    data: str = SHUFFLED,
    epochs: int = 12,
) -> float:
    """Return the held-out accuracy in percent, with n_fetch = n_push = n."""
    task = TaskSpec(
        model=ModelSpec(factory="experiments.digits.digits:net", initial="seed", seed=seed),
        train=DataSpec(factory=data, arguments={"part": "train"}),
        loss="cross_entropy",
    )
    n_samples = len(digits.images("train"))
    settings = DownpourSettings(
        loss="cross_entropy",
        batch_size=32,
        rule=SGD(learning_rate=0.05),
        n_fetch=n,
        n_push=n,
        blocking=n_replicas == 1,
        overwrite_local_steps=overwrite_local_steps,
        max_steps=epochs * n_samples // n_replicas // 32,
        seed=seed,
    )
    cluster = Cluster(
        task, settings, n_replicas=n_replicas, n_shards=2, seed=seed, await_begin=True
    )
    cluster.cluster.run(until=0.1)
    cluster.tell("replica-0", StartTraining())
    cluster.cluster.run_until(lambda: cluster.counters(0).steps >= WARM_START_STEPS)
    for replica in cluster.replicas[1:]:
        cluster.tell(replica, StartTraining())
    cluster.run()
    module, values = digits.net(), cluster.values()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(values[name].view_as(parameter))
        inputs, targets = digits.images("test").tensors
        return 100 * float((module(inputs).argmax(1) == targets).float().mean())


def mean_of(label: str, found: list[float]) -> float:
    mean = sum(found) / len(found)
    each = " ".join(f"{one:.1f}" for one in found)
    print(f"{label:50} {each}   mean {mean:.1f}")  # noqa: T201 -- what it is for
    return mean


@pytest.mark.parametrize("n", [5, 10])
def test_two_replicas_that_seldom_fetch_and_push_learn_as_well(n: int) -> None:
    """A fetch overwrote n - 1 of n local steps; the paper's order still does."""
    often = mean_of("2 replicas, n = 1", [accuracy(s) for s in SEEDS])
    seldom = mean_of(f"2 replicas, n = {n}", [accuracy(s, n=n) for s in SEEDS])
    mean_of(
        f"2 replicas, n = {n}, local steps overwritten",
        [accuracy(s, n=n, overwrite_local_steps=True) for s in SEEDS],
    )
    assert seldom > often - 1.5


def test_one_replica_alone_that_seldom_fetches_and_pushes_is_plain_sgd() -> None:
    for s in SEEDS:
        plain = mean_of("1 replica, n = 1", [accuracy(s, n_replicas=1)])
        seldom = mean_of("1 replica, n = 10", [accuracy(s, n_replicas=1, n=10)])
        mean_of(
            "1 replica, n = 10, local steps overwritten",
            [accuracy(s, n_replicas=1, n=10, overwrite_local_steps=True)],
        )
        assert seldom == pytest.approx(plain, abs=0.3)  # rounding may turn one scan


@pytest.mark.parametrize("n_replicas", [2, 4])
def test_data_sorted_by_class_are_learnt_as_well_as_shuffled_ones(n_replicas: int) -> None:
    """Each replica had a contiguous part: of ten classes, five or three."""
    shuffled = mean_of(
        f"{n_replicas} replicas, shuffled",
        [accuracy(s, n_replicas=n_replicas, epochs=20) for s in SEEDS],
    )
    by_class = mean_of(
        f"{n_replicas} replicas, sorted by class",
        [accuracy(s, n_replicas=n_replicas, data=SORTED, epochs=20) for s in SEEDS],
    )
    assert by_class > shuffled - 1.0
