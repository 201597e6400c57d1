"""The network: carries messages along paths, subject to faults, and computes their sizes.

It guarantees what ZeroMQ over TCP does: messages of one path arrive whole and in order, if at
all, except where a fault changes that. A path has its own link, or a route through a fabric
that paths share. Messages travel in one of two forms:

* `Encoded`: each message is encoded to frames and decoded, as between real processes. No array
  is shared by accident, and a message that cannot be encoded fails.
* `PassedOn`: the message object travels, only its array is copied. This is faster.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, assert_never, cast, final, get_args

import msgspec

from distbelief.core.vectors import Vector
from distbelief.protocol import (
    Fetch,
    FetchAck,
    Message,
    ParameterBlock,
    Push,
    PushApplied,
    PushBlock,
    PushBlockAck,
    StateBlock,
    TransferBlock,
)
from distbelief.protocol.codec import Codec, Frame
from distbelief.roles.role import Address, Received, Seconds, Send
from distbelief.simulation.event_queue import EventQueue
from distbelief.simulation.faults import CutOff, Delay, Drop, Duplicate, MessageFault, NetworkFault
from distbelief.simulation.topology import Path, Port
from distbelief.simulation.world import RandomStreams, draws


class Packet(msgspec.Struct, eq=False):  # twice as fast to create as a dataclass
    """A message in transit: its frames, or the message object."""

    path: Path
    payload: object
    n_bytes: float
    departs: Seconds = 0.0


@dataclass(slots=True, eq=False)
class _Cut:
    fault: CutOff
    held: list[Packet] = field(default_factory=list)

    def holds(self, path: Path) -> bool:
        fault, ends = self.fault, (path.sender, path.receiver)
        if fault.one_way and fault.a != path.sender:
            return False
        return fault.a in ends and (fault.b is None or fault.b in ends)


class Network:
    """The simulated network; calls `deliver` when a packet arrives, `lose` when it is lost."""

    def __init__(
        self,
        event_queue: EventQueue,
        streams: RandomStreams,
        *,
        deliver: Callable[[Packet], None],
        lose: Callable[[Packet, str], None],
    ) -> None:
        self._event_queue = event_queue
        self._streams = streams
        self._deliver = deliver
        self._lose = lose
        self._chances = draws(streams.network)
        self._faults: list[MessageFault] = []
        self._cuts: list[_Cut] = []

    def send(self, path: Path, payload: object, n_bytes: float) -> None:
        traffic = path.traffic
        traffic[0] += 1
        traffic[1] += n_bytes
        route, now = path.route, self._event_queue.now
        if route is None:
            departs = passed = path.depart(n_bytes, now)
        else:
            card = route.card
            # Small messages slip in between the packets of large ones; see `Route`.
            if (card.free_at > now or card.turns) and (
                n_bytes > card.small_bytes or path in card.queues
            ):
                card.wait(path, Packet(path, payload, n_bytes))
                self._wake(card)
                return
            departs, passed = route.pass_through(n_bytes, now)
        self._go(Packet(path, payload, n_bytes, departs), passed)

    def _wake(self, card: Port) -> None:
        # Send the next waiting packet when the card is free.
        if not card.woken and card.turns:
            card.woken = True
            self._event_queue.at(card.free_at, partial(self._next_of, card))

    def _next_of(self, card: Port) -> None:
        card.woken = False
        if card.free_at <= self._event_queue.now:  # small messages may have used the card since
            packet = card.next()
            assert isinstance(packet, Packet)
            assert packet.path.route is not None
            now, route = self._event_queue.now, packet.path.route
            packet.departs, passed = route.pass_through(packet.n_bytes, now)
            self._go(packet, passed)
        self._wake(card)

    def _go(self, packet: Packet, passed: Seconds) -> None:
        # The packet has passed all ports; only the latency remains.
        if self._faults:
            self._go_with_faults(packet, passed)
            return
        arrives = packet.path.arrive(passed, next(self._chances))
        self._event_queue.at(arrives, partial(self._arrive, packet))

    def begin(self, fault: NetworkFault) -> None:
        """Start a fault; it ends after `fault.seconds`."""
        if isinstance(fault, CutOff):
            cut = _Cut(fault)
            self._cuts.append(cut)
            end = partial(self._heal, cut)
        else:
            self._faults.append(fault)
            end = partial(self._faults.remove, fault)
        self._event_queue.at(self._event_queue.now + fault.seconds, end)

    def _go_with_faults(self, packet: Packet, passed: Seconds) -> None:
        delay, overtaken, copies = 0.0, False, [0.0]
        for fault in self._faults:
            if not self._hits(fault, packet.path):
                continue
            match fault:
                case Drop():
                    self._lose(packet, "dropped")
                    return
                case Duplicate():
                    copies.append(self._draw(fault.seconds_max))
                case Delay():
                    delay += self._draw(fault.seconds_max)
                    overtaken = overtaken or fault.overtaken
                case _:
                    assert_never(fault)
        arrives = packet.path.arrive(passed, next(self._chances), delay=delay, overtaken=overtaken)
        for late in copies:
            self._event_queue.at(arrives + late, partial(self._arrive, packet))

    def _hits(self, fault: MessageFault, path: Path) -> bool:
        if fault.between is not None and (
            path.sender not in fault.between or path.receiver not in fault.between
        ):
            return False
        return bool(self._streams.faults.random() < fault.probability)

    def _draw(self, seconds_max: Seconds) -> Seconds:
        return float(self._streams.faults.uniform(0.0, seconds_max))

    def _arrive(self, packet: Packet) -> None:
        if self._cuts and self._is_cut_off(packet):
            return
        if packet.departs > packet.path.broken_at:
            self._lose(packet, "its sender died before it had left")
            return
        self._deliver(packet)

    def _is_cut_off(self, packet: Packet) -> bool:
        for cut in self._cuts:
            if cut.holds(packet.path):
                if cut.fault.loses:
                    self._lose(packet, "cut off")
                else:
                    cut.held.append(packet)
                return True
        return False

    def _heal(self, cut: _Cut) -> None:
        self._cuts.remove(cut)
        self._event_queue.before_all(partial(self._arrive, packet) for packet in cut.held)


# Messages whose headers all have about the same size: it is measured once for each kind.
_ALIKE: Final = frozenset(
    {
        PushApplied,
        FetchAck,
        Fetch,
        ParameterBlock,
        Push,
        PushBlock,
        PushBlockAck,
        StateBlock,
        TransferBlock,
    }
)


# The array field of each kind of message; no message has more than one.
_ARRAYS: Final[Mapping[type[Message], str]] = {
    kind: field.name
    for kind in get_args(Message)
    for field in msgspec.structs.fields(kind)
    if field.type in {Vector, Vector | None}
}


class MessageSizing(Protocol):
    """The form in which messages travel, and their sizes."""

    size: tuple[int, int]  # bytes of header and array of the last message sent

    def sent(self, action: Send, *, sender: Address, incarnation: int) -> object:
        """Return the payload that travels."""
        ...

    def received(self, payload: object) -> Received:
        """Return the event for the receiver."""
        ...


@final
class Encoded:
    """Messages travel as encoded frames."""

    def __init__(self, run: str) -> None:
        self._wire = Codec(run=run)
        self.size = (0, 0)

    def sent(self, action: Send, *, sender: Address, incarnation: int) -> object:
        """Return the frames of the message.

        Raises:
            LocalProtocolError: no receiver would accept the message.
        """
        frames = self._wire.encode(action.message, sender=sender, incarnation=incarnation)
        if len(frames) == 1:
            self.size = len(frames[0]), 0
            return frames
        self.size = len(frames[0]), sum(map(len, frames[1:]))
        # Copied now: the sender may change the array. A lent one is copied on arrival.
        return frames if action.lent else [bytes(frame) for frame in frames]

    def received(self, payload: object) -> Received:
        frames = cast("Sequence[Frame]", payload)
        if len(frames) > 1:
            frames = [bytes(frame) for frame in frames]
        envelope = self._wire.decode(frames)
        return Received(
            sender=Address(envelope.sender),
            incarnation=envelope.incarnation,
            message=envelope.message,
        )


@final
class _Lent(msgspec.Struct, eq=False):
    event: Received  # its array may still change


@final
class PassedOn:
    """Messages travel as objects; their arrays are copied when frames would be."""

    def __init__(self, run: str) -> None:
        self._wire = Codec(run=run)
        self._headers: dict[type[Message], int] = {}
        self.size = (0, 0)

    def sent(self, action: Send, *, sender: Address, incarnation: int) -> object:
        message = action.message
        kind = type(message)
        header = self._headers.get(kind)
        if header is None:
            frames = self._wire.encode(message, sender=sender, incarnation=incarnation)
            header = len(frames[0])
            if kind in _ALIKE:
                self._headers[kind] = header
        name = _ARRAYS.get(kind)
        if name is None:
            self.size = header, 0
            return Received(sender=sender, incarnation=incarnation, message=message)
        array: Vector | None = getattr(message, name)
        self.size = header, 0 if array is None else array.nbytes
        if array is not None and not action.lent:
            message = _copied(message, name, array)
        event = Received(sender=sender, incarnation=incarnation, message=message)
        return _Lent(event) if array is not None and action.lent else event

    def received(self, payload: object) -> Received:
        if isinstance(payload, Received):
            return payload
        assert isinstance(payload, _Lent)
        event = payload.event
        message, name = event.message, _ARRAYS[type(event.message)]
        return Received(
            sender=event.sender,
            incarnation=event.incarnation,
            message=_copied(message, name, getattr(message, name)),
        )


def _copied(message: Message, name: str, array: Vector) -> Message:
    copy = array.copy()
    copy.flags.writeable = False  # as arrays decoded from frames
    return msgspec.structs.replace(message, **{name: copy})
