import io
import platform

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from distbelief.job.run import summary as sm
from distbelief.supervisor.view import JobView, Point, RoleView
from tests.distbelief.jobs import speech


class Frames(list[int]):
    """A data set that knows what it holds."""

    fingerprint = "9f86d081"


VIEW = JobView(
    seconds=491.0,
    training_seconds=480.0,
    phase="done",
    stop_reason="1 epoch trained",
    samples=4_800_000,
    step=18_750,
    loss=2.21,
    metric=0.398,
    held_out_loss=2.34,
    staleness_mean=0.9,
    staleness_p95=2.0,
    staleness_max=5.0,
    pushes_applied=18_750,
    pushes_lost=2,
    roles=(
        RoleView(name="shard-0", state="done", restarts=1),
        RoleView(name="replica-0", state="done"),
    ),
)
FACTS = sm.TaskFacts(
    n_parameters=41_800_000,
    train=sm.DataFacts.of(Frames(range(710))),
    test=sm.DataFacts.of([0] * 49),
)


def a_summary(view: JobView = VIEW, *, error: str | None = None) -> sm.Summary:
    return sm.summarise(
        speech("algorithm.seed=3", "model.seed=5"),
        view,
        directory="runs/speech-demo",
        task=FACTS,
        error=error,
    )


def shown(summary: sm.Summary, *, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(sm.final_table(summary))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_copies_failures_and_losses_that_nobody_knows_are_reported() -> None:
    """After a damaged status.json a resumed run ended with "0 pushes lost"."""
    summary = sm.summarise(speech("cluster.shard_copies=2"), VIEW, directory="runs/a", task=FACTS)
    assert summary.shard_copies == 2
    assert "2 replicas x 2 shards in 2 copies" in shown(summary, width=100)[1]
    summary = a_summary(replace(VIEW, pushes_lost=None))
    assert summary.pushes_lost is None
    assert "pushes lost: unknown" in " ".join(shown(summary, width=200))
    text = " ".join(shown(a_summary(error="the loss is not finite"), width=200))
    assert "failed: the loss is not finite; 8 m 00 s of training" in text


def test_lost_pushes_are_told_beside_the_figures_of_an_exchange() -> None:
    """They were left out wherever there were figures, as if a coordinator repeated them."""
    for lost in (0, 2):
        summary = a_summary(replace(VIEW, pushes_lost=lost, figures={"clock_gap": 1.0}))
        assert f"{lost} pushes lost" in " ".join(shown(summary, width=200))


def test_a_summary_holds_figures_seeds_versions_and_data() -> None:
    summary = a_summary()
    assert summary.samples_per_second == 10_000.0  # over the time of training only
    assert summary.rule == "adagrad"
    assert summary.restarts == 1
    assert summary.pushes_lost == 2
    assert (summary.start_seconds, summary.training_seconds) == (11.0, 480.0)
    assert summary.seeds == {"model": 5, "algorithm": 3, "evaluation": 0}
    assert summary.versions["python"] == platform.python_version()
    assert {"torch", "numpy", "pyzmq"} <= summary.versions.keys()
    assert summary.train == sm.DataFacts(n_samples=710, fingerprint="9f86d081")
    assert summary.test == sm.DataFacts(n_samples=49, fingerprint=None)


def test_a_fingerprint_may_be_a_method() -> None:
    class Lazy(list[int]):
        def fingerprint(self) -> str:
            return "abc"

    assert sm.DataFacts.of(Lazy()).fingerprint == "abc"


def test_a_summary_reads_back_equal() -> None:
    text = sm.summary_text(a_summary())
    assert msgspec.json.decode(text, type=sm.Summary) == a_summary()
    assert text.count("\n") > 20  # for people, too


def test_the_final_table_looks_so() -> None:
    assert "\n".join(shown(a_summary(), width=99)) == TABLE


TABLE = """
Downpour, 2 replicas x 2 shards, Adagrad                      speech-demo, 710 samples, 49 held out
                        time    samples  samples/s  held-out accuracy  held-out loss  training loss
Downpour + Adagrad  8 m 11 s  4,800,000     10,000             39.8 %           2.34           2.21
ended: 1 epoch trained; 8 m 00 s of training, 11 s before; staleness mean 0.9, p95 2; at least 2
pushes lost; 1 restart; everything in runs/speech-demo"""


def test_the_held_out_loss_has_one_column_if_it_is_the_metric() -> None:
    """It stood there twice, under the same name."""
    job = speech("evaluation.metric=loss")
    view = replace(VIEW, metric=2.34, metric_name="loss")
    summary = sm.summarise(job, view, directory="runs/a", task=FACTS)
    assert (summary.metric, summary.held_out_loss) == (2.34, 2.34)
    text = "\n".join(shown(summary, width=120))
    assert text.count("held-out loss") == text.count("2.34") == 1


def test_the_training_loss_is_a_mean_over_the_last_tenth_of_the_samples() -> None:
    """It was that of the last interval of the curve, which may be one step."""
    losses = {500: 3.0, 880: 2.0, 960: 1.0, 1000: 1.3, 1002: 9.0}
    history = tuple(Point(seconds=n / 10, samples=n, loss=loss) for n, loss in losses.items())
    view = JobView(seconds=100.0, samples=1002, loss=9.0, history=history)
    summary = sm.summarise(speech(), view, directory="runs/x", task=FACTS)
    assert summary.loss == pytest.approx((80 * 1.0 + 40 * 1.3 + 2 * 9.0) / 122)


def test_a_figure_that_was_not_measured_has_no_column() -> None:
    view = JobView(seconds=3.0, samples=100, loss=2.0, phase="done")
    text = "\n".join(shown(a_summary(view), width=100))
    assert not any(word in text for word in ("held-out", "staleness", "lost"))
    assert "training loss" in text


@pytest.mark.parametrize("width", [30, 50, 80])
def test_where_the_figures_do_not_fit_they_stand_below_each_other(width: int) -> None:
    lines = shown(a_summary(), width=width)
    assert all(len(line) <= width for line in lines)
    assert any(line.startswith("held-out accuracy") for line in lines)


def test_a_rule_by_torch_keeps_its_capitals() -> None:
    """A job with AdamW was one with Adamw."""
    found = [sm._title(name) for name in ("AdamW", "sgd", "delayed_nesterov")]
    assert found == ["AdamW", "SGD", "Delayed nesterov"]
