"""When a machine may go: its last step is taken, and nobody needs it any more."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

from distbelief.messages import Finished
from distbelief.roles import SUPERVISOR, Action, Address, Halt, Report, Seconds, Send
from distbelief.runtime.machine.duty import Duty
from distbelief.runtime.machine.leading import Leader
from distbelief.runtime.machine.living import Living, Phase


END_SECONDS: Final = 30.0
"""After its end, until a machine that hears nothing of its leader is gone."""


@final
class Ending:
    """The end of one machine.

    Args:
        names: Of all machines of the group.
        living: Its life.
        duty: What it computes for, which tells the supervisor the last.
        leader: If it leads.
        figures: Its counters.

    Attributes:
        is_gone: Whether it has gone.
    """

    def __init__(
        self,
        names: Sequence[Address],
        *,
        living: Living,
        duty: Duty,
        leader: Leader | None,
        figures: Callable[[], Mapping[str, float]],
    ) -> None:
        self.is_gone = False
        self._names = names
        self._living = living
        self._duty = duty
        self._leader = leader
        self._figures = figures
        self._ended_at: Seconds = 0.0
        self._stopped_at: Seconds | None = None
        self._is_orphan = False

    def end(self, now: Seconds) -> None:
        """Its last step is taken, and all that it pushed is applied."""
        self._ended_at = now

    def stop(self, now: Seconds) -> None:
        """The supervisor has told it to stop: not its leader, who decides."""
        if self._stopped_at is None:
            self._stopped_at = now

    def leader_lost(self) -> None:
        """Its leader will not come back: nobody will grant another step."""
        self._is_orphan = True

    def is_left(self, now: Seconds, *, is_idle: bool) -> bool:
        """Return whether there is nothing it could wait for.

        Its leader has ended for good, or it seems that all others had ended before this
        life of it began.

        Args:
            now: The time.
            is_idle: Whether it computes nothing.
        """
        if self._is_orphan:
            return is_idle and self._duty.is_settled
        is_late = self._stopped_at is not None and now - self._stopped_at > END_SECONDS
        return is_late and self._living.phase is Phase.ALONE

    def leave(self, now: Seconds) -> list[Action]:
        """Go once all have taken the last step: nobody needs this machine any more."""
        if not self._may_go(now):
            return []
        actions: list[Action] = []
        if self._leader is not None:
            last, _ = self._duty.report(self._leader, now, final=True)
            actions += last
        return [*actions, *self._farewell(), *self.go()]

    def go(self) -> list[Action]:
        """Go now."""
        self.is_gone = True
        finished = Finished(counters=dict(self._figures()))
        return [Send(receiver=SUPERVISOR, message=finished), Halt()]

    def _may_go(self, now: Seconds) -> bool:
        """Whether all have taken the last step; or the leader has gone without it."""
        others = self._leader is None or self._leader.all_ended
        done = others and self._living.has_ended
        return done or (self._leader is None and now - self._ended_at > END_SECONDS)

    def _farewell(self) -> list[Action]:
        """Return what the leader says of those without whom the end was made."""
        if self._leader is None or not self._leader.missing:
            return []
        names = ", ".join(self._names[m] for m in sorted(self._leader.missing))
        text = f"ended without {names}: no word from there"
        return [Report(text=text, level="warning")]
