"""Whole jobs in virtual time: order, faults, ends. DB-12, and the warm start of 4.1."""

import json
from dataclasses import dataclass, field

import msgspec
import pytest

from distbelief.config.job import StopTable
from distbelief.parameter_server.shard_config import shard_of
from distbelief.protocol import PushApplied
from distbelief.protocol.role import FIRST_LABEL, SUPERVISOR, Address
from distbelief.simulation.driver import HandledEvent
from distbelief.simulation.faults import Delay, DiskFull, Drop, Fault, Kill, Pause
from distbelief.simulation.storage import Disk
from tests.simulation.jobs import EXAMPLES, STEP_SECONDS, TASK, JobCluster, seeds
from tests.simulation.random_faults import random_faults
from tests.simulation.scene import sends


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
        assert job.newest(shard).label
    assert {role.state for role in view.roles} == {"done"}
    assert view.pushes_applied == view.step  # each push goes to both shards


def test_the_last_evaluation_takes_all_samples() -> None:
    job = JobCluster(stop=StopTable(epochs=2), evaluate_every=1e3)
    assert job.run() is None
    assert job.view.metric is not None
    n = job.member("evaluator").status()[1]["evaluations"]
    assert n == 1


def test_a_job_without_test_data_has_no_evaluator() -> None:
    job = JobCluster(stop=StopTable(epochs=2), task=msgspec.structs.replace(TASK, test=None))
    assert job.run() is None
    assert job.view.metric is None
    assert [role.name for role in job.view.roles if role.name == "evaluator"] == []


def test_the_warm_start_lets_replica_0_alone_at_first() -> None:
    job = JobCluster(stop=LONG, n_replicas=3, warm_start_steps=10)
    steps = []

    def others() -> list[int]:
        return [job.samples("replica-1"), job.samples("replica-2")]

    job.run_until(lambda: job.phase == "warm start")
    job.run_until(lambda: job.phase == "training")
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


# --------------------------------------------------------------------- how far it goes


REPLICAS = (Address("replica-0"), Address("replica-1"), Address("replica-2"))
SLOW_WORDS = [
    Delay(probability=1.0, seconds_max=1.0, between=(SUPERVISOR, name)) for name in REPLICAS
]
SLOW_SUPERVISOR = [Pause(at=float(second), role=SUPERVISOR, seconds=0.9) for second in range(1, 60)]


@pytest.mark.each_value
@pytest.mark.parametrize("faults", [[], SLOW_WORDS, SLOW_SUPERVISOR])
@pytest.mark.parametrize("n_replicas", [1, 3])
def test_no_more_samples_are_trained_than_the_job_asks_for(
    n_replicas: int, faults: list[Fault]
) -> None:
    """A late report made a late stop: up to 16 % too many samples."""
    job = JobCluster(
        stop=StopTable(epochs=20),
        n_replicas=n_replicas,
        faults=faults,
        warm_start_steps=3,
        evaluate_every=100.0,
    )
    assert job.run() is None
    assert job.view.stop_reason == "20 epochs done"
    assert 1200 <= job.view.samples < 1200 + 4 * n_replicas
    # Nor does anybody wait for words of the supervisor: a step takes 0.05 s.
    assert job.view.training_seconds < 1.3 * 300 * STEP_SECONDS / n_replicas + 4.0


@pytest.mark.parametrize(
    "fault",
    [
        Drop(probability=0.5, between=(SUPERVISOR, REPLICAS[0])),
        Kill(at=3.0, role=REPLICAS[1]),
        Kill(at=5.5, role=REPLICAS[1]),
        Pause(at=5.0, role=REPLICAS[1], seconds=5.0),
        Pause(at=5.0, role=REPLICAS[1], seconds=100.0),
    ],
    ids=["words lost", "killed", "killed late", "away for a while", "gone"],
)
def test_what_a_lost_replica_was_to_train_the_others_train(fault: Fault) -> None:
    """No replica waits forever, and hardly any sample is trained twice."""
    job = JobCluster(stop=StopTable(epochs=20), n_replicas=3, faults=[fault])
    assert job.run() is None
    assert job.view.stop_reason == "20 epochs done"
    # A replica that comes back may train what was given to the others meanwhile.
    assert 1200 <= job.view.samples < 1200 + 3 * 4 + 2 * 80
    assert job.view.training_seconds < 20.0


