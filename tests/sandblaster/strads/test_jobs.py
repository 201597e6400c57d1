"""Programs as models of a job: files of data, and what the check refuses before the start."""

from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from scipy import sparse

from distbelief.config.job import Job
from distbelief.config.load import parse_job
from distbelief.core.errors import JobError, SettingError
from distbelief.core.memory import PrivateMemory
from distbelief.job.launch.preflight import PreflightResult, answer_to
from distbelief.job.run.resume import check_same
from distbelief.parameter_server.layout import Layout, TensorSpec
from distbelief.task.data import marks_of
from distbelief.task.task import BuildContext, DataSpec, build_dataset
from sandblaster import LatentDirichletAllocation
from sandblaster.build import build_coordinator, build_replica
from sandblaster.coordinator.coordinator import Coordinator
from sandblaster.settings import SandblasterSettings
from sandblaster.strads import columns, jobs
from sandblaster.strads.program import run


RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 6))
Y = X[:, 0] - X[:, 1]
RATINGS = sparse.csr_array(np.where(RNG.random((8, 7)) < 0.5, RNG.normal(size=(8, 7)), 0.0))

LINEAR: Final = """
[model]
factory = "sandblaster.strads.jobs:lasso"
arguments = { x = "x.npy", y = "y.npy", alpha = 0.1, n_blocks = 3 }

[data.train]
factory = "sandblaster.strads.jobs:samples"
arguments = { x = "x.npy", y = "y.npy" }

[algorithm]
name = "sandblaster"
method = "strads"
loss = "mse"
"""

FACTORS: Final = """
[model]
factory = "sandblaster.strads.jobs:factors"
arguments = { ratings = "r.npz", n_components = 2, n_blocks = 3 }

[data.train]
factory = "sandblaster.strads.jobs:entries"
arguments = { ratings = "r.npz" }

[algorithm]
name = "sandblaster"
method = "strads"
loss = "mse"
"""


DOWNPOUR: Final = [
    "algorithm={name='downpour', loss='mse', batch_size=4, rule={name='sgd', learning_rate=0.1}}",
    "stop.epochs=1",
]
COUNTS = RNG.poisson(1.0, (9, 7))

