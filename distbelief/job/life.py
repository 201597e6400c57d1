"""One life of one run: made ready, supervised until it ends, and wound up.

    get_ready   data prepared, the job tried out, earlier lives taken up
    supervise   spec of all roles -> supervisor's node, in this thread, with the display
                in its ticks
    conclude    model, summary, and last of all the curve

This process never holds the training data or a gradient, and has no torch thread.
"""

import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, final

import msgspec
from rich.console import Console

from distbelief import files
from distbelief.errors import StorageError
from distbelief.job.configuration.jobfile import Job
from distbelief.job.configuring import check_data, supervisor_config
from distbelief.job.directory.final_files import draw_curve_of, write_model
from distbelief.job.directory.metrics import MetricsFile
from distbelief.job.directory.run_directory import RunDirectory
from distbelief.job.directory.store import SnapshotStore
from distbelief.job.directory.summary import Summary, summarise, write_summary
from distbelief.job.display.progress import Progress
from distbelief.job.display.view import SupervisorView
from distbelief.job.hosts.address import JobAddress
from distbelief.job.hosts.hosting import Hosting
from distbelief.job.hosts.on_ray import RayHosts
from distbelief.job.processes.checking import Answer
from distbelief.job.processes.launcher import Launcher
from distbelief.job.processes.process import Spec, import_from
from distbelief.job.processes.signals import EXIT_CODES, REASONS, caught_signals
from distbelief.job.processes.trying import CHECK, try_out
from distbelief.job.resuming.legacy import Legacy
from distbelief.job.resuming.resuming import begin_anew, take_up
from distbelief.job.supervision.supervisor import Supervisor
from distbelief.job.voice import Voice
from distbelief.job.watching import Watch, Watching, status_of
from distbelief.messages import Stop
from distbelief.node import Node
from distbelief.parameter_server.layout.layout import Layout
from distbelief.program.plan import load
from distbelief.roles import SUPERVISOR, USER, Received, Role
from distbelief.runtime.task.task import prepare
from distbelief.transport.places import LOOPBACK, Place
from distbelief.transport.reach import Reach
from distbelief.transport.shared_memory import FileMemory


class Detours(Protocol):
    """Lets messages of a run pass through a place where they can be hindered."""

    def through(self, name: str, endpoint: str) -> str:
        """Return where `name` is to be found, in place of `endpoint`."""
        ...

    def around(self, supervisor: Role) -> Role:
        """Return the supervisor as one who sends everybody there."""
        ...


