"""The role of a machine that has joined: it offers itself, and is one job's at a time.

    OFFERING --Duties--> PROBING --rate--> READING --brief--> PREPARING --> READY
        ^  |                                                                  |
        |  +--> over: nothing listens where its job did                       |
        +----------------- Dismiss, or silence of the supervisor -------------+

Rules:

* Once it is ready it runs what the supervisor wants to run here (`workload`).
* A host that hears nothing of the supervisor for as long as the job says ends all that
  it runs and offers itself anew: a job that has lost its supervisor leaves nothing
  behind. It offers itself long before that, while roles run on: should another
  supervisor be there by now, whose run is another one, it takes the host at once.
* The last word of a job may be lost, or be meant for a life that is over. So whoever
  drives a host that hears nothing (`is_left_alone`) looks whether the supervisor is
  there at all, and says if it is not (`PeerLost`). A link that is cut is waited for.
* Everything that ends with a life of the host is numbered by it: words of an older
  life mean nothing.
* The machine's user comes first: asked to leave, a host waits until what runs here has
  been moved, but not for long; asked twice, not at all.
"""

from collections.abc import Sequence
from typing import Final, Protocol, final

from distbelief.errors import DistBeliefError, RemoteProtocolError
from distbelief.job.hosts.documents import Reading
from distbelief.job.hosts.host_config import HostConfig
from distbelief.job.hosts.probing import PROBE, LinkProbe
from distbelief.job.hosts.workload import PREPARE, Workload
from distbelief.messages import Dismiss, Duties, HostReport, Message, Piece, Stop
from distbelief.roles import (
    SUPERVISOR,
    USER,
    Action,
    Compute,
    Computed,
    Event,
    Halt,
    PeerLost,
    Received,
    Report,
    Seconds,
    Send,
    SetTimer,
    Started,
    TimerFired,
)


BRIEF: Final = "brief"
"""The document that tells all roles of a run what to do."""

_TIMER: Final = "host:beat"
_FURNISH: Final = "host:furnish"
_VERDICT: Final = "host:verdict"
_ALONE_SECONDS: Final = 3.0


class Site(Protocol):
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


@final
class Host:
    """The role `host-...`.

    Args:
        config: What it offers.
        site: Where it keeps what it is told.
    """

    def __init__(self, config: HostConfig, *, site: Site) -> None:
        self._config = config
        self._site = site
        self._life = 0
        self._run: str | None = None  # whose duties it has
        self._was_taken = config.returns  # by a job, in this life or an earlier one
        self._word_at: Seconds = 0.0  # the supervisor's last, of whatever life
        self._probe: LinkProbe | None = None  # as long as that lasts
        self._bandwidth = 0.0  # of the link, as found
        self._reading: Reading | None = None  # its brief
        self._ready = False
        self._to_prepare = False  # as soon as an older process has ended
        self._refusal: str | None = None
        self._leaves_at: Seconds | None = None  # once it was asked to: at the latest
        self._workload = Workload()
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
        return [*self._workload.end(), Halt(error=error)]

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
            case Duties():
                return self._assigned(message, now)
            case Dismiss():
                return self._dismissed(message, now)
            case Piece():
                return self._read(message, now)
            case _:
                raise RemoteProtocolError(f"the supervisor sent a host {type(message).__name__}")

    def _assigned(self, message: Duties, now: Seconds) -> list[Action]:
        if message.life != self._life:
            return []
        if self._run not in {None, message.run}:  # another supervisor, at its place
            return [*self._begin_anew(now), *self._offer(now)]
        self._heard_at = now
        if self._run is None:
            self._run, self._was_taken = message.run, True
            self._probe = LinkProbe(begun_at=now)
            asks = [_tell(ask) for ask in self._probe.ask(now)]
            return [Report(text=f"run {message.run}"), *asks]
        self._workload.assign(message)
        return self._reconcile()

    def _dismissed(self, message: Dismiss, now: Seconds) -> list[Action]:
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

    def _read(self, piece: Piece, now: Seconds) -> list[Action]:
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

    def _probed(self, probe: LinkProbe) -> list[Action]:
        """The link is known; go on to the brief."""
        self._probe, self._bandwidth = None, probe.rate
        self._reading = Reading(BRIEF)
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
