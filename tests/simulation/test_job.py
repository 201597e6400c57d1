"""Whole jobs in virtual time: order, faults, ends. DB-12, and the warm start of 4.1."""

import msgspec
import pytest

from distbelief.job.configuration.sections import StopTable
from distbelief.roles import SUPERVISOR, Address
from distbelief.simulation.faults import DiskFull, Drop, Kill, Pause, random_faults
from tests.simulation.jobs import EXAMPLES, TASK, JobCluster, seeds


LONG = StopTable(seconds=1e6)


def test_a_job_runs_to_its_end_and_leaves_everything_behind() -> None:
    job = JobCluster(stop=StopTable(epochs=4))
    assert job.run() is None
    view = job.view
    assert view.phase == "done"
    assert view.stop_reason == "4 epochs done"
    assert view.samples >= 240
    assert view.pushes_lost == 0
    assert view.metric is not None
    for shard in job.shards:
        assert job.simulation.disk.newest(shard) is not None
    assert {role.state for role in view.roles} == {"done"}
    assert view.pushes_applied == 2 * view.step  # each push goes to both shards


def test_the_last_evaluation_takes_all_samples() -> None:
    job = JobCluster(stop=StopTable(epochs=2), evaluate_every=1e3)
    assert job.run() is None
    assert job.view.metric is not None
    n = job.member("evaluator").status()[1]["evaluations"]
    assert n == 1


def test_a_job_without_test_data_has_no_evaluator() -> None:
    job = JobCluster(
        stop=StopTable(epochs=2), task=msgspec.structs.replace(TASK, test=None)
    )
    assert job.run() is None
    assert job.view.metric is None
    assert [role.name for role in job.view.roles if role.name == "evaluator"] == []


def test_the_warm_start_lets_replica_0_alone_at_first() -> None:
    job = JobCluster(stop=LONG, n_replicas=3, warm_start_steps=10)
    steps = []

    def others() -> list[int]:
        return [job.samples("replica-1"), job.samples("replica-2")]

    job.run_until(lambda: job.view.phase == "warm start")
    job.run_until(lambda: job.view.phase == "training")
    steps.append(job.samples("replica-0") // 4)
    assert others() == [0, 0]
    assert steps[0] >= 10
    job.run_until(lambda: min(others()) > 0)


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        (StopTable(samples=100), "100 samples done"),
        (StopTable(seconds=3.0), "3.0 s of training are over"),
        (StopTable(accuracy=0.01), "held-out accuracy"),
        (StopTable(loss=100.0), "held-out loss"),
        (StopTable(samples=10**9, seconds=2.0), "2.0 s of training are over"),
    ],
)
def test_whichever_rule_is_met_first_ends_the_job(stop: StopTable, reason: str) -> None:
    job = JobCluster(stop=stop)
    assert job.run() is None
    assert (job.view.stop_reason or "").startswith(reason)


def test_replicas_that_have_taken_all_their_steps_end_the_job() -> None:
    job = JobCluster(stop=LONG, max_steps=6)
    assert job.run() is None
    assert job.view.stop_reason == "every replica has taken all its steps"
    assert job.view.step == 12
    assert job.restarts("replica-0") == 0


# ---------------------------------------------------------------------------- faults


def test_a_replica_that_dies_comes_back_while_the_others_go_on() -> None:
    """DB-12."""
    job = JobCluster(stop=LONG, faults=[Kill(at=3.0, role=Address("replica-1"))])
    job.run_until(lambda: job.restarts("replica-1") == 1)
    before = job.samples("replica-0")
    assert "replica 1 killed: restarting it" in job.told
    job.run_until(lambda: job.state("replica-1") == "computing")
    assert job.samples("replica-0") > before
    assert job.samples("replica-1") > 0
    assert job.view.pushes_lost == 0


def test_a_replica_that_dies_too_often_is_left_out() -> None:
    """DB-12."""
    job = JobCluster(stop=LONG)
    for n in range(4):
        job.run_until(lambda: job.state("replica-1") == "computing")
        assert job.restarts("replica-1") == n
        job.simulation.kill(Address("replica-1"))
        job.simulation.run(until=job.simulation.now + 0.2)
    assert job.state("replica-1") == "lost, left out"
    before = job.samples("replica-0")
    job.simulation.run(until=job.simulation.now + 5.0)
    assert job.samples("replica-0") > before
    job.interrupt()
    assert job.run() == "interrupted"


