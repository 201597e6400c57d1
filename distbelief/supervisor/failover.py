"""Primary election: which copy of each shard serves the clients.

    term   event                              decision: Promote
     1     shard-0 joins                      shard-0,  no backup
     2     shard-0b joins                     shard-0,  backup shard-0b
           shard-0b reports in sync (term 2)
     3     shard-0 dies, or is silent         shard-0b, no backup
     4     shard-0 joins again                shard-0b, backup shard-0

This is the view change of a primary and its backup (Alsberg & Day 1976; Liskov & Cowling 2012)
with the supervisor in place of a vote. A shard with one copy needs no election.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

import msgspec

from distbelief.parameter_server.lost_pushes import Lost, lost_after, n_lost
from distbelief.parameter_server.shard_config import other_copy
from distbelief.protocol import BackupInSync, BackupUnresponsive, Promote
from distbelief.protocol.log_events import LogEvent
from distbelief.protocol.role import Action, Address, Seconds, Send, Terminate
from distbelief.supervisor.membership import Membership, RoleRecord
from distbelief.supervisor.output import Output
from distbelief.supervisor.periodic_requests import Checkpoints


# How long a primary stays without a backup after BackupUnresponsive: a backup that comes and goes
# would block its pushes again and again.
REST_SECONDS = 1.0
# Until copies that another supervisor started count as silent: they join again first.
ADOPTED_SECONDS: Final = 20.0


class ElectionState(msgspec.Struct, frozen=True, kw_only=True):
    primary: str | None
    backup: str | None
    term: int
    in_sync: bool
    incarnations: dict[str, int]  # of the copies that are there


@final
class PrimaryElection:
    """Chooses the primary of one shard and its backup.

    * The term rises with every decision, so that of two primaries everybody believes the later.
      Only the latest `Promote` is repeated, until the primary's counter "term" confirms it.
    * A backup takes over only if it is in sync for the present term. A primary acknowledges alone
      only by a later term than that, so a new primary has every acknowledged push.
    * Each `Promote` names the incarnations of both copies: a name is not enough, for a message to a
      dead incarnation can reach the next one.
    * If no copy may take over, there is no primary until a copy joins with its newest checkpoint.

    Repeated news does no harm. `joined` must be called once per incarnation of a copy, and `tick`
    several times in `takeover_seconds`.
    """

    def __init__(
        self, copies: tuple[Address, Address], *, first: int, takeover_seconds: Seconds = 1.0
    ) -> None:
        """Begin without any copy; `first` is above every earlier term and saved incarnation."""
        self._copies = copies
        self._takeover_seconds = takeover_seconds
        self._heard: dict[Address, Seconds] = {}  # last heartbeat of each copy that is present
        self._incarnations: dict[Address, int] = {}  # latest incarnation that joined
        self._rests_until: Seconds = 0.0
        self._ticked: Seconds | None = None
        self.primary: Address | None = None
        self.backup: Address | None = None
        self.term = first - 1
        self.in_sync = False  # whether the backup holds everything that was acknowledged

    def state(self) -> ElectionState:
        return ElectionState(
            primary=self.primary,
            backup=self.backup,
            term=self.term,
            in_sync=self.in_sync,
            incarnations={copy: self._incarnations[copy] for copy in self._heard},
        )

    def adopt(self, state: ElectionState, now: Seconds) -> None:
        """Go on where another supervisor has come to."""
        self.primary = None if state.primary is None else Address(state.primary)
        self.backup = None if state.backup is None else Address(state.backup)
        self.term, self.in_sync = state.term, state.in_sync
        self._incarnations = {Address(copy): n for copy, n in state.incarnations.items()}
        self._heard = dict.fromkeys(self._incarnations, now + ADOPTED_SECONDS)

    def joined(self, copy: Address, incarnation: int, now: Seconds) -> list[Action]:
        """Note a new incarnation of this copy; an earlier one, if any, is over."""
        if copy in self._heard and self._incarnations[copy] == incarnation:
            self._heard[copy] = now  # it was adopted
            return []
        before = self.lost(copy)
        self._heard[copy] = now
        self._incarnations[copy] = incarnation
        if self.primary is None:
            return self._promote(copy, backup=None)
        return self._choose_backup(now) or before

    def lost(self, copy: Address) -> list[Action]:
        """Note that this copy's incarnation is over; an in-sync backup takes over."""
        self._heard.pop(copy, None)
        if copy == self.backup:
            assert self.primary is not None
            return self._promote(self.primary, backup=None)
        if copy != self.primary:
            return []
        if self.backup is not None and self.in_sync:
            return self._promote(self.backup, backup=None)
        self.primary = self.backup = None
        return []

    def heard(self, copy: Address, counters: Mapping[str, float], now: Seconds) -> list[Action]:
        if copy not in self._heard:
            return []
        self._heard[copy] = now
        if copy == self.primary and counters.get("term", 0.0) < self.term:
            return [self._latest()]
        if copy == self.backup and counters.get("in_sync", 0.0) == self.term:
            self.in_sync = True
        return self._choose_backup(now)

    def backup_unresponsive(self, copy: Address, term: int, now: Seconds) -> list[Action]:
        """Let a primary acknowledge alone because its backup of that term does not answer."""
        if copy != self.primary or copy not in self._heard:
            return []
        self._heard[copy] = now
        if self.backup is None or term != self.term:
            return [self._latest()]
        self._rests_until = now + REST_SECONDS
        return self._promote(copy, backup=None)

    def tick(self, now: Seconds) -> list[Action]:
        """Replace a silent primary, or choose a backup; `Terminate` a primary that is replaced."""
        late = 0.0 if self._ticked is None else now - self._ticked
        self._ticked = now
        if late > self._takeover_seconds / 2:
            # The supervisor itself was suspended.
            self._heard = dict.fromkeys(self._heard, now)
        silent = self.primary
        if silent is None or self._answers(silent, now):
            return self._choose_backup(now)
        if self.backup is None or not self.in_sync:
            return []  # no other copy can take over; a primary reports its own mute backup
        if not self._answers(self.backup, now):
            return []  # both silent: the network of the supervisor may be at fault
        # A primary never becomes a backup within one incarnation: it may have applied what its
        # successor never saw. So it is killed.
        self._heard.pop(silent, None)
        return [*self._promote(self.backup, backup=None), Terminate(name=silent)]

    def _answers(self, copy: Address, now: Seconds) -> bool:
        return now - self._heard[copy] < self._takeover_seconds

    def _choose_backup(self, now: Seconds) -> list[Action]:
        if self.primary is None or self.backup is not None or now < self._rests_until:
            return []
        other = self._copies[self.primary == self._copies[0]]
        if other not in self._heard or not self._answers(other, now):
            return []
        return self._promote(self.primary, backup=other)

    def _promote(self, primary: Address, *, backup: Address | None) -> list[Action]:
        self.primary, self.backup, self.in_sync = primary, backup, False
        self.term += 1
        return [self._latest()]

    def _latest(self) -> Send:
        assert self.primary is not None
        promote = Promote(
            term=self.term,
            receiver_incarnation=self._incarnations[self.primary],
            backup=self.backup or "",
            backup_incarnation=self._incarnations[self.backup] if self.backup else 0,
        )
        return Send(receiver=self.primary, message=promote)


