"""The link to one shard: session, primary, shared memory and timeouts.

                      OpenSession, repeated             SessionOpened
    opening ------------------------------> opening -------------------> open
       ^                                                                   |
       +---- new primary, new incarnation, SessionRefused, shard is gone --+

OpenSession goes to all copies of the shard, everything else to the one that opened the session.
Pushes in flight survive a change of the primary. While something is awaited, a timer repeats all
of it, with a delay that doubles from `retry_seconds` to `retry_seconds_max`.

The primary is the copy of the highest term (`shard_incarnation` in the replies; with one copy, its
incarnation). A reply of a lower term, or of an older incarnation of a copy, is ignored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never, final

from distbelief.core.memory import Memory
from distbelief.core.reliable import Backoff, Silence
from distbelief.errors import JobError, MemoryGoneError, PeerLostError
from distbelief.parameter_server.client.buffers import PushBuffers, ShardFetch, ShardPush
from distbelief.parameter_server.layout import PartialView
from distbelief.parameter_server.shared_vector import SeqlockVector, push_buffer_views
from distbelief.protocol import Message, PrimaryChanged, push_fetch as pf
from distbelief.roles.role import (
    Action,
    Address,
    PeerJoined,
    PeerLost,
    Received,
    Seconds,
    Send,
    SetTimer,
)


N_ATTACH_MAX = 3
"""Failures in a row after which the client uses messages instead of shared memory."""

TIMER = "client:"

ShardReply = (
    pf.SessionOpened
    | PrimaryChanged
    | pf.SessionRefused
    | pf.ParameterBlock
    | pf.PushBlockAck
    | pf.PushApplied
)


@final
@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Limits and delays of a client."""

    pushes: bool
    retry_seconds: Seconds = 0.5
    retry_seconds_max: Seconds = 4.0
    silence_seconds_max: Seconds = 60.0  # without any message
    stall_seconds_max: Seconds = 600.0  # with messages but without progress
    torn_seconds_max: Seconds = 1.0  # then a fetch from shared memory goes by blocks
    credit_blocks: int = 16  # blocks of 1 MiB under way per shard and direction

    def __post_init__(self) -> None:
        for name in (
            "retry_seconds",
            "retry_seconds_max",
            "silence_seconds_max",
            "stall_seconds_max",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; use more than 0")
        if not self.torn_seconds_max >= 0:
            raise ValueError(f"torn_seconds_max is {self.torn_seconds_max}; use 0 or more")
        if not 1 <= self.credit_blocks <= 64:
            raise ValueError(f"credit_blocks is {self.credit_blocks}; use 1 to 64")


@final
class ShardLink:
    """One shard, as one client sees it.

    Args:
        copies: Addresses of the shard's copies, one or two.
        index: Of the shard.
        config: Settings of the client.
        view: What the client holds.
        memory: Shared with shards on this host.
        note_staleness: Called with the staleness of each acknowledged push.
    """

    def __init__(
        self,
        copies: Sequence[Address],
        index: int,
        *,
        config: ClientConfig,
        view: PartialView,
        memory: Memory,
        note_staleness: Callable[[int], None],
    ) -> None:
        self.copies = tuple(copies)
        self.index = index
        self.config = config
        self._layout = view.layout
        self._slice = view.slice(index)
        self._note_staleness = note_staleness
        self.is_open = False  # whether the current primary has opened the session
        self.samples = 0  # this client's samples in the shard's values when the session opened
        credit = config.credit_blocks
        self.fetching = ShardFetch(view, index, self._slice, credit_blocks=credit)
        self.pushing = ShardPush(view, index, self._slice, credit_blocks=credit)
        # The copy that opened the last session; before that, the first copy.
        self.primary = self.copies[0]
        self.term = 0  # the highest known term; 0 before the first
        self._incarnations = dict.fromkeys(self.copies, 0)
        # Shared memory of the shard that is attached, and names of regions to release.
        self._memory = memory
        self._published: SeqlockVector | None = None  # its values; None: they come in blocks
        self._push_buffers: PushBuffers | None = None  # None: pushes go in blocks
        self._push_region = ""
        self._held: set[str] = set()
        self._n_attach_failures = 0
        self._silence = Silence()
        self._backoff = Backoff(config.retry_seconds, config.retry_seconds_max)
        self._sent_at: Seconds = 0.0
        self._awaited = False

    @property
    def clock(self) -> int:
        return max(self.fetching.clock, self.pushing.clock)

    # ------------------------------------------------------------ from the client

    def open_session(self, now: Seconds) -> list[Action]:
        self.is_open = False
        self._sent_at = now
        return self._open_session(self.copies)

    def send(self, messages: Sequence[Message], now: Seconds) -> list[Action]:
        """Send these to the primary, and wait for what they ask for."""
        return [*self._send(messages, now), *self.wait(now)]

    # ------------------------------------------------------------- from the shard

    def receive(self, event: Received, message: ShardReply, now: Seconds) -> list[Action]:
        sender = event.sender
        if self._is_stale(sender, event.incarnation):
            return []
        is_lost = self._note_incarnation(sender, event.incarnation)
        demoted = False
        if not isinstance(message, pf.SessionRefused):
            is_lost = self._note_term(message.shard_incarnation) or is_lost
            demoted = message.shard_incarnation < self.term
        actions: list[Action] = []
        if is_lost:
            self._lost()
            if demoted or not isinstance(message, pf.SessionOpened):
                actions += self.open_session(now)
        if not demoted:
            actions += self._take(sender, message, now)
        return actions

    def peer(self, event: PeerJoined | PeerLost, now: Seconds) -> list[Action]:
        if self._is_stale(event.peer, event.incarnation):
            return []
        if self._note_incarnation(event.peer, event.incarnation):
            self._lost()
        if isinstance(event, PeerLost) and event.peer == self.primary:
            return self.open_session(now)
        return [] if self.is_open else self.open_session(now)

    def _is_stale(self, copy: Address, incarnation: int) -> bool:
        return incarnation < self._incarnations[copy]

    def _note_incarnation(self, copy: Address, incarnation: int) -> bool:
        """Note an incarnation; return whether it shows that the primary has restarted."""
        before = self._incarnations[copy]
        self._incarnations[copy] = max(before, incarnation)
        return copy == self.primary and 0 < before < incarnation

    def _note_term(self, term: int) -> bool:
        """Note a term; return whether it is the highest so far."""
        is_newer = term > self.term
        self.term = max(self.term, term)
        return is_newer

    def _lost(self) -> None:
        self.is_open = False
        self.fetching.lost()
        self._backoff.pause = self._backoff.first
        self._n_attach_failures = 0

    def _take(self, sender: Address, message: ShardReply, now: Seconds) -> list[Action]:
        if isinstance(message, pf.SessionRefused):
            return self._refused(sender, message, now)
        self._silence.heard(now, progress=False)
        if isinstance(message, pf.SessionOpened):
            return self._session_opened(sender, message, now)
        replies: Sequence[Message] = ()
        progress = False
        match message:
            case PrimaryChanged():
                pass  # `receive` has sent OpenSession if this is news
            case pf.PushApplied():
                progress = self.pushing.acknowledged(message)
                if progress:
                    self._note_staleness(message.staleness)
            case pf.ParameterBlock():
                before = len(self.fetching.blocks)
                replies = self.fetching.take(message)
                # Every block counts, not only those that get an answer: over a busy network a
                # quarter of a window may take longer than `retry_seconds`.
                progress = len(self.fetching.blocks) > before
            case pf.PushBlockAck():
                replies = self.pushing.blocks_acked(message)
                progress = bool(replies)
            case _:
                assert_never(message)
        if progress:
            self._progressed(now)
        return self._send(replies, now)

    def _session_opened(
        self, sender: Address, message: pf.SessionOpened, now: Seconds
    ) -> list[Action]:
        if self.is_open:
            return []  # a repetition, which only shows that the shard is alive
        # A SessionOpened behind our own watermark answers an older OpenSession.
        if not self.pushing.agrees(message):
            return self._open_session(self.copies)
        if not self._attach(message):
            return []  # the timer sends OpenSession again
        self.is_open = True
        self.primary = sender
        self.samples = message.samples
        self._progressed(now)
        self.pushing.session_opened(message, self._push_buffers)
        fetches = self.fetching.session_opened(
            self._published, shard_incarnation=message.shard_incarnation, clock=message.clock
        )
        return self._send([*fetches, *self.pushing.again()], now)

    def _refused(self, sender: Address, message: pf.SessionRefused, now: Seconds) -> list[Action]:
        if message.for_good:
            raise JobError(f"{sender} refuses this client: {message.reason}")
        # A backup refuses clients; that means nothing here.
        if self.is_open and sender != self.primary:
            return []
        self._silence.heard(now, progress=False)
        if not self.is_open:
            return []  # the shard is busy; the timer sends OpenSession again
        return self.open_session(now)

    # ------------------------------------------------------------- shared memory

    def _attach(self, opened: pf.SessionOpened) -> bool:
        """Attach the regions that SessionOpened names; return whether all of them exist.

        On failure nothing changes: the old push buffers hold pushes in flight, which are copied
        to the new ones later.
        """
        published, push_buffers = self._published, self._push_buffers
        values_region, push_region = opened.parameters_region, opened.push_buffers_region
        n_elements, dtype = self._slice.n_elements, self._slice.dtype
        try:
            if published is None or published.name != values_region:
                published = None
                if values_region:
                    self._held.add(values_region)
                    size = self._layout.shard_size(self.index)
                    published = SeqlockVector.attach(
                        self._memory, values_region, n_elements=size, dtype=dtype
                    )
            if push_region != self._push_region:
                push_buffers = None
                if push_region:
                    self._held.add(push_region)
                    region = self._memory.attach(push_region)
                    push_buffers = push_buffer_views(region, n_elements=n_elements, dtype=dtype)
        except MemoryGoneError:
            self._n_attach_failures += 1
            return False
        self._published, self._push_buffers = published, push_buffers
        self._push_region = push_region
        return True

    def release(self) -> None:
        """Release memory of former primaries; call when no work touches it."""
        if not self._held:  # always so for a shard on another host
            return
        used = {self._push_region}
        if self._published is not None:
            used.add(self._published.name)
        for name in self._held - used:
            self._memory.release(name)
        self._held &= used

    # --------------------------------------------------------------------- waiting

    @property
    def _is_waiting(self) -> bool:
        return not self.is_open or not self.fetching.complete or self.pushing.waits

    def wait(self, now: Seconds) -> list[Action]:
        """Run the timer if something is awaited; call after every change."""
        is_waiting = self._is_waiting
        begins = is_waiting and not self._awaited
        self._awaited = is_waiting
        if begins:
            self._silence.start(now)
            self._sent_at, self._backoff.pause = now, self._backoff.first
        if not is_waiting:
            return []
        due, timer_at = now + self._backoff.pause, self._silence.timer_at
        runs = timer_at is not None and (not begins or timer_at <= due)
        return [] if runs else [self._set_timer(due)]

    def timer(self, now: Seconds) -> list[Action]:
        """Repeat what is awaited; raise PeerLostError if the shard was silent for too long."""
        self._silence.woke(now)
        if not self._is_waiting:
            return []
        self._give_up_if_due(now)
        due = max(self._sent_at, self._silence.progress_at) + self._backoff.pause
        if now < due:
            return [self._set_timer(due)]
        self._backoff.repeat(now)
        if self.is_open:
            # The other copy gets OpenSession too: it may be primary, with its PrimaryChanged
            # lost.
            others = [copy for copy in self.copies if copy != self.primary]
            messages = [*self.fetching.again(), *self.pushing.again()]
            actions = [*self._send(messages, now), *self._open_session(others)]
        else:
            actions = self.open_session(now)
        self._sent_at = now
        return [*actions, self._set_timer(self._backoff.due)]

    def _set_timer(self, at: Seconds) -> SetTimer:
        return SetTimer(name=f"{TIMER}{self.index}", at=self._silence.expect(at))

    def _give_up_if_due(self, now: Seconds) -> None:
        config, silence = self.config, self._silence
        silent, stalled = silence.silent(now), silence.stalled(now)
        name = " and ".join(self.copies)
        awaited = "SessionOpened"
        if self.is_open:
            awaited = "an acknowledgement" if self.fetching.complete else "a fetch"
        if silent >= config.silence_seconds_max:
            raise PeerLostError(
                f"{name} has been silent for {silent:.1f} s with {awaited} due "
                f"(silence_seconds_max is {config.silence_seconds_max:g}): look at its log"
            )
        if stalled >= config.stall_seconds_max:
            raise PeerLostError(
                f"{name} answers, but {awaited} is overdue by {stalled:.1f} s "
                f"(stall_seconds_max is {config.stall_seconds_max:g}): look at its log"
            )

    def _progressed(self, now: Seconds) -> None:
        self._silence.progress_at = now
        self._backoff.pause = self._backoff.first

    # --------------------------------------------------------------------- sending

    def _open_session(self, copies: Sequence[Address]) -> list[Action]:
        may_attach = self._n_attach_failures < N_ATTACH_MAX
        request = pf.OpenSession(
            layout=self._layout.fingerprint,
            pushes=self.config.pushes,
            host=self._memory.host if may_attach else "",
            next_sequence=self.pushing.settled + 1,
            holds=self._slice.stripes,
        )
        return [Send(receiver=copy, message=request) for copy in copies]

    def _send(self, messages: Sequence[Message], now: Seconds) -> list[Action]:
        if messages:
            self._sent_at = now
        # Push buffers stay unchanged until the push is settled, so blocks need no copy.
        return [
            Send(receiver=self.primary, message=message, lent=isinstance(message, pf.PushBlock))
            for message in messages
        ]
