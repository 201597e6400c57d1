"""The sums that a machine of a replica has, and their way to its shards.

kept --> granted --> in the lane --> pushed --> staged: every shard holds it
  |         |
  +---------+--> not named any more: dropped

A sum is pushed once, under one grant, and is given up then: its memory is the slot's.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, final

from distbelief.errors import JobError, LocalProtocolError
from distbelief.messages import PushPart
from distbelief.parameter_server.client.client import ParameterClient, Staged
from distbelief.roles import Action, Compute, Computed, Cost, Seconds
from sandblaster.replicas.portion_sums import SetSum


PUSH: Final = "machine:push"

N_TOLD: Final = 32
"""Grants whose staging is told of again: more than can be open."""

Key = tuple[int, int]  # epoch, attempt


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """This machine's part of the sum of one set."""

    total: SetSum
    n_portions: int
    n_examples: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Pushing:
    """What is laid into the slots."""

    grant: int
    kept: Kept


@final
class PartPushes:
    """What is kept, and what was granted of it.

    Args:
        client: Of the shards that it is pushed to.
        n_bytes: Of one sum.
        has_parts: Whether the machine keeps anything at all.

    Attributes:
        staged: Grants whose parts every shard holds, the newest last.
    """

    def __init__(self, client: ParameterClient, *, n_bytes: float, has_parts: bool) -> None:
        self.staged: deque[int] = deque(maxlen=N_TOLD)
        self._client = client
        self._n_bytes = n_bytes
        self._has_parts = has_parts
        self._sums: dict[Key, Kept] = {}
        self._to_push: dict[int, Key] = {}  # by grant, the oldest first
        self._pushing: _Pushing | None = None  # in the lane
        self._pushed: deque[int] = deque()  # not acknowledged
        self._news = False
        self._has_work = False

    def __len__(self) -> int:
        return len(self._sums)

    def keep(self, key: Key, kept: Kept) -> None:
        """A sum is whole."""
        self._sums[key] = kept

    def retain(self, keys: Collection[Key]) -> None:
        """Drop all others: nobody may ask for them any more."""
        self._sums = {key: one for key, one in self._sums.items() if key in keys}

    def grant(self, message: PushPart) -> None:
        """Let what there is of this try be pushed, unless that was done."""
        key, grant = (message.epoch, message.attempt), message.grant
        known = grant in self.staged or grant in self._pushed or grant in self._to_push
        is_under_way = self._pushing is not None and self._pushing.grant == grant
        if known or is_under_way or key not in self._sums:
            return
        if not self._has_parts:
            del self._sums[key]
            self.staged.append(grant)
            self._news = True
            return
        self._to_push[grant] = key
        self._has_work = True

    def stage(self) -> Sequence[Action]:
        """Lay what was granted into slots, once one is free on every shard."""
        self._to_push = {g: key for g, key in self._to_push.items() if key in self._sums}
        client = self._client
        if not self._to_push or not (client.ready and client.can_push):
            return []
        grant = next(iter(self._to_push))
        kept = self._sums.pop(self._to_push.pop(grant))
        self._pushing = _Pushing(grant, kept)
        stage = client.stage(kept.total.gradients, kept.total.values)
        return [Compute(name=PUSH, work=stage, cost=Cost(n_bytes=2.0 * self._n_bytes))]

    def computed(self, event: Computed, now: Seconds) -> Sequence[Action]:
        """Send what lies in the slots now."""
        if event.name != PUSH or self._pushing is None:
            raise LocalProtocolError(f"nobody asked for {event.name!r}")
        result = event.result
        assert isinstance(result, Staged), result
        pushing, self._pushing = self._pushing, None
        if not result.finite:  # it was when it was summed
            raise JobError(f"not finite when it was pushed: {result.culprits}")
        self._pushed.append(pushing.grant)
        return self._client.staged(
            result,
            n_gradients=pushing.kept.n_portions,
            samples=pushing.kept.n_examples,
            grant=pushing.grant,
            now=now,
        )

    def has_news(self) -> bool:
        """Return whether more parts are staged than when this was asked last."""
        while len(self._pushed) > self._client.unacknowledged:
            self.staged.append(self._pushed.popleft())
            self._news = True
        news, self._news = self._news, False
        return news

    def has_work(self) -> bool:
        """Return whether there is more to push than when this was asked last."""
        has_work, self._has_work = self._has_work, False
        return has_work
