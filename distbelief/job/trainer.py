"""Runs a job: the work of `distbelief train` and `distbelief.train`.

    run directory -> fork server -> get_ready -> supervise -> conclude -> final table

At the end there is no process left and no shared memory; what a power loss leaves is removed at the
next start. If this process is killed, roles go on for a while, and another one takes over
(`LiveRun`). This process never holds the training data or a gradient, and starts no torch threads;
of the user's code it runs callbacks only.
"""

import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Self, final

import msgspec
from rich.console import Console
from torch import nn

from distbelief.config.algorithms import facts_of, find
from distbelief.config.job import Job
from distbelief.config.load import job_from_json, job_of, load_job
from distbelief.config.presets import KNOBS
from distbelief.core import files
from distbelief.core.arguments import checked
from distbelief.core.drawing import import_for_drawing
from distbelief.core.errors import JobError, StorageError
from distbelief.core.folders import LocalFolder
from distbelief.core.signals import EXIT_CODES, REASONS, caught_signals, ended_by_signals
from distbelief.job.callbacks import Callbacks, HeldCallback, named_callbacks
from distbelief.job.display.progress import ProgressLine
from distbelief.job.hosts.bootstrap import JobAddress
from distbelief.job.hosts.join_server import HostSource, JoinServer
from distbelief.job.launch.local import LocalLauncher
from distbelief.job.launch.preflight import PreflightResult
from distbelief.job.launch.preflight_client import CHECK, run_preflight
from distbelief.job.launch.role_process import RoleSpec, import_from, import_paths
from distbelief.job.launch.supervised_job import check_data, supervisor_config, warnings_of
from distbelief.job.run.checkpoints import CheckpointStore
from distbelief.job.run.directory import RunDirectory, Status
from distbelief.job.run.folders import absolute
from distbelief.job.run.metrics_file import Measurement, MetricsFile, draw_curve, read_metrics
from distbelief.job.run.model_file import ModelSource, write_best, write_model
from distbelief.job.run.result import Run
from distbelief.job.run.resume import (
    PreviousRun,
    check_same,
    checkpoint_set_of,
    formed_before,
    newest_checkpoint_set,
    resume_run,
    start_from_scratch,
    store_of,
    write_checkpoint_set,
)
from distbelief.job.run.summary import Summary, final_table, summarise, summary_text
from distbelief.job.run_log import RunLog
from distbelief.job.takeover import HANDOVER, QUESTION, ROLE_SPEC, LiveRun
from distbelief.parameter_server.layout import Layout
from distbelief.plans.plan import load
from distbelief.protocol.role import SUPERVISOR, Role
from distbelief.supervisor.handover import handover_of
from distbelief.supervisor.supervisor import Supervisor
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.supervisor.view import JobView
from distbelief.task.imports import check_is_no_import, installed_imports
from distbelief.transport.address import LOOPBACK, Endpoint
from distbelief.transport.file_server import FileServer
from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.node import RoleRunner
from distbelief.transport.shared_memory import FileMemory
from distbelief.worker.evaluator import Kept


STATUS_SECONDS: Final = 1.0
DRAWING_SECONDS: Final = 2.0  # of training, after which matplotlib is imported

Around = Callable[[Role], Role]
Beside = Callable[[Path], AbstractContextManager[None]]


