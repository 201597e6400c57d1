"""The warm start of a run, as the coordinator sees it: Downpour first.

    Account of a replica            Begin: train your share
    Finished of it                  it is done
    all are done, or are lost       the run begins, where the shards are by then
    Save of the supervisor          Save: the shards do, each when it can
    Saved of all shards             Saved

Who takes much longer than the first to be done is told to stop, and waited for: nothing
may push to the shards once the run has begun.

Shards that nobody drives are saved as those of Downpour are: at no common moment. One
that dies in the warm start goes on from there, and so does a job that is resumed. How
much of its share a replica has done, the shards know.
"""

from collections.abc import Sequence
from typing import Final, final

from distbelief.protocol import CheckpointSaved, SaveCheckpoint, StartTraining, Stop
from distbelief.roles.role import SUPERVISOR, Action, Address, Seconds, Send, SetTimer


TIMER: Final = "coordinator:warm"

_GRACE_SHARE: Final = 0.5
"""Of the time that the first one has taken: so long others may take besides."""

_STOP = Stop(reason="the warm start is over")


@final
class WarmStartRun:
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
        self._time_is_up = False  # for those that are not done

    @property
    def is_over(self) -> bool:
        """Can the run begin?"""
        is_time = self._time_is_up or len(self._done) >= self._n_replicas
        return is_time and not self._running

    def is_done(self, name: Address) -> bool:
        """Return whether a replica has done its share."""
        return name in self._done

    def replica_joined(self, name: Address, now: Seconds) -> list[Action]:
        """A replica is here: let it train, unless it has."""
        if name in self._done:
            return []
        if self._began_at is None:
            self._began_at = now
        if self._time_is_up and name not in self._running:
            return []  # too late to begin
        self._running.add(name)
        return [Send(receiver=name, message=StartTraining())]

    def replica_finished(self, name: Address, now: Seconds) -> list[Action]:
        """A replica is done."""
        is_first = not self._done
        self._running.discard(name)
        self._done.add(name)
        if not is_first:
            return []
        taken = 0.0 if self._began_at is None else now - self._began_at
        pause = max(_GRACE_SHARE * taken, self._retry_seconds)
        return [SetTimer(name=TIMER, at=now + pause)]

    def lost(self, name: Address) -> None:
        """A replica is gone; another life of it says so itself."""
        self._running.discard(name)
        self._done.discard(name)

    def timer(self, now: Seconds) -> list[Action]:
        """Tell who is late to stop."""
        self._time_is_up = True
        stops = [Send(receiver=name, message=_STOP) for name in sorted(self._running)]
        return [*stops, SetTimer(name=TIMER, at=now + self._retry_seconds)]


@final
class WarmSaves:
    """The snapshot of a warm start that the supervisor has asked for last.

    Args:
        shards: All.
    """

    def __init__(self, shards: Sequence[Address]) -> None:
        self._shards = shards
        self._label = ""
        self._waiting: set[Address] = set()
        self._errors: dict[Address, str] = {}

    def request(self, label: str) -> list[Action]:
        """Let all shards save, or those again that have not, or could not."""
        if label != self._label:
            self._label, self._waiting = label, set(self._shards)
        elif not self._waiting and not self._errors:
            return [self._saved()]
        self._waiting |= self._errors.keys()
        self._errors = {}
        save = SaveCheckpoint(label=label)
        return [Send(receiver=name, message=save) for name in sorted(self._waiting)]

    def shard_answered(self, sender: Address, message: CheckpointSaved) -> list[Action]:
        """A shard has saved, or could not; the last one's answer is everybody's."""
        if message.label != self._label or sender not in self._waiting:
            return []
        self._waiting.discard(sender)
        if message.error is not None:
            self._errors[sender] = message.error
        return [] if self._waiting else [self._saved()]

    def _saved(self) -> Action:
        errors = [f"{name}: {why}" for name, why in sorted(self._errors.items())]
        error = "; ".join(errors) or None
        message = CheckpointSaved(label=self._label, clock=0, error=error)
        return Send(receiver=SUPERVISOR, message=message)
