"""The job file's side: settings, roster, roles, what an end means."""

from collections.abc import Mapping

import msgspec
import pytest

from distbelief.config.job import Job
from distbelief.config.load import parse_job
from distbelief.core.errors import JobFileError, LocalProtocolError
from distbelief.core.memory import PrivateMemory
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.shard import Shard
from distbelief.task.task import BuildContext, DataSpec, ModelSpec, TaskSpec
from distbelief.worker import build as wb
from distbelief.worker.replica import Replica
from sandblaster.algorithm import SANDBLASTER, reason_of
from sandblaster.chunks import COORDINATOR
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.optimizers.descent import ConjugateGradient, GradientDescent
from sandblaster.optimizers.lbfgs import LBFGS
from sandblaster.optimizers.owlqn import OWLQN
from sandblaster.optimizers.termination import Reason
from sandblaster.settings import SandblasterSettings
from sandblaster.warm_start_worker import WarmStartWorker
from tests.simulation.sandblasts import Sandblast


JOB = """
[model]
factory = "experiments.digits.digits:net"
[data.train]
factory = "experiments.digits.digits:images"
[algorithm]
name = "sandblaster"
loss = "cross_entropy"
"""


def settings(**keys: object) -> SandblasterSettings:
    return msgspec.convert({"loss": "mse", **keys}, SandblasterSettings)


@pytest.mark.parametrize(
    ("keys", "method"),
    [
        ({}, LBFGS()),
        ({"history": 3, "l2": 0.5}, LBFGS(history=3, l2=0.5)),
        ({"tolerance": 0.1}, LBFGS(tolerance=0.1)),
        (
            {"method": "conjugate-gradient", "max_iterations": 7},
            ConjugateGradient(max_iterations=7),
        ),
        ({"method": "gradient-descent", "max_evaluations": 7}, GradientDescent(max_evaluations=7)),
        (
            {"method": "owl-qn", "l1": 0.1, "value_tolerance": 0.0},
            OWLQN(l1=0.1, value_tolerance=0.0),
        ),
    ],
)
def test_the_table_names_a_method(keys: Mapping[str, object], method: object) -> None:
    assert settings(**keys).chosen() == method


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"history": 0}, "history is 0; use 1 or more"),
        ({"portion": -1}, "portion is -1; use 1 or more"),
        ({"l2": -0.5}, "l2 is -0.5; use a finite number, 0 or more"),
        ({"tolerance": float("inf")}, "tolerance is inf; use a finite number"),
        ({"seed": -1}, "seed is -1; use 0 or more"),
        ({"l1": 0.1}, "l1 is 0.1 with method 'l-bfgs'"),
        (
            {"history": 3, "method": "conjugate-gradient"},
            "history is 3 with method 'conjugate-gradient', .* or remove history",
        ),
        (
            {"history": 3, "method": "gradient-descent"},
            "history is 3 with method 'gradient-descent', which",
        ),
        (
            {"method": "owl-qn"},
            "l1 is 0.0 with method 'owl-qn'.*: use l1 above 0, or method = \"l-bfgs\"",
        ),
        ({"method": "newton"}, "method is 'newton'. It knows l-bfgs, conj"),
        ({"method": "lbfgs"}, "method is 'lbfgs'. Did you mean 'l-bfgs'?"),
        ({"method": "L-BFGS-B"}, "method is 'L-BFGS-B'. Did you mean 'l-bfgs'?"),
        ({"method": "CG"}, "method is 'CG'. Did you mean 'conjugate-gradient'?"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name_and_value(
    keys: Mapping[str, object], text: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=text):
        settings(**keys)


def test_what_has_the_effect_it_says_is_not_refused() -> None:
    """Job files of runs name every key, so those with its default must be read."""
    assert settings(method="conjugate-gradient", history=10).history == 10


def test_chunks_are_as_large_as_balance_allows() -> None:
    def chunk_size(n_examples: int, n_replicas: int, **keys: object) -> int:
        chunk_sizes = settings(**keys).chunk_sizes(n_examples=n_examples, n_replicas=n_replicas)
        return chunk_sizes.chunk_size

    assert chunk_size(1_000_000, 2) == 4096  # large enough for any push
    assert chunk_size(20_000, 4) == 1024
    assert chunk_size(20_000, 4, portion=100) == 1200
    assert chunk_size(1000, 4) == 256  # at least one mini-batch
    assert chunk_size(1000, 4, portion=10) == 60
    assert chunk_size(20_000, 2) == 2048
    assert chunk_size(1_000_000, 2, portions_per_set=3) == 768


def job(more: str = "") -> Job:
    return parse_job(JOB + more, path="job.toml")


def test_a_job_without_stop_rules_ends_by_itself() -> None:
    read = job("max_iterations = 40\nhistory = 5")
    assert read.stop.is_empty
    assert read.batch_size == 256  # the dry run computes one mini-batch


WARM_TABLE = """
[algorithm.warm_start]
samples = 1000
batch_size = 20
rule = { name = "sgd", learning_rate = 0.1 }
"""


@pytest.mark.parametrize(
    ("tables", "text"),
    [(f"{WARM_TABLE}[cluster]\npartitions = 2", "needs replicas of one process: remove it")],
)
def test_a_cluster_that_it_cannot_use_is_refused(tables: str, text: str) -> None:
    with pytest.raises(JobFileError, match=text):
        job(tables)


@pytest.mark.parametrize(
    "keys",
    [
        {"history": 3},
        {"history": 5},
        {"bounds": "of the test.safetensors", "history": 3},
        {"method": "owl-qn", "l1": 1e-3, "history": 3},
        {"method": "conjugate-gradient"},
        {"method": "gradient-descent"},
    ],
)
def test_a_forecast_knows_how_many_vectors_a_shard_holds(keys: Mapping[str, object]) -> None:
    config = settings(**keys)
    chosen = msgspec.structs.replace(config.chosen(), tolerance=1e-14, max_iterations=14)
    run = Sandblast(method=chosen, saves=(0.03, 0.08))
    run.play()
    commands = run.role("shard-0", Shard)._commands
    n_held = len(commands._vector_store._arrays) + commands._sums.n_vectors
    assert n_held <= SANDBLASTER.facts(config).n_vectors <= n_held + 3


def test_shards_may_have_two_copies() -> None:
    roster = wb.roster_of(job("[cluster]\nshard_copies = 2"), ranks=(1,))
    assert [name for name, kind in roster if kind == "shard"] == ["shard-0", "shard-0b"]


def test_a_replica_may_have_several_ranks() -> None:
    read = job("[cluster]\npartitions = 2")
    assert read.cluster.is_split
    assert wb.roster_of(read, ranks=(2,)) == [
        ("shard-0", "shard"),
        ("coordinator", "coordinator"),
        ("replica-0.0", "replica"),
        ("replica-0.1", "rank"),
    ]


def context(*, n_train: int | None = 1437) -> BuildContext:
    task = TaskSpec(
        model=ModelSpec(factory="experiments.digits.digits:net"),
        train=DataSpec(factory="experiments.digits.digits:images", arguments={"part": "train"}),
        test=DataSpec(factory="experiments.digits.digits:images", arguments={"part": "test"}),
        loss="cross_entropy",
    )
    return BuildContext(
        task=task,
        layout=Layout.of([TensorSpec(name="a", shape=(130,))], n_shards=2),
        n_replicas=2,
        n_shards=2,
        seed=0,
        memory=PrivateMemory(),
        n_train=n_train,
    )


def test_every_role_of_the_roster_can_be_built() -> None:
    config = settings()
    roster = wb.roster(n_replicas=2, n_shards=2, coordinator=COORDINATOR)
    built = [
        type(SANDBLASTER.build(entry.name, config=config, context=context()))
        for entry in roster
        if not entry.name.startswith("replica")
    ]
    assert built == [Shard] * 2 + [Coordinator, Replica]
    assert [entry.kind for entry in roster] == [
        "shard",
        "shard",
        "coordinator",
        "replica",
        "replica",
        "evaluator",
    ]


WARM_START = {"samples": 1000, "batch_size": 20, "rule": {"name": "sgd", "learning_rate": 0.1}}


def test_a_warm_start_is_sgd_of_replica_0() -> None:
    config = settings(warm_start=WARM_START)
    assert config.warm_start is not None
    first = config.warm_start.downpour(loss="mse", seed=4, n_replicas=3)
    assert (first.max_steps, first.blocking) == (50, True)
    built = [
        SANDBLASTER.build(name, config=config, context=context())
        for name in ("replica-0", "replica-1")
    ]
    assert list(map(type, built)) == [WarmStartWorker, Replica]


def test_in_a_warm_start_of_all_shards_have_its_rule_and_replicas_an_equal_share() -> None:
    config = settings(warm_start=WARM_START | {"replicas": "all"})
    assert config.warm_start is not None
    first = config.warm_start.downpour(loss="mse", seed=4, n_replicas=3)
    assert (first.max_steps, first.batch_size, first.seed) == (17, 20, 4)
    replica = SANDBLASTER.build("replica-1", config=config, context=context())
    assert isinstance(replica, WarmStartWorker)
    shard = SANDBLASTER.build("shard-0", config=config, context=context())
    assert isinstance(shard, Shard)
    coordinator = SANDBLASTER.build("coordinator", config=config, context=context())
    assert isinstance(coordinator, Coordinator)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"samples": 0}, "samples is 0; use 1 or more"),
        ({"batch_size": 0}, "batch_size is 0; use 1 or more"),
        ({"n_push": 0}, "n_push is 0; use 1 or more"),
    ],
)
def test_a_warm_start_that_cannot_be_is_refused(keys: Mapping[str, object], text: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=text):
        settings(warm_start={**WARM_START, **keys})


