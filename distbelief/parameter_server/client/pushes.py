"""A client's pushes to all its shards: each is all shards' or nobody's.

    can_push   stage ~~> staged ... unacknowledged = 0
               draft ~~> staged                          the same, tensor by tensor

Rules:

* A push has one sequence, and is not begun before every shard has room for it. Nothing
  that is not finite is pushed: all slots are filled before any shard hears of it.
* At most one push is being staged; its slots belong to the work until it is done.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch

from distbelief.errors import LocalProtocolError
from distbelief.parameter_server.client.link import Link
from distbelief.parameter_server.client.pushing import StagedSlot
from distbelief.parameter_server.client.staging import Draft, Staged, staging
from distbelief.parameter_server.layout.layout import TensorSpec
from distbelief.roles import Action, Report, Seconds


@final
class ClientPushes:
    """One client's pushes.

    Args:
        links: Its shards, by index, in that order.
        tensors: What it pushes.
        allowed: Did it say that it would push?

    Attributes:
        n_pushed: Pushes made.
        n_non_finite: Pushes not made, for what was staged was not finite.
    """

    def __init__(
        self, links: Mapping[int, Link], *, tensors: Sequence[TensorSpec], allowed: bool
    ) -> None:
        self._links = links
        self._tensors = tensors
        self._allowed = allowed
        self._staging: list[StagedSlot] | None = None
        self.n_pushed = 0
        self.n_non_finite = 0

    @property
    def under_way(self) -> bool:
        """Does work touch the memory of shards?"""
        return self._staging is not None

    @property
    def can_push(self) -> bool:
        """Has every shard room for a push, and is none being staged?"""
        return (
            self._allowed
            and self._staging is None
            and all(link.welcome and link.pushing.has_room for link in self._links.values())
        )

    @property
    def unacknowledged(self) -> int:
        """Pushes that some shard has not acknowledged."""
        # All have issued the same.
        pushes = [link.pushing for link in self._links.values()]
        return max((one.issued - one.settled for one in pushes), default=0)

    def stage(
        self, tensors: Sequence[torch.Tensor | None], clocks: Sequence[int], *, skip_missing: bool
    ) -> Callable[[], Staged]:
        """Return the work that fills every slot; see `ParameterClient.stage`."""
        names = [spec.name for spec in self._tensors]
        touched = tensors if skip_missing else None
        return staging(self._begin(clocks, touched=touched), tensors, names=names)

    def draft(self, clocks: Sequence[int]) -> Draft:
        """Return a push to be filled; see `ParameterClient.draft`."""
        return Draft(self._begin(clocks), self._tensors)

    def abandon(self) -> None:
        """Push nothing of what was staged, or drafted; no work touches it any more."""
        if self._staging is None:
            raise LocalProtocolError("abandon without a stage or a draft")
        self._staging = None

    def staged(
        self, outcome: Staged, *, n_gradients: int, samples: int, grant: int, now: Seconds
    ) -> list[Action]:
        """Push what was staged, if it is finite; see `ParameterClient.staged`."""
        if self._staging is None:
            raise LocalProtocolError("staged without a stage: stage a push first")
        slots, self._staging = self._staging, None
        if not outcome.finite:
            self.n_non_finite += 1
            text = f"not pushed: NaN or infinity in {', '.join(outcome.culprits)}"
            return [Report(text=text, level="warning")]
        self.n_pushed += 1
        actions: list[Action] = []
        for link, slot in zip(self._links.values(), slots, strict=True):
            actions += link.issue(
                slot, n_gradients=n_gradients, samples=samples, grant=grant, now=now
            )
            actions += link.wait(now)
        return actions

    def _begin(
        self, fetched_clocks: Sequence[int], *, touched: Sequence[torch.Tensor | None] | None = None
    ) -> list[StagedSlot]:
        if not self.can_push:
            raise LocalProtocolError("stage while not can_push: wait until it is")
        self._staging = [
            # Gradients may have waited since a life of the shard with a higher clock.
            link.pushing.slot(fetched_clock=min(clock, link.clock), touched=touched)
            for link, clock in zip(self._links.values(), fetched_clocks, strict=True)
        ]
        return self._staging