@final
class Trainer:
    """One session of a run: prepare, supervise, conclude."""

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        *,
        memory: FileMemory,
        launcher: LocalLauncher,
        console: Console,
    ) -> None:
        self._job = job
        self._run = run
        self._memory = memory
        self._launcher = launcher
        self._console = console
        tell = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        self._log = RunLog(run.log_file(SUPERVISOR), SUPERVISOR, tell=tell)
        self._initial_file = run.path / "initial.safetensors"
        self._store = CheckpointStore(run.snapshots, report=self._log.warn_user)
        self._preflight = PreflightResult()
        self._forms = False  # whether replicas are still to be formed
        self._previous = PreviousRun()
        self._layout: Layout | None = None
        self._metrics = MetricsFile(run.metrics_file)
        report_every = job.output.report_every
        self._display = ProgressLine(job.name, console=console, report_every=report_every)
        self._view = JobView()
        self._status_at = 0.0
        self._n_dealt = 0
        self._may_draw = False
        self._error: str | None = None
        self._model_error: str | None = None
        self._unwritten: str | None = None  # why the run directory lacks some other file
        self.exit_code = 0
        self._n_ended = 0
        self._source: HostSource | None = None  # of hosts that join
        self._live: LiveRun | None = None  # whose supervisor was killed
        self._hand_over: Callable[[], Callable[[], None]] | None = None

    # --- prepare ---

    def get_ready(
        self, *, from_scratch: bool = False, live: LiveRun | None = None, has_hosts: bool = False
    ) -> None:
        """Run the preflight, which prepares the data, and resume previous sessions."""
        job, run, log = self._job, self._run, self._log
        import_from(job)  # for `Run.model`
        if live is not None:
            self._take_over(live)
            return
        with run.plan_kept():
            with self._console.status("Starting ...") as status:
                self._preflight = found = run_preflight(
                    self._launcher,
                    job,
                    self._memory.directory / QUESTION,
                    initial_file=self._initial_file,
                    plan=run.plan_file,
                    log=run.log_file(CHECK),
                    tell=status.update,
                    has_hosts=has_hosts,
                )
            check_data(job, found)
            for warning in warnings_of(job, found):
                log.warn_user(warning)
            if found.proof:
                log.announce(found.proof)
            n_shards = job.cluster.shards
            self._layout = Layout.of(found.tensors, n_shards=n_shards, dtype=found.dtype)
            if from_scratch:
                log.announce(start_from_scratch(job, run))
            ranks = found.ranks
            if found.costs:  # the hosts that join form replicas, unless they were formed before
                ranks = formed_before(job, run, found.plans)
                self._forms = not ranks
                self._preflight = found = found.formed(ranks or found.ranks)
            assert found.task.train is not None
            resumed = resume_run(
                job,
                run,
                layout=self._layout,
                train=found.task.train,
                report=log.warn_user,
                plans=[load(found.plans[n]) for n in ranks],
                judged_by=found.judged_by,
            )
            self._previous, self._store = resumed.previous, resumed.store
            for line in resumed.notes:
                log.announce(line)
        run.write(run.job_file, job.to_toml())

    def _take_over(self, live: LiveRun) -> None:
        """Get ready to go on with the roles of a supervisor that was killed."""
        directory, was = newest_checkpoint_set(self._run)
        formed = live.found.costs and was is not None and was.ranks
        self._live, self._preflight = live, live.found.formed(formed) if formed else live.found
        self._forms = bool(live.found.costs) and not formed
        self._store = store = store_of(self._run, directory, report=self._log.warn_user)
        n_shards, handover = self._job.cluster.shards, live.handover
        self._layout = Layout.of(live.found.tensors, n_shards=n_shards, dtype=live.found.dtype)
        labels = [label for k in range(n_shards) for label in store.labels(f"shard-{k}")]
        label = max([0, *(int(label) for label in labels if label.isdigit())]) + 1
        self._previous = PreviousRun(
            before=handover.before, incarnation=handover.incarnation, label=label
        )
        self._log.announce(f"takes over {len(handover.alive)} roles whose supervisor was killed")

    # --- supervise ---

    def supervise(
        self,
        watch: HeldCallback | None = None,
        around: Around | None = None,
        hosting: JoinServer | None = None,
    ) -> None:
        config = supervisor_config(self._job, self._preflight, previous=self._previous)
        live = self._live
        name = secrets.token_hex(16) if live is None else live.spec.run
        own = ListenConfig(directory=str(self._memory.directory))
        reach = own if hosting is None else hosting.reach
        transport = reach.transport(
            name=SUPERVISOR,
            incarnation=self._previous.incarnation,
            run=name,
            log=self._log.log if hosting is None else self._log.log_link,
            port=reach.port,
        )
        if live is not None:  # left by the supervisor that was killed
            (self._memory.directory / f".{SUPERVISOR}.{transport.incarnation}").unlink(
                missing_ok=True
            )
        with (
            transport,
            ExitStack() as stack,
            caught_signals() as caught,
            self._log.in_threads(),
            self._shown(),
        ):
            endpoint = str(Endpoint.parse(transport.endpoint).seen_from(LOOPBACK))
            spec = self._write_spec(name, endpoint, hosting.reach_of_roles if hosting else reach)
            cluster, files_at = None, ""
            if hosting is not None:
                server = stack.enter_context(self._file_server(spec, reach))
                files_at = server.endpoint
                cluster = hosting.cluster(self._job, spec, files=files_at)
                cluster = replace(cluster, costs=self._preflight.costs, forms=self._forms)
                if live is not None:
                    cluster = replace(cluster, run=live.handover.run)
                self._accept_hosts(hosting, hosting.address(transport.endpoint), stack)
            supervisor = Supervisor(config, cluster, handover=live and live.handover)
            run = "" if cluster is None else cluster.run
            self._hand_over = partial(self._hand_over_of, supervisor, config, run, files_at)
            if live is None:
                self._hand_over()()
                files.write(self._run.memory_file, str(self._memory.directory).encode())
            role: Role = supervisor if around is None else around(supervisor)
            node = RoleRunner(role, transport=transport, log=self._log.log, launcher=self._launcher)

            caught.tell = lambda number: node.stop(REASONS[number])
            if self._console.is_terminal is False:
                self._log.print(f"{self._job.name}: {self._run.path}")
            error = node.run(on_tick=lambda: self.tick(supervisor, watch))
            self._view = supervisor.view(time.monotonic())
            if watch is not None:  # the last evaluation may have come since
                watch(self._view)
        if supervisor.shutdown.interrupted:
            self.exit_code = EXIT_CODES.get(caught.number or signal.SIGINT, 130)
        elif error is not None:
            self._error, self.exit_code = error, 1

    @contextmanager
    def _shown(self) -> Iterator[None]:
        self._metrics.open()
        self._log.show(self._display.start)
        try:
            yield
        finally:
            self._log.show(self._display.stop)
            self._log.disk.write(self._metrics.close)

    def _hand_over_of(
        self, supervisor: Supervisor, config: SupervisorConfig, run: str, files_at: str
    ) -> Callable[[], None]:
        """Return what writes the state that another supervisor would need."""
        state = handover_of(supervisor, config, supervisor.view(time.monotonic()))
        content = msgspec.json.encode(msgspec.structs.replace(state, run=run, files=files_at))
        return partial(files.write_private, self._memory.directory / HANDOVER, content)

    def tick(self, supervisor: Supervisor, watch: HeldCallback | None = None) -> None:
        """Show the view, write status.json and metrics.jsonl, call the user."""
        log, now = self._log, time.monotonic()
        view = supervisor.view(now)
        records = supervisor.take_records()
        answers = [] if watch is None else [watch(each) for each in (*records, view)]
        if any(answers):
            assert watch is not None
            supervisor.request_stop(watch.reason)
        log.show(partial(self._display.update, view), key="view")
        for record in records:
            log.disk.write(log.warned(partial(self._metrics.append, Measurement.of(record))))
        if self._forms and supervisor.has_begun:
            self._forms, self._status_at = False, 0.0  # the handover has other roles now
            ranks = tuple(record.ranks for record in supervisor.members.of("replica"))
            self._preflight = self._preflight.formed(ranks)
            log.disk.write(log.warned(self._keep_formed))
        dealer = supervisor.allowances.dealer
        if dealer is not None and dealer.n_dealt != self._n_dealt:
            # Another supervisor would deal again what it finds nowhere.
            self._n_dealt, self._status_at = dealer.n_dealt, 0.0
        if now - self._status_at >= STATUS_SECONDS:
            self._status_at = now
            if self._hand_over is not None:
                log.disk.renew("handover", log.warned(self._hand_over()))
            log.disk.renew("status", partial(self._keep_status, self._status(view)))
        if view.training_seconds > DRAWING_SECONDS and not self._may_draw:
            # The import takes most of a second; at the end, Ctrl+C would have to wait for it.
            self._may_draw = True
            threading.Thread(target=import_for_drawing, daemon=True).start()
        if self._launcher.n_ended != self._n_ended:
            self._n_ended = self._launcher.n_ended
            self._memory.remove_orphans()
        if self._source is not None:
            for text in self._source.news(now):
                log.announce(text)

    def _keep_status(self, status: Status) -> None:
        try:
            self._run.check()
            self._run.write_status(status)
        except StorageError as error:
            if self._unwritten is None:
                self._unwritten = str(error)
                self._log.warn_user(self._unwritten)

    def _keep_formed(self) -> None:
        """Note the ranks of replicas that were formed: a resumed run keeps them."""
        found = self._preflight
        plans = [load(found.plans[n]) for n in found.ranks]
        directory, _ = newest_checkpoint_set(self._run)
        assert found.task.train is not None
        write_checkpoint_set(directory, checkpoint_set_of(self._job, found.task.train, plans))

    def _status(self, view: JobView, *, ended: bool = False) -> Status:
        return Status(
            name=self._job.name,
            pid=os.getpid(),
            written=time.time(),  # noqa: TID251 -- the time of day, for other programs
            view=view,
            ended=ended,
            error=self._error,
        )

    def _accept_hosts(self, hosting: JoinServer, address: JobAddress, stack: ExitStack) -> None:
        tell = self._log.announce
        if address.secret:  # everybody may read logs
            file = self._run.address_file
            files.write_private(file, f"{address}\n".encode())
            stack.callback(_remove, file)
            self._log.log("info", f"hosts join by the address in {file}")
            tell = self._log.print
        for line in hosting.lines(address):
            tell(line)
        n_ranks = sum(self._preflight.ranks) or self._job.cluster.n_replicas
        log = partial(self._log.log, "info")
        self._source = source = hosting.source(self._job, n_ranks=n_ranks, log=log)
        if source is not None:
            stack.callback(source.close)
            source.start(str(address), directory=self._run.path.absolute() / "joined")

    def _write_spec(self, name: str, endpoint: str, reach: ListenConfig) -> RoleSpec:
        assert self._layout is not None
        if self._live is not None:
            return self._live.spec
        spec = msgspec.structs.replace(
            self._preflight.role_spec(self._job, self._layout),
            run=name,
            supervisor=endpoint,
            memory=str(self._memory.directory) if self._job.cluster.shared_memory else "",
            snapshots=absolute(self._store.place),
            reach=reach,
        )
        # It may contain a secret; only the user may enter this directory.
        (self._memory.directory / ROLE_SPEC).write_bytes(msgspec.json.encode(spec))
        return spec

    def _file_server(self, spec: RoleSpec, reach: ListenConfig) -> FileServer:
        folder = LocalFolder(
            self._run.snapshots if self._job.cluster.checkpoints else Path(spec.snapshots)
        )
        initial = None if spec.initial_file is None else Path(spec.initial_file)
        # The supervisor has the port of `reach`.
        port = 0 if self._live is None else Endpoint.parse(self._live.handover.files).port
        elsewhere = msgspec.structs.replace(reach, port=port)
        return FileServer(folder, initial, reach=elsewhere, run=spec.run, log=self._log.log_link)

    # --- conclude ---

    def conclude(self) -> Summary:
        """Write model, summary and final status; return the summary."""
        self._launcher.close()
        found, run = self._preflight, self._run
        assert self._layout is not None
        source = ModelSource(
            layout=self._layout, store=self._store, dtypes=found.dtypes, aliases=found.aliases
        )
        kept: list[Kept] = []
        if self._job.output.keep == "best":
            self._try_write(lambda: kept.extend(write_best(run, source)))
        try:
            write_model(self._job, run, source)
        except StorageError as error:
            self._model_error = f"no model was written: {error}"
        if self._model_error is not None and self.exit_code == 0:
            self._error, self.exit_code = self._model_error, 1
            self._view = msgspec.structs.replace(self._view, phase="failed", error=self._error)
        self._try_write(run.check)
        summary = summarise(
            self._job,
            self._view,
            directory=str(run.path),
            task=found.task,
            kept=kept[0] if kept else None,
            error=self._error,
            model_error=self._model_error,
            unwritten=self._unwritten,
        )
        self._try_write(partial(run.write, run.summary_file, summary_text(summary)))
        status = partial(run.write_status, self._status(self._view, ended=True))
        self._try_write(partial(self._log.disk.renew, "status", status))
        return msgspec.structs.replace(summary, unwritten=self._unwritten)

    def _try_write(self, write: Callable[[], object]) -> None:
        try:
            write()
        except StorageError as error:
            self._unwritten = self._unwritten or str(error)  # the final table has the first
            self._log.warn(str(error))
            self.exit_code = self.exit_code or 1

    def draw(self) -> None:
        try:
            measurements = read_metrics(self._run.metrics_file)
            draw_curve(self._run.curve_file, measurements, title=self._job.name)
        except KeyboardInterrupt:
            self._log.warn("Ctrl+C while the curve was drawn: there is none")  # but a result
        except StorageError as error:
            if self._unwritten is None:
                self._log.warn_user(str(error))
            self.exit_code = self.exit_code or 1

    def __enter__(self) -> Self:
        self._log.log("info", f"begins in {self._run.path}")
        return self

    def __exit__(self, *_: object) -> None:
        _remove(self._initial_file)
        _remove(self._run.memory_file)