TAKEOVER_SECONDS: Final = 1.0  # silence after which the other copy takes over


@dataclass(slots=True, kw_only=True)
class _PushCount:
    """Counts the pushes that were in a shard's values, and those that were lost.

    The count goes on from a primary to its in-sync backup. A copy that begins from a checkpoint
    begins with the pushes in it: those reported beyond are lost. Pushes applied after the last
    heartbeat of a dead copy cannot be counted, and are lost as well.
    """

    seen: int = 0  # number of the newest push that was in the values
    lost: Lost = ()
    counted: tuple[str, int] | None = None  # name and incarnation of the primary
    was_in_sync: bool = False  # whether that one was a backup in sync, or began from a checkpoint

    def add(self, record: RoleRecord) -> None:
        clock = record.counters.get("clock")
        if clock is None:
            return
        applied = record.counters.get("pushes_applied", 0.0)
        process = (record.name, record.incarnation)
        if process != self.counted and not self.was_in_sync:
            restored = int(record.counters.get("pushes_restored", clock - applied))
            self.lost = lost_after(self.lost, seen=self.seen, kept=restored)
            self.seen = max(self.seen, restored + n_lost([self.lost]))
        self.counted = process
        pushes = int(record.counters.get("pushes", clock))
        self.seen = max(self.seen, pushes + n_lost([self.lost]))


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    seen: int
    lost: list[tuple[int, int]]
    counted: tuple[str, int] | None
    was_in_sync: bool
    election: ElectionState | None


