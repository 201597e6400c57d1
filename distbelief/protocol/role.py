"""The contract of a role: events in, actions out, no input or output of its own.

A role (shard, replica, coordinator, evaluator, supervisor) is a deterministic state machine.
It holds no socket, thread, clock, file or global random source. A driver delivers events and
performs the actions: `transport.node` over ZeroMQ, `simulation` in virtual time.

* `handle` gets one event at a time and is never re-entered. `Started` comes first.
* Messages of one link arrive in the order sent, if they arrive; none is guaranteed.
* Work of one executor runs in the order given, one piece at a time, outside `handle`. Each
  `Compute` or `Persist` is answered by one `Computed` or `Persisted`, unless the role exits. What
  work notes meanwhile comes before its answer, or never.
* A role does not touch what its work uses until the answer comes.
* Setting a timer again replaces it. It fires once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import UnionType
from typing import Final, NewType, Protocol, get_args

import msgspec

from distbelief import protocol as wire
from distbelief.core.errors import FalseClaimError, RemoteProtocolError
from distbelief.core.vectors import Vector
from distbelief.protocol import MESSAGES, Message
from distbelief.protocol.log_events import LogEvent


Address = NewType("Address", str)  # "supervisor", "shard-0", "replica-1", "evaluator"
Seconds = float

SUPERVISOR = Address("supervisor")

USER = Address("user")
"""Sender of `Stop` at Ctrl+C: posted by this process, never sent over the network."""

HOST = "host-"
"""Prefix of the names of hosts: machines that joined and run roles."""


class Executor(Enum):
    """Where work runs: one piece at a time in each executor, the executors in parallel."""

    COMPUTE = "compute"  # gradients, updates, copies: owns the role's arrays
    DATA = "data"  # reading the next batch

    __hash__ = object.__hash__  # Enum's own is written in Python, and slow


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a piece of work costs, for a driver in virtual time."""

    flops: float = 0.0
    n_bytes: float = 0.0  # moved to or from memory, or the disk
    waiting: Seconds = 0.0  # without computing: for a disk, or for other processes
    threads: int = 1  # that share the flops, each with the cores that work usually has


NEWEST = ""
"""Label of a snapshot that nobody asked for: it replaces the newest one.

So it never gets ahead of the labels that the supervisor gives.
"""

FIRST_LABEL = "00000"
"""Label of such a snapshot if it is the first."""

BEST = "best"
"""Label of the values of the best evaluation, which the next better one replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The saved state of one role: named arrays, and facts as text."""

    label: str  # "00412"; labels of one role sort by age. NEWEST: see there
    arrays: Mapping[str, Vector]
    facts: Mapping[str, str]


# --- events ---
# msgspec structs, though nobody encodes them: a frozen dataclass takes ten times as long to
# make, and every message needs several.


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """This incarnation of the role begins."""

    incarnation: int  # 1, 2, … : rises with each start
    restored: Snapshot | None = None  # its newest intact snapshot, if it has any
    unrestored: str | None = None  # why none of its snapshots can be used


class Received(msgspec.Struct, frozen=True, kw_only=True):
    sender: Address
    incarnation: int  # of the sender, when it sent this
    message: Message


