"""Tries out whether the roles of a run can be built on this host, before any is begun.

The program that the fork server runs as "prepare": it imports what the job names, if
this machine's user has allowed that, and lets the data be prepared, once, before roles
would do so side by side. What is wrong is written to a file beside the spec.
"""

import os
import traceback
from pathlib import Path

import torch

from distbelief import files
from distbelief.errors import DistBeliefError, JobError
from distbelief.job.configuration.jobfile import job_from_json
from distbelief.job.configuration.sections import Job
from distbelief.job.processes.allowing import check_allowed
from distbelief.job.processes.process import import_from, log, read_spec
from distbelief.runtime.task.imports import place
from distbelief.runtime.task.task import prepare


VERDICT_BYTES_MAX = 1 << 16


def verdict_file(spec: Path) -> Path:
    """Return where what is wrong is written; empty: nothing."""
    return spec.with_name(".verdict")


def main(name: str, incarnation: int, path: str) -> int:
    """Try it out; return the process's exit status."""
    log(name, incarnation, "info", f"process {os.getpid()} begins")
    try:
        spec = read_spec(path)
        job = job_from_json(bytes(spec.job))
        import_from(job)
        _try(job, spec.allowed or ())
        wrong = ""
    except DistBeliefError as error:
        wrong = str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code
        traceback.print_exc()  # to the log
        wrong = f"{type(error).__name__}: {error}{place(error)}"
    files.write(verdict_file(Path(path)), wrong.encode()[:VERDICT_BYTES_MAX])
    log(name, incarnation, "info", f"ends: {wrong or 'nothing is wrong'}")
    return 0


def _try(job: Job, allowed: tuple[str, ...]) -> None:
    check_allowed(job, allowed)
    if job.cluster.device == "cuda" and not torch.cuda.is_available():
        raise JobError(
            f"the job wants a GPU ([cluster] device = {job.cluster.device!r}), and "
            f"torch {torch.__version__} sees none here"
        )
    prepare(job.data.train, table="data.train")
    if job.data.test is not None:
        prepare(job.data.test, table="data.test")
