"""Reliability over links that lose, repeat and reorder messages, for every role.

    ReliableStream   numbers items, keeps a window under way, sends again until acknowledged
    Arrivals         the receiving end: which numbers came, the cumulative acknowledgement
    Window           which blocks of one vector are under way, acknowledged as a count
    Transfer         such a vector, and the message that follows the last block
    Backoff          when to send again: the pause doubles
    Silence          how long a peer has been silent, or without progress
    AnswerTimer      ask until answered: both, and pauses that fit a slow link

None of them knows a message or a clock: the owner gives `now`, and gets back what to send.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar, final

from distbelief.core.errors import PeerLostError, RemoteProtocolError
from distbelief.core.vectors import Vector


Item = TypeVar("Item")
Sent = TypeVar("Sent")
Block = TypeVar("Block")

WINDOW: Final = 32  # items under way to one peer
PATIENCE: Final = 1.5  # pause before a repetition, in times that the blocks under way take
N_KEPT: Final = 3  # answers, during which the pause after a repetition stays long


@final
@dataclass(slots=True)
class Backoff:
    """When to send again. The pause doubles from `first` to `longest` seconds."""

    first: float
    longest: float
    due: float = 0.0  # time of the next repetition
    pause: float = field(init=False)

    def __post_init__(self) -> None:
        self.pause = self.first

    def start(self, now: float) -> None:
        """Something was sent for the first time, or the peer has answered: short pauses again."""
        self.pause = self.first
        self.due = now + self.pause

    def repeat(self, now: float) -> None:
        """It was sent again."""
        self.pause = min(2 * self.pause, self.longest)
        self.due = now + self.pause

    def again(self, now: float) -> bool:
        """Return whether to send it again now."""
        is_due = now >= self.due
        if is_due:
            self.repeat(now)
        return is_due


@final
@dataclass(slots=True)
class Silence:
    """How long a peer has neither sent anything nor made progress.

    A process that was suspended, or too busy to run its timer, must not blame its peer: time by
    which our own timer came late does not count.
    """

    heard_at: float = 0.0
    progress_at: float = 0.0
    timer_at: float | None = None  # when our own timer fires; None if it does not run

    def start(self, now: float) -> None:
        self.heard_at = self.progress_at = now

    def heard(self, now: float, *, progress: bool = True) -> None:
        self.heard_at = now
        if progress:
            self.progress_at = now

    def expect(self, at: float) -> float:
        """Note the time at which our own timer should fire next; return it."""
        self.timer_at = at
        return at

    def woke(self, now: float) -> float:
        """Our own timer fired: do not count its delay as silence; return the delay."""
        late = 0.0 if self.timer_at is None else max(0.0, now - self.timer_at)
        self.timer_at = None
        self.add_delay(late, now)
        return late

    def add_delay(self, late: float, now: float) -> None:
        """Do not count `late` seconds: a timer that watches several peers was late by them."""
        self.heard_at = min(now, self.heard_at + late)
        self.progress_at = min(now, self.progress_at + late)

    def silent(self, now: float) -> float:
        """Return the seconds since the peer was last heard."""
        return now - self.heard_at

    def stalled(self, now: float) -> float:
        """Return the seconds since the last progress."""
        return now - self.progress_at


@final
class AnswerTimer:
    """Ask one peer until it answers. A timer runs as long as something is awaited.

    Over a slow link that others share, the blocks under way may take seconds. Those sent again
    meanwhile would only wait behind the first ones, and hold up everybody: so the pauses grow with
    the seconds that a block takes. These only an answer tells of that was asked for once. So after
    a repetition the long pause stays for the next questions (Karn and Partridge 1987): with short
    ones, each of them would be repeated.
    """

    def __init__(
        self, first: float, longest: float, *, silence_seconds_max: float, stall_seconds_max: float
    ) -> None:
        self.silence = Silence()
        self.sent_at = 0.0
        self._first, self._longest = first, longest
        self._silence_max, self._stall_max = silence_seconds_max, stall_seconds_max
        self._backoff = Backoff(first, longest)
        self._n_kept, self._kept = 0, first  # for so many answers the pause is this long
        self._waits = False  # for others: the long pause says nothing
        self.is_moving = False  # something has come since the last question, or its repetition
        self.is_awaited = False  # if not, the timer runs out
        # By direction: when something was last asked for, repetitions left out
        self.asked_at: dict[object, float] = {}
        # When it last made progress, and the seconds that all under way take.
        self._paces: dict[object, tuple[float, float]] = {}
        self._n_asked_twice: dict[object, int] = {}  # of the next ones to come

    def awaits(self, now: float) -> float | None:
        """Something is awaited; return when the timer is to fire, if it must be set."""
        begins, self.is_awaited = not self.is_awaited, True
        if begins:
            self.silence.start(now)
            self.sent_at = now
            self._n_asked_twice.clear()
            self.is_moving = False
            self._answered()
        due, timer_at = now + self._backoff.pause, self.silence.timer_at
        runs = timer_at is not None and (not begins or timer_at <= due)
        return None if runs else self.silence.expect(due)

    def woke(self, now: float) -> None:
        """The timer has fired."""
        self.silence.woke(now)

    def check(self, now: float, name: str, awaited: str) -> None:
        """Raise PeerLostError if the peer was silent, or without progress, for too long."""
        silent, stalled = self.silence.silent(now), self.silence.stalled(now)
        if silent >= self._silence_max:
            raise PeerLostError(
                f"{name} has been silent for {silent:.1f} s with {awaited} due "
                f"(silence_seconds_max is {self._silence_max:g}): look at its log"
            )
        if stalled >= self._stall_max:
            raise PeerLostError(
                f"{name} answers, but {awaited} is overdue by {stalled:.1f} s "
                f"(stall_seconds_max is {self._stall_max:g}): look at its log"
            )

    def not_yet(self, now: float) -> float | None:
        """Return when the timer is to fire again, if it is too early to ask again."""
        due = max(self.sent_at, self.silence.progress_at) + self._pause(now)
        return self.silence.expect(due) if now < due else None

    def repeated(self, now: float, *, under_way: Mapping[object, int]) -> float:
        """It was asked again, for so many blocks; return when the timer is to fire."""
        self.sent_at = now
        self._n_asked_twice.update(under_way)
        if under_way and not self._waits:
            # Where answers come, something was lost, and the pause long enough.
            pause = self._backoff.pause * (1 if self.is_moving else 2)
            pause = max(pause, self._kept if self._n_kept else 0.0)
            most = max(self._backoff.longest, self._silence_max / 4)
            self._n_kept, self._kept = N_KEPT, min(pause, most)
        self.is_moving = False
        self._backoff.repeat(now)
        return self.silence.expect(now + self._pause(now))

    def _pause(self, now: float) -> float:
        # The longer nothing is heard at all, the more often it is asked, before the peer is lost.
        left = self._silence_max - self.silence.silent(now)
        return min(self._backoff.pause, max(left / 3, self._first))

    def begin_anew(self) -> None:
        self._n_asked_twice.clear()
        self._end_kept()

    def _end_kept(self) -> None:
        self._n_kept, self._waits = 0, False
        self._backoff.pause = self._backoff.first

    def _answered(self) -> None:
        self._n_kept, self._waits = max(self._n_kept - 1, 0), False
        self._backoff.pause = self._kept if self._n_kept else self._backoff.first

    def progressed(self, now: float) -> None:
        self.silence.progress_at = now
        self._answered()

    def must_wait(self) -> None:
        """The peer has all that it can get from here: asking again helps if its answer was lost."""
        self._waits, self._backoff.pause = True, self._backoff.longest

    def blocks_came(self, now: float, direction: object, n: int, n_under_way: int) -> None:
        """So many blocks of a direction came, or were acknowledged."""
        self._came(now, direction, n, n_under_way, since=0.0)

    def applied(self, now: float, direction: object) -> None:
        """A push was applied, some time after its last block was acknowledged."""
        self._came(now, direction, 1, 1, since=self.silence.progress_at)

    def _came(
        self, now: float, direction: object, n: int, n_under_way: int, *, since: float
    ) -> None:
        self.silence.progress_at = now
        before, seconds = self._paces.get(direction, (0.0, 0.0))
        begun = max(before, since, self.asked_at.get(direction, 0.0))
        n_twice = self._n_asked_twice.get(direction, 0)
        if n_twice > 0:  # of which question is this the answer? The long pause stays
            self._n_asked_twice[direction] = n_twice - n
            self._paces[direction] = now, seconds
            self.is_moving = True
            self._backoff.pause = self._kept if self._n_kept else self._backoff.first
            return
        found = (now - begun) / n * n_under_way
        self._paces[direction] = now, max(found, (seconds + found) / 2)  # falls slowly
        slowest = max(seconds for _, seconds in self._paces.values())
        pause = min(PATIENCE * slowest, self._silence_max / 4)
        self._backoff.first = max(self._first, pause)
        self._backoff.longest = max(self._longest, pause)
        self._end_kept()


@final
class ReliableStream(Generic[Item, Sent]):
    """Numbered items to one peer; each is sent again until the peer acknowledges it."""

    def __init__(
        self, send: Callable[[int, Item], Sent], *, backoff: Backoff, window: int = WINDOW
    ) -> None:
        self._send = send  # makes what is sent of a number and an item, also for a repetition
        self._backoff = backoff
        self._window = window
        self._waiting: deque[Item] = deque()
        self._under_way: deque[tuple[int, Item]] = deque()
        self.next = 0  # number of the next item
        self.n_again = 0  # items that were sent again

    @property
    def items(self) -> list[Item]:
        """Those that are not acknowledged."""
        return [*(item for _, item in self._under_way), *self._waiting]

    def put(self, items: Iterable[Item], now: float) -> list[Sent]:
        """Send these as far as the window allows; the rest later."""
        self._waiting.extend(items)
        return self._fill(now)

    def acked(self, count: int, now: float) -> list[Sent]:
        """The peer has every item below `count`; RemoteProtocolError if some were never sent."""
        if count > self.next:
            raise RemoteProtocolError(
                f"acknowledged all items before {count}, but {self.next} is the next to be sent"
            )
        while self._under_way and self._under_way[0][0] < count:
            self._under_way.popleft()
            self._backoff.start(now)
        return self._fill(now)

    def again(self, now: float) -> list[Sent]:
        """Send again what has been under way for too long."""
        if not (self._under_way and self._backoff.again(now)):
            return []
        self.n_again += len(self._under_way)
        return [self._send(number, item) for number, item in self._under_way]

    def _fill(self, now: float) -> list[Sent]:
        sent: list[Sent] = []
        while self._waiting and len(self._under_way) < self._window:
            if not self._under_way:
                self._backoff.start(now)
            self._under_way.append((self.next, self._waiting.popleft()))
            sent.append(self._send(*self._under_way[-1]))
            self.next += 1
        return sent


@final
class Arrivals:
    """The numbers of a stream that arrived, in any order."""

    def __init__(self, *, window: int = WINDOW) -> None:
        self._window = window  # of the sender: a number farther ahead breaks the protocol
        self._ahead: set[int] = set()
        self.count = 0  # all numbers below it arrived: the acknowledgement

    def is_new(self, number: int) -> bool:
        """Return whether a number is new; RemoteProtocolError if it is beyond the window."""
        if number >= self.count + self._window:
            raise RemoteProtocolError(
                f"item {number} came before {self.count}: at most {self._window} may be under way"
            )
        return number >= self.count and number not in self._ahead

    def add(self, number: int) -> bool:
        """Note a number; return whether it is new. Raises as `is_new` does."""
        if not self.is_new(number):
            return False
        self._ahead.add(number)
        while self.count in self._ahead:
            self._ahead.remove(self.count)
            self.count += 1
        return True


@final
@dataclass(slots=True)
class Window:
    """The blocks 0 to n - 1 of one transfer, sent in order and acknowledged as a count.

    The receiver keeps blocks in order only, so a repetition begins at the first that it lacks.
    """

    n: int
    received: int = 0  # the peer has blocks [0, received)
    sent: int = 0  # blocks [0, sent) were sent
    held: int = 0  # so many of the last ones are not to be sent yet

    def due(self, credit: int) -> range:
        """Return the blocks to send now, at most `credit` beyond what the peer has."""
        stop = min(self.n - self.held, self.received + credit)
        blocks = range(self.sent, max(self.sent, stop))
        self.sent = blocks.stop
        return blocks

    def acked(self, received: int) -> bool:
        """The peer has blocks [0, received); return whether that is news."""
        if received > self.n:
            raise RemoteProtocolError(f"acknowledged {received} blocks of a transfer of {self.n}")
        if received <= self.received:
            return False
        self.received = received
        self.sent = max(self.sent, received)
        return True

    def again(self) -> None:
        """Begin again at the first block that the peer lacks."""
        self.sent = self.received


@final
@dataclass(slots=True, eq=False)
class Transfer(Generic[Item]):
    """A vector on its way in blocks, and the message that follows the last of them."""

    message: Item
    values: Vector
    blocks: Window
    is_sent: bool = False  # the message
    order: Sequence[int] | None = None  # which block goes as which; None: by index

    def again(self) -> None:
        self.blocks.again()
        self.is_sent = False

    def due(self, block: Callable[[int], Block], *, credit: int) -> list[Block | Item]:
        """Return what to send now, at most `credit` blocks beyond those that the peer has."""
        messages: list[Block | Item] = [block(index) for index in self.blocks.due(credit)]
        if self.blocks.sent == self.blocks.n and not self.is_sent:
            self.is_sent = True
            messages.append(self.message)
        return messages
