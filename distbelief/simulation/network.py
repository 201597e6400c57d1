"""The network: links and switched networks, messages in transit, faults, message sizes.

sent     departs = all bytes have left     arrives
 |---------- serialization ----------|--- latency ---|      a link: as over TCP, messages
         (after earlier messages)                           leave and arrive in order

sender's card --> [switches] --> receiver's card -- latency --> arrived      a switched network

A path guarantees what ZeroMQ over TCP does: its messages arrive whole and in order, if at all,
except where a fault changes that. Messages travel in one of two forms:

* `Encoded`: each message is encoded to frames and decoded, as between real processes. No array
  is shared by accident, and a message that cannot be encoded fails.
* `PassedOn`: the message object travels, only its array is copied. This is faster.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, assert_never, final, get_args

import msgspec
import numpy as np

from distbelief.core.vectors import Vector
from distbelief.protocol import (
    Fetch,
    FetchAck,
    HeartbeatAck,
    Message,
    OpenSession,
    ParameterBlock,
    Push,
    PushApplied,
    PushBlock,
    PushBlockAck,
    SessionOpened,
    StateBlock,
    TransferBlock,
)
from distbelief.protocol.codec import Codec, Frame
from distbelief.protocol.role import Address, Received, Seconds, Send
from distbelief.simulation.event_queue import EventQueue, RandomStreams, draws
from distbelief.simulation.faults import CutOff, Delay, Drop, Duplicate, MessageFault, NetworkFault


# Each port of the fabric (one direction of a card or switch) has a bandwidth. A message passes
# at the speed of the slowest port; it is not stored on the way. At the sender's card the flows
# take turns of as many bytes, so that they share it as flows over TCP do: those that begin together
# with as much end together. Switches and receiving cards serve pieces in order of arrival. A small
# message does not wait behind large ones of other flows, except on a slow port.

PIECE_BYTES: Final = 1 << 16  # smallest piece: what the kernel sends at a time
# While no smaller one waits a message has so many pieces, and more of them over a slow card: still
# more would hardly be more exact, and each is an event.
N_PIECES: Final = 3
PIECE_SECONDS: Final = 0.01
N_HEADS_MAX: Final = 16  # flows among which the smallest message is looked for

SMALL_BYTES: Final = 4096  # largest message that slips in between the packets of larger ones

# Bytes per second (1 Mbit/s). On a slower port, where 4096 bytes take more than 33 ms, only
# smaller messages slip in.
NARROW: Final = 125_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The network card of one host; the values hold for each direction."""

    bytes_per_second: float
    overhead_seconds: Seconds = 0.0  # additional time for each message
    sends_per_second: float = math.inf  # bytes, if fewer than it can receive
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    """The link of a switch that all traffic into, or out of, a group of hosts shares."""

    hosts: frozenset[str]
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchedNetwork:
    """The network cards and switches that all flows share."""

    cards: Mapping[str, Card]  # by host
    uplinks: tuple[Uplink, ...] = ()  # of groups of hosts, inner groups first
    # Bytes per second between two hosts, where that is less than their cards have.
    links: Mapping[tuple[str, str], float] = field(default_factory=dict)
    latency_seconds: Seconds = 0.0  # from the end of sending to the arrival
    # The same between two hosts or two regions, both ways.
    latencies: Mapping[tuple[str, str], Seconds] = field(default_factory=dict)
    jitter: float = 0.0  # a latency is drawn from [1, 1 + jitter] times the value above

    def latency(self, sender: str, receiver: str) -> Seconds:
        """Return the latency between two hosts, without jitter."""
        known = self.latencies
        if not known:
            return self.latency_seconds
        regions = self.cards[sender].region, self.cards[receiver].region
        for_regions = known.get(regions, self.latency_seconds)
        return known.get((sender, receiver), for_regions)


