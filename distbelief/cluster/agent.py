"""Where a host keeps what it is told of a run, and starts the processes of its roles.

DIRECTORY/RUN/logs/ROLE.log       what each role reported here
DIRECTORY/RUN/snapshots/          of shards that ran here
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


# What a machine that joins offers, and its patience.


@dataclass(frozen=True, kw_only=True)
class HostAgentConfig:
    """Of one host.

    Attributes:
        label: What people call it.
        endpoint: Where the driver can be reached ("" in a simulation).
        cores: For the run's roles.
        memory_bytes: Likewise.
        devices: Likewise: "cuda" for each.
        flops: Operations a second of one core, as measured; 0.0: they are not.
        stays: Whether it waits for another job when one is over.
        returns: Whether a job took this machine before, at another address.
        beat_seconds: Between two words to the supervisor.
        silence_seconds_max: Without a word of the supervisor, after which it offers
            itself anew; a run whose patience is greater goes on meanwhile.
        wait_seconds_max: For a job to take it.
        leave_seconds_max: For what runs here to be moved, when the user asks to leave.
        over_seconds: Without a word, after which a job whose port is shut is over: a
            supervisor that died may be started again until then.
    """

    label: str
    endpoint: str = ""
    cores: int
    memory_bytes: int
    devices: tuple[str, ...] = ()
    flops: float = 0.0
    stays: bool = False
    returns: bool = False
    beat_seconds: Seconds = 0.5
    silence_seconds_max: Seconds = 15.0
    wait_seconds_max: Seconds = 600.0
    leave_seconds_max: Seconds = 30.0
    over_seconds: Seconds = 60.0

    def offer(self, life: int) -> Offer:
        """Return what the supervisor is told.

        Args:
            life: Of the host.
        """
        return Offer(
            life=life,
            label=self.label[:128],
            endpoint=self.endpoint,
            cores=self.cores,
            memory_bytes=self.memory_bytes,
            devices=self.devices,
            flops=self.flops,
        )


# What runs on a host: a process for each duty, and one that tries the run out.
#
# Rules:
#
# * Duties say all that is to run: what is not among them is ended, what is and has not
#   been begun yet is begun, once. So a message that is lost costs half a second.
# * A process may outlive its duty, and the life of the host that it was begun in. None
#   of the same name is begun before it has ended.
# * That a process has ended is remembered as long as it is a duty: the supervisor
#   answers with another one.

PREPARE: Final = Address("prepare")
"""The process that tries out whether the run's roles can be built here."""

_REASON_MAX: Final = 2048
_NAME: Final = re.compile(r"[a-z]{1,32}(-\d{1,9})?(\.\d{1,9})?")


@final
class RunningRoles:
    """Of one host, in all its lives."""

    def __init__(self) -> None:
        self._wanted: dict[Address, int] = {}
        self._running: dict[Address, int] = {}  # of former lives, too, until they end
        self._ended: dict[Address, RoleEnded] = {}

    @property
    def n_running(self) -> int:
        """Processes that have not ended."""
        return len(self._running)

    @property
    def ended(self) -> tuple[RoleEnded, ...]:
        """Duties whose process has ended."""
        return tuple(self._ended.values())

    def is_over(self, name: Address, incarnation: int) -> bool:
        """Return whether this is a duty whose process has ended."""
        ended = self._ended.get(name)
        return ended is not None and ended.incarnation == incarnation

    def prepare(self, life: int) -> list[Action]:
        """Begin `PREPARE` for a life of the host, unless an older one has to end."""
        if PREPARE in self._running:
            return []
        self._running[PREPARE] = life
        return [Launch(name=PREPARE, incarnation=life)]

    def assign(self, message: Assignments) -> None:
        """Take over the duties of the host (`reconcile`).

        Raises:
            RemoteProtocolError: there is one that cannot be run.
        """
        self._wanted = {_role(duty.name): duty.incarnation for duty in message.duties}
        self._ended = {
            name: ended
            for name, ended in self._ended.items()
            if self._wanted.get(name) == ended.incarnation
        }

    def reconcile(self) -> list[Action]:
        """End what is not wanted, and begin what is and has not been begun."""
        actions: list[Action] = [
            Terminate(name=name)
            for name, incarnation in self._running.items()
            if self._wanted.get(name) != incarnation
        ]
        for name, incarnation in self._wanted.items():
            # An older one ends first.
            if name not in self._running and not self.is_over(name, incarnation):
                self._running[name] = incarnation
                actions.append(Launch(name=name, incarnation=incarnation))
        return actions

    def lose(self, event: PeerLost) -> bool:
        """A process has ended; return whether it was one of these."""
        if self._running.get(event.peer) != event.incarnation:
            return False
        del self._running[event.peer]
        if self._wanted.get(event.peer) == event.incarnation:
            self._ended[event.peer] = RoleEnded(
                name=event.peer, incarnation=event.incarnation, reason=event.reason[:_REASON_MAX]
            )
        return True

    def drop(self) -> list[Action]:
        """Forget all duties, and end what runs."""
        self._wanted, self._ended = {}, {}
        return self.end()

    def end(self) -> list[Action]:
        """End what runs."""
        return [Terminate(name=name) for name in self._running]


