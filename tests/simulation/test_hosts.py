"""Hosts that run shards come, die and leave: nothing acknowledged is lost, copies stay apart."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from distbelief.config.job import ShardPlacement
from distbelief.protocol.role import Address
from distbelief.supervisor import role_placement as placement_module
from distbelief.supervisor.hosts import HERE, Host, HostTable
from distbelief.supervisor.scheduler import Scheduler
from tests.simulation.hosted import N_HOSTS_MAX, HostedJob
from tests.simulation.jobs import seeds
from tests.simulation.variants import Patch, Variant, failure_of


POLICIES: tuple[ShardPlacement, ...] = ("spread", "beside replicas")


def end(job: HostedJob) -> None:
    """Let it train a little more, end it, and look at what it has saved."""
    job.train(40)
    job.supervisor.request_stop("enough")
    assert job.run() is None
    assert job.view.pushes_lost == 0, job.messages
    job.acknowledged.check(job)


# ------------------------------------------------------------------ single events


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_are_on_different_hosts_from_the_start(policy: ShardPlacement) -> None:
    job = HostedJob(seed=0, placement=policy, n_awaited=2)
    job.run_until(job.is_whole)
    for one, other in (("shard-0", "shard-0b"), ("shard-1", "shard-1b")):
        assert job.host_of(Address(one)) != job.host_of(Address(other))
    at = {role.name: role.at for role in job.view.roles}
    assert {at["shard-0"], at["shard-0b"], at["shard-1"], at["shard-1b"]} == {"", "0", "1"}
    end(job)


@pytest.mark.parametrize("part", ["primary", "backup"])
def test_a_host_is_lost_with_a_copy_of_a_shard(part: str) -> None:
    """The other one serves at once, and gets a new backup on a host that is there."""
    job = HostedJob(seed=1, placement="spread", n_awaited=3)
    job.run_until(job.is_whole)
    job.train(40)
    copy = next(
        name for name in job.copies if job.state(name) == part and job.host_of(name) != HERE
    )
    lost = job.host_of(copy)
    assert lost is not None
    job.kill_host(lost)
    job.run_until(lambda: job.host_of(copy) not in {lost, None}, within=10.0)
    job.run_until(job.is_whole)
    end(job)


def test_a_backup_leaves_the_host_of_its_primary_for_one_that_joins() -> None:
    job = HostedJob(seed=2, placement="spread", n_awaited=0)
    job.run_until(job.is_whole)
    assert {job.host_of(name) for name in job.copies} == {HERE}
    told = [text for text in job.messages if "there is no other" in text]
    assert told == ["shard 0 and shard 0b are on one host: there is no other"]  # once
    job.come()
    job.run_until(lambda: {job.host_of(name) for name in job.copies} != {HERE}, within=5.0)
    job.run_until(job.is_whole)
    end(job)


def test_copies_are_in_different_domains_if_there_are_two() -> None:
    """Of three hosts two are in one rack: no shard has both copies there."""
    job = HostedJob(
        seed=3, placement="spread", n_awaited=3, n_shards=3, domains=("rack", "rack", "other")
    )
    job.run_until(job.is_whole)
    hosts = job.supervisor.scheduler.hosts
    for shard in job.shards:
        one, other = hosts.at(shard), hosts.at(Address(f"{shard}b"))
        assert one is not None
        assert other is not None
        assert one.domain != other.domain


@pytest.mark.parametrize("policy", POLICIES)
def test_hosts_that_leave_hand_their_shards_over(policy: ShardPlacement) -> None:
    """One after the other, until the supervisor's is the last one."""
    job = HostedJob(seed=4, placement=policy, n_awaited=3)
    job.run_until(job.is_whole)
    for host in job.hosts:
        job.train(40)
        job.leave(host)
        job.run_until(partial(job.has_left, host), within=25.0)
        job.run_until(job.is_whole)
    assert {job.host_of(name) for name in job.copies} == {HERE}
    end(job)


def test_a_primary_waits_for_its_backup_before_it_leaves() -> None:
    """Its other copy had just been restarted: its host left with what nobody else had."""
    job = HostedJob(seed=5, placement="spread", n_awaited=2, n_shards=1)
    job.run_until(job.is_whole)
    job.train(40)
    primary, backup = job.copy_that_is("primary"), job.copy_that_is("backup")
    host = job.host_of(primary)
    assert host not in {HERE, None}
    job.cluster.kill(backup)
    assert host is not None
    job.leave(host)
    job.run_until(partial(job.has_left, host), within=25.0)
    assert job.copy_that_is("primary") == backup
    end(job)


