import pytest

from distbelief.config.load import parse_job
from experiments.figures.__main__ import gather, parse, running
from experiments.figures.courses import SEARCHED, Try, best, kept_course, pace, setting_of
from experiments.figures.entries import FIGURE_4, FIGURE_5, LEARNER, Entry
from experiments.figures.findings import EXTRA, PAPERS_ORDER


@pytest.mark.parametrize("entry", [*FIGURE_4, *FIGURE_5, LEARNER], ids=lambda e: e.label)
def test_every_entry_is_a_job(entry: Entry) -> None:
    algorithm = entry.algorithm(entry.candidates[0], squares=0.5)
    job = parse_job(
        f"""
[model]
factory = "experiments.figures.task:net"
[data.train]
factory = "experiments.figures.task:train"
[algorithm]
{algorithm}
loss = "cross_entropy"
[cluster]
replicas = {entry.replicas}
shards = 1
[stop]
samples = {entry.samples}
""",
        path="figure.toml",
    )
    assert job.cluster.replicas == entry.replicas


def test_figure_4_has_the_methods_of_the_paper_and_all_have_the_same_number_of_tries() -> None:
    assert {entry.label for entry in FIGURE_4} == {*PAPERS_ORDER, EXTRA}
    assert {len(entry.candidates) for entry in SEARCHED} == {4}


def attempt(setting: float, seconds: float | None, held_out: float) -> Try:
    return Try(setting=setting, target_seconds=seconds, held_out=held_out, seconds=1.0)


@pytest.mark.parametrize(
    "tries",
    [
        [attempt(1, 20.0, 0.3), attempt(2, 10.0, 0.25), attempt(3, None, 0.4)],
        [attempt(1, 20.0, 0.3), attempt(2, 20.0, 0.4)],
        [attempt(1, None, 0.1), attempt(2, None, 0.2)],
    ],
)
def test_the_best_setting_is_first_at_the_target_then_most_accurate(tries: list[Try]) -> None:
    assert best(tries) == 2


def test_a_label_that_there_is_not_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    """It was ignored without --run; with it, nothing was run, without a word."""
    with pytest.raises(SystemExit):
        parse(["methods", "--only", "Nobody [3]"])
    printed = capsys.readouterr().err
    assert "--only 'Nobody [3]' is part of no label: there are SGD [1], " in printed
    assert parse(["speedup", "--only", "80M"]).only == "80M"
    with running(0) as runs:
        gather([], parse(["methods", "--only", "SGD"]), runs)
    assert "--only chooses what --run runs" in capsys.readouterr().out


def test_every_kept_result_is_of_these_entries() -> None:
    """Another fingerprint, of machines or settings, would run all of them again."""
    for entry in dict.fromkeys((*FIGURE_4, *FIGURE_5)):
        setting = setting_of(entry)
        assert setting is not None, entry.label
        learner = LEARNER if entry.kind == "l-bfgs" else entry
        for seed in range(5):
            assert kept_course(learner, setting=setting, seed=seed), entry.label
        assert entry.kind != "l-bfgs" or pace(entry) is not None