def _role(name: str) -> Address:
    """Return the name of a role that may run here: it names files, too."""
    if _NAME.fullmatch(name) is None or name == PREPARE:
        raise RemoteProtocolError(f"a host cannot run a role {name!r:.80}")
    return Address(name)


# The role of a machine that has joined: it offers itself, and is one job's at a time.
#
#     OFFERING --Duties--> PROBING --rate--> READING --brief--> PREPARING --> READY
#         ^  |                                                                  |
#         |  +--> over: nothing listens where its job did                       |
#         +----------------- Dismiss, or silence of the supervisor -------------+
#
# Rules:
#
# * Once it is ready it runs what the supervisor wants to run here (`workload`).
# * A host that hears nothing of the supervisor for as long as the job says ends all that
#   it runs and offers itself anew: a job that has lost its supervisor leaves nothing
#   behind. It offers itself long before that, while roles run on: should another
#   supervisor be there by now, whose run is another one, it takes the host at once.
# * The last word of a job may be lost, or be meant for a life that is over. So whoever
#   drives a host that hears nothing (`is_left_alone`) looks whether the supervisor is
#   there at all, and says if it is not (`PeerLost`). A link that is cut is waited for.
# * Everything that ends with a life of the host is numbered by it: words of an older
#   life mean nothing.
# * The machine's user comes first: asked to leave, a host waits until what runs here has
#   been moved, but not for long; asked twice, not at all.

BRIEF: Final = "brief"
"""The document that tells all roles of a run what to do."""

_TIMER: Final = "host:beat"
_FURNISH: Final = "host:furnish"
_VERDICT: Final = "host:verdict"
_ALONE_SECONDS: Final = 3.0


class HostStorage(Protocol):
    """Where a host keeps what it is told. Called as work, never by two at once."""

    def furnish(self, brief: bytes) -> Seconds:
        """Check a run's brief, and write down what the processes of roles will read.

        Returns:
            How long roles of that run wait for a supervisor that is silent.

        Raises:
            DistBeliefError: this machine can be of no use to that run.
        """
        ...

    def verdict(self) -> str | None:
        """Return what `PREPARE` has found wrong; None if nothing is."""
        ...


HostMessage = Assignments | Release | FileChunk | Stop


