"""The client of all shards, embedded in a role.

    fetch    begin_fetch ... fetch_complete   install ~~> installed     (torn: install again)
    push     can_push                         stage   ~~> staged ... unacknowledged = 0
             can_push                         draft   ~~> staged        tensor by tensor

`~~>` is work that the role runs in its executor, at most one install and one stage at a time;
meanwhile the tensors belong to it. The role passes on every event that the client `owns` and
performs the returned actions. Nothing here blocks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch

from distbelief.core.memory import Memory
from distbelief.errors import LocalProtocolError, RemoteProtocolError
from distbelief.parameter_server.client.buffers import (
    FetchResult,
    PushDraft,
    PushResult,
    ShardReader,
    StageTarget,
    install,
    stage,
)
from distbelief.parameter_server.client.link import TIMER, ClientConfig, ShardLink, ShardReply
from distbelief.parameter_server.layout import Layout, PartialView
from distbelief.parameter_server.push_history import Staleness, n_lost
from distbelief.roles.role import (
    Action,
    Address,
    Event,
    PeerJoined,
    PeerLost,
    Received,
    Report,
    Seconds,
    TimerFired,
)


__all__ = ["ClientConfig", "FetchResult", "ParameterClient", "PushDraft", "PushResult"]


_INCARNATION_BITS = 32
"""Sequences and requests of incarnation i start at i << 32, so that a late answer to a former
incarnation is never mistaken for a current one."""


@final
class ParameterClient:
    """One client of all shards, or of those that hold its part of the tensors.

    A push has one sequence on all shards, and starts only when every shard has a free buffer.
    """

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
            layout: Of the tensors on the shards.
            shards: Addresses of the shards, shard 0 first.
            memory: Shared with shards on this host.
            backups: Address of each shard's other copy; empty if each has one copy.
            selection: What this client holds; None for everything.
        """
        if len(shards) != layout.n_shards:
            raise ValueError(f"{len(shards)} shards are given, the layout has {layout.n_shards}")
        if backups and len(backups) != len(shards):
            raise ValueError(
                f"{len(backups)} backups are given for {len(shards)} shards: give none, "
                "or one for each"
            )
        view = PartialView(layout) if selection is None else selection
        if view.layout.fingerprint != layout.fingerprint:
            raise ValueError(
                f"the selection has layout {view.layout.fingerprint}, the client has "
                f"{layout.fingerprint}: use one layout"
            )
        self._specs = view.tensors
        self._is_parameter = [spec.kind == "parameter" for spec in view.tensors]
        self._pushes_allowed = config.pushes
        self._incarnation: int | None = None  # once started
        self._staleness = Staleness()
        self._links: dict[int, ShardLink] = {}  # by index of the shard, in that order
        self._link_of: dict[Address, ShardLink] = {}
        for index in view.shards:
            copies = (shards[index], *backups[index : index + 1])
            self._links[index] = link = ShardLink(
                copies,
                index,
                config=config,
                view=view,
                memory=memory,
                note_staleness=self._staleness.add,
            )
            self._link_of |= dict.fromkeys(copies, link)
        self._installing: dict[int, ShardReader] | None = None
        self._staging: list[StageTarget] | None = None
        self._n_torn = 0  # torn reads, each of one shard
        self._n_pushed = 0
        self._n_non_finite = 0  # pushes dropped because of NaN or infinity

    # ---------------------------------------------------------------------- events

    def start(self, incarnation: int, now: Seconds) -> list[Action]:
        """Open a session with every shard, once. `incarnation` is that of the role."""
        if self._incarnation == incarnation:
            return []  # another role that shares this client has started it
        self._incarnation = incarnation
        actions: list[Action] = []
        for link in self._links.values():
            link.fetching.start(incarnation << _INCARNATION_BITS)
            link.pushing.start((incarnation << _INCARNATION_BITS) + 1)
            actions += [*link.open_session(now), *link.wait(now)]
        return actions

    def owns(self, event: Event) -> bool:
        if isinstance(event, TimerFired):
            return event.name.startswith(TIMER)
        if isinstance(event, Received) and not isinstance(event.message, ShardReply):
            return False
        return self._link_of_event(event) is not None

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
            if not isinstance(event.message, ShardReply):
                raise RemoteProtocolError(
                    f"{event.sender} sent {type(event.message).__name__}, which a client does "
                    "not accept"
                )
            actions = link.receive(event, event.message, now)
        elif isinstance(event, TimerFired):
            actions = link.timer(now)
        else:
            assert isinstance(event, PeerJoined | PeerLost)
            actions = link.peer(event, now)
        if self._installing is None and self._staging is None:
            link.release()
        return [*actions, *link.wait(now)]

    def _link_of_event(self, event: Event) -> ShardLink | None:
        if isinstance(event, Received):
            return self._link_of.get(event.sender)
        if isinstance(event, PeerJoined | PeerLost):
            return self._link_of.get(event.peer)
        if isinstance(event, TimerFired) and event.name.startswith(TIMER):
            index = event.name.removeprefix(TIMER)
            return self._links.get(int(index)) if index.isdecimal() else None
        return None

    # --------------------------------------------------------------------- fetches

    @property
    def ready(self) -> bool:
        return all(link.is_open for link in self._links.values())

    @property
    def samples(self) -> int:
        return min((link.samples for link in self._links.values()), default=0)

    @property
    def clocks(self) -> tuple[int, ...]:
        return tuple(link.fetching.clock for link in self._links.values())

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        return tuple(link.fetching.version for link in self._links.values())

    def begin_fetch(self, now: Seconds) -> list[Action]:
        """Fetch from every shard; LocalProtocolError while the last fetch is installed."""
        if self._installing is not None:
            raise LocalProtocolError("begin_fetch while an install is under way")
        actions: list[Action] = []
        for link in self._links.values():
            actions += link.send(link.fetching.begin(is_open=link.is_open), now)
        return actions

    @property
    def fetch_complete(self) -> bool:
        return all(link.fetching.complete for link in self._links.values())

    def install(self, tensors: Sequence[torch.Tensor]) -> Callable[[], FetchResult]:
        """Return the work that copies the fetched values into `tensors`.

        The tensors are (n_elements,) each, in the order of the layout or the selection. A repeated
        install skips shards that an earlier one of the same fetch has copied.

        Raises:
            LocalProtocolError: Another install is running.
        """
        if self._installing is not None:
            raise LocalProtocolError("install while an install is under way")
        fetches = {index: link.fetching for index, link in self._links.items()}
        self._installing = {
            index: one.reader() for index, one in fetches.items() if one.wanted and one.complete
        }
        missing = [index for index, one in fetches.items() if not one.complete]
        known = {index: -1 if one.wanted else one.clock for index, one in fetches.items()}
        return partial(install, self._installing, tensors, missing=missing, known=known)

    @property
    def readable_share(self) -> float:
        readers = self._installing or {}
        n_readable = sum(reader.readable for reader in readers.values())
        return n_readable / max(len(self._links), 1)

    def installed(self, outcome: FetchResult, now: Seconds) -> list[Action]:
        """Take the result of an install.

        If `outcome.torn` names shards, install again after a millisecond and once `fetch_complete`.
        After `torn_seconds_max` of torn reads, the client fetches by blocks.
        """
        if self._installing is None:
            raise LocalProtocolError("installed without an install")
        readers, self._installing = self._installing, None
        clocks = dict(zip(self._links, outcome.clocks, strict=True))
        actions: list[Action] = []
        for index, reader in readers.items():
            link = self._links[index]
            if index in outcome.torn:
                self._n_torn += 1
                seconds_max = link.config.torn_seconds_max
                actions += link.send(link.fetching.torn(now, seconds_max=seconds_max), now)
            else:
                link.fetching.installed(clocks[index], reader)
        self._release()
        return actions

    # ---------------------------------------------------------------------- pushes

    @property
    def can_push(self) -> bool:
        return (
            self._pushes_allowed
            and self._staging is None
            and all(link.is_open and link.pushing.has_room for link in self._links.values())
        )

    @property
    def unacknowledged(self) -> int:
        # Every shard was sent the same pushes.
        pushes = [link.pushing for link in self._links.values()]
        return max((one.issued - one.settled for one in pushes), default=0)

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
        tensors = [
            gradient if is_parameter else value
            for is_parameter, gradient, value in zip(
                self._is_parameter, gradients, values, strict=True
            )
        ]
        targets = self._begin_push(fetched_clocks, touched=tensors if skip_missing else None)
        return partial(stage, targets, tensors, specs=self._specs)

    def draft(self, *, fetched_clocks: Sequence[int] | None = None) -> PushDraft:
        """Return a push to fill tensor by tensor in the executor, as `stage`; call `staged`."""
        return PushDraft(self._begin_push(fetched_clocks), self._specs)

    def abandon(self) -> None:
        """Drop what was staged or drafted; its work must have ended."""
        if self._staging is None:
            raise LocalProtocolError("abandon without a stage or a draft")
        self._staging = None
        self._release()

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
            n_gradients: How many were summed.
            samples: Total of this client over all incarnations, including this push.
            now: The time.
            commit_token: Token of a chunk, whose sum is committed later, not applied; `samples`
                then counts this push only.
        """
        if self._staging is None:
            raise LocalProtocolError("staged without a stage: stage a push first")
        targets, self._staging = self._staging, None
        actions: list[Action] = []
        if outcome.finite:
            self._n_pushed += 1
            for link, target in zip(self._links.values(), targets, strict=True):
                messages = link.pushing.issue(
                    target,
                    n_gradients=n_gradients,
                    samples=samples,
                    commit_token=commit_token,
                    is_open=link.is_open,
                )
                actions += link.send(messages, now)
        else:
            self._n_non_finite += 1
            text = f"not pushed: NaN or infinity in {', '.join(outcome.culprits)}"
            actions.append(Report(text=text, level="warning"))
        self._release()
        return actions

    def _begin_push(
        self,
        fetched_clocks: Sequence[int] | None,
        *,
        touched: Sequence[torch.Tensor | None] | None = None,
    ) -> list[StageTarget]:
        if not self.can_push:
            raise LocalProtocolError("stage while not can_push: wait until it is")
        clocks = self.clocks if fetched_clocks is None else fetched_clocks
        self._staging = [
            # The gradients may be older than a restart that lowered the shard's clock.
            link.pushing.stage_target(fetched_clock=min(clock, link.clock), touched=touched)
            for link, clock in zip(self._links.values(), clocks, strict=True)
        ]
        return self._staging

    # -------------------------------------------------------------------- status

    @property
    def waiting_for(self) -> Address | None:
        for link in self._links.values():
            if not (link.is_open and link.fetching.complete and link.pushing.has_room):
                return link.copies[0]
        return None

    def counters(self) -> dict[str, float]:
        """Return the counters.

        A push to several shards counts once. `pushes_acknowledged` counts those that every shard
        has acknowledged, `pushes_lost` those that were acknowledged and then lost by a shard.
        Bytes count blocks and copies to and from shared memory.
        """
        links = self._links.values()
        return {
            "pushes_sent": float(self._n_pushed),
            "pushes_acknowledged": float(self._n_pushed - self.unacknowledged),
            "pushes_lost": float(n_lost(link.pushing.lost for link in links)),
            "bytes_in": float(sum(link.fetching.bytes_in for link in links)),
            "bytes_out": float(sum(link.pushing.bytes_out for link in links)),
            "torn_reads": float(self._n_torn),
            "non_finite": float(self._n_non_finite),
            **self._staleness.counters(),
        }

    def _release(self) -> None:
        if self._installing is None and self._staging is None:
            for link in self._links.values():
                link.release()
