"""The supervisor's view of its job, made from all that it knows."""

from collections.abc import Iterable

from distbelief.job.ending import Ending
from distbelief.job.figures import Figures
from distbelief.job.membership import Membership, Presence, RoleRecord
from distbelief.job.stop_rules import StopRules
from distbelief.job.view import Phase, RoleView, SupervisorView
from distbelief.roles import Seconds


def role_view(record: RoleRecord, now: Seconds) -> RoleView:
    """Return one role's row."""
    state = record.presence.value
    if record.presence is Presence.PRESENT:
        state = record.state or state
    elif record.presence is Presence.LAUNCHED and record.restarts:
        state = "restarting"
    heard = record.presence is Presence.PRESENT
    return RoleView(
        name=record.name,
        state=state,
        rate=record.rate.per_second if record.is_alive else None,
        last_heartbeat_age=max(0.0, now - record.heard_at) if heard else None,
        restarts=record.restarts,
        counters=dict(record.counters),
    )


def staleness(shards: Iterable[RoleRecord]) -> tuple[float | None, ...]:
    """Return mean, p95 and maximum over shards that have applied pushes.

    The mean is weighted by pushes; the p95 is the worst shard's, since the shards tell
    no more than their own.
    """
    told = [shard.counters for shard in shards if shard.counters.get("pushes_applied")]
    if not told:
        return None, None, None
    n_pushes = sum(counters["pushes_applied"] for counters in told)
    weighted = sum(
        counters["pushes_applied"] * counters.get("staleness_mean", 0.0)
        for counters in told
    )
    return (
        weighted / n_pushes,
        max(counters.get("staleness_p95", 0.0) for counters in told),
        max(counters.get("staleness_max", 0.0) for counters in told),
    )


def total(records: Iterable[RoleRecord], counter: str) -> int:
    """Return a counter over these roles, in all their lives."""
    return int(sum(record.total(counter) for record in records))


def view_of(
    figures: Figures,
    members: Membership,
    *,
    ending: Ending,
    stop: StopRules | None,
    phase: Phase,
    now: Seconds,
) -> SupervisorView:
    """Return the whole job at one moment."""
    reached = figures.reached(now)
    shards, replicas = members.of("shard"), members.of("replica")
    mean, p95, largest = staleness(shards)
    return SupervisorView(
        now=now,
        seconds=figures.seconds(now),
        training_seconds=figures.training_seconds(now),
        phase=phase,
        stop_reason=ending.reason,
        samples=figures.samples,
        total_samples=None if stop is None else stop.total_samples,
        eta_seconds=None if stop is None else stop.eta_seconds(reached),
        progress=None if stop is None else stop.progress(reached),
        step=figures.step,
        samples_per_second=figures.samples_per_second,
        loss=figures.loss,
        metric_name=figures.metric_name,
        metric=figures.metric,
        held_out_loss=figures.held_out_loss,
        best_metric=figures.best_metric,
        best_metric_seconds=figures.best_metric_seconds,
        staleness_mean=mean,
        staleness_p95=p95,
        staleness_max=largest,
        bytes_in=total(shards, "bytes_in"),
        bytes_out=total(shards, "bytes_out"),
        pushes_applied=total(shards, "pushes_applied"),
        pushes_refused=total(shards, "pushes_refused"),
        pushes_lost=total(replicas, "pushes_lost"),
        roles=tuple(role_view(record, now) for record in members),
        history=tuple(figures.history),
        messages=tuple(figures.messages),
    )
