"""Jobs that keep the values of their best evaluation, and end when it is not beaten."""

import math

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional

from distbelief.config.job import StopTable
from distbelief.parameter_server.layout import Layout
from distbelief.protocol.role import BEST, SUPERVISOR, Address
from distbelief.simulation.faults import DiskFull, Drop, Fault, Kill
from distbelief.supervisor.metrics import PreviousTotals
from distbelief.task.task import build_dataset, build_model
from distbelief.worker.evaluator import held_out, kept_in
from tests.simulation.jobs import TASK, JobCluster, scattered, seeds


EVALUATOR = Address("evaluator")
BY_LOSS = msgspec.structs.replace(TASK, metric="loss")


def keeping(stop: StopTable, *faults: Fault, seed: int = 0) -> JobCluster:
    return JobCluster(stop=stop, task=BY_LOSS, keeps_best=True, faults=list(faults), seed=seed)


def measured_again(job: JobCluster) -> float:
    """Return the loss of the kept values, by plain torch."""
    kept = job.newest(EVALUATOR)
    one = Layout.of(job.layout.tensors, n_shards=1)
    module, values = build_model(TASK.model), scattered(one, [kept.arrays["values"]])
    module.load_state_dict(
        {name: values[name].view_as(tensor) for name, tensor in module.state_dict().items()}
    )
    assert TASK.test is not None
    data, (usual, _) = build_dataset(TASK.test), held_out(50, subset=20)
    pairs = [data[int(index)] for index in usual]
    inputs, targets = (torch.as_tensor(np.stack(part)) for part in zip(*pairs, strict=True))
    with torch.no_grad():
        return float(functional.cross_entropy(module.eval()(inputs), targets))


@pytest.mark.parametrize(
    "faults",
    [
        (),
        (Kill(at=2.3, role=EVALUATOR), Kill(at=4.1, role=EVALUATOR)),
        (Drop(probability=0.4, between=(SUPERVISOR, EVALUATOR)),),
        (Kill(at=3.0, role=Address("shard-0")), Kill(at=3.6, role=EVALUATOR)),
    ],
    ids=["none", "killed", "words lost", "with a shard"],
)
@pytest.mark.parametrize("seed", seeds(1, of=2))
def test_what_is_kept_is_the_best_evaluation_whatever_fails(
    faults: tuple[Fault, ...], seed: int
) -> None:
    job = keeping(StopTable(epochs=13), *faults, seed=seed)
    assert job.run() is None
    kept = kept_in(job.newest(EVALUATOR))
    seen = [point.metric for point in job.view.history[:-1] if point.metric is not None]
    assert seen
    assert kept.n_samples == 20
    assert kept.metric <= min(seen)
    assert math.isclose(measured_again(job), kept.metric, rel_tol=1e-6)


def test_a_full_disk_is_told_and_the_next_best_values_are_saved() -> None:
    job = keeping(StopTable(epochs=25), DiskFull(at=0.0, seconds=7.0))
    assert job.run() is None
    assert any(text.startswith("the best values so far could not") for text in job.messages)
    assert job.newest(EVALUATOR).label == BEST
    assert math.isclose(measured_again(job), kept_in(job.newest(EVALUATOR)).metric, rel_tol=1e-6)


def test_patience_ends_a_job_that_does_not_get_better() -> None:
    # Of the accuracy of 20 samples many evaluations are equal.
    job = JobCluster(stop=StopTable(patience=3))
    assert job.run() is None
    assert "in 3 evaluations (a larger patience goes on)" in (job.view.stop_reason or "")
    found = [point.metric for point in job.view.history if point.metric is not None]
    assert job.view.metric_to_beat == max(found[:-1])


def test_evaluations_come_after_as_many_samples_as_asked_for() -> None:
    job = JobCluster(stop=StopTable(epochs=12), evaluate_samples=120, evaluate_every=math.inf)
    assert job.run() is None
    # The last multiple is the end, after which all samples are measured.
    assert job.member("evaluator").status()[1]["evaluations"] == 12 * 60 / 120
    # A resumed job, or one taken over, goes on from the next multiple.
    again = JobCluster(
        stop=StopTable(epochs=12),
        evaluate_samples=120,
        evaluate_every=math.inf,
        before=PreviousTotals(samples={"replica-0": 250, "replica-1": 250}),
    )
    assert again.run() is None
    assert again.member("evaluator").status()[1]["evaluations"] == 2
