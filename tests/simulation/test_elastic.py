"""Elastic jobs with dealt data: hosts join, leave and die with shards and replicas on them.

ExactlyOnceBySample and NoSampleLost (`dealt`), CopiesApart and OnThoseThere (`hosted`).
"""

from collections.abc import Mapping
from functools import partial
from typing import TypeVar, cast

import numpy as np
import pytest

from distbelief.config.job import ShardPlacement
from distbelief.core.spans import NOTHING, Spans
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.protocol.role import SUPERVISOR, Address
from distbelief.simulation.faults import CutOff, Pause
from distbelief.supervisor import role_placement as placement_module
from distbelief.supervisor.dealer import Dealer
from distbelief.supervisor.hosts import ClusterConfig
from distbelief.supervisor.membership import RoleRecord
from distbelief.supervisor.scheduler import Scheduler
from distbelief.supervisor.shutdown import ShutdownStage
from tests.simulation.dealt import DealtJob
from tests.simulation.hosted import N_HOSTS_MAX, HostedJob
from tests.simulation.random_faults import message_faults
from tests.simulation.test_dealt import VARIANTS as DEALT
from tests.simulation.test_seeds import chunks, name, play_seeds
from tests.simulation.variants import Patch, Variants, assert_noticed, failure_of


T = TypeVar("T")

FILE = "tests/simulation/test_elastic.py"
PLACEMENTS: tuple[ShardPlacement, ...] = ("spread", "beside replicas")
HORIZON = 12.0  # until then messages are lost, late or doubled
SECONDS_MAX = 200.0


def elastic_job(seed: int, stream: np.random.Generator) -> DealtJob:
    """Return a job whose replicas, shards, hosts, data and exchange are drawn."""

    def pick(*choices: T) -> T:
        return choices[int(stream.integers(len(choices)))]

    n_hosts, slots_here = pick(0, 1, 2, 3), pick(1, 2)
    exchange = pick(
        ExchangePolicy(),
        ExchangePolicy(),
        ExchangePolicy(staleness=pick(0, 2)),
        ExchangePolicy(staleness=0, round=Round(quorum=pick(1.0, 0.5))),
    )
    return DealtJob(
        seed=seed,
        cluster=partial(
            HostedJob,
            placement=pick(*PLACEMENTS),
            n_awaited=n_hosts,
            slots_here=slots_here,
            replicas_min=pick(1, min(2, slots_here)),
        ),
        n_samples=pick(130, 260, 401),
        n_epochs=pick(2, 3.5, 5),
        batch_size=pick(4, 8, 12),
        n_push=pick(1, 1, 2),
        n_replicas=pick(1, 2, 4, 6),
        n_shards=pick(1, 2, 3),
        shard_copies=pick(1, 2, 2),
        snapshot_every=pick(0.7, 1.5, 5.0),
        exchange=exchange,
        faults=message_faults(stream, horizon=HORIZON, intensity=pick(0.0, 0.0, 0.5)),
    )


def play(seed: int) -> DealtJob:
    """Let a job be struck a few times, whatever state it is in; it ends, and no sample is lost."""
    stream = np.random.default_rng([seed, 0xE1A5])
    dealt = elastic_job(seed, stream)
    job = cast("HostedJob", dealt.job)
    job.run_until(lambda: job.phase == "training")
    for _ in range(int(stream.integers(1, 7))):
        _strike_in(float(stream.exponential(1.0)), dealt, stream)
    if stream.random() < 0.3:
        job.run_until(lambda: dealt.is_over, within=SECONDS_MAX)
        for _ in range(2):  # between the last sample and the last checkpoint
            _strike_in(float(stream.exponential(0.02)), dealt, stream)
    job.run_until(lambda: SUPERVISOR in job.cluster.halted, within=SECONDS_MAX)
    assert job.cluster.halted[SUPERVISOR] is None, job.cluster.halted[SUPERVISOR]
    dealt.check_end(Spans([(0, dealt.total)]))
    dealt.check_saved()
    return dealt


def _strike_in(seconds: float, dealt: DealtJob, stream: np.random.Generator) -> None:
    """Let a host join, leave, die, stand still or be cut off, or let a role die."""
    job = cast("HostedJob", dealt.job)
    simulation = job.cluster
    simulation.run(until=simulation.now + seconds)
    if SUPERVISOR in simulation.halted:
        return
    hosts, seconds = job.hosts, float(stream.exponential(3.0))
    host = hosts[int(stream.integers(len(hosts)))] if hosts else None
    role = [*job.copies, *job.replicas][int(stream.integers(len(job.copies + job.replicas)))]
    struck = () if host is None else (host, *job.roles_on(host))
    what = int(stream.integers(8))
    if what == 6:
        struck = (role,) if simulation.is_alive(role) else ()
    lives = {(name, simulation.incarnation(name)) for name in struck}
    if what in {2, 3} and host is not None:
        if host in job.asked:  # asked twice, a host ends at once, with its roles (seed 1513)
            dealt.struck |= lives
        job.leave(host)
    elif what == 7 or not struck:
        if job.n_hosts < N_HOSTS_MAX:
            job.come()
    else:
        dealt.struck |= lives
        for name in struck:
            if what == 4:
                simulation.inject(Pause(at=simulation.now, role=name, seconds=seconds))
            elif what == 5:
                cut = CutOff(at=simulation.now, a=name, seconds=seconds, loses=True)
                simulation.inject(cut)
            else:
                simulation.kill(name)


