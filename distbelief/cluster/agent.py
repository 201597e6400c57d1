"""The agent on a host: offers it to a job, and runs the processes of the roles assigned to it.

    OFFERING --Assignments--> PROBING --rate--> READING --job spec--> PREPARING --> READY
        ^  |                                                                          |
        |  +--> over: nothing listens where its job did                               |
        +----------------- Release, or silence of the supervisor ---------------------+

DIRECTORY/RUN/logs/ROLE.log       log of each role
DIRECTORY/RUN/snapshots/          checkpoints of shards that ran here
(shared memory)/.spec.json        what the processes of roles read
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final

import msgspec

from distbelief.cluster.bootstrap import (
    PROBE,
    BandwidthProbe,
    FileDownload,
    patience_of,
    read_job_spec,
    relocated,
)
from distbelief.core import files
from distbelief.errors import DistBeliefError, JobError, RemoteProtocolError
from distbelief.launch.local import LocalLauncher
from distbelief.launch.preflight import VERDICT_BYTES_MAX, verdict_file
from distbelief.protocol import (
    Assignments,
    FileChunk,
    HostReport,
    Message,
    Offer,
    Release,
    RoleEnded,
    Stop,
)
from distbelief.roles.role import (
    SUPERVISOR,
    USER,
    Action,
    Address,
    Compute,
    Computed,
    Event,
    Exit,
    Launch,
    PeerLost,
    Received,
    Report,
    Seconds,
    Send,
    SetTimer,
    Started,
    Terminate,
    TimerFired,
    message_types,
)
from distbelief.transport.config import ListenConfig
from distbelief.transport.shared_memory import FileMemory


@dataclass(frozen=True, kw_only=True)
class HostAgentConfig:
    """What a host offers, and its time limits."""

    label: str  # name for display
    endpoint: str = ""  # where the driver can be reached ("" in a simulation)
    cores: int  # cores for the run's roles
    memory_bytes: int
    devices: tuple[str, ...] = ()  # "cuda" for each GPU
    flops: float = 0.0  # operations a second of one core, as measured; 0.0: not measured
    stays: bool = False  # whether it waits for another job when one is over
    returns: bool = False  # whether a job used this host before, at another address
    heartbeat_seconds: Seconds = 0.5  # between two reports to the supervisor
    # Silence of the supervisor after which the host offers itself again; a run with a longer
    # patience goes on meanwhile
    silence_seconds_max: Seconds = 15.0
    wait_seconds_max: Seconds = 600.0  # for a job to take it
    leave_seconds_max: Seconds = 30.0  # for its roles to be moved when the user asks it to leave
    # Silence after which a job whose port is closed is over; until then a supervisor that died may
    # be restarted
    over_seconds: Seconds = 60.0

    def offer(self, incarnation: int) -> Offer:
        return Offer(
            incarnation=incarnation,
            label=self.label[:128],
            endpoint=self.endpoint,
            cores=self.cores,
            memory_bytes=self.memory_bytes,
            devices=self.devices,
            flops=self.flops,
        )


PREPARE: Final = Address("prepare")  # the preflight process: can the run's roles be built here?

_REASON_MAX: Final = 2048
_NAME: Final = re.compile(r"[a-z]{1,32}(-\d{1,9})?(\.\d{1,9})?")


@final
class RunningRoles:
    """The processes of one host, in all its incarnations.

    `Assignments` is the complete list: a process that is not in it is ended, a role without a
    process is started, once. So a lost message costs half a second. A process may outlive its
    assignment; no other one of its name starts before it has ended.
    """

    def __init__(self) -> None:
        self._assigned: dict[Address, int] = {}
        self._running: dict[Address, int] = {}  # also of earlier incarnations, until they end
        self._ended: dict[Address, RoleEnded] = {}  # kept until they are no longer assigned

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def ended(self) -> tuple[RoleEnded, ...]:
        return tuple(self._ended.values())

    def is_over(self, name: Address, incarnation: int) -> bool:
        """Return whether this role is assigned and its process has ended."""
        ended = self._ended.get(name)
        return ended is not None and ended.incarnation == incarnation

    def prepare(self, incarnation: int) -> list[Action]:
        """Start `PREPARE` for an incarnation of the host, unless an older one must end first."""
        if PREPARE in self._running:
            return []
        self._running[PREPARE] = incarnation
        return [Launch(name=PREPARE, incarnation=incarnation)]

    def assign(self, message: Assignments) -> None:
        """Store the roles assigned to this host; `reconcile` acts on them.

        Raises:
            RemoteProtocolError: a role name is invalid.
        """
        self._assigned = {_role(duty.name): duty.incarnation for duty in message.assignments}
        self._ended = {
            name: ended
            for name, ended in self._ended.items()
            if self._assigned.get(name) == ended.incarnation
        }

    def reconcile(self) -> list[Action]:
        """End what is not assigned; start what is and has not been started."""
        actions: list[Action] = [
            Terminate(name=name)
            for name, incarnation in self._running.items()
            if self._assigned.get(name) != incarnation
        ]
        for name, incarnation in self._assigned.items():
            # An older one ends first.
            if name not in self._running and not self.is_over(name, incarnation):
                self._running[name] = incarnation
                actions.append(Launch(name=name, incarnation=incarnation))
        return actions

    def lose(self, event: PeerLost) -> bool:
        """Handle the end of a process; return whether it was one of these."""
        if self._running.get(event.peer) != event.incarnation:
            return False
        del self._running[event.peer]
        if self._assigned.get(event.peer) == event.incarnation:
            self._ended[event.peer] = RoleEnded(
                name=event.peer, incarnation=event.incarnation, reason=event.reason[:_REASON_MAX]
            )
        return True

    def drop(self) -> list[Action]:
        """Forget all assignments and end all processes."""
        self._assigned, self._ended = {}, {}
        return self.end()

    def end(self) -> list[Action]:
        return [Terminate(name=name) for name in self._running]


def _role(name: str) -> Address:
    if _NAME.fullmatch(name) is None or name == PREPARE:
        raise RemoteProtocolError(f"a host cannot run a role {name!r:.80}")
    return Address(name)


JOB_SPEC: Final = "brief"  # document name of the job spec

_TIMER: Final = "host:beat"
_STORE: Final = "host:store"
_VERDICT: Final = "host:verdict"
_ALONE_SECONDS: Final = 3.0


class HostStorage(Protocol):
    """Stores what a host receives for a run. Called as work, never concurrently."""

    def store_job_spec(self, job_spec: bytes) -> Seconds:
        """Check a run's job spec, and write the files that the processes of roles read.

        Returns:
            How long roles of that run wait for a silent supervisor.

        Raises:
            DistBeliefError: this host cannot serve that run.
        """
        ...

    def verdict(self) -> str | None: ...


HostMessage = Assignments | Release | FileChunk | Stop


@final
class HostAgent:
    """The role `host-...`: offers this host, and serves one job at a time.

    * A host that hears nothing from the supervisor for as long as the job allows ends all its roles
      and offers itself again, so a job without supervisor leaves nothing behind. It sends offers
      long before that: a supervisor of another run takes the host at once.
    * If the supervisor is silent (`is_supervisor_silent`), the driver checks whether anything
      listens at its address, and posts `PeerLost` if not: the last `Release` may have been lost.
    * Messages carry the host's incarnation; those of an older one are ignored.
    * Asked to leave, a host waits a little until its roles have been moved; asked twice, it ends.

    Args:
        config: What it offers.
        storage: Where it stores what it receives.
    """

    accepts: Final = message_types(HostMessage)

    def __init__(self, config: HostAgentConfig, *, storage: HostStorage) -> None:
        self._config = config
        self._storage = storage
        self._life = 0
        self._run: str | None = None  # whose roles it runs
        self._was_taken = config.returns  # by a job, in this incarnation or an earlier one
        self._message_at: Seconds = 0.0  # last message of the supervisor, to any incarnation
        self._probe: BandwidthProbe | None = None  # while it runs
        self._bandwidth = 0.0  # of the link, as measured
        self._download: FileDownload | None = None  # download of the job spec
        self._ready = False
        self._to_prepare = False  # as soon as an older process has ended
        self._refusal: str | None = None
        self._leaves_at: Seconds | None = None  # deadline, once it was asked to leave
        self._roles = RunningRoles()
        self._patience: Seconds = config.silence_seconds_max
        self._heard_at: Seconds = 0.0
        self._offered_since: Seconds = 0.0
        self._beat_at: Seconds = 0.0

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        match event:
            case Started():
                self._beat_at = self._message_at = now
                return [*self._restart(now), *self._beat(now)]
            case TimerFired(name=name) if name == _TIMER:
                return self._beat(now)
            case Computed():
                return self._computed(event, now)
            case PeerLost():
                is_head = event.peer == SUPERVISOR
                return self._supervisor_gone(event, now) if is_head else self._process_ended(event)
            case Received():
                return self._received(event, now)
            case _:
                return []

    def status(self) -> tuple[str, dict[str, float]]:
        """Return the state of the host, and how many roles run."""
        if self._leaves_at is not None:
            state = "leaving"
        elif self._run is None:
            state = "offering"
        else:
            state = "ready" if self._ready else "preparing"
        return state, {"roles": float(self._roles.n_running)}

    @property
    def is_offering(self) -> bool:
        return self._run is None

    @property
    def was_taken(self) -> bool:
        return self._was_taken

    def is_supervisor_silent(self, now: Seconds) -> bool:
        """Return whether a job that has taken this host is silent now."""
        was_of_one = self._was_taken and not self._config.stays
        return was_of_one and now - self._message_at > _ALONE_SECONDS

    def _received(self, event: Received, now: Seconds) -> list[Action]:
        if event.sender == USER:
            return self._leave(event.message, now)
        if event.sender == SUPERVISOR:
            return self._dispatch(event.message, now)
        return []

    def _beat(self, now: Seconds) -> list[Action]:
        delay = max(0.0, now - self._beat_at)
        self._heard_at += delay
        self._beat_at = now + self._config.heartbeat_seconds
        timer = SetTimer(name=_TIMER, at=self._beat_at)
        if self._leaves_at is not None and now >= self._leaves_at:
            return self._exit("the roles of this host could not be moved in time")
        if self._run is None:
            return [*self._offer(now), timer]
        silent = now - self._heard_at
        if silent > self._patience:
            if self._leaves_at is not None:
                return self._exit(None)
            text = (
                f"no message from the supervisor for {silent:.1f} s: all roles ended; "
                "waiting for it to return"
            )
            report = Report(text=text, level="warning")
            return [report, *self._restart(now), *self._offer(now), timer]
        actions: list[Action] = [self._report(), *self._repeat_requests(now), timer]
        if silent > self._config.silence_seconds_max:
            actions.append(_to_supervisor(self._config.offer(self._life)))
        return actions

    def _repeat_requests(self, now: Seconds) -> list[Action]:
        if self._probe is not None:
            return self._probe_done(self._probe) if self._probe.is_late(now) else []
        again = None if self._download is None else self._download.ask_again()
        return [] if again is None else [_to_supervisor(again)]

    def _offer(self, now: Seconds) -> list[Action]:
        config = self._config
        waited = now - self._offered_since
        if waited > config.wait_seconds_max:
            return self._exit(f"no job has taken this host in {waited:.0f} s")
        return [_to_supervisor(config.offer(self._life))]

    def _supervisor_gone(self, event: PeerLost, now: Seconds) -> list[Action]:
        silent = now - self._message_at
        if not self.is_supervisor_silent(now) or silent < self._config.over_seconds:
            return []
        text = f"{event.reason}: the job is over; this host does not know how it ended"
        return [Report(text=text, level="warning"), *self._exit(None)]

    def _report(self) -> Send:
        report = HostReport(
            incarnation=self._life,
            ready=self._ready,
            leaving=self._leaves_at is not None,
            refusal=self._refusal,
            bandwidth=self._bandwidth,
            ended=self._roles.ended,
        )
        return _to_supervisor(report)

    def _restart(self, now: Seconds) -> list[Action]:
        self._life += 1
        self._run = self._download = self._probe = self._refusal = None
        self._ready = self._to_prepare = False
        self._patience = self._config.silence_seconds_max
        self._offered_since = now
        return self._roles.drop()

    def _exit(self, error: str | None) -> list[Action]:
        return [*self._roles.end(), Exit(error=error)]

    def _leave(self, message: Message, now: Seconds) -> list[Action]:
        if not isinstance(message, Stop):
            raise RemoteProtocolError(f"the user sent {type(message).__name__}")
        if self._run is None or self._leaves_at is not None:
            return self._exit(None)
        self._leaves_at = now + self._config.leave_seconds_max
        text = f"{message.reason}: leaving once the roles of this host have been moved"
        return [Report(text=text), self._report()]

    def _dispatch(self, message: Message, now: Seconds) -> list[Action]:
        self._message_at = now
        match message:
            case Assignments():
                return self._assigned(message, now)
            case Release():
                return self._released(message, now)
            case FileChunk():
                return self._take_chunk(message, now)
            case _:
                raise RemoteProtocolError(f"the supervisor sent a host {type(message).__name__}")

    def _assigned(self, message: Assignments, now: Seconds) -> list[Action]:
        if message.incarnation != self._life:
            return []
        if self._run not in {None, message.run}:  # the supervisor of another run
            return [*self._restart(now), *self._offer(now)]
        self._heard_at = now
        if self._run is None:
            self._run, self._was_taken = message.run, True
            self._probe = BandwidthProbe(begun_at=now)
            asks = [_to_supervisor(ask) for ask in self._probe.ask(now)]
            return [Report(text=f"run {message.run}"), *asks]
        self._roles.assign(message)
        return self._reconcile()

    def _released(self, message: Release, now: Seconds) -> list[Action]:
        if message.incarnation != self._life:
            return []
        if self._leaves_at is not None:
            return self._exit(None)
        sent_away = message.refused or self._refusal is not None
        if not (message.again or self._config.stays):
            if sent_away:
                return self._exit(message.reason)
            return [Report(text=f"released: {message.reason}"), *self._exit(None)]
        report = Report(text=f"offering again: {message.reason}")
        if sent_away:
            text = f"rejected: {message.reason}; waiting for another job"
            report = Report(text=text, level="warning")
        return [report, *self._restart(now), *(self._offer(now) if message.again else ())]

    def _take_chunk(self, chunk: FileChunk, now: Seconds) -> list[Action]:
        if chunk.document == PROBE:
            if self._probe is None:
                return []
            self._heard_at = now
            asks = self._probe.take(chunk, now)
            if self._probe.is_over:
                return self._probe_done(self._probe)
            return [_to_supervisor(ask) for ask in asks]
        download = self._download
        if download is not None:  # a duplicate counts too: it shows that the link works
            self._heard_at = now
        if download is None or not download.take(chunk):
            return []
        content = download.content
        if content is None:
            return [_to_supervisor(download.ask())]
        name = f"{_STORE}:{self._life}"
        return [Compute(name=name, work=lambda: self._storage.store_job_spec(content))]

    def _probe_done(self, probe: BandwidthProbe) -> list[Action]:
        self._probe, self._bandwidth = None, probe.rate
        self._download = FileDownload(JOB_SPEC)
        return [_to_supervisor(self._download.ask())]

    def _computed(self, event: Computed, now: Seconds) -> list[Action]:
        what, _, incarnation = event.name.rpartition(":")
        if incarnation != str(self._life):
            return []
        if event.error is not None:
            return self._refuse(event.error)
        if what == _STORE:
            assert isinstance(event.result, float), event.result
            self._patience = max(self._patience, event.result)
            return self._prepare()
        if event.result is not None:
            return self._refuse(DistBeliefError(str(event.result)))
        self._ready = True
        self._heard_at = max(self._heard_at, now)
        return [Report(text="ready"), self._report()]

    def _refuse(self, error: BaseException) -> list[Action]:
        text = str(error)
        if not isinstance(error, DistBeliefError):
            text = f"{type(error).__name__}: {text}"
        self._refusal = text[:8192]
        return [Report(text=text, level="error"), self._report()]

    def _prepare(self) -> list[Action]:
        launches = self._roles.prepare(self._life)
        self._to_prepare = not launches
        return launches

    def _reconcile(self) -> list[Action]:
        return self._roles.reconcile() if self._ready else []

    def _process_ended(self, event: PeerLost) -> list[Action]:
        if not self._roles.lose(event):
            return []
        if event.peer == PREPARE:
            return self._prepared(event.incarnation)
        is_duty = self._roles.is_over(event.peer, event.incarnation)
        return [self._report()] if is_duty else self._reconcile()

    def _prepared(self, incarnation: int) -> list[Action]:
        if self._to_prepare:
            return self._prepare()
        if incarnation != self._life:
            return []
        name = f"{_VERDICT}:{self._life}"
        return [Compute(name=name, work=self._storage.verdict)]


def _to_supervisor(message: Message) -> Send:
    return Send(receiver=SUPERVISOR, message=message)


N_SIBLINGS_MAX: Final = 10_000  # run directories of one host


@dataclass(frozen=True, kw_only=True)
class AgentStorageConfig:
    """Paths and limits of a host."""

    supervisor: str  # its address, with its key
    reach: ListenConfig  # where roles of this host listen
    allowed: tuple[str, ...]  # modules whose functions a job may name
    code: Path  # directory of their modules and of the job's files
    directory: Path  # for logs and checkpoints


@final
class AgentStorage:
    """Files and shared memory of one host, for one run at a time."""

    def __init__(self, config: AgentStorageConfig, *, launcher: LocalLauncher) -> None:
        self._config = config
        self._launcher = launcher
        self._memory: FileMemory | None = None
        self._spec = Path()

    def store_job_spec(self, job_spec: bytes) -> Seconds:
        self.clear()
        received = read_job_spec(job_spec)
        patience = patience_of(received.spec.job)
        directory = _new_run_directory(self._config.directory)
        memory = self._memory = FileMemory.make()
        plan = None
        if received.plan is not None:
            plan = memory.directory / ".plan.json"
            files.write(plan, received.plan.encode())
        spec = msgspec.structs.replace(
            received.spec,
            job=relocated(received.spec.job, self._config.code),
            supervisor=self._config.supervisor,
            memory=str(memory.directory) if received.shares else "",
            snapshots=str(directory / "snapshots"),
            initial_file=None,
            plan=None if plan is None else str(plan),
            reach=self._config.reach,
            allowed=self._config.allowed,
        )
        self._spec = memory.directory / ".spec.json"
        # It may contain a secret; only the user may enter this directory.
        self._spec.write_bytes(msgspec.json.encode(spec))
        logs = directory / "logs"
        self._launcher.serve(
            spec=self._spec, log_of=lambda name: logs / f"{name}.log", has_ranks=plan is not None
        )
        return patience

    def verdict(self) -> str | None:
        try:
            with verdict_file(self._spec).open("rb") as file:
                text = file.read(VERDICT_BYTES_MAX).decode(errors="replace")
        except FileNotFoundError:
            return f"trying out the job failed here: see {self._config.directory}"
        except OSError as error:
            raise files.explained(error, self._spec, doing="read") from error
        return text or None

    def clear(self) -> None:
        """Remove the shared memory of the previous run."""
        if self._memory is not None:
            self._memory.remove_all()
            self._memory = None


@final
class AgentLauncher:
    """Starts the processes of roles, and the preflight process, on a host."""

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher

    def launch(self, name: Address, incarnation: int) -> None:
        if name == PREPARE:
            self._launcher.prepare(name, incarnation)
        else:
            self._launcher.launch(name, incarnation)

    def terminate(self, name: Address) -> None:
        self._launcher.terminate(name)

    def fileno(self) -> int:
        return self._launcher.fileno()

    def events(self) -> Sequence[Event]:
        return self._launcher.events()


def _new_run_directory(directory: Path) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number in range(1, N_SIBLINGS_MAX):
            candidate = directory / str(number)
            with suppress(FileExistsError):  # perhaps made just now, by another join
                candidate.mkdir()
                (candidate / "logs").mkdir()
                return candidate
    except OSError as error:
        raise files.explained(error, directory, doing="make a directory in") from error
    raise JobError(f"{directory} has {N_SIBLINGS_MAX} runs: remove some")