@final
class HostAgent:
    """The role `host-...`.

    Args:
        config: What it offers.
        site: Where it keeps what it is told.
    """

    accepts: Final = message_types(HostMessage)

    def __init__(self, config: HostAgentConfig, *, site: HostStorage) -> None:
        self._config = config
        self._site = site
        self._life = 0
        self._run: str | None = None  # whose duties it has
        self._was_taken = config.returns  # by a job, in this life or an earlier one
        self._word_at: Seconds = 0.0  # the supervisor's last, of whatever life
        self._probe: BandwidthProbe | None = None  # as long as that lasts
        self._bandwidth = 0.0  # of the link, as found
        self._reading: FileDownload | None = None  # its brief
        self._ready = False
        self._to_prepare = False  # as soon as an older process has ended
        self._refusal: str | None = None
        self._leaves_at: Seconds | None = None  # once it was asked to: at the latest
        self._workload = RunningRoles()
        self._patience: Seconds = config.silence_seconds_max
        self._heard_at: Seconds = 0.0
        self._offered_since: Seconds = 0.0
        self._beat_at: Seconds = 0.0

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for."""
        match event:
            case Started():
                self._beat_at = self._word_at = now
                return [*self._begin_anew(now), *self._beat(now)]
            case TimerFired(name=name) if name == _TIMER:
                return self._beat(now)
            case Computed():
                return self._computed(event, now)
            case PeerLost():
                is_head = event.peer == SUPERVISOR
                return self._alone(event, now) if is_head else self._ended_here(event)
            case Received():
                return self._received(event, now)
            case _:
                return []

    def status(self) -> tuple[str, dict[str, float]]:
        """Return what the host is doing, and how many roles run."""
        if self._leaves_at is not None:
            state = "leaving"
        elif self._run is None:
            state = "offering"
        else:
            state = "ready" if self._ready else "preparing"
        return state, {"roles": float(self._workload.n_running)}

    @property
    def is_offering(self) -> bool:
        """Whether no job has this machine just now."""
        return self._run is None

    @property
    def was_taken(self) -> bool:
        """Whether one had it at any time."""
        return self._was_taken

    def is_left_alone(self, now: Seconds) -> bool:
        """Return whether a job that has taken this machine says nothing just now."""
        was_of_one = self._was_taken and not self._config.stays
        return was_of_one and now - self._word_at > _ALONE_SECONDS

    def _received(self, event: Received, now: Seconds) -> list[Action]:
        if event.sender == USER:
            return self._asked_to_leave(event.message, now)
        if event.sender == SUPERVISOR:
            return self._told(event.message, now)
        return []

    # ---------------------------------------------------------------------- in touch

    def _beat(self, now: Seconds) -> list[Action]:
        """Say how it stands; give up whoever has said nothing for too long."""
        stood_still = max(0.0, now - self._beat_at)
        self._heard_at += stood_still
        self._beat_at = now + self._config.beat_seconds
        timer = SetTimer(name=_TIMER, at=self._beat_at)
        if self._leaves_at is not None and now >= self._leaves_at:
            return self._go("what ran here could not be moved in time")
        if self._run is None:
            return [*self._offer(now), timer]
        silent = now - self._heard_at
        if silent > self._patience:
            if self._leaves_at is not None:
                return self._go(None)
            text = (
                f"no word from the supervisor for {silent:.1f} s: all roles ended; "
                "waiting for it to be back"
            )
            said = Report(text=text, level="warning")
            return [said, *self._begin_anew(now), *self._offer(now), timer]
        actions: list[Action] = [self._report(), *self._ask_again(now), timer]
        if silent > self._config.silence_seconds_max:
            actions.append(_tell(self._config.offer(self._life)))
        return actions

    def _ask_again(self, now: Seconds) -> list[Action]:
        """Ask for what does not come."""
        if self._probe is not None:
            return self._probed(self._probe) if self._probe.is_late(now) else []
        again = None if self._reading is None else self._reading.ask_again()
        return [] if again is None else [_tell(again)]

    def _offer(self, now: Seconds) -> list[Action]:
        config = self._config
        waited = now - self._offered_since
        if waited > config.wait_seconds_max:
            return self._go(f"no job has taken this machine in {waited:.0f} s")
        return [_tell(config.offer(self._life))]

    def _alone(self, event: PeerLost, now: Seconds) -> list[Action]:
        """The supervisor is not there: its job is over, unless it is started again."""
        silent = now - self._word_at
        if not self.is_left_alone(now) or silent < self._config.over_seconds:
            return []
        text = f"{event.reason}: the job is over; how it ended is not known here"
        return [Report(text=text, level="warning"), *self._go(None)]

    def _report(self) -> Send:
        report = HostReport(
            life=self._life,
            ready=self._ready,
            leaving=self._leaves_at is not None,
            refusal=self._refusal,
            bandwidth=self._bandwidth,
            ended=self._workload.ended,
        )
        return _tell(report)

    def _begin_anew(self, now: Seconds) -> list[Action]:
        """Begin a life: nothing of the one before is to go on."""
        self._life += 1
        self._run = self._reading = self._probe = self._refusal = None
        self._ready = self._to_prepare = False
        self._patience = self._config.silence_seconds_max
        self._offered_since = now
        return self._workload.drop()

    def _go(self, error: str | None) -> list[Action]:
        return [*self._workload.end(), Exit(error=error)]

    def _asked_to_leave(self, message: Message, now: Seconds) -> list[Action]:
        if not isinstance(message, Stop):
            raise RemoteProtocolError(f"the user sent {type(message).__name__}")
        if self._run is None or self._leaves_at is not None:
            return self._go(None)
        self._leaves_at = now + self._config.leave_seconds_max
        text = f"{message.reason}: leaving as soon as what runs here has been moved"
        return [Report(text=text), self._report()]

    # ----------------------------------------------------------------- the supervisor

    def _told(self, message: Message, now: Seconds) -> list[Action]:
        self._word_at = now
        match message:
            case Assignments():
                return self._assigned(message, now)
            case Release():
                return self._dismissed(message, now)
            case FileChunk():
                return self._read(message, now)
            case _:
                raise RemoteProtocolError(f"the supervisor sent a host {type(message).__name__}")

    def _assigned(self, message: Assignments, now: Seconds) -> list[Action]:
        if message.life != self._life:
            return []
        if self._run not in {None, message.run}:  # another supervisor, at its place
            return [*self._begin_anew(now), *self._offer(now)]
        self._heard_at = now
        if self._run is None:
            self._run, self._was_taken = message.run, True
            self._probe = BandwidthProbe(begun_at=now)
            asks = [_tell(ask) for ask in self._probe.ask(now)]
            return [Report(text=f"run {message.run}"), *asks]
        self._workload.assign(message)
        return self._reconcile()

    def _dismissed(self, message: Release, now: Seconds) -> list[Action]:
        if message.life != self._life:
            return []
        if self._leaves_at is not None:
            return self._go(None)
        sent_away = message.refused or self._refusal is not None
        if not (message.again or self._config.stays):
            if sent_away:
                return self._go(message.reason)
            return [Report(text=f"dismissed: {message.reason}"), *self._go(None)]
        said = Report(text=f"begins anew: {message.reason}")
        if sent_away:
            text = f"sent away: {message.reason}; waiting for another job"
            said = Report(text=text, level="warning")
        return [said, *self._begin_anew(now), *(self._offer(now) if message.again else ())]

    def _read(self, piece: FileChunk, now: Seconds) -> list[Action]:
        if piece.document == PROBE:
            if self._probe is None:
                return []
            self._heard_at = now
            asks = self._probe.take(piece, now)
            if self._probe.is_over:
                return self._probed(self._probe)
            return [_tell(ask) for ask in asks]
        reading = self._reading
        if reading is not None:  # also what comes twice: all else waits behind that
            self._heard_at = now
        if reading is None or not reading.take(piece):
            return []
        content = reading.content
        if content is None:
            return [_tell(reading.ask())]
        name = f"{_FURNISH}:{self._life}"
        return [Compute(name=name, work=lambda: self._site.furnish(content))]

    def _probed(self, probe: BandwidthProbe) -> list[Action]:
        """The link is known; go on to the brief."""
        self._probe, self._bandwidth = None, probe.rate
        self._reading = FileDownload(BRIEF)
        return [_tell(self._reading.ask())]

    # --------------------------------------------------------------------- processes

    def _computed(self, event: Computed, now: Seconds) -> list[Action]:
        what, _, life = event.name.rpartition(":")
        if life != str(self._life):
            return []
        if event.error is not None:
            return self._refuse(event.error)
        if what == _FURNISH:
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
        """Begin the process that tries out the run, unless an older one has to end."""
        launches = self._workload.prepare(self._life)
        self._to_prepare = not launches
        return launches

    def _reconcile(self) -> list[Action]:
        return self._workload.reconcile() if self._ready else []

    def _ended_here(self, event: PeerLost) -> list[Action]:
        """A process has ended."""
        if not self._workload.lose(event):
            return []
        if event.peer == PREPARE:
            return self._tried_out(event.incarnation)
        is_duty = self._workload.is_over(event.peer, event.incarnation)
        return [self._report()] if is_duty else self._reconcile()

    def _tried_out(self, life: int) -> list[Action]:
        """The process that tries out the run, in this life or another, has ended."""
        if self._to_prepare:
            return self._prepare()
        if life != self._life:
            return []
        name = f"{_VERDICT}:{self._life}"
        return [Compute(name=name, work=self._site.verdict)]


def _tell(message: Message) -> Send:
    return Send(receiver=SUPERVISOR, message=message)


N_SIBLINGS_MAX: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class AgentStorageConfig:
    """What a host knows of itself.

    Attributes:
        supervisor: Where that is, with its key.
        reach: From where roles here can be reached.
        allowed: Modules whose functions a job may name.
        code: Directory where their modules, and the job's files, are looked for.
        directory: For logs and snapshots.
    """

    supervisor: str
    reach: ListenConfig
    allowed: tuple[str, ...]
    code: Path
    directory: Path


@final
class AgentStorage:
    """Of one process that has joined; a run at a time."""

    def __init__(self, config: AgentStorageConfig, *, launcher: LocalLauncher) -> None:
        self._config = config
        self._launcher = launcher
        self._memory: FileMemory | None = None
        self._spec = Path()

    def furnish(self, brief: bytes) -> Seconds:
        """Check a run's brief, and write down what the processes of roles will read.

        Returns:
            How long roles of that run wait for a supervisor that is silent.

        Raises:
            DistBeliefError: this machine can be of no use to that run.
        """
        self.clear()
        told = read_job_spec(brief)
        patience = patience_of(told.spec.job)
        directory = _made(self._config.directory)
        memory = self._memory = FileMemory.make()
        plan = None
        if told.plan is not None:
            plan = memory.directory / ".plan.json"
            files.write(plan, told.plan.encode())
        spec = msgspec.structs.replace(
            told.spec,
            job=relocated(told.spec.job, self._config.code),
            supervisor=self._config.supervisor,
            memory=str(memory.directory) if told.shares else "",
            snapshots=str(directory / "snapshots"),
            initial_file=None,
            plan=None if plan is None else str(plan),
            reach=self._config.reach,
            allowed=self._config.allowed,
        )
        self._spec = memory.directory / ".spec.json"
        # In a directory that only its user may enter: a secret may be in it.
        self._spec.write_bytes(msgspec.json.encode(spec))
        logs = directory / "logs"
        self._launcher.serve(
            spec=self._spec, log_of=lambda name: logs / f"{name}.log", has_machines=plan is not None
        )
        return patience

    def verdict(self) -> str | None:
        """Return what `PREPARE` has found wrong; None if nothing is."""
        try:
            with verdict_file(self._spec).open("rb") as file:
                text = file.read(VERDICT_BYTES_MAX).decode(errors="replace")
        except FileNotFoundError:
            return f"trying out the job failed here: see {self._config.directory}"
        except OSError as error:
            raise files.explained(error, self._spec, doing="read") from error
        return text or None

    def clear(self) -> None:
        """Give up the memory of the run before."""
        if self._memory is not None:
            self._memory.remove_all()
            self._memory = None


@final
class AgentLauncher:
    """Starts roles, and what tries the run out, as a host wants it."""

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher

    def launch(self, name: Address, incarnation: int) -> None:
        """Start the process of this name."""
        if name == PREPARE:
            self._launcher.prepare(name, incarnation)
        else:
            self._launcher.launch(name, incarnation)

    def terminate(self, name: Address) -> None:
        """End it by force; nothing happens if it is gone already."""
        self._launcher.terminate(name)

    def fileno(self) -> int:
        """Return a descriptor that is readable while `events` has something."""
        return self._launcher.fileno()

    def events(self) -> Sequence[Event]:
        """Return what happened since the last call."""
        return self._launcher.events()


def _made(directory: Path) -> Path:
    """Return the next numbered directory that was not there yet, with one for logs."""
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