def test_a_job_that_has_lost_every_replica_fails() -> None:
    job = JobCluster(stop=LONG, n_replicas=1)
    for _ in range(4):
        job.run_until(lambda: job.state("replica-0") == "computing")
        job.simulation.kill(Address("replica-0"))
        job.simulation.run(until=job.simulation.now + 0.2)
    assert (job.run() or "").startswith("every replica is lost")
    assert job.simulation.disk.newest(job.shards[0]) is not None


@pytest.mark.parametrize("host", ["host-0", ""], ids=["one host", "block messages"])
def test_a_shard_that_dies_comes_back_from_its_snapshot(host: str) -> None:
    job = JobCluster(stop=StopTable(samples=2000), host=host)
    job.run_until(lambda: job.simulation.disk.newest(job.shards[0]) is not None)
    job.simulation.run(until=job.simulation.now + 1.0)
    job.simulation.kill(job.shards[0])
    job.run_until(lambda: job.restarts("shard-0") == 1)
    said = [text for text in job.told if "shard 0" in text]
    assert "restarting it from snapshot 00001 (1." in said[0]
    assert "acknowledged pushes will be lost" in said[0]
    assert job.run() is None
    assert (job.view.pushes_lost or 0) > 0
    assert job.restarts("shard-1") == 0
    assert job.restarts("replica-0") == 0


def test_pushes_of_a_replica_that_died_with_the_shard_are_lost() -> None:
    """It was "0 pushes lost": only the replica that had made them could tell."""
    job = JobCluster(stop=StopTable(samples=1000), n_replicas=1, snapshot_every=1e3)
    job.run_until(lambda: job.view.samples > 400)
    n_applied = job.view.pushes_applied
    job.simulation.kill(Address("replica-0"))
    job.simulation.kill(job.shards[0])
    assert job.run() is None
    view = job.view
    assert (view.pushes_lost or 0) >= n_applied / 2 - 1
    clocks = [role.counters["clock"] for role in view.roles if "shard" in role.name]
    assert view.pushes_applied == sum(clocks)


def test_a_shard_that_dies_before_its_first_snapshot_begins_anew() -> None:
    job = JobCluster(stop=StopTable(samples=400), snapshot_every=1e3)
    job.run_until(lambda: job.view.samples > 40)
    job.simulation.kill(job.shards[1])
    job.run_until(lambda: job.restarts("shard-1") == 1)
    assert any("from its initial values" in text for text in job.told)
    assert job.run() is None


def test_an_evaluator_that_dies_too_often_is_done_without() -> None:
    job = JobCluster(stop=StopTable(seconds=20.0))
    for n in range(3):
        job.run_until(lambda: job.state("evaluator") == "waiting")
        assert job.restarts("evaluator") == n
        job.simulation.kill(Address("evaluator"))
        job.simulation.run(until=job.simulation.now + 0.2)
    assert job.run() is None
    assert any("evaluator" in text and "left out" in text for text in job.told)


def test_a_silent_role_is_named_and_greeted_when_it_is_back() -> None:
    pause = Pause(at=5.0, role=Address("replica-1"), seconds=6.0)
    job = JobCluster(stop=LONG, faults=[pause])
    job.run_until(lambda: any("silent" in text for text in job.told))
    assert job.simulation.now < 5.0 + 3.0 + 1.0
    assert job.told[-1].startswith("replica 1 silent for 3.")
    assert job.told[-1].endswith("restarting it")
    job.run_until(lambda: any("is back" in text for text in job.told))
    assert job.restarts("replica-1") == 0


def test_a_role_silent_for_long_is_ended_and_restarted() -> None:
    pause = Pause(at=5.0, role=Address("shard-0"), seconds=1000.0)
    job = JobCluster(stop=LONG, faults=[pause])
    job.run_until(lambda: job.restarts("shard-0") == 1)
    assert job.simulation.now < 5.0 + 10.0 + 1.0
    before = job.view.samples
    job.run_until(lambda: job.view.samples > before + 100)


def test_a_supervisor_that_stood_still_blames_nobody() -> None:
    pause = Pause(at=5.0, role=SUPERVISOR, seconds=12.0)
    job = JobCluster(stop=LONG, faults=[pause])
    job.simulation.run(until=25.0)
    assert not [text for text in job.told if "silent" in text]


