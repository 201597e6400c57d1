"""Downpour SGD on a simulated cluster, against the rules of the paper (DB-5 to DB-13).

Where values must be bit-exact in any order of events, the model's gradient depends on the data
alone and is an integer: the parameters then show, as an exact sum, which gradients were applied
and how often.
"""

import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from typing_extensions import override

from distbelief.parameter_server.initial_values import shard_values
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.rules import SGD, Adagrad, TorchRule, UpdateRule
from distbelief.parameter_server.schedules import Cosine
from distbelief.protocol import Evaluate, EvaluationDone, Finished, Progress, StartTraining, Stop
from distbelief.protocol.role import Address
from distbelief.simulation.faults import Delay, Drop, Duplicate, Kill, Pause
from distbelief.task.data import BatchCursor, DataShard
from distbelief.task.losses import loss_function
from distbelief.task.task import DataSpec, ModelSpec, TaskSpec, build_dataset, build_model
from distbelief.worker.downpour_settings import DownpourSettings
from distbelief.worker.local_executor import FlatModel
from distbelief.worker.training import Counters, Training
from tests.distbelief.examples import initials_of
from tests.elsewhere import answers
from tests.simulation.jobs import TASK, Direct, scattered


HERE = "tests.simulation.test_downpour"
EXAMPLES = "tests.distbelief.examples"
HOSTS = {"one host": "host-0", "block messages": ""}

both_data_paths = pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS.keys())


# ------------------------------------------------------- models


class Counting(nn.Module):
    """Each sample's gradient is its inputs, which are integers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def counting_net(*, width: int = 500) -> nn.Module:
    return Counting(width)


def counting_data(*, width: int = 500, n_samples: int = 40) -> list[object]:
    """Return samples whose mean over any four, times four, is exact in float32."""
    inputs = torch.from_numpy(
        np.random.default_rng(0).integers(-8, 9, (n_samples, width)).astype(np.float32)
    )
    return [(row, torch.tensor(0.0)) for row in inputs]


def total(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient is the sum, not the mean, over the samples."""
    return outputs.sum() + 0.0 * targets.sum()


COUNTING = TaskSpec(
    model=ModelSpec(factory=f"{HERE}:counting_net", initial="seed"),
    train=DataSpec(factory=f"{HERE}:counting_data"),
    loss=f"{HERE}:total",
)
LEARNING = TASK


# ----------------------------------------------------------------------- cluster


class Cluster(Direct):
    """A job without a supervisor: replicas start at once and end by themselves."""

    def run(self, *, but: Sequence[str] = ()) -> None:
        """Run all replicas but these to their planned end."""
        wanted = [name for name in self.replicas if name not in but]
        halted = self.cluster.halted
        self.cluster.run_until(lambda: all(name in halted for name in wanted))
        assert {halted[name] for name in wanted} == {None}
        self.ended_at = self.now
        self.wait(0.1)  # their last messages arrive

    def counters(self, index: int) -> Counters:
        program = self.replica(self.replicas[index]).program
        assert isinstance(program, Training)
        return program.counters


NADAM: UpdateRule = msgspec.convert({"name": "NAdam", "lr": 0.05}, UpdateRule)


def downpour(  # the options of one job
    *,
    rule: UpdateRule | None = None,
    batch_size: int = 4,
    n_fetch: int = 1,
    n_push: int = 1,
    blocking: bool = False,
    overwrite_local_steps: bool = False,
    max_steps: int | None = 10,
    local_learning_rate: float | None = None,
    loss: str = "cross_entropy",
) -> DownpourSettings:
    return DownpourSettings(
        loss=loss,
        batch_size=batch_size,
        rule=SGD(learning_rate=0.1) if rule is None else rule,
        n_fetch=n_fetch,
        n_push=n_push,
        blocking=blocking,
        overwrite_local_steps=overwrite_local_steps,
        max_steps=max_steps,
        local_learning_rate=local_learning_rate,
    )


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------- one replica: Algorithm 1.1


