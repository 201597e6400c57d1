"""The supervisor's view of its job, made from all that it knows."""

import math
from collections.abc import Iterable
from typing import Final

from distbelief.job.display.view import Phase, RoleView, SupervisorView
from distbelief.job.supervision.books import Books
from distbelief.job.supervision.membership import Membership, Presence, RoleRecord
from distbelief.roles import Address, Seconds


COUNT_MAX: Final = 2.0**53
"""Beyond it a counter, which is a float, counts no more."""


def role_view(
    record: RoleRecord, now: Seconds, *, part: str | None, restarts_before: int = 0
) -> RoleView:
    """Return one role's row.

    Args:
        record: Of the role.
        now: The present.
        part: What it is in a pair of copies: "leading", ...
        restarts_before: In former lives of the run.
    """
    state = record.presence.value
    if record.presence is Presence.PRESENT:
        state = part or record.state or state
    elif record.presence is Presence.LAUNCHED and record.restarts:
        state = "restarting"
    heard = record.presence is Presence.PRESENT
    return RoleView(
        name=record.name,
        state=state,
        rate=record.rate.per_second if record.is_alive else None,
        last_heartbeat_age=max(0.0, now - record.heard_at) if heard else None,
        restarts=restarts_before + record.restarts,
        pid=record.pid if record.is_alive else None,
        # JSON has no NaN.
        counters={k: v for k, v in record.counters.items() if math.isfinite(v)},
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
        counters["pushes_applied"] * counters.get("staleness_mean", 0.0) for counters in told
    )
    return (
        weighted / n_pushes,
        max(counters.get("staleness_p95", 0.0) for counters in told),
        max(counters.get("staleness_max", 0.0) for counters in told),
    )


def total(records: Iterable[RoleRecord], counter: str) -> int:
    """Return a counter over these roles, in all their lives.

    It is their own word: what can be no count is none.
    """
    told = (record.total(counter) for record in records)
    return int(sum(n for n in told if 0.0 <= n <= COUNT_MAX))


def figures_of(books: Books) -> dict[str, float]:
    """Return what the coordinator counts, if there is one, as far as it is shown."""
    coordinator = books.members.coordinator
    counters = {} if coordinator is None else coordinator.counters
    return {
        name: counters[name]
        for name in books.config.fields
        if math.isfinite(counters.get(name, math.nan))
    }


def _by_shard(members: Membership) -> Iterable[list[RoleRecord]]:
    """Return the copies of each shard."""
    found: dict[Address, list[RoleRecord]] = {}
    for record in members.of("shard"):
        found.setdefault(record.shard, []).append(record)
    return found.values()


def _applied(books: Books) -> int:
    """Return the pushes that every shard has."""
    if books.members.coordinator is None:
        return books.pairs.pushes_applied
    # Its orders are what makes clocks rise; what is pushed waits to be folded.
    taken = (total(copies, "pushes_applied") for copies in _by_shard(books.members))
    return books.figures.before.pushes_applied + min(taken, default=0)


def view_of(books: Books, *, phase: Phase, now: Seconds) -> SupervisorView:
    """Return the whole job at one moment.

    What is sent and received is taken from the clients' counters: nobody tells a shard
    of reads from shared memory, and what goes to its other copy is not meant.

    A push is one push, however many shards it goes to. It is refused if some shard says
    that it came too late: at least as many as the shard has refused that refused most.

    Pushes lost are known from two sides, neither of which knows of all: replicas miss
    what they pushed in their present life, shards' clocks fall behind what was heard of
    them. The larger count is shown.
    """
    figures, members, pairs = books.figures, books.members, books.pairs
    before = figures.before
    missed = total(members.training, "pushes_lost")
    lost = max(missed, pairs.pushes_lost)
    if members.coordinator is not None:
        lost = 0  # what was pushed for a sum is pushed again, until the sum is whole
    refused = (total(copies, "pushes_refused") for copies in _by_shard(members))
    stop = books.config.stop
    reached = figures.reached(now)
    shards = members.of("shard")
    clients = [record for record in members if record.kind != "shard"]
    stale = members.coordinator is None  # else every set is of the point asked for
    mean, p95, largest = staleness([r for r in shards if pairs.leads(r) and stale])
    return SupervisorView(
        now=now,
        seconds=figures.seconds(now),
        training_seconds=figures.training_seconds(now),
        phase=phase,
        stop_reason=books.ending.reason,
        error=None if books.ending.interrupted else books.ending.error,
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
        bytes_in=before.bytes_in + total(clients, "bytes_out"),
        bytes_out=before.bytes_out + total(clients, "bytes_in"),
        pushes_applied=_applied(books),
        pushes_refused=before.pushes_refused + max(refused, default=0),
        pushes_lost=None if before.pushes_lost is None else before.pushes_lost + lost,
        figures=figures_of(books),
        roles=tuple(
            role_view(
                record,
                now,
                part=pairs.part(record),
                restarts_before=before.restarts.get(record.name, 0),
            )
            for record in members
        ),
        history=tuple(figures.history),
        messages=tuple(figures.messages),
    )
