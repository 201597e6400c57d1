"""The client of a sharded parameter server: embedded in a role, not a role itself.

    handle / begin_fetch   ->  actions of the role        (one `link` per shard)
    install / stage        ->  work for the role's compute lane, no state touched
    installed / staged     ->  the work is done: actions again
    draft                  ->  what the lane fills piece by piece, instead of stage

    fetch    begin_fetch ... fetch_complete   install ~~> installed     (torn: again)
    push     can_push                         stage   ~~> staged ... unacknowledged = 0

Rules:

* The role passes on every event (`owns` tells which are for the client) and performs
  the actions; timers are named "client:...". Nothing here waits: what does not come is
  asked for again, and a shard that stays silent is given up by `PeerLostError`.
* A push in flight outlives its shard: it goes to whoever serves next, from where it
  lies. Lost is only what a shard had acknowledged, and its next life does not know.
* At most one install and one stage are under way, in one lane; between them the tensors
  belong to the work.
* `client_fetches` has the fetches, `client_pushes` the rules of pushes.
* Shards do not wait for each other: their clocks differ (DB-5).
* A client that holds only regions of the tensors (`selection`) knows only the shards
  that hold some of them; "every shard" is every one of those. It may be none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import assert_never, final

import torch

from distbelief.core.memory import Memory
from distbelief.errors import LocalProtocolError, RemoteProtocolError
from distbelief.parameter_server.client.buffers import (
    FetchResult,
    PushDraft,
    PushResult,
    installing,
    staging,
)
from distbelief.parameter_server.client.fetch import ShardReader
from distbelief.parameter_server.client.link import TIMER, ClientConfig, ShardLink, ShardReply
from distbelief.parameter_server.client.push import StagedSlot
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.parameter_server.lost_pushes import n_lost
from distbelief.parameter_server.session_state import Staleness
from distbelief.parameter_server.slices import PartialView, SliceCopier
from distbelief.roles.role import (
    Action,
    Address,
    Computed,
    Event,
    PeerJoined,
    PeerLost,
    Persisted,
    Received,
    Report,
    Seconds,
    Started,
    TimerFired,
)


__all__ = ["ClientConfig", "FetchResult", "ParameterClient", "PushDraft", "PushResult"]


# A client's fetches from all its shards: what is installed, and what was torn.
#
# begin ... complete   install ~~> installed     (torn: again)


@final
class ClientFetches:
    """One client's fetches.

    Args:
        links: Its shards, by index, in that order.

    Attributes:
        n_torn: Reads that were torn, each of one shard.
    """

    def __init__(self, links: Mapping[int, ShardLink]) -> None:
        self._links = links
        self._installing: dict[int, ShardReader] | None = None
        self.n_torn = 0

    @property
    def under_way(self) -> bool:
        """Does work touch the memory of shards?"""
        return self._installing is not None

    @property
    def clocks(self) -> tuple[int, ...]:
        """Per shard, the clock of the values installed last."""
        return tuple(link.fetching.clock for link in self._links.values())

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """Per shard, its life and the clock of the values installed last."""
        return tuple(link.fetching.version for link in self._links.values())

    @property
    def complete(self) -> bool:
        """Can the fetch be installed? From shared memory it can be tried at once."""
        return all(link.fetching.complete for link in self._links.values())

    def begin(self, now: Seconds) -> list[Action]:
        """Fetch anew from every shard; see `ParameterClient.begin_fetch`."""
        if self._installing is not None:
            raise LocalProtocolError("begin_fetch while an install is under way")
        actions: list[Action] = []
        for link in self._links.values():
            actions += [*link.begin_fetch(now), *link.wait(now)]
        return actions

    def install(self, tensors: Sequence[torch.Tensor]) -> Callable[[], FetchResult]:
        """Return the work that installs; see `ParameterClient.install`."""
        if self._installing is not None:
            raise LocalProtocolError("install while an install is under way")
        fetches = {index: link.fetching for index, link in self._links.items()}
        readers = {
            index: fetching.reader()
            for index, fetching in fetches.items()
            if fetching.wanted and fetching.complete
        }
        missing = [index for index, one in fetches.items() if not one.complete]
        self._installing = readers
        known = {
            index: -1 if fetching.wanted else fetching.clock for index, fetching in fetches.items()
        }
        return installing(readers, tensors, missing=missing, known=known)

    @property
    def readable_share(self) -> float:
        """Part of the shards from which the install under way can copy now."""
        readers = self._installing or {}
        n_readable = sum(reader.readable for reader in readers.values())
        return n_readable / max(len(self._links), 1)

    def installed(self, outcome: FetchResult, now: Seconds) -> list[Action]:
        """Note what an install did; see `ParameterClient.installed`."""
        if self._installing is None:
            raise LocalProtocolError("installed without an install")
        readers, self._installing = self._installing, None
        clocks = dict(zip(self._links, outcome.clocks, strict=True))
        actions: list[Action] = []
        for index, reader in readers.items():
            link = self._links[index]
            if index in outcome.torn:
                self.n_torn += 1
                actions += [*link.torn(now), *link.wait(now)]
            else:
                link.fetching.installed(clocks[index], reader)
        return actions


# A client's pushes to all its shards: each is all shards' or nobody's.
#
#     can_push   stage ~~> staged ... unacknowledged = 0
#                draft ~~> staged                          the same, tensor by tensor
#
# Rules:
#
# * A push has one sequence, and is not begun before every shard has room for it. Nothing
#   that is not finite is pushed: all slots are filled before any shard hears of it.
# * At most one push is being staged; its slots belong to the work until it is done.


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
        self, links: Mapping[int, ShardLink], *, tensors: Sequence[TensorSpec], allowed: bool
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
    ) -> Callable[[], PushResult]:
        """Return the work that fills every slot; see `ParameterClient.stage`."""
        names = [spec.name for spec in self._tensors]
        touched = tensors if skip_missing else None
        return staging(self._begin(clocks, touched=touched), tensors, names=names)

    def draft(self, clocks: Sequence[int]) -> PushDraft:
        """Return a push to be filled; see `ParameterClient.draft`."""
        return PushDraft(self._begin(clocks), self._tensors)

    def abandon(self) -> None:
        """Push nothing of what was staged, or drafted; no work touches it any more."""
        if self._staging is None:
            raise LocalProtocolError("abandon without a stage or a draft")
        self._staging = None

    def staged(
        self, outcome: PushResult, *, n_gradients: int, samples: int, grant: int, now: Seconds
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


_LIFE_BITS = 32
"""Sequences and requests of incarnation i begin at i << 32, so that no late answer to
a former life can be taken for one to this."""


@final
class ParameterClient:
    """One client of all shards, or of those that hold what it selects."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        layout: Layout,
        shards: Sequence[Address],
        memory: Memory,
        second_copies: Sequence[Address] = (),
        selection: PartialView | None = None,
    ) -> None:
        """Store; `start` acts.

        Args:
            config: How to talk to them.
            layout: Where what is to be found; the shards must have the same.
            shards: Their addresses, shard 0 first.
            memory: What this client can share with shards of its host.
            second_copies: Where each shard is also to be found; none if each has one
                copy only.
            selection: What this client holds of the tensors; None for everything.
        """
        if len(shards) != layout.n_shards:
            raise ValueError(f"{len(shards)} shards are given, the layout has {layout.n_shards}")
        if second_copies and len(second_copies) != len(shards):
            raise ValueError(
                f"{len(second_copies)} second copies are given for {len(shards)} "
                "shards: give none, or one for each"
            )
        if selection is not None and selection.fingerprint != layout.fingerprint:
            raise ValueError(
                f"the selection is of layout {selection.fingerprint}, the client's is "
                f"{layout.fingerprint}: select from the same"
            )
        self._tensors = layout.tensors if selection is None else selection.tensors
        self._links: dict[int, ShardLink] = {}  # by index of the shard, in that order
        self._link_of: dict[Address, ShardLink] = {}
        for index in range(len(shards)) if selection is None else selection.shards:
            copies = (shards[index], *second_copies[index : index + 1])
            part = SliceCopier.of(selection, layout, index)
            link = ShardLink(copies, index, config=config, part=part, memory=memory)
            self._links[index] = link
            self._link_of |= dict.fromkeys(copies, link)
        self._fetches = ClientFetches(self._links)
        self._pushes = ClientPushes(self._links, tensors=self._tensors, allowed=config.pushes)
        self._staleness = Staleness()

    # ---------------------------------------------------------------------- events

    def start(self, incarnation: int, now: Seconds) -> list[Action]:
        """Say Hello to every shard. `incarnation` is that of the role."""
        actions: list[Action] = []
        for link in self._links.values():
            link.fetching.start(incarnation << _LIFE_BITS)
            link.pushing.start((incarnation << _LIFE_BITS) + 1)
            actions += [*link.greet(now), *link.wait(now)]
        return actions

    def owns(self, event: Event) -> bool:
        """Return whether this event is for the client."""
        match event:
            case Received():
                return event.sender in self._link_of and isinstance(event.message, ShardReply)
            case TimerFired():
                return event.name.startswith(TIMER)
            case PeerJoined() | PeerLost():
                return event.peer in self._link_of
            case Started() | Computed() | Persisted():
                return False
            case _:
                assert_never(event)

    def handle(self, event: Event, now: Seconds) -> list[Action]:
        """Return the actions that `event` calls for; none if it is not the client's.

        Raises:
            PeerLostError: a shard has been silent for too long; it is named.
            JobError: a shard refuses this client for good.
            RemoteProtocolError: a shard broke the protocol; the event is of no effect.
        """
        link = self._link_met(event)
        if link is None:
            return []
        if isinstance(event, Received):
            actions = self._receive(link, event, now)
        elif isinstance(event, TimerFired):
            actions = link.timer(now)
        else:
            assert isinstance(event, PeerJoined | PeerLost)
            actions = link.peer(event, now)
        if not self._is_working:
            link.release()
        return [*actions, *link.wait(now)]

    def _link_met(self, event: Event) -> ShardLink | None:
        """Return the link that an event is of, if it is of one."""
        match event:
            case Received():
                return self._link_of.get(event.sender)
            case TimerFired():
                return self._link_timed(event.name)
            case PeerJoined() | PeerLost():
                return self._link_of.get(event.peer)
            case Started() | Computed() | Persisted():
                return None
            case _:
                assert_never(event)

    def _link_timed(self, name: str) -> ShardLink | None:
        """Return the link whose timer has this name."""
        index = name.removeprefix(TIMER)
        known = index != name and index.isdecimal()
        return self._links.get(int(index)) if known else None

    def _receive(self, link: ShardLink, event: Received, now: Seconds) -> list[Action]:
        message = event.message
        if not isinstance(message, ShardReply):
            raise RemoteProtocolError(
                f"{event.sender} sent a client {type(message).__name__}, which shards do not send"
            )
        return link.receive(event, message, self._staleness, now)

    # --------------------------------------------------------------------- fetches

    @property
    def ready(self) -> bool:
        """Has every shard said Welcome, and led since?"""
        return all(link.welcome for link in self._links.values())

    @property
    def samples(self) -> int:
        """Samples of this client in the values of every shard: where to resume."""
        return min((link.samples for link in self._links.values()), default=0)

    @property
    def clocks(self) -> tuple[int, ...]:
        """Per shard, the clock of the values installed last."""
        return self._fetches.clocks

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """Per shard, its life and the clock of the values installed last."""
        return self._fetches.versions

    def begin_fetch(self, now: Seconds) -> list[Action]:
        """Fetch anew from every shard.

        Raises:
            LocalProtocolError: an install is under way, which reads the last fetch.
        """
        return self._fetches.begin(now)

    @property
    def fetch_complete(self) -> bool:
        """Can the fetch be installed? From shared memory it can be tried at once."""
        return self._fetches.complete

    def install(self, tensors: Sequence[torch.Tensor]) -> Callable[[], FetchResult]:
        """Return the work that copies what was fetched into `tensors`.

        Shards that an install before this one has copied from, for the same fetch, are
        not copied from again.

        Args:
            tensors: Each (n_elements,), in the order of the layout or the selection.

        Raises:
            LocalProtocolError: an install is under way.
        """
        return self._fetches.install(tensors)

    @property
    def readable_share(self) -> float:
        """Part of the shards from which the install under way can copy now."""
        return self._fetches.readable_share

    def installed(self, outcome: FetchResult, now: Seconds) -> list[Action]:
        """Note what an install did.

        If `outcome.torn` names shards, install again: after a millisecond, and once
        `fetch_complete`. A read that stays torn for `torn_seconds_max` gives way to
        blocks, which this begins.
        """
        actions = self._fetches.installed(outcome, now)
        self._release()
        return actions

    # ---------------------------------------------------------------------- pushes

    @property
    def can_push(self) -> bool:
        """Has every shard room for a push, and is none being staged?"""
        return self._pushes.can_push

    @property
    def unacknowledged(self) -> int:
        """Pushes that some shard has not acknowledged."""
        return self._pushes.unacknowledged

    def stage(
        self,
        gradients: Sequence[torch.Tensor | None],
        values: Sequence[torch.Tensor],
        *,
        fetched_clocks: Sequence[int] | None = None,
        skip_missing: bool = False,
    ) -> Callable[[], PushResult]:
        """Return the work that copies a push into every shard's slot, and checks it.

        Args:
            gradients: Each (n_elements,), in the order of the layout or the selection:
                sums of raw gradients (DB-7). None for zeros; those of buffers are not
                looked at.
            values: Likewise; of buffers these are pushed, others are not looked at.
            fetched_clocks: `clocks` when the oldest of these gradients' parameters had
                been installed; by default those of the last install.
            skip_missing: The shards change nothing of tensors without a gradient,
                neither values nor the rule's state; for a client that holds everything.

        Raises:
            LocalProtocolError: not `can_push`.
        """
        tensors = self._pushed(gradients, values)
        clocks = self._clocks(fetched_clocks)
        return self._pushes.stage(tensors, clocks, skip_missing=skip_missing)

    def draft(self, *, fetched_clocks: Sequence[int] | None = None) -> PushDraft:
        """Return a push that the lane fills tensor by tensor; then call `staged`.

        Args:
            fetched_clocks: As in `stage`.

        Raises:
            LocalProtocolError: not `can_push`.
        """
        return self._pushes.draft(self._clocks(fetched_clocks))

    def abandon(self) -> None:
        """Push nothing of what was staged, or drafted; no work touches it any more."""
        self._pushes.abandon()
        self._release()

    def _pushed(
        self, gradients: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        return [
            gradient if spec.kind == "parameter" else value
            for spec, gradient, value in zip(self._tensors, gradients, values, strict=True)
        ]

    def _clocks(self, fetched_clocks: Sequence[int] | None) -> Sequence[int]:
        return self.clocks if fetched_clocks is None else fetched_clocks

    def staged(
        self, outcome: PushResult, *, n_gradients: int, samples: int, now: Seconds, grant: int = 0
    ) -> list[Action]:
        """Push what was staged, if it is finite; count and name it if not.

        Args:
            outcome: Of the work.
            n_gradients: How many gradients were summed.
            samples: Total of this client over all its lives, these included.
            now: The time.
            grant: Of a set of portions, which is folded, not applied; then `samples`
                are its own.
        """
        actions = self._pushes.staged(
            outcome, n_gradients=n_gradients, samples=samples, grant=grant, now=now
        )
        self._release()
        return actions

    # -------------------------------------------------------------------- figures

    @property
    def waiting_for(self) -> Address | None:
        """The first shard without whom the next fetch or push cannot go on, if any."""
        for link in self._links.values():
            if not (link.welcome and link.fetching.complete and link.pushing.has_room):
                return link.address
        return None

    def counters(self) -> dict[str, float]:
        """Return figures for the role's status.

        A push is one, however many shards it goes to. `pushes_sent` counts all,
        `pushes_acknowledged` those of them that no shard owes an answer, `pushes_lost`
        those that were acknowledged and are missing in the values of a shard.
        Bytes are those of blocks and of copies to and from shared memory.
        """
        links = self._links.values()
        staleness = self._staleness.counters()
        return {
            "pushes_sent": float(self._pushes.n_pushed),
            "pushes_acknowledged": float(self._pushes.n_pushed - self.unacknowledged),
            "pushes_lost": float(n_lost(link.pushing.lost for link in links)),
            "bytes_in": float(sum(link.fetching.bytes_in for link in links)),
            "bytes_out": float(sum(link.pushing.bytes_out for link in links)),
            "torn_reads": float(self._fetches.n_torn),
            "non_finite": float(self._pushes.n_non_finite),
            **staleness,
        }

    def _release(self) -> None:
        """Let go of memory of former leaders, unless work touches it."""
        if not self._is_working:
            for link in self._links.values():
                link.release()

    @property
    def _is_working(self) -> bool:
        return self._fetches.under_way or self._pushes.under_way
