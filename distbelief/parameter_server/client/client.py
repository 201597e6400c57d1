"""The client of all shards, embedded in a role.

    fetch    begin_fetch ... fetch_complete   install ~~> installed     (torn: install again)
    push     can_push                         draft   ~~> staged ... unacknowledged = 0
    tick     enter ... may_begin              fetch, local steps, push ...              leave

`~~>` is work that the role runs in its executor, at most one install and one draft at a time;
meanwhile the tensors belong to it. The role passes on every event that the client `owns` and
performs the returned actions. Nothing here blocks.

Where shards count ticks, workers wait for each other: `enter` before every tick, begin it once
`may_begin`; `leave` when there is nothing to do, or the others wait. A push ends a tick.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, assert_never, cast, final

import msgspec
import torch

from distbelief.core import formatting
from distbelief.core.errors import JobError, LocalProtocolError
from distbelief.core.memory import Memory
from distbelief.core.reliable import AnswerTimer
from distbelief.parameter_server.client.factored import FactoredPushes, FactorSource, PushEncoder
from distbelief.parameter_server.client.fetches import FetchResult, ShardFetch, ShardReader, install
from distbelief.parameter_server.client.primary import ShardMemory, ShardPrimary
from distbelief.parameter_server.client.pushes import (
    FullBlocks,
    PushDraft,
    PushResult,
    SendOrder,
    ShardPush,
    StageTarget,
)
from distbelief.parameter_server.client.residuals import EncodedPush, Residuals
from distbelief.parameter_server.codecs import Auto, Factors
from distbelief.parameter_server.layout import PartialView, first_difference
from distbelief.parameter_server.lost_pushes import n_lost
from distbelief.parameter_server.shard_config import ClientConfig, copy_names
from distbelief.parameter_server.staleness import Staleness
from distbelief.parameter_server.tensor_copies import N_PUSH_BUFFERS
from distbelief.parameter_server.ticks import ShardTicks, WorkerTicks
from distbelief.protocol import Message, PrimaryChanged, push_fetch as pf, role as rl


# --- one shard ---

TIMER: Final = "client:"

ShardReply = (
    pf.SessionOpened
    | PrimaryChanged
    | pf.SessionRefused
    | pf.ParameterBlock
    | pf.PushBlockAck
    | pf.PushApplied
    | pf.Floor
)
_SHARD_REPLIES: Final = rl.message_types(ShardReply)
_ANSWERS: Final[Mapping[type[Message], type[Message]]] = {
    pf.Fetch: pf.ParameterBlock,
    pf.PushBlock: pf.PushBlockAck,
    pf.Push: pf.PushApplied,
}


@final
class ShardLink:
    """The link to one shard: session, primary, shared memory and timeouts.

                          OpenSession, repeated             SessionOpened
        opening ------------------------------> opening -------------------> open
           ^                                                                   |
           +---- new primary, new incarnation, SessionRefused, shard is gone --+

    OpenSession goes to all copies of the shard, everything else to the one that opened the
    session. Pushes in flight survive a change of the primary. While something is awaited, a timer
    repeats all of it, with a delay that doubles from `retry_seconds` to `retry_seconds_max`.
    """

    def __init__(
        self,
        config: ClientConfig,
        view: PartialView,
        index: int,
        copies: tuple[rl.Address, ...],  # one or two
        *,
        memory: Memory,
        staleness: Staleness,  # of acknowledged pushes
        encoder: PushEncoder | None,
        order: SendOrder,
    ) -> None:
        self.copies = copies
        self._hosts: dict[rl.Address, str] = {}  # of these copies, as far as known
        self.index = index
        self._config = config
        self._layout = view.layout
        self._holds = view.slices[index].stripes
        n_blocks = len(view.slices[index].bounds)
        self._credit = min(config.credit_blocks, n_blocks)
        self._staleness = staleness
        self.is_open = False  # whether the current primary has opened the session
        self.samples = 0  # this client's samples in the shard's values when the session opened
        self.ticks = ShardTicks()
        self.memory = ShardMemory(memory, view, index)
        self.fetching = ShardFetch(config, view, index, self.memory)
        self.pushing = ShardPush(config, view, index, self.memory, self.ticks, encoder, order)
        self.primary = ShardPrimary(copies)
        self._answer = AnswerTimer(
            config.retry_seconds,
            config.retry_seconds_max,
            silence_seconds_max=config.silence_seconds_max,
            stall_seconds_max=config.stall_seconds_max,
        )

    @property
    def clock(self) -> int:
        return max(self.fetching.clock, self.pushing.clock)

    @property
    def has_room(self) -> bool:
        return self.pushing.issued - self.pushing.settled < N_PUSH_BUFFERS

    @property
    def state(self) -> tuple[object, ...]:
        """What the client's role may wait for."""
        blocks, settled, ticks = self.fetching.complete, self.pushing.settled, self.ticks
        agrees = ticks.floor is None or ticks.agrees
        return self.is_open, self.primary.term, blocks, settled, ticks.floor, ticks.known, agrees

    @property
    def progress(self) -> tuple[int, int, int]:
        """Figures that change with every block that comes or is acknowledged."""
        blocks = sum(one.blocks.received for one in self.pushing.in_flight)
        return self.fetching.bytes_in, self.pushing.settled, blocks

    # ------------------------------------------------------------ from the client

    def open_session(self, now: rl.Seconds) -> list[rl.Action]:
        self.is_open, self.pushing.host = False, None
        self._answer.sent_at = now
        return self._open_session(self.copies)

    def tell(self, now: rl.Seconds, *, is_news: bool) -> list[rl.Action]:
        """Tell the shard whether the client is in, and its tick; repeated until it knows."""
        tells = is_news and self.is_open
        sends = self._open_session([self.primary.address]) if tells else []
        return [*sends, *self.wait(now)]

    # ------------------------------------------------------------- from the shard

    def receive(self, event: rl.Received, message: ShardReply, now: rl.Seconds) -> list[rl.Action]:
        primary, is_late = self.primary, False
        term = None if isinstance(message, pf.SessionRefused) else message.term
        actions: list[rl.Action] = []
        if event.incarnation != primary.incarnations[event.sender] or term != primary.term:
            is_lost, is_late = primary.hear(event.sender, event.incarnation, term)
            if is_lost:
                self._lost()
                if is_late or not isinstance(message, pf.SessionOpened):
                    actions += self.open_session(now)
        return actions if is_late else actions + self._take(event.sender, message, now)

    def peer(self, event: rl.PeerJoined | rl.PeerLost, now: rl.Seconds) -> list[rl.Action]:
        is_lost, is_late = self.primary.hear(event.peer, event.incarnation, None)
        if is_late:
            return []
        if isinstance(event, rl.PeerJoined):
            self._hosts[event.peer] = event.host
        if is_lost:
            self._lost()
        is_gone = isinstance(event, rl.PeerLost) and event.peer == self.primary.address
        return self.open_session(now) if is_gone or not self.is_open else []

    def _lost(self) -> None:
        self.is_open, self.pushing.host = False, None
        self.fetching.lost()
        self._answer.begin_anew()
        self.memory.n_failures = 0

    def _take(self, sender: rl.Address, message: ShardReply, now: rl.Seconds) -> list[rl.Action]:
        replies: Sequence[Message] = ()
        answer = self._answer
        if not isinstance(message, pf.SessionRefused):
            answer.silence.heard_at = now
        match message:  # the most frequent ones first
            case pf.ParameterBlock():
                before = self.fetching.received
                replies = self.fetching.take(message)
                # Every block counts, not only those that get an answer: over a busy network a
                # quarter of a window may take longer than `retry_seconds`.
                if self.fetching.received > before:
                    answer.blocks_came(now, pf.ParameterBlock, 1, self._credit)
            case pf.PushBlockAck():
                replies = self._blocks_acked(message, now)
            case pf.PushApplied():
                self._acknowledged(message, now)
            case pf.Floor():
                self.ticks.note_floor(message)
            case PrimaryChanged():
                pass  # `receive` has sent OpenSession if this is news
            case pf.SessionRefused():
                return self._refused(sender, message, now)
            case pf.SessionOpened():
                return self._session_opened(sender, message, now)
            case _:
                assert_never(message)
        return self.send(replies, now)

    def _blocks_acked(self, message: pf.PushBlockAck, now: rl.Seconds) -> Sequence[Message]:
        answer = self._answer
        n_acked, replies = self.pushing.blocks_acked(message)
        if n_acked:
            answer.blocks_came(now, pf.PushBlockAck, n_acked, self._credit)
        is_last = message.sequence == self.pushing.issued  # else the last one may be lost
        if message.waits is True and is_last and self.fetching.complete:
            answer.must_wait()
        if self.ticks.floor is not None:  # it may wait for pushes of other workers
            answer.silence.progress_at = now
        return replies

    def _acknowledged(self, message: pf.PushApplied, now: rl.Seconds) -> None:
        is_news = self.pushing.acknowledged(message)
        if message.floor is not msgspec.UNSET:
            self.ticks.acknowledged(message, is_news=is_news)
        if is_news:
            self._staleness.add(message.staleness)
            if message.late is msgspec.UNSET:
                self._answer.applied(now, pf.PushApplied)
            else:  # its round has waited for other workers, which tells nothing of the shard
                self._answer.progressed(now)

    def _session_opened(
        self, sender: rl.Address, message: pf.SessionOpened, now: rl.Seconds
    ) -> list[rl.Action]:
        if self.is_open:  # a repetition, which only shows that the shard is alive
            self.ticks.note(message)
            if not self._awaits and self.ticks.floor is not None:
                self._answer.silence.progress_at = now  # the client waits for other workers
            return []
        # A SessionOpened behind our own watermark answers an older OpenSession.
        if not self.pushing.agrees(message):
            return self._open_session(self.copies)
        if not self.memory.attach(message):
            return []  # the timer sends OpenSession again
        self.is_open, self.pushing.host = True, self._hosts.get(sender, "")
        self.primary.address = sender
        self.samples = message.samples
        self.ticks.opened()
        self._answer.progressed(now)
        self.pushing.session_opened(message)
        self.ticks.note(message)
        return self.send([*self.fetching.session_opened(message), *self.pushing.again()], now)

    def _refused(
        self, sender: rl.Address, message: pf.SessionRefused, now: rl.Seconds
    ) -> list[rl.Action]:
        if message.for_good:
            difference = first_difference(message.tensors or (), self._layout.shown())
            why = [bool(message.tensors and difference) and f"it has {difference}", message.reason]
            text = formatting.plain(formatting.joined("; ", why))
            raise JobError(f"{sender} refuses this client: {text}")
        # A backup refuses clients; that means nothing here.
        if self.is_open and sender != self.primary.address:
            return []
        self._answer.silence.heard_at = now
        # If the shard is busy, the timer sends OpenSession again.
        return self.open_session(now) if self.is_open else []

    # --------------------------------------------------------------------- waiting

    @property
    def _awaits(self) -> bool:
        """Whether the shard itself owes something, not another worker."""
        is_fetching = not (self.fetching.complete or self.fetching.is_held)
        # It owes nothing for a push whose blocks all wait for their turn.
        pushes = [
            x for x in self.pushing.in_flight if x.is_sent or x.blocks.sent > x.blocks.received
        ]
        return bool(not self.is_open or is_fetching or pushes)

    @property
    def _is_waiting(self) -> bool:
        ticks = self.ticks
        is_late = ticks.floor is not None and (ticks.waits_for_floor or not ticks.agrees)
        return is_late or self._awaits

    def wait(self, now: rl.Seconds) -> list[rl.Action]:
        """Run the timer if something is awaited; call after every change."""
        answer = self._answer
        if not self._is_waiting:
            answer.is_awaited = False
        elif not answer.is_awaited or answer.silence.timer_at is None:
            at = answer.awaits(now)
            return [] if at is None else [self._timer_at(at)]
        return []

    def timer(self, now: rl.Seconds) -> list[rl.Action]:
        """Repeat what is awaited; raise PeerLostError if the shard was silent for too long."""
        self._answer.woke(now)
        if not self._is_waiting:
            return []
        is_fetching = not (self.fetching.complete or self.fetching.is_held)
        awaited = "a fetch" if is_fetching else "an acknowledgement"
        awaited = awaited if self.is_open else "SessionOpened"
        self._answer.check(now, " and ".join(self.copies), awaited)
        at = self._answer.not_yet(now)
        if at is not None:
            return [self._timer_at(at)]
        under_way: dict[object, int] = {}
        if self.is_open:
            under_way = {
                pf.ParameterBlock: self.fetching.n_under_way,
                pf.PushBlockAck: self.pushing.n_unanswered,
                pf.PushApplied: len(self.pushing.in_flight),
            }
            # The other copy gets OpenSession too: it may be primary, with its PrimaryChanged lost.
            # Where it counts ticks, the primary's answer tells the floor.
            asks = self.ticks.floor is not None and not is_fetching
            others = [copy for copy in self.copies if asks or copy != self.primary.address]
            messages = [*self.fetching.again(), *self.pushing.again()]
            actions = [*self._sends(messages), *self._open_session(others)]
        else:
            actions = self.open_session(now)
        return [*actions, self._timer_at(self._answer.repeated(now, under_way=under_way))]

    def _timer_at(self, at: rl.Seconds) -> rl.SetTimer:
        return rl.SetTimer(name=f"{TIMER}{self.index}", at=at)

    # --------------------------------------------------------------------- sending

    def _open_session(self, copies: Sequence[rl.Address]) -> list[rl.Action]:
        ticks = self.ticks
        request = pf.OpenSession(
            layout=self._layout.fingerprint,
            pushes=self._config.pushes,
            host=self.memory.host,
            next_sequence=self.pushing.settled + 1,
            holds=self._holds,
            entries=ticks.attendance.changes or msgspec.UNSET,
            tick=msgspec.UNSET if ticks.ended is None else ticks.ended,
            known_term=self.primary.term,
            encodes=msgspec.UNSET if self._config.push is None else True,
        )
        return [rl.Send(receiver=copy, message=request) for copy in copies]

    def send(self, messages: Sequence[Message], now: rl.Seconds) -> list[rl.Action]:
        answer = self._answer
        for message in messages:
            answer.sent_at = now
            kind = type(message)
            if kind in _ANSWERS:
                answer.asked_at[_ANSWERS[kind]] = now
                answer.is_moving &= kind is pf.PushBlock  # of a push whose first ones may be there
        return self._sends(messages)

    def _sends(self, messages: Sequence[Message]) -> list[rl.Action]:
        # Push buffers stay unchanged until the push is settled, so blocks need no copy.
        primary = self.primary.address
        return [
            rl.Send(receiver=primary, message=message, lent=isinstance(message, pf.PushBlock))
            for message in messages
        ]


