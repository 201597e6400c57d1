"""Which copy of each shard leads, as the supervisor sees it.

A shard with one copy is led by it. Of two copies, `Pairing` decides; what the other one
does (`part`), and whether it could take over now (`survivor`, `answers`), is told here.
A push is one push, however many shards it goes to and however many copies these have:
it is applied if it is in the values of every shard, and lost if it was acknowledged and
one of them has it no more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from distbelief.job.supervision.membership import Membership, RoleRecord
from distbelief.messages import Alone, Whole
from distbelief.parameter_server.copies.copies import other_copy
from distbelief.parameter_server.copies.pairing import Pairing
from distbelief.parameter_server.state.lost_pushes import Lost, lost_after, n_lost
from distbelief.roles import Address, Seconds, Send


LEADING: Final = "leading"
SECOND: Final = "second"
CATCHING_UP: Final = "catching up"

TAKEOVER_SECONDS: Final = 1.0
"""Silence after which a copy is not counted on, and of two the other one leads."""


@dataclass(slots=True, kw_only=True)
class _Tally:
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
class Pairs:
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
        self._pairings: dict[Address, Pairing] = {}
        self._tallies: dict[Address, _Tally] = {}
        # Whether who leads went on with all that was there, or began from a snapshot.
        self._goes_on: dict[Address, bool] = {}
        self._deposed: dict[Address, tuple[Address, int]] = {}  # the last: name, life
        for record in members.of("shard"):
            if record.name != record.shard:
                continue
            clock = (clocks or {}).get(record.shard, 0)
            self._tallies[record.shard] = _Tally(seen=clock)
            other = members.get(other_copy(record.name))
            if other is not None:
                self._pairings[record.shard] = Pairing(
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

    def hear(self, record: RoleRecord, message: Alone | Whole, now: Seconds) -> Sequence[Send]:
        """A copy tells how it stands with the other one."""
        pairing = self._pairings.get(record.shard)
        if pairing is None:
            return []
        match message:
            case Alone():
                return pairing.alone(record.name, message.pairing, now).sends
            case Whole():
                return pairing.whole(record.name, message.pairing, now).sends

    def news(self, record: RoleRecord, message: Alone | Whole) -> str:
        """Return what is worth telling of this message, before it is heard."""
        pairing = self._pairings.get(record.shard)
        if pairing is None or message.pairing != pairing.number:
            return ""
        match message:
            case Whole() if record.name == pairing.second and not pairing.is_whole:
                return f"{record.label} holds all that its leader has acknowledged"
            case Alone() if record.name == pairing.leader and pairing.second:
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