def test_a_replica_that_is_late_has_something_left_to_train() -> None:
    """It waited for a host while the others trained."""
    job = JobCluster(
        stop=StopTable(epochs=20),
        n_replicas=2,
        faults=[Kill(at=1.2, role=REPLICAS[1]), Kill(at=2.5, role=REPLICAS[1])],
    )
    assert job.run() is None
    assert job.samples("replica-1") > 100
    assert 1200 <= job.view.samples < 1200 + 2 * 4


# ---------------------------------------------------------------------------- faults


def test_a_replica_that_dies_comes_back_while_the_others_go_on() -> None:
    """DB-12."""
    job = JobCluster(stop=LONG, faults=[Kill(at=3.0, role=Address("replica-1"))])
    job.run_until(lambda: job.restarts("replica-1") == 1)
    before = job.samples("replica-0")
    assert "replica 1 killed: restarting it" in job.messages
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
        job.cluster.kill(Address("replica-1"))
        job.wait(0.2)
    assert job.state("replica-1") == "lost, left out"
    before = job.samples("replica-0")
    job.wait(5.0)
    assert job.samples("replica-0") > before
    job.interrupt()
    assert job.run() == "interrupted"


def test_a_job_that_has_lost_every_replica_fails() -> None:
    job = JobCluster(stop=LONG, n_replicas=1)
    for _ in range(4):
        job.run_until(lambda: job.state("replica-0") == "computing")
        job.cluster.kill(Address("replica-0"))
        job.wait(0.2)
    assert (job.run() or "").startswith("every replica is lost")
    assert job.newest(job.shards[0]).label


@pytest.mark.parametrize("host", ["host-0", ""], ids=["one host", "block messages"])
def test_a_shard_that_dies_comes_back_from_its_checkpoint(host: str) -> None:
    job = JobCluster(stop=StopTable(samples=1000), host=host)
    job.run_until(lambda: job.cluster.disk.newest(job.shards[0]) is not None)
    job.wait(1.0)
    job.cluster.kill(job.shards[0])
    job.run_until(lambda: job.restarts("shard-0") == 1)
    said = [text for text in job.messages if "shard 0" in text]
    assert "restarting it from checkpoint 00001 (1." in said[0]
    assert "acknowledged pushes will be lost" in said[0]
    assert job.run() is None
    assert job.view.pushes_lost
    assert job.restarts("shard-1") == 0
    assert job.restarts("replica-0") == 0


def test_pushes_of_a_replica_that_died_with_the_shard_are_lost() -> None:
    """It was "0 pushes lost": only the replica that had made them could tell."""
    job = JobCluster(stop=StopTable(samples=1000), n_replicas=1, snapshot_every=1e3)
    job.run_until(lambda: job.n_samples > 400)
    n_applied = job.view.pushes_applied
    job.cluster.kill(Address("replica-0"))
    job.cluster.kill(job.shards[0])
    assert job.run() is None
    view = job.view
    assert view.pushes_lost is not None
    assert view.pushes_lost >= n_applied - 1
    clocks = [role.counters["clock"] for role in view.roles if "shard" in role.name]
    assert view.pushes_applied == min(clocks)


def test_a_shard_that_dies_before_its_first_checkpoint_starts_from_scratch() -> None:
    job = JobCluster(stop=StopTable(samples=400), snapshot_every=1e3)
    job.run_until(lambda: job.n_samples > 40)
    job.cluster.kill(job.shards[1])
    job.run_until(lambda: job.restarts("shard-1") == 1)
    assert any("from its initial values" in text for text in job.messages)
    assert job.run() is None


