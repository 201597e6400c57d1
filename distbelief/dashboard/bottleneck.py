"""Which role holds a run back, and why, from the counters of its heartbeats.

Replicas and shards count the seconds that they are in each state (`spent_STATE`); replicas those
that they wait for other workers by name (`waits_NAME`), computing seconds and samples. A role is
named only where it differs from the others, or where the others wait for it. The causes are tried
in this order; that of a role that reads pages again is `memory`, whatever it seemed to be.

    silent      it does not answer, and others wait
    memory      it reads pages from disk again and again, and its host or container waits for that
    waited for  in a round or for a floor, for its processor, its link or its data
    link        it waits for shards much longer than the other replicas
    data        it waits for its samples
    shard       replicas wait for this shard when all others have answered
    processor   it computes much longer for a sample than the other replicas
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import msgspec

from distbelief.core.formatting import percent
from distbelief.supervisor.view import JobView, RoleView


SPENT: Final = "spent_"
WAITS: Final = "waits_"
OBSERVED_SECONDS_MIN: Final = 1.0  # of a replica, before anything is said of it
WAITED_SHARE: Final = 0.15  # of the time of all workers, waited for one of them
READING_SHARE: Final = 0.2
EXCHANGE_SHARE: Final = 0.3  # waiting for shards, or copying
SHARD_SHARE: Final = 0.2  # waiting for one shard alone
STALLED_SHARE: Final = 0.1  # of the time, in which something there waited for memory
AGAIN_PER_SECOND: Final = 20.0  # pages of a role, for which a slow disk takes a fifth of its time
SLOWER: Final = 1.5  # times as long as the others for the same work
_IN_SILENCE: Final = ("silent", "restarting", "lost", "starting", "importing", "building")

_HELP: Final = {
    "silent": "Its log says what it did last. A shard with `[cluster] shard_copies = 2` is "
    "replaced at once.",
    "memory": "Give its host or container more memory, or let it need less: fewer roles there, a "
    "smaller `batch_size`, or more shards.",
    "processor": "Is something else running on its host? Without rounds and floors the others do "
    "not wait for it.",
    "link": "Push less often (`[algorithm] n_push`), or send fewer bytes (`[algorithm.exchange] "
    "push`).",
    "data": "Let processes read ahead: `[data.train] num_workers`.",
    "shard": "Cut the parameters into more shards (`[cluster] shards`), or see what else runs "
    "where it is.",
    "exchange": "Push and fetch less often (`[algorithm] n_push`, `n_fetch`), send fewer bytes, "
    "or use larger batches.",
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What holds a run back: a role, and the cause, a key of `_HELP`; "" if none stands out."""

    role: str = ""
    cause: str = ""
    text: str
    help: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """What a replica did in some time."""

    name: str
    seconds: float  # observed
    shares: Mapping[str, float]  # of them, by activity
    alone: Mapping[str, float]  # the share that it waited for one shard alone
    waits: Mapping[str, float] = field(default_factory=dict)  # seconds for other workers
    per_sample: float | None = None  # computing seconds

    @property
    def exchange(self) -> float:
        return self.shares.get("waiting for shards", 0.0) + self.shares.get("copying", 0.0)


def activity_of(state: str) -> str:
    """Return what a state is part of, as the page shows it; "" for none."""
    if state.startswith("waiting for shard"):
        return "waiting for shards"
    if state == "waiting for more samples":
        return "waiting for samples"
    if state.startswith("waiting for "):
        return "waiting for roles"
    if state in {"computing", "measuring", "applying", "staging", "executing"}:
        return "computing"
    return {"fetching": "copying", "pushing": "copying"}.get(
        state, state if state in {"copying", "reading"} else ""
    )


