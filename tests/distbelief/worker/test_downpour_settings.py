"""The settings of a replica: when it fetches and pushes; invalid values."""

import math

import msgspec
import pytest

from distbelief.config.job import FIT_MAX, ClusterTable, Elastic
from distbelief.core.errors import JobError, JobFileError
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import SGD, Adagrad
from distbelief.parameter_server.schedules import InverseTime
from distbelief.worker.downpour import DOWNPOUR
from distbelief.worker.downpour_settings import DownpourSettings, LockFree
from distbelief.worker.exchange import Pace


def test_fetches_and_pushes_begin_at_step_0() -> None:
    """DB-6."""
    policy = Pace(n_fetch=3, n_push=2)
    assert [s for s in range(8) if policy.fetches_before(s)] == [0, 3, 6]
    assert [s for s in range(8) if policy.pushes_after(s)] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("policy", "waits", "during_push", "during_other"),
    [
        (Pace(), False, True, True),
        (Pace(blocking=True), True, False, False),
        (Pace(n_push=2), True, False, True),
        (Pace(n_fetch=2), True, False, False),
        (Pace(n_push=2, overwrite_local_steps=True), False, True, True),
    ],
)
def test_a_fetch_waits_for_pushes_if_it_could_lose_or_repeat_a_step(
    policy: Pace, *, waits: bool, during_push: bool, during_other: bool
) -> None:
    """DB-11."""
    assert policy.awaits_pushes is waits
    assert policy.may_fetch(unacknowledged=1, during=3) is not waits
    assert policy.may_fetch(unacknowledged=0, during=2) is during_push
    assert policy.may_fetch(unacknowledged=0, during=3) is during_other


def settings(**fields: object) -> DownpourSettings:
    usual = {"loss": "", "batch_size": 1, "rule": SGD(learning_rate=0.5)}
    return DownpourSettings(**usual | fields)  # type: ignore[arg-type] # any field


def test_local_steps_follow_the_schedule() -> None:
    own = settings(rule=SGD(learning_rate=0.5, schedule=InverseTime(n_pushes=10)))
    assert [own.rate(clock) for clock in (0, 10)] == [0.5, 0.25]
    assert settings(local_learning_rate=0.1).rate(10) == 0.1
    assert settings(rule=Adagrad(learning_rate=0.5)).rate(0) == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, 0) for name in ("batch_size", "max_steps", "non_finite_limit")],
        *[(name, 0) for name in ("n_fetch", "n_push")],
        *[("clip_norm", value) for value in (0.0, math.inf)],
        *[("epoch_share", value) for value in (0.0, 1.5)],
    ],
)
def test_a_bad_value_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field} is {value}; use"):
        settings(**{field: value})


def test_samples_are_dealt_unless_the_job_says_otherwise() -> None:
    """By default a dead replica's part was read by nobody, and some samples counted twice."""
    exchange = ExchangePolicy(every="auto", send="delta")
    given = settings(exchange=exchange, inner={"name": "SGD", "lr": 0.1})
    for config in (settings(), given, settings(epoch_share=0.75)):
        assert DOWNPOUR.settled(config, ClusterTable(replicas=2)).order == "dealt"
    assert DOWNPOUR.settled(settings(order="parts"), ClusterTable()).order == "parts"
    with pytest.raises(ValueError, match=r'epoch_share is 0.75 and order is "parts"'):
        settings(epoch_share=0.75, order="parts")


def test_replicas_that_come_and_go_need_dealt_data() -> None:
    elastic = ClusterTable(replicas=Elastic(min=2, max=4))
    DOWNPOUR.settled(settings(order="dealt"), elastic)
    with pytest.raises(
        JobError, match=r"replicas has min and max, and \[algorithm\] order is .part"
    ):
        DOWNPOUR.settled(settings(order="parts"), elastic)
    split = ClusterTable(replicas=Elastic(min=2, max=4), partitions=2)
    with pytest.raises(JobError, match=r"replicas has min and max, and partitions or plan .* give"):
        DOWNPOUR.settled(settings(order="dealt"), split)


def test_split_replicas_are_dealt_samples_if_they_are_split_alike() -> None:
    for partitions, order in ((2, "dealt"), ((2, 2), "dealt"), ((1, 2), "parts")):
        cluster = ClusterTable(replicas=2, partitions=partitions)
        assert DOWNPOUR.settled(settings(), cluster).order == order
    ssp = settings(exchange=ExchangePolicy(staleness=0))
    assert DOWNPOUR.settled(ssp, ClusterTable(partitions=2)).order == "parts"
    with pytest.raises(JobError, match=r'order is "dealt", exchange.staleness 0, and'):
        DOWNPOUR.settled(msgspec.structs.replace(ssp, order="dealt"), ClusterTable(partitions=2))
    with pytest.raises(JobError, match=r'order is "dealt", and .* partitions \[1, 2\] splits'):
        DOWNPOUR.settled(settings(order="dealt"), ClusterTable(replicas=2, partitions=(1, 2)))


def test_as_many_as_fit_are_bounded() -> None:
    table = ClusterTable(replicas=Elastic(min=3), threads=2)
    assert (table.n_replicas, table.replicas_min) == (FIT_MAX, 3)
    assert table.fitted(n_cores=16).n_replicas == 8
    assert table.fitted(n_cores=1).n_replicas == 3
    assert ClusterTable(replicas=2).fitted(n_cores=16).n_replicas == 2
    with pytest.raises(JobFileError, match="min = 5 and max = 4: wants no more"):
        Elastic(min=5, max=4)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"batch_size": 2}, "threads is 3, and a step of batch_size 2 has 2 small batches"),
        ({"lockfree": LockFree(threads=3, samples=8)}, "has 2 small batches: use a larger"),
        ({"inner": {"name": "AdamW"}}, "inner is AdamW, whose state threads cannot share"),
        ({"inner": {"name": "SGD", "momentum": 0.9}}, "inner is SGD, momentum, whose state"),
        (
            {"inner": None, "exchange": ExchangePolicy(staleness=0, round=Round(), route="ring")},
            'lockfree is given and exchange.route is "ring"',
        ),
        (
            {"inner": None, "exchange": ExchangePolicy(), "rule": Adagrad(learning_rate=0.1)},
            "rule 'adagrad' has no rate for steps of a replica: give local_learning_rate",
        ),
    ],
)
def test_threads_without_locks_are_refused_where_they_cannot_work(
    fields: dict[str, object], why: str
) -> None:
    usual: dict[str, object] = {
        "batch_size": 16,
        "lockfree": LockFree(threads=3),
        "exchange": ExchangePolicy(send="delta"),
        "inner": {"name": "SGD", "lr": 0.1, "weight_decay": 0.1},
    }
    settings(**usual)
    with pytest.raises(ValueError, match=why):
        settings(**usual | fields)


def test_threads_without_locks_are_of_whole_replicas() -> None:
    given = settings(batch_size=4, lockfree=LockFree(threads=4))
    with pytest.raises(JobError, match=r"lockfree is given, and \[cluster\] partitions"):
        DOWNPOUR.settled(given, ClusterTable(partitions=2))


@pytest.mark.parametrize("name", ["threads", "samples"])
def test_a_bad_number_of_threads_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; use 1 or more"):
        LockFree(**{"threads": 1} | {name: 0})
