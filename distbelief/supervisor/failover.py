"""Which copy of each shard leads, as the supervisor sees it.

A shard with one copy is led by it. Of two copies, `PrimaryElection` decides; what the other one
does (`part`), and whether it could take over now (`survivor`, `answers`), is told here.
A push is one push, however many shards it goes to and however many copies these have:
it is applied if it is in the values of every shard, and lost if it was acknowledged and
one of them has it no more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from distbelief.parameter_server.lost_pushes import Lost, lost_after, n_lost
from distbelief.parameter_server.replication import other_copy
from distbelief.protocol import BackupInSync, BackupUnresponsive, Promote
from distbelief.roles.role import Address, Seconds, Send
from distbelief.supervisor.membership import Membership, RoleRecord


# Which of a shard's two copies leads: the supervisor's decision, one per shard.
#
#     pairing   event                             decided: Lead
#        1      shard-0 joins                     to shard-0,  second ""
#        2      shard-0b joins                    to shard-0,  second "shard-0b"
#               shard-0b is whole for 2
#        3      shard-0 dies, or is silent        to shard-0b, second ""
#        4      shard-0 joins, alive anew         to shard-0b, second "shard-0"
#        5      shard-0b says Alone(4)            to shard-0b, second ""
#        6      a second later shard-0 is heard   to shard-0b, second "shard-0"
#
# Rules:
#
# * The pairing rises with every decision, so that of two leaders everybody believes the
#   later one. Only the latest is repeated: as long as its receiver says, by its counter
#   "pairing", that it has not come.
# * The second takes over only if it is whole for the present pairing. A leader may
#   acknowledge alone only by a later pairing than that for which its second was whole; so
#   whoever takes over has everything that was ever acknowledged. This is the view
#   change of a primary and its backup (Alsberg & Day 1976; Liskov & Cowling 2012) with
#   the supervisor in place of a vote.
# * Each Lead names the life that is to obey it, and that of the second, so that a pairing
#   belongs to one life of each. A name is not enough: what was told a life that has died
#   can reach the next one.
# * If nobody may take over, nobody leads until a copy joins: a life that has just begun
#   holds the newest snapshot.
# * A leader is never made a second within one life: it may have applied what its
#   successor never saw. One that was deposed for its silence is ended by force.

REST_SECONDS = 1.0
"""How long a leader stays alone after it had to ask for it: a second that comes and
goes would hold up its pushes again and again."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the supervisor is to do now."""

    sends: tuple[Send, ...] = ()  # each a `Promote`
    deposed: Address | None = None  # end it by force, and start it again


_NOTHING = Decision()