def _remove(file: Path) -> None:
    with suppress(OSError):  # the disk may have become read-only
        file.unlink()


_IN_TABLES: Final = {
    "stop": ("epochs", "samples", "seconds"),
    "cluster": ("replicas", "shards", "threads"),
    "algorithm": ("batch_size", "loss", "rule", "preset", "inner"),
    "output": ("directory", "keep"),
}
_OF_THE_JOB: Final = {
    name: f'give overrides={{"{table}.{name}": ...}}'
    for table, names in _IN_TABLES.items()
    for name in names
} | {"watch": "give it in a list: callbacks=[watch]", **KNOBS}


@checked("train", _OF_THE_JOB)
def train(
    job: Job | str | os.PathLike[str] | Mapping[str, object],
    overrides: Mapping[str, object] | None = None,
    *,
    resume: str | os.PathLike[str] | None = None,
    from_scratch: bool = False,
    show: bool = True,
    callbacks: Sequence[object] = (),
) -> Run:
    """Run a job in processes of this host until it ends.

    Args:
        job: The path of a job file; or its tables, as a dictionary of dictionaries, in which paths
            start at the current directory.
        overrides: Values of single keys, as {"stop.epochs": 2, "algorithm.batch_size": 64}.
        resume: Run directory of an earlier run of this job.
        from_scratch: Whether to start again there; earlier files are moved into aside-1 (aside-2,
            ...) in it.
        show: Whether to show progress on standard output.
        callbacks: Beside those of the job file ([output] callbacks). Objects with `on_step(view)`,
            `on_evaluation(view)`, `on_checkpoint(view)`, each called once there is a new one, and
            `on_end(run)`; or functions, called with each view, a few each second. One that
            returns True, or raises StopIteration, ends the job. If one raises another error, the
            job ends in order, and its error is raised then.

    Returns:
        The run. After Ctrl+C the job ends in order, too, and `run.model` is what was learned.

    Raises:
        JobError: the job cannot be run, or it failed. What it saved is kept.
        StorageError: a directory or shared memory cannot be created.
    """
    check_is_no_import("distbelief.train")
    run = run_job(
        job,
        overrides=overrides,
        resume=resume,
        from_scratch=from_scratch,
        show=show,
        callbacks=callbacks,
    )
    return run.unless_failed("train")