def seconds_spent(counters: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each activity between two heartbeats."""
    found: dict[str, float] = {}
    for name, value in counters.items():
        activity = activity_of(name.removeprefix(SPENT)) if name.startswith(SPENT) else ""
        if activity:
            found[activity] = found.get(activity, 0.0) + value - before.get(name, 0.0)
    if not found and "seconds_computing" in counters:
        name = "seconds_computing"
        found["computing"] = counters[name] - before.get(name, 0.0)
    return found


def seconds_counted(role: RoleView, view: JobView) -> float:
    """Return for how long a role of a training job has counted.

    Counters begin at zero in each session, and in each life of a process, whereas the view has the
    time of all sessions. Only replicas count what they do all the time; shards begin before them.
    """
    longest = session_seconds([role] if _trains(role) else view.roles)
    return min(view.training_seconds, longest)


def session_seconds(roles: Iterable[RoleView]) -> float:
    """Return for how long replicas have counted in a job's last session; infinite: none has."""
    seconds = (
        sum(n for name, n in one.counters.items() if name.startswith(SPENT))
        for one in roles
        if _trains(one)
    )
    return max(seconds, default=0.0) or math.inf


def bottleneck(view: JobView, since: JobView | None = None) -> Finding | None:
    """Return what holds a run back, from `since` (None: its start) until `view`.

    None if its roles have not counted for long enough.
    """
    earlier = {} if since is None else {role.name: role.counters for role in since.roles}
    timed = [_load(role, earlier.get(role.name, {})) for role in view.roles if _trains(role)]
    loads = [load for load in timed if load is not None]
    if not loads:
        return None
    looks = (_silent, _waited_for, _link, _data, _shard, _processor)
    finding = next((found for look in looks if (found := look(loads, view)) is not None), None)
    if finding is None or finding.cause != "silent":
        finding = _memory(view, since, finding) or finding
    if finding is not None:
        return finding
    exchange = median(load.exchange for load in loads)
    if exchange >= EXCHANGE_SHARE:
        text = f"No role stands out: replicas spend {percent(exchange)} of their time in exchange."
        return Finding(text=text, help=_HELP["exchange"])
    computing = median(load.shares.get("computing", 0.0) for load in loads)
    return Finding(
        text=f"No role holds the others back: replicas compute {percent(computing)} of their time."
    )


def _trains(role: RoleView) -> bool:
    return role.name.startswith("replica-")


def _load(role: RoleView, before: Mapping[str, float]) -> _Load | None:
    counters = role.counters
    if any(counters.get(name, 0.0) < before[name] for name in before if name.startswith(SPENT)):
        before = {}  # it was restarted
    spent = {n: v - before.get(n, 0.0) for n, v in counters.items() if n.startswith(SPENT)}
    seconds = sum(spent.values())
    if seconds < OBSERVED_SECONDS_MIN:
        return None
    shares = {name: n / seconds for name, n in seconds_spent(counters, before).items()}
    alone = {
        name.removeprefix(f"{SPENT}waiting for "): n / seconds
        for name, n in spent.items()
        if name.startswith(f"{SPENT}waiting for shard-")
    }
    waits = {
        name.removeprefix(WAITS): value - before.get(name, 0.0)
        for name, value in counters.items()
        if name.startswith(WAITS)
    }
    samples = counters.get("samples", 0.0) - before.get("samples", 0.0)
    computing = counters.get("seconds_computing", 0.0) - before.get("seconds_computing", 0.0)
    return _Load(
        name=role.name,
        seconds=seconds,
        shares=shares,
        alone=alone,
        waits=waits,
        per_sample=computing / samples if samples > 0.0 else None,
    )


def _found(role: str, cause: str, text: str) -> Finding:
    return Finding(role=role, cause=cause, text=text, help=_HELP[cause])


def _is_silent(role: RoleView) -> bool:
    is_old = (role.last_heartbeat_age or 0.0) > role.silent_seconds
    return (is_old and role.state not in {"done", "finished"}) or role.state in _IN_SILENCE


def _silent(_loads: Sequence[_Load], view: JobView) -> Finding | None:
    """A shard that does not answer: nobody can fetch or push."""
    waiting = {role.state.removeprefix("waiting for ") for role in view.roles if _trains(role)}
    for role in view.roles:
        if role.name.startswith("shard-") and _is_silent(role) and role.name in waiting:
            seen = (
                "" if role.last_heartbeat_age is None else f" for {role.last_heartbeat_age:.0f} s"
            )
            return _found(
                role.name, "silent", f"{role.name} is silent{seen}, and replicas wait for it."
            )
    return None


def _memory(view: JobView, since: JobView | None, seen: Finding | None) -> Finding | None:
    """A replica or shard whose pages are thrown out and read again: if it was `seen` to be slow.

    Otherwise where Linux says that something waits for memory: all may be equally slow.
    """
    earlier = {} if since is None else {role.name: role.counters for role in since.roles}
    short: dict[str, tuple[float, float]] = {}  # pages a second; share of the time stalled
    for role in view.roles:
        before = earlier.get(role.name, {})
        seconds = seconds_counted(role, view) if since is None else view.now - since.now
        pages, stalled = (
            (role.counters.get(name, 0.0) - before.get(name, 0.0)) / max(seconds, 1e-9)
            for name in ("pages_read_again", "seconds_stalled_for_memory")
        )
        if pages >= AGAIN_PER_SECOND and role.name.startswith(("replica-", "shard-")):
            short[role.name] = pages, stalled
    stands = [name for name, (_, stalled) in short.items() if stalled >= STALLED_SHARE]
    own = "" if seen is None else seen.role
    name = own if own in short else max(stands, key=short.__getitem__, default="")
    if not name:
        return None
    pages, stalled = short[name]
    text = f"{name} has too little memory: it reads {pages:.0f} pages a second from disk again."
    if stalled >= STALLED_SHARE:
        where = "Its host or container waits for memory"
        text = f"{text} {where} {percent(min(stalled, 1.0))} of the time."
    if seen is not None and name == own:
        text = f"{text} {seen.text}"
    return _found(name, "memory", text)


def _waited_for(loads: Sequence[_Load], view: JobView) -> Finding | None:
    """In a round, or for a floor: workers count for whom they wait."""
    total: dict[str, float] = {}
    for load in loads:
        for name, seconds in load.waits.items():
            total[name] = total.get(name, 0.0) + seconds
    if not total:
        return None
    name = max(total, key=total.__getitem__)
    waiting = [load for load in loads if load.name != name]
    share = total[name] / sum(load.seconds for load in waiting) if waiting else 0.0
    if share < WAITED_SHARE:
        return None
    text = f"The others wait for {name}, {percent(share)} of their time"
    role = next((role for role in view.roles if role.name == name), None)
    own = next((load for load in loads if load.name == name), None)
    if role is not None and _is_silent(role):
        return _found(name, "silent", f"{text}: it is silent.")
    if own is None:
        return _found(name, "silent", f"{text}: it counts nothing yet.")
    activities = {"link": "exchange", "data": "reading", "processor": "computing"}
    excess = {
        cause: _share(own, name) - median(_share(load, name) for load in waiting)
        for cause, name in activities.items()
    }
    cause = max(excess, key=excess.__getitem__)
    busy = f"{percent(_share(own, activities[cause]))} of its own"
    why = {
        "link": f"it spends {busy} in exchange, by a slow link",
        "data": f"it spends {busy} waiting for its data",
        "processor": f"it spends {busy} computing, slowly",
    }
    return _found(name, cause, f"{text}: {why[cause]}.")


def _share(load: _Load, activity: str) -> float:
    return load.exchange if activity == "exchange" else load.shares.get(activity, 0.0)


def _link(loads: Sequence[_Load], _view: JobView) -> Finding | None:
    """One replica waits for shards, and the others do not."""
    if len(loads) < 2:
        return None
    worst = max(loads, key=lambda load: load.exchange)
    others = median(load.exchange for load in loads if load is not worst)
    if worst.exchange < EXCHANGE_SHARE or worst.exchange < 2.0 * others + 0.1:
        return None
    text = f"{worst.name} spends {percent(worst.exchange)} of its time in exchange with the shards"
    return _found(worst.name, "link", f"{text}, the others {percent(others)}: its link is slow.")


def _data(loads: Sequence[_Load], _view: JobView) -> Finding | None:
    worst = max(loads, key=lambda load: _share(load, "reading"))
    share = _share(worst, "reading")
    if share < READING_SHARE:
        return None
    n = sum(_share(load, "reading") >= READING_SHARE for load in loads)
    several = f", as {n - 1} others do" if n > 2 else ", as another does" if n == 2 else ""
    text = f"{worst.name} waits for its samples {percent(share)} of its time{several}"
    return _found(worst.name, "data", f"{text}: reading is slow.")


def _shard(loads: Sequence[_Load], view: JobView) -> Finding | None:
    """Replicas wait for one shard when all others have answered; or there is only one."""
    shards = [role.name for role in view.roles if role.name.startswith("shard-")]
    shares = {name: median(load.alone.get(name, 0.0) for load in loads) for name in shards}
    if len(shares) < 2:
        return None
    name = max(shares, key=shares.__getitem__)
    others = sum(shares.values()) - shares[name]
    if shares[name] < SHARD_SHARE or shares[name] < 3.0 * others:
        return None
    text = f"Replicas wait for {name} {percent(shares[name])} of their time, when all other shards "
    return _found(name, "shard", f"{text}have answered.")


def _processor(loads: Sequence[_Load], _view: JobView) -> Finding | None:
    timed = [(load.per_sample, load) for load in loads if load.per_sample is not None]
    if len(timed) < 2:
        return None
    slowest, worst = max(timed, key=lambda each: each[0])
    others = median(seconds for seconds, load in timed if load is not worst)
    if slowest < SLOWER * others:
        return None
    factor = f"{slowest / others:.1f}" if others > 0.0 else "many"
    text = f"{worst.name} computes {factor} times as long for a sample as the other replicas"
    return _found(worst.name, "processor", f"{text}: its processor is slow or busy.")
