"""What a client knows of one shard: who leads it, the handshake, how long it is silent.

                 Hello, again and again                  Welcome
    greeting ------------------------------> greeting -------------> welcome
        ^                                                               |
        +---- another leads, or a new life; Refused; the shard is gone -+

Rules:

* A shard has one address or two (`ranking` tells which of its copies leads). Hello goes
  to all of them, everything else to the one that said Welcome.
* Whoever leads anew is told in Hello from which push on the client goes: the first one
  that nobody has acknowledged. Nothing in flight is given up (`pushing`), and the
  memory in which it lies is kept until Welcome says where it goes next (`attached`).
* A Welcome that is behind what Hello said answers an older Hello: Hello again.
* `SessionRefused` by a copy that does not lead means nothing, unless it is for good.
* While something is awaited, one timer runs. Without progress for `retry_seconds`,
  doubling up to `retry_seconds_max`, everything awaited is asked for again, and copies
  that do not lead are said Hello to: if one does, its word of it was lost. Without any
  word for `silence_seconds_max`, or any progress for `stall_seconds_max`, the shard is
  given up by name. Time in which nobody drove the client (the timer came late) does not
  count: a user's loop may leave it alone for as long as it likes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never, final

from distbelief.core.memory import Memory
from distbelief.errors import JobError, MemoryGoneError, PeerLostError
from distbelief.parameter_server.client.fetch import ShardFetch
from distbelief.parameter_server.client.push import Room, ShardPush, StagedSlot
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


# The memory of one shard that one client has attached: values to read, slots to fill.
#
# Rules:
#
# * A Welcome names both, or neither, or one. All that it names is attached, or nothing
#   changes: what was attached before holds pushes in flight, which are copied from there
#   once there is somewhere to copy them to.
# * What is no longer used is released when the client says that no work touches it.
# * Memory that cannot be attached, three times in a row, is done without: the next Hello
#   names no host.

N_ATTACH_MAX = 3
"""Failures in a row after which a client does without shared memory."""


@final
class SharedBuffers:
    """One shard's memory, as one client sees it.

    Attributes:
        published: The shard's values; None if they come by blocks.
        room: Slots to push into; None if pushes go by blocks.
    """

    def __init__(self, memory: Memory, part: SliceCopier) -> None:
        self._memory = memory
        self._part = part
        self._slots_name = ""
        self._held: set[str] = set()  # attached, if they were there, and not yet released
        self._n_failures = 0
        self.published: SeqlockVector | None = None
        self.room: Room | None = None

    @property
    def host(self) -> str:
        """What to say in Hello."""
        return self._memory.host if self._n_failures < N_ATTACH_MAX else ""

    def forgive(self) -> None:
        """Somebody else leads, whose memory may well be there."""
        self._n_failures = 0

    def follow(self, welcome: SessionOpened) -> bool:
        """Attach what `welcome` names; return whether all of it was there.

        Raises:
            RemoteProtocolError: it is of another size.
        """
        try:
            published = self._published(welcome.parameters_region)
            room = self._room(welcome.slots_region)
        except MemoryGoneError:
            self._n_failures += 1
            return False
        self.published, self.room = published, room
        self._slots_name = welcome.slots_region
        return True

    def release(self) -> None:
        """Let go of what is no longer used; call when no work touches it."""
        if not self._held:  # as of every shard of another host
            return
        used = {self._slots_name}
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

    def _room(self, name: str) -> Room | None:
        if name == self._slots_name:
            return self.room
        if not name:
            return None
        self._held.add(name)
        region = self._memory.attach(name)
        n_elements = self._part.holding.n_elements
        return push_buffer_views(region, n_elements=n_elements, dtype=self._part.dtype)


# How a client talks to its shards, as numbers.


@final
@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """How a client talks to its shards."""

    pushes: bool
    retry_seconds: Seconds = 0.5
    retry_seconds_max: Seconds = 4.0
    silence_seconds_max: Seconds = 60.0  # without a word
    stall_seconds_max: Seconds = 600.0  # with words, but without progress
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


# Which copy of a shard leads, as far as one client can tell.
#
#     shard-0 leads, number 3 --> Leading or Welcome, number 5 --> shard-0b leads
#
# Rules:
#
# * Leaders are ordered by their number alone, the `shard_incarnation` of what they say.
#   Whoever says a lower one than the highest heard of is deposed, and is not heard.
# * Of each copy the newest life is known, from the envelopes and from the driver. What an
#   older life said, or what is said of it, means nothing any more.
# * The numbers of two copies are the supervisor's, those of a single one its lives.


@final
class PrimaryTracker:
    """The copies of one shard, as one client hears of them.

    Attributes:
        copies: One or two addresses.
        leader: Whoever said Welcome last; the first copy until somebody has.
        number: The highest that a leader is known to have; 0 if none is.
    """

    def __init__(self, copies: Sequence[Address]) -> None:
        self.copies = tuple(copies)
        self.leader = self.copies[0]
        self.number = 0
        self._lives = dict.fromkeys(self.copies, 0)

    @property
    def others(self) -> tuple[Address, ...]:
        """All copies but the leader."""
        return tuple(copy for copy in self.copies if copy != self.leader)

    def is_over(self, copy: Address, incarnation: int) -> bool:
        """Return whether `copy` has begun a later life than that."""
        return incarnation < self._lives[copy]

    def meet(self, copy: Address, incarnation: int) -> bool:
        """Note that this life began; return whether that of the leader is over so."""
        before = self._lives[copy]
        self._lives[copy] = max(before, incarnation)
        return copy == self.leader and 0 < before < incarnation

    def rise(self, number: int) -> bool:
        """Note that somebody leads under `number`; return whether none higher did."""
        rises = number > self.number
        self.number = max(self.number, number)
        return rises


TIMER = "client:"

ShardReply = (
    SessionOpened | PrimaryChanged | SessionRefused | ParameterBlock | PushBlockAck | PushApplied
)


@final
class ShardLink:
    """One shard, as one client sees it.

    Attributes:
        address: Of the shard: that of its first copy.
        index: Of the shard.
        welcome: Has the newest leader said Welcome, and nothing happened since?
        samples: Of this client, in the values of the shard, at the last Welcome.
        fetching: Parameters from it.
        pushing: Gradients to it.
    """

    def __init__(
        self,
        copies: Sequence[Address],
        index: int,
        *,
        config: ClientConfig,
        part: SliceCopier,
        memory: Memory,
    ) -> None:
        self.address = copies[0]
        self.index = index
        self._ranking = PrimaryTracker(copies)
        self._config = config
        self._part = part
        self._attached = SharedBuffers(memory, part)
        self._timer_at: Seconds | None = None  # while it runs
        self._awaited = False
        self._heard_at: Seconds = 0.0  # or when waiting began
        self._progress_at: Seconds = 0.0
        self._sent_at: Seconds = 0.0
        self._delay: Seconds = config.retry_seconds
        self.welcome = False
        self.samples = 0
        credit_blocks = config.credit_blocks
        self.fetching = ShardFetch(part, index, credit_blocks=credit_blocks)
        self.pushing = ShardPush(part, index, credit_blocks=credit_blocks)

    # -------------------------------------------------------- what the client does

    def greet(self, now: Seconds) -> list[Action]:
        """Say Hello to whoever may lead, and wait for Welcome."""
        self.welcome = False
        self._sent_at = now
        return self._hello()

    def begin_fetch(self, now: Seconds) -> list[Action]:
        """Fetch anew."""
        messages = self.fetching.begin(welcome=self.welcome)
        return self._send(messages, now)

    def torn(self, now: Seconds) -> list[Action]:
        """An install met a torn read."""
        seconds_max = self._config.torn_seconds_max
        return self._send(self.fetching.torn(now, seconds_max=seconds_max), now)

    def issue(
        self, staged: StagedSlot, *, n_gradients: int, samples: int, grant: int, now: Seconds
    ) -> list[Action]:
        """Push what was staged, as soon as the shard says Welcome if it does not."""
        messages = self.pushing.issue(
            staged, n_gradients=n_gradients, samples=samples, grant=grant, welcome=self.welcome
        )
        return self._send(messages, now)

    def release(self) -> None:
        """Let go of memory of former leaders; call when no work touches it."""
        self._attached.release()

    @property
    def clock(self) -> int:
        """The newest of the present leader that is known."""
        return max(self.fetching.clock, self.pushing.clock)

    # --------------------------------------------------------- what the shard says

    def receive(
        self, event: Received, message: ShardReply, staleness: Staleness, now: Seconds
    ) -> list[Action]:
        """Take a message of one of the copies."""
        ranking, sender = self._ranking, event.sender
        if ranking.is_over(sender, event.incarnation):
            return []
        lost = ranking.meet(sender, event.incarnation)
        deposed = False
        if not isinstance(message, SessionRefused):
            lost = ranking.rise(message.shard_incarnation) or lost
            deposed = message.shard_incarnation < ranking.number
        actions: list[Action] = []
        if lost:
            self._lost()
            if deposed or not isinstance(message, SessionOpened):
                actions += self.greet(now)
        if not deposed:
            actions += self._hear(sender, message, staleness, now)
        return actions

    def peer(self, event: PeerJoined | PeerLost, now: Seconds) -> list[Action]:
        """Take what the driver says of one of the copies."""
        ranking, peer = self._ranking, event.peer
        if ranking.is_over(peer, event.incarnation):
            return []
        if ranking.meet(peer, event.incarnation):
            self._lost()
        if isinstance(event, PeerLost) and peer == ranking.leader:
            return self.greet(now)
        return [] if self.welcome else self.greet(now)

    def _lost(self) -> None:
        """Whoever led leads no more."""
        self.welcome = False
        self.fetching.lost()
        self._delay = self._config.retry_seconds
        self._attached.forgive()

    def _hear(
        self, sender: Address, message: ShardReply, staleness: Staleness, now: Seconds
    ) -> list[Action]:
        """Take a message of whoever leads, or may lead."""
        if isinstance(message, SessionRefused):
            return self._refused(sender, message, now)
        self._heard_at = now
        if isinstance(message, SessionOpened):
            return self._welcomed(sender, message, now)
        replies: Sequence[Message] = ()
        match message:
            case PrimaryChanged():
                progress = False  # if it is news, it was greeted
            case PushApplied():
                progress = self.pushing.acknowledged(message, staleness)
            case ParameterBlock():
                before = self.fetching.received
                replies = self.fetching.take(message)
                # Each block, not only those that are answered: over a busy network a
                # quarter of a window may take longer than `retry_seconds`.
                progress = self.fetching.received > before
            case PushBlockAck():
                replies = self.pushing.credited(message)
                progress = bool(replies)
            case _:
                assert_never(message)
        if progress:
            self._progressed(now)
        return self._send(replies, now)

    def _welcomed(self, sender: Address, message: SessionOpened, now: Seconds) -> list[Action]:
        if self.welcome:
            return []  # a repeated one: it only says that the shard lives
        if not self.pushing.agrees(message):
            return self._hello()
        attached = self._attached
        if not attached.follow(message):
            return []  # the timer says Hello again
        self.welcome = True
        self._ranking.leader = sender
        self.samples = message.samples
        self._progressed(now)
        self.pushing.welcomed(message, attached.room)
        fetches = self.fetching.welcomed(
            attached.published, shard_incarnation=message.shard_incarnation, clock=message.clock
        )
        return self._send([*fetches, *self.pushing.again()], now)

    def _refused(self, sender: Address, message: SessionRefused, now: Seconds) -> list[Action]:
        if message.for_good:
            raise JobError(f"{sender} refuses this client: {message.reason}")
        if self.welcome and sender != self._ranking.leader:
            return []
        self._heard_at = now
        if not self.welcome:
            return []  # it is busy; the timer says Hello again
        return self.greet(now)

    # --------------------------------------------------------------------- waiting

    @property
    def _awaits(self) -> bool:
        return not self.welcome or not self.fetching.complete or self.pushing.waits

    def wait(self, now: Seconds) -> list[Action]:
        """Run the timer if something is awaited; call after whatever was done."""
        awaits = self._awaits
        begins = awaits and not self._awaited
        self._awaited = awaits
        if begins:
            self._heard_at = self._progress_at = self._sent_at = now
            self._delay = self._config.retry_seconds
        if not awaits:
            return []
        due = now + self._delay
        runs = self._timer_at is not None and (not begins or self._timer_at <= due)
        return [] if runs else [self._set_timer(due)]

    def timer(self, now: Seconds) -> list[Action]:
        """Ask again for what does not come; give the shard up at last."""
        self._excuse(now)
        if not self._awaits:
            return []
        self._give_up_if_due(now)
        due = max(self._sent_at, self._progress_at) + self._delay
        if now < due:
            return [self._set_timer(due)]
        self._delay = min(2 * self._delay, self._config.retry_seconds_max)
        if self.welcome:
            messages = [*self.fetching.again(), *self.pushing.again()]
            actions = [*self._send(messages, now), *self._hello(self._ranking.others)]
        else:
            actions = self.greet(now)
        self._sent_at = now
        return [*actions, self._set_timer(now + self._delay)]

    def _set_timer(self, at: Seconds) -> SetTimer:
        self._timer_at = at
        return SetTimer(name=f"{TIMER}{self.index}", at=at)

    def _excuse(self, now: Seconds) -> None:
        """The timer is over; if it came late, the shard is not to blame."""
        if self._timer_at is not None:
            late = max(0.0, now - self._timer_at)
            self._heard_at = min(now, self._heard_at + late)
            self._progress_at = min(now, self._progress_at + late)
        self._timer_at = None

    def _give_up_if_due(self, now: Seconds) -> None:
        config = self._config
        awaited = (
            "Welcome"
            if not self.welcome
            else ("a fetch" if not self.fetching.complete else "an acknowledgement")
        )
        if now - self._heard_at >= config.silence_seconds_max:
            raise PeerLostError(
                f"{self._name} has been silent for {now - self._heard_at:.1f} s "
                f"while {awaited} was awaited (silence_seconds_max is "
                f"{config.silence_seconds_max:g}): look at its log"
            )
        if now - self._progress_at >= config.stall_seconds_max:
            raise PeerLostError(
                f"{self._name} answers, but {awaited} has not come for "
                f"{now - self._progress_at:.1f} s (stall_seconds_max is "
                f"{config.stall_seconds_max:g}): look at its log"
            )

    def _progressed(self, now: Seconds) -> None:
        self._progress_at = now
        self._delay = self._config.retry_seconds

    # --------------------------------------------------------------------- sending

    @property
    def _name(self) -> str:
        return " and ".join(self._ranking.copies)

    def _hello(self, copies: Sequence[Address] | None = None) -> list[Action]:
        """Say Hello to `copies`, by default to all."""
        hello = OpenSession(
            layout=self._part.fingerprint,
            pushes=self._config.pushes,
            host=self._attached.host,
            next_sequence=self.pushing.settled + 1,
            holds=self._part.holding.stripes,
        )
        receivers = self._ranking.copies if copies is None else copies
        return [Send(receiver=receiver, message=hello) for receiver in receivers]

    def _send(self, messages: Sequence[Message], now: Seconds) -> list[Action]:
        if messages:
            self._sent_at = now
        leader = self._ranking.leader
        # Until a push is settled its slot stays as it is; then its blocks mean nothing.
        return [
            Send(receiver=leader, message=message, lent=isinstance(message, PushBlock))
            for message in messages
        ]