def run_job(  # noqa: PLR0913 -- the options of all that run jobs
    job: Job | str | os.PathLike[str] | Mapping[str, object],
    *,
    overrides: Mapping[str, object] | None = None,
    resume: str | os.PathLike[str] | None = None,
    from_scratch: bool = False,
    show: bool = True,
    json: bool = False,
    launcher: LocalLauncher | None = None,
    callbacks: Sequence[object] = (),
    around: Around | None = None,
    hosting: JoinServer | None = None,
    module: nn.Module | None = None,
    beside: Beside | None = None,
) -> Run:
    """Run a job as `train` does; one that fails after its start raises nothing.

    Args:
        job: As of `train`, as are the next ones.
        overrides: Values of single keys.
        resume: Run directory of an earlier run.
        from_scratch: Whether to start again there.
        show: Whether to show progress.
        callbacks: Beside those of the job file.
        json: Whether to print the summary as JSON at the end.
        launcher: One that was started early, closed at the end; by default a new one.
        around: Wraps the supervisor; chaos uses it to see its events.
        hosting: How other hosts may join; by default they may not.
        module: Such as the model, if the job's factory cannot make one after the run.
        beside: What lasts from the making of the run directory to the last write, given its path.
    """
    # First, because the server's import of torch takes longest.
    with ended_by_signals(), launcher or LocalLauncher() as own_launcher:
        if isinstance(job, Mapping):
            job = job_of(job, user="job", overrides=overrides or {})
        elif not isinstance(job, Job):
            job = load_job(job, overrides=overrides or {})
        elif overrides:
            job = job_of(job.to_tables(), user="job", overrides=overrides)
        import_from(job)
        return _train(
            job,
            Callbacks([*named_callbacks(job.output.callbacks), *callbacks]),
            own_launcher,
            resume=resume,
            from_scratch=from_scratch,
            console=Console(quiet=not show),
            json=json,
            around=around,
            hosting=hosting,
            module=module,
            beside=beside,
        )


