"""What a coordinator has to do with its replicas, from word to word and tick to tick.

Account      taken, and what follows from it dealt
tick         who is silent is given up for now; what nobody answered is said again
"""

from typing import Final, final

from distbelief.errors import PeerLostError
from distbelief.messages import Account
from distbelief.roles import Action, Address, Received, Seconds, SetTimer
from sandblaster.coordination.coordinator_config import CoordinatorConfig
from sandblaster.coordination.crew import Crew
from sandblaster.coordination.dealing import Dealing


TICK: Final = "coordinator:tick"

_TICK_SECONDS_MIN: Final = 0.02


@final
class Oversight:
    """The replicas of one coordinator, and its ticks while there is work.

    Args:
        config: How it works.
        crew: Who is there.
    """

    def __init__(self, config: CoordinatorConfig, crew: Crew) -> None:
        self._config = config
        self._crew = crew
        self._tick_at: Seconds | None = None  # None: there is no work
        self._seen_at: Seconds = 0.0  # when there was anybody

    def hear(
        self, event: Received, account: Account, dealing: Dealing | None, now: Seconds
    ) -> None:
        """A replica says how it stands."""
        if self._crew.is_new_life(event, account):
            self.leave(event.sender, dealing, now, is_over=True)
        member = self._crew.hear(event, account, now)
        if dealing is None:
            return
        if member is not None:
            dealing.account(member, account, now)
        elif (known := self._crew.get(event.sender)) is not None:
            dealing.heard(known)

    def lost(self, name: Address, incarnation: int, dealing: Dealing | None, now: Seconds) -> None:
        """A life of a replica is over."""
        member = self._crew.get(name)
        if member is not None and member.incarnation <= incarnation:
            self.leave(name, dealing, now, is_over=True)

    def leave(self, name: Address, dealing: Dealing | None, now: Seconds, *, is_over: bool) -> None:
        """Deal what it has again; if its life `is_over`, listen to it no more."""
        member = self._crew.leave(name, is_over=is_over)
        if member is not None and dealing is not None:
            dealing.lost(member, now)

    def deal(self, dealing: Dealing | None, now: Seconds) -> list[Action]:
        """Tell replicas what they have to do now; look again after a while."""
        if dealing is None:
            self._tick_at = None
            return []
        actions: list[Action] = []
        if dealing.sets.is_finite:
            dealing.deal(now)
        for member in dealing.changed():
            actions += self._crew.tell(member, now)
        if self._tick_at is None:
            self._seen_at = now
            actions.append(self._set_tick(now))
        return actions

    def tick(self, dealing: Dealing | None, now: Seconds) -> list[Action]:
        """See who is late or silent.

        Raises:
            PeerLostError: there has been no replica for too long.
        """
        if self._tick_at is None:
            return []
        late = max(0.0, now - self._tick_at)  # nobody drove this role meanwhile
        self._crew.excuse(late)
        self._seen_at += late
        for name in self._crew.silent(now):
            self.leave(name, dealing, now, is_over=False)
        if len(self._crew):
            self._seen_at = now
        elif now - self._seen_at >= self._config.starved_seconds_max:
            raise PeerLostError(
                f"no replica has been there for {now - self._seen_at:.1f} s "
                "(starved_seconds_max is "
                f"{self._config.starved_seconds_max:g}): look at their logs"
            )
        return [*self._crew.tell_again(now), self._set_tick(now)]

    def _set_tick(self, now: Seconds) -> SetTimer:
        pace = min(self._crew.set_seconds / 4, self._config.retry_seconds)
        self._tick_at = now + max(pace, _TICK_SECONDS_MIN)
        return SetTimer(name=TICK, at=self._tick_at)
