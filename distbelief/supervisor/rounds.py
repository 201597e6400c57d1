"""Periodic requests of the supervisor: evaluations, and checkpoints of all shards.

One round of each kind is under way at a time. An unanswered request is repeated, because messages
may be lost; a role answers a repeated request again.
"""

import math
from dataclasses import dataclass, field
from typing import final

from distbelief.protocol import CheckpointSaved, Evaluate, EvaluationDone, SaveCheckpoint
from distbelief.roles.role import FIRST_LABEL, Address, Seconds


REPEAT_SECONDS = 2.0  # until an unanswered request is repeated


@final
class Evaluations:
    """Requests to the evaluator.

    Args:
        every: Seconds between two; infinity without an evaluator.
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
        return self._asked is not None

    def waited(self, now: Seconds) -> Seconds:
        return now - self._asked_at if self.waits else 0.0

    def begin(self, now: Seconds) -> None:
        self._next_at = now + self._every  # the first one comes a period after training begins

    def due(self, now: Seconds) -> Evaluate | None:
        """Return the next request, if its time has come."""
        if self.waits or now < self._next_at:
            return None
        return self.ask(now, whole=False)

    def ask(self, now: Seconds, *, whole: bool) -> Evaluate:
        """Return a new request, which replaces an unanswered one."""
        self._n_requests += 1
        self._asked = Evaluate(request=self._n_requests, whole=whole)
        self._asked_at = self._said_at = now
        self._next_at = now + self._every
        return self._asked

    def repeat(self, now: Seconds, *, at_once: bool = False) -> Evaluate | None:
        """Return the unanswered request, if it is time to repeat it."""
        if self._asked is None or not (at_once or now - self._said_at >= REPEAT_SECONDS):
            return None
        self._said_at = now
        return self._asked

    def answered(self, message: EvaluationDone) -> Evaluate | None:
        """Return the request that this answers, if it is pending."""
        asked = self._asked
        if asked is None or message.request != asked.request:
            return None
        self._asked = None
        return asked

    def give_up(self) -> None:
        self._asked = None


@dataclass(slots=True, kw_only=True)
class _Snapshot:
    """The newest checkpoint of one shard."""

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
    """Rounds of checkpoints.

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
        return self._next_at < math.inf

    @property
    def waits(self) -> bool:
        return self._round is not None and bool(self._round.waiting)

    @property
    def waiting(self) -> list[Address]:
        return sorted(self._round.waiting) if self._round else []

    @property
    def errors(self) -> dict[Address, str]:
        return {} if self._round is None else self._round.errors

    def waited(self, now: Seconds) -> Seconds:
        return now - self._round.begun_at if self._round and self.waits else 0.0

    def begin(self, now: Seconds) -> None:
        self._next_at = now + self._every

    def is_due(self, now: Seconds) -> bool:
        return not self.waits and now >= self._next_at

    def ask(
        self,
        shards: set[Address],
        now: Seconds,
        *,
        retry_seconds: Seconds = 0.0,
        last: bool = False,
    ) -> SaveCheckpoint:
        """Begin a round, and return the request to each of these.

        Args:
            shards: Names of the shards, or of the coordinator, which asks the shards itself.
            now: The present.
            retry_seconds: How long a failed save is repeated: a full disk may recover.
            last: Whether nothing changes after it.
        """
        label = f"{self._number:05d}"
        self._number += 1
        self._round = _Round(
            label=label, begun_at=now, waiting=set(shards), retry_seconds=retry_seconds, last=last
        )
        self._round.said_at = dict.fromkeys(shards, now)
        self._next_at = now + self._every
        return SaveCheckpoint(label=label, last=last)

    def repeat(
        self, shard: Address, now: Seconds, *, at_once: bool = False
    ) -> SaveCheckpoint | None:
        """Return the request to this role, if it is time to repeat it."""
        asked = self._round
        if asked is None or shard not in asked.waiting:
            return None
        if not at_once and now - asked.said_at[shard] < REPEAT_SECONDS:
            return None
        asked.said_at[shard] = now
        return SaveCheckpoint(label=asked.label, last=asked.last)

    def answered(self, shard: Address, message: CheckpointSaved, now: Seconds) -> str | None:
        """Store an answer; return its error if that is new."""
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
                asked.said_at[shard] = now  # `repeat` waits a moment
                return None if message.error == known_error else message.error
        asked.waiting.discard(shard)
        return None if message.error == known_error else message.error

    def give_up(self) -> list[Address]:
        """End the round; return the roles that have not answered."""
        waiting = self.waiting
        self._round = None
        return waiting

    def forget(self, shard: Address) -> None:
        """Stop waiting for this role, which is gone."""
        if self._round is not None:
            self._round.waiting.discard(shard)

    def describe(self, shard: Address, now: Seconds) -> str:
        """Return what this shard restarts from: "checkpoint 00412 (4.1 s old)"."""
        newest = self._newest.get(shard)
        if newest is None:
            return "its newest checkpoint" if self._resumed else "its initial values"
        return f"checkpoint {newest.label} ({now - newest.at:.1f} s old)"

    def n_since(self, shard: Address, clock: float) -> int:
        """Return how many pushes this shard applied since its newest checkpoint."""
        newest = self._newest.get(shard)
        if newest is None and self._resumed:
            return 0  # unknown in a resumed run before its first checkpoint
        return max(0, int(clock) - (newest.clock if newest else 0))