def test_an_evaluator_that_dies_too_often_is_done_without() -> None:
    job = JobCluster(stop=StopTable(seconds=10.0))
    for n in range(3):
        job.run_until(lambda: job.state("evaluator") == "waiting")
        assert job.restarts("evaluator") == n
        job.cluster.kill(Address("evaluator"))
        job.wait(0.2)
    assert job.run() is None
    assert any("evaluator" in text and "left out" in text for text in job.messages)


def test_a_silent_role_is_named_and_greeted_when_it_is_back() -> None:
    pause = Pause(at=5.0, role=Address("replica-1"), seconds=6.0)
    job = JobCluster(stop=LONG, faults=[pause])
    job.run_until(lambda: any("silent" in text for text in job.messages))
    assert job.now < 5.0 + 3.0 + 1.0
    assert job.messages[-1].startswith("replica 1 silent for 3.")
    assert job.messages[-1].endswith("s; counts as dead after 10 s")
    job.run_until(lambda: any("is back" in text for text in job.messages))
    assert job.restarts("replica-1") == 0


def test_a_role_silent_for_long_is_ended_and_restarted() -> None:
    pause = Pause(at=5.0, role=Address("shard-0"), seconds=1000.0)
    job = JobCluster(stop=LONG, faults=[pause])
    job.run_until(lambda: job.restarts("shard-0") == 1)
    assert job.now < 5.0 + 10.0 + 1.0
    job.train()


def test_a_suspended_supervisor_blames_nobody() -> None:
    pause = Pause(at=5.0, role=SUPERVISOR, seconds=12.0)
    job = JobCluster(stop=LONG, faults=[pause])
    job.cluster.run(until=20.0)
    assert not [text for text in job.messages if "silent" in text]


copies = pytest.mark.parametrize("shard_copies", [1, 2])


@copies
@pytest.mark.parametrize(
    ("n_times", "seconds"),
    [
        (1, 25.0),
        pytest.param(10, 25.0, marks=pytest.mark.soak),
        pytest.param(1, 300.0, marks=pytest.mark.soak),
    ],
)
def test_a_supervisor_that_was_stopped_finds_its_job_at_work(
    shard_copies: int, n_times: int, seconds: float
) -> None:
    """After 15 s of its silence all roles ended, and both copies of each shard."""
    faults = [
        Pause(at=5.0 + n * (seconds + 1.0), role=SUPERVISOR, seconds=seconds)
        for n in range(n_times)
    ]
    job = JobCluster(
        stop=LONG,
        faults=faults,
        n_replicas=1,
        n_shards=1,
        snapshot_every=1e3,
        shard_copies=shard_copies,
    )
    job.cluster.run(until=5.0)
    roles = {role.name: role.state for role in job.view.roles}
    job.cluster.run(until=5.0 + n_times * (seconds + 1.0))
    job.train()
    view = job.view
    assert [role.name for role in view.roles if role.restarts] == []
    assert not [text for text in job.messages if "silent" in text or "restart" in text]
    if shard_copies == 2:  # nobody was deposed
        assert {roles["shard-0"], roles["shard-0b"]} == {"primary", "backup"}
        assert {name: job.state(name) for name in job.copies} == {
            name: roles[name] for name in job.copies
        }
    job.supervisor.request_stop("enough")
    assert job.run() is None
    view = job.view
    assert view.pushes_lost == 0
    assert view.pushes_applied == view.step


