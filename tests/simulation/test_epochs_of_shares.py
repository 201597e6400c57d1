"""`every = "1 epoch"`: exchanges every so many passes of a replica over its share of the data."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

import msgspec
import pytest
from hypothesis import given, strategies as st

from distbelief.config.job import ClusterTable, Elastic
from distbelief.core.errors import JobError, JobFileError
from distbelief.job.launch.preflight import PreflightResult
from distbelief.job.launch.supervised_job import check_data, supervisor_config, warnings_of
from distbelief.job.run.summary import DataFacts, TaskFacts
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import SGD, Adagrad
from distbelief.parameter_server.schedules import Linear
from distbelief.protocol.role import Address
from distbelief.simulation.faults import Fault, Kill
from distbelief.task.data import ENDLESS, DataShard
from distbelief.worker.batches import TrainingPlan
from distbelief.worker.downpour import DOWNPOUR
from distbelief.worker.downpour_settings import DownpourSettings
from tests.distbelief.jobs import speech
from tests.simulation import test_downpour as td
from tests.simulation.dealt import DealtJob
from tests.simulation.test_local_steps import ADAMW, reference


ADD: Final = SGD(learning_rate=1.0)
RAGGED: Final = 7  # a batch; 60 samples are 8 of them and one of 4, and 30 are 4 and one of 2


def settings(every: str, **choices: object) -> DownpourSettings:
    exchange = {"every": every, "send": "delta"}
    table = {"loss": td.LEARNING.loss, "batch_size": RAGGED, "rule": ADD, "inner": ADAMW}
    table |= {"order": "parts", "exchange": exchange} | choices
    return msgspec.convert(msgspec.to_builtins(table), DownpourSettings)


@pytest.mark.parametrize(("every", "n_steps"), [("1 epoch", 9), ("2 epochs", 18)])
def test_one_blocking_replica_is_plain_training_and_exchanges_after_the_ragged_batch(
    every: str, n_steps: int
) -> None:
    """DP-2: push after frequency_num epochs."""
    config = settings(every, blocking=True, max_steps=31)
    cluster = td.Cluster(td.LEARNING, config, n_shards=2)
    cluster.run()
    in_steps = msgspec.structs.replace(config.exchange, every=n_steps)
    plain = msgspec.structs.replace(config, exchange=in_steps)
    assert td.same(cluster.values(), reference(plain, task=td.LEARNING))
    assert cluster.counters(0).pushes == -(-31 // n_steps)


def test_replicas_average_after_each_pass_over_their_own_parts() -> None:
    exchange = {"every": "1 epoch", "send": "delta", "staleness": 0, "round": {}, "weight": "mean"}
    config = settings("", exchange=exchange, max_steps=15)
    cluster = td.Cluster(td.LEARNING, config, n_replicas=2)
    cluster.run()
    in_steps = msgspec.structs.replace(config.exchange, every=5)
    plain = msgspec.structs.replace(config, exchange=in_steps)
    expected = reference(plain, task=td.LEARNING, n_replicas=2)
    for name, values in cluster.values().items():
        assert values.tolist() == pytest.approx(expected[name].tolist(), rel=1e-5, abs=1e-6)
    assert [cluster.counters(r).pushes for r in range(2)] == [3, 3]


@given(
    n_train=st.integers(3, 80),
    batch_size=st.integers(1, 9),
    n_replicas=st.integers(1, 3),
    n_epochs=st.integers(1, 3),
)
def test_exchanges_end_with_the_passes_of_each_replica(
    *, n_train: int, batch_size: int, n_replicas: int, n_epochs: int
) -> None:
    """Of parts that differ by a sample, one may have a batch more: each has steps of its own."""
    rule = SGD(learning_rate=1.0, schedule=Linear(n_pushes="6 epochs"))
    config = settings(f"{n_epochs} epochs", batch_size=batch_size, rule=rule)
    n_pushes = 0
    for replica in range(n_replicas):
        part = DataShard(n_train, replica_index=replica, n_replicas=n_replicas, seed=0)
        every = config.in_steps(part, n_replicas=n_replicas).pace.n_push
        plan = TrainingPlan(part, batch_size=batch_size)
        ends = [plan.batch(step).position for step in range(every, 6 * every + 1, every)]
        assert ends == [n * n_epochs * len(part) for n in range(1, 7)]
        n_pushes += 6 // n_epochs
    schedule = config.in_pushes(n_train, n_replicas=n_replicas).rule.schedule
    assert isinstance(schedule, Linear)
    assert schedule.n_pushes == n_pushes


@given(
    n_train=st.integers(3, 80),
    batch_size=st.integers(1, 9),
    n_replicas=st.integers(1, 3),
    every=st.sampled_from(["1 epoch", "0.5 epochs", "0.1 epochs"]),
)
def test_dealt_epochs_are_cut_into_as_many_exchanges_as_there_are_replicas(
    *, n_train: int, batch_size: int, n_replicas: int, every: str
) -> None:
    """The last one of an epoch may be short: 9 batches of 2 replicas are 5 and 4."""
    config = settings(every, batch_size=batch_size, order="dealt")
    epochs = config.epochs(n_train, None, n_replicas)
    n_batches, share = epochs.n_batches(0, n_train), Fraction(every.split(maxsplit=1)[0])
    assert epochs.n_push == max(1, -(-n_batches * share // n_replicas))
    position, n_each = 0, list[int]()
    while position < n_train:
        n_each.append(epochs.n_batches(position, epochs.stop(position)))
        position = epochs.stop(position)
    assert position == n_train
    assert {*n_each[:-1]} <= {epochs.n_push}
    assert 0 < n_each[-1] <= epochs.n_push + 1  # a single sample left joins the batch before
    if every == "1 epoch":
        assert len(n_each) <= n_replicas
    part = DataShard(n_train, replica_index=n_replicas - 1, n_replicas=n_replicas, seed=0)
    assert config.in_steps(part, n_replicas=n_replicas).pace.n_push == epochs.n_push


@pytest.mark.parametrize("faults", [[], [Kill(at=2.0, role=Address("replica-1"), after_actions=1)]])
def test_every_dealt_sample_counts_once_with_exchanges_of_a_share(faults: Sequence[Fault]) -> None:
    exchange = ExchangePolicy(every="1 epoch", send="delta")
    sgd: dict[str, object] = {"name": "SGD", "lr": 1.0}
    job = DealtJob(n_samples=65, n_epochs=6, exchange=exchange, inner=sgd, faults=faults)
    job.run()
    assert job.job.view.samples == 390
    shard = job.job.member("shard-0").role
    assert shard is not None
    # 17 batches of 3 replicas: 6, 6 and 5. Those of a killed one are cut where it had come to.
    assert shard.status()[1]["clock"] in ([18] if not faults else range(18, 24))


def answer_of(n_samples: int) -> PreflightResult:
    return PreflightResult(task=TaskFacts(train=DataFacts(n_samples=n_samples)))


def test_supervisor_and_warnings_know_the_share_of_a_job() -> None:
    job = ("algorithm.preset=dpplee3-asgd", "algorithm.batch_size=10", "cluster.replicas=4")
    one = speech(*job, "algorithm.exchange.every=1 epoch", "stop.epochs=8")
    assert 'every = "1 epoch"' in one.to_toml()
    config = supervisor_config(one, answer_of(1015))
    assert config.dealt is not None
    assert config.dealt.n_push == 26  # of 102 batches
    assert warnings_of(one, answer_of(1015)) == []
    parts = [*job, "algorithm.order=parts", "algorithm.exchange.every=9 epochs"]
    (warning,) = warnings_of(speech(*parts, "stop.epochs=8"), answer_of(1000))
    assert "every = 225 steps" in warning
    assert "they exchange nothing before the end" in warning


def test_a_stream_without_length_has_no_epochs() -> None:
    job = speech("algorithm.preset=local", "algorithm.exchange.every=1 epoch", "stop.epochs=8")
    job = msgspec.structs.replace(job, stop=msgspec.structs.replace(job.stop, epochs=None))
    with pytest.raises(JobError, match=r'every = "... epochs" is given, and the stream .* no len'):
        check_data(job, answer_of(ENDLESS))


def test_shares_that_are_not_known_are_refused() -> None:
    dealt = settings("2 epochs", order="dealt")
    with pytest.raises(JobError, match=r'samples are dealt, .*: use order = "parts", or at most'):
        DOWNPOUR.settled(dealt, ClusterTable(replicas=2))
    one = settings("1 epoch", order=None)
    with pytest.raises(JobError, match=r"has min and max, so that shares change: give replicas a"):
        DOWNPOUR.settled(one, ClusterTable(replicas=Elastic(max=2)))
    assert DOWNPOUR.settled(one, ClusterTable(replicas=2)).order == "dealt"


@pytest.mark.parametrize("every", ["0 epochs", "epoch", "1.2.3 epochs", "3 steps", "-1 epochs"])
def test_what_is_no_number_of_epochs_is_refused(every: str) -> None:
    with pytest.raises(ValueError, match='use 1 or more, "auto", or "1 epoch"'):
        ExchangePolicy(every=every)
    with pytest.raises(JobFileError, match='or "1 epoch"'):
        speech(f'algorithm.exchange.every="{every}"', "algorithm.preset=local")


def test_epochs_do_not_fit_what_needs_a_number_of_steps() -> None:
    with pytest.raises(ValueError, match=r"and rule 'adagrad' adapts its rate .*: give local_lear"):
        DownpourSettings(
            loss="mse",
            batch_size=1,
            rule=Adagrad(learning_rate=0.1),
            exchange=ExchangePolicy(every="1 epoch"),
        )
    with pytest.raises(ValueError, match=r"every '1 epoch' and .*: use quorum below 1, every of"):
        ExchangePolicy(
            every="1 epoch", send="delta", weight="mean", round=Round(quorum=0.5, early=True)
        )
