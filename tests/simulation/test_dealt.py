"""Dealt data: each sample of an epoch counts once on every shard, even if roles die."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from distbelief.core.spans import NOTHING, Spans
from distbelief.parameter_server import checkpoint, shard as shard_module
from distbelief.parameter_server.checkpoint import ShardState
from distbelief.parameter_server.policy import ExchangePolicy, Round
from distbelief.parameter_server.rules import SGD
from distbelief.parameter_server.shard_config import ShardConfig
from distbelief.parameter_server.store import ShardStore
from distbelief.protocol import membership
from distbelief.protocol.role import SUPERVISOR, Address, Snapshot
from distbelief.simulation.faults import Drop, Fault, Kill, Pause, Slow
from distbelief.supervisor import membership as membership_module, supervisor as supervisor_module
from distbelief.supervisor.dealer import Dealer
from distbelief.supervisor.membership import RoleRecord
from distbelief.worker.downpour_settings import LockFree
from tests.simulation.dealt import DealtJob, job_of, split_job_of
from tests.simulation.jobs import seeds
from tests.simulation.variants import Patch, Variants, Whole, failure_of


REPLICAS = [Address(f"replica-{r}") for r in range(3)]


@pytest.mark.each_value
@pytest.mark.parametrize("n_push", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_every_sample_of_an_epoch_counts_once(batch_size: int, n_push: int) -> None:
    DealtJob(batch_size=batch_size, n_push=n_push).run()


@pytest.mark.each_value
@pytest.mark.parametrize("n_replicas", [1, 2, 4])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_every_item_of_a_stream_counts_once(n_replicas: int, n_ranks: int) -> None:
    DealtJob(n_samples=48, n_replicas=n_replicas, n_ranks=n_ranks, is_stream=True).run()


@pytest.mark.parametrize("faults", [[], [Kill(at=2.0, role=REPLICAS[1], after_actions=1)]])
def test_pushes_fitted_to_the_link_are_of_any_batches(faults: Sequence[Fault]) -> None:
    exchange = ExchangePolicy(every="auto", send="delta")
    sgd: dict[str, object] = {"name": "SGD", "lr": 1.0}
    job = DealtJob(n_samples=65, n_epochs=10, exchange=exchange, inner=sgd, faults=faults)
    job.run()
    assert job.job.view.samples == 650


@pytest.mark.parametrize("faults", [[], [Kill(at=2.0, role=REPLICAS[0], after_actions=1)]])
def test_pushes_of_a_slow_replica_end_where_a_round_waits_for_it(
    faults: Sequence[Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are means of local steps here; what is applied has each sample once all the same."""
    monkeypatch.setattr(DealtJob, "_check", lambda *_: None)
    monkeypatch.setattr(DealtJob, "check_end", lambda *_: None)
    ends = Round(quorum=0.5, grace_seconds=20.0, early=True)
    exchange = ExchangePolicy(send="delta", every=8, staleness=0, round=ends, weight="samples")
    slow = Slow(at=0.0, role=REPLICAS[1], factor=8.0, seconds=1e9)
    sgd: dict[str, object] = {"name": "SGD", "lr": 1.0}
    job = DealtJob(n_samples=65, n_epochs=20, exchange=exchange, inner=sgd, faults=[slow, *faults])
    job.run()
    assert job.job.view.samples == 1300
    applied = {str(applied) for applied, _ in job._last.values()}
    assert applied == {str(Spans([(0, 1300)]))}