def test_a_backup_waits_for_its_primary_before_it_leaves() -> None:
    """The host of its primary had just died: its own left with what nobody else had any more."""
    job = HostedJob(seed=7, placement="spread", n_awaited=3, n_shards=1)
    job.run_until(job.is_whole)
    job.train(40)
    host, other = (job.host_of(job.copy_that_is(part)) for part in ("backup", "primary"))
    assert host not in {HERE, None}
    assert other not in {HERE, None}
    assert host is not None
    assert other is not None
    job.kill_host(other)
    job.leave(host)
    job.run_until(partial(job.has_left, host), within=25.0)
    end(job)


def test_a_single_copy_saves_before_its_host_leaves() -> None:
    """It was ended at once: what it had acknowledged after its checkpoint was lost."""
    job = HostedJob(seed=6, placement="spread", n_awaited=2, shard_copies=1)
    job.run_until(lambda: job.phase == "training")
    for host in job.hosts:
        job.train(40)
        job.leave(host)
        job.run_until(partial(job.has_left, host), within=25.0)
    assert {job.host_of(name) for name in job.copies} == {HERE}
    end(job)


# -------------------------------------------------------------------- random ones


def play(seed: int, *, n_blows: int = 3) -> None:
    """Hosts of a job die, leave and come; whenever one dies, all shards have a backup."""
    stream = np.random.default_rng([seed, 0x4057])
    job = HostedJob(
        seed=seed,
        placement=POLICIES[int(stream.integers(2))],
        n_awaited=int(stream.integers(1, 4)),
        n_replicas=int(stream.integers(1, 4)),
        n_shards=int(stream.integers(1, 4)),
        slots_here=int(stream.integers(1, 3)),
    )
    for _ in range(n_blows):
        job.run_until(job.is_whole, within=60.0)
        job.cluster.run(until=job.now + float(stream.uniform(0.0, 2.0)))
        _blow(job, stream)
    job.run_until(job.is_whole, within=60.0)
    end(job)


def _blow(job: HostedJob, stream: np.random.Generator) -> None:
    hosts = job.hosts
    host = hosts[int(stream.integers(len(hosts)))] if hosts else None
    copy = job.copies[int(stream.integers(len(job.copies)))]
    match int(stream.integers(5)):
        case 0 | 1 if host is not None and job.is_whole():
            job.kill_host(host)
        case 2 if host is not None:
            job.leave(host)
        case 3 if job.is_whole():
            job.cluster.kill(copy)
        case _ if job.n_hosts < N_HOSTS_MAX:
            job.come()
        case _:
            pass


@pytest.mark.parametrize("seed", seeds(4, of=400))
def test_whatever_befalls_its_hosts_a_job_loses_nothing(seed: int) -> None:
    play(seed)


# ------------------------------------------------------------------ broken variants


def backup_beside_its_primary(patch: Patch) -> None:
    """A copy goes where it may, whatever host the other one is on."""
    patch.setattr(placement_module, "apart_from", lambda _other, hosts: hosts)


def shards_go_to_hosts_that_are_lost(patch: Patch) -> None:
    """A host that is gone still counts."""
    usable = property(lambda self: [self.here, *self.joined.values()])
    patch.setattr(HostTable, "usable", usable)
    patch.setattr(Host, "takes_roles", property(lambda self: bool(self.slots)))


def primary_leaves_at_once(patch: Patch) -> None:
    """A host ends a primary, in sync or not."""
    patch.setattr(Scheduler, "_ends_in_order", lambda *_: False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "scene"),
    [
        (backup_beside_its_primary, partial(play, 2)),
        (shards_go_to_hosts_that_are_lost, partial(play, 0)),
        (primary_leaves_at_once, test_a_primary_waits_for_its_backup_before_it_leaves),
        (primary_leaves_at_once, test_a_single_copy_saves_before_its_host_leaves),
    ],
)
def test_a_broken_rule_of_placement_is_noticed(
    variant: Variant, scene: Callable[[], object]
) -> None:
    assert failure_of(variant, scene) is not None
