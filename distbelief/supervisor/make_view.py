"""Makes the view of a running job from what its supervisor knows."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from distbelief.protocol.role import Seconds
from distbelief.supervisor.failover import ShardFailover
from distbelief.supervisor.hosts import HostTable
from distbelief.supervisor.membership import COUNT_MAX, WAITS, Membership, Presence, RoleRecord
from distbelief.supervisor.metrics import JobMetrics
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.supervisor.view import JobView, RoleView


N_CULPRITS_MAX: Final = 3
IMPORT_SECONDS: Final = 3.0  # without a process, after which a role is shown as importing
_WAITED_FOR: Final = "seconds_waited_for_"


def make_view(
    config: SupervisorConfig,
    members: Membership,
    failover: ShardFailover,
    metrics: JobMetrics,
    hosts: HostTable,
    now: Seconds,
) -> JobView:
    before, view, stop = metrics.before, metrics.view(now), config.stop
    coordinator, shards = members.coordinator, members.of("shard")
    applied, lost, stale = failover.pushes_applied, failover.pushes_lost, shards
    # Losses are known from two sides, and neither sees all of them: replicas miss pushes of
    # their present incarnation, shards' clocks fall behind what they reported. Take the larger.
    lost = max(lost, _total(members.training, "pushes_lost"))
    counters: dict[str, float] = {}
    if coordinator is not None:
        counters = coordinator.counters
        # The clocks count its commands: pushes wait for their commit. A push that is lost is
        # repeated until the sum is complete, and every chunk is computed at the requested point.
        applied = before.pushes_applied + min(_totals_by_shard(shards, "pushes_applied"), default=0)
        lost, stale = 0, []
    stale = [shard for shard in stale if failover.is_primary(shard)]
    mean, p95, largest = _staleness(stale, before)
    # Traffic is taken from the clients' counters: a shard does not see reads from shared
    # memory, and its own counters include replication to the backup.
    clients = [record for record in members if record.kind != "shard"]
    # One push goes to several shards and is refused if any of them refuses it, so the true
    # number is at least that of the shard that refused most.
    refused = max(_totals_by_shard(shards, "pushes_refused"), default=0)
    n_steps = before.step + _total(members.training, "gradients_pushed")
    n_pushes = before.step / before.figures.get("steps_per_push", 1.0)
    n_pushes += _total(members.training, "pushes")
    if n_steps > n_pushes > 0:
        counters = counters | {"steps_per_push": n_steps / n_pushes}
    restarts = {role.name: role.restarts for role in before.roles}
    return replace(
        view,
        total_samples=None if stop is None else stop.total_samples,
        eta_seconds=None if stop is None else stop.eta_seconds(view),
        progress=None if stop is None else stop.progress(view),
        staleness_mean=mean,
        staleness_p95=p95,
        staleness_max=largest,
        bytes_in=before.bytes_in + _total(clients, "bytes_out"),
        bytes_out=before.bytes_out + _total(clients, "bytes_in"),
        pushes_applied=applied,
        pushes_refused=before.pushes_refused + refused,
        pushes_lost=None if before.pushes_lost is None else before.pushes_lost + lost,
        figures={name: counters[name] for name in config.fields if name in counters}
        | _encoded(members.training, before.figures)
        | _waits(members.training, before.figures),
        roles=tuple(
            _role_view(
                r,
                failover,
                hosts,
                now,
                restarts=restarts.get(r.name, 0),
                silent_seconds=config.silence_max(r.kind)[0],
            )
            for r in members
        ),
        hosts=tuple(host.view() for host in hosts.joined.values()),
    )


def _encoded(workers: Sequence[RoleRecord], before: Mapping[str, float]) -> dict[str, float]:
    """Return how much smaller encoded pushes are, and what of them is held back, or lost."""
    # What a former run held back at its end was dropped with its replicas.
    lost = before.get("residual_lost", 0.0) + before.get("residual", 0.0)
    lost += sum(one.past.get("residual", 0.0) + one.total("residual_lost") for one in workers)
    lost = max(lost - sum(one.total("residual_restored") for one in workers), 0.0)
    clipped = before.get("clipped", 0.0) + sum(one.total("clipped") for one in workers)
    held = 0.0
    for record in workers:
        residual = record.counters.get("residual", 0.0)
        is_here = record.presence in {Presence.PRESENT, Presence.FINISHED}
        held, lost = held + residual * is_here, lost + residual * (not is_here)
    n_words = _total(workers, "words_pushed")
    if not n_words:
        return {"residual_lost": lost} if lost else {}
    figures = {"compression": _total(workers, "numbers_pushed") / n_words, "residual": held}
    more = {"residual_lost": lost, "clipped": clipped}
    return figures | {name: value for name, value in more.items() if value}


def _waits(workers: Sequence[RoleRecord], before: Mapping[str, float]) -> dict[str, float]:
    """Return how many ticks workers are apart, and for whom they waited how long, if they wait."""
    gaps = {name: before[name] for name in before if name == "clock_gap_max"}
    seconds = {name: n for name, n in before.items() if name.startswith(_WAITED_FOR)}
    others = before.get("seconds_waited", 0.0) - sum(seconds.values())
    for record in workers:
        for name, value in (record.past | record.counters).items():
            if name in {"clock_gap", "clock_gap_max"}:
                gaps[name] = max(gaps.get(name, 0.0), value)
            elif name.startswith(WAITS):
                key = _WAITED_FOR + name.removeprefix(WAITS)
                seconds[key] = seconds.get(key, 0.0) + record.total(name)
    if not (gaps or seconds):
        return {}
    most = sorted(seconds, key=seconds.__getitem__, reverse=True)[:N_CULPRITS_MAX]
    total = others + sum(seconds.values())
    return {**gaps, "seconds_waited": total, **{name: seconds[name] for name in most}}


def state_of(record: RoleRecord, failover: ShardFailover, now: Seconds) -> str:
    presence, late = record.presence, record.launched_at + IMPORT_SECONDS
    if presence is Presence.PRESENT:
        return failover.copy_role(record) or record.state or presence.value
    if presence is Presence.LAUNCHED and not record.begins and now > late:
        return "importing"
    return "restarting" if presence is Presence.LAUNCHED and record.restarts else presence.value


def _role_view(
    record: RoleRecord,
    failover: ShardFailover,
    hosts: HostTable,
    now: Seconds,
    *,
    restarts: int,
    silent_seconds: Seconds,
) -> RoleView:
    host, heard = hosts.at(record.name), record.presence is Presence.PRESENT
    return RoleView(
        name=record.name,
        state=state_of(record, failover, now),
        rate=record.rate.per_second if record.is_alive else None,
        last_heartbeat_age=max(0.0, now - record.heard_at) if heard else None,
        silent_seconds=silent_seconds,
        restarts=restarts + record.restarts,
        pid=record.pid if record.is_alive else None,
        counters=record.counters,
        at="" if host is None else host.label,
    )


def _total(records: Iterable[RoleRecord], counter: str) -> int:
    # Roles report these numbers: negative, infinite or NaN ones are dropped.
    reported = (record.total(counter) for record in records)
    return int(sum(n for n in reported if 0.0 <= n <= COUNT_MAX))


def _totals_by_shard(shards: Sequence[RoleRecord], counter: str) -> list[int]:
    names = {record.shard for record in shards}
    return [_total([r for r in shards if r.shard == name], counter) for name in names]


def _staleness(shards: Sequence[RoleRecord], before: JobView) -> tuple[float | None, ...]:
    """Return mean, p95 and maximum of the staleness over shards that have applied pushes.

    The mean is weighted by pushes. The p95 is that of the worst shard, in the worst session: shards
    do not report their distributions.
    """
    earlier = before.staleness_mean, before.staleness_p95, before.staleness_max
    reported = [shard.counters for shard in shards if shard.counters.get("pushes_applied")]
    if not reported:
        return earlier
    n_before = 0 if before.staleness_mean is None else before.pushes_applied * len(reported)
    weighted = n_before * (before.staleness_mean or 0.0)
    n_pushes = n_before + sum(counters["pushes_applied"] for counters in reported)
    weighted += sum(
        counters["pushes_applied"] * counters.get("staleness_mean", 0.0) for counters in reported
    )
    return (
        weighted / n_pushes,
        max([earlier[1] or 0.0, *(counters.get("staleness_p95", 0.0) for counters in reported)]),
        max([earlier[2] or 0.0, *(counters.get("staleness_max", 0.0) for counters in reported)]),
    )
