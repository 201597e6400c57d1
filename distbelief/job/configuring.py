"""What the supervisor of a job is told: made from the job, and from what was found.

So it is told the same whether the job runs in processes or in virtual time.
"""

from distbelief.errors import JobError
from distbelief.job.configuration.algorithms import fields_of, roster_of, verdict_of
from distbelief.job.configuration.sections import Job
from distbelief.job.processes.checking import Answer
from distbelief.job.resuming.legacy import Legacy
from distbelief.job.supervision.stop_rules import StopRules
from distbelief.job.supervision.supervisor_config import SupervisorConfig


def check_data(job: Job, answer: Answer) -> None:
    """Refuse more replicas than there are samples.

    Raises:
        JobError: it names both numbers.
    """
    train = answer.task.train
    if train is not None and 1 < job.cluster.replicas > train.n_samples:
        raise JobError(
            f"[cluster] replicas = {job.cluster.replicas}, but [data.train] "
            f"has {train.n_samples} samples: each replica needs at least one"
        )


def supervisor_config(
    job: Job, answer: Answer, *, legacy: Legacy | None = None
) -> SupervisorConfig:
    """Return what the supervisor of this job is told.

    Args:
        job: The job.
        answer: What was found when it was tried out.
        legacy: Of former lives of its run.
    """
    legacy = Legacy() if legacy is None else legacy
    roster = roster_of(job, n_machines=answer.n_machines)
    assert answer.task.train is not None
    return SupervisorConfig(
        roster=tuple((entry.name, entry.kind) for entry in roster),
        stop=StopRules(
            job.stop,
            n_train=answer.task.train.n_samples,
            metric_name=answer.metric_name,
            higher_is_better=answer.higher_is_better,
            has_test=job.data.test is not None,
        ),
        metric_name=answer.metric_name,
        higher_is_better=answer.higher_is_better,
        batch_size=job.batch_size,
        warm_start_steps=getattr(job.algorithm, "warm_start_steps", 0),
        evaluate_every=job.evaluation.every,
        snapshot_every=job.output.snapshot_every,
        report_every=job.output.report_every,
        first_incarnation=legacy.incarnation,
        first_label=legacy.label,
        before=legacy.before,
        fields=fields_of(job),
        verdict=verdict_of(job),
    )
