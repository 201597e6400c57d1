"""What the metrics of two sessions must have in common, for best values and for patience."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from distbelief.config.job import Job
from distbelief.core.errors import JobError
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.directory import RunDirectory, Status
from distbelief.job.run.resume import Resumed, resume_run
from distbelief.job.run.summary import DataFacts
from distbelief.parameter_server.layout import Layout
from distbelief.protocol.role import BEST, Snapshot
from distbelief.supervisor.view import JobView
from distbelief.task.task import judged_by, metric_names
from distbelief.worker.group import EVALUATORS
from distbelief.worker.local_executor import FlatModel
from tests.distbelief.examples import net
from tests.distbelief.jobs import speech


def judgement(job: Job) -> str:
    table, (metric, *_) = job.evaluation, metric_names(job.task)
    return judged_by(job.task, metric, subset=table.subset, seed=table.seed)


class Sessions:
    """A run directory, in which a first session of this job has measured and kept."""

    def __init__(self, path: Path, *overrides: str) -> None:
        self.run = RunDirectory.create(path)
        self.store = CheckpointStore(self.run.snapshots, report=pytest.fail)
        first = speech(*overrides)
        self.resume(first)
        view = JobView(n_evaluations=3, metric_to_beat=1.73, judged_by=judgement(first))
        self.run.write_status(Status(name="x", pid=1, written=0.0, view=view))
        facts = {"incarnation": "1", "judged_by": judgement(first)}
        values = {"values": np.zeros(4, np.float32)}
        self.store.save(EVALUATORS, Snapshot(label=BEST, arrays=values, facts=facts))

    def resume(self, job: Job) -> Resumed:
        resumed = resume_run(
            job,
            self.run,
            layout=Layout.of(FlatModel(net()).specs(), n_shards=job.cluster.shards),
            train=DataFacts(n_samples=100),
            report=pytest.fail,
            judged_by=judgement(job),
        )
        self.run.write(self.run.job_file, job.to_toml())
        return resumed


CHANGES = {
    'evaluation.metric="loss"': "another [evaluation] metric ('accuracy', now 'loss (cross_ent",
    "evaluation.subset=3": "another [evaluation] subset (",
    "data.test.limit=3": "another [data.test] (",
}


@pytest.mark.parametrize(("change", "told"), CHANGES.items())
def test_best_values_outlast_sessions_that_keep_none_and_are_compared_with_their_like(
    tmp_path: Path, change: str, told: str
) -> None:
    """A loss of 1.73 was taken for an accuracy, after a session with keep = "last"."""
    sessions = Sessions(tmp_path / "run", 'output.keep="best"')
    sessions.resume(speech(change))  # keeps none
    with pytest.raises(JobError) as caught:
        sessions.resume(speech(change, 'output.keep="best"'))
    message = str(caught.value).replace('"', "'")
    assert f"the best values so far were judged by {told}" in message
    assert f"move {sessions.run.best_file} and {sessions.store.place}/{EVALUATORS}" in message
    sessions.resume(speech('output.keep="best"'))
    assert sessions.store.newest(EVALUATORS) is not None


@pytest.mark.parametrize(("change", "told"), CHANGES.items())
def test_a_run_says_that_patience_begins_anew(tmp_path: Path, change: str, told: str) -> None:
    sessions = Sessions(tmp_path / "run")
    assert sessions.resume(speech()).notes == ()
    (note,) = sessions.resume(speech(change)).notes
    assert note.startswith("the best metric and [stop] patience begin anew: they were of ")
    assert told in note.replace('"', "'")


def test_the_default_written_out_and_a_seed_that_selects_nothing_are_no_change(
    tmp_path: Path,
) -> None:
    sessions = Sessions(tmp_path / "run", 'output.keep="best"', "evaluation.metric='accuracy'")
    job = speech('output.keep="best"')
    open_metric = msgspec.structs.replace(
        job, evaluation=msgspec.structs.replace(job.evaluation, metric=None, seed=9)
    )
    assert sessions.resume(open_metric).notes == ()


def test_a_metric_that_is_the_loss_changes_with_the_loss() -> None:
    losses = ("cross_entropy", "multi_margin")
    own, other = (speech(f'algorithm.loss="{name}"', 'evaluation.metric="loss"') for name in losses)
    assert judgement(own) != judgement(other)
