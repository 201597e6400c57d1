"""Runs a job: the work of `distbelief train` and `distbelief.train`.

    run directory -> fork server -> get_ready -> supervise -> conclude -> final table

At the end there is no process left and no shared memory; what a power loss leaves is removed at the
next start. This process never holds the training data or a gradient, and runs no torch threads.
"""

import os
import secrets
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self, TypeVar, final

import msgspec
from rich.console import Console

from distbelief.cluster.address import JobAddress
from distbelief.cluster.listen import JoinServer
from distbelief.cluster.ray import RayHosts
from distbelief.config.algorithms import fields_of, roster_of, verdict_of
from distbelief.config.job import Job
from distbelief.config.load import load_job
from distbelief.core import files
from distbelief.core.signals import EXIT_CODES, REASONS, caught_signals, ended_by_signals
from distbelief.display.progress import ProgressLine
from distbelief.errors import DistBeliefError, JobError, StorageError
from distbelief.launch.local import LocalLauncher
from distbelief.launch.preflight import PreflightRequest, PreflightResult, read_result
from distbelief.launch.role_process import RoleSpec, import_from
from distbelief.parameter_server.layout import Layout
from distbelief.program.plan import load
from distbelief.protocol import Stop
from distbelief.roles.role import SUPERVISOR, USER, Address, PeerLost, Received, Role
from distbelief.run.checkpoints import CheckpointStore
from distbelief.run.directory import RunDirectory, Status
from distbelief.run.metrics_file import Measurement, MetricsFile
from distbelief.run.model_file import draw_curve_of, write_model
from distbelief.run.result import Run
from distbelief.run.resume import PreviousRun, check_same, resume_run, start_from_scratch
from distbelief.run.summary import Summary, final_table, summarise, summary_text, write_summary
from distbelief.run_log import RunLog
from distbelief.supervisor.config import SupervisorConfig
from distbelief.supervisor.stop_rules import StopRules
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.view import JobView
from distbelief.task.task import prepare
from distbelief.transport.address import LOOPBACK, Endpoint
from distbelief.transport.config import ListenConfig
from distbelief.transport.node import RoleRunner
from distbelief.transport.shared_memory import FileMemory


def check_data(job: Job, answer: PreflightResult) -> None:
    """Reject more replicas than there are samples.

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
    job: Job, answer: PreflightResult, *, previous: PreviousRun | None = None
) -> SupervisorConfig:
    """Return the supervisor's config, the same for processes and for virtual time.

    Args:
        job: The job.
        answer: Result of the preflight.
        previous: Previous sessions of its run.
    """
    previous = PreviousRun() if previous is None else previous
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
        first_incarnation=previous.incarnation,
        first_label=previous.label,
        before=previous.before,
        fields=fields_of(job),
        verdict=verdict_of(job),
    )


CHECK: Final = Address("check")
CHECK_SECONDS_MAX: Final = 1800.0

_TAIL: Final = 2000  # characters of the log that are shown


def run_preflight(
    job: Job, launcher: LocalLauncher, *, directory: Path, initial_file: Path, plan: Path, log: Path
) -> PreflightResult:
    """Run the preflight process; return its result.

    Args:
        job: The job.
        launcher: Starts the process.
        directory: For request and result.
        initial_file: For the module's initial values, if they are needed.
        plan: For the plan, if replicas are split.
        log: Where the process writes.

    Raises:
        JobError: the user has to fix the job.
        DistBeliefError: it cannot run for another reason.
    """
    request, answer = directory / ".question.json", directory / ".answer.json"
    content = PreflightRequest(
        job=msgspec.Raw(job.to_json()),
        answer=str(answer),
        initial_file=str(initial_file.absolute()),
        plan=str(plan.absolute()),
    )
    request.write_bytes(msgspec.json.encode(content))
    launcher.check(CHECK, request)
    deadline = time.monotonic() + CHECK_SECONDS_MAX
    ends: list[PeerLost] = []
    while not ends:
        left = deadline - time.monotonic()
        if left <= 0:
            raise JobError(
                f"the check of model and data took more than {CHECK_SECONDS_MAX:.0f} s. "
                f"The log ends:\n{_tail(log)}"
            )
        select.select([launcher.fileno()], [], [], left)
        ends = [e for e in launcher.events() if isinstance(e, PeerLost)]
    found = read_result(answer)
    if found is None:
        reason = ends[0].reason.removesuffix(f" (see {log})")
        raise JobError(
            f"the process that checks model and data {reason}. Its log ends:\n{_tail(log)}"
        )
    if found.error is not None:
        kind = JobError if found.is_users else DistBeliefError
        raise kind(found.error)
    return found


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL:] if log.is_file() else ""


STATUS_SECONDS: Final = 1.0
DRAWING_SECONDS: Final = 2.0  # of training, after which matplotlib is imported

T = TypeVar("T")
Watch = Callable[[JobView], bool]  # receives each view; returns whether to end the job


@final
class HeldCallback:
    """A callback whose error ends the job in order, and is raised at the end.

    It is raised unchanged at the end of a `with` block around the job. Until then the callback is
    not called again: it would probably fail again.

    Args:
        watch: The callback.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._error: BaseException | None = None

    def __call__(self, view: JobView) -> bool:
        if self._error is not None:
            return True
        try:
            return self._watch(view)
        except BaseException as error:  # noqa: BLE001 -- SystemExit, too, can wait
            self._error = error
            return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # It takes precedence over an error of the block, which may follow from it; Python keeps
        # that one
        # as its context.
        if self._error is not None:
            raise self._error


