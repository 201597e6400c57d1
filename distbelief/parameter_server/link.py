"""What a client knows of one shard: its life, the handshake, and how long it is silent.

                 Hello, again and again                  Welcome
    greeting ------------------------------> greeting -------------> welcome
        ^                                                               |
        +---- a new life of the shard; Refused; the shard is gone ------+

Rules:

* The incarnation in the envelope tells the shard's life. An older one is not heard; a
  newer one means that the shard has restarted: what is in flight is given up *before*
  the next Hello, so that Hello says truly from which push on the client goes.
* A Welcome that is behind what Hello said answers an older Hello: Hello again.
* While something is awaited, one timer runs. Without progress for `retry_seconds`,
  doubling up to `retry_seconds_max`, everything awaited is asked for again. Without any
  word for `silence_seconds_max`, or any progress for `stall_seconds_max`, the shard is
  given up by name. Time in which nobody drove the client (the timer came late) does not
  count: a user's loop may leave it alone for as long as it likes.
* Shared memory that cannot be attached, three times in a row, is done without.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never, final

from distbelief.errors import JobError, MemoryGoneError, PeerLostError
from distbelief.memory import Memory
from distbelief.messages import (
    Acknowledge,
    Hello,
    Message,
    ParameterBlock,
    PushCredit,
    Refused,
    Welcome,
)
from distbelief.parameter_server.fetching import Fetching
from distbelief.parameter_server.layout import Layout
from distbelief.parameter_server.published import Published
from distbelief.parameter_server.pushing import Pushing, Room, StagedSlot
from distbelief.parameter_server.slots import slot_views
from distbelief.parameter_server.staleness import Staleness
from distbelief.roles import Action, Address, Seconds, Send, SetTimer


N_ATTACH_MAX = 3
"""Failures in a row after which a client does without shared memory."""

TIMER = "client:"

ShardReply = Welcome | Refused | ParameterBlock | PushCredit | Acknowledge


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
            raise ValueError(
                f"torn_seconds_max is {self.torn_seconds_max}; use 0 or more"
            )
        if not 1 <= self.credit_blocks <= 64:
            raise ValueError(f"credit_blocks is {self.credit_blocks}; use 1 to 64")


@final
class Link:
    """One shard, as one client sees it.

    Attributes:
        address: Of the shard.
        index: Of the shard.
        incarnation: Of the shard, the newest heard of; 0 if none was.
        welcome: Has that incarnation said Welcome, and nothing happened since?
        samples: Of this client, in the values of the shard, at the last Welcome.
        fetching: Parameters from it.
        pushing: Gradients to it.
    """

    def __init__(
        self,
        address: Address,
        index: int,
        *,
        config: ClientConfig,
        layout: Layout,
        memory: Memory,
    ) -> None:
        self.address = address
        self.index = index
        self._config = config
        self._layout = layout
        self._memory = memory
        self._n_attach_failures = 0
        self._slots: tuple[str, Room] | None = None  # region, and what lies in it
        self._published: Published | None = None
        self._gone: list[str] = []  # regions of former lives, to be released
        self._timer_at: Seconds | None = None  # while it runs
        self._awaited = False
        self._heard_at: Seconds = 0.0  # or when waiting began
        self._progress_at: Seconds = 0.0
        self._sent_at: Seconds = 0.0
        self._delay: Seconds = config.retry_seconds
        self.incarnation = 0
        self.welcome = False
        self.samples = 0
        credit_blocks = config.credit_blocks
        self.fetching = Fetching(layout, index, credit_blocks=credit_blocks)
        self.pushing = Pushing(layout, index, credit_blocks=credit_blocks)

    # -------------------------------------------------------- what the client does

    def greet(self, now: Seconds) -> list[Action]:
        """Say Hello, and wait for Welcome."""
        self.welcome = False
        self._sent_at = now
        return [self._hello()]

    def begin_fetch(self, now: Seconds) -> list[Action]:
        """Fetch anew."""
        messages = self.fetching.begin(welcome=self.welcome)
        return self._send(messages, now)

    def torn(self, now: Seconds) -> list[Action]:
        """An install met a torn read."""
        seconds_max = self._config.torn_seconds_max
        return self._send(self.fetching.torn(now, seconds_max=seconds_max), now)

    def issue(
        self, staged: StagedSlot, *, n_gradients: int, samples: int, now: Seconds
    ) -> list[Action]:
        """Push what was staged, unless the shard it was staged for has died since."""
        messages = self.pushing.issue(staged, n_gradients=n_gradients, samples=samples)
        if messages is None:
            return self.greet(now)
        return self._send(messages, now)

    def release(self) -> None:
        """Let go of memory of former lives; call when no work touches it."""
        gone, self._gone = self._gone, []
        for name in gone:
            self._memory.release(name)

    # --------------------------------------------------------- what the shard says

    def restarted(self, incarnation: int) -> None:
        """The shard lives anew: give up what is in flight. Say Hello next."""
        self.incarnation = incarnation
        self.welcome = False
        self.fetching.lost()
        self.pushing.lost()
        self._delay = self._config.retry_seconds
        self._n_attach_failures = 0

    def hear(
        self, message: ShardReply, staleness: Staleness, now: Seconds
    ) -> list[Action]:
        """Take a message of the shard's present life."""
        self._heard_at = now
        match message:
            case Welcome():
                return self._welcomed(message, now)
            case Refused():
                return self._refused(message, now)
            case ParameterBlock():
                replies: Sequence[Message] = self.fetching.take(message)
            case PushCredit():
                replies = self.pushing.credited(message)
            case Acknowledge():
                if self.pushing.acknowledged(message, staleness):
                    self._progressed(now)
                return []
            case _:
                assert_never(message)
        if replies:
            self._progressed(now)
        return self._send(replies, now)

    def _welcomed(self, message: Welcome, now: Seconds) -> list[Action]:
        if self.welcome:
            return []  # a repeated one: it only says that the shard lives
        if not self.pushing.agrees(message):
            return [self._hello()]
        try:
            self._attach(message)
        except MemoryGoneError:
            self._n_attach_failures += 1  # the timer says Hello again
            return []
        self.welcome = True
        self.samples = message.samples
        self._progressed(now)
        self.pushing.welcomed(message, None if self._slots is None else self._slots[1])
        fetches = self.fetching.welcomed(
            self._published,
            shard_incarnation=message.shard_incarnation,
            clock=message.clock,
        )
        return self._send([*fetches, *self.pushing.again()], now)

    def _refused(self, message: Refused, now: Seconds) -> list[Action]:
        if message.for_good:
            raise JobError(f"{self.address} refuses this client: {message.reason}")
        if not self.welcome:
            return []  # it is busy; the timer says Hello again
        return self.greet(now)

    # ---------------------------------------------------------------------- memory

    def _attach(self, message: Welcome) -> None:
        size, dtype = self._layout.shard_size(self.index), self._layout.dtype
        name = message.parameters_region
        if self._published is not None and self._published.name != name:
            self._gone.append(self._published.name)
            self._published = None
        if name and self._published is None:
            self._published = Published.attach(
                self._memory, name, n_elements=size, dtype=dtype
            )
        name = message.slots_region
        if self._slots is not None and self._slots[0] != name:
            self._gone.append(self._slots[0])
            self._slots = None
        if name and self._slots is None:
            region = self._memory.attach(name)
            self._slots = name, slot_views(region, n_elements=size, dtype=dtype)

    # --------------------------------------------------------------------- waiting

    @property
    def _awaits(self) -> bool:
        return not self.welcome or not self.fetching.complete or self.pushing.waits

    def wait(self, now: Seconds) -> list[Action]:
        """Run the timer if something is awaited; call after whatever was done."""
        begins = self._awaits and not self._awaited
        self._awaited = self._awaits
        if begins:
            self._heard_at = self._progress_at = self._sent_at = now
            self._delay = self._config.retry_seconds
        due = now + self._delay
        runs = self._timer_at is not None and (not begins or self._timer_at <= due)
        return [] if runs or not self._awaited else [self._set_timer(due)]

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
            actions = self._send(messages, now)
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
                f"{self.address} has been silent for {now - self._heard_at:.1f} s "
                f"while {awaited} was awaited (silence_seconds_max is "
                f"{config.silence_seconds_max:g}): look at its log"
            )
        if now - self._progress_at >= config.stall_seconds_max:
            raise PeerLostError(
                f"{self.address} answers, but {awaited} has not come for "
                f"{now - self._progress_at:.1f} s (stall_seconds_max is "
                f"{config.stall_seconds_max:g}): look at its log"
            )

    def _progressed(self, now: Seconds) -> None:
        self._progress_at = now
        self._delay = self._config.retry_seconds

    # --------------------------------------------------------------------- sending

    def _hello(self) -> Send:
        host = self._memory.host if self._n_attach_failures < N_ATTACH_MAX else ""
        return Send(
            receiver=self.address,
            message=Hello(
                layout=self._layout.fingerprint,
                pushes=self._config.pushes,
                host=host,
                next_sequence=self.pushing.settled + 1,
            ),
        )

    def _send(self, messages: Sequence[Message], now: Seconds) -> list[Action]:
        if messages:
            self._sent_at = now
        return [Send(receiver=self.address, message=message) for message in messages]
