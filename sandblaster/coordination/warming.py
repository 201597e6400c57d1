"""The warm start of a run, as the coordinator sees it: Downpour first.

    Account of a replica            Begin: train your share
    Finished of it                  it is done
    all are done, or are lost       the run begins, where the shards are by then

Who takes much longer than the first to be done is told to stop, and waited for: nothing
may push to the shards once the run has begun.

Nothing is saved before the first point is accepted: a shard that dies in the warm start
begins anew, and a job that is resumed there has another warm start.
"""

from typing import Final, final

from distbelief.messages import Begin, Stop
from distbelief.roles import Action, Address, Seconds, Send, SetTimer


TIMER: Final = "coordinator:warm"

_PATIENCE: Final = 0.5
"""Of the time that the first one has taken: so long others may take besides."""

_STOP = Stop(reason="the warm start is over")


@final
class Warming:
    """Who trains, and who is done.

    Args:
        n_replicas: Of the job.
        retry_seconds: After which who is late is told to stop again.
    """

    def __init__(self, n_replicas: int, *, retry_seconds: Seconds) -> None:
        self._n_replicas = n_replicas
        self._retry_seconds = retry_seconds
        self._running: set[Address] = set()
        self._done: set[Address] = set()
        self._began_at: Seconds | None = None
        self._is_late = False  # for those that are not done

    @property
    def is_over(self) -> bool:
        """Can the run begin?"""
        is_time = self._is_late or len(self._done) >= self._n_replicas
        return is_time and not self._running

    def is_done(self, name: Address) -> bool:
        """Return whether a replica has done its share."""
        return name in self._done

    def heard(self, name: Address, now: Seconds) -> list[Action]:
        """A replica is here: let it train, unless it has."""
        if name in self._done:
            return []
        if self._began_at is None:
            self._began_at = now
        if self._is_late and name not in self._running:
            return []  # too late to begin
        self._running.add(name)
        return [Send(receiver=name, message=Begin())]

    def finished(self, name: Address, now: Seconds) -> list[Action]:
        """A replica is done."""
        is_first = not self._done
        self._running.discard(name)
        self._done.add(name)
        if not is_first:
            return []
        taken = 0.0 if self._began_at is None else now - self._began_at
        pause = max(_PATIENCE * taken, self._retry_seconds)
        return [SetTimer(name=TIMER, at=now + pause)]

    def lost(self, name: Address) -> None:
        """A replica is gone; another life of it says so itself."""
        self._running.discard(name)
        self._done.discard(name)

    def timer(self, now: Seconds) -> list[Action]:
        """Tell who is late to stop."""
        self._is_late = True
        stops = [Send(receiver=name, message=_STOP) for name in sorted(self._running)]
        return [*stops, SetTimer(name=TIMER, at=now + self._retry_seconds)]