@pytest.mark.parametrize("shard_copies", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_primary_that_dies_while_the_supervisor_is_stopped(shard_copies: int) -> None:
    """With two copies nothing is lost; with one, the pushes after its checkpoint."""
    pause = Pause(at=5.0, role=SUPERVISOR, seconds=10.0)
    job = JobCluster(stop=LONG, faults=[pause], n_shards=1, shard_copies=shard_copies)
    job.cluster.run(until=4.0)
    primary = job.copy_that_is("primary") if shard_copies == 2 else job.shards[0]
    job.cluster.inject(Kill(at=10.0, role=primary))
    job.run_until(lambda: job.restarts(primary) == 1)
    job.train()
    assert (job.view.pushes_lost == 0) is (shard_copies == 2)


@dataclass
class Acknowledged:
    """The pushes that each shard has acknowledged to each replica."""

    newest: dict[tuple[Address, Address], int] = field(default_factory=dict)

    def __call__(self, happening: HandledEvent) -> None:
        for replica, applied in sends(happening, PushApplied):
            if replica.startswith("replica"):
                key = shard_of(happening.name), replica
                self.newest[key] = max(applied.sequence, self.newest.get(key, 0))

    @property
    def n(self) -> int:
        """How many there are, if no replica was restarted."""
        return sum(sequence % (1 << 32) for sequence in self.newest.values())

    def n_missing(self, disk: Disk) -> int:
        """Return how many of them are in no checkpoint."""
        n = 0
        for (shard, replica), sequence in self.newest.items():
            snapshot = disk.newest(shard)
            assert snapshot is not None, f"{shard} has saved nothing"
            clients = json.loads(snapshot.facts["clients"])
            n += max(0, sequence - clients[replica]["watermark"])
        return n


@pytest.mark.parametrize(
    ("shard_copies", "host"),
    [
        (1, "host-0"),
        (2, ""),  # by block messages
        pytest.param(1, "", marks=pytest.mark.soak),
        pytest.param(2, "host-0", marks=pytest.mark.soak),
    ],
)
def test_shards_save_before_they_end_without_a_supervisor(shard_copies: int, host: str) -> None:
    """They ended without a checkpoint, whatever they had acknowledged."""
    job = JobCluster(
        stop=LONG,
        faults=[Kill(at=5.0, role=SUPERVISOR)],
        shard_copies=shard_copies,
        patience=5.0,
        snapshot_every=3.0,
        host=host,
    )
    acknowledged = Acknowledged()
    job.cluster.observe(acknowledged)
    job.cluster.run(until=5.0 + 4.0)
    n_alive = len(job.copies) + len(job.replicas) + 1
    assert job.n_alive == n_alive  # they work on
    assert acknowledged.n_missing(job.cluster.disk) > 100
    job.cluster.run(until=5.0 + 9.0)
    assert job.n_alive == len(job.copies)  # which wait for last pushes, as long again
    job.cluster.run(until=5.0 + 12.0)
    assert job.n_alive == 0
    assert acknowledged.n_missing(job.cluster.disk) == 0
    for name, seconds in [(Address("replica-0"), 5), *[(copy, 10) for copy in job.copies]]:
        halted = job.cluster.halted[name] or ""
        assert halted.startswith(f"no message from the supervisor for {seconds}.")


@copies
def test_a_job_goes_on_after_a_silence_beyond_its_patience(shard_copies: int) -> None:
    """Their next incarnations have everything that the shards had acknowledged.

    Replicas that had ended in order counted as done, and a job without a goal was over.
    """
    job = JobCluster(
        stop=StopTable(samples=2500),
        faults=[Pause(at=5.0, role=SUPERVISOR, seconds=20.0)],
        shard_copies=shard_copies,
        patience=5.0,
        snapshot_every=1e3,
    )
    acknowledged = Acknowledged()
    job.cluster.observe(acknowledged)
    job.cluster.run(until=24.0)
    assert {role.restarts for role in job.view.roles} == {0}
    assert acknowledged.n_missing(job.cluster.disk) == 0
    n_acknowledged = acknowledged.n
    assert job.run() is None
    view = job.view
    assert all(role.restarts == 1 for role in view.roles)
    assert view.pushes_lost == 0
    # Each shard acknowledges its part of a push.
    assert len(job.shards) * view.pushes_applied > n_acknowledged
    assert not any("will be lost" in text for text in job.messages)


def test_a_checkpoint_without_a_request_is_never_ahead_of_the_next_one() -> None:
    """If it took the next number, a shard that ended so twice in a row would be two
    ahead of its supervisor, whose next checkpoint would look older."""
    pauses = [Pause(at=at, role=SUPERVISOR, seconds=8.0) for at in (5.0, 18.0)]
    job = JobCluster(stop=LONG, faults=pauses, patience=3.0, snapshot_every=30.0)
    job.cluster.run(until=29.0)
    assert job.restarts("shard-0") == 2
    (only,) = job.cluster.disk.snapshots(job.shards[0])
    assert only.snapshot.label == FIRST_LABEL
    job.run_until(lambda: len(job.cluster.disk.snapshots(job.shards[0])) == 2, within=100.0)
    assert job.newest(job.shards[0]).label == "00001"


@pytest.mark.parametrize("seed", seeds(2, of=5))
def test_a_job_survives_a_lossy_network(seed: int) -> None:
    job = JobCluster(stop=StopTable(samples=400), seed=seed, faults=[Drop(probability=0.2)])
    assert job.run() is None
    assert job.view.samples >= 400
    assert sum(role.restarts for role in job.view.roles) == 0


@pytest.mark.each_value
@pytest.mark.parametrize("seed", seeds(3, of=24))
@copies
def test_a_job_survives_whatever_heals(seed: int, shard_copies: int) -> None:
    job = JobCluster(
        stop=StopTable(samples=800), seed=seed, warm_start_steps=5, shard_copies=shard_copies
    )
    roles = [*job.copies, *job.replicas, Address("evaluator")]
    for fault in random_faults(seed, roles, horizon=10.0, intensity=0.7, restarts=False):
        job.cluster.inject(fault)
    assert job.run(within=600.0) is None
    assert job.view.samples >= 800


# ------------------------------------------------------------- shards in two copies


@pytest.mark.parametrize("host", ["host-0", ""], ids=["one host", "block messages"])
def test_a_primary_that_dies_costs_nothing(host: str) -> None:
    job = JobCluster(stop=StopTable(samples=700), shard_copies=2, host=host)
    job.run_until(job.is_paired)
    job.run_until(lambda: job.n_samples > 200)
    primary, backup = job.copy_that_is("primary"), job.copy_that_is("backup")
    job.cluster.kill(primary)
    job.run_until(lambda: job.state(backup) == "primary", within=1.0)
    job.run_until(job.is_paired)
    assert job.copy_that_is("backup") == primary
    assert job.run() is None
    assert any("takes over, nothing acknowledged is lost" in text for text in job.messages)
    view = job.view
    assert view.pushes_lost == 0
    assert view.pushes_applied == view.step  # each push once, on both shards, in both copies
    assert sum(role.restarts for role in view.roles) == 1


def test_primaries_die_one_after_the_other_and_nothing_is_lost() -> None:
    job = JobCluster(stop=LONG, shard_copies=2, snapshot_every=1e3)
    for n in range(8):
        job.run_until(job.is_paired)
        job.wait(0.3)
        if job.is_paired():
            job.cluster.kill(job.copy_that_is("primary", n % 2))
    job.train(200)
    assert job.view.pushes_lost == 0
    job.interrupt()
    assert job.run() == "interrupted"


def test_a_primary_that_is_paused_is_replaced_within_two_seconds() -> None:
    job = JobCluster(stop=LONG, shard_copies=2)
    job.run_until(job.is_paired)
    job.run_until(lambda: job.n_samples > 40)
    primary, backup = job.copy_that_is("primary"), job.copy_that_is("backup")
    job.pause(primary, 3.0)
    job.run_until(lambda: job.state(backup) == "primary", within=2.0)
    job.train(40, within=2.0)
    job.run_until(job.is_paired)
    assert job.restarts(primary) == 1
    assert job.view.pushes_lost == 0


def test_a_backup_that_is_paused_holds_nobody_up_for_long() -> None:
    job = JobCluster(stop=LONG, shard_copies=2)
    job.run_until(job.is_paired)
    job.run_until(lambda: job.n_samples > 40)
    backup = job.copy_that_is("backup")
    job.pause(backup, 5.0)
    job.train(within=4.0)
    job.run_until(job.is_paired)
    assert job.restarts(backup) == 0
    assert job.view.pushes_lost == 0
    assert any("does not answer" in text for text in job.messages)


def test_two_paused_copies_that_wake_up_and_come_back_have_lost_nothing() -> None:
    """Both were killed after 10 s, each because the other one held everything."""
    job = JobCluster(stop=LONG, shard_copies=2, snapshot_every=1e3)
    job.run_until(job.is_paired)
    job.run_until(lambda: job.n_samples > 40)
    primary, backup = job.copy_that_is("primary"), job.copy_that_is("backup")
    for copy in (primary, backup):
        job.pause(copy, 16.0)
    job.train()
    job.run_until(job.is_paired)
    assert (job.restarts(primary), job.restarts(backup)) == (0, 1)
    assert job.view.pushes_lost == 0
    assert not any("nothing acknowledged is lost" in text for text in job.messages)


@pytest.mark.parametrize("how", ["die", "are silent for good"])
def test_two_copies_that_are_lost_at_once_come_back_from_a_checkpoint(how: str) -> None:
    job = JobCluster(stop=StopTable(samples=800), shard_copies=2, snapshot_every=1e3)
    job.run_until(job.is_paired)
    job.run_until(lambda: job.n_samples > 200)
    for copy in job.copies[:2]:
        if how == "die":
            job.cluster.kill(copy)
        else:
            job.pause(copy, 1000.0)
    assert job.run() is None
    assert job.view.pushes_lost
    assert not any("nothing acknowledged is lost" in text for text in job.messages)
    assert any("pushes will be lost" in text for text in job.messages)


def test_a_disk_that_is_full_at_the_end_fails_the_job() -> None:
    job = JobCluster(stop=StopTable(samples=400), faults=[DiskFull(at=1.0, seconds=1000.0)])
    assert "the last checkpoint of shard 0 could not be saved" in (job.run() or "")


# ------------------------------------------------------------------------- the user


@copies
def test_an_interrupted_job_is_over_and_saved_within_two_seconds(shard_copies: int) -> None:
    job = JobCluster(stop=LONG, snapshot_every=1e3, shard_copies=shard_copies)
    job.run_until(lambda: job.n_samples > 100)
    begun = job.now
    job.interrupt()
    assert job.run() == "interrupted"
    assert job.supervisor.shutdown.interrupted
    assert job.now - begun <= 1.3 + 1.0  # run() adds a second
    for shard in job.shards:
        assert job.newest(shard).label


@pytest.mark.parametrize("victim", ["replica-0", "shard-1", "evaluator"])
def test_nobody_can_delay_an_interrupt(victim: str) -> None:
    job = JobCluster(stop=LONG)
    job.run_until(lambda: job.n_samples > 100)
    job.pause(Address(victim), 100.0)
    begun = job.now
    job.interrupt()
    assert job.run() == "interrupted"
    assert job.now - begun <= 1.3 + 1.0 + 1e-6


def test_a_second_interrupt_ends_everything_at_once() -> None:
    job = JobCluster(stop=LONG)
    job.run_until(lambda: job.n_samples > 100)
    begun = job.now
    job.interrupt()
    job.interrupt()
    job.run_until(lambda: SUPERVISOR in job.cluster.halted)
    assert job.now - begun < 0.01


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 1.0])
def test_a_job_can_be_interrupted_while_it_starts(at: float) -> None:
    job = JobCluster(stop=LONG)
    job.cluster.run(until=at)
    job.interrupt()
    assert job.run() == "interrupted"


# ------------------------------------------------------------------- the user's code


def test_a_factory_that_fails_in_one_process_ends_the_job_with_its_error() -> None:
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
