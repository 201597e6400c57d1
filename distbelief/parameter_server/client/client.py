"""The client of all shards, embedded in a role.

    fetch    begin_fetch ... fetch_complete   install ~~> installed     (torn: install again)
    push     can_push                         stage   ~~> staged ... unacknowledged = 0
             can_push                         draft   ~~> staged        tensor by tensor

`~~>` is work that the role runs in its executor, at most one install and one stage at a time;
meanwhile the tensors belong to it. The role passes on every event that the client `owns` and
performs the returned actions. Nothing here blocks.
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
    install_work,
    stage_work,
)
from distbelief.parameter_server.client.fetch import ShardReader
from distbelief.parameter_server.client.link import TIMER, ClientConfig, ShardLink, ShardReply
from distbelief.parameter_server.client.push import StageTarget
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


# --- fetches ---


@final
class ClientFetches:
    """The fetches of one client from all its shards.

    Args:
        links: The client's shards, by index, in that order.
    """

    def __init__(self, links: Mapping[int, ShardLink]) -> None:
        self._links = links
        self._installing: dict[int, ShardReader] | None = None
        self.n_torn = 0  # torn reads, each of one shard

    @property
    def under_way(self) -> bool:
        return self._installing is not None

    @property
    def clocks(self) -> tuple[int, ...]:
        return tuple(link.fetching.clock for link in self._links.values())

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        return tuple(link.fetching.version for link in self._links.values())

    @property
    def complete(self) -> bool:
        return all(link.fetching.complete for link in self._links.values())

    def begin(self, now: Seconds) -> list[Action]:
        if self._installing is not None:
            raise LocalProtocolError("begin_fetch while an install is under way")
        actions: list[Action] = []
        for link in self._links.values():
            actions += [*link.begin_fetch(now), *link.wait(now)]
        return actions

    def install(self, tensors: Sequence[torch.Tensor]) -> Callable[[], FetchResult]:
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
        return install_work(readers, tensors, missing=missing, known=known)

    @property
    def readable_share(self) -> float:
        readers = self._installing or {}
        n_readable = sum(reader.readable for reader in readers.values())
        return n_readable / max(len(self._links), 1)

    def installed(self, outcome: FetchResult, now: Seconds) -> list[Action]:
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


# --- pushes ---


@final
class ClientPushes:
    """The pushes of one client to all its shards.

    A push has one sequence on all shards, and starts only when every shard has a free buffer. All
    buffers are filled and checked before any message goes out, so a push with NaN reaches no shard.

    Args:
        links: The client's shards, by index, in that order.
        tensors: The pushed tensors.
        allowed: Whether the client's sessions allow pushes.
    """

    def __init__(
        self, links: Mapping[int, ShardLink], *, tensors: Sequence[TensorSpec], allowed: bool
    ) -> None:
        self._links = links
        self._tensors = tensors
        self._allowed = allowed
        self._staging: list[StageTarget] | None = None
        self.n_pushed = 0  # pushes made
        self.n_non_finite = 0  # pushes dropped because of NaN or infinity

    @property
    def under_way(self) -> bool:
        return self._staging is not None

    @property
    def can_push(self) -> bool:
        return (
            self._allowed
            and self._staging is None
            and all(link.is_open and link.pushing.has_room for link in self._links.values())
        )

    @property
    def unacknowledged(self) -> int:
        # Every shard was sent the same pushes.
        pushes = [link.pushing for link in self._links.values()]
        return max((one.issued - one.settled for one in pushes), default=0)

    def stage(
        self, tensors: Sequence[torch.Tensor | None], clocks: Sequence[int], *, skip_missing: bool
    ) -> Callable[[], PushResult]:
        names = [spec.name for spec in self._tensors]
        touched = tensors if skip_missing else None
        return stage_work(self._begin(clocks, touched=touched), tensors, names=names)

    def draft(self, clocks: Sequence[int]) -> PushDraft:
        return PushDraft(self._begin(clocks), self._tensors)

    def abandon(self) -> None:
        if self._staging is None:
            raise LocalProtocolError("abandon without a stage or a draft")
        self._staging = None

    def staged(
        self,
        outcome: PushResult,
        *,
        n_gradients: int,
        samples: int,
        commit_token: int,
        now: Seconds,
    ) -> list[Action]:
        if self._staging is None:
            raise LocalProtocolError("staged without a stage: stage a push first")
        targets, self._staging = self._staging, None
        if not outcome.finite:
            self.n_non_finite += 1
            text = f"not pushed: NaN or infinity in {', '.join(outcome.culprits)}"
            return [Report(text=text, level="warning")]
        self.n_pushed += 1
        actions: list[Action] = []
        for link, stage_target in zip(self._links.values(), targets, strict=True):
            actions += link.issue(
                stage_target,
                n_gradients=n_gradients,
                samples=samples,
                commit_token=commit_token,
                now=now,
            )
            actions += link.wait(now)
        return actions

    def _begin(
        self, fetched_clocks: Sequence[int], *, touched: Sequence[torch.Tensor | None] | None = None
    ) -> list[StageTarget]:
        if not self.can_push:
            raise LocalProtocolError("stage while not can_push: wait until it is")
        self._staging = [
            # The gradients may be older than a restart that lowered the shard's clock.
            link.pushing.stage_target(fetched_clock=min(clock, link.clock), touched=touched)
            for link, clock in zip(self._links.values(), fetched_clocks, strict=True)
        ]
        return self._staging


_INCARNATION_BITS = 32
"""Sequences and requests of incarnation i start at i << 32, so that a late answer to a former
incarnation is never mistaken for a current one."""


@final
class ParameterClient:
    """One client of all shards, or of those that hold its part of the tensors."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        layout: Layout,
        shards: Sequence[Address],
        memory: Memory,
        backups: Sequence[Address] = (),
        selection: PartialView | None = None,
    ) -> None:
        """Create the client; `start` acts.

        Args:
            config: Settings.
            layout: Layout of the tensors; the same as the shards'.
            shards: Addresses of the shards, shard 0 first.
            memory: Memory shared with shards on this host.
            backups: Address of each shard's other copy; empty if each has one copy.
            selection: The part of the tensors that this client holds; None for everything.
        """
        if len(shards) != layout.n_shards:
            raise ValueError(f"{len(shards)} shards are given, the layout has {layout.n_shards}")
        if backups and len(backups) != len(shards):
            raise ValueError(
                f"{len(backups)} backups are given for {len(shards)} shards: give none, "
                "or one for each"
            )
        if selection is not None and selection.fingerprint != layout.fingerprint:
            raise ValueError(
                f"the selection has layout {selection.fingerprint}, the client has "
                f"{layout.fingerprint}: use one layout"
            )
        self._tensors = layout.tensors if selection is None else selection.tensors
        self._links: dict[int, ShardLink] = {}  # by index of the shard, in that order
        self._link_of: dict[Address, ShardLink] = {}
        for index in range(len(shards)) if selection is None else selection.shards:
            copies = (shards[index], *backups[index : index + 1])
            part = SliceCopier.of(selection, layout, index)
            link = ShardLink(copies, index, config=config, part=part, memory=memory)
            self._links[index] = link
            self._link_of |= dict.fromkeys(copies, link)
        self._fetches = ClientFetches(self._links)
        self._pushes = ClientPushes(self._links, tensors=self._tensors, allowed=config.pushes)
        self._staleness = Staleness()

    # ---------------------------------------------------------------------- events

    def start(self, incarnation: int, now: Seconds) -> list[Action]:
        """Open a session with every shard. `incarnation` is that of the role."""
        actions: list[Action] = []
        for link in self._links.values():
            link.fetching.start(incarnation << _INCARNATION_BITS)
            link.pushing.start((incarnation << _INCARNATION_BITS) + 1)
            actions += [*link.open_session(now), *link.wait(now)]
        return actions

    def owns(self, event: Event) -> bool:
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
        """Return the actions for `event`; none if the client does not own it.

        Raises:
            PeerLostError: A shard was silent for too long.
            JobError: A shard refuses this client for good.
            RemoteProtocolError: A shard broke the protocol; the event has no effect.
        """
        link = self._link_of_event(event)
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

    def _link_of_event(self, event: Event) -> ShardLink | None:
        match event:
            case Received():
                return self._link_of.get(event.sender)
            case TimerFired():
                return self._link_of_timer(event.name)
            case PeerJoined() | PeerLost():
                return self._link_of.get(event.peer)
            case Started() | Computed() | Persisted():
                return None
            case _:
                assert_never(event)

    def _link_of_timer(self, name: str) -> ShardLink | None:
        index = name.removeprefix(TIMER)
        known = index != name and index.isdecimal()
        return self._links.get(int(index)) if known else None

    def _receive(self, link: ShardLink, event: Received, now: Seconds) -> list[Action]:
        message = event.message
        if not isinstance(message, ShardReply):
            raise RemoteProtocolError(
                f"{event.sender} sent {type(message).__name__}, which a client does not accept"
            )
        return link.receive(event, message, self._staleness, now)

    # --------------------------------------------------------------------- fetches

    @property
    def ready(self) -> bool:
        return all(link.is_open for link in self._links.values())

    @property
    def samples(self) -> int:
        return min((link.samples for link in self._links.values()), default=0)

    @property
    def clocks(self) -> tuple[int, ...]:
        return self._fetches.clocks

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        return self._fetches.versions

    def begin_fetch(self, now: Seconds) -> list[Action]:
        """Fetch from every shard.

        Raises:
            LocalProtocolError: An install of the last fetch is running.
        """
        return self._fetches.begin(now)

    @property
    def fetch_complete(self) -> bool:
        return self._fetches.complete

    def install(self, tensors: Sequence[torch.Tensor]) -> Callable[[], FetchResult]:
        """Return the work that copies the fetched values into `tensors`.

        A repeated install skips shards that an earlier one of the same fetch has copied.

        Args:
            tensors: Each (n_elements,), in the order of the layout or the selection.

        Raises:
            LocalProtocolError: Another install is running.
        """
        return self._fetches.install(tensors)

    @property
    def readable_share(self) -> float:
        return self._fetches.readable_share

    def installed(self, outcome: FetchResult, now: Seconds) -> list[Action]:
        """Take the result of an install.

        If `outcome.torn` names shards, install again after a millisecond and once `fetch_complete`.
        After `torn_seconds_max` of torn reads, the client fetches by blocks.
        """
        actions = self._fetches.installed(outcome, now)
        self._release()
        return actions

    # ---------------------------------------------------------------------- pushes

    @property
    def can_push(self) -> bool:
        return self._pushes.can_push

    @property
    def unacknowledged(self) -> int:
        return self._pushes.unacknowledged

    def stage(
        self,
        gradients: Sequence[torch.Tensor | None],
        values: Sequence[torch.Tensor],
        *,
        fetched_clocks: Sequence[int] | None = None,
        skip_missing: bool = False,
    ) -> Callable[[], PushResult]:
        """Return the work that copies a push into every shard's buffer and checks it.

        Args:
            gradients: Each (n_elements,), in the order of the layout or the selection: sums of
                raw gradients (DB-7). None for zeros; those of buffers are ignored.
            values: In the same order; only those of buffers are pushed.
            fetched_clocks: `clocks` of the parameters of the oldest gradient; by default those of
                the last install.
            skip_missing: Tensors without a gradient keep their values and rule state; only for
                a client that holds everything.

        Raises:
            LocalProtocolError: Not `can_push`.
        """
        tensors = self._pushed(gradients, values)
        clocks = self._clocks(fetched_clocks)
        return self._pushes.stage(tensors, clocks, skip_missing=skip_missing)

    def draft(self, *, fetched_clocks: Sequence[int] | None = None) -> PushDraft:
        """Return a push to fill tensor by tensor in the executor; then call `staged`.

        Args:
            fetched_clocks: As in `stage`.

        Raises:
            LocalProtocolError: Not `can_push`.
        """
        return self._pushes.draft(self._clocks(fetched_clocks))

    def abandon(self) -> None:
        """Drop what was staged or drafted; its work must have ended."""
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
        self,
        outcome: PushResult,
        *,
        n_gradients: int,
        samples: int,
        now: Seconds,
        commit_token: int = 0,
    ) -> list[Action]:
        """Push what was staged if it is finite; otherwise count and report it.

        Args:
            outcome: Result of the work.
            n_gradients: Number of summed gradients.
            samples: Total of this client over all incarnations, including this push.
            now: The time.
            commit_token: Token of a chunk, whose sum is committed later, not applied; `samples`
                then counts this push only.
        """
        actions = self._pushes.staged(
            outcome, n_gradients=n_gradients, samples=samples, commit_token=commit_token, now=now
        )
        self._release()
        return actions

    # -------------------------------------------------------------------- status

    @property
    def waiting_for(self) -> Address | None:
        for link in self._links.values():
            if not (link.is_open and link.fetching.complete and link.pushing.has_room):
                return link.address
        return None

    def counters(self) -> dict[str, float]:
        """Return the counters.

        A push to several shards counts once. `pushes_acknowledged` counts those that every shard
        has acknowledged, `pushes_lost` those that were acknowledged and then lost by a shard.
        Bytes count blocks and copies to and from shared memory.
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
        if not self._is_working:
            for link in self._links.values():
                link.release()

    @property
    def _is_working(self) -> bool:
        return self._fetches.under_way or self._pushes.under_way
