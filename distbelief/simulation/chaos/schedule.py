"""The fault schedule: fault events drawn from one seed.

    kind        effect on a role                                 with real processes
    kill        its process ends at once                         SIGKILL
    pause       its process stops for a while                    SIGSTOP, SIGCONT
    slow        its work takes several times as long             stopped most of the time
    cut off     no messages between it and one or all others     left out
    drop        some messages from and to it are lost            left out
    duplicate   some messages arrive twice, perhaps late         left out

Times are fractions of the job's undisturbed length, so that one schedule fits any job.
"""

from collections.abc import Sequence
from typing import Final, Literal, assert_never, final, get_args

import msgspec
import numpy as np

from distbelief.parameter_server.shard_config import shard_of
from distbelief.protocol.role import Address, Seconds
from distbelief.simulation.faults import CutOff, Drop, Duplicate, Fault, Kill, Pause, Slow
from distbelief.simulation.forecast.run import first_word
from distbelief.worker.group import group_rank_of


Kind = Literal["kill", "pause", "slow", "drop", "duplicate", "cut off"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
# These affect a process; the others affect links.
PROCESS_KINDS: Final[frozenset[Kind]] = frozenset({"kill", "pause", "slow"})

N_EVENTS: Final = 12
FIRST, LAST = 0.1, 0.9  # faults begin between these fractions of the job
SHARE_MAX: Final = 0.15  # longest fault, as a fraction of the job

# Kinds of roles that send messages to each other; all of them do to the supervisor.
_PEERS: Final = (
    {"shard", "replica"},
    {"shard", "evaluator"},
    {"shard", "coordinator"},
    {"coordinator", "replica"},
)

_STREAM: Final = 0xC405


@final
class FaultEvent(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    role: str
    other: str | None = None  # the other end of the affected link; None: all links of `role`
    at: float  # fraction of the job's undisturbed length
    lasts: float = 0.0  # fraction of the job's undisturbed length
    factor: float = 1.0  # of "slow": how many times as long work takes
    probability: float = 0.0  # of "drop" and "duplicate", for each message

    def text(self, horizon: Seconds) -> str:
        """Return a description, for a job of `horizon` seconds."""
        seconds = f"for {self.lasts * horizon:.1f} s"
        link = "" if self.other is None else f" - {self.other}"
        match self.kind:
            case "kill":
                return f"kill {self.role}"
            case "pause":
                return f"pause {self.role} {seconds}"
            case "slow":
                return f"slow {self.role} down {self.factor:.1f} times {seconds}"
            case "drop" | "duplicate":
                share = f"{self.probability:.0%} of the messages"
                return f"{self.kind} {share} {self.role}{link} {seconds}"
            case "cut off":
                far = "all others" if self.other is None else self.other
                return f"cut {self.role} off from {far} {seconds}"
            case _:
                assert_never(self.kind)


def schedule(seed: int, roles: Sequence[str]) -> tuple[FaultEvent, ...]:
    """Return the fault events of a seed for these roles, ordered by time."""
    stream = np.random.default_rng([seed, _STREAM])
    fault_events = [_draw_event(stream, roles) for _ in range(N_EVENTS)]
    return tuple(sorted(fault_events, key=lambda event: event.at))


def _draw_event(stream: np.random.Generator, roles: Sequence[str]) -> FaultEvent:
    # Always draw the same number of random numbers, so that events are independent.
    kind = KINDS[int(stream.integers(len(KINDS)))]
    role = roles[int(stream.integers(len(roles)))]
    other = roles[int(stream.integers(len(roles)))]
    at, lasts, much, coin = (float(number) for number in stream.random(4))
    is_link = kind not in PROCESS_KINDS and coin < 0.5 and _talk(role, other, roles)
    return FaultEvent(
        kind=kind,
        role=role,
        other=other if is_link else None,
        at=round(FIRST + (LAST - FIRST) * at, 6),
        lasts=0.0 if kind == "kill" else round(SHARE_MAX * lasts, 6),
        factor=round(2.0 + 6.0 * much, 3) if kind == "slow" else 1.0,
        probability=round(0.02 + 0.2 * much, 4) if kind in {"drop", "duplicate"} else 0.0,
    )


def _talk(role: str, other: str, roles: Sequence[str]) -> bool:
    # Whether two roles always exchange messages; a fault on another link would have no effect.
    # A rank of a split replica or evaluator sends messages to its own group, and only to the
    # shards that hold its regions.
    if role == other:
        return False
    if _group(role) == _group(other):
        return True
    if any("." in name or f"{name}.1" in roles for name in (role, other)):
        return False
    return {first_word(Address(role)), first_word(Address(other))} in _PEERS


def _group(role: str) -> str:
    # The shard of a primary or backup, or the group of a rank.
    place = group_rank_of(role)
    return shard_of(role) if place is None else place.group


def faults_of(event: FaultEvent, *, horizon: Seconds, roles: Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of a simulated job that takes `horizon` seconds undisturbed."""
    at, seconds, role = (event.at * horizon, event.lasts * horizon, Address(event.role))
    others = [Address(name) for name in roles if name != role]
    if event.other is not None:
        others = [Address(event.other)]
    match event.kind:
        case "kill":
            return (Kill(at=at, role=role),)
        case "pause":
            return (Pause(at=at, role=role, seconds=seconds),)
        case "slow":
            return (Slow(at=at, role=role, factor=event.factor, seconds=seconds),)
        case "drop":
            return tuple(
                Drop(probability=event.probability, between=(role, other), at=at, seconds=seconds)
                for other in others
            )
        case "duplicate":
            return tuple(
                Duplicate(
                    probability=event.probability,
                    seconds_max=seconds,
                    between=(role, other),
                    at=at,
                    seconds=seconds,
                )
                for other in others
            )
        case "cut off":
            far = None if event.other is None else Address(event.other)
            return (CutOff(at=at, a=role, b=far, seconds=seconds),)
        case _:
            assert_never(event.kind)
