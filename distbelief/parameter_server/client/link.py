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
* `Refused` by a copy that does not lead means nothing, unless it is for good.
* While something is awaited, one timer runs. Without progress for `retry_seconds`,
  doubling up to `retry_seconds_max`, everything awaited is asked for again, and copies
  that do not lead are said Hello to: if one does, its word of it was lost. Without any
  word for `silence_seconds_max`, or any progress for `stall_seconds_max`, the shard is
  given up by name. Time in which nobody drove the client (the timer came late) does not
  count: a user's loop may leave it alone for as long as it likes.
"""

from collections.abc import Sequence
from typing import assert_never, final

from distbelief.errors import JobError, PeerLostError
from distbelief.memory import Memory
from distbelief.messages import (
    Acknowledge,
    Hello,
    Leading,
    Message,
    ParameterBlock,
    PushBlock,
    PushCredit,
    Refused,
    Welcome,
)
from distbelief.parameter_server.client.attached import Attached
from distbelief.parameter_server.client.config import ClientConfig
from distbelief.parameter_server.client.fetching import Fetching
from distbelief.parameter_server.client.pushing import Pushing, StagedSlot
from distbelief.parameter_server.client.ranking import Ranking
from distbelief.parameter_server.layout.selection import Part
from distbelief.parameter_server.state.staleness import Staleness
from distbelief.roles import (
    Action,
    Address,
    PeerJoined,
    PeerLost,
    Received,
    Seconds,
    Send,
    SetTimer,
)


TIMER = "client:"

ShardReply = Welcome | Leading | Refused | ParameterBlock | PushCredit | Acknowledge


@final
class Link:
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
        part: Part,
        memory: Memory,
    ) -> None:
        self.address = copies[0]
        self.index = index
        self._ranking = Ranking(copies)
        self._config = config
        self._part = part
        self._attached = Attached(memory, part)
        self._timer_at: Seconds | None = None  # while it runs
        self._awaited = False
        self._heard_at: Seconds = 0.0  # or when waiting began
        self._progress_at: Seconds = 0.0
        self._sent_at: Seconds = 0.0
        self._delay: Seconds = config.retry_seconds
        self.welcome = False
        self.samples = 0
        credit_blocks = config.credit_blocks
        self.fetching = Fetching(part, index, credit_blocks=credit_blocks)
        self.pushing = Pushing(part, index, credit_blocks=credit_blocks)

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
        if not isinstance(message, Refused):
            lost = ranking.rise(message.shard_incarnation) or lost
            deposed = message.shard_incarnation < ranking.number
        actions: list[Action] = []
        if lost:
            self._lost()
            if deposed or not isinstance(message, Welcome):
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
        if isinstance(message, Refused):
            return self._refused(sender, message, now)
        self._heard_at = now
        if isinstance(message, Welcome):
            return self._welcomed(sender, message, now)
        replies: Sequence[Message] = ()
        match message:
            case Leading():
                progress = False  # if it is news, it was greeted
            case Acknowledge():
                progress = self.pushing.acknowledged(message, staleness)
            case ParameterBlock():
                before = self.fetching.received
                replies = self.fetching.take(message)
                # Each block, not only those that are answered: over a busy network a
                # quarter of a window may take longer than `retry_seconds`.
                progress = self.fetching.received > before
            case PushCredit():
                replies = self.pushing.credited(message)
                progress = bool(replies)
            case _:
                assert_never(message)
        if progress:
            self._progressed(now)
        return self._send(replies, now)

    def _welcomed(self, sender: Address, message: Welcome, now: Seconds) -> list[Action]:
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

    def _refused(self, sender: Address, message: Refused, now: Seconds) -> list[Action]:
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
        hello = Hello(
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
