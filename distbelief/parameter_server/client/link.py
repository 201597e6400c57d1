"""The link to one shard: session, primary, shared memory and timeouts.

                      OpenSession, repeated             SessionOpened
    opening ------------------------------> opening -------------------> open
       ^                                                                   |
       +---- new primary, new incarnation, SessionRefused, shard is gone --+

OpenSession goes to all copies of the shard, everything else to the one that opened the session.
Pushes in flight survive a change of the primary. While something is awaited, a timer repeats all
of it, with a delay that doubles from `retry_seconds` to `retry_seconds_max`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never, final

from distbelief.core.memory import Memory
from distbelief.errors import JobError, MemoryGoneError, PeerLostError
from distbelief.parameter_server.client.fetch import ShardFetch
from distbelief.parameter_server.client.push import PushBuffers, ShardPush, StageTarget
from distbelief.parameter_server.session_state import Staleness, push_buffer_views
from distbelief.parameter_server.shared_vector import SeqlockVector
from distbelief.parameter_server.slices import SliceCopier
from distbelief.protocol import (
    Message,
    OpenSession,
    ParameterBlock,
    PrimaryChanged,
    PushApplied,
    PushBlock,
    PushBlockAck,
    SessionOpened,
    SessionRefused,
)
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


# --- shared memory ---

N_ATTACH_MAX = 3
"""Failures in a row after which the client uses messages instead of shared memory."""


@final
class SharedBuffers:
    """The memory of one shard that one client has attached."""

    def __init__(self, memory: Memory, part: SliceCopier) -> None:
        self._memory = memory
        self._part = part
        self._push_region = ""
        self._held: set[str] = set()  # region names to release
        self._n_failures = 0
        # The shard's values; None if they come in blocks.
        self.published: SeqlockVector | None = None
        # Where to stage pushes; None if pushes go in blocks.
        self.push_buffers: PushBuffers | None = None

    @property
    def host(self) -> str:
        return self._memory.host if self._n_failures < N_ATTACH_MAX else ""

    def reset_failures(self) -> None:
        self._n_failures = 0

    def attach_all(self, opened: SessionOpened) -> bool:
        """Attach the regions that SessionOpened names; return whether all of them exist.

        On failure nothing changes: the old push buffers hold pushes in flight, which are copied
        to the new ones later.
        """
        try:
            published = self._published(opened.parameters_region)
            push_buffers = self._attach_push_buffers(opened.push_buffers_region)
        except MemoryGoneError:
            self._n_failures += 1
            return False
        self.published, self.push_buffers = published, push_buffers
        self._push_region = opened.push_buffers_region
        return True

    def release(self) -> None:
        """Release regions that are no longer used; call when no work touches them."""
        if not self._held:  # always so for a shard on another host
            return
        used = {self._push_region}
        if self.published is not None:
            used.add(self.published.name)
        for name in self._held - used:
            self._memory.release(name)
        self._held &= used

    def _published(self, name: str) -> SeqlockVector | None:
        if self.published is not None and self.published.name == name:
            return self.published
        if not name:
            return None
        self._held.add(name)
        return SeqlockVector.attach(
            self._memory, name, n_elements=self._part.shard_size, dtype=self._part.dtype
        )

    def _attach_push_buffers(self, name: str) -> PushBuffers | None:
        if name == self._push_region:
            return self.push_buffers
        if not name:
            return None
        self._held.add(name)
        region = self._memory.attach(name)
        n_elements = self._part.shard_slice.n_elements
        return push_buffer_views(region, n_elements=n_elements, dtype=self._part.dtype)


# --- settings ---


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


# --- primary ---


@final
class PrimaryTracker:
    """Tracks which copy of a shard is the primary, as far as one client can tell.

    The highest term wins (`shard_incarnation` in the replies; with one copy, its incarnation). A
    reply of a lower term, or of an older incarnation of a copy, is ignored.
    """

    def __init__(self, copies: Sequence[Address]) -> None:
        self.copies = tuple(copies)  # one or two addresses
        # The copy that opened the last session; before that, the first copy.
        self.primary = self.copies[0]
        self.term = 0  # the highest known term; 0 before the first
        self._incarnations = dict.fromkeys(self.copies, 0)

    @property
    def others(self) -> tuple[Address, ...]:
        return tuple(copy for copy in self.copies if copy != self.primary)

    def is_stale(self, copy: Address, incarnation: int) -> bool:
        return incarnation < self._incarnations[copy]

    def note_incarnation(self, copy: Address, incarnation: int) -> bool:
        """Note an incarnation; return whether it shows that the primary has restarted."""
        before = self._incarnations[copy]
        self._incarnations[copy] = max(before, incarnation)
        return copy == self.primary and 0 < before < incarnation

    def note_term(self, term: int) -> bool:
        """Note a term; return whether it is the highest so far."""
        is_newer = term > self.term
        self.term = max(self.term, term)
        return is_newer


TIMER = "client:"

ShardReply = (
    SessionOpened | PrimaryChanged | SessionRefused | ParameterBlock | PushBlockAck | PushApplied
)


@final
class ShardLink:
    """One shard, as one client sees it."""

    def __init__(
        self,
        copies: Sequence[Address],
        index: int,
        *,
        config: ClientConfig,
        part: SliceCopier,
        memory: Memory,
    ) -> None:
        self.address = copies[0]  # address of the shard: that of its first copy
        self.index = index  # index of the shard
        self._tracker = PrimaryTracker(copies)
        self._config = config
        self._part = part
        self._buffers = SharedBuffers(memory, part)
        self._timer_at: Seconds | None = None  # while it runs
        self._awaited = False
        self._heard_at: Seconds = 0.0  # or start of waiting
        self._progress_at: Seconds = 0.0
        self._sent_at: Seconds = 0.0
        self._delay: Seconds = config.retry_seconds
        self.is_open = False  # whether the current primary has opened the session
        self.samples = 0  # this client's samples in the shard's values when the session opened
        credit_blocks = config.credit_blocks
        # Fetches from the shard.
        self.fetching = ShardFetch(part, index, credit_blocks=credit_blocks)
        self.pushing = ShardPush(part, index, credit_blocks=credit_blocks)  # pushes to the shard

    # ------------------------------------------------------------ from the client

    def open_session(self, now: Seconds) -> list[Action]:
        self.is_open = False
        self._sent_at = now
        return self._open_session()

    def begin_fetch(self, now: Seconds) -> list[Action]:
        messages = self.fetching.begin(is_open=self.is_open)
        return self._send(messages, now)

    def torn(self, now: Seconds) -> list[Action]:
        seconds_max = self._config.torn_seconds_max
        return self._send(self.fetching.torn(now, seconds_max=seconds_max), now)

    def issue(
        self,
        staged: StageTarget,
        *,
        n_gradients: int,
        samples: int,
        commit_token: int,
        now: Seconds,
    ) -> list[Action]:
        """Push what was staged, now or when the session opens."""
        messages = self.pushing.issue(
            staged,
            n_gradients=n_gradients,
            samples=samples,
            commit_token=commit_token,
            is_open=self.is_open,
        )
        return self._send(messages, now)

    def release(self) -> None:
        """Release memory of former primaries; call when no work touches it."""
        self._buffers.release()

    @property
    def clock(self) -> int:
        return max(self.fetching.clock, self.pushing.clock)

    # ------------------------------------------------------------- from the shard

    def receive(
        self, event: Received, message: ShardReply, staleness: Staleness, now: Seconds
    ) -> list[Action]:
        tracker, sender = self._tracker, event.sender
        if tracker.is_stale(sender, event.incarnation):
            return []
        lost = tracker.note_incarnation(sender, event.incarnation)
        demoted = False
        if not isinstance(message, SessionRefused):
            lost = tracker.note_term(message.shard_incarnation) or lost
            demoted = message.shard_incarnation < tracker.term
        actions: list[Action] = []
        if lost:
            self._lost()
            if demoted or not isinstance(message, SessionOpened):
                actions += self.open_session(now)
        if not demoted:
            actions += self._take(sender, message, staleness, now)
        return actions

    def peer(self, event: PeerJoined | PeerLost, now: Seconds) -> list[Action]:
        tracker, peer = self._tracker, event.peer
        if tracker.is_stale(peer, event.incarnation):
            return []
        if tracker.note_incarnation(peer, event.incarnation):
            self._lost()
        if isinstance(event, PeerLost) and peer == tracker.primary:
            return self.open_session(now)
        return [] if self.is_open else self.open_session(now)

    def _lost(self) -> None:
        self.is_open = False
        self.fetching.lost()
        self._delay = self._config.retry_seconds
        self._buffers.reset_failures()

    def _take(
        self, sender: Address, message: ShardReply, staleness: Staleness, now: Seconds
    ) -> list[Action]:
        if isinstance(message, SessionRefused):
            return self._refused(sender, message, now)
        self._heard_at = now
        if isinstance(message, SessionOpened):
            return self._session_opened(sender, message, now)
        replies: Sequence[Message] = ()
        match message:
            case PrimaryChanged():
                progress = False  # `receive` has sent OpenSession if this is news
            case PushApplied():
                progress = self.pushing.acknowledged(message, staleness)
            case ParameterBlock():
                before = self.fetching.received
                replies = self.fetching.take(message)
                # Every block counts, not only those that get an answer: over a busy network a
                # quarter of a window may take longer than `retry_seconds`.
                progress = self.fetching.received > before
            case PushBlockAck():
                replies = self.pushing.blocks_acked(message)
                progress = bool(replies)
            case _:
                assert_never(message)
        if progress:
            self._progressed(now)
        return self._send(replies, now)

    def _session_opened(
        self, sender: Address, message: SessionOpened, now: Seconds
    ) -> list[Action]:
        if self.is_open:
            return []  # a repetition, which only shows that the shard is alive
        # A SessionOpened behind our own watermark answers an older OpenSession.
        if not self.pushing.agrees(message):
            return self._open_session()
        buffers = self._buffers
        if not buffers.attach_all(message):
            return []  # the timer sends OpenSession again
        self.is_open = True
        self._tracker.primary = sender
        self.samples = message.samples
        self._progressed(now)
        self.pushing.session_opened(message, buffers.push_buffers)
        fetches = self.fetching.session_opened(
            buffers.published, shard_incarnation=message.shard_incarnation, clock=message.clock
        )
        return self._send([*fetches, *self.pushing.again()], now)

    def _refused(self, sender: Address, message: SessionRefused, now: Seconds) -> list[Action]:
        if message.for_good:
            raise JobError(f"{sender} refuses this client: {message.reason}")
        # A backup refuses clients; that means nothing here.
        if self.is_open and sender != self._tracker.primary:
            return []
        self._heard_at = now
        if not self.is_open:
            return []  # the shard is busy; the timer sends OpenSession again
        return self.open_session(now)

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
            self._heard_at = self._progress_at = self._sent_at = now
            self._delay = self._config.retry_seconds
        if not is_waiting:
            return []
        due = now + self._delay
        runs = self._timer_at is not None and (not begins or self._timer_at <= due)
        return [] if runs else [self._set_timer(due)]

    def timer(self, now: Seconds) -> list[Action]:
        """Repeat what is awaited; raise PeerLostError if the shard was silent for too long."""
        self._adjust_for_own_delay(now)
        if not self._is_waiting:
            return []
        self._give_up_if_due(now)
        due = max(self._sent_at, self._progress_at) + self._delay
        if now < due:
            return [self._set_timer(due)]
        self._delay = min(2 * self._delay, self._config.retry_seconds_max)
        if self.is_open:
            # The other copy gets OpenSession too: it may be primary, with its PrimaryChanged
            # lost.
            messages = [*self.fetching.again(), *self.pushing.again()]
            actions = [*self._send(messages, now), *self._open_session(self._tracker.others)]
        else:
            actions = self.open_session(now)
        self._sent_at = now
        return [*actions, self._set_timer(now + self._delay)]

    def _set_timer(self, at: Seconds) -> SetTimer:
        self._timer_at = at
        return SetTimer(name=f"{TIMER}{self.index}", at=at)

    def _adjust_for_own_delay(self, now: Seconds) -> None:
        if self._timer_at is not None:
            late = max(0.0, now - self._timer_at)
            self._heard_at = min(now, self._heard_at + late)
            self._progress_at = min(now, self._progress_at + late)
        self._timer_at = None

    def _give_up_if_due(self, now: Seconds) -> None:
        config = self._config
        awaited = (
            "SessionOpened"
            if not self.is_open
            else ("a fetch" if not self.fetching.complete else "an acknowledgement")
        )
        if now - self._heard_at >= config.silence_seconds_max:
            raise PeerLostError(
                f"{self._name} has been silent for {now - self._heard_at:.1f} s with {awaited} due "
                f"(silence_seconds_max is {config.silence_seconds_max:g}): look at its log"
            )
        if now - self._progress_at >= config.stall_seconds_max:
            raise PeerLostError(
                f"{self._name} answers, but {awaited} is overdue by "
                f"{now - self._progress_at:.1f} s (stall_seconds_max is "
                f"{config.stall_seconds_max:g}): look at its log"
            )

    def _progressed(self, now: Seconds) -> None:
        self._progress_at = now
        self._delay = self._config.retry_seconds

    # --------------------------------------------------------------------- sending

    @property
    def _name(self) -> str:
        return " and ".join(self._tracker.copies)

    def _open_session(self, copies: Sequence[Address] | None = None) -> list[Action]:
        request = OpenSession(
            layout=self._part.fingerprint,
            pushes=self._config.pushes,
            host=self._buffers.host,
            next_sequence=self.pushing.settled + 1,
            holds=self._part.shard_slice.stripes,
        )
        receivers = self._tracker.copies if copies is None else copies
        return [Send(receiver=receiver, message=request) for receiver in receivers]

    def _send(self, messages: Sequence[Message], now: Seconds) -> list[Action]:
        if messages:
            self._sent_at = now
        primary = self._tracker.primary
        # Push buffers stay unchanged until the push is settled, so blocks need no copy.
        return [
            Send(receiver=primary, message=message, lent=isinstance(message, PushBlock))
            for message in messages
        ]
