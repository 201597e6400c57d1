"""Which of a shard's two copies leads: the supervisor's decision, one per shard.

    pairing   event                             decided: Lead
       1      shard-0 joins                     to shard-0,  second ""
       2      shard-0b joins                    to shard-0,  second "shard-0b"
              shard-0b is whole for 2
       3      shard-0 dies, or is silent        to shard-0b, second ""
       4      shard-0 joins, alive anew         to shard-0b, second "shard-0"
       5      shard-0b says Alone(4)            to shard-0b, second ""
       6      a second later shard-0 is heard   to shard-0b, second "shard-0"

Rules:

* The pairing rises with every decision, so that of two leaders everybody believes the
  later one. Only the latest is repeated: as long as its receiver says, by its counter
  "pairing", that it has not come.
* The second takes over only if it is whole for the present pairing. A leader may
  acknowledge alone only by a later pairing than that for which its second was whole; so
  whoever takes over has everything that was ever acknowledged. This is the view
  change of a primary and its backup (Alsberg & Day 1976; Liskov & Cowling 2012) with
  the supervisor in place of a vote.
* Each Lead names the life that is to obey it, and that of the second, so that a pairing
  belongs to one life of each. A name is not enough: what was told a life that has died
  can reach the next one.
* If nobody may take over, nobody leads until a copy joins: a life that has just begun
  holds the newest snapshot.
* A leader is never made a second within one life: it may have applied what its
  successor never saw. One that was deposed for its silence is ended by force.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from distbelief.messages import Lead
from distbelief.roles import Address, Seconds, Send


REST_SECONDS = 1.0
"""How long a leader stays alone after it had to ask for it: a second that comes and
goes would hold up its pushes again and again."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the supervisor is to do now."""

    sends: tuple[Send, ...] = ()  # each a `Lead`
    deposed: Address | None = None  # end it by force, and start it again


_NOTHING = Decision()


@final
class Pairing:
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
        lead = Lead(
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
