"""The lives of a job's roles: launch, introduction, silence, death, restart.

What the supervisor does for each role whatever the job is doing. Rules:

* A role that falls silent is named at once, with what will be done about it. Longer
  silence is death: its process is ended, whatever it is doing.
* Every start is a new incarnation; words of an older one are not heard.
* Shards come back from their newest whole snapshot. Clients are told who is there
  whenever that changes, and now and then again, for messages may be lost.
* Guests are neither ended nor restarted: their processes are somebody else's.
"""

from typing import final

from distbelief.job.figures import Figures
from distbelief.job.membership import Membership, Presence, RoleRecord
from distbelief.job.rounds import Saves
from distbelief.job.supervisor_config import SupervisorConfig
from distbelief.messages import Alive, Heartbeat, Join, Peers
from distbelief.roles import Action, Connect, Launch, Seconds, Send, Terminate


INTRODUCE_SECONDS = 5.0
"""After which a role is told of its peers again."""


@final
class Lives:
    """Looks after all members."""

    def __init__(
        self,
        config: SupervisorConfig,
        members: Membership,
        *,
        saves: Saves,
        figures: Figures,
    ) -> None:
        self._config = config
        self._members = members
        self._saves = saves
        self._figures = figures

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
        """It can be spoken to from now on."""
        actions: list[Action] = []
        if record.join(message):
            connect = Connect(
                peer=record.name,
                incarnation=record.incarnation,
                endpoint=message.endpoint,
                host=message.host,
            )
            actions = [connect, *self._tell_others(record, now)]
        return [*actions, *self._introduce(record, now)]

    def beaten(
        self, record: RoleRecord, message: Heartbeat, now: Seconds
    ) -> list[Action]:
        """It says how it is."""
        record.state, record.counters = message.state, message.counters
        if record.kind == "shard":
            applied = message.counters.get("pushes_applied")
            if applied is not None:
                record.rate.add(now, applied)
        if not record.has_joined:
            return []
        actions: list[Action] = [Send(receiver=record.name, message=Alive())]
        told_at = record.introduced_at
        if told_at is not None and now - told_at >= INTRODUCE_SECONDS:
            actions += self._introduce(record, now)
        return actions

    def _introduce(self, record: RoleRecord, now: Seconds) -> list[Action]:
        """Tell a role whom it needs; a client not before all shards are there."""
        if (
            record.kind != "shard"
            and record.introduced_at is None
            and not self._members.shards_are_there
        ):
            return []
        record.introduced_at = now
        peers = Peers(entries=self._members.entries_for(record))
        return [Send(receiver=record.name, message=peers)]

    def _tell_others(self, record: RoleRecord, now: Seconds) -> list[Action]:
        """Tell those who need this role that it is there, or no longer."""
        actions: list[Action] = []
        for other in self._members:
            if other.has_joined and (other.kind == "shard") != (record.kind == "shard"):
                actions += self._introduce(other, now)
        return actions

    # --------------------------------------------------------------------- deaths

    def restart(self, record: RoleRecord, why: str, now: Seconds) -> list[Action]:
        """Begin a new life of a role that is dead; leave it out if it died too often.

        Afterwards `record.is_alive` tells which.
        """
        bound = self._config.restarts_max(record.kind)
        if record.restarts >= bound:
            return self.leave_out(
                record, f"{why}; left out after {record.restarts} restarts", now
            )
        record.restarts += 1
        text = f"{record.label} {why}: {self._plan(record, now)}"
        said = self._figures.tell(text, now, "warning")
        record.begin_life(record.incarnation + 1, now)
        return [
            said,
            # What the launcher took for dead may be only silent.
            Terminate(name=record.name),
            Launch(name=record.name, incarnation=record.incarnation),
            *self._tell_others(record, now),
        ]

    def leave_out(self, record: RoleRecord, why: str, now: Seconds) -> list[Action]:
        """Go on without it."""
        record.presence = Presence.LEFT_OUT
        return [
            self._figures.tell(f"{record.label} {why}", now, "error"),
            Terminate(name=record.name),
            *self._tell_others(record, now),
        ]

    def finished(self, record: RoleRecord, now: Seconds) -> list[Action]:
        """It has ended as planned."""
        record.presence = Presence.FINISHED
        if record.kind == "guest":
            self._members.leave(record)
        return self._tell_others(record, now)

    def _plan(self, record: RoleRecord, now: Seconds) -> str:
        """Return what is done about the loss of a role, and what it costs."""
        if record.kind != "shard":
            return "restarting it"
        text = f"restarting it from {self._saves.describe(record.name, now)}"
        clock = record.counters.get("clock", 0.0)
        n_lost = self._saves.n_since(record.name, clock)
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
        if silence > config.dead_seconds:
            return f"silent for {silence:.1f} s"
        building = now - record.launched_at
        if record.state == "building" and building > config.build_seconds_max:
            return f"has been building its model and data for {building:.0f} s"
        return None

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
        left = config.dead_seconds - silence
        if record.restarts < config.restarts_max(record.kind):
            plan = self._plan(record, now)
        else:
            plan = "going on without it" if record.kind != "shard" else "giving up"
        text = f"{record.label} silent for {silence:.1f} s: in {left:.0f} s {plan}"
        return [self._figures.tell(text, now, "warning")]