@final
class PrimaryElection:
    """Who leads one shard, and who is its second.

    Its methods tell it what happened; each may be called again with the same news. It
    only wants every life of a copy to be `joined` once, and `tick` to be called several
    times in `takeover_seconds`.

    Attributes:
        leader: Who leads, as far as the supervisor is concerned; None: nobody.
        second: Who is to hold everything as well; None: nobody.
        number: The pairing of the latest Lead; `first` - 1 before there was one.
        is_whole: Does the second hold everything that was acknowledged?
    """

    def __init__(
        self, copies: tuple[Address, Address], *, first: int, takeover_seconds: Seconds = 1.0
    ) -> None:
        """Store; nobody has joined yet.

        Args:
            copies: Names of the two roles.
            first: Pairing of the first Lead: beyond all of the run that this one
                resumes, and beyond the incarnation of every snapshot of the shard.
            takeover_seconds: A silence of the leader after which a second that is whole
                takes over.
        """
        if first < 1:
            raise ValueError(f"first is {first}; pairings are counted from 1")
        if not takeover_seconds > 0:
            raise ValueError(f"takeover_seconds is {takeover_seconds}; use more than 0")
        if copies[0] == copies[1]:
            raise ValueError(f"both copies are called {copies[0]!r}: name them apart")
        self._copies = copies
        self._takeover_seconds = takeover_seconds
        self._heard: dict[Address, Seconds] = {}  # those that are there
        self._lives: dict[Address, int] = {}  # the latest that joined
        self._rests_until: Seconds = 0.0
        self._ticked: Seconds | None = None
        self.leader: Address | None = None
        self.second: Address | None = None
        self.number = first - 1
        self.is_whole = False

    # ---------------------------------------------------------------------- lives

    def joined(self, copy: Address, incarnation: int, now: Seconds) -> Decision:
        """A life of this copy has begun; one before it, if any, is over."""
        before = self.lost(copy, now)
        self._heard[copy] = now
        self._lives[copy] = incarnation
        if self.leader is None:
            return self._lead(copy, second=None)
        after = self._pair(now)
        return after if after.sends else before

    def lost(self, copy: Address, now: Seconds) -> Decision:
        """The life of this copy is over."""
        del now
        self._check(copy)
        self._heard.pop(copy, None)
        if copy == self.second:
            assert self.leader is not None
            return self._lead(self.leader, second=None)
        if copy != self.leader:
            return _NOTHING
        if self.second is not None and self.is_whole:
            return self._lead(self.second, second=None)
        self.leader = self.second = None
        return _NOTHING

    def silent(self, copy: Address, now: Seconds) -> Decision:
        """This copy does not talk: who can take its place does."""
        self._check(copy)
        if copy != self.leader or self.second is None or not self.is_whole:
            return _NOTHING  # it is better than nobody; a second's leader will complain
        if not self._talks(self.second, now):
            return _NOTHING  # perhaps it is not they who are silent
        self._heard.pop(copy, None)
        decision = self._lead(self.second, second=None)
        return Decision(sends=decision.sends, deposed=copy)

    # ------------------------------------------------------------------- messages

    def heard(self, copy: Address, counters: Mapping[str, float], now: Seconds) -> Decision:
        """A heartbeat of this copy's present life has come."""
        self._check(copy)
        if copy not in self._heard:
            return _NOTHING
        self._heard[copy] = now
        if copy == self.leader and counters.get("pairing", 0.0) < self.number:
            return self._again()
        if copy == self.second and counters.get("whole", 0.0) == self.number:
            self.is_whole = True
        return self._pair(now)

    def whole(self, copy: Address, pairing: int, now: Seconds) -> Decision:
        """This copy says that it is whole for that pairing."""
        return self.heard(copy, {"whole": float(pairing)}, now)

    def alone(self, copy: Address, pairing: int, now: Seconds) -> Decision:
        """This copy asks to acknowledge alone: its second of that pairing is mute."""
        self._check(copy)
        if copy != self.leader or copy not in self._heard:
            return _NOTHING
        self._heard[copy] = now
        if self.second is None or pairing != self.number:
            return self._again()
        self._rests_until = now + REST_SECONDS
        return self._lead(copy, second=None)

    # ----------------------------------------------------------------------- time

    def tick(self, now: Seconds) -> Decision:
        """Decide what is due by now."""
        late = 0.0 if self._ticked is None else now - self._ticked
        self._ticked = now
        if late > self._takeover_seconds / 2:
            # It was the supervisor who did not listen.
            self._heard = dict.fromkeys(self._heard, now)
        if self.leader is not None and not self._talks(self.leader, now):
            return self.silent(self.leader, now)
        return self._pair(now)

    def _talks(self, copy: Address, now: Seconds) -> bool:
        return now - self._heard[copy] < self._takeover_seconds

    def _pair(self, now: Seconds) -> Decision:
        """Give the leader a second, if there is one and it is time."""
        if self.leader is None or self.second is not None or now < self._rests_until:
            return _NOTHING
        other = self._copies[self.leader == self._copies[0]]
        if other not in self._heard or not self._talks(other, now):
            return _NOTHING
        return self._lead(self.leader, second=other)

    def _lead(self, leader: Address, *, second: Address | None) -> Decision:
        self.leader, self.second, self.is_whole = leader, second, False
        self.number += 1
        return self._again()

    def _again(self) -> Decision:
        assert self.leader is not None
        lead = Promote(
            pairing=self.number,
            receiver_incarnation=self._lives[self.leader],
            second=self.second or "",
            second_incarnation=self._lives[self.second] if self.second else 0,
        )
        return Decision(sends=(Send(receiver=self.leader, message=lead),))

    def _check(self, copy: Address) -> None:
        if copy not in self._copies:
            raise ValueError(
                f"{copy!r} is no copy of this shard; {self._copies[0]!r} and "
                f"{self._copies[1]!r} are"
            )


