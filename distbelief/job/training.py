"""Running a job: `train` is what `distbelief train` and `distbelief.train` do.

    run directory -> fork server -> a life of the run (`life`) -> final table

Whatever happens, at the end there is no process left and no shared memory; what a crash
of the machine leaves is swept at the next start.
"""

import os
import shutil
import sys
from contextlib import ExitStack

from rich.console import Console

from distbelief.errors import JobError
from distbelief.job.configuration.jobfile import Job, load_job
from distbelief.job.directory.run import Run
from distbelief.job.directory.run_directory import RunDirectory
from distbelief.job.directory.summary import final_table, summary_text
from distbelief.job.hosts.hosting import Hosting
from distbelief.job.life import Detours, Life
from distbelief.job.processes.launcher import Launcher
from distbelief.job.processes.signals import EXIT_CODES, ended_by_signals
from distbelief.job.resuming.resuming import check_same
from distbelief.job.watching import HeldBack, Watch
from distbelief.transport.shared_memory import FileMemory


def train(  # noqa: PLR0913 -- a front door: all but the first are options
    job: Job | str | os.PathLike[str],
    *,
    resume: str | os.PathLike[str] | None = None,
    from_scratch: bool = False,
    show: bool = True,
    json: bool = False,
    launcher: Launcher | None = None,
    watch: Watch | None = None,
    detours: Detours | None = None,
    hosting: Hosting | None = None,
) -> Run:
    """Run a job in processes of this machine, and those that join, until it ends.

    Args:
        job: A job, or the path of a job file.
        resume: Run directory of an earlier run of this job, to go on with.
        from_scratch: Whether to begin anew there instead; what was saved is moved into
            aside-1 (aside-2, ...) beside it, and kept.
        show: Whether to show how it goes, on standard output.
        json: Whether to print the summary as JSON at the end.
        launcher: One that was started early, closed at the end; by default a new one.
        watch: Called with each view of the job; returns whether to end it. What it
            raises ends it, too, and is raised when everything is written.
        detours: Of all messages; by default they go straight.
        hosting: Where other machines may join it; by default none may.

    Returns:
        The run. A job that fails after it has started is no exception: see
        `summary.error`.

    Raises:
        JobError: what was given cannot be run.
        StorageError: a directory or shared memory cannot be had.
    """
    console = Console(quiet=not show)
    with ended_by_signals(), ExitStack() as stack:
        if watch is not None:
            watch = stack.enter_context(HeldBack(watch))
        # The server's import of torch takes longer than all else here.
        launcher = stack.enter_context(launcher or Launcher())
        if not isinstance(job, Job):
            job = load_job(job)
        hosting = None if hosting is None else hosting.checked()
        FileMemory.sweep()
        memory = FileMemory.make()
        stack.callback(memory.remove_all)
        if from_scratch and resume is None:
            raise JobError(
                "--from-scratch begins a run anew that there is: name its directory, "
                "as in --resume runs/speech --from-scratch"
            )
        run, is_new = _open_run(job, resume)
        stack.enter_context(run)
        launcher.serve(
            spec=memory.directory / ".spec.json",
            log_of=run.log_file,
            has_machines=job.cluster.is_split,
        )
        life = stack.enter_context(
            Life(
                job,
                run,
                memory=memory,
                launcher=launcher,
                console=console,
                from_scratch=from_scratch,
            )
        )
        try:
            life.get_ready()
        except BaseException:
            if is_new:  # a mistake leaves nothing behind
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        life.supervise(watch, detours, hosting)
        summary = life.conclude()
        if json:
            sys.stdout.write(summary_text(summary))
        else:
            console.print(final_table(summary))
        # Who interrupts wants an end now.
        if life.exit_code not in EXIT_CODES.values():
            life.draw()
    return Run(run.path, summary, life.exit_code, job)


def _open_run(job: Job, resume: str | os.PathLike[str] | None) -> tuple[RunDirectory, bool]:
    """Return the run directory, locked, and whether it is a new one."""
    if resume is None:
        return RunDirectory.create(job.output.directory), True
    run = RunDirectory.open(resume)
    try:
        check_same(job, load_job(run.job_file), directory=str(resume))
    except BaseException:
        run.close()
        raise
    return run, False
