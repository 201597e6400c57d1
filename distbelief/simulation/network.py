"""The simulated network: carries frames along paths, subject to faults.

It knows no roles and reads no message. What it promises is what ZeroMQ over TCP does:
frames of one path arrive whole and in order, if at all, save where a fault says
otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from distbelief.roles import Seconds
from distbelief.simulation.agenda import Agenda
from distbelief.simulation.faults import (
    CutOff,
    Delay,
    Drop,
    Duplicate,
    MessageFault,
    NetworkFault,
)
from distbelief.simulation.links import Path
from distbelief.simulation.streams import Streams
from distbelief.wire import Frame


@dataclass(slots=True, eq=False)  # frozen would double its cost
class Packet:
    """The frames of one message under way."""

    path: Path
    frames: Sequence[Frame]
    departs: Seconds


@dataclass(slots=True, eq=False)
class _Cut:
    fault: CutOff
    held: list[Packet] = field(default_factory=list)

    def holds(self, path: Path) -> bool:
        """Whether nothing passes along `path`."""
        fault, ends = self.fault, (path.sender, path.receiver)
        if fault.one_way and fault.a != path.sender:
            return False
        return fault.a in ends and (fault.b is None or fault.b in ends)


class Network:
    """Calls `deliver` when a packet arrives, `lose` when it never will."""

    def __init__(
        self,
        agenda: Agenda,
        streams: Streams,
        *,
        deliver: Callable[[Packet], None],
        lose: Callable[[Packet, str], None],
    ) -> None:
        self._agenda = agenda
        self._streams = streams
        self._deliver = deliver
        self._lose = lose
        self._faults: list[MessageFault] = []
        self._cuts: list[_Cut] = []

    def send(self, path: Path, frames: Sequence[Frame]) -> None:
        """Put frames on their way."""
        n_bytes = sum(map(len, frames))
        packet = Packet(path, frames, path.depart(n_bytes, self._agenda.now))
        if self._faults:
            self._send_with_faults(packet)
        else:
            arrives = path.arrive(packet.departs, self._streams.network)
            self._agenda.at(arrives, partial(self._arrive, packet))

    def begin(self, fault: NetworkFault) -> None:
        """Let `fault` act from now on, until its time has passed."""
        if isinstance(fault, CutOff):
            cut = _Cut(fault)
            self._cuts.append(cut)
            end = partial(self._heal, cut)
        else:
            self._faults.append(fault)
            end = partial(self._faults.remove, fault)
        self._agenda.at(self._agenda.now + fault.seconds, end)

    def _send_with_faults(self, packet: Packet) -> None:
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
        arrives = packet.path.arrive(
            packet.departs, self._streams.network, delay=delay, overtaken=overtaken
        )
        for late in copies:
            self._agenda.at(arrives + late, partial(self._arrive, packet))

    def _hits(self, fault: MessageFault, path: Path) -> bool:
        if fault.between is not None and (
            path.sender not in fault.between or path.receiver not in fault.between
        ):
            return False
        return bool(self._streams.faults.random() < fault.probability)

    def _draw(self, seconds_max: Seconds) -> Seconds:
        return float(self._streams.faults.uniform(0.0, seconds_max))

    def _arrive(self, packet: Packet) -> None:
        for cut in self._cuts:
            if cut.holds(packet.path):
                if cut.fault.loses:
                    self._lose(packet, "cut off")
                else:
                    cut.held.append(packet)
                return
        if packet.departs > packet.path.broken_at:
            self._lose(packet, "its sender died before it had left")
            return
        self._deliver(packet)

    def _heal(self, cut: _Cut) -> None:
        self._cuts.remove(cut)
        self._agenda.before_all(partial(self._arrive, packet) for packet in cut.held)