TOLD = {
    "hosts lost with roles": "lost with it",
    "hosts left": "has left",
    "roles waited for a host": "waits for a host",
    "backups moved": "moves to another host",
    "takeovers": "takes over",
    "shards restored": "restarting it from",
    "roles silent": "silent for",
}
SELDOM = (*TOLD, "two copies", "hosts joined later")


def sights(seed: int) -> Mapping[str, int]:
    """Play a seed; return what happened in it."""
    dealt = play(seed)
    job = cast("HostedJob", dealt.job)
    told = " ".join(job.messages)
    return {
        **{what: text in told for what, text in TOLD.items()},
        "two copies": len(job.copies) > len(job.shards),
        "hosts joined later": job.n_hosts - job.n_awaited,
        "shards without a copy after the end": len(dealt.fell_back),
    }


def play_all(seeds: range) -> None:
    play_seeds(seeds, sights, file=FILE, seldom=SELDOM, share=0.03)


@pytest.mark.parametrize("seeds", [range(3)], ids=name)
def test_whatever_befalls_an_elastic_job_each_sample_counts_once(seeds: range) -> None:
    play_all(seeds)


def hosts_leave_at_the_end() -> None:
    """When the last sample is trained, and no checkpoint has it, all hosts but one leave."""
    cluster = partial(HostedJob, placement="spread", n_awaited=2)
    dealt = DealtJob(n_samples=130, cluster=cluster, shard_copies=1, snapshot_every=1e3)
    dealt.job.run_until(lambda: dealt.is_over, within=SECONDS_MAX)
    job = cast("HostedJob", dealt.job)
    for host in job.hosts:
        job.leave(host)
    assert job.run() is None
    dealt.check_saved()
    assert not dealt.fell_back


def test_hosts_that_leave_at_the_end_save_first() -> None:
    hosts_leave_at_the_end()


def test_nobody_waits_for_a_worker_whose_last_message_comes_late() -> None:
    """Its host stood still and was given up; a last message left it before its processes ended.

    So its shards took it for one that works, and the others waited for it for ever.
    """
    cluster = partial(HostedJob, placement="here", n_awaited=1)
    dealt = DealtJob(n_replicas=2, cluster=cluster, exchange=ExchangePolicy(staleness=0))
    job, simulation = cast("HostedJob", dealt.job), dealt.job.cluster
    job.run_until(lambda: job.n_samples > 20)
    (host,) = job.hosts
    for role, seconds in ((host, 8.5), (Address("replica-1"), 8.4)):
        simulation.inject(Pause(at=simulation.now, role=role, seconds=seconds))
    job.leave(host)
    job.run_until(lambda: SUPERVISOR in simulation.halted, within=60.0)
    assert "replica 1 waits for a host with free cores (distbelief join)" in job.messages
    dealt.check_end(Spans([(0, dealt.total)]))


def test_samples_are_lost_only_with_both_copies_before_the_last_checkpoint() -> None:
    """Seen in random runs: what both copies had, and no checkpoint, is gone for good."""
    cluster = partial(HostedJob, placement="spread", n_awaited=2)
    dealt = DealtJob(n_samples=130, cluster=cluster, shard_copies=2, snapshot_every=1e3)
    dealt.job.run_until(lambda: dealt.is_over, within=SECONDS_MAX)
    both = {(name, dealt.job.cluster.incarnation(name)) for name in dealt.job.copies[:2]}
    for copy, _ in both:
        dealt.job.cluster.kill(copy)
    assert dealt.job.run() is None
    assert dealt.fell_back == {"shard-0": NOTHING}
    with pytest.raises(AssertionError, match="ended with samples not saved"):
        dealt.check_saved()
    dealt.struck |= both
    dealt.check_saved()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", chunks(range(10_000), 100), ids=name)
def test_each_sample_counts_once_for_ten_thousand_seeds(seeds: range) -> None:
    play_all(seeds)


# ------------------------------------------------------------------- broken variants


VARIANTS = Variants[int]()
for known, seed in (("done when one shard has it", 13), ("backup does not know the positions", 20)):
    VARIANTS[known] = DEALT[known]
    VARIANTS.caught_by[known] = seed


@VARIANTS(caught_by=1)
def copies_on_one_host(patch: Patch) -> None:
    patch.setattr(placement_module, "apart_from", lambda _other, hosts: hosts)


@VARIANTS(caught_by=0)
def ranges_of_those_who_left_are_not_dealt_again(patch: Patch) -> None:
    """What a replica holds stays with it when it is gone, and when it begins anew."""
    patch.setattr(Dealer, "began", lambda *_: None)
    pool = Dealer._pooled

    def keep(self: Dealer) -> Spans:
        held = [span for hand in self.hands.values() for span in hand.held.values()]
        return pool(self) - Spans(held)

    patch.setattr(Dealer, "_pooled", keep)


def host_leaves_with_the_last_samples(patch: Patch) -> None:
    """After the job's end, a shard leaves with its host before its checkpoint is saved."""
    whole = Scheduler._ends_in_order

    def ends(self: Scheduler, record: RoleRecord, cluster: ClusterConfig) -> bool:
        return self._shutdown.stage is ShutdownStage.RUN and whole(self, record, cluster)

    patch.setattr(Scheduler, "_ends_in_order", ends)


@pytest.mark.slow
@pytest.mark.timeout(300)  # a changed scene makes the test search for a new seed
@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    assert_noticed(name, VARIANTS, play)


def test_samples_that_leave_with_a_host_are_noticed() -> None:
    assert failure_of(host_leaves_with_the_last_samples, hosts_leave_at_the_end)