@final
class ShardFailover:
    """The elections of all shards, and the count of their pushes.

    A push counts once, however many shards and copies it goes to: it is applied if it is in the
    values of every shard, and lost if it was acknowledged and one shard no longer has it.
    """

    def __init__(
        self, members: Membership, out: Output, *, first: int, clocks: Mapping[str, int]
    ) -> None:
        self._members = members
        self._out = out
        self._elections: dict[Address, PrimaryElection] = {}  # of shards with two copies
        self._push_counts: dict[Address, _PushCount] = {}
        self._demoted: set[tuple[Address, int]] = set()  # names and incarnations
        for record in members.of("shard"):
            if record.name != record.shard:
                continue
            self._push_counts[record.shard] = _PushCount(seen=clocks.get(record.shard, 0))
            other = members.get(other_copy(record.name))
            if other is not None:
                self._elections[record.shard] = PrimaryElection(
                    (record.name, other.name), first=first, takeover_seconds=TAKEOVER_SECONDS
                )

    def states(self) -> dict[str, ShardState]:
        """Return what another supervisor would go on with, by shard."""
        return {
            shard: ShardState(
                seen=count.seen,
                lost=[(part.start, part.stop) for part in count.lost],
                counted=count.counted,
                was_in_sync=count.was_in_sync,
                election=self._elections[shard].state() if shard in self._elections else None,
            )
            for shard, count in self._push_counts.items()
        }

    def adopt(self, states: Mapping[str, ShardState]) -> None:
        for shard, count in self._push_counts.items():
            state = states[shard]
            count.seen, count.lost = state.seen, tuple(range(*part) for part in state.lost)
            count.counted, count.was_in_sync = state.counted, state.was_in_sync
            if state.election is not None:
                self._elections[shard].adopt(state.election, self._out.now)

    @property
    def all_have_primary(self) -> bool:
        primaries = [self.primary(record.shard) for record in self._members.of("shard")]
        return all(primary is not None and primary.has_joined for primary in primaries)

    def copies(self, shard: Address) -> list[RoleRecord]:
        return [record for record in self._members.of("shard") if record.shard == shard]

    def primary(self, shard: Address) -> RoleRecord | None:
        """Return the primary of this shard if it is alive; a single copy always is the primary."""
        election = self._elections.get(shard)
        name = shard if election is None else election.primary
        record = None if name is None else self._members.get(name)
        return record if record is not None and record.is_alive else None

    def is_primary(self, record: RoleRecord) -> bool:
        election = self._elections.get(record.shard)
        return election is None or election.primary == record.name

    def was_primary(self, record: RoleRecord) -> bool:
        """Return whether this incarnation is the primary, or was until it was demoted."""
        return self.is_primary(record) or (record.name, record.incarnation) in self._demoted

    def _survivor(self, record: RoleRecord) -> RoleRecord | None:
        # The copy that has all of the shard if this one is lost. It may be silent or dead itself.
        election = self._elections.get(record.shard)
        if election is None:
            return None
        if election.primary != record.name:
            return self.primary(record.shard)
        if election.backup is None or not election.in_sync:
            return None
        return self._members.get(election.backup)

    def _answers(self, record: RoleRecord) -> bool:
        # Whether this copy is neither dead nor silent.
        silence = self._out.now - record.heard_at
        return record.has_joined and record.end is None and silence < TAKEOVER_SECONDS

    def is_irreplaceable(self, record: RoleRecord) -> bool:
        """Return whether it is the primary of two copies, and its backup cannot take over now."""
        election = self._elections.get(record.shard)
        if election is None or election.primary != record.name:
            return False
        other = self._survivor(record)
        return other is None or not self._answers(other)

    def copy_role(self, record: RoleRecord) -> str | None:
        """Return "primary", "backup" or "syncing" for one of two copies, else None."""
        election = self._elections.get(record.shard)
        if election is None or record.name not in {election.primary, election.backup}:
            return None
        if election.primary == record.name:
            return "primary"
        return "backup" if election.in_sync else "syncing"

    def joined(self, record: RoleRecord) -> list[Action]:
        """Note a new incarnation; return what to send once the others know of it."""
        election = self._elections.get(record.shard)
        if election is None:
            return []
        return election.joined(record.name, record.incarnation, self._out.now)

    def heartbeat(self, record: RoleRecord) -> None:
        election = self._elections.get(record.shard)
        if election is not None:
            self._out.add(*election.heard(record.name, record.counters, self._out.now))

    def lost(self, record: RoleRecord) -> None:
        election = self._elections.get(record.shard)
        if election is None:
            return
        was_primary = election.primary == record.name
        self._out.add(*election.lost(record.name))
        if was_primary:
            self._push_counts[record.shard].was_in_sync = election.primary is not None

    def reported(self, record: RoleRecord, message: BackupUnresponsive | BackupInSync) -> None:
        election, name, term = self._elections.get(record.shard), record.name, message.term
        if election is None:
            return
        is_of_now = term == election.term
        event: LogEvent | None = None
        if isinstance(message, BackupInSync):
            if is_of_now and name == election.backup and not election.in_sync:
                event = LogEvent("backup_in_sync", role=name)
            actions = election.heard(name, {"in_sync": float(term)}, self._out.now)
        else:
            if is_of_now and name == election.primary and election.backup:
                event = LogEvent("backup_unresponsive", role=name, other=election.backup)
            actions = election.backup_unresponsive(name, term, self._out.now)
        self._out.add(*actions)
        if event is not None:
            self._out.log(event)

    def restart_event(self, record: RoleRecord, why: str, checkpoints: Checkpoints) -> LogEvent:
        """Return the log event of a role that is restarted, with what is lost by that."""
        now = self._out.now
        what, other, detail, n = "role_restarted", "", "", 0
        survivor, coordinator = self._survivor(record), self._members.coordinator
        if survivor is not None:
            other = survivor.name
            if survivor.end is not None:
                what = "other_copy_dead"
            elif not self._answers(survivor):
                what = "other_copy_silent"
            else:
                what = "backup_takes_over" if self.was_primary(record) else "primary_alone"
        elif record.kind == "shard" and coordinator is not None:
            what, detail = "run_restored", checkpoints.describe(coordinator.name, now)
        elif record.kind == "shard":
            what, detail = "shard_restored", checkpoints.describe(record.shard, now)
            if self.is_primary(record):
                n = checkpoints.n_since(record.shard, record.counters.get("clock", 0.0))
                what = "shard_restored_with_loss" if n else what
        name, incarnation = record.name, record.incarnation
        return LogEvent(what, name, incarnation, reason=why, other=other, detail=detail, n=n)

    def tick(self) -> list[RoleRecord]:
        """Let backups take over; return the silent primaries to kill."""
        demoted: list[RoleRecord] = []
        for shard, election in self._elections.items():
            for action in election.tick(self._out.now):
                record = self._members.get(action.name) if isinstance(action, Terminate) else None
                if record is None:
                    self._out.add(action)
                    continue
                self._push_counts[shard].was_in_sync = True
                self._demoted.add((record.name, record.incarnation))
                demoted.append(record)
        return demoted

    def count(self, record: RoleRecord) -> None:
        push_count = self._push_counts.get(record.shard)
        if push_count is not None and self.is_primary(record):
            push_count.add(record)

    @property
    def pushes_applied(self) -> int:
        """Pushes in every shard's values; shards differ in order, so wrong by those in flight."""
        # A shard without elements may have met none of the pushes.
        seen = [push_count.seen for push_count in self._push_counts.values() if push_count.seen]
        return max(min(seen, default=0) - self.pushes_lost, 0)

    @property
    def pushes_lost(self) -> int:
        return n_lost(push_count.lost for push_count in self._push_counts.values())  # a lower bound
