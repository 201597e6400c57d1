"""The leader's half of keeping a second copy of a shard: what it sends, what it holds.

    Follow ... StateCredit       the second is there; nothing is forwarded yet
    Follow, StateBlock x 16      at a moment when nothing is being applied
    Forward, Acknowledge         every push from here on
    StateBlock x 16              once all of those are acknowledged; and so on
    Forward, Forward, ...        the second is whole

Rules:

* From the first piece on, every push that is applied is forwarded, in that order, when
  its application begins. The client is told of it when it is applied on both sides;
  until then its slot stays as it is, for the second may read it there.
* A window of pieces is sent at one clock, which is the second's as well: when nothing
  is being applied and nothing forwarded is unacknowledged. While pieces are missing,
  one push is applied between two windows: neither waits for the other to end.
* What the second does not answer is sent again. If it has not said a word for
  `SILENCE_SECONDS`, or has come no further for `STALL_SECONDS`, the supervisor is asked
  to let this shard go on alone; only its answer, a later `Lead`, ends the waiting.
* What lies in memory that the second cannot reach goes out in blocks, of two pushes at
  the most, since that is what the second has room for.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, final

import msgspec

from distbelief.messages import (
    Acknowledge,
    Alone,
    Follow,
    Forward,
    Lead,
    Message,
    PushBlock,
    PushCredit,
    StateBlock,
    StateCredit,
)
from distbelief.parameter_server.serving.clients import Clients
from distbelief.parameter_server.serving.pushes import Applying, Pushes
from distbelief.parameter_server.state.slots import N_SLOTS
from distbelief.parameter_server.state.values import ShardValues
from distbelief.roles import SUPERVISOR, Action, Address, Received, Seconds, Send, SetTimer


TIMER: Final = "second"

WINDOW_PIECES: Final = 16
WINDOW_BLOCKS: Final = 16  # of one push, beyond those that the second holds
TICK_SECONDS: Final = 0.125  # also before anything is sent again
SILENCE_SECONDS: Final = 0.5
STALL_SECONDS: Final = 10.0
ALONE_SECONDS: Final = 0.25  # between two `Alone`


@final
@dataclass(slots=True, eq=False)
class _Forwarded:
    """A push that the second has not acknowledged, or that is not applied here."""

    message: Forward
    applying: Applying
    applied: bool = False  # here
    acknowledged: bool = False  # by the second
    received: int = 0  # blocks the second holds
    sent: int = 0  # blocks sent
    said: bool = False  # was the Forward itself sent?


@final
class Forwarding:
    """What one life of a shard does for its second, as long as it has one.

    Attributes:
        pairing: Of the latest Lead; 0 before there was one.
    """

    def __init__(self, values: ShardValues, clients: Clients, pushes: Pushes) -> None:
        self._values = values
        self._clients = clients
        self._pushes = pushes
        self._outstanding: deque[_Forwarded] = deque()
        self._timer_at: Seconds | None = None
        self.pairing = 0
        self._begin(None, life=0)

    def _begin(self, second: Address | None, *, life: int) -> None:
        self._second = second
        self._life = life  # of the second: no other is heard
        self._is_there = False  # has it answered?
        self._shares = True  # as far as is known: the clients' slots, with the second
        self._n_received = 0  # pieces that the second holds
        self._n_sent = 0
        self._window_clock: int | None = None  # at which the last window was sent
        self._outstanding.clear()
        self._heard_at: Seconds = 0.0  # or when waiting began
        self._progress_at: Seconds = 0.0
        self._alone_at: Seconds | None = None  # when that was said last

    # --------------------------------------------------------------- the supervisor

    def lead(self, lead: Lead, now: Seconds) -> list[Action]:
        """Acknowledge what this second holds as well, or alone from now on."""
        actions = self._release_all()
        self.pairing = lead.pairing
        second = Address(lead.second) if lead.second else None
        self._begin(second, life=lead.second_incarnation)
        if second is not None:
            self._heard_at = self._progress_at = now
            actions += [self._to_second(self._follow()), *self._arm(now)]
        return actions

    def stop(self) -> list[Action]:
        """Go on alone without asking: the job is over."""
        actions = self._release_all()
        self._begin(None, life=0)
        return actions

    # ----------------------------------------------------------- pushes, and pieces

    @property
    def may_apply(self) -> bool:
        """Whether a push may be applied now: not before a window that is due."""
        return not self._builds or self._window_clock == self._values.clock

    def forward(self, applying: Applying, *, n_clients: int, now: Seconds) -> list[Action]:
        """This push is being applied now."""
        if not self._is_there:
            return []
        clock, push = self._values.clock, applying.push
        holding = applying.client.holding
        message = Forward(
            pairing=self.pairing,
            clock=clock,
            client=applying.record(),
            n_pushing=n_clients,
            slots_region="",
            slot=push.sequence % N_SLOTS,
            holds=holding.stripes if push.touches is None else push.touches,
            touches=push.touches is not None,
        )
        if not self._awaits:
            self._heard_at = self._progress_at = now
        self._outstanding.append(_Forwarded(message, applying))
        return [*self._send_due(), *self._arm(now)]

    def applied(self, *, clock: int) -> bool:
        """The push of that clock is applied here; return whether it is to be held."""
        if not self._outstanding or self._outstanding[-1].message.clock != clock:
            return False
        last = self._outstanding[-1]
        last.applied = True
        if last.acknowledged:
            assert len(self._outstanding) == 1, self._outstanding
            self._outstanding.clear()
            return False
        return True

    def transfer(self, now: Seconds) -> list[Action]:
        """Send a window of pieces if it is due; nothing is being applied."""
        if not self._builds or self._outstanding:
            return []
        clock = self._values.clock
        if self._window_clock == clock and self._n_received < self._n_sent:
            return []  # one is under way
        messages: list[Message] = []
        if not self._n_received:
            messages.append(self._follow())
        stop = min(self._n_received + WINDOW_PIECES, self._values.n_pieces)
        messages += [
            StateBlock(
                pairing=self.pairing, clock=clock, index=index, values=self._values.piece(index)
            )
            for index in range(self._n_received, stop)
        ]
        self._n_sent, self._window_clock = stop, clock
        return [*map(self._to_second, messages), *self._arm(now)]

    # ------------------------------------------------------------------- the second

    def credit_pieces(self, event: Received, message: StateCredit, now: Seconds) -> list[Action]:
        """The second is there, and holds so many pieces."""
        if not self._is_second(event, message.pairing):
            return []
        self._heard_at = now
        if not self._is_there or message.received > self._n_received:
            self._progress_at = now
        self._is_there = True
        self._n_received = max(self._n_received, message.received)
        return []

    def acknowledged(self, event: Received, message: Acknowledge, now: Seconds) -> list[Action]:
        """The second has applied every push before that sequence."""
        if not self._is_second(event, message.shard_incarnation):
            return []
        self._heard_at = now
        actions: list[Action] = []
        for forwarded in self._outstanding:
            if forwarded.message.clock < message.sequence:
                forwarded.acknowledged = True
                self._progress_at = now
        while self._outstanding:
            first = self._outstanding[0]
            if not (first.acknowledged and first.applied):
                break
            self._outstanding.popleft()
            actions.append(self._settle(first))
        return [*actions, *self._send_due()]

    def credit_blocks(self, event: Received, message: PushCredit, now: Seconds) -> list[Action]:
        """The second lives, and holds so many blocks of that push."""
        if not self._is_second(event, message.shard_incarnation):
            return []
        self._heard_at = now
        for forwarded in self._outstanding:
            if forwarded.message.clock + 1 != message.sequence:
                continue
            n_blocks = forwarded.applying.client.n_blocks
            if self._shares and forwarded.applying.client.region:
                if message.received < n_blocks:
                    self._shares = False  # it cannot reach that memory
                    self._send_again()
            elif forwarded.received < message.received <= n_blocks:
                forwarded.received = message.received
                forwarded.sent = max(forwarded.sent, message.received)
                self._progress_at = now
        return self._send_due()

    # ------------------------------------------------------------------------- time

    def timer(self, now: Seconds) -> list[Action]:
        """Send again what is not answered; complain if nothing is."""
        assert self._timer_at is not None
        late = max(0.0, now - self._timer_at)  # then nobody listened here
        self._heard_at = min(now, self._heard_at + late)
        self._progress_at = min(now, self._progress_at + late)
        self._timer_at = None
        if not self._awaits:
            return []
        actions: list[Action] = []
        if not self._is_there:
            actions.append(self._to_second(self._follow()))
        elif self._is_mute(now):
            actions += self._complain(now)
        if self._is_there and now - self._heard_at >= TICK_SECONDS:
            actions += self._again()
        return [*actions, *self._arm(now)]

    def _is_mute(self, now: Seconds) -> bool:
        return now - self._heard_at >= SILENCE_SECONDS or now - self._progress_at >= STALL_SECONDS

    def _complain(self, now: Seconds) -> list[Action]:
        if self._alone_at is not None and now - self._alone_at < ALONE_SECONDS:
            return []
        self._alone_at = now
        return [Send(receiver=SUPERVISOR, message=Alone(pairing=self.pairing))]

    def _again(self) -> list[Action]:
        """Send again what the second does not say it has."""
        self._window_clock = None  # `transfer` sends the window, when it may
        self._send_again()
        messages: list[Message] = [] if self._n_received else [self._follow()]
        return [*map(self._to_second, messages), *self._send_due()]

    def _arm(self, now: Seconds) -> list[Action]:
        if self._timer_at is not None or not self._awaits:
            return []
        self._timer_at = now + TICK_SECONDS
        return [SetTimer(name=TIMER, at=self._timer_at)]

    # ---------------------------------------------------------------------- details

    @property
    def _builds(self) -> bool:
        """Whether the second is there, but lacks pieces."""
        return self._is_there and self._n_received < self._values.n_pieces

    @property
    def _awaits(self) -> bool:
        if self._second is None:
            return False
        return not self._is_there or self._builds or bool(self._outstanding)

    def _is_second(self, event: Received, pairing: int) -> bool:
        """Whether this comes from the second, and from the life that is meant."""
        return (
            event.sender == self._second
            and event.incarnation == self._life
            and pairing == self.pairing
        )

    def _follow(self) -> Follow:
        return Follow(
            pairing=self.pairing,
            receiver_incarnation=self._life,
            clock=self._values.clock,
            clients=tuple(client.record for client in self._clients.all()),
            steps=self._values.steps.words(),
        )

    def _release_all(self) -> list[Action]:
        """Tell the clients of all that is applied; what is not, is held no more."""
        return [self._settle(f) for f in self._outstanding if f.applied]

    def _settle(self, forwarded: _Forwarded) -> Action:
        return self._pushes.settle(
            forwarded.applying,
            staleness=forwarded.message.client.staleness,
            clock=self._values.clock,
        )

    def _send_again(self) -> None:
        for forwarded in self._outstanding:
            forwarded.sent, forwarded.said = forwarded.received, False

    def _send_due(self) -> list[Action]:
        """Send what may go now: in order, for else the second could not take it."""
        actions: list[Action] = []
        waiting = [f for f in self._outstanding if not f.acknowledged]
        for index, forwarded in enumerate(waiting):
            if not forwarded.said:
                by_blocks = not (self._shares and forwarded.applying.client.region)
                if by_blocks and index >= N_SLOTS:
                    break
                actions += map(self._to_second, self._messages(forwarded))
            if not forwarded.said:
                break
        return actions

    def _messages(self, forwarded: _Forwarded) -> Iterator[PushBlock | Forward]:
        region = forwarded.applying.client.region
        message = forwarded.message
        if self._shares and region:
            forwarded.said = True
            yield msgspec.structs.replace(message, slots_region=region)
            return
        bounds = forwarded.applying.client.holding.bounds
        limit = min(len(bounds), forwarded.received + WINDOW_BLOCKS)
        while forwarded.sent < limit:
            start, stop = bounds[forwarded.sent]
            yield PushBlock(
                sequence=message.clock + 1,
                shard_incarnation=self.pairing,
                block_index=forwarded.sent,
                values=forwarded.applying.slot.values[start:stop],
            )
            forwarded.sent += 1
        if forwarded.sent == len(bounds):
            forwarded.said = True
            yield message

    def _to_second(self, message: Message) -> Send:
        assert self._second is not None
        # Slots stay as they are until the second has answered; pieces are copies.
        lent = isinstance(message, PushBlock | StateBlock)
        return Send(receiver=self._second, message=message, lent=lent)
