"""Runs the preflight in a process of its own, and waits for what it finds."""

import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from distbelief.config.job import Job
from distbelief.core.errors import DistBeliefError, JobError
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.launch.preflight import (
    PreflightRequest,
    PreflightResult,
    prepared_mark,
    read_result,
)
from distbelief.protocol.role import Address, PeerLost


CHECK: Final = Address("check")
CHECK_SECONDS_MAX: Final = 1800.0  # from the moment that the data are prepared

_TAIL: Final = 2000  # characters of the log that are shown
_LOOK_SECONDS: Final = 0.2  # between two looks at how far the preflight is


def run_preflight(
    launcher: LocalLauncher,
    job: Job,
    request: Path,
    *,
    initial_file: Path,
    plan: Path,
    log: Path,
    tell: Callable[[str], object],
    has_hosts: bool = False,
) -> PreflightResult:
    """Run the preflight process; return its result.

    Its result goes beside the request; `tell` receives what is being done. JobError if the user has
    to fix the job; DistBeliefError if it cannot run for another reason.
    """
    mark = prepared_mark(request)
    content = PreflightRequest(
        job=msgspec.Raw(job.to_json()),
        initial_file=str(initial_file.absolute()),
        plan=str(plan.absolute()),
        has_hosts=has_hosts,
    )
    request.write_bytes(msgspec.json.encode(content))
    launcher.check(CHECK, request)
    deadline: float | None = None
    ends: list[PeerLost] = []
    while not ends:
        if deadline is None and mark.exists():  # a download may take hours
            deadline = time.monotonic() + CHECK_SECONDS_MAX
        if deadline is not None and time.monotonic() >= deadline:
            raise JobError(
                f"the check of model and data took more than {CHECK_SECONDS_MAX:.0f} s. "
                f"The log ends:\n{_tail(log)}"
            )
        started = launcher.pid(CHECK) is not None
        stage = "Checking model and data" if deadline is not None else "Preparing data"
        tell(f"{stage if started else 'Importing torch'} ...")
        select.select([launcher.fileno()], [], [], _LOOK_SECONDS)
        ends = [e for e in launcher.events() if isinstance(e, PeerLost)]
    found = read_result(request)
    if found is None:
        reason = ends[0].reason.removesuffix(f" (see {log})")
        raise JobError(
            f"the process that checks model and data {reason}. Its log ends:\n{_tail(log)}"
        )
    if found.error is not None:
        error = (JobError if found.is_users else DistBeliefError)(found.error)
        if found.trace:
            error.add_note(found.trace)
        raise error
    return found


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL:] if log.is_file() else ""