def plain(settings: DownpourSettings, *, task: TaskSpec) -> dict[str, torch.Tensor]:
    """Return the parameters after the paper's Algorithm 1.1, taken literally, in plain torch.

    The additions are a last push of what is left, rates that follow the rule's schedule, and local
    steps that are repeated from fetched parameters.
    """
    module = build_model(task.model)
    local: dict[str, torch.Tensor] = dict(module.named_parameters())
    server = {name: drawn(task)[name].clone().requires_grad_() for name in local}
    optimizer = _optimizer(settings.rule, server)
    own = settings.rule.learning_rate if isinstance(settings.rule, SGD) else 0.0
    rate, n_pushes = settings.local_learning_rate or own, 0
    alpha, factor = rate, settings.rule.schedule.factor
    dataset, loss = build_dataset(task.train), loss_function(task.loss)
    accrued = {name: torch.zeros_like(value) for name, value in server.items()}
    n_steps = settings.max_steps or 0
    for step, indices in enumerate(_batches(settings, n_samples=len(dataset))):
        samples = [dataset[i] for i in indices]
        inputs, targets = torch.utils.data.default_collate(samples)
        if step % settings.n_fetch == 0:
            alpha = rate * factor(n_pushes)
            for name, value in local.items():
                value.data.copy_(server[name].data.view_as(value))
                if not settings.overwrite_local_steps:
                    value.data.add_(accrued[name].view_as(value), alpha=-alpha)
        module.zero_grad()
        loss(module(inputs), targets).backward()
        for name, value in local.items():
            assert value.grad is not None
            accrued[name] += value.grad.view(-1)
            value.data.add_(value.grad, alpha=-alpha)
        if step % settings.n_push == 0 or step == n_steps - 1:
            for name, value in server.items():
                value.grad, accrued[name] = accrued[name], torch.zeros_like(value)
            for group in optimizer.param_groups:
                group["lr"] = settings.rule.learning_rate * factor(n_pushes)
            optimizer.step()
            n_pushes += 1
    return {name: value.detach() for name, value in server.items()}


