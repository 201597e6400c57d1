"""Heartbeats and restart policy: detects silent and dead roles, and restarts them.

* A silent role is reported at once; longer silence counts as death, and its process is killed.
* Every start is a new incarnation; messages of an older one are ignored.
* A dead replica is restarted and, after too many restarts, left out: the others train on (DB-12).
  A dead shard restarts from its newest checkpoint.
* Guests are neither killed nor restarted: their processes belong to their user.
"""

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


INTRODUCE_SECONDS = 5.0  # between two `Peers` to one role: messages may be lost

_RESTORING: Final = "starting"  # state of a shard without values yet: its clock is 0


@final
class Heartbeats:
    """Launches all roles, tracks their heartbeats, and introduces them to each other."""

    def __init__(self, job: JobState) -> None:
        self._config = job.config
        self._shutdown_state = job.shutdown
        self._members = job.members
        self._failover = job.failover
        self._checkpoints = job.checkpoints
        self._metrics = job.metrics

    def launch_all(self, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        for record in self._members:
            record.launched_at = record.heard_at = now
            actions.append(Launch(name=record.name, incarnation=record.incarnation))
        return actions

    def heard(self, record: RoleRecord, now: Seconds) -> list[Action]:
        """Note that a message came; report a role that was silent before."""
        was_away = record.presence is Presence.AWAY
        silence = record.hear(now)
        actions: list[Action] = []
        if record.silence_reported:
            record.silence_reported = False
            text = f"{record.label} is back after {silence:.1f} s"
            actions.append(self._metrics.report(text, now))
        if was_away:
            actions += self._notify_peers(record, now)
        return actions

    def joined(self, record: RoleRecord, message: Join, now: Seconds) -> list[Action]:
        """Register where a role can be reached, and introduce it to its peers.

        Raises:
            RemoteProtocolError: its endpoint or host is not ASCII.
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
            # The primary is chosen first: clients wait for it.
            promotions = self._failover.joined(record, now)
            actions = [
                connect,
                *self._warnings(record, message, now),
                *self._notify_peers(record, now),
            ]
        else:
            promotions = []
        return [*actions, *self._introduce(record, now), *promotions]

    def _warnings(self, record: RoleRecord, message: Join, now: Seconds) -> list[Action]:
        if not record.restarts:
            return []  # those of a first incarnation were shown before the start
        return [
            self._metrics.report(f"{record.label}: {text}", now, "warning")
            for text in message.warnings
        ]

    def heartbeat(self, record: RoleRecord, message: Heartbeat, now: Seconds) -> list[Action]:
        """Handle a heartbeat: store state and counters, acknowledge it."""
        record.state = formatting.without_control_characters(message.state)
        record.counters = message.counters
        if record.kind == "shard":
            if record.state != _RESTORING:
                self._failover.count(record)
            applied = message.counters.get("pushes_applied")
            if applied is not None:
                record.rate.add(now, applied)
        elif record.kind == "replica" and self._members.coordinator is not None:
            # Under a coordinator replicas send no Progress.
            record.rate.add(now, message.counters.get("samples", 0.0))
        if not record.has_joined:
            return []
        actions: list[Action] = [
            Send(receiver=record.name, message=HeartbeatAck()),
            *self._failover.heartbeat(record, now),
        ]
        sent_at = record.introduced_at
        if sent_at is not None and now - sent_at >= INTRODUCE_SECONDS:
            actions += self._introduce(record, now)
        return actions

    def _introduce(self, record: RoleRecord, now: Seconds) -> list[Action]:
        if (
            record.kind != "shard"
            and record.introduced_at is None
            and not self._failover.all_have_primary
        ):
            return []  # a client waits until all shards are there
        record.introduced_at = now
        members = self._members
        peers = Peers(entries=members.entries_for(record), gone=members.gone_for(record))
        return [Send(receiver=record.name, message=peers)]

    def _notify_peers(self, record: RoleRecord, now: Seconds) -> list[Action]:
        actions: list[Action] = []
        for other in self._members:
            if other.has_joined and record.needs(other):
                actions += self._introduce(other, now)
        return actions

    def restart(self, record: RoleRecord, why: str, now: Seconds) -> list[Action]:
        """Start a new incarnation of a dead role, or leave it out if it died too often.

        `record.is_alive` says which of the two happened.
        """
        if self._restarts_exhausted(record):
            why += f"; left out{self.restarts_text(record)}"
            return self.leave_out(record, why, now)
        if record.was_stable(self._config.stable_seconds):
            record.restarts_in_a_row = 0
        record.restarts_in_a_row += 1
        record.restarts += 1
        text = f"{record.label} {why}: {self._recovery_text(record, now)}"
        reported = self._metrics.report(text, now, "warning")
        # Copies of a shard share their incarnation numbers: they restore each other's
        # checkpoints, which must always come from a lower incarnation.
        copies = [record, *self._failover.copies(record.shard)]
        record.begin_incarnation(1 + max(copy.incarnation for copy in copies), now)
        return [
            reported,
            # The process may only be silent.
            Terminate(name=record.name),
            Launch(name=record.name, incarnation=record.incarnation),
            *self._notify_peers(record, now),
        ]

    def _restarts_exhausted(self, record: RoleRecord) -> bool:
        settled = record.was_stable(self._config.stable_seconds)
        bound = self._config.restarts_max(record.kind, trains=record.trains)
        return record.restarts_in_a_row >= bound and not (settled and bound)

    def is_dispensable(self, record: RoleRecord) -> bool:
        """Return whether the job ends without this role, so that it is not restarted."""
        stage = self._shutdown_state.stage
        return stage >= ShutdownStage.CLOSE or (record.trains and stage is not ShutdownStage.RUN)

    def restarts_text(self, record: RoleRecord) -> str:
        """Return " after 3 restarts, none of which lasted 30 s"."""
        n = record.restarts_in_a_row
        noun = "restart" if n == 1 else "restarts"
        text = f" after {n} {noun}, none of which lasted "
        return f"{text}{self._config.stable_seconds:g} s" if n else ""

    def leave_out(self, record: RoleRecord, why: str, now: Seconds) -> list[Action]:
        """Continue without this role, and without the ranks of its model-parallel group."""
        actions: list[Action] = [self._metrics.report(f"{record.label} {why}", now, "error")]
        group = [r for r in self._members.ranks_with(record) if r.is_alive]
        if group:
            names = ", ".join(other.label for other in group)
            text = f"{names} left out with {record.label}: they are of one model"
            actions.append(self._metrics.report(text, now, "error"))
        for each in (record, *group):
            each.presence = Presence.LEFT_OUT
            actions += [Terminate(name=each.name), *self._notify_peers(each, now)]
        return actions

    def finished(self, record: RoleRecord, now: Seconds) -> list[Action]:
        """Handle the planned end of a role."""
        record.presence = Presence.FINISHED
        if record.kind == "guest":
            self._members.leave(record)
        actions = self._notify_peers(record, now)
        if record.kind == "shard" and not self._failover.is_primary(record):
            actions += self._failover.lost(record, now)  # its primary need not wait for it
        return actions

    def _recovery_text(self, record: RoleRecord, now: Seconds) -> str:
        if record.kind != "shard":
            return "restarting it"
        other = self._failover.survivor(record)
        if other is None:
            return self._recovery_without_backup(record, now)
        if other.end is not None:
            return f"restarting it; {other.label} is dead too"
        if not self._failover.answers(other, now):
            return f"restarting it; {other.label}, which is in sync, is silent"
        verb = "takes over" if self._failover.was_primary(record) else "goes on alone"
        text = f"{other.label} {verb}, nothing acknowledged is lost"
        return f"{text}; restarting {record.label}"

    def _recovery_without_backup(self, record: RoleRecord, now: Seconds) -> str:
        coordinator = self._members.coordinator
        if coordinator is not None:
            point = self._checkpoints.describe(coordinator.name, now)
            return f"restarting it from {point}; the run goes on from there"
        text = f"restarting it from {self._checkpoints.describe(record.shard, now)}"
        if not self._failover.is_primary(record):
            return text
        clock = record.counters.get("clock", 0.0)
        n_lost = self._checkpoints.n_since(record.shard, clock)
        if n_lost:
            noun = "push" if n_lost == 1 else "pushes"
            text += f"; about {n_lost:,} acknowledged {noun} will be lost"
        return text

    def silent(self, now: Seconds) -> tuple[list[Action], list[tuple[RoleRecord, str]]]:
        """Look for silent roles.

        Returns:
            Actions to take at once, and the roles that count as dead, with the reason.
        """
        actions: list[Action] = []
        dead: list[tuple[RoleRecord, str]] = []
        for record in list(self._members):
            why = self._cause_of_death(record, now)
            if why is not None:
                dead.append((record, why))
            elif record.presence is Presence.PRESENT:
                actions += self._report_if_silent(record, now)
        return actions, dead

    def _cause_of_death(self, record: RoleRecord, now: Seconds) -> str | None:
        config, silence = self._config, now - record.heard_at
        if record.presence is Presence.LAUNCHED and silence > config.start_seconds_max:
            return f"has sent nothing for {silence:.0f} s since it was started"
        if record.presence is not Presence.PRESENT or record.kind == "guest":
            return None
        if silence > self._dead_after(record, now):
            return f"silent for {silence:.1f} s"
        building = now - record.launched_at
        if record.state == "building" and building > config.build_seconds_max:
            return f"has been building its model and data for {building:.0f} s"
        return None

    def _dead_after(self, record: RoleRecord, now: Seconds) -> Seconds:
        # A primary whose backup cannot take over holds what nobody else has. So if both copies
        # are silent, the backup is killed first.
        alone = self._failover.is_irreplaceable(record, now)
        return self._config.dead_seconds * (2 if alone else 1)

    def _report_if_silent(self, record: RoleRecord, now: Seconds) -> list[Action]:
        config, silence = self._config, now - record.heard_at
        if record.kind == "guest":
            if silence <= config.dead_seconds:
                return []
            record.presence = Presence.AWAY
            text = f"{record.label} silent for {silence:.1f} s: going on without it"
            return [self._metrics.report(text, now), *self._notify_peers(record, now)]
        if record.silence_reported or silence <= config.silent_seconds:
            return []
        record.silence_reported = True
        left = f"in {self._dead_after(record, now) - silence:.0f} s"
        other = self._failover.survivor(record)
        if self.is_dispensable(record):
            plan = f"{left} ending without it"
        elif self._restarts_exhausted(record):
            end = "going on without it" if record.kind != "shard" else "giving up"
            plan = f"{left} {end}"
        elif other is not None and self._failover.is_irreplaceable(record, now):
            plan = f"so is {other.label}; if neither comes back, {left} "
            plan += self._recovery_without_backup(record, now)
        else:
            plan = f"{left} {self._recovery_text(record, now)}"
        text = f"{record.label} silent for {silence:.1f} s: {plan}"
        return [self._metrics.report(text, now, "warning")]


TIMER: Final = "supervisor:lost:"

# Last messages of a role may arrive after the news that its process ended.
LAST_MESSAGES_SECONDS: Final = 0.1


@final
class RestartPolicy:
    """Decides what follows from the death of a role: restart, takeover, or the end of the job."""

    def __init__(self, job: JobState, *, heartbeats: Heartbeats) -> None:
        self._shutdown_state = job.shutdown
        self._members = job.members
        self._failover = job.failover
        self._heartbeats = heartbeats
        self._checkpoints = job.checkpoints
        self._evaluations = job.evaluations
        self._metrics = job.metrics

    def process_ended(self, event: PeerLost, now: Seconds) -> list[Action]:
        """Handle the end of a process: wait a moment for its last messages."""
        record = self._members.get(event.peer)
        if record is None or event.incarnation != record.incarnation or not record.is_alive:
            return []
        record.end = event.reason
        if self._shutdown_state.interrupted or self._shutdown_state.stage >= ShutdownStage.CLOSE:
            return self.confirm_death(record.name, now)
        timer = SetTimer(name=f"{TIMER}{record.name}", at=now + LAST_MESSAGES_SECONDS)
        return [timer]

    def confirm_death(self, name: Address, now: Seconds) -> list[Action]:
        """Handle the death of a role whose process has ended and whose last messages have come."""
        record = self._members.get(name)
        if record is None or record.end is None or not record.is_alive:
            return []
        why = f"failed ({record.failure})" if record.failure else record.end
        return self.handle_death(record, why, now)

    def handle_death(self, record: RoleRecord, why: str, now: Seconds) -> list[Action]:
        """Handle the death of a role: restart it unless the job no longer needs it."""
        ending = self._shutdown_state
        if ending.interrupted or (ending.stage >= ShutdownStage.CLOSE and record.end):
            return self._heartbeats.finished(record, now)
        if self._heartbeats.is_dispensable(record):
            text = f"{record.label} {why} while it was stopping"
            reported = self._metrics.report(text, now, "warning")
            return [reported, Terminate(name=record.name), *self._heartbeats.finished(record, now)]
        was_primary = self._failover.was_primary(record)
        actions = self._heartbeats.restart(record, why, now)
        if record.kind == "shard":
            actions += self.replace(record, why, now, was_primary=was_primary)
        if not record.is_alive:
            self.cancel_requests(record)
        if record.kind == "coordinator" and not record.is_alive:
            often = self._heartbeats.restarts_text(record)
            error = f"the coordinator cannot be kept alive{often}: it {why}"
            self._shutdown_state.begin(error, now, error=error)
        return actions

    def cancel_requests(self, record: RoleRecord) -> None:
        """Cancel requests to a role that is gone for good."""
        if record.kind in {"evaluator", "machine"} and not record.trains:
            self._evaluations.give_up()
        if not any(copy.is_alive for copy in self._failover.copies(record.shard)):
            self._checkpoints.forget(record.shard)

    def replace(
        self, record: RoleRecord, why: str, now: Seconds, *, was_primary: bool
    ) -> list[Action]:
        """Let the other copy of a shard take over from a dead one, if there is another.

        Args:
            record: The copy that died.
            why: Cause of death, for messages.
            now: The present.
            was_primary: Whether it was the primary.
        """
        actions: list[Action] = [*self._failover.lost(record, now)]
        primary = self._failover.primary(record.shard)
        if was_primary and primary is not None and primary is not record:
            save = self._checkpoints.repeat(record.shard, now, at_once=True)
            actions += [Send(receiver=primary.name, message=save)] if save else []
        if record.is_alive:
            return actions
        others = [copy for copy in self._failover.copies(record.shard) if copy.is_alive]
        if not others:
            often = self._heartbeats.restarts_text(record)
            label = record.shard.replace("-", " ")
            error = f"{label} cannot be kept alive{often}: it {why}"
            self._shutdown_state.begin(error, now, error=error)
        elif primary is None and others[0].has_joined:
            # It is out of sync: only a new incarnation, with a checkpoint, can become primary.
            why = f"is not in sync, and {record.label} will not come back"
            actions += self.handle_death(others[0], why, now)
        return actions
