"""How long the work of a job's roles takes on this host: measured, and kept.

    replica  replica:step      seconds of each floating point operation asked for
             replica:push      seconds of each byte
    shard    shard:apply       seconds of each byte
    replica Computed apply     seconds of each such event, of the role's own thread
    message, work, timer       seconds of a core for each, role apart (`exchange`)

What the parts of a job take is known best from doing them: the real roles run for a few
seconds in virtual time, with their real work, and every piece is timed. As many
processes as there are cores do so side by side, for a core computes faster, and memory
is nearer, while the others idle. What comes of it is kept in ~/.cache/distbelief.

On another machine work takes as many times as long as that one is slower: what was
counted in operations by its speed, what was counted in bytes by its memory.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Final, Literal, final

import msgspec

from distbelief import files
from distbelief.errors import StorageError
from distbelief.forecast.exchange import Exchange
from distbelief.forecast.likeness import likeness
from distbelief.job.configuration.sections import Job
from distbelief.partition.profiling.profile import Host, this_host
from distbelief.roles import Compute, Cost, Seconds
from distbelief.simulation.desk import Handling


VERSION: Final = 9

Unit = Literal["flops", "bytes", "times"]


@final
class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """How long one kind of work takes.

    Attributes:
        unit: What its cost is counted in.
        seconds: Of each unit.
        n: Pieces that were timed.
        waiting: Besides, of each unit: seconds in which no core was at work.
    """

    unit: Unit
    seconds: Seconds
    n: int
    waiting: Seconds = 0.0


@final
class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one job on one host.

    Attributes:
        work: By "KIND NAME by UNIT": of a role, of its work.
        handling: Seconds that a role takes for an event, by "KIND LABEL", and by KIND
            for those that never came; see `simulation.desk.label_of`.
        exchange: What its process takes besides.
        n_side_by_side: Processes that computed at once.
        share: Of a core, that each of them had when it wanted one.
        date: Of the measurement, ISO 8601.
        version: Of what is measured, and how.
    """

    work: Mapping[str, Rate]
    handling: Mapping[str, Seconds]
    exchange: Exchange
    n_side_by_side: int = 1
    share: float = 1.0
    date: str = ""
    version: int = VERSION

    def handling_of(self, kind: str) -> Handling:
        """Return what events take of a process that has this kind of role."""
        prefix = f"{kind} "
        seconds = {
            key.removeprefix(prefix): value + self._besides(key.removeprefix(prefix))
            for key, value in self.handling.items()
            if key.startswith(prefix)
        }
        usual = [value for key, value in self.handling.items() if " " not in key]
        other = self.handling.get(kind, fmean(usual) if usual else 0.0)
        found = self.exchange
        return Handling(
            seconds=seconds, other=other + found.message, begins=found.begins, answers=found.answers
        )

    def _besides(self, label: str) -> Seconds:
        match label.partition(" ")[0]:
            case "Computed":
                return self.exchange.work
            case "TimerFired":
                return self.exchange.timer
            case _:
                return self.exchange.message

    def seconds_of(self, kind: str, asked: Compute) -> tuple[Unit, Seconds] | None:
        """Return what this work takes here, and by what that would change."""
        rate = self._rate_of(kind, asked)
        if rate is None:
            return None
        return rate.unit, rate.seconds * amount(asked.cost, rate.unit)

    def waiting_of(self, kind: str, asked: Compute) -> Seconds:
        """Return for how long this work waits besides, on whatever machine."""
        rate = self._rate_of(kind, asked)
        return 0.0 if rate is None else rate.waiting * amount(asked.cost, rate.unit)

    def _rate_of(self, kind: str, asked: Compute) -> Rate | None:
        units: tuple[Unit, ...] = (unit_of(asked.cost), "times")
        keys = (key_of(kind, asked.name, unit) for unit in units)
        return next((self.work[key] for key in keys if key in self.work), None)


def mean_of(found: Sequence[Rates]) -> Rates:
    """Return measurements of one job as one: work by pieces, the rest by halves.

    Args:
        found: At least one; the date is that of the last.
    """
    work: dict[str, Rate] = {}
    for rates in found:
        for key, rate in rates.work.items():
            other = work.get(key, msgspec.structs.replace(rate, n=0))
            n = rate.n + other.n
            seconds = (rate.n * rate.seconds + other.n * other.seconds) / max(1, n)
            waiting = (rate.n * rate.waiting + other.n * other.waiting) / max(1, n)
            work[key] = Rate(unit=rate.unit, seconds=seconds, n=n, waiting=waiting)
    handling = {
        key: fmean(rates.handling[key] for rates in found if key in rates.handling)
        for rates in found
        for key in rates.handling
    }
    figures = [msgspec.structs.asdict(rates.exchange) for rates in found]
    exchange = {name: fmean(each[name] for each in figures) for name in figures[0]}
    return msgspec.structs.replace(
        found[-1],
        work=work,
        handling=handling,
        exchange=Exchange(**exchange),
        share=min(rates.share for rates in found),
    )


def key_of(kind: str, name: str, unit: Unit) -> str:
    """Return how a kind of work is called; numbers in names are of no account.

    Work of one name may be counted in operations now and in bytes then.
    """
    plain = "".join(letter for letter in name if not letter.isdigit())
    return f"{kind} {plain} by {unit}"


def unit_of(cost: Cost) -> Unit:
    """Return what a cost is best counted in."""
    if cost.flops > 0:
        return "flops"
    return "bytes" if cost.n_bytes > 0 else "times"


def amount(cost: Cost, unit: Unit) -> float:
    """Return how many of the unit it is."""
    match unit:
        case "flops":
            return cost.flops
        case "bytes":
            return cost.n_bytes
        case "times":
            return 1.0


def now() -> str:
    """Return the date, for what is measured now."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# ------------------------------------------------------------------------- keeping


def kept(job: Job) -> Rates | None:
    """Return what was measured of such a job on this host before, if anything was."""
    try:
        content = _path(job, this_host()).read_bytes()
        rates = msgspec.json.decode(content, type=Rates)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return rates if rates.version == VERSION else None


def keep(job: Job, rates: Rates) -> None:
    """Keep what was measured, where that can be; else it is measured again."""
    path = _path(job, this_host())
    with suppress(StorageError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, msgspec.json.format(msgspec.json.encode(rates)))


def _path(job: Job, host: Host) -> Path:
    what = f"{VERSION} {likeness(job)}"
    digest = hashlib.sha256(what.encode()).hexdigest()[:16]
    # Roles compute with as many threads as the job says, whatever this process does.
    host = msgspec.structs.replace(host, n_threads=job.cluster.threads)
    return host.path.with_name(f"rates-{digest}-{host.path.stem[-8:]}.json")