@final
class Life:
    """One life of one run.

    Attributes:
        exit_code: As in `Run`, once it is over.
    """

    def __init__(
        self,
        job: Job,
        run: RunDirectory,
        *,
        memory: FileMemory,
        launcher: Launcher,
        console: Console,
        from_scratch: bool = False,
    ) -> None:
        self._job = job
        self._run = run
        self._memory = memory
        self._launcher = launcher
        self._from_scratch = from_scratch
        self._voice = Voice(console, run)
        self._initial_file = run.path / "initial.safetensors"
        self._store = SnapshotStore(run.snapshots, report=self._voice.alarm)
        self._answer = Answer()
        self._legacy = Legacy()
        self._layout: Layout | None = None
        self._view = SupervisorView()
        self._error: str | None = None
        self._model_error: str | None = None
        self.exit_code = 0
        self._n_ended = 0
        self._lender: RayHosts | None = None

    # ---------------------------------------------------------------- before it

    def get_ready(self) -> None:
        """Prepare data, try the job out, and see what earlier lives left.

        Raises:
            JobError: the job cannot be run.
        """
        job = self._job
        import_from(job)
        prepare(job.data.train, table="data.train")
        if job.data.test is not None:
            prepare(job.data.test, table="data.test")
        with self._run.plan_kept():
            self._try_out()
            self._take_up()
        self._run.write(self._run.job_file, job.to_toml())

    def _try_out(self) -> None:
        """Let a process try the job out; it writes the plan, if there is one."""
        with self._voice.console.status("Trying model and data ..."):
            self._answer = try_out(
                self._job,
                self._launcher,
                directory=self._memory.directory,
                initial_file=self._initial_file,
                plan=self._run.plan_file,
                log=self._run.log_file(CHECK),
            )
        check_data(self._job, self._answer)
        self._layout = Layout.of(
            self._answer.tensors, n_shards=self._job.cluster.shards, dtype=self._answer.dtype
        )

    def _take_up(self) -> None:
        assert self._layout is not None
        assert self._answer.task.train is not None
        is_split = self._answer.n_machines is not None
        if self._from_scratch:
            self._voice.announce(begin_anew(self._job, self._run))
        resumed = take_up(
            self._job,
            self._run,
            layout=self._layout,
            train=self._answer.task.train,
            report=self._voice.alarm,
            plan=load(self._run.plan_file) if is_split else None,
        )
        self._legacy, self._store = resumed.legacy, resumed.store
        for line in resumed.told:
            self._voice.announce(line)

    # ------------------------------------------------------------------ while it

    def supervise(
        self,
        watch: Watch | None = None,
        detours: Detours | None = None,
        hosting: Hosting | None = None,
    ) -> None:
        """Run the supervisor until the job ends."""
        console = self._voice.console
        config = supervisor_config(self._job, self._answer, legacy=self._legacy)
        supervisor = Supervisor(config)
        name = secrets.token_hex(16)
        own = Reach(directory=str(self._memory.directory))
        reach = own if hosting is None else hosting.reach
        transport = reach.transport(
            name=SUPERVISOR,
            incarnation=self._legacy.incarnation,
            run=name,
            log=self._voice.log if hosting is None else self._voice.heed,
            port=reach.port,
        )
        display = Progress(
            self._job.name, console=console, report_every=self._job.output.report_every
        )
        with (
            transport,
            ExitStack() as lent,
            caught_signals() as caught,
            self._voice.apart(),
            self._metrics() as metrics,
        ):
            endpoint = str(Place.parse(transport.endpoint).seen_from(LOOPBACK))
            role: Role = supervisor
            if detours is not None:
                endpoint = detours.through(SUPERVISOR, endpoint)
                role = detours.around(supervisor)
            of_roles = reach if hosting is None else hosting.reach_of_roles
            spec = self._write_spec(name, endpoint, of_roles)
            look = supervisor.view
            if hosting is not None:
                plan = None if spec.plan is None else Path(spec.plan)
                role = hosted = hosting.around(supervisor, self._job, spec, plan=plan)
                look = hosted.view
                self._invite(hosting, hosting.address(transport.endpoint), lent)
            node = Node(role, transport=transport, log=self._voice.log, launcher=self._launcher)

            def stop(number: signal.Signals) -> None:
                message = Stop(reason=REASONS[number])
                node.post(Received(sender=USER, incarnation=0, message=message))

            caught.tell = stop
            with self._shown(display):
                if console.is_terminal is False:
                    self._voice.say(f"{self._job.name}: {self._run.path}")
                watching = Watching(
                    supervisor,
                    look=look,
                    display=display,
                    metrics=metrics,
                    run=self._run,
                    name=self._job.name,
                    voice=self._voice,
                    watch=watch,
                )
                error = node.run(on_tick=lambda: self._tick(watching))
            self._view = look(time.monotonic())
        self._error = None if supervisor.interrupted else error
        if supervisor.interrupted:
            self.exit_code = EXIT_CODES.get(caught.number or signal.SIGINT, 130)
        elif error is not None:
            self.exit_code = 1

    @contextmanager
    def _metrics(self) -> Iterator[MetricsFile]:
        """Open the file; it is closed where it is written."""
        metrics = MetricsFile(self._run.metrics_file)
        metrics.open()
        try:
            yield metrics
        finally:
            self._voice.disk.write(metrics.close)

    @contextmanager
    def _shown(self, display: Progress) -> Iterator[None]:
        """Show it; it is drawn where all else is written on the screen."""
        self._voice.show(display.start)
        try:
            yield
        finally:
            self._voice.show(display.stop)

    def _invite(self, hosting: Hosting, address: JobAddress, lent: ExitStack) -> None:
        """Let other machines know where to join."""
        tell = self._voice.announce
        if address.secret:  # logs are for everybody to read
            file = self._run.address_file
            files.write_private(file, f"{address}\n".encode())
            lent.callback(file.unlink, missing_ok=True)
            self._voice.log("info", f"machines join by the address in {file}")
            tell = self._voice.say
        for line in hosting.lines(address):
            tell(line)
        machines = hosting.lent(
            self._job,
            address,
            n_machines=self._answer.n_machines or 1,
            directory=self._run.path.absolute() / "joined",
        )
        self._lender = lent.enter_context(machines)

    def _write_spec(self, name: str, endpoint: str, reach: Reach) -> Spec:
        assert self._layout is not None
        shares = self._job.cluster.shared_memory
        answer, plan = self._answer, self._run.plan_file
        spec = Spec(
            job=msgspec.Raw(self._job.to_json()),
            run=name,
            supervisor=endpoint,
            memory=str(self._memory.directory) if shares else "",
            snapshots=str(self._store.directory.absolute()),
            layout=self._layout.spec,
            initials=self._answer.initials,
            initial_file=self._answer.initial_file,
            plan=None if answer.n_machines is None else str(plan.absolute()),
            sample=answer.sample,
            n_train=None if answer.task.train is None else answer.task.train.n_samples,
            reach=reach,
        )
        # In a directory that only its user may enter: a secret may be in it.
        (self._memory.directory / ".spec.json").write_bytes(msgspec.json.encode(spec))
        return spec

    def _tick(self, watching: Watching) -> None:
        watching.tick()
        if self._launcher.n_ended != self._n_ended:
            self._n_ended = self._launcher.n_ended
            self._memory.remove_orphans()
        if self._lender is not None:
            for text in self._lender.news(time.monotonic()):
                self._voice.announce(text)

    # ------------------------------------------------------------------- after it

    def conclude(self) -> Summary:
        """Write what a run leaves behind, as far as there is anything to write."""
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
            task=self._answer.task,
            error=self._error,
            model_error=self._model_error,
        )
        self._keep(lambda: write_summary(self._run, summary))
        status = status_of(self._job.name, self._view, ended=True, error=self._error)
        write = partial(self._run.write_status, status)
        self._keep(lambda: self._voice.disk.renew("status", write))
        return summary

    def _keep(self, write: Callable[[], object]) -> None:
        """Write one of the last files; what cannot be is told, and costs no other."""
        try:
            write()
        except StorageError as error:
            self._voice.alarm(str(error))
            self.exit_code = self.exit_code or 1

    def draw(self) -> None:
        """Draw the curve, last of all."""
        self._keep(lambda: draw_curve_of(self._run, title=self._job.name))

    def __enter__(self) -> Self:
        """Begin: the supervisor's log."""
        self._voice.log("info", f"begins in {self._run.path}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove what was only for the shards' first lives."""
        self._initial_file.unlink(missing_ok=True)