class TimerFired(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `Compute`: its result, or its error."""

    name: str
    result: object = None
    error: BaseException | None = None
    seconds: Seconds = 0.0  # how long it ran
    is_note: bool = False  # of work that still runs: its answer follows


class Persisted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `Persist`: saved durably, or why not."""

    label: str
    error: str | None = None


class PeerJoined(msgspec.Struct, frozen=True, kw_only=True):
    """A peer, or a new incarnation of it, can be reached from now on."""

    peer: Address
    incarnation: int
    host: str = ""  # whose memory it can map; "" if none, or not known


class PeerLost(msgspec.Struct, frozen=True, kw_only=True):
    """A peer is gone: its process ended, or the driver gave up on it."""

    peer: Address
    incarnation: int
    reason: str
    for_good: bool = False  # it will not come back: do not wait for it


Event = Started | Received | TimerFired | Computed | Persisted | PeerJoined | PeerLost


# --- actions ---


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Deliver `message` to `receiver`, without a guarantee.

    The driver has read every array by the time the role handles its next event, unless they
    are `lent`: then it may read them at any time, and the role must not change them until
    every possible receiver of the message has answered, or will ignore what they say.
    """

    receiver: Address
    message: Message
    lent: bool = False


class SetTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Deliver `TimerFired(name=name)` at time `at`."""

    name: str
    at: Seconds


class CancelTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Cancel the timer of this name, if there is one."""

    name: str


@dataclass(slots=True, eq=False)
class Notes:
    """Where work tells what is done, and which share of all that is.

    A driver that passes it on sets `tell`.
    """

    tell: Callable[[object, float], None] = lambda _note, _share: None


class Compute(msgspec.Struct, frozen=True, kw_only=True):
    """Run `work` on `executor`, then deliver `Computed` under the same name."""

    name: str
    work: Callable[[], object]
    cost: Cost = Cost()
    executor: Executor = Executor.COMPUTE
    # Called when its turn comes: the share of the cost still to pay; 0 for work that will
    # find that its result is not needed. None: all of it.
    remaining: Callable[[], float] | None = None
    notes: Notes | None = None  # of the work


class Persist(msgspec.Struct, frozen=True, kw_only=True):
    """Save `snapshot` durably (on the compute executor), then deliver `Persisted`."""

    snapshot: Snapshot


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Log one line; at level "warning" or "error" also show it."""

    text: str
    level: str = "info"  # "debug", "info", "warning", "error"
    event: LogEvent | None = None  # what is said, in fields

    @classmethod
    def of(cls, event: LogEvent) -> "Report":
        return cls(text=event.text, level=event.level, event=event)


class Connect(msgspec.Struct, frozen=True, kw_only=True):
    """From now on `peer` listens at `endpoint` ("" in a simulation)."""

    peer: Address
    incarnation: int
    endpoint: str
    host: str
    watched: bool = False  # deliver `PeerLost` once the connection ends and nothing listens there


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Deliver `PeerLost` if nothing listens at this endpoint: its process has ended."""

    peer: Address
    incarnation: int
    endpoint: str


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Start the role `name` with this incarnation (supervisor only)."""

    name: Address
    incarnation: int
    ranks: int = 1  # of its group


class AssignName(msgspec.Struct, frozen=True, kw_only=True):
    """From now on only the host of `to` may use the name `name`."""

    name: Address
    to: Address


class Terminate(msgspec.Struct, frozen=True, kw_only=True):
    """Kill the process of the role `name` (supervisor only)."""

    name: Address


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """The role has ended; `error` says why, unless as planned."""

    error: str | None = None


Action = (
    Send
    | SetTimer
    | CancelTimer
    | Compute
    | Persist
    | Report
    | Connect
    | Probe
    | Launch
    | AssignName
    | Terminate
    | Exit
)


Together = Callable[[Sequence[Callable[[], object]]], None]
"""Runs pieces of work, which raise nothing, and returns when all have ended.

The driver gives it to roles whose work has pieces that may run at the same time.
"""


def in_turn(pieces: Sequence[Callable[[], object]]) -> None:
    """Run the pieces one after the other, as in virtual time."""
    for piece in pieces:
        piece()


def message_types(union: UnionType) -> frozenset[type]:
    return frozenset(get_args(union))


ALL_MESSAGES: Final[frozenset[type]] = frozenset(MESSAGES)
"""For roles that wrap another one and pass messages on."""


class Role(Protocol):
    """A process of the system, as a deterministic state machine."""

    @property
    def accepts(self) -> frozenset[type]:
        """The message types that its peers may send it; the driver refuses all others."""
        ...

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        RemoteProtocolError if a peer broke the protocol: the driver logs it, drops the event and
        goes on. DistBeliefError if the role cannot go on: the driver reports it and halts.
        """
        ...

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what the role is doing, in a word, and its counters."""
        ...


_COORDINATOR: Final = "coordinator"

# Orders, and who may give them: names, and a prefix. A worker's key proves a worker's name only.
ORDERS: Final[Mapping[type, tuple[str, ...]]] = {
    **dict.fromkeys((wire.Promote, wire.Peers, wire.HeartbeatAck, wire.Evaluate), (SUPERVISOR,)),
    **dict.fromkeys((wire.Assignments, wire.Release, wire.FileChunk), (SUPERVISOR,)),
    wire.RingMembers: (SUPERVISOR,),
    **dict.fromkeys((wire.StartTraining, wire.SaveCheckpoint), (SUPERVISOR, _COORDINATOR)),
    wire.Stop: (SUPERVISOR, _COORDINATOR, USER),
    **dict.fromkeys((wire.ShardCommand, wire.Assignment), (_COORDINATOR,)),
    **dict.fromkeys((wire.StartSync, wire.StateBlock), ("shard-",)),
    **dict.fromkeys((wire.ReplicatePush, wire.ReplicateCommand, wire.ReplicateRows), ("shard-",)),
}


def check_accepted(role: Role, event: Event, *, name: str) -> None:
    """Refuse a message that is not for this role. Drivers call it before `handle`.

    The RemoteProtocolError names the sender and the message.
    """
    if not isinstance(event, Received):
        return
    kind = type(event.message)
    if kind not in role.accepts:
        raise RemoteProtocolError(
            f"{event.sender} sent {name} {kind.__name__}, which it does not accept"
        )
    givers, sender = ORDERS.get(kind), event.sender
    if givers and not any(
        sender == one or (one[-1] == "-" and sender.startswith(one)) for one in givers
    ):
        raise FalseClaimError(
            f"{event.sender} sent {name} {kind.__name__}: only {' or '.join(givers)} may"
        )
