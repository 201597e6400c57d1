"""What the supervisor asks for now and then: evaluations, and snapshots of all shards.

One round of each kind is under way at a time. What is asked for is asked again until it
is answered, for messages may be lost; whoever is asked answers a repeated question.
"""

import math
from dataclasses import dataclass, field
from typing import final

from distbelief.protocol import CheckpointSaved, Evaluate, EvaluationDone, SaveCheckpoint
from distbelief.roles.role import FIRST_LABEL, Address, Seconds


REPEAT_SECONDS = 2.0
"""After which an unanswered question is asked again."""


@final
class Evaluations:
    """The requests to the evaluator.

    Args:
        every: Seconds between two; infinity if there is nobody to ask.
    """

    def __init__(self, *, every: Seconds) -> None:
        self._every = every
        self._next_at: Seconds = math.inf
        self._n_requests = 0
        self._asked: Evaluate | None = None
        self._asked_at: Seconds = 0.0
        self._said_at: Seconds = 0.0

    @property
    def waits(self) -> bool:
        """Whether an answer is awaited."""
        return self._asked is not None

    def waited(self, now: Seconds) -> Seconds:
        """Return for how long."""
        return now - self._asked_at if self.waits else 0.0

    def begin(self, now: Seconds) -> None:
        """Training begins: the first evaluation comes one period from now."""
        self._next_at = now + self._every

    def due(self, now: Seconds) -> Evaluate | None:
        """Return the usual request, if its time has come."""
        if self.waits or now < self._next_at:
            return None
        return self.ask(now, whole=False)

    def ask(self, now: Seconds, *, whole: bool) -> Evaluate:
        """Return a new request; one before it need not be answered any more."""
        self._n_requests += 1
        self._asked = Evaluate(request=self._n_requests, whole=whole)
        self._asked_at = self._said_at = now
        self._next_at = now + self._every
        return self._asked

    def again(self, now: Seconds, *, at_once: bool = False) -> Evaluate | None:
        """Return the unanswered request, if it is time to ask again."""
        if self._asked is None or not (at_once or now - self._said_at >= REPEAT_SECONDS):
            return None
        self._said_at = now
        return self._asked

    def answered(self, message: EvaluationDone) -> Evaluate | None:
        """Return the request that this answers, if it is awaited."""
        asked = self._asked
        if asked is None or message.request != asked.request:
            return None
        self._asked = None
        return asked

    def give_up(self) -> None:
        """Await no answer."""
        self._asked = None


@dataclass(slots=True, kw_only=True)
class _Snapshot:
    """What is known of one shard's newest snapshot."""

    label: str
    clock: int
    at: Seconds


@dataclass(slots=True, kw_only=True)
class _Round:
    label: str
    begun_at: Seconds
    waiting: set[Address]
    retry_seconds: Seconds = 0.0
    last: bool = False
    said_at: dict[Address, Seconds] = field(default_factory=dict)
    errors: dict[Address, str] = field(default_factory=dict)


@final
class Checkpoints:
    """The rounds of snapshots.

    Args:
        every: Seconds between two.
        first: Number of the first label; labels of one run only rise.
    """

    def __init__(self, *, every: Seconds, first: int = 1) -> None:
        self._every = every
        self._number = first
        self._resumed = first > 1
        self._next_at: Seconds = math.inf
        self._round: _Round | None = None
        self._newest: dict[Address, _Snapshot] = {}

    @property
    def has_begun(self) -> bool:
        """Whether there will be rounds."""
        return self._next_at < math.inf

    @property
    def waits(self) -> bool:
        """Whether a round is under way."""
        return self._round is not None and bool(self._round.waiting)

    @property
    def waiting(self) -> list[Address]:
        """Who has not answered yet."""
        return sorted(self._round.waiting) if self._round else []

    @property
    def errors(self) -> dict[Address, str]:
        """Who could not save in the last round, and why not."""
        return {} if self._round is None else self._round.errors

    def waited(self, now: Seconds) -> Seconds:
        """Return for how long the round is under way."""
        return now - self._round.begun_at if self._round and self.waits else 0.0

    def begin(self, now: Seconds) -> None:
        """Training begins: the first round comes one period from now."""
        self._next_at = now + self._every

    def is_due(self, now: Seconds) -> bool:
        """Whether it is time for the next round."""
        return not self.waits and now >= self._next_at

    def ask(
        self,
        shards: set[Address],
        now: Seconds,
        *,
        retry_seconds: Seconds = 0.0,
        last: bool = False,
    ) -> SaveCheckpoint:
        """Begin a round, and return what to say to each of these.

        Args:
            shards: Or the coordinator, which asks them.
            now: The present.
            retry_seconds: Whoever cannot save is asked again for so long: a full disk
                may heal.
            last: Whether nothing is to be changed after it.
        """
        label = f"{self._number:05d}"
        self._number += 1
        self._round = _Round(
            label=label, begun_at=now, waiting=set(shards), retry_seconds=retry_seconds, last=last
        )
        self._round.said_at = dict.fromkeys(shards, now)
        self._next_at = now + self._every
        return SaveCheckpoint(label=label, last=last)

    def again(
        self, shard: Address, now: Seconds, *, at_once: bool = False
    ) -> SaveCheckpoint | None:
        """Return what to say to this one, if it is time to ask it again."""
        asked = self._round
        if asked is None or shard not in asked.waiting:
            return None
        if not at_once and now - asked.said_at[shard] < REPEAT_SECONDS:
            return None
        asked.said_at[shard] = now
        return SaveCheckpoint(label=asked.label, last=asked.last)

    def answered(self, shard: Address, message: CheckpointSaved, now: Seconds) -> str | None:
        """Note an answer; return what went wrong, if that is news."""
        if message.error is None:
            known = self._newest.get(shard)
            label = message.label or (known.label if known else FIRST_LABEL)
            self._newest[shard] = _Snapshot(label=label, clock=message.clock, at=now)
        asked = self._round
        if asked is None or message.label != asked.label or shard not in asked.waiting:
            return None
        known_error = asked.errors.pop(shard, None)
        if message.error is not None:
            asked.errors[shard] = message.error
            if now - asked.begun_at < asked.retry_seconds:
                asked.said_at[shard] = now  # `again` waits a moment
                return None if message.error == known_error else message.error
        asked.waiting.discard(shard)
        return None if message.error == known_error else message.error

    def give_up(self) -> list[Address]:
        """Wait no longer; return who has not answered."""
        waiting = self.waiting
        self._round = None
        return waiting

    def forget(self, shard: Address) -> None:
        """Wait for this one no longer: it will not answer."""
        if self._round is not None:
            self._round.waiting.discard(shard)

    def describe(self, shard: Address, now: Seconds) -> str:
        """Return what this shard restarts from: "snapshot 00412 (4.1 s old)"."""
        newest = self._newest.get(shard)
        if newest is None:
            return "its newest snapshot" if self._resumed else "its initial values"
        return f"snapshot {newest.label} ({now - newest.at:.1f} s old)"

    def n_since(self, shard: Address, clock: float) -> int:
        """Return how many pushes this shard applied since its newest snapshot."""
        newest = self._newest.get(shard)
        if newest is None and self._resumed:
            return 0  # since when, nobody has told this supervisor
        return max(0, int(clock) - (newest.clock if newest else 0))