def _train(  # noqa: PLR0913 -- the options of `train`
    job: Job,
    callers: Callbacks,
    launcher: LocalLauncher,
    *,
    resume: str | os.PathLike[str] | None,
    console: Console,
    from_scratch: bool = False,
    json: bool = False,
    around: Around | None = None,
    hosting: JoinServer | None = None,
    module: nn.Module | None = None,
    beside: Beside | None = None,
) -> Run:
    with ExitStack() as stack:
        watch = stack.enter_context(HeldCallback(callers))
        hosting = None if hosting is None else hosting.checked()
        if hosting is None:
            job.cluster.check_formed()
            n_cores = len(os.sched_getaffinity(0)) // (facts_of(job).threads or 1)
            cluster = job.cluster.fitted(n_cores)
            job = msgspec.structs.replace(job, cluster=cluster)
        FileMemory.sweep()
        run, is_new = _open_run(job, resume, hosting, from_scratch=from_scratch)
        stack.enter_context(run)
        if beside is not None:
            stack.enter_context(beside(run.path))
        live = LiveRun.adopted(run, launcher)
        memory = FileMemory.make() if live is None else FileMemory.adopt(live.directory)
        stack.callback(memory.remove_all)
        hosting = hosting if live is None else live.hosting(hosting)
        paths = (path.partition(":")[0] for _, path in import_paths(job))
        modules = installed_imports(paths, job.import_paths)
        launcher.serve(
            spec=memory.directory / ROLE_SPEC,
            log_of=run.log_file,
            has_ranks=job.cluster.is_split,
            modules=(find(job.algorithm_name).module, *modules),
            patience=job.cluster.patience,
        )
        trainer = stack.enter_context(
            Trainer(job, run, memory=memory, launcher=launcher, console=console)
        )
        try:
            trainer.get_ready(from_scratch=from_scratch, live=live, has_hosts=hosting is not None)
        except BaseException:
            if is_new:  # a rejected job leaves no directory
                shutil.rmtree(run.path, ignore_errors=True)
            raise
        trainer.supervise(watch, around, hosting)
        summary = trainer.conclude()
        if json:
            sys.stdout.write(summary_text(summary))
        else:
            console.print(final_table(summary))
        if sys.stdout is not None:  # closed before Python began
            sys.stdout.flush()  # before an error, in one file too
        # After an interrupt, do not spend time on the curve.
        if trainer.exit_code not in EXIT_CODES.values():
            trainer.draw()
        done = Run(run.path, summary, trainer.exit_code, job, module)
        callers.end(done)
    return done