# --- all shards ---

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
        view: PartialView,  # what this client holds
        *,
        memory: Memory,  # shared with shards on this host
        shard_copies: int = 1,
        factors: FactorSource | None = None,  # of dense layers, where they go as these
    ) -> None:
        self.view = view
        self._specs = view.tensors
        self._pushes_allowed = config.pushes
        # Whether the last fetch, which may be under way, has all pushes of this client for certain.
        self.fetches_own_pushes = True
        self._follows = False  # whether that fetch was to begin when each shard has them
        self._incarnation: int | None = None  # once started
        self._staleness = Staleness()
        # Where pushes are encoded: what of them is not sent yet.
        self._residuals: Residuals | None = None
        self._factored: FactoredPushes | None = None
        if isinstance(config.push, Factors | Auto) and factors is not None:
            self._factored = FactoredPushes(config.push, view, factors)
        elif config.push is not None and config.pushes:
            self._residuals = Residuals(config.push, view)
        self._encoder: PushEncoder | None = self._factored or self._residuals
        self._order = SendOrder()
        self._links: dict[int, ShardLink] = {}  # by index of the shard, in that order
        self._links_by_copy: dict[rl.Address, ShardLink] = {}
        self._links_by_timer: dict[str, ShardLink] = {}
        for index in view.shards:
            copies = copy_names(index, shard_copies)
            link = ShardLink(
                config,
                view,
                index,
                copies,
                memory=memory,
                staleness=self._staleness,
                encoder=self._encoder,
                order=self._order,
            )
            self._links[index] = link
            self._links_by_copy |= dict.fromkeys(copies, link)
            self._links_by_timer[f"{TIMER}{index}"] = link
        self._installing: dict[int, ShardReader] | None = None
        self._staging: list[StageTarget] | None = None
        self._durable = config.durable
        self._unsaved: Callable[[rl.Seconds], list[rl.Action]] | None = None  # sends that push
        self._n_torn = 0  # torn reads, each of one shard
        self._n_pushed = 0
        self._n_non_finite = 0  # pushes dropped because of NaN or infinity
        self._ticks = WorkerTicks([link.ticks for link in self._links.values()])
        # Whether the last event may have removed what the role waits for.
        self.has_news = False
        self.sends_early = False  # whether parts of a push may leave before it is complete

    # ---------------------------------------------------------------------- events

    def start(
        self, incarnation: int, now: rl.Seconds, *, restored: rl.Snapshot | None = None
    ) -> list[rl.Action]:
        """Open a session with every shard, once. `incarnation` is that of the role.

        `restored` is what a former one has saved.
        """
        if self._incarnation == incarnation:
            return []  # another role that shares this client has started it
        self._incarnation = incarnation
        if self._residuals is not None and self._durable:
            self._residuals.restored = restored
        actions: list[rl.Action] = []
        for link in self._links.values():
            link.fetching.start(incarnation << _INCARNATION_BITS)
            link.pushing.start((incarnation << _INCARNATION_BITS) + 1)
            actions += [*link.open_session(now), *link.wait(now)]
        return actions

    def owns(self, event: rl.Event) -> bool:
        return self._link_of(event) is not None or self._is_saved(event)

    def _is_saved(self, event: rl.Event) -> bool:
        return isinstance(event, rl.Persisted) and self._unsaved is not None

    def handle(self, event: rl.Event, now: rl.Seconds) -> list[rl.Action]:
        """Return the actions for `event`; none if the client does not own it.

        PeerLostError if a shard was silent for too long; JobError if it refuses this client.
        """
        if isinstance(event, rl.Persisted) and self._unsaved is not None:
            return self._saved(event, self._unsaved, now)
        link = self._link_of(event)
        if link is None:
            return []
        before = link.state
        if isinstance(event, rl.Received):
            actions = link.receive(event, cast("ShardReply", event.message), now)
        elif isinstance(event, rl.TimerFired):
            actions = link.timer(now)
        else:
            assert isinstance(event, rl.PeerJoined | rl.PeerLost)
            actions = link.peer(event, now)
        if link.memory.has_former:
            self._release()
        actions += [*self._follow(link, now), *link.wait(now)]
        if self._order.held:
            actions += self._send_held(now)
        self.has_news = link.state != before
        if self.has_news:
            self.sends_early = any(one.pushing.sends_early for one in self._links.values())
        return actions

    def _link_of(self, event: rl.Event) -> ShardLink | None:
        if type(event) is rl.Received:  # nearly all events, without the match statement
            is_reply = type(event.message) in _SHARD_REPLIES
            return self._links_by_copy.get(event.sender) if is_reply else None
        match event:
            case rl.PeerJoined(peer=peer) | rl.PeerLost(peer=peer):
                return self._links_by_copy.get(peer)
            case rl.TimerFired(name=name):
                return self._links_by_timer.get(name)
            case _:
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

    def begin_fetch(
        self, now: rl.Seconds, *, exact: bool = False, follows: bool = False
    ) -> list[rl.Action]:
        """Fetch from every shard, without rounding if `exact`; not during an install.

        If it `follows` pushes, each shard is asked once it has those, and its floor is high enough.
        """
        if self._installing is not None:
            raise LocalProtocolError("begin_fetch while an install is under way")
        self._follows = follows
        self.fetches_own_pushes = follows or self.unacknowledged == 0
        actions: list[rl.Action] = []
        for link in self._links.values():
            fetches = link.fetching.begin(is_open=link.is_open, exact=exact, is_held=follows)
            actions += [*link.send(fetches, now), *self._follow(link, now), *link.wait(now)]
        return actions

    def _follow(self, link: ShardLink, now: rl.Seconds) -> list[rl.Action]:
        is_applied = self._unsaved is None and link.pushing.issued == link.pushing.settled
        is_due = link.fetching.is_held and link.is_open and is_applied
        is_due = is_due and self._ticks.may_read(link.ticks)
        return link.send(link.fetching.release(), now) if is_due else []

    @property
    def fetch_complete(self) -> bool:
        return all(link.fetching.complete for link in self._links.values())

    @property
    def installable(self) -> bool:
        """Whether an install now has something to copy, or nothing is to come."""
        return self.fetch_complete or any(
            link.fetching.installable for link in self._links.values()
        )

    def install(self, tensors: Sequence[torch.Tensor]) -> Callable[[], FetchResult]:
        """Return the work that copies the fetched values into `tensors`.

        The tensors are (n_elements,) each, in the order of the layout or the selection. A repeated
        install skips what an earlier one of the same fetch has copied, so that a client with
        nothing else to do can install what has come while the rest is on its way.
        """
        if self._installing is not None:
            raise LocalProtocolError("install while an install is under way")
        fetches = {index: link.fetching for index, link in self._links.items()}
        self._installing = {i: one.reader() for i, one in fetches.items() if one.installable}
        known = {index: -1 if one.wanted else one.clock for index, one in fetches.items()}
        return partial(install, self._installing, tensors, known=known)

    @property
    def readable_share(self) -> float:
        readable = [reader.readable for reader in (self._installing or {}).values()]
        return sum(readable) / max(len(self._links), 1)

    def installed(self, outcome: FetchResult, now: rl.Seconds) -> list[rl.Action]:
        """Take the result of an install.

        If `outcome.torn` names shards, install again after a millisecond and once `fetch_complete`.
        After `torn_seconds_max` of torn reads, the client fetches by blocks.
        """
        if self._installing is None:
            raise LocalProtocolError("installed without an install")
        readers, self._installing = self._installing, None
        clocks = dict(zip(self._links, outcome.clocks, strict=True))
        actions: list[rl.Action] = []
        for index, reader in readers.items():
            link = self._links[index]
            if index in outcome.torn and reader.blocks:
                link.fetching.part_installed(reader)
            elif index in outcome.torn:
                self._n_torn += 1
                actions += [*link.send(link.fetching.torn(now), now), *link.wait(now)]
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
            and all(link.is_open and link.has_room for link in self._links.values())
        )

    @property
    def encodes(self) -> bool:
        return self._encoder is not None

    @property
    def owes_rest(self) -> bool:
        """Whether a last push would send something that was held back so far."""
        return self._residuals is not None and self._residuals.is_owed

    def forget_rest(self) -> None:
        """Drop what is held back: the shards' values were set."""
        if self._residuals is not None:
            self._residuals.forget([*self._links])

    @property
    def unacknowledged(self) -> int:
        # Every shard was sent the same pushes.
        pushes = [link.pushing for link in self._links.values()]
        n_issued = max((one.issued - one.settled for one in pushes), default=0)
        return n_issued + (self._unsaved is not None)

    def draft(
        self,
        *,
        fetched_clocks: Sequence[int] | None = None,
        touched: Sequence[torch.Tensor | None] | None = None,
        is_last: bool = False,
        notes: rl.Notes | None = None,
        in_turn: bool = False,
    ) -> PushDraft:
        """Return a push to fill in the executor; call `staged` with its result.

        With `notes` of that work, pass each to `filled`: then blocks leave as they get full, to
        one shard after the other if `in_turn` (see `staged`).

        Gradients are sums of raw gradients (DB-7). `fetched_clocks`, of the parameters of the
        oldest gradient, are by default those of the last install. With `touched`, tensors that are
        None there keep their values and rule state. Where pushes are encoded, the last one
        (`is_last`) leaves nothing behind that counts.
        """
        if not self.can_push:
            raise LocalProtocolError("draft while not can_push: wait until it is")
        clocks = self.clocks if fetched_clocks is None else fetched_clocks
        # The last one also has what is held back of tensors without a gradient.
        is_rest = is_last and self.owes_rest
        self._staging = [
            # The gradients may be older than a restart that lowered the shard's clock.
            link.pushing.stage_target(
                fetched_clock=min(clock, link.clock), touched=None if is_rest else touched
            )
            for link, clock in zip(self._links.values(), clocks, strict=True)
        ]
        encode = None
        if self._encoder is not None:
            sequence = max(one.push.sequence for one in self._staging)
            touched = None if is_rest else touched
            encode = partial(self._encoder.encode, sequence, is_last=is_last, touched=touched)
        if notes is not None:
            self._order.is_used = in_turn
        return PushDraft(self._staging, self._specs, encode, notes)

    def filled(self, note: object, now: rl.Seconds) -> list[rl.Action]:
        """Send the blocks that a draft has noted as full."""
        assert isinstance(note, FullBlocks), note
        if note.targets is not self._staging:
            return []  # of a draft that was abandoned
        actions: list[rl.Action] = []
        links = zip(self._links.values(), note.targets, note.blocks, strict=True)
        for link, target, blocks in links:
            if blocks:
                messages = link.pushing.filled(target, blocks, is_open=link.is_open)
                actions += [*link.send(messages, now), *link.wait(now)]
        return actions

    def describe(
        self, fetched_clocks: Sequence[int], touched: Sequence[torch.Tensor | None] | None
    ) -> None:
        """Say of a draft, as in `draft`, what was not known when it began."""
        if self._staging is None:
            raise LocalProtocolError("describe without a draft")
        links = zip(self._links.values(), self._staging, fetched_clocks, strict=True)
        self._staging = [
            link.pushing.described(target, fetched_clock=min(clock, link.clock), touched=touched)
            for link, target, clock in links
        ]

    def abandon(self) -> None:
        """Drop what was drafted; its work must have ended."""
        if self._staging is None:
            raise LocalProtocolError("abandon without a draft")
        self._staging = None
        for link in self._links.values():
            link.pushing.abandon()
        self._release()

    def staged(  # noqa: PLR0913 -- what a push says of itself
        self,
        outcome: PushResult,
        *,
        n_gradients: int,  # that were summed
        samples: int,
        now: rl.Seconds,
        commit_token: int = 0,  # of a chunk, whose sum is committed later, not applied
        dealt: pf.Dealt = msgspec.UNSET,  # positions of its samples
        sets: bool = False,  # values, not gradients
        rates: pf.Rates = msgspec.UNSET,
        in_turn: bool = False,  # to one shard after the other, for a fetch that follows
    ) -> list[rl.Action]:
        """Push what was staged if it is finite; otherwise count and report it.

        `samples` is this client's total over all incarnations; of a chunk, its own.
        """
        if self._staging is None:
            raise LocalProtocolError("staged without a draft: draft a push first")
        if not outcome.finite:
            self.abandon()
            self._n_non_finite += 1
            text = f"not pushed: NaN or infinity in {', '.join(outcome.culprits)}"
            return [rl.Report(text=text, level="warning")]
        self.fetches_own_pushes, self._order.is_used = False, in_turn
        counts = {"n_gradients": n_gradients, "samples": samples, "commit_token": commit_token}
        issue = partial(self._issue, outcome.encoded, counts, dealt=dealt, sets=sets, rates=rates)
        if self._residuals is None or not self._durable:
            return issue(now)
        self._unsaved = issue  # it stays staged until then
        assert self._incarnation is not None
        snapshot = self._residuals.snapshot(samples, incarnation=self._incarnation)
        return [rl.Persist(snapshot=snapshot)]

    def _issue(
        self,
        encoded: EncodedPush | None,
        counts: dict[str, int],
        now: rl.Seconds,
        *,
        dealt: pf.Dealt,
        sets: bool,
        rates: pf.Rates = msgspec.UNSET,
    ) -> list[rl.Action]:
        targets, self._staging = self._staging, None
        self._n_pushed += 1
        if self._counting and not counts["commit_token"]:
            counts |= self._ticks.pushed(
                counts["samples"], in_session=self.samples, is_rest=not counts["n_gradients"]
            )
        actions: list[rl.Action] = []
        for link, target in zip(self._links.values(), targets or (), strict=True):
            messages = link.pushing.issue(
                target, encoded, is_open=link.is_open, dealt=dealt, sets=sets, rates=rates, **counts
            )
            actions += [*link.send(messages, now), *link.wait(now)]
        if self._factored is not None and self._factored.news is not None:
            actions.append(rl.Report(text=self._factored.news))
            self._factored.news = None
        self._release()
        return actions

    def _saved(
        self, event: rl.Persisted, issue: Callable[[rl.Seconds], list[rl.Action]], now: rl.Seconds
    ) -> list[rl.Action]:
        self._unsaved, self.has_news = None, True
        actions = issue(now)
        if event.error is not None:
            text = f"what a push holds back is not saved ({event.error}): a kill would lose it"
            actions.append(rl.Report(text=text, level="warning"))
        return actions

    def _send_held(self, now: rl.Seconds) -> list[rl.Action]:
        """Send the blocks whose turn has come."""
        links = [self._links[index] for index in sorted(self._order.held)]
        self._order.held.clear()
        # Where no session is open, they are sent when it opens.
        due = [(link, link.pushing.more()) for link in links if link.is_open]
        sent = [(*one.send(messages, now), *one.wait(now)) for one, messages in due if messages]
        return [action for actions in sent for action in actions]

    # ---------------------------------------------------------------------- ticks

    @property
    def _counting(self) -> list[ShardLink]:
        return [link for link in self._links.values() if link.ticks.floor is not None]

    @property
    def tick(self) -> int:
        """The ticks that this worker has ended; one that enters has those of the slowest."""
        return self._ticks.ended or 0

    def enter(self, now: rl.Seconds, *, staleness: int | None = None) -> list[rl.Action]:
        """Want to begin a tick at most `staleness` ahead of the slowest worker; None: at once.

        Call again after each event until `may_begin`. Does nothing where shards count no ticks.
        """
        counting = self._counting
        if not counting or not self.ready:
            return []
        before = self._ticks.ended
        news = self._ticks.enter(
            now, staleness=staleness, samples=self.samples, unacknowledged=self.unacknowledged
        )
        told = zip(counting, news, strict=False)
        actions = [one for link, is_news in told for one in link.tell(now, is_news=is_news)]
        is_fetching = self._follows and any(one.fetching.wanted for one in self._links.values())
        if is_fetching and self._installing is None and before != self._ticks.ended:
            # Others went on without this worker: what it fetches may be older than it may read now.
            actions += self.begin_fetch(now, follows=True)
        return actions

    @property
    def is_placed(self) -> bool:
        """Whether it is known which tick the next push ends, where shards count them."""
        return not self._counting or self._ticks.ended is not None

    def skip_tick(self, now: rl.Seconds, *, staleness: int | None) -> list[rl.Action]:
        """End a tick without a push, as another rank of this replica ends one with it."""
        self._ticks.skip()
        return self.enter(now, staleness=staleness)

    @property
    def may_begin(self) -> bool:
        """Whether the next tick may begin: all pushes are applied, and the floor is high enough."""
        counting = self._counting
        is_known = all(link.is_open for link in counting) and not self.unacknowledged
        return not counting or (is_known and self._ticks.may_begin)

    @property
    def is_awaited(self) -> bool:
        """Whether a round of the others waits for this worker's next push."""
        return self._ticks.is_awaited

    def leave(self, now: rl.Seconds) -> list[rl.Action]:
        """End no further tick until `enter`: nobody waits for this worker."""
        self._ticks.leave()
        links = self._links.values()
        return [one for link in links for one in link.tell(now, is_news=link.ticks.leave())]

    # -------------------------------------------------------------------- status

    @property
    def waiting_for(self) -> rl.Address | None:
        if self._ticks.waits_since is not None and self._ticks.waits_since[0]:
            return self._ticks.waits_since[0]  # another worker
        return next(iter(self.late_shards), None)

    @property
    def late_shards(self) -> list[rl.Address]:
        """The shards of which a fetch, an acknowledgement or the session is missing."""
        links = self._links.values()
        late = (li for li in links if not (li.is_open and li.fetching.complete and li.has_room))
        return [link.copies[0] for link in late]

    @property
    def progress(self) -> Sequence[tuple[int, int, int]]:
        """Figures that change while parameters or pushes move."""
        return [link.progress for link in self._links.values()]

    def counters(self) -> dict[str, float]:
        """Return the counters.

        A push to several shards counts once. `pushes_acknowledged` counts those that every shard
        has acknowledged, `pushes_lost` those that were acknowledged and then lost by a shard.
        Bytes count blocks and copies to and from shared memory. Where workers wait for each other,
        `clock_gap` is how many ticks this one is ahead of the slowest (`clock_gap_max`: has been),
        `waits_NAME` how many seconds it waited for that worker. Of encoded pushes: `residual` is
        the sum of the sizes of what is held back (`residual_lost`: was, and was dropped as samples
        are dealt again; `residual_restored`: was saved by a former incarnation), `clipped` of what
        the codec has cut off or let decay, `words` those of the last push (`words_max`: of any),
        `words_pushed` of all for the `numbers_pushed`, `compression` their ratio, `tau` the
        smallest size that the last one sent.
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
            **self._ticks.counters(),
            **({} if self._encoder is None else self._encoder.figures.counters()),
        }

    def _release(self) -> None:
        if self._installing is None and self._staging is None:
            for link in self._links.values():
                if link.memory.has_former:
                    link.memory.release()

    def validate(self) -> None:
        """Check what holds after every event; only simulations call it."""
        for link in self._links.values():
            assert link.pushing.settled <= link.pushing.issued, f"{link.index} settled too much"
