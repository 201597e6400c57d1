"""The agent on a host: offers it to a job, runs the processes of its roles, and leaves.

    OFFERING --Assignments--> probing --rate--> downloading --job spec--> preparing --> READY
        ^  |                                                                             |
        |  +--> over: nothing listens where its job did                                  |
        +----------------- Release, or silence of the supervisor ------------------------+

DIRECTORY/RUN/logs/ROLE.log       log of each role
(shared memory)/.spec.json        what the processes of roles read
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, final

import msgspec

from distbelief import protocol as wire
from distbelief.core import files
from distbelief.core.errors import DistBeliefError, JobError, RemoteProtocolError
from distbelief.core.reliable import Silence
from distbelief.job.hosts.bootstrap import FileDownload, localized, read_job_spec
from distbelief.job.launch.forkserver import END_SECONDS_MAX
from distbelief.job.launch.local import PREPARE, LocalLauncher
from distbelief.job.launch.preflight import read_result
from distbelief.job.launch.role_process import RoleSpec
from distbelief.job.run.folders import absolute
from distbelief.protocol import role as rl
from distbelief.protocol.hosts import JOB_SPEC, PROBE
from distbelief.protocol.log_events import LogEvent
from distbelief.transport.listen_config import ListenConfig
from distbelief.transport.shared_memory import FileMemory


PROBE_SECONDS: Final = 0.15  # enough to measure the link
PROBE_SECONDS_MAX: Final = 3.0  # a lost chunk ends the measurement
_TIMER: Final = "host:beat"
_STORE: Final = "host:store"
_VERDICT: Final = "host:verdict"
_ALONE_SECONDS: Final = 3.0
_REASON_MAX: Final = 2048
_NAME: Final = re.compile(r"[a-z]{1,32}(-\d{1,9}b?)?(\.\d{1,9})?")


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    address: str  # as `distbelief train --listen` prints it
    is_held: bool = False  # whether it leaves when its standard input ends
    keys: Path | None  # directory of this host's keys; None for a run without keys
    cores: int | None = None  # to use; None for all
    memory_bytes: int | None = None  # to use; None for all
    devices: tuple[str, ...] = ()  # "cuda" for each GPU to use
    allowed: tuple[str, ...] = ()  # modules whose functions a job may name
    places: tuple[str, ...] = ()  # folders and URLs where a job may save
    code: Path = Path()  # directory of a job's modules and files
    directory: Path = Path("runs/joined")  # for logs
    domain: str = ""  # what fails together with this host
    stays: bool = False  # whether to wait for another job when one is over
    wait_seconds: float = 600.0  # for a job to take this host


@dataclass(frozen=True, kw_only=True)
class HostAgentConfig:
    offer: wire.Offer  # its incarnation is set for each offer
    stays: bool = False  # whether it waits for another job when one is over
    heartbeat_seconds: rl.Seconds = 0.5  # between two reports to the supervisor
    # Silence of the supervisor after which the host offers itself again; a run with a longer
    # patience goes on meanwhile
    silence_seconds_max: rl.Seconds = 15.0
    wait_seconds_max: rl.Seconds = 600.0  # for a job to take it
    leave_seconds_max: rl.Seconds = 30.0  # for its roles to be moved when the user asks it to leave
    # Silence after which a job whose port is closed is over; until then a supervisor that died may
    # be restarted
    over_seconds: rl.Seconds = 60.0


class HostStorage(Protocol):
    """Stores what a host receives for a run. Called as work, never concurrently."""

    def store_job_spec(self, job_spec: bytes) -> rl.Seconds:
        """Check a run's job spec, and write the files that the processes of roles read.

        Return how long to wait for a silent supervisor; DistBeliefError if this host is unfit.
        """
        ...

    def verdict(self) -> str | None: ...


HostMessage = wire.Assignments | wire.Release | wire.FileChunk | wire.Stop


@final
class HostAgent:
    """The role `host-...`: offers this host, and serves one job at a time.

    * A host that hears nothing from the supervisor for longer than its roles wait ends those that
      are left and offers itself again, so a job without supervisor leaves nothing behind. It sends
      offers long before that: a supervisor of another run takes the host at once.
    * If the supervisor is silent (`is_supervisor_silent`), the driver checks whether anything
      listens at its address, and posts `PeerLost` if not: the last `Release` may have been lost. A
      host without roles ends then.
    * Messages carry the host's incarnation; those of an older one are ignored.
    * Asked to leave, a host waits a little until its roles have been moved; asked twice, it ends.
    """

    accepts: Final = rl.message_types(HostMessage)

    def __init__(self, config: HostAgentConfig, *, storage: HostStorage) -> None:
        self._config = config
        self._storage = storage
        self._incarnation = 0
        self._run: str | None = None  # whose roles it runs
        self.was_taken = False  # by a job, in this incarnation or an earlier one
        self._download: FileDownload | None = None  # of the probe, then of the job spec
        self._bandwidth = 0.0  # of the link, as measured
        self._ready = False
        self._to_prepare = False  # as soon as an older process has ended
        self._refusal: str | None = None
        self._leaves_at: rl.Seconds | None = None  # deadline, once it was asked to leave
        self._assigned: dict[rl.Address, wire.RoleAssignment] = {}
        self._running: dict[rl.Address, int] = {}  # also of earlier incarnations, until they end
        # Kept until they are no longer assigned.
        self._ended: dict[rl.Address, wire.RoleEnded] = {}
        self._patience: rl.Seconds = config.silence_seconds_max
        self._offered_since: rl.Seconds = 0.0
        # Of the supervisor; progress: a message to this incarnation.
        self._silence = Silence()

    def handle(self, event: rl.Event, now: rl.Seconds) -> Sequence[rl.Action]:
        match event:
            case rl.Started():
                self._silence.start(now)
                actions = [*self._restart(now), *self._beat(now)]
            case rl.TimerFired(name=name) if name == _TIMER:
                actions = self._beat(now)
            case rl.Computed():
                actions = self._computed(event, now)
            case rl.PeerLost(peer=peer) if peer == rl.SUPERVISOR:
                actions = self._supervisor_gone(event, now)
            case rl.PeerLost():
                actions = self._process_ended(event)
            case rl.Received(sender=sender, message=message) if sender == rl.USER:
                actions = self._leave(message, now)
            case rl.Received(sender=sender, message=message) if sender == rl.SUPERVISOR:
                actions = self._dispatch(message, now)
            case _:
                actions = []
        return actions

    def status(self) -> tuple[str, dict[str, float]]:
        if self._leaves_at is not None:
            state = "leaving"
        elif self._run is None:
            state = "offering"
        else:
            state = "ready" if self._ready else "preparing"
        return state, {"roles": float(len(self._running))}

    def is_supervisor_silent(self, now: rl.Seconds) -> bool:
        was_of_one = self.was_taken and not self._config.stays
        return was_of_one and self._silence.silent(now) > _ALONE_SECONDS

    def _beat(self, now: rl.Seconds) -> list[rl.Action]:
        self._silence.woke(now)
        at = self._silence.expect(now + self._config.heartbeat_seconds)
        timer = rl.SetTimer(name=_TIMER, at=at)
        if self._leaves_at is not None and now >= self._leaves_at:
            return self._exit("the roles of this host could not be moved in time")
        if self._run is None:
            return [*self._offer(now), timer]
        silent = self._silence.stalled(now)
        if silent > self._patience:
            if self._leaves_at is not None:
                return self._exit(None)
            report = _said("supervisor_silent", seconds=silent)
            return [report, *self._restart(now), *self._offer(now), timer]
        actions = [self._report(), *self._ask_again(now), timer]
        if silent > self._config.silence_seconds_max:
            actions.append(self._offer_message())
        return actions

    def _offer(self, now: rl.Seconds) -> list[rl.Action]:
        waited = now - self._offered_since
        if waited > self._config.wait_seconds_max:
            return self._exit(f"no job has taken this host in {waited:.0f} s")
        return [self._offer_message()]

    def _offer_message(self) -> rl.Action:
        offer = self._config.offer
        return _to_supervisor(msgspec.structs.replace(offer, incarnation=self._incarnation))

    def _report(self) -> rl.Action:
        report = wire.HostReport(
            incarnation=self._incarnation,
            ready=self._ready,
            leaving=self._leaves_at is not None,
            refusal=self._refusal,
            bandwidth=self._bandwidth,
            ended=tuple(self._ended.values()),
        )
        return _to_supervisor(report)

    def _restart(self, now: rl.Seconds) -> list[rl.Action]:
        self._incarnation += 1
        self._run = self._download = self._refusal = None
        self._ready = self._to_prepare = False
        self._patience = self._config.silence_seconds_max
        self._offered_since = now
        return self._drop_roles()

    def _exit(self, error: str | None) -> list[rl.Action]:
        return [*self._drop_roles(), rl.Exit(error=error)]

    def _leave(self, message: wire.Message, now: rl.Seconds) -> list[rl.Action]:
        if not isinstance(message, wire.Stop):
            raise RemoteProtocolError(f"the user sent {type(message).__name__}")
        if self._run is None or self._leaves_at is not None:
            return self._exit(None)
        self._leaves_at = now + self._config.leave_seconds_max
        return [_said("leaving", reason=message.reason), self._report()]

    def _supervisor_gone(self, event: rl.PeerLost, now: rl.Seconds) -> list[rl.Action]:
        silent = self._silence.silent(now)
        if not self.is_supervisor_silent(now) or silent < self._config.over_seconds:
            return []
        if any(self._is_wanted(name, n) for name, n in self._running.items()):
            return []  # they end by themselves, after they have saved
        return [_said("supervisor_gone", reason=event.reason), *self._exit(None)]

    def _dispatch(self, message: wire.Message, now: rl.Seconds) -> list[rl.Action]:
        self._silence.heard(now, progress=False)
        match message:
            case wire.Assignments(incarnation=incarnation) if incarnation == self._incarnation:
                return self._take_assignments(message, now)
            case wire.Release(incarnation=incarnation) if incarnation == self._incarnation:
                return self._released(message, now)
            case wire.FileChunk():
                return self._take_chunk(message, now)
            case wire.Assignments() | wire.Release():
                return []  # to an earlier incarnation
            case _:
                raise RemoteProtocolError(f"the supervisor sent a host {type(message).__name__}")

    def _take_assignments(self, message: wire.Assignments, now: rl.Seconds) -> list[rl.Action]:
        if self._run not in {None, message.run}:  # the supervisor of another run
            return [*self._restart(now), *self._offer(now)]
        self._silence.heard(now)
        if self._run is None:
            self._run, self.was_taken = message.run, True
            return [_said("taken", detail=message.run), self._begin_download(PROBE, now)]
        assigned: dict[rl.Address, wire.RoleAssignment] = {}
        for role in message.assignments:
            if _NAME.fullmatch(role.name) is None or role.name == PREPARE:
                raise RemoteProtocolError(f"a host cannot run a role {role.name!r:.80}")
            assigned[rl.Address(role.name)] = role
        self._assigned = assigned
        self._ended = {n: e for n, e in self._ended.items() if self._is_wanted(n, e.incarnation)}
        return self._reconcile()

    def _released(self, message: wire.Release, now: rl.Seconds) -> list[rl.Action]:
        if self._leaves_at is not None:
            return self._exit(None)
        sent_away = message.refused or self._refusal is not None
        if message.again or self._config.stays:
            what = "rejected" if sent_away else "released_for_now"
            offers = self._offer if message.again else lambda _: []
            return [_said(what, reason=message.reason), *self._restart(now), *offers(now)]
        if sent_away:
            return self._exit(message.reason)
        return [_said("released", reason=message.reason), *self._exit(None)]

    def _begin_download(self, document: str, now: rl.Seconds) -> rl.Action:
        self._download = FileDownload(document, now)
        return _to_supervisor(self._download.ask(now))

    def _ask_again(self, now: rl.Seconds) -> list[rl.Action]:
        download = self._download
        if download is None:
            return []
        if download.document == PROBE and now - download.begun_at > PROBE_SECONDS_MAX:
            return [self._probed(download, now)]
        again = download.ask_again(now)
        return [] if again is None else [_to_supervisor(again)]

    def _probed(self, probe: FileDownload, now: rl.Seconds) -> rl.Action:
        self._bandwidth = probe.rate
        return self._begin_download(JOB_SPEC, now)

    def _take_chunk(self, chunk: wire.FileChunk, now: rl.Seconds) -> list[rl.Action]:
        download = self._download
        if download is None:
            return []
        self._silence.heard(now)  # a duplicate counts too: it shows that the link works
        if not download.take(chunk, now):
            return []
        content = download.content
        if download.document == PROBE:
            if content is not None or now - download.begun_at >= PROBE_SECONDS:
                return [self._probed(download, now)]
        elif content is not None:
            name = f"{_STORE}:{self._incarnation}"
            return [rl.Compute(name=name, work=lambda: self._storage.store_job_spec(content))]
        return [_to_supervisor(download.ask(now))]

    def _computed(self, event: rl.Computed, now: rl.Seconds) -> list[rl.Action]:
        what, _, incarnation = event.name.rpartition(":")
        if incarnation != str(self._incarnation):
            return []
        error = event.error
        if error is not None:
            known = isinstance(error, DistBeliefError)
            return self._refuse(str(error) if known else f"{type(error).__name__}: {error}")
        if what == _STORE:
            assert isinstance(event.result, float), event.result
            self._patience = max(self._patience, event.result)
            return self._prepare()
        if event.result is not None:
            return self._refuse(str(event.result))
        self._ready = True
        self._silence.heard(now)
        return [_said("prepared"), self._report()]

    def _refuse(self, why: str) -> list[rl.Action]:
        self._refusal = why[:8192]
        return [_said("refused", reason=why), self._report()]

    def _prepare(self) -> list[rl.Action]:
        launches = self._start_role(PREPARE, self._incarnation)
        self._to_prepare = not launches
        return launches

    def _process_ended(self, event: rl.PeerLost) -> list[rl.Action]:
        name, incarnation = event.peer, event.incarnation
        if self._running.get(name) != incarnation:
            return []
        del self._running[name]
        if name == PREPARE:
            return self._prepared(incarnation)
        if not self._is_wanted(name, incarnation):
            return self._reconcile()
        reason = event.reason[:_REASON_MAX]
        self._ended[name] = wire.RoleEnded(name=name, incarnation=incarnation, reason=reason)
        return [self._report()]

    # --- the processes of this host, in all its incarnations
    #
    # `Assignments` is the complete list: a process that is not in it is ended, a role without a
    # process is started, once. So a lost message costs half a second. A process may outlive its
    # assignment; no other one of its name starts before it has ended.

    def _start_role(self, name: rl.Address, incarnation: int, ranks: int = 1) -> list[rl.Action]:
        if name in self._running:
            return []
        self._running[name] = incarnation
        return [rl.Launch(name=name, incarnation=incarnation, ranks=ranks)]

    def _is_wanted(self, name: rl.Address, incarnation: int) -> bool:
        role = self._assigned.get(name)
        return role is not None and role.incarnation == incarnation

    def _reconcile(self) -> list[rl.Action]:
        if not self._ready:
            return []
        actions: list[rl.Action] = [
            rl.Terminate(name=name)
            for name, incarnation in self._running.items()
            if not self._is_wanted(name, incarnation)
        ]
        for name, role in self._assigned.items():
            if name not in self._ended:
                actions += self._start_role(name, role.incarnation, role.ranks)
        return actions

    def _drop_roles(self) -> list[rl.Action]:
        self._assigned, self._ended = {}, {}
        return [rl.Terminate(name=name) for name in self._running]

    def _prepared(self, incarnation: int) -> list[rl.Action]:
        if self._to_prepare:
            return self._prepare()
        if incarnation != self._incarnation:
            return []
        return [rl.Compute(name=f"{_VERDICT}:{self._incarnation}", work=self._storage.verdict)]


def _to_supervisor(message: wire.Message) -> rl.Action:
    return rl.Send(receiver=rl.SUPERVISOR, message=message)


def _said(what: str, *, reason: str = "", detail: str = "", seconds: rl.Seconds = 0.0) -> rl.Action:
    return rl.Report.of(LogEvent(what, reason=reason, detail=detail, seconds=seconds))


@final
@dataclass(kw_only=True)
class AgentStorage:
    """Files and shared memory of one host, for one run at a time."""

    supervisor: str  # its address, with its key
    reach: ListenConfig  # where roles of this host listen
    allowed: tuple[str, ...]  # modules whose functions a job may name
    places: tuple[str, ...] = ()  # where it may save, beside the supervisor's host
    code: Path  # directory of their modules and of the job's files
    directory: Path  # for logs
    launcher: LocalLauncher
    spec: Path = field(default_factory=Path)  # what the processes of roles read
    memory: FileMemory | None = None

    def store_job_spec(self, job_spec: bytes) -> rl.Seconds:
        self.clear()
        received = read_job_spec(job_spec)
        self._check_place(received.spec)
        job, patience = localized(received.spec.job, self.code)
        with files.explaining(self.directory, doing="make a directory in"):
            files.make_directory(self.directory)
            directory = files.make_numbered(self.directory, "")
            (directory / "logs").mkdir()
        memory = self.memory = FileMemory.make()
        plans = {n: memory.directory / f".plan-{n}.json" for n in received.plans}
        for n, plan in plans.items():
            files.write(plan, received.plans[n].encode())
        spec = msgspec.structs.replace(
            received.spec,
            job=job,
            supervisor=self.supervisor,
            memory=str(received.memory_here or memory.directory) if received.shares else "",
            plans={n: str(plan) for n, plan in plans.items()},
            reach=self.reach,
            allowed=self.allowed,
            # Nothing that names files of this host.
            initial_file=None if received.spec.initial_file is None else "",
            computation=None,
        )
        self.spec = memory.directory / ".spec.json"
        # It may contain a secret; only the user may enter this directory.
        self.spec.write_bytes(msgspec.json.encode(spec))
        logs = directory / "logs"
        self.launcher.serve(
            spec=self.spec, log_of=lambda name: logs / f"{name}.log", has_ranks=bool(plans)
        )
        return patience + END_SECONDS_MAX  # first its roles end by themselves

    def _check_place(self, spec: RoleSpec) -> None:
        """Reject a job that would save, with this user's rights, where its user has not agreed."""
        place = spec.snapshots
        if not (place or spec.files):
            raise JobError("the job names no place for checkpoints: start it with --listen")
        is_within = any(
            f"{place}/".startswith(f"{absolute(one).rstrip('/')}/") for one in self.places
        )
        if place and (not is_within or ".." in place.split("/")):
            raise JobError(
                f"the job saves at {place:.200}, which this host does not allow (allowed: "
                f"{', '.join(self.places) or 'none'}): use distbelief join ... "
                f"--allow-checkpoints {place:.200}"
            )

    def verdict(self) -> str | None:
        found = read_result(self.spec)
        return (
            f"trying out the job failed here: see {self.directory}"
            if found is None
            else found.error
        )

    def clear(self) -> None:
        if self.memory is not None:
            self.memory.remove_all()
            self.memory = None
