"""Warm start of a run, on the coordinator: the first workers run SGD, one of them or all.

    WorkReport of a worker    -> StartTraining: train your share
    Finished of it            it is done
    all are done or lost      the run begins, at the parameters of the shards
    SaveCheckpoint            -> SaveCheckpoint to the shards; CheckpointSaved when all have

Without a coordinator's commands shards are saved as in Downpour: each when it can. The
shards know how much of its share a worker has done, so a restarted one does the rest.
"""

from collections.abc import Mapping, Sequence
from typing import Final, final

from distbelief.protocol import CheckpointSaved, SaveCheckpoint, StartTraining, Stop
from distbelief.protocol.role import SUPERVISOR, Action, Address, Seconds, Send, SetTimer


TIMER: Final = "coordinator:warm"

_GRACE_SHARE: Final = 0.5
"""Share of the first worker's time that the others may take longer."""

_STOP = Stop(reason="the warm start is over")


@final
class WarmStart:
    """Which workers train, which are done, and the checkpoint that was requested last."""

    def __init__(
        self,
        n_replicas: int,
        *,
        shards: Sequence[Address],
        second_copies: Mapping[Address, Address],  # by shard, if there are two
        retry_seconds: Seconds,
    ) -> None:
        self._names = {Address(f"replica-{index}") for index in range(n_replicas)}
        self._shards = shards
        self._second_copies = second_copies
        self._retry_seconds = retry_seconds
        self._running: set[Address] = set()
        self.done: set[Address] = set()
        self._gone: set[Address] = set()  # lost for good
        self._began_at: Seconds | None = None
        self._time_is_up = False  # too late for the others
        self._label = ""  # of the checkpoint
        self._unsaved: set[Address] = set()  # shards that have not answered
        self._errors: dict[Address, str] = {}

    @property
    def is_over(self) -> bool:
        # Nothing may push to the shards once the run has begun: wait for all to stop.
        is_time = self._time_is_up or self._names <= self.done | self._gone
        return is_time and not self._running

    def replica_joined(self, name: Address, now: Seconds) -> list[Action]:
        """Let a worker train, unless it is done or too late."""
        if name in self.done or name not in self._names:
            return []
        if self._began_at is None:
            self._began_at = now
        if self._time_is_up and name not in self._running:
            return []
        self._running.add(name)
        return [Send(receiver=name, message=StartTraining())]

    def replica_finished(self, name: Address, now: Seconds) -> list[Action]:
        is_first = not self.done
        self._running.discard(name)
        self.done.add(name)
        if not is_first:
            return []
        taken = 0.0 if self._began_at is None else now - self._began_at
        pause = max(_GRACE_SHARE * taken, self._retry_seconds)
        return [SetTimer(name=TIMER, at=now + pause)]

    def lost(self, name: Address, *, for_good: bool = False) -> None:
        # Its next incarnation reports again, and says if it is done.
        self._gone |= {name} if for_good else set()
        self._running.discard(name)
        self.done.discard(name)

    def timer(self, now: Seconds) -> list[Action]:
        """Stop the workers that are late, and end the warm start when all have stopped."""
        self._time_is_up = True
        stops = [Send(receiver=name, message=_STOP) for name in sorted(self._running)]
        return [*stops, SetTimer(name=TIMER, at=now + self._retry_seconds)]

    # --- checkpoints ---

    def save(self, label: str) -> list[Action]:
        """Send the request to the shards that have not saved, or could not."""
        if label != self._label:
            self._label, self._unsaved = label, set(self._shards)
        elif not self._unsaved and not self._errors:
            return [self._saved()]
        self._unsaved |= self._errors.keys()
        self._errors = {}
        save = SaveCheckpoint(label=label)
        unsaved = sorted(self._unsaved)
        # Of two copies the primary answers.
        second = [self._second_copies[name] for name in unsaved if name in self._second_copies]
        return [Send(receiver=name, message=save) for name in (*unsaved, *second)]

    def shard_saved(self, shard: Address, message: CheckpointSaved) -> list[Action]:
        """Note a shard's answer; the last one completes the supervisor's."""
        if message.label != self._label or shard not in self._unsaved:
            return []
        self._unsaved.discard(shard)
        if message.error is not None:
            self._errors[shard] = message.error
        return [] if self._unsaved else [self._saved()]

    def _saved(self) -> Action:
        errors = [f"{name}: {why}" for name, why in sorted(self._errors.items())]
        error = "; ".join(errors) or None
        message = CheckpointSaved(label=self._label, clock=0, error=error)
        return Send(receiver=SUPERVISOR, message=message)