@final
class Port:
    """One direction of one card, switch or link."""

    __slots__ = (
        "bytes_per_second",
        "free_at",
        "is_spent",
        "is_woken",
        "overhead_seconds",
        "quantum",
        "small_bytes",
        "turn_min",
        "turns",
        "used",
    )

    def __init__(
        self, bytes_per_second: float, overhead_seconds: Seconds = 0.0, *, has_flows: bool = True
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self.overhead_seconds = overhead_seconds
        # Of a link that belongs to one flow alone, every message waits for those before it.
        narrow = min(1.0, bytes_per_second / NARROW)
        self.small_bytes = SMALL_BYTES * narrow if has_flows else -1.0
        self.free_at: Seconds = 0.0
        self.used: Seconds = 0.0  # that messages have taken
        self.turns: deque[Path] = deque()  # flows with waiting packets; only at a sender's card
        self.is_woken = False  # a call for the time when it is free is scheduled
        self.quantum = math.inf  # bytes of a turn
        self.turn_min = min(PIECE_BYTES, bytes_per_second * PIECE_SECONDS)
        self.is_spent = False  # the turn of the first flow is over

    def fit_turns(self) -> None:
        """Let turns be as long as the smallest piece of those that are next, but not too short."""
        if 0 < len(self.turns) <= N_HEADS_MAX:
            pieces = [path.waiting[0].piece for path in self.turns]
            self.quantum = max(min(pieces), min(self.turn_min, max(pieces)))


@final
class Ports:
    def __init__(self, network: SwitchedNetwork) -> None:
        self.network = network
        self._known: dict[tuple[object, ...], Port] = {}

    @property
    def used(self) -> dict[tuple[str, str], Seconds]:
        """How long each card, link and switch worked in its busier direction, by kind and name."""
        found: dict[tuple[str, str], Seconds] = {}
        for key, port in self._known.items():
            kind, name = "switch", ""
            match key:
                case ("card", _, str(name)):
                    kind = "card"
                case ("link", str(a), str(b)):
                    kind, name = "link", "-".join(sorted((a, b)))
                case (_, int(index)):
                    name = f"switch-{index}"
            found[kind, name] = max(found.get((kind, name), 0.0), port.used)
        return found

    def between(self, sender: str, receiver: str) -> tuple[Port, ...]:
        """Return the ports from one host to another; none if they do not use the network."""
        network, cards = self.network, self.network.cards
        if sender == receiver or sender not in cards or receiver not in cards:
            return ()
        ports = [self._card("out", sender)]
        rate = network.links.get((sender, receiver))
        if rate is not None:
            ports.append(self._port(("link", sender, receiver), rate))
        for index, up in enumerate(network.uplinks):
            if (sender in up.hosts) is not (receiver in up.hosts):
                way = "out" if sender in up.hosts else "in"
                ports.append(self._port((way, index), up.bytes_per_second))
        return (*ports, self._card("in", receiver))

    def _card(self, way: str, host: str) -> Port:
        card = self.network.cards[host]
        rate = card.bytes_per_second
        if way == "out":
            rate = min(rate, card.sends_per_second)
        return self._port(("card", way, host), rate, card.overhead_seconds)

    def _port(self, key: tuple[object, ...], rate: float, overhead: Seconds = 0.0) -> Port:
        if key not in self._known:
            self._known[key] = Port(rate, overhead)
        return self._known[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a connection between two roles."""

    latency_seconds: Seconds = 100e-6
    bytes_per_second: float = 1.25e8  # 1 Gbit/s
    jitter: float = 0.5  # a latency is drawn from [1, 1 + jitter] times this one


# Half a round trip of 64 bytes over ZeroMQ on loopback, and its throughput.
WITHIN_HOST = Link(latency_seconds=40e-6, bytes_per_second=5e9)


@final
class Path:
    """A connection to one incarnation of its receiver: a link, or a way through ports."""

    __slots__ = (
        "arrives_last",
        "broken_at",
        "card",
        "credit",
        "ends_at",
        "frame_scale",
        "incarnation",
        "jitter",
        "latency_seconds",
        "ports",
        "receiver",
        "sender",
        "traffic",
        "waiting",
    )

    def __init__(self, link: Link, *, sender: Address, receiver: Address, incarnation: int) -> None:
        self.sender = sender
        self.receiver = receiver
        self.incarnation = incarnation  # of the receiver
        self.ends_at = receiver, incarnation
        self.ports: tuple[Port, ...] = (Port(link.bytes_per_second, has_flows=False),)
        self.card: Port | None = None  # of the sender, where flows take turns
        self.waiting: deque[Packet] = deque()  # at the card
        self.credit = 0.0  # bytes that are left to it of its turn there
        self.latency_seconds = link.latency_seconds
        self.jitter = link.jitter
        self.frame_scale = 1.0  # factor for the arrays in its messages
        self.traffic: list[float] = [0, 0]  # messages and bytes sent between the two roles
        self.broken_at: Seconds = math.inf  # when the sender was killed
        self.arrives_last: Seconds = 0.0

    def use_ports(self, ports: tuple[Port, ...], latency: Seconds, jitter: float) -> None:
        self.card, self.ports = ports[0], ports
        self.latency_seconds, self.jitter = latency, jitter


class Packet(msgspec.Struct, eq=False):  # twice as fast to create as a dataclass
    """A message in transit: its frames, or the message object."""

    path: Path
    payload: object
    n_bytes: float
    piece: float  # bytes in which it passes the sender's card, while no other flow waits
    n_left: float  # bytes that have not passed
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


_ONE_COPY: Final = [0.0]


def _use(
    ports: Sequence[Port], n_bytes: float, now: Seconds, *, has_overhead: bool = True
) -> tuple[Seconds, Seconds]:
    # Return when so many bytes have left the first port, and the last one. A small message does not
    # wait, but uses bandwidth. On a slow port, where it is not small, it waits for that port only:
    # it has not blocked the later ports until then.
    begins, departs, ends = now, 0.0, 0.0
    for port in ports:  # without max(): this loop is hot
        takes = n_bytes / port.bytes_per_second
        if has_overhead:
            takes += port.overhead_seconds
        port.used += takes
        free_at = port.free_at
        ended = begins + takes
        if free_at <= begins:
            port.free_at = ended
        else:
            port.free_at = free_at + takes
            if n_bytes > SMALL_BYTES:
                begins, ended = free_at, port.free_at
            elif n_bytes > port.small_bytes:
                ended = port.free_at
        if ended > ends:  # noqa: PLR1730 -- as above
            ends = ended
        if not departs:
            departs = ends
    return departs, ends


class Network:
    """The simulated network; calls `arrive` at the end of the way, `lose` before it."""

    def __init__(
        self,
        event_queue: EventQueue,
        streams: RandomStreams,
        *,
        arrive: Callable[[Packet], None],
        lose: Callable[[Packet, str], None],
    ) -> None:
        self._event_queue = event_queue
        self._at = event_queue.at  # found faster than through two attributes
        self._streams = streams
        self._arrive = arrive
        self._lose = lose
        self._chances = draws(streams.network)
        self._faults: list[MessageFault] = []
        self.cuts: list[_Cut] = []

    def send(self, path: Path, payload: object, n_bytes: float) -> None:
        traffic = path.traffic
        traffic[0] += 1
        traffic[1] += n_bytes
        packet = Packet(path, payload, n_bytes, n_bytes, n_bytes)
        card, now = path.card, self._event_queue.now
        if card is None:
            self._pass(packet, now, n_bytes)
            return
        if n_bytes > PIECE_BYTES:
            takes = n_bytes / card.bytes_per_second
            n_pieces = max(N_PIECES, math.ceil(takes / PIECE_SECONDS))
            n_pieces = min(math.ceil(n_bytes / PIECE_BYTES), n_pieces)
            packet.piece = float(math.ceil(n_bytes / n_pieces))
        # Small messages slip in between the pieces of large ones.
        waits = (card.free_at > now or card.turns) and (n_bytes > card.small_bytes or path.waiting)
        if not waits:
            self._pass(packet, now, packet.piece)
            if not packet.n_left:
                return
            card.is_spent = True  # a flow that comes now is served before this one
        path.waiting.append(packet)
        if len(path.waiting) == 1:
            card.turns.append(path)
            card.fit_turns()
        if not card.is_woken:
            card.is_woken = True
            self._at(card.free_at, self._send_next, card)

    def _send_next(self, card: Port) -> None:
        # Send what waits of the flow whose turn it is.
        now, turns = self._event_queue.now, card.turns
        if card.free_at <= now:  # small messages may have used the card since
            if card.is_spent:
                turns.rotate(-1)
            path = turns[0]
            packet = path.waiting[0]
            if path.credit <= 0.0:
                path.credit = packet.piece if len(turns) == 1 else card.quantum
            n_bytes = min(path.credit, packet.n_left)
            path.credit -= n_bytes
            self._pass(packet, now, n_bytes)
            card.is_spent = path.credit <= 0.0
            if not packet.n_left:
                path.waiting.popleft()
                if not path.waiting:
                    path.credit, card.is_spent = 0.0, False
                    turns.popleft()
                card.fit_turns()
        card.is_woken = bool(turns)
        if turns:
            self._at(card.free_at, self._send_next, card)

    def _pass(self, packet: Packet, now: Seconds, n_bytes: float) -> None:
        # Send so many bytes of a packet; it arrives with its last ones.
        path = packet.path
        packet.n_left -= n_bytes
        if packet.n_left:
            _use(path.ports, n_bytes, now, has_overhead=False)
            return
        departs, ends = _use(path.ports, n_bytes, now)
        packet.departs = departs
        delay, overtaken, copies = 0.0, False, _ONE_COPY
        if self._faults:
            met = self._faults_of(packet)
            if met is None:
                return
            delay, overtaken, copies = met
        latency = path.latency_seconds * (1 + path.jitter * next(self._chances))
        arrives = ends + latency + delay
        # Messages arrive in order, except where a fault lets later ones overtake.
        if arrives < path.arrives_last:
            arrives = path.arrives_last
        elif not overtaken:
            path.arrives_last = arrives
        for late in copies:
            self._at(arrives + late, self._arrive, packet)

    def _faults_of(self, packet: Packet) -> tuple[Seconds, bool, list[Seconds]] | None:
        # Delay, whether it is overtaken, and how late each copy is; None if it is lost.
        delay, overtaken, copies = 0.0, False, [0.0]
        for fault in self._faults:
            if not self._hits(fault, packet.path):
                continue
            match fault:
                case Drop():
                    self._lose(packet, "dropped")
                    return None
                case Duplicate():
                    copies.append(self._draw(fault.seconds_max))
                case Delay():
                    delay += self._draw(fault.seconds_max)
                    overtaken = overtaken or fault.overtaken
                case _:
                    assert_never(fault)
        return delay, overtaken, copies

    def begin(self, fault: NetworkFault) -> None:
        """Start a fault; it ends after `fault.seconds`."""
        ends = self._event_queue.now + fault.seconds
        if isinstance(fault, CutOff):
            cut = _Cut(fault)
            self.cuts.append(cut)
            self._at(ends, self._heal, cut)
        else:
            self._faults.append(fault)
            self._at(ends, self._faults.remove, fault)

    def _hits(self, fault: MessageFault, path: Path) -> bool:
        if fault.between is not None and (
            path.sender not in fault.between or path.receiver not in fault.between
        ):
            return False
        return bool(self._streams.faults.random() < fault.probability)

    def _draw(self, seconds_max: Seconds) -> Seconds:
        return float(self._streams.faults.uniform(0.0, seconds_max))

    def stops(self, packet: Packet) -> bool:
        """Return whether a packet does not arrive, or not now."""
        for cut in self.cuts:
            if cut.holds(packet.path):
                if cut.fault.loses:
                    self._lose(packet, "cut off")
                else:
                    cut.held.append(packet)
                return True
        if packet.departs > packet.path.broken_at:
            self._lose(packet, "its sender died before it had left")
            return True
        return False

    def _heal(self, cut: _Cut) -> None:
        self.cuts.remove(cut)
        self._event_queue.before_all(partial(self._arrive, packet) for packet in cut.held)


# Messages whose headers all have about the same size: it is measured once for each kind.
_ALIKE: Final = frozenset(
    {
        PushApplied,
        FetchAck,
        Fetch,
        HeartbeatAck,
        OpenSession,
        ParameterBlock,
        Push,
        PushBlock,
        PushBlockAck,
        SessionOpened,
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


@final
class Encoded:
    """Messages travel as encoded frames; `size` is that of the last message sent."""

    def __init__(self, run: str) -> None:
        self._wire = Codec(run=run)
        self.size = (0, 0)  # bytes of header and array

    def sent(self, action: Send, *, sender: Address, incarnation: int) -> object:
        """Return the frames of the message; LocalProtocolError if nobody would accept it."""
        frames = self._wire.encode(action.message, sender=sender, incarnation=incarnation)
        if len(frames) == 1:
            self.size = len(frames[0]), 0
            return frames
        self.size = len(frames[0]), sum(map(len, frames[1:]))
        # Copied now: the sender may change the array. A lent one is copied on arrival.
        return frames if action.lent else [bytes(frame) for frame in frames]

    def received(self, payload: object) -> Received:
        frames: Sequence[Frame] = payload  # type: ignore[assignment]  # of `sent`
        if len(frames) > 1 and type(frames[1]) is not bytes:  # lent
            frames = [frames[0], bytes(frames[1])]
        envelope = self._wire.decode(frames)
        return Received(
            sender=Address(envelope.sender),
            incarnation=envelope.incarnation,
            message=envelope.message,
        )


@final
class _Lent(msgspec.Struct, eq=False):
    sender: Address
    incarnation: int
    message: Message
    name: str  # of the array field
    array: Vector  # may still change


@final
class PassedOn:
    """Messages travel as objects; their arrays are copied when frames would be."""

    def __init__(self, run: str) -> None:
        self._wire = Codec(run=run)
        # Size of the header, and name of the array field.
        self._kinds: dict[type[Message], tuple[int, str | None]] = {}
        self.size = (0, 0)

    def sent(self, action: Send, *, sender: Address, incarnation: int) -> object:
        message = action.message
        kind = type(message)
        known = self._kinds.get(kind)
        if known is None:
            frames = self._wire.encode(message, sender=sender, incarnation=incarnation)
            known = len(frames[0]), _ARRAYS.get(kind)
            if kind in _ALIKE:
                self._kinds[kind] = known
        header, name = known
        array: Vector | None = None if name is None else getattr(message, name)
        if name is None or array is None:
            self.size = header, 0
        else:
            self.size = header, array.nbytes
            if action.lent:
                return _Lent(sender, incarnation, message, name, array)
            message = _copied(message, name, array)
        return Received(sender=sender, incarnation=incarnation, message=message)

    def received(self, payload: object) -> Received:
        assert isinstance(payload, _Lent)
        return Received(
            sender=payload.sender,
            incarnation=payload.incarnation,
            message=_copied(payload.message, payload.name, payload.array),
        )


def _copied(message: Message, name: str, array: Vector) -> Message:
    # The copy is read-only, as are arrays decoded from frames.
    copy = np.frombuffer(array.tobytes(), array.dtype)
    return msgspec.structs.replace(message, **{name: copy})