@final
class Callbacks:
    """Work of each tick: shows the view, writes status.json and metrics.jsonl, calls the user.

    Args:
        supervisor: Of the job.
        display: Draws it.
        metrics: Receives the measurements.
        run: Receives status.json.
        name: Of the job.
        log: Runs the writes; logs failures.
        watch: Called with each view; returns whether to end the job.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        display: ProgressLine,
        metrics: MetricsFile,
        run: RunDirectory,
        name: str,
        log: RunLog,
        watch: Watch | None,
    ) -> None:
        self._supervisor = supervisor
        self._display = display
        self._metrics = metrics
        self._run = run
        self._name = name
        self._log = log
        self._watch = watch
        self._may_draw = False
        self._status_at = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        view = self._supervisor.view(now)
        if self._watch is not None and self._watch(view):
            self._supervisor.request_stop("stopped by the caller")
        self._log.show(partial(self._display.update, view), key="view")
        for record in self._supervisor.take_records():
            measurement = Measurement.of(record)
            self._log.disk.write(partial(self._try, self._metrics.append, measurement))
        if now - self._status_at >= STATUS_SECONDS:
            self._status_at = now
            status = status_of(self._name, view)
            self._log.disk.renew("status", partial(self._try, self._run.write_status, status))
        if view.training_seconds > DRAWING_SECONDS and not self._may_draw:
            # The import takes most of a second; at the end, Ctrl+C would have to wait for it.
            self._may_draw = True
            name = "distbelief.run.plot"
            threading.Thread(target=import_module, args=(name,), daemon=True).start()

    def _try(self, write: Callable[[T], None], what: T) -> None:
        try:
            write(what)
        except StorageError as error:  # training continues without it
            self._log.warn(str(error))


def status_of(name: str, view: JobView, *, ended: bool = False, error: str | None = None) -> Status:
    return Status(
        name=name,
        pid=os.getpid(),
        written=time.time(),  # noqa: TID251 -- the time of day, for other programs
        view=view,
        ended=ended,
        error=error,
    )


class MessageProxies(Protocol):
    """Routes the messages of a run through proxies, where faults can be injected."""

    def through(self, name: str, endpoint: str) -> str: ...

    def around(self, supervisor: Role) -> Role: ...


@final
class Trainer:
    """One session of a run: prepare, supervise, conclude.

    Attributes:
        exit_code: As in `Run`, once it is over.
    """

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        *,
        memory: FileMemory,
        launcher: LocalLauncher,
        console: Console,
        from_scratch: bool = False,
    ) -> None:
        self._job = job
        self._run = run
        self._memory = memory
        self._launcher = launcher
        self._from_scratch = from_scratch
        self._log = RunLog(console, run)
        self._initial_file = run.path / "initial.safetensors"
        self._store = CheckpointStore(run.snapshots, report=self._log.warn_user)
        self._preflight = PreflightResult()
        self._previous = PreviousRun()
        self._layout: Layout | None = None
        self._view = JobView()
        self._error: str | None = None
        self._model_error: str | None = None
        self.exit_code = 0
        self._n_ended = 0
        self._ray_hosts: RayHosts | None = None

    def get_ready(self) -> None:
        """Prepare data, run the preflight, and resume previous sessions.

        Raises:
            JobError: the job cannot be run.
        """
        job = self._job
        import_from(job)
        prepare(job.data.train, table="data.train")
        if job.data.test is not None:
            prepare(job.data.test, table="data.test")
        with self._run.plan_kept():
            self._run_preflight()
            self._resume()
        self._run.write(self._run.job_file, job.to_toml())

    def _run_preflight(self) -> None:
        with self._log.console.status("Checking model and data ..."):
            self._preflight = run_preflight(
                self._job,
                self._launcher,
                directory=self._memory.directory,
                initial_file=self._initial_file,
                plan=self._run.plan_file,
                log=self._run.log_file(CHECK),
            )
        check_data(self._job, self._preflight)
        self._layout = Layout.of(
            self._preflight.tensors, n_shards=self._job.cluster.shards, dtype=self._preflight.dtype
        )

    def _resume(self) -> None:
        assert self._layout is not None
        assert self._preflight.task.train is not None
        is_split = self._preflight.n_machines is not None
        if self._from_scratch:
            self._log.announce(start_from_scratch(self._job, self._run))
        resumed = resume_run(
            self._job,
            self._run,
            layout=self._layout,
            train=self._preflight.task.train,
            report=self._log.warn_user,
            plan=load(self._run.plan_file) if is_split else None,
        )
        self._previous, self._store = resumed.previous, resumed.store
        for line in resumed.notes:
            self._log.announce(line)

    def supervise(
        self,
        watch: Watch | None = None,
        detours: MessageProxies | None = None,
        hosting: JoinServer | None = None,
    ) -> None:
        console = self._log.console
        config = supervisor_config(self._job, self._preflight, previous=self._previous)
        name = secrets.token_hex(16)
        own = ListenConfig(directory=str(self._memory.directory))
        reach = own if hosting is None else hosting.reach
        transport = reach.transport(
            name=SUPERVISOR,
            incarnation=self._previous.incarnation,
            run=name,
            log=self._log.log if hosting is None else self._log.log_link,
            port=reach.port,
        )
        display = ProgressLine(
            self._job.name, console=console, report_every=self._job.output.report_every
        )
        with (
            transport,
            ExitStack() as stack,
            caught_signals() as caught,
            self._log.in_threads(),
            self._metrics() as metrics,
        ):
            endpoint = str(Endpoint.parse(transport.endpoint).seen_from(LOOPBACK))
            if detours is not None:
                endpoint = detours.through(SUPERVISOR, endpoint)
            of_roles = reach if hosting is None else hosting.reach_of_roles
            spec = self._write_spec(name, endpoint, of_roles)
            cluster = None
            if hosting is not None:
                plan = None if spec.plan is None else Path(spec.plan)
                cluster = hosting.cluster(self._job, spec, plan=plan)
                self._accept_hosts(hosting, hosting.address(transport.endpoint), stack)
            supervisor = Supervisor(config, cluster)
            role: Role = supervisor if detours is None else detours.around(supervisor)
            node = RoleRunner(role, transport=transport, log=self._log.log, launcher=self._launcher)

            def stop(number: signal.Signals) -> None:
                message = Stop(reason=REASONS[number])
                node.post(Received(sender=USER, incarnation=0, message=message))

            caught.tell = stop
            with self._shown(display):
                if console.is_terminal is False:
                    self._log.print(f"{self._job.name}: {self._run.path}")
                callbacks = Callbacks(
                    supervisor,
                    display=display,
                    metrics=metrics,
                    run=self._run,
                    name=self._job.name,
                    log=self._log,
                    watch=watch,
                )
                error = node.run(on_tick=lambda: self._tick(callbacks))
            self._view = supervisor.view(time.monotonic())
        self._error = None if supervisor.interrupted else error
        if supervisor.interrupted:
            self.exit_code = EXIT_CODES.get(caught.number or signal.SIGINT, 130)
        elif error is not None:
            self.exit_code = 1

    @contextmanager
    def _metrics(self) -> Iterator[MetricsFile]:
        metrics = MetricsFile(self._run.metrics_file)
        metrics.open()
        try:
            yield metrics
        finally:
            self._log.disk.write(metrics.close)

    @contextmanager
    def _shown(self, display: ProgressLine) -> Iterator[None]:
        self._log.show(display.start)
        try:
            yield
        finally:
            self._log.show(display.stop)

    def _accept_hosts(self, hosting: JoinServer, address: JobAddress, stack: ExitStack) -> None:
        tell = self._log.announce
        if address.secret:  # everybody may read logs
            file = self._run.address_file
            files.write_private(file, f"{address}\n".encode())
            stack.callback(file.unlink, missing_ok=True)
            self._log.log("info", f"hosts join by the address in {file}")
            tell = self._log.print
        for line in hosting.lines(address):
            tell(line)
        machines = hosting.ray_hosts(
            self._job,
            address,
            n_machines=self._preflight.n_machines or 1,
            directory=self._run.path.absolute() / "joined",
        )
        self._ray_hosts = stack.enter_context(machines)

    def _write_spec(self, name: str, endpoint: str, reach: ListenConfig) -> RoleSpec:
        assert self._layout is not None
        shares = self._job.cluster.shared_memory
        answer, plan = self._preflight, self._run.plan_file
        spec = RoleSpec(
            job=msgspec.Raw(self._job.to_json()),
            run=name,
            supervisor=endpoint,
            memory=str(self._memory.directory) if shares else "",
            snapshots=str(self._store.directory.absolute()),
            layout=self._layout.spec,
            initials=self._preflight.initials,
            initial_file=self._preflight.initial_file,
            plan=None if answer.n_machines is None else str(plan.absolute()),
            sample=answer.sample,
            n_train=None if answer.task.train is None else answer.task.train.n_samples,
            reach=reach,
        )
        # It may contain a secret; only the user may enter this directory.
        (self._memory.directory / ".spec.json").write_bytes(msgspec.json.encode(spec))
        return spec

    def _tick(self, callbacks: Callbacks) -> None:
        callbacks.tick()
        if self._launcher.n_ended != self._n_ended:
            self._n_ended = self._launcher.n_ended
            self._memory.remove_orphans()
        if self._ray_hosts is not None:
            for text in self._ray_hosts.news(time.monotonic()):
                self._log.announce(text)

    def conclude(self) -> Summary:
        """Write model, summary and final status; return the summary."""
        self._launcher.close()
        try:
            assert self._layout is not None
            write_model(self._job, self._run, layout=self._layout, store=self._store)
        except StorageError as error:
            self._model_error = f"no model was written: {error}"
        if self._model_error is not None and self.exit_code == 0:
            self._error, self.exit_code = self._model_error, 1
            self._view = replace(self._view, phase="failed", error=self._error)
        summary = summarise(
            self._job,
            self._view,
            directory=str(self._run.path),
            task=self._preflight.task,
            error=self._error,
            model_error=self._model_error,
        )
        self._try_write(lambda: write_summary(self._run, summary))
        status = status_of(self._job.name, self._view, ended=True, error=self._error)
        write = partial(self._run.write_status, status)
        self._try_write(lambda: self._log.disk.renew("status", write))
        return summary

    def _try_write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except StorageError as error:
            self._log.warn_user(str(error))
            self.exit_code = self.exit_code or 1

    def draw(self) -> None:
        self._try_write(lambda: draw_curve_of(self._run, title=self._job.name))

    def __enter__(self) -> Self:
        self._log.log("info", f"begins in {self._run.path}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._initial_file.unlink(missing_ok=True)


def train(  # noqa: PLR0913 -- a front door: all but the first are options
    job: Job | str | os.PathLike[str],
    *,
    resume: str | os.PathLike[str] | None = None,
    from_scratch: bool = False,
    show: bool = True,
    json: bool = False,
    launcher: LocalLauncher | None = None,
    watch: Watch | None = None,
    detours: MessageProxies | None = None,
    hosting: JoinServer | None = None,
) -> Run:
    """Run a job in processes of this host, and of hosts that join, until it ends.

    Args:
        job: A job, or the path of a job file.
        resume: Run directory of an earlier run of this job.
        from_scratch: Whether to start again there; earlier files are moved into aside-1 (aside-2,
            ...) in it.
        show: Whether to show progress on standard output.
        json: Whether to print the summary as JSON at the end.
        launcher: One that was started early, closed at the end; by default a new one.
        watch: Called with each view of the job; returns whether to end it. If it raises, the job
            ends in order and the error is raised then.
        detours: Proxies for all messages; by default there are none.
        hosting: How other hosts may join; by default they may not.

    Returns:
        The run. A job that fails after its start raises nothing: see `summary.error`.

    Raises:
        JobError: the job cannot be run.
        StorageError: a directory or shared memory cannot be created.
    """
    console = Console(quiet=not show)
    with ended_by_signals(), ExitStack() as stack:
        if watch is not None:
            watch = stack.enter_context(HeldCallback(watch))
        # First, because the server's import of torch takes longest.
        launcher = stack.enter_context(launcher or LocalLauncher())
        if not isinstance(job, Job):
            job = load_job(job)
        hosting = None if hosting is None else hosting.checked()
        FileMemory.sweep()
        memory = FileMemory.make()
        stack.callback(memory.remove_all)
        if from_scratch and resume is None:
            raise JobError(
                "--from-scratch needs the run to start again: add --resume, "
                "as in --resume runs/speech --from-scratch"
            )
        run, is_new = _open_run(job, resume)
        stack.enter_context(run)
        launcher.serve(
            spec=memory.directory / ".spec.json",
            log_of=run.log_file,
            has_ranks=job.cluster.is_split,
        )
        trainer = stack.enter_context(
            Trainer(
                job,
                run,
                memory=memory,
                launcher=launcher,
                console=console,
                from_scratch=from_scratch,
            )
        )
        try:
            trainer.get_ready()
        except BaseException:
            if is_new:  # a rejected job leaves no directory
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        trainer.supervise(watch, detours, hosting)
        summary = trainer.conclude()
        if json:
            sys.stdout.write(summary_text(summary))
        else:
            console.print(final_table(summary))
        # After an interrupt, do not spend time on the curve.
        if trainer.exit_code not in EXIT_CODES.values():
            trainer.draw()
    return Run(run.path, summary, trainer.exit_code, job)


def _open_run(job: Job, resume: str | os.PathLike[str] | None) -> tuple[RunDirectory, bool]:
    if resume is None:
        return RunDirectory.create(job.output.directory), True
    run = RunDirectory.open(resume)
    try:
        check_same(job, load_job(run.job_file), directory=str(resume))
    except BaseException:
        run.close()
        raise
    return run, False
