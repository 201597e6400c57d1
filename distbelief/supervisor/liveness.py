"""Deaths of roles: who is restarted, who is missed, and when a job cannot go on."""

from typing import Final, final

from distbelief.core import formatting
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import Heartbeat, HeartbeatAck, Join, Peers
from distbelief.roles.role import (
    Action,
    Address,
    Connect,
    Launch,
    PeerLost,
    Seconds,
    Send,
    SetTimer,
    Terminate,
)
from distbelief.supervisor.membership import Presence, RoleRecord
from distbelief.supervisor.state import JobState, ShutdownStage


# The lives of a job's roles: launch, introduction, silence, death, restart.
#
# What the supervisor does for each role whatever the job is doing. Rules:
#
# * A role that falls silent is named at once, with what will be done about it. Longer
#   silence is death: its process is ended, whatever it is doing. A leader whose other
#   copy cannot take over is given twice as long, for what it has nobody else does; so if
#   both copies of a shard are silent, only the one that follows is put down at first.
# * Every start is a new incarnation; words of an older one are not heard.
# * Shards come back from their newest whole snapshot. Clients are told who is there
#   whenever that changes, and now and then again, for messages may be lost.
# * Guests are neither ended nor restarted: their processes are somebody else's.

INTRODUCE_SECONDS = 5.0
"""After which a role is told of its peers again."""

_RESTORING: Final = "starting"
"""A shard's word for what it does until its values are there: its clock is 0."""


