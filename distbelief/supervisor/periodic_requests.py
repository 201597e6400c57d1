"""Periodic requests of the supervisor: when an evaluation, or a checkpoint of all shards, is due.

One request of each kind is under way at a time. An unanswered request is repeated, because messages
may be lost; a role answers a repeated request again.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, final

from distbelief.core.reliable import Backoff
from distbelief.protocol import CheckpointSaved, Evaluate, EvaluationDone, SaveCheckpoint
from distbelief.protocol.role import FIRST_LABEL, Address, Seconds


REPEAT_SECONDS: Final = 2.0  # until an unanswered request is repeated


def _asked(now: Seconds) -> Backoff:
    backoff = Backoff(first=REPEAT_SECONDS, longest=REPEAT_SECONDS)
    backoff.start(now)
    return backoff


@final
class Evaluations:
    """Requests to the evaluator, one every so many seconds, or samples of all replicas.

    After an earlier `first` one the time between two doubles until it is `every`.
    """

    def __init__(
        self, *, every: Seconds, first: Seconds | None = None, n_samples: int | None = None
    ) -> None:
        self._every = every
        self._gap = every if first is None else first
        self.n_samples = n_samples
        self._next_sample: int | None = None
        self._next_at: Seconds = math.inf
        self.n_requests = 0
        self._pending: Evaluate | None = None
        self._backoff = _asked(0.0)

    @property
    def waits(self) -> bool:
        return self._pending is not None

    def begin(self, now: Seconds, samples: int) -> None:
        self._next_at = now + self._gap
        self._count_from(samples)

    def _count_from(self, samples: int) -> None:
        if self.n_samples is not None:
            self._next_sample = (samples // self.n_samples + 1) * self.n_samples

    def due(self, now: Seconds, samples: int) -> Evaluate | None:
        after = self._next_sample
        is_due = now >= self._next_at if after is None else samples >= after
        if self.waits or not is_due:
            return None
        self._count_from(samples)
        return self.ask(now, whole=False)

    def ask(self, now: Seconds, *, whole: bool) -> Evaluate:
        """Return a new request, which replaces an unanswered one."""
        self.n_requests += 1
        self._pending = Evaluate(request=self.n_requests, whole=whole)
        self._backoff.start(now)
        self._gap = min(self._every, 2 * self._gap)
        self._next_at = now + self._gap
        return self._pending

    def repeat(self, now: Seconds) -> Evaluate | None:
        """Return the unanswered request, if it is time to repeat it."""
        is_due = self._pending is not None and self._backoff.again(now)
        return self._pending if is_due else None

    def answered(self, message: EvaluationDone) -> bool:
        if self._pending is None or message.request != self._pending.request:
            return False
        self._pending = None
        return True

    def give_up(self) -> None:
        self._pending = None


@dataclass(slots=True, kw_only=True)
class _Newest:
    label: str
    clock: int
    at: Seconds


@dataclass(slots=True, kw_only=True)
class _Round:
    request: SaveCheckpoint
    waiting: dict[Address, Backoff]
    retry_until: Seconds
    errors: dict[Address, str] = field(default_factory=dict)


@final
class Checkpoints:
    def __init__(self, *, every: Seconds, first: int = 1) -> None:
        self._every = every
        self._number = first
        self._resumed = first > 1
        self.n_complete = 0  # rounds in which all have saved
        self._next_at: Seconds = math.inf
        self._round: _Round | None = None
        self._newest: dict[Address, _Newest] = {}

    @property
    def has_begun(self) -> bool:
        return self._next_at < math.inf

    @property
    def waiting(self) -> list[Address]:
        return sorted(self._round.waiting) if self._round else []

    @property
    def errors(self) -> dict[Address, str]:
        return {} if self._round is None else self._round.errors

    def begin(self, now: Seconds) -> None:
        self._next_at = now + self._every

    def is_due(self, now: Seconds) -> bool:
        return now >= self._next_at and not self.waiting

    def ask(
        self,
        shards: Iterable[Address],
        now: Seconds,
        *,
        retry_seconds: Seconds = 0.0,
        last: bool = False,
    ) -> SaveCheckpoint:
        """Begin a round, and return the request to each of these.

        A coordinator asks the shards itself. A failed save is repeated for `retry_seconds`: a full
        disk may recover. Nothing changes after the `last` round.
        """
        request = SaveCheckpoint(label=f"{self._number:05d}", last=last)
        self._number += 1
        self._round = _Round(
            request=request,
            waiting={shard: _asked(now) for shard in shards},
            retry_until=now + retry_seconds,
        )
        self._next_at = now + self._every
        return request

    def repeat(
        self, shard: Address, now: Seconds, *, at_once: bool = False
    ) -> SaveCheckpoint | None:
        """Return the request to this role, if it is time to repeat it."""
        backoff = None if self._round is None else self._round.waiting.get(shard)
        if self._round is None or backoff is None or (now < backoff.due and not at_once):
            return None
        backoff.repeat(now)
        return self._round.request

    def answered(self, shard: Address, message: CheckpointSaved, now: Seconds) -> str | None:
        """Store an answer; return its error if that is new."""
        if message.error is None:
            known = self._newest.get(shard)
            label = message.label or (known.label if known else FIRST_LABEL)
            self._newest[shard] = _Newest(label=label, clock=message.clock, at=now)
        asked = self._round
        if asked is None or message.label != asked.request.label or shard not in asked.waiting:
            return None
        known_error = asked.errors.pop(shard, None)
        if message.error is not None:
            asked.errors[shard] = message.error
        if message.error is not None and now < asked.retry_until:
            asked.waiting[shard].start(now)
        else:
            del asked.waiting[shard]
            self.n_complete += not (asked.waiting or asked.errors)
        return None if message.error == known_error else message.error

    def give_up(self) -> None:
        self._round = None

    def forget(self, shard: Address) -> None:
        if self._round is not None:
            self._round.waiting.pop(shard, None)

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