def _optimizer(rule: UpdateRule, server: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    if isinstance(rule, Adagrad):
        return torch.optim.Adagrad(server.values(), lr=rule.learning_rate, fused=True)
    if isinstance(rule, TorchRule):
        return getattr(torch.optim, rule.name)(server.values(), lr=rule.learning_rate)  # type: ignore[no-any-return]
    assert isinstance(rule, SGD)
    return torch.optim.SGD(server.values(), lr=rule.learning_rate, fused=True)


def _batches(
    settings: DownpourSettings, *, n_samples: int, replica_index: int = 0, n_replicas: int = 1
) -> Iterator[list[int]]:
    assert settings.max_steps is not None
    part = DataShard(
        n_samples, replica_index=replica_index, n_replicas=n_replicas, seed=settings.seed
    )
    cursor = BatchCursor(part)
    position = 0
    for _ in range(settings.max_steps):
        indices = cursor.batch(position, settings.batch_size)
        position += len(indices)
        yield indices.tolist()


def drawn(task: TaskSpec) -> dict[str, torch.Tensor]:
    model = FlatModel(build_model(task.model))
    layout = Layout.of(model.specs(), n_shards=1)
    vector = shard_values(layout, 0, initials_of(model.module), seed=task.model.seed)
    return scattered(layout, [vector])


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize(
    "rule",
    # Not momentum: torch's fused kernel rounds the last elements of a tensor otherwise
    # if their number is no multiple of 16; on the shards it always is.
    [SGD(learning_rate=0.1), Adagrad(learning_rate=0.05), NADAM],
    ids=lambda rule: rule.name,
)
def test_one_blocking_replica_is_sequential_training_to_the_bit(
    rule: UpdateRule, host: str
) -> None:
    """DB-11, over three passes of the data."""
    job = downpour(rule=rule, blocking=True, max_steps=45)
    cluster = Cluster(LEARNING, job, host=host)
    cluster.run()
    assert same(cluster.values(), plain(job, task=LEARNING))


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("n_push", [1, 2, 5])
@pytest.mark.parametrize("n_fetch", [1, 3, 4])
def test_algorithm_1_1_is_followed_to_the_bit(n_fetch: int, n_push: int, host: str) -> None:
    """DB-6 to DB-9: when, which sum, reset to zero, and the local steps in between."""
    job = downpour(
        n_fetch=n_fetch, n_push=n_push, blocking=True, overwrite_local_steps=True, max_steps=11
    )
    cluster = Cluster(LEARNING, job, host=host)
    cluster.run()
    assert same(cluster.values(), plain(job, task=LEARNING))


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize(("n_fetch", "n_push"), [(2, 2), (3, 1), (2, 3)])
def test_local_steps_follow_the_schedule(
    n_fetch: int, n_push: int, *, overwrite: bool, host: str
) -> None:
    """Regression: they had the rate of one fetch ago, and after a restart that of clock 0."""
    rule = SGD(learning_rate=0.5, schedule=Cosine(n_pushes=12))
    job = downpour(
        rule=rule,
        n_fetch=n_fetch,
        n_push=n_push,
        blocking=True,
        overwrite_local_steps=overwrite,
        max_steps=11,
    )
    cluster = Cluster(LEARNING, job, host=host)
    cluster.run()
    assert same(cluster.values(), plain(job, task=LEARNING))


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("n_push", [1, 2, 5, 10])
@pytest.mark.parametrize("n_fetch", [1, 2, 5, 10])
def test_one_replica_alone_is_sequential_sgd_however_seldom_it_fetches_and_pushes(
    n_fetch: int, n_push: int, host: str
) -> None:
    """Regression: a fetch overwrote the local steps whose gradients were not pushed yet.

    With n_fetch = n_push = 10, nine of ten gradients were lost. Only n_fetch = n_push = 1
    needs `blocking`, because there a fetch does not wait for pushes.
    """
    job = downpour(n_fetch=n_fetch, n_push=n_push, blocking=n_fetch == n_push == 1, max_steps=31)
    cluster = Cluster(LEARNING, job, host=host, n_shards=2)
    cluster.run()
    everything_at_once = msgspec.structs.replace(job, n_fetch=1, n_push=1)
    expected = plain(everything_at_once, task=LEARNING)
    for name, value in cluster.values().items():
        if n_push == 1:  # sums of one gradient: the same additions in the same order
            assert torch.equal(value, expected[name])
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=2e-6)


def normal_net(*, width: int = 40) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 2))


@pytest.mark.parametrize(("n_fetch", "n_push"), [(1, 4), (4, 4), (2, 3)])
def test_a_fetch_loses_nothing_of_running_averages(n_fetch: int, n_push: int) -> None:
    """Regression: a fetch restored the shards' averages, so one of four steps counted."""
    task = msgspec.structs.replace(
        LEARNING, model=ModelSpec(factory=f"{HERE}:normal_net", initial="seed")
    )
    found = []
    for job in (
        downpour(blocking=True, max_steps=13),
        downpour(n_fetch=n_fetch, n_push=n_push, max_steps=13),
    ):
        cluster = Cluster(task, job)
        cluster.run()
        found.append(cluster.values())
    assert found[1]["1.num_batches_tracked"].item() == 13
    for name, value in found[1].items():
        torch.testing.assert_close(value, found[0][name], rtol=1e-4, atol=1e-5)


def test_without_a_rate_of_its_own_a_replica_only_sums_gradients() -> None:
    """A replica cannot take an adaptive rule's step: n_push = 3 sums three gradients."""
    job = downpour(rule=Adagrad(learning_rate=0.05), n_push=3, max_steps=10)
    cluster = Cluster(LEARNING, job)
    cluster.run()
    assert same(cluster.values(), plain(job, task=LEARNING))