TOPICS: Final = """
[model]
factory = "sandblaster.strads.jobs:topics"
arguments = { counts = "c.npy", n_components = 2, n_blocks = 3 }

[data.train]
factory = "sandblaster.strads.jobs:documents"
arguments = { counts = "c.npy" }

[data.test]
factory = "sandblaster.strads.jobs:documents"
arguments = { counts = "c.npy" }

[algorithm]
name = "sandblaster"
method = "strads"
loss = "cross_entropy"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    np.save("y.npy", Y)
    sparse.save_npz("r.npz", RATINGS)
    np.save("c.npy", COUNTS)
    return tmp_path


def checked(folder: Path, job: str, *overrides: str) -> PreflightResult:
    parsed = parse_job(job, path=folder / "job.toml", overrides=overrides)
    return answer_to(parsed, initial_file=str(folder / "i.safetensors"), plan="")


@pytest.mark.parametrize("job", [LINEAR, FACTORS, TOPICS])
def test_a_program_passes_the_check_in_double_precision(folder: Path, job: str) -> None:
    assert checked(folder, job).dtype == "float64"


@pytest.mark.parametrize(
    ("job", "overrides", "text"),
    [
        # It began processes, and wrote "no model was written" before it said why.
        (LINEAR, ["cluster.replicas=4"], "replicas is 4, and the program has 3 blocks"),
        (FACTORS, ["cluster.replicas=4"], "replicas is 4, and the program has 3 blocks"),
        # These trained on the files of [model] without a word.
        (LINEAR, ["data.train.arguments.x=x2.npy"], r"\[data.train\] x is '.*x2.npy', but"),
        (FACTORS, ["data.train.arguments.ratings=r2.npz"], "ratings is '.*r2.npz', but"),
        (LINEAR, ["data.train.limit=10"], "limit is 10, but a program computes from"),
        # The default method minimized the loss without the penalty, and said it had converged.
        (LINEAR, ["algorithm.method=l-bfgs"], "is a program, which this algorithm does not run"),
        # So did this.
        (LINEAR, [*DOWNPOUR], r"is a program, .*: use .algorithm. name = .sandblaster., method"),
        (FACTORS, [*DOWNPOUR], r"is a program, .*: use .algorithm. name = .sandblaster., method"),
        (TOPICS, [*DOWNPOUR], r"is a program, .*: use .algorithm. name = .sandblaster., method"),
        # These did nothing, without a word.
        (LINEAR, ["model.arguments.workers=2"], r"workers is of fit, .* \[cluster\] replicas"),
        (LINEAR, ["model.arguments.warm_start=true"], "warm_start is of fit, not of a job"),
        (FACTORS, ["model.arguments.workers=2"], "workers is of fit, not of a job"),
        # Replicas failed with numpy's TypeError, until all were lost; "biases" stood for true.
        (LINEAR, ["model.arguments.fit_intercept=no"], "fit_intercept is 'no'; use true or false"),
        (FACTORS, ["model.arguments.biases=no"], "biases is 'no'; use true or false"),
        (TOPICS, ["cluster.replicas=4"], "replicas is 4, and the program has 3 blocks"),
        (TOPICS, ["data.train.arguments.counts=c5.npy"], "counts is '.*c5.npy', but"),
        (TOPICS, ["model.arguments.n_blocks=8"], "n_blocks is 8, X has 7 words; use n_blocks=7"),
        (TOPICS, ["model.arguments.counts=bad.npy"], r"a count of X, -1\.0, is negative"),
        (TOPICS, ["model.arguments.counts=nan.npy"], "X contains NaN or infinity"),
        (TOPICS, ["data.test.arguments.counts=nan.npy"], r"nan\.npy: X contains NaN or infinity"),
        (TOPICS, ["data.test.arguments.counts=c2.npy"], "2 columns, not 7: use the same vocab"),
        (TOPICS, ["data.test.arguments.counts=none.npy"], "too few words to score; give more"),
        (
            TOPICS,
            ["model.arguments.held_out=c2.npy"],
            "X has 2 features, .* 7 .*: use the same vocab",
        ),
        (TOPICS, ["model.arguments.held_out=none.npy"], "held_out has too few words to score"),
        (TOPICS, ["model.arguments.workers=2"], "workers is of fit, not of a job"),
    ],
)
def test_what_the_program_would_not_do_is_refused_before_the_start(
    folder: Path, job: str, overrides: list[str], text: str
) -> None:
    np.save("x2.npy", X + 1.0)
    sparse.save_npz("r2.npz", RATINGS[:4])
    np.save("c2.npy", COUNTS[:, :2])
    np.save("c5.npy", COUNTS[:5])
    np.save("bad.npy", COUNTS - 1)
    np.save("nan.npy", np.full((3, 7), np.nan))
    np.save("none.npy", np.zeros((3, 7)))
    with pytest.raises(JobError, match=text):
        checked(folder, job, *overrides)


def test_data_that_fit_into_no_memory_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "free_bytes", lambda: 100)
    with pytest.raises(JobError, match=r"r.npz takes .* each process reads all of it"):
        checked(folder, FACTORS)


@pytest.mark.parametrize(
    ("text", "same", "other"),
    [
        (TOPICS, ["staleness=0", "n_components=2", "learn_doc_topic_prior=false"], "staleness=1"),
        (FACTORS, ["biases=false", 'held_out=""', "random_state=0"], "biases=true"),
        (LINEAR, ["fit_intercept=true"], "fit_intercept=false"),
    ],
)
def test_a_resumed_job_may_name_what_it_had_by_default(
    folder: Path, text: str, same: list[str], other: str
) -> None:
    """It was refused as another model; and what the coordinator had saved, as of other settings."""

    def given(*overrides: str) -> tuple[Job, str]:
        named = [f"model.arguments.{one}" for one in overrides]
        job = parse_job(text, path=folder / "job.toml", overrides=named)
        config = msgspec.convert({"loss": "mse", "method": "strads"}, SandblasterSettings)
        coordinator = build_coordinator(config, context=_context(job))
        assert isinstance(coordinator, Coordinator)
        return job, coordinator._config.goal

    (job, goal), (named, its_goal), (changed, other_goal) = given(), given(*same), given(other)
    check_same(named, job, directory="runs/x")
    check_same(job, named, directory="runs/x")
    assert goal == its_goal != other_goal
    with pytest.raises(JobError, match="of another model"):
        check_same(changed, job, directory="runs/x")


def test_data_are_the_same_if_a_key_has_its_default() -> None:
    one, same, other = (
        DataSpec(factory="sandblaster.strads.jobs:samples", arguments={"x": "x.svm", **more})
        for more in ({}, {"y": ""}, {"y": "y.npy"})
    )
    assert one.source == same.source != other.source
    unknown = DataSpec(factory="no.such:data", arguments={"x": 1})
    assert unknown.source["arguments"] == {"x": 1}


def test_the_same_file_by_another_path_is_the_same(folder: Path) -> None:
    checked(folder, LINEAR, "data.train.arguments.x=./x.npy")


def _context(job: Job) -> BuildContext:
    program, data = jobs.program_of(job.task.model), build_dataset(job.task.train)
    specs = [TensorSpec(name=name, shape=rows.shape) for name, rows in program.tables.items()]
    return BuildContext(
        task=job.task,
        layout=Layout.of(specs, n_shards=2, dtype="float64"),
        n_replicas=2,
        n_shards=2,
        seed=0,
        memory=PrivateMemory(),
        n_train=len(data),
        marks=marks_of(data),
    )


def test_a_host_with_other_data_is_refused(folder: Path) -> None:
    """Its replica computed from them, and the result was of no data at all."""
    job = parse_job(LINEAR, path=folder / "job.toml")
    config = msgspec.convert({"loss": "mse", "method": "strads"}, SandblasterSettings)
    context = _context(job)
    build_replica(config, index=0, context=context)
    np.save("x.npy", X + 0.1)
    with pytest.raises(JobError, match=r"30 other samples here .* same data on all hosts"):
        build_replica(config, index=0, context=context)


@pytest.mark.parametrize("kind", ["<f4", ">f8", "<i8", "|b1"])
def test_data_of_any_numbers_are_evaluated_in_double_precision(folder: Path, kind: str) -> None:
    """These were refused: "let the data set return float64", and the data set is not the user's."""
    x, y = (10 * X).astype(kind), (10 * Y).astype(kind)
    np.save("x.npy", x)
    np.save("y.npy", y)
    checked(folder, LINEAR)
    taken, targets = jobs.samples("x.npy", "y.npy")[3]
    assert taken.dtype == targets.dtype == torch.float64
    assert taken.numpy().tolist() == x[3].tolist()
    assert targets.item() == y[3]


