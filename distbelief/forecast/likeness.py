"""Which jobs do the same work, so that what one was measured to take holds for another.

Jobs are alike by what their files say, and by the source of what they name: the same
factory may make another net today, or beside another job file.
"""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec

from distbelief.job.configuration.sections import Job
from distbelief.job.processes.process import import_from


def likeness(job: Job) -> str:
    """Return a hash of all that the time of a job's work depends on, but the host."""
    task, cluster = job.task, job.cluster
    import_from(job)
    test = "" if task.test is None else task.test.factory
    named = [task.model.factory, task.train.factory, test, task.loss, task.metric or ""]
    what = (
        task,
        job.algorithm_name,
        job.batch_size,
        cluster.threads,
        cluster.shared_memory,
        (cluster.partitions, cluster.plan, cluster.device),
        os.cpu_count(),
        _sources(named),
    )
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:16]


def _sources(named: Iterable[str]) -> list[str]:
    """Return a hash of the source of each module that "MODULE:NAME" names."""
    modules = sorted({name.partition(":")[0] for name in named if ":" in name})
    return [_source(module) for module in modules]


def _source(module: str) -> str:
    with suppress(ImportError, ValueError, OSError):  # trying the job out tells of it
        spec = find_spec(module)
        if spec is not None and spec.origin is not None:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    return ""