LEADING: Final = "leading"
SECOND: Final = "second"
CATCHING_UP: Final = "catching up"

TAKEOVER_SECONDS: Final = 1.0
"""Silence after which a copy is not counted on, and of two the other one leads."""


@dataclass(slots=True, kw_only=True)
class _PushCount:
    """The pushes that were in a shard's values, and those that are no more.

    They go on from leader to whole second. Who begins from a snapshot begins with the
    pushes in it: what was heard of beyond that is lost. What was applied after the last
    word of who died, nobody can count: it is lost as well.
    """

    seen: int = 0  # number of the newest push that was in the values
    lost: Lost = ()
    counted: tuple[Address, int] | None = None  # name and incarnation of whom

    def add(self, record: RoleRecord, *, goes_on: bool) -> None:
        clock = record.counters.get("clock")
        if clock is None:
            return
        applied = record.counters.get("pushes_applied", 0.0)
        life = (record.name, record.incarnation)
        if life != self.counted and not goes_on:
            restored = int(record.counters.get("pushes_restored", clock - applied))
            self.lost = lost_after(self.lost, seen=self.seen, kept=restored)
            self.seen = max(self.seen, restored + n_lost([self.lost]))
        self.counted = life
        pushes = int(record.counters.get("pushes", clock))
        self.seen = max(self.seen, pushes + n_lost([self.lost]))