def _end_if_other(
    job: Job, resume: str | os.PathLike[str], hosting: JoinServer | None, *, from_scratch: bool
) -> None:
    """End a run whose roles live without supervisor in order, if they cannot go on as this job."""
    run = RunDirectory.open(resume, write=False)
    live = None if run.writer_pid() is not None else LiveRun.of(run)
    if live is None:
        return
    listens = live.listens_as(hosting)
    if live.spec.reach.host and not listens:
        raise JobError(
            f"--resume {resume}: its supervisor was killed, and its roles live, perhaps on other "
            f"hosts, too: add --listen and keys as before (it listened at {live.spec.reach.host})"
        )
    if from_scratch or not (listens and live.runs(job)):
        earlier = job_from_json(bytes(live.spec.job))

        def runs_again(view: JobView) -> bool:
            return view.phase not in {"starting", "resuming"}

        listening = hosting if listens else None
        if listening is not None and listening.started is not None:  # hosts of the new job
            listening = replace(listening, n_hosts=0, started=None)
        # Without its own callbacks: the user may have changed them, and it only ends.
        with LocalLauncher() as launcher:
            _train(
                earlier,
                Callbacks([runs_again]),
                launcher,
                resume=resume,
                console=Console(quiet=True),
                hosting=listening,
            )


def _open_run(
    job: Job,
    resume: str | os.PathLike[str] | None,
    hosting: JoinServer | None,
    *,
    from_scratch: bool,
) -> tuple[RunDirectory, bool]:
    if from_scratch and resume is None:
        raise JobError(
            "--from-scratch needs the run to start again: add --resume, "
            "as in --resume runs/speech --from-scratch"
        )
    if resume is None:
        return RunDirectory.create(job.output.directory), True
    _end_if_other(job, resume, hosting, from_scratch=from_scratch)
    run = RunDirectory.open(resume)
    try:
        check_same(job, load_job(run.job_file), directory=str(resume))
    except BaseException:
        run.close()
        raise
    return run, False