def test_roles_end_when_their_supervisor_is_gone() -> None:
    job = JobCluster(stop=LONG, faults=[Kill(at=5.0, role=SUPERVISOR)])
    job.simulation.run(until=5.0)
    assert job.n_alive == 5
    job.simulation.run(until=5.0 + 17.0)
    assert job.n_alive == 0
    assert "no word from the supervisor" in (
        job.simulation.halted[Address("replica-0")] or ""
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_job_survives_a_lossy_network(seed: int) -> None:
    job = JobCluster(
        stop=StopTable(samples=400), seed=seed, faults=[Drop(probability=0.2)]
    )
    assert job.run() is None
    assert job.view.samples >= 400
    assert sum(role.restarts for role in job.view.roles) == 0


@pytest.mark.parametrize("seed", seeds(6, of=24))
def test_a_job_survives_whatever_heals(seed: int) -> None:
    job = JobCluster(stop=StopTable(samples=800), seed=seed, warm_start_steps=5)
    roles = [*job.shards, *job.replicas, Address("evaluator")]
    for fault in random_faults(
        seed, roles, horizon=10.0, intensity=0.7, restarts=False
    ):
        job.simulation.inject(fault)
    assert job.run(within=600.0) is None
    assert job.view.samples >= 800


# ------------------------------------------------------------- shards in two copies


@pytest.mark.parametrize("host", ["host-0", ""], ids=["one host", "block messages"])
def test_a_leader_that_dies_costs_nothing(host: str) -> None:
    job = JobCluster(stop=StopTable(samples=1200), shard_copies=2, host=host)
    job.run_until(job.is_paired)
    job.run_until(lambda: job.view.samples > 200)
    leader, second = job.copy_that_is("leading"), job.copy_that_is("second")
    job.simulation.kill(leader)
    job.run_until(lambda: job.state(second) == "leading", within=1.0)
    job.run_until(job.is_paired)
    assert job.copy_that_is("second") == leader
    assert job.run() is None
    assert any("takes over, nothing acknowledged is lost" in text for text in job.told)
    view = job.view
    assert view.pushes_lost == 0
    assert view.pushes_applied == 2 * view.step  # each push once, on both shards
    assert sum(role.restarts for role in view.roles) == 1


def test_leaders_die_one_after_the_other_and_nothing_is_lost() -> None:
    job = JobCluster(stop=LONG, shard_copies=2, snapshot_every=1e3)
    for n in range(8):
        job.run_until(job.is_paired)
        job.simulation.run(until=job.simulation.now + 0.3)
        if job.is_paired():
            job.simulation.kill(job.copy_that_is("leading", n % 2))
    before = job.view.samples
    job.run_until(lambda: job.view.samples > before + 200)
    assert job.view.pushes_lost == 0
    job.interrupt()
    assert job.run() == "interrupted"


def test_a_leader_that_stands_still_is_replaced_within_two_seconds() -> None:
    job = JobCluster(stop=LONG, shard_copies=2)
    job.run_until(job.is_paired)
    job.run_until(lambda: job.view.samples > 40)
    leader, second = job.copy_that_is("leading"), job.copy_that_is("second")
    pause = Pause(at=job.simulation.now, role=leader, seconds=3.0)
    job.simulation.inject(pause)
    job.run_until(lambda: job.state(second) == "leading", within=2.0)
    before = job.view.samples
    job.run_until(lambda: job.view.samples > before + 40, within=2.0)
    job.run_until(job.is_paired)
    assert job.restarts(leader) == 1
    assert job.view.pushes_lost == 0


def test_a_second_that_stands_still_holds_nobody_up_for_long() -> None:
    job = JobCluster(stop=LONG, shard_copies=2)
    job.run_until(job.is_paired)
    job.run_until(lambda: job.view.samples > 40)
    second = job.copy_that_is("second")
    pause = Pause(at=job.simulation.now, role=second, seconds=5.0)
    job.simulation.inject(pause)
    before = job.view.samples
    job.run_until(lambda: job.view.samples > before + 100, within=6.0)
    job.run_until(job.is_paired)
    assert job.restarts(second) == 0
    assert job.view.pushes_lost == 0


def test_a_shard_that_loses_both_copies_comes_back_from_its_snapshot() -> None:
    job = JobCluster(stop=StopTable(samples=2000), shard_copies=2)
    job.run_until(lambda: job.simulation.disk.newest(job.shards[0]) is not None)
    job.simulation.run(until=job.simulation.now + 1.0)
    for copy in job.copies[:2]:
        job.simulation.kill(copy)
    assert job.run() is None
    assert (job.view.pushes_lost or 0) > 0
    assert job.view.samples >= 2000


def test_two_copies_that_stand_still_and_come_back_have_lost_nothing() -> None:
    """Both were put down after 10 s, each with a promise of what the other holds."""
    job = JobCluster(stop=LONG, shard_copies=2, snapshot_every=1e3)
    job.run_until(job.is_paired)
    job.run_until(lambda: job.view.samples > 40)
    leader, second = job.copy_that_is("leading"), job.copy_that_is("second")
    for copy in (leader, second):
        pause = Pause(at=job.simulation.now, role=copy, seconds=16.0)
        job.simulation.inject(pause)
    before = job.view.samples
    job.run_until(lambda: job.view.samples > before + 100)
    job.run_until(job.is_paired)
    assert (job.restarts(leader), job.restarts(second)) == (0, 1)
    assert job.view.pushes_lost == 0
    assert not any("nothing acknowledged is lost" in text for text in job.told)


def test_two_copies_that_stand_still_for_good_come_back_from_a_snapshot() -> None:
    job = JobCluster(stop=StopTable(samples=800), shard_copies=2, snapshot_every=1e3)
    job.run_until(job.is_paired)
    job.run_until(lambda: job.view.samples > 200)
    for copy in job.copies[:2]:
        pause = Pause(at=job.simulation.now, role=copy, seconds=1000.0)
        job.simulation.inject(pause)
    assert job.run() is None
    assert (job.view.pushes_lost or 0) > 0
    assert not any("nothing acknowledged is lost" in text for text in job.told)
    assert any("pushes will be lost" in text for text in job.told)


@pytest.mark.parametrize("seed", seeds(4, of=24))
def test_a_job_with_two_copies_survives_whatever_heals(seed: int) -> None:
    job = JobCluster(
        stop=StopTable(samples=800), seed=seed, shard_copies=2, warm_start_steps=5
    )
    roles = [*job.copies, *job.replicas, Address("evaluator")]
    for fault in random_faults(
        seed, roles, horizon=10.0, intensity=0.7, restarts=False
    ):
        job.simulation.inject(fault)
    assert job.run(within=600.0) is None
    assert job.view.samples >= 800


def test_an_interrupted_job_with_two_copies_is_saved_within_two_seconds() -> None:
    job = JobCluster(stop=LONG, snapshot_every=1e3, shard_copies=2)
    job.run_until(lambda: job.view.samples > 100)
    begun = job.simulation.now
    job.interrupt()
    assert job.run() == "interrupted"
    assert job.simulation.now - begun <= 1.3 + 1.0  # run() adds a second
    for shard in job.shards:
        assert job.simulation.disk.newest(shard) is not None


def test_a_disk_that_is_full_at_the_end_fails_the_job() -> None:
    job = JobCluster(
        stop=StopTable(samples=400), faults=[DiskFull(at=1.0, seconds=1000.0)]
    )
    assert "the last snapshot of shard 0 could not be saved" in (job.run() or "")


# ------------------------------------------------------------------------- the user


def test_an_interrupted_job_is_over_and_saved_within_two_seconds() -> None:
    job = JobCluster(stop=LONG, snapshot_every=1e3)
    job.run_until(lambda: job.view.samples > 100)
    begun = job.simulation.now
    job.interrupt()
    assert job.run() == "interrupted"
    assert job.supervisor.interrupted
    assert job.simulation.now - begun <= 1.3 + 1.0  # run() adds a second
    for shard in job.shards:
        assert job.simulation.disk.newest(shard) is not None


@pytest.mark.parametrize("victim", ["replica-0", "shard-1", "evaluator"])
def test_nobody_can_delay_an_interrupt(victim: str) -> None:
    job = JobCluster(stop=LONG)
    job.run_until(lambda: job.view.samples > 100)
    pause = Pause(at=job.simulation.now, role=Address(victim), seconds=100.0)
    job.simulation.inject(pause)
    begun = job.simulation.now
    job.interrupt()
    assert job.run() == "interrupted"
    assert job.simulation.now - begun <= 1.3 + 1.0 + 1e-6


def test_a_second_interrupt_ends_everything_at_once() -> None:
    job = JobCluster(stop=LONG)
    job.run_until(lambda: job.view.samples > 100)
    begun = job.simulation.now
    job.interrupt()
    job.interrupt()
    job.run_until(lambda: SUPERVISOR in job.simulation.halted)
    assert job.simulation.now - begun < 0.01


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 1.0])
def test_a_job_can_be_interrupted_while_it_starts(at: float) -> None:
    job = JobCluster(stop=LONG)
    job.simulation.run(until=at)
    job.interrupt()
    assert job.run() == "interrupted"


# ------------------------------------------------------------------- the user's code


def test_a_factory_that_fails_in_one_process_ends_the_job_with_its_words() -> None:
    bad = msgspec.structs.replace(
        TASK,
        model=msgspec.structs.replace(
            TASK.model, factory=f"{EXAMPLES}:failing", arguments={"size": 3}
        ),
    )
    job = JobCluster(stop=LONG, tasks={"replica-1": bad})
    error = job.run() or ""
    assert error.startswith("replica 1: ")
    assert "KeyError: 3" in error
    assert job.restarts("replica-1") == 0