def test_local_steps_have_their_own_rate() -> None:
    """DB-9 with an adaptive rule on the shards."""
    job = downpour(
        rule=Adagrad(learning_rate=0.05), n_fetch=3, local_learning_rate=0.2, blocking=True
    )
    cluster = Cluster(LEARNING, job)
    cluster.run()
    assert same(cluster.values(), plain(job, task=LEARNING))


@pytest.mark.each_value
@pytest.mark.parametrize(
    "rule", [SGD(learning_rate=0.1), Adagrad(learning_rate=0.05), NADAM], ids=lambda rule: rule.name
)
@pytest.mark.parametrize("n_shards", [2, 5])
def test_the_number_of_shards_changes_no_bit(rule: UpdateRule, n_shards: int) -> None:
    """DB-5 and DB-13: for one order of updates."""
    job = downpour(rule=rule, blocking=True, overwrite_local_steps=True, n_push=2)
    cluster = Cluster(LEARNING, job, n_shards=n_shards)
    cluster.run()
    assert same(cluster.values(), plain(job, task=LEARNING))


# ------------------------------------------------------------------- frequency


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("n_push", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("n_fetch", [1, 2, 5])
def test_fetches_and_pushes_are_as_many_as_the_paper_has(
    n_fetch: int, n_push: int, host: str, *, blocking: bool
) -> None:
    """DB-6: ceil(T/a) and ceil(T/b), and one push more for what is left."""
    n_steps = 11
    job = downpour(n_fetch=n_fetch, n_push=n_push, max_steps=n_steps, blocking=blocking)
    cluster = Cluster(LEARNING, job, host=host, n_shards=2)
    cluster.run()
    counters = cluster.counters(0)
    n_left = (n_steps - 1) % n_push
    assert counters.steps == n_steps
    assert counters.fetches == math.ceil(n_steps / n_fetch)
    assert counters.pushes == math.ceil(n_steps / n_push) + (n_left > 0)
    assert counters.gradients == counters.gradients_pushed == n_steps
    for k in range(2):
        assert cluster.status(f"shard-{k}")["pushes_applied"] == counters.pushes


def test_local_steps_are_taken_where_no_fetch_follows() -> None:
    """DB-9: of steps 0 to 10 with fetches at 0, 4, 8, all but 3 and 7 step locally."""
    cluster = Cluster(LEARNING, downpour(n_fetch=4, max_steps=11))
    cluster.run()
    assert cluster.counters(0).local_steps == 11 - 2


def test_fetching_overlaps_computing() -> None:
    """DB-10: not blocking, the same steps over the same slow links take less time."""
    seconds = []
    for blocking in (True, False):
        job = downpour(max_steps=20, blocking=blocking)
        cluster = Cluster(LEARNING, job, host="")
        cluster.run()
        seconds.append(cluster.ended_at)
    assert seconds[1] < 0.7 * seconds[0]


# ------------------------------------------------------------------- no lost gradients


def gradient_sum(cluster: Cluster, *, task: TaskSpec = COUNTING) -> torch.Tensor:
    """Return the sum of all gradients up to each replica's reported position."""
    dataset = build_dataset(task.train)
    inputs = torch.stack([dataset[i][0] for i in range(len(dataset))])  # type: ignore[index]
    whole = torch.zeros_like(inputs[0])
    for r, name in enumerate(cluster.replicas):
        part = DataShard(len(dataset), replica_index=r, n_replicas=len(cluster.replicas), seed=0)
        samples = int(cluster.status(name)["samples"])
        n_passes, rest = divmod(samples, len(part))
        whole += n_passes * inputs[torch.from_numpy(part.order(0))].sum(0)
        whole += inputs[torch.from_numpy(part.order(n_passes)[:rest])].sum(0)
    return whole


def counting(**options: object) -> DownpourSettings:
    return msgspec.structs.replace(
        downpour(loss=f"{HERE}:total", rule=SGD(learning_rate=1.0)), **options
    )


@pytest.mark.each_value
@both_data_paths
@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize(("n_fetch", "n_push"), [(1, 1), (1, 4), (3, 2)])
def test_pushes_are_the_sum_of_the_computed_gradients(
    n_fetch: int, n_push: int, n_shards: int, host: str
) -> None:
    """DB-7 and DB-8, with three replicas that do not wait for each other."""
    job = counting(n_fetch=n_fetch, n_push=n_push, max_steps=17)
    cluster = Cluster(COUNTING, job, n_replicas=3, n_shards=n_shards, host=host)
    cluster.run()
    assert torch.equal(cluster.values()["weight"], -gradient_sum(cluster))


@both_data_paths
@given(
    seed=st.integers(0, 2**32 - 1),
    n_push=st.integers(1, 3),
    drop=st.floats(0.0, 0.3),
    duplicate=st.floats(0.0, 0.3),
    late=st.floats(0.0, 0.3),
    overtaken=st.booleans(),
)
@settings(max_examples=settings().max_examples // 3)
def test_each_push_counts_once_despite_lost_and_late_messages(
    host: str,
    seed: int,
    n_push: int,
    drop: float,
    duplicate: float,
    late: float,
    *,
    overtaken: bool,
) -> None:
    faults = (
        Drop(probability=drop),
        Duplicate(probability=duplicate, seconds_max=2.0),
        Delay(probability=late, seconds_max=2.0, overtaken=overtaken),
    )
    job = counting(n_push=n_push, max_steps=8)
    cluster = Cluster(COUNTING, job, n_replicas=2, n_shards=2, host=host, seed=seed, faults=faults)
    cluster.run()
    assert torch.equal(cluster.values()["weight"], -gradient_sum(cluster))
    n_pushes = sum(cluster.counters(r).pushes for r in range(2))
    for k in range(2):
        assert cluster.status(f"shard-{k}")["pushes_applied"] == n_pushes


@both_data_paths
@given(
    seed=st.integers(0, 2**32 - 1),
    at=st.floats(0.0, 0.02),
    after_actions=st.none() | st.integers(0, 4),
    drop=st.floats(0.0, 0.2),
    pause=st.floats(0.0, 0.02),
)
@settings(max_examples=settings().max_examples // 3)
def test_a_killed_replica_continues_from_the_shards_position(
    host: str, seed: int, at: float, after_actions: int | None, drop: float, pause: float
) -> None:
    """What was computed and not applied is computed again: each sample counts once."""
    faults = (
        Kill(at=at, role=Address("replica-0"), restart_after=0.01, after_actions=after_actions),
        Pause(at=pause, role=Address("shard-0"), seconds=0.005),
        Drop(probability=drop),
    )
    job = counting(n_push=2, max_steps=8)
    cluster = Cluster(COUNTING, job, n_replicas=2, host=host, seed=seed, faults=faults)
    cluster.run()
    assert torch.equal(cluster.values()["weight"], -gradient_sum(cluster))


@both_data_paths
def test_a_dead_replica_delays_no_other(host: str) -> None:
    """DB-12: the others continue, and the shards serve them."""
    dead = Kill(at=0.003, role=Address("replica-1"))
    cluster = Cluster(
        LEARNING, downpour(max_steps=100), n_replicas=3, n_shards=2, host=host, faults=[dead]
    )
    cluster.run(but=["replica-1"])
    n_dead = cluster.counters(1).pushes
    assert n_dead < 100
    applied = cluster.status("shard-0")["pushes_applied"]
    assert 200 <= applied <= 200 + n_dead + 2


@both_data_paths
def test_a_dead_shard_is_waited_for_and_its_lost_pushes_are_counted(host: str) -> None:
    """Without a checkpoint it starts anew: all applied pushes are lost and counted."""
    dead = Kill(at=0.004, role=Address("shard-0"), restart_after=0.5)
    job = downpour(max_steps=60)
    cluster = Cluster(LEARNING, job, n_replicas=2, n_shards=2, host=host, faults=[dead])
    cluster.run()
    assert cluster.ended_at > 0.5
    lost = sum(cluster.status(name)["pushes_lost"] for name in cluster.replicas)
    applied = cluster.status("shard-0")["pushes_applied"]
    assert lost > 0
    assert applied == 120 - lost
    assert cluster.status("shard-1")["pushes_applied"] == 120


# -------------------------------------------------------------- start, stop, evaluate


def test_replicas_wait_for_their_start() -> None:
    """The warm start: the supervisor starts replica 0, later the others."""
    cluster = Cluster(LEARNING, downpour(), n_replicas=2, await_begin=True)
    cluster.cluster.run(until=1.0)
    assert cluster.cluster.role(cluster.replicas[0]).status()[0] == "waiting for begin"
    cluster.tell("replica-0", StartTraining())
    cluster.run(but=["replica-1"])
    assert cluster.counters(1).steps == 0
    cluster.tell("replica-1", StartTraining())
    cluster.run()


@both_data_paths
@given(at=st.floats(0.0, 0.01), n_push=st.integers(1, 4))
@settings(max_examples=settings().max_examples // 3)
def test_stop_at_any_time_loses_nothing(host: str, at: float, n_push: int) -> None:
    job = counting(n_push=n_push, max_steps=None)
    cluster = Cluster(COUNTING, job, n_replicas=2, host=host)
    cluster.cluster.run(until=at)
    for name in cluster.replicas:
        cluster.tell(name, Stop(reason="enough"))
    cluster.run()
    assert torch.equal(cluster.values()["weight"], -gradient_sum(cluster))
    finished = cluster.told(Finished)
    assert len(finished) == 2
    assert sum(message.counters["samples"] for message in finished) == sum(
        cluster.status(name)["samples"] for name in cluster.replicas
    )


def test_progress_adds_up() -> None:
    cluster = Cluster(LEARNING, downpour(max_steps=30))
    cluster.run()
    progress = cluster.told(Progress)
    assert progress[0].step == 1  # at once, then each half second, then at the end
    assert progress[-1].step == 30
    assert progress[-1].samples == 120
    assert progress[-1].seconds_computing > 0.0


@both_data_paths
def test_the_evaluator_measures_the_shards_values(host: str) -> None:
    cluster = Cluster(LEARNING, downpour(), host=host, n_shards=2)
    cluster.run()
    cluster.tell("evaluator", Evaluate(request=1, whole=True))
    cluster.tell("evaluator", Evaluate(request=2, whole=False))

    cluster.cluster.run_until(lambda: len(cluster.told(EvaluationDone)) == 2)
    whole, subset = cluster.told(EvaluationDone)
    module = build_model(LEARNING.model)
    for name, value in module.named_parameters():
        value.data.copy_(cluster.values()[name].view_as(value))
    dataset = build_dataset(LEARNING.test or LEARNING.train)
    inputs, targets = torch.utils.data.default_collate([dataset[i] for i in range(len(dataset))])
    outputs = module(inputs).detach()
    assert (whole.request, subset.request) == (1, 2)
    assert (whole.n_samples, subset.n_samples) == (50, 20)
    assert whole.clock == subset.clock == 10.0
    assert whole.loss == pytest.approx(float(nn.functional.cross_entropy(outputs, targets)))
    assert whole.metric == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))


# --------------------------------------------------------------------- reproducibility


def digest() -> str:
    cluster = Cluster(
        LEARNING,
        downpour(),
        n_replicas=3,
        n_shards=2,
        seed=5,
        faults=[Drop(probability=0.1), Duplicate(probability=0.1)],
    )
    cluster.run()
    return cluster.cluster.trace.digest


@pytest.mark.slow
def test_one_seed_is_one_run_in_any_process() -> None:
    here = digest()
    assert len(here) == 64
    assert answers(HERE, "[t.digest()]") == [here]