@pytest.mark.parametrize("labels", [np.array([-1, 1]), np.array([1.0, 2.0])])
def test_labels_are_0_and_1_for_whatever_evaluates(folder: Path, labels: "np.ndarray") -> None:
    """With -1 and 1 the held-out loss was -0.66, without a word."""
    np.save("y.npy", labels[(Y > 0).astype(int)])
    logistic = "model.factory=sandblaster.strads.jobs:sparse_logistic"
    with pytest.raises(JobError, match=r"y\.npy has other labels than 0 and 1"):
        checked(folder, LINEAR, logistic, "algorithm.loss=binary_cross_entropy_with_logits")


@pytest.mark.parametrize(
    ("y", "text"),
    [
        (Y[:, None], r"y.npy has shape \(30, 1\): save one number per sample"),
        (np.where(Y > 0, "a", "b"), "y.npy is of <U1: save numbers"),
    ],
)
def test_targets_are_one_number_per_sample(folder: Path, y: "np.ndarray", text: str) -> None:
    np.save("y.npy", y)
    with pytest.raises(JobError, match=text):
        checked(folder, LINEAR)


def test_documents_are_scored_as_the_estimator_scores_them(folder: Path) -> None:
    counts = COUNTS.copy()
    counts[2] = 0
    np.save("c.npy", counts)
    model = jobs.topics("c.npy", n_components=2, n_blocks=3, max_iter=3, learn_doc_topic_prior=True)
    _, tables = run(model.program)
    save_file(dict(tables), folder / "model.safetensors")
    model.load_state_dict({name: torch.from_numpy(values) for name, values in tables.items()})
    documents = jobs.documents("c.npy")
    given, rest = documents.__getitems__(range(len(documents)))
    loss = torch.nn.functional.cross_entropy(model(given), rest)
    found = LatentDirichletAllocation.from_model(folder / "model.safetensors")
    assert loss.item() == pytest.approx(-found.score(counts), rel=1e-12)
    loss.backward()  # as the check of a job does
    save_file({"rows": np.ones(3)}, folder / "other.safetensors")
    with pytest.raises(SettingError, match="has no topics: give the model of a job"):
        LatentDirichletAllocation.from_model(folder / "other.safetensors")
    with pytest.raises(SettingError, match=r"none\.safetensors cannot be read"):
        LatentDirichletAllocation.from_model(folder / "none.safetensors")


def test_predictions_take_counts_only(folder: Path) -> None:
    """0.9 was taken for no word at all, and -1 for a word."""
    np.save(folder / "c.npy", COUNTS)
    model = jobs.topics("c.npy", n_components=2, n_blocks=3)
    for wrong, what in ((0.9, "0.9, is no whole number"), (-1.0, "-1.0, is negative")):
        counts = torch.ones(2, COUNTS.shape[1], dtype=torch.float64)
        counts[1, 2] = wrong
        with pytest.raises(SettingError, match=f"a count of X, {what}"):
            model(counts)