@pytest.mark.parametrize("name", ["shard-2", "replica-2", "replica-x", "coordinator-1", "worker"])
def test_no_other_role_can(name: str) -> None:
    with pytest.raises(LocalProtocolError, match=f"no role '{name}' in a job of 2"):
        SANDBLASTER.build(name, config=settings(), context=context())


def test_a_coordinator_without_n_train_counts_the_samples_itself() -> None:
    built = SANDBLASTER.build("coordinator", config=settings(), context=context(n_train=None))
    assert isinstance(built, Coordinator)
    assert built._n_examples == 1437


@pytest.mark.parametrize(
    ("reason", "iteration", "failed"),
    [
        (Reason.CONVERGED_GRADIENT, 9, False),
        (Reason.MAX_ITERATIONS, 9, False),
        (Reason.NOT_FINITE, 0, True),
        (Reason.LINE_SEARCH_FAILED, 0, True),
        (Reason.LINE_SEARCH_FAILED, 9, False),
        (Reason.NO_FINITE_TRIAL, 9, True),
    ],
)
def test_each_reason_has_its_verdict(
    reason: Reason,
    iteration: int,
    failed: bool,  # noqa: FBT001 -- a parameter
) -> None:
    index = float(list(Reason).index(reason))
    verdict = SANDBLASTER.facts(settings()).verdict(
        {"reason": index, "iteration": float(iteration)}
    )
    assert verdict.reason == reason.sentence
    assert verdict.failed == failed


def test_a_coordinator_without_last_counters_was_stopped() -> None:
    assert reason_of({}) is Reason.STOPPED
    assert reason_of({"reason": 99.0}) is Reason.STOPPED
