"""What the supervisor that takes over a job must know of the one that was killed.

Roles go on without supervisor for a while. From here the next one knows which roles there are, and
their incarnations. Where they listen, they say themselves: they join again.
"""

from typing import Final, Protocol

import msgspec

from distbelief.protocol import Offer
from distbelief.protocol.role import Address, Seconds, SetTimer
from distbelief.supervisor.allowances import Allowances
from distbelief.supervisor.dealer import Hand
from distbelief.supervisor.failover import ShardFailover, ShardState
from distbelief.supervisor.hosts import HERE
from distbelief.supervisor.membership import Membership, Presence, RoleRecord
from distbelief.supervisor.metrics import JobMetrics, PreviousTotals
from distbelief.supervisor.output import Output
from distbelief.supervisor.periodic_requests import Evaluations
from distbelief.supervisor.scheduler import Scheduler
from distbelief.supervisor.supervisor_config import SupervisorConfig
from distbelief.supervisor.view import JobView


LOST: Final = "supervisor:lost:"  # prefix of the timer after which a role counts as dead


class RoleState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    incarnation: int
    presence: Presence
    host: str  # that runs it; "" for none
    restarts: int
    restarts_in_a_row: int
    step: int
    counters: dict[str, float]
    past: dict[str, float]


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    offer: Offer
    bandwidth: float


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: int  # of the supervisor; the first of all roles
    before: PreviousTotals  # of previous sessions
    view: JobView
    samples: dict[str, int]  # of each replica
    n_evaluations: int  # requested so far
    warm_start_left: int  # steps
    roles: tuple[RoleState, ...]
    hosts: tuple[HostState, ...]  # that have joined, and are ready
    shards: dict[str, ShardState]
    hands: dict[Address, Hand]  # of replicas, where data are dealt
    # What only the driver knows.
    run: str = ""  # as hosts know it
    files: str = ""  # where roles on other hosts find checkpoints
    alive: dict[Address, int] = {}  # incarnations of the roles whose processes live on this host


UNTOLD_MAX: Final = 1 << 20
"""Evaluations that may have been requested since a handover was written: numbers go on beyond."""


class Parts(Protocol):
    """What of a supervisor is handed over."""

    members: Membership
    metrics: JobMetrics
    out: Output
    failover: ShardFailover
    evaluations: Evaluations
    scheduler: Scheduler
    allowances: Allowances


def handover_of(supervisor: Parts, config: SupervisorConfig, view: JobView) -> Handover:
    hosts = supervisor.scheduler.hosts
    return Handover(
        incarnation=config.first_incarnation,
        before=config.before,
        view=view,
        samples=supervisor.metrics.samples_of,
        n_evaluations=supervisor.evaluations.n_requests,
        warm_start_left=supervisor.allowances.warm_start_left,
        roles=tuple(
            RoleState(
                name=record.name,
                incarnation=record.incarnation,
                presence=record.presence,
                host="" if (host := hosts.at(record.name)) is None else host.name,
                restarts=record.restarts,
                restarts_in_a_row=record.restarts_in_a_row,
                step=record.step,
                counters=record.counters,
                past=record.past,
            )
            for record in supervisor.members
        ),
        hosts=tuple(
            HostState(name=host.name, offer=host.offer, bandwidth=host.bandwidth)
            for host in hosts.joined.values()
            if host.present and host.ready
        ),
        shards=supervisor.failover.states(),
        hands=dealer.hands if (dealer := supervisor.allowances.dealer) is not None else {},
    )


def start_roles(supervisor: Parts, handover: Handover | None, now: Seconds) -> None:
    """Start the roles of a supervisor that begins; it goes on with those that run already."""
    if handover is None:
        supervisor.scheduler.form_replicas()
        for record in supervisor.members:
            record.begin_incarnation(record.incarnation, now)
            supervisor.scheduler.launch(record)
        return
    supervisor.metrics.adopt(handover.view, handover.samples, now)
    supervisor.evaluations.n_requests = handover.n_evaluations + UNTOLD_MAX
    supervisor.allowances.warm_start_left = handover.warm_start_left
    supervisor.failover.adopt(handover.shards)
    if supervisor.allowances.dealer is not None:
        supervisor.allowances.dealer.adopt(handover.hands)
    for host in handover.hosts:
        supervisor.scheduler.adopt_host(Address(host.name), host.offer, host.bandwidth)
    known = {role.name: role for role in handover.roles}
    for record in supervisor.members:
        _adopt_role(supervisor, record, known[record.name], handover, now)


def _adopt_role(
    supervisor: Parts, record: RoleRecord, state: RoleState, handover: Handover, now: Seconds
) -> None:
    is_here = state.host in {"", HERE}
    n = handover.alive.get(record.name, 0) if is_here else state.incarnation
    record.begin_incarnation(max(n, state.incarnation), now)
    record.restarts, record.restarts_in_a_row = state.restarts, state.restarts_in_a_row
    record.past = dict(state.past)
    if state.presence in {Presence.FINISHED, Presence.LEFT_OUT}:
        record.presence = state.presence
    elif state.presence is Presence.WAITING and not n:
        supervisor.scheduler.launch(record)
    else:
        if n == state.incarnation:
            record.step, record.counters = state.step, dict(state.counters)
        record.begins = True
        supervisor.scheduler.adopt(record, Address(state.host or HERE))
        if not n:
            record.end = "ended while there was no supervisor"
            supervisor.out.add(SetTimer(name=f"{LOST}{record.name}", at=now))
