"""What a job and its earlier sessions make of the supervisor."""

import msgspec
import pytest

from distbelief.core.errors import JobError
from distbelief.core.pieces import Pieces
from distbelief.job.launch.preflight import PreflightResult
from distbelief.job.launch.supervised_job import (
    check_data,
    short_epochs,
    supervisor_config,
    warnings_of,
)
from distbelief.job.run.resume import PreviousRun
from distbelief.job.run.summary import DataFacts, TaskFacts
from distbelief.supervisor.metrics import PreviousTotals
from tests.distbelief.jobs import speech


def answer_of(n_samples: int) -> PreflightResult:
    return PreflightResult(task=TaskFacts(train=DataFacts(n_samples=n_samples)))


def test_only_the_rest_of_a_warm_start_is_left_to_a_resumed_run() -> None:
    job = speech("algorithm.warm_start_steps=100", "algorithm.batch_size=10")
    for done, left in ((0, 100), (300, 70), (2000, 0)):
        before = PreviousTotals(samples={"replica-0": done, "replica-1": 0})
        config = supervisor_config(job, answer_of(100_000), previous=PreviousRun(before=before))
        assert config.warm_start_steps == left


def test_there_may_be_more_replicas_than_samples_where_samples_are_dealt() -> None:
    """It told that each needs a sample of its own, also as many replicas as fit."""
    with pytest.raises(JobError, match=r"replicas = 5, but \[data.train\] has 3 samples: each"):
        check_data(speech("cluster.replicas=5", "algorithm.order=parts"), answer_of(3))
    check_data(speech("cluster.replicas=5"), answer_of(3))


def test_epochs_too_short_for_an_exchange_are_told_at_the_start() -> None:
    """With 8 batches an epoch, replicas exchanged every 8 steps, and 64 were asked for."""
    delta = ("algorithm.preset=local", "algorithm.batch_size=10")
    text = short_epochs(speech(*delta), answer_of(75))
    assert text is not None
    assert "an epoch of 75 samples has 8 batches, and exchanges are 64 steps apart" in text
    assert "every (or n_push) be 8 at most" in text
    enough = [speech(*delta, "algorithm.order=parts"), speech(*delta, "algorithm.exchange.every=8")]
    assert [short_epochs(job, answer_of(75)) for job in enough] == [None, None]
    assert short_epochs(speech(*delta), answer_of(640)) is None
    summing = speech("algorithm.batch_size=10", "algorithm.n_push=3")
    assert "has 1 batch, and" in (short_epochs(summing, answer_of(10)) or "")


BATCHES = ("algorithm.batch_size=10", "cluster.replicas=4")
FORTY = (*BATCHES, "stop.samples=400")  # ten of each replica
MINUTE = (*BATCHES, "stop.seconds=60")


@pytest.mark.parametrize(
    ("wish", "enough", "said"),
    [
        (FORTY, "algorithm.warm_start_steps={}", ("40", "39", "the warm start takes 400 samples")),
        (FORTY, "algorithm.n_push={}", ("11", "10", "n_push = 11 steps, and until")),
        (
            (*FORTY, "algorithm.order=parts"),
            "algorithm.accumulate={}",
            ("11", "10", "accumulate = 11 steps, and until"),
        ),
        (
            (*FORTY, "algorithm.local_learning_rate=0.1"),
            "algorithm.n_fetch={}",
            ("11", "10", "none ever sees what others learn"),
        ),
        (FORTY, "algorithm.exchange.staleness={}", ("11", "10", "none is ever so far ahead")),
        (
            FORTY,
            "algorithm.rule.schedule={{name='constant', n_warm_up={}}}",
            ("40", "39", "n_warm_up is 40 pushes, and until [stop] come about 40"),
        ),
        (
            FORTY,
            "algorithm.rule.schedule={{name='constant', n_warm_up='{} epochs'}}",
            ("0.4", "0.39", "n_warm_up is 0.4 epochs, and [stop] ends the job after 400 samples"),
        ),
        (FORTY, "cluster.replicas={}", ("41", "40", "some replicas train nothing")),
        (FORTY, "evaluation.every={} samples", ("401", "400", "only the last evaluation comes")),
        (
            (*FORTY, "evaluation.every=100 samples"),
            "stop.patience={}",
            ("4", "3", "patience = 4 never ends it"),
        ),
        # After 1, 3, 7, 15, 31 and 51 s.
        (
            (*MINUTE, "evaluation.every=20 s"),
            "stop.patience={}",
            ("6", "5", "the time of evaluation 7 is 71 s"),
        ),
        (MINUTE, "output.report_every={} s", ("61", "60", "curve and metrics have one point")),
        (MINUTE, "output.snapshot_every={} s", ("61", "60", "none to resume from")),
    ],
)
def test_what_a_job_of_this_length_never_comes_to_is_told(
    wish: tuple[str, ...], enough: str, said: tuple[str, str, str]
) -> None:
    """Four warnings of thirteen were given; the others were found in curves of one point."""
    too_much, fine, text = said
    (warning,) = warnings_of(speech(*wish, enough.format(too_much)), answer_of(1000))
    assert text in warning
    assert warnings_of(speech(*wish, enough.format(fine)), answer_of(1000)) == []


def test_what_is_usual_in_a_short_job_is_not_told() -> None:
    short = ("stop.seconds=1", "evaluation.every=1 s")  # a checkpoint comes every 30 s
    assert warnings_of(speech(*BATCHES, *short), answer_of(1000)) == []
    # Five evaluations come within 60 s all the same, and the default, 10 s, was named, too.
    assert warnings_of(speech(*MINUTE, "evaluation.every=61 s"), answer_of(1000)) == []
    assert warnings_of(speech(*BATCHES, "stop.seconds=5"), answer_of(1000)) == []
    alone = (*FORTY, "cluster.replicas=1", "algorithm.warm_start_steps=400")
    assert warnings_of(speech(*alone), answer_of(1000)) == []


def in_pieces(rows: dict[str, int], *, can_fetch: bool = False) -> PreflightResult:
    pieces = Pieces.of(rows, is_placed=True, can_fetch=can_fetch)
    return msgspec.structs.replace(answer_of(sum(rows.values())), pieces=pieces)


def test_small_pieces_on_some_hosts_are_told_at_the_start() -> None:
    """A push ends with its piece."""
    job = speech("algorithm.batch_size=10", "algorithm.n_push=3")
    text = short_epochs(job, in_pieces(dict.fromkeys(map(str, range(50)), 7)))
    assert text is not None
    assert "so it has 7 samples in the mean, not 30" in text
    assert short_epochs(job, in_pieces({"a": 700, "b": 1, "c": 0})) is None


def test_replica_0_alone_may_have_too_few_pieces_for_a_warm_start() -> None:
    job = speech("algorithm.warm_start_steps=100", "algorithm.batch_size=10")
    check_data(job, in_pieces({"a": 700}, can_fetch=True))
    check_data(speech(), in_pieces({"a": 700}))
    with pytest.raises(
        JobError, match=r"warm_start_steps, in which replica 0 trains alone, and pi"
    ):
        check_data(job, in_pieces({"a": 700}))


def test_the_supervisor_knows_the_pieces() -> None:
    answer = in_pieces({"a": 700, "b": 1})
    config = supervisor_config(speech("algorithm.batch_size=10"), answer)
    assert config.dealt is not None
    assert config.dealt.pieces is not None
    assert config.dealt.n_pushes == 71
