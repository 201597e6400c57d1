"""Model and data of a job, tried out in a process of their own before it starts."""

import select
import time
from pathlib import Path
from typing import Final

import msgspec

from distbelief.errors import DistBeliefError, JobError
from distbelief.job.configuration.sections import Job
from distbelief.job.processes.checking import Answer, Question, read_answer
from distbelief.job.processes.launcher import Launcher
from distbelief.roles import Address, PeerLost


CHECK: Final = Address("check")
CHECK_SECONDS_MAX: Final = 1800.0

_TAIL: Final = 2000  # characters of the log that are shown


def try_out(
    job: Job, launcher: Launcher, *, directory: Path, initial_file: Path, plan: Path, log: Path
) -> Answer:
    """Try model and data out, in a process of its own; return what was found.

    Args:
        job: The job.
        launcher: Starts the process.
        directory: For question and answer.
        initial_file: For the module's initial values, where they are needed.
        plan: For the plan, where replicas are split over machines.
        log: Where the process writes.

    Raises:
        JobError: the job cannot be run.
        DistBeliefError: nor can it, for a reason that is not the user's.
    """
    question, answer = directory / ".question.json", directory / ".answer.json"
    content = Question(
        job=msgspec.Raw(job.to_json()),
        answer=str(answer),
        initial_file=str(initial_file.absolute()),
        plan=str(plan.absolute()),
    )
    question.write_bytes(msgspec.json.encode(content))
    launcher.check(CHECK, question)
    deadline = time.monotonic() + CHECK_SECONDS_MAX
    ends: list[PeerLost] = []
    while not ends:
        left = deadline - time.monotonic()
        if left <= 0:
            raise JobError(
                f"model and data could not be tried out in {CHECK_SECONDS_MAX:.0f} s. "
                f"The log ends:\n{_tail(log)}"
            )
        select.select([launcher.fileno()], [], [], left)
        ends = [e for e in launcher.events() if isinstance(e, PeerLost)]
    found = read_answer(answer)
    if found is None:
        reason = ends[0].reason.removesuffix(f" (see {log})")
        raise JobError(
            f"the process that tried out model and data {reason}. Its log ends:\n{_tail(log)}"
        )
    if found.error is not None:
        kind = JobError if found.is_users else DistBeliefError
        raise kind(found.error)
    return found


def _tail(log: Path) -> str:
    """Return the end of a log; with the error that tells it the log is removed."""
    return log.read_text(errors="replace")[-_TAIL:] if log.is_file() else ""