@final
class Heartbeats:
    """Looks after all members."""

    def __init__(self, books: JobState) -> None:
        self._config = books.config
        self._ending = books.ending
        self._members = books.members
        self._pairs = books.pairs
        self._saves = books.saves
        self._figures = books.figures

    def launch_all(self, now: Seconds) -> list[Action]:
        """Start the whole roster."""
        actions: list[Action] = []
        for record in self._members:
            record.launched_at = record.heard_at = now
            actions.append(Launch(name=record.name, incarnation=record.incarnation))
        return actions

    # -------------------------------------------------------------------- words

    def heard(self, record: RoleRecord, now: Seconds) -> list[Action]:
        """A word of this role has come; greet it if it was missed."""
        was_away = record.presence is Presence.AWAY
        silence = record.hear(now)
        actions: list[Action] = []
        if record.silence_named:
            record.silence_named = False
            text = f"{record.label} is back after {silence:.1f} s"
            actions.append(self._figures.tell(text, now))
        if was_away:
            actions += self._tell_others(record, now)
        return actions

    def joined(self, record: RoleRecord, message: Join, now: Seconds) -> list[Action]:
        """It can be spoken to from now on.

        Raises:
            RemoteProtocolError: nobody could be told where it is.
        """
        if not (message.endpoint + message.host).isascii():
            raise RemoteProtocolError(f"{record.name} joins from {message.endpoint!a}")
        actions: list[Action] = []
        if record.join(message):
            connect = Connect(
                peer=record.name,
                incarnation=record.incarnation,
                endpoint=message.endpoint,
                host=message.host,
            )
            # Who leads is settled first: clients wait to hear of that.
            leads = self._pairs.joined(record, now)
            actions = [
                connect,
                *self._warnings(record, message, now),
                *self._tell_others(record, now),
            ]
        else:
            leads = []
        return [*actions, *self._introduce(record, now), *leads]

    def _warnings(self, record: RoleRecord, message: Join, now: Seconds) -> list[Action]:
        """Tell what a new life has found; of a first one it was told beforehand."""
        if not record.restarts:
            return []
        return [
            self._figures.tell(f"{record.label}: {text}", now, "warning")
            for text in message.warnings
        ]

    def beaten(self, record: RoleRecord, message: Heartbeat, now: Seconds) -> list[Action]:
        """It says how it is."""
        record.state = formatting.harmless(message.state)
        record.counters = message.counters
        if record.kind == "shard":
            if record.state != _RESTORING:
                self._pairs.count(record)
            applied = message.counters.get("pushes_applied")
            if applied is not None:
                record.rate.add(now, applied)
        elif record.kind == "replica" and self._members.coordinator is not None:
            # Who is driven by a coordinator does not report its progress itself.
            record.rate.add(now, message.counters.get("samples", 0.0))
        if not record.has_joined:
            return []
        actions: list[Action] = [
            Send(receiver=record.name, message=HeartbeatAck()),
            *self._pairs.beaten(record, now),
        ]
        told_at = record.introduced_at
        if told_at is not None and now - told_at >= INTRODUCE_SECONDS:
            actions += self._introduce(record, now)
        return actions

    def _introduce(self, record: RoleRecord, now: Seconds) -> list[Action]:
        """Tell a role whom it needs; a client not before all shards are there."""
        if record.kind != "shard" and record.introduced_at is None and not self._pairs.all_led:
            return []
        record.introduced_at = now
        members = self._members
        peers = Peers(entries=members.entries_for(record), gone=members.gone_for(record))
        return [Send(receiver=record.name, message=peers)]

    def _tell_others(self, record: RoleRecord, now: Seconds) -> list[Action]:
        """Tell those who need this role that it is there, or no longer."""
        actions: list[Action] = []
        for other in self._members:
            if other.has_joined and record.needs(other):
                actions += self._introduce(other, now)
        return actions

    # --------------------------------------------------------------------- deaths

    def restart(self, record: RoleRecord, why: str, now: Seconds) -> list[Action]:
        """Begin a new life of a role that is dead; leave it out if it died too often.

        Afterwards `record.is_alive` tells which.
        """
        if self._is_past_mending(record):
            why += f"; left out{self.so_often(record)}"
            return self.leave_out(record, why, now)
        if record.has_settled(self._config.settled_seconds):
            record.in_a_row = 0
        record.in_a_row += 1
        record.restarts += 1
        text = f"{record.label} {why}: {self._plan(record, now)}"
        said = self._figures.tell(text, now, "warning")
        # Copies of a shard count their lives together, for they restore each other's
        # snapshots, which are always of a life before.
        copies = [record, *self._pairs.copies(record.shard)]
        record.begin_life(1 + max(copy.incarnation for copy in copies), now)
        return [
            said,
            # What the launcher took for dead may be only silent.
            Terminate(name=record.name),
            Launch(name=record.name, incarnation=record.incarnation),
            *self._tell_others(record, now),
        ]

    def _is_past_mending(self, record: RoleRecord) -> bool:
        """Whether it has died too often, and each time too soon."""
        settled = record.has_settled(self._config.settled_seconds)
        bound = self._config.restarts_max(record.kind, trains=record.trains)
        return record.in_a_row >= bound and not (settled and bound)

    def is_late(self, record: RoleRecord) -> bool:
        """Whether the end of the job does without it: it is not started again."""
        stage = self._ending.stage
        return stage >= ShutdownStage.CLOSE or (record.trains and stage is not ShutdownStage.RUN)

    def so_often(self, record: RoleRecord) -> str:
        """Return " after 3 restarts, none of which lasted 30 s"."""
        n = record.in_a_row
        noun = "restart" if n == 1 else "restarts"
        text = f" after {n} {noun}, none of which lasted "
        return f"{text}{self._config.settled_seconds:g} s" if n else ""

    def leave_out(self, record: RoleRecord, why: str, now: Seconds) -> list[Action]:
        """Go on without it, and without machines that compute nothing without it."""
        actions: list[Action] = [self._figures.tell(f"{record.label} {why}", now, "error")]
        group = [r for r in self._members.machines_with(record) if r.is_alive]
        if group:
            names = ", ".join(other.label for other in group)
            text = f"{names} left out with {record.label}: they are of one model"
            actions.append(self._figures.tell(text, now, "error"))
        for each in (record, *group):
            each.presence = Presence.LEFT_OUT
            actions += [Terminate(name=each.name), *self._tell_others(each, now)]
        return actions

    def finished(self, record: RoleRecord, now: Seconds) -> list[Action]:
        """It has ended as planned."""
        record.presence = Presence.FINISHED
        if record.kind == "guest":
            self._members.leave(record)
        actions = self._tell_others(record, now)
        if record.kind == "shard" and not self._pairs.leads(record):
            actions += self._pairs.lost(record, now)  # its leader need not wait for it
        return actions

    def _plan(self, record: RoleRecord, now: Seconds) -> str:
        """Return what is done about the loss of a role, and what it costs."""
        if record.kind != "shard":
            return "restarting it"
        other = self._pairs.survivor(record)
        if other is None:
            return self._plan_without(record, now)
        if other.end is not None:
            return f"restarting it; {other.label} is dead too"
        if not self._pairs.answers(other, now):
            return f"restarting it; {other.label}, which holds all, is silent"
        verb = "takes over" if self._pairs.has_led(record) else "goes on alone"
        text = f"{other.label} {verb}, nothing acknowledged is lost"
        return f"{text}; restarting {record.label}"

    def _plan_without(self, record: RoleRecord, now: Seconds) -> str:
        """Return what is done where no other copy has what this one had."""
        coordinator = self._members.coordinator
        if coordinator is not None:
            point = self._saves.describe(coordinator.name, now)
            return f"restarting it from {point}; the run goes on from there"
        text = f"restarting it from {self._saves.describe(record.shard, now)}"
        if not self._pairs.leads(record):
            return text
        clock = record.counters.get("clock", 0.0)
        n_lost = self._saves.n_since(record.shard, clock)
        if n_lost:
            noun = "push" if n_lost == 1 else "pushes"
            text += f"; about {n_lost:,} acknowledged {noun} will be lost"
        return text

    # -------------------------------------------------------------------- silence

    def silent(self, now: Seconds) -> tuple[list[Action], list[tuple[RoleRecord, str]]]:
        """Look for roles that say nothing.

        Returns:
            What is to be done at once, and who is to be taken for dead, and why.
        """
        actions: list[Action] = []
        dead: list[tuple[RoleRecord, str]] = []
        for record in list(self._members):
            why = self._why_dead(record, now)
            if why is not None:
                dead.append((record, why))
            elif record.presence is Presence.PRESENT:
                actions += self._name_if_silent(record, now)
        return actions, dead

    def _why_dead(self, record: RoleRecord, now: Seconds) -> str | None:
        config, silence = self._config, now - record.heard_at
        if record.presence is Presence.LAUNCHED and silence > config.start_seconds_max:
            return f"has not said a word in {silence:.0f} s since it was started"
        if record.presence is not Presence.PRESENT or record.kind == "guest":
            return None
        if silence > self._patience(record, now):
            return f"silent for {silence:.1f} s"
        building = now - record.launched_at
        if record.state == "building" and building > config.build_seconds_max:
            return f"has been building its model and data for {building:.0f} s"
        return None

    def _patience(self, record: RoleRecord, now: Seconds) -> Seconds:
        """Return after how much silence it is taken for dead."""
        alone = self._pairs.is_irreplaceable(record, now)
        return self._config.dead_seconds * (2 if alone else 1)

    def _name_if_silent(self, record: RoleRecord, now: Seconds) -> list[Action]:
        config, silence = self._config, now - record.heard_at
        if record.kind == "guest":
            if silence <= config.dead_seconds:
                return []
            record.presence = Presence.AWAY
            text = f"{record.label} silent for {silence:.1f} s: going on without it"
            return [self._figures.tell(text, now), *self._tell_others(record, now)]
        if record.silence_named or silence <= config.silent_seconds:
            return []
        record.silence_named = True
        left = f"in {self._patience(record, now) - silence:.0f} s"
        other = self._pairs.survivor(record)
        if self.is_late(record):
            plan = f"{left} ending without it"
        elif self._is_past_mending(record):
            end = "going on without it" if record.kind != "shard" else "giving up"
            plan = f"{left} {end}"
        elif other is not None and self._pairs.is_irreplaceable(record, now):
            plan = f"so is {other.label}; if neither comes back, {left} "
            plan += self._plan_without(record, now)
        else:
            plan = f"{left} {self._plan(record, now)}"
        text = f"{record.label} silent for {silence:.1f} s: {plan}"
        return [self._figures.tell(text, now, "warning")]


