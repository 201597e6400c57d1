"""What a role is: events in, actions out, no input or output of its own.

A role (shard, replica, coordinator, evaluator, supervisor) is a deterministic state
machine. It holds no socket, thread, clock, file or global random source; a *driver*
delivers events and performs the actions, over ZeroMQ (`node`) or in virtual time
(`simulation`). Rules that both drivers keep:

* `handle` is called with one event at a time and never re-entered.
* `Started` is the first event of every life.
* Messages of one link arrive in the order sent, if they arrive; none is promised to.
* Work of one lane runs in the order given, one at a time, outside `handle`; each
  `Compute` or `Persist` is answered by exactly one `Computed` or `Persisted` unless
  the role halts first.
* What a piece of work touches, the role leaves alone until the answer.
* A timer is known by its name: setting it again replaces it. It fires once.

Events and actions are structs of msgspec, though nobody encodes them: one is made in a
tenth of the time of a frozen dataclass, and every message takes some of each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import UnionType
from typing import Final, NewType, Protocol, get_args

import msgspec

from distbelief.core.vectors import Vector
from distbelief.errors import RemoteProtocolError
from distbelief.protocol import Message


Address = NewType("Address", str)  # "supervisor", "shard-0", "replica-1", "evaluator"
Seconds = float

SUPERVISOR = Address("supervisor")

USER = Address("user")
"""Who sends `Stop` at Ctrl+C: posted by this process, never sent over the network."""

HOST = "host-"
"""How the names of hosts begin: machines that have joined, and run roles."""


class Executor(Enum):
    """Where work runs: one piece at a time in each lane, the lanes side by side."""

    COMPUTE = "compute"  # gradients, updates, copies: owns the role's arrays
    DATA = "data"  # reading the next batch

    __hash__ = object.__hash__  # there is one of each; Enum's own is written in Python


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a piece of work would take, for a driver in virtual time."""

    flops: float = 0.0
    n_bytes: float = 0.0  # moved to or from memory, or the disk
    waiting: Seconds = 0.0  # in which nothing computes: for a disk, or for others


NEWEST = ""
"""Label of a snapshot that nobody asked for: it takes the newest one's place.

So it never gets ahead of the labels that the supervisor gives.
"""

FIRST_LABEL = "00000"
"""Of such a snapshot where there is none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The saved state of one role: named arrays, and facts as text."""

    label: str  # "00412"; labels of one role sort by age. NEWEST: see there
    arrays: Mapping[str, Vector]
    facts: Mapping[str, str]


# ---------------------------------------------------------------------- events


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The role's present life begins."""

    incarnation: int  # 1, 2, … : a new one at each start
    restored: Snapshot | None = None  # its newest whole snapshot, if it has any
    unrestored: str | None = None  # why none of the snapshots that it has can be used


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A message arrived."""

    sender: Address
    incarnation: int  # of the sender, when it sent this
    message: Message


class TimerFired(msgspec.Struct, frozen=True, kw_only=True):
    """A timer set earlier has come due."""

    name: str


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `Compute`: its result, or what went wrong."""

    name: str
    result: object = None
    error: BaseException | None = None
    seconds: Seconds = 0.0  # how long it ran


class Persisted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `Persist`: saved for good, or why not."""

    label: str
    error: str | None = None


class PeerJoined(msgspec.Struct, frozen=True, kw_only=True):
    """A peer (or a new incarnation of it) can be reached from now on."""

    peer: Address
    incarnation: int


class PeerLost(msgspec.Struct, frozen=True, kw_only=True):
    """A peer is gone: its process ended, or the driver gave up on it."""

    peer: Address
    incarnation: int
    reason: str
    for_good: bool = False  # it will not come back: there is no waiting for it


Event = Started | Received | TimerFired | Computed | Persisted | PeerJoined | PeerLost


# --------------------------------------------------------------------- actions


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Deliver `message` to `receiver`, perhaps.

    The driver has read every array by the time the role handles its next event; unless
    they are `lent`: then it may read them at any time, and the role leaves them as they
    are until whoever could still heed the message has answered it.
    """

    receiver: Address
    message: Message
    lent: bool = False


class SetTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Deliver `TimerFired(name=name)` at time `at`."""

    name: str
    at: Seconds


class CancelTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Forget the timer of this name, if there is one."""

    name: str


class Compute(msgspec.Struct, frozen=True, kw_only=True):
    """Run `work` in `lane`, then deliver `Computed` under the same name."""

    name: str
    work: Callable[[], object]
    cost: Cost = Cost()
    lane: Executor = Executor.COMPUTE
    # Asked when its turn comes: what part of the cost is there still to pay; 0 for work
    # that will find that it is in vain. None: all of it.
    remaining: Callable[[], float] | None = None


class Persist(msgspec.Struct, frozen=True, kw_only=True):
    """Save `snapshot` for good (in the compute lane), then deliver `Persisted`."""

    snapshot: Snapshot


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Write one line to the role's log; at level "warning" or "error" show it too."""

    text: str
    level: str = "info"  # "debug", "info", "warning", "error"


class Connect(msgspec.Struct, frozen=True, kw_only=True):
    """From now on `peer` is to be found at `endpoint` ("" in a simulation)."""

    peer: Address
    incarnation: int
    endpoint: str
    host: str


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """Start the role `name` with this incarnation (the supervisor alone asks)."""

    name: Address
    incarnation: int


class AssignName(msgspec.Struct, frozen=True, kw_only=True):
    """From now on `name` belongs to the machine of `to`: nobody else speaks for it."""

    name: Address
    to: Address


class Terminate(msgspec.Struct, frozen=True, kw_only=True):
    """End the role `name` at once, by force (the supervisor alone asks)."""

    name: Address


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """The role has ended; `error` says why if not as planned."""

    error: str | None = None


Action = (
    Send
    | SetTimer
    | CancelTimer
    | Compute
    | Persist
    | Report
    | Connect
    | Launch
    | AssignName
    | Terminate
    | Exit
)


def message_types(union: UnionType) -> frozenset[type]:
    """Return the message types of a union such as `Push | Fetch`."""
    return frozenset(get_args(union))


ALL_MESSAGES: Final = message_types(Message)
"""What a role accepts that passes messages on to another one."""


class Role(Protocol):
    """A process of the system, as a deterministic state machine."""

    @property
    def accepts(self) -> frozenset[type]:
        """The message types that its peers may send it; the driver refuses all others."""
        ...

    def handle(self, event: Event, now: Seconds) -> Sequence[Action]:
        """Return the actions that `event` calls for.

        Raises:
            RemoteProtocolError: a peer broke the protocol; the driver logs it, drops
                the event and goes on.
            DistBeliefError: the role cannot go on; the driver reports it and halts.
        """
        ...

    def status(self) -> tuple[str, Mapping[str, float]]:
        """Return what the role is doing, in a word, and its counters."""
        ...


def check_accepted(role: Role, event: Event, *, name: str) -> None:
    """Refuse a message that is not for this role. Drivers call it before `handle`.

    Raises:
        RemoteProtocolError: naming the sender and the message.
    """
    if isinstance(event, Received) and type(event.message) not in role.accepts:
        raise RemoteProtocolError(
            f"{event.sender} sent {name} {type(event.message).__name__}, which it does not accept"
        )
