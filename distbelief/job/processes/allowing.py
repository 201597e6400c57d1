"""What a job from another machine may call here: what this machine's user has named.

A job names functions by import path, and their arguments. Whoever may name any function
may do anything, so a host calls only functions of modules that its own user allowed:

    --allow-import experiments.speech
        experiments.speech.model:paper_net      yes
        experiments.speech:anything             yes
        experiments.speech.data:os.system       no: that is a function of os
        experiments.images.model:net            no
"""

from collections.abc import Iterator, Sequence
from typing import cast

from distbelief.errors import JobError
from distbelief.job.configuration.sections import Job
from distbelief.runtime.task.imports import resolve


def import_paths(job: Job) -> Iterator[tuple[str, str]]:
    """Yield table and path of every function that this job names."""
    yield "model", job.model.factory
    yield "data.train", job.data.train.factory
    if job.data.test is not None:
        yield "data.test", job.data.test.factory
    for table, name in (("algorithm", job.loss), ("evaluation", job.evaluation.metric)):
        if name is not None and ":" in name:
            yield table, name


def check_allowed(job: Job, allowed: Sequence[str]) -> None:
    """Refuse a job that names what this machine's user has not allowed.

    Raises:
        JobError: it names the module, and the option that would allow it.
    """
    paths = list(import_paths(job))
    for table, path in paths:  # before anything is imported
        _check(path.partition(":")[0], path, table=table, allowed=allowed)
    for table, path in paths:
        found = cast("object", resolve(path, table=table))
        module: object = getattr(found, "__module__", None)
        _check(str(module), path, table=table, allowed=allowed)


def _check(module: str, path: str, *, table: str, allowed: Sequence[str]) -> None:
    if any(module == name or module.startswith(f"{name}.") for name in allowed):
        return
    so_far = ", ".join(allowed) or "none so far"
    raise JobError(
        f"[{table}] {path!r} is a function of module {module!r}, from which this "
        f"machine's user lets nothing be called ({so_far}). If that is to be: "
        f"distbelief join ... --allow-import {module}"
    )