@pytest.mark.parametrize("faults", [[], [Kill(at=2.0, role=REPLICAS[1])]])
def test_a_supervisor_of_many_looks_at_all_roles_only_now_and_then(
    faults: Sequence[Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "FEW", 1)
    monkeypatch.setattr(supervisor_module, "FEW", 1)
    job = DealtJob(n_epochs=10, faults=faults)
    job.run()
    assert job.job.view.samples == 500
    assert job.job.view.stop_reason == "10 epochs done"


@pytest.mark.each_value
@pytest.mark.parametrize(
    "faults",
    [
        [Kill(at=2.0, role=REPLICAS[1])],
        [Kill(at=2.0 + 0.1 * n, role=name) for n, name in enumerate(REPLICAS)],
        [Kill(at=2.0, role=REPLICAS[1], after_actions=1)],  # between two shards
        [Kill(at=1.2 + 0.8 * n, role=REPLICAS[1]) for n in range(5)],  # left out in the end
        [Pause(at=2.0, role=REPLICAS[1], seconds=5.0)],  # taken for dead, and goes on
        [Slow(at=1.0, role=REPLICAS[1], factor=10.0, seconds=20.0)],
        [Drop(probability=0.3, between=(SUPERVISOR, name)) for name in REPLICAS],
    ],
    ids=["one", "all", "between shards", "left out", "taken for dead", "slow", "words lost"],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_a_lost_replica_has_not_pushed_others_read(
    faults: Sequence[Fault], *, is_stream: bool
) -> None:
    job = DealtJob(n_epochs=10, faults=faults, is_stream=is_stream)
    job.run()
    assert job.job.view.samples == 500
    assert job.job.view.stop_reason == "10 epochs done"


def test_what_a_restored_shard_has_lost_is_dealt_anew() -> None:
    """The other shard has these samples already: it leaves them out."""
    kill = Kill(at=2.5, role=Address("shard-0"))
    job = DealtJob(n_epochs=10, snapshot_every=1e3, faults=[kill])
    job.run()
    shard = job.job.member("shard-1").role
    assert shard is not None
    assert shard.status()[1]["clock"] > 130  # pushes: those dealt twice arrived twice


def test_a_job_goes_on_when_shards_tell_only_their_first_spans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message with all spans had no bound."""
    monkeypatch.setattr(membership, "N_SPANS_MAX", 1)
    slow = Slow(at=0.0, role=REPLICAS[2], factor=10.0, seconds=20.0)
    DealtJob(n_epochs=4, faults=[slow, Kill(at=2.0, role=REPLICAS[1])]).run()


def test_a_takeover_loses_no_sample() -> None:
    """The backup must learn the positions of each push: it killed a backup, and none took over.

    And those of all pushes before it began to sync, or they would be applied again.
    """
    kills = [
        Kill(at=2.0, role=Address("shard-0b")),
        Kill(at=2.5, role=REPLICAS[0]),
        Kill(at=3.0, role=Address("shard-0")),  # to which the first takeover led
    ]
    job = DealtJob(n_epochs=10, shard_copies=2, snapshot_every=1e3, faults=kills)
    job.run()
    successor = job.job.member("shard-0b").role
    assert successor is not None
    assert successor.status()[1]["primary"] == 1.0


def test_a_resumed_job_may_cut_its_pushes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash, shards had applied different pushes of 4; pushes of 16 overlapped both.

    Each shard left them all out, and the job never ended.
    """
    job = DealtJob(batch_size=16)
    before = Spans([(0, 4), (8, 12)]), Spans([(0, 8)])
    initialised = ShardStore.initialised

    def restored(self: ShardStore, state: ShardState) -> None:
        index = self._config.index
        state.values[:] = job.expected(before[index], index)
        initialised(self, replace(state, applied=before[index]))

    monkeypatch.setattr(ShardStore, "initialised", restored)
    job.run()


def test_bad_samples_are_left_out_once_per_epoch() -> None:
    job = DealtJob(n_samples=20, n_epochs=4, batch_size=1, bad=[3, 4, 19])
    assert job.job.run() is None
    assert job.job.view.samples == 80
    total = sum(job.job.samples(name) for name in REPLICAS)
    assert 80 <= total < 86  # and not tried again and again


LOCK_FREE: list[dict[str, Any]] = [
    {"exchange": ExchangePolicy(every=4)},
    {"exchange": ExchangePolicy(every=4, send="delta"), "inner": {"name": "SGD", "lr": 1.0}},
]


@pytest.mark.each_value
@pytest.mark.parametrize("how", LOCK_FREE, ids=["gradient", "delta"])
@pytest.mark.parametrize("bad", [[], [3, 17]])
@pytest.mark.parametrize("after_actions", [None, 0, 1])
def test_samples_of_threads_without_locks_count_once_whatever_dies(
    how: dict[str, Any], bad: Sequence[int], after_actions: int | None
) -> None:
    """Of a small batch with a bad sample, no sample counts; the others of its step do."""
    faults = []
    if after_actions is not None:
        faults = [Kill(at=2.0, role=REPLICAS[1], after_actions=after_actions)]
    job = DealtJob(
        n_samples=64,
        n_epochs=6,
        batch_size=4,
        lockfree=LockFree(threads=2, samples=1),
        faults=faults,
        bad=bad,
        **how,
    )
    job.run()
    assert job.job.view.samples == 384


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize(
    "how",
    [
        {"n_push": 4},
        {"exchange": ExchangePolicy(every=4)},
        {"exchange": ExchangePolicy(every=4, send="delta"), "inner": {}},
    ],
    ids=["n_push", "every", "delta"],
)
def test_steps_after_the_last_whole_push_count(how: dict[str, Any], n_ranks: int) -> None:
    """With max_steps = 3 and four steps a push, a job ended with an untrained model."""
    if "inner" in how:  # the loss of a split model is a mean
        inner = {"name": "SGD", "lr": 1.0 if n_ranks == 1 else 4.0}
        how = {**how, "inner": inner, "rule": SGD(learning_rate=1.0)}
    job = DealtJob(n_samples=40, n_replicas=1, max_steps=7, n_ranks=n_ranks, **how)
    assert job.job.run() is None
    assert job.job.view.samples == 28
    job.check_end(Spans([(0, 28)]))


def test_part_of_an_epoch_ends_exactly() -> None:
    job = DealtJob(n_samples=50, n_epochs=2.5, batch_size=4)
    job.run()
    assert job.job.view.samples == 125


def test_an_epoch_may_end_without_its_last_samples() -> None:
    """Project Adam: nobody waits for a replica that is slow."""
    slow = Slow(at=0.0, role=REPLICAS[2], factor=30.0, seconds=1e3)
    whole = DealtJob(n_epochs=4, faults=[slow])
    whole.run()
    most = DealtJob(n_epochs=4, faults=[slow], epoch_share=0.75)
    assert most.job.run() is None
    assert most.job.view.training_seconds < whole.job.view.training_seconds
    assert most.job.view.samples == 200


def test_who_is_slow_is_dealt_less() -> None:
    job = DealtJob(n_epochs=20, faults=[Slow(at=0.0, role=REPLICAS[1], factor=5.0, seconds=1e3)])
    job.run()
    fast, slow, _ = (job.job.samples(name) for name in REPLICAS)
    assert slow < 0.5 * fast


@pytest.mark.parametrize("seed", seeds(6, of=2000))
def test_each_sample_counts_once_under_any_faults(seed: int) -> None:
    job = job_of(seed)
    assert job.job.run() is None
    job.check_end(Spans([(0, job.total)]))


@pytest.mark.parametrize("name", ["replica-0.0", "replica-0.1", "replica-1.1", "shard-0"])
@pytest.mark.timeout(180)
def test_a_rank_that_dies_loses_no_sample_of_its_replica(name: str) -> None:
    """Shards knew the samples of a replica, and not which rank had pushed them."""
    kills = [Kill(at=at, role=Address(name)) for at in (2.0, 4.5)]
    job = DealtJob(n_samples=48, n_epochs=10, n_replicas=2, n_ranks=2, faults=kills)
    job.run()
    assert job.job.view.samples == 480


@pytest.mark.parametrize("seed", seeds(3, of=1000))
@pytest.mark.timeout(180)
def test_each_sample_counts_once_in_each_part_under_any_faults(seed: int) -> None:
    split_job_of(seed).run()


# ------------------------------------------------------------------------- variants


VARIANTS = Variants[int]()


@VARIANTS()
def shard_ignores_positions(patch: Patch) -> None:
    patch.setattr(Spans, "overlaps", lambda *_: False)


@VARIANTS()
def done_when_one_shard_has_it(patch: Patch) -> None:
    """So, too, the next owner would begin where the most advanced shard is."""
    patch.setattr(Spans, "__and__", Spans.__or__)


@VARIANTS.replacing(Dealer, "_heard")
def pushed_is_done(whole: Whole[None], self: Dealer, hand: object, record: RoleRecord) -> None:
    """The dealer believes replicas, and does not ask what shards still have."""
    n_read = record.counters.get("ranges_done", 0.0)
    held = hand.held  # type: ignore[attr-defined]
    self.skipped(record, [end for n, span in held.items() if n < n_read for end in span])
    whole(self, hand, record)


@VARIANTS()
def positions_are_forgotten_in_the_snapshot(patch: Patch) -> None:
    def take(label: str, state: ShardState, *, config: ShardConfig) -> Snapshot:
        return checkpoint.take(label, replace(state, applied=NOTHING), config=config)

    patch.setattr(shard_module, "take", take)


@VARIANTS.replacing(ShardStore, "start_sync")
def backup_does_not_know_the_positions(
    whole: Whole[None], self: ShardStore, **all_: object
) -> None:
    whole(self, **(all_ | {"applied": NOTHING}))


def run_all() -> None:
    replica, shard = Kill(at=2.0, role=REPLICAS[1]), Kill(at=2.9, role=Address("shard-0"))
    DealtJob(n_epochs=10, faults=[replica, shard]).run()
    after = Kill(at=4.5, role=Address("shard-0b"))
    DealtJob(n_epochs=20, n_shards=1, shard_copies=2, faults=[replica, shard, after]).run()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_rule_is_noticed(name: str) -> None:
    failure = failure_of(VARIANTS[name], run_all)
    assert failure is not None, f"{name!r} breaks nothing"