TIMER: Final = "supervisor:lost:"

LAST_WORDS_SECONDS: Final = 0.1
"""What a role said last may arrive after the news of its end."""


@final
class RestartPolicy:
    """Decides what follows from the death of a role."""

    def __init__(self, books: JobState, *, lives: Heartbeats) -> None:
        self._ending = books.ending
        self._members = books.members
        self._pairs = books.pairs
        self._lives = lives
        self._saves = books.saves
        self._evaluations = books.evaluations
        self._figures = books.figures

    def told(self, event: PeerLost, now: Seconds) -> list[Action]:
        """The launcher tells of a process that has ended: wait for its last words."""
        record = self._members.get(event.peer)
        if record is None or event.incarnation != record.incarnation or not record.is_alive:
            return []
        record.end = event.reason
        if self._ending.interrupted or self._ending.stage >= ShutdownStage.CLOSE:
            return self.settle(record.name, now)
        timer = SetTimer(name=f"{TIMER}{record.name}", at=now + LAST_WORDS_SECONDS)
        return [timer]

    def settle(self, name: Address, now: Seconds) -> list[Action]:
        """A process has ended, and what it had to say has come."""
        record = self._members.get(name)
        if record is None or record.end is None or not record.is_alive:
            return []
        why = f"failed ({record.failure})" if record.failure else record.end
        return self.bury(record, why, now)

    def bury(self, record: RoleRecord, why: str, now: Seconds) -> list[Action]:
        """A role is dead: restart it, unless it is not needed any more."""
        ending = self._ending
        if ending.interrupted or (ending.stage >= ShutdownStage.CLOSE and record.end):
            return self._lives.finished(record, now)
        if self._lives.is_late(record):
            text = f"{record.label} {why} while it was stopping"
            said = self._figures.tell(text, now, "warning")
            return [said, Terminate(name=record.name), *self._lives.finished(record, now)]
        led = self._pairs.has_led(record)
        actions = self._lives.restart(record, why, now)
        if record.kind == "shard":
            actions += self.replace(record, why, now, led=led)
        if not record.is_alive:
            self.await_nothing(record)
        if record.kind == "coordinator" and not record.is_alive:
            often = self._lives.so_often(record)
            error = f"the coordinator cannot be kept alive{often}: it {why}"
            self._ending.begin(error, now, error=error)
        return actions

    def await_nothing(self, record: RoleRecord) -> None:
        """Wait for no answer of a role that is gone for good."""
        if record.kind in {"evaluator", "machine"} and not record.trains:
            self._evaluations.give_up()
        if not any(copy.is_alive for copy in self._pairs.copies(record.shard)):
            self._saves.forget(record.shard)

    def replace(self, record: RoleRecord, why: str, now: Seconds, *, led: bool) -> list[Action]:
        """Let the other copy of a shard do without this one, if there is another.

        Args:
            record: Of the copy that is dead.
            why: It is.
            now: The present.
            led: Whether it led before.
        """
        actions: list[Action] = [*self._pairs.lost(record, now)]
        leader = self._pairs.leader(record.shard)
        if led and leader is not None and leader is not record:
            save = self._saves.again(record.shard, now, at_once=True)
            actions += [Send(receiver=leader.name, message=save)] if save else []
        if record.is_alive:
            return actions
        others = [copy for copy in self._pairs.copies(record.shard) if copy.is_alive]
        if not others:
            often = self._lives.so_often(record)
            label = record.shard.replace("-", " ")
            error = f"{label} cannot be kept alive{often}: it {why}"
            self._ending.begin(error, now, error=error)
        elif leader is None and others[0].has_joined:
            # It holds a part of a copy: only a new life has a snapshot to lead with.
            why = f"is not whole, and {record.label} will not come back"
            actions += self.bury(others[0], why, now)
        return actions