@final
class ShardFailover:
    """Of all shards.

    Args:
        members: Of the job.
        first: Number of the first decision; a resumed run goes on counting.
        clocks: Pushes in the snapshots that shards begin from; the others begin at 0.
    """

    def __init__(
        self, members: Membership, *, first: int = 1, clocks: Mapping[str, int] | None = None
    ) -> None:
        self._members = members
        self._pairings: dict[Address, PrimaryElection] = {}
        self._tallies: dict[Address, _PushCount] = {}
        # Whether who leads went on with all that was there, or began from a snapshot.
        self._goes_on: dict[Address, bool] = {}
        self._deposed: dict[Address, tuple[Address, int]] = {}  # the last: name, life
        for record in members.of("shard"):
            if record.name != record.shard:
                continue
            clock = (clocks or {}).get(record.shard, 0)
            self._tallies[record.shard] = _PushCount(seen=clock)
            other = members.get(other_copy(record.name))
            if other is not None:
                self._pairings[record.shard] = PrimaryElection(
                    (record.name, other.name), first=first, takeover_seconds=TAKEOVER_SECONDS
                )

    # --------------------------------------------------------------------- who is what

    @property
    def all_led(self) -> bool:
        """Whether every shard has a copy that leads, and that can be spoken to."""
        leaders = [self.leader(record.shard) for record in self._members.of("shard")]
        return all(leader is not None and leader.has_joined for leader in leaders)

    def copies(self, shard: Address) -> list[RoleRecord]:
        """Return the copies of this shard; nothing if it is none."""
        return [record for record in self._members.of("shard") if record.shard == shard]

    def leader(self, shard: Address) -> RoleRecord | None:
        """Return who leads this shard; a single copy does as long as it lives."""
        pairing = self._pairings.get(shard)
        name = shard if pairing is None else pairing.leader
        record = None if name is None else self._members.get(name)
        return record if record is not None and record.is_alive else None

    def leads(self, record: RoleRecord) -> bool:
        """Whether this copy is the one that serves the clients."""
        pairing = self._pairings.get(record.shard)
        return pairing is None or pairing.leader == record.name

    def has_led(self, record: RoleRecord) -> bool:
        """Whether this life leads, or has until it was deposed."""
        life = (record.name, record.incarnation)
        return self.leads(record) or self._deposed.get(record.shard) == life

    def survivor(self, record: RoleRecord) -> RoleRecord | None:
        """Return the copy that has all of the shard if this one is lost.

        Whether that one can go on with it, `answers` tells.
        """
        pairing = self._pairings.get(record.shard)
        if pairing is None:
            return None
        if pairing.leader != record.name:
            return self.leader(record.shard)
        if pairing.second is None or not pairing.is_whole:
            return None
        return self._members.get(pairing.second)

    def answers(self, record: RoleRecord, now: Seconds) -> bool:
        """Whether this copy can be counted on: neither dead nor silent."""
        silence = now - record.heard_at
        return record.has_joined and record.end is None and silence < TAKEOVER_SECONDS

    def is_irreplaceable(self, record: RoleRecord, now: Seconds) -> bool:
        """Whether it leads of two copies, and the other cannot take over now."""
        pairing = self._pairings.get(record.shard)
        if pairing is None or pairing.leader != record.name:
            return False
        other = self.survivor(record)
        return other is None or not self.answers(other, now)

    def part(self, record: RoleRecord) -> str | None:
        """Return in a word what a copy is, if it has another beside it."""
        pairing = self._pairings.get(record.shard)
        if pairing is None:
            return None
        if pairing.leader == record.name:
            return LEADING
        if pairing.second != record.name:
            return None
        return SECOND if pairing.is_whole else CATCHING_UP

    # ----------------------------------------------------------------- what happens

    def joined(self, record: RoleRecord, now: Seconds) -> Sequence[Send]:
        """A life of this role can be spoken to from now on."""
        pairing = self._pairings.get(record.shard)
        if pairing is None:
            return []
        return pairing.joined(record.name, record.incarnation, now).sends

    def beaten(self, record: RoleRecord, now: Seconds) -> Sequence[Send]:
        """It says that it lives, and by its counters which words have reached it."""
        pairing = self._pairings.get(record.shard)
        if pairing is None:
            return []
        return pairing.heard(record.name, record.counters, now).sends

    def lost(self, record: RoleRecord, now: Seconds) -> Sequence[Send]:
        """This life of it is over."""
        pairing = self._pairings.get(record.shard)
        if pairing is None:
            return []
        led = pairing.leader == record.name
        sends = pairing.lost(record.name, now).sends
        if led:
            self._goes_on[record.shard] = pairing.leader is not None
        return sends

    def hear(
        self, record: RoleRecord, message: BackupUnresponsive | BackupInSync, now: Seconds
    ) -> Sequence[Send]:
        """A copy tells how it stands with the other one."""
        pairing = self._pairings.get(record.shard)
        if pairing is None:
            return []
        match message:
            case BackupUnresponsive():
                return pairing.alone(record.name, message.pairing, now).sends
            case BackupInSync():
                return pairing.whole(record.name, message.pairing, now).sends

    def news(self, record: RoleRecord, message: BackupUnresponsive | BackupInSync) -> str:
        """Return what is worth telling of this message, before it is heard."""
        pairing = self._pairings.get(record.shard)
        if pairing is None or message.pairing != pairing.number:
            return ""
        match message:
            case BackupInSync() if record.name == pairing.second and not pairing.is_whole:
                return f"{record.label} holds all that its leader has acknowledged"
            case BackupUnresponsive() if record.name == pairing.leader and pairing.second:
                other = pairing.second.replace("-", " ")
                return f"{other} does not answer {record.label}, which goes on alone"
            case _:
                return ""

    def tick(self, now: Seconds) -> tuple[list[Send], list[RoleRecord]]:
        """Time has passed.

        Returns:
            What to say, and who is deposed for its silence: it is to be ended.
        """
        sends: list[Send] = []
        deposed: list[RoleRecord] = []
        for shard, pairing in self._pairings.items():
            decision = pairing.tick(now)
            sends += decision.sends
            record = decision.deposed and self._members.get(decision.deposed)
            if record:
                self._goes_on[shard] = True
                self._deposed[shard] = (record.name, record.incarnation)
                deposed.append(record)
        return sends, deposed

    # ---------------------------------------------------------------------- figures

    def count(self, record: RoleRecord) -> None:
        """Its counters have come."""
        tally = self._tallies.get(record.shard)
        if tally is not None and self.leads(record):
            tally.add(record, goes_on=self._goes_on.get(record.shard, False))

    @property
    def pushes_applied(self) -> int:
        """In the values of every shard, as far as shards have told.

        The order in which they applied pushes is taken to be the same: two that differ
        by what is under way make this wrong by as much, and no more.
        """
        # A shard without elements may have met none of the pushes.
        seen = [tally.seen for tally in self._tallies.values() if tally.seen]
        return max(min(seen, default=0) - self.pushes_lost, 0)

    @property
    def pushes_lost(self) -> int:
        """At least so many were in a shard's values, and are no more."""
        return n_lost(tally.lost for tally in self._tallies.values())
